"""The environment protocol: `reset`, `step` and `close`, in messages.

An Env object plays one trajectory at a time. It knows nothing of tokens, models or training.
A complete environment:

    class Guess(Env):
        secret = None

        async def reset(self, task):
            self.secret = task.data["seed"] % 10
            return Observation(messages=[Message(role="user", content="Guess a digit.")])

        async def step(self, action):
            if self.secret is None:
                raise EnvError("call reset first")
            hit = action.content.strip() == str(self.secret)
            reply = Message(role="user", content="right" if hit else "wrong")
            return StepResult(messages=[reply], reward=float(hit), terminated=hit)
"""

from __future__ import annotations

import inspect
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ValidationError

from ludus.core.errors import ConfigError, EnvError, did_you_mean
from ludus.core.modules import not_async
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs import forks

T = TypeVar("T")

PREPARE_S = 300.0
"""Time limit of `Env.prepare`, in seconds."""


RESULTS: dict[str, type[BaseModel]] = {
    "Message": Message,
    "Observation": Observation,
    "StepResult": StepResult,
    "Task": Task,
}
"""Results that an environment's methods construct, by name."""

MEANT = {"done": "terminated", "observation": "messages", "text": "content", "seed": "data"}
"""Fields of other libraries' results, and those of ours that they stand for."""

RIGHT = {
    "messages": "a list of Messages",
    "reward": "a number or None",
    "terminated": "True or False",
    "truncated": "True or False",
    "info": "a dict",
    "role": "system, user, assistant or tool",
    "content": "a text",
    "id": "a text",
    "tier": "a text or None",
    "data": "a dict",
}
"""Values of their fields, in words."""


def exit_error(failure: BaseException) -> EnvError:
    """The error of an environment that raised SystemExit, KeyboardInterrupt or CancelledError."""
    return EnvError(f"the environment called for exit: {failure!r}")


async def awaited(name: str, result: Awaitable[T]) -> T:
    """Returns the awaited result of a method. A process that the method forked, and that returns
    from it too, ends here.

    Errors: EnvError where the method is not async, constructs a result with a wrong field, or where
    such a process returned from an earlier call.
    """
    if not inspect.isawaitable(result):
        raise EnvError(not_async(f"the environment's {name}", name, result))
    process, copies = os.getpid(), forks.returned()
    try:
        return await result
    except ValidationError as error:
        if (fault := construction_fault(error)) is None:
            raise
        raise EnvError(f"{_own_name(name, result)}: {fault}") from error
    finally:
        if os.getpid() != process:
            forks.end_copy(copies, _own_name(name, result))
        if copies[0]:
            raise forks.Forked(forks.copy_returned())


def _own_name(name: str, result: object) -> str:
    """Class.method of a coroutine, else the name of the call."""
    return ".".join(getattr(result, "__qualname__", name).split(".")[-2:])


