"""The agent `relay`: roles take turns in an environment, with rewards of their own turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from played_envs import task_of
from rollout_world import Scripted, World
from test_agents import collector

from ludus.core.types import WITHOUT_TURN, Group, Spec, Status, Trajectory, by_role
from ludus.rollout.outcome import Outcome
from ludus.rollout.roles import Player, Role
from ludus.rollout.workflow import Agent
from ludus.train import ALGORITHMS
from ludus.train.batches.samples import to_samples


def roles_of(world: World, *names: str, **samplers: Any) -> tuple[list[Role], Any]:
    sampler = Scripted(world.renderer(), "red", "blue", "green")
    of = {"policy": Player("policy", lambda _: sampler)}
    for name, own in samplers.items():
        of[name] = Player(name, lambda _, own=own: own, trains=False)
    return [Role(name, name if name in samplers else "policy", of) for name in names], sampler


async def play(
    world: World, agent: Any, roles: list[Role], sampler: Any, size: int = 1, **data: Any
) -> Group:
    own = collector(world, agent, env="Say", sampler=sampler, max_turns=3)
    own = replace(own, roles=roles, env=Spec(name="relay_envs:Duet"))
    (group,) = await own.collect([task_of(0, **data)], 0, size)
    return group


def relay(gamma: float | None = None) -> Agent:
    return Agent.build(Spec(name="relay", args={} if gamma is None else {"gamma": gamma}))


def turn_rewards(trajectory: Trajectory) -> list[float | None]:
    return [segment.reward for segment in trajectory.segments if segment.sampled]


async def test_each_role_earns_its_own_turns(world: World) -> None:
    roles, sampler = roles_of(world, "first", "second")
    group = await play(world, relay(), roles, sampler)
    (first,), (second,) = (g.trajectories for g in by_role([group]))
    assert (first.status, first.reward, turn_rewards(first)) == (Status.COMPLETED, 0.5, [0.5])
    assert (second.reward, turn_rewards(second)) == (1.25, [0.25, 1.0])
    assert first.metrics["success"] == 1.0
    assert first.scores == {"turns": 3.0}
    assert first.explanation == "after 3"
    texts = [s.message.content for s in second.segments if s.message]
    assert texts == ["say red .", "red", "better .", "red", "again .", "blue"]
    assert [s.sampled for s in second.segments if s.message] == [False] * 3 + [True, False, True]


async def test_returns_run_over_the_turns_of_all_roles(world: World) -> None:
    roles, sampler = roles_of(world, "first", "second")
    group = await play(world, relay(gamma=0.4), roles, sampler, size=2)
    first, second = (g.trajectories[0] for g in by_role([group]))
    assert turn_rewards(first) == [pytest.approx(0.5 + 0.4 * 0.25 + 0.16 * 1.0)]
    assert turn_rewards(second) == [pytest.approx(0.25 + 0.4), 1.0]
    assert second.reward == pytest.approx(1.65)
    algorithm = ALGORITHMS.build(Spec(name="turn_grpo", args={"gamma": 0.0}))
    samples = to_samples(algorithm.assign(by_role([group])))
    assert {sample.role for sample in samples} == {"first", "second"}


async def test_a_fixed_role_plays_along(world: World) -> None:
    old = Scripted(world.renderer(), "grey", "grey")
    roles, sampler = roles_of(world, "first", "second", second=old)
    group = await play(world, relay(), roles, sampler)
    (first,) = group.trajectories
    (second,) = first.others
    assert (first.reward, first.dropped) == (0.5, None)
    assert second.dropped is not None
    assert second.dropped.endswith("does not train")


async def test_a_role_that_has_no_turn_gives_no_row(world: World) -> None:
    roles, sampler = roles_of(world, "first", "second", "third")
    group = await play(world, relay(), roles, sampler)
    (first,) = group.trajectories
    third = first.others[1]
    assert first.reward == 0.5
    assert third.reward is None
    assert third.dropped == WITHOUT_TURN
    assert third.without_turn


async def test_a_role_at_its_limit_ends_the_episode_with_what_was_earned(world: World) -> None:
    roles, sampler = roles_of(world, "first", "second")
    own = collector(world, relay(), env="Say", sampler=sampler, max_turns=1)
    own = replace(own, roles=roles, env=Spec(name="relay_envs:Duet"))
    (group,) = await own.collect([task_of(0)], 0, 1)
    first, second = (g.trajectories[0] for g in by_role([group]))
    assert (first.reward, second.reward) == (0.5, 0.25)
    assert second.status is Status.TRUNCATED_TURNS
    assert first.scores == {"turns": 2.0}
    assert first.metrics["success"] == 1.0


@pytest.mark.parametrize(
    ("data", "problem"),
    [({"nameless": True}, "names no `role`"), ({"silent": True}, "no `conversation` for the role")],
)
async def test_an_environment_without_roles_is_refused(
    world: World, data: dict[str, Any], problem: str
) -> None:
    roles, sampler = roles_of(world, "first", "second")
    (first,) = (await play(world, relay(), roles, sampler, **data)).trajectories
    assert first.status is Status.ERROR_ENV
    assert problem in (first.error or "")


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome(turn_rewards={"first": [1.0, 2.0]}), "are 2; its turns are 1"),
        (Outcome(turn_rewards={"third": []}), "no role 'third'"),
        (Outcome(turn_rewards={"first": ["x"]}), "have to be numbers"),  # type: ignore[list-item]
        (Outcome(rewards={"first": 1}, turn_rewards={"first": [1]}), "one is needed"),
        (Outcome(reward=1, turn_rewards={"first": [1]}), "has to have one"),
    ],
)
async def test_rewards_of_turns_that_do_not_fit_are_no_reward(
    world: World, outcome: Outcome, problem: str
) -> None:
    async def run(task: Any, model: Any) -> Outcome:
        await model.role("first").chat([{"role": "user", "content": "red ?"}])
        return outcome

    roles, sampler = roles_of(world, "first", "second")
    (first,) = (await play(world, run, roles, sampler)).trajectories
    assert first.status is Status.UNSCORABLE
    assert problem in (first.error or "")


async def test_an_environments_explanation_is_kept(world: World) -> None:
    sampler = Scripted(world.renderer(), "red", "blue", "green")
    own = world.collector("Say", sampler=sampler, system_prompt=None)
    own = replace(own, env=Spec(name="relay_envs:Duet"))
    (group,) = await own.collect([task_of(0)], 0, 1)
    assert group.trajectories[0].explanation == "it took 3 turns"
    assert group.trajectories[0].reward == 1.75
