"""The learner trains while a sampler with its own weights samples; one that shares them waits."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_helpers import LEVERS, PLACES, Recording, World, task
from test_local import ALGORITHM, HALF, make_backend, renderer  # noqa: F401

from ludus.backends.local import LocalBackend
from ludus.config.schema import RunConfig
from ludus.core.types import Sample, Spec
from ludus.loop.loop import run_stage
from ludus.models.chat.renderer import Renderer
from ludus.models.decoders import native
from ludus.models.samplers.base import SamplingParams

AHEAD: dict[str, Any] = {
    "rl": {"max_staleness": 1, "algorithm": {"name": "grpo", "args": {"importance_cap": 2.0}}},
    "rollout": {"max_tokens_per_turn": 8, "deterministic": False},
    "env": "textcraft",
}
REASON = native.absence()
SAMPLE = Sample([2, 5, 6, 7], [False, True, True, True], [0.0, -1.0, -1.0, -1.0], [1.0] * 4, "t")


def in_process(**args: Any) -> dict[str, Any]:
    return {**AHEAD, "sampler": {"name": "in_process", "args": args}}


async def keep_sampling(backend: LocalBackend, stop: asyncio.Event) -> None:
    backend.sampler.open("s")
    number = 0
    while not stop.is_set():
        number += 1
        await backend.sampler.sample([3, 4, 5], SamplingParams(8, seed=number), session="s")
    backend.sampler.close("s")


@pytest.mark.parametrize(
    ("args", "own"),
    [
        pytest.param({}, True, marks=pytest.mark.skipif(bool(REASON), reason=REASON)),
        ({"dtype": "bfloat16", "path": "static"}, True),
        ({"dtype": "bfloat16", "path": "generic"}, True),
        ({"path": "static"}, False),
        ({"path": "generic"}, False),
    ],
)
async def test_turns_during_a_training_step(
    tmp_path: Path,
    renderer: Renderer,  # noqa: F811
    args: dict[str, Any],
    own: bool,
) -> None:
    backend = make_backend(renderer, tmp_path, seed=0, **in_process(**args))
    sampler: Any = backend.sampler
    assert sampler.shares_weights is not own
    train_step, sampled = backend.learner.train_step, []

    def watched(*inputs: Any) -> dict[str, float]:
        """In the learner's thread: waits for tokens of the sampler, which must come or must not."""
        before = sampler.num_decode_tokens
        until = time.monotonic() + (60 if own else 0.1)
        while sampler.num_decode_tokens < before + 5 and time.monotonic() < until:
            time.sleep(0.001)
        sampled.append(sampler.num_decode_tokens - before)
        return train_step(*inputs)

    backend.learner.train_step = watched  # type: ignore[method-assign]
    stop = asyncio.Event()
    playing = asyncio.create_task(keep_sampling(backend, stop))
    try:
        for version in (1, 2):
            await backend.train([SAMPLE], ALGORITHM)
            assert await backend.publish_weights() == version
            before = sampler.num_decode_tokens
            while sampler.num_decode_tokens == before:  # it goes on
                await asyncio.sleep(0)
    finally:
        stop.set()
        await asyncio.wait_for(playing, 60)
        backend.close()
    assert len(sampled) == 2
    assert all(count >= 5 for count in sampled) if own else sampled == [0, 0]


async def test_no_step_during_a_publication(tmp_path: Path, renderer: Renderer) -> None:  # noqa: F811
    """The copy is made in another thread; the event loop is free, and no token is sampled."""
    args = {"dtype": "bfloat16", "path": "static"}
    backend = make_backend(renderer, tmp_path, seed=0, **in_process(**args))
    sampler, loop = backend.sampler, asyncio.get_running_loop()
    refresh, counts = sampler.decoder.refresh, []  # type: ignore[attr-defined]

    async def turns_of_the_loop() -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    def watched() -> None:
        assert sampler.policy_version == 0  # set after the copy
        counts.append(sampler.num_decode_tokens)  # type: ignore[attr-defined]
        asyncio.run_coroutine_threadsafe(turns_of_the_loop(), loop).result(timeout=60)
        refresh()
        counts.append(sampler.num_decode_tokens)  # type: ignore[attr-defined]

    sampler.decoder.refresh = watched  # type: ignore[attr-defined]
    stop = asyncio.Event()
    playing = asyncio.create_task(keep_sampling(backend, stop))
    while not sampler.num_decode_tokens:  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    assert await backend.publish_weights() == 1
    stop.set()
    await asyncio.wait_for(playing, 60)
    backend.close()
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("changes", "low", "high"), [({}, 0.0, 1e-4), (HALF, 1e-4, 0.05)], ids=["shared", "bfloat16"]
)
async def test_importance_sampling_sees_the_difference(
    tmp_path: Path, changes: dict[str, Any], low: float, high: float
) -> None:
    """Recorded log-probabilities are the copy's; `train/sampler_gap` measures their distance from
    the learner's, and the loss weighs by it."""
    world, kept = World(tmp_path), Recording()
    world.config = RunConfig.model_validate({**world.config.model_dump(), **changes})
    model = world.backend.model
    world.backend = type(world.backend)(lambda: model, world.renderer, world.config, tmp_path)
    await run_stage(
        world.sft([(place, lever) for place in PLACES for lever in LEVERS], 5),
        world.backend,
        Recording(),
    )
    grpo = Spec(name="grpo", args={"importance_cap": 2.0})
    await run_stage(world.rl([task(place) for place in PLACES], 2, grpo), world.backend, kept)
    for _, _, groups, metrics in kept.steps:
        segments = [
            segment
            for group in groups
            for trajectory in group.trajectories
            for segment in trajectory.segments
            if segment.learner_logprobs is not None
        ]
        pairs = [
            (ours, theirs)
            for segment in segments
            for ours, theirs in zip(segment.learner_logprobs, segment.logprobs, strict=True)
        ]
        assert pairs
        gap = sum(abs(a - b) for a, b in pairs) / len(pairs)
        assert metrics["train/sampler_gap"] == pytest.approx(gap)
        assert low <= gap < high
        assert any(math.exp(a - b) != 1.0 for a, b in pairs)
    trained = [p.dtype for p in world.backend.model.parameters()]
    assert set(trained) == {torch.float32}
