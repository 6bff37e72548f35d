"""The environment of an episode in the hands of a user's agent."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from ludus.core.errors import EpisodeError
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.rollout.hosts.host import HostedEnv
from ludus.rollout.sessions.agent_session import AgentSession

T = TypeVar("T")

OVER = "The episode is over."


class AgentEnv:
    """The episode's environment, for its agent. Rewards belong to the agent's last turn.

    A failure of the environment ends the attempt, also where the agent catches it: frameworks tell
    the errors of their tools to the model.
    """

    def __init__(self, session: AgentSession, env: HostedEnv, task: Task) -> None:
        self._session, self._env, self._task = session, env, task
        self.done = False
        """True once a step has ended the episode; later steps are answered with OVER."""
        self.failure: EpisodeError | None = None

    async def reset(self) -> Observation:
        """Start the episode."""
        self.done = False
        return await self._session.at_home(self._kept(self._env.reset(self._task)))

    async def step(self, action: Message | str) -> StepResult:
        """Act with a text, or a message."""
        if isinstance(action, str):
            action = Message(role="assistant", content=action)
        return await self._act(self._env.step(action), "user")

    async def call(self, call: ToolCall) -> StepResult:
        """Act with a tool call."""
        return await self._act(self._env.call(call), "tool")

    def tools(self) -> Sequence[ToolSpec]:
        """The tools of the environment; after `reset`."""
        return self._env.env.tools()

    async def _act(
        self, step: Coroutine[Any, Any, StepResult], role: Literal["user", "tool"]
    ) -> StepResult:
        if self.done:
            step.close()
            return StepResult(messages=[Message(role=role, content=OVER)], terminated=True)
        return await self._session.at_home(self._noted(step))

    async def _noted(self, step: Awaitable[StepResult]) -> StepResult:
        result = await self._kept(step)
        self._session.note_reward(result.reward)
        self.done = result.done
        return result

    async def _kept(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except EpisodeError as error:
            self.failure = error
            raise
