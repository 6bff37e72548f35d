"""Episodes of several roles: a trajectory, a policy and a reward for each."""

from __future__ import annotations

import json
from bdb import BdbQuit
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from played_envs import SAY, task_of
from rollout_world import Scripted, World
from test_agents import collector

from ludus.core.errors import ConfigError, SamplerError, SchemaError
from ludus.core.types import WITHOUT_TURN, Group, Status, by_role
from ludus.loop.loop import credit_by_role
from ludus.loop.metrics import role_metrics
from ludus.models.endpoint.client import Reply
from ludus.models.samplers.base import Completion
from ludus.rollout.outcome import Outcome
from ludus.rollout.roles import Player, Role
from ludus.rollout.roles import cast as drawn
from ludus.services.gateway.gateway import HttpGateway
from ludus.train import ALGORITHMS
from ludus.train.batches.samples import rows, to_samples


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Broken(Scripted):
    async def sample(self, *args: Any, **kwargs: Any) -> Completion:
        raise SamplerError("no connection")


def cast(world: World, *names: str, said: str = "red", **players: Any) -> tuple[list[Role], Any]:
    """Roles of the run's policy; or of the player with the role's name."""
    sampler = Scripted(world.renderer(), said)
    of = {"policy": Player("policy", lambda _: sampler)}
    of |= {player.policy: player for player in players.values() if player}
    chosen = dict.fromkeys(names, "policy")
    chosen |= {name: player.policy if player else "policy" for name, player in players.items()}
    return [Role(name, policy, of) for name, policy in chosen.items()], sampler


async def play(
    world: World, agent: Any, roles: list[Role], sampler: Any, size: int = 1, **how: Any
) -> Group:
    own = replace(collector(world, agent, env=None, sampler=sampler, **how), roles=roles)
    (group,) = await own.collect([task_of(0)], 0, size)
    return group


async def test_each_role_has_its_conversation_and_its_reward(world: World):
    async def run(task, model):
        wolf, villager = model.role("wolf"), model.role("villager")
        for player in (wolf, villager, wolf):
            await player.chat(ask("red ?"))
        return Outcome(rewards={"wolf": 1.0, "villager": -1.0}, metrics={"days": 2})

    roles, sampler = cast(world, "wolf", "villager")
    group = await play(world, run, roles, sampler)
    wolves, villagers = by_role([group])
    (wolf,), (villager,) = wolves.trajectories, villagers.trajectories
    assert (wolves.id, villagers.id) == ("rl-000000/g0000", "rl-000000/g0000/villager")
    assert (wolf.id, villager.id) == (
        "rl-000000/g0000/e000",
        "rl-000000/g0000/e000/villager",
    )
    assert (wolf.role, wolf.reward, wolf.num_turns) == ("wolf", 1.0, 2)
    assert (villager.role, villager.reward, villager.num_turns) == ("villager", -1.0, 1)
    assert (wolf.metrics["success"], villager.metrics["success"]) == (1.0, 0.0)
    assert wolf.metrics["days"] == 2
    assert villager.group_id == villagers.id
    assert sampler.sessions == set()


async def test_the_agents_own_model_is_the_first_role(world: World):
    async def run(task, model):
        await model.chat(ask("red ?"))
        await model.role("wolf").chat(ask("blue ?"))
        return 0.5

    roles, sampler = cast(world, "wolf", "villager")
    group = await play(world, run, roles, sampler)
    (wolf,) = group.trajectories
    assert (wolf.num_turns, wolf.reward) == (2, 0.5)
    (villager,) = wolf.others
    assert villager.reward == 0.5, "one reward is for all"
    assert villager.dropped == WITHOUT_TURN


