"""Losses: log-probabilities of sampled tokens -> one loss per token.

The weights of the tokens are in `aggregates`. Shape suffix: N, the loss tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ludus.core.errors import ConfigError, TrainingError
from ludus.train.algorithms.own import calling, name_of

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, which overflows at 88 in float32. Beyond the clamp the
gradient is 0. Clipping has removed that gradient already, except for a token of negative advantage
whose probability grew by e^20; no update is reliable there."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a loss: the N loss tokens of a micro-batch.

    Args:
        logprobs_N: log-probabilities under the policy, with gradient.
        old_logprobs_N: under the sampling policy, recorded while sampling.
        advantages_N: advantage of each token.
        trajectory_N: int64, index of the token's trajectory in the batch.
        ref_logprobs_N: under the reference model, if there is one.
        entropy_N: entropy of the policy at each token, in nats, with gradient.
        values_N: the critic's value before each token, with gradient.
        old_values_N: the critic's value before the step's first update.
        returns_N: the critic's target.
        trajectory_log_ratio_N: mean log-ratio of each token's trajectory, without gradient, if the
            micro-batch does not hold the whole trajectory.
        consistency_N: `Task.consistency` of the token's task, for algorithms that need it.
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
    consistency_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of each token, and metrics [N], averaged over a step's loss tokens."""

    loss_N: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


LossFn = Callable[[LossInputs], LossOutput]
KlKind = Literal["k1", "k2", "k3", "k3_corrected"]
Unit = Literal["token", "log_ratio", "trajectory"]
"""A token's loss depends on

    token        the token's own inputs
    log_ratio    these, and its trajectory's mean log-ratio (`LossInputs.trajectory_log_ratio_N`)
    trajectory   all loss tokens of its trajectory, which therefore stay in one micro-batch
"""
UNITS: tuple[Unit, ...] = ("token", "log_ratio", "trajectory")
Loss = TypeVar("Loss", bound=Callable[..., LossOutput])


def depends_on(unit: Unit) -> Callable[[Loss], Loss]:
    """Decorator that declares a loss's unit. A loss without one counts as `trajectory`."""
    if unit not in UNITS:
        raise ConfigError(f"depends_on({unit!r}): a loss depends on {', '.join(UNITS)}")

    def declare(loss: Loss) -> Loss:
        loss.unit = unit  # type: ignore[attr-defined]
        return loss

    return declare


def unit_of(loss: Any) -> Unit:
    """Returns the unit that a loss declares; the widest of a loss and the one that it wraps."""
    found: list[Unit] = []
    while loss is not None:
        wraps = isinstance(loss, partial)
        found.append(getattr(loss.func if wraps else loss, "unit", "trajectory"))
        loss = loss.keywords.get("loss") if wraps else None
    return max(found, key=UNITS.index)


def computed(loss: LossFn, inputs: LossInputs) -> LossOutput:
    """Returns the loss of each token.

    Errors: TrainingError where a user's loss raises, or returns anything but a loss and metrics of
    one value per token. A mean, for example, would be added to each token's weight.
    """
    with calling(f"the loss {name_of(loss)}"):
        output = loss(inputs)
    if wrong := _wrong_loss(output, inputs.logprobs_N):
        shape = list(inputs.logprobs_N.shape)
        raise TrainingError(
            f"rl.algorithm: the loss {name_of(loss)} returned {wrong}; it has to return "
            f"LossOutput(loss, metrics), all of one value per token: of shape {shape} here"
        )
    return output


def _wrong_loss(output: Any, logprobs_N: Tensor) -> str | None:
    if not isinstance(output, LossOutput):
        return f"a {type(output).__name__}"
    if not isinstance(output.metrics, dict):
        return f"metrics that are a {type(output.metrics).__name__}"
    for name, value in {"a loss": output.loss_N, **_named(output.metrics)}.items():
        if not isinstance(value, Tensor):
            return f"{name} that is a {type(value).__name__}"
        if value.shape != logprobs_N.shape:
            return f"{name} of shape {list(value.shape)}"
    trains = logprobs_N.requires_grad and torch.is_grad_enabled()
    return "a loss without a gradient" if trains and not output.loss_N.requires_grad else None


def _named(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"metric {name!r}": value for name, value in metrics.items()}


@torch.no_grad()
def require_unit(loss: LossFn, inputs: LossInputs) -> None:
    """Compare the losses of every other token, computed alone, with those among all tokens.

    Errors: ConfigError where they differ, though the loss declares a unit below `trajectory`.
    """
    if unit_of(loss) == "trajectory":
        return
    given: dict[str, Any] = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    if given["trajectory_log_ratio_N"] is None:
        log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
        means = trajectory_means(log_ratio_N, inputs.trajectory_N)
        given["trajectory_log_ratio_N"] = means[inputs.trajectory_N]
    whole_N = computed(loss, LossInputs(**given)).loss_N
    half: dict[str, Any] = {
        name: None if value is None else value[::2] for name, value in given.items()
    }
    if not torch.allclose(
        computed(loss, LossInputs(**half)).loss_N, whole_N[::2], 1e-4, 1e-6, True
    ):
        raise ConfigError(
            f"rl.algorithm: the loss {name_of(loss)} declares depends_on({unit_of(loss)!r}), but "
            "the loss of a token changes with the tokens beside it; declare "
            'depends_on("trajectory")'
        )


