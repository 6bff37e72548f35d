"""Signals end a coroutine in order; the second ends it at once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from ludus.core.signals import (
    Terminated,
    ctrl_c_kept_from_children,
    exit_code,
    handling,
    raise_stop,
    run,
)

BOTH = pytest.mark.parametrize(
    ("number", "kind", "code"),
    [(signal.SIGINT, KeyboardInterrupt, 130), (signal.SIGTERM, Terminated, 143)],
)


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


async def forever(log: list[str]) -> None:
    try:
        await asyncio.sleep(3600)
    finally:
        log.append("ended")


@BOTH
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


@BOTH
def test_a_signal_while_main_computes_raises_there(number: int, kind: type, code: int) -> None:
    async def main() -> None:
        signal.raise_signal(number)
        raise AssertionError("not reached")

    with pytest.raises(kind):
        run(main())


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


def test_errors_and_results_pass_through() -> None:
    async def wrong() -> None:
        raise ValueError("wrong")

    async def right() -> int:
        return 3

    assert run(right()) == 3
    with pytest.raises(ValueError, match="wrong"):
        run(wrong())


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
