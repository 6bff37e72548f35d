"""Effective time under faults, which are too rare for the simulation of a few steps.

A fault of a node with a learner ends the step: training goes on after `recovery_s`, from the last
checkpoint; a fault during the recovery begins it anew. A node that only samples takes its share of
the samplers away for `sampler_recovery_s`; rollouts take longer by that share, in the mean.

    effective-time ratio = seconds that the steps take without faults / seconds with them

Faults come at random (exponential times). The events are the faults, not the steps between them, so
days between two faults cost nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.diagnostics.simulation.parts import Step

FAULTS = 2000
"""Faults of learner nodes that are simulated."""


@dataclass(frozen=True, slots=True)
class Hazard:
    """Faults a second of learner nodes and of pure sampler nodes, and what they cost.

    Args:
        lost_share: part of the samplers on a sampler node.
        checkpoint_every: steps between two checkpoints.
    """

    learner_rate: float
    sampler_rate: float
    recovery_s: float
    sampler_recovery_s: float
    lost_share: float
    checkpoint_every: int


@dataclass(frozen=True, slots=True)
class Effective:
    """The ratio; hours between two faults of learner nodes and of sampler nodes (infinite without
    them); steps done again for a fault of a learner node."""

    ratio: float
    learner_h: float = float("inf")
    sampler_h: float = float("inf")
    repeated: float = 0.0


def effective(steps: Sequence[Step], hazard: Hazard, seed: int = 0) -> Effective:
    """Simulate FAULTS faults of a run whose steps take the mean of `steps`."""
    mean_s = sum(step.seconds for step in steps) / len(steps)
    rollout_s = sum(step.rollout_s for step in steps) / len(steps)
    away = hazard.lost_share * hazard.sampler_rate * hazard.sampler_recovery_s
    away = min(away, 0.99)
    step_s = mean_s + rollout_s * away / (1 - away)
    sampler_h = 1 / hazard.sampler_rate / 3600 if hazard.sampler_rate else float("inf")
    if not hazard.learner_rate:
        return Effective(mean_s / step_s, sampler_h=sampler_h)
    rng, interval = random.Random(seed), hazard.checkpoint_every * step_s
    kept, repeated, total = 0, 0, 0.0
    for _ in range(FAULTS):
        worked = rng.expovariate(hazard.learner_rate)
        saved = int(worked / interval)
        kept += saved * hazard.checkpoint_every
        repeated += int((worked - saved * interval) / step_s)
        total += worked + _recovery(hazard, rng)
    return Effective(
        kept * mean_s / total, 1 / hazard.learner_rate / 3600, sampler_h, repeated / FAULTS
    )


def _recovery(hazard: Hazard, rng: random.Random) -> float:
    """Seconds of a recovery that further faults begin anew, at most 1,000 times."""
    spent = 0.0
    for _ in range(1000):
        fault = rng.expovariate(hazard.learner_rate)
        if fault >= hazard.recovery_s:
            break
        spent += fault
    return spent + hazard.recovery_s
