"""The learning rate that moves the policy no farther than asked: `rl.optimizer.target_kl`.

A fixed rate that suits one policy destroys another. After each policy iteration the rate is scaled
by how far that iteration moved the policy, as in Schulman et al. 2017 (arXiv:1707.06347, section 4)
for a penalty; it never exceeds the schedule's. KL grows with the square of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SLOWEST, FASTEST = 1 / 16, 1.0
"""Limits of the scale: a policy that hardly moves may have nothing to learn from."""

START = 1 / 8
"""Scale of the first iteration. Adam's first steps move each weight by the full rate, for its
moments hold no noise of other batches yet: at a scale of 1 the first iteration moved policies by 2
to 81 times the target, and one of them lost a quarter of its success (docs/log.md)."""

DOWN, UP = 0.25, 1.25
"""Limits of a change of the scale: a step that was too long is mended at once, a short one slowly,
for the KL of one iteration is a noisy figure."""

NOT_MEASURED = (
    "rl.optimizer.target_kl has no effect: the loss of `rl.algorithm` returns no "
    '"kl" of each token among its metrics'
)
"""Refusal of a loss that does not tell how far a step moved the policy."""

LAST_SHARE = 0.1
"""Share of the peak rate below which the scale stays: the schedule ends training there."""


def moved(steps: Sequence[Mapping[str, float]]) -> float | None:
    """Mean KL (nats a token) from the policy that sampled, over an iteration's optimizer steps but
    the first, above that of the first; None without such a step, or a loss that does not measure
    it.

    The first step begins at the policy that sampled: what it measures is how far learner and
    sampler differ in rounding. With products in bfloat16 that was 3e-5 to 5e-4 in one run, above
    the target in its last third, so that the rate fell to its lowest limit and stayed there.
    """
    kls = [metrics["kl"] for metrics in steps if "kl" in metrics]
    if len(kls) < 2:
        return None
    first, others = kls[0], kls[1:]
    above = sum(others) / len(others) - first
    return above if math.isnan(above) else max(above, 0.0)


def next_scale(scale: float, kl: float | None, target: float, share: float) -> float:
    """Returns the factor on the learning rate for the next iteration.

    Args:
        kl: that `moved` returned.
        target: the KL to be reached at the peak rate.
        share: of the schedule's rate in its peak. The target falls with its square.
    """
    if kl is None or share < LAST_SHARE:
        return scale
    if math.isnan(kl):
        return max(scale * DOWN, SLOWEST)
    change = math.sqrt(target * share**2 / kl) if kl > 0 else UP
    return min(max(scale * min(max(change, DOWN), UP), SLOWEST), FASTEST)
