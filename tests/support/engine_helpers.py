"""Tiny models of many families, a reference distribution, and an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from ludus.models.samplers.base import Completion, SamplingParams
from ludus.models.samplers.engine import InProcessSampler

VOCAB, CONTEXT = 61, 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # wide, so that wrong positions or masks show
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**GROUPED),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "llama": lambda: LlamaConfig(**GROUPED),
    "gemma": lambda: GemmaConfig(**GROUPED),
    "gemma2": lambda: Gemma2Config(
        **{**GROUPED, "num_hidden_layers": 3},
        sliding_window=12,
        query_pre_attn_scalar=11,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**GROUPED, "num_hidden_layers": 3},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=12,
        query_pre_attn_scalar=11,
    ),
    "glm4": lambda: Glm4Config(**GROUPED, attention_bias=True),
    "granite": lambda: GraniteConfig(
        **COMMON,
        num_key_value_heads=2,
        intermediate_size=48,
        embedding_multiplier=3.0,
        attention_multiplier=0.5,
        residual_multiplier=0.6,
        logits_scaling=1.7,
    ),
    "olmo2": lambda: Olmo2Config(**COMMON, num_key_value_heads=2, intermediate_size=48),
    "smollm3": lambda: SmolLM3Config(**GROUPED, no_rope_layer_interval=2),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=None),
    "phi3": lambda: Phi3Config(**COMMON, num_key_value_heads=2, intermediate_size=48),
    "gpt_neox": lambda: GPTNeoXConfig(**COMMON, intermediate_size=48),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "opt": lambda: OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
}


EAGER = {"gemma2"}
"""Families whose soft caps transformers computes with its own attention only."""


def tiny(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            FAMILIES[family](), attn_implementation="eager" if family in EAGER else "sdpa"
        )
    return model.to(dtype).eval()


def conversations_of(vocab: int) -> list[list[int]]:
    """Prompts with common prefixes, of 1 to 50 tokens."""
    rng = np.random.default_rng(0)
    base = rng.integers(1, vocab, 50).tolist()
    return [base, base, base[:33], [*base[:20], 1, 2, 3], base[:1], [5] * 17, base[:16]]


def sampler(model: Any, **options: Any) -> InProcessSampler:
    return InProcessSampler(model, **{"context_length": CONTEXT, **options})


def numpy_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Reference log-probabilities of the sampling distribution at one position, in float64."""
    logits = logits.astype(np.float64)
    keep = np.ones(len(logits), dtype=bool)
    if params.temperature > 0:
        logits = logits / params.temperature
        order = np.argsort(-logits, kind="stable")
        if params.top_k:
            keep[order[params.top_k :]] = False
        if params.top_p < 1:
            probabilities = np.where(keep, np.exp(logits - logits.max()), 0.0)
            mass = np.cumsum(probabilities[order] / probabilities.sum())
            keep[order[int(np.argmax(mass >= params.top_p)) + 1 :]] = False
    shifted = np.where(keep, logits - logits.max(), -np.inf)
    return shifted - np.log(np.exp(shifted).sum())


def expected_logprobs(
    model: Any, prompt: Sequence[int], completion: Completion, params: SamplingParams
) -> list[float]:
    """The completion's log-probabilities from one pass without cache, mask or padding."""
    ids = [*prompt, *completion.token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].double().numpy()
    return [
        float(numpy_distribution(logits[len(prompt) + i - 1], params)[token])
        for i, token in enumerate(completion.token_ids)
    ]


Turn = tuple[list[int], SamplingParams, Completion]


async def episode(
    engine: InProcessSampler,
    name: str,
    prompt: list[int],
    turns: Sequence[SamplingParams],
    pause: Callable[[], Any] = lambda: asyncio.sleep(0),
) -> list[Turn]:
    """Open a session, sample turns with observations in between, close it."""
    engine.open(name)
    played: list[Turn] = []
    ids = list(prompt)
    try:
        for number, params in enumerate(turns):
            await pause()
            completion = await engine.sample(ids, params, session=name)
            played.append((ids, params, completion))
            ids = [*ids, *completion.token_ids, *range(10 + number, 13 + 2 * number)]
        await pause()
    finally:
        engine.close(name)
    return played


def tokens(played: Sequence[Turn]) -> list[list[int]]:
    return [completion.token_ids for _, _, completion in played]


def tokenizer_of(ids: list[int]) -> PreTrainedTokenizerFast:
    """A tokenizer of the tokens <unk> (id 0) and t1, t7 and so on."""
    vocab = {"<unk>" if not id else f"t{id}": id for id in ids}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<unk>")
