"""What a metrics sink is, and the guard that keeps a failing one from harming the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from ludus.telemetry.logs import get_logger

log = get_logger(__name__)


class Sink(Protocol):
    """Where metrics go beside the JSON lines. Any method may raise: the sink is then left out."""

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Take one step's metrics, all finite; `time` is in seconds since 1970."""

    def rewind(self, keep: Mapping[str, int]) -> None:
        """Forget what came after the last step to keep of each stage."""

    def close(self) -> None:
        """Write out what is held back."""


class Guarded:
    """A sink that cannot stop the run: its first failure is logged, and it is switched off.

    `num_lost` counts the steps that it missed since; `error` says why, None while it works.
    """

    def __init__(self, name: str, sink: Sink | None = None) -> None:
        self.name = name
        self.num_lost = 0
        self.error: str | None = None
        self._sink = sink

    def start(self, sink: Sink) -> None:
        """Put the sink behind the guard."""
        self._sink = sink

    @property
    def sink(self) -> Sink | None:
        """The sink itself, while it works."""
        return self._sink

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._guard(lambda sink: sink.log(stage, step, metrics, time))
        self.num_lost += self._sink is None

    def rewind(self, keep: Mapping[str, int]) -> None:
        self._guard(lambda sink: sink.rewind(keep))

    def close(self) -> None:
        self._guard(lambda sink: sink.close())

    def switch_off(self, error: Exception) -> None:
        """Leave the sink out from here on, and say so once."""
        sink, self._sink = self._sink, None
        self.error = f"{type(error).__name__}: {error}"
        log.warning("metrics sink failed and is switched off", sink=self.name, error=self.error)
        if sink is not None:
            with suppress(Exception):
                sink.close()

    def _guard(self, action: Callable[[Sink], None]) -> None:
        if self._sink is not None:
            try:
                action(self._sink)
            except Exception as error:
                self.switch_off(error)
