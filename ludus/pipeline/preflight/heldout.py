"""Held-out tasks that cannot be played: after SFT, an evaluation would fail, or leave some out."""

from __future__ import annotations

from ludus.pipeline.preflight.episodes import Sample
from ludus.pipeline.preflight.limits import Findings

ENOUGH = 4
"""Tasks of which none opens, from which all are taken to be alike."""


def judge_heldout(sample: Sample, found: Findings) -> None:
    """Add a fault where no held-out task opens, and a note for each level that does not, or does in
    part. Tasks that took too long are no sign of a fault."""
    tried = [played for played in sample.heldout if not played.overdue]
    failed = [played for played in tried if not played.opened]
    if not failed:
        return
    if len(failed) == len(tried) >= ENOUGH:
        found.faults.append(
            f"tasks.heldout: none of {len(tried)} tasks that were tried opens ({failed[0].fault}): "
            "an evaluation would have no result. `ludus check-env` tells more"
        )
        return
    for tier in dict.fromkeys(played.task.tier for played in failed):
        of = "" if tier is None else f" of level {tier!r}"
        closed = [played for played in failed if played.task.tier == tier]
        number = sum(played.task.tier == tier for played in tried)
        found.notes.append(
            f"tasks.heldout: {len(closed)} of {number} tasks{of} that were tried do not open "
            f"({closed[0].fault}): evaluations leave such tasks out"
        )
