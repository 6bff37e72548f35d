"""Token trees: samples store a shared prefix once.

Sorted samples are a tree's leaves in depth-first order. The length of the prefix that a sample
shares with the previous sample is the place of its branch:

    sample     sorted        shared    adds
    1 2 3 4    1 2 3 4       0         1 2 3 4
    1 2 9      1 2 3 5 6     3         5 6
    1 2 3 5 6  1 2 9         2         9

Tokens are compared as ids, over all samples of a step: equal turns of a group, the prompt of a
group, the system prompt of all groups. Nothing is merged by text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def grow(token_ids: Sequence[Sequence[int]], budget: int) -> list[list[tuple[int, int]]]:
    """Lay trees out in rows of at most `budget` tokens.

    Returns rows of (sample index, number of tokens shared with the previous sample of the row). A
    tree larger than a row is cut; the next part repeats the prefix. Each sample must fit into a
    row.
    """
    order = sorted(range(len(token_ids)), key=lambda i: list(token_ids[i]))
    rows: list[list[tuple[int, int]]] = []
    free = 0
    before = np.zeros(0, dtype=np.int64)
    for index in order:
        ids = np.asarray(token_ids[index])
        shared = common_prefix(before, ids) if rows else 0
        if not rows or len(ids) - shared > free:
            rows.append([])
            free, shared = budget, 0
        rows[-1].append((index, shared))
        free -= len(ids) - shared
        before = ids
    return rows


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Returns the length of the common prefix."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if differs.size else length
