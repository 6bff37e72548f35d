"""Model families in training: packed rows and trees are their samples, and sampler and learner
agree."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engine_helpers import CONTEXT, EAGER, conversations_of, episode, tiny
from test_tree import branching, outcome, require_equal

from ludus.config.schema import LoraConfig
from ludus.core.types import Sample
from ludus.models.build import _with_lora
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.train.batches.packing import pack
from ludus.train.forward import Forward

FAMILIES = ["phi3", "olmo2", "granite", "smollm3", "gemma2", "gemma3", "glm4", "qwen3_moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_are_their_samples(family: str) -> None:
    model, samples = tiny(family), branching(5)
    own = "eager" if family in EAGER else "sdpa"
    forward = Forward(model, context_length=CONTEXT)
    assert (forward.attention, forward.layout) == ("tiles", "tree")
    assert model.config._attn_implementation == own, "what the sampler computes with"
    expected = outcome(model, samples, "single", 1000, context_length=CONTEXT)
    for layout in ("tree", "packed"):
        require_equal(
            outcome(model, samples, layout, 200, context_length=CONTEXT),
            expected,
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_masks_serve_too(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """On a GPU: masks of transformers, with windows by kind of layer."""
    model, samples = tiny(family), branching(6)
    expected = outcome(model, samples, "single", 1000, context_length=CONTEXT)

    def dense(self: Any) -> Any:
        self.attention = "dense"
        assert self._is_exact()
        return "dense"

    monkeypatch.setattr(Forward, "_find_attention", dense)
    require_equal(outcome(model, samples, "tree", 200, context_length=CONTEXT), expected)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
async def test_sampler_and_learner_agree(family: str, adapters: bool) -> None:
    """Episodes of several turns beyond the window, trained as trees: recorded log-probabilities are
    the learner's."""
    model = tiny(family)
    if adapters:
        model = _with_lora(model, LoraConfig(rank=2)).eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2, generator=generator)
    engine = InProcessSampler(model, context_length=CONTEXT)
    turns = [SamplingParams(max_tokens=7, seed=s) for s in range(3)]
    played = await asyncio.gather(
        *[episode(engine, f"{n}", prompt, turns) for n, prompt in enumerate(conversations_of(61))]
    )
    samples = []
    for number, episode_turns in enumerate(played):
        prompt, _, completion = episode_turns[-1]
        ids = [*prompt, *completion.token_ids]
        mask, logprobs = [False] * len(ids), [0.0] * len(ids)
        for start, _, turn in episode_turns:
            at = slice(len(start), len(start) + len(turn.token_ids))
            mask[at], logprobs[at] = [True] * len(turn.token_ids), turn.logprobs
        samples.append(Sample(ids, mask, logprobs, [0.0] * len(ids), f"{number}"))
    forward = Forward(model, context_length=CONTEXT)
    batch = pack(
        samples,
        [sample.logprobs for sample in samples],
        tokens_per_batch=1000,
        pad_id=0,
        layout=forward.layout,
    )
    for m in batch.micro_batches:
        with torch.no_grad(), forward.passes(m):
            found, _ = forward.logprobs(m)
        torch.testing.assert_close(found, m.old_logprobs_N, atol=1e-4, rtol=0)
