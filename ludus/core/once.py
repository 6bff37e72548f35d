"""Work done once for each key: its results are kept, and shared by callers at the same time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

MAX_RESULTS = 65_536
T = TypeVar("T")


class Once(Generic[T]):
    """Runs each work once, if its result lasts. Use it in one event loop.

    Args:
        max_results: that are kept; those least recently used go first.
        size: of a result, for a limit of their sum, `max_size`; the last result stays.
    """

    def __init__(
        self,
        max_results: int = MAX_RESULTS,
        size: Callable[[T], int] = lambda _: 0,
        max_size: int = 0,
    ) -> None:
        self._known: OrderedDict[bytes, T] = OrderedDict()
        self._running: dict[bytes, asyncio.Event] = {}
        self._max, self._size_of, self._max_size, self._size = max_results, size, max_size, 0

    async def of(self, key: bytes, run: Callable[[], Awaitable[tuple[T, bool]]]) -> T:
        """The result of `run`, which also tells if the result lasts: else the next caller runs.

        Callers at the same time wait for the first; if its result does not last, all run.
        """
        if (first := self._running.get(key)) is not None:
            await first.wait()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        ended = self._running.setdefault(key, asyncio.Event())
        try:
            result, lasts = await run()
            if lasts and key not in self._known:
                self._keep(key, result)
            return result
        finally:
            ended.set()
            self._running.pop(key, None)

    def _keep(self, key: bytes, result: T) -> None:
        self._known[key] = result
        self._size += self._size_of(result)
        while len(self._known) > self._max or (
            len(self._known) > 1 and self._size > self._max_size
        ):
            _, oldest = self._known.popitem(last=False)
            self._size -= self._size_of(oldest)
