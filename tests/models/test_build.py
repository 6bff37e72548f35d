"""Models from scratch and from a folder; LoRA; configuration errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_helpers import tiny
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from ludus.config.schema import LoraConfig, ModelConfig
from ludus.core.errors import CheckpointError, ConfigError
from ludus.core.types import Spec
from ludus.models import ARCHITECTURES
from ludus.models.build import build_model, merge_lora, set_tf32
from ludus.models.chat.tokenizers import load_tokenizer, train_tokenizer
from ludus.models.samplers.engine import InProcessSampler
from ludus.train.checkpoint.export import export_hf

TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "intermediate_size": 64}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(Spec(name="words"), ["turn left", "turn right", "pick up the ball"])


def scratch(name: str = "qwen3", **fields: object) -> ModelConfig:
    architecture = {"name": name, "args": TINY}
    return ModelConfig.model_validate(
        {"architecture": architecture, "tokenizer": "words", "context_length": 64, **fields}
    )


def states(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_model_is_a_function_of_its_seed(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = states(build_model(scratch(name), tokenizer, 7))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same(states(build_model(scratch(name), tokenizer, 7)), first)
    assert not same(states(build_model(scratch(name), tokenizer, 8)), first)


def test_default_size_is_800k_parameters(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    for name in ARCHITECTURES:
        config = ModelConfig(architecture=Spec(name=name), tokenizer="words")
        model = build_model(config, tokenizer, 0)
        assert 0.75e6 < model.num_parameters() < 0.9e6
        assert model.config.max_position_embeddings == config.context_length
        assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
        assert model.config._attn_implementation == "sdpa"
        assert model.config.eos_token_id == tokenizer.eos_token_id


def test_bfloat16_weights_are_rounded_float32(tokenizer: PreTrainedTokenizerFast) -> None:
    full = states(build_model(scratch(), tokenizer, 0))
    model = build_model(scratch(dtype="bfloat16"), tokenizer, 0)
    assert same(states(model), {name: value.bfloat16() for name, value in full.items()})
    frequencies = build_model(scratch(), tokenizer, 0).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def test_tf32_is_set_by_the_configuration(tokenizer: PreTrainedTokenizerFast) -> None:
    """Whatever the process had: off by default, for products and convolutions."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32
    try:
        cuda.allow_tf32 = cudnn.allow_tf32 = True
        build_model(scratch(), tokenizer, 0)
        assert (cuda.allow_tf32, cudnn.allow_tf32) == (False, False)
        set_tf32(True)
        assert (cuda.allow_tf32, cudnn.allow_tf32) == (True, True)
    finally:
        cuda.allow_tf32, cudnn.allow_tf32 = before
    with pytest.raises(ValueError, match=r"`tf32` needs `device: cuda`; products on cpu are exact"):
        scratch(tf32=True)


def test_save_and_load_round_trip(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(scratch(), tokenizer, 0)
    model.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), context_length=64)
    assert same(states(build_model(config, tokenizer, 1)), states(model))
    with pytest.raises(
        ConfigError, match=r"model\.context_length: 65 exceeds the model's 64 positions"
    ):
        build_model(ModelConfig(path=str(tmp_path), context_length=65), tokenizer, 0)
    large = train_tokenizer(Spec(name="bpe"), ["turn left"])
    with pytest.raises(ConfigError, match=r"model\.tokenizer: the token .* has the id \d+"):
        build_model(config, large, 0)


def test_loading_and_saving_print_nothing(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str]
) -> None:
    assert transformers_logging.is_progress_bar_enabled()
    export_hf(build_model(scratch(), tokenizer, 0), tokenizer, tmp_path / "exported")
    build_model(ModelConfig(path=str(tmp_path / "exported"), context_length=64), tokenizer, 0)
    assert transformers_logging.is_progress_bar_enabled(), "a user's own setting stays"
    assert capfd.readouterr() == ("", "")


