"""An environment whose rewards are not between 0 and 1."""

from __future__ import annotations

from typing import ClassVar

from ludus.core.errors import EnvError
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.base import Env


class Ranged(Env):
    """Four steps up (7.5 each) or down (2.5 each): -10 to 30; from 20 on a success."""

    score_range: ClassVar[tuple[float, float]] = (-10.0, 30.0)
    success_at: ClassVar[float] = 20.0
    max_turns: ClassVar[int] = 4

    def __init__(self) -> None:
        self.data: dict[str, object] | None = None
        self.closed = False

    async def reset(self, task: Task) -> Observation:
        self.data, self._steps, self._height = task.data, 0, 0.0
        opening = f"climb, number {task.data['seed']}: up, down or wait."
        return Observation(messages=[Message(role="user", content=opening)])

    async def step(self, action: Message) -> StepResult:
        if self.data is None or self.closed:
            raise EnvError("call reset first")
        self._steps += 1
        reward = {"up": 7.5, "down": -2.5}.get(action.content.strip())
        self._height += reward or 0.0
        reply = Message(role="user", content=f"step {self._steps}, height {self._height:g}.")
        return StepResult(messages=[reply], reward=reward, terminated=self._steps == 4)

    async def close(self) -> None:
        self.closed = True

    def scores(self) -> dict[str, float]:
        return {"height": self._height}

    def expert_action(self) -> str:
        return "up"

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"ranged/{seed}", data={"seed": seed})
