"""Attention over a packed row of token trees, without the work that a dense mask throws away.

In a row of trees in depth-first order, the token at j is seen by the queries from j to its
subtree's end, and by no other. The row's queries are cut into tiles; a tile computes only with the
keys that some query of it sees:

    row             P P P P  A A A  B B B         A and B both continue P
    tile A A A      keys P P P P A A A            P in full, A causally
    tile B B B      keys P P P P B B B            A's keys are not even read

So a prefix costs once, samples packed side by side cost as if alone, and no T x T mask exists.
Beyond a constant, scores are computed again in the backward pass, as in FlashAttention (Dao et al.
2022, arXiv:2205.14135): memory does not grow with T x T either.

Shape suffixes: T positions, H query heads, K key heads, G = H / K, D head size, Q queries of a
tile, S keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

NAME = "ludus_tiles"
ROWS = 64
"""Queries of a tile at most."""
KEEP = 1 << 24
"""Attention weights that the layers of a pass keep for the backward (64 MB in float32)."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries start to stop of a row, and what they see.

    Args:
        spans: intervals of keys, in the order in which the tile lays them out.
        num_full: how many of its first keys every query of the tile sees.
        hidden_QS: bool, True where a query does not see one of the remaining keys.
    """

    start: int
    stop: int
    spans: tuple[tuple[int, int], ...]
    num_full: int
    hidden_QS: Tensor

    @property
    def num_keys(self) -> int:
        return self.num_full + self.hidden_QS.shape[1]

    def gather(self, x_KTD: Tensor) -> Tensor:
        """The tile's keys or values [K, S, D]."""
        parts = [x_KTD[:, start:stop] for start, stop in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def scatter(self, x_KSD: Tensor, into_KTD: Tensor) -> None:
        """Add gradients to where `gather` took from."""
        offset = 0
        for start, stop in self.spans:
            into_KTD[:, start:stop] += x_KSD[:, offset : offset + stop - start]
            offset += stop - start


class Plan:
    """The tiles of a pass, and the room that is left for weights to keep."""

    def __init__(self, tiles: Sequence[Tile], *, keep: bool = True) -> None:
        self.tiles = tiles
        self.room = KEEP if keep else 0

    def keeps(self, q_KTGD: Tensor) -> bool:
        """Whether there is room for one more layer; takes it."""
        rows = q_KTGD.shape[0] * q_KTGD.shape[2]
        needed = rows * sum(t.hidden_QS.shape[0] * t.num_keys for t in self.tiles)
        if needed > self.room:
            return False
        self.room -= needed
        return True


def tiles(ends: Sequence[int] | Tensor, rows: int = ROWS) -> list[Tile]:
    """Cut a row into tiles.

    Args:
        ends: for each position j, the end of the queries that see it: those from j to ends[j].
    """
    ends_T = np.asarray(ends)
    every_T = np.arange(len(ends_T))
    plan = []
    for start, stop in _cuts(ends_T, rows):
        old_T, until_T = every_T[:start], ends_T[:start]
        full = old_T[until_T >= stop]
        part = np.concatenate([old_T[(until_T > start) & (until_T < stop)], every_T[start:stop]])
        query_Q1 = every_T[start:stop, None]
        seen_QS = (part[None] <= query_Q1) & (query_Q1 < ends_T[part][None])
        spans = _spans(full) + _spans(part)
        if full.size and spans[len(_spans(full))][0] == full[-1] + 1:  # they touch: one slice
            middle = len(_spans(full))
            spans[middle - 1 : middle + 1] = [(spans[middle - 1][0], spans[middle][1])]
        plan.append(Tile(start, stop, tuple(spans), full.size, torch.from_numpy(~seen_QS)))
    return plan


def _cuts(ends_T: np.ndarray[Any, Any], rows: int) -> Iterator[tuple[int, int]]:
    """Tiles of at most `rows`, that end where a branch begins if they are at least half full."""
    length = len(ends_T)
    branches = np.flatnonzero(ends_T[:-1] <= np.arange(1, length)) + 1
    start = 0
    while start < length:
        stop = min(start + rows, length)
        near = branches[(branches >= start + max(rows // 2, 1)) & (branches <= stop)]
        if stop < length and near.size:
            stop = int(near[-1])
        yield start, stop
        start = stop


def _spans(positions: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Sorted positions as intervals."""
    if not positions.size:
        return []
    breaks = np.flatnonzero(np.diff(positions) > 1) + 1
    return [(int(p[0]), int(p[-1]) + 1) for p in np.split(positions, breaks)]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_KTGD: Tensor, k_KTD: Tensor, v_KTD: Tensor, plan: Plan) -> Tensor:
        out_KTGD = torch.empty_like(q_KTGD)
        keeps = any(ctx.needs_input_grad) and plan.keeps(q_KTGD)
        kept: list[Tensor] = []
        for tile in plan.tiles:
            queries = slice(tile.start, tile.stop)
            q = q_KTGD[:, queries].flatten(1, 2)
            weights = _weights(q, tile.gather(k_KTD), tile)
            out_KTGD[:, queries] = torch.bmm(weights, tile.gather(v_KTD)).view_as(
                q_KTGD[:, queries]
            )
            if keeps:
                kept.append(weights)
        ctx.save_for_backward(q_KTGD, k_KTD, v_KTD, out_KTGD, *kept)
        ctx.tiles = plan.tiles
        return out_KTGD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_KTGD: Tensor) -> tuple[Any, ...]:
        q_KTGD, k_KTD, v_KTD, out_KTGD, *kept = ctx.saved_tensors
        grad_KTGD = grad_KTGD.contiguous()
        delta_KTG = (grad_KTGD * out_KTGD).sum(-1)
        dq_KTGD = torch.empty_like(q_KTGD)
        dk_KTD = torch.zeros_like(k_KTD, dtype=torch.float32)
        dv_KTD = torch.zeros_like(dk_KTD)
        for number, tile in enumerate(ctx.tiles):
            queries = slice(tile.start, tile.stop)
            q, grad = q_KTGD[:, queries].flatten(1, 2), grad_KTGD[:, queries].flatten(1, 2)
            keys = tile.gather(k_KTD)
            weights = kept[number] if kept else _weights(q, keys, tile)
            tile.scatter(torch.bmm(weights.mT, grad), dv_KTD)
            inner = torch.bmm(grad, tile.gather(v_KTD).mT)
            inner = inner.sub_(delta_KTG[:, queries].flatten(1)[..., None]).mul_(weights)
            dq_KTGD[:, queries] = torch.bmm(inner, keys).view_as(q_KTGD[:, queries])
            tile.scatter(torch.bmm(inner.mT, q), dk_KTD)
        return dq_KTGD, dk_KTD.to(k_KTD.dtype), dv_KTD.to(v_KTD.dtype), None


def _weights(q: Tensor, keys: Tensor, tile: Tile) -> Tensor:
    """Softmax of the tile's scores [K, Q * G, S]."""
    scores = torch.bmm(q, keys.mT)
    num_queries = tile.stop - tile.start
    shape = scores.shape[0], num_queries, -1, scores.shape[2]
    scores.view(shape)[..., tile.num_full :].masked_fill_(tile.hidden_QS[None, :, None], -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype)


_active: list[Plan] = []
"""The plan of the pass under way. Not a context variable: autograd may recompute a checkpointed
layer on a thread of its own."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def tiled_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers: [1, H, T, D] to [1, T, H, D].

    Errors: TypeError for what it does not do: dropout, caps, sinks, biases, windows.
    """
    window = options.get("sliding_window")
    extras = ("softcap", "s_aux", "position_bias", "dropout")
    narrow = window is not None and window < query.shape[2]
    if narrow or any(_is_set(options.get(name)) for name in extras):
        raise TypeError("an attention with extras")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    dtype, device = value.dtype, query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    q_KTGD = (query[0] * scale).unflatten(0, (key.shape[1], -1)).transpose(1, 2).to(dtype)
    with torch.autocast(device, enabled=False):
        out_KTGD = _Tiled.apply(  # type: ignore[no-untyped-call]
            q_KTGD.contiguous(),
            key[0].to(dtype).contiguous(),
            value[0].to(dtype).contiguous(),
            _active[-1],
        )
    return out_KTGD.transpose(0, 1).flatten(1, 2)[None], None


def _is_set(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)


AttentionInterface.register(NAME, tiled_attention)


@contextmanager
def attending(model: Any, plan: Sequence[Tile], *, keep: bool = True) -> Iterator[None]:
    """Let the model's layers attend by these tiles, in single-row passes and their backward.

    Without `keep`, no weights are kept for the backward: a layer that is computed twice has to do
    the same both times. The choice is undone afterwards: the in-process sampler runs the very same
    modules.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    _active.append(Plan(plan, keep=keep))
    try:
        yield
    finally:
        _active.pop()
        config._attn_implementation = before
