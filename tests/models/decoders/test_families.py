"""Model families on the fast path: all decoders match the model's own module."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engine_helpers import COMMON, CONTEXT, GROUPED, episode, sampler, tiny, tokens
from test_decoders import MISSING, NEWER, Reader, check_logits, conversations, made, needs_native
from test_half import check_near, halves
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from ludus.config.schema import LoraConfig
from ludus.core.errors import ConfigError
from ludus.models.build import _with_lora
from ludus.models.decoders.base import Decoder
from ludus.models.decoders.generic import GenericDecoder
from ludus.models.decoders.lean import LeanDecoder
from ludus.models.decoders.llama import NotLlama, read
from ludus.models.decoders.native.decoder import NativeDecoder
from ludus.models.decoders.probe import choose_decoder
from ludus.models.decoders.static import StaticDecoder
from ludus.models.samplers.base import SamplingParams
from ludus.models.windows import layer_windows

MIXED = ["sliding_attention", "full_attention"]


def longrope(original: int) -> Phi3Config:
    """Phi-3 with other frequencies beyond its original length."""
    return Phi3Config(
        **COMMON,
        num_key_value_heads=2,
        intermediate_size=48,
        original_max_position_embeddings=original,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.1, 2.2, 2.3],
        },
    )


VARIANTS: dict[str, Any] = {
    "window of 1": lambda: MistralConfig(**GROUPED, sliding_window=1),
    "window of 16": lambda: MistralConfig(**GROUPED, sliding_window=16),
    "window of 33": lambda: Phi3Config(
        **COMMON, num_key_value_heads=2, intermediate_size=48, sliding_window=33
    ),
    "windows in some layers": lambda: Qwen3Config(
        **GROUPED, use_sliding_window=True, sliding_window=9, layer_types=MIXED
    ),
    "one kind of window": lambda: Gemma3TextConfig(
        **GROUPED, layer_types=["sliding_attention"] * 2, sliding_window=9
    ),
    "no positions, windows": lambda: SmolLM3Config(
        **GROUPED, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=9
    ),
    "no positions at all": lambda: SmolLM3Config(**GROUPED, no_rope_layers=[0, 0]),
    "olmo3": lambda: Olmo3Config(**GROUPED, layer_types=MIXED, sliding_window=9),
    "mixtral": lambda: MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: OlmoeConfig(
        **COMMON, num_key_value_heads=2, intermediate_size=16, num_experts=4, num_experts_per_tok=2
    ),
    "partial rotary": lambda: Phi3Config(
        **{**COMMON, "hidden_size": 64},
        num_key_value_heads=2,
        intermediate_size=48,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5
        },
    ),
    "longrope": lambda: longrope(CONTEXT),
    "normalised shares": lambda: Qwen3MoeConfig(
        **GROUPED, num_experts=37, num_experts_per_tok=5, moe_intermediate_size=20,
        norm_topk_prob=True,
    ),
    "some layers with experts": lambda: Qwen3MoeConfig(
        **GROUPED, num_experts=4, num_experts_per_tok=4, moe_intermediate_size=16,
        mlp_only_layers=[0],
    ),
}  # fmt: skip


def model_of(name: str) -> Any:
    """A model whose norms have weights of their own too."""
    model = tiny(name) if name in NEWER else made(VARIANTS[name]())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand(parameter.shape, generator=generator))
    return model


def decoders_of(model: Any) -> list[Decoder]:
    llama = read(model, CONTEXT)
    windows = layer_windows(model.config, CONTEXT)
    found: list[Decoder] = [LeanDecoder(llama), StaticDecoder(llama)]
    found.append(GenericDecoder(model, windows=windows))
    return found if MISSING else [*found, NativeDecoder(llama)]


@pytest.mark.parametrize("name", [*NEWER, *VARIANTS])
def test_logits(name: str) -> None:
    model = model_of(name)
    for decoder in decoders_of(model):
        check_logits(model, decoder)


@pytest.mark.parametrize("name", [*NEWER, *VARIANTS])
def test_the_fast_path_is_chosen(name: str) -> None:
    model = model_of(name)
    expected = "lean" if MISSING else "native"
    assert choose_decoder(model, CONTEXT).name == expected
    assert choose_decoder(model, CONTEXT, "static").name == "static"
    assert choose_decoder(model, CONTEXT, "generic").name == "generic"
    assert choose_decoder(model, CONTEXT, dtype="bfloat16").name == expected


@pytest.mark.parametrize("name", NEWER)
def test_bfloat16(name: str) -> None:
    # All experts: a rounded score may choose another one.
    model = model_of("some layers with experts") if name == "qwen3_moe" else tiny(name)
    for weights, decoder in halves(model):
        check_near(weights, decoder)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*NEWER, *VARIANTS])
def test_bits_are_batch_and_chunk_invariant(name: str, dtype: torch.dtype) -> None:
    llama = read(model_of(name), CONTEXT)
    prompts = dict(enumerate(conversations()))
    together = Reader(NativeDecoder(llama, dtype)).logits(prompts)
    for number, prompt in prompts.items():
        alone = Reader(NativeDecoder(llama, dtype))
        assert torch.equal(alone.logits({0: prompt})[0], together[number])
        decoding = Reader(NativeDecoder(llama, dtype))
        for length in range(1, len(prompt) + 1):
            found = decoding.logits({0: prompt[:length]})
        assert torch.equal(found[0], together[number])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads % 2 + 1)
        assert torch.equal(Reader(NativeDecoder(llama, dtype)).logits(prompts), together)
    finally:
        torch.set_num_threads(threads)


@needs_native
@pytest.mark.parametrize("window", [1, 15, 16, 40, 64, 65, 130])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_long_windows(window: int, heads: int) -> None:
    """Windows that begin anywhere in blocks, chunks and tiles: single tokens, prefill, parts."""
    length = 150
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 8}
    settings = {**GROUPED, **sizes, "max_position_embeddings": length}
    model = made(MistralConfig(**settings, sliding_window=window))
    llama = read(model, length)
    ids = [i * i % 61 for i in range(length)]
    whole = Reader(NativeDecoder(llama)).logits({0: ids})[0]
    with torch.no_grad():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    assert float((whole - expected).abs().max() / expected.abs().max()) < 5e-5
    parts, steps = Reader(NativeDecoder(llama)), Reader(NativeDecoder(llama))
    for stop in (1, 7, 40, 41, 113, length):
        found = parts.logits({0: ids[:stop]})
    assert torch.equal(found[0], whole)
    for stop in range(1, length + 1):
        found = steps.logits({0: ids[:stop]})
    assert torch.equal(found[0], whole)


@pytest.mark.parametrize("name", NEWER)
def test_weights_follow_the_model(name: str) -> None:
    model = model_of(name)
    decoders = decoders_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2, 3]])).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    for decoder in decoders:
        decoder.refresh()
        check_logits(model, decoder)


@pytest.mark.parametrize("name", NEWER)
def test_adapters(name: str) -> None:
    model = _with_lora(model_of(name), LoraConfig(rank=2)).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.2, generator=generator)
    decoders = decoders_of(model)
    for decoder in decoders:
        check_logits(model, decoder)
    assert choose_decoder(model, CONTEXT).name == ("lean" if MISSING else "native")
    with model.disable_adapter():
        for decoder in decoders:
            decoder.refresh()
            check_logits(model, decoder)


@pytest.mark.parametrize("name", NEWER)
async def test_episodes_have_the_modules_logprobs(name: str) -> None:
    """Several turns, shared prompts and branches, past the window; then with published weights."""
    model = model_of(name)
    engine = sampler(model)
    turns = [SamplingParams(max_tokens=7, seed=s) for s in range(3)]
    for version in range(2):
        played = await asyncio.gather(
            *[episode(engine, f"{n}", prompt, turns) for n, prompt in enumerate(conversations())]
        )
        for prompt, _, completion in [turn for one in played for turn in one]:
            ids = [*prompt, *completion.token_ids]
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0
            )
        if version == 0:
            before = tokens(played[0])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            engine.publish(1)
    assert tokens(played[0]) != before


@pytest.mark.parametrize("name", ["cohere2", "gpt_oss"])
def test_windows_on_the_generic_path(name: str) -> None:
    """Other norms, and attention sinks, which only transformers' own attention has."""
    config = {
        "cohere2": lambda: Cohere2Config(**GROUPED, sliding_window=9),
        "gpt_oss": lambda: GptOssConfig(
            **GROUPED, sliding_window=9, num_local_experts=4, num_experts_per_tok=2
        ),
    }[name]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    decoder = choose_decoder(model, CONTEXT)
    assert decoder.name == "generic"
    check_logits(model, decoder)


