"""Environments of episodes: construction, deadlines, checks of their results."""

from __future__ import annotations

import asyncio
import math
import time
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

from ludus.core.errors import (
    ConfigError,
    EnvError,
    EpisodeTimeout,
    LudusError,
    ToolError,
    Unscorable,
)
from ludus.core.modules import told
from ludus.core.types import (
    NO_ENV,
    Message,
    Observation,
    Spec,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
)
from ludus.envs import ENVS
from ludus.envs.base import PREPARE_S, Env, awaited, is_blocking, turns_fault
from ludus.rollout.hosts.threads import Act, EnvThread, Overdue, T
from ludus.telemetry.occupancy import busy
from ludus.telemetry.traces import execute_tool

LARGEST = 3.4e38
"""Of a reward's magnitude: advantages are computed in float32."""

MAX_CHARACTERS = 10_000_000
"""Limit of the text of one result: no context holds more, and tokens take 200 times the memory."""


class HostedEnv:
    """One episode's environment, with deadlines, its results checked.

    A blocking environment lives in the worker thread of `thread`, from construction to close; any
    other lives in the event loop of the rollouts. `prepares`: it has a `prepare` of its own.
    `release` is called at the end, even if the environment hangs.

    Errors: EnvError where the environment raises or returns an invalid result, EpisodeTimeout where
    a call exceeds `step_deadline_s`; an environment may raise ToolError or Unscorable itself.
    """

    def __init__(
        self,
        make: Callable[[], Env],
        thread: EnvThread,
        step_deadline_s: float,
        *,
        blocking: bool = True,
        prepares: bool = False,
        release: Callable[[], object] = lambda: None,
    ) -> None:
        self._make, self._release, self._prepares = make, release, prepares
        self._thread, self._deadline, self._blocking = thread, step_deadline_s, blocking
        self._env: Env | None = None
        self._abandoned = False
        self.seconds = 0.0
        """Seconds in which the episode waited for its environment so far."""

    @property
    def env(self) -> Env:
        """The environment itself; available after `reset`."""
        if self._env is None:
            raise EnvError("the environment was used before reset")
        return self._env

    async def reset(self, task: Task) -> Observation:
        """Construct the environment and start the episode, with a copy of the task."""
        own_task = task.model_copy(deep=True)

        async def prepare() -> None:
            self._env = self._make()
            await awaited("prepare", self._env.prepare(own_task))

        async def act() -> Observation:
            env = self._env = self._env if self._prepares and self._env else self._make()
            return await awaited("reset", env.reset(own_task))

        if self._prepares:
            await self._call("prepare", prepare, PREPARE_S)
        result = await self._call("reset", act)
        return check_opening(result)

    async def step(self, action: Message) -> StepResult:
        """Take one action."""

        async def act() -> StepResult:
            return await awaited("step", self.env.step(action))

        return check_result(await self._call("step", act))

    async def call(self, call: ToolCall) -> StepResult:
        """Take the action of a tool call; the first reply becomes the tool's.

        A call that the environment cannot read gets a reply with the error text.
        """

        async def act() -> StepResult:
            try:
                text = self.env.text_of(call)
            except (KeyError, TypeError, ValueError) as error:
                return StepResult(messages=[Message(role="user", content=f"{call.name}: {error}")])
            action = Message(role="assistant", content=text, tool_calls=[call])
            return await awaited("step", self.env.step(action))

        with execute_tool(call.name, call_id=call.id, arguments=call.arguments) as span:
            result = check_result(await self._call("step", act))
            span.result("\n".join(message.content for message in result.messages))
        fields = {"role": "tool", "name": call.name, "tool_call_id": call.id}
        first = [message.model_copy(update=fields) for message in result.messages[:1]]
        return result.model_copy(update={"messages": first + result.messages[1:]})

    @property
    def max_turns(self) -> int:
        """The environment's own turn limit."""
        limit = self.env.max_turns
        if fault := turns_fault(limit):
            raise EnvError(fault)
        return limit

    async def scores(self) -> dict[str, float]:
        """The named scores of the finished episode; may be infinite or NaN."""

        async def act() -> dict[str, float]:
            return self.env.scores()

        return _check_scores(await self._call("scores", act))

    async def explanation(self) -> str:
        """The explanation of the finished episode's score."""

        async def act() -> str:
            return str(getattr(self.env, "explanation", str)())

        return await self._call("explanation", act)

    async def close(self) -> None:
        """Close the environment, then release it. Errors of its `close` are ignored."""
        try:
            if self._env is not None and not self._abandoned:
                with suppress(Exception), busy("env_wait"):
                    await self._thread.run(self._close, self._deadline, blocking=self._blocking)
        finally:
            self._release()

    async def _close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await env.close()

    async def _call(self, name: str, act: Act[T], limit_s: float | None = None) -> T:
        deadline = limit_s or self._deadline
        run = self._thread.run(act, deadline, blocking=self._blocking, last=self._close)
        started = time.perf_counter()
        try:
            with busy("env_wait"):
                return await run
        except Overdue:
            self._abandoned = self._blocking
            limit = "" if limit_s else "rollout.step_deadline_s = "
            raise EpisodeTimeout(
                f"the environment's {name} took longer than {limit}{deadline:g} s"
            ) from None
        except asyncio.CancelledError:
            self._abandoned = self._blocking and not self._thread.inline
            raise
        except (EnvError, ToolError, EpisodeTimeout, Unscorable, BdbQuit):
            raise
        except Exception as error:
            raise EnvError(f"the environment's {name} raised {told(error)}") from error
        finally:
            self.seconds += time.perf_counter() - started


