"""Decode steps of fixed shapes match the model's own module; eviction in a full cache."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import CONTEXT, VOCAB, episode, sampler, tiny, tokens
from test_decoders import FAST, VARIANTS, Reader, check_logits, conversations, made
from torch import Tensor

from ludus.config.schema import LoraConfig
from ludus.core.errors import ConfigError
from ludus.models.build import _with_lora
from ludus.models.decoders import static
from ludus.models.decoders.lean import LeanDecoder
from ludus.models.decoders.llama import read
from ludus.models.decoders.static import StaticDecoder
from ludus.models.kv_cache.paging import BLOCK
from ludus.models.kv_cache.shared_prefix import PrefixGroups, round_up
from ludus.models.kv_cache.step_inputs import StepInputs
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.device_sampling import sample_on_device
from ludus.models.samplers.engine import InProcessSampler
from ludus.models.samplers.sampling import distribution, sample_tokens


class Watched(StaticDecoder):
    """Records the bucket of each step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.buckets: list[static.Bucket] = []
        super().__init__(*args, **options)

    def _run(self, step: static.BucketStep) -> Tensor:
        self.buckets.append(step.bucket)
        return super()._run(step)


def static_sampler(model: Any, decoder: StaticDecoder | None = None) -> InProcessSampler:
    engine = sampler(model, path="static")
    if decoder is not None:
        engine.decoder = decoder
        engine._reset()  # with the decoder's limit
    return engine


@torch.no_grad()
def check_steps(model: Any, decoder: StaticDecoder) -> None:
    """Two rows that share a block and one that does not, token by token across a block boundary."""
    reader = Reader(decoder)
    base = [(3 * i + 2) % model.config.vocab_size for i in range(BLOCK + 12)]
    prompts = {0: [*base, 1], 1: [*base, 2], 2: [5] * 17}
    reader.logits(prompts)
    for extra in range(6):
        prompts = {number: [*prompt, extra + number] for number, prompt in prompts.items()}
        found = reader.logits(prompts)
        plain = [model(torch.tensor([p]), use_cache=False).logits[0, -1] for p in prompts.values()]
        expected = torch.stack(plain)
        assert float((found - expected).abs().max() / expected.abs().max()) < 5e-5
    assert [sizes[:1] + sizes[2:] for sizes in decoder._steps] == [(3, 1, 2, 1)]


