"""The viewer's sources, and their preparation: the first request of each kind would wait for
modules to load, statements to compile, and the newest run's metrics to be read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from ludus.core.errors import LudusError
from ludus.services.viewer import rollout
from ludus.services.viewer.ab_rollouts import RolloutLogs
from ludus.services.viewer.curves import Curves
from ludus.services.viewer.overview import curves_of, describe_run, list_runs
from ludus.services.viewer.source import NoRuns, Source
from ludus.services.viewer.steps import describe_step, list_steps
from ludus.services.viewer.texts import Tokenizers
from ludus.store.search import Search, Sort, search


@dataclass(frozen=True, slots=True)
class Data:
    """The store and the run folders, with what is kept in memory."""

    source: Source
    logs: RolloutLogs
    curves: Curves = field(default_factory=Curves)
    tokenizers: Tokenizers = field(default_factory=Tokenizers)

    @classmethod
    def open(cls, runs_dir: Path, store: str | None, logs: Sequence[Path] = ()) -> Data:
        """The store and the logs of roll-outs open on first use."""
        return cls(Source(runs_dir, store), RolloutLogs(runs_dir, logs))


def prepare(data: Data) -> str:
    """Answer a question of each kind about the newest run. Returns what to tell the user.

    Errors: ConfigError, StoreError for a store that cannot be read; one that is not there yet is
    waited for.
    """
    try:
        data.source.store()
    except NoRuns as error:
        return str(error)
    with suppress(LudusError):  # a page of the same question will say what is wrong
        _ask(data)
    return ""


def _ask(data: Data) -> None:
    source, store = data.source, data.source.store()
    heads = list_runs(source, None)["runs"]
    if not heads:
        return
    run = str(heads[0]["id"])
    describe_run(source, run)
    curves_of(source, data.curves, [run], None, None, "step", 240)
    list_steps(store, run, None, None)
    pages = [search(store, run, Search(sort=sort)) for sort in get_args(Sort)]
    for row in pages[0].rows[:1]:
        search(store, run, Search(sort="reward", status=row.status, text=row.id))
        search(store, run, Search(sort="tokens", stage=row.stage, step=row.step, tool="python"))
        describe_step(store, run, row.stage, row.step)
        rollout.describe(store, run, row.id, data.tokenizers.of(source.folder(run)))
