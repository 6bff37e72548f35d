"""Aggregates: how the losses of an optimizer step's tokens add up to one loss.

An aggregate gives every token a weight; the step's loss is sum(weight * loss) over all its
micro-batches, so how tokens are packed changes nothing. The rollout is the unit: the rows of one
trajectory weigh together as one. Weights of two trajectories with 1 and 3 sampled tokens:

    trajectory_mean       1/2 | 1/6 1/6 1/6
    token_mean            1/4 | 1/4 1/4 1/4
    trajectory_sum        1/2 | 1/2 1/2 1/2
    constant_length(10)   1/20 | 1/20 1/20 1/20
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from ludus.core.types import Sample

Aggregate = Callable[[Sequence[Sample]], list[list[float]]]
"""All samples of an optimizer step to one weight a token; 0 where there is no loss."""


def trajectory_mean(samples: Sequence[Sample]) -> list[list[float]]:
    """Mean over trajectories of the mean over a trajectory's tokens.

    GRPO, Shao et al. 2024 (arXiv:2402.03300), equation 3: 1/G sum_i 1/|o_i| sum_t.
    """
    lengths = _loss_tokens(samples)
    return [_weights(s, 1 / (len(lengths) * (lengths[s.trajectory_id] or 1))) for s in samples]


def token_mean(samples: Sequence[Sample]) -> list[list[float]]:
    """Mean over all tokens, so that long trajectories weigh more.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 8: 1 / sum_i |o_i| sum_i sum_t; over the
    whole step, where the paper writes it for one group.
    """
    total = max(_loss_tokens(samples).total(), 1)
    return [_weights(s, 1 / total) for s in samples]


def constant_length(length: float) -> Aggregate:
    """Mean over trajectories of the sum over a trajectory's tokens, divided by a constant.

    Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783): a long wrong answer is not punished
    less a token than a short one. The constant only scales; the authors take the most tokens that
    an answer may have.
    """
    return partial(_constant_length, length=length)


def trajectory_sum(samples: Sequence[Sample]) -> list[list[float]]:
    """Mean over trajectories of the sum over a trajectory's tokens: its whole log-probability.

    RLOO, Ahmadian et al. 2024 (arXiv:2402.14740): the whole answer is one action.
    """
    return _constant_length(samples, length=1)


def _constant_length(samples: Sequence[Sample], length: float) -> list[list[float]]:
    num_trajectories = max(len(_loss_tokens(samples)), 1)
    return [_weights(s, 1 / (num_trajectories * length)) for s in samples]


def _loss_tokens(samples: Sequence[Sample]) -> Counter[str]:
    """Trajectory id to its number of loss tokens, over all its rows."""
    counts: Counter[str] = Counter()
    for sample in samples:
        counts[sample.trajectory_id] += sample.num_loss_tokens
    return counts


def _weights(sample: Sample, weight: float) -> list[float]:
    return [weight if has_loss else 0.0 for has_loss in sample.loss_mask]
