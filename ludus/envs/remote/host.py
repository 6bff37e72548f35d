"""One host of a fleet: whether it takes sessions, its connections, a session of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ludus.core.errors import EnvError, EpisodeTimeout, ToolError, Unscorable
from ludus.envs.remote import wire
from ludus.envs.remote.ask import Denied, Description, NotFound, describe, only_env
from ludus.envs.remote.connection import PULSE_S, SILENCE_S, Connection
from ludus.envs.remote.lag import Lag
from ludus.envs.remote.wire import Answer, Draining, Full, Gone, Refused, SessionOpened
from ludus.telemetry.hosts import HOSTS
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

PER_CONNECTION = 64
"""Sessions of a connection: few enough to spread over the workers of a host."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 3.0
"""Pauses before a host that has failed is looked at again; each is twice the last, until the host
has been up for STEADY_S."""

STEADY_S = 10.0

REFUSED_PAUSE_S = 5.0
FROZEN_S = 10.0
"""Silence of one connection, while others of its host answer, after which it is cut."""

IDLE_S = 5.0
"""Seconds until a connection without sessions is closed."""

CREATE_S = 5.0
"""Seconds for opening a session, which makes no environment yet."""

BUSY_S = 0.5
"""Seconds until a host that answers, but opens no connection, is given another session."""

CAUTIOUS = 16
"""Sessions that are opened at once at a host that may have little room."""

_jitter = random.Random()

ERRORS = {"env_timeout": EpisodeTimeout, "tool_error": ToolError, "unscorable": Unscorable}


class State(StrEnum):
    """The state of a host; NEW: not known yet."""

    NEW = "new"
    UP = "up"
    DOWN = "down"
    REFUSED = "refused"


@dataclass(frozen=True)
class Use:
    """The use of a host by a fleet: its environment's name (None: its only one), most calls at
    once, most sessions (0: as many as it takes), and whether it has to be like the other hosts."""

    env: str | None
    calls: int
    sessions: int
    compared: bool


