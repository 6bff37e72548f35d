"""Less of a recipe: without a stage, or a few steps of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus.cli import app
from ludus.config.load import load_config
from ludus.config.recipes import shipped_recipes
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.pipeline.quick import quick, without_stages
from ludus.services.viewer.overview import describe_run, list_runs
from ludus.services.viewer.source import Source

RECIPES = {n: p for n, p in shipped_recipes().items() if not n.startswith("coevolve-")}


def recipe(name: str, *changes: str) -> RunConfig:
    config = load_config(str(RECIPES[name]), list(changes))
    assert isinstance(config, RunConfig)
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_has_a_quick_version(name: str) -> None:
    config, notes = quick(recipe(name))
    assert config.name == f"{name}-quick"
    assert config.model.path is None
    assert config.model.device == "cpu"
    assert config.backend.name == "local"
    assert config.sampler.name == "in_process"
    for stage in (config.sft, config.rl):
        assert stage is None or stage.steps <= 2
    assert config.evaluate.num_tasks is not None
    assert config.evaluate.num_tasks <= 4
    assert notes[0].startswith("a few steps and episodes")


def test_measurements_of_sft_are_not_rarer_than_its_end() -> None:
    config, notes = quick(recipe("babyai-tiny", "sft.until={every: 20, min_steps: 5}"))
    assert config.sft is not None
    assert config.sft.until is not None
    assert config.sft.until.every == config.sft.steps == 2
    assert "sft.until.every: 20 -> 2" in notes
    assert "sft.until.min_steps: 5 -> 0" in notes


def test_what_differs_is_told() -> None:
    _, notes = quick(recipe("cuda-qwen3-4b", "backend=ray", "metrics=[tensorboard]"))
    assert notes[0].endswith("of a tiny model from scratch in place of Qwen/Qwen3-4B")
    for part in (
        "model.path: Qwen/Qwen3-4B -> null",
        "model.device: cuda -> cpu",
        "model.architecture: null -> qwen3",
        "model.lora.quantise: nf4 -> null",
        "backend.name: ray -> local",
        "metrics: [...] -> []",
        "rl.steps: 200 -> 2",
    ):
        assert part in notes
    _, notes = quick(recipe("cuda-tiny"))
    assert "rollout.max_tokens_per_turn: 128 -> 64" in notes
    assert not [line for line in notes if line.startswith(("name", "model."))]


def test_a_stage_is_left_out() -> None:
    config = recipe("babyai-tiny")
    without = without_stages(config, sft=True, rl=False)
    assert (without.sft, without.demonstrations) == (None, None)
    assert without.rl == config.rl
    without = without_stages(config, sft=False, rl=True)
    assert without.rl is None
    assert without.sft == config.sft


def test_settings_without_effect_are_told_where_sft_is_left_out() -> None:
    told: list[str] = []
    config = recipe("babyai-tiny")
    without_stages(config, sft=True, rl=False, note=told.append)
    assert told == []
    evaluate = config.evaluate.model_copy(update={"before_sft": True})
    config = config.model_copy(update={"evaluate": evaluate})
    without = without_stages(config, sft=True, rl=False, note=told.append)
    assert not without.evaluate.before_sft
    assert told == ["--skip-sft: evaluate.before_sft has no effect without SFT: it is off"]


@pytest.mark.parametrize(
    ("changes", "skipped", "problem"),
    [
        (["sft=null", "demonstrations=null"], ["sft"], "--skip-sft: the recipe has no `sft`"),
        (["rl=null"], ["rl"], "--skip-rl: the recipe has no `rl`"),
        (["rl=null"], ["sft"], "nothing is left to train"),
        ([], ["sft", "rl"], "nothing is left to train"),
    ],
)
def test_nothing_to_skip_or_to_train_is_refused(
    changes: list[str], skipped: list[str], problem: str
) -> None:
    config = recipe("babyai-tiny", *changes)
    with pytest.raises(ConfigError, match=problem):
        without_stages(config, sft="sft" in skipped, rl="rl" in skipped)


def test_a_resumed_run_takes_no_such_option() -> None:
    result = CliRunner().invoke(app, ["train", "--resume", "x-1", "--skip-rl"])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError)
    assert "--skip-rl belongs to the start of a run" in str(result.exception)


def test_a_quick_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "babyai-tiny", "--quick-test", "--skip-rl"])
    assert result.exit_code == 0, result.output
    [run] = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert run.name == "babyai-tiny-quick-1"
    assert (run / "report.html").exists()
    assert_one_time(run)


def assert_one_time(run: Path) -> None:
    """Store, viewer, report and budget tell the same wall time."""
    spent = json.loads((run / "budget.json").read_text())["seconds"]
    parts = json.loads((run / "timings.json").read_text())
    source = Source(run.parent, None)
    row = source.store().run(run.name)
    [listed] = list_runs(source, None)["runs"]
    assert row.finished is not None
    assert row.elapsed_s is not None
    for shown in (listed, describe_run(source, run.name)):
        assert shown["elapsed_s"] == pytest.approx(row.elapsed_s, rel=1e-5)
    assert spent <= row.elapsed_s <= (row.finished - row.created).total_seconds()
    assert 0.5 * spent < sum(parts.values()) <= spent
    source.store().close()
