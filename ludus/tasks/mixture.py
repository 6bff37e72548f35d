"""Tasks of several environments in exact ratios: the reader and the task sampler.

    tasks:
      train:
        name: mixture
        args:
          parts:
            babyai: {ratio: 2, tasks: {name: env, args: {num_tasks: 2000}}}
            crafting: {ratio: 1, tasks: {name: env, args: {num_tasks: 500}}}

Among the first n tasks, for any n, a part with share w has n * w tasks, rounded up or down. So
every step has exact shares if its number of tasks is divisible by the sum of the ratios; otherwise
the error carries over to the next steps and stays below one task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import cycle
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ludus.core.errors import CheckpointError, ConfigError, did_you_mean
from ludus.core.types import Group, Spec, Task
from ludus.tasks.curriculum import TaskSampler
from ludus.tasks.readers import BadLine, OnBadLine, TaskList, TaskMaker, read_tasks
from ludus.tasks.splits import Taken

PART = "part"
"""Key in `Task.data`: the name of the task's part."""

T = TypeVar("T")


class Part(BaseModel):
    """A part of a mixture: its ratio and the reader of its tasks."""

    model_config = ConfigDict(extra="forbid")

    ratio: int = Field(1, ge=1, le=1000, description="Share of the tasks, relative to the others.")
    tasks: Spec = Field(description="Reader of the part's tasks.")


def schedule(ratios: Mapping[str, int]) -> list[str]:
    """Returns the part of each task in a round; a round has sum(ratios) tasks.

    After every task, each part has had its share of the tasks so far, rounded up or down: Tijdeman
    1980, "The chairman assignment problem", Discrete Mathematics 32. Next comes, among the parts
    whose deficit is at least 1 / (2 * parts - 2), the part with the earliest deadline.
    """
    total = sum(ratios.values())
    if len(ratios) == 1:
        return list(ratios) * total
    share = {name: Fraction(ratio, total) for name, ratio in ratios.items()}
    counts = dict.fromkeys(share, 0)
    slack = Fraction(1, 2 * len(share) - 2)
    order: list[str] = []
    for position in range(1, total + 1):
        deficit = {name: position * w - counts[name] for name, w in share.items()}
        ready = [name for name in share if deficit[name] >= slack]
        chosen = min(ready, key=lambda name: (1 - slack - deficit[name]) / share[name])
        counts[chosen] += 1
        order.append(chosen)
    return order


def part_of(task: Task) -> str | None:
    """The mixture part of a task; None without a mixture."""
    name = task.data.get(PART)
    return name if isinstance(name, str) else None


def for_part(setting: T | dict[str, T] | None, task: Task) -> T | None:
    """The value of a setting for a task, if the setting may differ by part; None if not set."""
    if isinstance(setting, dict):
        return setting.get(part_of(task) or "")
    return setting


def read_mixture(
    parts: Annotated[
        dict[str, Part], Field(min_length=1, description="Reader and ratio by environment.")
    ],
    maker: TaskMaker | None = None,
    on_bad_line: OnBadLine = "refuse",
    place: str = "",
    taken: Taken | None = None,
) -> TaskList:
    """Tasks of several environments in the given ratios, for the environment `mixture`.

    If a part runs out of tasks, the rest of the list is of the other parts. In training each part
    repeats its own tasks, so the ratios always hold.
    """
    members = maker.members() if maker is not None else {}
    if not members:
        raise ConfigError("the reader 'mixture' needs the environment 'mixture': set `env`")
    queues: dict[str, list[Task]] = {}
    skipped, rows = list[BadLine](), dict[str, int]()
    for name, part in parts.items():
        where = f"{place}.args.parts.{name}"
        if name not in members:
            near = did_you_mean(name, members)
            raise ConfigError(f"{where}: {name!r} is no environment of the mixture{near}")
        member = members[name]
        label = partial(_labelled, name=name, where=where)
        read = read_tasks(
            part.tasks,
            f"{where}.tasks",
            maker=member,
            on_bad_line=on_bad_line,
            taken=_through(label, taken),
        )
        queues[name] = [label(task) for task in read]
        skipped += read.skipped
        rows |= read.rows
    ratios = {name: part.ratio for name, part in parts.items()}
    return TaskList(_interleaved(queues, ratios), skipped, ratios, rows)


