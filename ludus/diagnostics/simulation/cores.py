"""Cores that the processes of a machine share, and processes with a queue of work.

k processes that compute at once on c cores compute at min(1, c / k) of their speed each (processor
sharing, as a fair scheduler of an operating system gives over times longer than its slices). A
speed changes where a process begins or ends to compute, and at no other time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ludus.diagnostics.simulation.clock import Clock


class Computes(Protocol):
    """A process: whether it computes now, and at which part of its speed."""

    speed: float

    @property
    def computing(self) -> bool: ...

    def set_speed(self, speed: float) -> None:
        """Compute at a part of the full speed from now on."""
        ...


class Cores:
    """Gives processes their speed; `share` is called when one begins or ends to compute.

    `number` need not be whole: where other programs have a part of the time, it is less.
    """

    def __init__(self, number: float) -> None:
        self._number = number
        self._processes: Sequence[Computes] = ()
        self._sharing = False

    def of(self, processes: Sequence[Computes]) -> None:
        """Set the processes that share the cores."""
        self._processes = processes

    def share(self) -> None:
        """Give each process its present speed."""
        if self._sharing:  # a process tells of a change while its own speed is being set
            return
        self._sharing = True
        busy = sum(process.computing for process in self._processes)
        speed = min(1.0, self._number / max(busy, 1))
        for process in self._processes:
            if process.speed != speed:
                process.set_speed(speed)
        self._sharing = False


class Process:
    """Does one job after the other, first come, first served, at a speed that changes.

    `on_busy` is called when it begins or ends to compute.
    """

    def __init__(self, clock: Clock, on_busy: Callable[[], None]) -> None:
        self.speed, self.busy_s = 1.0, 0.0
        self._clock, self._on_busy = clock, on_busy
        self._jobs: deque[tuple[float, Callable[[Any], object], Any]] = deque()
        self._left, self._since, self._due = 0.0, 0.0, -1.0

    @property
    def computing(self) -> bool:
        return bool(self._jobs)

    @property
    def waiting(self) -> int:
        """Jobs that are not done."""
        return len(self._jobs)

    def run(self, seconds: float, call: Callable[[Any], object], value: Any = None) -> None:
        """Do a job of so many seconds at full speed, then `call(value)`."""
        self._jobs.append((seconds, call, value))
        if len(self._jobs) == 1:
            self._begin()
            self._on_busy()

    def set_speed(self, speed: float) -> None:
        if self._jobs:
            self._advance()
        self.speed = speed
        if self._jobs:
            self._schedule()

    def _begin(self) -> None:
        self._left, self._since = self._jobs[0][0], self._clock.now
        self._schedule()

    def _advance(self) -> None:
        now = self._clock.now
        self._left -= (now - self._since) * self.speed
        self.busy_s += now - self._since
        self._since = now

    def _schedule(self) -> None:
        self._due = self._clock.now + max(self._left, 0.0) / self.speed
        self._clock.at(self._due, self._on_time, self._due)

    def _on_time(self, due: float) -> None:
        if due != self._due or not self._jobs:
            return  # the speed has changed since
        self._advance()
        self._due = -1.0
        _, call, value = self._jobs.popleft()
        if self._jobs:
            self._begin()
        else:
            self._on_busy()
        call(value)
