"""Adapters of several policies on one base; what a fixed model has to fit."""

from __future__ import annotations

import torch

from ludus.backends.fixed import share_base
from ludus.config.schema import LoraConfig, ModelConfig
from ludus.core.types import Spec
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.train.checkpoint.policy import build_policy


def test_adapters_share_the_memory_of_their_base() -> None:
    tokenizer = train_tokenizer(Spec(name="words"), ["one two three"], "plain", [])
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    config = ModelConfig(
        architecture=Spec(name="qwen3", args=sizes),
        tokenizer="words",
        chat_template="plain",
        lora=LoraConfig(rank=2),
    )
    one, two, other = (build_policy(config, tokenizer, seed) for seed in (0, 0, 1))
    share_base(one, two)
    share_base(one, other)
    own = dict(one.named_parameters())
    for name, parameter in two.named_parameters():
        shared = parameter.data_ptr() == own[name].data_ptr()
        assert shared == (not parameter.requires_grad), name
    frozen = [name for name, p in other.named_parameters() if not p.requires_grad]
    differing = [name for name in frozen if "embed" in name or "proj" in name]
    parameters = dict(other.named_parameters())
    assert differing
    assert all(parameters[name].data_ptr() != own[name].data_ptr() for name in differing)
    with torch.no_grad():
        for name, parameter in two.named_parameters():
            if parameter.requires_grad:
                parameter += 1.0
                assert not torch.equal(parameter, own[name])
