"""Sessions: who may play which episode, where it runs, and when it ends.

A session is one environment that plays one episode after another. It belongs to the token that
opened it. One that raises, hangs or is forgotten ends alone:

- every call runs in a thread (or, with `isolate`, in a process of the session's own) and has a
  deadline; a thread that hangs is left behind, a process is killed;
- a session that nobody used for `idle_s` seconds is closed;
- a second call while one is under way is refused: it would play on a state that nobody has seen.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ludus.core.errors import EpisodeError, EpisodeTimeout, ToolError, Unscorable
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.rollout.threads import Act, EnvThread
from ludus.services.envs.session import ID_BITS, EnvSession, ServedEnv
from ludus.services.server.app import BUCKETS_S, ServiceError

T = TypeVar("T")

MAX_REMEMBERED = 10_000
"""Ended sessions whose end can still be told."""

LIGHT_THREADS = 8
"""Calls of light environments that compute at the same time."""


@dataclass(frozen=True)
class SessionLimits:
    """What a service allows.

    `step_deadline_s` bounds one reset or step, `idle_s` the time between two calls,
    `max_memory_mb` the resident memory above which no session is opened (0: none),
    `max_action_chars` the length of an action.
    """

    max_sessions: int = 4096
    idle_s: float = 900.0
    step_deadline_s: float = 30.0
    max_memory_mb: int = 0
    max_action_chars: int = 200_000


class LightSeat(EnvThread):
    """A seat without a thread of its own: each call borrows one.

    Thousands of sessions share a few threads, and one that hangs keeps none of the others.
    """

    def __init__(self, slots: asyncio.Semaphore) -> None:
        super().__init__()
        self._slots = slots

    async def run(
        self, act: Act[T], deadline: float, *, blocking: bool, last: Act[None] | None = None
    ) -> T:
        async with self._slots:
            seat = EnvThread()
            try:
                return await seat.run(act, deadline, blocking=True, last=last)
            finally:
                seat.close()

    def close(self) -> None:
        """Nothing is kept."""


class Tally(Protocol):
    """How many sessions each worker has open, known to all of them."""

    def tell(self, count: int) -> None:
        """This worker's, from now on."""

    def others(self) -> int:
        """Those of the other workers."""


class Alone:
    """The tally of a process that has no other beside it."""

    def tell(self, count: int) -> None: ...

    def others(self) -> int:
        return 0


