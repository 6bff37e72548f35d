"""Fast path: the native and lean decoders match the model's own module."""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import (
    CONTEXT,
    FAMILIES,
    GROUPED,
    VOCAB,
    conversations_of,
    episode,
    sampler,
    tiny,
    tokens,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import ludus.models.samplers.engine
from ludus.config.schema import LoraConfig
from ludus.core.errors import ConfigError, TrainingError
from ludus.models.build import _with_lora
from ludus.models.decoders import native
from ludus.models.decoders.base import Decoder
from ludus.models.decoders.generic import GenericDecoder
from ludus.models.decoders.lean import LeanDecoder
from ludus.models.decoders.llama import NotLlama, read
from ludus.models.decoders.native.bindings import Kernels
from ludus.models.decoders.native.decoder import NativeDecoder
from ludus.models.decoders.static import StaticDecoder
from ludus.models.kv_cache.paging import BLOCK, Block, BlockTree
from ludus.models.kv_cache.step_inputs import StepInputsBuilder
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.sampling import TokenSampler, distribution, sample_tokens
from ludus.models.vocabulary import Vocabulary

try:
    native.library()
    MISSING = ""
except native.Unavailable as reason:
    MISSING = str(reason)
needs_native = pytest.mark.skipif(bool(MISSING), reason=MISSING)

FAST = ["qwen3", "qwen2", "llama", "gemma", "mistral"]
NEWER = ["phi3", "olmo2", "granite", "smollm3", "gemma2", "gemma3", "glm4", "qwen3_moe"]
"""Families on the fast path too: see test_families."""
ROPE = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 24}
VARIANTS: dict[str, Any] = {
    "biases": lambda: LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "qwen2 biases": lambda: Qwen2Config(**GROUPED),
    "untied": lambda: Qwen3Config(**GROUPED, tie_word_embeddings=False),
    "one head": lambda: Qwen3Config(
        **{**GROUPED, "num_attention_heads": 1, "num_key_value_heads": 1}
    ),
    "six heads a key": lambda: Qwen3Config(
        **{**GROUPED, "num_attention_heads": 6, "num_key_value_heads": 1}
    ),
    "odd sizes": lambda: LlamaConfig(
        **{**GROUPED, "hidden_size": 36, "intermediate_size": 51, "head_dim": 34, "vocab_size": 67}
    ),
    "rope llama3": lambda: LlamaConfig(
        **GROUPED,
        rope_parameters={
            **ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0
        },
    ),
    "rope yarn": lambda: LlamaConfig(**GROUPED, rope_parameters={**ROPE, "rope_type": "yarn"}),
    "rope linear": lambda: LlamaConfig(
        **GROUPED, rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    ),
}  # fmt: skip


def made(config: Any, seed: int = 0) -> Any:
    """A model with random weights and biases."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model.eval()


def conversations(vocab: int = VOCAB) -> list[list[int]]:
    return conversations_of(vocab)


class Reader:
    """Feeds conversations to a decoder, as the scheduler does."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.tree = BlockTree(self.copy)
        self.blocks: dict[int, list[Block]] = {}

    def copy(self, source: int, target: int, count: int) -> None:
        self.decoder.reserve(self.tree.num_blocks)
        self.decoder.copy(source, target, count)

    def logits(self, prompts: dict[int, list[int]]) -> Tensor:
        builder = StepInputsBuilder()
        for number, prompt in prompts.items():
            self.blocks[number] = self.tree.admit(self.blocks.get(number, []), prompt, builder)
        self.decoder.reserve(self.tree.num_blocks)
        return self.decoder.forward(builder.build()).clone()


def decoders_of(model: Any) -> list[Decoder]:
    llama = read(model, CONTEXT)
    fast: list[Decoder] = [LeanDecoder(llama)]
    return fast if MISSING else [*fast, NativeDecoder(llama)]


@torch.no_grad()
def check_logits(model: Any, decoder: Decoder) -> None:
    """Prefill, then two turns of one and of many tokens, all rows in one batch."""
    reader = Reader(decoder)
    prompts = dict(enumerate(conversations(model.config.vocab_size)))
    for extra in ([], [9], [4, 8, 7, 7, 2]):
        prompts = {number: prompt + extra for number, prompt in prompts.items()}
        found = reader.logits(prompts)
        plain = [model(torch.tensor([p]), use_cache=False).logits[0, -1] for p in prompts.values()]
        expected = torch.stack(plain)
        assert float((found - expected).abs().max() / expected.abs().max()) < 5e-5


