"""RL ends where its groups have lost their signal."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.config.load import load_config
from ludus.config.recipes import shipped_recipes
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.pipeline.monitoring.rl_end import METRIC, WINDOW, Signal
from ludus.pipeline.parts.checks import check
from ludus.pipeline.quick import quick
from ludus.telemetry.metrics import MetricsLog


def signal(minimum: float | None, shares: list[float | None]) -> Signal:
    made = Signal(minimum)
    for share in shares:
        made.add(share)
    return made


def test_rl_ends_where_the_mean_of_the_last_steps_is_below_the_minimum() -> None:
    reason = signal(0.02, [0.5] * 30 + [0.0] * (WINDOW - 1) + [0.3]).reason
    assert reason is not None
    assert reason.startswith(
        "1.5 % of the groups of the last 20 steps have a signal, less than 2 %"
    )


@pytest.mark.parametrize(
    ("minimum", "shares"),
    [
        (None, [0.0] * 100),
        (0.02, [0.5] * 5 + [0.0] * (WINDOW - 6)),
        (0.02, [0.5] * 30 + [0.0] * 100 + [0.5]),  # the mean of 20 is 2.5 %
        (0.02, [0.0] * 100),  # what is rare at first may be found
        (0.02, [None] * 100),  # an algorithm that does not score
    ],
    ids=["without a minimum", "too few steps", "enough", "never had more", "no measure"],
)
def test_rl_goes_on(minimum: float | None, shares: list[float | None]) -> None:
    assert signal(minimum, shares).reason is None


def test_a_resumed_run_has_the_steps_before_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for stage, shares in (("sft", [1.0] * 50), ("rl", [1.0] * WINDOW + [0.0] * WINDOW)):
            for step, share in enumerate(shares):
                log.log(stage, step, {METRIC: share})
        log.log("rl", 2 * WINDOW, {METRIC: 1.0})  # after the checkpoint: played again
    assert Signal.restored(0.02, path, 2 * WINDOW).reason is not None
    assert Signal.restored(0.02, path, 2 * WINDOW - 1).reason is None
    assert Signal.restored(0.02, path, 2 * WINDOW + 1).reason is None
    assert Signal.restored(None, path, 2 * WINDOW).reason is None


def recipe(*changes: str) -> RunConfig:
    config = load_config(str(shipped_recipes()["babyai-tiny"]), ["rl.min_signal=0.02", *changes])
    assert isinstance(config, RunConfig)
    return config


def test_a_minimum_that_no_step_can_reach_is_refused() -> None:
    check(recipe("rl.steps=21"))
    with pytest.raises(
        ConfigError, match=r"rl.min_signal has no effect: .* and RL has 20 \(`rl.st"
    ):
        check(recipe("rl.steps=20"))
    unused = ["sft.until={success: 0.5}", "rl.steps_per_unused_sft_step=1"]
    check(recipe("rl.steps=20", *unused))


def test_a_quick_version_has_no_ends_of_longer_runs() -> None:
    config, _ = quick(recipe("rl.min_success_to_stop=0.9", "rl.steps=100", "evaluate.every=40"))
    check(config)


@pytest.mark.parametrize(
    ("algorithm", "fault"),
    [
        ("{name: ppo, args: {entropy_target: 0.5}}", "entropy_target has no effect without"),
        ("{name: ppo, args: {clipp: 0.5}}", "rl.algorithm.args.clipp is not an argument of ppo"),
    ],
)
def test_all_that_another_algorithm_does_not_take_is_told_at_once(
    algorithm: str, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault) as refused:
        check(recipe(f"rl.algorithm={algorithm}", "rollout.temperature=0"))
    said = str(refused.value)
    assert "rollout.temperature: 0 is greedy" in said
    assert "rl.min_signal has no effect with ppo" in said
