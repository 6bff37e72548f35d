"""The pool of JVMs: shared, replaced, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("textworld_express", reason="needs the extra textworldexpress")

from ludus.core.errors import ConfigError, EnvError
from ludus.envs.java.machine import find_java
from ludus.envs.java.pool import Pool, pool_of
from ludus.envs.java.textworldexpress import ENGINE

try:
    find_java("textworldexpress")
except ConfigError as missing:
    pytest.skip(str(missing), allow_module_level=True)


def ended(pid: int, within_s: float = 20.0) -> bool:
    """True if the process goes away; one that nobody reaps counts as gone."""
    limit = time.monotonic() + within_s
    while time.monotonic() < limit:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def games(engine: object) -> int:
    return len(list(engine.getGameNames()))  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(ENGINE, size=2, heap_mb=64)
    yield pool
    pool.shutdown()


def test_after_a_pool_was_shut_down_there_is_another() -> None:
    first = pool_of(ENGINE, 1, 64)
    first.open().close()
    first.shutdown()
    with pytest.raises(EnvError, match="its pool of JVMs was shut down"):
        first.open()
    second = pool_of(ENGINE, 1, 64)
    try:
        second.open().close()
    finally:
        second.shutdown()


def two_run(pool: Pool) -> None:
    """Wait for the spare, which may still be starting."""
    while len(pool.jvms()) < 2:
        time.sleep(0.02)


def test_a_spare_is_started_ahead_and_reused(pool: Pool) -> None:
    first = pool.open()
    second = pool.open()
    two_run(pool)
    third = pool.open()
    assert third.jvm is not first.jvm, "the one with the fewest sessions"
    assert first.run(games) == second.run(games) == third.run(games) == 8
    pids = {jvm.pid for jvm in pool.jvms()}
    for session in (first, second, third):
        session.close()
        session.close()
    assert {jvm.num_sessions for jvm in pool.jvms()} == {0}
    again = pool.open()
    assert again.jvm.pid in pids
    again.close()
    with pytest.raises(EnvError, match="the session is closed"):
        again.run(games)


def test_a_jvm_that_is_killed_ends_its_sessions_only_and_is_replaced(pool: Pool) -> None:
    session = pool.open()
    pool.open().close()  # asks for the spare, where no other test has
    two_run(pool)
    other = pool.open()
    assert session.jvm is not other.jvm
    pid = session.jvm.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EnvError, match=rf"JVM {pid} died.* can be retried"):
        session.run(games)
    assert other.run(games) == 8
    other.close()
    session.close()
    two_run(pool)
    assert pid not in {jvm.pid for jvm in pool.jvms()}


def test_a_call_under_way_ends_with_its_jvm(pool: Pool) -> None:
    session = pool.open()
    failures: list[BaseException] = []

    def hang() -> None:
        try:
            session.run(lambda _: session.jvm._gateway.jvm.java.lang.Thread.sleep(1 << 33))
        except EnvError as error:
            failures.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    while not session.jvm.lock.locked():
        time.sleep(0.01)
    os.kill(session.jvm.pid, signal.SIGKILL)
    thread.join(timeout=20)  # far below the limit of a call, which is 60 s
    assert len(failures) == 1
    session.close()


def test_a_frozen_jvm_gets_no_sessions_and_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.envs.java.machine.PROBE_LIMIT_S", 6.0)
    monkeypatch.setattr("ludus.envs.java.machine.SUSPECT_S", 0.5)
    monkeypatch.setattr("ludus.envs.java.pool.PROBE_S", 0.1)
    pool = Pool(ENGINE, size=1, heap_mb=64)
    try:
        session = pool.open()
        os.kill(session.jvm.pid, signal.SIGSTOP)
        read = time.monotonic() + 1.5  # an answer from before the stop may still be on its way
        while time.monotonic() < read or not session.jvm.suspect:
            time.sleep(0.02)
        other = pool.open()  # beyond the pool's size, while the frozen one lives
        assert other.jvm is not session.jvm
        assert other.run(games) == 8
        with pytest.raises(EnvError, match=r"died or did not answer .* can be retried"):
            session.run(games)
        assert ended(session.jvm.pid)
        session.close()
        assert pool.jvms() == [other.jvm]
    finally:
        pool.shutdown()


def test_a_call_that_hangs_is_ended() -> None:
    pool = Pool(ENGINE, size=1, heap_mb=64, call_limit_s=2.0)
    try:
        session, waits = pool.open(), pool.open()
        with pytest.raises(EnvError, match="did not answer"):
            session.run(lambda _: session.jvm._gateway.jvm.java.lang.Thread.sleep(1 << 33))
        assert ended(session.jvm.pid)
        with pytest.raises(EnvError, match="died"):
            waits.run(games)
        assert pool.open().run(games) == 8
    finally:
        pool.shutdown()


def test_sessions_are_spread_over_the_jvms() -> None:
    pool = Pool(ENGINE, size=3, heap_mb=64)
    try:
        sessions = [pool.open() for _ in range(24)]
        counts = [jvm.num_sessions for jvm in pool.jvms()]
        assert len(counts) == 3
        assert max(counts) <= 12
        assert sum(counts) == len(sessions)
    finally:
        pool.shutdown()


def test_an_exception_of_the_engine_is_an_error_of_the_environment(pool: Pool) -> None:
    session = pool.open()
    with pytest.raises(EnvError, match=r"textworldexpress: the engine raised java\.lang\.Number"):
        session.run(lambda _: session.jvm._gateway.jvm.java.lang.Integer.parseInt("x"))
    assert session.run(games) == 8
    session.close()


def test_all_sessions_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.envs.java.pool.SESSIONS_PER_JVM", 1)
    pool = Pool(ENGINE, size=1, heap_mb=64)
    try:
        pool.open()
        with pytest.raises(EnvError, match=r"all 1 sessions are in use: raise env.args.num_jvms"):
            pool.open()
    finally:
        pool.shutdown()


def test_a_jvm_that_cannot_start_says_why() -> None:
    pool = Pool(ENGINE, size=1, heap_mb=0)
    with pytest.raises(EnvError, match=r"textworldexpress: java did not start: .*heap"):
        pool.open()


OWNER = """
import os, sys, time
from ludus.envs.java.pool import pool_of
from ludus.envs.java.textworldexpress import ENGINE
session = pool_of(ENGINE, 1, 64).open()
if sys.argv[1] == "fork" and os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print(session.jvm.pid, flush=True)
if sys.argv[1] != "exit":
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["exit", "kill", "fork"])
def test_no_jvm_outlives_its_process(end: str) -> None:
    """Nor where the process is killed, nor where a forked child of it lives on."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, end], stdout=subprocess.PIPE, process_group=0
    )
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        if end != "exit":
            os.kill(owner.pid, signal.SIGKILL)
        try:
            assert ended(pid)
        finally:
            if end == "fork":
                os.killpg(owner.pid, signal.SIGKILL)


def test_a_missing_java_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"no java on the PATH: install one, e\.g\. apt install"):
        find_java("scienceworld")
    monkeypatch.setenv("JAVA_HOME", "/nowhere/jdk")
    with pytest.raises(ConfigError, match="JAVA_HOME=/nowhere/jdk has no bin/java"):
        find_java("scienceworld")
