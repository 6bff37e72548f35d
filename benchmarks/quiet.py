"""Time as on an idle core: an event loop with its own clock.

The clock counts the processor time of this process, and skips the time in which the process only
waits for a timer. An environment that sleeps five seconds takes no time to measure, and other load
on the machine does not count.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_S = 0.002
"""Interval at which the clock reads the processor's time while another thread computes."""


class _Selector(selectors.DefaultSelector):
    """Polls where the loop would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0
        self.computing = 0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self.computing or timeout is None:
            return super().select(LOOK_S)
        self.skipped_s += max(timeout, 0.0)
        return ready


class QuietLoop(asyncio.SelectorEventLoop):
    """The event loop; `time` is that of the clock above."""

    def __init__(self) -> None:
        self._quiet = _Selector()
        super().__init__(self._quiet)

    def time(self) -> float:
        return time.process_time() + self._quiet.skipped_s

    def counted(self, work: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        """The same coroutine function, which has another thread compute."""

        async def run(*args: Any) -> T:
            self._quiet.computing += 1
            try:
                return await work(*args)
            finally:
                self._quiet.computing -= 1

        return run
