"""A served environment, and one session of it: an episode, and the effect of each call."""

from __future__ import annotations

import time
from asyncio import run
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ludus.core.errors import EnvLost, EpisodeError, EpisodeTimeout, LudusError
from ludus.core.types import Message, Observation, Spec, StepResult, Task, ToolCall, ToolSpec, Wire
from ludus.envs import ENVS
from ludus.envs.base import Env, NoExpert, expert_action, expert_steps, limits_of
from ludus.rollout.hosts.host import HostedEnv, LocalEnvs, has_prepare
from ludus.rollout.hosts.threads import EnvThread, Overdue, T
from ludus.services.envs.isolated import IsolatedEnv
from ludus.services.server.app import ServiceError
from ludus.services.server.shares import Client

ID_BITS = 96


class State(StrEnum):
    """State of a session's episode."""

    NEW = "new"
    PLAYING = "playing"
    OVER = "over"


class ExpertTurn(Wire):
    """The expert's action, and what it writes before it (`Env.expert_steps`)."""

    action: str
    steps: str = ""


class EnvSchema(Wire):
    """Description of an environment for clients. `expert_deadline_s`: of a call of its expert.

    `args` are those that it is served with, without texts that may be paths of this machine.
    """

    name: str
    tools: list[ToolSpec]
    score_range: tuple[float, float]
    success_at: float
    max_turns: int
    tiers: list[str]
    expert_deadline_s: float
    args: dict[str, Any]


