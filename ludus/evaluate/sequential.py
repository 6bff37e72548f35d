"""Always-valid tests of two variants: the evidence may be looked at after each sample.

`Evidence` is a betting test of the mean of a bounded variable (Waudby-Smith and Ramdas 2024, JRSS B
86(1), doi:10.1093/jrsssb/qkad009). A gambler with capital 1 stakes a fraction g on each value z at
odds z / m, where m is the largest mean under the null hypothesis:

    capital *= 1 - g + g z / m        fair for mean m, and at a loss below it

The null hypothesis makes the capital a nonnegative supermartingale. By Ville's inequality it ever
reaches 1/alpha with probability alpha at most, whenever and however often anyone looks. Nothing is
approximate: no sample is too small. The best fraction depends on the unknown mean, so the capital
is spread over the fractions of STAKES (a mixture of martingales is one).

`Blocks` turns two streams of values into independent blocks with some values from each:

    A A B A | B B A | A B       a block ends as soon as it has enough of both, here one

A block's difference of means lies in [-1, 1]. Its expectation is that of B minus A, whatever part
of the traffic B had, and also if values of one variant come later or more rarely than those of the
other, as long as that does not depend on the values themselves. Values of the same time meet in a
block, so a drift of both variants cancels, and an outage of both disturbs two blocks at most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ludus.core.errors import ConfigError

STAKES = tuple(0.9 * 2 ** (-k / 2) for k in range(14))
"""Fractions of the capital that are staked, 0.9 to 0.01. Small ones find small differences."""

BINS = 4000
"""Of values from 0 to 1, for intervals."""

MAX_CAPITAL = 1e250
"""The capital is not counted further: no threshold is near it, and it would overflow."""


class Evidence:
    """Evidence against the hypothesis that the mean of z, in [0, 1], is `mean` or less.

    `switching`: the part of the capital that is spread evenly again after each value (fixed share,
    Herbster and Warmuth 1998, doi:10.1023/A:1007424614876), with one more fraction, 0. The gambler
    then notices a mean that rises after thousands of values below `mean`, which would have taken
    all of the capital, at a cost of `switching` nats a value.

    Errors: ConfigError if `mean` is not between 0 and 1.
    """

    def __init__(self, mean: float, switching: float = 0.0) -> None:
        if not 0 < mean < 1:
            raise ConfigError(f"the mean of a hypothesis must be between 0 and 1, not {mean:g}")
        self._mean, self._switching = mean, switching
        self._stakes = (*STAKES, 0.0) if switching else STAKES
        self._capitals = [1.0 / len(self._stakes)] * len(self._stakes)
        self.num_values = 0
        self.best = 1.0
        """The largest capital so far: the inverse of an always-valid p-value."""

    @property
    def capital(self) -> float:
        return sum(self._capitals)

    @property
    def p_value(self) -> float:
        """At most alpha with probability at most alpha, at all times at once."""
        return min(1.0, 1.0 / self.best)

    def add(self, z: float) -> None:
        """Bet on one value. Errors: ConfigError if it lies outside of [0, 1]."""
        if not 0 <= z <= 1:
            raise ConfigError(f"a value of the test must lie in [0, 1], not {z!r}")
        self.num_values += 1
        gain = z / self._mean - 1.0
        pairs = zip(self._capitals, self._stakes, strict=True)
        self._capitals = [capital * (1.0 + stake * gain) for capital, stake in pairs]
        total = sum(self._capitals)
        if total > MAX_CAPITAL:
            self._capitals = [capital * (1e200 / total) for capital in self._capitals]
        if self._switching:
            kept, spread = 1 - self._switching, self._switching * sum(self._capitals)
            even = spread / len(self._capitals)
            self._capitals = [kept * capital + even for capital in self._capitals]
        self.best = max(self.best, total)

    def rejects(self, alpha: float) -> bool:
        """True once the hypothesis is rejected at `alpha`; it stays so."""
        return self.best >= 1.0 / alpha


@dataclass(frozen=True, slots=True)
class Block:
    """Values of both variants that are compared with each other."""

    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Mean of B minus mean of A."""
        return sum(self.b) / len(self.b) - sum(self.a) / len(self.a)

    def exceeds(self, factor: float) -> float:
        """The share of pairs in which B's value exceeds `factor` times A's."""
        wins = sum(b > factor * a for b in self.b for a in self.a)
        return wins / (len(self.a) * len(self.b))


