"""Steps of an expert before its action: which demonstrations have them, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from faulty_envs import Digit, ShowsSteps
from service_world import service

from ludus.config.schema import MarkersConfig
from ludus.core.errors import EnvError
from ludus.core.types import Message, Spec, StepResult
from ludus.data.expert import CodeBlocks, run_expert
from ludus.envs.base import NoExpert
from ludus.envs.checks.check import check_env
from ludus.envs.mixture import Mixture
from ludus.envs.remote.env import RemoteEnv
from ludus.tasks.mixture import PART
from ludus.tools.toolbox import Toolbox

TASK = ShowsSteps.task(None, 4)


def turns(messages: list[Message]) -> list[str]:
    return [message.content for message in messages if message.role == "assistant"]


async def test_steps_stand_before_the_action_in_plain_demonstrations() -> None:
    demonstration = await run_expert(ShowsSteps(), TASK)
    assert turns(demonstration.messages) == ["0", "try 2\n4"]
    assert demonstration.success


@pytest.mark.parametrize("format", ["react", "code"])
async def test_other_formats_have_the_action_alone(format: Any) -> None:
    async with await Toolbox.open([]) as toolbox:
        blocks = CodeBlocks(MarkersConfig(), toolbox, runs=False) if format == "code" else None
        demonstration = await run_expert(ShowsSteps(), TASK, format, blocks=blocks)
    assert demonstration.success
    assert not any("try" in turn for turn in turns(demonstration.messages))


async def test_a_mixture_has_the_steps() -> None:
    mixture = Mixture(envs={"digits": Spec(name="faulty_envs:ShowsSteps")})
    task = TASK.model_copy(update={"data": {**TASK.data, PART: "digits"}})
    assert turns((await run_expert(mixture, task)).messages) == ["0", "try 2\n4"]


async def test_a_service_tells_them_with_the_action() -> None:
    """In a process of the session's own; one request brings both."""
    with service("faulty_envs:ShowsSteps", isolate=True) as url:
        env = RemoteEnv(url=url)
        played = await run_expert(env, TASK)
        assert turns(played.messages) == ["0", "try 2\n4"]
        await env.reset(TASK)
        assert env.expert_steps() is None
        assert env.expert_action() == "0"
        await env.step(Message(role="assistant", content="0"))
        assert env.expert_steps() == "try 2"
        await env.step(Message(role="assistant", content="4"))
        with pytest.raises(NoExpert, match="no episode is being played"):
            env.expert_action()
        await env.close()


@pytest.mark.parametrize("steps", [3, ["a"]])
async def test_steps_that_are_no_text_are_refused(steps: Any) -> None:
    wrong = type("Wrong", (ShowsSteps,), {"expert_steps": lambda self: steps})
    with pytest.raises(
        EnvError, match=r"expert_steps returned .*; it has to return a text or None"
    ):
        await run_expert(wrong(), TASK)


async def test_steps_that_are_async_are_refused() -> None:
    class Waits(ShowsSteps):
        async def expert_steps(self) -> str | None:  # type: ignore[override]
            return "a"

    with pytest.raises(EnvError, match="expert_steps is async: write `def expert_steps`"):
        await run_expert(Waits(), TASK)


async def test_check_env_plays_the_steps() -> None:
    assert await check_env(ShowsSteps) == []

    class Deaf(ShowsSteps):
        async def step(self, action: Message) -> StepResult:
            return await Digit.step(self, action)

    found = [str(finding) for finding in await check_env(Deaf, num_tasks=3)]
    assert any("error: expert: " in each for each in found), found
