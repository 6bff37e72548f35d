"""Judges for tests of the evaluation service."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from ludus.core.errors import ToolError
from ludus.core.types import Score, Task, Trajectory
from ludus.judges.base import final_answer


class Raises:
    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        return Score(value=1 / 0)


class LosesItsSandbox:
    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        raise ToolError("the sandbox is lost")


class Leaves:
    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        raise SystemExit(3)


class NotANumber:
    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        return Score(value=float("nan"))


class Waits:
    """Scores after the seconds that the answer says; counts those who wait, and who gave up."""

    waiting: ClassVar[int] = 0
    cancelled: ClassVar[int] = 0

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        Waits.waiting += 1
        try:
            await asyncio.sleep(float(task.answer or 0))
        except asyncio.CancelledError:
            Waits.cancelled += 1
            raise
        finally:
            Waits.waiting -= 1
        return Score(value=1.0, explanation=final_answer(trajectory).content)


class Opens:
    """Counts the judges that are open, by their argument."""

    open: ClassVar[list[int]] = []

    def __init__(self, number: int = 0) -> None:
        self.number = number
        Opens.open.append(number)

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        await asyncio.sleep(float(task.answer or 0))
        return Score(value=float(self.number in Opens.open))

    async def close(self) -> None:
        Opens.open.remove(self.number)
