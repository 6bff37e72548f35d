"""Held-out tasks that cannot be played: an evaluation would fail, after SFT."""

from __future__ import annotations

from ludus.pipeline.preflight.episodes import Played, Sample
from ludus.pipeline.preflight.limits import Findings


def judge_heldout(sample: Sample, found: Findings) -> None:
    """Add a fault for a level of which no held-out task opens, a note for one that opens in part.
    Tasks that took too long are no sign of a fault."""
    levels: dict[str | None, list[Played]] = {}
    for played in sample.heldout:
        if not played.overdue:
            levels.setdefault(played.task.tier, []).append(played)
    for tier, tried in levels.items():
        failed = [played for played in tried if not played.opened]
        if not failed:
            continue
        of = "" if tier is None else f" of level {tier!r}"
        reason = f"task {failed[0].task.id}: {failed[0].error}"
        if len(failed) == len(tried):
            found.faults.append(
                f"tasks.heldout: no task{of} opens ({len(tried)} tried; {reason}): the evaluation "
                "before RL would fail. `ludus check-env` tells more"
            )
        else:
            found.notes.append(
                f"tasks.heldout: {len(failed)} of {len(tried)} tasks{of} that were tried do not "
                f"open, {reason}; evaluations leave such tasks out"
            )
