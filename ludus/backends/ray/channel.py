"""Calls to an actor in batches: one message a tick of the event loop, in both directions.

A call of a Ray actor costs its caller about half a millisecond. Hundreds of episodes that wait for
turns and steps would spend a core on it, so calls are collected until the event loop's next tick,
and results until the actor's:

    driver  Channel --[(0, "sample", ...), (1, "sample", ...)]--> Station  actor
                    <--[(0, Completion), ...]--------------------

The messages go through a direct connection. Where there is none, or none any more, they are calls
of Ray: `start`, and a standing request for `results`. Both ends number what they send, and keep it
until the other end has it, so nothing is lost or doubled when a connection ends. Ray tells of the
actor's death in both cases.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import Any

from ludus.backends.ray.link import CONNECT_S, Address, Broken, Link
from ludus.backends.ray.station import Call, Results
from ludus.core.errors import LudusError, described
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)


class ActorLost(LudusError):
    """The actor's process or node has died; what it computed is lost."""


class Channel:
    """The driver's end. Calls may come from several event loops, from one at a time.

    Args:
        actor: a Ray actor that is `Stationed`.
        name: names the actor in errors.
    """

    def __init__(self, actor: Any, name: str) -> None:
        self.actor, self.name = actor, name
        self.lost: ActorLost | None = None
        self.counters: dict[str, float] = {}
        self.direct = True
        """False once a direct connection failed: from then on, all goes by calls of Ray."""
        self._numbers, self._batches = itertools.count(), itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._queued: list[Call] = []
        self._unconfirmed: deque[tuple[int, list[Call]]] = deque()
        self._received = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: Link | None = None
        self._pump: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._flushing = False

    async def call(self, method: str, *args: Any) -> Any:
        """Returns the result of a method. Cancelling the caller cancels the call.

        Errors: ActorLost; whatever the method raises.
        """
        if self.lost is not None:
            raise self.lost
        loop = self._enter(asyncio.get_running_loop())
        number = next(self._numbers)
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting[number] = future
        self._queued.append(Call(number, method, args))
        self._flush_soon(loop)
        self._run_pump(loop)
        try:
            return await future
        except asyncio.CancelledError:
            self.tell("cancel", number)
            raise

    def tell(self, method: str, *args: Any) -> None:
        """Call a method, and do not wait. It runs before the calls that follow."""
        if self.lost is not None:
            return
        self._queued.append(Call(None, method, args))
        try:
            loop = self._enter(asyncio.get_running_loop())
        except RuntimeError:
            self._enqueue()
            self._send_by_ray()
            return
        self._flush_soon(loop)
        if self._link is None and self.direct:
            self._run_pump(loop)

    def fail(self, lost: ActorLost) -> None:
        """End all calls with an error, and refuse new ones."""
        self.lost = self.lost or lost
        self._drop_link()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(lost)

    def _enter(self, loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
        if self._loop is not loop:  # the calls of another loop ended with it
            self._loop, self._pump, self._flushing = loop, None, False
            self._drop_link()
            self._waiting.clear()
        return loop

    # Calls

    def _flush_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if not self._enqueue():
            return
        if self._link is not None:
            self._send(*self._unconfirmed[-1])
        elif not self.direct:
            self._send_by_ray()  # else the link is being made, and sends all

    def _enqueue(self) -> bool:
        """Make a batch of the new calls; False where there are none."""
        calls, self._queued = self._queued, []
        if calls and self.lost is None:
            self._unconfirmed.append((next(self._batches), calls))
            return True
        return False

    def _send(self, batch: int, calls: list[Call]) -> None:
        assert self._link is not None
        try:
            self._link.send((batch, calls, self._received))
        except Exception:  # an argument that only Ray can pickle, if any
            self._leave_link("a call could not be pickled")

    def _send_by_ray(self) -> None:
        while self._unconfirmed:
            self.actor.start.remote(*self._unconfirmed.popleft())

    # Results

    def _run_pump(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._receive())

    async def _receive(self) -> None:
        """Receive results while calls wait for theirs."""
        from ray.exceptions import RayError

        try:
            if self._link is None and self.direct:
                await self._connect()
            while self._waiting:
                self._settle(await self._next())
        except RayError as error:
            self.fail(ActorLost(f"{self.name} has died: {reason_of(error)}"))

    async def _next(self) -> Results:
        if self._link is not None:
            try:
                got: Results = await self._link.receive()
                return got
            except Broken as error:
                if self.lost is None:
                    self._leave_link(str(error))
        got = await self.actor.results.remote(self._received)
        return got  # noqa: RET504 (Ray's calls have no types)

    def _settle(self, got: Results) -> None:
        self.counters = got.counters
        self._confirm(got.next_batch)
        for result in got.results[self._received - got.first :]:
            self._received += 1
            future = self._waiting.pop(result.number, None)
            if future is None or future.done():
                continue
            if result.error is None:
                future.set_result(result.value)
            else:
                future.set_exception(result.error)

    def _confirm(self, next_batch: int) -> None:
        """Forget the calls that the actor has."""
        while self._unconfirmed and self._unconfirmed[0][0] < next_batch:
            self._unconfirmed.popleft()

    # The direct connection

    async def _connect(self) -> None:
        """Make the direct connection, and send what waits for it; by Ray where it fails."""
        address: Address | None = await self.actor.listen.remote()
        link = None
        try:
            if address is None:
                raise OSError("the actor cannot listen, or Ray uses TLS")
            link = await Link.connect(address)
            link.send(self._received)
            async with asyncio.timeout(CONNECT_S):
                self._confirm(await link.receive())
        except (OSError, TimeoutError, Broken) as error:
            if link is not None:
                link.close()
            where = f" at {address.host}:{address.port}" if address else ""
            self._leave_link(f"no connection{where}: {described(error)}")
            return
        except BaseException:
            if link is not None:
                link.close()
            raise
        self._link = link
        self._watcher = asyncio.get_running_loop().create_task(self._watch(link))
        for batch, calls in list(self._unconfirmed):
            if self._link is not None:
                self._send(batch, calls)

    async def _watch(self, link: Link) -> None:
        """Wait for the actor's death. Ends with the event loop, and the link with it."""
        from ray.exceptions import RayError

        try:
            await self.actor.watch.remote()
        except RayError as error:
            self.fail(ActorLost(f"{self.name} has died: {reason_of(error)}"))
        finally:
            link.close()

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _leave_link(self, reason: str) -> None:
        """From now on, call by Ray."""
        log.warning("calls go by Ray, which is slower", actor=self.name, reason=reason)
        self.direct = False
        self._drop_link()
        self._send_by_ray()


def reason_of(error: BaseException) -> str:
    """Returns the first telling line of a Ray error."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return described(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
