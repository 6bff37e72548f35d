"""Environments that play in several processes, and fail in some of them."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Annotated

from pydantic import Field

from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.base import Env


class Alone(Env):
    """Counts to three. Keeps a list for all episodes, so it cannot play in several processes."""

    async def reset(self, task: Task) -> Observation:
        self.seed, self.turns = int(task.data["seed"]), 0
        return Observation(messages=[Message(role="user", content=f"count from {self.seed}")])

    async def step(self, action: Message) -> StepResult:
        self.turns += 1
        reply = Message(role="user", content=f"turn {self.turns} of {self.seed}")
        reward = float(len(action.content) % 2)
        return StepResult(messages=[reply], reward=reward, terminated=self.turns == 3)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"count/{seed}", data={"seed": seed})


class Count(Alone):
    """`fails` with odd seeds, at the reset: crashes (also with a child that lives) and fails
    elsewhere only outside of the process `owner`."""

    several_processes = True
    score_range = (0.0, 3.0)

    def __init__(
        self,
        fails: Annotated[
            str, Field(description="raise, sleep, crash, orphan, elsewhere or nothing.")
        ] = "",
        owner: Annotated[int, Field(description="A process.")] = 0,
    ) -> None:
        self.fails, self.owner = fails, owner

    async def reset(self, task: Task) -> Observation:
        if task.data["seed"] % 2:
            if self.fails == "raise":
                raise RuntimeError(f"seed {task.data['seed']} is odd")
            if self.fails == "sleep":
                await asyncio.sleep(60)
            if os.getpid() != self.owner:
                if self.fails == "orphan" and os.fork() == 0:
                    time.sleep(90)
                    os._exit(0)
                if self.fails in ("crash", "orphan"):
                    os._exit(3)
                if self.fails == "elsewhere":
                    raise RuntimeError("no such library")
        return await super().reset(task)


class Undecided(Alone):
    """An environment whose processes and turns depend on its arguments."""

    @property
    def several_processes(self) -> bool:  # type: ignore[override]
        return False

    @property
    def max_turns(self) -> int:  # type: ignore[override]
        return 7
