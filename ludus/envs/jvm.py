"""Engines that run in a Java virtual machine: a pool of JVMs, shared by many episodes.

    pool = pool_of(ENGINE, num_jvms=2, heap_mb=512)
    session = pool.open()                       one episode's engine object
    text = session.run(lambda engine: engine.step("look around"))
    session.close()                             the JVM is kept for the next episode

A JVM takes a second or two to start and hundreds of megabytes, an episode's world half a megabyte.
So one JVM plays many episodes, one call at a time, and what its engine keeps in static fields (the
random generator, counters) is exchanged when another episode's turn comes: an episode never notices
the others. Identity hash codes, by which Scala orders its sets, are made constant: without that,
the same task differs from one JVM to the next.

When a JVM dies, the call under way fails at once, its episodes end with EnvError, which is retried,
and another JVM is started. JVMs end with this process, however it ends: they read its pipe.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from logging import CRITICAL, getLogger
from typing import Any, TypeVar

from py4j.java_gateway import (
    GatewayClient,
    GatewayConnection,
    GatewayParameters,
    JavaGateway,
    find_jar_path,
    quiet_close,
)
from py4j.protocol import Py4JError, Py4JJavaError

from ludus.core.errors import ConfigError, EnvError

T = TypeVar("T")

SESSIONS_PER_JVM = 256
"""Episodes open in one JVM: a world of ScienceWorld takes 0.6 MB of its heap."""

START_LIMIT_S = 60.0
CALL_LIMIT_S = 120.0
"""Seconds after which a JVM that does not answer is given up. Gold paths take up to 20."""

_SEED_MASK = 0x5DEECE66D
_FORCE_LONG = 1 << 50
"""java.util.Random scrambles its seed with the mask and cuts it to 48 bits; a bit above makes py4j
send a Java long, whatever the value."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A Java engine: the class whose object plays an episode, and where its static state is.

    `counters` are static longs, as (name of a Scala object's class, field), that an episode owns.
    `variant` is what the engine holds statically for all its episodes: each has JVMs of its own.
    """

    name: str
    jar: str
    interface: str
    counters: tuple[tuple[str, str], ...] = ()
    variant: str = ""


def find_java(name: str) -> str:
    """The program `java`. Errors: ConfigError, which says how to install it."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin") if home else None)
    if java is None:
        place = f"JAVA_HOME={home} has no bin/java" if home else "there is no java on the PATH"
        raise ConfigError(
            f"env {name!r} needs a Java runtime, 11 or newer, and {place}: install one, "
            "e.g. apt install default-jre-headless"
        )
    return java


class Jvm:
    """One Java process with the engine in it. Errors: EnvError where it does not start."""

    def __init__(self, engine: Engine, heap_mb: int) -> None:
        self.engine = engine
        self.num_sessions = 0
        self.lock = threading.Lock()
        self._last: Session | None = None
        self._spare: list[Any] = []
        self._process = _launch(engine, heap_mb)
        try:
            self._connect()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The Java process."""
        return self._process.pid

    @property
    def classes(self) -> Any:
        """Its packages and classes, as py4j shows them."""
        return self._gateway.jvm

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def _connect(self) -> None:
        assert self._process.stdout is not None
        watchdog = threading.Timer(START_LIMIT_S, self._process.kill)
        watchdog.start()
        try:
            port, token = (self._process.stdout.readline().decode().strip() for _ in range(2))
        finally:
            watchdog.cancel()
        if not port.isdecimal():
            raise EnvError(f"{self.engine.name}: java did not start: {port or 'it said nothing'}")
        getLogger("py4j").setLevel(CRITICAL)  # what fails is told by our errors
        self._gateway = _Gateway(
            gateway_parameters=GatewayParameters(
                port=int(port), auth_token=token, read_timeout=CALL_LIMIT_S
            )
        )
        java = self._gateway.jvm
        # Engines print every step: nobody reads that pipe, and a full one would stop them.
        silence = java.java.io.PrintStream(java.java.io.OutputStream.nullOutputStream())
        java.java.lang.System.setOut(silence)
        java.java.lang.System.setErr(silence)
        self._statics = _Statics(java, self.engine)
        self._spare.append(self._new_interface())  # loads the classes, before anyone waits

    def _new_interface(self) -> Any:
        target = self._gateway.jvm
        for part in self.engine.interface.split("."):
            target = getattr(target, part)
        return target()

    def take_interface(self) -> Any:
        """An engine object that no episode has."""
        return self._spare.pop() if self._spare else self._new_interface()

    def give_back(self, session: Session) -> None:
        """A session has ended: its engine object is for the next one."""
        if session.interface is not None:
            self._spare.append(session.interface)
        if self._last is session:
            self._last = None

    def enter(self, session: Session) -> None:
        """Put the session's static state in place of that of the one before."""
        if self._last is session:
            return
        if self._last is not None:
            self._last.statics = self._statics.read()
        if session.statics is not None:
            self._statics.write(session.statics)
        self._last = session

    def seed(self, value: int) -> None:
        """Seed the engine's global random generator."""
        self._statics.seed(value)

    def kill(self) -> None:
        """End the process. May be called more than once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if gateway := getattr(self, "_gateway", None):
            gateway._gateway_client.is_connected = False  # nothing is freed in a dead JVM
            with suppress(Exception):
                gateway.close()

    def leave_to_parent(self) -> None:
        """In a forked child: let go of the pipe by which the JVM sees its owner's end."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _launch(engine: Engine, heap_mb: int) -> subprocess.Popen[bytes]:
    command = [
        find_java(engine.name),
        f"-Xmx{heap_mb}m",
        "-XX:+ExitOnOutOfMemoryError",
        "-XX:+UseSerialGC",  # the smallest; calls come one at a time anyway
        "-XX:+UnlockExperimentalVMOptions",
        "-XX:hashCode=2",
        "--add-opens=java.base/java.util=ALL-UNNAMED",
        "-classpath",
        os.pathsep.join([find_jar_path(), engine.jar]),
        "py4j.GatewayServer",
        "--die-on-broken-pipe",
        "--enable-auth",
        "0",
    ]
    # Its own process group: Ctrl-C is for us, who may still want to finish a step.
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=os.path.dirname(engine.jar),  # where engines look for their data files
        process_group=0,
    )


