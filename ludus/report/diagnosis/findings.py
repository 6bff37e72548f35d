"""Findings, and the history of metrics that they are drawn from."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ludus.config.schema import RunConfig

WINDOW = 10
"""Steps whose mean is judged: one step's batch says little about the next."""

START_STEPS = 3
"""Steps of RL below which nothing is said of it: `--quick-test` has two."""

CEILING = 0.95
"""Success from which rewards have no room to rise."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a run, told once: when, in words with its number, and what to change.

    Args:
        step: counted from 0, as in `metrics.jsonl`.
        level: from 1; a finding of the same kind is told again when its level rises.
        lasting: false where a later step of the stage no longer shows it.
    """

    kind: str
    stage: str
    step: int
    level: int
    text: str
    advice: str
    lasting: bool = True

    @property
    def where(self) -> str:
        """`sft`; `rl step 12`; `evaluation at step 40`; `evaluation at the end`."""
        if self.stage.startswith("evaluate/"):
            label = self.stage.removeprefix("evaluate/")
            if label == "rl":
                return f"evaluation at step {self.step}"
            return f"evaluation {_WHEN.get(label, label)}"
        return f"{self.stage} step {self.step}"

    def __str__(self) -> str:
        return f"{self.where}: {self.text}. {self.advice}."


_WHEN = {"start": "before SFT", "before": "before RL", "after": "at the end"}
"""Evaluations by their label; a run without RL has one at its end, too."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a check."""

    level: int
    text: str
    advice: str


Check = Callable[["History", RunConfig], Found | None]

HUGE = 1e100
"""Size of a value that counts as missing: sums of such values overflow."""


class History:
    """Metrics of a stage, step by step; NaN where a step lacks one."""

    def __init__(self, names: Sequence[str]) -> None:
        self.num_steps = 0
        self._sums = dict.fromkeys(names, 0.0)
        self._counts = dict.fromkeys(names, 0)
        self._columns = {name: array("d") for name in names}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Append a step."""
        self.num_steps += 1
        for name, column in self._columns.items():
            value = metrics.get(name)
            if isinstance(value, int | float) and abs(value) < HUGE:
                column.append(float(value))
            else:
                column.append(math.nan)
            if not math.isnan(column[-1]):
                self._sums[name] += column[-1]
                self._counts[name] += 1

    def first(self, name: str, count: int) -> list[float]:
        """The values of the first `count` steps."""
        return _known(self._columns[name][:count])

    def last(self, name: str, count: int = WINDOW, before: int = 0) -> list[float]:
        """The values of `count` steps, the last of which is `before` steps before the newest."""
        column = self._columns[name]
        end = len(column) - before
        return _known(column[max(0, end - count) : max(0, end)])

    def mean(self, name: str, count: int = WINDOW) -> float | None:
        """The mean over the last `count` steps; None before the stage has so many."""
        values = self.last(name, count)
        return mean(values) if len(values) >= count else None

    def total(self, name: str) -> float:
        """The sum over all steps."""
        return self._sums[name]

    def overall(self, name: str) -> float | None:
        """The mean over all steps that have a value."""
        return self._sums[name] / self._counts[name] if self._counts[name] else None


def _known(values: array[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def mean(values: Sequence[float]) -> float:
    """Returns the mean of at least one value."""
    return math.fsum(values) / len(values)


def level_of(value: float, thresholds: Sequence[float]) -> int:
    """Number of thresholds that a value reaches."""
    return sum(value >= threshold for threshold in thresholds)


def percent(share: float) -> str:
    """`83 %`; one digit below 10 %."""
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def rate_of(config: RunConfig) -> str:
    """RL's learning rate, in advice."""
    return f"{config.rl.optimizer.lr:g}" if config.rl else "unset"


REACHED, SFT_STEPS = "sft/reached", "sft/steps"
"""Of SFT, for the checks of RL and of evaluations: success of its last measurements for
`sft.until`, and its number of steps."""

UNUSED = 0.25
"""Share of SFT's steps that a measured end left, from which more of them is advised."""


def longer_sft(history: History, config: RunConfig) -> str:
    """Advice after that of other ways, where RL raises nothing and SFT ended early; else empty.

    GoToObjDoor's SFT ended after 400 of 1,290 steps, and RL then took 33 to 36 %, where the rest of
    SFT reaches 50 % in less time (docs/log.md).
    """
    reached, steps = history.last(REACHED, 1), history.last(SFT_STEPS, 1)
    sft = config.sft
    if sft is None or sft.until is None or not reached or not steps:
        return ""
    if steps[0] > (1 - UNUSED) * sft.steps:
        return ""
    later = f"a higher `sft.until.patience`, now {sft.until.patience}"
    if reached[0] >= sft.until.success:
        way = f"a higher `sft.until.success`, now {sft.until.success:g}"
    elif sft.until.min_gain is not None:
        way = f"`sft.until.min_gain=null`, or {later}"
    else:
        way = later
    return f"; or let SFT go on: it ended after {steps[0]:,.0f} of {sft.steps:,} steps ({way})"


def sentence(text: str) -> str:
    """A text with a capital."""
    return text[0].upper() + text[1:]