@needs_native
def test_many_rows_share_few_tokens() -> None:
    """Equal prompts share a token, so there are more rows of logits than tokens."""
    reader = Reader(NativeDecoder(read(made(Qwen3Config(**GROUPED)), CONTEXT)))
    rows = 4000
    logits = reader.logits({row: [3, 1, 4] for row in range(rows)})
    assert logits.shape[0] == rows
    assert (logits == logits[0]).all()
    assert len(reader.decoder._scratch) >= rows * GROUPED["hidden_size"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", [VOCAB, -1, 10**9, -(10**9)])
def test_inputs_that_the_model_lacks_are_refused(wrong: int) -> None:
    """Native code and CUDA kernels would read out of bounds."""
    model = tiny()
    decoders = [*decoders_of(model), StaticDecoder(read(model, CONTEXT)), GenericDecoder(model)]
    for decoder in decoders:
        reader = Reader(decoder)
        for ids in ([1, 2, wrong], [wrong]):
            with pytest.raises(IndexError, match=rf"token id {wrong} in a decoder's inputs"):
                reader.logits({0: ids})
    for decoder in decoders[:-1]:  # the generic one calls the model, which computes positions
        with pytest.raises(IndexError, match=rf"position {CONTEXT} in a decoder's inputs"):
            Reader(decoder).logits({0: [1] * (CONTEXT + 1)})


@pytest.mark.parametrize("family", FAST)
def test_families(family: str) -> None:
    model = tiny(family)
    for decoder in decoders_of(model):
        check_logits(model, decoder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str) -> None:
    model = made(VARIANTS[variant]())
    for decoder in decoders_of(model):
        check_logits(model, decoder)


@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_paths_sample_the_same(family: str) -> None:
    """All paths sample the same tokens over several turns, with shared and branching sessions."""
    model = tiny(family)
    turns = [SamplingParams(max_tokens=7, seed=s, temperature=0.8) for s in range(3)]

    async def played(path: str, decoder: Decoder | None = None) -> list[Any]:
        engine = sampler(model, path=path)
        engine.decoder = decoder or engine.decoder
        engine._reset()
        episodes = [
            episode(engine, f"{n}", prompt, turns) for n, prompt in enumerate(conversations())
        ]
        results = await asyncio.gather(*episodes)
        assert engine.num_blocks == 0
        return [(tokens(result), [c.logprobs for _, _, c in result]) for result in results]

    generic = await played("generic")
    fast = [await played("auto")]
    if family in FAST or family in NEWER:
        assert sampler(model).decoder.name == ("lean" if MISSING else "native")
        fast.append(await played("auto", LeanDecoder(read(model, CONTEXT))))
    else:
        assert sampler(model).decoder.name == "generic"
    for other in fast:
        for (a_tokens, a), (b_tokens, b) in zip(generic, other, strict=True):
            assert a_tokens == b_tokens
            for mine, theirs in zip(a, b, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)


async def test_fast_path_refuses_other_models() -> None:
    with pytest.raises(ConfigError, match="fast path cannot serve GPT2LMHeadModel: GPT2LMHead"):
        sampler(tiny("gpt2"), path="fast")
    with pytest.raises(NotLlama, match="has other parts"):
        read(tiny("gpt_neox"), CONTEXT)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(NotLlama, match="rotary positions of type 'dynamic'"):
        read(made(LlamaConfig(**GROUPED, rope_parameters=dynamic)), CONTEXT)


async def test_a_modified_forward_takes_the_generic_path() -> None:
    """Its modules are Llama's, its forward pass is not: only the trial pass detects it."""
    model = tiny("llama")
    attention = model.model.layers[1].self_attn
    plain = attention.forward
    attention.forward = lambda *args, **kwargs: (2 * plain(*args, **kwargs)[0], None)
    assert sampler(model).decoder.name == "generic"
    with pytest.raises(ConfigError, match=r"logits differ from those of the same weights.*%"):
        sampler(model, path="fast")


# Native code


@needs_native
@pytest.mark.parametrize("variant", ["qwen3", "odd sizes"])
def test_bits_are_batch_and_chunk_invariant(variant: str) -> None:
    model = tiny() if variant == "qwen3" else made(VARIANTS[variant]())
    llama = read(model, CONTEXT)
    prompts = dict(enumerate(conversations()))
    together = Reader(NativeDecoder(llama)).logits(prompts)
    for number, prompt in prompts.items():
        alone = Reader(NativeDecoder(llama))
        assert torch.equal(alone.logits({0: prompt})[0], together[number])
        decoding = Reader(NativeDecoder(llama))
        for length in range(1, len(prompt) + 1):
            found = decoding.logits({0: prompt[:length]})
        assert torch.equal(found[0], together[number])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads % 2 + 1)
        assert torch.equal(Reader(NativeDecoder(llama)).logits(prompts), together)
    finally:
        torch.set_num_threads(threads)


