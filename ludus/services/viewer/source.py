"""The store and the run folders that the page shows. Reads only; opened on first use."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select

from ludus.core.errors import LudusError
from ludus.report.diagnosis import read_findings
from ludus.store import RunStore
from ludus.store import schema as db
from ludus.store.folders import RunFolder, unrecorded
from ludus.store.queries import took

MAX_LIVE_BYTES = 100_000
STALE_S = 30.0
"""Age of `live.json` from which its process is taken for dead or hanging."""


class NoRuns(LudusError):
    """There is no store yet."""


@dataclass(frozen=True, slots=True)
class RunHead:
    """A run in the list. `stages`: the last step of each stage, in order of their start.
    `elapsed_s`: its time from start to end, as RunRow has it."""

    key: int
    id: str
    name: str
    status: str
    created: float
    finished: float | None
    error: str | None
    stages: dict[str, int]
    last_step: float | None
    elapsed_s: float | None


class Source:
    """Opens the store when it is there, and again after it failed.

    Args:
        url: of the store; None: `<runs_dir>/ludus.db`.
    """

    def __init__(self, runs_dir: Path, url: str | None, timeout_s: float = 5.0) -> None:
        self.runs_dir, self._url, self._timeout_s = runs_dir, url, timeout_s
        self._store: RunStore | None = None
        self._lock = threading.Lock()

    def store(self) -> RunStore:
        """The open store. Errors: NoRuns before the first run, StoreError, ConfigError."""
        with self._lock:
            if self._store is None:
                if self._url is None and not (self.runs_dir / "ludus.db").is_file():
                    raise NoRuns(
                        f"{self.runs_dir} holds no runs yet: start one with `ludus train RECIPE`"
                    )
                self._store = RunStore.open(
                    self._url, self.runs_dir, read_only=True, timeout_s=self._timeout_s
                )
            return self._store

    def close(self) -> None:
        """Close the store; it opens again on use."""
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    def heads(self, limit: int, before: int | None = None) -> list[RunHead]:
        """Returns the newest runs, newest first; `before`: only those with a lower key."""
        return self.store().read(lambda connection: _heads(connection, limit, before))

    def folder(self, run: str) -> RunFolder | None:
        """The folder of a recorded run, if this machine has it."""
        if not run or Path(run).name != run:
            return None
        folder = RunFolder(self.runs_dir / run)
        return folder if folder.path.is_dir() else None

    def unrecorded(self, ids: set[str]) -> list[str]:
        """Ids of run folders that the store does not know: killed before they were recorded."""
        return [folder.id for folder in unrecorded(self.runs_dir, ids)][:100]

    def live(self, run: str) -> dict[str, Any] | None:
        """The running step of a run; None where none is running or the file cannot be read."""
        folder = self.folder(run)
        if folder is None:
            return None
        with suppress(OSError, ValueError, RecursionError):
            with folder.live.open("rb") as file:
                state = json.loads(file.read(MAX_LIVE_BYTES))
            if isinstance(state, dict) and isinstance(state.get("time"), float | int):
                age = max(0.0, time.time() - state["time"])
                return {**state, "age_s": round(age, 1), "stale": age > STALE_S}
        return None

    def findings(self, run: str) -> list[dict[str, Any]]:
        """The diagnosis' findings so far; none without the run's folder."""
        folder = self.folder(run)
        found = read_findings(folder.findings) if folder is not None else []
        return [{**asdict(finding), "where": finding.where} for finding in found]

    def pulse(self) -> tuple[Any, ...]:
        """A value that changes when a run begins, ends or records a step."""

        def work(connection: Connection) -> tuple[Any, ...]:
            r, s = db.runs.c, db.steps.c
            last = select(s.key, s.run_key, s.stage, s.step).order_by(s.key.desc()).limit(1)
            states = connection.execute(select(r.key, r.status).order_by(r.key.desc()).limit(200))
            return tuple(connection.execute(last).all()), tuple(states.all())

        return self.store().read(work)


def _heads(connection: Connection, limit: int, before: int | None) -> list[RunHead]:
    r, s = db.runs.c, db.steps.c
    columns = (r.key, r.id, r.name, r.status, r.created, r.finished, r.error, r.elapsed_s)
    query = select(*columns).order_by(r.key.desc()).limit(limit)
    if before is not None:
        query = query.where(r.key < before)
    runs = connection.execute(query).all()
    keys = [run.key for run in runs]
    stages: dict[int, list[Any]] = {key: [] for key in keys}
    grouped = select(
        s.run_key, s.stage, func.max(s.step).label("step"), func.min(s.key).label("first"),
        func.max(s.key).label("last"),
    )  # fmt: skip
    for row in connection.execute(grouped.where(s.run_key.in_(keys)).group_by(s.run_key, s.stage)):
        stages[row.run_key].append(row)
    newest = {key: max(row.last for row in rows) for key, rows in stages.items() if rows}
    started = {
        row.key: row.started
        for row in connection.execute(select(s.key, s.started).where(s.key.in_(newest.values())))
    }
    return [
        RunHead(
            run.key, run.id, run.name, run.status, run.created.timestamp(),
            run.finished and run.finished.timestamp(), run.error,
            {row.stage: row.step for row in sorted(stages[run.key], key=lambda row: row.first)},
            started[newest[run.key]].timestamp() if run.key in newest else None, took(run),
        )
        for run in runs
    ]  # fmt: skip
