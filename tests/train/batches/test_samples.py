"""From trajectory trees to training rows, and their split into optimizer steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.types import Group, Sample, Segment, Task, Trajectory
from ludus.train.algorithms.aggregates import advantage_mean
from ludus.train.algorithms.base import Assignment
from ludus.train.algorithms.table import DR_GRPO, SFT
from ludus.train.batches.minibatches import split, staleness
from ludus.train.batches.samples import rows, to_samples

P0 = Segment(-1, [5, 6, 7])


def sampled(parent: int, ids: list[int], version: int = 0) -> Segment:
    return Segment(parent, ids, logprobs=[-i / 10 for i in ids], policy_version=version)


def trajectory(*segments: Segment, name: str = "t", reward: float | None = 1.0) -> Trajectory:
    return Trajectory(name, "g", "task", segments=list(segments), reward=reward)


def test_a_chain_by_hand() -> None:
    chain = trajectory(P0, sampled(0, [8, 9], 4), Segment(1, [3]), sampled(2, [2], 5))
    (row,) = rows(chain, 0.5)
    assert row.token_ids == [5, 6, 7, 8, 9, 3, 2] == chain.token_ids()
    assert row.loss_mask == [False, False, False, True, True, False, True]
    assert row.logprobs == [0, 0, 0, -0.8, -0.9, 0, -0.2]
    assert row.advantages == [0, 0, 0, 0.5, 0.5, 0, 0.5]
    assert (row.trajectory_id, row.group_id, row.policy_version) == ("t", "g", 4)
    assert row.num_loss_tokens == 3


def test_each_loss_token_has_its_version() -> None:
    first = replace(sampled(0, [8, 9, 9], 4), version_runs=[(4, 1), (6, 2)])
    chain = trajectory(P0, first, Segment(1, [3]), sampled(2, [2], 6))
    (row,) = rows(chain, 0.5)
    assert (row.policy_version, row.versions) == (4, [-1, -1, -1, 4, 6, 6, -1, 6])
    assert row.version_counts == {4: 1, 6: 3}
    assert [row.version_of(i) for i in (3, 4, 7)] == [4, 6, 6]
    assert staleness([row], 7) == (3 + 3 * 1) / 4
    turns = trajectory(P0, sampled(0, [8, 9], 4), Segment(1, [3], [0.0]))  # then a demonstration
    (row,) = rows(turns, 0.5)
    assert (row.policy_version, row.versions) == (4, [-1, -1, -1, 4, 4, -1])
    assert row.version_of(5) is None
    assert row.version_counts == {4: 2}


def test_one_version_needs_no_list() -> None:
    chain = trajectory(P0, sampled(0, [8, 9], 4), Segment(1, [3]), sampled(2, [2], 4))
    (row,) = rows(chain, 0.5)
    assert (row.policy_version, row.versions, row.version_counts) == (4, None, {4: 3})
    assert row.version_of(3) == 4
    assert staleness([row], 7) == 3


@pytest.mark.parametrize(
    ("version", "runs", "told"),
    [
        (4, [(4, 1), (5, 1)], "cover 2 tokens, not 3"),
        (4, [(4, 0), (5, 3)], "cover 3 tokens"),
        (5, [(4, 1), (5, 2)], "policy_version 5 is not the oldest"),
        (None, [(4, 3)], "policy_version None is not the oldest"),
    ],
)
def test_runs_that_contradict_the_tokens_are_refused(
    version: int | None, runs: list[tuple[int, int]], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Segment(0, [8, 9, 9], [0.0] * 3, policy_version=version, version_runs=runs)


def test_what_follows_the_last_sampled_token_is_left_out() -> None:
    (row,) = rows(trajectory(P0, sampled(0, [8, 9]), Segment(1, [3, 3, 3])), 1.0)
    assert row.token_ids == [5, 6, 7, 8, 9]


def test_a_shared_turn_trains_in_its_first_row_only() -> None:
    # P0 - A0 - E0 - A1
    #          \- E1 - A2
    tree = trajectory(
        P0,
        sampled(0, [8, 9], 1),
        Segment(1, [3]),
        sampled(2, [2], 2),
        Segment(1, [4]),
        sampled(4, [1, 1], 3),
    )
    first, second = rows(tree, 2.0)
    assert first.token_ids == [5, 6, 7, 8, 9, 3, 2]
    assert first.loss_mask == [False, False, False, True, True, False, True]
    assert second.token_ids == [5, 6, 7, 8, 9, 4, 1, 1]
    assert second.loss_mask == [False] * 6 + [True] * 2
    assert second.logprobs == [0.0] * 6 + [-0.1] * 2
    assert (first.policy_version, second.policy_version) == (1, 3)


def test_a_replaced_turn_trains_as_its_own_row() -> None:
    # The sampled A0 was replaced by the given A0': both hang on P0.
    first, second = rows(trajectory(P0, sampled(0, [8, 9]), Segment(0, [8]), sampled(2, [2])), 1.0)
    assert (first.token_ids, second.token_ids) == ([5, 6, 7, 8, 9], [5, 6, 7, 8, 2])
    assert second.loss_mask == [False, False, False, False, True]


def test_a_branch_without_sampled_tokens_gives_no_row() -> None:
    tree = trajectory(P0, sampled(0, [8]), Segment(1, [3]), Segment(1, [4]), sampled(0, []))
    assert len(rows(tree, 1.0)) == 1


def test_observations_can_train_with_a_weight_of_their_own() -> None:
    chain = trajectory(P0, sampled(0, [8, 9]), Segment(1, [3]), sampled(2, [2]), Segment(3, [4]))
    [row] = to_samples(Assignment([(chain, 1.0)], {}), observation_weight=0.2)
    assert row.token_ids == [5, 6, 7, 8, 9, 3, 2]  # what follows the last turn is left out
    assert row.loss_mask == [False, True, True, True, True, True, True]
    assert row.advantages == [0, 0.2, 0.2, 1, 1, 0.2, 1]
    assert advantage_mean([row]) == [[pytest.approx(a / 3.6) for a in row.advantages]]
    assert SFT.aggregate([row]) == [[0.0, *[1 / 6] * 6]]


def test_an_observation_that_two_rows_share_trains_once() -> None:
    tree = trajectory(P0, sampled(0, [8]), Segment(1, [3]), sampled(2, [2]), sampled(0, [1]))
    first, second = rows(tree, 1.0, observation_weight=0.5)
    assert first.loss_mask == [False, True, True, True, True, True]
    assert second.loss_mask == [False, False, False, True]


def test_a_demonstration_has_no_version() -> None:
    (row,) = rows(trajectory(P0, Segment(0, [8], logprobs=[0.0])), 1.0)
    assert row.policy_version is None


@st.composite
def trees(draw: st.DrawFn) -> Trajectory:
    """Any tree that opens with given tokens."""
    segments = [Segment(-1, [1])]
    for index in range(1, draw(st.integers(1, 10)) + 1):
        ids = draw(st.lists(st.integers(1, 99), max_size=4))
        logprobs = [-0.5] * len(ids) if draw(st.booleans()) else None
        segments.append(Segment(draw(st.integers(0, index - 1)), ids, logprobs))
    return trajectory(*segments)


@given(trees())
def test_every_sampled_token_trains_exactly_once(tree: Trajectory) -> None:
    found = rows(tree, 1.0)
    assert sum(row.num_loss_tokens for row in found) == tree.num_sampled_tokens
    paths = [tree.token_ids(leaf) for leaf in tree.leaves()]
    for row in found:
        assert row.loss_mask[-1]
        assert not row.loss_mask[0]
        assert any(path[: len(row.token_ids)] == row.token_ids for path in paths)
        lengths = {
            len(row.token_ids),
            len(row.loss_mask),
            len(row.logprobs),
            len(row.advantages),
        }
        assert len(lengths) == 1


def test_to_samples_keeps_the_order_and_skips_what_is_dropped() -> None:
    group = Group(
        "g",
        Task(id="task"),
        [
            trajectory(P0, sampled(0, [8]), name="a", reward=1.0),
            trajectory(P0, sampled(0, [9]), name="b", reward=None),
            trajectory(P0, sampled(0, [7]), name="c", reward=0.0),
        ],
    )
    assigned = DR_GRPO.assign([group])
    found = to_samples(assigned)
    assert [(s.trajectory_id, s.advantages[-1]) for s in found] == [("a", 0.5), ("c", -0.5)]
    assert assigned.excluded == {"b": "no reward"}


def test_demonstrations_need_no_reward_and_no_companion() -> None:
    group = Group("g", Task(id="task"), [trajectory(P0, sampled(0, [8]), reward=None)])
    (sample,) = to_samples(SFT.assign([group]))
    assert sample.advantages == [0, 0, 0, 1]


def named(*names: str) -> list[Sample]:
    return [Sample([1, 2], [False, True], [0, -1], [0, 1], name) for name in names]


def test_split_keeps_a_trajectory_together_and_the_order() -> None:
    samples = named("a", "b", "b", "c", "d", "b", "e")
    parts = split(samples, 2, seed=3)
    assert sorted(len({s.trajectory_id for s in part}) for part in parts) == [2, 3]
    homes = Counter(name for part in parts for name in {s.trajectory_id for s in part})
    assert set(homes.values()) == {1}
    for part in parts:
        places = [next(i for i, other in enumerate(samples) if other is s) for s in part]
        assert places == sorted(places)


def test_split_depends_on_the_seed_alone() -> None:
    samples = named(*"abcdefgh")
    assert split(samples, 3, seed=1) == split(samples, 3, seed=1)
    assert split(samples, 3, seed=1) != split(samples, 3, seed=2)


def grouped(**advantages: float) -> list[Sample]:
    """Two trajectories of each group, of these advantages."""
    return [
        Sample([1, 2], [False, True], [0, -1], [0, value], f"{name}{number}", name)
        for number in range(2)
        for name, value in advantages.items()
    ]


def test_split_keeps_groups_together_and_spreads_those_with_a_gradient() -> None:
    samples = grouped(a=1, b=0, c=1, d=0, e=-1, f=0, g=1, h=0)
    parts = split(samples, 2, seed=0)
    for part in parts:
        names = Counter(sample.group_id for sample in part)
        assert set(names.values()) == {2}
        assert len(names) == 4
        assert sum(any(sample.advantages) for sample in part) == 4
    assert parts != split(samples, 2, seed=1)


def test_split_parts_groups_where_few_have_a_gradient() -> None:
    samples = grouped(a=1, b=0, c=0, d=0, e=1, f=1)
    for regularised in (False, True):
        parts = split(samples, 2, seed=0, regularised=regularised)
        assert [len(part) for part in parts] == [6, 6]
        sizes = {n for part in parts for n in Counter(s.group_id for s in part).values()}
        assert (sizes == {2}) is regularised


@pytest.mark.parametrize(("num_minibatches", "expected"), [(1, [3]), (2, [2, 1]), (5, [1, 1, 1])])
def test_split_gives_no_empty_part(num_minibatches: int, expected: list[int]) -> None:
    parts = split(named("a", "b", "c"), num_minibatches, seed=0)
    assert [len(part) for part in parts] == expected
    assert split([], num_minibatches, seed=0) == []


def test_staleness_is_the_mean_of_versions_behind() -> None:
    row = Sample([1, 2], [False, True], [0.0, -1.0], [0.0, 1.0], "t")
    assert staleness([replace(row, policy_version=v) for v in (7, 5, None)], 7) == 1.0
    assert staleness([row], 7) == 0.0