async def test_a_fixed_policy_has_no_row(world: World):
    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        await model.role("villager").chat(ask("red ?"))
        return Outcome(rewards={"wolf": 1})

    old = Scripted(world.renderer(), "blue")
    roles, sampler = cast(world, "wolf", villager=Player("old", lambda _: old, trains=False))
    group = await play(world, run, roles, sampler, size=2)
    for trajectory in group.trajectories:
        (villager,) = trajectory.others
        assert rows(villager, 1.0) == []
        assert villager.dropped == "the policy 'old' does not train"
        assert villager.policy == "old"
        assert villager.metrics["weights_version"] == 7
        assert [s.message.content for s in villager.segments if s.message][-1] == "blue"
        assert all(not segment.runs for segment in villager.segments), "no version of the policy"
    algorithm = ALGORITHMS.build("grpo")
    screened = algorithm.screen(by_role([group]))
    assert {t.role for g in screened.groups for t in g.trajectories} <= {"wolf"}


async def test_advantages_are_within_a_role(world: World):
    rewards = iter([1.0, 0.0, 1.0, 0.0])

    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        await model.role("villager").chat(ask("red ?"))
        won = next(rewards)
        return Outcome(rewards={"wolf": won, "villager": 10 - won})

    roles, sampler = cast(world, "wolf", "villager")
    groups = by_role([await play(world, run, roles, sampler, size=4, concurrency=1)])
    for name in ("grpo", "reinforce_pp"):
        algorithm = ALGORITHMS.build(name)
        credited = credit_by_role(algorithm, algorithm.screen(groups).groups)
        samples = to_samples(credited)
        assert {s.policy for s in samples} == {"policy"}
        for role in ("wolf", "villager"):
            found = [sum(s.advantages) for s in samples if s.role == role]
            assert len(found) == 4
            assert sum(found) == pytest.approx(0, abs=1e-5)
            assert max(found) > 0
    metrics = role_metrics(groups)
    assert metrics["role/wolf/turns"] == 1.0
    assert metrics["role/wolf/reward"] == 0.5
    assert metrics["role/villager/reward"] == 9.5
    assert metrics["rollout/tokens"] == sum(t.num_tokens for g in groups for t in g.trajectories)


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Outcome(rewards={"wolf": 1}), "lack the role 'villager', which trains"),
        (Outcome(rewards={"wolf": 1, "vilager": 0}), "no role 'vilager'"),
        (Outcome(rewards={"wolf": 1, "villager": float("nan")}), "reward of villager is nan"),
        (Outcome(rewards={"wolf": "1", "villager": 1}), "reward of wolf is '1'"),
        (Outcome(rewards={"villager": 1}), "lack the role 'wolf', which trains"),
        (Outcome(1.0, rewards={"wolf": 1, "villager": 1}), "it has to have one"),
        (Outcome(rewards=[1, 2]), "[1, 2]"),
    ],
)
async def test_wrong_rewards(world: World, outcome, told):
    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        return outcome

    roles, sampler = cast(world, "wolf", "villager")
    (wolf,) = (await play(world, run, roles, sampler)).trajectories
    assert wolf.status is Status.UNSCORABLE
    assert told in wolf.error
    assert wolf.others[0].status is Status.UNSCORABLE


async def test_a_fixed_role_without_a_reward_stays_without(world: World):
    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        return Outcome(rewards={"wolf": np.float32(0.5)})

    old = Scripted(world.renderer(), "blue")
    roles, sampler = cast(world, "wolf", villager=Player("old", lambda _: old, trains=False))
    (wolf,) = (await play(world, run, roles, sampler)).trajectories
    assert wolf.reward == 0.5
    assert wolf.others[0].reward is None


async def test_the_first_role_needs_a_reward_although_it_is_fixed(world: World):
    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        return Outcome(rewards={"villager": 1})

    old = Scripted(world.renderer(), "blue")
    roles, sampler = cast(world, wolf=Player("old", lambda _: old, trains=False), villager=None)
    (wolf,) = (await play(world, run, roles, sampler)).trajectories
    assert "lack the first role, 'wolf'" in wolf.error


async def test_a_fault_of_the_agent_after_a_cut_turn_is_its_fault(world: World):
    """A turn that reached its limit of tokens is no reason to raise."""

    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        raise ValueError("oops")

    roles, sampler = cast(world, "wolf", "villager", said="red...")
    (wolf,) = (await play(world, run, roles, sampler)).trajectories
    assert wolf.status is Status.ERROR_ENV
    assert "oops" in wolf.error


