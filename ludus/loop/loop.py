"""THE loop: tasks -> rollouts -> judged groups -> samples -> batch -> train step -> weights.

SFT runs through the same lines as reinforcement learning: its `collect` reads demonstrations where
RL's plays episodes, and its algorithm's loss is the cross-entropy.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ludus.backends.base import Backend
from ludus.config.schema import OptimizerConfig
from ludus.core.errors import TrainingError
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Sample, Task, Trajectory
from ludus.rollout.prefetch import Prefetch
from ludus.tasks.curriculum import Curriculum
from ludus.tasks.mixture import part_of
from ludus.telemetry.logs import get_logger
from ludus.telemetry.occupancy import Split, busy
from ludus.train.algorithms.base import Algorithm
from ludus.train.packing import Batch, Layout, pack
from ludus.train.samples import split, staleness, to_samples

log = get_logger(__name__)

BY_PART = {f"rollout/{name}" for name in ("reward", "success", "turns", "groups_with_signal")}
"""Metrics of rollouts that a mixture has for each of its environments too."""


class Recorder(Protocol):
    """Where a step's results go: the run store, the metrics sinks, the progress display."""

    def record(
        self, stage: str, step: int, groups: Sequence[Group], metrics: dict[str, float]
    ) -> None:
        """Keep the results of a step that is complete. Steps are counted from 0."""
        ...


@dataclass(slots=True)
class Stage:
    """One use of the loop: where groups come from, and how they train the policy.

    Args:
        collect: plays (or reads) the groups of some tasks, given the step's number and that of
            the first group.
        ahead: plays the groups ahead of their steps, in place of `collect`.
        after_step: called when a step is recorded, with the number of steps that are complete;
            evaluates and saves. Returning False ends the stage.
    """

    name: str
    steps: int
    tasks: Curriculum
    groups_per_step: int
    collect: Callable[[Sequence[Task], int, int], Awaitable[list[Group]]]
    algorithm: Algorithm
    optimizer: OptimizerConfig
    tokens_per_batch: int
    pad_id: int
    epochs: int = 1
    minibatches: int = 1
    temperature: float = 1.0
    seed: int = 0
    after_step: Callable[[int], Awaitable[bool]] | None = None
    ahead: Prefetch | None = None

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.epochs * self.minibatches


async def run_stage(stage: Stage, backend: Backend, recorder: Recorder, start: int = 0) -> None:
    """Run the steps from `start` on. The back end has begun the stage, or loaded a checkpoint.

    Meanwhile the garbage collector leaves alone what there is when it begins: libraries and the
    model are hundreds of thousands of objects, and to go through them takes a quarter of a second,
    in the midst of some environment's step.
    """
    gc.freeze()
    try:
        await _run_steps(stage, backend, recorder, start)
    finally:
        gc.unfreeze()
        if stage.ahead is not None:
            await stage.ahead.close()


async def _run_steps(stage: Stage, backend: Backend, recorder: Recorder, start: int) -> None:
    split = Split()
    for step in range(start, stage.steps):
        clock = Clock()
        version = backend.policy_version
        groups, rounds = await _sample(stage, step, version)
        _require_fresh(groups, version, stage.ahead.max_staleness if stage.ahead else 0)
        clock.lap("rollout")
        with busy("train"):
            kept = [t for group in stage.algorithm.screen(groups) for t in group]
            if stage.algorithm.asks_models:
                await backend.score(kept, stage.tokens_per_batch, stage.pad_id)
            samples = to_samples(groups, stage.algorithm)
            trained: list[dict[str, float]] = []
            for part in _parts(stage, samples, step):
                batch = _batch(stage, part, backend.layout)
                done = await backend.train_step(batch, stage.algorithm.loss)
                stale = staleness(part, backend.policy_version)
                trained.append({**done, **_sizes(batch), "staleness": stale})
            metrics = group_metrics(groups) | part_metrics(groups) | train_metrics(trained)
            metrics |= {"rollout/rounds": float(rounds), **score_metrics(kept)}
            metrics["train/policy_version"] = await backend.publish_weights()
        clock.lap("train")
        metrics |= clock.metrics(groups) | split.metrics()
        if stage.ahead is not None:
            metrics |= stage.ahead.metrics() | age_metrics(groups, version)
        recorder.record(stage.name, step, groups, metrics)
        if stage.after_step and not await stage.after_step(step + 1):
            return