def clipped(low: float, high: float) -> LossFn:
    """-min(r A, clip(r, 1 - low, 1 + high) A), with r = exp(logprobs - old_logprobs).

    PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, equation 7), per token, as in
    GRPO (arXiv:2402.03300, equation 3, here without the KL term). `high` above `low` is
    DAPO's clip-higher (arXiv:2503.14476, section 3.1): rare tokens can become more likely.

    Metrics: `ratio`; `clip_fraction`, the tokens without gradient due to the clip; `kl`, the k3
    estimate r - 1 - log r of KL(sampling policy || policy) (Schulman 2020, "Approximating KL
    divergence"; the samples are the sampling policy's).
    """
    return partial(_clipped, low=low, high=high)


@depends_on("token")
def _clipped(inputs: LossInputs, low: float, high: float) -> LossOutput:
    return clipped_surrogate(inputs, low, high)


def clipped_surrogate(inputs: LossInputs, low: float, high: float | Tensor) -> LossOutput:
    """The loss of `clipped`; `high` is a number, or one a token [N]."""
    log_ratio_N = _log_ratio(inputs)
    ratio_N = log_ratio_N.exp()
    unclipped_N = ratio_N * inputs.advantages_N
    if isinstance(high, Tensor):
        bounded_N = torch.minimum(ratio_N.clamp(min=1 - low), 1 + high)
    else:
        bounded_N = ratio_N.clamp(1 - low, 1 + high)
    clipped_N = bounded_N * inputs.advantages_N
    metrics = {**_drift(log_ratio_N, ratio_N), "clip_fraction": (clipped_N < unclipped_N).float()}
    return LossOutput(-torch.minimum(unclipped_N, clipped_N), metrics)


def trajectory_clipped(low: float, high: float) -> LossFn:
    """`clipped` with one ratio per trajectory: the geometric mean of its tokens' ratios.

    GSPO, Zheng et al. 2025 (arXiv:2507.18071), equations 5 to 7, in the form of GSPO-token
    (equations 13 and 14): each token's ratio has the trajectory's value and the token's gradient.
    With one advantage per trajectory, both forms have the same loss and gradient.
    """
    return partial(_trajectory_clipped, low=low, high=high)


@depends_on("log_ratio")
def _trajectory_clipped(inputs: LossInputs, low: float, high: float) -> LossOutput:
    with torch.no_grad():
        mean_N = inputs.trajectory_log_ratio_N
        if mean_N is None:
            log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
            mean_N = trajectory_means(log_ratio_N, inputs.trajectory_N)[inputs.trajectory_N]
        mean_N = mean_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    zero_N = inputs.logprobs_N - inputs.logprobs_N.detach()  # 0, with the token's gradient
    ratio_N = (mean_N + zero_N).exp()
    unclipped_N = ratio_N * inputs.advantages_N
    clipped_N = ratio_N.clamp(1 - low, 1 + high) * inputs.advantages_N
    metrics = {**_token_drift(inputs), "clip_fraction": (clipped_N < unclipped_N).float()}
    return LossOutput(-torch.minimum(unclipped_N, clipped_N), metrics)


def trajectory_means(values_N: Tensor, trajectory_N: Tensor) -> Tensor:
    """Returns the mean value of each trajectory: [number of trajectories]; 0 without values."""
    size = int(trajectory_N.max()) + 1 if len(trajectory_N) else 0
    sums = values_N.new_zeros(size).index_add_(0, trajectory_N, values_N)
    return sums / torch.bincount(trajectory_N, minlength=size).clamp(min=1)


def capped_reinforce(cap: float) -> LossFn:
    """-sg(min(r, cap)) A log pi: every token has a gradient, with a weight of at most `cap`.

    CISPO, MiniMax-M1 2025 (arXiv:2506.13585), equations 4 and 5, without a lower bound.
    """
    return partial(_capped_reinforce, cap=cap)


@depends_on("token")
def _capped_reinforce(inputs: LossInputs, cap: float) -> LossOutput:
    with torch.no_grad():
        ratio_N = _log_ratio(inputs).exp()
        weight_N = ratio_N.clamp(max=cap)
    metrics = {**_token_drift(inputs), "clip_fraction": (ratio_N > cap).float()}
    return LossOutput(-weight_N * inputs.advantages_N * inputs.logprobs_N, metrics)


@depends_on("token")
def reinforce(inputs: LossInputs) -> LossOutput:
    """-A log pi: REINFORCE (Williams 1992), as in RLOO (arXiv:2402.14740).

    Exact only for samples of the current policy; there is no correction for later steps. If
    `rl.epochs` or `rl.minibatches` exceed 1, `kl` and `ratio` measure the policy's drift.
    """
    return LossOutput(-inputs.advantages_N * inputs.logprobs_N, _token_drift(inputs))


