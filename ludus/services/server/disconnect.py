"""Work for a request that is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from fastapi import Request

T = TypeVar("T")


class Disconnected(Exception):
    """The client has closed its connection."""


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`. Errors: Disconnected; the work is then cancelled."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_for_disconnect(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed its connection; the body has to be read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
