"""One episode's environment: run with deadlines, its results checked."""

from __future__ import annotations

import asyncio
import math
from bdb import BdbQuit
from collections.abc import Callable
from contextlib import suppress

from ludus.core.errors import EnvError, EpisodeTimeout, ToolError, Unscorable
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall
from ludus.envs.base import Env
from ludus.rollout.threads import Act, EnvThread, Overdue, T
from ludus.telemetry.occupancy import busy


class HostedEnv:
    """One episode's environment, with deadlines, and with its answers checked.

    A blocking environment lives in its seat's thread from its making to its end, any other in the
    event loop of the rollouts.

    Errors: EnvError where the environment raises or returns rubbish, EpisodeTimeout where it takes
    longer than `step_deadline` seconds; an environment may raise ToolError or Unscorable itself.
    """

    def __init__(
        self,
        make: Callable[[], Env],
        seat: EnvThread,
        step_deadline: float,
        *,
        blocking: bool = True,
    ) -> None:
        self._make = make
        self._seat = seat
        self._deadline = step_deadline
        self._blocking = blocking
        self._env: Env | None = None
        self._left_behind = False

    @property
    def env(self) -> Env:
        """The environment itself; available after `reset`."""
        if self._env is None:
            raise EnvError("the environment was used before reset")
        return self._env

    async def reset(self, task: Task) -> Observation:
        """Build the environment and start the episode, on a copy of the task."""
        own_task = task.model_copy(deep=True)

        async def act() -> Observation:
            self._env = self._make()
            return await self._env.reset(own_task)

        result = await self._call("reset", act)
        if not isinstance(result, Observation):
            raise EnvError(f"reset returned {_kind(result)}; it has to return an Observation")
        _check_messages("reset", result.messages)
        return result

    async def step(self, action: Message) -> StepResult:
        """Take one action."""

        async def act() -> StepResult:
            return await self.env.step(action)

        return _checked(await self._call("step", act))

    async def call(self, call: ToolCall) -> StepResult:
        """Take the action that a tool call stands for, and answer as the tool.

        A call that the environment cannot read is answered with what is wrong.
        """

        async def act() -> StepResult:
            try:
                text = self.env.text_of(call)
            except (KeyError, TypeError, ValueError) as error:
                return StepResult(messages=[Message(role="user", content=f"{call.name}: {error}")])
            action = Message(role="assistant", content=text, tool_calls=[call])
            return await self.env.step(action)

        result = _checked(await self._call("step", act))
        answer = {"role": "tool", "name": call.name, "tool_call_id": call.id}
        first = [message.model_copy(update=answer) for message in result.messages[:1]]
        return result.model_copy(update={"messages": first + result.messages[1:]})

    async def close(self) -> None:
        """Close the environment; what goes wrong there is not the episode's fault any more."""
        if self._env is not None and not self._left_behind:
            with suppress(Exception), busy("env_wait"):
                await self._seat.run(self._release, self._deadline, blocking=self._blocking)

    async def _release(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await env.close()

    async def _call(self, what: str, act: Act[T]) -> T:
        run = self._seat.run(act, self._deadline, blocking=self._blocking, last=self._release)
        try:
            with busy("env_wait"):
                return await run
        except Overdue:
            self._left_behind = self._blocking
            raise EpisodeTimeout(
                f"the environment's {what} took longer than rollout.step_deadline_s = "
                f"{self._deadline:g} s"
            ) from None
        except asyncio.CancelledError:
            self._left_behind = self._blocking and not self._seat.inline
            raise
        except (EnvError, ToolError, EpisodeTimeout, Unscorable, BdbQuit):
            raise
        except Exception as error:
            raise EnvError(
                f"the environment's {what} raised {type(error).__name__}: {error}"
            ) from error


def _checked(result: StepResult) -> StepResult:
    """The answer to a step. Errors: EnvError where it is rubbish."""
    if not isinstance(result, StepResult):
        raise EnvError(f"step returned {_kind(result)}; it has to return a StepResult")
    reward = result.reward
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise EnvError(f"step returned the reward {reward!r}; it has to be a finite number or None")
    _check_messages("step", result.messages)
    return result


def _check_messages(what: str, messages: list[Message]) -> None:
    if not isinstance(messages, list):
        raise EnvError(f"{what} returned {_kind(messages)} for messages; it has to be a list")
    for message in messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise EnvError(f"{what} returned {_kind(message)} among its messages, not a Message")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