async def _sample(stage: Stage, step: int, version: int) -> tuple[list[Group], int]:
    """The groups of a step, and in how many rounds they were sampled.

    An algorithm that leaves out groups may sample on in their place (DAPO's dynamic sampling, Yu et
    al. 2025, arXiv:2503.14476, section 3.2), up to its `max_rounds`. What was left out is returned,
    too: it was played, and the curriculum sees it.
    """
    algorithm, wanted = stage.algorithm, stage.groups_per_step
    groups: list[Group] = []
    rounds, missing = 0, wanted
    while missing > 0 and rounds < algorithm.max_rounds:
        if stage.ahead is None:
            tasks = [next(stage.tasks) for _ in range(missing)]
            fresh = await stage.collect(tasks, step, len(groups))
            stage.tasks.observe(fresh)
        else:
            fresh = await stage.ahead.take(missing, step, version)
        groups += fresh
        rounds += 1
        missing -= sum(bool(kept) for kept in algorithm.screen(fresh))
    if algorithm.max_rounds > 1 and missing > 0:
        log.info("too few groups with signal", step=step, rounds=rounds, missing=missing)
    return groups, rounds


def _require_fresh(groups: Sequence[Group], version: int, max_staleness: int) -> None:
    """Refuse turns of weights that are more than `max_staleness` versions behind the published
    ones, or that nobody published.

    Errors: TrainingError. Demonstrations carry no version, and pass.
    """
    for group in groups:
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                sampled_by = segment.policy_version
                if sampled_by is None or version - max_staleness <= sampled_by <= version:
                    continue
                allowed = f", of which {max_staleness} may lie between" if max_staleness else ""
                raise TrainingError(
                    f"trajectory {trajectory.id} was sampled by version {sampled_by} of the "
                    f"weights, but version {version} was published{allowed}: the sampler is stale"
                )


def _parts(stage: Stage, samples: list[Sample], step: int) -> list[list[Sample]]:
    """The samples of each optimizer step of one policy iteration.

    A part in which no token has an advantage has no gradient, and is left out; but for algorithms
    with a term that needs no advantage.
    """
    parts: list[list[Sample]] = []
    for epoch in range(stage.epochs):
        seed = derive_seed(stage.seed, stage.name, step, epoch)
        parts += split(samples, stage.minibatches, seed) if samples else []
    if stage.algorithm.regularised:
        return parts
    return [part for part in parts if any(map(_has_gradient, part))]


def _batch(stage: Stage, samples: list[Sample], layout: Layout) -> Batch:
    """Weights over all samples; then trajectories without a gradient need no computation."""
    weights = stage.algorithm.aggregate(samples)
    moved = {s.trajectory_id for s in samples if stage.algorithm.regularised or _has_gradient(s)}
    live = [(s, w) for s, w in zip(samples, weights, strict=True) if s.trajectory_id in moved]
    return pack(
        [sample for sample, _ in live],
        [weight for _, weight in live],
        tokens_per_batch=stage.tokens_per_batch,
        pad_id=stage.pad_id,
        layout=layout,
    )


def _sizes(batch: Batch) -> dict[str, float]:
    """Logical tokens are those of all samples; unique ones are computed."""
    return {
        "padding": batch.padding,
        "tokens": float(batch.num_tokens),
        "unique_tokens": float(batch.num_unique_tokens),
        "loss_tokens": float(batch.num_loss_tokens),
    }


