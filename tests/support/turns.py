"""Turns of an environment, as the tests of several take them."""

from __future__ import annotations

from ludus.core.types import Message, StepResult
from ludus.envs.base import Env


async def act(env: Env, text: str) -> StepResult:
    """Take an action."""
    return await env.step(Message(role="assistant", content=text))


async def say(env: Env, text: str) -> str:
    """Take an action, and read the answer."""
    return (await act(env, text)).messages[0].content


async def win(env: Env) -> tuple[float, StepResult]:
    """The expert's episode, from here: the sum of its rewards, and its last step.

    Every action stands for a tool call, and that for the action.
    """
    total = 0.0
    while True:
        action = env.expert_action()
        assert env.text_of(env.call_of(action)) == action
        result = await act(env, action)
        total += result.reward or 0.0
        if result.done:
            return total, result
