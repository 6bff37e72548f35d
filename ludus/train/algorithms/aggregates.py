"""Aggregates: the weight of each token's loss in an optimizer step's loss.

The step's loss is sum(weight * loss) over all micro-batches, so packing does not change the loss.
The rollout is the unit: the rows of a trajectory share its weight. Weights of two trajectories with
1 and 3 sampled tokens:

    trajectory_mean       1/2 | 1/6 1/6 1/6
    token_mean            1/4 | 1/4 1/4 1/4
    trajectory_sum        1/2 | 1/2 1/2 1/2
    constant_length(10)   1/20 | 1/20 1/20 1/20
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from ludus.core.types import Sample

Aggregate = Callable[[Sequence[Sample]], list[list[float]]]
"""All samples of an optimizer step to one weight per token; 0 for tokens without loss."""


def trajectory_mean(samples: Sequence[Sample]) -> list[list[float]]:
    """Mean over trajectories of the mean over a trajectory's tokens.

    GRPO, Shao et al. 2024 (arXiv:2402.03300), equation 3: 1/G sum_i 1/|o_i| sum_t.
    """
    lengths = _loss_tokens(samples)
    return [_weights(s, 1 / (len(lengths) * (lengths[s.trajectory_id] or 1))) for s in samples]


def token_mean(samples: Sequence[Sample]) -> list[list[float]]:
    """Mean over all tokens, so long trajectories have more weight.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 8: 1 / sum_i |o_i| sum_i sum_t; here over the
    whole step, in the paper over one group.
    """
    total = max(_loss_tokens(samples).total(), 1)
    return [_weights(s, 1 / total) for s in samples]


def advantage_mean(samples: Sequence[Sample]) -> list[list[float]]:
    """Mean over all tokens, weighted by their advantages, which are at least 0: those of SFT."""
    total = math.fsum(a for s in samples for a in s.advantages) or 1.0
    return [[a / total for a in s.advantages] for s in samples]


def constant_length(length: float) -> Aggregate:
    """Mean over trajectories of the sum over a trajectory's tokens, divided by a constant.

    Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783): tokens of long and short wrong answers have the
    same weight. The constant only scales the loss; the authors use the maximum length of an answer.
    """
    return partial(_constant_length, length=length)


def trajectory_sum(samples: Sequence[Sample]) -> list[list[float]]:
    """Mean over trajectories of the sum over a trajectory's tokens: its log-probability.

    RLOO, Ahmadian et al. 2024 (arXiv:2402.14740): the whole answer is one action.
    """
    return _constant_length(samples, length=1)


def _constant_length(samples: Sequence[Sample], length: float) -> list[list[float]]:
    num_trajectories = max(len(_loss_tokens(samples)), 1)
    return [_weights(s, 1 / (num_trajectories * length)) for s in samples]


def _loss_tokens(samples: Sequence[Sample]) -> Counter[str]:
    """Returns the number of loss tokens by trajectory id, over all rows."""
    counts: Counter[str] = Counter()
    for sample in samples:
        counts[sample.trajectory_id] += sample.num_loss_tokens
    return counts


def _weights(sample: Sample, weight: float) -> list[float]:
    return [weight if has_loss else 0.0 for has_loss in sample.loss_mask]
