"""The run store: all steps of all runs, down to tokens and logprobs.

RunStore.open(url, runs_dir)     SQLite by default, PostgreSQL by URL, one schema
export(store, run_id, path)      JSON lines, Parquet, SFT data
render_runs / render_run / render_trajectory   for the terminal (ludus.store.show)
"""

from ludus.store.rows import RunStatus
from ludus.store.store import RunExists, RunStore

__all__ = ["RunExists", "RunStatus", "RunStore"]
