"""Sizes of a recipe's episodes, measured on a few of the expert's, for `ludus plan`.

A few training tasks are played once; conversations become tokens by the recipe's tokenizer.
Nothing is written, and the network is not used.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar, cast

from huggingface_hub import try_to_load_from_cache

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, EnvError, LudusError, counted
from ludus.core.modules import own_frame, told
from ludus.core.system.signals import run
from ludus.core.types import Task, ToolCall
from ludus.data.conversations import read_conversations, replay_all
from ludus.data.expert import CodeBlocks, Demonstration, run_expert
from ludus.envs import ENVS
from ludus.envs.base import Env, NoExpert
from ludus.pipeline.parts.checks import check
from ludus.pipeline.parts.tokenizer import (
    check_functions,
    formats_of,
    make_renderers,
    make_tokenizer,
)
from ludus.rollout.hosts.host import LocalEnvs
from ludus.rollout.hosts.threads import EnvThread, Overdue
from ludus.tasks.mixture import part_of, settings_of
from ludus.tasks.readers import read_tasks
from ludus.tools.base import ToolResult
from ludus.tools.toolbox import Toolbox

T = TypeVar("T")

NUM_TASKS = 24
"""Tasks that the expert plays at most."""

LONGEST_S = 30.0
"""Seconds of an episode, with the start of its environment, at most."""

PATIENCE_S = 15.0
"""No further task is begun after this time."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Means over the expert's episodes.

    Tokens: `prompt` before the first turn, then `observed` and `sampled` a turn. Seconds: `reset_s`
    and `step_s` of the environment, `expert_s` of a whole episode with its expert, without the
    tools. `calls`: tool calls, where the expert runs its code in each episode that may. `failed`:
    episodes that could not be played, in words; empty: none.
    """

    prompt: float
    observed: float
    sampled: float
    turns: float
    reset_s: float = 0.0
    step_s: float = 0.0
    expert_s: float = 0.0
    calls: float = 0.0
    failed: str = ""


def measure(config: RunConfig) -> Usage | None:
    """Check a recipe as `ludus debug` does and play its expert; None without an expert.

    Errors: ConfigError, DataError for wrong arguments, tiers and files, and where no episode can be
    played.
    """
    config = local(config)
    check(config)
    env = ENVS.build(config.env, "env") if config.env else None
    on_bad_line = config.tasks.on_bad_line
    train = read_tasks(config.tasks.train, "tasks.train", maker=env, on_bad_line=on_bad_line)
    if config.tasks.heldout is not None:
        heldout = read_tasks(
            config.tasks.heldout, "tasks.heldout", maker=env, on_bad_line=on_bad_line
        )
        check_functions(config, heldout)
    check_functions(config, train)
    if config.env is None:
        return None
    clock = _Clock()
    played, failed = run(_play(config, train, clock))
    if not played:
        return None
    conversations, _ = read_conversations(config.model_copy(update={"sft": None}), played, train)
    messages = [message for item in conversations for message in item.messages]
    tokenizer = make_tokenizer(config, [], messages)
    _, trajectories, _ = replay_all(conversations, make_renderers(config, tokenizer), 10**9)
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
        calls=clock.tool_calls / len(played),
        failed=failed,
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


async def _play(
    config: RunConfig, tasks: Sequence[Task], clock: _Clock
) -> tuple[list[Demonstration], str]:
    """`_played`, with the tools that run the expert's code in the format `code`."""
    if "code" not in {config.rollout.format, *formats_of(config).values()}:
        return await _played(config, tasks, clock, None)
    async with await Toolbox.open(config.tools) as toolbox:
        return await _played(config, tasks, clock, cast(Toolbox, _TimedTools(toolbox, clock)))


