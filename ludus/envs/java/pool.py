"""Pools of JVMs for the episodes of a Java engine.

    pool = pool_of(ENGINE, num_jvms=2, heap_mb=512)
    session = pool.open()                       an episode's engine object
    text = session.run(lambda engine: engine.step("look around"))
    session.close()                             the JVM is reused by the next episode

Episodes are spread over the JVMs. When a JVM dies, the running call fails at once, the JVM's
episodes end with EnvError (and are retried), and the pool starts another JVM. A JVM that hangs in a
call or does not answer the pool's probes is killed, with the same effect; before that, it gets no
further episodes.

Long searches for solutions run in a pool of their own (`Pool.experts`), so no episode waits for
them.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError
from pydantic import Field

from ludus.core.errors import EnvError, EnvLost
from ludus.envs.base import Env, NoExpert
from ludus.envs.java.machine import CALL_LIMIT_S, EXPERT_LIMIT_S, Engine, Jvm, Place

T = TypeVar("T")

NumJvms = Annotated[
    int, Field(ge=1, le=64, description="Most JVMs of a process; each plays up to 64 episodes.")
]

SESSIONS_PER_JVM = 64
"""Maximum number of open episodes of a JVM, which are lost with it. A world of ScienceWorld takes
0.6 MB of heap."""

SESSIONS_PER_START = 8
"""A further JVM is started for each of these many open episodes."""

PROBE_S = 2.0
"""Seconds between two probes of a JVM."""


@dataclass(eq=False, slots=True)
class Session:
    """An episode's engine object in a JVM of the pool."""

    pool: Pool
    jvm: Jvm
    place: Place = field(default_factory=Place)
    _closed: bool = False

    def run(self, act: Callable[[Any], T]) -> T:
        """Returns `act(engine object)`, with exclusive access to the JVM.

        Errors: EnvError if the engine raises, or the JVM dies or does not answer.
        """
        name = self.jvm.engine.name
        if self._closed:
            raise EnvError(f"{name}: the session is closed")
        wait_s = self.jvm.call_limit_s
        if not self.jvm.lock.acquire(timeout=wait_s):
            raise EnvError(f"{name}: JVM {self.jvm.pid} has been busy for {wait_s:g} s")
        try:
            with self.jvm.calling():
                self.jvm.enter(self.place)
                if self.place.interface is None:
                    self.place.interface = self.jvm.take_interface()
                return act(self.place.interface)
        except Py4JJavaError as error:
            reason = str(error.java_exception.toString()) if self.jvm.alive else "the JVM died"
            raise EnvError(f"{name}: the engine raised {reason}") from None
        except (Py4JError, OSError) as error:
            self.pool.discard(self.jvm)
            raise EnvLost(
                f"{name}: JVM {self.jvm.pid} died or did not answer ({type(error).__name__}); the "
                "episode can be retried"
            ) from None
        finally:
            self.jvm.lock.release()

    def seed(self, value: int) -> None:
        """Seed the engine's global random generator for the next `run`."""
        self.run(lambda _: self.jvm.seed(value))

    def close(self) -> None:
        """Release the engine object. May be called more than once."""
        if not self._closed:
            self._closed = True
            self.pool.release(self)


