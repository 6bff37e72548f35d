"""Programs: write a small Python function that does what a sentence says.

    user        write f : add 4 , then multiply by 3 .
    assistant   ```python
                def f(x):
                    x = x + 4
                    x = x * 3
                    return x
                ```

A task carries tests (assertions, in MBPP's form) for the judge `code`, which accepts any program
that passes them. The environment itself runs nothing: it rewards its reference program alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from ludus.core.errors import EnvError
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.base import Env, NoExpert

OPERATIONS = {"add": "+", "subtract": "-", "multiply by": "*"}
NUMBERS = range(2, 10)
INPUTS = (0, 1, 7, 100)
"""Arguments of the tests. Sequences of up to three operations that differ in effect differ here."""


class Programs(Env):
    """A function of one number: one to three operations, the tier `steps-N`.

    A task's data is `{"steps": [["add", 4], ...], "test_list": ["assert f(0) == 4", ...]}`.
    """

    blocking: ClassVar[bool] = False
    cheap_reset: ClassVar[bool] = True
    max_turns: ClassVar[int] = 1

    def __init__(self) -> None:
        self._program: str | None = None

    async def reset(self, task: Task) -> Observation:
        steps = _steps_of(task)
        self._program = program(steps)
        text = " , then ".join(f"{verb} {number}" for verb, number in steps)
        return Observation(messages=[Message(role="user", content=f"write f : {text} .")])

    async def step(self, action: Message) -> StepResult:
        if self._program is None:
            raise EnvError("programs: the episode is over, or was never reset; call reset first")
        hit = action.content.strip() == self._program
        self._program = None
        reply = "this is the reference program." if hit else "this is not the reference program."
        return StepResult(
            messages=[Message(role="user", content=reply)], reward=float(hit), terminated=True
        )

    async def close(self) -> None:
        self._program = None

    def expert_action(self) -> str:
        if self._program is None:
            raise NoExpert("programs: no episode is being played")
        return self._program

    @classmethod
    def tiers(cls) -> Sequence[str]:
        return ("steps-1", "steps-2", "steps-3")

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """Operations and numbers are drawn by the seed; without a tier, tiers take turns."""
        tier = tier or cls.tiers()[seed % 3]
        cls.check_tier(tier)
        rng = random.Random(f"programs/{tier}/{seed}")
        verbs = list(OPERATIONS)
        steps = [[rng.choice(verbs), rng.choice(NUMBERS)] for _ in range(int(tier[-1]))]
        tests = [f"assert f({x}) == {_value(steps, x)}" for x in INPUTS]
        data = {"steps": steps, "test_list": ["\n".join(tests)]}
        return Task(id=f"programs/{tier}/{seed}", data=data, tier=tier, source="programs")


def program(steps: Sequence[Sequence[Any]]) -> str:
    """The reference program of a list of operations, as a code block."""
    lines = [f"    x = x {OPERATIONS[verb]} {number}" for verb, number in steps]
    return "\n".join(["```python", "def f(x):", *lines, "    return x", "```"])


def _value(steps: Sequence[Sequence[Any]], x: int) -> int:
    for verb, number in steps:
        x = {"+": x + number, "-": x - number, "*": x * number}[OPERATIONS[verb]]
    return x


def _steps_of(task: Task) -> list[tuple[str, int]]:
    """Errors: EnvError where the task's data is of another form."""
    steps = task.data.get("steps")
    known = isinstance(steps, list) and all(
        isinstance(step, list | tuple)
        and len(step) == 2
        and step[0] in OPERATIONS
        and type(step[1]) is int
        for step in steps
    )
    if not steps or not known:
        raise EnvError(
            f"programs: task {task.id!r}: data.steps is {steps!r:.80}; it has to be a list such as "
            f"[['add', 4]] of {', '.join(OPERATIONS)}"
        )
    return [(verb, number) for verb, number in steps]
