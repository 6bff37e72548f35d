"""Every row of the table finds the lever that pays; what it needs besides the policy is kept."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_helpers import LEVERS, PLACES, Recording, World, task

from ludus.core.errors import CheckpointError, ConfigError
from ludus.core.types import Group, Segment, Spec, Task, Trajectory
from ludus.loop.loop import run_stage
from ludus.train import ALGORITHMS
from ludus.train.algorithms.base import Assignment
from ludus.train.reference import Reference

TASKS = [task(place) for place in PLACES]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights that pull any lever."""
    world = World(tmp_path_factory.mktemp("taught"))
    stage = world.sft([(place, lever) for place in PLACES for lever in LEVERS], steps=30)
    asyncio.run(run_stage(stage, world.backend, Recording()))
    return copy.deepcopy(world.backend.model.state_dict())


def world_of(folder: Path, taught: dict[str, Any]) -> World:
    world = World(folder)
    world.backend.model.load_state_dict(taught)
    world.backend.sampler.publish(world.backend.policy_version)
    return world


ROWS = [name for name in ALGORITHMS.names() if name not in ("sft", "grpo")]


@pytest.mark.parametrize("name", ROWS)
async def test_a_row_finds_the_lever_that_pays(
    name: str, tmp_path: Path, taught: dict[str, Any]
) -> None:
    world, kept = world_of(tmp_path, taught), Recording()
    row = Spec(name=name, args={"max_rounds": 1} if name == "dapo" else {})
    tasks = [task.model_copy(update={"consistency": 0.5}) for task in TASKS]
    stage = world.rl(tasks, 10, row, minibatches=2)
    await run_stage(stage, world.backend, kept)
    success = kept.metric("rollout/success")
    assert sum(success[:2]) / 2 < 0.6
    assert sum(success[-2:]) / 2 > 0.85, success


@pytest.mark.parametrize(
    "spec",
    [
        Spec(name="grpo", args={"kl_coefficient": 0.05}),
        Spec(name="rloo", args={"kl_coefficient": 0.02, "kl_kind": "k1", "kl_in": "reward"}),
        Spec(name="grpo", args={"importance_cap": 2, "importance_level": "trajectory"}),
        Spec(name="ppo", args={"level": "turn", "kl_coefficient": 0.05, "kl_in": "reward"}),
    ],
    ids=lambda spec: "-".join(map(str, [spec.name, *spec.args.values()])),
)
async def test_terms_do_not_keep_a_row_from_learning(
    spec: Spec, tmp_path: Path, taught: dict[str, Any]
) -> None:
    world, kept = world_of(tmp_path, taught), Recording()
    stage = world.rl(TASKS, 10, spec)
    await run_stage(stage, world.backend, kept)
    assert sum(kept.metric("rollout/success")[-2:]) / 2 > 0.85


async def test_a_strong_divergence_term_holds_the_policy(
    tmp_path: Path, taught: dict[str, Any]
) -> None:
    """The policy stays near its reference if the penalty outweighs the reward."""
    ends = []
    for coefficient in (0.0, 3.0):
        world, kept = world_of(tmp_path / str(coefficient), taught), Recording()
        args = {"kl_coefficient": coefficient, "kl_kind": "k3_corrected"}
        stage = world.rl(TASKS, 8, Spec(name="grpo", args=args))
        await run_stage(stage, world.backend, kept)
        ends.append(sum(kept.metric("rollout/success")[-2:]) / 2)
        if coefficient:
            divergences = kept.metric("train/reference_kl")
            assert divergences[0] == pytest.approx(0, abs=1e-5)  # it is its own reference
            assert max(divergences) < 0.3
    assert ends[1] < ends[0] - 0.2


# Scoring


async def test_scores_are_the_models_own(tmp_path: Path, taught: dict[str, Any]) -> None:
    """With the sampler's weights, learner, reference and sampler agree."""
    world, kept = world_of(tmp_path, taught), Recording()
    args = {"kl_coefficient": 0.1, "importance_cap": 2}
    await run_stage(world.rl(TASKS, 1, Spec(name="ppo", args=args)), world.backend, kept)
    turns = [
        s for _, _, gs, _ in kept.steps for g in gs for t in g.trajectories for s in t.segments
    ]
    turns = [segment for segment in turns if segment.sampled]
    assert len(turns) == 24
    for segment in turns:
        assert segment.ref_logprobs == pytest.approx(segment.logprobs, abs=1e-4)
        assert segment.learner_logprobs == pytest.approx(segment.logprobs, abs=1e-4)
        assert segment.values == [0.0] * (len(segment.token_ids) + 1)  # a critic starts from 0
    [gap], [drift] = kept.metric("train/sampler_gap"), kept.metric("train/reference_gap")
    assert 0 <= gap < 1e-4
    assert abs(drift) < 1e-4


