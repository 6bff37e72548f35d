"""Wall-time accounting: every moment belongs to one part, so the parts add up to the wall time.

    with busy("sample"):        # the sampler computes
        ...

Parts may overlap: many environments work at once, some while the model computes. A moment counts
for the first busy part of this list:

    train        an optimizer step, and publishing the weights
    evaluate     held-out evaluation, all of it
    checkpoint   saving a checkpoint
    sample       the sampler computes
    judge        at least one episode waits for its judge
    tool         at least one episode waits for its tool calls
    env_wait     at least one episode waits for its environment
    idle         the rest: bookkeeping of the rollouts

So `env_wait` is the time lost to environments: the model computes nothing, and at least one episode
waits for its environment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal, get_args

Part = Literal["train", "evaluate", "checkpoint", "sample", "judge", "tool", "env_wait", "idle"]
PARTS: tuple[Part, ...] = get_args(Part)


class Occupancy:
    """Counts the tasks that are busy with each part; a moment counts for the first busy part.

    Safe to use from several threads; a change costs about a microsecond.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._busy = dict.fromkeys(PARTS, 0)
        self._busy["idle"] = 1  # always busy, and last in the list
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._current: Part = "idle"
        self._since = clock()
        self._began = dict.fromkeys(PARTS, self._since)

    def change(self, part: Part, by: int) -> None:
        """Add `by` (negative: remove) busy tasks of a part."""
        with self._lock:
            before = self._busy[part]
            self._busy[part] += by
            self._settle()
            if before <= 0 < before + by:
                self._began[part] = self._since
            elif before + by <= 0 < before:
                self._totals[part] += self._since - self._began[part]

    def seconds(self) -> dict[Part, float]:
        """Seconds counted for each part so far."""
        with self._lock:
            self._settle()
            return dict(self._seconds)

    def counts(self) -> dict[Part, int]:
        """Number of tasks that are busy with each part now."""
        with self._lock:
            return dict(self._busy)

    def total(self, part: Part) -> float:
        """Seconds so far with at least one task busy with the part, overlaps included."""
        with self._lock:
            self._settle()
            unfinished = self._since - self._began[part] if self._busy[part] > 0 else 0.0
            return self._totals[part] + unfinished

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self._current] += now - self._since
        self._since = now
        for part, count in self._busy.items():
            if count > 0:
                self._current = part
                return


OCCUPANCY = Occupancy()
"""The occupancy of this process."""


class busy:  # noqa: N801 - reads as a statement
    """Count one more task as busy with `part` during the block."""

    __slots__ = ("_part",)

    def __init__(self, part: Part) -> None:
        self._part: Part = part

    def __enter__(self) -> None:
        OCCUPANCY.change(self._part, 1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        OCCUPANCY.change(self._part, -1)


class Split:
    """The time of each part since the last call."""

    def __init__(self, occupancy: Occupancy = OCCUPANCY) -> None:
        self._occupancy = occupancy
        self._last = occupancy.seconds()

    def metrics(self) -> dict[str, float]:
        """`time/<part>_s` since the last call, and their sum, `time/wall_s`."""
        now = self._occupancy.seconds()
        spent: Mapping[Part, float] = {part: now[part] - self._last[part] for part in PARTS}
        self._last = now
        parts = {f"time/{part}_s": seconds for part, seconds in spent.items()}
        return {**parts, "time/wall_s": sum(spent.values())}