def construction_fault(error: ValidationError) -> str | None:
    """Returns what is wrong with a result that an environment constructs; None: it is another
    class's error."""
    if (model := RESULTS.get(error.title)) is None:
        return None
    first = error.errors(include_url=False)[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    if field not in model.model_fields:
        if (meant := MEANT.get(field)) in model.model_fields:
            return f"{error.title} has no field {field!r} (did you mean {meant}?)"
        return f"{error.title} has no field {field!r}{did_you_mean(field, model.model_fields)}"
    right = RIGHT.get(field, "of its type")
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return f"{error.title} needs `{field}`, {right}"
    value = f"{first['input']!r:.80}"
    what = f"{field}={value}" if len(first["loc"]) == 1 else f"{value} in {field}"
    return f"{error.title} has {what}; it has to be {right}"


FLAGS = ("blocking", "cheap_reset", "several_processes")
"""Declarations that are True or False."""


def tiers_of(env: Any) -> list[str]:
    """The tiers of an environment or its class. Errors: EnvError for anything else than different
    names; those of `tiers` but TypeError."""
    right = 'it has to be a tuple of names, easiest first: ("easy", "hard"), or () without tiers'
    try:
        found = env.tiers()
    except TypeError as error:
        raise EnvError(
            f"tiers() raised TypeError: {error}; write `@classmethod def tiers(cls)`"
        ) from error
    fine = isinstance(found, Sequence) and not isinstance(found, str | bytes)
    if not fine or not all(isinstance(tier, str) and tier for tier in found):
        raise EnvError(f"tiers() returned {found!r:.80}; {right}")
    if len(set(found)) < len(found):
        raise EnvError(f"tiers() returned {found!r:.80}, with a name twice; {right}")
    return list(found)


def declaration_fault(env: Any) -> str | None:
    """Returns what is wrong with `score_range`, `success_at`, `max_turns` or FLAGS of an
    environment, or of its class, where they may still be properties; None: nothing."""
    score_range = getattr(env, "score_range", Env.score_range)
    success_at = getattr(env, "success_at", Env.success_at)
    if not isinstance(score_range, property):
        bounds = score_range if isinstance(score_range, tuple | list) else ()
        if len(bounds) != 2 or not all(map(_is_number, bounds)):
            return (
                f"score_range is {score_range!r:.80}; it has to be two numbers, the lowest and the "
                "highest reward of an episode"
            )
        if not bounds[0] < bounds[1]:
            return f"score_range {score_range} is empty"
    if not isinstance(success_at, property) and not _is_number(success_at):
        return f"success_at is {success_at!r:.80}; it has to be a number"
    for name in FLAGS:
        flag = getattr(env, name, False)
        if not isinstance(flag, bool | property):
            return f"{name} is {flag!r:.80}; it has to be True or False"
    max_turns = getattr(env, "max_turns", Env.max_turns)
    return None if isinstance(max_turns, property) else turns_fault(max_turns)


def turns_fault(limit: object) -> str | None:
    """Returns what is wrong with a turn limit; None: nothing."""
    if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1:
        return None
    return f"max_turns is {limit!r:.80}; it has to be a whole number of at least 1"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def limits_of(env: Env) -> tuple[tuple[float, float], float]:
    """Returns an environment's `score_range` and `success_at`. Errors: EnvError where a declaration
    is wrong."""
    if fault := declaration_fault(env):
        raise EnvError(f"{type(env).__name__}: {fault}")
    low, high = env.score_range
    return (low, high), env.success_at


def set_limits(
    env: Env, max_turns: int, score_range: tuple[float, float], success_at: float
) -> None:
    """Set an environment's limits where they are its arguments. Errors: ConfigError."""
    if not score_range[0] < score_range[1]:
        raise ConfigError(f"score_range: {list(score_range)} is empty: give LOWEST, HIGHEST")
    env.max_turns, env.success_at = max_turns, success_at  # type: ignore[misc]
    env.score_range = score_range  # type: ignore[misc]


def is_blocking(env_class: Any, task: Task, args: Mapping[str, Any]) -> bool:
    """Returns whether an environment's calls for this task run in worker threads."""
    if hasattr(env_class, "blocks"):
        return bool(env_class.blocks(task, **args))
    return bool(getattr(env_class, "blocking", True))


def expert_knows_more(env_class: Any, task: Task, args: Mapping[str, Any]) -> bool:
    """Returns what `Env.expert_knows_more` says. Errors: EnvError where it cannot be called, or
    answers with something else than True or False."""
    if not hasattr(env_class, "expert_knows_more"):  # a class that is not derived from Env
        return False
    name = f"{env_class.__name__}.expert_knows_more"
    form = "write `@classmethod def expert_knows_more(cls, task, **args) -> bool`"
    try:
        answer = env_class.expert_knows_more(task, **args)
    except Exception as error:
        raise EnvError(f"{name} raised {type(error).__name__}: {error}; {form}") from error
    if not isinstance(answer, bool):
        raise EnvError(f"{name} returned {answer!r:.40}; {form}")
    return answer


class NoExpert(Exception):
    """The environment, level or state has no scripted expert."""


def expert_action(env: Any) -> str:
    """Returns the expert's action. Errors: NoExpert; EnvError for anything else than a text."""
    action: Any = _not_a_coroutine(env.expert_action(), "expert_action")
    if not isinstance(action, str):
        raise EnvError(f"expert_action returned {action!r:.80}; it has to return a text")
    return action


def expert_steps(env: Any) -> str:
    """Returns the expert's lines before its action, with a line break; "" for none.

    Errors: EnvError for anything else than a text or None.
    """
    steps: Any = _not_a_coroutine(env.expert_steps(), "expert_steps")
    if steps is not None and not isinstance(steps, str):
        raise EnvError(f"expert_steps returned {steps!r:.80}; it has to return a text or None")
    return f"{steps}\n" if steps else ""


def _not_a_coroutine(result: Any, method: str) -> Any:
    """The result itself. Errors: EnvError for a method that is async, and must not be."""
    if inspect.iscoroutine(result):
        result.close()
        raise EnvError(f"{method} is async: write `def {method}`")
    return result


class Env(ABC):
    """Base class of environments.

    Errors: report what a *model's action* causes (an unknown command, a wrong argument) to the
    model, as a message of the StepResult. An exception means that the environment itself failed:
    the episode ends with status error_env and is retried; it never counts as a reward of 0.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """Lowest and highest episode reward (the sum of step rewards)."""

    success_at: ClassVar[float] = 1.0
    """Episode reward from which an episode is a success."""

    max_turns: ClassVar[int] = 20
    """Default turn limit of an episode."""

    blocking: ClassVar[bool] = True
    """True if `reset` and `step` compute rather than await. Blocking environments run in worker
    threads, so a timeout can abandon a hanging call. Set it to False for an environment that only
    awaits a network, or whose steps cannot hang and cost less than a thread switch."""

    cheap_reset: ClassVar[bool] = False
    """True if `reset` takes a few milliseconds and needs no process and no network. All tasks are
    then reset before a run, to find held-out tasks whose world is a training task's."""

    several_processes: ClassVar[bool] = False
    """True if a run's episodes may be played in several processes at once, each with its own copy
    of this module: an episode shares nothing with others, and needs no port and no file."""

    agentgym: ClassVar[str | None] = None
    """Key of this environment in `ludus.tasks.agentgym.ITEMS`; None: AgentGym does not have it."""

    def members(self) -> Mapping[str, Env]:
        """The environments of a mixture, by name; empty for any other environment."""
        return {}

    def success_of(self, task: Task) -> float:
        """The episode reward from which `task` counts as solved."""
        return self.success_at

    @classmethod
    def blocks(cls, task: Task, **args: Any) -> bool:
        """`blocking` for an episode of `task` in an environment with these arguments."""
        return cls.blocking

    @classmethod
    def expert_knows_more(cls, task: Task, **args: Any) -> bool:
        """True if the expert knows what the agent must find out first, such as the room of a hidden
        coin. `ludus init` then gives an agent twice the expert's turns."""
        return False

    @classmethod
    def works(cls, **args: Any) -> str:
        """Processes and devices that an environment with these arguments computes on besides its
        own process, for `ludus plan`; empty: none."""
        return ""

    @classmethod
    def at_once(cls, **args: Any) -> int | None:
        """Most calls at the same time in a process of environments with these arguments, for
        `ludus plan`; None: as many as there are episodes under way."""
        return None

    async def prepare(self, task: Task) -> None:  # noqa: B027 - most environments need nothing
        """Start what the episodes of a process share, such as an engine, and write what `task`
        needs. Called before `reset`; has PREPARE_S seconds, not a step's."""

    @abstractmethod
    async def reset(self, task: Task) -> Observation:
        """Start the task's episode. The same task always gives the same episode."""

    @abstractmethod
    async def step(self, action: Message) -> StepResult:
        """Take the assistant's message: `content` is the action text, `tool_calls` its calls."""

    async def world(self, task: Task) -> str | None:
        """The world that `task` opens, as text: equal tasks have equal worlds. None: unknown.

        By default the opening observation if `cheap_reset`. Override it if different worlds open
        alike, for example where the agent sees only a part.
        """
        if not self.cheap_reset:
            return None
        messages = (await self.reset(task)).messages
        await self.close()
        return "\n".join(f"{message.role}: {message.content}" for message in messages)

    async def close(self) -> None:  # noqa: B027 - most environments hold no resources
        """Release the episode's resources. May be called more than once."""

    def scores(self) -> dict[str, float]:
        """Returns named scores of the finished episode, stored with its trajectory."""
        return {}

    def explanation(self) -> str:
        """Explains the finished episode's score to people who read the rollout; empty: nothing."""
        return ""

    def tools(self) -> Sequence[ToolSpec]:
        """The tools of the model, for rollouts in the tool-call format."""
        return ()

    def text_of(self, call: ToolCall) -> str:
        """The action text of a tool call; the inverse of `call_of`."""
        raise NotImplementedError(f"{type(self).__name__} takes no tool calls")

    def call_of(self, action: str) -> ToolCall:
        """The tool call of an action text; used to write demonstrations."""
        raise NotImplementedError(f"{type(self).__name__} takes no tool calls")

    def expert_action(self) -> str:
        """The next action of a scripted expert, which may use the full state. Errors: NoExpert."""
        raise NoExpert(f"{type(self).__name__} has no expert")

    def expert_steps(self) -> str | None:
        """The lines that the expert writes before its next action: how the action follows. For
        demonstrations in the format `plain`; `step` then receives both. None: nothing."""
        return None

    def expert_code(self) -> str | Sequence[str] | None:
        """Code that the expert runs before its next action, for demonstrations in the format
        `code`: one block, or several that run in turn; None: none."""
        return None

    def inspect(self, what: str) -> Any:
        """A view of the running episode that is no observation, as JSON; services offer it.

        Errors: LookupError for a name that the environment does not have.
        """
        raise LookupError(f"{type(self).__name__} has no {what!r}")

    @classmethod
    def tiers(cls) -> Sequence[str]:
        """The levels or depths of this environment's tasks, easiest first."""
        return ()

    @classmethod
    def check_tier(cls, tier: str) -> None:
        """Refuse an unknown tier; an environment may accept finer tiers than it lists.

        Errors: ConfigError.
        """
        tiers = list(cls.tiers())
        if tier not in tiers:
            near = did_you_mean(tier, tiers)
            if not near and tiers:
                near = f" (known: {', '.join(tiers[:12])}, and {len(tiers) - 12} more)"
            raise ConfigError(f"{tier!r} is not a tier of {cls.__name__}{near}")

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """Returns the task of a tier and a seed; the reader `env` makes task lists with it."""
        raise NotImplementedError(f"{cls.__name__} does not make tasks from seeds")
