"""Token sampling: the distribution, edge cases, inversion of the cumulative distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_helpers import numpy_distribution
from scipy.stats import chisquare

from ludus.core.errors import TrainingError
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.sampling import distribution, sample_tokens


def params(**options: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **options)  # type: ignore[arg-type]


def test_the_distribution_of_each_row() -> None:
    rng = np.random.default_rng(0)
    rows = [
        params(temperature=t, top_k=k, top_p=p)
        for t in (0.0, 0.3, 1.0, 2.0)
        for k in (0, 1, 5, 1000)
        for p in (1.0, 0.9, 0.3, 1e-9)
    ]
    logits = rng.normal(scale=3, size=(len(rows), 50)).astype(np.float32)
    with np.errstate(divide="ignore"):
        got = np.log(distribution(torch.from_numpy(logits), rows).numpy())
    expected = np.stack([numpy_distribution(*row) for row in zip(logits, rows, strict=True)])
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(got[finite], expected[finite], atol=1e-5)
    np.testing.assert_allclose(np.exp(got).sum(-1), 1, atol=1e-5)


def test_a_hand_computed_distribution() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()

    def kept(**options: float) -> list[float]:
        return distribution(logits, [params(**options)])[0].tolist()

    assert kept() == pytest.approx([0.5, 0.3, 0.2])
    assert kept(temperature=0.5) == pytest.approx([25 / 38, 9 / 38, 4 / 38])
    assert kept(top_k=2) == pytest.approx([0.625, 0.375, 0])
    assert kept(top_p=0.79) == pytest.approx([0.625, 0.375, 0])
    assert kept(top_p=0.81) == pytest.approx([0.5, 0.3, 0.2])
    assert kept(top_p=0.49) == pytest.approx([1, 0, 0])
    # top-p counts what top-k left: 0.625 of the mass is the first token's.
    assert kept(top_k=2, top_p=0.6) == pytest.approx([1, 0, 0])
    assert kept(temperature=0.0, top_k=1) == pytest.approx([0.5, 0.3, 0.2])  # greedy: the model's


def test_ties_are_truncated_in_id_order() -> None:
    got = distribution(torch.zeros(1, 6), [params(top_k=2)])[0]
    assert (got > 0).tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize("temperature", [1e-30, 1e-45])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 40.0, -3.0, 39.0]])
    tokens, logprobs = sample_tokens(logits, [params(temperature=temperature)], [0.999])
    assert (tokens, logprobs) == ([1], [0.0])


def test_greedy_takes_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]])
    tokens, logprobs = sample_tokens(
        logits, [params(temperature=0.0, top_k=1, top_p=0.1)] * 2, [0.9, 0.9]
    )
    assert tokens == [1, 0]
    assert logprobs == pytest.approx(logits.log_softmax(-1)[[0, 1], [1, 0]].tolist())


def test_uniform_numbers_at_the_limits() -> None:
    """A token of probability 0 is never sampled."""
    below_one = float(np.nextafter(1.0, 0.0))
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for uniform, token in ((0.0, 1), (0.499, 1), (0.5, 3), (below_one, 3)):
        assert sample_tokens(logits, [params()], [uniform]) == (
            [token],
            [pytest.approx(np.log(0.5))],
        )
    wide = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 4
    for row in (params(top_k=3), params(top_p=0.5), params(temperature=0.1)):
        for uniform in (0.0, below_one):
            _, [logprob] = sample_tokens(wide, [row], [uniform])
            assert np.isfinite(logprob)


def test_frequencies_match_the_distribution() -> None:
    generator = np.random.Generator(np.random.Philox(3))
    row = params(temperature=0.8, top_k=10, top_p=0.95)
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(1))
    size = 20_000
    tokens, logprobs = sample_tokens(
        logits.expand(size, -1), [row] * size, generator.random(size).tolist()
    )
    expected = np.exp(numpy_distribution(logits[0].numpy(), row))
    counts = np.bincount(tokens, minlength=24)
    kept = expected > 0
    assert kept.sum() > 3
    assert counts[~kept].sum() == 0
    assert chisquare(counts[kept], size * expected[kept]).pvalue > 0.01
    np.testing.assert_allclose(np.exp(logprobs), expected[tokens], atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(TrainingError, match=r"not finite \(row 1 of 3\).*have diverged"):
        sample_tokens(logits, [params(temperature=temperature)] * 3, [0.5] * 3)
    with pytest.raises(TrainingError, match="row 0 of 1"):
        sample_tokens(torch.full((1, 4), -torch.inf), [params()], [0.5])