class _Client(GatewayClient):  # type: ignore[misc]
    """py4j's own client tries a dead JVM again, logs to the root logger (which then prints), and
    leaves the socket open."""

    def send_command(self, command: str, retry: bool = True, binary: bool = False) -> Any:
        connection = self._get_connection()
        try:
            response = connection.send_command(command)
        except BaseException:
            connection.close()
            raise
        self._give_back_connection(connection)
        return response

    def _create_connection(self) -> GatewayConnection:
        connection = GatewayConnection(self.gateway_parameters, self.gateway_property)
        try:
            connection.start()
        except BaseException:
            quiet_close(connection.socket)
            raise
        return connection


class _Gateway(JavaGateway):  # type: ignore[misc]
    def _create_gateway_client(self) -> _Client:
        return _Client(gateway_parameters=self.gateway_parameters)


class _Statics:
    """The static state of an engine that belongs to an episode: (random seed, counters)."""

    def __init__(self, java: Any, engine: Engine) -> None:
        by_name = java.java.lang.Class.forName
        self._random = by_name("scala.util.Random$").getField("MODULE$").get(None).self()
        self._seed = by_name("java.util.Random").getDeclaredField("seed")
        self._seed.setAccessible(True)
        self._counters = []
        for class_name, name in engine.counters:
            scala_object = by_name(class_name)
            counter = scala_object.getDeclaredField(name)
            counter.setAccessible(True)
            self._counters.append((counter, scala_object.getField("MODULE$").get(None)))

    def read(self) -> tuple[int, ...]:
        return self._seed.get(self._random), *(c.get(owner) for c, owner in self._counters)

    def write(self, values: tuple[int, ...]) -> None:
        self._random.setSeed(values[0] ^ _SEED_MASK | _FORCE_LONG)
        for (counter, owner), value in zip(self._counters, values[1:], strict=True):
            counter.setLong(owner, value)

    def seed(self, value: int) -> None:
        self._random.setSeed(value | _FORCE_LONG)


