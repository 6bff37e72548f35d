"""Small models of many families, with weights that make their tokens differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

V = 97
WIDE = {"vocab_size": V, "max_position_embeddings": 128, "hidden_size": 48, "num_hidden_layers": 2}
WIDE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 100}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
NARROW = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "vocab_size": V,
    "n_positions": 128,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**WIDE, head_dim=12),
    "qwen2": lambda: Qwen2Config(**WIDE),
    "llama": lambda: LlamaConfig(**WIDE),
    "mistral": lambda: MistralConfig(**WIDE),
    "gemma": lambda: GemmaConfig(**WIDE, head_dim=12),
    "olmo2": lambda: Olmo2Config(**WIDE),
    "cohere": lambda: CohereConfig(**WIDE),
    "phi": lambda: PhiConfig(**WIDE),
    "gpt_neox": lambda: GPTNeoXConfig(**WIDE),
    "gpt2": lambda: GPT2Config(**NARROW),
    "qwen3_moe": lambda: Qwen3MoeConfig(**WIDE, **EXPERTS, head_dim=12, moe_intermediate_size=16),
    "mixtral": lambda: MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: OlmoeConfig(**{**WIDE, "eos_token_id": 0}, **EXPERTS),
    "window": lambda: MistralConfig(**WIDE, sliding_window=9),
    "gemma3": lambda: Gemma3TextConfig(
        **WIDE,
        head_dim=12,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=9,
    ),
    "phi3": lambda: Phi3Config(**WIDE, pad_token_id=0, eos_token_id=0),
    "glm4": lambda: Glm4Config(**WIDE, head_dim=12, pad_token_id=0, eos_token_id=0),
    "smollm3": lambda: SmolLM3Config(**{**WIDE, "pad_token_id": 0}, no_rope_layer_interval=2),
    "opt": lambda: OPTConfig(
        vocab_size=V,
        max_position_embeddings=128,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=100,
        word_embed_proj_dim=48,
        dropout=0.0,
    ),
}


def make(family: str) -> Any:
    torch.manual_seed(0)
    config = FAMILIES[family]()
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # as `build_model` does
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    return model
