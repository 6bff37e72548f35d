"""The end of RL where its groups have lost their signal: `rl.min_signal`.

A group whose episodes have equal rewards trains nothing. Where nearly all are alike, because the
policy is certain, or all tasks are solved, or none can be, single samples decide where the policy
moves: one that gave the same answer to every task lost it after 600 such steps (docs/log.md).

    lost = Signal(0.02)
    lost.add(0.6) ... lost.add(0.0)
    lost.reason                     # None, until the last WINDOW steps have less
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ludus.config.schema import RLConfig
from ludus.telemetry.metrics import Line

WINDOW = 20
"""Steps whose mean is compared: of 32 groups each, 2 % are 13 groups."""

METRIC = "train/groups_with_advantage"


class Signal:
    """Shares of the groups with a signal, of the last steps of RL.

    Args:
        minimum: the share below which RL ends; None: never.
    """

    def __init__(self, minimum: float | None) -> None:
        self._minimum = minimum
        self._shares: deque[float] = deque(maxlen=WINDOW)

    @classmethod
    def restored(cls, rl: RLConfig | None, lines: Iterable[Line], steps: int) -> Signal:
        """That of a run after `steps` complete steps of RL, from the lines of its metrics."""
        found = cls(None if rl is None else rl.min_signal)
        for line in lines:
            if line.stage == "rl" and line.step < steps:
                found.add(line.metrics.get(METRIC))
        return found

    def add(self, share: float | None) -> None:
        """Add a step's share; None where the algorithm has none."""
        if share is not None:
            self._shares.append(share)

    @property
    def reason(self) -> str | None:
        """Why RL ends; None: it goes on."""
        if self._minimum is None or len(self._shares) < WINDOW:
            return None
        mean = sum(self._shares) / WINDOW
        if mean >= self._minimum:
            return None
        return (
            f"{mean:.1%} of the groups of the last {WINDOW} steps have a signal, less than "
            f"rl.min_signal, {self._minimum:.0%}: more steps would follow single samples"
        )
