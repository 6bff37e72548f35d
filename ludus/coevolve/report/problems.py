"""The problems of an iteration: each proposal with its votes, its answers and its fate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, InstanceOf, ValidationError, model_validator

from ludus.coevolve.storage import Storage, read_rows
from ludus.core.errors import DataError, first_fault
from ludus.core.types import Status

KEPT = "kept"

Text = InstanceOf[str]
"""A text of a model: it may hold half a surrogate pair, which pydantic refuses in `str`."""

R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the executor's k answers; `text` is its last message, None: it has none.

    `group` is its class in the problem's `counts`; None: the answer was not read, or not counted.
    """

    status: str
    tool_calls: int
    text: str | None
    group: int | None


@dataclass(frozen=True, slots=True)
class Problem:
    """A proposal, and what became of it.

    Args:
        number: its place among the iteration's proposals, from 1.
        text: the proposing message.
        question: None: the text is no proposal.
        p: share of the majority; None: no vote.
        answer: of the majority, the label; None: no answer was read.
        counts: the classes of equal answers, the largest first: a text, and the number of answers.
        fate: KEPT, or the reason of its rejection; empty before the filter.
        remark: why there is no question, or no vote; empty: there are both.
        repeats: a proposal before it has the same question, and holds the answers.
    """

    number: int
    id: str
    text: str | None
    question: str | None
    claimed: str | None
    p: float | None = None
    answer: str | None = None
    agrees: bool | None = None
    tie: bool = False
    counts: Sequence[tuple[str, int]] = ()
    mean_tool_calls: float | None = None
    answers: Sequence[Answer] = ()
    fate: str = ""
    remark: str = ""
    repeats: bool = False

    @property
    def is_kept(self) -> bool:
        return self.fate == KEPT


def read_problems(storage: Storage, iteration: int) -> list[Problem]:
    """Returns an iteration's problems in the order of their proposals; empty before `generate`.

    Errors: DataError for a damaged file.
    """
    proposals = _rows(storage.questions(iteration, "proposals"), _Proposal)
    answered = {row.question: row for row in _rows(storage.temporary(iteration, "answers"), _Vote)}
    fates = {row.id: row.reason for row in _rows(storage.questions(iteration, "rejected"), _Fate)}
    kept = _rows(storage.questions(iteration, "problems"), _Kept)
    fates |= {row.id: KEPT for row in kept}
    found, seen = [], set[str]()
    for number, row in enumerate(proposals, start=1):
        question = row.question
        vote = None if question is None else answered.get(question)
        found.append(_problem(number, row, vote, fates.get(row.id, ""), question in seen))
        if question is not None:
            seen.add(question)
    return found


class _Proposal(BaseModel):
    """A row of `proposals.jsonl`."""

    id: str
    text: Text | None
    question: Text | None
    claimed: Text | None
    reason: Text | None


class _Vote(BaseModel):
    """A row of `answers.jsonl`; without a vote it ends with the texts."""

    question: Text
    statuses: list[Status]
    tool_calls: list[int]
    texts: list[Text | None]
    consistency: Annotated[float, Field(ge=0, le=1)] | None
    answer: Text | None = None
    counts: list[tuple[Text, int]] = []
    classes: list[int | None] = []
    tie: bool = False
    agrees: bool | None = None
    mean_tool_calls: FiniteFloat | None = None
    reason: Text | None

    @model_validator(mode="after")
    def _same_length(self) -> _Vote:
        if not len(self.statuses) == len(self.tool_calls) == len(self.texts):
            raise ValueError("`statuses`, `tool_calls` and `texts` have to be equally many")
        return self


class _Fate(BaseModel):
    """A row of `rejected.jsonl`."""

    id: str
    reason: Text


class _Kept(BaseModel):
    """A row of `problems.jsonl`."""

    id: str


def _rows(path: Path, form: type[R]) -> list[R]:
    """The rows of a file; none where it is absent. Errors: DataError names the line."""
    rows = []
    for number, row in enumerate(read_rows(path) if path.is_file() else [], start=1):
        try:
            rows.append(form.model_validate(row))
        except ValidationError as error:
            told = first_fault(error, "the row")
            raise DataError(f"{path}: line {number} is damaged: {told}") from None
    return rows


def _problem(number: int, row: _Proposal, vote: _Vote | None, fate: str, repeats: bool) -> Problem:
    problem = Problem(
        number=number,
        id=row.id,
        text=row.text,
        question=row.question,
        claimed=row.claimed,
        fate=fate,
        remark=(row.reason if row.question is None else vote and vote.reason) or "",
        repeats=repeats,
    )
    if vote is None:
        return problem
    return replace(
        problem,
        p=vote.consistency,
        answer=vote.answer,
        agrees=None if repeats else vote.agrees,
        tie=vote.tie,
        counts=vote.counts,
        mean_tool_calls=vote.mean_tool_calls,
        answers=[] if repeats else _answers(vote),
    )


def _answers(vote: _Vote) -> list[Answer]:
    """`classes` has an entry for each episode that counts."""
    classes = iter(vote.classes)
    rows = zip(vote.statuses, vote.tool_calls, vote.texts, strict=True)
    return [
        Answer(status.value, calls, text, next(classes, None) if status.trainable else None)
        for status, calls, text in rows
    ]