def _has_gradient(sample: Sample) -> bool:
    return any(sample.advantages)


class Clock:
    """Wall time of a step, part by part."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """Give the time since the last lap to `part`."""
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Seconds a part, and tokens a second over the whole step."""
        seconds = self._last - self._started
        tokens = sum(t.num_tokens for group in groups for t in group.trajectories)
        parts = {f"time/{name}_s": value for name, value in self._parts.items()}
        return {**parts, "time/step_s": seconds, "time/tokens_per_s": tokens / max(seconds, 1e-9)}


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What the rollouts of a step were like. Rates are over trainable episodes."""
    everyone = [t for group in groups for t in group.trajectories]
    counted = [t for t in everyone if t.status.trainable and t.reward is not None]
    metrics = {
        "rollout/episodes": float(len(everyone)),
        "rollout/excluded": float(len(everyone) - len(counted)),
        "rollout/retries": _total(everyone, "retries"),
        "rollout/tokens": float(sum(t.num_tokens for t in everyone)),
        "rollout/sampled_tokens": float(sum(t.num_sampled_tokens for t in everyone)),
    }
    if counted:
        size = len(counted)
        metrics |= {
            "rollout/reward": sum(t.reward or 0.0 for t in counted) / size,
            "rollout/success": _total(counted, "success") / size,
            "rollout/turns": sum(t.num_turns for t in counted) / size,
            "rollout/truncated": sum(t.status != "completed" for t in counted) / size,
        }
    mixed = [len({t.reward for t in group.trajectories}) > 1 for group in groups]
    metrics["rollout/groups_with_signal"] = sum(mixed) / max(len(mixed), 1)
    return metrics


def part_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Of a mixture, the numbers of each environment: `rollout/success_NAME` and so on, how many
    groups it had, and the mean reward as its environment gave it."""
    found: dict[str, float] = {}
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
        found |= {f"{name}_{part}": value for name, value in numbers.items()}
    return found


def age_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many versions old the turns are that a step trains on, of those that have a version."""
    ages = [
        version - segment.policy_version
        for group in groups
        for trajectory in group.trajectories
        if trajectory.status.trainable
        for segment in trajectory.segments
        if segment.policy_version is not None
    ]
    return {
        "rollout/staleness_mean": sum(ages) / max(len(ages), 1),
        "rollout/staleness_max": float(max(ages, default=0)),
    }


def score_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What models said of the sampled tokens, where they were asked, as means over tokens.

    `sampler_gap`: |log pi_learner - log pi_sampler|, of one policy; `reference_gap`: log pi - log
    pi_ref, the k1 estimate of the divergence when they were sampled.
    """
    found: dict[str, list[float]] = {"train/sampler_gap": [], "train/reference_gap": []}
    for turn in (s for t in trajectories for s in t.segments if s.logprobs):
        own = turn.learner_logprobs or turn.logprobs or []
        if turn.learner_logprobs and turn.logprobs:
            pairs = zip(own, turn.logprobs, strict=True)
            found["train/sampler_gap"] += [abs(a - b) for a, b in pairs]
        if turn.ref_logprobs:
            pairs = zip(own, turn.ref_logprobs, strict=True)
            found["train/reference_gap"] += [a - b for a, b in pairs]
    return {name: sum(gaps) / len(gaps) for name, gaps in found.items() if gaps}


def train_metrics(trained: Sequence[dict[str, float]]) -> dict[str, float]:
    """The means over a step's optimizer steps, and how many there were."""
    names = dict.fromkeys(name for metrics in trained for name in metrics)
    means = {
        f"train/{name}": sum(metrics[name] for metrics in trained) / len(trained) for name in names
    }
    return {**means, "train/optimizer_steps": float(len(trained))}


def _total(trajectories: Sequence[Trajectory], name: str) -> float:
    return sum(t.metrics.get(name, 0.0) for t in trajectories)
