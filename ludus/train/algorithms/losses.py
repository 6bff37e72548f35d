"""Losses: log-probabilities of sampled tokens -> one loss a token.

Which token weighs how much is not decided here (see `aggregates`). Shape suffix: N, the loss
tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

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
        values_N: what the critic expects before each token, where there is one; carries the
            gradient.
        old_values_N: what it expected before the step's first update.
        returns_N: what it should have expected.
        trajectory_log_ratio_N: mean log-ratio of each token's trajectory, without gradient, where
            the trajectory does not lie in this micro-batch as a whole.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    trajectory_N: Tensor
    ref_logprobs_N: Tensor | None = None
    entropy_N: Tensor | None = None
    values_N: Tensor | None = None
    old_values_N: Tensor | None = None
    returns_N: Tensor | None = None
    trajectory_log_ratio_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of each token, and metrics [N], which are averaged over a step's loss tokens."""

    loss_N: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


LossFn = Callable[[LossInputs], LossOutput]
KlKind = Literal["k1", "k2", "k3", "k3_corrected"]


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


def trajectory_clipped(low: float, high: float) -> LossFn:
    """`clipped` with one ratio a trajectory: the geometric mean of its tokens' ratios.

    GSPO, Zheng et al. 2025 (arXiv:2507.18071), equations 5 to 7, in the form of GSPO-token
    (equations 13 and 14): each token's ratio has the trajectory's value and its own gradient. With
    one advantage a trajectory the two have the same loss and the same gradient.
    """
    return partial(_trajectory_clipped, low=low, high=high)


def _trajectory_clipped(inputs: LossInputs, low: float, high: float) -> LossOutput:
    with torch.no_grad():
        mean_N = inputs.trajectory_log_ratio_N
        if mean_N is None:
            log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
            mean_N = trajectory_means(log_ratio_N, inputs.trajectory_N)[inputs.trajectory_N]
        mean_N = mean_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    own_N = inputs.logprobs_N - inputs.logprobs_N.detach()  # 0, with the token's gradient
    ratio_N = (mean_N + own_N).exp()
    free_N = ratio_N * inputs.advantages_N
    held_N = ratio_N.clamp(1 - low, 1 + high) * inputs.advantages_N
    metrics = {**_token_drift(inputs), "clip_fraction": (held_N < free_N).float()}
    return LossOutput(-torch.minimum(free_N, held_N), metrics)


def trajectory_means(values_N: Tensor, trajectory_N: Tensor) -> Tensor:
    """Mean of the values of each trajectory: [number of trajectories]; 0 for those without any."""
    size = int(trajectory_N.max()) + 1 if len(trajectory_N) else 0
    sums = values_N.new_zeros(size).index_add_(0, trajectory_N, values_N)
    return sums / torch.bincount(trajectory_N, minlength=size).clamp(min=1)


def needs_whole_trajectories(loss: LossFn) -> bool:
    """Whether a token's loss depends on all tokens of its trajectory."""
    while isinstance(loss, partial):
        if loss.func is _trajectory_clipped:
            return True
        loss = loss.keywords.get("loss")  # type: ignore[assignment]
    return False


def capped_reinforce(cap: float) -> LossFn:
    """-sg(min(r, cap)) A log pi: no token is cut off, but none weighs more than `cap`.

    CISPO, MiniMax-M1 2025 (arXiv:2506.13585), equations 4 and 5, without a lower bound, as there.
    """
    return partial(_capped_reinforce, cap=cap)


def _capped_reinforce(inputs: LossInputs, cap: float) -> LossOutput:
    with torch.no_grad():
        ratio_N = _log_ratio(inputs).exp()
        weight_N = ratio_N.clamp(max=cap)
    metrics = {**_token_drift(inputs), "clip_fraction": (ratio_N > cap).float()}
    return LossOutput(-weight_N * inputs.advantages_N * inputs.logprobs_N, metrics)


