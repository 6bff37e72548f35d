"""Validity of a task: whether its judge can tell its answer from another."""

from __future__ import annotations

from ludus.core.errors import Unscorable, described
from ludus.core.types import NO_ENV, Message, Segment, Task, Trajectory
from ludus.judges.base import Judge

FORMS = ("\\boxed{{{}}}", "<answer>{}</answer>", "{}")
"""Forms in which a judge may expect the answer; it has to accept one of them."""

WRONG = "I do not know."
"""An answer that no task has."""


async def fault_of(judge: Judge, task: Task) -> str | None:
    """The judge's fault with a task; None where it accepts the task's answer, and only that."""
    problem = ""
    for form in FORMS:
        try:
            if await solved(judge, task, form.format(task.answer)):
                break
        except Unscorable as error:
            problem = problem or str(error)
    else:
        if problem:
            return f"the judge cannot score the answer: {problem}"
        return "the judge refuses the answer"
    try:
        return "the judge accepts any answer" if await solved(judge, task, WRONG) else None
    except Unscorable:
        return None  # it does not take such a text for an answer


async def solved(judge: Judge, task: Task, text: str) -> bool:
    """True if the judge takes a text for right. Errors: Unscorable."""
    try:
        score = await judge(task, _said(task, text))
    except Unscorable:
        raise
    except Exception as error:
        raise Unscorable(f"the judge raised {described(error)}") from error
    return score.succeeded


def task_of(id: str, question: str, answer: str) -> Task:
    """The task of a question."""
    prompt = [Message(role="user", content=question)]
    return Task(id=id, prompt=prompt, answer=answer, env=NO_ENV, source="augmentation")


def _said(task: Task, text: str) -> Trajectory:
    """An episode in which the assistant said a text."""
    trajectory = Trajectory(id=task.id, group_id=task.id, task_id=task.id)
    trajectory.segments = [Segment(-1, [0], message=message) for message in task.prompt[:1]]
    answer = Message(role="assistant", content=text)
    trajectory.segments.append(Segment(0, [0], [0.0], message=answer))
    return trajectory
