"""The learning rate that moves the policy no farther than asked: `rl.optimizer.target_kl`.

A fixed rate that suits one policy destroys another. After each policy iteration the rate is scaled
by how far the last iterations moved the policy, as in Schulman et al. 2017 (arXiv:1707.06347,
section 4) for a penalty; it never exceeds the schedule's. KL grows with the square of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLOWEST, FASTEST = 1 / 16, 1.0
"""Limits of the scale: a policy that hardly moves may have nothing to learn from."""

START = 1 / 8
"""Scale of the first iteration. Adam's first steps move each weight by the full rate, for its
moments hold no noise of other batches yet: at a scale of 1 the first iteration moved policies by 2
to 81 times the target, and one of them lost a quarter of its success (docs/log.md)."""

DOWN, UP = 0.25, 1.25
"""Limits of a change of the scale: a step that was too long is mended at once, a short one
slowly."""

FADE = 0.8
"""Weight of each iteration over that of the next. The KL of one iteration is a noisy figure: of
64 episodes it was 10 times that of the iteration before, for the sake of a few tokens."""

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
    the target in its last third, so that the rate fell to its lowest limit and stayed there. The
    difference may be negative, by the noise of both.
    """
    kls = [metrics["kl"] for metrics in steps if "kl" in metrics]
    if len(kls) < 2:
        return None
    first, others = kls[0], kls[1:]
    return sum(others) / len(others) - first


@dataclass
class RateScale:
    """The factor on the schedule's learning rate.

    Args:
        target: the KL of an iteration at the peak rate, in nats a token.
        kl: sum of the iterations' KL, the newest with weight 1, each before it with FADE less.
        squares: sum of the squares of their rates over the peak, likewise; `kl / squares` is the KL
            that the peak rate would have. Iterations with a high rate count most: they tell most.
    """

    target: float
    scale: float = START
    kl: float = 0.0
    squares: float = 0.0

    def update(self, kl: float | None, share: float) -> None:
        """Follow an iteration.

        Args:
            kl: that `moved` returned.
            share: of the schedule's rate in its peak. The target falls with its square.
        """
        if kl is None or share < LAST_SHARE:
            return
        if not math.isfinite(kl):
            self.scale = max(self.scale * DOWN, SLOWEST)
            return
        self.kl = FADE * self.kl + kl
        self.squares = FADE * self.squares + (self.scale * share) ** 2
        wanted = math.sqrt(self.target * self.squares / self.kl) if self.kl > 0 else FASTEST
        within = min(max(wanted, self.scale * DOWN), self.scale * UP)
        self.scale = min(max(within, SLOWEST), FASTEST)

    def state(self) -> dict[str, float]:
        """All but the target, for a checkpoint."""
        return {"scale": self.scale, "kl": self.kl, "squares": self.squares}
