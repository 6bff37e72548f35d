"""On a CUDA device: training and sampling agree with the CPU's and with each other."""

from __future__ import annotations

import asyncio
import copy
import itertools

import pytest
import torch
from engine_helpers import CONTEXT, episode, expected_logprobs, sampler, tiny
from harness import BABYAI, Ludus
from learner_helpers import make_batch, make_samples, policy

from ludus.config.schema import LearnerConfig, OptimizerConfig
from ludus.core.types import Sample
from ludus.models.samplers.base import SamplingParams
from ludus.train.algorithms.losses import clipped
from ludus.train.batches.packing import pack
from ludus.train.forward import Forward
from ludus.train.learner import Learner

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MAX_GAP = 0.02  # nats, in bfloat16


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_steps_equal_those_of_the_cpu(checkpointing: bool) -> None:
    cpu = policy()
    model = copy.deepcopy(cpu).to(DEVICE)
    settings = LearnerConfig(gradient_checkpointing=checkpointing)
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=0)
    learners = [Learner(m, optimizer, 10, settings=settings) for m in (cpu, model)]
    for seed in range(3):
        batch = make_batch(make_samples(seed=seed))
        expected, found = (learner.train_step(batch, clipped(0.2, 0.2)) for learner in learners)
        assert found == pytest.approx(expected, rel=1e-2, abs=1e-4)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        logits = model(ids.to(DEVICE)).logits.cpu()
        torch.testing.assert_close(logits, cpu(ids).logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("path", ["auto", "generic"])
async def test_sampled_logprobs_equal_those_of_the_cpu(path: str) -> None:
    cpu = tiny()
    engine = sampler(copy.deepcopy(cpu).to(DEVICE), path=path)
    turns = [SamplingParams(12, seed=seed, temperature=0.8) for seed in (1, 2)]
    prompts = [[5, 6, 7, 8] * 4, [9, 10]]
    played = await asyncio.gather(
        *[episode(engine, f"e{n}", prompts[n % 2], turns) for n in range(6)]
    )
    for ids, params, completion in itertools.chain(*played):
        expected = expected_logprobs(cpu, ids, completion, params)
        assert completion.logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", MAX_GAP)])
async def test_the_sampler_agrees_with_the_learner(dtype: str, limit: float) -> None:
    model = policy().to(DEVICE)
    engine = sampler(model, context_length=64, dtype=dtype)
    prompt = list(range(8))
    played = await asyncio.gather(
        *[episode(engine, f"e{n}", prompt, [SamplingParams(24, seed=n)]) for n in range(8)]
    )
    samples = []
    for number, [(ids, _, completion)] in enumerate(played):
        given, sampled = len(ids), len(completion.token_ids)
        mask = [False] * given + [True] * sampled
        logprobs = [0.0] * given + completion.logprobs
        tokens = ids + completion.token_ids
        samples.append(Sample(tokens, mask, logprobs, logprobs, f"{number}"))
    forward = Forward(model, context_length=CONTEXT, settings=LearnerConfig(dtype=dtype))
    weights = [sample.advantages for sample in samples]
    gaps = []
    for micro in pack(
        samples, weights, tokens_per_batch=512, pad_id=0, layout=forward.layout
    ).micro_batches:
        with torch.no_grad(), forward.passes(micro):
            logprobs_N, _ = forward.logprobs(micro)
        gaps.append((logprobs_N.cpu() - micro.old_logprobs_N.cpu()).abs())
    assert torch.cat(gaps).mean() < limit


def test_a_recipe_trains_in_bfloat16(ludus: Ludus) -> None:
    changes = (
        f"model.device={DEVICE}",
        "learner.dtype=bfloat16",
        "sampler={name: in_process, args: {dtype: bfloat16, path: static}}",
        "rl.algorithm={name: grpo, args: {importance_cap: 2}}",
        "rl.steps=2",
    )
    ludus("train", BABYAI, *changes).ok()
    lines = ludus.metrics()
    losses = [line["train/loss"] for line in lines if line["stage"] == "sft"]
    gaps = [line["train/sampler_gap"] for line in lines if line["stage"] == "rl"]
    assert losses[-1] < 0.5 * losses[0]
    assert len(gaps) == 2
    assert max(gaps) < MAX_GAP
