"""Difference of two plays of a task by the expert, in words."""

from __future__ import annotations

from ludus.data.expert import Demonstration
from ludus.pipeline.preflight.episodes import Sample
from ludus.pipeline.preflight.limits import Findings


def difference(first: Demonstration, again: Demonstration) -> str:
    """The first difference of two episodes of a task, and what to change; empty: none."""
    task, pairs = first.task_id, zip(first.messages, again.messages, strict=False)
    other = next((one for one, two in pairs if one != two), None)
    if other is not None and other.role == "assistant":
        return (
            f"the expert acts differently when task {task} is played again: its choices are "
            "random, or a world that the messages before do not show; derive both from the task"
        )
    if (first.messages, first.reward) == (again.messages, again.reward):
        return ""
    return (
        f"task {task} differs when it is played again: the same task has to give the same "
        "episode, or groups compare luck; derive all randomness from the task"
    )


def judge_again(sample: Sample, found: Findings) -> None:
    """Add a note where a second play of a task differs from the first, or fails."""
    first = {played.task.id: played.demonstration for played in sample.finished}
    for again in sample.again:
        before = first[again.task.id]
        if again.overdue or before is None:
            continue
        if again.demonstration is None:
            text = f"task {again.task.id} fails when it is played again: {again.error}"
        else:
            text = difference(before, again.demonstration)
        if text:
            found.notes.append(f"env: {text} (`ludus check-env` tells more)")
            return
