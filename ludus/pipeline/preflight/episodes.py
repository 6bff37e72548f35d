"""A few episodes of a recipe's environment before its run: of the expert, and of random words.

Each is played in a worker thread, so an environment that hangs does not stop the command.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, cast

from ludus.config.schema import RunConfig
from ludus.core.errors import EnvError, LudusError
from ludus.core.modules import told
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.data.expert import CodeBlocks, Demonstration, run_expert
from ludus.envs import ENVS
from ludus.envs.base import Env, NoExpert, awaited, limits_of
from ludus.envs.checks.play import EpisodeProcessDied, play_in_process
from ludus.rollout.hosts.host import LocalEnvs, check_opening, check_result
from ludus.rollout.hosts.threads import EnvThread, Overdue
from ludus.tasks.mixture import part_of, settings_of

NUM_EPISODES = 8
"""Episodes of the expert, spread over the tiers."""

MAX_EPISODES = 32
"""Most episodes of the expert: further ones are played where none of these succeeds."""

NUM_AGAIN = 2
"""Episodes of the expert that are played twice."""

NUM_RANDOM = 2
"""Episodes of random words; NUM_EPISODES without an expert."""

NUM_HELDOUT = 8
"""Held-out tasks that are played with random words, spread over the tiers, while time is left."""

RANDOM_TURNS = 5
"""Turns of an episode of random words."""

PATIENCE_S = 5.0
"""No further episode is begun after this time."""

DEADLINE_S = 15.0
"""Episodes under way are given up after this time."""


APART_S = 8.0
"""Seconds of the episode in another process, with the start of it."""


@dataclass(slots=True)
class Played:
    """An episode, as far as it went.

    Args:
        rewards, seconds: of each step. `cpu_s`: processor time of all steps.
        opening_s: wall time of the constructor and the reset.
        demonstration: the expert's whole episode.
        error: the reason why it ended early; `no_expert`, `overdue`: the kind of reason.
    """

    task: Task
    opening: list[Message] = field(default_factory=list)
    opened: bool = False
    rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    opening_s: float = 0.0
    score_range: tuple[float, float] = (0.0, 1.0)
    max_turns: int = 1
    demonstration: Demonstration | None = None
    error: str = ""
    no_expert: bool = False
    overdue: bool = False

    @property
    def reward(self) -> float:
        """The sum of the step rewards."""
        return sum(self.rewards)

    @property
    def fault(self) -> str:
        """The error, with the task."""
        return f"task {self.task.id}: {self.error}"


@dataclass(frozen=True, slots=True)
class Sample:
    """Episodes that were played before the run.

    `complete`: all tasks with an expert's episode in the run were played, or all that were planned;
    False: the time was up before. `again`: second plays of tasks that the expert finished.
    `heldout`: of held-out tasks, in words that are no expert's.
    """

    expert: list[Played]
    random: list[Played]
    num_tasks: int
    complete: bool
    again: Sequence[Played] = ()
    heldout: Sequence[Played] = ()

    @property
    def finished(self) -> list[Played]:
        """The expert's whole episodes."""
        return [played for played in self.expert if played.demonstration is not None]

    @property
    def opened(self) -> list[Played]:
        """All episodes that have an opening observation."""
        return [played for played in (*self.expert, *self.random) if played.opened]


async def play_sample(
    config: RunConfig, tasks: Sequence[Task], heldout: Sequence[Task] = ()
) -> Sample:
    """Play episodes of the tasks that have an environment.

    Errors: EnvError for an environment that ends its process.
    """
    envs = LocalEnvs(config.env)
    tasks, heldout = ([t for t in ts if envs.spec_of(t) is not None] for ts in (tasks, heldout))
    if tasks:
        _play_apart(envs, tasks[0])
    demonstrated = tasks[: config.demonstrations.num_episodes] if config.demonstrations else tasks
    chosen = spread(demonstrated, MAX_EPISODES)
    thread, started = EnvThread(), time.monotonic()
    expert: list[Played] = []
    random: list[Played] = []
    overdue = False

    def left() -> bool:
        return time.monotonic() - started < PATIENCE_S and not overdue

    async def one(task: Task, act: Callable[[Recorded], Awaitable[Any]]) -> Played:
        nonlocal overdue
        deadline = max(DEADLINE_S - (time.monotonic() - started), 0.1)
        played = await play_one(envs, thread, task, deadline, act)
        overdue |= played.overdue
        return played

    for task in chosen:
        enough = len(expert) >= NUM_EPISODES and any(_succeeded(played) for played in expert)
        if enough or not left():
            break
        expert.append(await one(task, partial(_demonstrate, config)))
    complete = len(expert) >= min(NUM_EPISODES, len(chosen))
    has_expert = any(not played.no_expert for played in expert)
    for task in chosen[: NUM_RANDOM if has_expert else NUM_EPISODES]:
        if not left():
            break
        random.append(await one(task, _wander))
    again: list[Played] = []
    finished = [played.task for played in expert if played.demonstration is not None]
    for task in finished[:NUM_AGAIN]:
        if not left():
            break
        again.append(await one(task, partial(_demonstrate, config)))
    unseen: list[Played] = []
    for task in spread(heldout, NUM_HELDOUT):
        if not left():
            break
        unseen.append(await one(task, _wander))
    thread.close()
    return Sample(expert, random, len(demonstrated), complete, again, unseen)


