"""Trees: what samples share is computed once, and nothing else changes."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_helpers import VOCAB, policy
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    PhiConfig,
    PreTrainedConfig,
)

import ludus.train.forward
from ludus.config.schema import OptimizerConfig
from ludus.core.types import Sample
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.models.windows import layer_windows
from ludus.train.algorithms.aggregates import trajectory_mean
from ludus.train.algorithms.losses import clipped, with_entropy_bonus
from ludus.train.batches.packing import Layout, MicroBatch, attention_mask, pack
from ludus.train.batches.tree import grow
from ludus.train.forward import Forward
from ludus.train.learner import Learner

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TILED: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON, num_key_value_heads=2),
    "gemma": GemmaConfig(**COMMON, num_key_value_heads=1, head_dim=8),
    "gpt_neox": GPTNeoXConfig(**COMMON),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    ),
    "granite": GraniteConfig(**COMMON, num_key_value_heads=2, attention_multiplier=0.2),
    "olmo": OlmoConfig(**COMMON),
    "phi": PhiConfig(**COMMON),
}
LOSS = with_entropy_bonus(clipped(0.2, 0.28), 0.01)


def branching(seed: int, num: int = 12, longest: int = 24) -> list[Sample]:
    """Samples that continue random prefixes of earlier ones, sampled tokens included."""
    rng = random.Random(seed)
    samples: list[Sample] = []
    for number in range(num):
        ids: list[int] = []
        if samples and rng.random() < 0.8:
            first = rng.choice(samples).token_ids
            ids = first[: rng.randint(0, min(len(first), longest))]
        ids = ids + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest + 1 - len(ids)))]
        ids = ids if len(ids) > 1 else [*ids, 3]
        mask = [i > 0 and (rng.random() < 0.6 or i == len(ids) - 1) for i in range(len(ids))]
        samples.append(rated(rng, ids, mask, f"t{number // 2}"))
    return samples


def rated(rng: random.Random, ids: list[int], mask: list[bool], trajectory_id: str) -> Sample:
    """A sample with random log-probabilities and advantages where the mask is true."""
    logprobs = [rng.uniform(-4, -3) * m for m in mask]
    return Sample(ids, mask, logprobs, [rng.uniform(-1, 1) * m for m in mask], trajectory_id)


def outcome(
    model: Any, samples: list[Sample], layout: Layout, tokens_per_batch: int, **options: Any
) -> tuple[dict[tuple[int, int], float], dict[str, Tensor], int, float]:
    """Log-probabilities by sample and place, gradients, tokens computed, and the loss."""
    model = copy.deepcopy(model)
    learner = Learner(model, OptimizerConfig(max_grad_norm=1e9), num_steps=3, **options)
    batch = pack(
        samples,
        trajectory_mean(samples),
        tokens_per_batch=tokens_per_batch,
        pad_id=0,
        layout=layout,
    )
    logprobs: dict[tuple[int, int], float] = {}
    for m in batch.micro_batches:
        with torch.no_grad():
            found, _ = learner.logprobs(m)
        places = zip(m.sample_N.tolist(), m.index_N.tolist(), strict=True)
        logprobs |= dict(zip(places, found.tolist(), strict=True))
    gradients: dict[str, Tensor] = {}

    def look(*_: Any) -> None:
        gradients.update(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )

    learner.optimizer.register_step_pre_hook(look)
    loss = learner.train_step(batch, LOSS)["loss"]
    assert batch.num_loss_tokens == sum(s.num_loss_tokens for s in samples) == len(logprobs)
    return logprobs, gradients, batch.num_unique_tokens, loss


def require_equal(found: Any, expected: Any, atol: float = 1e-5) -> None:
    assert found[0] == pytest.approx(expected[0], abs=10 * atol)
    assert found[1].keys() == expected[1].keys()
    assert max(float(g.abs().max()) for g in expected[1].values()) > 0.01
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=atol, rtol=1e-4)
    assert found[3] == pytest.approx(expected[3], abs=atol)


# Layout


def test_by_hand() -> None:
    samples = [[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 5, 6]]
    assert grow(samples, 100) == [[(0, 0), (2, 3), (1, 2)]]
    # 1 2 3 4, 5 6 fill a row of 6; the last repeats the prefix
    assert grow(samples, 6) == [[(0, 0), (2, 3)], [(1, 0)]]

    made = [Sample(ids, [False, True, True, True, True][: len(ids)], *[[0.0] * len(ids)] * 2, "t")
            for ids in samples]  # fmt: skip
    batch = pack(made, [s.logprobs for s in made], tokens_per_batch=100, pad_id=0, layout="tree")
    [micro] = batch.micro_batches
    assert micro.token_ids_RT.tolist() == [[1, 2, 3, 4, 5, 6, 9]]
    assert micro.positions_RT.tolist() == [[0, 1, 2, 3, 3, 4, 2]]
    assert micro.ends_RT.tolist() == [[7, 7, 6, 4, 6, 6, 7]]
    # 2 is predicted thrice by 1; 3, 3 and 9 by 2; 4 and 5 by 3
    assert micro.places_P[micro.place_N].tolist() == [0, 1, 2, 0, 1, 2, 4, 0, 1]
    assert micro.target_N.tolist() == [2, 3, 4, 2, 3, 5, 6, 2, 9]
    assert micro.sample_N.tolist() == [0, 0, 0, 2, 2, 2, 2, 1, 1]
    assert (batch.num_tokens, batch.num_unique_tokens, batch.padding) == (12, 7, 0)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(25, 120))
def test_each_token_sees_its_own_past(seed: int, budget: int) -> None:
    """Following the mask from a loss token's place gives back the sample up to it."""
    samples = branching(seed)
    weights = [s.logprobs for s in samples]
    batch = pack(samples, weights, tokens_per_batch=budget, pad_id=0, layout="tree")
    seen = set()
    for m in batch.micro_batches:
        assert m.token_ids_RT.shape[0] == 1
        assert m.token_ids_RT.numel() <= budget
        mask_TT = attention_mask(m)[0, 0]
        for i in range(len(m.target_N)):
            sample = samples[m.sample_N[i]]
            index = int(m.index_N[i])
            place = m.places_P[m.place_N[i]]
            assert m.token_ids_RT[0, mask_TT[place]].tolist() == sample.token_ids[:index]
            assert m.positions_RT[0, mask_TT[place]].tolist() == list(range(index))
            assert m.target_N[i] == sample.token_ids[index]
            assert m.old_logprobs_N[i] == pytest.approx(sample.logprobs[index])
            seen.add((int(m.sample_N[i]), index))
    assert len(seen) == batch.num_loss_tokens == sum(s.num_loss_tokens for s in samples)


