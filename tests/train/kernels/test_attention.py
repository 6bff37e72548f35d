"""Attention in tiles is attention under the dense mask."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ludus.train.kernels import attention
from ludus.train.kernels import tiles as tiling
from ludus.train.kernels.attention import tiled_attention
from ludus.train.kernels.bindings import kernels
from ludus.train.kernels.tiles import Plan, tiles

needs_kernels = pytest.mark.skipif(
    kernels(torch.float32) is None, reason="no C compiler here, or LUDUS_NATIVE=0"
)
NATIVE = [pytest.param(True, marks=needs_kernels), False]


def choose(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setattr(attention, "kernels", lambda _: None)


def random_ends(length: int, seed: int) -> list[int]:
    """A random forest in depth-first order, as the end of each token's subtree."""
    rng = random.Random(seed)
    path: list[int] = []
    ends = [length] * length
    for j in range(length):
        if path and rng.random() < 0.15:
            keep = rng.randint(0, len(path))
            for ancestor in path[keep:]:
                ends[ancestor] = j
            path = path[:keep]
        path.append(j)
    return ends


def dense_mask(ends: list[int]) -> Tensor:
    every = torch.arange(len(ends))
    return (every[None] <= every[:, None]) & (every[:, None] < torch.tensor(ends)[None])


def test_tiles_by_hand() -> None:
    """P P P P, then branches A A and B B: B's tile does not read A."""
    plan = tiles([8, 8, 8, 8, 6, 6, 8, 8], rows=2)
    assert [(t.start, t.stop, t.spans, t.num_full) for t in plan] == [
        (0, 2, ((0, 2),), 0),
        (2, 4, ((0, 4),), 2),
        (4, 6, ((0, 6),), 4),
        (6, 8, ((0, 4), (6, 8)), 4),
    ]
    assert [t.hidden_QS.int().tolist() for t in plan] == [[[0, 1], [0, 0]]] * 4


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 90), st.integers(0, 10_000), st.integers(1, 40))
def test_tiles_cover_the_mask(length: int, seed: int, rows: int) -> None:
    ends = random_ends(length, seed)
    plan = tiles(ends, rows)
    found = torch.zeros(length, length, dtype=torch.bool)
    stop = 0
    for tile in plan:
        assert tile.start == stop
        assert 0 < tile.stop - tile.start <= rows
        stop = tile.stop
        keys = torch.cat([torch.arange(*span) for span in tile.spans])
        assert len(keys) == tile.num_keys
        found[tile.start : stop, keys[: tile.num_full]] = True
        found[tile.start : stop, keys[tile.num_full :]] = ~tile.hidden_QS
    assert stop == length
    assert torch.equal(found, dense_mask(ends))


def path_positions(ends: list[int]) -> Tensor:
    """Positions of the tokens on their own paths."""
    return dense_mask(ends).sum(1) - 1


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 90), st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 50))
def test_tiles_of_windows(length: int, seed: int, rows: int, window: int) -> None:
    ends = random_ends(length, seed)
    positions = path_positions(ends)
    found = torch.zeros(length, length, dtype=torch.bool)
    for tile in tiles(ends, rows, positions=positions, window=window):
        keys = torch.cat([torch.arange(*span) for span in tile.spans])
        assert len(keys) == tile.num_keys == len(set(keys.tolist()))
        found[tile.start : tile.stop, keys[: tile.num_full]] = True
        found[tile.start : tile.stop, keys[tile.num_full :]] = ~tile.hidden_QS
    near = positions[None] > positions[:, None] - window
    assert torch.equal(found, dense_mask(ends) & near)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 90), st.integers(0, 10_000), st.integers(1, 40), st.integers(0, 50))
def test_tiles_of_some_queries(length: int, seed: int, rows: int, window: int) -> None:
    ends = random_ends(length, seed)
    positions = path_positions(ends)
    rng = random.Random(seed)
    queries = torch.tensor(sorted(rng.sample(range(length), rng.randint(1, length))))
    found = torch.zeros(len(queries), length, dtype=torch.bool)
    for tile in tiles(ends, rows, positions=positions, window=window, queries=queries):
        keys = torch.cat([torch.arange(*span) for span in tile.spans])
        assert len(keys) == tile.num_keys == len(set(keys.tolist()))
        assert tile.hidden_QS.is_contiguous()  # as kernels.c reads it
        found[tile.start : tile.stop, keys[: tile.num_full]] = True
        found[tile.start : tile.stop, keys[tile.num_full :]] = ~tile.hidden_QS
    near = positions[None] > positions[:, None] - (window or length)
    assert torch.equal(found, (dense_mask(ends) & near)[queries])


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_caps(monkeypatch: pytest.MonkeyPatch, cap: float, native: bool) -> None:
    choose(monkeypatch, native)
    torch.manual_seed(0)
    ends = random_ends(150, 1)
    q = torch.randn(1, 4, 150, 8, requires_grad=True)
    k, v = (torch.randn(1, 2, 150, 8, requires_grad=True) for _ in range(2))
    scores = q.unflatten(1, (2, 2)) @ k[:, :, None].mT * 0.3
    scores = (torch.tanh(scores / cap) * cap).masked_fill(~dense_mask(ends), -torch.inf)
    expected = (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2).transpose(1, 2)
    monkeypatch.setattr(attention, "_active", [Plan(tiles(ends, 32))])
    found, _ = tiled_attention(None, q, k, v, None, scaling=0.3, softcap=cap)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(1, 150, 4, 8)
    got = torch.autograd.grad((found * weights).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("keep", [0, 1 << 24])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], keep: int, native: bool
) -> None:
    choose(monkeypatch, native)
    monkeypatch.setattr(tiling, "KEEP", keep)
    torch.manual_seed(0)
    ends = random_ends(150, 1)
    q = torch.randn(1, heads[0], 150, 8, requires_grad=True)
    k = torch.randn(1, heads[1], 150, 8, requires_grad=True)
    v = torch.randn(1, heads[1], 150, 8, requires_grad=True)
    weights = torch.randn(1, 150, heads[0], 8)
    expected = scaled_dot_product_attention(
        q, k, v, attn_mask=dense_mask(ends), scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(attention, "_active", [Plan(tiles(ends, 32))])
        found, _ = tiled_attention(None, q, k, v, None, scaling=0.3, dropout=0.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    got = torch.autograd.grad((found * weights).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "extra", [{"dropout": 0.1}, {"s_aux": torch.ones(2)}, {"sliding_window": 4}]
)
def test_what_it_does_not_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, object]
) -> None:
    q = torch.randn(1, 2, 6, 8)
    monkeypatch.setattr(attention, "_active", [Plan(tiles([6] * 6))])
    with pytest.raises(TypeError):
        tiled_attention(None, q, q, q, None, **extra)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives back."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("native", NATIVE)
def test_memory_does_not_grow_with_the_square(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """Many short samples in a row: no tensor larger than a tile's scores, or the row itself."""
    choose(monkeypatch, native)
    monkeypatch.setattr(tiling, "KEEP", 0)

    def largest(length: int) -> int:
        ends = [j - j % 32 + 32 for j in range(length)]
        q = torch.randn(1, 2, length, 8, requires_grad=True)
        monkeypatch.setattr(attention, "_active", [Plan(tiles(ends, 32))])
        with Largest() as seen:
            tiled_attention(None, q, q, q, None)[0].sum().backward()
        return seen.numel

    assert largest(1024) == 2 * 1024 * 8
    assert largest(2048) == 2 * 2048 * 8
