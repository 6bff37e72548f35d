"""Seconds that the code of an episode waits for the rate limits of endpoints.

with metered() as waits:        # around an episode
    waited(0.3)                 # anywhere below, also in tasks that it starts
waits.seconds                   # 0.3
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Waits:
    """`seconds`: summed over all requests; None before the first to a limited endpoint."""

    seconds: float | None = None


_waits: ContextVar[Waits | None] = ContextVar("waits", default=None)


@contextmanager
def metered() -> Iterator[Waits]:
    """Sum up what `waited` reports during the block."""
    token = _waits.set(waits := Waits())
    try:
        yield waits
    finally:
        _waits.reset(token)


def waited(seconds: float) -> None:
    """Report a wait to the innermost `metered` block, if there is one."""
    if (waits := _waits.get()) is not None:
        waits.seconds = (waits.seconds or 0.0) + seconds