@pytest.mark.parametrize("family", FAST)
def test_families(family: str) -> None:
    model = tiny(family)
    check_logits(model, StaticDecoder(read(model, CONTEXT)))
    check_steps(model, StaticDecoder(read(model, CONTEXT)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str) -> None:
    model = made(VARIANTS[variant]())
    check_logits(model, StaticDecoder(read(model, CONTEXT)))
    check_steps(model, StaticDecoder(read(model, CONTEXT)))


async def played(engine: InProcessSampler, temperature: float, seed: int = 0) -> list[Any]:
    """Episodes with common prefixes, branches, different lengths, late starts and early ends."""
    rng = random.Random(seed)

    async def one(number: int, prompt: list[int]) -> Any:
        turns = [
            SamplingParams(rng.randrange(1, 9), temperature, seed=10 * number + turn)
            for turn in range(rng.randrange(1, 4))
        ]
        found = await episode(engine, f"{number:02d}", prompt, turns)
        return tokens(found), [c.logprobs for _, _, c in found]

    prompts = [*conversations(), *conversations()[::-1]]
    results = await asyncio.gather(*[one(n, prompt) for n, prompt in enumerate(prompts)])
    assert engine.num_blocks == 0
    return results


@pytest.mark.parametrize("family", FAST)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_samples_match_the_generic_path(family: str, temperature: float) -> None:
    model = tiny(family)
    decoder = Watched(read(model, CONTEXT))
    expected = await played(sampler(model, path="generic"), temperature)
    found = await played(static_sampler(model, decoder), temperature)
    assert any(sizes.groups > 1 and sizes.shared > 1 for sizes in decoder.buckets)
    assert any(sizes.rows == 12 for sizes in decoder.buckets)
    for (a_tokens, a), (b_tokens, b) in zip(expected, found, strict=True):
        assert a_tokens == b_tokens
        for mine, theirs in zip(a, b, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


async def test_deterministic_mode_off() -> None:
    """Rows join and leave during other turns."""
    model = tiny()
    expected = await played(sampler(model, path="generic"), 0.0)
    found = await played(sampler(model, path="static", deterministic=False), 0.0)
    assert [a for a, _ in expected] == [b for b, _ in found]


@pytest.mark.parametrize("room", [7, 12, 30])
async def test_eviction_does_not_change_samples(room: int) -> None:
    """Idle sessions and waiting turns are evicted first, then running turns."""
    model = tiny()
    free = static_sampler(model)
    expected = await played(free, 0.9)
    decoder = StaticDecoder(read(model, CONTEXT), max_blocks=room)
    engine = static_sampler(model, decoder)
    found = await played(engine, 0.9)
    assert [a for a, _ in expected] == [b for b, _ in found]
    if room < 30:
        assert engine.num_prefill_tokens > free.num_prefill_tokens  # computed anew
    assert engine._scheduler._tree.num_blocks <= room


async def test_a_cache_too_small_for_one_turn_is_refused() -> None:
    model = tiny()
    engine = static_sampler(model, StaticDecoder(read(model, CONTEXT), max_blocks=2))
    with pytest.raises(ConfigError, match="KV cache holds 32 tokens, too few for one"):
        await episode(engine, "a", [1] * 40, [SamplingParams(3)])
    assert tokens(await episode(engine, "b", [1, 2], [SamplingParams(3)]))  # goes on


def test_buckets() -> None:
    assert [round_up(n) for n in range(14)] == [0, 1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]


def found_groups(tables: list[list[int]], whole: list[int]) -> list[tuple[list[int], list[int]]]:
    groups = PrefixGroups().update(np.array(tables, np.int32), np.array(whole, np.int32))
    return [(sorted(group.rows.tolist()), group.blocks.tolist()) for group in groups]


def test_prefix_groups_save_most_reads() -> None:
    system, tasks = [1], ([2, 3, 4], [5, 6, 7])
    rows = [[*system, *tasks[n // 4], 10 + n] for n in range(8)]
    assert found_groups(rows, [4] * 8) == [
        ([0, 1, 2, 3], [1, 2, 3, 4]), ([4, 5, 6, 7], [1, 5, 6, 7])
    ]  # fmt: skip
    rows = [[*[1, 2, 3], 10 + n // 2, 20 + n] for n in range(8)]
    assert found_groups(rows, [4] * 8) == [(list(range(8)), [1, 2, 3])]
    assert found_groups([[1, 2], [1, 3], [4, 5]], [1, 1, 1]) == [([0, 1], [1])]
    assert found_groups([[1, 2], [1, 3]], [0, 1]) == []  # a block that is being written


def test_prefix_groups_are_updated_with_the_rows() -> None:
    groups = PrefixGroups()
    tables = np.array([[1, 2, 3], [1, 2, 4], [5, 6, 7], [5, 6, 8]], np.int32)
    whole = np.full(4, 2, np.int32)
    first = groups.update(tables, whole)
    assert [group.blocks.tolist() for group in first] == [[1, 2], [5, 6]]
    assert groups.update(np.pad(tables, ((0, 0), (0, 1))), whole + 1) is first
    other = tables[[0, 2, 3, 1]]
    assert sorted(group.rows.tolist() for group in groups.update(other, whole)) == [[0, 3], [1, 2]]
    assert groups.update(tables[:1], whole[:1]) == []
    alone = np.array([[1, 2], [3, 4]], np.int32)
    assert groups.update(alone, whole[:2] - 1) == []


def one_step(tables: list[list[int]], positions: list[int], seed: int) -> StepInputs:
    rows = np.arange(len(tables), dtype=np.int32)
    at = np.array(positions, np.int32)
    table = np.array(tables, np.int32)
    slots = table[rows, at // BLOCK] * BLOCK + at % BLOCK
    ids = np.random.default_rng(seed).integers(1, VOCAB, len(rows))
    return StepInputs(ids, at, rows, rows, slots.astype(np.int32), table, rows)


def test_least_recently_used_bucket_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "MAX_GRAPHS", 3)
    decoder = Watched(read(tiny(), CONTEXT))
    decoder.reserve(8)
    for rows in (1, 2, 3, 4, 1):
        decoder.forward(one_step([[n] for n in range(rows)], [0] * rows, rows))
    assert [sizes.rows for sizes in decoder._steps] == [3, 4, 1]


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_match_lean(seed: int) -> None:
    """Steps over randomly shared tables, with rows of any length."""
    rng = random.Random(seed)
    llama = read(tiny(), CONTEXT)
    decoders = (StaticDecoder(llama), LeanDecoder(llama))
    blocks = 40
    fill = StepInputs(
        np.random.default_rng(seed).integers(1, VOCAB, BLOCK * blocks),
        np.tile(np.arange(BLOCK, dtype=np.int32), blocks),
        np.repeat(np.arange(blocks, dtype=np.int32), BLOCK),
        np.arange(BLOCK * blocks, dtype=np.int32),
        np.arange(BLOCK * blocks, dtype=np.int32),
        np.arange(blocks, dtype=np.int32)[:, None],
        np.arange(blocks, dtype=np.int32) * BLOCK,
    )
    for decoder in decoders:
        decoder.reserve(blocks)
        decoder.forward(fill)
    for number in range(6):
        tables: list[list[int]] = []
        positions = []
        unused = list(range(20, blocks))
        for _ in range(rng.randrange(1, 12)):
            base = rng.choice(tables)[: rng.randrange(4)] if tables else [*rng.sample(range(20), 3)]
            depth = len([block for block in base if block < 20])
            tables.append(([*base[:depth], unused.pop()] + [0] * 4)[:4])
            positions.append(BLOCK * depth + rng.randrange(BLOCK))
        step = one_step(tables, positions, number)
        found, expected = [decoder.forward(step).clone() for decoder in decoders]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_weights_are_read_in_place() -> None:
    model = tiny("qwen2")
    decoder = StaticDecoder(read(model, CONTEXT))
    check_steps(model, decoder)
    steps = dict(decoder._steps)
    assert steps
    model.load_state_dict(tiny("qwen2", seed=3).state_dict())
    decoder.refresh()
    assert dict(decoder._steps) == steps  # what was captured stays
    check_steps(model, decoder)


def test_refresh_detects_a_replaced_parameter() -> None:
    """Until `refresh`, the old parameter is kept for the graphs that read it."""
    model = tiny("qwen2")
    decoder = StaticDecoder(read(model, CONTEXT))
    check_steps(model, decoder)
    old = model.model.layers[0].mlp.up_proj.weight
    address = old.data_ptr()
    model.load_state_dict(tiny("qwen2", seed=4).state_dict(), assign=True)
    assert address in {part.data_ptr() for part in decoder._sources if isinstance(part, Tensor)}
    assert decoder._steps
    decoder.refresh()
    assert not decoder._steps
    assert address not in {part.data_ptr() for part in decoder._sources if isinstance(part, Tensor)}
    check_steps(model, decoder)


def test_adapters_switched_off() -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)  # under some adapters rounding in float32 is as large as 1e-4
        model = _with_lora(tiny(), LoraConfig(rank=2)).eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    decoder = StaticDecoder(read(model, CONTEXT))
    check_steps(model, decoder)
    with model.disable_adapter():
        decoder.refresh()
        assert not decoder._steps
        check_steps(model, decoder)


async def test_bfloat16_products_of_float32_weights() -> None:
    model = tiny()
    engine = sampler(model, path="static", dtype="bfloat16")
    assert isinstance(engine.decoder, StaticDecoder)
    [(_, _, completion)] = await episode(engine, "a", [3, 4, 5], [SamplingParams(12)])
    exact = sampler(model, path="static")
    [(_, _, other)] = await episode(exact, "a", [3, 4, 5], [SamplingParams(12)])
    assert completion.logprobs[0] != other.logprobs[0]
    assert completion.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.3)
    width = 2 * 2 * 2 * 8 * BLOCK  # keys and values, layers, heads, head size
    assert (engine.decoder.bytes_per_block, exact.decoder.bytes_per_block) == (2 * width, 4 * width)  # type: ignore[attr-defined]


def test_sample_on_device_matches_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    for vocab in (3, 1024, 4099):
        logits = 4 * torch.randn(60, vocab, generator=generator)
        logits[::5, 1::3] = -torch.inf
        temperatures = np.array([0.0, 0.3, 1.0, 1.7] * 15)
        params = [SamplingParams(1, temperature=t) for t in temperatures]
        uniforms = rng.random(60)
        uniforms[:4], uniforms[4:8] = 0.0, np.nextafter(1.0, 0.0)
        expected, logprobs = sample_tokens(logits, params, uniforms.tolist())
        found, found_logprobs = sample_on_device(logits, temperatures, uniforms)
        same = found == np.array(expected)
        assert same.sum() > 50
        np.testing.assert_allclose(found_logprobs[same], np.array(logprobs)[same], atol=1e-5)
        probabilities = distribution(logits, params)
        cumulative = probabilities.cumsum(-1)
        for row in np.flatnonzero(~same):  # rounding may tip a choice between neighbours
            assert probabilities[row, found[row]] > 0
            low = min(int(found[row]), expected[row])
            assert abs(float(cumulative[row, low]) - uniforms[row]) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite(bad: float) -> None:
    logits = torch.zeros(3, 40)
    logits[1] = bad
    _, logprobs = sample_on_device(logits, np.ones(3), np.full(3, 0.5))
    assert np.isfinite(logprobs).tolist() == [True, False, True]


def test_static_path_refuses_other_models() -> None:
    with pytest.raises(ConfigError, match="static path cannot serve GPT2LMHeadModel"):
        sampler(tiny("gpt2"), path="static")


@pytest.mark.gpu
async def test_graphs_follow_the_copy_in_bfloat16() -> None:
    """Captured graphs read the refreshed weights, and no others."""
    model = tiny().cuda()
    engine = sampler(model, dtype="bfloat16")
    assert isinstance(engine.decoder, StaticDecoder)
    for _ in range(3):
        before = [ids for ids, _ in await played(engine, 0.0)]
    assert engine.decoder.num_graphs
    graphs = engine.decoder.num_graphs
    with torch.no_grad():
        model.load_state_dict(tiny(seed=5).state_dict())
    assert [ids for ids, _ in await played(engine, 0.0)] == before
    engine.publish(1)
    assert engine.decoder.num_graphs >= graphs
    found = [ids for ids, _ in await played(engine, 0.0)]
    fresh = [ids for ids, _ in await played(sampler(model, dtype="bfloat16"), 0.0)]
    assert found == fresh != before


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_graph_samples_match_the_generic_path(temperature: float) -> None:
    model = tiny().cuda()
    engine = sampler(model)
    assert engine.decoder.name == "CUDA graphs"
    assert isinstance(engine.decoder, StaticDecoder)
    expected = await played(sampler(model, path="generic"), temperature)
    for _ in range(3):  # the second and later ones replay
        found = await played(engine, temperature)
        assert [a for a, _ in expected] == [b for b, _ in found]
    assert engine.decoder.num_graphs
    with torch.no_grad():
        model.load_state_dict(tiny(seed=5).state_dict())  # in place
    engine.publish(1)
    changed = await played(engine, temperature)
    assert [a for a, _ in changed] == [
        b for b, _ in await played(sampler(model, path="generic"), temperature)
    ]