def test_equal_samples_and_prefixes_cost_nothing() -> None:
    sample = Sample([1, 2, 3], [False, True, True], [0.0] * 3, [1.0] * 3, "a")
    samples = [sample, replace(sample, trajectory_id="b"), replace(sample, token_ids=[1, 2, 4])]
    batch = pack(samples, [s.logprobs for s in samples], tokens_per_batch=9, pad_id=0,
                 layout="tree")  # fmt: skip
    assert batch.num_unique_tokens == 4
    assert batch.num_loss_tokens == 6


# Values and gradients


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokens_per_batch", [30, 90, 1000])
def test_random_trees_are_their_paths(seed: int, tokens_per_batch: int) -> None:
    model, samples = policy(seed), branching(seed, num=16)
    expected = outcome(model, samples, "single", 1000)
    found = outcome(model, samples, "tree", tokens_per_batch)
    require_equal(found, expected)
    assert expected[2] == sum(len(s.token_ids) for s in samples)
    assert found[2] < expected[2]


@pytest.mark.parametrize("family", TILED)
def test_families_take_trees(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TILED[family], attn_implementation="sdpa")
    assert Forward(model).attention == "tiles"
    assert model.config._attn_implementation == "sdpa", "what the sampler computes with"
    samples = branching(5)
    for layout in ("tree", "packed"):
        require_equal(outcome(model, samples, layout, 200), outcome(model, samples, "single", 1000))


