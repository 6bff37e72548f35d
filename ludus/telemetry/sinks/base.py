"""The metrics sink protocol, and a guard that disables a failing sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from ludus.telemetry.logs import get_logger

log = get_logger(__name__)


class Sink(Protocol):
    """A target of metrics besides the JSON lines. A sink that raises is disabled."""

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Record one step's metrics, all finite; `time` is in seconds since 1970."""

    def rewind(self, keep: Mapping[str, int]) -> None:
        """Remove the steps after each stage's last step to keep."""

    def close(self) -> None:
        """Flush and close."""


class Guarded:
    """A sink that cannot stop the run: its first failure is logged and disables the sink.

    `num_lost` counts the steps missed since then. `error` is the failure; None while the sink
    works. `sink` is None before the start, and once disabled.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_lost = 0
        self.error: str | None = None
        self.sink: Sink | None = None

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._guard(lambda sink: sink.log(stage, step, metrics, time))
        self.num_lost += self.sink is None

    def rewind(self, keep: Mapping[str, int]) -> None:
        self._guard(lambda sink: sink.rewind(keep))

    def close(self) -> None:
        self._guard(lambda sink: sink.close())

    def disable(self, error: Exception) -> None:
        """Disable the sink, with one log line."""
        sink, self.sink = self.sink, None
        self.error = f"{type(error).__name__}: {error}"
        log.warning("metrics sink failed and is disabled", sink=self.name, error=self.error)
        if sink is not None:
            with suppress(Exception):
                sink.close()

    def _guard(self, action: Callable[[Sink], None]) -> None:
        if self.sink is not None:
            try:
                action(self.sink)
            except Exception as error:
                self.disable(error)