def check_opening(result: Observation) -> Observation:
    """Returns the result of a reset. Errors: EnvError where it is invalid."""
    if not isinstance(result, Observation):
        raise EnvError(f"reset returned {_type_name(result)}; it has to return an Observation")
    _check_messages("reset", result.messages)
    return result


def check_total(reward: float) -> None:
    """Errors: EnvError where the sum of an episode's step rewards is no finite float32."""
    if not abs(reward) <= LARGEST:
        raise EnvError(f"the step rewards sum to {reward}; they have to sum to a finite number")


def check_result(result: StepResult) -> StepResult:
    """Returns the result of a step. Errors: EnvError where it is invalid."""
    if not isinstance(result, StepResult):
        raise EnvError(f"step returned {_type_name(result)}; it has to return a StepResult")
    if result.reward is not None and not _is_finite(result.reward):
        raise EnvError(
            f"step returned a reward that is no finite number or None: {result.reward!r:.80}"
        )
    _check_messages("step", result.messages)
    return result


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def _check_scores(scores: dict[str, float]) -> dict[str, float]:
    if not isinstance(scores, dict):
        raise EnvError(
            f"scores returned {_type_name(scores)}; it has to return a dict of names to numbers"
        )
    for name, value in scores.items():
        if not isinstance(name, str) or not isinstance(value, int | float):
            raise EnvError(f"scores returned {value!r:.80} for {name!r:.80}; it has to be a number")
    return scores


def _check_messages(name: str, messages: list[Message]) -> None:
    if not isinstance(messages, list):
        raise EnvError(f"{name} returned {_type_name(messages)} for messages; it has to be a list")
    for message in messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise EnvError(
                f"{name} returned {_type_name(message)} among its messages, not a Message"
            )
    if (length := sum(len(message.content) for message in messages)) > MAX_CHARACTERS:
        raise EnvError(
            f"{name} returned messages of {length:,} characters; the limit is {MAX_CHARACTERS:,}"
        )


def _type_name(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


class EnvFactory(Protocol):
    """Gives each episode its environment."""

    def host(self, task: Task, thread: EnvThread, step_deadline_s: float) -> HostedEnv | None:
        """The task's environment, to be constructed at its reset; None where the task has none."""

    def tools(self) -> Sequence[ToolSpec]:
        """The tools of the environment."""


class LocalEnvs:
    """Constructs environments in this process.

    `spec` is the environment of tasks that name none. If a task names the same environment with
    other arguments, the task's arguments override those of `spec`.

    Errors of all methods: ConfigError where `spec` names no environment or has wrong arguments.
    """

    def __init__(self, spec: Spec | None) -> None:
        self.spec = spec

    def host(self, task: Task, thread: EnvThread, step_deadline_s: float) -> HostedEnv | None:
        """Errors: EnvError where the task's own spec is wrong."""
        spec = self.spec_of(task)
        if spec is None:
            return None
        # Import plug-ins and check arguments here, in one thread, and for each episode: no two
        # environments share an argument.
        try:
            env_class, args = ENVS.load(spec.name), ENVS.check(spec, "env")
        except LudusError as error:
            if spec is self.spec:
                raise
            raise EnvError(f"task {task.id}: {error}") from error
        blocking = is_blocking(env_class, task, args)
        return HostedEnv(
            lambda: env_class(**args),
            thread,
            step_deadline_s,
            blocking=blocking,
            prepares=has_prepare(env_class),
        )

    def make(self, task: Task | None = None) -> Env:
        """Construct an environment in the calling thread: the task's, or that of `spec`."""
        spec = self.spec if task is None else self.spec_of(task)
        if spec is None:
            raise ConfigError("env: neither the configuration nor the task names an environment")
        return ENVS.build(spec, "env")

    @cached_property
    def prototype(self) -> Env:
        """An environment that plays no episode: for its tools and its score range."""
        return self.make()

    def tools(self) -> Sequence[ToolSpec]:
        return self.prototype.tools()

    def spec_of(self, task: Task) -> Spec | None:
        """The environment of a task; None where it has none."""
        if task.env == NO_ENV:
            return None
        if task.env is None or self.spec is None or task.env.name != self.spec.name:
            return task.env or self.spec
        return Spec(name=task.env.name, args={**self.spec.args, **task.env.args})


def has_prepare(env_class: Any) -> bool:
    """Returns whether an environment of this class has to be prepared."""
    return getattr(env_class, "prepare", Env.prepare) is not Env.prepare