@depends_on("token")
def cross_entropy(inputs: LossInputs) -> LossOutput:
    """-log pi of the demonstrated tokens: maximum likelihood. Advantages are ignored."""
    return LossOutput(-inputs.logprobs_N)


def with_entropy_bonus(loss: LossFn, coefficient: float) -> LossFn:
    """`loss` minus coefficient x entropy, which slows the policy's loss of entropy.

    Williams and Peng 1991, "Function optimization using connectionist reinforcement learning
    algorithms"; Mnih et al. 2016, arXiv:1602.01783, section 4. The entropy is exact, of each
    token's distribution, not an estimate from the sampled token.
    """
    return partial(_with_entropy_bonus, loss=loss, coefficient=coefficient)


@depends_on("token")
def _with_entropy_bonus(inputs: LossInputs, loss: LossFn, coefficient: float) -> LossOutput:
    if inputs.entropy_N is None:
        raise ValueError("an entropy bonus needs the entropy of each token's distribution")
    output = computed(loss, inputs)
    return LossOutput(output.loss_N - coefficient * inputs.entropy_N, output.metrics)


def with_reference_kl(loss: LossFn, coefficient: float, kind: KlKind) -> LossFn:
    """`loss` plus coefficient x an estimate of KL(policy || reference) per token.

    GRPO's term (Shao et al. 2024, arXiv:2402.03300, equation 4) is k3. `k3_corrected` is k3 times
    the ratio of policy and sampler, with the divergence's gradient (DeepSeek-V3.2 2025,
    arXiv:2512.02556, section 3.1). See `kl_estimate`.
    """
    return partial(_with_reference_kl, loss=loss, coefficient=coefficient, kind=kind)


@depends_on("token")
def _with_reference_kl(
    inputs: LossInputs, loss: LossFn, coefficient: float, kind: KlKind
) -> LossOutput:
    if inputs.ref_logprobs_N is None:
        raise ValueError("a divergence from the reference needs the reference's log-probabilities")
    output = computed(loss, inputs)
    kl_N = kl_estimate(inputs.logprobs_N, inputs.ref_logprobs_N, kind)
    if kind == "k3_corrected":
        kl_N = kl_N * _log_ratio(inputs).exp()
    metrics = {**output.metrics, "reference_kl": kl_N.detach()}
    return LossOutput(output.loss_N + coefficient * kl_N, metrics)


def kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, kind: KlKind) -> Tensor:
    """Returns KL(policy || reference) from tokens sampled by the policy. Schulman 2020,
    "Approximating KL divergence", with d = log pi - log pi_ref:

        k1  d                 unbiased, of either sign; as a loss, the expected gradient is 0
        k2  d^2 / 2           biased; as a loss, the gradient of the divergence
        k3  e^-d - 1 + d      unbiased, at least 0; as a loss, the gradient of KL(reference ||
                              policy)
    """
    gap_N = (logprobs_N - ref_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return gap_N
    if kind == "k2":
        return gap_N.square() / 2
    return (-gap_N).exp() - 1 + gap_N


def with_value_loss(loss: LossFn, coefficient: float, clip: float) -> LossFn:
    """`loss` plus coefficient x the critic's squared error, clipped around its old value.

    max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2, as in PPO's reference code
    (Engstrom et al. 2020, arXiv:2005.12729, section 3). Tokens have the weights of the policy's
    loss.
    """
    return partial(_with_value_loss, loss=loss, coefficient=coefficient, clip=clip)


@depends_on("token")
def _with_value_loss(
    inputs: LossInputs, loss: LossFn, coefficient: float, clip: float
) -> LossOutput:
    values_N, old_N, returns_N = inputs.values_N, inputs.old_values_N, inputs.returns_N
    if values_N is None or old_N is None or returns_N is None:
        raise ValueError("a critic's loss needs values, old values and returns")
    output = computed(loss, inputs)
    near_N = old_N + (values_N - old_N).clamp(-clip, clip)
    error_N = (values_N - returns_N).square()
    clipped_error_N = (near_N - returns_N).square()
    loss_N = torch.maximum(error_N, clipped_error_N) / 2
    metrics = {
        **output.metrics,
        "value": values_N.detach(),
        "value_error": error_N.detach(),
        "value_clip_fraction": (clipped_error_N > error_N).float(),
    }
    return LossOutput(output.loss_N + coefficient * loss_N, metrics)


def _log_ratio(inputs: LossInputs) -> Tensor:
    log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _drift(log_ratio_N: Tensor, ratio_N: Tensor) -> dict[str, Tensor]:
    """Returns metrics of the drift from the sampling policy."""
    return {"ratio": ratio_N.detach(), "kl": (ratio_N - 1 - log_ratio_N).detach()}


def _token_drift(inputs: LossInputs) -> dict[str, Tensor]:
    with torch.no_grad():
        log_ratio_N = _log_ratio(inputs)
        return _drift(log_ratio_N, log_ratio_N.exp())
