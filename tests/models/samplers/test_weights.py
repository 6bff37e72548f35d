"""Weight transfer to a sampler's process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers import tiny
from transformers import AutoModelForCausalLM

from ludus.config.schema import LoraConfig
from ludus.core.errors import TrainingError
from ludus.models.build import _with_lora, merge_lora
from ludus.models.samplers.vllm_side.ludus_vllm_side import difference, layout
from ludus.models.samplers.weights import WEIGHTS, probe_logprobs, write_model

IDS = [3, 14, 15, 9, 26]


def test_content_hash(tmp_path: Path) -> None:
    model = tiny()
    first = write_model(model, tmp_path / "a")
    assert write_model(tiny(), tmp_path / "b") == first
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-6
    assert write_model(model, tmp_path / "a") != first


def test_written_model_loads_equal(tmp_path: Path) -> None:
    model = tiny()
    write_model(model, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert probe_logprobs(loaded, IDS) == probe_logprobs(model, IDS)


def test_written_adapters_are_merged(tmp_path: Path) -> None:
    model = _with_lora(tiny(), LoraConfig())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05)
    model.eval()
    write_model(merge_lora(model), tmp_path / "model")
    assert layout(tmp_path / "model" / WEIGHTS).keys() == _names(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert probe_logprobs(loaded, IDS) == pytest.approx(probe_logprobs(model, IDS), abs=1e-4)
    assert probe_logprobs(loaded, IDS) != pytest.approx(probe_logprobs(tiny(), IDS), abs=1e-2)


def _names(folder: Path) -> set[str]:
    write_model(tiny(), folder)
    return set(layout(folder / WEIGHTS))


def test_probe_keeps_the_training_mode() -> None:
    model = tiny().train()
    probe_logprobs(model, IDS)
    assert model.training


def test_probe_refuses_diverged_weights() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(TrainingError, match="diverged"):
        probe_logprobs(model, IDS)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"a": "F32[2, 3]", "b": "F32[4]"}, None),
        ({"a": "F32[2, 3]"}, "b is missing"),
        ({"a": "F32[2, 3]", "b": "F32[4]", "c": "F32[1]"}, "c is unknown to the model"),
        ({"a": "F32[3, 2]", "b": "F32[4]"}, r"a is F32[3, 2]; the model has F32[2, 3]"),
        ({"a": "F32[2, 3]", "b": "BF16[4]"}, "b is BF16[4]; the model has F32[4]"),
    ],
)
def test_layout_difference(given: dict[str, str], told: str | None) -> None:
    assert difference({"a": "F32[2, 3]", "b": "F32[4]"}, given) == told