class Host:
    """A host. `changed` is called when it may take sessions again, `refer` with its description.

    `refer` returns why the host is not one of this fleet, or None. Deadlines of answers are longer
    by `lag`, that of this process.
    """

    def __init__(
        self,
        url: str,
        use: Use,
        changed: Callable[[], None],
        refer: Callable[[Description], str | None],
        lag: Lag,
    ) -> None:
        self.url, self._use, self._changed, self._refer = url, use, changed, refer
        self.env = use.env
        self.state, self.why, self.listed, self.draining = State.NEW, "not asked yet", True, False
        self.connections: list[Connection] = []
        self.num_sessions = self._num_opening = 0
        self.full_until, self._allowance, self._full_why = 0.0, float("inf"), ""
        self.retry_at, self._pause_s, self._up_since = 0.0, FIRST_PAUSE_S, 0.0
        self._lag = lag
        self.calls = asyncio.Semaphore(use.calls)
        self._connecting: asyncio.Task[None] | None = None
        self.checking: asyncio.Task[None] | None = None
        self._tell()

    # Readiness

    def takes_session(self, now: float) -> bool:
        """True if a session may be opened here, as far as is known."""
        if not self.listed or self.draining or self.state not in (State.NEW, State.UP):
            return False
        num_taken = self.num_sessions + self._num_opening
        has_room = not self._use.sessions or num_taken < self._use.sessions
        return has_room and now >= self.full_until and self._num_opening < self._allowance

    @property
    def condition(self) -> str:
        """The reason why the host takes no session, for people."""
        if self.state in (State.DOWN, State.REFUSED):
            return self.why
        if self.draining:
            return "it drains"
        told = self._full_why or "as many as sessions_per_host are open"
        return f"it is full: {told}"

    def fail(self, why: str, *, cut: bool = False) -> None:
        """Use the host no more until it answers again. `cut`: end its open sessions too."""
        if self.state is not State.DOWN:
            log.warning(
                "environment host failed", host=self.url, reason=why, open=self.num_sessions
            )
            HOSTS.count("failures")
        now = time.monotonic()
        if self.state is State.UP and now - self._up_since > STEADY_S:
            self._pause_s = FIRST_PAUSE_S
        self._set(State.DOWN, why)
        self.retry_at = now + self._pause_s * _jitter.uniform(0.7, 1.0)
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        if cut:
            for connection in list(self.connections):
                connection.end(why)

    def refuse(self, why: str) -> None:
        """Do not use the host as it is now."""
        if self.why != why:
            log.warning("environment host refused", host=self.url, reason=why)
        self._set(State.REFUSED, why)
        self.retry_at = time.monotonic() + REFUSED_PAUSE_S

    def fill(self, error: Full) -> None:
        """The host has no room for the time that it says."""
        HOSTS.count("full")
        self._full_why = str(error)
        self.full_until, self._allowance = time.monotonic() + error.retry_after_s, 1.0

    def drain(self) -> None:
        """The host says that it opens no new sessions."""
        if not self.draining:
            log.info("environment host drains", host=self.url, open=self.num_sessions)
            HOSTS.count("drains")
        self.draining = True
        self.retry_at = time.monotonic() + LONGEST_PAUSE_S
        self._tell()

    def _rise(self) -> None:
        if self.state is State.UP and not self.draining:
            return
        if self.state is not State.NEW:
            log.info("environment host is back", host=self.url)
            self._allowance = CAUTIOUS
        self.draining, self.full_until, self._up_since = False, 0.0, time.monotonic()
        self._set(State.UP, "")
        self._changed()

    def _set(self, state: State, why: str) -> None:
        self.state, self.why = state, why
        self._tell()

    def _tell(self) -> None:
        if self._use.compared and self.listed:
            HOSTS.states[self.url] = "draining" if self.draining else self.state.value

    @property
    def is_up(self) -> bool:
        return self.state is State.UP and not self.draining

    def end(self) -> None:
        """Close all connections."""
        for task in (self._connecting, self.checking):
            if task is not None:
                task.cancel()
        for connection in list(self.connections):
            self.connections.remove(connection)
            connection.end("the fleet is closed")

    # Looking at it

    def check(self) -> asyncio.Task[None]:
        """Look whether the host answers, as a fleet's host has to."""
        if self.checking is None or self.checking.done():
            self.checking = asyncio.create_task(self._check())
        return self.checking

    async def _check(self) -> None:
        try:
            if self._use.compared or self.draining:
                told = await asyncio.to_thread(describe, self.url, self._use.env)
                if why := self._refer(told):
                    raise Refused(why)
                self.env = told.env
                if told.health.status == "draining":
                    self._set(State.UP, "")
                    self.drain()
                    return
            elif self.env is None:
                self.env = await asyncio.to_thread(only_env, self.url)
            if not self.connections:
                await self._connect()
            self._rise()
        except (Denied, NotFound, Refused) as error:
            self.refuse(str(error))
        except Full as error:
            self._rise()
            self.fill(error)
        except (EnvError, Gone) as error:
            self.fail(str(error))

    def watch(self, now: float) -> None:
        """Ping where an answer or a sign of life is due; cut what is silent."""
        for connection in list(self.connections):
            if connection.num_sessions == 0 and now - connection.last_used > IDLE_S:
                self.connections.remove(connection)
                connection.end("it was idle")
        first = self.connections[:1]
        for connection in self.connections:
            due = connection.is_busy or connection in first
            if due and now - connection.last_heard > PULSE_S:
                connection.ping()
        pinged = [c for c in self.connections if c.ping_sent is not None]
        silence_s = SILENCE_S + self._lag.slack_s
        overdue = [c for c in pinged if now - (c.ping_sent or now) > silence_s]
        if overdue and now - self._heard > silence_s:
            self.fail(self._silent(SILENCE_S + PULSE_S), cut=True)
            return
        for connection in overdue:
            if now - (connection.ping_sent or now) > FROZEN_S:
                connection.end(self._silent(FROZEN_S))

    def forget_pings(self) -> None:
        """This process was suspended: ping again."""
        for connection in self.connections:
            connection.ping_sent = None
            connection.last_heard = time.monotonic()

    def _silent(self, seconds: float) -> str:
        silence = f"it has been silent for {seconds:g} s"
        return f"the environment service at {self.url} is gone ({silence})"

    # Sessions

    async def open(self, key: str) -> Session:
        """Open a session. Errors: Gone and its kinds; EnvError where the host knows no such env."""
        self._num_opening += 1
        try:
            connection = await self._reserve()
            try:
                answer = await self._create(connection)
                session = wire.read(self.url, SessionOpened, answer.result).session
            except BaseException:
                connection.num_sessions -= 1
                raise
        finally:
            self._num_opening -= 1
        if self.state is State.UP:
            self.full_until, self._allowance = 0.0, self._allowance * 2
        self.num_sessions += 1
        HOSTS.sessions[self.url] += 1
        return Session(self, connection, session, key)

    async def _create(self, connection: Connection) -> Answer:
        number = connection.next_number()
        if time.monotonic() < self.full_until:
            raise Full(f"{self.url} has no room", 0.0)
        if self.draining or not self.listed:
            raise Draining(f"{self.url} drains")
        calling = asyncio.ensure_future(connection.call(number, op="create", env=self.env))
        try:
            answer = await self._lag.within(CREATE_S, calling)
        except TimeoutError as error:
            self.fail(f"{self.url} has not opened a session within {CREATE_S:g} s")
            raise Gone(self.why) from error
        finally:
            if not calling.done():
                connection.when_answered(number, lambda late: _close_late(connection, late))
                calling.cancel()
        if answer.status == 200:
            return answer
        kind, told = answer.error.type, f"{self.url}: {answer.error.message}"
        if kind == "draining":
            raise Draining(told)
        if answer.status == 503 or kind == "too_many_sessions":
            raise Full(told, answer.retry_after)
        raise EnvError(told)

    def release(self, connection: Connection) -> None:
        """A session has ended."""
        connection.num_sessions -= 1
        connection.last_used = time.monotonic()
        self.num_sessions -= 1
        HOSTS.sessions[self.url] -= 1
        if self.full_until:
            self.full_until = 0.0
        self._changed()

    async def _reserve(self) -> Connection:
        """A connection with room for a session, which is counted. Errors: Gone and its kinds."""
        while True:
            for connection in reversed(self.connections):
                if connection.num_sessions < PER_CONNECTION:
                    connection.num_sessions += 1
                    return connection
            if self._connecting is None or self._connecting.done():
                self._connecting = asyncio.create_task(self._connect())
            try:
                await asyncio.shield(self._connecting)
            except (Full, Refused):
                raise
            except Gone as error:
                if time.monotonic() - self._heard < PULSE_S + SILENCE_S:
                    raise Full(f"{self.url} is busy: {error}", BUSY_S) from error
                if self.state is not State.DOWN:
                    self.fail(str(error))
                raise

    async def _connect(self) -> None:
        self.connections.append(await Connection.open(self.url, self._on_lost, self._lag))

    @property
    def _heard(self) -> float:
        """Time of the last message of any connection."""
        return max((connection.last_heard for connection in self.connections), default=0.0)

    def _on_lost(self, connection: Connection) -> None:
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        why = connection.lost or ""
        if connection.is_rubbish:
            self.fail(why, cut=True)
        elif not self.connections and self.state is State.UP:
            self.fail(why)


