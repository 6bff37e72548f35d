"""The judge protocol: a task and its trajectory in, a score out."""

from __future__ import annotations

from typing import Protocol

from ludus.core.errors import Unscorable
from ludus.core.types import Message, Score, Task, Trajectory


class Judge(Protocol):
    """Scores a finished trajectory; `Score.value` becomes its reward.

    Errors: Unscorable if there is no score to give (a score of 0 is a score).
    """

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score: ...


def final_answer(trajectory: Trajectory) -> Message:
    """The assistant's last message on the trajectory's last branch. Errors: Unscorable: none."""
    for index in reversed(trajectory.path()):
        message = trajectory.segments[index].message
        if message is not None and message.role == "assistant":
            return message
    raise Unscorable(f"trajectory {trajectory.id} has no assistant message to judge")
