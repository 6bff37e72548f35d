"""A Java virtual machine with an engine in it, which many episodes share.

A JVM takes a second or two to start and hundreds of megabytes, an episode's world half a megabyte.
So one JVM plays many episodes, one call at a time, and what its engine keeps in static fields (the
random generator, counters) is exchanged when another episode's turn comes: an episode never notices
the others. Identity hash codes, by which Scala orders its sets, are made constant: without that,
the same task differs from one JVM to the next.

JVMs end with this process, however it ends: they read its pipe.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from contextlib import suppress
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

from ludus.core.errors import ConfigError, EnvError

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


@dataclass(eq=False, slots=True)
class Place:
    """What an episode has in a JVM: its engine object, and its static state while others play."""

    interface: Any = None
    statics: tuple[int, ...] | None = None


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

    def give_back(self, place: Place) -> None:
        """An episode has ended: its engine object is for the next one."""
        if place.interface is not None:
            self._spare.append(place.interface)
        if self._last is place:
            self._last = None

    def enter(self, place: Place) -> None:
        """Exchange the static state of the episode before for that of this one."""
        if self._last is place:
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
