"""Induction heads at the start of a new model: where they look, and what they copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ludus.config.schema import ModelConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Spec
from ludus.models.build import build_model, check_model
from ludus.models.chat.tokenizers import train_tokenizer

SHAPES = [
    {"name": "qwen3", "args": {}},
    {"name": "llama", "args": {}},
    {"name": "qwen3", "args": {"head_dim": 64, "hidden_size": 256, "num_kv_heads": 4}},
    {"name": "qwen3", "args": {"tie_embeddings": False}},
    {"name": "llama", "args": {"tie_embeddings": False}},
    {"name": "llama", "args": {"head_dim": 16, "num_heads": 8, "init_range": 0.02}},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(
        Spec(name="words"), [" ".join(a + b for a in "bcdfghklmn" for b in "aeiouy")]
    )


def policy(
    tokenizer: PreTrainedTokenizerFast, name: str, args: dict[str, Any], seed: int = 0
) -> Any:
    return build_model(settings(name, **args), tokenizer, seed).eval()


def settings(name: str, **args: Any) -> ModelConfig:
    architecture = {"name": name, "args": {"induction_heads": True, **args}}
    return ModelConfig.model_validate(
        {"architecture": architecture, "tokenizer": "words", "context_length": 128}
    )


def random_prompts(size: int, count: int = 16, length: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(size, generator=generator)[:length] for _ in range(count)]
    return torch.stack(rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_of_the_first_layer_look_one_and_two_places_back(
    tokenizer: PreTrainedTokenizerFast, shape: dict[str, Any]
) -> None:
    model = policy(tokenizer, **shape)
    model.set_attn_implementation("eager")
    tokens = random_prompts(len(tokenizer))
    found = model(tokens, output_attentions=True).attentions[0].mean(0)  # [heads, to, from]
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for head in range(group):
        before = found[head].diagonal(-head - 1)[10:]
        assert before.min() > 0.5
    plain = found[-1].diagonal(-1)[10:]
    assert plain.mean() < 0.3


@pytest.mark.parametrize("shape", SHAPES)
def test_a_new_model_continues_what_stands_earlier_in_its_prompt(
    tokenizer: PreTrainedTokenizerFast, shape: dict[str, Any]
) -> None:
    """`a b c d ... b`: the second layer looks at `c`, and of the others `c` is the likeliest."""
    looks, copies = continued(policy(tokenizer, **shape))
    assert looks > 0.5
    assert copies > 0.25
    without = {**shape["args"], "induction_heads": False}
    looks, copies = continued(policy(tokenizer, shape["name"], without))
    assert looks < 0.1
    assert copies < 0.1


def continued(model: Any) -> tuple[float, float]:
    """Mean attention of layer 1's first head to `c`; the share of prompts where `c` follows."""
    model.set_attn_implementation("eager")
    prompts, place = random_prompts(model.config.vocab_size, count=64), 11
    found = model(torch.cat([prompts, prompts[:, place, None]], 1), output_attentions=True)
    others = found.logits[:, -1].gather(1, prompts)
    others[:, place] = -torch.inf
    copied = (others.argmax(1) == place + 1).float().mean()
    return found.attentions[1][:, 0, -1, place + 1].mean().item(), copied.item()


def test_weights_depend_on_the_seed_only(tokenizer: PreTrainedTokenizerFast) -> None:
    one, same, other = (policy(tokenizer, "qwen3", {}, seed) for seed in (0, 0, 1))
    names = ["model.layers.0.self_attn.v_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    for name in names:
        state = one.state_dict()[name]
        assert torch.equal(state, same.state_dict()[name])
        assert not torch.equal(state, other.state_dict()[name])


@pytest.mark.parametrize(
    "args",
    [
        {"num_layers": 1},
        {"head_dim": 12},
        {"head_dim": 16, "rope_theta": 10.0},
        {"hidden_size": 32},
    ],
)
def test_a_shape_without_room_is_refused_before_a_model_is_built(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"induction_heads: takes num_layers of at least 2"):
        check_model(settings("llama", **args), None)


@pytest.mark.parametrize("init_range", [1e-4, 0.3, 10])
def test_an_init_range_that_drowns_the_heads_is_refused(init_range: float) -> None:
    with pytest.raises(ConfigError, match=r"induction_heads: takes an init_range from 0.001 to 0"):
        check_model(settings("qwen3", init_range=init_range), None)


@pytest.mark.parametrize("key", ["init_range", "rope_theta"])
def test_numbers_that_are_not_finite_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be a finite number"):
        check_model(settings("qwen3", **{key: float("inf")}), None)


def test_without_the_key_a_model_is_as_before(tokenizer: PreTrainedTokenizerFast) -> None:
    config = settings("qwen3", induction_heads=False)
    assert not hasattr(build_model(config, tokenizer, 0).config, "induction_heads")
