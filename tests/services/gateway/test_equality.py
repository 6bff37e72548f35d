"""Agents against the built-in loop: equal tokens, masks and log-probabilities, equal gradients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_agents import APIS, FRAMEWORKS, PROGRAM, Game, Play, talking
from played_envs import task_of
from rollout_world import World, demonstration, teach
from variants import variants

from ludus.config.schema import OptimizerConfig
from ludus.core.types import Group, Spec, Trajectory
from ludus.rollout.workflow import Agent
from ludus.services.gateway.gateway import HttpGateway
from ludus.train import ALGORITHMS
from ludus.train.batches.packing import pack
from ludus.train.batches.samples import rows, to_samples
from ludus.train.learner import Learner

TASKS = [task_of(100 + i) for i in range(6)]
STYLES = [("plain", "keep"), ("think", "keep"), ("think", "strip"), ("tools", "keep")]
MAX_TURNS = 12
SAID = re.compile(r"|say \w+ \.|that is no colour \.")
"""Texts of the game."""


@pytest.fixture(scope="session")
def taught(world: World) -> World:
    """The policy that plays with well-formed tool calls too."""
    world = replace(world, model=deepcopy(world.model))
    teach(world, {"tools": [demonstration("tools", seed) for seed in range(24)]}, 40)
    return world


def agent_of(play: Play, world: World, style: str, thinking: str) -> Agent:
    renderer = world.renderer(style, thinking)

    async def run(model: Any, env: Any) -> None:
        game = Game(model, env, renderer, style)
        try:
            await play(game)
        except Exception:
            if not game.done:
                raise

    return Agent(run, frozenset({"model", "env"}))


async def built_in(world: World, style: str, thinking: str) -> list[Group]:
    """The groups of the built-in loop; played once."""
    if (style, thinking) not in _built_in:
        sampler = world.sampler(deterministic=False)
        collector = world.collector(
            style=style, thinking=thinking, max_turns=MAX_TURNS, sampler=sampler
        )
        _built_in[style, thinking] = await collector.collect(TASKS, 0, 4)
    return _built_in[style, thinking]


_built_in: dict[tuple[str, str], list[Group]] = {}


async def played_by(agent: Agent, world: World, style: str, thinking: str) -> list[Group]:
    collector = replace(
        world.collector(
            "Say" if agent.names >= {"env"} else None,
            style,
            thinking,
            sampler=world.sampler(deterministic=False),
            format="plain",
            system_prompt=None,
            max_turns=MAX_TURNS,
            max_retries=0,
        ),
        agent=agent,
        gateway=HttpGateway(),
    )
    try:
        return await collector.collect(TASKS, 0, 4)
    finally:
        await collector.close()


def gradients(world: World, groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    """The gradients of a GRPO step on the groups. Rewards are the numbers of sampled tokens: those
    of the game are often the same in all of a group."""
    groups = deepcopy(groups)
    for trajectory in [t for group in groups for t in group.trajectories]:
        trajectory.reward = float(trajectory.num_sampled_tokens)
    algorithm = ALGORITHMS.build(Spec(name="grpo"), "rl.algorithm")
    samples = to_samples(algorithm.assign(groups))
    batch = pack(samples, algorithm.aggregate(samples), tokens_per_batch=4096, pad_id=0)
    model = deepcopy(world.model).train()
    Learner(model, OptimizerConfig(), num_steps=1).forward_backward(batch, algorithm.loss)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_equal(world: World, expected: list[Group], found: list[Group]) -> None:
    """Token ids, masks, log-probabilities, rewards; then the gradients."""
    for one, other in pairs(expected, found):
        assert (other.reward, other.status) == (one.reward, one.status), other.error
        for row, same in zip(rows(one, 1.0), rows(other, 1.0), strict=True):
            assert (same.token_ids, same.loss_mask) == (row.token_ids, row.loss_mask)
            assert same.logprobs == pytest.approx(row.logprobs, abs=1e-5)
    grads, others = gradients(world, expected), gradients(world, found)
    assert max(float(g.abs().max()) for g in grads.values()) > 1e-3
    for name, gradient in grads.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-5, rtol=0)


def pairs(expected: list[Group], found: list[Group]) -> list[tuple[Trajectory, Trajectory]]:
    return [
        pair
        for a, b in zip(expected, found, strict=True)
        for pair in zip(a.trajectories, b.trajectories, strict=True)
    ]


def is_whole(trajectory: Trajectory) -> bool:
    """True if each turn has a text or a call: some frameworks drop others from the history."""
    turns = [s.message for s in trajectory.segments if s.sampled and s.message]
    return all(turn.content or turn.tool_calls for turn in turns)


def is_well_formed(trajectory: Trajectory) -> bool:
    """True if the game alone answered: the built-in loop tells what is wrong with a turn that
    cannot be read, such as an unfinished `<think>`, and a program does not. How many of them the
    policy writes depends on the processor's rounding."""
    told = [s.message.content for s in trajectory.segments if s.message and not s.sampled]
    return all(text == "plain" or SAID.fullmatch(text) for text in told)


def only(kept: set[str], groups: list[Group]) -> list[Group]:
    """The groups without other trajectories than those with these ids."""
    found = deepcopy(groups)
    for group in found:
        group.trajectories = [t for t in group.trajectories if t.id in kept]
    return found


EVERY = [(api, *style) for api in APIS for style in STYLES]
HARDEST = [case for case in EVERY if case[0] == "model.chat" or case[1:] in STYLES[2:]]


@pytest.mark.parametrize(("api", "style", "thinking"), variants(EVERY, HARDEST))
async def test_apis(taught: World, api: str, style: str, thinking: str) -> None:
    expected = await built_in(taught, style, thinking)
    assert any(t.num_turns > 2 for group in expected for t in group.trajectories)
    agent = agent_of(talking(APIS[api]), taught, style, thinking)
    check_equal(taught, expected, await played_by(agent, taught, style, thinking))


@pytest.mark.parametrize(
    ("style", "thinking"),
    [pytest.param(*s, marks=[pytest.mark.slow] * (s[0] != "tools")) for s in STYLES],
)
@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.filterwarnings("ignore")
async def test_frameworks(taught: World, name: str, style: str, thinking: str) -> None:
    pytest.importorskip(name, reason="needs the extra agents")
    expected = await built_in(taught, style, thinking)
    found = await played_by(
        agent_of(FRAMEWORKS[name], taught, style, thinking), taught, style, thinking
    )
    kept = {t.id for group in expected for t in group.trajectories if is_whole(t)}
    assert len(kept) >= 12
    check_equal(taught, only(kept, expected), only(kept, found))


async def test_a_command(taught: World, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    spec = Spec(name="command", args={"command": ["{python}", "-S", "-E", str(program)]})
    expected = await built_in(taught, "plain", "keep")
    found = await played_by(Agent.build(spec), taught, "plain", "keep")
    kept = {t.id for group in expected for t in group.trajectories if is_well_formed(t)}
    assert len(kept) >= 6
    check_equal(taught, only(kept, expected), only(kept, found))
