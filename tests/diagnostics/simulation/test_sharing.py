"""Trees of recorded groups, and their growth with the size of the group; all counted by hand."""

from __future__ import annotations

import pytest

from ludus.core.types import Group, Segment, Status, Task, Trajectory
from ludus.diagnostics.simulation.sharing import Tree, absent, sharing_of


def episode(number: int, *turns: list[int], reward: float = 0.0) -> Trajectory:
    """A prompt of 4 tokens; between turns, an observation of 2 equal to the turn's first token."""
    segments = [Segment(-1, [1, 1, 1, 1], None, None)]
    for ids in turns:
        segments.append(Segment(len(segments) - 1, ids, [-0.5] * len(ids), None))
        segments.append(Segment(len(segments) - 1, [ids[0]] * 2, None, None))
    found = Trajectory(f"t{number}", "g", str(number), status=Status.COMPLETED, reward=reward)
    found.segments = segments  # the last observation follows no turn: it is not computed
    return found


def group(*rewards: float) -> Group:
    """Four episodes: the first turn of three is equal, the second turn of two of these."""
    ends = [[[5], [7, 7]], [[5], [7, 7]], [[5], [8, 8]], [[6], [7, 7]]]
    played = [
        episode(i, *turns, reward=reward)
        for i, (turns, reward) in enumerate(zip(ends, rewards, strict=True))
    ]
    return Group("g", Task(id="0"), played)


def test_tokens_by_the_episodes_that_go_through_them() -> None:
    found = sharing_of([group(1, 0, 0, 0)], 4, all_train=False)
    # The prompt; 5 and its observation; 7 7; 8 8, and 6 with its observation and 7 7.
    assert found.trained.through == {4: 4, 3: 3, 2: 2, 1: 7}
    assert {count: n for count, n in found.observed.through.items() if n} == {3: 2, 1: 2}
    assert found.trained.tokens(4) == 16


def test_smaller_groups_are_counted_exactly() -> None:
    tree = sharing_of([group(1, 0, 0, 0)], 4, all_train=False).trained
    assert tree.tokens(1) == pytest.approx(9)  # each episode has 9 tokens
    # Pairs: {0, 1}: 9; {0, 2} and {1, 2}: 11; the three with the last one: 14.
    assert tree.tokens(2) == pytest.approx((9 + 2 * 11 + 3 * 14) / 6)
    assert tree.per_episode(1) == pytest.approx(9 / 4)


def test_larger_groups_continue_the_additions() -> None:
    """As a power: constant, or that of a fall from 5 at the second to 1 at the fourth episode."""
    tree = Tree(4, {4: 10.0, 1: 8.0})
    assert absent(4, 1, 3) == pytest.approx(1 / 4)
    assert tree.tokens(5) == pytest.approx(18 + 2)  # what one episode has alone is added always
    falling = Tree(4, {2: 12.0, 1: 4.0})
    # Additions: 1 + 12 x (C(2, k - 1) / C(4, k - 1) - C(2, k) / C(4, k)): 7, 5, 3, 1.
    assert [falling.tokens(k) for k in (1, 2, 4)] == pytest.approx([7, 12, 16])
    power = -2.321928  # log2(1 / 5)
    assert falling.tokens(8) == pytest.approx(16 + sum((k / 4) ** power for k in range(5, 9)))


def test_a_prompt_is_computed_once_in_groups_of_any_size() -> None:
    tree = Tree(8, {8: 100.0})
    assert tree.tokens(64) == tree.tokens(1) == 100
    assert tree.per_episode(16) == pytest.approx(1 / 2)


def test_larger_groups_have_a_signal_more_often() -> None:
    groups = [group(1, 0, 0, 0), group(0, 0, 0, 0)]
    found = sharing_of(groups, 4, all_train=False)
    assert found.without_signal(4) == pytest.approx(1 / 2)
    assert found.without_signal(2) == pytest.approx((3 / 6 + 1) / 2)
    assert found.without_signal(8) == pytest.approx((1 / 2) ** 2 / (3 / 4))
    assert found.idle(4) == 1
    assert sum(found.trained.through.values()) == 16  # the group without a signal does not train
    assert sharing_of(groups, 4, all_train=True).trained.tokens(4) == 32


def test_groups_that_are_not_whole_do_not_count() -> None:
    found = sharing_of([group(1, 0, 0, 0)], 8, all_train=True)
    assert not found.trained.through
    assert found.trained.per_episode(16) == found.observed.per_episode(16) == found.idle(16) == 1
