"""The loop: supervised and reinforcement learning, steps without a gradient, what is recorded."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from loop_helpers import LEVERS, PLACES, Recording, World, task

from ludus.core.errors import ConfigError, TrainingError
from ludus.core.types import (
    DOES_NOT_TRAIN,
    Group,
    Score,
    Segment,
    Spec,
    Status,
    Task,
    Trajectory,
)
from ludus.loop.loop import run_stage, share_that_trains
from ludus.loop.metrics import group_metrics, score_metrics
from ludus.rollout.source import SyncSource
from ludus.tasks.curriculum import TaskSampler
from ludus.telemetry.metrics import NAME
from ludus.telemetry.occupancy import PARTS
from ludus.train import ALGORITHMS
from ludus.train.algorithms.base import Assignment
from ludus.train.batches.minibatches import train_metrics

EVERYTHING = [(place, lever) for place in PLACES for lever in LEVERS]
ALWAYS = {
    "rollout/episodes",
    "rollout/excluded",
    "rollout/retries",
    "rollout/tokens",
    "rollout/sampled_tokens",
    "rollout/groups_with_signal",
    "rollout/rounds",
    "tasks/epoch",
    "train/groups_with_advantage",
    "train/optimizer_steps",
    "train/policy_version",
    "time/rollout_s",
    "time/train_s",
    "time/step_s",
    "time/cpu_s",
    "time/wall_s",
    "time/tokens_per_s",
    *(f"time/{part}_s" for part in PARTS),
}
SCORED = {"rollout/reward", "rollout/success", "rollout/turns", "rollout/truncated"} | {
    "tasks/reward_all",
    "rollout/groups_failed",
    "rollout/groups_solved",
    "rollout/truncated_turns",
    "rollout/truncated_length",
    "rollout/truncated_context",
}
OF_ENDS = {"rollout/turns_of_success", "rollout/turns_of_truncated"}
"""Of a step with such episodes."""
TRAINED = {
    f"train/{name}"
    for name in (
        "loss",
        "entropy",
        "ratio",
        "kl",
        "first_kl",
        "clip_fraction",
        "grad_norm",
        "lr",
        "padding",
    )
} | {"train/tokens", "train/unique_tokens", "train/loss_tokens", "train/staleness"}


def weights(world: World) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in world.backend.model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def answer(trajectory: Trajectory) -> str:
    return next(s.message.content for s in trajectory.segments if s.sampled and s.message)


async def answers(world: World, place: str, temperature: float) -> list[str]:
    collector = world.collector(temperature=temperature)
    [group] = await collector.collect([task(place)], 0, 32 if temperature else 1)
    return [answer(trajectory) for trajectory in group.trajectories]


async def test_demonstrations_are_memorised(tmp_path: Path) -> None:
    world, kept = World(tmp_path), Recording()
    lever_of = {place: LEVERS[i % 4] for i, place in enumerate(PLACES)}
    stage = world.sft(list(lever_of.items()), steps=60)
    await run_stage(stage, world.backend, kept)
    assert [(stage, step) for stage, step, _, _ in kept.steps] == [("sft", i) for i in range(60)]
    losses = kept.metric("train/loss")
    assert losses[-1] < 0.05 < 2 < losses[0]
    assert kept.metric("train/policy_version") == list(range(1, 61))
    for place, lever in lever_of.items():
        assert await answers(world, place, temperature=0) == [lever]


async def taught(folder: Path) -> World:
    """A policy that pulls any lever: what reinforcement learning starts from."""
    world = World(folder)
    await run_stage(world.sft(EVERYTHING, steps=30), world.backend, Recording())
    return world


async def test_grpo_finds_the_lever_that_pays(tmp_path: Path) -> None:
    world, kept = await taught(tmp_path), Recording()
    before = await answers(world, "hall", temperature=1)
    assert before.count("green") < 20
    stage = world.rl([task(place) for place in PLACES], steps=14)
    await run_stage(stage, world.backend, kept)
    success = kept.metric("rollout/success")
    assert sum(success[:2]) / 2 < 0.6
    assert success[-1] > 0.9
    assert (await answers(world, "hall", temperature=1)).count("green") > 28
    metrics = kept.steps[0][3]
    assert metrics.keys() - OF_ENDS == ALWAYS | SCORED | TRAINED
    assert metrics["rollout/episodes"] == 24
    assert metrics["train/ratio"] == pytest.approx(1, abs=1e-3)
    assert metrics["train/policy_version"] == 31  # thirty of them were supervised
    for _, step, groups, _ in kept.steps:
        assert [group.id for group in groups] == [f"rl-{step:06d}/g{i:04d}" for i in range(3)]
        versions = {s.policy_version for g in groups for t in g.trajectories for s in t.segments}
        assert versions == {None, 30 + step}
        for group in groups:
            means = [
                sum(x for s in t.segments for x in s.advantages or ()) for t in group.trajectories
            ]
            rewards = [t.reward or 0.0 for t in group.trajectories]
            assert (max(means) > 0) == (min(means) < 0) == (len(set(rewards)) > 1)
            assert means.index(max(means)) == rewards.index(max(rewards))
            for segment in (s for t in group.trajectories for s in t.segments):
                assert (segment.advantages is not None) == segment.sampled


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "rloo"])
@pytest.mark.parametrize("pays", ["all", "none", "broken"])
async def test_a_step_without_a_gradient(tmp_path: Path, algorithm: str, pays: str) -> None:
    """All the same reward, or nothing but failures: recorded, published, not trained on."""
    world, kept = await taught(tmp_path), Recording()
    before = weights(world)
    stage = world.rl([task(place, pays=pays) for place in PLACES], 2, algorithm)
    await run_stage(stage, world.backend, kept)
    assert same(weights(world), before)
    assert world.backend.learner.step == 0
    assert not world.backend.learner.optimizer.state
    names = ALWAYS if pays == "broken" else ALWAYS | SCORED
    assert [metrics.keys() - OF_ENDS for _, _, _, metrics in kept.steps] == [names] * 2
    assert kept.metric("train/optimizer_steps") == [0, 0]
    assert kept.metric("train/policy_version") == [31, 32]
    rounds = 4 if algorithm == "dapo" else 1  # DAPO samples on in search of a signal
    assert kept.metric("rollout/rounds") == [rounds] * 2
    assert kept.metric("rollout/episodes") == [24 * rounds] * 2
    excluded = 24 * rounds if pays == "broken" else 0
    assert kept.metric("rollout/excluded") == [excluded] * 2
    reasons = {t.dropped for _, _, gs, _ in kept.steps for g in gs for t in g.trajectories}
    if pays == "broken":
        assert len(reasons) == 1
        assert "out of order" in str(reasons)
    elif algorithm == "dapo":
        assert reasons == {f"no signal: all rewards of the group are {float(pays == 'all')}"}
    else:
        assert reasons == {None}


async def test_an_entropy_bonus_trains_where_rewards_are_equal(tmp_path: Path) -> None:
    world, kept = await taught(tmp_path), Recording()
    row = Spec(name="grpo", args={"entropy_bonus": 0.1})
    stage = world.rl([task(place, pays="all") for place in PLACES], 4, row)
    await run_stage(stage, world.backend, kept)
    assert kept.metric("train/optimizer_steps") == [1] * 4
    entropies = kept.metric("train/entropy")
    assert entropies[-1] > entropies[0] + 0.01


async def test_an_entropy_target_switches_the_bonus_off_above_it(tmp_path: Path) -> None:
    async def metrics_with(target: float) -> Recording:
        world, kept = await taught(tmp_path / str(target)), Recording()
        row = Spec(name="grpo", args={"entropy_bonus": 0.1, "entropy_target": target})
        stage = world.rl([task(place, pays="all") for place in PLACES], 3, row)
        await run_stage(stage, world.backend, kept)
        return kept

    above = await metrics_with(1e-6)
    assert above.metric("train/optimizer_steps") == [0] * 3
    assert above.metric("train/entropy_bonus") == [0] * 3
    below = await metrics_with(100.0)
    assert below.metric("train/optimizer_steps") == [1] * 3
    assert all(0.09 < weight <= 0.1 for weight in below.metric("train/entropy_bonus"))
    entropies = below.metric("train/entropy")
    assert entropies[-1] > entropies[0]


def test_an_entropy_target_without_a_bonus_is_refused() -> None:
    with pytest.raises(ConfigError, match="no effect without an entropy_bonus"):
        ALGORITHMS.build(Spec(name="grpo", args={"entropy_target": 0.1}))
    for value in (math.inf, math.nan):
        endless = Spec(name="grpo", args={"entropy_bonus": 0.1, "entropy_target": value})
        with pytest.raises(ConfigError, match=r"entropy_target must be a finite number > 0.*, got"):
            ALGORITHMS.build(endless)


async def test_a_group_without_signal_does_not_hold_back_the_others(tmp_path: Path) -> None:
    """One group of three teaches; the others are counted."""
    world, kept = await taught(tmp_path), Recording()
    before = weights(world)
    tasks = [task("hall"), task("roof", pays="all"), task("yard", pays="broken")]
    await run_stage(world.rl(tasks, 1), world.backend, kept)
    assert not same(weights(world), before)
    assert kept.metric("train/optimizer_steps") == [1]
    assert kept.metric("rollout/groups_with_signal") == [1 / 3]
    assert kept.metric("train/groups_with_advantage") == [1 / 3]
    assert kept.metric("rollout/excluded") == [8]


async def test_epochs_and_minibatches_are_optimizer_steps(tmp_path: Path) -> None:
    world, kept = await taught(tmp_path), Recording()
    stage = world.rl([task(place) for place in PLACES], 2, epochs=2, minibatches=3)
    assert stage.settings.optimizer_steps == 12
    await run_stage(stage, world.backend, kept)
    assert kept.metric("train/optimizer_steps") == [6, 6]
    assert world.backend.learner.step == 12
    assert world.backend.learner.num_steps == 12
    assert kept.metric("train/policy_version") == [31, 32]
    assert kept.metric("train/ratio")[0] != pytest.approx(1, abs=1e-6)  # later parts are off-policy


async def test_runs_repeat_themselves_and_their_middle_can_be_resumed(tmp_path: Path) -> None:
    async def run(folder: str, stop: int | None) -> tuple[World, Recording]:
        world, kept = await taught(tmp_path / folder), Recording()
        stage = world.rl([task(place) for place in PLACES], 4, minibatches=2)
        saved = {}

        async def after_step(done: int) -> bool:
            if done == stop:
                saved["path"] = world.backend.save(
                    "rl", done, stage.source.state_dict(), None, pin=False
                )
            return done != stop

        stage.after_step = after_step
        await run_stage(stage, world.backend, kept)
        if stop is None:
            return world, kept
        again = World(tmp_path / folder / "again", seed=9)
        stage = again.rl([task(place) for place in PLACES], 4, minibatches=2)
        stage.source.load_state_dict(again.backend.load(saved["path"]))
        await run_stage(stage, again.backend, kept, start=stop)
        return again, kept

    whole, expected = await run("whole", None)
    pieced, kept = await run("pieced", 2)
    assert same(weights(pieced), weights(whole))
    assert [step for _, step, _, _ in kept.steps] == [0, 1, 2, 3]
    for (_, _, groups, metrics), (_, _, wanted, reference) in zip(
        kept.steps, expected.steps, strict=True
    ):
        assert [[t.segments for t in g.trajectories] for g in groups] == [
            [t.segments for t in g.trajectories] for g in wanted
        ]
        assert {n: v for n, v in metrics.items() if not n.startswith("time/")} == {
            n: v for n, v in reference.items() if not n.startswith("time/")
        }


async def test_a_stage_ends_when_after_step_says_so(tmp_path: Path) -> None:
    world, kept = World(tmp_path), Recording()
    done: list[int] = []

    async def after_step(complete: int) -> bool:
        assert len(kept.steps) == complete  # recorded first
        done.append(complete)
        return complete < 2

    stage = world.sft(EVERYTHING, steps=5, after_step=after_step)
    await run_stage(stage, world.backend, kept)
    assert done == [1, 2]


async def test_diverged_weights_stop_the_stage(tmp_path: Path) -> None:
    world, kept = await taught(tmp_path), Recording()
    stage = world.rl([task(place) for place in PLACES], 1)
    healthy = copy.deepcopy(world.backend.model.state_dict())
    with torch.no_grad():
        next(world.backend.model.parameters()).fill_(float("nan"))
    world.backend.sampler.publish(world.backend.policy_version)
    with pytest.raises(TrainingError, match="logits are not finite"):
        await run_stage(stage, world.backend, kept)
    assert not kept.steps
    world.backend.model.load_state_dict(healthy)
    world.backend.sampler.publish(world.backend.policy_version)
    await run_stage(stage, world.backend, kept)
    assert len(kept.steps) == 1


def test_score_metrics_by_hand() -> None:
    turn = Segment(0, [1, 2], [-1.0, -2.0])
    turn.learner_logprobs, turn.ref_logprobs = [-1.5, -1.75], [-1.0, -2.0]
    trajectory = Trajectory("t", "g", "task", [Segment(-1, [5]), turn])
    groups = [Group("g", Task(id="task"), [trajectory])]
    assert score_metrics(groups) == {
        "train/sampler_gap": (0.5 + 0.25) / 2,
        "train/reference_gap": (-0.5 + 0.25) / 2,
    }
    turn.learner_logprobs = None
    assert score_metrics(groups) == {"train/reference_gap": 0.0}


def test_metrics_of_nothing() -> None:
    assert score_metrics([]) == {}
    assert train_metrics([]) == {"train/optimizer_steps": 0}
    kls = train_metrics([{"kl": 0.25}, {"kl": 0.75}])
    assert kls == {"train/kl": 0.5, "train/first_kl": 0.25, "train/optimizer_steps": 2}
    assert train_metrics([{"loss": 1.0}, {"loss": 2.0}]) == {
        "train/loss": 1.5,
        "train/optimizer_steps": 2,
    }
    assert group_metrics([])["rollout/groups_with_signal"] == 0


async def test_the_time_of_a_step_is_split(tmp_path: Path) -> None:
    """An environment and a judge that sleep while nobody computes: their time is told apart."""
    world, kept = World(tmp_path), Recording()
    stage = world.rl([task("hall")], steps=2, groups_per_step=1)
    env = Spec(name="loop_helpers:SleepyBandit", args={"seconds": 0.05})
    play = world.play(1, env=env, judge=sleepy_judge)
    stage.source = SyncSource(TaskSampler([task("hall")]), play)
    await run_stage(stage, world.backend, kept)
    for _, _, _, metrics in kept.steps:
        assert metrics["time/env_wait_s"] >= 0.05
        assert metrics["time/judge_s"] >= 0.05
        assert metrics["time/sample_s"] > 0
        parts = [metrics[f"time/{part}_s"] for part in PARTS]
        assert sum(parts) == pytest.approx(metrics["time/wall_s"])
        assert metrics["time/wall_s"] >= metrics["time/step_s"]


async def sleepy_judge(task: Task, trajectory: Trajectory) -> Score:
    await asyncio.sleep(0.05)
    return Score(value=float(len(trajectory.segments)))


def test_parts_of_scores_are_averaged_over_the_episodes_that_have_them() -> None:
    scores = [{"a": 1.0, "b": 0.5}, {"a": 0.0}, {"a": math.inf}, {"a": 7.0}]
    trajectories = [
        Trajectory(str(i), "g", "t", reward=1.0, scores=parts) for i, parts in enumerate(scores)
    ]
    trajectories[-1].status = Status.UNSCORABLE
    metrics = group_metrics([Group("g", Task(id="t"), trajectories)])
    assert {k: v for k, v in metrics.items() if k.startswith("score/")} == {
        "score/a": 0.5,
        "score/b": 0.5,
    }


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("exact match (%)", "score/exact_match_"),
        ("math/correct", "score/math/correct"),
        ("", "score/_"),
        ("/a//b/", "score/_a_/b_"),
        ("größe\n", "score/gr_e_"),
    ],
)
def test_names_of_scores_become_names_of_metrics(name: str, metric: str) -> None:
    trajectory = Trajectory("0", "g", "t", reward=1.0, scores={name: 0.5})
    metrics = group_metrics([Group("g", Task(id="t"), [trajectory])])
    assert metrics[metric] == 0.5
    assert NAME.fullmatch(metric)


def played(name: str, group: str, reward: float, role: str = "agent") -> Trajectory:
    turn = Segment(0, [9, 9], [-1.0, -1.0])
    return Trajectory(name, group, "hall", [Segment(-1, [1]), turn], role=role, reward=reward)


def of_rewards(*groups: Sequence[float]) -> list[Group]:
    return [
        Group(f"g{n}", task("hall"), [played(f"{n}{k}", f"g{n}", r) for k, r in enumerate(rewards)])
        for n, rewards in enumerate(groups)
    ]


@pytest.mark.parametrize(
    ("name", "groups", "share"),
    [
        ("grpo", [(0.7,) * 6, (0.1,) * 6], 0.0),  # their advantages are 1e-12
        ("grpo", [(1.0, 0.0), (0.0, 0.0)], 0.5),
        ("dapo", [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0)], 1 / 3),  # two are left out before
        ("gigpo", [(1.0, 0.0), (0.0, 0.0)], 0.5),
        ("reinforce_pp_baseline", [(1.0, 0.0, 0.0), *[(0.0,) * 3] * 3], 0.25),
        ("reinforce_pp", [(1.0,), (0.0,)], 1.0),
        ("reinforce_pp", [(0.0,), (0.0,)], 0.0),
    ],
)
def test_groups_that_train_are_counted(
    name: str, groups: list[Sequence[float]], share: float
) -> None:
    algorithm, made = ALGORITHMS.build(name), of_rewards(*groups)
    assert share_that_trains(algorithm, made, algorithm.assign(made)) == pytest.approx(share)


def test_groups_that_train_are_counted_by_role() -> None:
    algorithm = ALGORITHMS.build("grpo")
    wolves = Group("g", task("hall"), [played("a", "g", 1.0, "wolf"), played("b", "g", 0, "wolf")])
    hunters = Group("g", task("hall"), [played(n, "g", 1.0, "hunter") for n in "cd"])
    fixed = played("e", "g", 1.0, "referee")
    fixed.dropped = f"the policy 'referee' {DOES_NOT_TRAIN}"
    groups = [wolves, hunters, Group("g", task("hall"), [fixed])]
    assert share_that_trains(algorithm, groups, algorithm.assign(groups[:2])) == 0.5
    assert share_that_trains(algorithm, [], Assignment([], {})) == 0.0