class Session:
    """An open session of a host. Errors of `call`: Gone; EnvError and its like from the service."""

    __slots__ = ("_calling", "_connection", "_ended", "host", "id", "key")

    def __init__(self, host: Host, connection: Connection, id: str, key: str) -> None:
        self.host, self._connection, self.id, self.key = host, connection, id, key
        self._calling: int | None = None
        self._ended = False

    @property
    def is_open(self) -> bool:
        return not self._ended and self._connection.lost is None

    async def call(self, op: str, **arguments: Any) -> Any:
        """Returns the result of a call."""
        async with self.host.calls:
            number = self._calling = self._connection.next_number()
            answer = await self._connection.call(number, op=op, session=self.id, **arguments)
            self._calling = None
        if answer.status == 200:
            return answer.result
        kind, told = answer.error.type, f"{self.host.url}: {answer.error.message}"
        self.close()
        if answer.status == 503 or kind == "too_many_sessions":
            raise Gone(told)
        raise ERRORS.get(kind, EnvError)(told)

    def close(self) -> None:
        """Close the session; after the answer, where a call of it was given up."""
        if self._ended:
            return
        self._ended = True
        connection = self._connection
        if self._calling is None or connection.lost is not None:
            connection.post(op="close", session=self.id)
            self.host.release(connection)
            return

        def end(_: Answer) -> None:
            connection.post(op="close", session=self.id)
            self.host.release(connection)

        connection.when_answered(self._calling, end)


def _close_late(connection: Connection, answer: Answer) -> None:
    """Close a session that was opened for somebody who left."""
    if answer.status == 200 and isinstance(answer.result, dict):
        connection.post(op="close", session=answer.result.get("session"))
