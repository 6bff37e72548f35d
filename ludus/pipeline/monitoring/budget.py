"""Time, tokens and money that a run has spent; limits that stop it.

Time is wall time of all processes of the run. It includes steps that a killed process had to
repeat, because they were paid for. The count is saved in the run's folder after every step and
evaluation, and never decreases.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ludus.config.schema import BudgetConfig
from ludus.core.errors import DataError
from ludus.core.files import atomic_write, read_json

NUM_RECENT_STEPS = 5
"""Steps whose mean predicts the next one."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of wall time, and tokens of all episodes that were played or trained on."""

    seconds: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.tokens + other.tokens)

    def times(self, factor: float) -> Spent:
        return Spent(self.seconds * factor, self.tokens * factor)


class Budget:
    """Counts what a run spends; refuses a step that would exceed a limit.

    Args:
        path: file that keeps the count between processes.

    Errors: DataError for a malformed file.
    """

    def __init__(
        self, settings: BudgetConfig, path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self._path, self._clock = path, clock
        self._before = _read(path)
        self._started = clock()
        self._tokens = 0.0
        self._steps: deque[Spent] = deque(maxlen=NUM_RECENT_STEPS)
        self._last: Spent = self.spent

    @property
    def spent(self) -> Spent:
        """The total so far, earlier processes included."""
        return self._before + Spent(self._clock() - self._started, self._tokens)

    def cost(self, spent: Spent) -> float | None:
        """Returns the cost in money; None where the configuration sets no price."""
        price = self.settings.price_per_hour
        return None if price is None else price * spent.seconds / 3600

    def begin_stage(self) -> None:
        """Start a new prediction: steps of another stage take another time."""
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
            projected = self.cost(spent + self._next().times(steps_left))
            metrics["budget/projected_cost"] = projected or 0.0
        return metrics

    def keep(self) -> None:
        atomic_write(self._path, json.dumps(asdict(self.spent)), flush=False)

    def exceeded(self) -> str | None:
        """Returns the limit that one more step would exceed, in words; None if there is none."""
        settings, now = self.settings, self.spent
        then = now + self._next()
        cost_then, cost_now = self.cost(then), self.cost(now)
        unit = settings.currency
        max_cost = settings.max_cost
        if max_cost is not None and cost_then is not None and cost_then > max_cost:
            return f"budget.max_cost: {cost_now:.2f} of {max_cost:g} {unit} are spent"
        if settings.max_hours is not None and then.seconds > settings.max_hours * 3600:
            hours = now.seconds / 3600
            return f"budget.max_hours: {hours:.2f} of {settings.max_hours:g} hours are spent"
        if settings.max_tokens is not None and then.tokens > settings.max_tokens:
            return f"budget.max_tokens: {now.tokens:,.0f} of {settings.max_tokens:,} are spent"
        return None

    def _next(self) -> Spent:
        """Returns the prediction for one more step."""
        total = sum(self._steps, Spent())
        return total.times(1 / max(len(self._steps), 1))


class Timings:
    """Seconds of wall time by part of a run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the wall time of a block to a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - started)

    def restore(self, seconds: Mapping[str, float]) -> None:
        self.seconds = dict(seconds)


def _read(path: Path) -> Spent:
    try:
        count = read_json(path)
        spent = Spent(float(count["seconds"]), float(count["tokens"]))
        if not (0 <= spent.seconds < math.inf and 0 <= spent.tokens < math.inf):
            raise ValueError("a number is negative or not finite")
        return spent
    except FileNotFoundError:
        return Spent()
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: malformed count of time and tokens ({error}); repair the file, or remove it "
            "to count from 0"
        ) from error
