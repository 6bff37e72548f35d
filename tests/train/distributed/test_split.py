"""The split over ranks: every sample once, trajectories whole, balanced, trees kept together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharded import groups

from ludus.core.types import Sample
from ludus.train import ALGORITHMS
from ludus.train.batches.samples import to_samples
from ludus.train.distributed.split import assign


def sample(trajectory: str, ids: list[int]) -> Sample:
    zeros = [0.0] * len(ids)
    return Sample(ids, [False] + [True] * (len(ids) - 1), zeros, zeros, trajectory)


def computed(samples: list[Sample], chosen: list[int]) -> int:
    """Tokens of the chosen samples as one tree: their distinct prefixes."""
    paths = [samples[i].token_ids for i in chosen]
    return len({tuple(ids[:end]) for ids in paths for end in range(1, len(ids) + 1)})


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(0, 2), min_size=2, max_size=9)),
        max_size=12,
    ),
    st.integers(1, 5),
    st.sampled_from(["tree", "packed", "single"]),
)
def test_every_sample_once_and_trajectories_whole(rows, num_ranks, layout):
    samples = [sample(f"t{name}", ids) for name, ids in rows]
    parts = assign(samples, num_ranks, layout)
    assert len(parts) == num_ranks
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    homes = [{samples[i].trajectory_id for i in part} for part in parts]
    assert sum(map(len, homes)) == len(set().union(*homes)) if homes else True
    assert all(part == sorted(part) for part in parts)


@given(st.integers(0, 50), st.integers(1, 4))
def test_no_part_is_larger_than_its_share_and_one_trajectory(seed, num_ranks):
    samples = to_samples(ALGORITHMS.build("grpo").assign(groups(seed)))
    loads = [
        sum(len(samples[i].token_ids) for i in part)
        for part in assign(samples, num_ranks, "single")
    ]
    units: dict[str, int] = {}
    for row in samples:
        units[row.trajectory_id] = units.get(row.trajectory_id, 0) + len(row.token_ids)
    assert max(loads) <= sum(units.values()) / num_ranks + max(units.values())


def test_trees_are_cut_between_groups():
    """Two groups of four with long prompts: a group a rank, in any order of samples."""
    prompts = {"a": [1] * 20, "b": [2] * 20}
    samples = [sample(f"{g}{n}", [*prompts[g], 3 + n, 9]) for n in range(4) for g in "ab"]
    parts = assign(samples, 2, "tree")
    assert [{samples[i].trajectory_id[0] for i in part} for part in parts] == [{"a"}, {"b"}]
    assert [computed(samples, part) for part in parts] == [28, 28]


def test_a_tree_of_all_samples_is_cut_where_that_balances():
    samples = [sample(f"t{n}", [1, 1, n, n, n, n]) for n in range(2, 10)]
    parts = assign(samples, 4, "tree")
    assert [len(part) for part in parts] == [2, 2, 2, 2]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_nothing_to_split(num_ranks: int) -> None:
    assert assign([], num_ranks, "tree") == [[] for _ in range(num_ranks)]