# What is refused


def test_unknown_attention_is_refused() -> None:
    model = tiny("llama")
    model.config.layer_types = ["chunked_attention"] * 2
    with pytest.raises(ConfigError, match=r"has layers of type chunked_attention\. It serves"):
        choose_decoder(model, CONTEXT)
    with pytest.raises(NotLlama, match="chunked_attention"):
        read(model, CONTEXT)
    model.config.layer_types = ["sliding_attention"] * 2
    with pytest.raises(ConfigError, match="sliding-window attention without a window"):
        choose_decoder(model, CONTEXT)


def test_a_window_that_the_module_ignores_is_found() -> None:
    """The config has a window, the module attends to everything: rows shorter than the window would
    not show it."""
    model = tiny("llama")
    model.config.sliding_window = 60
    with pytest.raises(ConfigError, match=r"a plain pass by \d+\.\d%"):
        choose_decoder(model, CONTEXT)
    with pytest.raises(ConfigError, match="fast path cannot serve LlamaForCausalLM: its logits"):
        choose_decoder(model, CONTEXT, "fast")
    assert model.config.sliding_window == 60


def test_a_trial_leaves_the_windows() -> None:
    model = tiny("gemma3")
    decoder = choose_decoder(model, CONTEXT)
    assert model.config.sliding_window == 12
    check_logits(model, decoder)


def test_rotary_positions_that_change_take_the_generic_path() -> None:
    with pytest.raises(NotLlama, match="rotary positions of type 'longrope' beyond 24 tokens"):
        read(made(longrope(24)), CONTEXT)


def test_a_module_that_fails_is_refused() -> None:
    """torch's product of stacked experts asks for sizes that are a multiple of 16 bytes."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 19}
    model = made(Qwen3MoeConfig(**GROUPED, **sizes))
    with pytest.raises(ConfigError, match="a pass of its own module failed: RuntimeError: strides"):
        choose_decoder(model, CONTEXT)


def test_other_experts_are_refused() -> None:
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.is_transposed = True
    with pytest.raises(NotLlama, match="Qwen3MoeSparseMoeBlock has other parts"):
        read(model, CONTEXT)
    model = tiny("olmo2")
    model.model.layers[1].self_attn.q_norm.weight = torch.nn.Parameter(torch.ones(16))
    with pytest.raises(NotLlama, match="norms over some of the heads"):
        read(model, CONTEXT)