async def test_a_library_that_cannot_read_a_cut_turn_meets_the_limit(world: World):
    async def run(task, model):
        reply = await model.role("wolf").chat(ask("red ?"))
        return json.loads(reply.message.content)["reward"]

    roles, sampler = cast(world, "wolf", "villager", said="red...")
    (wolf,) = (await play(world, run, roles, sampler)).trajectories
    assert wolf.status is Status.TRUNCATED_LENGTH
    assert wolf.reward == 0.0


async def test_quitting_the_debugger_ends_the_run(world: World):
    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        raise BdbQuit

    roles, sampler = cast(world, "wolf", "villager")
    with pytest.raises(BdbQuit):
        await play(world, run, roles, sampler)


async def test_an_unknown_role_ends_the_run(world: World):
    async def run(task, model):
        await model.role("wulf").chat(ask("red ?"))

    roles, sampler = cast(world, "wolf", "villager")
    with pytest.raises(ConfigError, match=r"the role 'wulf' \(did you mean wolf\?\)"):
        await play(world, run, roles, sampler)


async def test_a_role_whose_sampler_fails_excludes_all(world: World):
    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        await model.role("villager").chat(ask("red ?"))
        return 1

    broken = Broken(world.renderer(), "")
    roles, sampler = cast(world, "wolf", villager=Player("old", lambda _: broken, trains=False))
    (wolf,) = (await play(world, run, roles, sampler)).trajectories
    assert [t.status for t in (wolf, *wolf.others)] == [Status.ERROR_SAMPLER] * 2


async def test_a_role_beyond_its_context_truncates_the_episode(world: World):
    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        await model.role("villager").chat(ask("red " * 300))
        return 1

    roles, sampler = cast(world, "wolf", "villager")
    (wolf,) = (await play(world, run, roles, sampler)).trajectories
    assert [t.status for t in (wolf, *wolf.others)] == [Status.TRUNCATED_LENGTH] * 2
    assert wolf.reward == 0.0


async def test_a_late_call_of_a_role_is_refused(world: World):
    kept = []

    async def run(task, model):
        kept.append(model.role("villager"))
        await model.role("wolf").chat(ask("red ?"))
        return 1

    roles, sampler = cast(world, "wolf", "villager")
    await play(world, run, roles, sampler)
    with pytest.raises(Exception, match="the episode has ended"):
        await kept[0].chat(ask("red ?"))


class Served:
    """An endpoint's client with a scripted answer."""

    model = "served"

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def chat(self, messages, params, tools=(), schema=None, *, strict=False) -> Reply:
        from ludus.core.types import Message

        if schema is not None:
            assert strict
            raise SchemaError("the endpoint refused a call with a schema: not here")
        self.asked.append((list(messages), params))
        text = f"answer {len(self.asked)}"
        return Reply(Message(role="assistant", content=text), "stop")


async def test_a_role_that_an_endpoint_plays(world: World):
    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        villager, talk = model.role("villager"), ask("red ?")
        for _ in range(2):
            said = await villager.chat(talk, [SAY], temperature=0.3)
            talk += [{"role": "assistant", "content": said.content}, *ask("and ?")]
        return Outcome(rewards={"wolf": 1})

    served: Any = Served()
    roles, sampler = cast(world, "wolf", villager=Player("big", None, served, trains=False))
    (wolf,) = (await play(world, run, roles, sampler)).trajectories
    assert (wolf.status, wolf.reward) == (Status.COMPLETED, 1.0)
    (villager,) = wolf.others
    assert [s.message.content for s in villager.segments] == [
        "red ?", "answer 1", "and ?", "answer 2"
    ]  # fmt: skip
    assert [len(messages) for messages, _ in served.asked] == [1, 3]
    assert served.asked[0][1].temperature == 0.3
    assert rows(villager, 1.0) == []


