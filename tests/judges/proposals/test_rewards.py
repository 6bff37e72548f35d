"""The curriculum agent's reward, by hand and in general."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.judges.proposals.rewards import (
    Weights,
    proposal_reward,
    repetition,
    tool_bonus,
    uncertainty,
)

SHARE = st.floats(0, 1)
CALLS = st.floats(0, 100)


@pytest.mark.parametrize(("p", "expected"), [(0, 0), (0.25, 0.5), (0.5, 1), (0.9, 0.2), (1, 0)])
def test_uncertainty(p, expected):
    assert uncertainty(p) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("calls", "gamma", "limit", "expected"),
    [(0, 1, 4, 0), (1.5, 1, 4, 1.5), (4, 1, 4, 4), (9, 1, 4, 4), (3, 0.5, 2, 1), (3, 0, 4, 0)],
)
def test_tool_bonus(calls, gamma, limit, expected):
    assert tool_bonus(calls, gamma, limit) == expected


def test_repetition():
    assert repetition(1, 512) == 1 / 512
    assert repetition(3, 4, 0.5) == 0.375
    assert repetition(1, 1) == 1.0


@pytest.mark.parametrize(
    ("p", "calls", "size", "batch", "expected"),
    [
        (0.5, 2.0, 1, 4, 1 + 0.6 * 2 - 0.25),
        (0.6, 0.5, 2, 8, 0.8 + 0.3 - 0.25),
        (1.0, 0.0, 8, 8, 0.0),  # -1, cut to 0
        (0.5, 10.0, 1, 512, 1 + 2.4 - 1 / 512),
        (0.5, 0.0, 1, 1, 0.0),
    ],
)
def test_reward_by_hand(p, calls, size, batch, expected):
    assert proposal_reward(p, calls, size, batch) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (Weights(uncertainty=0), 0.6 * 3 - 0.25),
        (Weights(tool=0), 0.8 - 0.25),
        (Weights(repetition=0), 0.8 + 1.8),
        (Weights(repetition=2), 0.8 + 1.8 - 0.5),
        (Weights(gamma=0.5), 0.8 + 0.9 - 0.25),
        (Weights(max_tool_calls=1), 0.8 + 0.6 - 0.25),
    ],
)
def test_each_weight_has_its_part(weights, expected):
    assert proposal_reward(0.6, 3.0, 2, 8, weights) == pytest.approx(expected)


@given(SHARE, CALLS, st.integers(1, 64), st.integers(0, 64))
def test_bounds(p, calls, size, more):
    reward = proposal_reward(p, calls, size, size + more)
    assert 0 <= reward <= 1 + 0.6 * 4
    assert 0 <= uncertainty(p) <= 1


@given(SHARE, CALLS, CALLS, st.integers(1, 63))
def test_monotone(p, calls, more, size):
    base = proposal_reward(p, calls, size, 64)
    assert proposal_reward(p, calls + more, size, 64) >= base
    assert proposal_reward(p, calls, size + 1, 64) <= base
    assert proposal_reward((p + 0.5) / 2, calls, size, 64) >= base - 1e-12
    assert proposal_reward(1 - p, calls, size, 64) == pytest.approx(base, abs=1e-12)
