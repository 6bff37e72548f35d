"""The table of algorithms. A row says how trajectories are compared, and how their tokens learn.

What differs from a neighbour is what you see. `assign` gives each trajectory its advantage, or the
reason why it has none; the learner runs whatever loss the row names and knows no algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from ludus.core.types import Group, Trajectory
from ludus.train.advantages import (
    AdvantageFn,
    group_centred,
    group_normalised,
    has_signal,
    leave_one_out,
    ones,
)
from ludus.train.aggregates import (
    Aggregate,
    constant_length,
    token_mean,
    trajectory_mean,
    trajectory_sum,
)
from ludus.train.losses import LossFn, clipped, cross_entropy, reinforce, with_entropy_bonus


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the table.

    Args:
        advantages: rewards of a group to advantages.
        loss: one loss a token.
        aggregate: one weight a token, over all samples of an optimizer step.
        source: the paper.
        keep: whether a group is worth training on, by its rewards; None: every group.
        compares: whether advantages compare rewards, so that a trajectory needs a reward and a
            companion in its group. False: it needs neither.
        regularised: whether the loss has a term that needs no advantage, so that a token whose
            advantage is 0 trains too.
    """

    name: str
    advantages: AdvantageFn
    loss: LossFn
    aggregate: Aggregate
    source: str
    keep: Callable[[Sequence[float]], bool] | None = None
    compares: bool = True
    regularised: bool = False

    def assign(self, groups: Sequence[Group]) -> list[tuple[Trajectory, float]]:
        """The trajectories that train, each with its advantage, in order.

        All others get the reason in their `dropped`. They have no part in the baseline: a failed
        episode is no reward of 0, it is no reward.
        """
        assigned: list[tuple[Trajectory, float]] = []
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.dropped = trajectory.dropped or self._refusal(trajectory)
            left = [t for t in group.trajectories if t.dropped is None]
            rewards = [t.reward or 0.0 for t in left]
            reason = self._group_refusal(rewards)
            if reason is None:
                assigned += zip(left, self.advantages(rewards), strict=True)
            for trajectory in left:
                trajectory.dropped = reason
        return assigned

    def _refusal(self, trajectory: Trajectory) -> str | None:
        """Why this trajectory cannot train, whatever the others did."""
        status, reward = trajectory.status, trajectory.reward
        if not status.trainable:
            return f"{status.value}: {trajectory.error}" if trajectory.error else status.value
        if self.compares and reward is None:
            return "no reward"
        if self.compares and reward is not None and not math.isfinite(reward):
            return f"the reward is not finite: {reward}"
        if trajectory.num_sampled_tokens == 0:
            return "no sampled token"
        if any(_opens_sampled(trajectory, leaf) for leaf in trajectory.leaves()):
            return "its first token was sampled: nothing before it predicts it"
        return None

    def _group_refusal(self, rewards: Sequence[float]) -> str | None:
        """Why a group with these rewards cannot train."""
        if self.compares and len(rewards) == 1:
            return "alone in its group: no other trainable trajectory to compare it with"
        if self.keep is None or not rewards or self.keep(rewards):
            return None
        if len(set(rewards)) == 1:
            return f"no signal: all rewards of the group are {rewards[0]}"
        return f"no signal: the rewards of the group are {', '.join(map(str, rewards))}"


def _opens_sampled(trajectory: Trajectory, leaf: int) -> bool:
    """Whether the first token on the path to `leaf` was sampled."""
    segments = (trajectory.segments[index] for index in trajectory.path(leaf))
    first = next((segment for segment in segments if segment.token_ids), None)
    return first is not None and first.sampled


GRPO = Algorithm(
    "grpo",
    advantages=group_normalised,
    loss=clipped(0.2, 0.2),
    aggregate=trajectory_mean,
    source="DeepSeekMath, Shao et al. 2024, arXiv:2402.03300",
)

DR_GRPO = Algorithm(
    "dr_grpo",
    advantages=group_centred,
    loss=clipped(0.2, 0.2),
    aggregate=constant_length(1024),
    source="Understanding R1-Zero-Like Training, Liu et al. 2025, arXiv:2503.20783",
)

DAPO = Algorithm(
    "dapo",
    advantages=group_normalised,
    loss=clipped(0.2, 0.28),
    aggregate=token_mean,
    keep=has_signal,
    source="DAPO, Yu et al. 2025, arXiv:2503.14476",
)

RLOO = Algorithm(
    "rloo",
    advantages=leave_one_out,
    loss=reinforce,
    aggregate=trajectory_sum,
    source="Back to Basics, Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019",
)

SFT = Algorithm(
    "sft",
    advantages=ones,
    loss=cross_entropy,
    aggregate=token_mean,
    compares=False,
    source="maximum likelihood",
)


ClipLow = Annotated[
    float, Field(gt=0, le=1, description="The ratio is clipped below 1 minus this.")
]
ClipHigh = Annotated[float, Field(gt=0, description="The ratio is clipped above 1 plus this.")]
Length = Annotated[
    float, Field(gt=0, description="The constant: the most tokens that an episode may sample.")
]
Entropy = Annotated[
    float,
    Field(ge=0, description="Weight of the entropy bonus; with one, every token sampled trains."),
]


def grpo(
    clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2, entropy_bonus: Entropy = 0.0
) -> Algorithm:
    """GRPO, without the KL term: group-normalised advantages, clipped loss, trajectory mean."""
    return _regularised(replace(GRPO, loss=clipped(clip_low, clip_high)), entropy_bonus)


def dr_grpo(
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    length: Length = 1024,
    entropy_bonus: Entropy = 0.0,
) -> Algorithm:
    """Dr. GRPO: GRPO that divides neither by the std nor by a trajectory's own length."""
    row = replace(DR_GRPO, loss=clipped(clip_low, clip_high), aggregate=constant_length(length))
    return _regularised(row, entropy_bonus)


def dapo(
    clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.28, entropy_bonus: Entropy = 0.0
) -> Algorithm:
    """DAPO: a higher upper clip, token mean, groups whose rewards are all equal left out.

    The paper samples until the batch is full again; here the step trains on the groups it has.
    Its penalty for overlong answers is a matter of the reward.
    """
    return _regularised(replace(DAPO, loss=clipped(clip_low, clip_high)), entropy_bonus)


def rloo(entropy_bonus: Entropy = 0.0) -> Algorithm:
    """RLOO: REINFORCE on whole trajectories, each against the mean of the others."""
    return _regularised(RLOO, entropy_bonus)


def sft() -> Algorithm:
    """Cross-entropy on demonstrations, averaged over tokens."""
    return SFT


def _regularised(row: Algorithm, entropy_bonus: float) -> Algorithm:
    """`row` with the terms asked for."""
    if not entropy_bonus:
        return row
    return replace(row, loss=with_entropy_bonus(row.loss, entropy_bonus), regularised=True)
