"""Session manager: ownership, limits, deadlines and expiry.

A session is one environment that plays one episode after another. It belongs to the token that
opened it. A failure stays within its session:

- every call runs in a thread (with `isolate`, in the session's own process) and has a deadline; a
  hanging thread is abandoned, a hanging process is killed;
- a session that is idle for `idle_s` seconds is closed;
- a second concurrent call is refused: it would act on a state that its client has not seen.
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
from typing import Any, TypeVar

from prometheus_client import Counter, Gauge, Histogram

from ludus.core.errors import EpisodeError, EpisodeTimeout, ToolError, Unscorable
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.rollout.hosts.threads import Act, EnvThread
from ludus.services.envs.session import ID_BITS, EnvSession, ExpertTurn, ServedEnv, parse_id
from ludus.services.server.app import BUCKETS_S, ServiceError, Settings
from ludus.services.server.drain import Drain
from ludus.services.server.peers import Peers
from ludus.services.server.shares import Client, Shares

T = TypeVar("T")

MAX_REMEMBERED = 10_000
"""Ended sessions whose end reason is kept."""

LIGHT_THREADS = 8
"""Concurrent calls of non-blocking environments."""

_KINDS = {EpisodeTimeout: "env_timeout", ToolError: "tool_error", Unscorable: "unscorable"}


@dataclass(frozen=True)
class SessionLimits:
    """Limits of a service.

    `max_sessions_per_token`: sessions of one token, without tokens of one client address (0: an
    equal share of `max_sessions` for each token). `idle_s`: seconds between two calls.
    `step_deadline_s`: seconds of a reset or step. `expert_deadline_s`: of a call of the expert,
    which may search for long. `max_memory_mb`: resident memory above which no session is opened
    (0: no limit). `max_action_chars`: length of an action.
    """

    max_sessions: int = 4096
    max_sessions_per_token: int = 0
    idle_s: float = 900.0
    step_deadline_s: float = 30.0
    expert_deadline_s: float = 150.0
    max_memory_mb: int = 0
    max_action_chars: int = 200_000


class BorrowedThread(EnvThread):
    """Takes a worker thread for each call only.

    Thousands of sessions share LIGHT_THREADS threads; a hanging call does not block the others.
    """

    borrows_workers = True

    def __init__(self, slots: asyncio.Semaphore) -> None:
        super().__init__()
        self._slots = slots

    async def run(
        self, act: Act[T], deadline: float | None, *, blocking: bool, last: Act[None] | None = None
    ) -> T:
        async with self._slots:
            thread = EnvThread(wait_for="pause")  # soon, for the environment does not block
            try:
                return await thread.run(act, deadline, blocking=True, last=last)
            finally:
                thread.close()

    def close(self) -> None:
        """Nothing to release."""


class SessionManager:
    """All sessions of a process. Errors of all methods: ServiceError.

    `peers` are the other workers; `limits.max_sessions` is for all workers together.
    """

    def __init__(
        self,
        served: dict[str, ServedEnv],
        limits: SessionLimits,
        settings: Settings,
        peers: Peers | None = None,
    ) -> None:
        self.served, self.limits, self._peers = served, limits, peers
        self.drain = Drain(peers.folder if peers else None)
        registry, tokens = settings.registry, settings.tokens
        counter = peers.counter if peers else None
        self._shares = Shares(limits.max_sessions, limits.max_sessions_per_token, tokens, counter)
        self._sessions: dict[int, EnvSession] = {}
        self._ended: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._slots = asyncio.Semaphore(LIGHT_THREADS)
        self._closing: set[asyncio.Task[None]] = set()
        draining = Gauge("ludus_env_draining", "Whether no session is opened", registry=registry)
        draining.set_function(lambda: float(self.drain.on))
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
        """Number of open sessions, of one environment or of all."""
        return sum(name is None or s.served.name == name for s in self._sessions.values())

    def env(self, name: str) -> ServedEnv:
        if name not in self.served:
            names = ", ".join(sorted(self.served))
            raise ServiceError(404, "unknown_env", f"{name!r:.80} is not served here; {names} is")
        return self.served[name]

    def new_number(self) -> int:
        """A random number that this worker owns."""
        number = secrets.randbits(ID_BITS - 8)
        return number * self._peers.num_workers + self._peers.worker if self._peers else number

    def create(self, served: ServedEnv, client: Client) -> EnvSession:
        """Open a session. Its environment is made at the first reset."""
        self.drain.require_off()
        others = self._peers.counter.others() if self._peers else 0
        limit, limit_mb = self.limits.max_sessions, self.limits.max_memory_mb
        if len(self._sessions) + others >= limit:
            raise ServiceError(429, "too_many_sessions", f"{limit} sessions are open: close one")
        if not self._shares.allows(client.tenant):
            message = f"you have {self._shares.limit} sessions open, your share: close one"
            raise ServiceError(429, "too_many_sessions", message)
        if 0 < limit_mb < resident_mb():
            raise ServiceError(503, "out_of_memory", f"more than {limit_mb} MB are in use")
        thread = EnvThread(wait_for="start") if served.blocking else BorrowedThread(self._slots)
        deadlines = self.limits.step_deadline_s, self.limits.expert_deadline_s
        session = EnvSession(self.new_number(), client, served, thread, *deadlines)
        self._sessions[session.number] = session
        self._shares.add(client.tenant)
        self._share_count()
        return session

    def get(self, number: int | None, owner: str) -> EnvSession:
        """The owner's session. Another owner's session is reported as unknown."""
        if number is not None:
            session = self._sessions.get(number)
            if session is not None and session.owner == owner:
                return session
            ended_owner, reason = self._ended.get(number, ("", ""))
            if reason and ended_owner == owner:
                raise ServiceError(410, "session_closed", f"the session has ended: {reason}")
        raise ServiceError(404, "unknown_session", "there is no such session")

    def by_id(self, id: str, owner: str) -> EnvSession:
        return self.get(parse_id(id), owner)

    async def reset(self, session: EnvSession, task: Task, *, own: bool = False) -> Observation:
        """Start an episode in a new environment. `own`: see `EnvSession.reset`."""
        return await self._exclusive(session, "reset", lambda: session.reset(task, own))

    async def step(self, session: EnvSession, message: Message) -> StepResult:
        """Take an action. The environment parses a single tool call without text."""
        calls = sum(len(str(call.arguments)) + len(call.name) for call in message.tool_calls)
        limit = self.limits.max_action_chars
        if len(message.content) + len(message.thinking or "") + calls > limit:
            raise ServiceError(413, "action_too_long", f"an action may have {limit} characters")
        return await self._exclusive(session, "step", lambda: session.step(message))

    async def expert(self, session: EnvSession) -> ExpertTurn:
        return await self._exclusive(session, "expert", session.expert)

    async def inspect(self, session: EnvSession, what: str) -> Any:
        return await self._exclusive(session, "inspect", lambda: session.inspect(what))

    async def leave(self, session: EnvSession) -> None:
        """Close a session for its owner; refused during a call."""
        _require_idle(session)
        await self.close(session)

    async def close(self, session: EnvSession, reason: str = "it was closed") -> None:
        """Close a session, even during a call."""
        if self._remove(session, reason):
            await self._release(session)

    def _remove(self, session: EnvSession, reason: str) -> bool:
        """Forget a session and note its end; False if that was done before."""
        if self._sessions.pop(session.number, None) is None:
            return False
        self._share_count()
        self._shares.add(session.client.tenant, -1)
        self._ended[session.number] = (session.owner, reason)
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._ends.labels(reason.partition(":")[0]).inc()
        return True

    def _share_count(self) -> None:
        if self._peers:
            self._peers.counter.set(len(self._sessions))

    async def _release(self, session: EnvSession) -> None:
        await session.close_env()
        session.thread.close()

    def is_open(self, session: EnvSession) -> bool:
        return session.number in self._sessions

    async def close_idle(self) -> None:
        """Close idle sessions; runs until cancelled."""
        while True:
            await asyncio.sleep(min(5.0, self.limits.idle_s / 4))
            oldest = time.monotonic() - self.limits.idle_s
            idle = [s for s in self._sessions.values() if s.last_used < oldest and not s.busy]
            for session in idle:
                self._in_background(self.close(session, "it was idle for too long"))

    async def close_all(self) -> None:
        sessions = list(self._sessions.values())
        closing = [self.close(session, "the service shuts down") for session in sessions]
        await asyncio.gather(*closing, *self._closing, return_exceptions=True)

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _exclusive(
        self, session: EnvSession, call: str, act: Callable[[], Awaitable[T]]
    ) -> T:
        """Run the only call of a session. A failure of the environment ends the session."""
        self.get(session.number, session.owner)  # it may have ended since its lookup
        _require_idle(session)
        session.busy, started = True, time.perf_counter()
        try:
            return await act()
        except EpisodeError as error:
            kind = _KINDS.get(type(error), "env_error")
            if self._remove(session, f"{kind}: {error}"):
                self._in_background(self._release(session))
            raise ServiceError(504 if kind == "env_timeout" else 502, kind, str(error)) from error
        finally:
            session.busy, session.last_used = False, time.monotonic()
            self._seconds.labels(session.served.name, call).observe(time.perf_counter() - started)


def _require_idle(session: EnvSession) -> None:
    if session.busy:
        raise ServiceError(409, "session_busy", "another call of this session is running")


def resident_mb() -> float:
    """Resident memory of this process in MB; its peak on systems without /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
