"""What a run has spent, what it will, and where it has to stop.

Time is the wall time in which a process had the run, over all its sittings: also that of steps
which a killed process had to do again, for the machine was paid for it. It is kept in the run's
folder after every step and evaluation, and never goes back.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ludus.config.schema import BudgetConfig
from ludus.core.errors import DataError
from ludus.core.files import atomic_write

PACE = 5
"""Newest steps whose mean tells what the next one takes."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of wall time, and tokens of all episodes that were played or trained on."""

    seconds: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.tokens + other.tokens)

    def times(self, factor: float) -> Spent:
        """So many times as much."""
        return Spent(self.seconds * factor, self.tokens * factor)


class Budget:
    """Counts what a run spends, and says when the next step would be too much.

    Args:
        path: the file that keeps the count between sittings.

    Errors: DataError for a file that holds no count.
    """

    def __init__(
        self, settings: BudgetConfig, path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self._path, self._clock = path, clock
        self._before = _read(path)
        self._started = clock()
        self._tokens = 0.0
        self._steps: deque[Spent] = deque(maxlen=PACE)
        self._last: Spent = self.spent

    @property
    def spent(self) -> Spent:
        """So far, earlier sittings included."""
        return self._before + Spent(self._clock() - self._started, self._tokens)

    def cost(self, spent: Spent) -> float | None:
        """In money; None where the configuration names no price."""
        price = self.settings.price_per_hour
        return None if price is None else price * spent.seconds / 3600

    def begin_stage(self) -> None:
        """Steps of another stage take another time."""
        self._steps.clear()
        self._last = self.spent

    def step(self, tokens: float, steps_left: int) -> dict[str, float]:
        """Count a step; returns its metrics.

        Args:
            tokens: of the step's episodes.
            steps_left: in the stage.
        """
        self._tokens += tokens
        spent = self.spent
        self._steps.append(Spent(spent.seconds - self._last.seconds, tokens))
        self._last = spent
        self.keep()
        metrics = {"budget/hours": spent.seconds / 3600, "budget/tokens": spent.tokens}
        cost = self.cost(spent)
        if cost is not None:
            metrics["budget/cost"] = cost
            to_come = self.cost(spent + self._next().times(steps_left))
            metrics["budget/projected_cost"] = to_come or 0.0
        return metrics

    def keep(self) -> None:
        """Write down what was spent."""
        atomic_write(self._path, json.dumps(asdict(self.spent)), flush=False)

    def exceeded(self) -> str | None:
        """Which limit one more step like the last would pass, in words; None: it may begin."""
        settings, now = self.settings, self.spent
        then = now + self._next()
        cost, reached = self.cost(then), self.cost(now)
        unit = settings.currency
        if settings.max_cost is not None and cost is not None and cost > settings.max_cost:
            return f"budget.max_cost: {reached:.2f} of {settings.max_cost:g} {unit} are spent"
        if settings.max_hours is not None and then.seconds > settings.max_hours * 3600:
            hours = now.seconds / 3600
            return f"budget.max_hours: {hours:.2f} of {settings.max_hours:g} hours are spent"
        if settings.max_tokens is not None and then.tokens > settings.max_tokens:
            return f"budget.max_tokens: {now.tokens:,.0f} of {settings.max_tokens:,} are spent"
        return None

    def _next(self) -> Spent:
        """What one more step takes."""
        total = sum(self._steps, Spent())
        return total.times(1 / max(len(self._steps), 1))


def _read(path: Path) -> Spent:
    if not path.exists():
        return Spent()
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Spent(float(kept["seconds"]), float(kept["tokens"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: it does not tell what the run has spent ({error}); mend it, or remove it to "
            "count from nothing"
        ) from error