@needs_native
def test_packed_weights_follow_the_model() -> None:
    model = tiny("qwen2")
    decoder = NativeDecoder(read(model, CONTEXT))
    check_logits(model, decoder)
    before = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2, 3]])).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    check_logits(before, decoder)  # the packed weights are the decoder's own
    addresses = [tensor.data_ptr() for tensor in decoder._weights.values()]
    decoder.refresh()
    check_logits(model, decoder)
    model.load_state_dict(tiny("qwen2", seed=4).state_dict(), assign=True)
    decoder.refresh()  # new tensors in place of the old
    check_logits(model, decoder)
    assert [tensor.data_ptr() for tensor in decoder._weights.values()] == addresses


@needs_native
def test_adapters_are_merged() -> None:
    model = _with_lora(tiny(), LoraConfig(rank=2)).eval()
    decoder = NativeDecoder(read(model, CONTEXT))
    for seed in range(2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(seed))
        decoder.refresh()
        check_logits(model, decoder)
    with model.disable_adapter():
        decoder.refresh()
        check_logits(model, decoder)


@needs_native
def test_native_sampling_matches_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    for vocab in (3, 64, 1000, 4099):
        logits = 4 * torch.randn(60, vocab, generator=generator)
        logits[::5, ::3] = -torch.inf
        params = [SamplingParams(1, temperature=t) for t in (0.0, 0.3, 1.0, 1.7) * 15]
        uniforms = rng.random(60)
        uniforms[:4], uniforms[4:8] = 0.0, np.nextafter(1.0, 0.0)
        expected, logprobs = sample_tokens(logits, params, uniforms.tolist())
        found, found_logprobs = TokenSampler()(logits, params, uniforms)
        np.testing.assert_allclose(found_logprobs[found == expected],
                                   np.array(logprobs)[found == expected], atol=1e-5)  # fmt: skip
        # Rounding may tip a choice between neighbours.
        cumulative = distribution(logits, params).cumsum(-1)
        for row in np.flatnonzero(found != expected):
            low, high = sorted((int(found[row]), int(expected[row])))
            reached = float(cumulative[row, low])
            assert abs(reached - uniforms[row]) < 1e-6
            assert float(cumulative[row, high - 1]) - reached < 1e-6
        assert np.isfinite(found_logprobs).all()


@needs_native
def test_truncated_rows_and_a_smaller_vocabulary() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 40:] = 30.0
    params = [SamplingParams(1, top_k=5), SamplingParams(1), SamplingParams(1, top_p=0.5)] * 2
    uniforms = np.linspace(0, 0.999, 6)
    found, logprobs = TokenSampler(Vocabulary(40))(logits, params, uniforms)
    expected, expected_logprobs = sample_tokens(logits[:, :40], params, uniforms.tolist())
    assert found.tolist() == expected
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)


