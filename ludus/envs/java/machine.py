"""A Java virtual machine with an engine, shared by many episodes.

A JVM takes 1 to 2 s to start and hundreds of megabytes; an episode's world takes half a megabyte.
So a JVM plays many episodes, one call at a time. The engine's static fields (random generator,
counters) are swapped when the episode changes, which isolates the episodes. Identity hash codes, by
which Scala orders its sets, are constant; otherwise a task would differ between JVMs.

A JVM exits when this process ends, in whatever way, since it reads from this process's pipe.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from logging import CRITICAL, getLogger
from typing import Any

from py4j.java_gateway import (
    GatewayClient,
    GatewayConnection,
    GatewayParameters,
    JavaGateway,
    find_jar_path,
    quiet_close,
)
from py4j.protocol import Py4JError

from ludus.core.errors import ConfigError, EnvError

START_LIMIT_S = 60.0
CALL_LIMIT_S = 20.0
"""Timeout of a call to a JVM that plays episodes; a reset takes less than a second."""

EXPERT_LIMIT_S = 120.0
"""Timeout of a call to a JVM that searches for solutions. Gold paths take up to 20 s on an idle
machine, and over 60 s where a slow one is busy."""

PROBE_LIMIT_S = 10.0
"""Timeout of a probe. A JVM that does not answer is frozen, and is killed."""

SUSPECT_S = 4.0
"""Seconds without an answer, or a fifth of a call's timeout, after which a JVM gets no further
episodes."""

_SEED_MASK = 0x5DEECE66D
_FORCE_LONG = 1 << 50
"""java.util.Random XORs its seed with the mask and keeps 48 bits. A higher bit makes py4j send a
Java long for any value."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A Java engine: the class of an episode's engine object, and the location of its static state.

    `counters` are static longs that belong to an episode, as (class of a Scala object, field).
    `draws`: steps draw from the global random generator, so its state belongs to an episode too.
    `variant` is a static setting shared by all episodes; each variant has its own JVMs.
    """

    name: str
    jar: str
    interface: str
    counters: tuple[tuple[str, str], ...] = ()
    draws: bool = True
    variant: str = ""


@dataclass(eq=False, slots=True)
class Place:
    """An episode's engine object in a JVM, and its static state while another episode runs."""

    interface: Any = None
    statics: tuple[int, ...] | None = None


def find_java(name: str) -> str:
    """Returns the path of `java`. Errors: ConfigError with instructions to install it."""
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
    """A Java process with the engine. Errors: EnvError if it does not start."""

    def __init__(self, engine: Engine, heap_mb: int, call_limit_s: float = CALL_LIMIT_S) -> None:
        self.engine, self.call_limit_s = engine, call_limit_s
        self.num_sessions = 0
        self.lock = threading.Lock()
        self._call_since: float | None = None
        self._probe_since: float | None = None
        self._last: Place | None = None
        self._spare: list[Any] = []
        self._process = _launch(engine, heap_mb)
        try:
            self._connect()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Process id of the JVM."""
        return self._process.pid

    @property
    def classes(self) -> Any:
        """The JVM's packages and classes, as py4j exposes them."""
        return self._gateway.jvm

    @property
    def alive(self) -> bool:
        """True if the process is running."""
        return self._process.poll() is None

    @property
    def suspect(self) -> bool:
        """True if a call or a probe has had no answer for long."""
        now = time.monotonic()
        call, probe = self._call_since, self._probe_since
        slow_call = call is not None and now - call > max(SUSPECT_S, self.call_limit_s / 5)
        return slow_call or (probe is not None and now - probe > SUSPECT_S)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """The time of a call, for `suspect`. The caller holds the lock."""
        self._call_since = time.monotonic()
        try:
            yield
        finally:
            self._call_since = None

    def answers(self) -> bool:
        """True if the JVM answers a probe in time; works while a call is running."""
        self._probe_since = time.monotonic()
        try:
            self._clock.nanoTime()
        except (Py4JError, OSError):
            return False
        finally:
            self._probe_since = None
        return True

    def _connect(self) -> None:
        assert self._process.stdout is not None
        watchdog = threading.Timer(START_LIMIT_S, self._process.kill)
        watchdog.start()
        try:
            port, token = (self._process.stdout.readline().decode().strip() for _ in range(2))
        finally:
            watchdog.cancel()
        if not port.isdecimal():
            raise EnvError(f"{self.engine.name}: java did not start: {port or 'no output'}")
        getLogger("py4j").setLevel(CRITICAL)  # failures are reported by our own errors
        self._gateway, self._probe = (
            _Gateway(
                gateway_parameters=GatewayParameters(
                    port=int(port), auth_token=token, read_timeout=limit
                )
            )
            for limit in (self.call_limit_s, PROBE_LIMIT_S)
        )
        java = self._gateway.jvm
        self._clock = self._probe.jvm.java.lang.System
        # Engines print every step; nothing reads that pipe, and a full pipe would block them.
        silence = java.java.io.PrintStream(java.java.io.OutputStream.nullOutputStream())
        java.java.lang.System.setOut(silence)
        java.java.lang.System.setErr(silence)
        self._statics = _Statics(java, self.engine)
        self._spare.append(self._new_interface())  # loads the classes ahead of the first episode

    def _new_interface(self) -> Any:
        target = self._gateway.jvm
        for part in self.engine.interface.split("."):
            target = getattr(target, part)
        return target()

    def take_interface(self) -> Any:
        """Returns an unused engine object."""
        return self._spare.pop() if self._spare else self._new_interface()

    def give_back(self, place: Place) -> None:
        """Return an ended episode's engine object for reuse."""
        if place.interface is not None:
            self._spare.append(place.interface)
        if self._last is place:
            self._last = None

    def enter(self, place: Place) -> None:
        """Save the static state of the previous episode and restore that of this episode."""
        if self._last is place or not (self.engine.draws or self.engine.counters):
            return
        if self._last is not None:
            self._last.statics = self._statics.read()
        if place.statics is not None:
            self._statics.write(place.statics)
        self._last = place

    def seed(self, value: int) -> None:
        """Seed the engine's global random generator."""
        self._statics.seed(value)

    def kill(self) -> None:
        """Kill the process. May be called more than once."""
        self._process.kill()
        self._process.wait()
        self.close_pipes()
        for gateway in (getattr(self, "_gateway", None), getattr(self, "_probe", None)):
            if gateway is not None:
                gateway._gateway_client.is_connected = False  # nothing to free in a dead JVM
                with suppress(Exception):
                    gateway.close()

    def close_pipes(self) -> None:
        """Close the pipes; a forked child closes its copies, so the JVM sees its parent's end."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _launch(engine: Engine, heap_mb: int) -> subprocess.Popen[bytes]:
    command = [
        find_java(engine.name),
        f"-Xmx{heap_mb}m",
        "-XX:+ExitOnOutOfMemoryError",
        "-XX:+UseSerialGC",  # least memory; calls are sequential anyway
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
    # Own process group, so Ctrl-C reaches only this process, which may need to finish a step.
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=os.path.dirname(engine.jar),  # engines load data files from the working folder
        process_group=0,
    )


class _Client(GatewayClient):  # type: ignore[misc]
    """Client without retries: py4j's own retries a dead JVM, logs to the root logger (which
    prints), and leaks the socket."""

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
    """Accesses an engine's static state of the current episode: (random seed, counters)."""

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
