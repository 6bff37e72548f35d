"""Cut a row of token trees into tiles of queries, and find the keys of each tile.

In a row of trees in depth-first order, only the queries from j to the end of its subtree see the
token at j. A tile computes only with keys that at least one of its queries sees:

    row             P P P P  A A A  B B B         A and B both continue P
    tile A A A      keys P P P P A A A            P in full, A causally
    tile B B B      keys P P P P B B B            A's keys are not read

With a sliding window, a query also sees only the last positions of its own path.

Shape suffixes: T positions, K key heads, D head size, Q queries of a tile, S keys of a tile.
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
KEEP = 1 << 24
"""Attention weights kept for the backward of a pass (64 MB in float32), with torch's operations;
the kernels recompute them."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries start to stop of a row, and their keys.

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


class Plan:
    """The tiles of a pass, and the free space for kept weights.

    Args:
        windowed: plans of the layers with a sliding window, by the layer's number.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        *,
        keep: bool = True,
        windowed: Mapping[int, Plan] | None = None,
    ) -> None:
        self.tiles = tiles
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


def tiles(
    ends: Sequence[int] | Tensor,
    rows: int = ROWS,
    *,
    positions: Sequence[int] | Tensor | None = None,
    window: int = 0,
) -> list[Tile]:
    """Cut a row into tiles.

    Args:
        ends: for each position j, the end of the queries that see it: those from j to ends[j].
        positions: of the tokens in their samples; only a window needs them.
        window: positions that a query sees, its own included; 0: all.
    """
    ends_T = np.asarray(ends)
    every_T = np.arange(len(ends_T))
    at_T = every_T if positions is None else np.asarray(positions)
    far = window or len(ends_T)
    plan = []
    for start, stop in _cuts(ends_T, rows):
        old_T, until_T = every_T[:start], ends_T[:start]
        query_at = at_T[start:stop]
        in_reach_T = at_T[:start] > query_at.min() - far
        sees_all_T = (until_T >= stop) & (at_T[:start] > query_at.max() - far)
        full = old_T[sees_all_T]
        part = old_T[(until_T > start) & in_reach_T & ~sees_all_T]
        part = np.concatenate([part, every_T[start:stop]])
        query_Q1 = every_T[start:stop, None]
        seen_QS = (part[None] <= query_Q1) & (query_Q1 < ends_T[part][None])
        if window:
            seen_QS &= at_T[part][None] > query_at[:, None] - window
        spans = _spans(full) + _spans(part)
        if full.size and spans[len(_spans(full))][0] == full[-1] + 1:  # adjacent: one slice
            middle = len(_spans(full))
            spans[middle - 1 : middle + 1] = [(spans[middle - 1][0], spans[middle][1])]
        plan.append(Tile(start, stop, tuple(spans), full.size, torch.from_numpy(~seen_QS)))
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
