"""The judge protocol: a task and its trajectory in, a score out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Protocol

from pydantic import Field

from ludus.core.errors import ConfigError, Unscorable, described
from ludus.core.types import Message, Score, Task, Trajectory
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)


Digits = Annotated[
    int, Field(ge=0, le=15, description="Decimal places in which numbers must agree.")
]
CpuSeconds = Annotated[
    float, Field(gt=0, le=600, description="Seconds of CPU time for one comparison.")
]


class Judge(Protocol):
    """Scores a finished trajectory; `Score.value` becomes its reward.

    A judge that holds something (a sandbox) has an `async close()` too, called when the run ends.
    One that needs a server (a sandbox) has an `async check()`, called at the start, which raises
    ToolError or ConfigError where the server does not answer.
    One whose signature has `limits` receives the run's rate limits, for `Endpoint(limits=...)`; one
    with `make_player` receives a function that opens another model, to play tasks with it.
    One that compares the trajectories of a training step has `async score_groups(groups, step)`,
    which is asked after all of them are played, and returns the groups with their final scores; it
    can only be the run's judge.

    Errors: Unscorable if there is no score to give (a score of 0 is a score).
    """

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score: ...


async def check_all(judges: Iterable[Judge]) -> None:
    """Check the servers that judges need. Errors: ToolError, ConfigError."""
    for judge in judges:
        if (check := getattr(judge, "check", None)) is not None:
            await check()


def refuse_of_steps(judge: Judge, place: str) -> None:
    """Refuse a judge that scores the groups of a step together, where it would have to score an
    episode alone. Errors: ConfigError."""
    if hasattr(judge, "score_groups"):
        raise ConfigError(
            f"{place}: this judge scores the episodes of a step together: it can only be the "
            "run's `judge`"
        )


async def close_all(judges: Iterable[Judge]) -> None:
    """Close the judges that hold something; a failure is logged, and hides no other error."""
    for judge in judges:
        if (close := getattr(judge, "close", None)) is not None:
            try:
                await close()
            except Exception as error:
                name, told = type(judge).__qualname__, described(error)
                log.warning("a judge could not release what it holds", judge=name, error=told)


def final_answer(trajectory: Trajectory) -> Message:
    """The assistant's last message on the trajectory's last branch. Errors: Unscorable: none."""
    for index in reversed(trajectory.path()):
        message = trajectory.segments[index].message
        if message is not None and message.role == "assistant":
            return message
    raise Unscorable(f"trajectory {trajectory.id} has no assistant message to judge")


def accepted_answers(task: Task) -> list[str]:
    """The task's answers as texts. Errors: Unscorable: none, or no texts and finite numbers."""
    answers: list[Any] = task.answer if isinstance(task.answer, list) else [task.answer]
    texts = [
        str(answer)
        for answer in answers
        if isinstance(answer, str | int) or (isinstance(answer, float) and math.isfinite(answer))
    ]
    if not texts or len(texts) < len(answers) or not all(text.strip() for text in texts):
        what = "no answer" if task.answer is None else f"the answer {task.answer!r:.80}"
        raise Unscorable(
            f"task {task.id} has {what}; its judge compares with an answer that is a text, a "
            "number or a list of these"
        )
    return texts


def last_tagged(text: str, markers: tuple[str, str] = ("<answer>", "</answer>")) -> str | None:
    """The text between the last two markers; None: there are none, or nothing between them."""
    opening, closing = markers
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(end, 0))
    return text[start + len(opening) : end].strip() or None if 0 <= start < end else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, inner braces included; None: no such box."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, first = 1, start + len("\\boxed{")
    for index in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[first:index].strip() or None
    return None
