"""The measurements of the trials."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ludus.evaluate.results import Estimate

DTYPES = {"float32": 2, "bfloat16": 12}
"""Types of matrix products (`learner.dtype`) that are timed, and first steps that are not counted:
oneDNN prepares products of new shapes. bfloat16 is fast only on processors that multiply it."""

FASTER = 0.85
"""Share of the seconds of a step in float32 below which bfloat16 is taken."""

TIE = 0.02
"""Relative difference of losses below which the lower rate is taken."""


@dataclass
class Trial:
    """Measurements of the trials; seconds are wall time.

    Args:
        step_s: seconds of a mean step of SFT, by `learner.dtype`; of all of DTYPES, or of none.
        losses: loss per token of unseen episodes after a few steps of SFT, by learning rate.
        curve: steps of SFT and success of sampled episodes.
        trained, heldout: the last of them with its interval, and that of held-out tasks; None where
            no episode succeeds, or a measurement takes long.
        unplayed: the reason why no held-out task could be scored; empty where one could.
        gap: after SFT, the loss per token of the expert's turns in unseen episodes of training
            tasks, and of held-out levels; None where the environment has none.
        signal: share of groups with different rewards, by temperature; `success` likewise.
        rl_step_s: of a step with the groups of the configuration.
        growth: turns of an episode when RL begins, over those of the trial, which a policy that
            does not end its turns cuts short.
        chance: success of random actions.
    """

    step_s: dict[str, float] = field(default_factory=dict)
    losses: dict[float, float] = field(default_factory=dict)
    sft_step_s: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    trained: Estimate | None = None
    heldout: Estimate | None = None
    unplayed: str = ""
    gap: tuple[float, float] | None = None
    signal: dict[float, float] = field(default_factory=dict)
    success: dict[float, float] = field(default_factory=dict)
    rl_step_s: float = 0.0
    eval_s: float = 0.0
    growth: float = 1.0
    chance: float = 0.0

    @property
    def rate(self) -> float:
        """The rate with the lowest loss, or a lower one that is as good."""
        best = min(self.losses.values())
        return min(rate for rate, loss in self.losses.items() if loss <= best * (1 + TIE))

    @property
    def dtype(self) -> str:
        """bfloat16 where it was clearly faster; else float32, whose sampler agrees to the digit."""
        exact, half = (self.step_s.get(dtype, math.inf) for dtype in DTYPES)
        return "bfloat16" if half <= FASTER * exact < math.inf else "float32"

    @property
    def told_dtypes(self) -> str:
        """The seconds that decided on `dtype`; empty where they were not measured."""
        if not self.step_s:
            return ""
        exact, half = (self.step_s[dtype] for dtype in DTYPES)
        return f": {half:.2f} s a step of SFT, in float32 {exact:.2f} s"
