"""The run store: all steps of all runs, down to tokens and logprobs.

RunStore.open(url, runs_dir)     SQLite by default, PostgreSQL by URL, one schema
export(store, run_id, path)      JSON lines, Parquet, SFT data
render_runs / render_run / render_trajectory   for the terminal (ludus.store.show)
"""

from ludus.store.rows import (
    DroppedRow,
    Record,
    RunRow,
    RunStatus,
    StageSummary,
    StepRow,
    TrajectoryRow,
)
from ludus.store.store import RunExists, RunStore

__all__ = [
    "DroppedRow",
    "Record",
    "RunExists",
    "RunRow",
    "RunStatus",
    "RunStore",
    "StageSummary",
    "StepRow",
    "TrajectoryRow",
]
