"""Batch-invariant computation: a token's bits depend neither on its batch nor on its position."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_models import FAMILIES, V, make
from torch import Tensor
from transformers import DynamicCache
from variants import variants

from ludus.models.exact import arithmetic
from ludus.models.exact.forward import attention, exact, log_softmax

LENGTHS = (17, 40, 5, 33)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "exp": (arithmetic.exp, torch.exp),
    "log": (lambda x: arithmetic.log(x.abs()), lambda x: x.abs().log()),
    "sin": (lambda x: arithmetic.sincos(50 * x)[0], lambda x: (50 * x).sin()),
    "cos": (lambda x: arithmetic.sincos(50 * x)[1], lambda x: (50 * x).cos()),
    "tanh": (arithmetic.tanh, torch.tanh),
    "sigmoid": (arithmetic.sigmoid, torch.sigmoid),
    "erf": (lambda x: arithmetic.erf(x / 5), lambda x: (x / 5).erf()),
}


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, V, (n,), generator=generator).tolist() for n in LENGTHS]


def packed(model: Any, rows: list[list[int]]) -> list[Tensor]:
    """All rows in one packed row, as in the learner."""
    ids = [token for row in rows for token in row]
    positions = [i for row in rows for i in range(len(row))]
    segments = torch.tensor([n for n, row in enumerate(rows) for _ in row])
    mask = (segments[:, None] == segments[None]).tril()[None, None]
    logits = model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        attention_mask=mask,
        use_cache=False,
    ).logits[0]
    return list(logits.split([len(row) for row in rows]))


@torch.inference_mode()
def decoded(model: Any, rows: list[list[int]]) -> list[list[tuple[int, Tensor]]]:
    """Two rows of equal length: a prefill of one half, then decoding from a cache."""
    found: list[list[tuple[int, Tensor]]] = [[] for _ in rows]
    for k, row in enumerate(rows):
        stranger = [(3 * token + 1) % V for token in row]
        pair = torch.tensor([stranger, row])
        cache, start = DynamicCache(config=model.config), 0
        for stop in range(len(row) // 2, len(row) + 1):
            logits = model(
                input_ids=pair[:, start:stop],
                position_ids=torch.arange(start, stop)[None].expand(2, -1),
                past_key_values=cache,
                use_cache=True,
            ).logits
            found[k].append((stop - 1, logits[1, -1].clone()))
            start = stop
    return found


WHOLE = [family for family in FAMILIES if family not in ("window", "gemma3")]
"""Families whose layers attend to all positions, as the mask of `packed` lets them."""


@pytest.mark.parametrize("family", variants(WHOLE, ["qwen3", "gpt2", "mixtral"]))
def test_decoding_and_training_give_the_same_bits(family: str) -> None:
    """tests/train/test_verify.py does it with the sampler and the learner, for each family."""
    model, ids = make(family), rows()
    with exact():
        trained, sampled = packed(model, ids), decoded(model, ids)
    pairs = [(trained[k][i], x) for k, found in enumerate(sampled) for i, x in found]
    assert len(pairs) > 40
    assert all(torch.equal(a, b) for a, b in pairs)
    plain = packed(model, ids)
    for a, b in zip(plain, trained, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_bits_differ_without_exact() -> None:
    """Control for the test above."""
    model, ids = make("qwen3"), rows()
    trained, sampled = packed(model, ids), decoded(model, ids)
    same = [torch.equal(trained[k][i], x) for k, found in enumerate(sampled) for i, x in found]
    assert not all(same)


def test_gradients_match_the_plain_computation() -> None:
    model, ids = make("qwen3"), rows()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        logits = torch.cat(packed(model, ids)).log_softmax(-1)
        logits[:, 3].mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    with exact():
        model.zero_grad()
        loss = torch.cat(packed(model, ids)).log_softmax(-1)[:, 3].mean()
    loss.backward()
    for a, parameter in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    mine, torchs = FUNCTIONS[name]
    x = torch.linspace(-29.3, 31.7, 20001, dtype=torch.float64)
    torch.testing.assert_close(mine(x), torchs(x), rtol=1e-11, atol=1e-13)


def test_functions_at_their_limits() -> None:
    x = torch.tensor([0.0, -math.inf, math.inf, math.nan, -750.0])
    assert arithmetic.exp(x).tolist()[:3] == [1.0, 0.0, math.inf]
    assert arithmetic.exp(x)[3].isnan()
    assert arithmetic.exp(x)[4] == 0
    assert arithmetic.log(torch.tensor([0.0, 1.0, math.inf])).tolist() == [-math.inf, 0, math.inf]
    assert arithmetic.log(torch.tensor(-1.0)).isnan()
    assert arithmetic.tanh(torch.tensor([1e-9, 1e9], dtype=torch.float64)).tolist() == [1e-9, 1.0]


def test_sums_do_not_depend_on_order_or_zeros() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 500, generator=generator) * torch.logspace(-6, 6, 500)
    order = torch.randperm(500, generator=generator)
    longer = torch.zeros(3, 2000)
    longer[:, 700:1200] = x[:, order]
    assert torch.equal(arithmetic.total(x, -1), arithmetic.total(longer, -1))
    assert not torch.equal(x.sum(-1), longer.sum(-1))
    torch.testing.assert_close(arithmetic.total(x, -1), x.double().sum(-1, True), rtol=1e-7, atol=0)


def test_products_are_finer_than_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(9, 300, generator=generator), torch.randn(300, 40, generator=generator)
    truth = a.double() @ b.double()
    error = (arithmetic.matmul(a, b) - truth).abs().max()
    assert error < ((a @ b) - truth).abs().max() / 100


def test_too_long_sums_are_refused() -> None:
    a = torch.ones(1, arithmetic.MAX_TERMS + 1)
    with pytest.raises(ValueError, match="are not exact"):
        arithmetic.matmul(a, a.T)
    with pytest.raises(ValueError, match="are not exact"):
        arithmetic.total(torch.ones(1, arithmetic.MAX_SUMMANDS + 1), -1)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 7, 8, generator=generator)
    k, v = (torch.randn(3, 2, 7, 8, generator=generator) for _ in range(2))
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(attention(q, k, v, is_causal=causal, enable_gqa=True), want)
    monkeypatch.setattr("ludus.models.exact.forward.MAX_SCORES", 1)  # row by row
    torch.testing.assert_close(attention(q, k, v, is_causal=causal, enable_gqa=True), want)


def test_logprobs_of_tokens() -> None:
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(0)) * 5
    temperatures = [0.7, 1.0, 0.0, 1.3, 0.7]
    divisor = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64)[:, None]
    together = log_softmax(logits, temperatures)
    torch.testing.assert_close(together, (logits.double() / divisor).log_softmax(-1))
    alone = [log_softmax(logits[i : i + 1], [t]) for i, t in enumerate(temperatures)]
    assert torch.equal(together, torch.cat(alone))
