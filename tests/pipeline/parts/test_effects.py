"""Settings without effect are refused together, each with its origin and what to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ludus.config.load import load_config, located
from ludus.core.errors import ConfigError
from ludus.pipeline.parts.checks import check

RECIPE = "babyai-tiny"


def refusals(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        check(load_config(RECIPE, overrides))
    return located(RECIPE, overrides, str(refused.value)).splitlines()


UNTIL: dict[str, Any] = {
    "sft={data: x, steps: 10, until: {every: 20}}": [
        "sft: `steps` is 10, so SFT would be over before its first measurement (`until.every` is "
        "20): sft.until.every=10, or sft.until=null"
    ],
    "sft={data: x, steps: 5, until: {min_steps: 10}}": [
        "sft: `steps` is 5, so SFT would be over before its first measurement (`until.every` is "
        "10): sft.until.every=5, or sft.until=null",
        "sft: `steps` is 5 and `until.every` 10, so no measurement comes between step 0 and the "
        "end, and with `until.min_steps` 10 `until.patience` and `until.min_gain` would have "
        "no effect: sft.until.min_steps=0",
    ],
    "sft={data: x, steps: 20, until: {min_steps: 15}}": [
        "sft: `steps` is 20 and `until.every` 10, so no measurement comes between step 10 and "
        "the end, and with `until.min_steps` 15 `until.patience` and `until.min_gain` would have "
        "no effect: sft.until.min_steps=10"
    ],
}


@pytest.mark.parametrize("override", UNTIL)
def test_measurements_that_never_come(override: str) -> None:
    told = refusals(override, "demonstrations=null")
    assert told == [f"override {override}: {line}" for line in UNTIL[override]]


def test_a_smaller_run_of_a_calibrated_recipe_is_refused_once() -> None:
    """SFT's and RL's faults come together, so that one more try is enough."""
    smaller = ["sft.steps=20", "rl.steps=10"]
    own = ["sft.until={every: 30, min_steps: 100}", "rl.min_signal=0.02"]
    told = refusals(*own, *smaller)
    assert [line.partition(": ")[0] for line in told] == [
        "override sft.steps=20",
        "override sft.steps=20",
        "override rl.steps=10",
    ]
    remedies = [line.rpartition(": ")[2] for line in told]
    assert remedies == [
        "sft.until.every=20, or sft.until=null",
        "sft.until.min_steps=0",
        "rl.min_signal=null, or more steps",
    ]
    mended = ["sft.until.every=20", "sft.until.min_steps=0", "rl.min_signal=null"]
    check(load_config(RECIPE, [*own, *smaller, *mended]))


@pytest.mark.parametrize("every", [0, 70, 500])
def test_an_end_by_evaluations_that_never_come(every: int) -> None:
    """RL has the steps that SFT leaves unused besides: with them 70."""
    recipe = ["sft.steps=100", "sft.until={}", "rl.steps=20", "rl.steps_per_unused_sft_step=0.5"]
    stop = ["rl.min_success_to_stop=0.9", "rl.min_signal=null"]
    (told,) = refusals(*recipe, *stop, f"evaluate.every={every}")
    assert told == (
        f"override rl.steps=20: rl.min_success_to_stop: no evaluation comes between steps: "
        f"`evaluate.every` is {every}, and RL has at most 70 steps (`rl.steps`): set "
        "evaluate.every below that, or rl.min_success_to_stop to null"
    ).replace("override rl.steps=20", f"override evaluate.every={every}")
    check(load_config(RECIPE, [*recipe, *stop, "evaluate.every=69"]))


def test_an_override_is_blamed_for_the_value_that_a_fault_quotes() -> None:
    overrides = ["tasks.train.args.num_tasks=3", "tasks.train.args.tiers=[GoToObj, Foo]"]
    told = located(RECIPE, overrides, "tasks.train.args: 'Foo' is no tier\nof all\nenv: 'x' fails")
    assert told.splitlines()[:2] == [
        "override tasks.train.args.tiers=[GoToObj, Foo]: tasks.train.args: 'Foo' is no tier",
        "of all",
    ]
    assert re.fullmatch(r".*babyai-tiny\.yaml: env: 'x' fails \[line \d+\]", told.splitlines()[2])


def test_recipes_of_functions_blame_an_override_for_its_own_key_alone(tmp_path: Path) -> None:
    """`rl.steps` was blamed for all faults of `rl`, since no line names another origin."""
    file = tmp_path / "recipe.py"
    file.write_text(
        "from ludus.config.load import load_config\n"
        f"def recipe(): return load_config({RECIPE!r}, ['rl.minibatches=4000'])\n"
    )
    source = f"{file}:recipe"
    with pytest.raises(ConfigError) as refused:
        check(load_config(source, ["rl.steps=3"]))
    told = located(source, ["rl.steps=3"], str(refused.value))
    assert told.startswith(f"{source}: rl.minibatches: 4000 exceed")


def test_no_message_shows_the_password_of_a_url() -> None:
    secret = "ftp://user:PASSW0RD@host/x"
    assert "PASSW0RD" not in located(
        RECIPE, [f"mirror={secret}"], f"mirror: {secret}: no such host"
    )
    keyed = "metrics=[{name: wandb, args: {api_key: SECRETKEY, project: mine}}]"
    told = located(RECIPE, [keyed], "metrics.0: no")
    assert told == (
        "override metrics=[{name: wandb, args: {api_key: ***, project: mine}}]: metrics.0: no"
    )
    level = ["rl.algorithm.args.level=token"]
    assert "level=token" in located(RECIPE, level, "rl.algorithm.args.level: no")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("verify=true", "verify compares one sampler with the learner"),
        ("judge=answer", "a `judge` may hold state"),
        ("env={name: alfworld}", "env: alfworld does not declare `several_processes`"),
    ],
)
def test_processes_that_the_recipe_does_not_allow(override: str, reason: str) -> None:
    """They are refused before demonstrations are played and a run's folder exists."""
    told = refusals("rollout.processes=2", override)
    [line] = [line for line in told if "rollout.processes" in line]
    assert line.startswith("override ")
    assert f": rollout.processes: 2 is not possible: {reason}" in line
