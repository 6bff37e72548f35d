"""Held-out tasks that cannot be played: after SFT, an evaluation would fail, or leave some out."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.pipeline.preflight.episodes import Played, Sample
from ludus.pipeline.preflight.limits import Findings

ENOUGH = 4
"""Tasks of which none can be played, from which all are taken to be alike."""


def judge_heldout(sample: Sample, found: Findings) -> None:
    """Add a fault where no held-out task can be played, and a note for each level that cannot, or
    can in part. Tasks that took too long are no sign of a fault; nor are errors of steps where
    training tasks have them too, for the words that are played are no expert's."""
    tried = [played for played in sample.heldout if not played.overdue]
    steps_count = not any(played.error for played in sample.random)
    failed = [p for p in tried if not p.opened or (p.error and steps_count)]
    if not failed:
        return
    if len(failed) == len(tried) >= ENOUGH:
        found.faults.append(
            f"tasks.heldout: none of {len(tried)} tasks that were tried can be {_tried(failed)} "
            f"({failed[0].fault}): an evaluation would have no result"
        )
        return
    for tier in dict.fromkeys(played.task.tier for played in failed):
        of = "" if tier is None else f" of level {tier!r}"
        closed = [played for played in failed if played.task.tier == tier]
        number = sum(played.task.tier == tier for played in tried)
        found.notes.append(
            f"tasks.heldout: {len(closed)} of {number} tasks{of} that were tried "
            f"cannot be {_tried(closed)} ({closed[0].fault}): evaluations leave such tasks out"
        )


def _tried(failed: Sequence[Played]) -> str:
    """`opened`, or `played` where a task opens: the part that fails."""
    return "played" if any(played.opened for played in failed) else "opened"
