"""Number of different tasks, estimated from the repetitions among a few hundred."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from ludus.core.system.signals import run
from ludus.core.types import Message, Spec, Task
from ludus.data.expert import Demonstration
from ludus.data.worlds import Worlds
from ludus.diagnostics.calibration.episodes import play_openings
from ludus.diagnostics.calibration.subject import Subject
from ludus.tasks.splits import fingerprint, task_key

NUM_WORLDS = 600
"""Tasks whose worlds are compared."""

WORLDS_S = 5.0
"""Seconds for that comparison; as many again for resets that are not cheap."""

MANY = 1e6
"""The estimate where no task repeats another."""


def num_distinct(
    subject: Subject, tasks: Sequence[Task], shown: Sequence[Demonstration] = ()
) -> tuple[float, float]:
    """About how many different tasks there are, and the seconds in which a run compares one."""
    tiers, seconds = by_tier(subject, tasks, shown)
    return total(tiers, subject), seconds


def total(tiers: Mapping[str | None, float], subject: Subject) -> float:
    """About how many different tasks the tiers of a subject have, by those of each."""
    kept = [number for tier, number in tiers.items() if tier in subject.tiers]
    kept = kept or list(tiers.values())  # no levels, or tasks of other levels than asked for
    return min(sum(kept), MANY)


def by_tier(
    subject: Subject, tasks: Sequence[Task], shown: Sequence[Demonstration] = ()
) -> tuple[dict[str | None, float], float]:
    """About how many different tasks each tier has, and the seconds in which a run compares one.

    Args:
        shown: episodes of the expert, which tell worlds apart that open alike.
    """
    if subject.kind == "data":
        different = {t.model_dump_json(include={"prompt"}) for t in subject.tasks}
        return {None: float(len(different))}, 0.0
    # The first is not timed: with it, an environment may load its files.
    worlds = Worlds(subject.env)
    keys, begun = {tasks[0].id: worlds.key(tasks[0])}, time.perf_counter()
    for task in tasks[1:NUM_WORLDS]:
        keys[task.id] = worlds.key(task)
        if time.perf_counter() - begun > WORLDS_S:
            break
    seconds = (time.perf_counter() - begun) / max(len(keys) - 1, 1)
    most: dict[str | None, float] = {}
    if subject.env is not None and all(key.startswith("data:") for key in keys.values()):
        keys, most = played_keys(subject.env, tasks, shown), by_data(tasks)
    of_tier: dict[str | None, list[str]] = {}
    for task in tasks:
        if task.id in keys:
            of_tier.setdefault(task.tier, []).append(keys[task.id])
    found = {tier: min(estimate(own), most.get(tier, MANY)) for tier, own in of_tier.items()}
    return found or {None: MANY}, seconds


def by_data(tasks: Sequence[Task]) -> dict[str | None, float]:
    """The number of different tasks of each tier whose seeds begin again: their data repeat."""
    of_tier: dict[str | None, list[str]] = {}
    for task in tasks:
        of_tier.setdefault(task.tier, []).append(fingerprint(task))
    counts = {tier: (len(set(own)), len(own)) for tier, own in of_tier.items()}
    return {
        tier: float(different) for tier, (different, all_) in counts.items() if different < all_
    }


def played_keys(env: Spec, tasks: Sequence[Task], shown: Sequence[Demonstration]) -> dict[str, str]:
    """Keys of tasks, by id, whose environment does not describe its worlds: by their openings; by
    whole episodes of the expert where these differ after equal openings. Empty: they tell nothing.
    """
    resets = run(play_openings(env, tasks[:NUM_WORLDS], WORLDS_S))
    openings = {task.id: played_key(task, messages) for task, messages in resets}
    by_id = {task.id: task for task in tasks}
    known = [d for d in shown if d.task_id in by_id]
    whole = {d.task_id: played_key(by_id[d.task_id], d.messages) for d in known}
    if not whole:  # one opening for all tasks may hide what differs
        return openings if len(set(openings.values())) > 1 else {}
    both = openings.keys() & whole.keys()
    hidden = len({openings[id] for id in both}) < len({whole[id] for id in both})
    return whole if hidden or len(whole) > len(openings) else openings


def played_key(task: Task, messages: Sequence[Message]) -> str:
    """The key of a task by the messages of an episode."""
    text = "\n".join(f"{message.role}: {message.content}" for message in messages)
    return task_key(task, text, has_env=True)


def estimate(keys: Sequence[str]) -> float:
    """The number of different tasks among which so many draws repeat as often as these keys."""
    num = len(set(keys))
    if num == len(keys):
        return MANY
    low, high = float(num), 1e7
    for _ in range(100):  # expected number of different ones among n draws of N
        middle = math.sqrt(low * high)
        expected = middle * (1 - math.exp(-len(keys) / middle))
        low, high = (middle, high) if expected < num else (low, middle)
    return low


def undeclared(subject: Subject, tasks: Sequence[Task]) -> bool:
    """True where an environment does not describe its worlds, so that no run compares them.

    False where the tasks' data tell worlds apart: seeds begin again with the same data.
    """
    if subject.env is None or not Worlds(subject.env).key(tasks[0]).startswith("data:"):
        return False
    return not by_data(tasks)
