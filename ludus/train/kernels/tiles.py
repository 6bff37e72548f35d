"""Cutting a row of token trees into tiles: which keys each tile of queries reads.

In a row of trees in depth-first order, the token at j is seen by the queries from j to its
subtree's end, and by no other. The row's queries are cut into tiles; a tile computes only with the
keys that some query of it sees:

    row             P P P P  A A A  B B B         A and B both continue P
    tile A A A      keys P P P P A A A            P in full, A causally
    tile B B B      keys P P P P B B B            A's keys are not even read

Shape suffixes: T positions, K key heads, D head size, Q queries of a tile, S keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROWS = 64
"""Queries of a tile at most."""
KEEP = 1 << 24
"""Attention weights that the layers of a pass keep for the backward (64 MB in float32), where torch
computes them; the kernels compute them again."""


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

    @cached_property
    def table(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """What kernels.c reads: a row of numbers a tile, and the spans of all of them."""
        rows: list[list[int]] = []
        spans: list[tuple[int, int]] = []
        for t in self.tiles:
            place = [len(spans), len(t.spans), t.hidden_QS.data_ptr()]
            rows.append([t.start, t.stop, t.num_full, t.num_keys, *place])
            spans += t.spans
        return np.asarray(rows, dtype=np.int64), np.asarray(spans, dtype=np.int64)

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
