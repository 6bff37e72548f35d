"""Simulated time, on simpy's event queue: calls at a later time, and processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy
from simpy.events import Timeout

from ludus.core.errors import ConfigError


class Clock(simpy.Environment):
    """Simpy's environment with calls at a time. `num_events` counts them.

    Errors: ConfigError above `max_events`.
    """

    def __init__(self, max_events: float = float("inf")) -> None:
        super().__init__()
        self.num_events = 0
        self.max_events = max_events

    def at(self, time: float, call: Callable[[Any], None], value: Any = None) -> None:
        """Call `call(value)` at a time that has not passed."""
        self.num_events += 1
        if self.num_events > self.max_events:
            raise ConfigError(
                f"the simulation needs more than simulate.max_events = {self.max_events:,} "
                "events: lower simulate.steps, or raise it"
            )
        delay = time - self._now
        event = Timeout(self, delay if delay > 0 else 0.0, value)
        assert event.callbacks is not None
        event.callbacks.append(lambda event: call(event._value))


class Signal:
    """Wakes the processes that wait for a change."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event: simpy.Event | None = None

    def wait(self) -> simpy.Event:
        """An event for `yield`."""
        self._event = self._event or self._clock.event()
        return self._event

    def set(self) -> None:
        """Wake all that wait now."""
        event, self._event = self._event, None
        if event is not None:
            event.succeed()
