"""Credit by turns that start from the same state, as in GiGPO.

The episodes of a group start from the same state, and come to the same states again: the same room,
the same page. There, their next turns can be compared:

    episode 0    kitchen -> corridor -> garden -> coin      return at the kitchen  g^3
    episode 1    kitchen -> cellar -> kitchen -> corridor   return at the kitchen  0 and 0

The state is the observation before a turn: what the environment said since the turn before. The
first turn's is the whole prompt, with the task and the tools.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.core.types import Segment, Trajectory
from ludus.train.algorithms.advantages import AdvantageFn
from ludus.train.algorithms.credit import Advantage, Credit, Earned, returns_by_turn, turns_of

State = tuple[int, ...]
"""The token ids of an observation."""


@dataclass(frozen=True, slots=True)
class AnchorStates:
    """A_i + weight * A_s(turn): the episode's reward compared in its group, and the turn's
    discounted return compared with those of the group's turns from the same observation.

    GiGPO, Feng et al. 2025 (arXiv:2505.10978), section 4. A turn whose observation no
    other turn of the group has gets A_i alone. Observations are compared by their tokens; the first
    turn's is the prompt.

    Args:
        compare: from the rewards of a group, and from the returns at a state, to advantages.
        gamma: discount per turn.
        weight: the paper's omega.
    """

    compare: AdvantageFn
    gamma: float
    weight: float

    def __call__(self, groups: Sequence[Sequence[Earned]]) -> list[list[Advantage]]:
        return [self._group(group) for group in groups]

    def _group(self, group: Sequence[Earned]) -> list[Advantage]:
        of_episodes = self.compare([earned.total for earned in group])
        of_turns = self._of_turns(group)
        assigned: list[Advantage] = []
        for k, (earned, of_episode) in enumerate(zip(group, of_episodes, strict=True)):
            rows: list[list[float]] = [[] for _ in earned.trajectory.segments]
            for i, segment in turns_of(earned.trajectory):
                advantage = of_episode + self.weight * of_turns.get((k, i), 0.0)
                rows[i] = [advantage] * len(segment.token_ids)
            assigned.append(Credit(rows))
        return assigned

    def _of_turns(self, group: Sequence[Earned]) -> dict[tuple[int, int], float]:
        """Returns the advantages of the turns, by trajectory and segment, at states that several
        turns have."""
        visits: dict[State, dict[tuple[int, int], float]] = defaultdict(dict)
        for k, earned in enumerate(group):
            for i, value in returns_by_turn(earned, self.gamma).items():
                if state := observation_before(earned.trajectory, i):
                    visits[state][k, i] = value
        found: dict[tuple[int, int], float] = {}
        for returns in visits.values():
            if len(returns) > 1:
                found |= zip(returns, self.compare(list(returns.values())), strict=True)
        return found


def observation_before(trajectory: Trajectory, turn: int) -> State:
    """Returns the token ids between the turn before and segment `turn`; empty where a turn follows
    a turn. Turns that were not sampled are turns: of another model, or without their reasoning."""
    parts: list[list[int]] = []
    at = trajectory.segments[turn].parent
    while at >= 0 and not _is_turn(trajectory.segments[at]):
        parts.append(trajectory.segments[at].token_ids)
        at = trajectory.segments[at].parent
    return tuple(token for part in reversed(parts) for token in part)


def _is_turn(segment: Segment) -> bool:
    message = segment.message
    return segment.sampled or (message is not None and message.role == "assistant")
