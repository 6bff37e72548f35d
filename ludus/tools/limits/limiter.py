"""A rate limit that threads, asyncio tasks, processes and hosts share.

    limiter = open_limiter(LimitSpec(name="search", rate_per_s=10, burst=5))
    waited_s = await limiter.acquire()          one permit; then call
    limiter.close()

All limiters of one name and store share one bucket. In any window of t seconds at most
`rate_per_s * t + burst` permits fall, by the store's clock (GCRA, ITU-T I.371, with a queue in
front of it). Waiters are served first come, first served:

    caller      store                                   bucket of 1, 10 per second, now at 0.00 s
    A  take     permit at 0.00                          queue: -
    B  take     ticket 2, come again in 0.08 s          queue: B
    C  take     ticket 3, come again in 0.18 s          queue: B C
    B  take     at 0.08: permit at 0.10                 queue: C

A waiter holds no lock and no reservation: it asks again when its turn is near, and every few
seconds before that, so the store knows that it lives. Where a waiter does not come, those behind
it move up after ABSENT_S; if it does come later, it still has its ticket's place. So a killed
process costs at most the permits that it already had. A store grants permits 20 ms early (Redis:
50 ms): waiters whose permits fall within that time may change places.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from pydantic import Field

from ludus.config.sections import LimitConfig
from ludus.core.errors import ConfigError, ToolError, did_you_mean
from ludus.telemetry.logs import get_logger
from ludus.tools.limits.stores import Answer, LimitStore, StoreUnavailable, open_store

log = get_logger(__name__)

RETRY_S = (0.05, 1.0)
"""First and longest pause between attempts where the store does not answer."""


class LimitSpec(LimitConfig):
    """A limit and its name. Limiters of the same name and store share permits."""

    name: str = Field(min_length=1, max_length=150, description="Name of the shared bucket.")


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave for one call. `at_ns`: its time on the store's clock."""

    waited_s: float
    at_ns: int


def open_limiter(spec: LimitSpec, where: str = "") -> Limiter:
    """Open the limiter and its store.

    Errors: ConfigError where the store cannot be written, or Redis does not answer;
    MissingDependency without the package redis. `where` names the key in the message.
    """
    return Limiter(spec, where or f"limits.{spec.name}")


