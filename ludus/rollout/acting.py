"""From a turn to a step of the environment: which action a turn names, in each format."""

from __future__ import annotations

from collections.abc import Callable

from ludus.core.types import Message, StepResult
from ludus.models.chat.parsing import parse_react
from ludus.rollout.host import HostedEnv


async def act(
    env: HostedEnv,
    turn: Message,
    error: str | None,
    form: str,
    refuse: Callable[[Message, str], list[Message]],
) -> StepResult:
    """Step the environment; a turn that names no action is answered with what is wrong.

    Args:
        error: what is wrong with the turn already, or None.
        form: `rollout.format`.
        refuse: the messages that tell a turn what is wrong with it.
    """
    if error is None and form == "tools":
        if len(turn.tool_calls) == 1:
            return await env.call(turn.tool_calls[0])
        error = f"make exactly one tool call a turn, not {len(turn.tool_calls)}."
    action = turn.content.strip()
    if error is None and form == "react":
        react = parse_react(turn.content)
        action, error = react.action, react.error
    if error is not None:
        return StepResult(messages=refuse(turn, error))
    return await env.step(Message(role="assistant", content=action))
