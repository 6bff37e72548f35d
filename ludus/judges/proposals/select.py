"""The filter: keeps the problems on which the executor is uncertain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from ludus.judges.proposals.parse import visible
from ludus.judges.proposals.votes import Vote

MARGIN = 1e-9
"""Numbers such as 0.5 - 0.2 are inexact: a p at the edge of the band is inside."""

BINS = 10
BAR = 40
"""Characters of the longest bar of a histogram."""


class Reason(StrEnum):
    """Reason for which a problem is rejected."""

    UNREAD = "the text is no proposal"
    NO_VOTE = "too few episodes of the executor could be counted"
    NO_ANSWER = "no answer of the executor could be read"
    TIE = "two answers are equally frequent"
    TOO_HARD = "p is below the band"
    TOO_EASY = "p is above the band"
    DUPLICATE = "the question was kept before"


@dataclass(frozen=True, slots=True)
class Problem:
    """A proposed question and the executor's vote on it.

    Args:
        question: None: the text was no proposal.
        vote: None: too few episodes of the executor could be counted.
    """

    id: str
    question: str | None
    vote: Vote | None


def select(
    problems: Sequence[Problem],
    *,
    min_consistency: float = 0.25,
    max_consistency: float = 0.75,
    ties: Literal["keep", "drop"] = "keep",
) -> tuple[list[Problem], list[tuple[Problem, Reason]]]:
    """Returns the problems with p in the band, edges included, and the others with the reason.

    Of problems with the same question, the first in the band is kept. Agent0 keeps
    |p - 0.5| <= 0.25 (arXiv 2511.16043); its released run keeps 0.3 to 0.8.
    """
    kept: list[Problem] = []
    rejected: list[tuple[Problem, Reason]] = []
    seen: set[str] = set()
    for problem in problems:
        reason = _reason(problem, min_consistency - MARGIN, max_consistency + MARGIN, ties)
        shown = visible(problem.question or "")
        if reason is None and shown in seen:
            reason = Reason.DUPLICATE
        if reason is None:
            kept.append(problem)
            seen.add(shown)
        else:
            rejected.append((problem, reason))
    return kept, rejected


def _reason(problem: Problem, low: float, high: float, ties: str) -> Reason | None:
    vote = problem.vote
    if problem.question is None:
        return Reason.UNREAD
    if vote is None:
        return Reason.NO_VOTE
    if vote.answer is None:
        return Reason.NO_ANSWER
    if vote.tie and ties == "drop":
        return Reason.TIE
    if vote.p < low:
        return Reason.TOO_HARD
    return Reason.TOO_EASY if vote.p > high else None


def explain_empty(
    rejected: Sequence[tuple[Problem, Reason]], min_consistency: float, max_consistency: float
) -> str:
    """The text of the error for a filter that kept nothing: the distribution of p, the number of
    each reason, and what to change."""
    counts = Counter(reason for _, reason in rejected)
    band = f"{min_consistency:g} <= p <= {max_consistency:g}"
    lines = [f"the filter kept none of {len(rejected)} proposals ({band})"]
    lines += [f"  {count:6}  {reason}" for reason, count in counts.most_common()]
    shares = [problem.vote.p for problem, _ in rejected if problem.vote is not None]
    if shares:
        lines += ["p, the share of answers that agree with their majority:", *histogram(shares)]
    if counts:
        lines.append(_ADVICE[counts.most_common(1)[0][0]])
    return "\n".join(lines)


def histogram(shares: Sequence[float]) -> list[str]:
    """A line for each tenth from 0 to 1, with a bar: the last one includes 1."""
    bins = Counter(min(int(share * BINS + MARGIN), BINS - 1) for share in shares)
    most = max(bins.values(), default=1)
    return [
        f"  {index / BINS:.1f} to {(index + 1) / BINS:.1f} {bins[index]:6}  "
        f"{'#' * -(-bins[index] * BAR // most)}".rstrip()
        for index in range(BINS)
    ]


_ADVICE = {
    Reason.UNREAD: "Most texts are no proposals: train the curriculum agent for more steps, warm "
    "it up on examples of the format, or give it more tokens.",
    Reason.NO_VOTE: "Most questions were never answered: see the errors of the executor's "
    "episodes.",
    Reason.NO_ANSWER: "The executor's answers cannot be read: let it answer in \\boxed{...} (its "
    "prompt), give it more tokens or turns, or set `extract: auto`.",
    Reason.TIE: "Most votes are ties: let the executor answer more often, by an odd number, or "
    "set `ties: keep`.",
    Reason.TOO_HARD: "The problems are too hard for the executor: lower `min_consistency`, or "
    "train the curriculum agent for more steps.",
    Reason.TOO_EASY: "The problems are too easy for the executor: raise `max_consistency` or the "
    "executor's temperature, or train the curriculum agent for more steps.",
    Reason.DUPLICATE: "Raise the weight of the repetition penalty, or the temperature of the "
    "curriculum agent.",
}
