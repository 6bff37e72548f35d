"""The environment of docs/tutorial.md."""

import re
from random import Random
from typing import ClassVar

from ludus import Env, Message, Observation, StepResult, Task
from ludus.core.errors import EnvError

DISKS = {"three": 3, "four": 4}


def place(num_disks: int, rng: Random) -> dict[str, list[int]]:
    """Disks on random pegs, the largest of a peg first: each such position is allowed."""
    pegs: dict[str, list[int]] = {"A": [], "B": [], "C": []}
    for disk in range(num_disks, 0, -1):
        pegs[rng.choice("ABC")].append(disk)
    return pegs


def show(pegs: dict[str, list[int]]) -> str:
    return " ; ".join(f"{peg} : {' '.join(map(str, pegs[peg])) or 'empty'}" for peg in pegs)


def peg_of(pegs: dict[str, list[int]]) -> dict[int, str]:
    return {disk: peg for peg, disks in pegs.items() for disk in disks}


class Hanoi(Env):
    """Moves disks from peg to peg. Reward 1 when all are where the task wants them."""

    max_turns: ClassVar[int] = 24
    cheap_reset: ClassVar[bool] = True  # so that no held-out task is a training task
    blocking: ClassVar[bool] = False  # a step takes microseconds: no thread for it
    several_processes: ClassVar[bool] = True  # its episodes share nothing
    solved = True  # no open episode

    async def reset(self, task: Task) -> Observation:
        num_disks, rng = DISKS[task.tier or "three"], Random(task.data["seed"])
        self.pegs, self.goal = place(num_disks, rng), place(num_disks, rng)
        while self.pegs == self.goal:
            self.goal = place(num_disks, rng)
        self.solved = False
        return self.say(f"goal {show(self.goal)}")

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
        self.solved = self.pegs == self.goal
        messages = self.say("done" if self.solved else "moved").messages
        return StepResult(messages=messages, reward=float(self.solved), terminated=self.solved)

    def say(self, text: str) -> Observation:
        return Observation(messages=[Message(role="user", content=f"{text}\n{show(self.pegs)}")])

    def expert_action(self) -> str:
        where, wanted = peg_of(self.pegs), peg_of(self.goal)
        free, move = "", ("", "")
        for disk in sorted(where, reverse=True):  # the largest that is not where it has to be
            target = free or wanted[disk]
            if where[disk] != target:
                move = where[disk], target
                free = next(peg for peg in "ABC" if peg not in move)
        return f"move {move[0]} to {move[1]}"

    @classmethod
    def tiers(cls) -> tuple[str, ...]:
        return tuple(DISKS)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"{tier}-{seed}", data={"seed": seed}, tier=tier, source="hanoi")
