"""An agent of several roles that take turns in an environment, which says whose turn is next.

    agent: relay
    roles: {generator: policy, optimiser: second}

    reset                -> info role: generator          the generator's conversation opens
    generator's turn     -> info role: generator          it reads the environment's answer
    generator's turn     -> info role: optimiser, conversation: the messages that it begins with
    optimiser's turn     -> the end: info success, scores, explanation

A role sees its own conversation only. The one that it begins with may hold turns of others: they
are given, without a loss.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ludus.core.errors import ContextOverflow, EnvError
from ludus.core.types import Message, Task
from ludus.rollout.agent_env import AgentEnv
from ludus.rollout.outcome import Outcome
from ludus.rollout.sessions.call_options import CallRefused
from ludus.rollout.workflow import Model


async def relay(
    task: Task,
    model: Model,
    env: AgentEnv,
    gamma: Annotated[
        float | None,
        Field(
            ge=0,
            le=1,
            description="Each turn earns the rewards from it on, of all roles, discounted by gamma "
            "a turn; null: its own. With turn_grpo or gspo_token, set their gamma to 0.",
        ),
    ] = None,
) -> Outcome:
    """Play an environment with the roles that it names."""
    opened = await env.reset()
    name = _role(opened.info)
    talks = {name: [*task.prompt, *opened.messages]}
    turns: list[tuple[str, float]] = []
    info: dict[str, Any] = {}
    while True:
        try:
            reply = await model.role(name).chat(talks[name])
        except (ContextOverflow, CallRefused):
            if not turns:
                raise
            break  # a regular end: earned rewards count
        talks[name].append(reply)
        result = await env.step(reply)
        turns.append((name, result.reward or 0.0))
        info = result.info
        if result.done:
            break
        following = _role(result.info)
        if (given := result.info.get("conversation")) is not None:
            talks[following] = [Message.model_validate(message) for message in given]
        elif following not in talks:
            raise EnvError(f"the environment gives no `conversation` for the role {following!r}")
        else:
            talks[following] += result.messages
        name = following
    return _outcome(turns, gamma, info)


def _outcome(turns: list[tuple[str, float]], gamma: float | None, info: dict[str, Any]) -> Outcome:
    earned: dict[str, list[float]] = {}
    to_go = 0.0
    for name, reward in reversed(turns):
        to_go = reward + (gamma or 0.0) * to_go
        earned.setdefault(name, []).insert(0, to_go)
    return Outcome(
        turn_rewards=earned,
        success=bool(info.get("success", False)),
        scores=info.get("scores", {}),
        explanation=str(info.get("explanation", "")),
    )


def _role(info: dict[str, Any]) -> str:
    """The role whose turn is next. Errors: EnvError where the environment names none."""
    name = info.get("role")
    if not isinstance(name, str):
        raise EnvError("agent relay: the environment's info names no `role`: it has no roles")
    return name
