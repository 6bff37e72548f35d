"""Environments and judges for the preflight: each has one fault by its arguments."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any, ClassVar

from ludus.core.errors import EnvError, Unscorable
from ludus.core.types import Message, Observation, Score, StepResult, Task, Trajectory
from ludus.envs.base import Env, NoExpert


def user(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


class Count(Env):
    """Count to `turns`, one number a turn; a tier `long` counts to 9. Only the end is rewarded."""

    cheap_reset = True
    played = 0
    """Episodes of this process."""
    resets: ClassVar[Counter[str]] = Counter()
    """Resets of each task, by what is drawn."""

    def __init__(
        self,
        turns: int = 3,
        reward: float = 1.0,
        anyway: bool = False,
        step_s: float = 0.0,
        expert: bool = True,
        action: str = "",
        opening: str = "count",
        strict: bool = False,
        drawn: str = "",
        shut: str = "",
        stuck: str = "",
    ) -> None:
        self._needed, self._reward, self._anyway, self._step_s = turns, reward, anyway, step_s
        self._expert, self._action, self._opening, self._strict = expert, action, opening, strict
        self._drawn, self._shut, self._stuck = drawn, shut, stuck
        self._at: int | None = None

    async def reset(self, task: Task) -> Observation:
        Count.played += 1
        if task.tier == self._shut:
            raise KeyError("lever")
        self._tier = task.tier
        self._at, self._turns = 0, 9 if task.tier == "long" else self._needed
        self._before = Count.resets[self._drawn + task.id]
        Count.resets[self._drawn + task.id] += 1
        if self._drawn == "fails" and self._before:
            raise EnvError("the world is gone")
        drawn = f" {Count.played}" if self._drawn == "opening" else ""
        return Observation(messages=user(f"{self._opening} {task.data['seed']}{drawn}"))

    async def step(self, action: Message) -> StepResult:
        if self._at is None:
            raise EnvError("call reset first")
        if self._tier == self._stuck:
            raise KeyError("hinge")
        if self._strict and action.content.startswith("look"):
            raise ValueError("no command")
        await asyncio.sleep(self._step_s)
        self._at += 1
        right = action.content == self._action + str(self._at)
        ended = self._at == self._turns
        if ended:
            self._at = None
        reward = self._reward if ended and (right or self._anyway) else 0.0
        reward /= 1 + self._before if self._drawn == "reward" else 1
        return StepResult(messages=user("next"), reward=reward, terminated=ended)

    async def close(self) -> None:
        self._at = None

    def expert_action(self) -> str:
        if not self._expert:
            raise NoExpert("nobody can count")
        assert self._at is not None
        drawn = f" {Count.played}" if self._drawn == "expert" else ""
        return self._action + str(self._at + 1) + drawn

    @classmethod
    def tiers(cls) -> list[str]:
        return ["short", "long"]

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"count/{tier}/{seed}", tier=tier, data={"seed": seed})


class Judge:
    """Judges with a fault."""

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    async def __call__(self, task: Task, trajectory: Trajectory) -> Any:
        match self._fault:
            case "raises":
                raise KeyError("verdict")
            case "nan":
                return Score(value=math.nan)
            case "none":
                return None
            case "some":
                if task.id.endswith(":1"):
                    raise Unscorable("no rubric")
            case "hangs":
                await asyncio.sleep(1000)
            case "constant":
                return Score(value=0.5)
        return Score(value=float(len(trajectory.segments[-1].message.content)))  # type: ignore[union-attr]


class SyncJudge:
    """A judge whose `__call__` is not async."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        return Score(value=1.0)