class Limiter:
    """One process's access to a shared limit. Use it from any number of threads and event loops.

    It can be pickled, and works in a forked child: both open the store anew.
    """

    def __init__(self, spec: LimitSpec, where: str) -> None:
        self.spec, self.where = spec, where
        self._open()

    def __reduce__(self) -> tuple[type[Limiter], tuple[LimitSpec, str]]:
        return Limiter, (self.spec, self.where)

    def close(self) -> None:
        """Release the store. Callers that still wait get a ToolError."""
        with self._lock:
            self._closed = True
        self._pool.shutdown()
        for ticket in self._late_leavers:
            with suppress(StoreUnavailable):  # it forgets the ticket by itself, later
                self._store.leave(ticket)
        self._store.close()

    async def acquire(self, deadline_s: float | None = None) -> float:
        """Wait for a permit; returns the seconds waited.

        A caller that is cancelled leaves the queue. If its permit was granted already, in the last
        20 ms of its wait (Redis: 50 ms), that permit is lost.

        Args:
            deadline_s: longest wait in seconds; None: the spec's `max_wait_s`.

        Errors: ToolError at the deadline. That is so too while the store does not answer: no call
        passes unlimited.
        """
        return (await self.permit(deadline_s)).waited_s

    async def permit(self, deadline_s: float | None = None) -> Permit:
        """Like `acquire`; also returns the permit's time."""
        if os.getpid() != self._pid:
            self._open()
        limit_s = self.spec.max_wait_s if deadline_s is None else deadline_s
        started = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                granted = await self._queue()
        except TimeoutError:
            raise ToolError(self._late(limit_s)) from None
        await asyncio.sleep(granted.wait_s)
        return Permit(time.monotonic() - started, granted.at_ns)

    def _open(self) -> None:
        self._store: LimitStore = open_store(self.spec, self.spec.name, self.where)
        self._pool = ThreadPoolExecutor(1, "ludus-limiter")
        self._lock, self._asked = threading.Lock(), list[tuple[int, Future[Answer]]]()
        self._pid, self._closed = os.getpid(), False
        self._late_leavers: list[int] = []
        self._trouble: str | None = None

    async def _queue(self) -> Answer:
        """Ask the store until it grants a permit; leave the queue on any error."""
        ticket, pause = 0, RETRY_S[0]
        try:
            while True:
                try:
                    answer = await self._take(ticket)
                except StoreUnavailable as error:
                    self._note(str(error))
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(2 * pause, RETRY_S[1])
                    continue
                self._note(None)
                ticket, pause = answer.ticket, RETRY_S[0]
                if answer.granted:
                    return answer
                await asyncio.sleep(answer.wait_s)
        except BaseException:
            self._leave(ticket)
            raise

    async def _take(self, ticket: int) -> Answer:
        """Ask the store, in its thread: its file may be locked, its host far away."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._closed:
                raise ToolError(f"{self.where}: the limiter is closed")
            self._asked.append((ticket, future))
            if len(self._asked) == 1:
                self._pool.submit(self._serve)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._abandon)  # it may run on; its ticket is nobody's
            raise

    def _serve(self) -> None:
        """Ask the store for all that wait for an answer, at once."""
        with self._lock:
            asked, self._asked = self._asked, []
        asked = [
            (ticket, future) for ticket, future in asked if future.set_running_or_notify_cancel()
        ]
        try:
            answers = self._store.take([ticket for ticket, _ in asked]) if asked else []
        except BaseException as error:
            for _, future in asked:
                future.set_exception(error)
            return
        for (_, future), answer in zip(asked, answers, strict=True):
            future.set_result(answer)

    def _abandon(self, future: Future[Answer]) -> None:
        if not future.cancelled() and not future.exception():
            self._leave(future.result().ticket)

    def _leave(self, ticket: int) -> None:
        with self._lock:
            if ticket and self._closed:
                self._late_leavers.append(ticket)  # granted while the limiter closes
            elif ticket:
                self._pool.submit(self._store.leave, ticket)

    def _note(self, trouble: str | None) -> None:
        """Log once when the store is lost and once when it is back."""
        if trouble and not self._trouble:
            log.warning(f"{self.where}: {trouble}; calls wait")
        if self._trouble and not trouble:
            log.info(f"{self.where}: the store answers again")
        self._trouble = trouble

    def _late(self, limit_s: float) -> str:
        if self._trouble:
            return f"{self.where}: no permit within {limit_s:g} s: {self._trouble}"
        return (
            f"{self.where}: no permit within {limit_s:g} s ({self.spec.rate_per_s:g} calls/s): "
            "make fewer calls at a time, or raise rate_per_s or max_wait_s"
        )


class Limits:
    """The limits of functions, by name, and of endpoints, by URL.

    Args:
        known: the functions and endpoints that are in use.

    Errors: ConfigError where nothing uses a limit, or its store cannot be used.
    """

    def __init__(self, configs: Mapping[str, LimitConfig], known: Sequence[str]) -> None:
        for name in configs:
            if name not in known:
                raise ConfigError(_unused(name, known))
        self._specs = {
            name: LimitSpec(name=name, **config.model_dump()) for name, config in configs.items()
        }
        self._open: dict[str, Limiter] = {}
        for name in configs:
            self._limiter(name)

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    async def acquire(self, name: str) -> float:
        """Wait for a permit; returns the seconds. Without a limit of this name: 0.

        Errors: ToolError after `max_wait_s`.
        """
        return await self._limiter(name).acquire() if name in self._specs else 0.0

    def close(self) -> None:
        """Release the stores; the next `acquire` opens them again."""
        while self._open:
            self._open.popitem()[1].close()

    def _limiter(self, name: str) -> Limiter:
        if name not in self._open:
            self._open[name] = open_limiter(self._specs[name])
        return self._open[name]


def is_endpoint(name: str) -> bool:
    """True if a key of `limits` is an endpoint's URL, not a function's name."""
    return "://" in name


def _unused(name: str, known: Sequence[str]) -> str:
    kind = [key for key in known if is_endpoint(key) == is_endpoint(name)]
    if is_endpoint(name):
        what, none = "no judge or model here asks this endpoint", " (none asks an endpoint)"
    else:
        what, none = f"{name!r} is no function of `tools`", " (the run has no tools)"
    return f"limits.{name}: {what}{did_you_mean(name, kind) if kind else none}"
