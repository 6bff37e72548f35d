"""Code of a user that blocks the event loop is named, and interrupted after a deadline."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from typing import Any

import pytest
from played_envs import Say, task_of
from rollout_world import Scripted, World

from ludus.core.errors import EpisodeTimeout
from ludus.core.types import Message, Score, Spec, Status, Task, Trajectory
from ludus.rollout.hosts import blocked
from ludus.rollout.hosts.blocked import watched_loop

TASK = Task(id="q", prompt=[Message(role="user", content="say red .")])
LIMITS = {"episode_deadline_s": 0.5, "max_retries": 0}


async def play(world: World, judge: Any, task: Task = TASK) -> Trajectory:
    sampler = Scripted(world.renderer(), "red")
    collector = world.collector(env=None, sampler=sampler, judge=judge, **LIMITS)
    [group] = await collector.collect([task], 0, 1)
    return group.trajectories[0]


async def sleeps(task: Task, trajectory: Trajectory) -> Score:
    time.sleep(3600)
    return Score(value=1.0)


async def test_a_judge_that_blocks_is_named_and_interrupted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trajectory = await play(world, sleeps)
    assert trajectory.status is Status.ERROR_TIMEOUT
    error = trajectory.error or ""
    assert "interrupted, since it blocked the event loop: sleeps [test_blocked.py, line " in error
    assert "await asyncio.to_thread" in error
    assert "the event loop is blocked: sleeps [test_blocked.py" in caplog.text
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL


class Sleeps(Say):
    """Claims that it never blocks."""

    blocking = False

    async def step(self, action: Message) -> Any:
        time.sleep(3600)


async def test_an_environment_that_blocks_the_loop_is_interrupted(world: World) -> None:
    own = task_of(0).model_copy(update={"env": Spec(name=f"{__name__}:Sleeps")})
    trajectory = await play(world, None, own)
    assert trajectory.status is Status.ERROR_TIMEOUT
    assert "Sleeps.step [test_blocked.py" in (trajectory.error or "")


async def test_a_judge_that_waits_is_not_blamed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def waits(task: Task, trajectory: Trajectory) -> Score:
        await asyncio.sleep(3600)
        return Score(value=1.0)

    trajectory = await play(world, waits)
    assert "rollout.episode_deadline_s = 0.5 s" in (trajectory.error or "")
    assert "blocked" not in caplog.text


async def test_a_function_that_has_returned_is_not_interrupted() -> None:
    """The signal may arrive late."""
    with watched_loop(3600.0):
        [watch] = blocked._watches.values()
        watch._blocking = _returned()
        watch._on_signal(signal.SIGURG, sys._getframe())
        watch._blocking = sys._getframe()
        with pytest.raises(EpisodeTimeout, match="interrupted"):
            watch._on_signal(signal.SIGURG, sys._getframe())
    assert not blocked._watches


def _returned() -> Any:
    return sys._getframe()


def test_outside_of_the_main_thread_nothing_is_interrupted() -> None:
    async def main() -> None:
        with watched_loop(3600.0), watched_loop(1.0):
            [watch] = blocked._watches.values()
            assert (watch.num_users, watch._interrupts) == (2, False)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join()
    assert not blocked._watches
