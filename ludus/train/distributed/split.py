"""The samples of a step, split over ranks by tokens; the trajectory stays whole.

Trajectories are sorted by their token ids, so those of a tree are neighbours, and cut into as many
consecutive parts as there are ranks. The largest part is as small as such a cut allows. A tree that
is cut costs its prefix again in the next part, so cuts between trees are preferred:

    trajectories    A1 A2 A3 A4 | B1 B2        2 ranks, group A's prefix longer than a trajectory
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ludus.core.types import Sample
from ludus.train.batches.packing import Layout
from ludus.train.batches.tree import common_prefix


def assign(samples: Sequence[Sample], num_ranks: int, layout: Layout) -> list[list[int]]:
    """Returns for each rank the indices of its samples, in their order.

    The result depends on the arguments alone. A rank may have no sample.
    """
    units: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        units.setdefault(sample.trajectory_id, []).append(index)
    for unit in units.values():
        unit.sort(key=lambda i: list(samples[i].token_ids))
    ordered = sorted(units.values(), key=lambda unit: list(samples[unit[0]].token_ids))
    alone, joined = _costs(ordered, samples, shares=layout == "tree")
    limit = _smallest_limit(alone, joined, num_ranks)
    parts = [sorted(i for n in part for i in ordered[n]) for part in _fill(alone, joined, limit)]
    return parts + [[] for _ in range(num_ranks - len(parts))]


def _costs(
    units: Sequence[Sequence[int]], samples: Sequence[Sample], *, shares: bool
) -> tuple[list[int], list[int]]:
    """Returns each unit's computed tokens where it is first, and where it follows another."""
    alone, joined = [], []
    before = np.zeros(0, dtype=np.int64)
    for unit in units:
        cost = saved = 0
        for place, index in enumerate(unit):
            ids = np.asarray(samples[index].token_ids)
            prefix = common_prefix(before, ids) if shares else 0
            cost += len(ids) - (prefix if place else 0)
            saved += 0 if place else prefix
            before = ids
        alone.append(cost)
        joined.append(cost - saved)
    return alone, joined


def _fill(alone: Sequence[int], joined: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive parts of at most `limit` tokens each."""
    parts: list[list[int]] = []
    load = 0
    for n, (first, following) in enumerate(zip(alone, joined, strict=True)):
        if parts and load + following <= limit:
            parts[-1].append(n)
            load += following
        else:
            parts.append([n])
            load = first
    return parts


def _smallest_limit(alone: Sequence[int], joined: Sequence[int], num_parts: int) -> int:
    low, high = max(alone, default=0), sum(alone)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(alone, joined, middle)) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low