def _through(label: Callable[[Task], Task], taken: Taken | None) -> Taken | None:
    """`taken` for tasks that are not labelled yet."""
    return None if taken is None else lambda task: taken(label(task))


def _labelled(task: Task, name: str, where: str) -> Task:
    if task.env is not None:
        raise ConfigError(
            f"{where}: task {task.id!r} names its own environment; in a mixture, set the "
            "environment of a part in env.args.envs"
        )
    tier = name if task.tier is None else f"{name}/{task.tier}"
    return task.model_copy(update={"tier": tier, "data": {**task.data, PART: name}})


def _interleaved(queues: Mapping[str, list[Task]], ratios: Mapping[str, int]) -> list[Task]:
    waiting = {name: iter(tasks) for name, tasks in queues.items()}
    num_tasks, tasks = sum(map(len, queues.values())), list[Task]()
    for name in cycle(schedule(ratios)):
        if len(tasks) == num_tasks:
            break
        if (task := next(waiting[name], None)) is not None:
            tasks.append(task)
    return tasks


def task_sampler(
    tasks: Sequence[Task], seed: int, *, shuffle: bool, ratios: Mapping[str, int] | None = None
) -> TaskSampler:
    """A MixtureSampler if there are ratios and every task has a part, else a TaskSampler."""
    if not ratios or not all(part_of(task) in ratios for task in tasks):
        return TaskSampler(tasks, seed, shuffle)
    return MixtureSampler(tasks, seed, shuffle, ratios)


class MixtureSampler(TaskSampler):
    """Visits the parts in exact ratios, and the tasks of a part in that part's own order.

    The state is the number of tasks given and the state of each part's sampler.
    """

    def __init__(
        self, tasks: Sequence[Task], seed: int, shuffle: bool, ratios: Mapping[str, int]
    ) -> None:
        super().__init__(tasks, seed, shuffle)
        by_part: dict[str, list[Task]] = defaultdict(list)
        for task in tasks:
            by_part[part_of(task) or ""].append(task)
        self.ratios = {name: ratio for name, ratio in ratios.items() if name in by_part}
        self.parts = {name: TaskSampler(by_part[name], seed, shuffle) for name in self.ratios}
        self._schedule = schedule(self.ratios)
        self._num_given = 0

    def __next__(self) -> Task:
        name = self._schedule[self._num_given % len(self._schedule)]
        self._num_given += 1
        return next(self.parts[name])

    def observe(self, groups: Sequence[Group]) -> None:
        """Pass each part its own groups."""
        super().observe(groups)
        for name, sampler in self.parts.items():
            sampler.observe([group for group in groups if part_of(group.task) == name])

    def metrics(self) -> dict[str, float]:
        """`tasks/epoch_PART`: epochs of the part's tasks; `tasks/reward_TIER`: as TaskSampler."""
        rewards = super().metrics()
        del rewards["tasks/epoch"]
        epochs = {f"tasks/epoch_{n}": s.metrics()["tasks/epoch"] for n, s in self.parts.items()}
        return epochs | rewards

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "ratios": self.ratios,
            "given": self._num_given,
            "parts": {name: sampler.state_dict() for name, sampler in self.parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state.get("ratios") != self.ratios:
            raise CheckpointError(
                f"the saved task order has the ratios {state.get('ratios')}, this run has "
                f"{self.ratios}: resume with the configuration of the saved run"
            )
        self._num_given = int(state["given"])
        for name, sampler in self.parts.items():
            sampler.load_state_dict(state["parts"][name])
