"""Environments with one fault each, for the checker and the demonstrations to find."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from typing import Any

from ludus.core.errors import EnvError
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.base import Env, NoExpert

MORTAL = """
import multiprocessing, os, signal
if multiprocessing.parent_process() is not None:
    os.kill(os.getpid(), signal.SIGKILL)
from faulty_envs import Digit
"""
"""Source of a module whose import kills a child process, as the system does for its memory."""


def user(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


class Digit(Env):
    """Guess a digit: without fault. The other classes are this one with one thing changed."""

    secret: int | None = None
    blocking = False

    async def reset(self, task: Task) -> Observation:
        self.secret, self.tries = task.data["seed"] % 10, 0
        return Observation(messages=user("guess a digit"))

    async def step(self, action: Message) -> StepResult:
        if self.secret is None:
            raise EnvError("call reset first")
        self.tries += 1
        hit = action.content == str(self.secret)
        reply = user("right" if hit else "wrong")
        if hit:
            self.secret = None
        return StepResult(messages=reply, reward=float(hit), terminated=hit)

    async def close(self) -> None:
        self.secret = None

    def expert_action(self) -> str:
        return str(self.secret) if self.tries else "0"

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"digit/{seed}", data={"seed": seed})


class ShowsSteps(Digit):
    """Without fault: the expert writes the number of its try on a line before its guess."""

    async def step(self, action: Message) -> StepResult:
        guess = action.content.rpartition("\n")[2]
        return await super().step(Message(role="assistant", content=guess))

    def expert_steps(self) -> str | None:
        return f"try {self.tries + 1}" if self.tries else None


class Praises(Digit):
    async def step(self, action: Message) -> StepResult:
        return StepResult(messages=user("well done"), reward="good")  # type: ignore[arg-type]


class Blocking(Digit):
    """Without fault, but with a worker thread for its steps of microseconds."""

    blocking = True


class Hangs(Digit):
    blocking = True

    async def step(self, action: Message) -> StepResult:
        while True:
            time.sleep(0.01)


class RaisesOnRubbish(Digit):
    async def step(self, action: Message) -> StepResult:
        int(action.content)
        return await super().step(action)


class ReturnsRubbish(Digit):
    async def step(self, action: Message) -> Any:
        return "wrong"


class NoSuchLevel(Digit):
    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        raise KeyError("level")


class StepReturnsNone(Digit):
    async def step(self, action: Message) -> Any:
        return None


class ResetReturnsNone(Digit):
    async def reset(self, task: Task) -> Any:
        return None


class RewardIsNan(Digit):
    async def step(self, action: Message) -> StepResult:
        return StepResult(messages=user("right"), reward=float("nan"), terminated=True)


class ActsWithNone(Digit):
    def expert_action(self) -> Any:
        return None


class Exits(Digit):
    async def step(self, action: Message) -> StepResult:
        raise SystemExit(0)


class AnswersAsAssistant(Digit):
    async def reset(self, task: Task) -> Observation:
        await super().reset(task)
        return Observation(messages=[Message(role="assistant", content="guess")])


class Prints(Digit):
    async def step(self, action: Message) -> StepResult:
        print("a step")
        return await super().step(action)


class NotDeterministic(Digit):
    async def reset(self, task: Task) -> Observation:
        await super().reset(task)
        return Observation(messages=user(f"guess a digit {os.urandom(8).hex()}"))


class HashDependent(Digit):
    async def reset(self, task: Task) -> Observation:
        await super().reset(task)
        return Observation(messages=user(f"guess a digit {hash('digit')}"))


class HashDependentExpert(Digit):
    def expert_action(self) -> str:
        return str(self.secret) if self.tries else str(100 + hash("digit"))


class SeedsTheWorld(Digit):
    async def reset(self, task: Task) -> Observation:
        random.seed(task.data["seed"])
        return await super().reset(task)


class Shares(Digit):
    guessed: int = 0

    async def reset(self, task: Task) -> Observation:
        Shares.guessed = 0
        return await super().reset(task)

    async def step(self, action: Message) -> StepResult:
        Shares.guessed += 1
        result = await super().step(action)
        return result.model_copy(update={"messages": user(f"guess {Shares.guessed}")})


class Fickle(Digit):
    """Its expert begins with another wrong guess in each episode."""

    num_episodes = 0

    async def reset(self, task: Task) -> Observation:
        Fickle.num_episodes += 1
        return await super().reset(task)

    def expert_action(self) -> str:
        return str(self.secret) if self.tries else str(100 + Fickle.num_episodes)


class GoesOn(Digit):
    async def step(self, action: Message) -> StepResult:
        return StepResult(messages=user("wrong"), reward=0.0)


class PaysTooMuch(Digit):
    async def step(self, action: Message) -> StepResult:
        result = await super().step(action)
        return result.model_copy(update={"reward": 3.0})


class ClosesOnce(Digit):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class Silent(Digit):
    async def step(self, action: Message) -> StepResult:
        result = await super().step(action)
        return result if result.done else result.model_copy(update={"messages": []})


class Moody(Digit):
    """The fault is the task's: hang, raise, exit, lose, no expert, or none."""

    async def reset(self, task: Task) -> Observation:
        self.fault = task.data.get("fault")
        return await super().reset(task)

    async def step(self, action: Message) -> StepResult:
        while self.fault == "hang":
            pass
        if self.fault == "raise":
            raise RuntimeError("the disk is full of eels")
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "lose":
            return StepResult(messages=user("lost"), reward=0.0, terminated=True)
        return await super().step(action)

    def expert_action(self) -> str:
        if self.fault == "no expert":
            raise NoExpert("nobody knows")
        return super().expert_action()


class Deaf(Digit):
    """Its tasks do not depend on the seed."""

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"digit/{seed}", data={"seed": 4})


class Namesakes(Digit):
    """Its tasks have one id."""

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id="digit", data={"seed": seed})


class RaisesElsewhere(Digit):
    """It raises in a process whose parent is one of Python's own."""

    async def reset(self, task: Task) -> Observation:
        if multiprocessing.parent_process() is not None:
            raise KeyError(task.id)
        return await super().reset(task)


class Levels(Digit):
    """Levels with a fault each: of `task`, of `reset`, of `step`, and an endless step."""

    @classmethod
    def tiers(cls) -> tuple[str, ...]:
        return ("fine", "file", "map", "rules", "moves", "sleeps")

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        if tier == "file":
            raise ValueError("no such file")
        return Task(id=f"{tier}/{seed}", data={"seed": seed}, tier=tier)

    async def reset(self, task: Task) -> Observation:
        if task.tier == "map":
            raise KeyError("map")
        self.tier = task.tier
        return await super().reset(task)

    async def step(self, action: Message) -> StepResult:
        if self.secret is not None and self.tier in ("rules", "moves"):
            raise KeyError("rule")
        if self.secret is not None and self.tier == "sleeps":
            time.sleep(60)
        return await super().step(action)


MORTAL_AT_TIMES = """
import multiprocessing, os, signal
from pathlib import Path
if multiprocessing.parent_process() is not None:
    starts = Path(__file__).with_name("starts")
    with starts.open("a") as file:
        file.write("x")
    if starts.stat().st_size in (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
from faulty_envs import Moody
"""
"""Source of a module whose first and third import kill a child process."""
