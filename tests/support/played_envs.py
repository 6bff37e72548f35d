"""Environments for rollout tests: one that works, and the same with faults on request."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from bdb import BdbQuit
from collections import Counter
from typing import Any

from ludus.core.errors import EnvError, ToolError
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.base import Env

COLOURS = ("red", "green", "blue", "grey")
SAY = ToolSpec(
    name="say",
    description="Say a colour.",
    parameters={
        "type": "object",
        "properties": {"word": {"type": "string"}},
        "required": ["word"],
        "additionalProperties": False,
    },
)

RELEASE = threading.Event()
"""Set when a test is over, when the next gets another: what hangs ends then, and burns no core."""

CLOSED: list[str] = []
ATTEMPTS: Counter[str] = Counter()
THREADS: set[str] = set()


def user(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def task_of(seed: int, **data: Any) -> Task:
    return Task(id=f"say/{seed}", data={"seed": seed, **data})


class Say(Env):
    """Three times: say the colour that is asked for. Each one right earns 1."""

    score_range = (0.0, 3.0)
    success_at = 3.0
    max_turns = 5

    def __init__(self, length: int = 3) -> None:
        self.length = length

    async def reset(self, task: Task) -> Observation:
        self.task = task
        rng = random.Random(task.data["seed"])
        self.wanted = [rng.choice(COLOURS) for _ in range(self.length)]
        self.turn = 0
        return Observation(messages=user(f"say {self.wanted[0]} ."))

    async def step(self, action: Message) -> StepResult:
        hit = action.content == self.wanted[self.turn]
        if action.content not in COLOURS:
            return StepResult(messages=user("that is no colour ."), reward=0.0)
        self.turn += 1
        done = self.turn == self.length
        reply = "done ." if done else f"say {self.wanted[self.turn]} ."
        return StepResult(messages=user(reply), reward=float(hit), terminated=done)

    async def close(self) -> None:
        CLOSED.append(self.task.id)

    def tools(self) -> list[ToolSpec]:
        return [SAY]

    def text_of(self, call: ToolCall) -> str:
        if call.arguments["word"] == "grey":
            raise ValueError("grey is not for calling .")
        return str(call.arguments["word"])

    def call_of(self, action: str) -> ToolCall:
        return ToolCall(name="say", arguments={"word": action})

    def expert_action(self) -> str:
        return self.wanted[self.turn]


class Faulty(Say):
    """Say, with the faults and delays that its task's data asks for."""

    async def reset(self, task: Task) -> Observation:
        observation = await super().reset(task)
        ATTEMPTS[task.id] += 1
        THREADS.add(threading.current_thread().name)
        await self._delay()
        found = await self._fault("reset")
        return observation if found is None else found  # type: ignore[no-any-return]

    async def step(self, action: Message) -> StepResult:
        THREADS.add(threading.current_thread().name)
        await self._delay()
        found = await self._fault("step")
        return await super().step(action) if found is None else found  # type: ignore[no-any-return]

    async def _delay(self) -> None:
        if delays := self.task.data.get("delays"):
            time.sleep(delays[self.turn % len(delays)])

    async def _fault(self, where: str) -> Any:
        data = self.task.data
        if data.get("where", "step") != where or data.get("turn", 0) != self.turn:
            return None
        if ATTEMPTS[self.task.id] > data.get("failures", 10**9):
            return None
        return await FAULTS[data.get("fault", "none")]()


class Awaiting(Faulty):
    """The same, in the event loop of the rollouts."""

    blocking = False


class Unmakeable(Say):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class Capricious(EnvError):
    """An environment's own error class."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def _raise(error: BaseException) -> Any:
    raise error


async def _none() -> Any:
    return None


async def _busy() -> Any:
    release = RELEASE
    while not release.is_set():
        pass


async def _sleeps() -> Any:
    release = RELEASE
    while not release.is_set():
        time.sleep(0.005)


async def _for_ever() -> Any:
    release = RELEASE
    while not release.is_set():
        await asyncio.sleep(0.005)


async def _give(value: Any) -> Any:
    return value


async def _cancel_itself() -> Any:
    raise asyncio.CancelledError


FAULTS: dict[str, Any] = {
    "none": _none,
    "raise": lambda: _raise(RuntimeError("the disk is full of eels")),
    "timeout of its own": lambda: _raise(TimeoutError("the database is slow")),
    "own error": lambda: _raise(Capricious("not today")),
    "tool": lambda: _raise(ToolError("the compiler broke")),
    "stop iteration": lambda: _raise(StopIteration()),
    "exit": lambda: _raise(SystemExit(3)),
    "cancel": _cancel_itself,
    "quit": lambda: _raise(BdbQuit()),
    "busy": _busy,
    "sleep": _sleeps,
    "await": _for_ever,
    "text": lambda: _give("right"),
    "a task": lambda: _give(Task(id="x")),
    "nan": lambda: _give(StepResult(messages=user("x"), reward=float("nan"))),
    "infinite": lambda: _give(StepResult(messages=user("x"), reward=-float("inf"))),
    "huge": lambda: _give(StepResult.model_construct(messages=user("x"), reward=10**400)),
    "unspeakable": lambda: _raise(Unspeakable()),
    "endless text": lambda: _give(StepResult(messages=user("x" * 10_000_001), reward=0.0)),
    "reward text": lambda: _give(StepResult.model_construct(messages=user("x"), reward="high")),
    "no list": lambda: _give(StepResult.model_construct(messages=None)),
    "texts": lambda: _give(StepResult.model_construct(messages=["x"])),
    "number": lambda: _give(
        StepResult.model_construct(messages=[Message.model_construct(role="user", content=3)])
    ),
    "silence": lambda: _give(Observation(messages=[])),
    "long": lambda: _give(StepResult(messages=user("say red . " * 400), reward=0.5)),
    "wait": lambda: _give(StepResult(messages=[], reward=None)),
    "never scored": lambda: _give(StepResult(messages=user("done ."), terminated=True)),
}


class Cut(Env):
    """An environment that never speaks of a reward."""

    max_turns = 2

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=user("say red ."))

    async def step(self, action: Message) -> StepResult:
        return StepResult(messages=user("say red ."))


class Shouts(Say):
    """Answers every action with the very same Message object."""

    ANSWER = Message(role="user", content="that is no colour .")

    async def step(self, action: Message) -> StepResult:
        return StepResult(messages=[self.ANSWER], reward=0.0)


class Spoils(Say):
    """Changes the task that it is given."""

    async def reset(self, task: Task) -> Observation:
        observation = await super().reset(task)
        task.data.clear()
        return observation


class BrokenCalls(Say):
    def text_of(self, call: ToolCall) -> str:
        raise ZeroDivisionError("calls are broken")


class Scores(Say):
    """Gives the scores, or raises the error, of its task's data; a turn limit that is no number."""

    def scores(self) -> Any:
        given = self.task.data["scores"]
        return 1 / 0 if given == "raise" else given


class EndlessTurns(Say):
    max_turns: Any = "3"


class Sums(Say):
    """Finite rewards with an infinite sum."""

    async def step(self, action: Message) -> StepResult:
        self.turn += 1
        return StepResult(messages=user("x"), reward=1e308, terminated=self.turn == 3)