async def test_an_endpoint_s_refusal_of_a_schema_reaches_the_agent(world: World):
    """The call fails, not the run; the next call is answered."""

    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        villager = model.role("villager")
        with pytest.raises(SchemaError, match="not here"):
            await villager.chat(ask("red ?"), schema={"type": "object"})
        await villager.chat(ask("red ?"))
        return Outcome(rewards={"wolf": 1})

    served: Any = Served()
    roles, sampler = cast(world, "wolf", villager=Player("big", None, served, trains=False))
    (wolf,) = (await play(world, run, roles, sampler)).trajectories
    assert (wolf.status, wolf.error) == (Status.COMPLETED, None)
    assert wolf.others[0].num_turns == 1


def test_players_are_drawn_for_a_group() -> None:
    of = {
        "policy": Player("policy", None),
        "old": Player("old", None, trains=False),
    }
    roles = [Role(name, {"policy": 1.0, "old": 3.0}, of) for name in ("wolf", "villager")]
    groups = [tuple(p.policy for p in drawn(roles, f"g{n}", 0)) for n in range(400)]
    assert groups == [tuple(p.policy for p in drawn(roles, f"g{n}", 0)) for n in range(400)]
    assert ("old", "old") not in groups, "such a group would train nothing"
    share = groups.count(("policy", "old")) / len(groups)
    assert 0.33 < share < 0.53, "3 of 7"
    fixed = [Role("wolf", "old", of)]
    assert [p.policy for p in drawn(fixed, "g", 0)] == ["old"], "an evaluation may have none"


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_role_is_a_model_over_http(world: World, api: str) -> None:
    """Every API: with the episode's key by the role's name, or with the role's own key."""
    told = []

    async def call(client: httpx.AsyncClient, url: str, key: str, name: str) -> httpx.Response:
        talk = ask("red ?")
        path, body = {
            "chat": ("chat/completions", {"messages": talk}),
            "responses": ("responses", {"input": "red ?"}),
            "messages": ("messages", {"messages": talk, "max_tokens": 5}),
        }[api]
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        return await client.post(f"{url}/{path}", json={"model": name, **body}, headers=headers)

    async def run(task, model):
        villager = model.role("villager")
        async with model.http_client() as client:
            for name in ("policy", "wolf", "villager", "villager:untrained"):
                answer = await call(client, model.base_url, model.api_key, name)
                assert answer.status_code == 200, answer.text
            answer = await call(client, villager.base_url, villager.api_key, villager.name)
            assert answer.status_code == 200, answer.text
            answer = await call(client, model.base_url, model.api_key, "vilager")
            told.append((answer.status_code, answer.text))
        return 1

    roles, sampler = cast(world, "wolf", "villager")
    gateway = HttpGateway()
    try:
        own = replace(collector(world, run, env=None, sampler=sampler), roles=roles)
        (group,) = await replace(own, gateway=gateway).collect([task_of(0)], 0, 1)
    finally:
        gateway.close()
    (wolf,) = group.trajectories
    assert (wolf.status, wolf.num_turns) == (Status.COMPLETED, 2), wolf.error
    (villager,) = wolf.others
    assert villager.num_turns == 2, "one of its calls was untrained"
    assert told[0][0] == 404
    assert "did you mean villager" in told[0][1]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_served_role_streams(world: World, api: str) -> None:
    told: list[str] = []

    async def run(task, model):
        await model.role("wolf").chat(ask("red ?"))
        path, body = {
            "chat": ("chat/completions", {"messages": ask("red ?")}),
            "responses": ("responses", {"input": "red ?"}),
            "messages": ("messages", {"messages": ask("red ?"), "max_tokens": 5}),
        }[api]
        headers = {"x-api-key": model.api_key, "anthropic-version": "2023-06-01"}
        async with model.http_client() as client:
            url = f"{model.base_url}/{path}"
            body = {"model": "villager", "stream": True, **body}
            answer = await client.post(url, json=body, headers=headers)
        told.append(answer.text)
        return Outcome(rewards={"wolf": 1})

    served: Any = Served()
    roles, sampler = cast(world, "wolf", villager=Player("big", None, served, trains=False))
    gateway = HttpGateway()
    try:
        own = replace(collector(world, run, env=None, sampler=sampler), roles=roles)
        (group,) = await replace(own, gateway=gateway).collect([task_of(0)], 0, 1)
    finally:
        gateway.close()
    assert group.trajectories[0].error is None
    assert "answer 1" in told[0]
