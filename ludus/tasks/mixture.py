"""Tasks of several sources in exact ratios: the reader and the task sampler.

    tasks:
      train:
        name: mixture
        args:
          parts:
            babyai: {ratio: 50%, tasks: {name: env, args: {num_tasks: 2000}}}
            crafting: {ratio: 30%, tasks: {name: env, args: {num_tasks: 500}}}
            sums:
              {ratio: 20%, env: none, judge: answer, tasks: {name: json, args: {path: sums.jsonl}}}

`ratios` has the guarantees. Each part is visited in passes of its own, in a new order each.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from ludus.config.schema import RolloutConfig
from ludus.core.errors import CheckpointError, ConfigError, DataError, did_you_mean
from ludus.core.types import NO_ENV, Group, Spec, Task
from ludus.tasks.curriculum import TaskSampler
from ludus.tasks.ratios import Schedule, shares
from ludus.tasks.readers import BadLine, OnBadLine, TaskList, TaskMaker, read_tasks
from ludus.tasks.splits import Taken

PART = "part"
"""Key in `Task.data`: the name of the task's part."""

_NAME = re.compile(r"[A-Za-z0-9_.@-]+")

T = TypeVar("T")


class Part(BaseModel):
    """A part of a mixture: its ratio, the reader of its tasks, and what scores them."""

    model_config = ConfigDict(extra="forbid")

    ratio: StrictInt | StrictFloat | StrictStr = Field(
        1,
        description="Share of the tasks: whole numbers, relative to the others; or fractions or "
        "percentages that sum to 1: 0.3, 1/3, 40%.",
    )
    tasks: Spec = Field(description="Reader of the part's tasks.")
    env: Literal["none"] | None = Field(
        None, description="none: without environment; null: that of the part's name, or the run's."
    )
    judge: Spec | None = Field(
        None, description="Judge of the tasks that name none; null: the run's."
    )
    tools: list[str] | None = Field(
        None, description="Functions of the run's tools for the tasks that name none; null: all."
    )
    distinct: bool = Field(False, description="No task twice in a step; needs enough tasks.")


def parts_of_mixture(spec: Spec | None) -> dict[str, Part]:
    """The parts of a reader that has been read; none if it is no mixture."""
    if spec is None or spec.name != "mixture":
        return {}
    return {name: Part.model_validate(part) for name, part in spec.args["parts"].items()}


def part_of(task: Task) -> str | None:
    """The mixture part of a task; None without a mixture."""
    name = task.data.get(PART)
    return name if isinstance(name, str) else None


def for_part(setting: T | dict[str, T] | None, task: Task) -> T | None:
    """The value of a setting for a task, if the setting may differ by part; None if not set."""
    if isinstance(setting, dict):
        return setting.get(part_of(task) or "")
    return setting


def settings_of(config: RolloutConfig, part: str | None) -> RolloutConfig:
    """The rollout settings of a part; `config` itself for a part without settings of its own.

    A limit of `max_turns` by part, which `rl.horizon` sets, comes before that of `parts`.
    """
    own = config.parts.get(part or "")
    if own is None:
        return config
    changes = {name: value for name, value in own if value is not None}
    if isinstance(config.max_turns, dict) and part in config.max_turns:
        changes.pop("max_turns", None)
    return config.model_copy(update=changes)


def read_mixture(
    parts: Annotated[
        dict[str, Part], Field(min_length=1, description="Reader and ratio by environment.")
    ],
    maker: TaskMaker | None = None,
    on_bad_line: OnBadLine = "refuse",
    place: str = "",
    taken: Taken | None = None,
) -> TaskList:
    """Tasks of several sources in the given ratios.

    With the environment `mixture`, a part is played in the environment of its name; with another
    environment, in that. A part with `env: none` has none.

    If a part runs out of tasks, the rest of the list is of the other parts. In training each part
    repeats its own tasks, so the ratios always hold.
    """
    members = maker.members() if maker is not None else {}
    place = f"{place}.args.parts"
    ratios = shares({name: part.ratio for name, part in parts.items()}, place)
    queues: dict[str, list[Task]] = {}
    skipped, rows = list[BadLine](), dict[str, int]()
    for name, part in parts.items():
        where = f"{place}.{name}"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{place}: {name!r:.80} cannot be the name of a part, which metrics carry: "
                "letters without accents, digits, `_`, `.`, `@` and `-`"
            )
        own = None if part.env else members.get(name, maker)
        if members and part.env is None and name not in members:
            near = did_you_mean(name, members)
            raise ConfigError(
                f"{where}: {name!r} is no environment of the mixture{near}; for a part without an "
                "environment, set `env: none`"
            )
        label = partial(_labelled, name=name, part=part, where=where, in_mixture=bool(members))
        try:
            read = read_tasks(
                part.tasks,
                f"{where}.tasks",
                maker=own,
                on_bad_line=on_bad_line,
                taken=_through(label, taken),
            )
        except DataError as error:
            raise error if where in str(error) else DataError(f"{where}: {error}") from error
        queues[name] = [label(task) for task in read]
        skipped += read.skipped
        rows |= read.rows
    distinct = [name for name, part in parts.items() if part.distinct]
    return TaskList(interleaved(queues, ratios), skipped, ratios, rows, distinct)


def _through(label: Callable[[Task], Task], taken: Taken | None) -> Taken | None:
    """`taken` for tasks that are not labelled yet."""
    return None if taken is None else lambda task: taken(label(task))


