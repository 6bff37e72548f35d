"""The two splits of a run: read, and made disjoint."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.files import atomic_write, read_json
from ludus.core.types import NO_ENV, Spec, Task
from ludus.data.worlds import MAX_TASKS, Worlds
from ludus.envs import ENVS
from ludus.envs.base import Env
from ludus.judges import JUDGES
from ludus.judges.base import refuse_of_steps
from ludus.rollout.hosts.host import LocalEnvs
from ludus.store.folders import RunFolder
from ludus.tasks.mixture import check_distinct, interleaved, part_of
from ludus.tasks.readers import TaskList, read_tasks
from ludus.tasks.splits import Known, refuse_shared
from ludus.tasks.splits import Taken as IsTaken
from ludus.tasks.tiers import check_curriculum

MANY = 0.9
"""Share of different worlds among the held-out tasks below which it is told."""


class Splits(NamedTuple):
    """Training tasks and held-out tasks.

    `taken` holds the ids of tasks that were not held out because training has them; None: read from
    the run's folder. `repeated`: of those left out because they repeat another. `note` tells the
    user what was compared.
    """

    train: TaskList
    heldout: TaskList
    taken: frozenset[str] | None = frozenset()
    note: str = ""
    repeated: frozenset[str] = frozenset()


def read_splits(config: RunConfig, folder: RunFolder | None = None) -> Splits:
    """Read the training and the held-out tasks, which share none unless the config allows it.

    Held-out tasks that training has are replaced where the environment makes the tasks, and refused
    where they come from files. If `folder` has the outcome for these settings, nothing is compared.

    Errors: DataError for files, lines and shared tasks; ConfigError for a task's unknown
    judge or environment, and for a task that nothing scores.
    """
    env = ENVS.build(config.env, "env") if config.env else None
    train = read_split(config, env, config.tasks.train, "tasks.train")
    check_curriculum(train, config.tasks.curriculum)
    if config.rl is not None:
        check_distinct(train, train.ratios, config.rl.groups_per_step, train.distinct)
    if config.tasks.heldout is None:
        return Splits(train, TaskList())
    read_heldout = partial(read_split, config, env, config.tasks.heldout, "tasks.heldout")
    if (stored := _stored(config, folder)) is not None:
        taken, repeated = stored
        heldout = read_heldout(lambda task: task.id in taken)
        return Splits(train, _without(heldout, repeated), None)
    started = time.perf_counter()
    asked = heldout = read_heldout()
    few = len(train) + len(asked) <= MAX_TASKS
    seen = _Seen(train, Worlds(config.env, resets=few))
    shared = [task for task in asked if seen.has(task)]
    repeated = frozenset[str]()
    if not config.tasks.allow_overlap:
        if shared:
            heldout = read_heldout(seen.has)
            refuse_shared(seen.train, heldout, seen.key, train.rows | heldout.rows)
        repeated = seen.repeated(heldout)
        heldout = _without(heldout, repeated)
    taken = frozenset() if config.tasks.allow_overlap else frozenset(seen.found)
    note = (
        f"{len(heldout)} held-out tasks compared with {len(train)} training tasks by "
        f"{_kinds(seen, asked, few)} in {time.perf_counter() - started:.1f} s: "
        + (f"{len(shared)} equal" if shared else "none equal")
    )
    if shared:
        allowed = config.tasks.allow_overlap
        note += ", allowed by tasks.allow_overlap" if allowed else ", replaced by further seeds"
    worlds = [key for key in map(seen.key, heldout) if key.startswith("world:")]
    if len(set(worlds)) < MANY * len(worlds):
        note += f"; they open {len(set(worlds))} different worlds"
    if repeated:
        note += f"; {len(repeated)} more, with the data of others, are left out"
    return Splits(train, heldout, taken, note, repeated)


def remember(splits: Splits, config: RunConfig, folder: RunFolder) -> None:
    """Write which tasks were replaced to the run's folder."""
    if splits.taken is not None:
        stored = {"taken": sorted(splits.taken), "repeated": sorted(splits.repeated)}
        atomic_write(folder.splits, json.dumps({"settings": _settings(config), **stored}))


