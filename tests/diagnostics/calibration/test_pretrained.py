"""Values for a pretrained model on a GPU; the GPU is a row of the table, so none is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from harness import SMALLEST

from ludus.config.schema import DemonstrationsConfig, RunConfig
from ludus.config.sections import ModelConfig
from ludus.config.training import SFTConfig
from ludus.core.types import Spec
from ludus.diagnostics.calibration import pretrained
from ludus.diagnostics.calibration.recipe import of_products
from ludus.diagnostics.hardware import HARDWARE
from ludus.models.build import build_model
from ludus.models.chat.tokenizers import train_tokenizer


def settings_of(folder: Path) -> RunConfig:
    """A recipe of a model that it writes to a folder."""
    tokenizer = train_tokenizer(Spec(name="words"), ["a b c"])
    shape = ModelConfig(architecture=Spec(name="qwen3", args=SMALLEST), tokenizer="words")
    build_model(shape, tokenizer, 0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return RunConfig.model_validate(
        {
            "name": "one",
            "model": {"path": str(folder / "model"), "device": "cuda", "context_length": 128},
            "env": {"name": "babyai"},
            "tasks": {"train": {"name": "seeds", "args": {"env": "babyai", "num_tasks": 8}}},
            "rl": {"algorithm": {"name": "grpo"}, "steps": 10},
        }
    )


def test_products_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path)
    monkeypatch.setattr(pretrained, "find_hardware", lambda name, model: HARDWARE["h100"])
    said: list[str] = []
    found, _ = pretrained.with_starting_values(settings, 5, said.append)
    assert found.learner.dtype == "bfloat16"
    assert found.model.dtype == "float32"  # small updates would be lost in 8 bits
    assert found.sampler == Spec(name="in_process", args={"dtype": "bfloat16"})
    assert found.rl is not None
    assert found.rl.algorithm.args["importance_cap"] == 2.0
    written = yaml.safe_load("\n".join(of_products(found)))
    assert written == {
        "learner": {"dtype": "bfloat16"},
        "sampler": {"name": "in_process", "args": {"dtype": "bfloat16"}},
    }
    on_cpu = settings.model_copy(
        update={"model": settings.model.model_copy(update={"device": "cpu"})}
    )
    found, _ = pretrained.with_starting_values(on_cpu, 5, said.append)
    assert of_products(found) == []
    assert found.rl is not None
    assert "importance_cap" not in found.rl.algorithm.args


def test_sft_leaves_half_of_the_minutes_to_rl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "find_hardware", lambda name, model: HARDWARE["h100"])
    settings = settings_of(tmp_path)
    given = SFTConfig(steps=1_000_000)
    rl, demonstrations = settings.rl, DemonstrationsConfig(num_episodes=8)
    assert rl is not None
    settings = settings.model_copy(update={"sft": given, "demonstrations": demonstrations})
    found, _ = pretrained.with_starting_values(settings, 5, lambda _: None)
    assert found.sft is not None
    assert found.rl is not None
    assert 20 < found.sft.steps < given.steps
    assert found.rl.steps > 1
    short, _ = pretrained.with_starting_values(settings, 0.01, lambda _: None)
    assert short.sft is not None
    assert short.rl is not None
    assert (short.sft.steps, short.rl.steps) == (20, 1)
