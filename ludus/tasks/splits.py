"""Check that training and held-out tasks do not overlap, by id or by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from ludus.core.errors import DataError
from ludus.core.types import Task

_NUM_SHOWN = 3


def fingerprint(task: Task) -> str:
    """Hash of the task's content: prompt, environment, data and answer, not its id."""
    content = task.model_dump(mode="json", include={"prompt", "env", "data", "answer"})
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def check_disjoint(train: Sequence[Task], heldout: Sequence[Task]) -> None:
    """Refuse splits that share a task, by id or by content.

    Errors: DataError with the number of shared tasks and the ids of the first.
    """
    train_ids = {task.id for task in train}
    by_content = {fingerprint(task): task.id for task in train}
    same_id = [task.id for task in heldout if task.id in train_ids]
    same_content = [
        (task.id, by_content[content])
        for task in heldout
        if (content := fingerprint(task)) in by_content and task.id not in train_ids
    ]
    if not same_id and not same_content:
        return
    overlaps = []
    if same_id:
        overlaps.append(f"{len(same_id)} by id ({_first(repr(id) for id in same_id)})")
    if same_content:
        pairs = (f"{held!r} is {trained!r}" for held, trained in same_content)
        overlaps.append(f"{len(same_content)} by content ({_first(pairs)})")
    raise DataError(
        f"{len(same_id) + len(same_content)} of {len(heldout)} held-out tasks are training tasks "
        f"too: {' and '.join(overlaps)}. Give the two splits different seeds, rows or files."
    )


def _first(items: Iterable[str]) -> str:
    every = list(items)
    return ", ".join(every[:_NUM_SHOWN]) + (", ..." if len(every) > _NUM_SHOWN else "")