def reinforce(inputs: LossInputs) -> LossOutput:
    """-A log pi: REINFORCE (Williams 1992), as in RLOO (arXiv:2402.14740).

    Exact on the policy's own samples only; nothing corrects for steps taken since. Where
    `rl.epochs` or `rl.minibatches` exceed 1, `kl` and `ratio` tell how far the policy has moved.
    """
    return LossOutput(-inputs.advantages_N * inputs.logprobs_N, _token_drift(inputs))


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


def with_reference_kl(loss: LossFn, coefficient: float, kind: KlKind) -> LossFn:
    """`loss` plus coefficient x an estimate of KL(policy || reference), a token at a time.

    GRPO's term (Shao et al. 2024, arXiv:2402.03300, equation 4) is k3. `k3_corrected` is k3 times
    the ratio of policy and sampler, whose gradient is the divergence's (DeepSeek-V3.2 2025,
    arXiv:2512.02556, section 3.1). See `kl_estimate`.
    """
    return partial(_with_reference_kl, loss=loss, coefficient=coefficient, kind=kind)


def _with_reference_kl(
    inputs: LossInputs, loss: LossFn, coefficient: float, kind: KlKind
) -> LossOutput:
    if inputs.ref_logprobs_N is None:
        raise ValueError("a divergence from the reference needs the reference's log-probabilities")
    output = loss(inputs)
    kl_N = kl_estimate(inputs.logprobs_N, inputs.ref_logprobs_N, kind)
    if kind == "k3_corrected":
        kl_N = kl_N * _log_ratio(inputs).exp()
    metrics = {**output.metrics, "reference_kl": kl_N.detach()}
    return LossOutput(output.loss_N + coefficient * kl_N, metrics)


def kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, kind: KlKind) -> Tensor:
    """KL(policy || reference) from tokens that the policy sampled. Schulman 2020, "Approximating KL
    divergence", with d = log pi - log pi_ref:

        k1  d                 unbiased, of either sign; as a loss its gradient is 0 in expectation
        k2  d^2 / 2           biased; as a loss its gradient is the divergence's
        k3  e^-d - 1 + d      unbiased, never below 0; as a loss, the gradient of KL(reference ||
                              policy)
    """
    gap_N = (logprobs_N - ref_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return gap_N
    if kind == "k2":
        return gap_N.square() / 2
    return (-gap_N).exp() - 1 + gap_N


def with_value_loss(loss: LossFn, coefficient: float, clip: float) -> LossFn:
    """`loss` plus coefficient x the critic's squared error, clipped around what it said before.

    max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2, as in PPO's reference code
    (Engstrom et al. 2020, arXiv:2005.12729, section 3). Tokens weigh as in the policy's loss.
    """
    return partial(_with_value_loss, loss=loss, coefficient=coefficient, clip=clip)


def _with_value_loss(
    inputs: LossInputs, loss: LossFn, coefficient: float, clip: float
) -> LossOutput:
    values_N, old_N, returns_N = inputs.values_N, inputs.old_values_N, inputs.returns_N
    if values_N is None or old_N is None or returns_N is None:
        raise ValueError("a critic's loss needs its values and what they should have been")
    output = loss(inputs)
    near_N = old_N + (values_N - old_N).clamp(-clip, clip)
    error_N = (values_N - returns_N).square()
    held_N = (near_N - returns_N).square()
    loss_N = torch.maximum(error_N, held_N) / 2
    metrics = {
        **output.metrics,
        "value": values_N.detach(),
        "value_error": error_N.detach(),
        "value_clip_fraction": (held_N > error_N).float(),
    }
    return LossOutput(output.loss_N + coefficient * loss_N, metrics)


def _log_ratio(inputs: LossInputs) -> Tensor:
    log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _drift(log_ratio_N: Tensor, ratio_N: Tensor) -> dict[str, Tensor]:
    """How far the policy is from the one that sampled."""
    return {"ratio": ratio_N.detach(), "kl": (ratio_N - 1 - log_ratio_N).detach()}


def _token_drift(inputs: LossInputs) -> dict[str, Tensor]:
    with torch.no_grad():
        log_ratio_N = _log_ratio(inputs)
        return _drift(log_ratio_N, log_ratio_N.exp())
