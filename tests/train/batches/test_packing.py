"""Packing changes no token, no loss, no gradient. Suffixes: R rows, T positions, N loss tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from ludus.core.errors import ConfigError, TrainingError
from ludus.core.types import Constraint, Sample
from ludus.train.algorithms.aggregates import trajectory_mean
from ludus.train.algorithms.losses import LossInputs, clipped
from ludus.train.batches.packing import (
    Batch,
    Layout,
    MicroBatch,
    arrange,
    attention_mask,
    pack,
    rounded,
)

VOCABULARY = 32


def make_sample(ids: list[int], name: str = "t") -> Sample:
    length = len(ids)
    mask = [False, *([True] * (length - 1))]
    return Sample(ids, mask, [-float(m) for m in mask], [2.0 * m for m in mask], name)


def make_samples(lengths: list[int], seed: int = 0) -> list[Sample]:
    """Samples with random contents, two rows a trajectory."""
    rng = random.Random(seed)
    samples = []
    for number, length in enumerate(lengths):
        mask = [i > 0 and rng.random() < 0.6 for i in range(length)]
        samples.append(
            Sample(
                [rng.randrange(VOCABULARY) for _ in range(length)],
                mask,
                [rng.uniform(-4, -3) * m for m in mask],
                [rng.uniform(-1, 1) * m for m in mask],
                f"t{number // 2}",
            )
        )
    return samples


def packed(samples: list[Sample], tokens_per_batch: int = 64) -> Batch:
    weights = trajectory_mean(samples)
    return pack(samples, weights, tokens_per_batch=tokens_per_batch, pad_id=0)


def test_two_rows_by_hand() -> None:
    samples = [
        make_sample([1, 2, 3], "b"),
        make_sample([5, 6, 7, 8, 9, 2], "a"),
        make_sample([4, 5], "b"),
    ]
    weights = [[0, 0.1, 0.2], [0, 1, 2, 3, 4, 5], [0, 0.3]]
    batch = pack(samples, weights, tokens_per_batch=12, pad_id=31)
    (micro,) = batch.micro_batches
    assert micro.token_ids_RT.tolist() == [[5, 6, 7, 8, 9, 2], [1, 2, 3, 4, 5, 31]]
    assert micro.positions_RT.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0]]
    assert micro.ends_RT.tolist() == [[6, 6, 6, 6, 6, 6], [3, 3, 3, 5, 5, 6]]
    assert micro.places_P.tolist() == [0, 1, 2, 3, 4, 6, 7, 9]
    assert micro.place_N.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert micro.target_N.tolist() == [6, 7, 8, 9, 2, 2, 3, 5]
    assert micro.sample_N.tolist() == [1, 1, 1, 1, 1, 0, 0, 2]
    assert micro.index_N.tolist() == [1, 2, 3, 4, 5, 1, 2, 1]
    assert micro.trajectory_N.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert micro.old_logprobs_N.tolist() == [-1.0] * 8
    assert micro.advantages_N.tolist() == [2.0] * 8
    torch.testing.assert_close(micro.weights_N, torch.tensor([1, 2, 3, 4, 5, 0.1, 0.2, 0.3]))
    assert micro.ref_logprobs_N is None
    assert (batch.num_samples, batch.num_loss_tokens, batch.num_tokens) == (3, 8, 11)
    assert batch.padding == pytest.approx(1 / 12)


def test_rounded_rows_and_places_by_hand() -> None:
    samples = [make_sample([1, 2, 3], "a"), make_sample([5, 6, 7, 8, 9, 2], "b")]
    batch = pack(samples, trajectory_mean(samples), tokens_per_batch=12, pad_id=31)
    (micro,) = batch.micro_batches
    wider = rounded(micro, 4)
    assert wider.token_ids_RT.tolist() == [[5, 6, 7, 8, 9, 2, 0, 0], [1, 2, 3, 31, 31, 31, 0, 0]]
    assert wider.positions_RT.tolist() == [[0, 1, 2, 3, 4, 5, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0]]
    assert wider.ends_RT.tolist() == [[6, 6, 6, 6, 6, 6, 7, 8], [3, 3, 3, 4, 5, 6, 7, 8]]
    assert micro.places_P.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert wider.places_P.tolist() == [0, 1, 2, 3, 4, 8, 9, 9]
    assert wider.place_N is micro.place_N
    again = rounded(wider, 4)
    assert all(
        torch.equal(getattr(again, name), getattr(wider, name))
        for name in ("token_ids_RT", "positions_RT", "ends_RT", "places_P")
    )


def test_types() -> None:
    (micro,) = packed(make_samples([5, 4])).micro_batches
    present = {name: getattr(micro, name) for name in MicroBatch.__slots__}
    assert present.pop("constrained") == []
    types = {name: value.dtype for name, value in present.items() if value is not None}
    floats = {"old_logprobs_N", "advantages_N", "weights_N"}
    assert {name for name, kind in types.items() if kind == torch.float32} == floats
    assert {kind for name, kind in types.items() if name not in floats} == {torch.int64}


@pytest.mark.parametrize("layout", ["tree", "packed", "single"])
def test_constrained_turns_keep_their_loss_tokens(layout: Layout) -> None:
    first, second = Constraint("a", (1,)), Constraint("b", (1,))
    plain, *others = make_samples([6, 8, 5])
    for sample in others:  # two turns, the second of one token
        sample.loss_mask = [i in (1, 2, 4) for i in range(len(sample.token_ids))]
        sample.constraints = [(1, 3, first), (4, 5, second)]
    samples = [plain, *others]
    batch = pack(samples, trajectory_mean(samples), tokens_per_batch=64, pad_id=0, layout=layout)
    found = [(micro, turn) for micro in batch.micro_batches for turn in micro.constrained]
    assert len(found) == 4
    for micro, turn in found:
        assert micro.target_N[turn.place_L].tolist() == turn.token_ids
        assert len(turn.token_ids) == (2 if turn.constraint is first else 1)
        (number,) = set(micro.sample_N[turn.place_L].tolist())
        assert number in (1, 2)


def test_the_mask_by_hand() -> None:
    ends_RT = torch.tensor([[2, 2, 3, 4, 5]])
    (micro,) = packed(make_samples([5])).micro_batches
    mask = attention_mask(replace(micro, ends_RT=ends_RT))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


# Arrangement


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(60, 300))
def test_everyone_has_one_place_within_the_budget(lengths: list[int], budget: int) -> None:
    plan = arrange(lengths, budget)
    assert sorted(i for rows in plan for row in rows for i in row) == list(range(len(lengths)))
    longest = []
    for rows in plan:
        width = max(sum(lengths[i] for i in row) for row in rows)
        assert width * len(rows) <= budget
        assert width == max(lengths[i] for row in rows for i in row)
        longest.append(width)
    assert longest == sorted(longest, reverse=True)
    assert plan == arrange(lengths, budget)


def test_equal_lengths_keep_their_order() -> None:
    assert arrange([4, 4, 4, 4, 4], 8) == [[[0], [1]], [[2], [3]], [[4]]]


def test_short_samples_fill_gaps_but_open_no_long_rows() -> None:
    # 2 fills the gap beside 8; the other two would leave a row of 10 mostly empty.
    assert arrange([10, 8, 2, 2, 2], 100) == [[[0], [1, 2]], [[3], [4]]]


def test_padding_is_small() -> None:
    rng = random.Random(0)
    uniform = [rng.randint(20, 400) for _ in range(256)]
    alike = [rng.randint(180, 220) for _ in range(256)]
    heavy_tailed = [min(20 + int(rng.expovariate(0.01)), 900) for _ in range(256)]
    assert packed(make_samples(uniform), tokens_per_batch=8192).padding < 0.10
    assert packed(make_samples(alike), tokens_per_batch=8192).padding < 0.05
    assert packed(make_samples(heavy_tailed), tokens_per_batch=8192).padding < 0.05


# Bad input


def test_a_sample_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rl\.tokens_per_batch .*'t0' has 65 tokens"):
        packed(make_samples([65]))
    assert packed(make_samples([64])).padding == 0


def test_a_loss_on_the_first_token_is_refused() -> None:
    sample = make_sample([1, 2])
    sample.loss_mask[0] = True
    with pytest.raises(TrainingError, match="loss on its first token"):
        packed([sample])


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "advantages"])
def test_lists_of_different_lengths_are_refused(name: str) -> None:
    sample = make_sample([1, 2, 3])
    getattr(sample, name).pop()
    with pytest.raises(TrainingError, match="one entry a token"):
        pack([sample], [[0.0, 1.0, 1.0]], tokens_per_batch=8, pad_id=0)


def test_an_empty_sample_and_short_weights_are_refused() -> None:
    with pytest.raises(TrainingError, match="one entry a token"):
        pack([make_sample([])], [[]], tokens_per_batch=8, pad_id=0)
    with pytest.raises(TrainingError, match="one entry a token"):
        pack([make_sample([1, 2])], [[0.0]], tokens_per_batch=8, pad_id=0)


@pytest.mark.parametrize("name", ["ref_logprobs", "values", "returns"])
def test_what_other_models_say_is_there_for_all_or_none(name: str) -> None:
    first, second = make_sample([1, 2]), make_sample([3, 4])
    setattr(first, name, [0.0, -2.0])
    with pytest.raises(TrainingError, match=f"some samples have {name} and others have none"):
        packed([first, second])
    setattr(second, name, [0.0, -3.0])
    (micro,) = packed([first, second]).micro_batches
    assert getattr(micro, f"{name}_N").tolist() == [-2, -3]
    setattr(second, name, [0.0])
    with pytest.raises(TrainingError, match="one entry a token"):
        packed([first, second])


def test_nothing_packs_to_nothing() -> None:
    batch = pack([], [], tokens_per_batch=8, pad_id=0)
    assert (batch.micro_batches, batch.num_tokens, batch.padding) == ([], 0, 0.0)


# On a real model


@pytest.fixture(scope="module")
def model() -> Any:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config)


def step(model: Any, batch: Batch) -> tuple[dict[tuple[int, ...], Tensor], float]:
    """Log-probabilities by sample (its ids are the key), and the loss, with its gradient taken."""
    model.zero_grad()
    loss = 0.0
    by_sample: dict[tuple[int, ...], Tensor] = {}
    for micro in batch.micro_batches:
        logits_RTV = model(
            input_ids=micro.token_ids_RT,
            position_ids=micro.positions_RT,
            attention_mask=attention_mask(micro),
        ).logits
        scores_PV = logits_RTV.flatten(0, 1)[micro.places_P].log_softmax(-1)
        logprobs_N = scores_PV[micro.place_N, micro.target_N]
        output = clipped(0.2, 0.2)(
            LossInputs(logprobs_N, micro.old_logprobs_N, micro.advantages_N, micro.trajectory_N)
        )
        total = (output.loss_N * micro.weights_N).sum()
        total.backward()
        loss += total.item()
        for index in micro.sample_N.unique().tolist():
            key = tuple(batch.samples[index].token_ids)
            by_sample[key] = logprobs_N[micro.sample_N == index].detach()
    return by_sample, loss


@pytest.mark.parametrize("tokens_per_batch", [40, 64, 1000])
def test_packed_equals_unpacked(model: Any, tokens_per_batch: int) -> None:
    samples = make_samples([3, 9, 25, 14, 6, 2, 40, 11, 5, 18, 7, 33])
    weights = trajectory_mean(samples)
    unpacked = pack(samples, weights, tokens_per_batch=1000, pad_id=0, layout="single")
    expected, expected_loss = step(model, unpacked)
    expected_gradient = [p.grad.clone() for p in model.parameters()]

    batch = packed(samples, tokens_per_batch)
    assert sum(len(m.token_ids_RT) for m in batch.micro_batches) < len(samples)
    found, loss = step(model, batch)

    assert found.keys() == expected.keys()
    for key, logprobs in found.items():
        torch.testing.assert_close(logprobs, expected[key], atol=1e-5, rtol=0)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert any(g.abs().max() > 1e-2 for g in expected_gradient)
    for parameter, gradient in zip(model.parameters(), expected_gradient, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


def test_a_sample_does_not_see_its_neighbour(model: Any) -> None:
    first, second = make_samples([20, 10])
    other = replace(second, token_ids=[(t + 1) % VOCABULARY for t in second.token_ids])
    long = make_samples([30], seed=5)[0]
    results = [step(model, packed([long, first, x], 1000))[0] for x in (second, other)]
    key = tuple(first.token_ids)
    torch.testing.assert_close(results[0][key], results[1][key], atol=0, rtol=0)
