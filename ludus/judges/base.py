"""What a judge is: a task and its trajectory in, a score out."""

from __future__ import annotations

from typing import Protocol

from ludus.core.errors import Unscorable
from ludus.core.types import Message, Score, Task, Trajectory


class Judge(Protocol):
    """Scores a finished trajectory; `Score.value` becomes its reward.

    Errors: Unscorable where no score can be given, which is not the same as a score of 0.
    """

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score: ...


def final_answer(trajectory: Trajectory) -> Message:
    """The last message that the assistant wrote on the trajectory's last branch.

    Errors: Unscorable where it wrote none.
    """
    for index in reversed(trajectory.path()):
        message = trajectory.segments[index].message
        if message is not None and message.role == "assistant":
            return message
    raise Unscorable(f"trajectory {trajectory.id} has no assistant message to judge")
