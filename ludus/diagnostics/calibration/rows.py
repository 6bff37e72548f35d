"""Faults of a data set's rows: those that are refused, and those that are told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ludus.core.errors import DataError, Unscorable, counted
from ludus.core.types import Task
from ludus.judges.base import accepted_answers
from ludus.tasks.readers import BadLine, TaskList
from ludus.tasks.splits import task_key

NUM_SHOWN = 5
"""Rows that an error names."""


def check_answers(given: str, tasks: Sequence[Task], rows: Rows | None = None) -> None:
    """Errors: DataError for rows that nothing can score."""
    if unscored := unscorable(tasks):
        raise DataError(
            f"{given}: {len(unscored)} of {counted(len(tasks), 'row')} cannot be scored, the "
            f"first: {unscored[0][1]}: {_remedy([task for task, _ in unscored], rows)}"
        )


def check_different(given: str, tasks: Sequence[Task], rows: Rows) -> None:
    """Errors: DataError for rows that repeat, or that are too few."""
    repeats = repeated(tasks)
    if len(tasks) - len(repeats) < 2:
        raise DataError(
            f"{given}: {counted(len(tasks), 'row')} with one question: a run needs at least one "
            "to train on and another to hold out"
            if tasks
            else f"{given}: no row can be scored"
        )
    if repeats:
        raise DataError(
            f"{given}: {len(repeats)} of {len(tasks)} rows repeat{'s' * (len(repeats) == 1)} an "
            "earlier one, so held-out rows may be training rows: "
            f"{_remedy([task for task, _ in repeats], rows)}"
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """The places of rows, and the command that leaves bad ones out.

    Args:
        numbers: of the rows, by the task's id.
        skip: the command that leaves bad rows out.
    """

    numbers: Mapping[str, int]
    skip: str


def unscorable(tasks: Sequence[Task]) -> list[tuple[Task, str]]:
    """The rows that nothing can score, each with the reason."""
    found = []
    for task in tasks:
        try:
            accepted_answers(task)
        except Unscorable as error:
            found.append((task, str(error)))
    return found


def repeated(tasks: Sequence[Task]) -> list[tuple[Task, str]]:
    """The rows that repeat an earlier one, each with the reason."""
    first: dict[str, Task] = {}
    found = []
    for task in tasks:
        if (earlier := first.setdefault(task_key(task), task)) is not task:
            found.append((task, f"repeats {earlier.id}"))
    return found


def of_rows(
    given: str, tasks: TaskList, left_out: Mapping[str, Sequence[BadLine]]
) -> Iterator[str]:
    """Yields what is wrong with rows that are not refused. `left_out`: by the kind of row."""
    if every := [bad for some in left_out.values() for bad in some]:
        earliest = min(every, key=attrgetter("number"))
        told = [counted(len(some), f"{kind} row") for kind, some in left_out.items() if some]
        yield (
            f"{given}: {', '.join(told)} left out, the first: line {earliest.number} "
            f"{earliest.reason}"
        )
    if torn := _contradicting(tasks):
        first, *others = torn[0]
        prompt = " ".join(first.prompt[-1].content.split())
        other = next(task for task in others if _answers(task) != _answers(first))
        yield (
            f"{given}: {counted(len(torn), 'question')} {'has' if len(torn) == 1 else 'have'} "
            f"different answers in {sum(map(len, torn)):,} rows, and nothing can learn both: "
            f"{prompt!r:.80} has {first.answer!r:.40} in line {tasks.rows[first.id]} and "
            f"{other.answer!r:.40} in line {tasks.rows[other.id]}; keep one of them"
        )


def _contradicting(tasks: Sequence[Task]) -> list[list[Task]]:
    """Rows with the same question, of which no answer is right for all."""
    asked: dict[str, list[Task]] = {}
    for task in tasks:
        if task.env is None and task.answer is not None:
            asked.setdefault(task_key(task.model_copy(update={"answer": None})), []).append(task)
    found = [(group, {_answers(task) for task in group}) for group in asked.values()]
    return [group for group, sets in found if len(sets) > 1 and not frozenset.intersection(*sets)]


def _remedy(bad: Sequence[Task], rows: Rows | None) -> str:
    """Names the rows to remove, or the command that leaves them out."""
    them = "it" if len(bad) == 1 else "them"
    if rows is None:
        return f"remove {them}"
    numbers = [str(rows.numbers[task.id]) for task in bad]
    more = f" and {len(numbers) - NUM_SHOWN} more" if len(numbers) > NUM_SHOWN else ""
    where = f"line{'s' * (len(numbers) > 1)} {', '.join(numbers[:NUM_SHOWN])}{more}"
    return f"remove {them} ({where}), or leave {them} out with `{rows.skip}`"


def _answers(task: Task) -> frozenset[str]:
    """The answers of a row, as texts without white space around them."""
    answers = task.answer if isinstance(task.answer, list) else [task.answer]
    return frozenset(str(answer).strip() for answer in answers)