def test_a_dense_mask_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TILED["llama"], attn_implementation="sdpa")
    samples = branching(6)
    expected = outcome(model, samples, "single", 1000)
    monkeypatch.setattr(Forward, "_find_attention", lambda *_: "dense")
    require_equal(outcome(model, samples, "tree", 200), expected)


def test_dropout_in_attention_is_not_lost() -> None:
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**COMMON, attention_dropout=0.1), attn_implementation="sdpa"
    )
    state = torch.get_rng_state()
    assert Forward(model).attention == "dense"
    assert torch.equal(torch.get_rng_state(), state), "a trial must not move the random state"


@pytest.mark.parametrize("context_length", [None, 8, 9, 40])
def test_sliding_windows_take_trees(context_length: int | None) -> None:
    """Shorter than the samples, or than a row of several samples."""
    torch.manual_seed(0)
    config = MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=8)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    longest = min(context_length or 24, 24)
    samples = branching(5, longest=longest)
    expected = outcome(model, samples, "single", 1000, context_length=context_length)
    for layout in ("tree", "packed"):
        found = outcome(model, samples, layout, 200, context_length=context_length)
        require_equal(found, expected)
    assert Forward(model, context_length=context_length).layout == "tree"
    assert model.config.sliding_window == 8


def test_other_layers_take_one_sample_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are neither full attention nor a sliding window."""
    kinds = SimpleNamespace(layer_types=["chunked_attention"])
    monkeypatch.setattr(
        ludus.train.forward, "layer_windows", lambda _, length: layer_windows(kinds, length)
    )
    forward = Forward(policy())
    assert (forward.attention, forward.layout) == ("none", "single")


async def test_real_rollouts() -> None:
    """A group that shares its prompt and some of its turns: recorded log-probabilities again."""
    model = policy()
    engine = InProcessSampler(model, context_length=64)
    samples = []
    for number in range(8):
        engine.open(f"{number}")
        ids, mask, logprobs = [5, 6, 7, 8, 9, 10 + number // 4], [False] * 6, [0.0] * 6
        for turn in range(3):
            params = SamplingParams(max_tokens=3, temperature=0.3, seed=number % 3 + 9 * turn)
            completion = await engine.sample(ids, params, session=f"{number}")
            ids = [*ids, *completion.token_ids, 3, 4]
            mask += [True] * len(completion.token_ids) + [False] * 2
            logprobs += [*completion.logprobs, 0.0, 0.0]
        engine.close(f"{number}")
        advantages = [(-1.0) ** number * m for m in mask]
        samples.append(Sample(ids, mask, logprobs, advantages, f"{number}", "g"))
    plain = outcome(model, samples, "single", 1000, temperature=0.3)
    found = outcome(model, samples, "tree", 1000, temperature=0.3)
    require_equal(found, plain)
    assert found[2] < 0.8 * plain[2]
    for (sample, index), logprob in found[0].items():
        assert logprob == pytest.approx(samples[sample].logprobs[index], abs=1e-4)


def test_halves_are_the_whole() -> None:
    """Splitting a micro-batch keeps each loss token, in smaller passes."""
    samples = branching(3, num=13)
    for layout in ("tree", "packed", "single"):
        batch = pack(samples, [s.logprobs for s in samples], tokens_per_batch=1000, pad_id=0,
                     layout=layout)  # fmt: skip
        for m in batch.micro_batches:
            halves = batch.halves(m)

            def tokens(parts: list[MicroBatch]) -> list[tuple[int, int]]:
                pairs = [zip(p.sample_N.tolist(), p.index_N.tolist(), strict=True) for p in parts]
                return sorted(pair for part in pairs for pair in part)

            chosen = len(m.sample_N.unique())
            assert bool(halves) == (chosen > 1)
            if halves:
                assert tokens(halves) == tokens([m])
                assert max(len(h.sample_N.unique()) for h in halves) <= (chosen + 1) // 2
