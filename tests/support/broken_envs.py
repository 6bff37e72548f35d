"""Environments that break in the middle of a run, for some tasks or for all."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.base import Env


class Echo(Env):
    """Say the word. Rewards depend on the answer's length, so that groups have a signal."""

    max_turns: ClassVar[int] = 2

    async def reset(self, task: Task) -> Any:
        self.fault = task.data["fault"]
        if self.fault == "raise":
            raise RuntimeError("the level file is gone")
        if self.fault == "hang":
            time.sleep(60)
        if self.fault == "rubbish":
            return {"messages": ["say it"]}
        text = "say it " * (100 if self.fault == "long" else 1)
        return Observation(messages=[Message(role="user", content=text)])

    async def step(self, action: Message) -> StepResult:
        return StepResult(reward=float(len(action.content) % 3), terminated=True)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        faults = cls.faults()
        return Task(id=f"echo/{seed}", data={"seed": seed, "fault": faults[seed % len(faults)]})

    @classmethod
    def faults(cls) -> list[str]:
        return ["none"]


class Moody(Echo):
    """Every other task breaks, each in its own way."""

    @classmethod
    def faults(cls) -> list[str]:
        return ["none", "raise", "none", "hang", "none", "rubbish", "none", "long"]


class TooLong(Echo):
    @classmethod
    def faults(cls) -> list[str]:
        return ["long"]


class Gone(Echo):
    @classmethod
    def faults(cls) -> list[str]:
        return ["raise"]


class Plain(Echo):
    """Its author forgot `async`."""

    def reset(self, task: Task) -> Observation:  # type: ignore[override]
        return Observation(messages=[Message(role="user", content="say a")])


class PlainStep(Echo):
    def step(self, action: Message) -> StepResult:  # type: ignore[override]
        return StepResult(messages=[], reward=1.0, terminated=True)
