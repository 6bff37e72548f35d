"""Warns when episodes fail or have no score, and nothing trains; stops where every episode fails.

Groups without a signal are not told here: the diagnosis does (`report.diagnosis`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ludus.core.errors import DataError
from ludus.core.types import Group, Status, Trajectory

MAX_IDLE_STEPS = 5
"""Consecutive steps without a weight update before a warning, or an error if episodes fail."""


class IdleWatchdog:
    """Counts consecutive steps without a weight update; warns once, with the reasons.

    Args:
        note: receives the warning.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._num_idle = self._num_failed = 0
        self._told: set[str] = set()

    def step(self, stage: str, groups: Sequence[Group], trained: bool, num_steps: int) -> None:
        """Count a step of a stage of `num_steps` steps.

        Errors: DataError after MAX_IDLE_STEPS steps, or all steps of a shorter stage, in which
        every episode failed: neither the next step nor a success is to be expected.
        """
        self._tell_of_unscored(stage, groups)
        self._num_idle = 0 if trained else self._num_idle + 1
        failed = not trained and all(_failed(t) for group in groups for t in group.trajectories)
        self._num_failed = self._num_failed + 1 if failed else 0
        if failed and self._num_failed >= min(MAX_IDLE_STEPS, num_steps):
            raise DataError(f"{stage}: {_times(self._num_failed)}: {_failure(groups)}")
        dropped = any(t.dropped for group in groups for t in group.trajectories)
        if self._num_idle == MAX_IDLE_STEPS and dropped:
            self._note(f"{stage}: {_times(MAX_IDLE_STEPS)} trained nothing: {_why(groups)}")

    def _tell_of_unscored(self, stage: str, groups: Sequence[Group]) -> None:
        """Warn once in a stage of episodes that no judge could score."""
        trajectories = [t for group in groups for t in group.trajectories]
        unscored = [t for t in trajectories if t.status is Status.UNSCORABLE]
        if unscored and stage not in self._told:
            self._told.add(stage)
            self._note(
                f"{stage}: {len(unscored)} of the step's {len(trajectories)} episodes have no "
                f"score and are left out: {unscored[0].error}"
            )


def _failed(trajectory: Trajectory) -> bool:
    return not trajectory.status.trainable or not trajectory.num_sampled_tokens


def _times(num_steps: int) -> str:
    return f"{num_steps} steps in a row" if num_steps > 1 else "the only step"


def _failure(groups: Sequence[Group]) -> str:
    """Returns an error about a step in which every episode failed."""
    trajectories = [t for group in groups for t in group.trajectories]
    if any(t.status is not Status.TRUNCATED_LENGTH for t in trajectories):
        return f"no episode could be trained on: {_why(groups)}"
    error = trajectories[0].error
    return f"no episode had room for a turn: {error}; shorten the prompts, or raise it"


def _why(groups: Sequence[Group]) -> str:
    """Returns the three most frequent reasons, each with a count and an example."""
    reasons = [t.dropped or "no advantage" for group in groups for t in group.trajectories]
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    examples = {reason.partition(":")[0]: reason for reason in reversed(reasons)}
    return ", ".join(f"{count} x {examples[kind]}" for kind, count in kinds.most_common(3))
