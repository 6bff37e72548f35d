"""The problems of an iteration: each proposal with its votes, its answers and its fate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.coevolve.storage import Row, Storage, read_rows
from ludus.core.types import Status

KEPT = "kept"


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
    answered = {row["question"]: row for row in _rows(storage, iteration, "answers")}
    fates = {str(row["id"]): str(row["reason"]) for row in _rows(storage, iteration, "rejected")}
    fates |= {str(row["id"]): KEPT for row in _rows(storage, iteration, "problems")}
    found, seen = [], set[str]()
    for number, row in enumerate(_rows(storage, iteration, "proposals"), start=1):
        question = row["question"]
        vote = answered.get(question) if question is not None else None
        fate, repeats = fates.get(str(row["id"]), ""), question in seen
        found.append(_problem(number, row, vote, fate, repeats))
        if question is not None:
            seen.add(question)
    return found


def _rows(storage: Storage, iteration: int, name: str) -> list[Row]:
    folder = storage.temporary if name == "answers" else storage.questions
    path = folder(iteration, name)
    return read_rows(path) if path.is_file() else []


def _problem(number: int, row: Row, vote: Row | None, fate: str, repeats: bool) -> Problem:
    vote = vote or {}
    p = vote.get("consistency")
    return Problem(
        number=number,
        id=str(row["id"]),
        text=row["text"],
        question=row["question"],
        claimed=row["claimed"],
        p=p,
        answer=vote.get("answer"),
        agrees=vote.get("agrees") if not repeats else None,
        tie=bool(vote.get("tie")),
        counts=[(str(text), int(count)) for text, count in vote.get("counts", ())],
        mean_tool_calls=vote.get("mean_tool_calls"),
        answers=[] if repeats else _answers(vote),
        fate=fate,
        remark=str((row["reason"] if row["question"] is None else vote.get("reason")) or ""),
        repeats=repeats,
    )


def _answers(vote: Row) -> list[Answer]:
    """`classes` has an entry for each episode that counts."""
    if not vote:
        return []
    classes = iter(vote.get("classes", ()))
    rows = zip(vote["statuses"], vote["tool_calls"], vote["texts"], strict=True)
    return [
        Answer(status, calls, text, next(classes, None) if Status(status).trainable else None)
        for status, calls, text in rows
    ]
