"""Metrics of a step: rollouts, scores of models, time."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from itertools import islice

from ludus.core.types import Group, Trajectory
from ludus.tasks.mixture import part_of
from ludus.telemetry.occupancy import Split

BY_PART = {f"rollout/{name}" for name in ("reward", "success", "turns", "groups_with_signal")}
"""Rollout metrics that a mixture also has for each of its environments."""

TOOL_METRICS = (
    "tool_calls", "tool_failed", "tool_malformed", "tool_refused", "tool_errors", "tool_seconds",
    "tool_wait_seconds",
)  # fmt: skip
"""Of a trajectory (`rollout.tool_use`); a step has their means, as `rollout/NAME`."""

BY_ROLE = ("reward", "success")
"""Rollout metrics that episodes of several roles also have for each role."""

BY_TRAINED_ROLE = ("turns", "groups_with_signal", "sampled_tokens")
"""The same, over the groups in which the role's policy trains."""

MAX_PARTS = 32
"""Number of `score/NAME` metrics of a step."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.@/-]+|^/|/(?=/|$)")


class StepClock:
    """Wall time of a step by phase, and by who computed (`telemetry.occupancy`)."""

    def __init__(self) -> None:
        self._split = Split()
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self._started = self._last = time.perf_counter()
        self._cpu = time.process_time()
        self._phases: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to `phase`."""
        now = time.perf_counter()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Seconds of each phase and of the step, those of all processor cores in this process, and
        tokens per second of the step."""
        seconds = self._last - self._started
        tokens = sum(t.num_tokens for group in groups for t in group.trajectories)
        phases = {f"time/{name}_s": value for name, value in self._phases.items()}
        rates = {"time/step_s": seconds, "time/tokens_per_s": tokens / max(seconds, 1e-9)}
        rates["time/cpu_s"] = time.process_time() - self._cpu
        return {**phases, **rates, **self._split.metrics()}


def _is_trainable(trajectory: Trajectory) -> bool:
    return trajectory.status.trainable and trajectory.reward is not None


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Outcomes of a step's rollouts. Rates and means are over trainable episodes."""
    everyone = [t for group in groups for t in group.trajectories]
    trainable = [t for t in everyone if _is_trainable(t)]
    metrics = {
        "rollout/episodes": float(len(everyone)),
        "rollout/excluded": float(
            sum(not t.without_turn for t in everyone if not _is_trainable(t))
        ),
        "rollout/retries": _total(everyone, "retries"),
        "rollout/tokens": float(sum(t.num_tokens for t in everyone)),
        "rollout/sampled_tokens": float(sum(t.num_sampled_tokens for t in everyone)),
    }
    if trainable:
        size = len(trainable)
        metrics |= {
            "rollout/reward": sum(t.reward or 0.0 for t in trainable) / size,
            "rollout/success": _total(trainable, "success") / size,
            "rollout/turns": sum(t.num_turns for t in trainable) / size,
            "rollout/truncated": sum(t.status != "completed" for t in trainable) / size,
        }
        metrics |= _ends(trainable)
    metrics |= _tool_metrics(everyone)
    if limited := [t for t in everyone if "endpoint_wait_seconds" in t.metrics]:
        total = _total(limited, "endpoint_wait_seconds")
        metrics["rollout/endpoint_wait_seconds"] = total / len(limited)
    metrics |= _parts(trainable)
    with_signal = [len({t.reward for t in group.trajectories}) > 1 for group in groups]
    metrics["rollout/groups_with_signal"] = sum(with_signal) / max(len(with_signal), 1)
    if solved := [some for some in map(_solved, groups) if some]:
        metrics["rollout/groups_failed"] = sum(not any(some) for some in solved) / len(solved)
        metrics["rollout/groups_solved"] = sum(all(some) for some in solved) / len(solved)
    return metrics


def _solved(group: Group) -> list[bool]:
    """For each scored episode of a group, whether it succeeded."""
    return [bool(t.metrics.get("success")) for t in group.trajectories if _is_trainable(t)]


