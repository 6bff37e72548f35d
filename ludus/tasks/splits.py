"""Overlap of training and held-out tasks.

Two tasks are the same if they have the same id, or the same key. The kind of a key depends on the
task; keys of different kinds never match:

    kind     tasks                                              key
    world    of an environment whose resets are cheap           prompt, answer, the world at reset
    prompt   without an environment, or prompt with an answer   prompt and answer
    data     all others                                         prompt, env, data, answer and tier
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ludus.core.errors import DataError
from ludus.core.types import Task

Taken = Callable[[Task], bool]
"""True for a task that the other split already has."""

_NUM_SHOWN = 3


def fingerprint(task: Task) -> str:
    """Hash of the task's content: prompt, environment, data and answer, not its id."""
    return _digest(task.model_dump(mode="json", include={"prompt", "env", "data", "answer"}))


def task_key(task: Task, world: str | None = None, *, has_env: bool = False) -> str:
    """The kind and the hash by which a task is compared: `prompt:3f...`.

    Args:
        world: the world that the task's environment opens, as text; None: unknown.
        has_env: the task is played in an environment, which may read its data.
    """
    prompt = [(message.role, " ".join(message.content.split())) for message in task.prompt]
    if world is not None:
        return f"world:{_digest([prompt, task.answer, world])}"
    if prompt and not (has_env and task.answer is None):
        return f"prompt:{_digest([prompt, task.answer])}"
    return f"data:{_digest([fingerprint(task), task.tier])}"  # a seed is another task in each tier


def _digest(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True)
class Known:
    """The tasks of a split and the key of each, to look other tasks up."""

    tasks: Sequence[Task]
    keys: Sequence[str]

    @cached_property
    def _by_id(self) -> Mapping[str, Task]:
        return {task.id: task for task in self.tasks}

    @cached_property
    def _by_key(self) -> Mapping[str, Task]:
        return dict(zip(self.keys, self.tasks, strict=True))

    def same(self, task: Task, key: str) -> Task | None:
        """Returns the task of this split that is the same as `task`; None if there is none."""
        return self._by_id.get(task.id) or self._by_key.get(key)

    def kinds(self) -> Counter[str]:
        """Number of keys of each kind."""
        return Counter(key.partition(":")[0] for key in self.keys)


def check_disjoint(
    train: Sequence[Task],
    heldout: Sequence[Task],
    key: Callable[[Task], str] = task_key,
    rows: Mapping[str, int] | None = None,
) -> None:
    """Refuse splits that share a task, by id or by key.

    Args:
        rows: row numbers of tasks that were read from files, by id.

    Errors: DataError with the number of shared tasks, and the first of them.
    """
    refuse_shared(Known(train, [key(task) for task in train]), heldout, key, rows or {})


def refuse_shared(
    train: Known, heldout: Sequence[Task], key: Callable[[Task], str], rows: Mapping[str, int]
) -> None:
    """`check_disjoint` for training tasks whose keys are known."""
    found = [(task, same) for task in heldout if (same := train.same(task, key(task))) is not None]
    if not found:
        return
    shown = "; ".join(
        f"{place_of(task, rows)} has the {'id' if task.id == same.id else 'content'} of "
        f"{place_of(same, rows)}"
        for task, same in found[:_NUM_SHOWN]
    )
    more = f"; and {len(found) - _NUM_SHOWN} more" if len(found) > _NUM_SHOWN else ""
    raise DataError(
        f"{len(found)} of {len(heldout)} held-out tasks are training tasks too: {shown}{more}. "
        "Remove them from one of the two, or set `tasks.allow_overlap: true`."
    )


def place_of(task: Task, rows: Mapping[str, int]) -> str:
    """The file and line of a task, from the rows of its list; its id if it is of no file."""
    return f"{task.source}:{rows[task.id]}" if task.id in rows else repr(task.id)
