"""Cut a row of token trees into tiles of queries, and find the keys of each tile.

In a row of trees in depth-first order, only the queries from j to the end of its subtree see the
token at j. A tile computes only with keys that at least one of its queries sees:

    row             P P P P  A A A  B B B         A and B both continue P
    tile A A A      keys P P P P A A A            P in full, A causally
    tile B B B      keys P P P P B B B            A's keys are not read

With a sliding window, a query also sees only the last positions of its own path. A plan may also
have tiles of some of the queries, those whose gradients are computed.

Shape suffixes: T positions, A of which are selected, K key heads, D head size, Q queries of a tile,
S keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROWS = 64
"""Maximum queries of a tile."""
SPARSE = 32
"""Maximum queries of a tile where only some queries have gradients: they are far apart, and a tile
computes with the keys between them."""
NEARLY_ALL = 0.9
"""Share of a row that predicts trained tokens from which the gradients of all of it are computed:
selecting takes longer than it saves."""
KEEP = 1 << 24
"""Attention weights kept for the backward of a pass (64 MB in float32), with torch's operations;
the kernels recompute them."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries start to stop, of a row or of some of its positions, and their keys.

    Args:
        spans: intervals of keys, in the tile's order.
        num_full: number of first keys that all queries of the tile see.
        hidden_QS: bool, True where a query does not see a remaining key.
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
        """Returns the tile's keys or values [K, S, D]."""
        parts = [x_KTD[:, start:stop] for start, stop in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def scatter(self, x_KSD: Tensor, into_KTD: Tensor) -> None:
        """Add gradients at the positions of `gather`."""
        offset = 0
        for start, stop in self.spans:
            into_KTD[:, start:stop] += x_KSD[:, offset : offset + stop - start]
            offset += stop - start


@dataclass(frozen=True, slots=True)
class Selection:
    """Some positions of a row, and a plan of their queries.

    Args:
        index_A: int64, ascending; copies of the last position may follow, whose gradients are 0.
        num: positions without the copies.
        plan: its tiles' starts and stops count the selected positions.
    """

    index_A: Tensor
    num: int
    plan: Plan

    def take(self, *tensors: Tensor) -> list[Tensor]:
        """Returns the rows [A, ...] of tensors [T, ...]."""
        return [x.index_select(0, self.index_A) for x in tensors]

    def take_grad(self, grad_T: Tensor) -> Tensor:
        """Returns the rows [A, ...] of a gradient [T, ...]; those of copies are 0."""
        grad_A = grad_T.index_select(0, self.index_A)
        grad_A[self.num :] = 0
        return grad_A

    def spread(self, grad_A: Tensor, length: int) -> Tensor:
        """Returns the gradient of `length` positions: 0 where none is computed."""
        out_T = grad_A.new_zeros(length, *grad_A.shape[1:])
        return out_T.index_copy_(0, self.index_A[: self.num], grad_A[: self.num])


class Plan:
    """The tiles of a pass, and the free space for kept weights.

    Args:
        back: the positions whose gradients are computed, and the tiles of their queries; None: all
            positions. States of the others are constants in the backward pass.
        windowed: plans of the layers with a sliding window, by the layer's number.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        *,
        back: Selection | None = None,
        keep: bool = True,
        windowed: Mapping[int, Plan] | None = None,
    ) -> None:
        self.tiles, self.back = tiles, back
        self.free = KEEP if keep else 0
        self._windowed = windowed

    def of(self, attention: Any, window: int | None = None, length: int = 0) -> Plan:
        """Returns the plan of a layer's attention module.

        Args:
            window: of the module, where it tells one.
            length: of the row.

        Errors: TypeError for a window shorter than the row, where the layers' windows are unknown.
        """
        if self._windowed is None:
            if window is not None and window < length:
                raise TypeError("tiled attention needs the windows of the layers")
            return self
        return self._windowed.get(attention.layer_idx, self) if self._windowed else self

    @cached_property
    def table(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Returns the input of kernels.c: a row of numbers per tile, and all spans."""
        rows: list[list[int]] = []
        spans: list[tuple[int, int]] = []
        for t in self.tiles:
            place = [len(spans), len(t.spans), t.hidden_QS.data_ptr()]
            rows.append([t.start, t.stop, t.num_full, t.num_keys, *place])
            spans += t.spans
        return np.asarray(rows, dtype=np.int64), np.asarray(spans, dtype=np.int64)

    def keeps(self, q_KTGD: Tensor) -> bool:
        """Reserve space for the weights of one more layer; returns False if there is none."""
        rows = q_KTGD.shape[0] * q_KTGD.shape[2]
        needed = rows * sum(t.hidden_QS.shape[0] * t.num_keys for t in self.tiles)
        if needed > self.free:
            return False
        self.free -= needed
        return True


def plan_row(
    ends_T: Tensor,
    positions_T: Tensor,
    *,
    windows: Sequence[int] = (),
    keep: bool = True,
    places_P: Tensor | None = None,
) -> Plan:
    """Returns the plan of a row, and those of its layers with a sliding window.

    Args:
        ends_T: as in `tiles`.
        positions_T: of the tokens in their samples.
        windows: of the layers; 0: none.
        keep: weights may be kept for the backward pass.
        places_P: positions through which gradients flow; None: all. Copies of the last may follow,
            where the number of positions is padded to shapes that recur.
    """
    index_A, num = _selected(places_P, len(ends_T))

    def plan(window: int, windowed: Mapping[int, Plan] | None = None) -> Plan:
        seen: dict[str, Any] = {"positions": positions_T, "window": window}
        back = None
        if index_A is not None:
            some = Plan(tiles(ends_T, SPARSE, queries=index_A[:num], **seen), keep=False)
            back = Selection(index_A, num, some)
        return Plan(tiles(ends_T, **seen), back=back, keep=keep, windowed=windowed)

    by_window = {window: plan(window) for window in {*windows} - {0}}
    return plan(0, {n: by_window[w] for n, w in enumerate(windows) if w})


def _selected(places_P: Tensor | None, length: int) -> tuple[Tensor | None, int]:
    """Returns the positions as those of a `Selection`, and their number; None for all."""
    if places_P is None:
        return None, 0
    index_A = torch.unique(places_P)
    num = len(index_A)
    if num > NEARLY_ALL * length:
        return None, 0
    return torch.cat([index_A, index_A[-1:].expand(len(places_P) - num)]), num


def tiles(
    ends: Sequence[int] | Tensor,
    rows: int = ROWS,
    *,
    positions: Sequence[int] | Tensor | None = None,
    window: int = 0,
    queries: Tensor | None = None,
) -> list[Tile]:
    """Cut a row into tiles.

    Args:
        ends: for each position j, the end of the queries that see it: those from j to ends[j].
        positions: of the tokens in their samples; only a window needs them.
        window: positions that a query sees, its own included; 0: all.
        queries: positions of the queries, ascending, each once; None: all.
    """
    ends_T = np.asarray(ends)
    every_T = np.arange(len(ends_T))
    at_T = every_T if positions is None else np.asarray(positions)
    query_A = every_T if queries is None else np.asarray(queries)
    far = window or len(ends_T)
    plan = []
    for start, stop in _cuts(np.searchsorted(query_A, ends_T[query_A]), rows):
        query_Q = query_A[start:stop]
        first, last, query_at = query_Q[0], query_Q[-1], at_T[query_Q]
        key_T, until_T, key_at = every_T[: last + 1], ends_T[: last + 1], at_T[: last + 1]
        sees_all_T = (key_T < first) & (until_T > last) & (key_at > query_at.max() - far)
        full = key_T[sees_all_T]
        part = key_T[(until_T > first) & (key_at > query_at.min() - far) & ~sees_all_T]
        seen_QS = (part[None] <= query_Q[:, None]) & (query_Q[:, None] < ends_T[part][None])
        if window:
            seen_QS &= at_T[part][None] > query_at[:, None] - window
        used_S = seen_QS.any(0)
        part, hidden_QS = part[used_S], np.ascontiguousarray(~seen_QS[:, used_S])  # for kernels.c
        spans = _spans(full) + _spans(part)
        if full.size and spans[len(_spans(full))][0] == full[-1] + 1:  # adjacent: one slice
            middle = len(_spans(full))
            spans[middle - 1 : middle + 1] = [(spans[middle - 1][0], spans[middle][1])]
        plan.append(Tile(start, stop, tuple(spans), full.size, torch.from_numpy(hidden_QS)))
    return plan


def _cuts(ends_T: np.ndarray[Any, Any], rows: int) -> Iterator[tuple[int, int]]:
    """Yields tiles of at most `rows`; a tile at least half full ends where a branch begins."""
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
    """Returns sorted positions as intervals."""
    if not positions.size:
        return []
    breaks = np.flatnonzero(np.diff(positions) > 1) + 1
    return [(int(p[0]), int(p[-1]) + 1) for p in np.split(positions, breaks)]