@dataclass(eq=False, slots=True)
class Session:
    """One episode's engine object in one of the pool's JVMs."""

    pool: Pool
    jvm: Jvm
    interface: Any = None
    statics: tuple[int, ...] | None = None
    _closed: bool = False

    def run(self, act: Callable[[Any], T]) -> T:
        """What `act` makes of the engine object; nothing else runs in the JVM meanwhile.

        Errors: EnvError where the engine raises, or the JVM dies or does not answer.
        """
        name = self.jvm.engine.name
        if self._closed:
            raise EnvError(f"{name}: the session is closed")
        if not self.jvm.lock.acquire(timeout=2 * CALL_LIMIT_S):
            raise EnvError(f"{name}: the JVM {self.jvm.pid} is busy for {2 * CALL_LIMIT_S:g} s")
        try:
            self.jvm.enter(self)
            if self.interface is None:
                self.interface = self.jvm.take_interface()
            return act(self.interface)
        except Py4JJavaError as error:
            reason = str(error.java_exception.toString()) if self.jvm.alive else "the JVM died"
            raise EnvError(f"{name}: the engine raised {reason}") from None
        except (Py4JError, OSError) as error:
            self.pool.discard(self.jvm)
            raise EnvError(
                f"{name}: the JVM {self.jvm.pid} died or did not answer ({type(error).__name__}); "
                "the episode is to be played again"
            ) from None
        finally:
            self.jvm.lock.release()

    def seed(self, value: int) -> None:
        """Seed the engine's global random generator for what `run` does next."""
        self.run(lambda _: self.jvm.seed(value))

    def close(self) -> None:
        """Give the place back. May be called more than once."""
        if not self._closed:
            self._closed = True
            self.pool.release(self)


@dataclass(eq=False)
class Pool:
    """Up to `size` JVMs of an engine. One more than is needed is started ahead."""

    engine: Engine
    size: int
    heap_mb: int
    _jvms: list[Jvm] = field(default_factory=list)
    _starting: int = 0
    _failure: BaseException | None = None
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def open(self) -> Session:
        """A session in the JVM that has the fewest.

        Errors: EnvError where no JVM starts, or all are full; ConfigError where there is no Java.
        """
        with self._changed:
            while True:
                self._jvms = [jvm for jvm in self._jvms if jvm.alive]
                free = [jvm for jvm in self._jvms if jvm.num_sessions < SESSIONS_PER_JVM]
                best = min(free, key=lambda jvm: jvm.num_sessions, default=None)
                if best is None and self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                if best is None or best.num_sessions:
                    self._start()
                if best is not None:
                    best.num_sessions += 1
                    return Session(self, best)
                if not self._starting:
                    raise EnvError(
                        f"{self.engine.name}: all {self.size * SESSIONS_PER_JVM} sessions are "
                        f"taken: raise env.args.num_jvms above {self.size}, or lower "
                        "rollout.concurrency"
                    )
                self._changed.wait()

    def release(self, session: Session) -> None:
        """The session's episode is over."""
        with self._changed:
            session.jvm.num_sessions -= 1
        # A thread that hangs in the JVM has the lock: then its engine object is lost, no more.
        if session.jvm.lock.acquire(blocking=False):
            session.jvm.give_back(session)
            session.jvm.lock.release()

    def discard(self, jvm: Jvm) -> None:
        """A JVM broke: end it, and start another."""
        jvm.kill()
        with self._changed:
            if jvm in self._jvms:
                self._jvms.remove(jvm)
                self._start()

    def shutdown(self) -> None:
        """End all JVMs."""
        with self._changed:
            self._closed = True
            jvms, self._jvms = self._jvms, []
        for jvm in jvms:
            jvm.kill()

    def jvms(self) -> list[Jvm]:
        """Those that run now."""
        with self._changed:
            return [jvm for jvm in self._jvms if jvm.alive]

    def _start(self) -> None:
        if len(self._jvms) + self._starting < self.size and not self._closed:
            self._starting += 1
            threading.Thread(target=self._add, name="ludus-jvm", daemon=True).start()

    def _add(self) -> None:
        jvm, failure = None, None
        try:
            jvm = Jvm(self.engine, self.heap_mb)
        except BaseException as error:
            failure = error
        with self._changed:
            self._starting -= 1
            self._failure = failure
            if jvm is not None and not self._closed:
                self._jvms.append(jvm)
                jvm = None
            self._changed.notify_all()
        if jvm is not None:  # the pool was closed meanwhile
            jvm.kill()


_pools: dict[tuple[Engine, int, int], Pool] = {}
_pools_lock = threading.Lock()


def pool_of(engine: Engine, num_jvms: int, heap_mb: int) -> Pool:
    """This process's pool for an engine; made at first use, and shut down with the process."""
    key = (engine, num_jvms, heap_mb)
    with _pools_lock:
        if key not in _pools:
            _pools[key] = Pool(*key)
            _at_exit()
        return _pools[key]


@cache
def _at_exit() -> None:
    atexit.register(_shut_down)


def _shut_down() -> None:
    for pool in list(_pools.values()):
        pool.shutdown()


def _after_fork() -> None:
    """A forked child has none of the parent's JVMs."""
    global _pools_lock
    _pools_lock = threading.Lock()
    for pool in _pools.values():
        for jvm in pool._jvms:
            jvm.leave_to_parent()
    _pools.clear()


os.register_at_fork(after_in_child=_after_fork)
