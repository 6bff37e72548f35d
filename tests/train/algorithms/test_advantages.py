"""Advantages against numbers worked out by hand, and properties that hold for all rewards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.train.algorithms.advantages import (
    AdvantageFn,
    group_centred,
    group_normalised,
    has_signal,
    leave_one_out,
    ones,
)

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=16)
RELATIVE = [group_normalised, group_centred, leave_one_out]


def test_group_normalised_by_hand() -> None:
    # mean 1/2; squares 4 * 1/4 = 1; std = sqrt(1/3) = 0.5773503; 0.5 / 0.5774503 = 0.8658754
    assert group_normalised([1, 0, 0, 1]) == pytest.approx(
        [0.8658754, -0.8658754, -0.8658754, 0.8658754], abs=1e-7
    )
    # mean 2; squares 1 + 0 + 1 = 2; std = sqrt(2/2) = 1; 1 / 1.0001 = 0.9999
    assert group_normalised([1, 2, 3]) == pytest.approx([-0.99990001, 0, 0.99990001], abs=1e-8)


def test_group_centred_by_hand() -> None:
    # mean (3 + 0 + 0 + 1) / 4 = 1
    assert group_centred([3, 0, 0, 1]) == [2, -1, -1, 0]


def test_leave_one_out_by_hand() -> None:
    # others: (0+0+1)/3 = 1/3, (3+0+1)/3 = 4/3, 4/3, (3+0+0)/3 = 1
    assert leave_one_out([3, 0, 0, 1]) == pytest.approx([8 / 3, -4 / 3, -4 / 3, 0])


def test_imitation_does_not_compare() -> None:
    assert ones([0.0, 5.0]) == [1, 1]


@pytest.mark.parametrize("advantages", RELATIVE)
def test_nothing_to_compare_with_is_zero(advantages: AdvantageFn) -> None:
    assert advantages([]) == []
    assert advantages([3.0]) == [0]
    assert advantages([0.1] * 3) == pytest.approx([0, 0, 0], abs=1e-9)


def test_rewards_that_differ_by_rounding_stay_near_zero() -> None:
    assert max(map(abs, group_normalised([0.1 + 0.2, 0.3]))) < 1e-10


@given(REWARDS, st.floats(-10, 10))
@pytest.mark.parametrize("advantages", RELATIVE)
def test_advantages_sum_to_zero_and_ignore_an_offset(
    advantages: AdvantageFn, rewards: list[float], offset: float
) -> None:
    found = advantages(rewards)
    assert sum(found) == pytest.approx(0, abs=1e-6)
    moved = advantages([reward + offset for reward in rewards])
    assert moved == pytest.approx(found, abs=1e-6)


@given(REWARDS)
def test_leave_one_out_is_a_scaled_centring(rewards: list[float]) -> None:
    scale = len(rewards) / (len(rewards) - 1)
    expected = [scale * a for a in group_centred(rewards)]
    assert leave_one_out(rewards) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([], False), ([1], False), ([1, 1], False), ([0.3, 0.1 + 0.2], False), ([0, 0.5], True)],
)
def test_has_signal(rewards: list[float], expected: bool) -> None:
    assert has_signal(rewards) is expected
