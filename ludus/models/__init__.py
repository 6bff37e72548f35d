"""Models, tokenizers, renderers, samplers."""

import os
from typing import Any

from ludus.config.registry import Registry, Row

# OpenMP threads that spin while they wait steal the cores from everything beside torch
# (environments, a second run); it must be set before torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ARCHITECTURES: Registry[object] = Registry(
    "architecture",
    {
        "qwen3": Row("ludus.models.build:qwen3", "train", "Qwen3: grouped queries, q and k normed"),
        "llama": Row("ludus.models.build:llama", "train", "Llama: grouped queries"),
    },
    context=frozenset({"vocab_size", "context_length"}),
)
"""Models that can be initialised from scratch: a size -> a transformers configuration."""

TOKENIZERS: Registry[object] = Registry(
    "tokenizer",
    {
        "words": Row(
            "ludus.models.chat.tokenizers:words", "train", "a token a word, digit or sign"
        ),
        "bpe": Row(
            "ludus.models.chat.tokenizers:bpe", "train", "byte pairs: every text round-trips"
        ),
    },
    context=frozenset({"texts", "framing", "special_tokens"}),
)
"""Tokenizers that can be trained on a recipe's own texts."""

SAMPLERS: Registry[Any] = Registry(
    "sampler",
    {
        "in_process": Row(
            "ludus.models.samplers.engine:InProcessSampler",
            "train",
            "in this process, on the learner's weights",
        ),
        "exact": Row(
            "ludus.models.exact.sampler:ExactSampler",
            "train",
            "in this process, each token alike in any batch; slow, see `verify`",
        ),
        "vllm": Row(
            "ludus.models.samplers.vllm:VllmSampler",
            "vllm",
            "a vLLM server, weights swapped while it serves",
        ),
    },
    context=frozenset(
        {"model", "context_length", "decode", "deterministic", "tokenizer", "folder"}
    ),
)
"""What samples turns with the policy that is trained: each is a `PolicySampler`."""
