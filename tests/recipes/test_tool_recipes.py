"""Recipes with tools: exact shares, and a plan that fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen3Config

from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.core.errors import MissingDependency
from ludus.diagnostics import plan as planning
from ludus.diagnostics.hardware import HARDWARE
from ludus.pipeline.parts.checks import check
from ludus.pipeline.parts.registries import parts_of
from ludus.tasks.ratios import shares

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(name: str, *overrides: str) -> RunConfig:
    config = load_config(str(RECIPES / f"{name}.yaml"), list(overrides))
    try:
        check(config)
    except MissingDependency as error:
        pytest.skip(str(error))
    return config


@pytest.mark.parametrize("name", ["math-tool-qwen3-4b", "mixed-qwen3-4b"])
def test_it_fits_the_gpu_that_it_is_meant_for(name: str, tmp_path: Path) -> None:
    Qwen3Config(  # as the config.json on the hub has it: no test reaches the hub
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    config = recipe(name, f"model.path={tmp_path}")
    found = planning.plan(config, HARDWARE["h200"], fill=0.4)
    assert found.num_parameters == 4_022_468_096
    assert found.fits


@pytest.mark.parametrize("name", ["mixed-tiny", "mixed-qwen3-4b"])
def test_each_step_has_whole_groups_of_each_part(name: str) -> None:
    config = recipe(name)
    train = config.tasks.train.args["parts"]
    ratios = shares({part: settings["ratio"] for part, settings in train.items()})
    assert ratios == {"code": 4, "search": 3, "maths": 3}
    assert config.rl is not None
    assert config.rl.groups_per_step % 10 == 0
    assert {part: spec.tools for part, spec in parts_of(config).items()} == {
        "code": [],
        "search": ["search"],
        "maths": ["python"],
    }
