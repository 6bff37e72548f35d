"""Advantages: the rewards of a group's trajectories -> each reward relative to the group.

The rollout is the unit: one number per trajectory, for any number of turns, tokens or branches.
With rewards 1, 0, 0, 1:

    group_normalised   0.866  -0.866  -0.866   0.866
    group_centred      0.5    -0.5    -0.5     0.5
    leave_one_out      0.667  -0.667  -0.667   0.667
    ones               1       1       1       1

Advantages that differ between tokens, or compare across groups, are in `credit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

AdvantageFn = Callable[[Sequence[float]], list[float]]
"""Rewards of a group's trainable trajectories to their advantages, in the same order."""

EPS = 1e-4
"""Added to the standard deviation, so advantages of rewards equal up to rounding stay near 0."""


def group_normalised(rewards: Sequence[float]) -> list[float]:
    """(r_i - mean) / (std + 1e-4): GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2.

    The paper writes std(r) without a convention. This is the sample's std (divided by G - 1) plus
    1e-4, as in TRL, so that runs can be compared. A single reward gives 0.
    """
    centred = group_centred(rewards)
    std = math.sqrt(math.fsum(c * c for c in centred) / max(len(centred) - 1, 1))
    return [c / (std + EPS) for c in centred]


def group_centred(rewards: Sequence[float]) -> list[float]:
    """r_i - mean: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783).

    Without the division, an easy or hard question (small std) has no higher weight than others.
    """
    mean = math.fsum(rewards) / max(len(rewards), 1)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r_i - mean of the others: RLOO, Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740).

    The baseline does not depend on r_i, so it is unbiased. Equals `group_centred` times G / (G -
    1). A single reward has no baseline and gives 0.
    """
    if len(rewards) < 2:
        return [0.0 for _ in rewards]
    total, others = math.fsum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def ones(rewards: Sequence[float]) -> list[float]:
    """1 for all: imitation does not compare trajectories."""
    return [1.0 for _ in rewards]


def has_signal(rewards: Sequence[float]) -> bool:
    """True if the group's rewards differ, so that its advantages are not all 0.

    DAPO's condition for keeping a group (Yu et al. 2025, arXiv:2503.14476, constraint of equation
    8: neither all correct nor all wrong), extended to rewards of any value.
    """
    return bool(rewards) and max(rewards) - min(rewards) > 1e-8
