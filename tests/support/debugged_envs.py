"""Environments to be looked at with the debug back end."""

from __future__ import annotations

import threading
from bdb import BdbQuit
from typing import ClassVar

from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.base import Env


class Count(Env):
    """Say the number that comes next, twice."""

    max_turns = 3

    async def reset(self, task: Task) -> Observation:
        self.number, self.turns = task.data["seed"], 0
        return self.says(f"count : {self.number}")

    async def step(self, action: Message) -> StepResult:
        self.turns += 1
        hit = action.content == str(self.number + 1)
        self.number += 1
        observation = self.says(f"count : {self.number}")
        done = self.turns == 2
        return StepResult(messages=observation.messages, reward=hit / 2, terminated=done)

    def says(self, text: str) -> Observation:
        return Observation(messages=[Message(role="user", content=text)])

    def expert_action(self) -> str:
        return str(self.number + 1)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"count/{seed}", data={"seed": seed})


class Threads(Count):
    def says(self, text: str) -> Observation:
        return super().says(f"called in {threading.current_thread().name}")


class Broken(Count):
    """Works for the expert, who plays each task once; then no more."""

    seen: ClassVar[set[str]] = set()

    async def reset(self, task: Task) -> Observation:
        if task.id in self.seen:
            task.data["seed"] //= 0
        self.seen.add(task.id)
        return await super().reset(task)


class Quits(Count):
    async def step(self, action: Message) -> StepResult:
        raise BdbQuit  # as the debugger does


class Stops(Count):
    async def step(self, action: Message) -> StepResult:
        if self.turns == 0:
            breakpoint()
        return await super().step(action)
