"""Metrics of steps as curves, thinned to the pixels of a chart; kept in memory and read on."""

from __future__ import annotations

import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, select

from ludus.store import RunStore
from ludus.store import schema as db
from ludus.store.store import run_key

MAX_RUNS = 24
PAGE = 500
ELAPSED, EPISODES = "time/elapsed_s", "rollout/episodes_total"


@dataclass(slots=True)
class Columns:
    """The metrics of a stage by name; NaN where a step has none."""

    steps: list[int] = field(default_factory=list)
    columns: dict[str, array[float]] = field(default_factory=dict)

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Append a step."""
        size = len(self.steps)
        self.steps.append(step)
        if metrics.keys() == self.columns.keys():  # as almost all steps have
            for name, value in metrics.items():
                known = isinstance(value, int | float)
                self.columns[name].append(value if known else math.nan)
            return
        for name, value in metrics.items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = array("d", [math.nan]) * size
            column.append(value if isinstance(value, int | float) else math.nan)
        for column in self.columns.values():
            if len(column) == size:
                column.append(math.nan)

    def points(self, name: str, x: str, num: int) -> list[list[float]]:
        """Returns [x, mean, least, greatest] of at most `num` spans of steps."""
        values = self.columns.get(name)
        if values is None:
            return []
        axis: Sequence[float] | None = self.steps if x == "step" else self.columns.get(x)
        if axis is None:
            return []
        known = [
            (at, value)
            for at, value in zip(axis, values, strict=True)
            if math.isfinite(value) and math.isfinite(at)
        ]
        width = max(1, math.ceil(len(known) / num))
        spans = [known[start : start + width] for start in range(0, len(known), width)]
        return [
            [span[-1][0], _short(math.fsum(ys) / len(ys)), _short(min(ys)), _short(max(ys))]
            for span in spans
            for ys in ([value for _, value in span],)
        ]


@dataclass(slots=True)
class _Run:
    stages: dict[str, Columns] = field(default_factory=dict)
    last: tuple[int, str, int, Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Curves:
    """The metrics of the runs shown last. A resumed run, whose steps were deleted, is read anew."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, int], _Run] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, store: RunStore, run_id: str) -> dict[str, Columns]:
        """Returns the metrics of a run by stage. Errors: UnknownName, StoreError."""
        key = store.read(lambda connection: run_key(connection, run_id))
        with self._lock:
            run = self._runs.setdefault((run_id, key), _Run())
            self._runs.move_to_end((run_id, key))
            while len(self._runs) > MAX_RUNS:
                self._runs.popitem(last=False)
        with run.lock:
            while store.read(lambda connection: _read_on(connection, key, run)):
                pass
            return run.stages


def _read_on(connection: Connection, key: int, run: _Run) -> bool:
    """Read the next steps; False after the last."""
    s = db.steps.c
    if run.last is not None:
        last = select(s.key, s.stage, s.step, s.started).where(s.key == run.last[0])
        found = connection.execute(last).one_or_none()
        if found is None or tuple(found) != run.last:
            run.stages, run.last = {}, None
    query = select(s.key, s.stage, s.step, s.started, s.metrics).where(s.run_key == key)
    if run.last is not None:
        query = query.where(s.key > run.last[0])
    rows = connection.execute(query.order_by(s.key).limit(PAGE)).all()
    for row in rows:
        run.stages.setdefault(row.stage, Columns()).add(row.step, row.metrics)
        run.last = row.key, row.stage, row.step, row.started
    return len(rows) == PAGE


def _short(value: float) -> float:
    return float(f"{value:.6g}")
