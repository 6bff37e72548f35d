"""The rollout is the unit, however many rows, turns or branches it has."""

from __future__ import annotations

import math

import pytest

from ludus.core.types import Group, Sample, Segment, Task, Trajectory
from ludus.train import ALGORITHMS
from ludus.train.batches.samples import to_samples


def trajectory(name: str, reward: float, branches: int) -> Trajectory:
    """A prompt, a sampled turn, then `branches` sampled turns that all answer it."""
    segments = [Segment(-1, [5, 6, 7]), Segment(0, [8, 9], logprobs=[-0.1, -0.7], policy_version=3)]
    for branch in range(branches):
        segments.append(Segment(1, [3]))
        tail = Segment(len(segments) - 1, [2, branch], logprobs=[-0.2, -0.3], policy_version=3)
        segments.append(tail)
    return Trajectory(name, "g", "t", segments=segments, reward=reward)


def group(branches: int) -> Group:
    members = [trajectory("a", 1.0, branches), trajectory("b", 0.0, 1), trajectory("c", 0.0, 1)]
    return Group("g", Task(id="t"), members)


def weight_of(samples: list[Sample], weights: list[list[float]], name: str) -> float:
    rows = zip(samples, weights, strict=True)
    return math.fsum(w for sample, row in rows if sample.trajectory_id == name for w in row)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo"])
def test_branches_do_not_move_the_baseline(name: str):
    algorithm = ALGORITHMS.build(name)
    one, many = (dict(_by_id(to_samples(algorithm.assign([group(n)])))) for n in (1, 5))
    assert one == many
    assert one["a"] > 0 > one["b"]


def _by_id(samples: list[Sample]) -> list[tuple[str, float]]:
    return [
        (sample.trajectory_id, advantage)
        for sample in samples
        for advantage, trains in zip(sample.advantages, sample.loss_mask, strict=True)
        if trains
    ]


@pytest.mark.parametrize("branches", [1, 2, 5])
def test_a_trajectory_weighs_the_same_however_many_rows_it_gives(branches: int):
    algorithm = ALGORITHMS.build("grpo")
    samples = to_samples(algorithm.assign([group(branches)]))
    assert len([s for s in samples if s.trajectory_id == "a"]) == branches
    weights = algorithm.aggregate(samples)
    assert [weight_of(samples, weights, name) for name in "abc"] == pytest.approx([1 / 3] * 3)


def test_a_token_that_rows_share_trains_once():
    samples = to_samples(ALGORITHMS.build("grpo").assign([group(5)]))
    assert sum(s.num_loss_tokens for s in samples if s.trajectory_id == "a") == 2 + 5 * 2
