"""Scoring runs beside sampling: a judge that waits holds back neither turns nor other scores."""

from __future__ import annotations

import asyncio
from typing import Any

from rollout_world import Scripted, World

from ludus.core.types import Message, Score, Spec, Status, Task, Trajectory


class Patient:
    """Judges the episode `slow` only after the other episodes are scored."""

    def __init__(self, others: int) -> None:
        self.left, self.all_scored = others, asyncio.Event()
        self.closed = False

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        if task.id == "slow":
            await self.all_scored.wait()
        else:
            self.left -= 1
            if not self.left:
                self.all_scored.set()
        return Score(value=1.0, parts={"a": 1.0}, explanation="fine")

    async def close(self) -> None:
        self.closed = True


class Running:
    """Counts the judge's calls at the same time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.005)
        self.now -= 1
        return Score(value=1.0)


def tasks(*ids: str, **more: Any) -> list[Task]:
    return [Task(id=id, prompt=[Message(role="user", content="go")], **more) for id in ids]


async def test_a_slow_judge_delays_no_other_episode(world: World) -> None:
    judge = Patient(others=5)
    sampler = Scripted(world.renderer("plain"), "red")
    collector = world.collector(env=None, sampler=sampler, judge=judge, concurrency=2)
    groups = await collector.collect(tasks("slow", *"abcde"), 0, 1)
    trajectories = [t for group in groups for t in group.trajectories]
    assert [t.status for t in trajectories] == [Status.COMPLETED] * 6
    assert {(t.reward, t.explanation) for t in trajectories} == {(1.0, "fine")}
    assert len(sampler.turns) == 6
    await collector.close()
    assert judge.closed


async def test_judge_calls_are_bounded_by_the_concurrency(world: World) -> None:
    judge = Running()
    sampler = Scripted(world.renderer("plain"), "red")
    collector = world.collector(env=None, sampler=sampler, judge=judge, concurrency=3)
    await collector.collect(tasks(*"abcdefghi"), 0, 1)
    assert judge.most == 3


async def test_the_judges_of_tasks_are_closed_too(world: World) -> None:
    sampler = Scripted(world.renderer("plain"), "red")
    collector = world.collector(env=None, sampler=sampler)
    spec = Spec(name="test_episode_scoring:Patient", args={"others": 1})
    await collector.collect(tasks("a", judge=spec), 0, 1)
    [judge] = collector._judges.values()
    await collector.close()
    assert isinstance(judge, Patient)
    assert judge.closed
