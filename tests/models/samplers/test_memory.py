"""Sampling steps that exceed memory: smaller passes, then an error with the settings to lower."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engine_helpers import sampler, tiny

from ludus.core.errors import TrainingError
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.models.samplers.engine import InProcessSampler

PROMPTS = [[5, 6, 7, 8] * 4, [9, 10], list(range(1, 30))]
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
]


async def turns(engine: InProcessSampler) -> list[Completion]:
    for number in range(len(PROMPTS)):
        engine.open(f"e{number}")
    calls = [
        engine.sample(prompt, SamplingParams(6, seed=n), session=f"e{n}")
        for n, prompt in enumerate(PROMPTS)
    ]
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for number in range(len(PROMPTS)):
            engine.close(f"e{number}")


def limited(engine: InProcessSampler, limit: int, error: Exception) -> list[int]:
    """Make passes of more than `limit` tokens fail; returns the sizes of all passes."""
    sizes: list[int] = []
    plain = engine.decoder.forward

    def forward(inputs: Any) -> Any:
        sizes.append(len(inputs.ids))
        if sizes[-1] > limit:
            raise error
        return plain(inputs)

    engine.decoder.forward = forward  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("path", ["auto", "generic", "static"])
async def test_a_step_is_computed_in_smaller_passes(path: str, error: Exception) -> None:
    expected = await turns(sampler(tiny(), path=path))
    engine = sampler(tiny(), path=path)
    sizes = limited(engine, 10, error)
    found = await turns(engine)
    assert max(sizes) > 10
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert engine.num_decode_tokens == 18
    failed = sum(size > 10 for size in sizes)
    await turns(engine)
    assert sum(size > 10 for size in sizes) == failed, "the smaller size is kept"


async def test_memory_that_does_not_hold_a_token() -> None:
    engine = sampler(tiny())
    plain = engine.decoder.forward
    limited(engine, 0, OUT_OF_MEMORY[0])
    with pytest.raises(TrainingError) as caught:
        await turns(engine)
    assert str(caught.value) == (
        "memory does not suffice to sample (CUDA out of memory. Tried to allocate 2.00 GiB.); "
        "lower sampler.args.cache_gib, rollout.concurrency or model.context_length"
    )
    engine.decoder.forward = plain  # type: ignore[method-assign]
    expected = await turns(sampler(tiny()))
    assert [t.token_ids for t in await turns(engine)] == [t.token_ids for t in expected]


async def test_other_errors_are_raised() -> None:
    engine = sampler(tiny())
    limited(engine, 10, RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="multiplied"):
        await turns(engine)
