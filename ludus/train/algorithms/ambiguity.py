"""ADPO: GRPO whose advantages and clip depend on the self-consistency p of a task's label.

A label is the majority of k answers, p the share that agrees with it: the lower p, the less certain
the label. With the trust t(p) = clip((p - 0.3) / 0.5, 0, 1):

    p                  0.3     0.55    0.8
    trust              0       0.5     1
    scale of A         0.6     0.8     1.0      0.6 + 0.4 t: an uncertain label counts less
    upper clip         0.3     0.25    0.2      0.2 + 0.1 (1 - t): rare tokens may grow more

Agent0, Xia et al. 2025 (arXiv:2511.16043), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ludus.core.errors import TrainingError
from ludus.train.algorithms.credit import Advantage, Credit, CreditFn, Earned, spread
from ludus.train.algorithms.losses import (
    LossFn,
    LossInputs,
    LossOutput,
    clipped_surrogate,
    depends_on,
)


@dataclass(frozen=True, slots=True)
class Trust:
    """t(p): 0 up to the consistency `low`, 1 from `high` on, linear between."""

    low: float = 0.3
    high: float = 0.8

    def __call__(self, consistency: float) -> float:
        return min(max((consistency - self.low) / (self.high - self.low), 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class ScaledByTrust:
    """The advantages of `credit` times s(p) = min_scale + (1 - min_scale) t(p); p goes to the loss.

    Errors: TrainingError for a task without `consistency`.
    """

    credit: CreditFn
    trust: Trust = Trust()
    min_scale: float = 0.6

    def __call__(self, groups: Sequence[Sequence[Earned]]) -> list[list[Advantage]]:
        return [
            [self._one(earned, advantage) for earned, advantage in zip(group, row, strict=True)]
            for group, row in zip(groups, self.credit(groups), strict=True)
        ]

    def _one(self, earned: Earned, advantage: Advantage) -> Credit:
        if earned.consistency is None:
            raise TrainingError(
                f"rl.algorithm: task {earned.trajectory.task_id} has no `consistency`, the share "
                "of answers that agree with its label"
            )
        scale = self.min_scale + (1 - self.min_scale) * self.trust(earned.consistency)
        rows = [[a * scale for a in row] for row in spread(earned.trajectory, advantage)]
        returns = advantage.returns if isinstance(advantage, Credit) else None
        return Credit(rows, returns, earned.consistency)


def clipped_by_trust(low: float, high: float, extra: float, trust: Trust) -> LossFn:
    """`losses.clipped` with the upper clip high + extra (1 - t(p)), p of each token's task.

    Metrics: those of `clipped`, and `clip_high`, the upper clip.
    """
    return partial(_clipped_by_trust, low=low, high=high, extra=extra, trust=trust)


@depends_on("token")
def _clipped_by_trust(
    inputs: LossInputs, low: float, high: float, extra: float, trust: Trust
) -> LossOutput:
    if inputs.consistency_N is None:
        raise ValueError("a clip that depends on the label's consistency needs it for each token")
    trust_N = ((inputs.consistency_N - trust.low) / (trust.high - trust.low)).clamp(0, 1)
    high_N = high + extra * (1 - trust_N)
    output = clipped_surrogate(inputs, low, high_N)
    return LossOutput(output.loss_N, {**output.metrics, "clip_high": high_N})
