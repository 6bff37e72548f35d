"""An entropy bonus that depends on the policy's entropy: `entropy_target`.

A policy that has become certain plays all episodes of a group alike, so its groups have no signal,
and training stops where it is. A constant bonus prevents that, and turns a policy with few signals
into noise. So the bonus is 0 while the entropy is at its target or above, and grows as it falls:

    bonus = entropy_bonus x (1 - entropy / entropy_target)

He et al. 2025, "Skywork Open Reasoner 1" (arXiv:2505.22312), keep an entropy by a weight that is
raised and lowered step by step. This one follows from the step's own episodes, so a resumed run
has no state to restore.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ludus.core.types import Group
from ludus.train.algorithms.base import Algorithm
from ludus.train.algorithms.losses import with_entropy_bonus

LEVELS = 16
"""Sizes of the bonus between 0 and its weight: each is an algorithm of its own, made once."""


@dataclass(slots=True)
class EntropyControl:
    """The algorithm of each step of a stage."""

    algorithm: Algorithm
    _made: dict[int, Algorithm] = field(default_factory=dict)

    def at(self, groups: Sequence[Group]) -> tuple[Algorithm, dict[str, float]]:
        """The algorithm for these groups, and the bonus as `train/entropy_bonus`; the algorithm
        itself without a target."""
        floor = self.algorithm.entropy_floor
        if floor is None:
            return self.algorithm, {}
        level = round(LEVELS * floor.share(sampled_entropy(groups)))
        weight = floor.weight * level / LEVELS
        if level and level not in self._made:
            loss = with_entropy_bonus(self.algorithm.loss, weight)
            self._made[level] = replace(self.algorithm, loss=loss, regularised=True)
        return self._made.get(level, self.algorithm), {"train/entropy_bonus": weight}


def sampled_entropy(groups: Sequence[Group]) -> float | None:
    """Mean of -log p of the sampled tokens, in nats: an unbiased estimate of the entropy of the
    distribution that they were sampled from. None without such tokens."""
    found = [
        p
        for group in groups
        for trajectory in group.trajectories
        if trajectory.status.trainable and not trajectory.dropped
        for segment in trajectory.segments
        if segment.sampled
        for p in segment.logprobs or ()
    ]
    return -math.fsum(found) / len(found) if found else None
