"""Worker threads: the turn that an event loop hands over."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from ludus.core.errors import EnvError
from ludus.rollout.hosts import threads
from ludus.rollout.hosts.threads import EnvThread, WorkerThread


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "HANDOVER_S", 30.0)


async def test_a_call_that_does_not_pause_returns_within_the_loops_turn():
    turns: list[str] = []
    asyncio.get_running_loop().call_soon(turns.append, "another turn of the loop")

    async def act() -> str:
        return threading.current_thread().name

    assert await WorkerThread.take().run(act, "pause") == "ludus-env"
    assert turns == []


async def test_its_error_too():
    async def act() -> None:
        raise SystemExit(3)

    with pytest.raises(EnvError, match="called for exit"):
        await WorkerThread.take().run(act, "pause")


async def test_a_call_that_pauses_lets_the_loop_go_on():
    answered = threading.Event()

    async def act() -> str:
        while not answered.is_set():  # only this loop's next turn answers
            await asyncio.sleep(0.001)
        return "answered"

    asyncio.get_running_loop().call_soon(answered.set)
    thread = EnvThread(wait_for="pause")
    assert await thread.run(act, 30, blocking=True) == "answered"
    thread.close()


async def test_a_call_that_blocks_lets_the_loop_go_on_once_it_has_started():
    answered = threading.Event()

    async def act() -> bool:
        return answered.wait(30)

    asyncio.get_running_loop().call_soon(answered.set)
    thread = EnvThread(wait_for="start")
    assert await thread.run(act, 60, blocking=True)
    thread.close()


HANGS = """
import asyncio
import time

from ludus.rollout.hosts.threads import in_daemon


async def main():
    try:
        await asyncio.wait_for(in_daemon(lambda: time.sleep(600)), 0.1)
    except TimeoutError:
        print(await in_daemon(lambda: "left"))


asyncio.run(main())
"""


def test_a_blocking_call_that_hangs_does_not_keep_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, timeout=120)
    assert done.stdout.strip() == b"left", done.stderr
