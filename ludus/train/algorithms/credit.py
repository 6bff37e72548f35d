"""Credit: the rewards of a step's trajectories -> the advantage of each sampled token.

The time steps of a trajectory are its sampled segments (turns), in the order of sampling; the
environment's text between turns is not a time step. Two turns of two tokens with rewards 1 and 2,
and a discount of 0.5 per turn:

    tokens           a0  a1 | b0  b1
    rewards           0   1 |  0   2        a turn's reward belongs to its last token
    turn_returns      2   2 |  2   2        1 + 0.5 * 2, and 2, before normalisation
    token_returns     3   3 |  2   2        undiscounted

An advantage shared by all tokens is one number, otherwise a `Credit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ludus.core.errors import TrainingError
from ludus.core.types import Segment, Status, Trajectory
from ludus.train.algorithms.advantages import EPS, AdvantageFn

PerToken = list[list[float]]
"""One number per token: one list per segment, in the order of `Trajectory.segments`; empty for
segments that were not sampled."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantages of a trajectory's sampled tokens.

    Args:
        advantages: one number per token.
        returns: the critic's target before each token; None without a critic.
        consistency: `Task.consistency`, for a loss that depends on it.
    """

    advantages: PerToken
    returns: PerToken | None = None
    consistency: float | None = None


Advantage = float | Credit
Unit = Literal["token", "rollout"]


@dataclass(frozen=True, slots=True)
class Earned:
    """A trajectory with its reward and the algorithm's changes to the reward.

    Args:
        bonus: added at the last token (e.g. DAPO's penalty of overlong answers, below 0).
        penalties: subtracted from each token's reward (the divergence from a reference).
        consistency: `Task.consistency`.
    """

    trajectory: Trajectory
    bonus: float = 0.0
    penalties: PerToken | None = None
    consistency: float | None = None

    @property
    def total(self) -> float:
        """Returns the total reward; 0 without a reward."""
        penalty = math.fsum(x for row in self.penalties or [] for x in row)
        return (self.trajectory.reward or 0.0) + self.bonus - penalty

    def turn_rewards(self) -> list[float]:
        """Returns each segment's reward; they add up to the trajectory's. 0 for unsampled segments.

        The part of the trajectory's reward that no turn has (a judge's score) belongs to the last
        turn. The reward of a turn without tokens moves to the next turn.
        """
        segments = self.trajectory.segments
        rewards = [0.0] * len(segments)
        turns = [i for i, _ in turns_of(self.trajectory)]
        if not turns:
            return rewards
        for i, segment in enumerate(segments):
            if segment.reward is not None:
                rewards[next((turn for turn in turns if turn >= i), turns[-1])] += segment.reward
        rewards[turns[-1]] += (self.trajectory.reward or 0.0) - math.fsum(rewards) + self.bonus
        if self.penalties is not None:
            for i in turns:
                rewards[i] -= math.fsum(self.penalties[i])
        return rewards

    def token_rewards(self) -> PerToken:
        """Returns the reward of each sampled token."""
        rewards = replace(self, penalties=None).turn_rewards()
        rows: PerToken = [[] for _ in rewards]
        for i, segment in turns_of(self.trajectory):
            rows[i] = [0.0] * (len(segment.token_ids) - 1) + [rewards[i]]
            if self.penalties is not None:
                rows[i] = [r - p for r, p in zip(rows[i], self.penalties[i], strict=True)]
        return rows


CreditFn = Callable[[Sequence[Sequence[Earned]]], list[list[Advantage]]]
"""The trainable trajectories of a step's groups to their advantages, in the same order."""


