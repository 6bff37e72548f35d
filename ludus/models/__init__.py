"""Models, tokenizers, chat rendering, samplers."""

import logging
import os
from typing import Any

from ludus.config.registry import Registry, Row

# By default, waiting OpenMP threads spin and take CPU time from environments and other processes.
# The variable has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# peft imports bitsandbytes wherever it is installed, and on some CPUs that warns in each process of
# a missing faster kernel for weights in 4 bits on the CPU: nearly no run has such weights.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in record.getMessage()
)

ARCHITECTURES: Registry[object] = Registry(
    "architecture",
    {
        "qwen3": Row(
            "ludus.models.build:qwen3",
            "train",
            "Qwen3: grouped-query attention, norms on queries and keys",
        ),
        "llama": Row("ludus.models.build:llama", "train", "Llama: grouped-query attention"),
    },
    context=frozenset({"vocab_size", "context_length"}),
    needs=("model_type", "to_dict"),
)
"""Models that can be initialised from scratch: sizes to a transformers configuration."""

TOKENIZERS: Registry[object] = Registry(
    "tokenizer",
    {
        "words": Row(
            "ludus.models.chat.tokenizers:words", "train", "one token per word, digit or sign"
        ),
        "bytes": Row(
            "ludus.models.chat.tokenizers:byte_level",
            "train",
            "one token per byte; for letters and digits",
        ),
        "bpe": Row(
            "ludus.models.chat.tokenizers:bpe",
            "train",
            "byte-level BPE; encodes any text losslessly",
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
            "in this process, batch-invariant; slow, see `verify`",
        ),
        "vllm": Row(
            "ludus.models.samplers.vllm:VllmSampler",
            "vllm",
            "a vLLM server with in-place weight updates",
        ),
        "sglang": Row(
            "ludus.models.samplers.sglang:SglangSampler",
            "sglang",
            "an SGLang server with in-place weight updates",
        ),
    },
    context=frozenset(
        {"model", "context_length", "decode", "deterministic", "tokenizer", "folder"}
    ),
    needs=("publish", "shutdown"),
)
"""Samplers of the trained policy; each is a `PolicySampler`."""
