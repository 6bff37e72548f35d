"""The lag of an event loop, so that its own delay does not count as a host's silence."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

BEAT_S = 0.05
MEMORY_S = 5.0
"""Seconds for which a delay counts."""

LATE_S, MAX_SLACK_S = 0.1, 10.0
MAX_ROUNDS = 4

T = TypeVar("T")


class Lag:
    """Measures the running loop while `measure` runs."""

    def __init__(self) -> None:
        self._worst_s, self._at, self._beaten = 0.0, 0.0, 0.0

    async def measure(self) -> None:
        """Runs until cancelled."""
        self._beaten = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            late_s, self._beaten = now - self._beaten - BEAT_S, now
            if late_s > self._worst_s or now - self._at > MEMORY_S:
                self._worst_s, self._at = late_s, now

    async def within(self, seconds: float, work: asyncio.Future[T]) -> T:
        """Returns the result of `work`, which is not cancelled.

        Errors: TimeoutError after `seconds` without a delay of the loop, in any case after
        MAX_ROUNDS times as long.
        """
        for _ in range(MAX_ROUNDS):
            done, _ = await asyncio.wait({work}, timeout=seconds + self.slack_s)
            if done:
                return work.result()
            if not self.slack_s:
                break
        raise TimeoutError

    @property
    def slack_s(self) -> float:
        """Seconds to add to the deadline of an answer; 0 where the loop runs on time."""
        unmeasured = time.monotonic() - self._beaten - BEAT_S if self._beaten else 0.0
        late_s = max(self._worst_s, unmeasured)
        return min(MAX_SLACK_S, late_s) if late_s > LATE_S else 0.0
