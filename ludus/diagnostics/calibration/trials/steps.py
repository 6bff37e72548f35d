"""Steps of a stage that are measured, and not kept."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ludus.core.types import Group
from ludus.loop.loop import Stage, run_stage
from ludus.pipeline.build import Run


@dataclass
class Metrics:
    """A recorder of a stage that keeps the metrics."""

    rows: list[dict[str, float]] = field(default_factory=list)

    def record(
        self, stage: str, step: int, groups: Sequence[Group], metrics: dict[str, float]
    ) -> None:
        self.rows.append(metrics)

    def mean(self, name: str, last: int) -> float:
        return fmean(row.get(name, 0.0) for row in self.rows[-last:])


async def run_steps(
    run_: Run, stage: Stage, metrics: Metrics, start: int, end: int, until: float = math.inf
) -> None:
    """Run the steps of a stage from `start` to `end`, or until a time; the first call begins it."""
    if start == 0:
        run_.backend.begin_stage(stage.settings, stage.algorithm)

    async def before(step: int) -> bool:
        return step < end and time.perf_counter() < until

    stage.after_step = before
    await run_stage(stage, run_.backend, metrics, start)


async def close(made: Run) -> None:
    """Close the environments and the back end of a run."""
    await made.collector.close()
    made.backend.close()
