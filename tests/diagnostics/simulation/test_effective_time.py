"""Effective time under faults, against closed forms."""

from __future__ import annotations

import math

import pytest

from ludus.diagnostics.simulation.faults import Effective, Hazard, effective
from ludus.diagnostics.simulation.parts import Step

STEPS = [Step(0.0, 6.0, 3.0, 1.0, 64, 1e4, 1e3, 0.0, 0)]
NEVER = math.inf


def found(learner_h: float, sampler_h: float = NEVER, every: int = 1, seed: int = 1) -> Effective:
    rates = 1 / (3600 * learner_h), 1 / (3600 * sampler_h)
    return effective(STEPS, Hazard(*rates, 300.0, 120.0, 0.25, every), seed)


def test_no_faults_cost_nothing() -> None:
    assert found(NEVER) == Effective(1.0)


@pytest.mark.parametrize(("mtbf_h", "every"), [(2.0, 1), (2.0, 10), (10.0, 50), (2000.0, 20)])
def test_faults_of_learners_cost_recovery_and_half_an_interval(mtbf_h: float, every: int) -> None:
    """Seconds lost for a fault: the recovery and, in the mean, half of the time between checkpoints
    (Young 1974), where faults are rarer than both."""
    lost = 300 + 10 * every / 2
    result = found(mtbf_h, every=every)
    assert result.ratio == pytest.approx(1 / (1 + lost / (3600 * mtbf_h)), abs=0.006)
    assert result.repeated == pytest.approx((every - 1) / 2, rel=0.1)


def test_faults_of_samplers_slow_the_rollouts_only() -> None:
    """A quarter of the samplers is away for 120 s every 0.5 h: 1/60 of them in the mean."""
    result = found(NEVER, sampler_h=0.5)
    assert result.ratio == pytest.approx(10 / (10 + 6 * (1 / 60) / (59 / 60)))


def test_a_run_that_never_gets_ahead() -> None:
    """A fault a minute, a checkpoint every 100 steps of 10 s."""
    assert found(1 / 60, every=100).ratio < 0.01


def test_the_same_seed_gives_the_same_faults() -> None:
    assert found(3.0, 2.0) == found(3.0, 2.0)
    assert found(3.0, 2.0) != found(3.0, 2.0, seed=2)
