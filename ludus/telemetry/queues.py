"""Waits of tool calls for their turn, which do not count for the deadline of a call.

with queueing() as queue:           # around a call, and again around several of them
    async with queued(semaphore):   # anywhere below, also in tasks that it starts
        ...
queue.seconds                       # waited for the semaphore
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Queue:
    """`seconds`: of the waits that are over, summed up; `outer`: they count there too."""

    outer: Queue | None = None
    seconds: float = 0.0
    num_waiting: int = 0
    _since: float = 0.0

    def until_now(self) -> float:
        """Seconds in which anything waited, with the present wait."""
        return self.seconds + (time.monotonic() - self._since if self.num_waiting else 0.0)

    def begin(self) -> None:
        if not self.num_waiting:
            self._since = time.monotonic()
        self.num_waiting += 1

    def end(self) -> None:
        self.num_waiting -= 1
        if not self.num_waiting:
            waited = time.monotonic() - self._since
            self.seconds += waited
            if self.outer is not None:
                self.outer.seconds += waited


_queue: ContextVar[Queue | None] = ContextVar("queue", default=None)


@contextmanager
def queueing() -> Iterator[Queue]:
    """Sum up the waits of `queued` during the block."""
    token = _queue.set(queue := Queue(_queue.get()))
    try:
        yield queue
    finally:
        _queue.reset(token)


@asynccontextmanager
async def queued(lock: asyncio.Lock | asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold a lock; the wait for it is one for a turn."""
    queue = _queue.get()
    if queue is not None:
        queue.begin()
    try:
        await lock.acquire()
    finally:
        if queue is not None:
            queue.end()
    try:
        yield
    finally:
        lock.release()
