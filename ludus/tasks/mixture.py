"""Tasks of several environments, in exact ratios: the reader, and the order of visits.

    tasks:
      train:
        name: mixture
        args:
          parts:
            babyai: {ratio: 2, tasks: {name: env, args: {num_tasks: 2000}}}
            crafting: {ratio: 1, tasks: {name: env, args: {num_tasks: 500}}}

Of any first n tasks, a part with the share w has n * w, rounded up or down. So where the tasks of a
step divide by the ratios, every step has exactly its shares; and where they do not, what is left
over is carried on to the next steps, and never adds up to a whole task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import cycle
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ludus.core.errors import CheckpointError, ConfigError, did_you_mean
from ludus.core.types import Group, Spec, Task
from ludus.tasks.curriculum import TaskSampler
from ludus.tasks.readers import OnBadLine, TaskList, TaskMaker, read_tasks

PART = "part"
"""Key of a task's data: the name of the part that it is of."""

T = TypeVar("T")


class Part(BaseModel):
    """A part of a mixture: how much of it, and where its tasks come from."""

    model_config = ConfigDict(extra="forbid")

    ratio: int = Field(1, ge=1, le=1000, description="Share of the tasks, beside the others'.")
    tasks: Spec = Field(description="Reader of the part's tasks.")


def schedule(ratios: Mapping[str, int]) -> list[str]:
    """The part of each task of a round, which has as many tasks as the ratios add up to.

    At every place, each part has had its share of the places so far, rounded up or down:
    Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32. Among the parts that
    are far enough behind, the one comes next that would be due first.
    """
    total = sum(ratios.values())
    if len(ratios) == 1:
        return list(ratios) * total
    share = {name: Fraction(ratio, total) for name, ratio in ratios.items()}
    had = dict.fromkeys(share, 0)
    slack = Fraction(1, 2 * len(share) - 2)
    order: list[str] = []
    for place in range(1, total + 1):
        behind = {name: place * w - had[name] for name, w in share.items()}
        ready = [name for name in share if behind[name] >= slack]
        chosen = min(ready, key=lambda name: (1 - slack - behind[name]) / share[name])
        had[chosen] += 1
        order.append(chosen)
    return order


def part_of(task: Task) -> str | None:
    """The part of a mixture that a task is of; None where there is no mixture."""
    name = task.data.get(PART)
    return name if isinstance(name, str) else None


def for_part(setting: T | dict[str, T] | None, task: Task) -> T | None:
    """A setting that may differ from part to part, for a task; None where there is none."""
    if isinstance(setting, dict):
        return setting.get(part_of(task) or "")
    return setting


def read_mixture(
    parts: Annotated[dict[str, Part], Field(min_length=1, description="By environment.")],
    maker: TaskMaker | None = None,
    on_bad_line: OnBadLine = "refuse",
    place: str = "",
) -> TaskList:
    """Tasks of several environments, in the given ratios, for the environment `mixture`.

    Parts that run out of tasks leave the rest of the list to the others; in training each part
    begins its own tasks anew, and the ratios hold for ever.
    """
    members = maker.members() if maker is not None else {}
    if not members:
        raise ConfigError("the reader 'mixture' needs the environment 'mixture': set `env`")
    queues: dict[str, list[Task]] = {}
    skipped = []
    for name, part in parts.items():
        where = f"{place}.args.parts.{name}"
        if name not in members:
            near = did_you_mean(name, members)
            raise ConfigError(f"{where}: {name!r} is no environment of the mixture{near}")
        member = members[name]
        read = read_tasks(part.tasks, f"{where}.tasks", maker=member, on_bad_line=on_bad_line)
        queues[name] = [_labelled(task, name, where) for task in read]
        skipped += read.skipped
    ratios = {name: part.ratio for name, part in parts.items()}
    return TaskList(_interleaved(queues, ratios), skipped, ratios)


def _labelled(task: Task, name: str, where: str) -> Task:
    if task.env is not None:
        raise ConfigError(
            f"{where}: task {task.id!r} names an environment of its own; that of a part stands in "
            "env.args.envs"
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
    """What visits the tasks: in exact ratios, where there are some and the tasks have parts."""
    if not ratios or not all(part_of(task) in ratios for task in tasks):
        return TaskSampler(tasks, seed, shuffle)
    return MixtureSampler(tasks, seed, shuffle, ratios)


class MixtureSampler(TaskSampler):
    """Visits the tasks of each part in that part's own order, and the parts in exact ratios.

    Its state is how many tasks it has given, and the place in each part.
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
        self._given = 0

    def __next__(self) -> Task:
        name = self._schedule[self._given % len(self._schedule)]
        self._given += 1
        return next(self.parts[name])

    def observe(self, groups: Sequence[Group]) -> None:
        """Show each part its own groups."""
        super().observe(groups)
        for name, sampler in self.parts.items():
            sampler.observe([group for group in groups if part_of(group.task) == name])

    def metrics(self) -> dict[str, float]:
        """`tasks/epoch_PART`: passes over the part's tasks; `tasks/reward_TIER` as ever."""
        rewards = super().metrics()
        del rewards["tasks/epoch"]
        epochs = {f"tasks/epoch_{n}": s.metrics()["tasks/epoch"] for n, s in self.parts.items()}
        return epochs | rewards

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "ratios": self.ratios,
            "given": self._given,
            "parts": {name: sampler.state_dict() for name, sampler in self.parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state.get("ratios") != self.ratios:
            raise CheckpointError(
                f"the saved task order has the ratios {state.get('ratios')}, this run has "
                f"{self.ratios}: resume with the configuration of the saved run"
            )
        self._given = int(state["given"])
        for name, sampler in self.parts.items():
            sampler.load_state_dict(state["parts"][name])