def _play_apart(envs: LocalEnvs, task: Task) -> None:
    """Play a task of the user's own class in another process: code that ends its process would end
    the command, with an exit code of its own. Errors: EnvError."""
    spec = envs.spec_of(task)
    if spec is None or ":" not in spec.name:
        return
    try:
        play_in_process(spec, task, None, APART_S)
    except EpisodeProcessDied as error:
        raise EnvError(f"env: {spec.name!r} {error.fault}") from None
    except Exception:  # the episodes here tell it, and its place
        return


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """Returns at most `count` tasks: of each tier in turn, from its first task on."""
    tiers: dict[tuple[str | None, str | None], list[Task]] = defaultdict(list)
    for task in tasks:
        own = tiers[part_of(task), task.tier]
        if len(own) < count:
            own.append(task)
    chosen = [*tiers.values()]
    if len(chosen) > NUM_EPISODES:  # the first and the last tier, and some between
        last = len(chosen) - 1
        places = [i * last // (NUM_EPISODES - 1) for i in range(NUM_EPISODES)]
        others = [i for i in range(len(chosen)) if i not in places]
        chosen = [chosen[i] for i in (*places, *others)]
    rounds = zip_longest(*chosen)
    return [task for tasks in rounds for task in tasks if task is not None][:count]


def _succeeded(played: Played) -> bool:
    return played.demonstration is not None and played.demonstration.success


class Recorded:
    """An environment whose opening, rewards and times are recorded."""

    def __init__(self, env: Env, played: Played) -> None:
        self._env, self._played, self.task = env, played, played.task
        self.stopped = False
        limit = env.max_turns
        played.max_turns = limit if isinstance(limit, int) else 1

    @property
    def won(self) -> bool:
        """True if the rewards so far reach the environment's `success_at`."""
        return self._played.reward >= limits_of(self._env)[1]

    async def reset(self, task: Task) -> Observation:
        started = time.perf_counter()
        opening = check_opening(await awaited("reset", self._env.reset(task)))
        self._played.opening_s += time.perf_counter() - started
        self._played.opening, self._played.opened = list(opening.messages), True
        self._played.score_range, _ = limits_of(self._env)
        return opening

    async def step(self, action: Message) -> StepResult:
        if self.stopped:  # the command does not wait for it any more
            raise LudusError("given up")
        started, cpu = time.perf_counter(), time.thread_time()
        try:
            result = check_result(await awaited("step", self._env.step(action)))
        finally:
            self._played.seconds.append(time.perf_counter() - started)
            self._played.cpu_s += time.thread_time() - cpu
        self._played.rewards.append(float(result.reward or 0.0))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


async def play_one(
    envs: LocalEnvs,
    thread: EnvThread,
    task: Task,
    deadline: float,
    act: Callable[[Recorded], Awaitable[Any]],
) -> Played:
    """Let `act` play an episode of a task in the environments' thread; an error, or the deadline in
    seconds, ends it and is in the result."""
    played = Played(task)
    made: list[Recorded] = []

    async def work() -> Any:
        started = time.perf_counter()
        env = envs.make(task)
        played.opening_s = time.perf_counter() - started
        made.append(Recorded(env, played))
        try:
            return await act(made[0])
        finally:
            await made[0].close()

    try:
        result = await thread.run(work, deadline, blocking=True)
        played.demonstration = result if isinstance(result, Demonstration) else None
    except NoExpert as error:
        played.no_expert, played.error = True, str(error)
    except Overdue:
        played.overdue, played.error = True, f"it took longer than {deadline:.0f} s"
        for env in made:
            env.stopped = True
    except LudusError as error:
        played.error = str(error)
    except Exception as error:
        played.error = told(error)
    return played


async def _demonstrate(config: RunConfig, env: Recorded) -> Demonstration:
    task = env.task
    settings = settings_of(config.rollout, part_of(task))
    blocks = None
    if settings.format == "code":  # only for its markers: the expert's code is not run
        blocks = CodeBlocks(settings.markers, cast(Any, None), runs=False)
    return await run_expert(
        cast(Env, env), task.model_copy(deep=True), settings.format, 0.0, blocks
    )


async def _wander(env: Recorded) -> None:
    """Play words that are no expert's."""
    await env.reset(env.task.model_copy(deep=True))
    for turn in range(RANDOM_TURNS):
        if (await env.step(Message(role="assistant", content=f"look {turn}"))).done:
            break


def at_once(config: RunConfig) -> int:
    """Returns the episodes that are played at the same time."""
    limit = None
    if config.env is not None:
        env: Any = ENVS.load(config.env.name)
        limit = env.at_once(**ENVS.check(config.env, "env")) if hasattr(env, "at_once") else None
    return min(config.rollout.concurrency, limit or config.rollout.concurrency)