def _ends(trainable: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of the limits that cut episodes; mean turns of those that succeed, and of those that
    the limit of turns cut."""
    cut = [t for t in trainable if t.status == "truncated_turns"]
    long = [t for t in trainable if t.status == "truncated_length"]
    full = sum("context" in (t.error or "") for t in long)
    counts = {"turns": len(cut), "length": len(long), "context": full}
    metrics = {f"rollout/truncated_{end}": n / len(trainable) for end, n in counts.items()}
    won = [t for t in trainable if t.metrics.get("success")]
    for name, some in (("success", won), ("truncated", cut)):
        if some:
            metrics[f"rollout/turns_of_{name}"] = sum(t.num_turns for t in some) / len(some)
    return metrics


def _tool_metrics(everyone: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the episodes that had tools on offer; none without such an episode."""
    equipped = [t for t in everyone if "tool_calls" in t.metrics]
    if not equipped:
        return {}
    return {f"rollout/{name}": _total(equipped, name) / len(equipped) for name in TOOL_METRICS}


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each named score over the episodes that have it, as `score/NAME`.

    Characters that a metric's name cannot have become `_`: judges and environments name scores.
    """
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.scores.items():
            if math.isfinite(value):
                values.setdefault(_NOT_IN_NAMES.sub("_", name) or "_", []).append(value)
    means = {f"score/{name}": sum(values[name]) / len(values[name]) for name in sorted(values)}
    return dict(islice(means.items(), MAX_PARTS))


def part_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of each part of a mixture, as `rollout/NAME_PART`: those of BY_PART, its
    number of groups, and the mean reward before rescaling; `mixture/PART/share`, of the groups."""
    metrics: dict[str, float] = {}
    for part in sorted({name for g in groups if (name := part_of(g.task)) is not None}):
        own = [group for group in groups if part_of(group.task) == part]
        raw = [
            t.scores["raw_reward"]
            for group in own
            for t in group.trajectories
            if t.status.trainable and "raw_reward" in t.scores
        ]
        numbers = {name: value for name, value in group_metrics(own).items() if name in BY_PART}
        numbers["rollout/groups"] = float(len(own))
        if raw:
            numbers["rollout/raw_reward"] = sum(raw) / len(raw)
        metrics |= {f"{name}_{part}": value for name, value in numbers.items()}
        metrics[f"mixture/{part}/share"] = len(own) / len(groups)
    return metrics


def role_of(group: Group) -> str:
    """The role of a group's trajectories."""
    return group.trajectories[0].role


def role_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of each role of a step with several, as `role/ROLE/NAME`: those of BY_ROLE and
    BY_TRAINED_ROLE; and the tokens of all roles."""
    roles = sorted({role_of(group) for group in groups})
    if len(roles) < 2:
        return {}
    metrics: dict[str, float] = {}
    for role in roles:
        own = [group for group in groups if role_of(group) == role]
        trained = [g for g in own if not any(t.fixed for t in g.trajectories)]
        for names, some in ((BY_ROLE, own), (BY_TRAINED_ROLE, trained)):
            numbers = group_metrics(some)
            for name in names:
                if some and f"rollout/{name}" in numbers:
                    metrics[f"role/{role}/{name}"] = numbers[f"rollout/{name}"]
    everyone = [t for group in groups for t in group.trajectories]
    metrics["rollout/tokens"] = float(sum(t.num_tokens for t in everyone))
    metrics["rollout/sampled_tokens"] = float(sum(t.num_sampled_tokens for t in everyone))
    return metrics


def score_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over sampled tokens that models scored.

    `sampler_gap`: |log pi_learner - log pi_sampler| of the same policy; `reference_gap`: log pi -
    log pi_ref, the k1 estimate of the divergence at sampling time.
    """
    gaps: dict[str, list[float]] = {"train/sampler_gap": [], "train/reference_gap": []}
    trajectories = (t for group in groups for t in group.trajectories)
    for turn in (s for t in trajectories for s in t.segments if s.logprobs):
        own = turn.learner_logprobs or turn.logprobs or []
        if turn.learner_logprobs and turn.logprobs:
            pairs = zip(own, turn.logprobs, strict=True)
            gaps["train/sampler_gap"] += [abs(a - b) for a, b in pairs]
        if turn.ref_logprobs:
            pairs = zip(own, turn.ref_logprobs, strict=True)
            gaps["train/reference_gap"] += [a - b for a, b in pairs]
    return {name: sum(values) / len(values) for name, values in gaps.items() if values}


def _total(trajectories: Sequence[Trajectory], name: str) -> float:
    return sum(t.metrics.get(name, 0.0) for t in trajectories)
