"""Check that training and held-out tasks do not overlap, by id or by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

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
    pairs = [f"{held!r} is {trained!r}" for held, trained in same_content]
    overlaps = []
    for kind, shared in (("id", [repr(id) for id in same_id]), ("content", pairs)):
        if shared:
            more = ", ..." if len(shared) > _NUM_SHOWN else ""
            overlaps.append(f"{len(shared)} by {kind} ({', '.join(shared[:_NUM_SHOWN])}{more})")
    if overlaps:
        raise DataError(
            f"{len(same_id) + len(pairs)} of {len(heldout)} held-out tasks are training tasks "
            f"too: {' and '.join(overlaps)}. Give the two splits different seeds, rows or files."
        )