async def test_values_are_those_of_the_states_before_each_token(
    tmp_path: Path, taught: dict[str, Any]
) -> None:
    world = world_of(tmp_path, taught)
    stage = world.rl(TASKS, 1, "ppo")
    groups = await stage.source.take(2, 0, 0)
    critic = world.backend.learner.critic
    assert critic is not None
    with torch.no_grad():
        critic.head.weight.normal_()
    scored = await world.backend.score(groups, stage.algorithm)
    assert all(s.values is None for g in groups for t in g.trajectories for s in t.segments)
    for trajectory in (t for group in scored for t in group.trajectories):
        last = next(i for i, s in enumerate(trajectory.segments) if s.sampled)
        ids = trajectory.token_ids(last)
        output = world.backend.model.model(input_ids=torch.tensor([ids]))
        with torch.no_grad():
            values = critic(output.last_hidden_state[0]).tolist()
        count = len(trajectory.segments[last].token_ids)
        assert trajectory.segments[last].values == pytest.approx(values[-count - 1 :], abs=1e-4)


async def test_values_of_several_turns_and_branches(tmp_path: Path) -> None:
    """P0 - A0 - E0 - A1 and, from A0 on, E1 - A2: each state has its value once."""
    world = World(tmp_path)
    algorithm = world.rl(TASKS, 1, "ppo").algorithm
    critic = world.backend.learner.critic
    assert critic is not None
    with torch.no_grad():
        critic.head.weight.normal_()
    tree = Trajectory("a", "g", "t", reward=0.0)
    tree.segments = [
        Segment(-1, [5, 6]),
        Segment(0, [7, 8], [-1.0, -1.0]),
        Segment(1, [9]),
        Segment(2, [4], [-1.0]),
        Segment(1, [3, 3]),
        Segment(4, [2, 10], [-1.0, -1.0]),
    ]
    groups = [Group("g", Task(id="t"), [tree])]
    [[tree]] = [group.trajectories for group in await world.backend.score(groups, algorithm)]
    for leaf, index, start in ((3, 1, 2), (3, 3, 5), (5, 5, 6)):
        output = world.backend.model.model(input_ids=torch.tensor([tree.token_ids(leaf)]))
        with torch.no_grad():
            values = critic(output.last_hidden_state[0]).tolist()
        segment = tree.segments[index]
        expected = values[start - 1 : start + len(segment.token_ids)]
        assert segment.values == pytest.approx(expected, abs=1e-5)
        assert len(expected) == len(segment.token_ids) + 1
    assert [tree.segments[i].values for i in (0, 2, 4)] == [None] * 3


async def test_the_critic_learns_what_episodes_are_worth(
    tmp_path: Path, taught: dict[str, Any]
) -> None:
    world, kept = world_of(tmp_path, taught), Recording()
    row = Spec(name="ppo", args={"critic_lr": 0.03, "value_clip": 10})
    stage = world.rl([task(place, pays="all") for place in PLACES], 8, row, epochs=2)
    await run_stage(stage, world.backend, kept)
    errors = kept.metric("train/value_error")
    assert errors[0] > 0.5
    assert errors[-1] < 0.1


# Dynamic sampling


async def test_sampling_goes_on_until_there_are_groups_enough(
    tmp_path: Path, taught: dict[str, Any]
) -> None:
    world, kept = world_of(tmp_path, taught), Recording()
    tasks = [task("hall", pays="all"), task("roof"), task("yard", pays="none"), task("attic")]
    stage = world.rl(tasks, 2, Spec(name="dapo", args={"max_rounds": 9}), groups_per_step=2)
    await run_stage(stage, world.backend, kept)
    for number, (_, _, groups, metrics) in enumerate(kept.steps):
        assert [group.id for group in groups] == [
            f"rl-{number:06d}/g{i:04d}" for i in range(len(groups))
        ]
        signal = [g for g in groups if any(t.dropped is None for t in g.trajectories)]
        assert len(signal) == 2
        assert {g.task.id.partition("/")[2] for g in signal} == {"green"}
        assert 1 < metrics["rollout/rounds"] <= 9
        left_out = {t.dropped for g in groups if g not in signal for t in g.trajectories}
        assert all(str(reason).startswith("no signal: all rewards") for reason in left_out)


async def test_sampling_ends_without_a_signal(tmp_path: Path, taught: dict[str, Any]) -> None:
    world, kept = world_of(tmp_path, taught), Recording()
    stage = world.rl(
        [task(place, pays="none") for place in PLACES],
        1,
        Spec(name="dapo", args={"max_rounds": 3}),
    )
    await run_stage(stage, world.backend, kept)
    assert kept.metric("rollout/rounds") == [3]
    assert kept.metric("train/optimizer_steps") == [0]


async def test_sampling_on_trains_on_what_there_is(tmp_path: Path, taught: dict[str, Any]) -> None:
    world, kept = world_of(tmp_path, taught), Recording()
    tasks = [task("hall"), *(task(place, pays="none") for place in PLACES[1:])]
    stage = world.rl(tasks, 1, Spec(name="dapo", args={"max_rounds": 2}))
    await run_stage(stage, world.backend, kept)
    assert kept.metric("train/optimizer_steps") == [1]
    assert kept.metric("rollout/rounds") == [2]


