"""The algorithm: advantages, loss, and weights of tokens.

    screen    groups -> trainable trajectories, and a reason for each excluded one
    credit    trainable trajectories, scored by models where asked -> advantages

Both return and change nothing. The rows are in `table`; the learner knows losses, not algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch

from ludus.core.errors import ConfigError, TrainingError
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
    weighted,
)
from ludus.train.algorithms.losses import KlKind, LossFn, kl_estimate
from ludus.train.algorithms.own import calling


@dataclass(frozen=True, slots=True)
class Overlong:
    """Soft length penalty: 0 up to `length - margin` sampled tokens, then linear to -1 at `length`.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 13.
    """

    length: int
    margin: int

    def __call__(self, trajectory: Trajectory) -> float:
        excess = trajectory.num_sampled_tokens - (self.length - self.margin)
        return -min(max(excess / self.margin, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class ReferenceKl:
    """Divergence from a frozen reference, as a term of the loss or subtracted from the reward.

    Args:
        model: folder or hub name of the reference; None: the policy as the stage began (with LoRA:
            the model without its adapters).
    """

    coefficient: float
    kind: KlKind
    within: Literal["loss", "reward"]
    model: str | None = None

    def penalties(self, trajectory: Trajectory) -> PerToken:
        """Returns coefficient x the estimate at each token, under the policy that sampled it."""
        rows: PerToken = [[] for _ in trajectory.segments]
        for i, segment in turns_of(trajectory):
            if segment.ref_logprobs is None:
                raise ValueError("kl_in: reward needs the reference's log-probabilities")
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
class EntropyFloor:
    """An entropy bonus of 0 at `target` (nats a token) that grows to `weight` at an entropy of 0;
    see `algorithms.entropy`."""

    weight: float
    target: float

    def share(self, entropy: float | None) -> float:
        """Share of the weight at an entropy; 0 where it is unknown."""
        return 0.0 if entropy is None else min(max(1 - entropy / self.target, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Screening:
    """The trainable trajectories by group, and the reason for each other trajectory by its id."""

    groups: list[Group]
    excluded: dict[str, str]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Trajectories with their advantages, and the reason for each excluded trajectory by its id."""

    pairs: list[tuple[Trajectory, Advantage]]
    excluded: dict[str, str]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the table.

    Args:
        advantages: maps the rewards of a step's trajectories to advantages.
        loss: returns one loss a token.
        aggregate: returns one weight a token, over all samples of an optimizer step.
        source: the paper.
        keep: whether a group with these rewards trains; None: every group does.
        compares: whether advantages compare rewards within a group, which takes two trajectories.
        scored: whether a trajectory needs a reward.
        regularised: whether the loss has a term without an advantage, so that tokens with an
            advantage of 0 train too.
        max_rounds: most rounds of sampling in a step, until enough groups pass `keep`.
        overlong: length penalty, added to the reward after `keep` has seen it.
        reference: divergence from a reference model; None: no reference model.
        critic_lr: learning rate of the critic; None: no critic.
        importance: correction for a sampler that differs from the learner.
        needs_consistency: whether each task needs `Task.consistency`.
        entropy_floor: bonus that depends on the policy's entropy; None: none.
        observation_weight: advantage of tokens that were not sampled; 0: they have no loss.
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
    needs_consistency: bool = False
    entropy_floor: EntropyFloor | None = None
    observation_weight: float = 0.0

    def __post_init__(self) -> None:
        for part in ("advantages", "loss", "aggregate"):
            if not callable(value := getattr(self, part)):
                raise ConfigError(
                    f"rl.algorithm: `{part}` of {self.name!r} is {value!r:.80}, not a function"
                )

    @property
    def asks_models(self) -> bool:
        """True if advantages or loss need a model's scores of the sampled tokens."""
        return bool(self.reference or self.importance or self.critic_lr)

    def assign(self, groups: Sequence[Group]) -> Assignment:
        """Screen the groups and assign advantages, for algorithms that ask no model."""
        screening = self.screen(groups)
        return Assignment(self.credit(screening.groups).pairs, screening.excluded)

    def screen(self, groups: Sequence[Group]) -> Screening:
        """Separate the trajectories that can train from those that cannot.

        Excluded trajectories have no part in the baseline: a failed episode has no reward, which is
        not a reward of 0.
        """
        kept: list[Group] = []
        excluded: dict[str, str] = {}
        for group in groups:
            reasons = [t.dropped or self._refusal(t) for t in group.trajectories]
            judged = list(zip(group.trajectories, reasons, strict=True))
            left = [t for t, reason in judged if reason is None]
            group_reason = self._group_refusal([t.reward or 0.0 for t in left])
            excluded |= {t.id: why for t, reason in judged if (why := reason or group_reason)}
            if left and group_reason is None:
                kept.append(replace(group, trajectories=left))
        return Screening(kept, excluded)

    def credit(self, groups: Sequence[Group]) -> Assignment:
        """Assign an advantage to each trajectory of screened groups, scored by the models that the
        algorithm asks.

        Errors: TrainingError where an advantage is not finite, or is no number.
        """
        earned = [
            [
                replace(self._earned(t), consistency=group.task.consistency)
                for t in group.trajectories
            ]
            for group in groups
        ]
        with calling("`advantages`"):
            rows = self.advantages(earned)
        _require_lengths(rows, groups)
        pairs = [
            (trajectory, self._finite(trajectory, advantage))
            for group, advantages in zip(groups, rows, strict=True)
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        ]
        return Assignment([(t, self._corrected(t, value)) for t, value in pairs], {})

    def _earned(self, trajectory: Trajectory) -> Earned:
        bonus = self.overlong(trajectory) if self.overlong else 0.0
        if self.reference is None or self.reference.within != "reward":
            return Earned(trajectory, bonus)
        return Earned(trajectory, bonus, self.reference.penalties(trajectory))

    def _finite(self, trajectory: Trajectory, advantage: Advantage) -> Advantage:
        """Returns the advantage. Errors: TrainingError unless all its values are finite: to train
        without the trajectory would hide a fault of the algorithm."""
        try:
            values = [x for row in spread(trajectory, advantage) for x in row]
            wrong = next((x for x in values if not math.isfinite(x)), None)
        except (TypeError, ValueError, OverflowError) as error:
            raise TrainingError(
                f"rl.algorithm: `advantages` returned {advantage!r:.80} for trajectory "
                f"{trajectory.id}; it has to return a number or a Credit ({error})"
            ) from error
        if wrong is not None:
            raise TrainingError(
                f"rl.algorithm: `advantages` of {self.name} returned {wrong} for trajectory "
                f"{trajectory.id}, whose reward is {trajectory.reward}; it has to be finite"
            )
        return advantage

    def _corrected(self, trajectory: Trajectory, advantage: Advantage) -> Advantage:
        if self.importance is None:
            return advantage
        weights = truncated_importance(trajectory, self.importance.cap, self.importance.level)
        return weighted(trajectory, advantage, weights)

    def _refusal(self, trajectory: Trajectory) -> str | None:
        """Reason to exclude a trajectory by itself; None: it can train."""
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
        """Reason to exclude a group with these rewards; None: it can train."""
        if self.compares and len(rewards) == 1:
            return "alone in its group: no other trainable trajectory to compare it with"
        with calling("`keep`"):
            if self.keep is None or not rewards or self.keep(rewards):
                return None
        if len(set(rewards)) == 1:
            return f"no signal: all rewards of the group are {rewards[0]}"
        return f"no signal: the rewards of the group are {', '.join(map(str, rewards))}"


def _require_lengths(rows: Any, groups: Sequence[Group]) -> None:
    """Errors: TrainingError unless `rows` has an advantage for each trajectory of each group."""

    def refuse(found: Any, what: str) -> NoReturn:
        raise TrainingError(
            f"rl.algorithm: `advantages` returned {found!r:.80} for {what}; it has to return a "
            "list for each group, with a number or a Credit for each of its trajectories"
        )

    if not isinstance(rows, Sequence) or len(rows) != len(groups):
        refuse(rows, f"{len(groups)} groups")
    for row, group in zip(rows, groups, strict=True):
        if not isinstance(row, Sequence) or len(row) != len(group.trajectories):
            refuse(row, f"the {len(group.trajectories)} trajectories of group {group.id}")


def _opens_sampled(trajectory: Trajectory, leaf: int) -> bool:
    """True if the first token on the path to `leaf` was sampled."""
    segments = (trajectory.segments[index] for index in trajectory.path(leaf))
    first = next((segment for segment in segments if segment.token_ids), None)
    return first is not None and first.sampled
