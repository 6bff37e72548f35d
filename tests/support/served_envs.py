"""An environment that does what it is told: for tests of services."""

from __future__ import annotations

import asyncio
import atexit
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from ludus.core.errors import EnvError, ToolError
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.base import Env

ACT = ToolSpec(
    name="act",
    parameters={"type": "object", "properties": {"action": {"type": "string"}}},
)


class Obeys(Env):
    """Each action is an order: `hang`, `raise`, `exit`, `sleep 0.2`, `win`; others are echoed."""

    async def reset(self, task: Task) -> Observation:
        if task.data.get("fail"):
            raise EnvError("this task cannot be played")
        if task.data.get("crash"):
            raise RuntimeError("a broken reset")
        self.seed = task.data.get("seed", 0)
        return Observation(messages=[Message(role="user", content=f"order {self.seed}")])

    async def step(self, action: Message) -> StepResult:
        text = self.text_of(action.tool_calls[0]) if action.tool_calls else action.content
        order, _, rest = text.partition(" ")
        if order == "hang":
            while True:
                time.sleep(0.01)
        if order == "await":
            await asyncio.sleep(3600)
        if order == "raise":
            raise RuntimeError("out of order")
        if order == "tool":
            raise ToolError("the tool broke")
        if order == "exit":
            os._exit(9)
        if order == "sleep":
            time.sleep(float(rest))
        if order == "print":
            print("hello from the environment")
        reply = str(os.getpid()) if order == "pid" else f"you said {text[:100]}"
        if order == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            reply = str(child.pid)
        if order == "much":
            reply = "x" * 100_000
        won = order == "win"
        return StepResult(
            messages=[Message(role="user", content=reply)], reward=float(won), terminated=won
        )

    def tools(self) -> list[ToolSpec]:
        return [ACT]

    def text_of(self, call: ToolCall) -> str:
        if "action" not in call.arguments:
            raise ValueError("the argument action is missing")
        return str(call.arguments["action"])

    def call_of(self, action: str) -> ToolCall:
        return ToolCall(name="act", arguments={"action": action})

    def expert_action(self) -> str:
        return "win"

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"obeys/{seed}", data={"seed": seed})


class ObeysLightly(Obeys):
    """The same, and says that it does not block."""

    blocking = False


class Ponders(Obeys):
    """Its expert takes as many seconds as the episode's seed."""

    def expert_action(self) -> str:
        time.sleep(self.seed)
        return "win"


class Pays(Obeys):
    """Takes any six actions, 0.15 s each, and pays 1 for them."""

    async def reset(self, task: Task) -> Observation:
        self.left = 6
        return await super().reset(task)

    async def step(self, action: Message) -> StepResult:
        time.sleep(0.15)
        self.left -= 1
        return StepResult(
            messages=[Message(role="user", content="go on")],
            reward=float(not self.left),
            terminated=not self.left,
        )


class Engine(Obeys):
    """Says in its opening who has prepared it."""

    prepared: ClassVar[dict[int, str]] = {}
    """The task of the first preparation, by process."""

    async def prepare(self, task: Task) -> None:
        self.prepared.setdefault(os.getpid(), task.id)
        if left := os.environ.get("TEST_ENGINE_FOLDER"):
            folder = Path(left) / str(os.getpid())
            folder.mkdir()
            atexit.register(folder.rmdir)

    async def reset(self, task: Task) -> Observation:
        said = f"{self.prepared[os.getpid()]} in {os.getpid()}"
        return Observation(messages=[Message(role="user", content=said)])

    @classmethod
    def tiers(cls) -> tuple[str, ...]:
        return ("easy",)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"{tier}-{seed}", tier=tier, data={"seed": seed})


class Deadly(Obeys):
    """Its reset ends the process."""

    async def reset(self, task: Task) -> Observation:
        os._exit(9)
