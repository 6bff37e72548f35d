"""The actor's end of calls in batches; `channel.py` tells of both."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ludus.backends.ray.link import Address, Broken, Link, Listener, is_encrypted
from ludus.core.errors import LudusError, described


class Call(NamedTuple):
    """A call of a method. Without a `number`, nobody waits for its result."""

    number: int | None
    method: str
    args: tuple[Any, ...]


class Result(NamedTuple):
    """Result of a call, or its error."""

    number: int
    value: Any
    error: Exception | None = None


class Results(NamedTuple):
    """Results from `first` on, in the order in which they were ready, and the actor's counters.

    `next_batch`: the batches of calls before it have been started.
    """

    first: int
    results: list[Result]
    next_batch: int
    counters: dict[str, float]


class Station:
    """The actor's end: runs the calls of a target's methods concurrently, in its event loop.

    Methods may be coroutines. A call without a number runs at once; its method is no coroutine.
    Batches are run in the order of their numbers, for Ray may deliver them in another, and once.
    """

    def __init__(self, target: Any, counters: Callable[[], dict[str, float]] = dict) -> None:
        self._target, self._counters = target, counters
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: deque[Result] = deque()
        self._first = 0  # number of the oldest result that is kept
        self._more = asyncio.Event()
        self._next_batch = 0
        self._early: dict[int, list[Call]] = {}
        self._listener = Listener(self._serve)
        self._link: Link | None = None
        self._sent = 0  # number of the first result that the link has not had
        self._pushing = False
        self._watch = asyncio.Event()

    async def start(self, batch: int, calls: list[Call]) -> None:
        """Start the calls of a batch, and of later batches that arrived before it."""
        if batch >= self._next_batch:
            self._early[batch] = calls
        while (due := self._early.pop(self._next_batch, None)) is not None:
            self._next_batch += 1
            for call in due:
                self._start(call)

    async def results(self, after: int) -> Results:
        """Wait for a result; returns all from the number `after` on, and forgets those before."""
        self._forget(after)
        while not self._ready:
            self._more.clear()
            await self._more.wait()
        return Results(self._first, list(self._ready), self._next_batch, self._counters())

    async def listen(self) -> Address | None:
        """Returns the address for a direct connection; None where there can be none."""
        from ray.util import get_node_ip_address

        if is_encrypted():  # a connection of our own would not be
            return None
        try:
            return await self._listener.listen(get_node_ip_address())  # type: ignore[no-untyped-call]
        except OSError:
            return None

    async def watch(self) -> None:
        """Return at the next call of this method. Until then, Ray tells its caller if the actor
        dies."""
        self._watch.set()
        self._watch = watch = asyncio.Event()
        await watch.wait()

    def close(self) -> None:
        """Listen no more, and end the connection."""
        self._listener.close()
        if self._link is not None:
            self._link.close()

    def cancel(self, number: int) -> None:
        """Cancel a running call."""
        if number in self._running:
            self._running[number].cancel()

    def _start(self, call: Call) -> None:
        method = getattr(self if call.method == "cancel" else self._target, call.method)
        if call.number is None:
            method(*call.args)
        else:
            task = asyncio.get_running_loop().create_task(self._run(call.number, method, call.args))
            self._running[call.number] = task

    async def _run(self, number: int, method: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            value = method(*args)
            result = Result(number, await value if asyncio.iscoroutine(value) else value)
        except asyncio.CancelledError:
            result = Result(number, None)
        except Exception as error:
            result = Result(number, None, portable(error))
        del self._running[number]
        self._ready.append(result)
        self._more.set()
        self._push_soon()

    def _forget(self, before: int) -> None:
        """Drop the results that the driver has."""
        while self._ready and self._first < before:
            self._ready.popleft()
            self._first += 1

    async def _serve(self, link: Link) -> None:
        """Exchange calls and results through a connection, until it ends. The newest one counts."""
        try:
            link.send(self._next_batch)
            self._sent = await link.receive()
            self._forget(self._sent)
            if self._link is not None:
                self._link.close()
            self._link = link
            self._push_soon()
            while True:
                batch, calls, received = await link.receive()
                self._forget(received)
                await self.start(batch, calls)
        except Broken:
            pass
        finally:
            if self._link is link:
                self._link = None

    def _push_soon(self) -> None:
        if self._link is not None and not self._pushing:
            self._pushing = True
            asyncio.get_running_loop().call_soon(self._push)

    def _push(self) -> None:
        """Send the new results of this tick."""
        self._pushing = False
        self._sent = max(self._sent, self._first)
        new = list(itertools.islice(self._ready, self._sent - self._first, None))
        if self._link is None or not new:
            return
        try:
            self._link.send(Results(self._sent, new, self._next_batch, self._counters()))
        except Exception:  # a result that only Ray can pickle, if any
            self._link.close()
            self._link = None
        self._sent += len(new)


class Stationed:
    """The methods of an actor that a `Channel` calls. `_station` runs the others."""

    _station: Station

    async def start(self, batch: int, calls: list[Call]) -> None:
        await self._station.start(batch, calls)

    async def results(self, after: int) -> Results:
        return await self._station.results(after)

    async def listen(self) -> Address | None:
        return await self._station.listen()

    async def watch(self) -> None:
        await self._station.watch()


def portable(error: Exception) -> Exception:
    """Returns the error, or a LudusError that describes it where another process could not read
    it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return LudusError(described(error))
    return error
