"""Several environments in one run: each task is played in its own environment.

    env:
      name: mixture
      args:
        envs:
          babyai: babyai
          crafting: {name: textcraft, args: {num_distractors: 3}}

The names are chosen freely; tasks, turn limits and metrics use them. The reader `mixture` makes the
tasks, in exact ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from ludus.config.registry import Registry
from ludus.core.errors import ConfigError, EnvError, LudusError, did_you_mean
from ludus.core.types import Message, Observation, Spec, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.base import Env, NoExpert, awaited, limits_of
from ludus.tasks.mixture import PART, part_of


class Mixture(Env):
    """Plays each task in the environment named by `Task.data`, and delegates to it.

    Episode rewards are scaled to [0, 1], as (reward - low) / (high - low) of the environment's
    `score_range`, so that environments weigh the same: each step's reward is scaled, and -low is
    added, scaled, to the first step's. `scores` has the unscaled sum as `raw_reward`. An episode
    that ends before its first step has the lowest reward.

    Errors: ConfigError for an unknown environment or wrong arguments.
    """

    def __init__(
        self,
        envs: Annotated[
            dict[str, Spec], Field(min_length=1, description="The environments, by name.")
        ],
    ) -> None:
        self.envs = envs
        self._env: Env | None = None
        for name, spec in envs.items():
            if spec.name == "mixture":
                raise ConfigError(f"envs.{name}: a mixture holds no other mixture")

    @classmethod
    def blocks(cls, task: Task, **args: Any) -> bool:
        """True if the task's own environment blocks."""
        spec = args["envs"].get(part_of(task))
        if spec is None:
            return cls.blocking
        member: Any = _registry().load(spec.name)
        return bool(member.blocks(task, **spec.args))

    def members(self) -> Mapping[str, Env]:
        """An instance of each environment, not used for episodes. Errors: ConfigError."""
        return self._members

    @cached_property
    def _members(self) -> dict[str, Env]:
        return {name: self._make(name) for name in self.envs}

    def success_of(self, task: Task) -> float:
        """The scaled reward from which an episode of the task is a success."""
        return _success_at(self.members()[self._name_of(task)])

    async def prepare(self, task: Task) -> None:
        name = self._name_of(task)
        if type(self.members()[name]).prepare is not Env.prepare:
            await awaited("prepare", self._make(name).prepare(_without_part(task)))

    async def reset(self, task: Task) -> Observation:
        await self.close()
        self._env = self._make(self._name_of(task))
        self._scale = _scale(self._env)
        self._raw, self._offset = 0.0, _shift(self._env)
        self.max_turns = self._env.max_turns  # type: ignore[misc]
        self.success_at = _success_at(self._env)  # type: ignore[misc]
        return await awaited("reset", self._env.reset(_without_part(task)))

    async def world(self, task: Task) -> str | None:
        return await self._members[self._name_of(task)].world(_without_part(task))

    async def step(self, action: Message) -> StepResult:
        result = await awaited("step", self._playing().step(action))
        if result.reward is None and not self._offset:
            return result
        raw = result.reward or 0.0
        self._raw += raw
        reward, self._offset = raw * self._scale + self._offset, 0.0
        return result.model_copy(update={"reward": reward})

    async def close(self) -> None:
        if self._env is not None:
            await self._env.close()

    def scores(self) -> dict[str, float]:
        return {"raw_reward": self._raw, **self._playing().scores()}

    def tools(self) -> Sequence[ToolSpec]:
        """The tools of the current episode's environment; before any episode, of all."""
        if self._env is not None:
            return self._env.tools()
        return [tool for env in self.members().values() for tool in env.tools()]

    def text_of(self, call: ToolCall) -> str:
        return self._playing().text_of(call)

    def call_of(self, action: str) -> ToolCall:
        return self._playing().call_of(action)

    def expert_action(self) -> str:
        if self._env is None:
            raise NoExpert("mixture: no episode is being played")
        return self._env.expert_action()

    def expert_steps(self) -> str | None:
        return self._playing().expert_steps()

    def expert_code(self) -> str | Sequence[str] | None:
        return self._playing().expert_code()

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        raise ConfigError("the tasks of a mixture come from the reader `mixture`, not from `env`")

    def _playing(self) -> Env:
        if self._env is None:
            raise EnvError("mixture: no episode was started; call reset first")
        return self._env

    def _name_of(self, task: Task) -> str:
        name = part_of(task)
        if name is None:
            raise EnvError(f"mixture: task {task.id!r} names no environment in data.{PART}")
        if name not in self.envs:
            near = did_you_mean(name, self.envs)
            raise EnvError(f"mixture: task {task.id!r} has unknown part {name!r}{near}")
        return name

    def _make(self, name: str) -> Env:
        try:
            return _registry().build(self.envs[name], f"env.args.envs.{name}")
        except LudusError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"env.args.envs.{name} cannot be built: {what}") from error


def _without_part(task: Task) -> Task:
    """The task as its own environment knows it."""
    data = {key: value for key, value in task.data.items() if key != PART}
    return task.model_copy(update={"data": data})


def _registry() -> Registry[Env]:
    from ludus.envs import ENVS  # the table names this file

    return ENVS


def _scale(env: Env) -> float:
    (low, high), _ = limits_of(env)
    return 1.0 / (high - low)


def _shift(env: Env) -> float:
    return -env.score_range[0] * _scale(env)


def _success_at(env: Env) -> float:
    threshold = env.success_at * _scale(env) + _shift(env)
    # Rounding of scaled sums may put a reward just below the threshold.
    return threshold if env.score_range == (0.0, 1.0) else threshold - 1e-9