class ServedEnv:
    """An environment on offer: its class, its arguments, its schema."""

    def __init__(self, spec: Spec, isolate: bool = False) -> None:
        self.spec, self.name, self.isolate = spec, spec.name, isolate
        ENVS.check(spec)
        self._local = LocalEnvs(spec)
        self.env_class: Any = ENVS.load(spec.name)
        self.blocking: bool = isolate or getattr(self.env_class, "blocking", True)
        self.prepares = has_prepare(self.env_class)

    def host(self, task: Task, thread: EnvThread, step_deadline_s: float) -> HostedEnv:
        """An environment for one episode: isolated in a process, or in this process.

        A task's own environment spec is ignored: clients play only what is served.
        """
        blocking = self.blocking or thread.borrows_workers
        if not self.isolate:
            return HostedEnv(
                self._local.make,
                thread,
                step_deadline_s,
                blocking=blocking,
                prepares=self.prepares,
            )
        env = IsolatedEnv(self.spec)
        # Where the thread that waits for the process was abandoned, only `kill` ends the process.
        return HostedEnv(
            lambda: env, thread, step_deadline_s, prepares=self.prepares, release=env.kill
        )

    def prepare(self) -> None:
        """Start what all sessions share, before the first one; its easiest task stands for all.

        Errors: LudusError.
        """
        if not self.prepares or self.isolate:
            return
        tier = next(iter(self.env_class.tiers()), None)
        run(self._local.make().prepare(self.env_class.task(tier, 0)))

    def tools(self) -> Sequence[ToolSpec]:
        return self._local.tools()

    def success_of(self, task: Task) -> float:
        """The episode reward from which a task counts as solved."""
        return self._local.prototype.success_of(task)

    def schema(self, expert_deadline_s: float) -> EnvSchema:
        env = self._local.prototype
        score_range, success_at = limits_of(env)
        return EnvSchema(
            name=self.name,
            tools=list(env.tools()),
            score_range=score_range,
            success_at=success_at,
            max_turns=env.max_turns,
            tiers=list(self.env_class.tiers()),
            expert_deadline_s=expert_deadline_s,
            args={key: value for key, value in self.spec.args.items() if not _has_path(value)},
        )

    def task(self, tier: str | None, seed: int) -> Task:
        """The environment's own task. Errors: ServiceError 422 for an unknown tier or seed."""
        try:
            task: Task = self.env_class.task(tier, seed)
        except NotImplementedError:
            raise ServiceError(
                422, "bad_task", f"{self.name} makes no tasks from seeds: send a task"
            ) from None
        except (LudusError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ServiceError(422, "bad_task", f"{self.name}: {error}") from error
        return task

    def call_of(self, action: str) -> ToolCall:
        """The tool call for an action. Errors: ServiceError 422."""
        try:
            return self._local.prototype.call_of(action)
        except (LookupError, NotImplementedError, TypeError, ValueError) as error:
            message = f"{action!r:.80} is not an action: {error}"
            raise ServiceError(422, "bad_action", message) from error


@dataclass(eq=False)
class EnvSession:
    """One environment and its episode, one call at a time.

    `last` is the last text of the environment. Each call has `deadline_s` seconds in it, a call of
    the expert `expert_deadline_s`.
    Errors of all methods: ServiceError; EpisodeError if the environment failed.
    """

    number: int
    client: Client
    served: ServedEnv
    thread: EnvThread
    deadline_s: float
    expert_deadline_s: float
    host: HostedEnv | None = None
    state: State = State.NEW
    num_steps: int = 0
    reward: float = 0.0
    score: float = 0.0
    last: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    busy: bool = False
    last_used: float = field(default_factory=time.monotonic)

    @property
    def owner(self) -> str:
        """The token that opened the session; empty without tokens."""
        return self.client.token

    @property
    def id(self) -> str:
        return format_id(self.number)

    async def reset(self, task: Task, own: bool) -> Observation:
        """Start an episode, in a second attempt where the environment's process was lost.

        `own`: the environment made the task, so a failure is not bad_task.
        """
        for attempt in (1, 2):
            await self.close_env()
            self.state = State.NEW
            self.host = host = self.served.host(task, self.thread, self.deadline_s)
            try:
                observation = await host.reset(task)
                break
            except EpisodeTimeout:
                raise
            except EpisodeError as error:
                await self.close_env()
                lost = isinstance(error, EnvLost)
                if lost and attempt == 1:
                    continue
                if own or lost:
                    raise
                raise ServiceError(422, "bad_task", str(error)) from error
        self.state, self.num_steps = State.PLAYING, 0
        self.reward = self.score = 0.0
        self.last, self.info = text_of(observation.messages), observation.info
        return observation

    async def step(self, message: Message) -> StepResult:
        host = self._playing("episode_over" if self.state is State.OVER else "not_reset")
        if len(message.tool_calls) == 1 and not message.content:
            result = await host.call(message.tool_calls[0])
        else:
            result = await host.step(message)
        self.num_steps += 1
        self.reward = result.reward or 0.0
        self.score += self.reward
        self.last = text_of(result.messages)
        self.info = {**self.info, **result.info}
        if result.done:
            self.state = State.OVER
            await self.close_env()
        return result

    async def expert(self) -> ExpertTurn:
        """The expert's action, and its steps. An expert that raises does not end the episode.

        An expert that exceeds its deadline may still be using the environment, so it does.
        """
        try:
            return await self._ask(
                lambda env: ExpertTurn(
                    steps=expert_steps(env).removesuffix("\n"), action=expert_action(env)
                ),
                "expert",
                self.expert_deadline_s,
                NoExpert,
            )
        except NoExpert as error:
            raise ServiceError(404, "no_expert", str(error)) from error

    async def inspect(self, what: str) -> Any:
        """A view of the running episode that is no observation (`Env.inspect`). As `expert`."""
        try:
            return await self._ask(
                lambda env: env.inspect(what), "view", self.deadline_s, LookupError
            )
        except LookupError as error:
            raise ServiceError(404, "no_view", str(error)) from error

    async def _ask(
        self,
        question: Callable[[Env], T],
        who: str,
        deadline_s: float,
        refusal: type[Exception],
    ) -> T:
        """Ask the running episode's environment, in its thread. `who` answers, in errors; an error
        of the type `refusal` is the caller's to report."""
        host = self._playing("not_reset")

        async def ask() -> T:
            return question(host.env)

        try:
            return await self.thread.run(ask, deadline_s, blocking=True)
        except refusal:
            raise
        except Overdue as error:
            raise EpisodeTimeout(f"the {who} took too long") from error
        except Exception as error:
            message = f"the {who} raised {type(error).__name__}: {error}"
            raise ServiceError(502, f"{who}_failed", message) from error

    async def close_env(self) -> None:
        """Close the environment; an isolated environment is killed if it does not close."""
        host, self.host = self.host, None
        if host is not None:
            with suppress(Exception):
                await host.close()

    def _playing(self, kind: str) -> HostedEnv:
        """The running episode's environment. Errors: ServiceError 409 of that kind."""
        if self.host is None or self.state is not State.PLAYING:
            raise ServiceError(409, kind, "no episode is running: reset the session first")
        return self.host


def _has_path(value: Any) -> bool:
    return any(separator in str(value) for separator in "/\\")


def format_id(number: int) -> str:
    """A session's or job's number as an id: hexadecimal."""
    return f"{number:0{ID_BITS // 4}x}"


def parse_id(id: str) -> int | None:
    """The number of an id; None if the text is not an id."""
    try:
        return int(id, 16) if id.isalnum() else None
    except ValueError:
        return None


def text_of(messages: list[Message]) -> str:
    """The messages as one text."""
    return "\n".join(message.content for message in messages)