def _labelled(task: Task, name: str, part: Part, where: str, *, in_mixture: bool) -> Task:
    if in_mixture and task.env not in (None, NO_ENV):
        raise ConfigError(
            f"{where}: task {task.id!r} names its own environment; in a mixture, set the "
            "environment of a part in env.args.envs"
        )
    fields = {
        "tier": name if task.tier is None else f"{name}/{task.tier}",
        "data": {**task.data, PART: name},
        "env": NO_ENV if part.env else task.env,
        "judge": task.judge or part.judge,
        "tools": part.tools if task.tools is None else task.tools,
    }
    return task.model_copy(update=fields)


def interleaved(queues: Mapping[str, list[Task]], ratios: Mapping[str, int]) -> list[Task]:
    """The tasks of the parts in their ratios; where a part runs out, those of the others."""
    waiting = {name: iter(tasks) for name, tasks in queues.items()}
    num_tasks, tasks, order = sum(map(len, queues.values())), list[Task](), Schedule(ratios)
    while len(tasks) < num_tasks:
        if (task := next(waiting[next(order)], None)) is not None:
            tasks.append(task)
    return tasks


def task_sampler(
    tasks: Sequence[Task],
    seed: int,
    *,
    shuffle: bool,
    ratios: Mapping[str, int] | None = None,
    batch_size: int | None = None,
    distinct: Collection[str] = (),
) -> TaskSampler:
    """A MixtureSampler if there are ratios and every task has a part, else a TaskSampler."""
    if not ratios or not all(part_of(task) in ratios for task in tasks):
        return TaskSampler(tasks, seed, shuffle)
    return MixtureSampler(tasks, seed, shuffle, ratios, batch_size, distinct)


def check_distinct(
    tasks: Sequence[Task], ratios: Mapping[str, int], batch_size: int, distinct: Collection[str]
) -> None:
    """Errors: DataError if a part of `distinct` has fewer tasks than a step takes of it."""
    counts = Counter(part_of(task) for task in tasks)
    for name in sorted(distinct):
        if name in ratios and counts[name] < (most := Schedule(ratios, batch_size).most(name)):
            raise DataError(
                f"part {name!r} has {counts[name]} tasks, but a step of {batch_size} takes up "
                f"to {most}: give it more tasks or a smaller ratio, or set its `distinct` to false"
            )


class MixtureSampler(TaskSampler):
    """Visits the parts in exact ratios, and the tasks of a part in that part's own order.

    The state is that of the schedule, and of each part's sampler.

    Args:
        batch_size: tasks of a step; None: the sum of the ratios.
        distinct: parts of which a step has no task twice.

    Errors: DataError if such a part has too few tasks.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        shuffle: bool,
        ratios: Mapping[str, int],
        batch_size: int | None = None,
        distinct: Collection[str] = (),
    ) -> None:
        super().__init__(tasks, seed, shuffle)
        by_part: dict[str, list[Task]] = defaultdict(list)
        for task in tasks:
            by_part[part_of(task) or ""].append(task)
        self.ratios = {name: ratio for name, ratio in ratios.items() if name in by_part}
        self._schedule = Schedule(self.ratios, batch_size)
        self.parts = {
            name: (_Distinct if name in distinct else TaskSampler)(by_part[name], seed, shuffle)
            for name in self.ratios
        }
        check_distinct(tasks, self.ratios, self._schedule.batch_size, distinct)

    def __next__(self) -> Task:
        if not self._schedule.num_left:
            for sampler in self.parts.values():
                sampler.start_batch()
        return next(self.parts[next(self._schedule)])

    def observe(self, groups: Sequence[Group]) -> None:
        """Pass each part its own groups."""
        super().observe(groups)
        for name, sampler in self.parts.items():
            sampler.observe([group for group in groups if part_of(group.task) == name])

    def metrics(self) -> dict[str, float]:
        """`mixture/PART/wraps`: complete passes over the part's tasks; `mixture/PART/left`: tasks
        left in this pass; `tasks/epoch_PART`: both as one number; `tasks/reward_TIER`: as
        TaskSampler."""
        metrics = super().metrics()
        del metrics["tasks/epoch"]
        for name, sampler in self.parts.items():
            metrics[f"tasks/epoch_{name}"] = sampler.metrics()["tasks/epoch"]
            metrics[f"mixture/{name}/wraps"] = float(sampler.epoch)
            metrics[f"mixture/{name}/left"] = float(len(sampler.tasks) - sampler.index)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "ratios": self.ratios,
            "schedule": self._schedule.state_dict(),
            "parts": {name: sampler.state_dict() for name, sampler in self.parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state.get("ratios") != self.ratios:
            raise CheckpointError(
                f"the saved task order has the ratios {state.get('ratios')}, this run has "
                f"{self.ratios}: resume with the configuration of the saved run"
            )
        if "schedule" in state:
            self._schedule.load_state_dict(state["schedule"])
        else:  # of a version that saved only the number of tasks
            for _ in range(int(state["given"])):
                next(self._schedule)
        for name, sampler in self.parts.items():
            sampler.load_state_dict(state["parts"][name])


class _Distinct(TaskSampler):
    """Gives no task twice in a batch: tasks that a batch had before the order of a new pass began
    come last in that order."""

    _late: Sequence[int] = ()

    def __init__(self, tasks: Sequence[Task], seed: int, shuffle: bool) -> None:
        self._batch: list[int] = []
        super().__init__(tasks, seed, shuffle)

    def start_batch(self) -> None:
        self._batch = []

    def __next__(self) -> Task:
        if self.index == len(self.tasks):
            self._late = self._batch
        task = super().__next__()
        self._batch = [*self._batch, self._order[self.index - 1]]
        return task

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"late": list(self._late), "batch": list(self._batch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._late, self._batch = state.get("late", ()), state.get("batch", [])
        super().load_state_dict(state)

    def _permutation(self, epoch: int) -> list[int]:
        late = set(self._late)
        return sorted(super()._permutation(epoch), key=late.__contains__)