def read_split(
    config: RunConfig, env: Env | None, spec: Spec, where: str, taken: IsTaken | None = None
) -> TaskList:
    """Read one split. Errors: as `read_splits`."""
    on_bad_line = config.tasks.on_bad_line
    tasks = read_tasks(spec, where, maker=env, on_bad_line=on_bad_line, taken=taken)
    for part, some in _by_part(tasks).items():
        place = f"{where}.args.parts.{part}" if part else where
        for judge in _distinct(task.judge for task in some):
            refuse_of_steps(JUDGES.build(judge, f"{place}: judge"), f"{place}: judge")
    for own in _distinct(task.env for task in tasks if task.env != NO_ENV):
        ENVS.build(own, f"{where}: env")
    envs, scored = LocalEnvs(config.env), bool(config.judge or config.agent)
    for task in () if scored else tasks:
        if task.judge is None and envs.spec_of(task) is None:
            raise ConfigError(
                f"{where}: nothing scores task {task.id!r}: it has neither an environment nor a "
                "judge. Give its part or its reader a `judge`, or set the run's `judge`"
            )
    return tasks


def _by_part(tasks: Iterable[Task]) -> dict[str | None, list[Task]]:
    parts: dict[str | None, list[Task]] = {}
    for task in tasks:
        parts.setdefault(part_of(task), []).append(task)
    return parts


def _distinct(specs: Iterable[Spec | None]) -> Iterable[Spec]:
    return {spec.model_dump_json(): spec for spec in specs if spec is not None}.values()


class _Seen:
    """Looks tasks up among the training tasks; computes the key of each task once."""

    def __init__(self, train: Sequence[Task], worlds: Worlds) -> None:
        self.train = Known(train, worlds.keys(train))
        self.found: set[str] = set()
        self._worlds = worlds
        self._keys: dict[str, str] = {}

    def key(self, task: Task) -> str:
        if task.id not in self._keys:
            self._keys[task.id] = self._worlds.key(task)
        return self._keys[task.id]

    def repeated(self, tasks: TaskList) -> frozenset[str]:
        """Ids of the tasks of an environment whose data an earlier one has: its seeds begin again.
        They would be played alike, and count twice in an interval."""
        first: dict[str, str] = {}
        made = [task for task in tasks if task.id not in tasks.rows]
        by_data = [task for task in made if self.key(task).startswith("data:")]
        return frozenset(t.id for t in by_data if first.setdefault(self.key(t), t.id) != t.id)

    def has(self, task: Task) -> bool:
        """True for a task that training has."""
        if self.train.same(task, self.key(task)) is None:
            return False
        self.found.add(task.id)
        return True


def _without(tasks: TaskList, ids: frozenset[str]) -> TaskList:
    """The list without some of its tasks; a mixture keeps its ratios."""
    if ids:
        kept = [task for task in tasks if task.id not in ids]
        parts = {str(part): some for part, some in _by_part(kept).items()}
        tasks[:] = interleaved(parts, tasks.ratios) if tasks.ratios else kept
    return tasks


def _kinds(seen: _Seen, tasks: Sequence[Task], few: bool) -> str:
    """`world`, or `prompt and answer (12) and data (3; ...)`."""
    counts = Counter(seen.key(task).partition(":")[0] for task in tasks)
    why = "the class declares neither `cheap_reset` nor `world`"
    if "world" in counts:
        why = f"they do not open, or {why}"
    why = f"not by worlds: {why}" if few else f"more than {MAX_TASKS} tasks are not reset"
    names = {"world": "world", "prompt": "prompt and answer", "data": f"data ({why})"}
    return " and ".join(names[kind] for kind, _ in counts.most_common())


def _settings(config: RunConfig) -> str:
    """Hash of the settings that the tasks depend on."""
    text = config.model_dump_json(include={"env", "tasks"}, exclude={"tasks": {"curriculum"}})
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _stored(
    config: RunConfig, folder: RunFolder | None
) -> tuple[frozenset[str], frozenset[str]] | None:
    """The ids of the tasks that were taken, and of those that repeat others."""
    if folder is None or not folder.splits.exists():
        return None
    try:
        stored = read_json(folder.splits)
        if stored["settings"] != _settings(config):
            return None
        return frozenset(stored["taken"]), frozenset(stored.get("repeated", ()))
    except (KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it is no record of splits"
        raise DataError(f"{folder.splits} is damaged: {reason}; remove it") from None