class SessionManager:
    """All sessions of a process. `worker` of `num_workers` shows in the numbers that it gives.

    `limits.max_sessions` is for all workers together, by `tally`. Errors of all methods:
    ServiceError.
    """

    def __init__(
        self,
        served: dict[str, ServedEnv],
        limits: SessionLimits,
        registry: CollectorRegistry,
        worker: int = 0,
        num_workers: int = 1,
        tally: Tally | None = None,
    ) -> None:
        self.served, self.limits = served, limits
        self._tally: Tally = tally or Alone()
        self.worker, self.num_workers = worker, num_workers
        self._sessions: dict[int, EnvSession] = {}
        self._ended: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._slots = asyncio.Semaphore(LIGHT_THREADS)
        self._closing: set[asyncio.Task[None]] = set()
        gauge = Gauge("ludus_env_sessions", "Open sessions", ["env"], registry=registry)
        for name in served:
            gauge.labels(name).set_function(lambda name=name: self.count(name))
        self._ends = Counter(
            "ludus_env_sessions_ended", "Sessions by how they ended", ["reason"], registry=registry
        )
        self._seconds = Histogram(
            "ludus_env_call_seconds",
            "Time in the environment, by call",
            ["env", "call"],
            registry=registry,
            buckets=BUCKETS_S,
        )

    def count(self, name: str | None = None) -> int:
        """Open sessions, of one environment or of all."""
        return sum(name is None or s.served.name == name for s in self._sessions.values())

    def env(self, name: str) -> ServedEnv:
        """The environment of that name."""
        if name not in self.served:
            known = ", ".join(sorted(self.served))
            raise ServiceError(404, "unknown_env", f"{name!r:.80} is not served here; {known} is")
        return self.served[name]

    def create(self, served: ServedEnv, owner: str) -> EnvSession:
        """Open a session; its environment is made at the first reset."""
        if len(self._sessions) + self._tally.others() >= self.limits.max_sessions:
            raise ServiceError(
                429, "too_many_sessions", f"{self.limits.max_sessions} sessions are open: close one"
            )
        if 0 < self.limits.max_memory_mb < resident_mb():
            raise ServiceError(
                503, "out_of_memory", f"more than {self.limits.max_memory_mb} MB are in use"
            )
        drawn = secrets.randbits(ID_BITS - 8)
        number = drawn * self.num_workers + self.worker
        seat = EnvThread() if served.blocking else LightSeat(self._slots)
        session = EnvSession(number, owner, served, seat, self.limits.step_deadline_s)
        self._sessions[number] = session
        self._tally.tell(len(self._sessions))
        return session

    def get(self, number: int, owner: str) -> EnvSession:
        """The owner's session; another's looks like none at all."""
        session = self._sessions.get(number)
        if session is not None and session.owner == owner:
            return session
        ended_owner, reason = self._ended.get(number, ("", ""))
        if reason and ended_owner == owner:
            raise ServiceError(410, "session_closed", f"the session has ended: {reason}")
        raise ServiceError(404, "unknown_session", "there is no such session")

    def by_id(self, id: str, owner: str) -> EnvSession:
        """The owner's session of that id, as `EnvSession.id` writes it."""
        try:
            number = int(id, 16) if id.isalnum() else -1
        except ValueError:
            number = -1
        return self.get(number, owner)

    async def reset(self, session: EnvSession, task: Task, *, own: bool = False) -> Observation:
        """Start an episode. `own`: the task is the environment's, so a failure is not the client's.

        The environment is made anew: nothing of an earlier episode is left.
        """
        return await self._exclusive(session, "reset", lambda: session.reset(task, own))

    async def step(self, session: EnvSession, message: Message) -> StepResult:
        """Take an action. A single tool call without text is read by the environment."""
        if size(message) > self.limits.max_action_chars:
            raise ServiceError(
                413,
                "action_too_long",
                f"an action may have {self.limits.max_action_chars} characters",
            )
        return await self._exclusive(session, "step", lambda: session.step(message))

    async def expert(self, session: EnvSession) -> str:
        """The expert's action."""
        return await self._exclusive(session, "expert", session.expert)

    async def leave(self, session: EnvSession) -> None:
        """End a session at its owner's wish."""
        if session.busy:
            raise ServiceError(409, "session_busy", "another call of this session is under way")
        await self.close(session)

    async def close(self, session: EnvSession, reason: str = "it was closed") -> None:
        """End a session, whatever it is doing."""
        if self._end(session, reason):
            await self._release(session)

    def _end(self, session: EnvSession, reason: str) -> bool:
        """Take a session off the table; False where that has been done."""
        if self._sessions.pop(session.number, None) is None:
            return False
        self._tally.tell(len(self._sessions))
        self._ended[session.number] = (session.owner, reason)
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._ends.labels(reason.partition(":")[0]).inc()
        return True

    async def _release(self, session: EnvSession) -> None:
        """Give back what an ended session holds."""
        await session.close_env()
        session.seat.close()

    def is_open(self, session: EnvSession) -> bool:
        """Whether it has not ended."""
        return session.number in self._sessions

    async def reap(self) -> None:
        """Close idle sessions, for ever."""
        while True:
            await asyncio.sleep(min(5.0, self.limits.idle_s / 4))
            oldest = time.monotonic() - self.limits.idle_s
            idle = [s for s in self._sessions.values() if s.used < oldest and not s.busy]
            for session in idle:
                self._in_background(self.close(session, "it was idle for too long"))

    async def close_all(self) -> None:
        """End all sessions, together."""
        sessions = list(self._sessions.values())
        closing = [self.close(session, "the service shuts down") for session in sessions]
        await asyncio.gather(*closing, *self._closing, return_exceptions=True)

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _exclusive(
        self, session: EnvSession, what: str, act: Callable[[], Awaitable[T]]
    ) -> T:
        """Run one call of a session, alone; an environment that broke ends its session."""
        self.get(session.number, session.owner)  # it may have ended since it was looked up
        if session.busy:
            raise ServiceError(409, "session_busy", "another call of this session is under way")
        session.busy, started = True, time.perf_counter()
        try:
            return await act()
        except EpisodeError as error:
            kind = _KINDS.get(type(error), "env_error")
            if self._end(session, f"{kind}: {error}"):
                self._in_background(self._release(session))
            raise ServiceError(504 if kind == "env_timeout" else 502, kind, str(error)) from error
        finally:
            session.busy, session.used = False, time.monotonic()
            self._seconds.labels(session.served.name, what).observe(time.perf_counter() - started)


_KINDS = {EpisodeTimeout: "env_timeout", ToolError: "tool_error", Unscorable: "unscorable"}


def size(message: Message) -> int:
    """Characters of a message, those of its calls included."""
    calls = sum(len(str(call.arguments)) + len(call.name) for call in message.tool_calls)
    return len(message.content) + len(message.thinking or "") + calls


def resident_mb() -> float:
    """Resident memory of this process, in MB; where the system does not tell, its peak."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