# Resuming


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        pytest.param(Spec(name="ppo", args={"critic_lr": 0.01}), {}, id="ppo"),
        pytest.param(Spec(name="grpo", args={"kl_coefficient": 0.5}), {}, id="grpo"),
        pytest.param(Spec(name="dapo"), {}, id="dapo"),
        pytest.param(Spec(name="grpo"), {"target_kl": 1e-3, "minibatches": 2}, id="target_kl"),
    ],
)
async def test_a_resumed_run_ends_with_the_same_bits(
    spec: Spec, options: dict[str, Any], tmp_path: Path, taught: dict[str, Any]
) -> None:
    """Critic, reference, scale of the learning rate and the order of tasks included."""
    whole, expected = world_of(tmp_path / "whole", taught), Recording()
    await run_stage(whole.rl(TASKS, 4, spec, **options), whole.backend, expected)

    first, kept = world_of(tmp_path / "pieces", taught), Recording()
    stage = first.rl(TASKS, 4, spec, **options)
    saved = {}

    async def after_step(done: int) -> bool:
        saved["path"] = first.backend.save("rl", done, stage.source.state_dict(), None, pin=False)
        return done < 2

    stage.after_step = after_step
    await run_stage(stage, first.backend, kept)
    again = World(tmp_path / "pieces", seed=9)  # other weights: all comes from the checkpoint
    stage = again.rl(TASKS, 4, spec, **options)
    stage.source.load_state_dict(again.backend.load(saved["path"]))
    await run_stage(stage, again.backend, kept, start=2)
    for name in ("rollout/reward", "train/loss", "train/grad_norm", "train/lr"):
        assert kept.metric(name) == expected.metric(name)
    pairs = zip(whole.backend.model.parameters(), again.backend.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


async def test_a_reference_that_is_missing_or_another_is_refused(
    tmp_path: Path, taught: dict[str, Any]
) -> None:
    spec = Spec(name="grpo", args={"kl_coefficient": 0.5})
    world = world_of(tmp_path, taught)
    world.rl(TASKS, 1, spec)
    path = world.backend.save("rl", 0, {}, None, pin=True)
    other = World(tmp_path, seed=5)
    other.rl(TASKS, 1, spec)
    other.backend.save("rl", 2, {}, None, pin=False)  # overwrites the folder's reference
    with pytest.raises(CheckpointError, match="another reference model than the run trained with"):
        world.backend.load(path)
    bare = world_of(tmp_path, taught)
    bare.rl(TASKS, 1, "grpo")
    without = bare.backend.save("rl", 3, {}, None, pin=False)
    with pytest.raises(CheckpointError, match="written without a reference model"):
        world.backend.load(without)
    for file in (tmp_path / "reference" / "reference-000000").iterdir():
        file.unlink()
    (tmp_path / "reference" / "reference-000000").rmdir()
    with pytest.raises(CheckpointError, match="the reference model of this stage, is missing"):
        world.backend.load(path)


# Reference models


def test_a_reference_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    other = copy.deepcopy(world.backend.model)
    other.resize_token_embeddings(other.config.vocab_size + 3)
    with pytest.raises(ConfigError, match=r"kl_reference: that model has a vocabulary of \d+ tok"):
        Reference(world.backend.model, other)


def test_a_reference_is_named_by_its_folder(tmp_path: Path, taught: dict[str, Any]) -> None:
    world = world_of(tmp_path, taught)
    world.backend.model.save_pretrained(tmp_path / "base")
    args = {"kl_coefficient": 0.1, "kl_reference": str(tmp_path / "base")}
    world.rl(TASKS, 1, Spec(name="grpo", args=args))
    reference = world.backend.trainer._reference
    assert reference is not None
    assert not reference.copied
    assert not any(p.requires_grad for p in reference.model.parameters())
    with pytest.raises(ConfigError, match=r"rl.algorithm.args.kl_reference: .*absent"):
        world.rl(TASKS, 1, Spec(name="grpo", args={**args, "kl_reference": "absent"}))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_the_reference_of_adapters_is_the_model_without_them(
    tmp_path: Path, taught: dict[str, Any]
) -> None:
    from peft import LoraConfig, get_peft_model

    base = world_of(tmp_path, taught).backend.model
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = base(input_ids=ids).logits
    adapted = get_peft_model(copy.deepcopy(base), LoraConfig(target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    reference = Reference(adapted)
    assert (reference.adapters_off, reference.copied) == (True, False)
    with torch.no_grad(), reference.active():
        assert torch.equal(reference.model(input_ids=ids).logits, expected)
    assert not torch.allclose(adapted(input_ids=ids).logits, expected, atol=1e-2)
    assert any(p.requires_grad for p in adapted.parameters())
    assert reference.save(tmp_path / "reference") is None


async def test_no_trajectories_need_no_pass(tmp_path: Path, taught: dict[str, Any]) -> None:
    world = world_of(tmp_path, taught)
    algorithm = world.rl(TASKS, 1, "ppo").algorithm
    assert await world.backend.score([], algorithm) == []
    groups = [Group("g", Task(id="t"), [Trajectory("a", "g", "t", reward=0.0)])]
    assert await world.backend.score(groups, algorithm) == groups
    assert algorithm.assign(groups) == Assignment([], {"a": "no sampled token"})
