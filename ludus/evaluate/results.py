"""Serialisable results of an evaluation and of a comparison, for the run store and the report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.core.errors import DataError, counted, printable
from ludus.core.files import read_regular

MOST_TIERS = 4
"""Tiers of excluded episodes that are named."""


class Record(BaseModel):
    """A result: strict and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Estimate(Record):
    """A mean over tasks and its interval; the ends are None if there is too little data."""

    value: float
    low: float | None
    high: float | None
    num_tasks: int

    def __str__(self) -> str:
        """As a percentage: `57.0 % (47.2 to 66.3)`."""
        if self.low is None or self.high is None:
            return f"{100 * self.value:.1f} %"
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


class TaskOutcome(Record):
    """Rewards of a task's scored episodes.

    `part` is the task's environment in a mixture, `success_at` that environment's threshold.
    `successes` are the verdicts of an agent or a judge, where they differ from the threshold's.
    """

    task_id: str
    fingerprint: str
    tier: str | None
    rewards: list[float]
    num_excluded: int = 0
    part: str | None = None
    success_at: float | None = None
    successes: list[bool] | None = None


class TierResult(Record):
    """The results of one tier's tasks."""

    success: Estimate
    score: Estimate
    num_episodes: int
    num_excluded: int


class Exclusion(Record):
    """Episodes excluded for one reason, with an example of their error messages."""

    count: int
    example: str = ""


class Evaluation(Record):
    """The results of a policy on a list of tasks.

    `mean_sampled_tokens` is None for an endpoint, which returns text.
    """

    label: str = ""
    checkpoint: str | None = None
    policy_version: int | None = None
    temperature: float = 0.0
    samples_per_task: int
    success_at: float
    confidence: float
    success: Estimate
    success_bounds: tuple[float, float]
    score: Estimate
    pass_at: dict[int, Estimate]
    tiers: dict[str, TierResult]
    num_tasks: int
    num_episodes: int
    num_excluded: int
    excluded: dict[str, Exclusion]
    mean_turns: float
    mean_sampled_tokens: float | None
    seconds: float = 0.0
    outcomes: list[TaskOutcome] = Field(repr=False)

    @property
    def sampling(self) -> Literal["greedy", "sampled"]:
        return "greedy" if self.temperature == 0 else "sampled"

    @property
    def left_out(self) -> str:
        """The excluded episodes by reason, with an example of each."""
        return ", ".join(
            f"{x.count} {reason}"
            + (f": {printable(' '.join(x.example.split())):.200}" if x.example else "")
            for reason, x in self.excluded.items()
        )

    @property
    def excluded_episodes(self) -> str:
        """The number of excluded episodes, and their tiers where there are several tiers:
        `50 episodes of tier 'two'`."""
        number = counted(self.num_excluded, "episode")
        counts = Counter({o.tier: 0 for o in self.outcomes})
        if None in counts or len(counts) < 2:
            return number
        for outcome in self.outcomes:
            counts[outcome.tier] += outcome.num_excluded
        found = [(tier, count) for tier, count in counts.most_common() if count]
        if len(found) == 1:
            return f"{number} of tier {printable(str(found[0][0]))!r}"
        named = [f"{printable(str(tier))!r} ({count})" for tier, count in found[:MOST_TIERS]]
        more = [f"{len(found) - MOST_TIERS} more"] if len(found) > MOST_TIERS else []
        return f"{number} of tiers {', '.join([*named, *more])}" if found else number

    def tasks(self, kind: str = "") -> str:
        """`100 tasks`; `50 of 100 tasks` where the others have no scored episode. `kind`: `training
        `, for one, before the noun."""
        told = counted(self.num_tasks, f"{kind}task")
        scored = self.success.num_tasks
        return told if scored == self.num_tasks else f"{scored:,} scored of {told}"

    @property
    def remarks(self) -> str:
        """The mean score, where it is not the success, and the excluded episodes; else empty."""
        left_out = f", {self.excluded_episodes} left out: {self.left_out}"
        left_out = left_out if self.num_excluded else ""
        graded = abs(self.score.value - self.success.value) > 1e-9  # more than 0 and 1
        return (f", mean score {self.score.value:.3f}" if graded else "") + left_out

    def __str__(self) -> str:
        return f"success {self.success} of {self.tasks()}{self.remarks}"


class Difference(Record):
    """b minus a over the tasks scored in both, with its interval and p-value: both of `test`."""

    a: float
    b: float
    value: float
    low: float | None
    high: float | None
    p_value: float
    test: Literal["Bonett-Price", "paired t", "McNemar exact", "Wilcoxon signed-rank"]
    num_tasks: int


class Comparison(Record):
    """Two evaluations on the same tasks. Tiers have no correction for multiple tests.

    Args:
        num_left_out: tasks that were not scored in both.
        num_unpaired: tasks that one of them did not play.
    """

    a: str
    b: str
    confidence: float
    success: Difference
    score: Difference
    num_better: int
    num_worse: int
    num_left_out: int
    tiers: dict[str, Difference]
    num_unpaired: int = 0


def read_evaluation(path: Path) -> Evaluation:
    """Returns an evaluation of a run's folder. Errors: DataError for a damaged file."""
    try:
        return Evaluation.model_validate_json(read_regular(path))
    except (OSError, ValidationError):
        raise DataError(
            f"{path} is no evaluation of a run: restore the file, or remove it to leave the "
            "evaluation out of the report"
        ) from None