async def _played(
    config: RunConfig, tasks: Sequence[Task], clock: _Clock, toolbox: Toolbox | None
) -> tuple[list[Demonstration], str]:
    """Episodes that the expert finished, while there is patience, and in words those that failed.

    Errors: ConfigError where all fail.
    """
    spec = config.env
    assert spec is not None
    played: list[Demonstration] = []
    faults: list[str] = []
    started = time.perf_counter()
    envs = LocalEnvs(spec)
    thread = EnvThread()
    for task in _spread([task for task in tasks if envs.spec_of(task)]):
        if time.perf_counter() - started > PATIENCE_S:
            break
        try:
            play = partial(_episode, config, envs, task, clock, toolbox)
            played.append(await thread.run(play, LONGEST_S, blocking=True))
        except (NoExpert, NotImplementedError):
            continue
        except Overdue:
            faults.append(f"task {task.id}: it took longer than {LONGEST_S:.0f} s")
            break  # so may the others
        except EnvError as error:
            faults.append(f"task {task.id}: {error}")
        except LudusError:
            raise
        except Exception as error:
            if own_frame(error) is None:  # our fault: its traceback tells the place
                raise
            faults.append(f"task {task.id}: {told(error)}")
    if faults and not played:
        raise ConfigError(f"env: {spec.name}: {faults[0]}")
    return played, (
        f"{len(faults)} of {counted(len(faults) + len(played), 'episode')} of the expert failed "
        f"({faults[0]}): the estimate is of the others"
        if faults
        else ""
    )


async def _episode(
    config: RunConfig, envs: LocalEnvs, task: Task, clock: _Clock, toolbox: Toolbox | None
) -> Demonstration:
    """The expert's episode of a task, timed."""
    env = envs.make(task)
    settings = settings_of(config.rollout, part_of(task))
    await env.reset(task)  # not timed: JVMs start, games are translated once
    runs = toolbox is not None and settings.format == "code"
    blocks = CodeBlocks(settings.markers, toolbox) if runs and toolbox else None
    timed = cast(Env, _Timed(env, clock))
    play = partial(run_expert, timed, task, settings.format, 0.0, blocks)
    return await clock.timed("all", play)


def _spread(tasks: Sequence[Task]) -> list[Task]:
    """At most NUM_TASKS of the tasks, one at random of each span: tasks of fixed distance could all
    be of one tier, for tiers take turns."""
    draw, count = random.Random(0), min(NUM_TASKS, len(tasks))
    return [tasks[int((span + draw.random()) * len(tasks) / count)] for span in range(count)]


class _Clock:
    """Processor and wall time of calls, by name."""

    def __init__(self) -> None:
        self._calls: dict[str, list[tuple[float, float]]] = {}
        self._tools = (0.0, 0.0)
        self.tool_calls = 0

    async def timed(self, name: str, act: Callable[[], Awaitable[T]]) -> T:
        """Time a call, without the tools that it calls."""
        before = self._now()
        try:
            return await act()
        finally:
            after = self._now()
            self._calls.setdefault(name, []).append((after[0] - before[0], after[1] - before[1]))

    async def left_out(self, act: Callable[[], Awaitable[T]]) -> T:
        """A tool's work, whose time no timed call counts."""
        before = self._now()
        try:
            return await act()
        finally:
            after, (processor, wall) = self._now(), self._tools
            self._tools = processor + after[0] - before[0], wall + after[1] - before[1]
            self.tool_calls += 1

    def _now(self) -> tuple[float, float]:
        processor, wall = self._tools
        return time.process_time() - processor, time.perf_counter() - wall

    def seconds(self, name: str) -> float:
        """The mean processor time of a call, which other load does not lengthen. Where this process
        mostly waits, the lower quartile of the wall time: the first calls of a JVM are slow."""
        calls = self._calls.get(name) or [(0.0, 0.0)]
        processor, walls = fmean(call[0] for call in calls), sorted(call[1] for call in calls)
        return processor if processor > fmean(walls) / 10 else walls[len(walls) // 4]


class _TimedTools:
    """Tools whose calls are counted, and not timed. They run in the loop that opened them."""

    def __init__(self, toolbox: Toolbox, clock: _Clock) -> None:
        self._toolbox, self._clock = toolbox, clock
        self._loop = asyncio.get_running_loop()

    async def call(self, calls: Sequence[ToolCall], episode: str) -> list[ToolResult]:
        async def there() -> list[ToolResult]:
            work = self._toolbox.call(calls, episode)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

        return await self._clock.left_out(there)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._toolbox, name)


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
