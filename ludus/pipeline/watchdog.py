"""Watches for training on nothing, which otherwise passes for training that does not help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ludus.core.errors import DataError
from ludus.core.types import Group, Status, Trajectory

NUM_IDLE_STEPS = 5
"""So many steps in a row without an update are worth a word."""


class Watch:
    """Told of each step; says once when nothing is being trained, and why.

    Args:
        tell: takes what the user should read.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._num_idle = self._num_unplayable = 0

    def step(self, stage: str, groups: Sequence[Group], trained: bool) -> None:
        """Count steps in a row. Errors: DataError where no episode of them could begin."""
        self._num_idle = 0 if trained else self._num_idle + 1
        if self._num_idle == NUM_IDLE_STEPS:
            self._tell(f"{stage}: {NUM_IDLE_STEPS} steps in a row trained nothing: {_why(groups)}")
        unplayable = _none_began(groups)
        self._num_unplayable = self._num_unplayable + 1 if unplayable else 0
        if unplayable and self._num_unplayable == NUM_IDLE_STEPS:
            raise DataError(f"{stage}: {NUM_IDLE_STEPS} steps in a row: {unplayable}")


def _why(groups: Sequence[Group]) -> str:
    """The reasons that a step trained nothing, each with its count and an example."""
    reasons = [t.dropped or "no advantage" for group in groups for t in group.trajectories]
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    examples = {reason.partition(":")[0]: reason for reason in reversed(reasons)}
    return ", ".join(f"{count} x {examples[kind]}" for kind, count in kinds.most_common(3))


def _none_began(groups: Sequence[Group]) -> str | None:
    """What to say where the context left no room for a single turn in any episode."""
    played: list[Trajectory] = [t for group in groups for t in group.trajectories]
    if any(t.status is not Status.TRUNCATED_LENGTH or t.num_sampled_tokens for t in played):
        return None
    return f"no episode had room for a turn: {played[0].error}; shorten the prompts, or raise it"
