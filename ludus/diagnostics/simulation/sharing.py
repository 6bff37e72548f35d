"""Growth of the tokens that a group computes with the size of the group, from recorded groups.

A group's episodes are a tree of tokens: the prompt belongs to all, later tokens to as many episodes
as are equal so far. Where c of n episodes go through a token, k episodes drawn from the n go
through it with probability 1 - C(n - c, k) / C(n, k). Summed over the tokens, this is the size of
the tree of k <= n episodes, exactly ("rarefaction": Hurlbert, "The Nonconcept of Species
Diversity", Ecology 52(4), 1971). Each episode adds fewer new tokens than the one before:
beyond n, the additions are continued as a power of the number of episodes (Heaps' law). The power
is that between the last addition and the one at half the size.

Groups whose rewards are all equal do not train; their part is counted and continued alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ludus.core.types import Group, Trajectory
from ludus.train.batches.tree import common_prefix


@dataclass(frozen=True, slots=True)
class Tree:
    """Tokens of groups of `size` episodes, by the number of episodes that go through them."""

    size: int
    through: Mapping[int, float] = field(default_factory=dict)

    def tokens(self, size: int) -> float:
        """Returns the tokens of a tree of `size` episodes."""
        known = min(size, self.size)
        found = sum(
            number * (1 - absent(self.size, count, known)) for count, number in self.through.items()
        )
        if size <= self.size or not self.through:
            return found
        last, power = self._last_addition()
        return found + sum(
            last * math.pow(k / self.size, power) for k in range(known + 1, size + 1)
        )

    def per_episode(self, size: int) -> float:
        """Returns the tokens that are computed for an episode, relative to those in groups of the
        recorded size; 1 where nothing is known."""
        then = self.tokens(self.size) / self.size
        return self.tokens(size) / size / then if then else 1.0

    def _last_addition(self) -> tuple[float, float]:
        """New tokens of the last episode, and the power by which additions change."""
        return _continued(lambda k: self.tokens(k) - self.tokens(k - 1), self.size)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Prefixes that the groups of a run share.

    Args:
        size: episodes of a group.
        trained: tokens of the groups that train.
        observed: tokens between turns, of all groups.
        rewards: of each group.
    """

    size: int
    trained: Tree
    observed: Tree
    rewards: Sequence[Sequence[float | None]] = ()

    def without_signal(self, size: int) -> float:
        """Returns the part of groups of `size` episodes whose rewards are all equal."""
        if size <= self.size:
            return _equal(self.rewards, size)
        last, power = _continued(lambda k: _equal(self.rewards, k), self.size)
        return last * math.pow(size / self.size, power)

    def idle(self, size: int) -> float:
        """Returns the part of groups without a signal, relative to the recorded size."""
        then = self.without_signal(self.size)
        return self.without_signal(size) / then if then else 1.0


def absent(size: int, count: int, chosen: int) -> float:
    """Returns the probability that `chosen` of `size` episodes have none of `count` ones."""
    return math.comb(size - count, chosen) / math.comb(size, chosen)


def sharing_of(groups: Sequence[Group], size: int, *, all_train: bool) -> Sharing:
    """Returns how groups share. Those with fewer than `size` finished episodes do not count.

    `all_train`: groups without a signal train too, as with an entropy bonus.
    """
    trained: Counter[int] = Counter()
    observed: Counter[int] = Counter()
    rewards = []
    for group in groups:
        played = [t for t in group.trajectories if t.status.trainable and t.num_turns]
        if len(played) != size:
            continue
        rewards.append([t.reward for t in played])
        rows = sorted((_row(t) for t in played), key=lambda row: list(row[0]))
        trains = all_train or len(set(rewards[-1])) > 1
        for count, row, start, end in _runs([ids for ids, _ in rows]):
            if trains:
                trained[count] += end - start
            observed[count] += int(rows[row][1][start:end].sum())
    return Sharing(size, Tree(size, trained), Tree(size, observed), rewards)


def _row(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of an episode up to its last sampled token; true for those between turns."""
    ids: list[int] = []
    between: list[bool] = []
    began, end = False, 0
    for segment in (trajectory.segments[i] for i in trajectory.path()):
        began = began or segment.sampled
        ids += segment.token_ids
        between += [began and not segment.sampled] * len(segment.token_ids)
        end = len(ids) if segment.sampled else end
    return np.asarray(ids[:end]), np.asarray(between[:end], dtype=bool)


def _runs(rows: Sequence[np.ndarray]) -> Iterator[tuple[int, int, int, int]]:
    """Yields runs of tokens of sorted rows that the same rows share: their number, one of these
    rows, and the places where the run starts and ends."""
    shared = [common_prefix(a, b) for a, b in pairwise(rows)]
    waiting = [(0, len(rows), 0)]
    while waiting:
        first, last, start = waiting.pop()
        if last - first == 1:
            yield 1, first, start, len(rows[first])
            continue
        end = min(shared[first : last - 1])
        yield last - first, first, start, end
        cuts = [i + 1 for i in range(first, last - 1) if shared[i] == end]
        for low, high in zip([first, *cuts], [*cuts, last], strict=True):
            waiting.append((low, high, end))


def _equal(rewards: Sequence[Sequence[float | None]], size: int) -> float:
    """Part of the draws of `size` rewards of a group that are all equal, over the groups."""
    if not rewards:
        return 0.0
    ways = (sum(math.comb(number, size) for number in Counter(group).values()) for group in rewards)
    return sum(ways) / math.comb(len(rewards[0]), size) / len(rewards)


def _continued(value: Callable[[int], float], size: int) -> tuple[float, float]:
    """The value at `size`, and the power by which it goes on; 0, a constant, where half the size
    tells none."""
    last, half = value(size), size // 2
    before = value(half) if half else 0.0
    if size < 4 or last <= 0 or before <= 0:
        return last, 0.0
    return last, min(math.log(last / before) / math.log(size / half), 0.0)
