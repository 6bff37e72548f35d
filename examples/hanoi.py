"""The environment of docs/tutorial.md."""

import re
from random import Random
from typing import ClassVar

from ludus import Env, Message, Observation, StepResult, Task
from ludus.core.errors import EnvError

DISKS = {"two": 2, "three": 3, "four": 4}


class Hanoi(Env):
    """Moves disks from peg to peg. Reward 1 when all are on C."""

    max_turns: ClassVar[int] = 24
    solved = True  # no open episode

    async def reset(self, task: Task) -> Observation:
        self.num_disks, rng = DISKS[task.tier or "three"], Random(task.data["seed"])
        self.pegs = {"A": [], "B": [], "C": []}
        for disk in range(self.num_disks, 0, -1):  # largest first: every position is allowed
            self.pegs[rng.choice("ABC")].append(disk)
        if len(self.pegs["C"]) == self.num_disks:  # solved already
            self.pegs["A"], self.pegs["C"] = self.pegs["C"], []
        self.solved = False
        return self.say("move all disks to C .")

    async def step(self, action: Message) -> StepResult:
        if self.solved:
            raise EnvError("call reset first")
        move = re.fullmatch("move ([ABC]) to ([ABC])", action.content.strip())
        if not move:
            return StepResult(messages=self.say("say : move X to Y").messages, reward=0.0)
        source, target = self.pegs[move[1]], self.pegs[move[2]]
        if not source or (target and target[-1] < source[-1]):
            return StepResult(messages=self.say("not allowed").messages, reward=0.0)
        target.append(source.pop())
        self.solved = len(self.pegs["C"]) == self.num_disks
        messages = self.say("done" if self.solved else "moved").messages
        return StepResult(messages=messages, reward=float(self.solved), terminated=self.solved)

    def say(self, text: str) -> Observation:
        shown = (
            f"{peg} : {' '.join(map(str, disks)) or 'empty'}" for peg, disks in self.pegs.items()
        )
        return Observation(messages=[Message(role="user", content=f"{text}\n{' ; '.join(shown)}")])

    def expert_action(self) -> str:
        where = {disk: peg for peg, disks in self.pegs.items() for disk in disks}
        target, move = "C", ("A", "C")
        for disk in range(self.num_disks, 0, -1):  # the largest disk that is not where it has to be
            if where[disk] != target:
                move = where[disk], target
                target = next(peg for peg in "ABC" if peg not in move)
        return f"move {move[0]} to {move[1]}"

    @classmethod
    def tiers(cls) -> tuple[str, ...]:
        return tuple(DISKS)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"{tier}-{seed}", data={"seed": seed}, tier=tier, source="hanoi")
