"""Episodes of an agent over the gateway, with a scripted sampler."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from played_envs import SAY, task_of
from rollout_world import Recording, Scripted, World

from ludus.core.types import Message, ToolCall, Trajectory
from ludus.rollout.workflow import Agent
from ludus.services.gateway.gateway import HttpGateway

ASKED = [{"role": "user", "content": "red ?"}]
TOOL = {"type": "function", "function": SAY.model_dump()}
RED = ToolCall(name="say", arguments={"word": "red"})
CALL = Message(role="assistant", tool_calls=[RED])


async def play(
    world: World, agent: Any, *texts: Any, style: str = "plain", sampler: Any = None, **how: Any
) -> Trajectory:
    """Play an episode; its sampler says the texts, one a turn."""
    sampler = sampler or Scripted(world.renderer(style, how.get("thinking", "keep")), *texts)
    how = {"format": "plain", "system_prompt": None, "max_retries": 0, **how}
    collector = world.collector(None, style, sampler=sampler, **how)
    names = frozenset(inspect.signature(agent).parameters)
    blocks = not inspect.iscoroutinefunction(agent)
    collector = replace(collector, agent=Agent(agent, names, blocks), gateway=HttpGateway())
    try:
        (group,) = await collector.collect([task_of(0)], 0, 1)
    finally:
        await collector.close()
    opened = sampler.open_sessions if isinstance(sampler, Recording) else sampler.sessions
    assert not opened
    return group.trajectories[0]
