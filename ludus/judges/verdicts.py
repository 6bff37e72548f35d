"""Verdicts of runs, kept by what was run: groups of a small model often repeat a program."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

MAX_VERDICTS = 65_536
T = TypeVar("T")


class Verdicts(Generic[T]):
    """Runs each thing once, if its verdict lasts. Use it in one event loop."""

    def __init__(self, max_verdicts: int = MAX_VERDICTS) -> None:
        self._known: OrderedDict[bytes, T] = OrderedDict()
        self._running: dict[bytes, asyncio.Event] = {}
        self._max = max_verdicts

    async def of(self, key: bytes, run: Callable[[], Awaitable[tuple[T, bool]]]) -> T:
        """The verdict of `run`, which also tells if the verdict lasts: else the next caller runs.

        Callers at the same time wait for the first; if its verdict does not last, all run.
        """
        if (first := self._running.get(key)) is not None:
            await first.wait()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        ended = self._running.setdefault(key, asyncio.Event())
        try:
            verdict, lasts = await run()
            if lasts:
                self._known[key] = verdict
                if len(self._known) > self._max:
                    self._known.popitem(last=False)
            return verdict
        finally:
            ended.set()
            self._running.pop(key, None)