class Blocks:
    """Collects values of A and B into blocks.

    At equal traffic, runs of one variant make a block's variance that of 79 % of the values. Larger
    blocks would waste less, but the bets are bounded by what a block could be at worst, and means
    of several values are far from that: with scores of little spread they halve the power.
    """

    def __init__(self) -> None:
        self._a: list[float] = []
        self._b: list[float] = []

    def add(self, is_b: bool, value: float, share: float) -> Block | None:
        """Returns the block that this value completes. `share`: that of B in the traffic now."""
        (self._b if is_b else self._a).append(value)
        least_a, least_b = least_of_each(share)
        if len(self._a) < least_a or len(self._b) < least_b:
            return None
        block = Block(tuple(self._a), tuple(self._b))
        self.clear()
        return block

    def clear(self) -> None:
        """Begin a new block."""
        self._a, self._b = [], []


def least_of_each(share: float) -> tuple[int, int]:
    """Values of A and B that a block needs: of the more frequent one, half of what comes."""
    more = max(share, 1 - share) / min(share, 1 - share)
    larger = max(1, round(more / 2))
    return (larger, 1) if share <= 0.5 else (1, larger)


class Spread:
    """Values in [0, 1] and the interval of their mean, in memory that does not grow with them.

    Values are counted in bins of 1 / BINS. Each side of the interval takes the end of the bin that
    widens it, so rounding makes no interval too narrow.
    """

    def __init__(self) -> None:
        self.num_values = 0
        self._sum = 0.0
        self._below: Counter[int] = Counter()
        self._above: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """Count a value from 0 to 1."""
        self.num_values += 1
        self._sum += value
        self._below[math.floor(value * BINS)] += 1
        self._above[math.floor((1 - value) * BINS)] += 1

    @property
    def mean(self) -> float | None:
        """None before the first value."""
        return self._sum / self.num_values if self.num_values else None

    def interval(self, alpha: float) -> tuple[float, float]:
        """The confidence interval of the mean, valid at all times at once, to 0.0005.

        The means that neither a test of the lower nor one of the upper side rejects now, each at
        alpha / 2 and without switching.
        """
        # Copies: another thread may count meanwhile.
        low = _lowest_mean(self._below.copy(), alpha / 2)
        return low, 1 - _lowest_mean(self._above.copy(), alpha / 2)


class Difference:
    """Is the mean of B above, or below, that of A by more than a limit? Values are in [0, 1].

    `above` is evidence that B - A exceeds `floor`, `below` that B - A falls short of `ceiling`;
    `switching` is that of each.
    """

    def __init__(
        self,
        floor: float = 0.0,
        ceiling: float = 0.0,
        switching: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.above = Evidence((1 + floor) / 2, switching[0])
        self.below = Evidence((1 - ceiling) / 2, switching[1])
        self._blocks = Blocks()
        self._sum = 0.0
        self._spread = Spread()

    def add(self, is_b: bool, value: float, share: float = 0.5) -> Block | None:
        """Count a value. Errors: ConfigError if it lies outside of [0, 1]."""
        if not 0 <= value <= 1:
            raise ConfigError(f"a value of the test must lie in [0, 1], not {value!r}")
        block = self._blocks.add(is_b, value, share)
        if block is not None:
            z = min(1.0, max(0.0, (1 + block.difference) / 2))
            self.above.add(z)
            self.below.add(1 - z)
            self._spread.add(z)
            self._sum += block.difference
        return block

    def break_off(self) -> None:
        """Begin a new block: values until now are not compared with later ones."""
        self._blocks.clear()

    @property
    def num_blocks(self) -> int:
        return self._spread.num_values

    @property
    def estimate(self) -> float | None:
        """Mean difference of the blocks; None before the first."""
        return self._sum / self.num_blocks if self.num_blocks else None

    def interval(self, alpha: float) -> tuple[float, float]:
        """The confidence interval of B - A, valid at all times at once, to 0.001."""
        low, high = self._spread.interval(alpha)
        return 2 * low - 1, 2 * high - 1


def _lowest_mean(bins: Mapping[Any, int], alpha: float) -> float:
    """The largest m such that means of m or less are rejected; the capital falls as m grows."""
    import numpy as np

    if not bins:
        return 0.0
    stakes_G1 = np.array(STAKES)[:, None]
    values_N, counts_N = np.array(list(bins)) / BINS, np.array(list(bins.values()))

    def log_capital(mean: float) -> float:
        logs_G = np.log1p(stakes_G1 * (values_N / mean - 1)) @ counts_N
        top = float(logs_G.max())
        return top + math.log(float(np.exp(logs_G - top).mean()))

    low, high = 0.0, 1.0
    while high - low > 0.0005:
        middle = (low + high) / 2
        if log_capital(middle) >= -math.log(alpha):
            low = middle
        else:
            high = middle
    return low
