"""An environment that is served, and a session of it: its episode, and what each call does."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from ludus.core.errors import EnvError, EpisodeError, EpisodeTimeout, LudusError
from ludus.core.types import Message, Observation, Spec, StepResult, Task, ToolCall, ToolSpec, Wire
from ludus.envs import ENVS
from ludus.envs.base import Env, NoExpert
from ludus.rollout.host import HostedEnv
from ludus.rollout.threads import EnvThread, Overdue
from ludus.services.envs.isolated import IsolatedEnv
from ludus.services.server.app import ServiceError

ID_BITS = 96


class State(StrEnum):
    """Where a session stands."""

    NEW = "new"
    PLAYING = "playing"
    OVER = "over"


class EnvSchema(Wire):
    """What a client has to know of an environment."""

    name: str
    tools: list[ToolSpec]
    score_range: tuple[float, float]
    success_at: float
    max_turns: int
    tiers: list[str]


class ServedEnv:
    """An environment that is offered: its class, its arguments, what clients are told of it."""

    def __init__(self, spec: Spec, isolate: bool = False) -> None:
        self.spec, self.name, self.isolate = spec, spec.name, isolate
        self._args = ENVS.check(spec)
        self.env_class: Any = ENVS.load(spec.name)
        self.blocking: bool = isolate or getattr(self.env_class, "blocking", True)

    def make(self) -> Env:
        """A new environment, for one session."""
        return IsolatedEnv(self.spec) if self.isolate else self.local()

    def local(self) -> Env:
        """A new environment in this process."""
        args = ENVS.check(self.spec)  # anew: no two environments share an argument
        made: Env = self.env_class(**args)
        return made

    @cached_property
    def prototype(self) -> Env:
        """One that plays nothing: for its tools, and for reading and writing calls."""
        return self.local()

    @cached_property
    def schema(self) -> EnvSchema:
        env = self.prototype
        return EnvSchema(
            name=self.name,
            tools=list(env.tools()),
            score_range=env.score_range,
            success_at=env.success_at,
            max_turns=env.max_turns,
            tiers=list(self.env_class.tiers()),
        )

    def task(self, tier: str | None, seed: int) -> Task:
        """The environment's own task. Errors: ServiceError 422 for a tier or seed it has not."""
        try:
            made: Task = self.env_class.task(tier, seed)
        except NotImplementedError:
            raise ServiceError(
                422, "bad_task", f"{self.name} makes no tasks from seeds: send a task"
            ) from None
        except (LudusError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ServiceError(422, "bad_task", f"{self.name}: {error}") from error
        return made

    def call_of(self, action: str) -> ToolCall:
        """The call for an action. Errors: ServiceError 422."""
        try:
            return self.prototype.call_of(action)
        except (LookupError, NotImplementedError, TypeError, ValueError) as error:
            raise ServiceError(
                422, "bad_action", f"{action!r:.80} is no action: {error}"
            ) from error


@dataclass(eq=False)
class EnvSession:
    """One environment and its episode. `last` is what was said last, for clients that ask again.

    One call at a time, each of at most `deadline_s` seconds in the environment.
    Errors of all methods: ServiceError, and EpisodeError where the environment broke.
    """

    number: int
    owner: str
    served: ServedEnv
    seat: EnvThread
    deadline_s: float
    host: HostedEnv | None = None
    env: Env | None = None
    state: State = State.NEW
    num_steps: int = 0
    reward: float = 0.0
    score: float = 0.0
    last: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    busy: bool = False
    used: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        return f"{self.number:0{ID_BITS // 4}x}"

    async def reset(self, task: Task, own: bool) -> Observation:
        """Start an episode. `own`: the task is the environment's, so its failure is no bad task."""
        await self.close_env()
        self.state = State.NEW

        def make() -> Env:
            self.env = self.served.make()
            return self.env

        host = HostedEnv(make, self.seat, self.deadline_s, blocking=True)
        self.host = host
        try:
            observation = await host.reset(task)
        except EpisodeTimeout:
            raise
        except EpisodeError as error:
            await self.close_env()
            if own:
                raise
            raise ServiceError(422, "bad_task", str(error)) from error
        self.state, self.num_steps = State.PLAYING, 0
        self.reward = self.score = 0.0
        self.last, self.info = text_of(observation.messages), observation.info
        return observation

    async def step(self, message: Message) -> StepResult:
        """Take an action."""
        if self.host is None or self.state is not State.PLAYING:
            kind = "episode_over" if self.state is State.OVER else "not_reset"
            raise ServiceError(409, kind, "no episode is under way: reset the session first")
        if len(message.tool_calls) == 1 and not message.content:
            result = await self.host.call(message.tool_calls[0])
        else:
            result = await self.host.step(message)
        self.num_steps += 1
        self.reward = result.reward or 0.0
        self.score += self.reward
        self.last = text_of(result.messages)
        self.info = {**self.info, **result.info}
        if result.done:
            self.state = State.OVER
            await self.close_env()
        return result

    async def expert(self) -> str:
        """The expert's action."""
        host = self.host
        if host is None or self.state is not State.PLAYING:
            raise ServiceError(409, "not_reset", "no episode is under way: reset the session first")

        async def ask() -> str:
            return host.env.expert_action()

        try:
            return await self.seat.run(ask, self.deadline_s, blocking=True)
        except NoExpert as error:
            raise ServiceError(404, "no_expert", str(error)) from error
        except EpisodeError:
            raise
        except Overdue as error:
            raise EpisodeTimeout("the expert took too long") from error
        except Exception as error:
            raise EnvError(f"the expert raised {type(error).__name__}: {error}") from error

    async def close_env(self) -> None:
        """Close the environment; an isolated one, whatever it is doing."""
        host, self.host = self.host, None
        env, self.env = self.env, None
        if host is not None:
            with suppress(Exception):
                await host.close()
        if isinstance(env, IsolatedEnv):
            env.kill()  # where its thread was left behind, nothing else would


def text_of(messages: list[Message]) -> str:
    """What was said, as one text."""
    return "\n".join(message.content for message in messages)
