"""What an environment is: `reset`, `step`, `close`, in messages.

One Env object plays one trajectory at a time. It knows nothing of tokens, models or training.
A whole environment:

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

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ludus.core.errors import ConfigError, did_you_mean
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec


class NoExpert(Exception):
    """This environment, level or state has no scripted expert."""


class Env(ABC):
    """Base class of environments.

    Errors: whatever a *model's action* causes (an unknown command, a wrong argument) is told to the
    model, as a message of the StepResult. An exception means that the environment itself broke; it
    ends the episode with status error_env, is retried, and is never a reward of 0.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """Lowest and highest episode reward (the sum of step rewards)."""

    success_at: ClassVar[float] = 1.0
    """An episode whose reward reaches this counts as a success."""

    max_turns: ClassVar[int] = 20
    """Turns after which the environment's authors end an episode."""

    blocking: ClassVar[bool] = True
    """Whether `reset` and `step` compute rather than await. Blocking environments run in worker
    threads, so that a deadline can pass over one that hangs. Set it to False for an environment
    that only awaits a network, or whose steps cannot hang and cost less than another thread."""

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
        """`blocking`, for an episode of this task and an environment with these arguments."""
        return cls.blocking

    @abstractmethod
    async def reset(self, task: Task) -> Observation:
        """Start the task's episode. The same task gives the same episode, always."""

    @abstractmethod
    async def step(self, action: Message) -> StepResult:
        """Take the assistant's message: `content` is the action's text, `tool_calls` its calls."""

    async def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Release what the episode holds. May be called more than once."""

    def scores(self) -> dict[str, float]:
        """Numbers beside the episode's reward that are kept with its trajectory, at its end."""
        return {}

    def tools(self) -> Sequence[ToolSpec]:
        """The tools that the model may call, for rollouts in the tool-call format."""
        return ()

    def text_of(self, call: ToolCall) -> str:
        """The action text that a tool call stands for; the inverse of `call_of`."""
        raise NotImplementedError(f"{type(self).__name__} takes no tool calls")

    def call_of(self, action: str) -> ToolCall:
        """The tool call that an action text stands for; used to write demonstrations."""
        raise NotImplementedError(f"{type(self).__name__} takes no tool calls")

    def expert_action(self) -> str:
        """The action a scripted expert takes now; it may look at the full state.

        Errors: NoExpert where there is none.
        """
        raise NoExpert(f"{type(self).__name__} has no expert")

    @classmethod
    def tiers(cls) -> Sequence[str]:
        """The levels or depths that tasks of this environment can have, easiest first."""
        return ()

    @classmethod
    def check_tier(cls, tier: str) -> None:
        """Whether there is such a tier; an environment may know finer ones than it lists.

        Errors: ConfigError.
        """
        known = list(cls.tiers())
        if tier not in known:
            raise ConfigError(
                f"{tier!r} is not a tier of {cls.__name__}{did_you_mean(tier, known)}"
            )

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The task of a tier and a seed: what `tasks.reader: env` makes task lists from."""
        raise NotImplementedError(f"{cls.__name__} does not make tasks from seeds")
