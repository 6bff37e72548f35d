"""The text of a recipe."""

from __future__ import annotations

from typing import cast

import yaml

from ludus.config.schema import RunConfig
from ludus.core.types import Spec
from ludus.diagnostics.calibration import recipe
from ludus.diagnostics.calibration.calibrate import Calibration
from ludus.diagnostics.calibration.first import base
from ludus.diagnostics.calibration.subject import Subject, config_tasks
from ludus.diagnostics.calibration.trials import Trial

TEXTCRAFT = Subject("env", "textcraft", "textcraft", Spec(name="textcraft"), ["depth-1"])


def config_of(heldout: int, **evaluate: int) -> RunConfig:
    config = base(TEXTCRAFT, 0, None, "sft.jsonl", shows=True)
    evaluates = config.evaluate.model_copy(update=evaluate)
    tasks = config_tasks(TEXTCRAFT, 64, heldout)
    return config.model_copy(update={"tasks": tasks, "evaluate": evaluates})


def test_no_limit_of_the_held_out_tasks_without_effect() -> None:
    def between(heldout: int) -> object:
        config = config_of(heldout, every=10, num_tasks_between=128)
        text = "\n".join(recipe.section("evaluate", recipe._evaluate(config)))
        return yaml.safe_load(text)["evaluate"].get("num_tasks_between")

    assert between(384) == 128
    assert between(128) is None
    assert between(40) is None


def test_sft_is_measured_before_it_ends() -> None:
    class Measured:
        config = config_of(8)
        trial = Trial()

    assert Measured.config.sft is not None
    until = Measured.config.sft.until
    assert until is not None
    update = {"steps": 40, "until": until.model_copy(update={"every": 100})}
    sft = Measured.config.sft.model_copy(update=update)
    Measured.config = Measured.config.model_copy(update={"sft": sft})
    written = {key: value for key, value, _ in recipe._sft(cast(Calibration, Measured))}
    assert written["until"] == {"success": 0.4, "every": 40}
