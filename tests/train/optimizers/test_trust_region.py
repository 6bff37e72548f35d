"""`rl.optimizer.target_kl`: the learning rate follows how far a step moved the policy."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest
from learner_helpers import make_batch, make_samples, policy

from ludus.config.schema import OptimizerConfig, RLConfig
from ludus.config.training import RLOptimizerConfig
from ludus.core.errors import ConfigError
from ludus.train.algorithms.losses import clipped
from ludus.train.learner import Learner
from ludus.train.optimizers.trust_region import FASTEST, SLOWEST, START, RateScale, moved

SURROGATE = clipped(0.2, 0.28)


def test_the_first_optimizer_step_measures_rounding_alone() -> None:
    assert moved([{"kl": 0.0}, {"kl": 0.1}, {"kl": 0.3}]) == pytest.approx(0.2)
    assert moved([{"kl": 4e-4}, {"kl": 5e-4}]) == pytest.approx(1e-4)
    assert moved([{"kl": 4e-4}, {"kl": 2e-4}]) == pytest.approx(-2e-4)
    assert moved([{"kl": 0.5}]) is None
    assert moved([{"loss": 1.0}, {"loss": 1.0}]) is None


def after(kl: float | None, scale: float = 0.5, share: float = 1.0) -> float:
    """The scale after one iteration, with a target of 0.01."""
    rate = RateScale(0.01, scale)
    rate.update(kl, share)
    return rate.scale


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.01, 1.0),
        (0.04, 0.5),
        (0.9, 0.25),
        (0.0081, 10 / 9),
        (1e-6, 1.25),
        (0.0, 1.25),
        (-1e-3, 1.25),
        (None, 1),
    ],
)
def test_the_rate_follows_the_root_of_the_ratio_within_limits(
    kl: float | None, expected: float
) -> None:
    assert after(kl) == pytest.approx(0.5 * expected)


def test_the_target_falls_with_the_schedule_and_stays_at_its_end() -> None:
    assert after(0.0025, 1.0, 0.5) == pytest.approx(1.0)
    assert after(1e-9, 0.3, 0.05) == 0.3


def test_a_kl_without_bounds_is_forgotten() -> None:
    for kl in (math.inf, -math.inf, math.nan):
        rate = RateScale(0.01, 0.5)
        rate.update(kl, 1.0)
        assert rate.scale == 0.125
        rate.update(1e-9, 1.0)
        assert rate.scale > 0.125


def test_a_kl_that_is_no_number_slows_down() -> None:
    assert after(float("nan"), 1.0) == 0.25
    assert after(float("nan"), SLOWEST) == SLOWEST


def test_the_scale_has_limits() -> None:
    low, high = RateScale(0.01, 1.0), RateScale(0.01, 1.0)
    for _ in range(50):
        low.update(1e3 * low.scale**2, 1.0)
        high.update(1e-9, 1.0)
    assert (low.scale, high.scale) == (SLOWEST, FASTEST)
    assert FASTEST == 1.0, "the schedule's rate is the peak"


def test_one_noisy_iteration_does_not_hold_the_rate_down() -> None:
    rate = RateScale(0.01, 0.5)
    for _ in range(10):
        rate.update(0.04 * rate.scale**2, 1.0)  # the target at half of the peak
    assert rate.scale == pytest.approx(0.5)
    rate.update(0.1, 1.0)  # ten times as much, by a few tokens
    assert 0.25 < rate.scale < 0.4
    for _ in range(8):
        rate.update(0.04 * rate.scale**2, 1.0)
    assert rate.scale > 0.4


def test_the_mean_of_noisy_iterations_reaches_the_target() -> None:
    draw, rate, kls = random.Random(0), RateScale(0.01, 0.5), []
    for _ in range(2000):
        kls.append(0.04 * rate.scale**2 * draw.lognormvariate(-0.5, 1.0))  # of mean 1
        rate.update(kls[-1] + draw.gauss(0, 3e-4), 1.0)
    assert fmean(kls) == pytest.approx(0.01, rel=0.25)


def test_rounding_at_the_end_of_a_schedule_is_no_movement() -> None:
    draw, rate = random.Random(0), RateScale(0.003, 0.5)
    scales = []
    for step in range(100):
        share = 1 - step / 100
        rate.update(0.012 * (rate.scale * share) ** 2 + draw.gauss(0, 1e-4), share)
        scales.append(rate.scale)
    assert min(scales) > 0.2


def learner_of(config: OptimizerConfig) -> Learner:
    return Learner(policy(), config, 100)


def test_a_policy_that_moved_too_far_is_slowed_down() -> None:
    learner = learner_of(RLOptimizerConfig(lr=0.05, target_kl=1e-4))
    learner.rate_scale = RateScale(1e-4, 1.0)
    batches = [make_batch(make_samples(8, seed)) for seed in (0, 0, 0)]
    steps = [learner.train_step(batch, SURROGATE) for batch in batches]
    assert steps[-1]["kl"] > 4e-3
    found = learner.adapt(steps)
    assert found["train/moved_kl"] == moved(steps)
    assert found["train/target_kl"] == pytest.approx(1e-4)
    assert found["train/rate_scale"] == 0.25
    assert learner.train_step(batches[0], SURROGATE)["lr"] == pytest.approx(0.0125)


def test_the_first_iteration_is_held_before_anything_is_measured() -> None:
    held = learner_of(RLOptimizerConfig(lr=0.05, target_kl=1e-4))
    assert held.train_step(make_batch(make_samples(8, 0)), SURROGATE)["lr"] == 0.05 * START


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(1e-4, 1e-4, 0.3), (1e-4, None, 1.0), (None, 1e-4, START), (None, None, 1.0)],
)
def test_a_resumed_run_takes_the_scale_where_both_hold_a_target(
    before: float | None, after: float | None, expected: float
) -> None:
    cut, resumed = (learner_of(RLOptimizerConfig(target_kl=kl)) for kl in (before, after))
    if before is not None:
        cut.rate_scale = RateScale(before, 0.3, kl=2e-4, squares=0.1)
    resumed.restore_scale(cut.saved_scale)
    assert resumed.optim_step()["lr"] == expected * resumed.config.lr
    if before and after:
        assert resumed.rate_scale == cut.rate_scale


def test_without_a_target_the_schedule_decides() -> None:
    for config in (OptimizerConfig(lr=0.05), RLOptimizerConfig(lr=0.05)):
        learner = learner_of(config)
        assert learner.adapt([{"kl": 0.0}, {"kl": 1.0}]) == {}
        assert learner.rate_scale is None


def test_a_loss_that_does_not_measure_it_is_refused() -> None:
    learner = learner_of(RLOptimizerConfig(target_kl=0.01))
    learner.adapt([])  # all minibatches were left out
    with pytest.raises(ConfigError, match=r"target_kl has no effect: .* no \"kl\""):
        learner.adapt([{"loss": 1.0}, {"loss": 1.0}])


def test_one_optimizer_step_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="set `minibatches: 2` or more"):
        RLConfig.model_validate({"optimizer": {"target_kl": 0.01}})
    RLConfig.model_validate({"optimizer": {"target_kl": 0.01}, "minibatches": 2})
    RLConfig.model_validate({"optimizer": {"target_kl": 0.01}, "epochs": 2})
