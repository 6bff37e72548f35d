"""Base weights in 4 bits: they train, sample, are saved, merged and exported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ludus.config.schema import ModelConfig
from ludus.core.errors import MissingDependency
from ludus.core.types import Spec
from ludus.models import quantisation
from ludus.models.build import build_model, merge_lora
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.decoders.llama import read
from ludus.models.quantisation import is_packed, weight_of
from ludus.train.checkpoint.export import export_hf
from ludus.train.checkpoint.loading import identity, load
from ludus.train.checkpoint.state import all_tensors, fingerprint, trained_tensors
from ludus.train.checkpoint.store import CheckpointStore

ABSENT = importlib.util.find_spec("bitsandbytes") is None
needs = pytest.mark.skipif(ABSENT, reason="bitsandbytes is not installed: ludus-rl[qlora]")

SIZES = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "intermediate_size": 256}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(Spec(name="words"), ["turn left", "turn right", "pick up the ball"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A pretrained model."""
    config = ModelConfig(
        architecture=Spec(name="qwen3", args=SIZES), tokenizer="words", context_length=64
    )
    path = tmp_path_factory.mktemp("base") / "model"
    return export_hf(build_model(config, tokenizer, 1), tokenizer, path)


def settings(folder: Path, quantise: str | None = "nf4", **fields: Any) -> ModelConfig:
    lora = {"rank": 4, "quantise": quantise}
    return ModelConfig.model_validate(
        {"path": str(folder), "context_length": 64, "lora": lora, **fields}
    )


def stirred(model: Any) -> Any:
    """The model with adapters that change its output."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model.eval()(torch.arange(10)[None]).logits
    return out


@needs
def test_the_base_is_packed_and_the_adapters_train(folder: Path, tokenizer: Any) -> None:
    model = build_model(settings(folder), tokenizer, 1)
    packed = [m for m in model.modules() if is_packed(m)]
    assert len(packed) == 2 * 7
    assert all(2 * m.weight.nbytes == m.in_features * m.out_features for m in packed)
    before = fingerprint(model)
    loss = model(torch.arange(10)[None], labels=torch.arange(10)[None]).loss
    loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    logits(model)
    assert fingerprint(model) == before


@needs
def test_the_sampler_reads_the_weights_that_the_learner_multiplies_with(
    folder: Path, tokenizer: Any
) -> None:
    model = stirred(build_model(settings(folder), tokenizer, 1))
    layer = read(model, 64).layers[0]
    module = model.get_base_model().model.layers[0].mlp.up_proj
    inputs = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            inputs @ layer.up.weight().T, module.eval()(inputs), rtol=1e-3, atol=1e-4
        )
    assert not torch.equal(weight_of(module.base_layer), layer.up.weight())


@needs
def test_merged_and_exported_models_have_plain_weights(
    folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    model = stirred(build_model(settings(folder), tokenizer, 1))
    before, expected = fingerprint(model), logits(model)
    merged = merge_lora(model)
    assert not any(is_packed(module) for module in merged.modules())
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-3)
    exported = export_hf(model, tokenizer, tmp_path / "exported")
    again = AutoModelForCausalLM.from_pretrained(exported)
    assert getattr(again.config, "quantization_config", None) is None
    torch.testing.assert_close(logits(again), expected, rtol=1e-3, atol=1e-3)
    assert fingerprint(model) == before


@needs
def test_a_checkpoint_has_the_adapters_only(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    model = stirred(build_model(settings(folder), tokenizer, 1))
    assert all("lora_" in name for name in trained_tensors(model))
    CheckpointStore(tmp_path, 1, keep_best=0).save("rl", 1, model=model, state={})
    [info] = CheckpointStore(tmp_path, 1, keep_best=0).list()
    other = build_model(settings(folder), tokenizer, 2)
    load(info.path, model=other)
    assert fingerprint(other) == fingerprint(model)


@needs
def test_the_packed_bits_do_not_identify_the_base(folder: Path, tokenizer: Any) -> None:
    """Another device may round them otherwise; embeddings and norms still tell bases apart."""
    model = build_model(settings(folder), tokenizer, 1)
    before = identity(model, trained_tensors(model))
    module = next(m for m in model.modules() if is_packed(m))
    module.weight.data[0] ^= 1
    assert identity(model, trained_tensors(model)) == before
    with torch.no_grad():
        next(t for n, t in all_tensors(model).items() if "embed_tokens" in n)[0] += 1
    assert identity(model, trained_tensors(model)) != before


def test_a_cpu_leaves_the_base_as_it_is_if_asked_to(folder: Path, tokenizer: Any) -> None:
    config = settings(folder, "nf4_on_gpu")
    assert not config.quantised
    model = build_model(config, tokenizer, 1)
    assert not any(is_packed(module) for module in model.modules())
    on_gpu = settings(folder, "nf4_on_gpu", device="cuda")
    assert on_gpu.lora is not None
    assert on_gpu.lora.quantise == "nf4"  # and stays so on another device


def test_a_missing_package_is_named(
    folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantisation, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"bitsandbytes.*ludus-rl\[qlora\]"):
        build_model(settings(folder), tokenizer, 1)


@needs
def test_a_run_without_packed_weights_is_told_nothing_of_them() -> None:
    """On a CPU with avx512_bf16 bitsandbytes asked for `kernels`, of which no run has need."""
    command = [sys.executable, "-c", "import ludus.train.checkpoint.export"]  # which imports peft
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_weights_from_scratch_are_not_packed() -> None:
    with pytest.raises(ValidationError, match="needs `path`"):
        ModelConfig.model_validate(
            {"architecture": "qwen3", "tokenizer": "words", "lora": {"quantise": "nf4"}}
        )
