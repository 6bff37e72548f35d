"""Sizes of a recipe's episodes, measured on a few of the expert's, for `ludus plan`.

The first training tasks are played once; conversations become tokens by the recipe's tokenizer.
Nothing is written, and the network is not used.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar, cast

from huggingface_hub import try_to_load_from_cache

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, EnvError
from ludus.core.signals import run
from ludus.core.types import Task
from ludus.data.conversations import read_conversations, replay_all
from ludus.data.demonstrations import Demonstration, run_expert
from ludus.envs import ENVS
from ludus.envs.base import Env, NoExpert
from ludus.pipeline.registries import check
from ludus.pipeline.tokenizer import make_renderer, make_renderers, make_tokenizer
from ludus.tasks.readers import read_tasks

T = TypeVar("T")

NUM_TASKS = 24
"""Tasks that the expert plays at most, spread over the training tasks."""

PATIENCE_S = 15.0
"""No further task is begun after this time."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Means over the expert's episodes.

    Tokens: `prompt` before the first turn, then `observed` and `sampled` a turn. Seconds: `reset_s`
    and `step_s` of the environment, `expert_s` of a whole episode with its expert.
    """

    prompt: float
    observed: float
    sampled: float
    turns: float
    reset_s: float = 0.0
    step_s: float = 0.0
    expert_s: float = 0.0


def measure(config: RunConfig) -> Usage | None:
    """Check a recipe as `ludus debug` does and play its expert; None without an expert.

    Errors: ConfigError, DataError for wrong arguments, tiers and files.
    """
    config = local(config)
    check(config)
    env = ENVS.build(config.env, "env") if config.env else None
    on_bad_line = config.tasks.on_bad_line
    train = read_tasks(config.tasks.train, "tasks.train", maker=env, on_bad_line=on_bad_line)
    if config.tasks.heldout is not None:
        read_tasks(config.tasks.heldout, "tasks.heldout", maker=env, on_bad_line=on_bad_line)
    if config.env is None:
        return None
    clock = _Clock()
    played = run(_play(config, train, clock))
    if not played:
        return None
    conversations, _ = read_conversations(config.model_copy(update={"sft": None}), played, train)
    messages = [message for item in conversations for message in item.messages]
    tokenizer = make_tokenizer(config, [], messages)
    renderer, renderers = make_renderer(config, tokenizer), make_renderers(config, tokenizer)
    _, trajectories, _ = replay_all(conversations, renderer, 10**9, renderers)
    prompts, observed, sampled = [], 0, 0
    for trajectory in trajectories:
        first = next((n for n, s in enumerate(trajectory.segments) if s.logprobs is not None), 0)
        prompts.append(sum(len(s.token_ids) for s in trajectory.segments[:first]))
        for segment in trajectory.segments[first:]:
            if segment.logprobs is None:
                observed += len(segment.token_ids)
            else:
                sampled += len(segment.token_ids)
    turns = sum(demonstration.num_turns for demonstration in played)
    return Usage(
        prompt=fmean(prompts),
        observed=observed / turns,
        sampled=sampled / turns,
        turns=turns / len(played),
        reset_s=clock.seconds("reset"),
        step_s=clock.seconds("step"),
        expert_s=clock.seconds("all"),
    )


def local(config: RunConfig) -> RunConfig:
    """The recipe with its model in a local folder: a hub's name becomes the folder of the cached
    snapshot. Errors: ConfigError where neither is there."""
    path = config.model.path
    if path is None or Path(path).expanduser().exists():
        return config
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(f"model.path: there is no folder {path}")
    cached = try_to_load_from_cache(path, "config.json")
    if not isinstance(cached, str):
        raise ConfigError(
            f"model.path: {path} is not in the local cache, and `ludus plan` downloads nothing: "
            f"run `hf download {path}` first, or set model.path to a folder"
        )
    model = config.model.model_copy(update={"path": str(Path(cached).parent)})
    return config.model_copy(update={"model": model})


async def _play(config: RunConfig, tasks: Sequence[Task], clock: _Clock) -> list[Demonstration]:
    """Episodes that the expert finished, while there is patience."""
    spec = config.env
    assert spec is not None
    played: list[Demonstration] = []
    started = time.perf_counter()
    for task in tasks[:: max(len(tasks) // NUM_TASKS, 1)][:NUM_TASKS]:
        if time.perf_counter() - started > PATIENCE_S:
            break
        env = ENVS.build(spec, "env")
        try:
            await env.reset(task)  # not timed: JVMs start, games are translated once
            play = partial(run_expert, cast(Env, _Timed(env, clock)), task, config.rollout.format)
            played.append(await clock.timed("all", play))
        except (NoExpert, NotImplementedError):
            continue
        except EnvError as error:
            raise ConfigError(f"env: {spec.name}: task {task.id}: {error}") from error
    return played


class _Clock:
    """Processor and wall time of calls, by name."""

    def __init__(self) -> None:
        self._calls: dict[str, list[tuple[float, float]]] = {}

    async def timed(self, name: str, act: Callable[[], Awaitable[T]]) -> T:
        processor, wall = time.process_time(), time.perf_counter()
        try:
            return await act()
        finally:
            spent = time.process_time() - processor, time.perf_counter() - wall
            self._calls.setdefault(name, []).append(spent)

    def seconds(self, name: str) -> float:
        """The mean processor time of a call, which other load does not lengthen. Where this process
        mostly waits, the lower quartile of the wall time: the first calls of a JVM are slow."""
        calls = self._calls.get(name) or [(0.0, 0.0)]
        processor, walls = fmean(call[0] for call in calls), sorted(call[1] for call in calls)
        return processor if processor > fmean(walls) / 10 else walls[len(walls) // 4]


class _Timed:
    """An environment whose `reset` and `step` are timed."""

    def __init__(self, env: Env, clock: _Clock) -> None:
        self._env, self._clock = env, clock

    async def reset(self, task: Task) -> Any:
        return await self._clock.timed("reset", lambda: self._env.reset(task))

    async def step(self, action: Any) -> Any:
        return await self._clock.timed("step", lambda: self._env.step(action))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)
