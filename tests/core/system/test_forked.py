"""Work in a forked process: its words, its output, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ludus.core.errors import ConfigError, LudusError
from ludus.core.system.forked import MAX_NOISE, Died, Ended, Stuck, Tell, in_child


def tried(work: object) -> tuple[Ended, list[str], bytes]:
    told: list[str] = []
    noise: list[bytes] = []
    return in_child(work, told.append, noise.append), told, b"".join(noise)  # type: ignore[arg-type]


def test_what_the_child_tells_and_prints_arrives() -> None:
    def work(tell: Tell) -> int:
        tell("one\nline")
        print("to stdout")
        os.write(2, b"to stderr")
        tell("two")
        return 3

    ended, told, noise = tried(work)
    assert (ended.code, told) == (3, ["one\nline", "two"])
    assert b"to stdout" in noise
    assert b"to stderr" in noise


def test_output_has_a_limit() -> None:
    def work(_: Tell) -> int:
        sys.stderr.write("x" * 2 * MAX_NOISE)
        return 0

    ended, _, noise = tried(work)
    assert (ended.noise, len(noise)) == (2 * MAX_NOISE, MAX_NOISE)


@pytest.mark.parametrize("code", [0, 7])
def test_a_process_that_is_ended_is_an_error(code: int) -> None:
    with pytest.raises(Died, match=f"ended its process with exit code {code}"):
        tried(lambda _: os._exit(code))
    with pytest.raises(Died, match="by signal SIGKILL"):
        tried(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def test_errors_keep_their_words_and_their_exit_code() -> None:
    def work(_: Tell) -> int:
        raise ConfigError("a wrong key")

    with pytest.raises(LudusError, match="a wrong key") as raised:
        tried(work)
    assert raised.value.exit_code == 2


def test_the_child_s_own_children_hold_nothing_up() -> None:
    def work(tell: Tell) -> int:
        if not (child := os.fork()):
            signal.pause()
        tell(str(child))
        return 0

    _, [child], _ = tried(work)
    os.kill(int(child), signal.SIGKILL)


def test_a_child_that_holds_the_interpreter_is_killed() -> None:
    """No signal handler of Python's, and no timeout of ours, runs in such a child."""
    begun = time.monotonic()
    with pytest.raises(Stuck, match=r"held the interpreter \(the GIL\) for more than 2 s"):
        in_child(lambda _: 9 ** (10**9), print, print, silent_s=2.0)
    assert time.monotonic() - begun < 60


ENDS = """
import signal, sys, time
from ludus.core.system.forked import in_child
def work(tell):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell("ready")
    time.sleep(600)
    return 0
try:
    in_child(work, lambda text: print(text, flush=True), print)
except Exception as error:
    print(error, error.exit_code, flush=True)
"""


def test_a_child_that_ignores_a_signal_is_killed_later() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        assert done.stdout.readline() == "ready\n"
        done.terminate()
        assert done.stdout.readline() == "stopped 143\n"
