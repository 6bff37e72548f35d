"""Sampler and learner agree in every bit over multi-turn episodes; what breaks that is named."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from engine_helpers import tiny
from exact_models import FAMILIES, V, make
from torch import Tensor
from variants import variants

from ludus.core.errors import ConfigError, TrainingError
from ludus.core.types import Sample, Segment, Trajectory
from ludus.models.exact.sampler import ExactSampler
from ludus.models.exact.trace import first_difference
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.train.batches.packing import Batch, Layout, pack
from ludus.train.batches.samples import rows
from ludus.train.forward import Forward
from ludus.train.verify import ExactForward, verify

VERSION = 3
CONTEXT = 96


async def episode(
    sampler: InProcessSampler, name: str, prompt: list[int], seed: int, temperature: float
) -> Sample:
    """Three turns of different lengths, with observations between them."""
    draw = random.Random(seed)
    ids, logprobs, mask = list(prompt), [0.0] * len(prompt), [False] * len(prompt)
    sampler.open(name)
    for turn in range(3):
        params = SamplingParams(
            max_tokens=draw.randint(1, 7), temperature=temperature, seed=100 * seed + turn
        )
        done = await sampler.sample(ids, params, session=name)
        seen = [draw.randrange(V) for _ in range(draw.randint(1, 9))]
        ids += done.token_ids + seen
        logprobs += done.logprobs + [0.0] * len(seen)
        mask += [True] * len(done.token_ids) + [False] * len(seen)
        await asyncio.sleep(0)
    sampler.close(name)
    advantages = [1.0 if loss else 0.0 for loss in mask]
    return Sample(ids, mask, logprobs, advantages, trajectory_id=name, policy_version=VERSION)


async def played(sampler: InProcessSampler, temperature: float = 1.0) -> list[Sample]:
    """Groups of three that share a prompt, and strangers, all at once."""
    draw = random.Random(1)
    prompts = [[draw.randrange(V) for _ in range(size)] for size in (21, 4, 33)]
    sampler.policy_version = VERSION
    plays = [
        episode(sampler, f"g{g}/e{e}", prompt, 10 * g + e, temperature)
        for g, prompt in enumerate(prompts)
        for e in range(3)
    ]
    return list(await asyncio.gather(*plays))


def batch_of(samples: list[Sample], layout: Layout = "tree") -> Batch:
    weights = [sample.advantages for sample in samples]
    return pack(samples, weights, tokens_per_batch=160, pad_id=0, layout=layout)


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_token_is_equal(family: str) -> None:
    model = make(family)
    samples = await played(ExactSampler(model, context_length=CONTEXT))
    count = sum(sample.num_loss_tokens for sample in samples)
    forward = ExactForward(model, context_length=CONTEXT)
    batch = batch_of(samples, forward.layout)
    assert len(batch.micro_batches) > 1
    assert await verify(forward, batch, VERSION) == count


def test_attention_that_is_not_torchs_is_refused() -> None:
    with pytest.raises(ConfigError, match="verify: the attention of Gemma2ForCausalLM is 'eager'"):
        ExactSampler(tiny("gemma2"), context_length=CONTEXT)


async def test_experts_without_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers registers a product of its own where torch has none."""
    asked: list[bool] = []
    name = "transformers.integrations.moe._can_use_grouped_mm"
    monkeypatch.setattr(name, lambda *_: bool(asked.append(True)))
    model = make("qwen3_moe")
    samples = await played(ExactSampler(model, context_length=CONTEXT))
    forward = ExactForward(model, context_length=CONTEXT)
    assert await verify(forward, batch_of(samples, forward.layout), VERSION) > 50
    assert asked


