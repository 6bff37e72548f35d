"""Warns when steps produce no gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ludus.core.errors import DataError
from ludus.core.types import Group, Status

MAX_IDLE_STEPS = 5
"""Consecutive steps without a weight update before a warning."""


class IdleWatchdog:
    """Counts consecutive steps without a weight update; warns once, with the reasons.

    Args:
        note: receives the warning.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._num_idle = self._num_without_turn = 0

    def step(self, stage: str, groups: Sequence[Group], trained: bool) -> None:
        """Count a step. Errors: DataError after MAX_IDLE_STEPS steps in which no episode had a
        turn."""
        self._num_idle = 0 if trained else self._num_idle + 1
        if self._num_idle == MAX_IDLE_STEPS:
            self._note(f"{stage}: {MAX_IDLE_STEPS} steps in a row trained nothing: {_why(groups)}")
        error = _no_turn(groups)
        self._num_without_turn = self._num_without_turn + 1 if error else 0
        if error and self._num_without_turn == MAX_IDLE_STEPS:
            raise DataError(f"{stage}: {MAX_IDLE_STEPS} steps in a row: {error}")


def _why(groups: Sequence[Group]) -> str:
    """Returns the three most frequent reasons, each with a count and an example."""
    reasons = [t.dropped or "no advantage" for group in groups for t in group.trajectories]
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    examples = {reason.partition(":")[0]: reason for reason in reversed(reasons)}
    return ", ".join(f"{count} x {examples[kind]}" for kind, count in kinds.most_common(3))


def _no_turn(groups: Sequence[Group]) -> str | None:
    """Returns an error if no prompt of the step left room for a turn in the context."""
    trajectories = [t for group in groups for t in group.trajectories]
    if any(t.status is not Status.TRUNCATED_LENGTH or t.num_sampled_tokens for t in trajectories):
        return None
    error = trajectories[0].error
    return f"no episode had room for a turn: {error}; shorten the prompts, or raise it"