def test_attention_is_torchs_where_the_model_supports_that(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """torch's has no soft caps; transformers refuses it for Gemma 2."""
    for family, own in (("gemma2", "eager"), ("gemma3", "sdpa")):
        tiny(family).save_pretrained(tmp_path / family)
        config = ModelConfig(path=str(tmp_path / family), context_length=64)
        model = build_model(config, tokenizer, 0)
        assert model.config._attn_implementation == own
        assert InProcessSampler(model, context_length=64).decoder.name != "generic"


def test_a_pretrained_model_has_no_dropout(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    shape = GPT2Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    assert shape.resid_pdrop > 0
    GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    model = build_model(ModelConfig(path=str(tmp_path), context_length=64), tokenizer, 0).train()
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_lora_trains_adapters_only_and_merges(tokenizer: PreTrainedTokenizerFast) -> None:
    config = scratch(lora=LoraConfig(rank=2, targets=["q_proj", "down_proj"]))
    model = build_model(config, tokenizer, 0)
    again = build_model(config, tokenizer, 0)
    assert same(states(model), states(again))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)

    ids = torch.arange(8)[None]
    plain = build_model(scratch(), tokenizer, 0)
    assert torch.equal(model(ids).logits, plain(ids).logits)  # adapters start at zero
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    adapted = states(model)
    merged = merge_lora(model)
    assert same(states(model), adapted)  # untouched
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert not torch.allclose(merged(ids).logits, plain(ids).logits)
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-4)
    assert merge_lora(plain) is plain


def test_all_linear_leaves_the_output_layer(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(scratch(lora=LoraConfig(rank=1)), tokenizer, 0)
    adapted = {
        name.split(".lora_")[0].rpartition(".")[2]
        for name, _ in model.named_parameters()
        if "lora_A" in name
    }
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_missing_tensors_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """transformers initialises them randomly and only warns."""
    model = build_model(scratch(), tokenizer, seed=1)
    name = "model.layers.1.mlp.up_proj.weight"
    kept = {key: value for key, value in model.state_dict().items() if key != name}
    model.save_pretrained(tmp_path, state_dict=kept)
    config = ModelConfig(path=str(tmp_path), context_length=64)
    with pytest.raises(ConfigError, match=rf"lacks 1 of the model's tensors, e.g. {name}"):
        build_model(config, tokenizer, seed=1)


def test_config_errors(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def fails(match: str, config: ModelConfig) -> None:
        with pytest.raises(ConfigError, match=match):
            build_model(config, tokenizer, 0)

    (tmp_path / "policy").mkdir()
    fails("did you mean .*policy", ModelConfig(path=str(tmp_path / "polcy")))
    fails("cannot load from the folder", ModelConfig(path=str(tmp_path / "policy")))
    fails("hub did not provide it", ModelConfig(path="nobody/no-such-model"))
    fails("did you mean qwen3", scratch("qwen"))
    fails(
        r"model\.lora\.targets\[0\].*did you mean q_proj",
        scratch(lora=LoraConfig(targets=["q_porj"])),
    )
    fails("not a device", scratch(device="gpu"))
    fails("CUDA devices", scratch(device="cuda:99"))
    bad = ModelConfig.model_validate(
        {"architecture": {"name": "qwen3", "args": {"num_heads": 3}}, "tokenizer": "words"}
    )
    fails("does not divide", bad)
    bad = ModelConfig.model_validate(
        {"architecture": {"name": "qwen3", "args": {"num_layer": 3}}, "tokenizer": "words"}
    )
    fails(r"did you mean model\.architecture\.args\.num_layers", bad)


def test_models_import_sets_the_wait_policy_without_torch() -> None:
    code = (
        "import os, sys; os.environ.pop('OMP_WAIT_POLICY', None); import ludus.models; "
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE' and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("size", [4_000_000_000, 4_000_000_000_000_000_000])
def test_a_model_beyond_the_memory_is_refused(
    tokenizer: PreTrainedTokenizerFast, size: int
) -> None:
    config = scratch(architecture={"name": "qwen3", "args": {**TINY, "hidden_size": size}})
    with pytest.raises(ConfigError, match=r"^model.architecture.args: "):
        build_model(config, tokenizer, 0)


def test_a_damaged_folder_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    build_model(scratch(), tokenizer, 0).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"model.path: .* cannot be loaded, the file may be"):
        build_model(ModelConfig(path=str(tmp_path), context_length=64), tokenizer, 0)
    with pytest.raises(ConfigError, match=r"model.tokenizer: .* has no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    ["[]", '{"model_type": "qwen3", "num_hidden_layers": 3, "layer_types": ["full_attention"]}'],
)
def test_a_config_json_that_transformers_cannot_read(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model.tokenizer: cannot load from the folder"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"model.path: cannot load from the folder"):
        build_model(ModelConfig(path=str(tmp_path), tokenizer="x"), None, seed=0)
