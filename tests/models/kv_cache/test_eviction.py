"""A full KV cache: least recently used idle sessions are evicted; samples stay the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engine_helpers import CONTEXT, episode, sampler, tiny

from ludus.core.errors import ConfigError
from ludus.core.system.machine import machine_memory
from ludus.models.decoders.capacity import MEMORY_FRACTION
from ludus.models.kv_cache.paging import BLOCK
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler

PATHS = ["fast", "static", "generic"]


def engine_of(path: str, blocks: int | None = None, **options: Any) -> InProcessSampler:
    """A sampler with room for `blocks`; None: the default."""
    engine = sampler(tiny(), path=path, **options)
    if blocks is None:
        return engine
    gib = (blocks + 0.5) * engine.decoder.bytes_per_block / 2**30
    return sampler(tiny(), path=path, cache_gib=gib, **options)


async def turn(engine: InProcessSampler, name: str, prompt: list[int]) -> tuple[list[int], int]:
    """The conversation after a turn of a session, and the number of tokens computed for it."""
    before = engine.num_prefill_tokens
    if name not in engine._scheduler.sessions:
        engine.open(name)
    params = SamplingParams(max_tokens=4, seed=ord(name))
    found = await engine.sample(prompt, params, session=name)
    return [*prompt, *found.token_ids, 7], engine.num_prefill_tokens - before


@pytest.mark.parametrize("path", PATHS)
async def test_the_least_recently_used_session_is_evicted(path: str) -> None:
    engine = engine_of(path, blocks=9, deterministic=False)
    a, _ = await turn(engine, "a", [1] * 40)  # three blocks each
    b, _ = await turn(engine, "b", [2] * 40)
    a, computed = await turn(engine, "a", a)
    assert computed == 2  # the last sampled token and the observation
    await turn(engine, "c", [3] * 40)
    assert engine.num_evicted_tokens == 0
    await turn(engine, "d", [4] * 40)
    assert engine.num_evicted_tokens > 0
    a, computed = await turn(engine, "a", a)
    assert computed == 2
    _, computed = await turn(engine, "b", b)
    assert computed == len(b)
    assert engine.num_blocks <= 9
    assert engine.cache_peak_bytes <= 9 * engine.decoder.bytes_per_block


@pytest.mark.parametrize("blocks", [8, 12, 20])
async def test_many_sessions_in_a_small_cache(blocks: int) -> None:
    """Twelve episodes of three turns, bit for bit as with an unlimited cache."""
    turns = [SamplingParams(max_tokens=9, temperature=1.3, seed=seed) for seed in range(3)]
    prompts = [[1 + number] * (5 * number % 37 + 1) for number in range(12)]
    prompts[1] = prompts[0] * 30  # of a common beginning with another
    prompts[2] = prompts[0] * 45

    async def played(engine: InProcessSampler) -> list[Any]:
        episodes = [episode(engine, f"{n:02d}", prompt, turns) for n, prompt in enumerate(prompts)]
        done = await asyncio.wait_for(asyncio.gather(*episodes), 60)
        return [[(c.token_ids, c.logprobs) for _, _, c in turns] for turns in done]

    free = engine_of("fast")
    expected = await played(free)
    assert free.num_evicted_tokens == 0
    engine = engine_of("fast", blocks)
    found = await played(engine)
    if engine.decoder.name == "native":
        assert found == expected
    assert [[ids for ids, _ in turns] for turns in found] == [
        [ids for ids, _ in turns] for turns in expected
    ]
    assert engine.num_evicted_tokens > 0
    assert engine.num_prefill_tokens > free.num_prefill_tokens
    assert engine.cache_peak_bytes <= blocks * engine.decoder.bytes_per_block
    assert engine.num_blocks == 0


@pytest.mark.parametrize("path", PATHS)
async def test_the_memory_of_a_block(path: str) -> None:
    """By default a quarter of the memory; keys and values are 2 x layers x heads x size numbers."""
    engine = engine_of(path)
    decoder = engine.decoder
    assert decoder.max_blocks is not None
    assert decoder.max_blocks * decoder.bytes_per_block <= MEMORY_FRACTION * machine_memory()
    plain = 2 * 2 * 2 * 8 * 4 * BLOCK  # keys and values, layers, heads, size, bytes
    values = plain // 2 // 8 * 32 if decoder.name == "native" else plain // 2
    assert plain <= decoder.bytes_per_block <= plain // 2 + values
    await turn(engine, "a", [1, 2, 3])
    assert engine.cache_peak_bytes == decoder.bytes_per_block


@pytest.mark.parametrize("path", PATHS)
def test_a_cache_below_one_conversation_is_refused(path: str) -> None:
    least = CONTEXT // BLOCK + 2
    engine_of(path, least)
    with pytest.raises(
        ConfigError,
        match=r"sampler.args.cache_gib: .* GiB hold 112 tokens, too few for one conversation of "
        r"model.context_length = 96; set at least",
    ):
        engine_of(path, least - 1)


async def test_reserved_memory_is_not_touched() -> None:
    """The native decoder reserves addresses for the whole capacity, and only written pages take
    memory, in deterministic mode too (torch.empty writes all of it there)."""
    engine = engine_of("fast")
    if engine.decoder.name != "native":
        pytest.skip("no native decoder")
    torch.use_deterministic_algorithms(True)
    try:
        await turn(engine, "a", [1] * 40)
    finally:
        torch.use_deterministic_algorithms(False)
    keys = engine.decoder._keys[0]  # type: ignore[attr-defined]
    assert len(keys) == engine.decoder.max_blocks
    assert keys.data_ptr() % 64 == 0
    assert not keys[len(keys) // 2].any()  # never written: the system's zero page
