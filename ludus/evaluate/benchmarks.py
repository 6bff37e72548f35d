"""Results of benchmarks: by model and benchmark, their averages, and thresholds to exceed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ludus.config import yaml12
from ludus.core.errors import ConfigError, DataError, did_you_mean
from ludus.core.types import Group, Status
from ludus.evaluate.comparison import compare
from ludus.evaluate.results import Difference, Estimate, Evaluation, Record

THRESHOLDS: Mapping[str, Mapping[str, float]] = {
    "agent0-8b": {"math-500": 78, "gsm8k": 89, "amc": 52, "mmlu-pro": 51, "supergpqa": 28},
}
"""Named sets, in percent. `agent0-8b`: what the base model Qwen3-8B reaches on mathematics, which
an 8B executor that co-evolution trained has to exceed (Agent0, arXiv:2511.16043)."""


class Threshold(Record):
    """The least mean@k that a benchmark asks for, in percent."""

    benchmark: str
    percent: float


class BenchmarkResult(Record):
    """A model's result on a benchmark. `evaluation` is None where nothing could be scored.

    `source` is the file or the hub's split, `num_rows` the number of its rows, `num_skipped` the
    number of malformed rows that were skipped.
    """

    model: str
    benchmark: str
    source: str
    num_rows: int
    num_skipped: int = 0
    num_truncated: int = 0
    evaluation: Evaluation | None
    failure: str = ""

    @property
    def mean(self) -> Estimate | None:
        """mean@k: the mean over tasks of the share of right answers among k."""
        return self.evaluation.success if self.evaluation else None

    @property
    def least(self) -> float:
        """The mean with the answers that were left out as wrong ones; 0 without a result."""
        if self.evaluation is None:
            return 0.0
        e = self.evaluation
        return e.success_bounds[0] if e.num_excluded else e.success.value

    @property
    def best(self) -> Estimate | None:
        """pass@k, for the k of the evaluation; None for k = 1, which is the mean."""
        if self.evaluation is None or self.evaluation.samples_per_task == 1:
            return None
        return self.evaluation.pass_at.get(self.evaluation.samples_per_task)


class Check(Record):
    """A threshold and what was reached; `reached` is None where nothing could be scored.

    `least` is the mean with the answers that were left out as wrong ones: leaving answers out must
    not reach a threshold.
    """

    model: str
    threshold: Threshold
    reached: Estimate | None
    least: float = 0.0

    @property
    def passed(self) -> bool:
        """True if `least` is at least the threshold."""
        return self.reached is not None and self.least >= self.threshold.percent / 100 - 1e-12


class BenchmarkReport(Record):
    """The results of models, in the order in which they were named."""

    version: str
    models: list[str]
    benchmarks: list[str]
    results: list[BenchmarkResult]
    checks: list[Check]
    averages: dict[str, float | None]
    changes: dict[str, Difference]

    @property
    def passed(self) -> bool:
        """True if all results are there, and none is below its threshold."""
        complete = all(result.evaluation is not None for result in self.results)
        return complete and all(check.passed for check in self.checks)

    def of(self, model: str, benchmark: str) -> BenchmarkResult | None:
        """The result of a model on a benchmark; None: not played yet."""
        for result in self.results:
            if (result.model, result.benchmark) == (model, benchmark):
                return result
        return None


def make_report(
    version: str,
    models: Sequence[str],
    benchmarks: Sequence[str],
    results: Sequence[BenchmarkResult],
    thresholds: Iterable[Threshold] = (),
) -> BenchmarkReport:
    """Returns the results with their averages, changes and checks.

    Thresholds are those of the last model. A change is the last model's difference to the first,
    task by task, where both were scored.
    """
    by_key = {(result.model, result.benchmark): result for result in results}
    last = models[-1]
    checks = [
        Check(model=last, threshold=threshold, reached=found.mean, least=found.least)
        for threshold in thresholds
        if (found := by_key.get((last, threshold.benchmark)))
    ]
    averages = {
        model: average(found.mean for name in benchmarks if (found := by_key.get((model, name))))
        for model in models
        if all((model, name) in by_key for name in benchmarks)
    }
    changes = {}
    for name in benchmarks if len(models) > 1 else ():
        first, final = by_key.get((models[0], name)), by_key.get((last, name))
        if first and final and (change := _change(first, final)):
            changes[name] = change
    return BenchmarkReport(
        version=version,
        models=list(models),
        benchmarks=list(benchmarks),
        results=list(results),
        checks=checks,
        averages=averages,
        changes=changes,
    )


def _change(first: BenchmarkResult, last: BenchmarkResult) -> Difference | None:
    if first.evaluation is None or last.evaluation is None:
        return None
    try:
        return compare(first.evaluation, last.evaluation).success
    except DataError:  # no task was scored in both
        return None


def average(means: Iterable[Estimate | None]) -> float | None:
    """The mean over benchmarks, each with the same weight; None where one has no result."""
    values = [None if mean is None else mean.value for mean in means]
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def num_truncated(groups: Iterable[Group]) -> int:
    """Number of episodes that a limit of tokens or turns ended."""
    cut = (Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS)
    return sum(t.status in cut for group in groups for t in group.trajectories)


def read_thresholds(
    pairs: Sequence[str], named: str | None, played: Collection[str]
) -> list[Threshold]:
    """Thresholds from `NAME=PERCENT`, and from a named set or a YAML file of `name: percent`.

    Errors: ConfigError for a benchmark that is not played, two thresholds of one, or no percentage.
    """
    found: list[tuple[str, str, object]] = []
    if named is not None:
        found += [(f"--thresholds {named}", name, value) for name, value in _set(named).items()]
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--threshold {pair}: write NAME=PERCENT, e.g. math-500=78")
        found.append((f"--threshold {pair}", name.strip(), yaml12.parse(text, pair)[0]))
    thresholds: dict[str, Threshold] = {}
    for place, name, value in found:
        if name not in played:
            raise ConfigError(
                f"{place}: {name!r} is not played{did_you_mean(name, played)}: name it in --on, or "
                "remove its threshold"
            )
        if name in thresholds:
            raise ConfigError(f"{place}: {name} has another threshold, of another option")
        thresholds[name] = Threshold(benchmark=name, percent=_percent(place, value))
    return list(thresholds.values())


def _set(named: str) -> Mapping[str, object]:
    if named in THRESHOLDS:
        return THRESHOLDS[named]
    try:
        text = Path(named).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"--thresholds {named}: neither a file that can be read nor a named set"
            f"{did_you_mean(named, THRESHOLDS)}"
        ) from None
    value, _ = yaml12.parse(text, named)
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{named}: write a line `NAME: PERCENT` for each benchmark")
    return {str(name): percent for name, percent in value.items()}


def _percent(place: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 100:
        raise ConfigError(f"{place}: a threshold is a percentage above 0, at most 100: {value!r}")
    if value < 1:
        raise ConfigError(f"{place}: {value} is below 1 %: write 78 for 78 %")
    return float(value)
