"""What the rows of a decode step share, so that attention reads it once, and sizes in buckets.

Rows whose tables begin with the same blocks form a group. Attention over these blocks is computed
with the queries of all rows of the group at once, attention over a row's other blocks with its own,
and the two are merged by their log-sum-exps (*cascade*; Juravsky et al. 2024, "Hydragen").

Shape suffixes: R rows, P groups, M rows of a group, K key-value heads, G query heads of one, X
queries, T positions, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
DEEPEST = 64
"""Forks on one path that are looked at; what is shared beyond them is read by each row."""


@dataclass(frozen=True, slots=True)
class Shared:
    """`rows` begin with the same `blocks`, all of them full."""

    rows: Ints
    blocks: Ints


class Groups:
    """The groups of the rows of successive steps, found anew only where they no longer hold."""

    def __init__(self) -> None:
        self._found: list[Shared] = []
        self._whole: NDArray[np.int32] = np.zeros(0, np.int32)
        self._blocks = np.zeros((0, 0), np.int64)  # of each row's group; -1: none

    def of(self, tables: NDArray[np.int32], whole: NDArray[np.int32]) -> list[Shared]:
        """Groups of rows that save most reads; a row is in one at most.

        Args:
            tables: the rows' blocks [R, B].
            whole: how many of them come before the one that is being written [R].
        """
        if not self._hold(tables, whole):
            self._found = _groups(tables, whole)
            self._whole = whole
            width = max((len(group.blocks) for group in self._found), default=0)
            self._blocks = np.full((len(tables), width), -1, np.int64)
            for group in self._found:
                self._blocks[group.rows, : len(group.blocks)] = group.blocks
        return self._found

    def _hold(self, tables: NDArray[np.int32], whole: NDArray[np.int32]) -> bool:
        """Whether the rows may be those of the last step: the groups are right for them, too.

        Rows that shared nothing are looked at again when one begins a new block.
        """
        width = self._blocks.shape[1]
        if len(whole) != len(self._whole) or width > tables.shape[1]:
            return False
        if (whole < self._whole).any() or (not width and (whole != self._whole).any()):
            return False
        return bool(((tables[:, :width] == self._blocks) | (self._blocks < 0)).all())


def _groups(tables: NDArray[np.int32], whole: NDArray[np.int32]) -> list[Shared]:
    """Groups that save most reads."""
    rows = np.arange(len(tables))
    found: list[Shared] = []
    for part in _parts(tables, whole, rows, 0):
        found += _best(tables, whole, part, 0, 0)[1]
    return found


def _parts(
    tables: NDArray[np.int32], whole: NDArray[np.int32], rows: Ints, depth: int
) -> Iterator[Ints]:
    """Two rows and more that have the same block at `depth`."""
    rows = rows[whole[rows] > depth]
    if not len(rows):
        return
    names = tables[rows, depth]
    order = np.argsort(names, kind="stable")
    for part in np.split(rows[order], np.flatnonzero(np.diff(names[order])) + 1):
        if len(part) > 1:
            yield part


def _best(
    tables: NDArray[np.int32], whole: NDArray[np.int32], rows: Ints, depth: int, forks: int
) -> tuple[int, list[Shared]]:
    """The reads of blocks saved, and the groups, among rows that agree on `depth` blocks."""
    common = tables[rows, : int(whole[rows].min())]
    differs = (common != common[0]).any(axis=0)
    depth = int(differs.argmax()) if differs.any() else common.shape[1]
    saved, groups = 0, []
    if forks < DEEPEST:
        for part in _parts(tables, whole, rows, depth):
            more, found = _best(tables, whole, part, depth, forks + 1)
            saved += more
            groups += found
    together = (len(rows) - 1) * depth
    if together >= saved:
        return together, [Shared(rows, common[0, :depth].astype(np.int64))]
    return saved, groups


def bucket(count: int) -> int:
    """The least of 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not below `count`."""
    if count < 2:
        return count
    power: int = 1 << (count - 1).bit_length()
    return 3 * power // 4 if count <= 3 * power // 4 else power


Partial = tuple[Tensor, ...]
"""Attention over some of the positions: the values' sums, not divided yet [..., D], the sum of the
weights [..., 1], and what was taken off the scores before they were exponents [..., 1]; float32."""


def partial(
    q_RKXD: Tensor, k_YTD: Tensor, v_YTD: Tensor, lengths_R: Tensor, scale: float
) -> Partial:
    """Attention of X queries a row over its first `lengths_R` positions; Y is K * R."""
    rows, heads, queries, size = q_RKXD.shape
    q_YXD = q_RKXD.transpose(0, 1).reshape(heads * rows, queries, size)
    scores_YXT = _product(q_YXD.to(k_YTD.dtype), k_YTD.transpose(1, 2)) * scale
    unseen_RT = torch.arange(k_YTD.shape[1], device=k_YTD.device) >= lengths_R[:, None]
    scores_KRXT = scores_YXT.view(heads, rows, queries, -1)
    scores_KRXT = scores_KRXT.masked_fill(unseen_RT[:, None], -torch.inf)
    most_KRX1 = scores_KRXT.amax(-1, keepdim=True)
    weights_KRXT = (scores_KRXT - most_KRX1).exp()
    sums_YXD = _product(weights_KRXT.view(scores_YXT.shape).to(v_YTD.dtype), v_YTD)
    found = (sums_YXD.view(heads, rows, queries, -1), weights_KRXT.sum(-1, keepdim=True), most_KRX1)
    return tuple(x.transpose(0, 1) for x in found)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched products in the operands' type, summed and returned in float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def of_rows(found_PKXZ: Tensor, members: int, place_B: Tensor) -> Tensor:
    """What groups found, by rows [B, K, G, Z]; that of rows without a group means nothing."""
    groups, heads, _, size = found_PKXZ.shape
    by_member = found_PKXZ.reshape(groups, heads, members, -1, size).transpose(1, 2).flatten(0, 1)
    return by_member[place_B.clamp(min=0)]


def merged(a: Partial, b: Partial, counts_B: Tensor) -> Partial:
    """Attention over the positions of both; `b` only where it counts."""
    b_most = b[2].masked_fill(~counts_B[:, None, None, None], -torch.inf)
    most = torch.maximum(a[2], b_most)
    of_a, of_b = (a[2] - most).exp(), (b_most - most).exp()
    return a[0] * of_a + b[0] * of_b, a[1] * of_a + b[1] * of_b, most
