"""Signals end a coroutine in order; the second ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ludus.core.system import signals
from ludus.core.system.signals import (
    HungUp,
    Terminated,
    ctrl_c_kept_from_children,
    exit_code,
    handling,
    raise_stop,
    run,
)

ALL = pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (signal.SIGINT, KeyboardInterrupt, 130),
        (signal.SIGTERM, Terminated, 143),
        (signal.SIGHUP, HungUp, 129),
    ],
)


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    """SIGHUP is not ignored meanwhile, also if the tests run under `nohup`."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    outside = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
    signal.signal(signal.SIGHUP, outside)


async def forever(log: list[str]) -> None:
    try:
        await asyncio.sleep(3600)
    finally:
        log.append("ended")


@ALL
def test_a_signal_in_a_task_ends_all_tasks_in_order(
    number: int, kind: type, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[str] = []

    async def struck() -> None:
        await asyncio.sleep(0)
        signal.raise_signal(number)
        log.append("the task goes on to its next wait")
        await forever(log)

    async def main() -> None:
        await asyncio.gather(struck(), *(forever(log) for _ in range(50)))

    with pytest.raises(kind) as stopped:
        run(main())
    assert exit_code(stopped.value) == code
    assert log == ["the task goes on to its next wait", *["ended"] * 51]
    assert capsys.readouterr() == ("", "")


@ALL
def test_a_signal_while_main_computes_raises_there(number: int, kind: type, code: int) -> None:
    async def main() -> None:
        signal.raise_signal(number)
        raise AssertionError("not reached")

    with pytest.raises(kind):
        run(main())


@ALL
def test_a_signal_while_a_task_blocks_the_loop_raises_there(
    number: int, kind: type, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "END_S", 0.05)

    async def blocks() -> None:
        signal.raise_signal(number)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            pass
        raise AssertionError("not reached")

    async def main() -> None:
        await asyncio.create_task(blocks())

    with pytest.raises(kind) as stopped:
        run(main())
    assert exit_code(stopped.value) == code


def test_main_may_finish_by_itself_once() -> None:
    signals: list[KeyboardInterrupt] = []

    def finishes(stop: KeyboardInterrupt) -> bool:
        signals.append(stop)
        return len(signals) == 1

    async def main() -> str:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0)
        return "saved"

    assert run(main(), finishes) == "saved"
    assert [type(stop) for stop in signals] == [Terminated]

    async def stubborn() -> str:
        signal.raise_signal(signal.SIGTERM)
        return "not reached"

    with pytest.raises(Terminated):
        run(stubborn(), finishes)


def test_a_task_that_swallows_the_cancellation_does_not_swallow_the_signal() -> None:
    async def struck() -> None:
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        task = asyncio.create_task(struck())
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await task

    with pytest.raises(KeyboardInterrupt):
        run(main())


def test_a_task_that_never_ends_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(signals, "END_S", 0.05)

    async def endless() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    async def main() -> int:
        ignored = asyncio.create_task(endless())
        await asyncio.sleep(0)
        return 3 if not ignored.done() else 0

    assert run(main()) == 3
    assert "endless" in caplog.text


def test_errors_and_results_pass_through() -> None:
    async def wrong() -> None:
        raise ValueError("wrong")

    async def right() -> int:
        return 3

    assert run(right()) == 3
    with pytest.raises(ValueError, match="wrong"):
        run(wrong())


class Falls:
    """Receives a signal in `__del__`, where Python ignores what is raised."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)
        assert time  # the handler is called before this line at the latest


@ALL
def test_a_signal_in_a_destructor_is_not_lost(
    number: int, kind: type, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = sys.unraisablehook

    def fall() -> None:
        Falls(number)
        time.sleep(30)

    with pytest.raises(KeyboardInterrupt) as caught, handling(raise_stop):
        fall()
    assert type(caught.value) is kind

    async def main() -> None:
        Falls(number)
        await asyncio.sleep(30)

    with pytest.raises(KeyboardInterrupt) as caught:
        run(main())
    assert type(caught.value) is kind
    assert sys.unraisablehook is hook
    assert "Traceback" not in capsys.readouterr().err


def test_other_errors_in_a_destructor_are_still_told() -> None:
    class Fails:
        def __del__(self) -> None:
            raise ValueError("of a destructor")

    told: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda given: told.append(given.exc_value)
    try:
        with handling(raise_stop):
            Fails()
    finally:
        sys.unraisablehook = hook
    assert [str(error) for error in told] == ["of a destructor"]


def test_other_threads_leave_signals_alone() -> None:
    results: list[int] = []

    async def right() -> int:
        return 3

    thread = threading.Thread(target=lambda: results.append(run(right())))
    thread.start()
    thread.join()
    assert results == [3]


def test_a_child_does_not_hear_ctrl_c() -> None:
    script = "import signal; signal.raise_signal(signal.SIGINT); print('alive')"
    with ctrl_c_kept_from_children():
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    with handling(raise_stop), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_waits_while_workers_start() -> None:
    """Though another thread, which does not block the signal, receives it."""
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    reached: list[str] = []

    def start_workers() -> None:
        with ctrl_c_kept_from_children():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            reached.append("the end of the body")
        reached.append("after it")

    try:
        with handling(raise_stop), pytest.raises(KeyboardInterrupt):
            start_workers()
    finally:
        over.set()
        other.join()
    assert reached == ["the end of the body"]


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handling(raise_stop):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


CLOSED_TERMINAL = """
import fcntl, sys, termios, time
from ludus.core.system.signals import HungUp, handling, raise_stop
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
try:
    with handling(raise_stop):
        print("ready", flush=True)
        time.sleep(60)
except HungUp:
    print("saving", flush=True)
    print("saving", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write("saved")
"""


def test_what_follows_a_closed_terminal_may_print(tmp_path: Path) -> None:
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CLOSED_TERMINAL, tmp_path / "result"],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    assert b"ready" in os.read(master, 100)
    os.close(master)  # the kernel sends SIGHUP to the terminal's session
    assert process.wait(60) == 0
    assert (tmp_path / "result").read_text() == "saved"


LEFT_SLOWLY = """
import atexit, signal
from ludus.core.system.signals import leave
atexit.register(signal.raise_signal, signal.SIGINT)
leave(130)
"""


def test_ctrl_c_while_python_exits_prints_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_SLOWLY], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