def turns_of(trajectory: Trajectory) -> list[tuple[int, Segment]]:
    """Returns the sampled segments with tokens, and their indices."""
    return [(i, s) for i, s in enumerate(trajectory.segments) if s.sampled and s.token_ids]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One number per trajectory: its total reward, compared within its group."""

    compare: AdvantageFn

    def __call__(self, groups: Sequence[Sequence[Earned]]) -> list[list[Advantage]]:
        return [self._one([earned.total for earned in group]) for group in groups]

    def _one(self, rewards: list[float]) -> list[Advantage]:
        found: Any = self.compare(rewards)
        if not hasattr(found, "__len__") or len(found) != len(rewards):
            raise TrainingError(
                f"rl.algorithm: `advantages` returned {found!r:.80} for the {len(rewards)} rewards "
                "of a group; it has to return one number for each"
            )
        return list(found)


@dataclass(frozen=True, slots=True)
class TokenReturns:
    """The discounted rewards from each token on, sum over k of gamma^k r_{t+k}: reward to go.

    With a penalty in the reward, tokens of a turn differ: REINFORCE++, Hu et al. 2025
    (arXiv:2501.03262).
    """

    gamma: float = 1.0

    def __call__(self, groups: Sequence[Sequence[Earned]]) -> list[list[Advantage]]:
        return [[Credit(self._one(earned)) for earned in group] for group in groups]

    def _one(self, earned: Earned) -> PerToken:
        rows, to_go = earned.token_rewards(), 0.0
        for row in reversed(rows):
            for t in reversed(range(len(row))):
                to_go = row[t] = row[t] + self.gamma * to_go
        return rows


@dataclass(frozen=True, slots=True)
class TurnReturns:
    """The rewards from each turn on, discounted by `gamma` per turn, normalised in the group.

    Kevin, Baronio et al. 2025 (arXiv:2507.11948), section 3. Mean and standard deviation are over
    all turns of the group, with equal weight for each trajectory; with one turn per trajectory this
    equals GRPO.
    """

    gamma: float

    def __call__(self, groups: Sequence[Sequence[Earned]]) -> list[list[Advantage]]:
        return [self._group(group) for group in groups]

    def _group(self, group: Sequence[Earned]) -> list[Advantage]:
        returns = [returns_by_turn(earned, self.gamma) for earned in group]
        values = [list(by_turn.values()) for by_turn in returns]
        mean, square = _moments(values, "rollout")
        std = math.sqrt(square * len(group) / max(len(group) - 1, 1))
        assigned: list[Advantage] = []
        for earned, by_turn in zip(group, returns, strict=True):
            rows: PerToken = [[] for _ in earned.trajectory.segments]
            for i, segment in turns_of(earned.trajectory):
                rows[i] = [(by_turn[i] - mean) / (std + EPS)] * len(segment.token_ids)
            assigned.append(Credit(rows))
        return assigned


def returns_by_turn(earned: Earned, gamma: float) -> dict[int, float]:
    """Returns the rewards from each turn on, discounted by `gamma` per turn, by segment."""
    rewards, to_go = earned.turn_rewards(), 0.0
    returns: dict[int, float] = {}
    for i, _ in reversed(turns_of(earned.trajectory)):
        to_go = returns[i] = rewards[i] + gamma * to_go
    return dict(reversed(returns.items()))


@dataclass(frozen=True, slots=True)
class Whitened:
    """The advantages of `credit`, minus their mean and divided by their std over the whole step.

    REINFORCE++, Hu et al. 2025 (arXiv:2501.03262), equation 8: over all tokens. With `unit`
    "rollout" all trajectories have equal weight. The std is the population's.
    """

    credit: CreditFn
    unit: Unit = "token"

    def __call__(self, groups: Sequence[Sequence[Earned]]) -> list[list[Advantage]]:
        assigned = self.credit(groups)
        values = [
            [x for row in spread(earned.trajectory, advantage) for x in row]
            for group, advantages in zip(groups, assigned, strict=True)
            for earned, advantage in zip(group, advantages, strict=True)
        ]
        mean, square = _moments(values, self.unit)
        # The minimum keeps rewards that are equal up to rounding from becoming advantages.
        scale = 1 / math.sqrt(max(square, 1e-8))
        return [[_scaled(a, mean, scale) for a in advantages] for advantages in assigned]


@dataclass(frozen=True, slots=True)
class Gae:
    """Generalised advantage estimates, Schulman et al. 2016 (arXiv:1506.02438), equation 16.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    A step is a token or a turn. A turn has one value, before its first token, and one advantage,
    shared by its tokens. V after the last step is 0; with `bootstrap` it is the critic's value
    where ludus' limit of tokens or turns cut the episode. The critic's target is A_t + V_t.
    """

    gamma: float = 1.0
    lam: float = 0.95
    level: Literal["token", "turn"] = "token"
    bootstrap: bool = False

    def __call__(self, groups: Sequence[Sequence[Earned]]) -> list[list[Advantage]]:
        return [[self._one(earned) for earned in group] for group in groups]

    def _one(self, earned: Earned) -> Credit:
        trajectory = earned.trajectory
        advantages: PerToken = [[] for _ in trajectory.segments]
        returns: PerToken = [[] for _ in trajectory.segments]
        steps = list(self._steps(earned))
        goes_on = self.bootstrap and trajectory.status is not Status.COMPLETED
        after = _value(steps[-1][1], -1) if steps and goes_on else 0.0
        to_go = 0.0
        for i, segment, start, length, reward in reversed(steps):
            value = _value(segment, start)
            delta = reward + self.gamma * after - value
            to_go = delta + self.gamma * self.lam * to_go
            advantages[i] = [to_go] * length + advantages[i]
            returns[i] = [to_go + value] * length + returns[i]
            after = value
        return Credit(advantages, returns)

    def _steps(self, earned: Earned) -> Iterator[tuple[int, Segment, int, int, float]]:
        """Yields segment index, segment, first token, number of tokens and reward of each step."""
        if self.level == "turn":
            rewards = earned.turn_rewards()
            for i, segment in turns_of(earned.trajectory):
                yield i, segment, 0, len(segment.token_ids), rewards[i]
        else:
            tokens = earned.token_rewards()
            for i, segment in turns_of(earned.trajectory):
                for t, reward in enumerate(tokens[i]):
                    yield i, segment, t, 1, reward


def truncated_importance(
    trajectory: Trajectory, cap: float, level: Literal["token", "trajectory"]
) -> PerToken:
    """min(pi_learner / pi_sampler, cap) of each sampled token, before any update.

    Truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training": learner and sampler differ in arithmetic or in weight versions. At the
    level of trajectories, the ratio of the products over all tokens. The ratio multiplies the
    advantages, hence the policy's loss.
    """
    gaps: PerToken = [[] for _ in trajectory.segments]
    for i, segment in turns_of(trajectory):
        if segment.learner_logprobs is None or segment.logprobs is None:
            raise ValueError("truncated importance sampling needs the learner's log-probabilities")
        gaps[i] = [a - b for a, b in zip(segment.learner_logprobs, segment.logprobs, strict=True)]
    log_cap = math.log(cap)
    if level == "token":
        return [[math.exp(min(gap, log_cap)) for gap in row] for row in gaps]
    whole = math.exp(min(math.fsum(gap for row in gaps for gap in row), log_cap))
    return [[whole] * len(row) for row in gaps]


def weighted(trajectory: Trajectory, advantage: Advantage, weights: PerToken) -> Credit:
    """Returns an advantage times one weight per token."""
    rows = [
        [a * w for a, w in zip(row, row_weights, strict=True)]
        for row, row_weights in zip(spread(trajectory, advantage), weights, strict=True)
    ]
    return replace(advantage, advantages=rows) if isinstance(advantage, Credit) else Credit(rows)


def spread(trajectory: Trajectory, advantage: Advantage) -> PerToken:
    """Returns an advantage as one number per sampled token."""
    if isinstance(advantage, Credit):
        return advantage.advantages
    return [[advantage] * len(s.token_ids) if s.sampled else [] for s in trajectory.segments]


def extremes(advantage: Advantage) -> tuple[float, float]:
    """Returns the lowest and the highest advantage of a trajectory's tokens; 0 without tokens."""
    if not isinstance(advantage, Credit):
        return advantage, advantage
    rows = [row for row in advantage.advantages if row]
    return min(map(min, rows), default=0.0), max(map(max, rows), default=0.0)


