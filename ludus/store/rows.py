"""The row types that the store returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from enum import StrEnum
from typing import Any

from ludus.core.types import Status, Task, Trajectory


class RunStatus(StrEnum):
    """Status of a run. A run whose process was killed stays `running` until resumed."""

    RUNNING = "running"
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run. `stages`: the last step of each stage, in order of their start. `last_step`: the start
    time of the latest step. `elapsed_s`: wall time from start to end, without pauses between a
    stop and `--resume`; of a running one, up to the latest step; None before."""

    id: str
    name: str
    status: RunStatus
    created: datetime
    finished: datetime | None
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    error: str | None
    stages: Mapping[str, int]
    last_step: datetime | None
    elapsed_s: float | None

    def observation_weight(self, stage: str) -> float:
        """Weight of prompts and observations in a stage's loss, where sampled tokens have 1."""
        sft = self.config.get("sft") or {}
        weight: float = sft.get("observation_weight", 0.0) if stage == "sft" else 0.0
        return weight


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step of a stage. `seconds`: its duration. `policy_version`: the published version."""

    stage: str
    step: int
    started: datetime
    seconds: float | None
    policy_version: int | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """A trajectory without its tokens."""

    stage: str
    step: int
    id: str
    group_id: str
    task_id: str
    tier: str | None
    role: str
    policy: str
    status: Status
    reward: float | None
    num_turns: int
    num_tokens: int
    num_sampled_tokens: int
    scores: Mapping[str, float]
    metrics: Mapping[str, float]
    explanation: str | None
    error: str | None
    dropped: str | None

    @property
    def without_turn(self) -> bool:
        """True for a role that had no turn in its episode, which ended well."""
        return self.num_turns == 0 and self.status.trainable

    @property
    def failed(self) -> bool:
        """True for a role's episode that was scored, and did not succeed."""
        scored = not self.without_turn and not self.unscored
        return scored and not self.metrics.get("success")

    @property
    def unscored(self) -> bool:
        """True for a role's episode that ended with an error, or has no reward."""
        return not self.without_turn and (not self.status.trainable or self.reward is None)


NO_TURN = "no turn"
"""In place of a status: a role that had no turn in its episode, which ended well."""

TRAJECTORY_COLUMNS = [field.name for field in fields(TrajectoryRow)][2:]
"""The columns of a TrajectoryRow's own table: all fields but stage and step."""


@dataclass(frozen=True, slots=True)
class Record:
    """A trajectory with its tokens, its task, and its row."""

    row: TrajectoryRow
    task: Task
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class DroppedRow:
    """A trajectory that gave no training row, and the reason."""

    stage: str
    step: int
    trajectory_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StageSummary:
    """Summary of a stage. `num_without_turn` of its trajectories are of roles that had no turn in
    their episode: they are not in `statuses`. `mean_reward` covers trajectories with a reward
    that is not NaN; `rewards` has the mean of each role."""

    stage: str
    num_steps: int
    last_step: int
    num_trajectories: int
    mean_reward: float | None
    statuses: Mapping[Status, int]
    rewards: Mapping[str, float | None]
    num_without_turn: int = 0
