"""Your own environment in 60 lines: guess a number by bisection.

    ludus check-env examples/own_environment.py:HigherOrLower

Guide: docs/your-own-environment.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import ClassVar

from ludus import Env, Message, Observation, StepResult, Task
from ludus.core.errors import EnvError

SIZES = {"small": 7, "medium": 31, "large": 127}
"""Highest number by tier: 3, 5 and 7 guesses suffice."""


class HigherOrLower(Env):
    """The agent guesses a hidden number in at most seven turns. Reward 1 for a hit."""

    max_turns: ClassVar[int] = 7
    blocking: ClassVar[bool] = False  # a step takes microseconds: no thread for it
    secret: int | None = None  # None: no open episode

    async def reset(self, task: Task) -> Observation:
        self.low, self.high = 1, SIZES[task.tier or "small"]
        self.secret = Random(task.data["seed"]).randint(self.low, self.high)
        return Observation(messages=[say(f"guess a number from 1 to {self.high} .")])

    async def step(self, action: Message) -> StepResult:
        if self.secret is None:
            raise EnvError("call reset first")
        text = action.content.strip()
        if not re.fullmatch("[0-9]{1,4}", text):  # a mistake of the model: answer it
            return StepResult(messages=[say("answer with a number .")], reward=0.0)
        guess = int(text)
        if guess == self.secret:
            self.secret = None
            return StepResult(messages=[say("right .")], reward=1.0, terminated=True)
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        hint = "higher" if guess < self.secret else "lower"
        return StepResult(messages=[say(f"{hint} .")], reward=0.0)

    def expert_action(self) -> str:
        return str((self.low + self.high) // 2)

    @classmethod
    def tiers(cls) -> Sequence[str]:
        return tuple(SIZES)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        tier = tier or "small"
        return Task(id=f"{tier}-{seed}", data={"seed": seed}, tier=tier, source="higher-or-lower")


def say(text: str) -> Message:
    return Message(role="user", content=text)