def with_advantages(trajectory: Trajectory, advantage: Advantage) -> Trajectory:
    """Returns a copy whose sampled segments have their tokens' advantages."""
    segments = []
    for segment, row in zip(trajectory.segments, spread(trajectory, advantage), strict=True):
        if row:
            segment = segment.copy()
            segment.advantages = [*map(float, row)]
        segments.append(segment)
    return replace(trajectory, segments=segments)


def _scaled(advantage: Advantage, mean: float, scale: float) -> Advantage:
    if isinstance(advantage, Credit):
        rows = [[(x - mean) * scale for x in row] for row in advantage.advantages]
        return replace(advantage, advantages=rows)
    return (advantage - mean) * scale


def _moments(values: Sequence[Sequence[float]], unit: Unit) -> tuple[float, float]:
    """Returns mean and population variance of the trajectories' numbers."""
    rows = [row for row in values if row]
    if unit == "token":
        rows = [[x for row in rows for x in row]] if rows else []
    if not rows:
        return 0.0, 0.0
    mean = math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
    squares = [math.fsum((x - mean) ** 2 for x in row) / len(row) for row in rows]
    return mean, math.fsum(squares) / len(rows)


def _value(segment: Segment, t: int) -> float:
    if segment.values is None:
        raise ValueError("generalised advantage estimation needs the critic's values")
    return segment.values[t]
