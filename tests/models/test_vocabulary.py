"""The ids that are sampled: those of the tokenizer, in the sampler and in the learner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_helpers import CONTEXT, VOCAB, episode, sampler, tiny, tokenizer_of

from ludus.config.schema import ModelConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Sample, Spec
from ludus.models.build import build_model
from ludus.models.exact.sampler import ExactSampler
from ludus.models.samplers.base import SamplingParams
from ludus.models.vocabulary import Vocabulary
from ludus.train.batches.packing import pack
from ludus.train.forward import Forward
from ludus.train.kernels.logprobs import Head, score_logits
from ludus.train.verify import ExactForward, verify

GAPS = [0, 1, 2, 3, 7, 11, 12, 40, 41, 50]
"""Ids of a tokenizer of 10 tokens, for models of 61 ids."""


async def sampled(engine: Any, prompt: list[int]) -> Any:
    """A turn at a high temperature, where ids without a token would be sampled most of the time."""
    params = SamplingParams(max_tokens=60, temperature=50.0, seed=3)
    [(_, _, completion)] = await episode(engine, "a", prompt, [params])
    return completion


@pytest.mark.parametrize("path", ["fast", "static", "generic", "exact"])
@pytest.mark.parametrize("ids", [GAPS, list(range(13))], ids=["gaps", "no gaps"])
async def test_sampled_ids_are_tokens(path: str, ids: list[int]) -> None:
    model, tokenizer = tiny(), tokenizer_of(ids)
    if path == "exact":
        engine: Any = ExactSampler(model, context_length=CONTEXT, tokenizer=tokenizer)
    else:
        engine = sampler(model, path=path, tokenizer=tokenizer)
    prompt = [5, 60, 1]  # ids without a token, but with an embedding
    completion = await sampled(engine, prompt)
    assert set(completion.token_ids) == set(ids)
    rows = [*prompt, *completion.token_ids]
    with torch.no_grad():
        logits_LV = model(torch.tensor([rows])).logits[0, len(prompt) - 1 : -1]
    logprobs_LS = (logits_LV[:, ids] / 50.0).log_softmax(-1)
    expected = [
        float(row[ids.index(i)]) for row, i in zip(logprobs_LS, completion.token_ids, strict=True)
    ]
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("ids", [GAPS, list(range(13))], ids=["gaps", "no gaps"])
@pytest.mark.parametrize("exact", [True, False])
async def test_the_learner_agrees(ids: list[int], exact: bool) -> None:
    """Bit for bit under `verify`, and without it but for rounding."""
    model, tokenizer = tiny(), tokenizer_of(ids)
    vocabulary = Vocabulary.of(tokenizer)
    options: Any = {"temperature": 50.0, "context_length": CONTEXT, "vocabulary": vocabulary}
    engine = ExactSampler(model, context_length=CONTEXT, tokenizer=tokenizer)
    completion = await sampled(engine, [5, 60, 1])
    length = len(completion.token_ids)
    mask = [False] * 3 + [True] * length
    logprobs, advantages = [0.0] * 3 + completion.logprobs, [0.0] * 3 + [1.0] * length
    sample = Sample([5, 60, 1, *completion.token_ids], mask, logprobs, advantages, "a")
    forward = (ExactForward if exact else Forward)(model, **options)
    batch = pack([sample], [advantages], tokens_per_batch=CONTEXT, pad_id=0, layout=forward.layout)
    if exact:
        assert await verify(forward, batch, sample.policy_version) == length
        return
    [micro_batch] = batch.micro_batches
    with torch.no_grad(), forward.passes(micro_batch):
        logprobs_N, _ = forward.logprobs(micro_batch)
    torch.testing.assert_close(logprobs_N, micro_batch.old_logprobs_N, atol=1e-5, rtol=1e-5)


def test_scores_with_gaps() -> None:
    torch.manual_seed(0)
    head, vocabulary = Head(torch.nn.Linear(8, VOCAB)), Vocabulary.from_ids(GAPS)
    hidden_PE, place_N = torch.randn(4, 8), torch.arange(4)
    target_N = torch.tensor([0, 11, 50, 3])
    logits_PV = head.logits(hidden_PE)
    gone = [id for id in range(VOCAB) if id not in GAPS]
    masked_PV = logits_PV.index_fill(1, torch.tensor(gone), -1e9)
    expected = score_logits(masked_PV, place_N, target_N)
    torch.testing.assert_close(
        score_logits(logits_PV, place_N, target_N, 1.0, vocabulary), expected
    )
    found = head.score(hidden_PE, place_N, target_N, 1.0, vocabulary)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    [gradient_VE] = torch.autograd.grad(found[0].sum(), [head.linear.weight])
    assert gradient_VE[GAPS].any(-1).all()
    assert not gradient_VE[gone].any()


def test_a_target_that_is_never_sampled_is_refused() -> None:
    head, vocabulary = Head(torch.nn.Linear(8, VOCAB)), Vocabulary.from_ids(GAPS)
    with pytest.raises(IndexError):
        head.score(torch.randn(1, 8), torch.tensor([0]), torch.tensor([4]), 1.0, vocabulary)


def test_places_and_ids() -> None:
    gaps = Vocabulary.from_ids(GAPS)
    assert (gaps.size, gaps.places(torch.tensor(GAPS)).tolist()) == (51, list(range(10)))
    assert gaps.ids(torch.arange(10)).tolist() == GAPS
    assert gaps.places(torch.tensor([4, 49])).tolist() == [10, 10]
    assert gaps.absent(53) == [id for id in range(53) if id not in GAPS]
    plain = Vocabulary.from_ids(range(5))
    assert (plain.absent(7), plain.absent(5), plain.absent(4)) == ([5, 6], [], [])
    assert (plain.size, plain.ids_S) == (5, None)
    logits_BV = torch.randn(2, 9)
    assert torch.equal(plain.select(logits_BV), logits_BV[:, :5])
    assert torch.equal(gaps.select(torch.arange(61)), torch.tensor(GAPS))


def test_a_new_model_has_an_embedding_for_every_id(tmp_path: Any) -> None:
    tokenizer = tokenizer_of(GAPS)
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    architecture = Spec(name="qwen3", args={**sizes, "intermediate_size": 16})
    config = ModelConfig(architecture=architecture, tokenizer="words", context_length=32)
    model = build_model(config, tokenizer, 0)
    assert model.get_input_embeddings().weight.shape[0] == 51
    model.save_pretrained(tmp_path)
    pretrained = ModelConfig(path=str(tmp_path), context_length=32)
    build_model(pretrained, tokenizer, 0)
    beyond = tokenizer_of([*GAPS, 51])
    assert len(beyond) < 51
    with pytest.raises(ConfigError, match=r"the token 't51' has the id 51, more than the model's"):
        build_model(pretrained, beyond, 0)
