"""`check-env` of environments whose expert is at fault."""

from __future__ import annotations

import re

import faulty_envs as faulty
import pytest

from ludus.core.types import Message, StepResult
from ludus.envs.base import Env
from ludus.envs.checks.check import check_env


class KeepsSteps(faulty.Digit):
    """`step` does not take the lines of `expert_steps` off, so the episode goes on."""

    def expert_steps(self) -> str | None:
        return f"try {self.tries + 1}" if self.tries else None


class OneTry(KeepsSteps):
    """As it, but an episode has one try, and a digit is known at once."""

    async def step(self, action: Message) -> StepResult:
        result = await super().step(action)
        self.secret = None
        return StepResult(messages=result.messages, reward=result.reward, terminated=True)

    def expert_action(self) -> str:
        return str(self.secret)

    def expert_steps(self) -> str | None:
        return "the digit is"


class Parses(OneTry):
    async def step(self, action: Message) -> StepResult:
        first = action.content.split("\n")[0]
        if first.startswith("the"):
            raise ValueError(f"{first} is no digit")
        return await super().step(action)


@pytest.mark.parametrize(
    ("env", "happens"),
    [
        (KeepsSteps, "digit/1: with the lines of expert_steps ('try 2\\n') before its action the "
         "episode does not end"),
        (OneTry, "('the digit is\\n') before its action the expert loses"),
        (Parses, "a step raises ValueError: the digit is is no digit"),
    ],
)  # fmt: skip
async def test_steps_that_are_not_taken_off_are_told(env: type[Env], happens: str) -> None:
    [found] = [f for f in await check_env(env) if f.check == "expert"]
    assert found.severity == "error"
    assert happens in found.detail
    assert ", and without them it wins" in found.detail
    assert found.detail.endswith(": `step` has to take them off")


def losing(losses: int, env: type[Env] = OneTry) -> type[Env]:
    """An expert that loses the tasks of the first digits; it writes no steps."""

    def expert_action(self: faulty.Digit) -> str:
        secret = self.secret or 0
        return str(secret + 10 if secret < losses else secret)

    return type("Loses", (env,), {"expert_action": expert_action, "expert_steps": Env.expert_steps})


async def test_an_expert_that_wins_nothing_is_an_error() -> None:
    [found] = [f for f in await check_env(losing(10)) if f.check == "expert"]
    assert found.severity == "error"
    assert "digit/0: the expert lost, with a reward of 0 (success_at is 1)" in found.detail
    assert "in 5 other tasks), and it won none: demonstrations need one that wins" in found.detail


async def test_an_expert_that_loses_some_is_a_note() -> None:
    [found] = [f for f in await check_env(losing(2)) if f.check == "expert"]
    assert found.severity == "note"
    assert found.detail.endswith("(success_at is 1) (so it is in 1 other task)")


async def test_a_step_that_raises_without_steps_too_is_told_as_it_is() -> None:
    def refuse(self: object, action: Message) -> StepResult:
        raise ValueError("no digit")

    env = type("Raises", (OneTry,), {"step": refuse})
    assert any("ValueError: no digit" in str(f) for f in await check_env(env))


class Wastes(KeepsSteps):
    """The lines cost a turn and no more: it takes another way, and wins."""

    def expert_steps(self) -> str | None:
        return "think" if self.tries == 1 else None

    def expert_action(self) -> str:
        return str((self.secret or 0) + 12 - self.tries) if self.tries < 12 else str(self.secret)


async def test_steps_that_change_the_way_are_not_taken_for_chance() -> None:
    class Counts(Wastes):
        async def step(self, action: Message) -> StepResult:
            if "\n" in action.content:
                self.tries += 5
            return await super().step(action)

    [found] = [f for f in await check_env(Counts) if f.check == "expert"]
    assert found.severity == "error"
    assert "takes another way than without them" in found.detail


async def test_an_expert_that_is_stuck_in_some_tasks_is_a_note() -> None:
    def expert_action(self: faulty.Digit) -> str:
        return "open red" if self.secret == 1 else str(self.secret)

    env = type("Stuck", (faulty.Digit,), {"expert_action": expert_action})
    said: list[str] = []
    [found] = [f for f in await check_env(env, tell=said.append) if f.check == "expert"]
    assert any(line.endswith("; 1 episode did not end here") for line in said), said
    assert found.severity == "note"
    assert "digit/1: the expert does not end the episode in 1,000 steps" in found.detail
    assert "last actions: 'open red', then 'open red'" in found.detail


async def test_an_exception_cannot_forge_a_finding() -> None:
    class Forges(OneTry):
        async def step(self, action: Message) -> StepResult:
            if "\n" in action.content:
                raise ValueError("a\rX\nerror: forged")
            return await super().step(action)

    [found] = [f for f in await check_env(Forges) if f.check == "expert"]
    assert "\n" not in found.detail
    assert "\r" not in found.detail


async def test_what_the_expert_reaches_is_told() -> None:
    said: list[str] = []
    await check_env(faulty.Digit, num_tasks=5, tell=said.append)
    await check_env(losing(2), num_tasks=4, tell=said.append)
    assert said == [
        "the expert wins 5 of 5 tasks, in episodes of 1 to 2 turns",
        "the expert wins 2 of 4 tasks, in episodes of 1 turn",
    ]


class StepRaises(faulty.Digit):
    """A step of some tasks raises."""

    async def step(self, action: Message) -> StepResult:
        if self.secret == 3:
            raise KeyError("three")
        return await super().step(action)


class ExpertRaises(faulty.Digit):
    """The expert of some tasks raises."""

    def expert_action(self) -> str:
        if self.secret == 3:
            raise KeyError("three")
        return super().expert_action()


@pytest.mark.parametrize("env", [StepRaises, ExpertRaises])
async def test_what_the_expert_reaches_is_told_beside_faults(env: type[Env]) -> None:
    said: list[str] = []
    found = await check_env(env, num_tasks=24, tell=said.append)
    assert re.fullmatch(
        r"the expert wins (\d+) of \1 tasks, in episodes of 1 to 2 turns; \d more tasks? cannot be "
        r"played",
        said[0],
    )
    assert any(f.severity == "error" and "KeyError: 'three'" in f.detail for f in found)
