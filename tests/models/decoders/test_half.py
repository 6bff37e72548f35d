"""bfloat16 products: the native and lean decoders are close to the model's own module."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engine_helpers import CONTEXT, GROUPED, VOCAB, episode, sampler, tiny, tokens
from test_decoders import FAST, MISSING, VARIANTS, Reader, conversations, made, needs_native
from transformers import Qwen3Config

from ludus.core.errors import ConfigError
from ludus.models.decoders import native
from ludus.models.decoders.base import Decoder
from ludus.models.decoders.lean import LeanDecoder
from ludus.models.decoders.llama import read
from ludus.models.decoders.native.bindings import Kernels
from ludus.models.decoders.native.decoder import NativeDecoder
from ludus.models.decoders.sampling_copy import SamplingCopy
from ludus.models.samplers.base import SamplingParams

BFLOAT16 = torch.bfloat16


def halves(model: Any) -> list[tuple[Any, Decoder]]:
    """Decoders, each with a model whose weights it uses: the copy rounds embeddings too."""
    llama = own = read(model, CONTEXT)
    rounded = None
    if next(model.parameters()).dtype == torch.float32:
        rounded = SamplingCopy(model, keep=[norm.module.weight for norm in llama.norms()])
        own = read(rounded.module, CONTEXT)
    lean = (own.model, LeanDecoder(own, copy=rounded))
    return [lean] if MISSING else [lean, (model, NativeDecoder(llama, BFLOAT16))]


@torch.no_grad()
def check_near(model: Any, decoder: Decoder) -> None:
    """As close to float32 as the module under torch's autocast: prefill, then turns of 1 and 5
    tokens."""
    reader = Reader(decoder)
    exact = type(model)(model.config).eval()
    exact.load_state_dict(model.state_dict())
    prompts = dict(enumerate(conversations(model.config.vocab_size)))
    for extra in ([], [9], [4, 8, 7, 7, 2]):
        prompts = {number: prompt + extra for number, prompt in prompts.items()}
        found = reader.logits(prompts).float()
        expected = plain_logits(exact, prompts)
        with torch.autocast("cpu", BFLOAT16):
            rounded = plain_logits(exact, prompts).float()
        usual = float((rounded - expected).square().mean().sqrt())
        assert 0 < float((found - expected).square().mean().sqrt()) < 1.5 * usual


def plain_logits(model: Any, prompts: dict[int, list[int]]) -> torch.Tensor:
    rows = [model(torch.tensor([p]), use_cache=False).logits[0, -1] for p in prompts.values()]
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAST)
def test_families(family: str) -> None:
    model = tiny(family)
    for weights, decoder in halves(model):
        check_near(weights, decoder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str) -> None:
    model = made(VARIANTS[variant]())
    for weights, decoder in halves(model):
        check_near(weights, decoder)


def test_weights_in_bfloat16() -> None:
    model = tiny().to(BFLOAT16)
    for weights, decoder in halves(model):
        check_near(weights, decoder)


@needs_native
@pytest.mark.parametrize("variant", ["qwen3", "odd sizes"])
def test_bits_are_batch_and_chunk_invariant(variant: str) -> None:
    llama = read(tiny() if variant == "qwen3" else made(VARIANTS[variant]()), CONTEXT)
    prompts = dict(enumerate(conversations()))
    together = Reader(NativeDecoder(llama, BFLOAT16)).logits(prompts)
    for number, prompt in prompts.items():
        alone = Reader(NativeDecoder(llama, BFLOAT16))
        assert torch.equal(alone.logits({0: prompt})[0], together[number])
        decoding = Reader(NativeDecoder(llama, BFLOAT16))
        for length in range(1, len(prompt) + 1):
            found = decoding.logits({0: prompt[:length]})
        assert torch.equal(found[0], together[number])


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 2, 8), (4, 2, 32), (6, 2, 10), (4, 1, 34), (7, 1, 8), (8, 1, 8), (14, 1, 16)],
)
def test_tiles_give_the_bits_of_single_tokens(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Tiles of queries in prefill, for any number of heads that share their keys: the bits of
    decode steps, of prefill in parts that begin anywhere, and with two threads."""
    length = 150
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = Qwen3Config(**{**GROUPED, **sizes, "max_position_embeddings": length})
    llama = read(made(config), length)
    prompts = {0: [i * i % VOCAB for i in range(length)], 1: [i % 7 for i in range(37)]}
    whole = Reader(NativeDecoder(llama, dtype)).logits(prompts)
    parts, steps = Reader(NativeDecoder(llama, dtype)), Reader(NativeDecoder(llama, dtype))
    for stop in (1, 7, 40, 41, 113, length):
        found = parts.logits({0: prompts[0][:stop]})
    assert torch.equal(found[0], whole[0])
    for stop in range(1, length + 1):
        found = steps.logits({0: prompts[0][:stop]})
        if stop in (33, 34, 35, 36):  # pairs of positions end anywhere in a block
            assert torch.equal(
                Reader(NativeDecoder(llama, dtype)).logits({0: prompts[0][:stop]}), found
            )
    assert torch.equal(found[0], whole[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(Reader(NativeDecoder(llama, dtype)).logits(prompts), whole)
    finally:
        torch.set_num_threads(threads)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("heads", [1, 2, 7])
def test_long_prefill_gives_the_bits_of_single_tokens(heads: int, dtype: torch.dtype) -> None:
    """Many chunks of keys: tiles that end anywhere in the last chunk, after a length that is a
    power of two."""
    start, length = 1024, 1060
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 34}
    config = Qwen3Config(**{**GROUPED, **sizes, "max_position_embeddings": length})
    llama = read(made(config), length)
    prompt = [i * i % VOCAB for i in range(length)]
    steps = Reader(NativeDecoder(llama, dtype))
    for stop in range(start, length + 1):
        found = steps.logits({0: prompt[:stop]})
        if stop in (start, start + 1, start + 33, length):
            whole = Reader(NativeDecoder(llama, dtype)).logits({0: prompt[:stop]})
            assert torch.equal(whole, found)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_unwritten_slots_are_never_read(dtype: torch.dtype) -> None:
    llama = read(tiny(), CONTEXT)
    prompts = dict(enumerate(conversations()))
    expected = Reader(NativeDecoder(llama, dtype)).logits(prompts)
    spoilt = NativeDecoder(llama, dtype)
    spoilt.reserve(64)
    for stored in (*spoilt._keys, *spoilt._values):
        stored.fill_(float("nan"))
    assert torch.equal(Reader(spoilt).logits(prompts), expected)


@needs_native
@pytest.mark.parametrize("half", [False, True])
def test_kernels_of_a_plain_build_agree(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without machine-specific instructions: four lanes, pairs multiplied one by one."""
    model, prompts = made(VARIANTS["six heads a key"]()), dict(enumerate(conversations()))
    llama = read(model, CONTEXT)
    dtype = BFLOAT16 if half else torch.float32
    own = Reader(NativeDecoder(llama, dtype)).logits(prompts)
    monkeypatch.setattr(native, "VARIANTS", ((),))
    native.library.cache_clear()
    try:
        assert Kernels(half).lanes == 4
        plain = Reader(NativeDecoder(llama, dtype)).logits(prompts)
    finally:
        native.library.cache_clear()
    tolerance = 0.02 if half else 1e-5
    assert float((own - plain).abs().max() / own.abs().max()) < tolerance


@needs_native
def test_nan_is_preserved() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    decoder = NativeDecoder(read(model, CONTEXT), BFLOAT16)
    found = Reader(decoder).logits({0: [7, 3], 1: [3, 4]})
    assert found[0].isnan().any()


async def test_engine_samples_in_bfloat16() -> None:
    """Batch-invariant tokens; log-probabilities close to float32."""
    model = tiny()
    engine = sampler(model, dtype="bfloat16")
    assert engine.decoder.name == ("lean" if MISSING else "native")
    turns = [SamplingParams(max_tokens=7, seed=s, temperature=0.8) for s in range(3)]
    prompts = conversations()
    together = await asyncio.gather(
        *[episode(engine, f"{n}", prompt, turns) for n, prompt in enumerate(prompts)]
    )
    plain = sampler(model)
    compared = 0
    for prompt, played in zip(prompts, together, strict=True):
        if not MISSING:
            assert tokens(await episode(engine, "a", prompt, turns)) == tokens(played)
        exact = await episode(plain, "a", prompt, turns)
        if tokens(exact) == tokens(played):
            compared += 1
            for (_, _, mine), (_, _, theirs) in zip(played, exact, strict=True):
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=0.05)
    assert compared


def test_unsupported_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"float32 needs weights in float32, not bfloat16"):
        sampler(tiny().to(BFLOAT16), dtype="float32")
    with pytest.raises(ConfigError, match=r"bfloat16 has no effect on weights in bfloat16 \(model"):
        sampler(tiny().to(BFLOAT16), dtype="bfloat16")
