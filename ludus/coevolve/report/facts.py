"""The numbers of a co-evolution, from the files of its folder.

A stage that did not run leaves its numbers empty, so the report can be written at any time.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from ludus.coevolve.report.problems import KEPT, Problem, read_problems
from ludus.coevolve.roles import run_name
from ludus.coevolve.storage import Row, Storage
from ludus.core.errors import DataError
from ludus.evaluate.results import Estimate, Evaluation
from ludus.judges.proposals.repetition import cluster_sizes
from ludus.report.charts import Record
from ludus.telemetry.metrics import MetricsLog

BATCH = 256
"""Questions, the first ones of an iteration, whose clusters are counted."""

COUNTS = ("proposed", "parsed", "distinct", "voted", "kept")


@dataclass(frozen=True, slots=True)
class Repetition:
    """Similarity of the questions of an iteration.

    Args:
        distinct: distinct questions, as a share of the parsed proposals.
        largest: share of the largest cluster in the first `batch` questions.
        mean: mean share of a question's cluster: the R_rep of a batch of that size.
    """

    distinct: float
    largest: float
    mean: float
    batch: int


@dataclass(frozen=True, slots=True)
class Frontier:
    """Results of the first iteration's executor on an iteration's problems."""

    pass_rate: Estimate
    tool_calls: float


@dataclass(frozen=True, slots=True)
class Iteration:
    """The numbers of an iteration. None, or empty: its stage did not run."""

    number: int
    heldout: Evaluation | None = None
    heldout_tool_calls: float | None = None
    frontier: Frontier | None = None
    counts: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    shares: Sequence[float] = ()
    kept_shares: Sequence[float] = ()
    tool_calls: float | None = None
    claims: Estimate | None = None
    repetition: Repetition | None = None
    curriculum: Sequence[Record] = ()
    executor: Sequence[Record] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """A co-evolution: `stages` holds the results of its complete stages, by label."""

    name: str
    stages: dict[str, Row]
    iterations: list[Iteration]

    @property
    def seconds(self) -> float:
        """Of all complete stages; one that ran beside another has none of its own."""
        return sum(float(row.get("seconds") or 0.0) for row in self.stages.values())


def read_facts(storage: Storage) -> Facts:
    """Read a co-evolution's numbers.

    Errors: DataError for a folder without a complete stage, and for a damaged file.
    """
    stages = stages_done(storage)
    numbers = sorted({number for label in stages if (number := _number(label)) is not None} | {0})
    return Facts(storage.root.name, stages, [read_iteration(storage, n) for n in numbers])


def stages_done(storage: Storage) -> dict[str, Row]:
    """The complete stages. Errors: DataError where there is none."""
    if not (stages := storage.complete()):
        raise DataError(f"{storage.root} holds no co-evolution: no stage is complete there")
    return stages


def read_iteration(storage: Storage, number: int) -> Iteration:
    """Read an iteration's numbers. Errors: DataError for a damaged file."""
    evaluation = _evaluation(storage.evaluation(number))
    problems = read_problems(storage, number) if number else []
    voted = [problem for problem in problems if problem.p is not None]
    calls = [p.mean_tool_calls for p in _first_of_each(voted) if p.mean_tool_calls is not None]
    return Iteration(
        number=number,
        counts=_counts(problems),
        reasons=dict(Counter(p.fate for p in problems if p.fate not in ("", KEPT)).most_common()),
        shares=[p.p for p in _first_of_each(voted) if p.p is not None],
        kept_shares=[p.p for p in problems if p.fate == KEPT and p.p is not None],
        tool_calls=fmean(calls) if calls else None,
        claims=_claims(_first_of_each(voted)),
        repetition=_repetition([p.question for p in problems if p.question is not None]),
        curriculum=_records(storage, run_name("curriculum", number)) if number else (),
        executor=_records(storage, run_name("executor", number)) if number else (),
        **evaluation,
    )


def share(hits: float, number: int, confidence: float = 0.95) -> Estimate:
    """A share of `number` with Wilson's interval."""
    from statsmodels.stats.proportion import proportion_confint

    low, high = proportion_confint(hits, number, alpha=1.0 - confidence, method="wilson")
    value = hits / number
    return Estimate(
        value=value, low=min(float(low), value), high=max(float(high), value), num_tasks=number
    )


def _number(label: str) -> int | None:
    match = re.match(r"iteration-([0-9]{1,4})/", label)
    return int(match[1]) if match else None


def _first_of_each(problems: Iterable[Problem]) -> list[Problem]:
    """Without the proposals that repeat a question: the executor answered it once."""
    return list({problem.question: problem for problem in reversed(list(problems))}.values())[::-1]


def _counts(problems: Sequence[Problem]) -> dict[str, int]:
    if not problems:
        return {}
    parsed = [problem.question for problem in problems if problem.question is not None]
    voted = {problem.question for problem in problems if problem.p is not None}
    kept = sum(problem.fate == KEPT for problem in problems)
    found = (len(problems), len(parsed), len(set(parsed)), len(voted), kept)
    return dict(zip(COUNTS, found, strict=True))


def _claims(problems: Sequence[Problem]) -> Estimate | None:
    """The share of claimed answers that agree with the majority; unread ones do not agree."""
    asked = [problem for problem in problems if problem.answer is not None]
    return share(sum(p.agrees is True for p in asked), len(asked)) if asked else None


def _repetition(questions: Sequence[str]) -> Repetition | None:
    if not questions:
        return None
    batch = questions[:BATCH]
    sizes = cluster_sizes(batch)
    return Repetition(
        distinct=len(set(questions)) / len(questions),
        largest=max(sizes) / len(batch),
        mean=fmean(sizes) / len(batch),
        batch=len(batch),
    )


def _evaluation(path: Path) -> dict[str, Any]:
    """The fields of an Iteration that an evaluation's file holds."""
    try:
        record = dict(json.loads(path.read_text(encoding="utf-8")))
        found: dict[str, Any] = {}
        if "heldout" in record:
            heldout = dict(record["heldout"])
            found["heldout_tool_calls"] = heldout.pop("tool_calls", None)
            found["heldout"] = Evaluation.model_validate(heldout)
        frontier = record.get("frontier")
        if frontier and frontier["pass_rate"] is not None:
            number = int(frontier["num_scored"])
            passed = share(frontier["pass_rate"] * number, number)
            found["frontier"] = Frontier(passed, float(frontier["tool_calls"]))
        return found
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, RecursionError, TypeError, ValueError) as error:
        told = str(error).splitlines()[0]
        raise DataError(
            f"{path} is no evaluation of a co-evolution ({told}): restore the file, or remove it "
            "to leave the evaluation out of the report"
        ) from None


def _records(storage: Storage, name: str) -> list[Record]:
    """The RL steps of a run."""
    path = storage.runs / f"{name}-1" / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = MetricsLog.read(path)
    return [{**line.metrics, "step": line.step} for line in lines if line.stage == "rl"]
