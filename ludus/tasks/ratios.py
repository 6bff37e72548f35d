"""Exact ratios: shares of batches, and the order of the sources in a batch.

    shares({"code": "40%", "search": "30%", "maths": "30%"})   {"code": 4, "search": 3, "maths": 3}
    order = Schedule({"code": 4, "search": 3, "maths": 3}, batch_size=8)
    [next(order) for _ in range(8)]     3 or 4 of code, 2 or 3 of search, 2 or 3 of maths

A batch of B rows has floor(w * B) or ceil(w * B) rows of a source with share w. At the end of every
batch, the n rows so far have n * w of the source, rounded up or down: fractions carry over.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import lcm
from typing import Any

from ludus.core.errors import CheckpointError, ConfigError

LARGEST = 1_000_000
"""Of a whole ratio, and of a fraction's denominator."""

_FORMS = "a whole number >= 1, a fraction (0.3 or '1/3') or a percentage ('40%')"

Ratio = int | float | str


def shares(ratios: Mapping[str, Ratio], place: str = "parts") -> dict[str, int]:
    """Returns whole numbers in the given ratios.

    Whole numbers are relative to one another. Fractions and percentages have to sum to exactly 1.

    Errors: ConfigError.
    """
    read = {name: _read(ratio, f"{place}.{name}.ratio") for name, ratio in ratios.items()}
    whole = [name for name, ratio in ratios.items() if isinstance(ratio, int)]
    if len(whole) == len(ratios):
        return {name: ratio.numerator for name, ratio in read.items()}
    if whole and len(ratios) > 1:
        other = next(name for name in ratios if name not in whole)
        raise ConfigError(
            f"{place}: the ratio of {whole[0]!r} is a whole number, that of {other!r} a fraction: "
            "give all as whole numbers, or all as fractions or percentages that sum to 1"
        )
    if (total := sum(read.values(), Fraction(0))) != 1:
        listed = " + ".join(str(ratio) for ratio in ratios.values())
        raise ConfigError(
            f"{place}: the ratios {listed} sum to {_shown(total)}; fractions and percentages have "
            "to sum to 1 (whole numbers may have any sum)"
        )
    common = lcm(*(ratio.denominator for ratio in read.values()))
    return {name: int(ratio * common) for name, ratio in read.items()}


def _read(ratio: Ratio, place: str) -> Fraction:
    text = str(ratio).strip()
    try:
        number = Fraction(text.removesuffix("%").strip())  # a float's shortest text: 0.1 is 1/10
        value = number / 100 if text.endswith("%") else number
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    most = Fraction(LARGEST) if isinstance(ratio, int) else Fraction(1)
    if isinstance(ratio, bool) or not 0 < value <= most or value.denominator > LARGEST:
        raise ConfigError(f"{place} must be {_FORMS}, got {ratio!r:.40}")
    return value


def _shown(value: Fraction) -> str:
    """`0.9`, or `29/30` where the decimals do not end."""
    decimal = f"{float(value):.6f}".rstrip("0").rstrip(".")
    return decimal if Fraction(decimal) == value else str(value)


class Schedule:
    """Yields the source of each row, without end; `shares` are whole numbers.

    The rows of a batch that are left over after floor(w * B) of each source go to the sources by
    PD2: Srinivasan & Anderson 2002, "Optimal rate-based scheduling on multiprocessors"; with a
    batch as a time slot, and w * B modulo 1 as a task's weight. It keeps every source within one
    row of its share at the end of every batch, for any number of left-over rows.

    The order in a batch is that of Tijdeman 1980, "The chairman assignment problem", Discrete
    Mathematics 32, among the sources that have rows left in the batch: next comes, of the sources
    whose deficit is at least 1 / (2 * sources - 2), the source with the earliest deadline.
    """

    def __init__(self, shares: Mapping[str, int], batch_size: int | None = None) -> None:
        self.shares = dict(shares)
        self.total = sum(self.shares.values())
        self.batch_size = batch_size or self.total
        self.counts = dict.fromkeys(self.shares, 0)
        self._left = dict.fromkeys(self.shares, 0)  # rows of this batch that are still to come
        common = lcm(*self.shares.values())
        self._urgency = {name: common // share for name, share in self.shares.items()}

    def __iter__(self) -> Schedule:
        return self

    def __next__(self) -> str:
        if not any(self._left.values()):
            self._left = self._next_batch()
        name = self._choose()
        self._left[name] -= 1
        self.counts[name] += 1
        return name

    @property
    def num_left(self) -> int:
        """Rows of the current batch that are still to come; 0 between batches."""
        return sum(self._left.values())

    def most(self, name: str) -> int:
        """The largest number of rows that a batch has of a source."""
        return _up(self.batch_size * self.shares[name], self.total)

    def _next_batch(self) -> dict[str, int]:
        number = sum(self.counts.values()) // self.batch_size
        slots, extra = dict[str, int](), dict[str, tuple[Any, ...]]()
        for name, share in self.shares.items():
            slots[name], weight = divmod(self.batch_size * share, self.total)
            had = self.counts[name] - number * slots[name]
            if weight and had * self.total // weight <= number:
                deficit = (number + 1) * weight - had * self.total
                extra[name] = (*_priority(had + 1, weight, self.total), -deficit)
        for name in sorted(extra, key=extra.__getitem__)[: self.batch_size - sum(slots.values())]:
            slots[name] += 1
        return slots

    def _choose(self) -> str:
        """The source of the next row. All numbers are multiplied by total * (2 * sources - 2)."""
        scale = max(2 * len(self.shares) - 2, 1)
        position = sum(self.counts.values()) + 1
        waiting = [name for name, left in self._left.items() if left]
        deficit = {
            name: scale * (position * self.shares[name] - self.counts[name] * self.total)
            for name in waiting
        }
        ready = [name for name in waiting if deficit[name] >= self.total] or waiting
        return min(
            ready,
            key=lambda name: ((scale - 1) * self.total - deficit[name]) * self._urgency[name],
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "shares": self.shares,
            "batch_size": self.batch_size,
            "counts": dict(self.counts),
            "left": dict(self._left),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Errors: CheckpointError for a state of other ratios or another size of batches."""
        own = self.state_dict()
        for key, name in {"shares": "ratios", "batch_size": "tasks a step"}.items():
            if state[key] != own[key]:
                raise CheckpointError(
                    f"the saved task order has {name} {state[key]}, this run has {own[key]}: "
                    "resume with the configuration of the saved run"
                )
        self.counts, self._left = dict(state["counts"]), dict(state["left"])


def _priority(number: int, weight: int, total: int) -> tuple[int, int, int]:
    """Priority of the `number`-th extra row of a source; the smallest comes first.

    Its deadline; whether its window overlaps the next one's; for weights of at least 1/2, the end
    of the chain of windows that a late row would shift (the group deadline).
    """
    deadline, overlaps = _up(number * total, weight), number * total % weight != 0
    group = 0
    if overlaps and 2 * weight >= total:
        rest = total - weight
        group = _up(_up(deadline * rest, total) * total, rest)
    return deadline, -int(overlaps), -group


def _up(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)
