"""What an algorithm is: how trajectories are compared, and how their tokens learn.

`assign` gives each trajectory its advantage, or the reason why it has none; the learner runs
whatever loss the row names and knows no algorithm. The rows are in `algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ludus.core.types import Group, Trajectory
from ludus.train.algorithms.aggregates import Aggregate
from ludus.train.algorithms.credit import (
    Advantage,
    CreditFn,
    Earned,
    PerToken,
    spread,
    truncated_importance,
    turns_of,
    weighed,
)
from ludus.train.algorithms.losses import KlKind, LossFn, kl_estimate


@dataclass(frozen=True, slots=True)
class Overlong:
    """The soft punishment of long answers: 0 up to `length - margin` sampled tokens, then falling
    to -1 at `length`, and -1 beyond.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 13.
    """

    length: int
    margin: int

    def __call__(self, trajectory: Trajectory) -> float:
        excess = trajectory.num_sampled_tokens - (self.length - self.margin)
        return -min(max(excess / self.margin, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class ReferenceKl:
    """The divergence from a frozen reference: a term of the loss, or a price on the reward.

    Args:
        model: folder or hub name of the reference; None: the policy as the stage began (with LoRA:
            the model without its adapters).
    """

    coefficient: float
    kind: KlKind
    within: Literal["loss", "reward"]
    model: str | None = None

    def penalties(self, trajectory: Trajectory) -> PerToken:
        """coefficient x the estimate at each sampled token, by the policy that sampled it."""
        rows: PerToken = [[] for _ in trajectory.segments]
        for i, segment in turns_of(trajectory):
            if segment.ref_logprobs is None:
                raise ValueError("a divergence in the reward needs the reference's log-probs")
            own = torch.tensor(segment.learner_logprobs or segment.logprobs, dtype=torch.float64)
            reference = torch.tensor(segment.ref_logprobs, dtype=torch.float64)
            estimate = kl_estimate(own, reference, self.kind)
            rows[i] = (self.coefficient * estimate).tolist()
        return rows


@dataclass(frozen=True, slots=True)
class Importance:
    """Truncated importance sampling; see `credit.truncated_importance`."""

    cap: float
    level: Literal["token", "trajectory"] = "token"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the table.

    Args:
        advantages: what the trajectories of a step earned to advantages.
        loss: one loss a token.
        aggregate: one weight a token, over all samples of an optimizer step.
        source: the paper.
        keep: whether a group is worth training on, by its rewards; None: every group.
        compares: whether advantages compare rewards within a group, so that a trajectory needs a
            companion in it.
        scored: whether a trajectory needs a reward.
        regularised: whether the loss has a term that needs no advantage, so that a token whose
            advantage is 0 trains too.
        max_rounds: how often a step may sample until it has its number of groups worth keeping.
        overlong: a punishment that is added to the reward, behind `keep`'s back.
        reference: the divergence from a reference model, where one is kept.
        critic_lr: learning rate of the critic, where advantages need its values.
        importance: corrects for a sampler that differs from the learner.
    """

    name: str
    advantages: CreditFn
    loss: LossFn
    aggregate: Aggregate
    source: str
    keep: Callable[[Sequence[float]], bool] | None = None
    compares: bool = True
    scored: bool = True
    regularised: bool = False
    max_rounds: int = 1
    overlong: Overlong | None = None
    reference: ReferenceKl | None = None
    critic_lr: float | None = None
    importance: Importance | None = None

    @property
    def asks_models(self) -> bool:
        """Whether advantages or loss need what a model says of the sampled tokens."""
        return bool(self.reference or self.importance or self.critic_lr)

    def assign(self, groups: Sequence[Group]) -> list[tuple[Trajectory, Advantage]]:
        """The trajectories that train, each with its advantage, in order.

        All others get the reason in their `dropped`.
        """
        kept = self.screen(groups)
        assigned = self.advantages([[self._earned(t) for t in group] for group in kept])
        pairs: list[tuple[Trajectory, Advantage]] = []
        for group, advantages in zip(kept, assigned, strict=True):
            for trajectory, advantage in zip(group, advantages, strict=True):
                trajectory.dropped = _not_finite(trajectory, advantage)
                if trajectory.dropped is None:
                    pairs.append((trajectory, self._corrected(trajectory, advantage)))
        return pairs

    def screen(self, groups: Sequence[Group]) -> list[list[Trajectory]]:
        """The trajectories of each group that can train.

        All others get the reason in their `dropped`. They have no part in the baseline: a failed
        episode is no reward of 0, it is no reward.
        """
        kept: list[list[Trajectory]] = []
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.dropped = trajectory.dropped or self._refusal(trajectory)
            left = [t for t in group.trajectories if t.dropped is None]
            reason = self._group_refusal([t.reward or 0.0 for t in left])
            for trajectory in left:
                trajectory.dropped = reason
            kept.append([] if reason else left)
        return kept

    def _earned(self, trajectory: Trajectory) -> Earned:
        bonus = self.overlong(trajectory) if self.overlong else 0.0
        in_reward = self.reference is not None and self.reference.within == "reward"
        if not in_reward or self.reference is None:
            return Earned(trajectory, bonus)
        return Earned(trajectory, bonus, self.reference.penalties(trajectory))

    def _corrected(self, trajectory: Trajectory, advantage: Advantage) -> Advantage:
        if self.importance is None:
            return advantage
        weights = truncated_importance(trajectory, self.importance.cap, self.importance.level)
        return weighed(trajectory, advantage, weights)

    def _refusal(self, trajectory: Trajectory) -> str | None:
        """Why this trajectory cannot train, whatever the others did."""
        status, reward = trajectory.status, trajectory.reward
        if not status.trainable:
            return f"{status.value}: {trajectory.error}" if trajectory.error else status.value
        if self.scored and reward is None:
            return "no reward"
        if self.scored and reward is not None and not math.isfinite(reward):
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


def _not_finite(trajectory: Trajectory, advantage: Advantage) -> str | None:
    values = [x for row in spread(trajectory, advantage) for x in row]
    wrong = next((x for x in values if not math.isfinite(x)), None)
    return None if wrong is None else f"its advantage is not finite: {wrong}"


def _opens_sampled(trajectory: Trajectory, leaf: int) -> bool:
    """Whether the first token on the path to `leaf` was sampled."""
    segments = (trajectory.segments[index] for index in trajectory.path(leaf))
    first = next((segment for segment in segments if segment.token_ids), None)
    return first is not None and first.sampled