@dataclass(eq=False)
class Pool:
    """Up to `size` JVMs of an engine; one JVM more than needed is started ahead of time.

    Until JVMs that hang are killed, as many others may run beside them.
    """

    engine: Engine
    size: int
    heap_mb: int
    call_limit_s: float = CALL_LIMIT_S
    _jvms: list[Jvm] = field(default_factory=list)
    _starting: int = 0
    _failure: BaseException | None = None
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def open(self) -> Session:
        """Open a session in the JVM with the fewest sessions.

        Errors: EnvError if no JVM starts, all are full, or the pool was shut down; ConfigError
        without Java.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise EnvError(f"{self.engine.name}: its pool of JVMs was shut down")
                self._jvms = [jvm for jvm in self._jvms if jvm.alive]
                suspects = [jvm for jvm in self._jvms if jvm.suspect]
                free = [jvm for jvm in self._jvms if jvm.num_sessions < SESSIONS_PER_JVM]
                free = [jvm for jvm in free if jvm not in suspects]
                best = min(free, key=lambda jvm: jvm.num_sessions, default=None)
                if best is None and self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                self._start(len(suspects))
                spread = best is not None and best.num_sessions < SESSIONS_PER_START
                if best is not None and (spread or not self._starting):
                    best.num_sessions += 1
                    return Session(self, best)
                if not self._starting and not suspects:
                    raise EnvError(
                        f"{self.engine.name}: all {self.size * SESSIONS_PER_JVM} sessions are in "
                        f"use: raise env.args.num_jvms above {self.size}, or lower "
                        "rollout.concurrency"
                    )
                self._changed.wait(PROBE_S)

    def experts(self) -> Pool:
        """The JVM for this engine's long searches."""
        return pool_of(self.engine, 1, self.heap_mb, EXPERT_LIMIT_S)

    def release(self, session: Session) -> None:
        """Release a session at its episode's end."""
        with self._changed:
            session.jvm.num_sessions -= 1
        # If a thread hangs in the JVM and holds the lock, only its engine object is lost.
        if session.jvm.lock.acquire(blocking=False):
            session.jvm.give_back(session.place)
            session.jvm.lock.release()

    def discard(self, jvm: Jvm) -> None:
        """Kill a broken JVM and start another."""
        jvm.kill()
        with self._changed:
            if jvm in self._jvms:
                self._jvms.remove(jvm)
                self._start(sum(other.suspect for other in self._jvms))
                self._changed.notify_all()

    def shutdown(self) -> None:
        """Kill all JVMs. `pool_of` then creates another pool."""
        with _pools_lock:
            for key in [key for key, pool in _pools.items() if pool is self]:
                del _pools[key]
        with self._changed:
            self._closed = True
            jvms, self._jvms = self._jvms, []
            self._changed.notify_all()
        for jvm in jvms:
            jvm.kill()

    def jvms(self) -> list[Jvm]:
        """The running JVMs."""
        with self._changed:
            return [jvm for jvm in self._jvms if jvm.alive]

    def _start(self, num_suspects: int) -> None:
        """Start a JVM if the sessions need one, or a spare."""
        sessions = sum(jvm.num_sessions for jvm in self._jvms)
        wanted = min(self.size, 1 + -(-sessions // SESSIONS_PER_START))
        wanted += min(num_suspects, self.size)
        if len(self._jvms) + self._starting < wanted and not self._closed:
            self._starting += 1
            threading.Thread(target=self._add, name="ludus-jvm", daemon=True).start()

    def _add(self) -> None:
        jvm, failure = None, None
        try:
            jvm = Jvm(self.engine, self.heap_mb, self.call_limit_s)
        except BaseException as error:
            failure = error
        with self._changed:
            self._starting -= 1
            self._failure = failure
            if jvm is not None and not self._closed:
                self._jvms.append(jvm)
                threading.Thread(
                    target=self._probe, args=(jvm,), name="ludus-jvm-probe", daemon=True
                ).start()
                jvm = None
            self._changed.notify_all()
        if jvm is not None:  # the pool was closed during the start
            jvm.kill()

    def _probe(self, jvm: Jvm) -> None:
        """Probe a JVM while it lives; kill it if it does not answer."""
        while jvm.alive:
            if not jvm.answers():
                self.discard(jvm)
                return
            time.sleep(PROBE_S)


_pools: dict[tuple[Engine, int, int, float], Pool] = {}
_pools_lock = threading.Lock()


def pool_of(
    engine: Engine, num_jvms: int, heap_mb: int, call_limit_s: float = CALL_LIMIT_S
) -> Pool:
    """This process's pool of an engine, created on first use, shut down at exit."""
    key = (engine, num_jvms, heap_mb, call_limit_s)
    with _pools_lock:
        if key not in _pools:
            _pools[key] = Pool(*key)
        return _pools[key]


@atexit.register
def _shut_down() -> None:
    for pool in list(_pools.values()):
        pool.shutdown()


class JvmEnv(Env):
    """An environment whose episodes are sessions of a pool; `_taken` are the episode's actions."""

    _pool: Pool
    _session: Session | None = None
    _taken: list[str]

    def _open(self, load: Callable[[Session], T]) -> T:
        """Open the episode's session and return `load(session)`; an error closes the session."""
        session = self._pool.open()
        try:
            opening = load(session)
        except BaseException:
            session.close()
            raise
        self._session = session
        return opening

    async def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _next_of(self, path: Sequence[str]) -> str:
        """The next action of a gold path. Errors: NoExpert after leaving that path."""
        done = len(self._taken)
        if list(path[:done]) != self._taken or done == len(path):
            raise NoExpert(f"{self._pool.engine.name}: the episode has left the gold path")
        return path[done]


def _after_fork() -> None:
    """Drop the parent's JVMs in a forked child."""
    global _pools_lock
    _pools_lock = threading.Lock()
    for pool in _pools.values():
        for jvm in pool._jvms:
            jvm.close_pipes()
    _pools.clear()


os.register_at_fork(after_in_child=_after_fork)