async def test_tokens_of_other_versions_are_skipped() -> None:
    """Weights that were published during a turn are compared on the tokens that they sampled."""
    model, ids = make("qwen3"), [3, 1, 4, 1, 5]
    sampler = ExactSampler(model, context_length=CONTEXT, deterministic=False)
    sampler.policy_version = VERSION - 1
    sampler.open("a")
    params = SamplingParams(max_tokens=12, seed=1)
    turn = asyncio.create_task(sampler.sample(ids, params, session="a"))
    while sampler.num_decode_tokens < 5:
        await asyncio.sleep(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    sampler.publish(VERSION)
    done = await turn
    (_, num_old), (_, num_new) = done.runs
    segments = [
        Segment(-1, ids),
        Segment(
            0, done.token_ids, done.logprobs, None, VERSION - 1, version_runs=done.version_runs
        ),
    ]
    (sample,) = rows(Trajectory("a", "g", "t", segments, reward=1.0), 1.0)
    forward = ExactForward(model, context_length=CONTEXT)
    assert min(num_old, num_new) > 0
    assert await verify(forward, batch_of([sample], "single"), VERSION) == num_new
    with pytest.raises(TrainingError, match=rf"{num_old} of {num_old} tokens"):
        await verify(forward, batch_of([sample], "single"), VERSION - 1)


@pytest.mark.parametrize(
    ("layout", "temperature"),
    variants(
        product(["tree", "packed", "single"], [0.7, 1.3]),
        [("tree", 0.7), ("packed", 1.3), ("single", 0.7)],
    ),
)
async def test_layouts_and_temperatures(layout: Layout, temperature: float) -> None:
    model = make("qwen3")
    samples = await played(ExactSampler(model, context_length=CONTEXT), temperature)
    forward = ExactForward(model, temperature=temperature, context_length=CONTEXT)
    assert forward.attention == "dense"
    told = await verify(forward, batch_of(samples, layout), VERSION)
    assert told > 50


async def test_the_same_episodes_alone_or_together() -> None:
    """Whatever else is in the batch, a session's tokens and log-probabilities are the same."""
    model = make("llama")
    together = await played(ExactSampler(model, context_length=CONTEXT))
    for number, sample in enumerate(together):
        g, e = divmod(number, 3)
        start = sample.loss_mask.index(True)
        sampler = ExactSampler(model, context_length=CONTEXT)
        alone = await episode(sampler, f"g{g}/e{e}", sample.token_ids[:start], 10 * g + e, 1.0)
        assert (alone.token_ids, alone.logprobs) == (sample.token_ids, sample.logprobs)


async def test_without_verify_they_differ() -> None:
    """Otherwise the tests above would show nothing."""
    model = make("qwen3")
    samples = await played(InProcessSampler(model, context_length=CONTEXT))
    forward = Forward(model, context_length=CONTEXT)
    with pytest.raises(TrainingError, match="sampler and learner disagree"):
        await verify(forward, batch_of(samples, forward.layout), VERSION)


async def test_gradients_are_those_of_plain_passes() -> None:
    model = make("qwen3")
    samples = await played(ExactSampler(model, context_length=CONTEXT))

    def gradients(forward: Forward) -> list[Tensor]:
        model.zero_grad()
        for micro_batch in batch_of(samples, forward.layout).micro_batches:
            with forward.passes(micro_batch):
                logprobs_N, entropy_N = forward.logprobs(micro_batch)
                (logprobs_N.sum() + 0.1 * entropy_N.sum()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients(Forward(model, context_length=CONTEXT))
    for a, b in zip(plain, gradients(ExactForward(model, context_length=CONTEXT)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(a.abs().max()))


def reversed_sum(norm: Any) -> Callable[[Tensor], Tensor]:
    """An RMS norm whose mean square is added up from the last entry to the first, in training."""
    plain = norm.forward

    def forward(x: Tensor) -> Tensor:
        if not norm.training:
            return plain(x)
        squares = x * x
        total = torch.zeros_like(x[..., :1])
        for i in reversed(range(x.shape[-1])):
            total = total + squares[..., i : i + 1]
        return norm.weight * (x * torch.rsqrt(total / x.shape[-1] + norm.variance_epsilon))

    return forward


async def test_a_norm_that_sums_in_another_order_is_named() -> None:
    model = make("qwen3")
    samples = await played(ExactSampler(model, context_length=CONTEXT))
    forward = ExactForward(model, context_length=CONTEXT)
    norm = model.model.layers[1].input_layernorm
    norm.forward = reversed_sum(norm)
    model.train()
    with pytest.raises(TrainingError) as caught:
        await verify(forward, batch_of(samples), VERSION)
    told = str(caught.value)
    assert "sampler and learner disagree" in told
    assert "in model.layers.1.input_layernorm (Qwen3RMSNorm), at position" in told
    assert "in the sampler" in told.rpartition("entry")[2]
    assert "layers.0" not in told


async def test_a_linear_layer_that_differs_is_named() -> None:
    model = make("gpt2")
    samples = await played(ExactSampler(model, context_length=CONTEXT))
    forward = ExactForward(model, context_length=CONTEXT)
    layer = model.transformer.h[1].mlp.c_proj
    plain = layer.forward
    layer.forward = lambda x: plain(x) * (1 + 2e-7) if layer.training else plain(x)
    model.train()
    with pytest.raises(TrainingError, match=r"in transformer\.h\.1\.mlp\.c_proj \(Conv1D\)"):
        await verify(forward, batch_of(samples), VERSION)


async def test_a_dependence_on_the_batch_alone_is_told() -> None:
    """A log-probability that neither side finds again: as if the batch had changed it."""
    model = make("qwen3")
    samples = await played(ExactSampler(model, context_length=CONTEXT))
    place = samples[0].loss_mask.index(True)
    samples[0].logprobs[place] += 1e-3
    forward = ExactForward(model, context_length=CONTEXT)
    with pytest.raises(TrainingError, match="depends on the rest of its batch") as caught:
        await verify(forward, batch_of(samples), VERSION)
    assert f"token {place} of trajectory g0/e0" in str(caught.value)


async def test_samples_of_other_weights_are_passed_over() -> None:
    model = make("qwen3")
    samples = await played(ExactSampler(model, context_length=CONTEXT))
    forward = ExactForward(model, context_length=CONTEXT)
    assert await verify(forward, batch_of(samples), VERSION + 1) == 0


def test_equal_records_have_no_difference() -> None:
    assert first_difference([], []) is None
