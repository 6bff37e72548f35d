"""Turns in order of tenants, so that a batch of one client does not hold up the others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """At most `size` turns at once. A free one goes to the next tenant that waits, in rotation.

    Three items of tenant A wait, then one of B: the order is A B A A.
    """

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, and give it back at the end."""
        await self._acquire(tenant)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it was given a turn at the same time
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            first = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the other tenants
            if not first.done():
                first.set_result(None)
                return
        self._free += 1
