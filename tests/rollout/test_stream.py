"""Groups that are finished while others are played."""

from __future__ import annotations

import asyncio

import pytest
from played_envs import task_of
from rollout_world import World

from ludus.core.types import Group


def tokens(groups: list[Group]) -> list[object]:
    played = [t for group in groups for t in group.trajectories]
    return [(t.id, t.status, t.reward, [s.token_ids for s in t.segments]) for t in played]


TASKS = [task_of(seed) for seed in range(10)]


async def test_the_groups_are_those_of_collect(world: World):
    found: dict[int, Group] = {}

    async def finish(number: int, group: Group) -> None:
        found[number] = group

    played = await world.collector(concurrency=4).collect(TASKS, 3, 2, first_group=5)
    await world.collector(concurrency=4).stream(iter(TASKS), 3, 2, finish, first_group=5)
    assert sorted(found) == list(range(5, 15))
    assert tokens([found[number] for number in sorted(found)]) == tokens(played)


async def test_episodes_go_on_while_a_group_is_finished(world: World):
    """The first group waits for the last: nothing else may wait for it."""
    last = asyncio.Event()
    order: list[int] = []

    async def finish(number: int, group: Group) -> None:
        if number == 9:
            last.set()
        if number == 0:
            await last.wait()
        order.append(number)

    stream = world.collector(concurrency=2).stream(TASKS, 0, 2, finish)
    await asyncio.wait_for(stream, 60)
    assert order[-1] == 0 or order[-2:] == [0, 9]
    assert sorted(order) == list(range(10))


async def test_a_full_backlog_holds_the_episodes(world: World):
    taken: list[int] = []
    go = asyncio.Event()

    def tasks():
        for number, task in enumerate(TASKS):
            taken.append(number)
            yield task

    async def finish(number: int, group: Group) -> None:
        await go.wait()

    collector = world.collector(concurrency=1)
    running = asyncio.create_task(collector.stream(tasks(), 0, 1, finish, backlog=3))
    while len(taken) < 4:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert len(taken) == 4  # three are being finished, one waits for room
    go.set()
    await asyncio.wait_for(running, 60)
    assert len(taken) == 10


async def test_an_error_of_finish_ends_the_episodes(world: World):
    sampler = world.sampler()

    async def finish(number: int, group: Group) -> None:
        raise ValueError("no room on the disk")

    with pytest.raises(ValueError, match="no room on the disk"):
        await world.collector(sampler=sampler, concurrency=4).stream(TASKS, 0, 2, finish)
    assert sampler.open_sessions == []


async def test_a_cancelled_stream_cancels_what_it_finishes(world: World):
    ended = asyncio.Event()

    async def finish(number: int, group: Group) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.create_task(world.collector().stream(TASKS[:1], 0, 1, finish))
    await asyncio.sleep(0.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
