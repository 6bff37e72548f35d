"""Shared-prefix attention: rows that share KV-cache blocks read them once; bucketed sizes.

Rows whose block tables begin with the same blocks form a group. Attention over the shared blocks is
computed with the queries of all rows of the group at once, attention over a row's other blocks with
its own query. The two are merged by their log-sum-exps (Juravsky et al. 2024, "Hydragen"; also
known as cascade attention).

Shape suffixes: R rows, P groups, M rows of a group, K key-value heads, G query heads per key-value
head, X queries, T positions, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
MAX_FORKS = 64
"""Forks examined on one path; blocks shared beyond them are read by each row."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A group: `rows` whose tables begin with the same full `blocks`."""

    rows: Ints
    blocks: Ints


class PrefixGroups:
    """Groups of rows by shared prefix, recomputed only when the previous groups no longer apply."""

    def __init__(self) -> None:
        self._groups: list[SharedPrefix] = []
        self._num_full: NDArray[np.int32] = np.zeros(0, np.int32)
        self._blocks = np.zeros((0, 0), np.int64)  # of each row's group; -1: none

    def update(self, tables: NDArray[np.int32], num_full: NDArray[np.int32]) -> list[SharedPrefix]:
        """Returns the groups that save the most block reads; a row is in at most one group.

        Args:
            tables: the rows' blocks [R, B].
            num_full: number of blocks before the one being written [R].
        """
        if not self._still_valid(tables, num_full):
            self._groups = _best_groups(tables, num_full)
            self._num_full = num_full
            width = max((len(group.blocks) for group in self._groups), default=0)
            self._blocks = np.full((len(tables), width), -1, np.int64)
            for group in self._groups:
                self._blocks[group.rows, : len(group.blocks)] = group.blocks
        return self._groups

    def _still_valid(self, tables: NDArray[np.int32], num_full: NDArray[np.int32]) -> bool:
        """True if the previous groups apply to these rows.

        Rows without shared blocks are regrouped when one of them begins a new block.
        """
        width = self._blocks.shape[1]
        if len(num_full) != len(self._num_full) or width > tables.shape[1]:
            return False
        if (num_full < self._num_full).any() or (not width and (num_full != self._num_full).any()):
            return False
        return bool(((tables[:, :width] == self._blocks) | (self._blocks < 0)).all())


def _best_groups(tables: NDArray[np.int32], num_full: NDArray[np.int32]) -> list[SharedPrefix]:
    groups: list[SharedPrefix] = []
    for rows in _split_by_block(tables, num_full, np.arange(len(tables)), 0):
        groups += _best_split(tables, num_full, rows, 0, 0)[1]
    return groups


def _split_by_block(
    tables: NDArray[np.int32], num_full: NDArray[np.int32], rows: Ints, depth: int
) -> Iterator[Ints]:
    """Sets of two or more rows that have the same block at `depth`."""
    rows = rows[num_full[rows] > depth]
    if not len(rows):
        return
    blocks = tables[rows, depth]
    order = np.argsort(blocks, kind="stable")
    for part in np.split(rows[order], np.flatnonzero(np.diff(blocks[order])) + 1):
        if len(part) > 1:
            yield part


def _best_split(
    tables: NDArray[np.int32], num_full: NDArray[np.int32], rows: Ints, depth: int, forks: int
) -> tuple[int, list[SharedPrefix]]:
    """Block reads saved, and the groups, for rows that share their first `depth` blocks."""
    common = tables[rows, : int(num_full[rows].min())]
    differs = (common != common[0]).any(axis=0)
    depth = int(differs.argmax()) if differs.any() else common.shape[1]
    saved_split, groups = 0, []
    if forks < MAX_FORKS:
        for part in _split_by_block(tables, num_full, rows, depth):
            saved, part_groups = _best_split(tables, num_full, part, depth, forks + 1)
            saved_split += saved
            groups += part_groups
    saved_whole = (len(rows) - 1) * depth
    if saved_whole >= saved_split:
        return saved_whole, [SharedPrefix(rows, common[0, :depth].astype(np.int64))]
    return saved_split, groups


def round_up(count: int) -> int:
    """Returns `count` rounded up to one of 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    if count < 2:
        return count
    power: int = 1 << (count - 1).bit_length()
    return 3 * power // 4 if count <= 3 * power // 4 else power


LOWEST = -1e30
"""Maximum of no scores: their weight is 0 once merged with others."""

PartialAttention = tuple[Tensor, ...]
"""Unnormalised attention over a subset of positions, in float32: weighted sum of values [..., D],
sum of weights [..., 1], and the maximum subtracted from the scores [..., 1]."""


def partial_attention(
    q_RKXD: Tensor,
    k_YTD: Tensor,
    v_YTD: Tensor,
    lengths_R: Tensor,
    scale: float,
    starts_RX: Tensor | None = None,
    softcap: float = 0.0,
) -> PartialAttention:
    """Attention of X queries per row over the row's first `lengths_R` positions; Y is K * R.

    Args:
        starts_RX: first position of a query's sliding window, [R, X] or [R, 1]; the window may lie
            beyond all of the positions.
        softcap: scores are cap * tanh(score / cap); 0: no cap.
    """
    rows, heads, queries, size = q_RKXD.shape
    q_YXD = q_RKXD.transpose(0, 1).reshape(heads * rows, queries, size)
    scores_YXT = _product(q_YXD.to(k_YTD.dtype), k_YTD.transpose(1, 2)) * scale
    if softcap:
        scores_YXT = torch.tanh(scores_YXT / softcap) * softcap
    column_T = torch.arange(k_YTD.shape[1], device=k_YTD.device)
    masked_RXT = (column_T >= lengths_R[:, None])[:, None]
    if starts_RX is not None:
        masked_RXT = masked_RXT | (column_T < starts_RX[..., None])
    scores_KRXT = scores_YXT.view(heads, rows, queries, -1)
    scores_KRXT = scores_KRXT.masked_fill(masked_RXT, -torch.inf)
    max_KRX1 = scores_KRXT.amax(-1, keepdim=True)
    if starts_RX is not None:
        max_KRX1 = max_KRX1.clamp(min=LOWEST)  # a query that sees none of the positions
    weights_KRXT = (scores_KRXT - max_KRX1).exp()
    sums_YXD = _product(weights_KRXT.view(scores_YXT.shape).to(v_YTD.dtype), v_YTD)
    parts = (sums_YXD.view(heads, rows, queries, -1), weights_KRXT.sum(-1, keepdim=True), max_KRX1)
    return tuple(x.transpose(0, 1) for x in parts)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product; operands keep their type, sums and result are float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def gather_rows(groups_PKXZ: Tensor, members: int, place_B: Tensor) -> Tensor:
    """Results of groups, by row [B, K, G, Z]; undefined for rows without a group."""
    groups, heads, _, size = groups_PKXZ.shape
    by_member = groups_PKXZ.reshape(groups, heads, members, -1, size).transpose(1, 2).flatten(0, 1)
    return by_member[place_B.clamp(min=0)]


def merge_attention(a: PartialAttention, b: PartialAttention, has_b_B: Tensor) -> PartialAttention:
    """Attention over the positions of both; rows where `has_b_B` is false ignore `b`."""
    b_max = b[2].masked_fill(~has_b_B[:, None, None, None], -torch.inf)
    top = torch.maximum(a[2], b_max)
    scale_a, scale_b = (a[2] - top).exp(), (b_max - top).exp()
    return a[0] * scale_a + b[0] * scale_b, a[1] * scale_a + b[1] * scale_b, top
