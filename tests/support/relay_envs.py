"""An environment of two roles that take turns: one turn of `first`, two of `second`."""

from __future__ import annotations

from typing import Any, ClassVar

from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.base import Env

REWARDS = (0.5, 0.25, 1.0)


def user(text: str) -> Message:
    return Message(role="user", content=text)


class Duet(Env):
    """`Task.data` may have `nameless` or `silent`: faults of the environment."""

    blocking: ClassVar[bool] = False
    score_range: ClassVar[tuple[float, float]] = (0.0, 2.0)
    heard: ClassVar[list[str]] = []

    async def reset(self, task: Task) -> Observation:
        self.task, self.turn = task, 0
        info = {} if task.data.get("nameless") else {"role": "first"}
        return Observation(messages=[user("say red .")], info=info)

    async def step(self, action: Message) -> StepResult:
        self.heard.append(action.content)
        self.turn += 1
        info: dict[str, Any] = {"role": "second", "success": self.turn > 1}
        info |= {"scores": {"turns": float(self.turn)}, "explanation": f"after {self.turn}"}
        if self.turn == 1 and not self.task.data.get("silent"):
            talk = (("user", "say red ."), ("assistant", "red"), ("user", "better ."))
            info["conversation"] = [{"role": role, "content": text} for role, text in talk]
        reward, done = REWARDS[self.turn - 1], self.turn == len(REWARDS)
        return StepResult(messages=[user("again .")], reward=reward, terminated=done, info=info)

    def explanation(self) -> str:
        return f"it took {self.turn} turns"
