"""The end of RL where its groups have lost their signal: `rl.min_signal`.

A group whose episodes have equal rewards trains nothing. Where nearly all are alike, because the
policy is certain, or all tasks are solved, or none can be, single samples decide where the policy
moves: one that gave the same answer to every task lost it after 600 such steps (docs/log.md).

    signal = Signal(0.02)
    signal.add(0.6) ... signal.add(0.0)
    signal.reason                   # None, until the last WINDOW steps have less

A run that never had more goes on: its few successes may be the first.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from ludus.config.schema import RLConfig, SFTConfig
from ludus.telemetry.metrics import MetricsLog

WINDOW = 20
"""Steps whose mean is compared: of 32 groups each, 2 % are 13 groups."""

METRIC = "train/groups_with_advantage"


def can_end(rl: RLConfig, sft: SFTConfig | None) -> bool:
    """True where RL may have more than WINDOW steps, with those that SFT leaves unused."""
    return rl.most_steps(sft) > WINDOW


class Signal:
    """Shares of the groups with a signal, of the last steps of RL.

    Args:
        minimum: the share below which RL ends; None: never.
    """

    def __init__(self, minimum: float | None) -> None:
        self._minimum = minimum
        self._shares: deque[float] = deque(maxlen=WINDOW)
        self._had = False
        """True if WINDOW steps had the minimum once."""

    @classmethod
    def restored(cls, minimum: float | None, metrics: Path, steps: int) -> Signal:
        """That of a run after `steps` complete steps of RL, from its `metrics.jsonl`."""
        found = cls(minimum)
        if minimum is not None and steps:
            for line in MetricsLog.read(metrics):
                if line.stage == "rl" and line.step < steps:
                    found.add(line.metrics.get(METRIC))
        return found

    def add(self, share: float | None) -> None:
        """Add a step's share; None where the algorithm does not score."""
        if share is None or self._minimum is None:
            return
        self._shares.append(share)
        self._had |= len(self._shares) == WINDOW and self._mean >= self._minimum

    @property
    def _mean(self) -> float:
        return sum(self._shares) / len(self._shares)

    @property
    def reason(self) -> str | None:
        """The reason why RL ends; None: it goes on."""
        if self._minimum is None or not self._had or self._mean >= self._minimum:
            return None
        return (
            f"{100 * self._mean:.3g} % of the groups of the last {WINDOW} steps have a signal, "
            f"less than {100 * self._minimum:.3g} % (rl.min_signal): more steps would follow "
            "single samples"
        )
