"""Faults of a data set's rows: those that are refused, and those that are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ludus.core.errors import DataError, Unscorable, counted
from ludus.core.types import Task
from ludus.judges.base import accepted_answers
from ludus.tasks.readers import TaskList
from ludus.tasks.splits import task_key


def check_answers(given: str, tasks: Sequence[Task]) -> None:
    """Errors: DataError for rows that nothing can score."""
    unscored = []
    for task in tasks:
        try:
            accepted_answers(task)
        except Unscorable as error:
            unscored.append(str(error))
    if unscored:
        raise DataError(
            f"{given}: {len(unscored)} of {counted(len(tasks), 'row')} cannot be scored, the "
            f"first: {unscored[0]}: remove {_them(len(unscored))}"
        )


def check_different(given: str, tasks: Sequence[Task]) -> None:
    """Errors: DataError for rows that repeat, or that are too few."""
    different = len({task_key(task) for task in tasks})
    if different < 2:
        raise DataError(
            f"{given}: {counted(len(tasks), 'row')} with one question: a run needs at least one "
            "to train on and another to hold out"
        )
    if repeated := len(tasks) - different:
        raise DataError(
            f"{given}: {repeated} of {len(tasks)} rows repeat{'s' if repeated == 1 else ''} an "
            f"earlier one, so held-out rows may be training rows: remove {_them(repeated)}"
        )


def of_rows(given: str, tasks: TaskList) -> Iterator[str]:
    """Yields what is wrong with rows that are not refused."""
    if tasks.skipped:
        yield (
            f"{given}: {counted(len(tasks.skipped), 'malformed row')} left out, the first: line "
            f"{tasks.skipped[0].number} {tasks.skipped[0].reason}"
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


def _them(number: int) -> str:
    return "it" if number == 1 else "them"


def _answers(task: Task) -> frozenset[str]:
    """The answers of a row, as texts without white space around them."""
    answers = task.answer if isinstance(task.answer, list) else [task.answer]
    return frozenset(str(answer).strip() for answer in answers)
