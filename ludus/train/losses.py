"""Losses: log-probabilities of sampled tokens -> one loss a token.

Which token weighs how much is not decided here (see `aggregates`). Shape suffix: N, the loss
tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to +-20 before exp, which would overflow from 88 on in float32. Beyond the
cut the gradient is 0; clipping has long switched it off there, but for a token of negative
advantage that became e^20 times likelier: no update can be trusted to mend that one."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss sees of the N loss tokens of a micro-batch.

    Args:
        logprobs_N: log-probabilities under the policy; carry the gradient.
        old_logprobs_N: those under the policy that sampled, recorded when it did.
        advantages_N: of each token's trajectory.
        trajectory_N: int64, which trajectory of the batch a token belongs to.
        ref_logprobs_N: log-probabilities under a reference model, where one is kept.
        entropy_N: entropy of the policy where each token was chosen, in nats; carries the gradient.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    trajectory_N: Tensor
    ref_logprobs_N: Tensor | None = None
    entropy_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of each token, and metrics [N], which are averaged over a step's loss tokens."""

    loss_N: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


LossFn = Callable[[LossInputs], LossOutput]


def clipped(low: float, high: float) -> LossFn:
    """-min(r A, clip(r, 1 - low, 1 + high) A), with r = exp(logprobs - old_logprobs).

    PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, equation 7), a token at a time,
    as GRPO uses it (arXiv:2402.03300, equation 3, here without its KL term). `high` above `low` is
    DAPO's clip-higher (arXiv:2503.14476, section 3.1): rare tokens may grow.

    Metrics: `ratio`; `clip_fraction`, the tokens that the clip keeps from learning; `kl`, the k3
    estimate r - 1 - log r of KL(sampling policy || policy) (Schulman 2020, "Approximating KL
    divergence"; the samples are the sampling policy's).
    """
    return partial(_clipped, low=low, high=high)


def _clipped(inputs: LossInputs, low: float, high: float) -> LossOutput:
    log_ratio_N = _log_ratio(inputs)
    ratio_N = log_ratio_N.exp()
    free_N = ratio_N * inputs.advantages_N
    held_N = ratio_N.clamp(1 - low, 1 + high) * inputs.advantages_N
    metrics = {**_drift(log_ratio_N, ratio_N), "clip_fraction": (held_N < free_N).float()}
    return LossOutput(-torch.minimum(free_N, held_N), metrics)


def reinforce(inputs: LossInputs) -> LossOutput:
    """-A log pi: REINFORCE (Williams 1992), as in RLOO (arXiv:2402.14740).

    Exact on the policy's own samples only; nothing corrects for steps taken since. Where
    `rl.epochs` or `rl.minibatches` exceed 1, `kl` and `ratio` tell how far the policy has moved.
    """
    with torch.no_grad():
        log_ratio_N = _log_ratio(inputs)
        metrics = _drift(log_ratio_N, log_ratio_N.exp())
    return LossOutput(-inputs.advantages_N * inputs.logprobs_N, metrics)


def cross_entropy(inputs: LossInputs) -> LossOutput:
    """-log pi of the demonstrated tokens: maximum likelihood. Advantages play no part."""
    return LossOutput(-inputs.logprobs_N)


def with_entropy_bonus(loss: LossFn, coefficient: float) -> LossFn:
    """`loss` minus coefficient x entropy: the policy stays undecided for longer.

    Williams and Peng 1991, "Function optimization using connectionist reinforcement learning
    algorithms"; Mnih et al. 2016, arXiv:1602.01783, section 4. The entropy is the exact one of each
    token's distribution, not an estimate from the token that was sampled.
    """
    return partial(_with_entropy_bonus, loss=loss, coefficient=coefficient)


def _with_entropy_bonus(inputs: LossInputs, loss: LossFn, coefficient: float) -> LossOutput:
    if inputs.entropy_N is None:
        raise ValueError("an entropy bonus needs the entropy of each token's distribution")
    output = loss(inputs)
    return LossOutput(output.loss_N - coefficient * inputs.entropy_N, output.metrics)


def _log_ratio(inputs: LossInputs) -> Tensor:
    log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _drift(log_ratio_N: Tensor, ratio_N: Tensor) -> dict[str, Tensor]:
    """How far the policy is from the one that sampled."""
    return {"ratio": ratio_N.detach(), "kl": (ratio_N - 1 - log_ratio_N).detach()}
