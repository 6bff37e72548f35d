"""The text of a recipe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from ludus.config.schema import RunConfig
from ludus.core.types import Spec
from ludus.diagnostics.calibration import choices, recipe
from ludus.diagnostics.calibration.calibrate import Calibration
from ludus.diagnostics.calibration.first import base
from ludus.diagnostics.calibration.subject import Subject, config_tasks
from ludus.diagnostics.calibration.trials.trial import Trial
from ludus.diagnostics.calibration.tuned import with_choices, with_few_episodes, with_measurement

TEXTCRAFT = Subject("env", "textcraft", "textcraft", Spec(name="textcraft"), ["depth-1"])


def config_of(heldout: int) -> RunConfig:
    config = base(TEXTCRAFT, 0, None, "sft.jsonl", shows=True)
    return config.model_copy(update={"tasks": config_tasks(TEXTCRAFT, 64, heldout)})


def tuned(heldout: int, episode_tokens: float = 5, **measured: Any) -> RunConfig:
    trial = Trial(losses={2e-3: 1.0}, rl_step_s=1.0, **measured)
    return with_choices(config_of(heldout), trial, 10, 1e9, episode_tokens)[0]


def test_no_limit_of_the_held_out_tasks_without_effect() -> None:
    def between(heldout: int) -> object:
        text = "\n".join(recipe.section("evaluate", recipe._evaluate(tuned(heldout))))
        return yaml.safe_load(text)["evaluate"].get("num_tasks_between")

    assert between(384) == 128
    assert between(128) is None
    assert between(40) is None


def test_episodes_of_the_expert_that_the_limit_of_turns_cuts_are_told() -> None:
    def line(*turns: int) -> str:
        config = config_of(64)
        rollout = config.rollout.model_copy(update={"max_turns": 8})
        calibration = SimpleNamespace(
            config=config.model_copy(update={"rollout": rollout}),
            expert=SimpleNamespace(turns=list(turns)),
            subject=TEXTCRAFT,
            lengths=SimpleNamespace(turn_max=5),
            searches=False,
            trial=Trial(losses={}),
        )
        lines = recipe._rollout(cast(Calibration, calibration))
        return next(str(told) for key, _, told in lines if key == "max_turns")

    assert "longer" not in line(3, 8)
    assert line(3, 8, 9, 34).startswith("the expert: 13.5, at most 34; 2 of its 4 episodes are lo")


def test_long_turns_are_held_to_a_smaller_kl_a_token() -> None:
    def target(episode_tokens: float) -> float | None:
        rl = tuned(64, episode_tokens).rl
        assert rl is not None
        return rl.optimizer.target_kl

    assert [target(tokens) for tokens in (5, 20, 36, 75)] == [0.003, 0.003, 0.002, 0.0008]


def test_the_rate_of_rl_is_high_only_where_a_target_holds_it() -> None:
    few, trial = with_few_episodes(config_of(64)), Trial(losses={2e-3: 1.0}, rl_step_s=1.0)
    held, free = tuned(64).rl, with_choices(few, trial, 10, 1e9, 5)[0].rl
    assert held is not None
    assert free is not None
    assert (held.optimizer.lr, free.optimizer.lr) == (1e-3, 3e-4)
    assert (held.optimizer.target_kl, free.optimizer.target_kl) == (0.003, None)


def test_few_steps_of_rl_have_no_end_by_their_signal() -> None:
    trial = Trial(losses={2e-3: 1.0}, rl_step_s=1.0)
    slow = Trial(losses={2e-3: 1.0}, sft_step_s=0.1, rl_step_s=1e4)
    many, few = (with_choices(config_of(64), each, 10, 1e9, 5)[0].rl for each in (trial, slow))
    assert many is not None
    assert few is not None
    assert (few.steps, few.min_signal) == (20, None)
    assert many.min_signal == 0.02


def test_tasks_that_sft_alone_solves_have_more_sft_and_an_end_of_rl() -> None:
    for solved, target, stop in ((0.95, 0.95, 0.98), (0.5, 0.4, None)):
        config = tuned(64, curve=[(40, 0.3), (80, solved)])
        assert config.sft is not None
        assert config.sft.until is not None
        assert config.rl is not None
        assert (config.sft.until.success, config.rl.min_success_to_stop) == (target, stop)


def test_a_recipe_in_bfloat16_tells_the_seconds_that_decided() -> None:
    class Measured:
        trial = Trial(step_s={"float32": 0.331, "bfloat16": 0.196})
        config = tuned(64, step_s=trial.step_s)

    [line] = recipe.of_products(Measured.config, Measured.trial.told_dtypes)
    assert line == (
        "learner: {dtype: bfloat16}  # products in bfloat16, weights in float32: 0.20 s a step of "
        "SFT, in float32 0.33 s"
    )
    assert recipe.of_products(tuned(64)) == []


def test_sft_is_measured_before_it_ends() -> None:
    class Measured:
        config = tuned(8, sft_step_s=1.0, eval_s=40.0, curve=[(5, 0.35)])
        trial = Trial()

    assert Measured.config.sft is not None
    assert Measured.config.sft.steps == 40
    written = {key: value for key, value, _ in recipe._sft(cast(Calibration, Measured))}
    assert written["until"] == {"success": 0.4, "min_gain": 0.1, "min_steps": 5, "every": 20}


def test_a_plateau_ends_sft_only_after_the_steps_of_the_trial() -> None:
    curve = [(292, 0.48), (382, 0.43), (502, 0.52)]
    assert choices.min_steps(Trial(curve=curve), 1900, 20) == 502
    assert choices.min_steps(Trial(curve=curve), 800, 20) == 400
    assert choices.min_steps(Trial(curve=curve), 800, 500) == 400
    assert choices.min_steps(Trial(curve=curve), 800, 800) == 0  # no measurement comes later
    assert choices.min_steps(Trial(), 800, 20) == 0


def test_a_target_that_is_not_expected_is_said_beside_it() -> None:
    class Measured:
        trial = Trial(curve=[(100, 0.01), (200, 0.02)], losses={2e-3: 1.0}, rl_step_s=1.0)
        config = tuned(64, sft_step_s=1.0, curve=trial.curve)

    def reason() -> str:
        return {k: why for k, _, why in recipe._sft(cast(Calibration, Measured))}["until"]

    assert reason().endswith("2% after 200 steps; not expected to reach 40% in these steps")
    Measured.trial.curve[-1] = (200, 0.5)
    Measured.trial.curve.append((220, 0.5))
    assert "not expected" not in reason()


@pytest.mark.parametrize(
    ("num_train", "measured"), [(3, (3, 4)), (9, (9, 2)), (39, (16, 1)), (1000, (16, 1))]
)
def test_slow_environments_measure_several_episodes(
    num_train: int, measured: tuple[int, int]
) -> None:
    few = with_few_episodes(with_measurement(config_of(64), num_train))
    assert few.sft is not None
    assert few.sft.until is not None
    assert (few.sft.until.num_tasks, few.sft.until.samples_per_task) == measured