async def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    model = made(Qwen3Config(**GROUPED, tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight[40:] *= 10
    params = [SamplingParams(max_tokens=60, seed=1)]
    tokenizer = SimpleNamespace(get_vocab=lambda: {f"t{id}": id for id in range(40)})
    for path in ("fast", "generic"):
        engine = sampler(model, tokenizer=tokenizer, path=path)
        [found] = tokens(await episode(engine, "a", [1, 2], params))
        assert max(found) < 40
        [free] = tokens(await episode(sampler(model, path=path), "a", [1, 2], params))
        assert max(free) >= 40


@needs_native
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite(bad: float) -> None:
    logits = torch.zeros(3, 40)
    logits[1] = bad
    with pytest.raises(TrainingError, match=r"not finite \(row 1 of 3\)"):
        TokenSampler()(logits, [SamplingParams(1)] * 3, np.full(3, 0.5))


@pytest.mark.parametrize("path", ["fast", "generic"])
async def test_groups_share_their_prompt(path: str) -> None:
    engine = sampler(tiny(), path=path)
    prompt = conversations()[0]
    params = [SamplingParams(max_tokens=4, seed=s) for s in range(8)]
    played = await asyncio.gather(
        *[episode(engine, f"{n}", prompt, [one]) for n, one in enumerate(params)]
    )
    assert engine.num_prefill_tokens == len(prompt)
    assert engine.num_prompt_tokens == 8 * len(prompt)
    assert engine.num_blocks == 0
    alone = [await episode(engine, "x", prompt, [one]) for one in params]
    assert [tokens(a) for a in alone] == [tokens(p) for p in played]


@pytest.mark.parametrize("path", ["fast", "generic"])
async def test_long_prompts_are_prefilled_in_chunks(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [SamplingParams(max_tokens=5, seed=2)] * 2

    async def played() -> tuple[list[Any], int]:
        engine = sampler(tiny(), path=path)
        longest = 0
        forward = engine.decoder.forward

        def counted(batch: Any) -> Tensor:
            nonlocal longest
            longest = max(longest, len(batch.ids))
            return forward(batch)

        engine.decoder.forward = counted  # type: ignore[method-assign]
        results = await asyncio.gather(
            *[episode(engine, f"{n}", p, params) for n, p in enumerate(conversations())]
        )
        return [tokens(result) for result in results], longest

    whole, size = await played()
    assert size > 50
    monkeypatch.setattr(ludus.models.samplers.engine, "MAX_TOKENS_PER_PASS", 11)
    assert await played() == (whole, 11)


def test_generic_returns_logits_of_any_token() -> None:
    """Rows whose output is a token inside another row."""
    for family in ("qwen3", "gpt2"):
        model = tiny(family)
        check_logits(model, GenericDecoder(model))


# Building


@needs_native
def test_block_sizes_agree() -> None:
    assert Kernels().block == BLOCK


def test_native_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_NATIVE", "0")
    native.library.cache_clear()
    try:
        with pytest.raises(native.Unavailable, match="LUDUS_NATIVE=0 is set"):
            native.library()
        engine = sampler(tiny())
        assert engine.decoder.name == "lean"
        played = asyncio.run(episode(engine, "a", [1, 2], [SamplingParams(max_tokens=3)]))
        assert len(played[0][2].token_ids) == 3
    finally:
        native.library.cache_clear()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.library.cache_clear()
    try:
        monkeypatch.setenv("CC", str(tmp_path / "missing"))
        with pytest.raises(native.Unavailable, match="could not build the kernels"):
            native.library()
        monkeypatch.delenv("CC")
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(native.Unavailable, match="no C compiler"):
            native.library()
    finally:
        native.library.cache_clear()


@needs_native
@pytest.mark.slow
def test_concurrent_builds(tmp_path: Path) -> None:
    program = "from ludus.models.decoders import native; print(native.library()._name)"
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    found = {builder.communicate()[0].strip() for builder in builders}
    folder = tmp_path / "ludus" / "native"
    assert found == {str(path) for path in folder.iterdir()}
    assert len(found) == 1


@needs_native
def test_a_folder_writable_by_others_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ludus" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ("-std=gnu11", "-fPIC", "-shared"))  # quick to build
    native.library.cache_clear()
    try:
        assert Path(native.library()._name).parent != folder
        assert not list(folder.iterdir())
    finally:
        native.library.cache_clear()


@needs_native
def test_the_source_compiles_without_warnings(tmp_path: Path) -> None:
    command = ["cc", "-O0", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command += [
        "-Wno-unused-parameter",
        "-Wno-psabi",
        "-c",
        str(native.SOURCE),
        "-o",
        str(tmp_path / "x.o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
