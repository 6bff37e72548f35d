r"""Proposals: write a problem of arithmetic or small algebra, and its answer.

    user        propose a problem .
    assistant   <question> what is 12 + 7 ? </question> \boxed{19}

The questions are those of the environment `problems`, whose tiers the expert draws, mostly easy
ones. A curriculum agent starts from them; its rewards come from the answers of an executor.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import ClassVar

from ludus.core.errors import EnvError
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.base import Env, NoExpert
from ludus.envs.synthetic.problems import TIERS, true_answer
from ludus.judges.answer import parse_number

PROMPT = "propose a problem ."
WEIGHTS = {
    "sum": 30,
    "product": 18,
    "brackets": 15,
    "equation": 15,
    "long": 8,
    "steps-2": 9,
    "steps-3": 4,
    "steps-4": 1,
}
"""Shares of the expert's proposals, in percent."""

_FORM = re.compile(r"\s*<question>([^<>]{1,400})</question>\s*\\boxed\{([^{}]{1,40})\}\s*")


class Proposals(Env):
    """A problem in the right form: reward 1 if the question has the answer in the box.

    A task's data is `{"question": ...}`, the question that the expert proposes. The model is not
    told of it: all tasks open alike.
    """

    blocking: ClassVar[bool] = False
    cheap_reset: ClassVar[bool] = True
    max_turns: ClassVar[int] = 1

    def __init__(self) -> None:
        self._open, self._example = False, ""

    async def reset(self, task: Task) -> Observation:
        self._open, self._example = True, str(task.data.get("question", ""))
        return Observation(messages=[Message(role="user", content=PROMPT)])

    async def world(self, task: Task) -> str | None:
        """None: there is one world, so a split by worlds would leave nothing to hold out."""
        return None

    async def step(self, action: Message) -> StepResult:
        if not self._open:
            raise EnvError("proposals: the episode is over, or was never reset; call reset first")
        self._open = False
        form = _FORM.fullmatch(action.content)
        answer = true_answer(form[1]) if form else None
        hit = form is not None and answer is not None and parse_number(form[2]) == answer
        reply = Message(role="user", content="correct." if hit else "wrong.")
        return StepResult(messages=[reply], reward=float(hit), terminated=True)

    async def close(self) -> None:
        self._open = False

    def expert_action(self) -> str:
        if not self._open or true_answer(self._example) is None:
            raise NoExpert("proposals: no episode with a question in the task's data is played")
        return f"<question> {self._example} </question> \\boxed{{{true_answer(self._example)}}}"

    @classmethod
    def tiers(cls) -> Sequence[str]:
        return ("mixed",)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The seed draws the expert's proposal."""
        cls.check_tier(tier or "mixed")
        rng = random.Random(f"proposals/{seed}")
        (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        return Task(
            id=f"proposals/mixed/{seed}",
            data={"question": TIERS[kind](rng)},
            tier="mixed",
            source="proposals",
        )
