"""Token trees: what samples share, they hold once.

Sorted, the samples are a tree's leaves in depth-first order, and what each shares with the one
before it says where it branches off:

    sample     sorted        shared    adds
    1 2 3 4    1 2 3 4       0         1 2 3 4
    1 2 9      1 2 3 5 6     3         5 6
    1 2 3 5 6  1 2 9         2         9

Tokens are compared as ids, over all samples of a step: the turns of a group that played alike, the
prompt of a group, the system prompt of all groups. Nothing is merged by text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def grow(token_ids: Sequence[Sequence[int]], budget: int) -> list[list[tuple[int, int]]]:
    """Lay trees out in rows of at most `budget` tokens.

    Returns rows of samples, each as its index and how many tokens it shares with the one before
    it in the row. A tree that fits into no row is cut: its next part repeats the prefix. Each
    sample has to fit into a row alone.
    """
    order = sorted(range(len(token_ids)), key=lambda i: list(token_ids[i]))
    rows: list[list[tuple[int, int]]] = []
    room = 0
    before = np.zeros(0, dtype=np.int64)
    for index in order:
        ids = np.asarray(token_ids[index])
        shared = common_prefix(before, ids) if rows else 0
        if not rows or len(ids) - shared > room:
            rows.append([])
            room, shared = budget, 0
        rows[-1].append((index, shared))
        room -= len(ids) - shared
        before = ids
    return rows


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """How many tokens both begin with."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if differs.size else length
