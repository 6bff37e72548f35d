"""THE loop: groups -> samples -> train -> publish.

Supervised and reinforcement learning differ in the source and the algorithm of their stage, and
asynchronous training differs in the source.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from ludus.backends.base import Backend
from ludus.core.errors import TrainingError
from ludus.core.system.garbage import rare_collections
from ludus.core.types import Group, Trajectory, by_role
from ludus.loop.metrics import (
    StepClock,
    group_metrics,
    part_metrics,
    role_metrics,
    role_of,
    score_metrics,
)
from ludus.rollout.source import GroupSource, require_fresh
from ludus.telemetry.hosts import HOSTS
from ludus.telemetry.occupancy import busy
from ludus.train.algorithms.base import Algorithm, Assignment
from ludus.train.algorithms.credit import extremes, with_advantages
from ludus.train.algorithms.entropy import EntropyControl
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.batches.samples import to_samples

ROUNDING = 1e-6
"""Differences of advantages, relative to the largest of the step, that are rounding."""


class Recorder(Protocol):
    """Receives the results of each step: run store, metrics sinks, progress display."""

    def record(
        self, stage: str, step: int, groups: Sequence[Group], metrics: dict[str, float]
    ) -> None:
        """Record a complete step. Steps are counted from 0."""
        ...


@dataclass(slots=True)
class Stage:
    """One use of the loop.

    Args:
        source: supplies the groups; the loop closes it.
        after_step: called with the number of complete steps, after a step is recorded. Evaluates
            and saves. Returning False ends the stage.
    """

    settings: TrainSettings
    groups_per_step: int
    source: GroupSource
    algorithm: Algorithm
    after_step: Callable[[int], Awaitable[bool]] | None = None

    @property
    def name(self) -> str:
        return self.settings.stage

    @property
    def steps(self) -> int:
        return self.settings.steps


async def run_stage(stage: Stage, backend: Backend, recorder: Recorder, start: int = 0) -> None:
    """Run the steps from `start` on. The back end has begun the stage, or loaded a checkpoint."""
    source, control, clock = stage.source, EntropyControl(stage.algorithm), StepClock()
    async with AsyncExitStack() as stack:
        stack.enter_context(rare_collections())
        stack.push_async_callback(source.close)
        for step in range(start, stage.steps):
            clock.start()
            version = backend.policy_version
            taken = await source.take(stage.groups_per_step, step, version)
            groups = by_role(taken)
            require_fresh(groups, version, source.max_staleness)
            clock.lap("rollout")
            with busy("train"), _located(stage.name, step):
                algorithm, bonus = control.at(groups)
                screening = algorithm.screen(groups)
                scored = await backend.score(screening.groups, algorithm)
                credited = credit_by_role(algorithm, scored)
                samples = to_samples(credited, algorithm.observation_weight)
                trained = await backend.train(samples, algorithm)
                trained["train/policy_version"] = await backend.publish_weights()
            clock.lap("train")
            metrics = group_metrics(taken) | part_metrics(taken) | {"rollout/rounds": 1.0}
            metrics |= role_metrics(groups) | HOSTS.metrics() | bonus
            metrics |= source.metrics() | score_metrics(scored) | trained | clock.metrics(groups)
            if algorithm.scored:
                metrics["train/groups_with_advantage"] = share_that_trains(
                    algorithm, groups, credited
                )
            shown = annotated(groups, credited, screening.excluded)
            recorder.record(stage.name, step, shown, metrics)
            if stage.after_step and not await stage.after_step(step + 1):
                return


@contextmanager
def _located(stage: str, step: int) -> Iterator[None]:
    """Name the step in the message of a TrainingError."""
    try:
        yield
    except TrainingError as error:
        raise TrainingError(f"{stage}, step {step}: {error}") from error


def credit_by_role(algorithm: Algorithm, groups: Sequence[Group]) -> Assignment:
    """The advantages of screened groups: statistics over a step are over the groups of a role."""
    pairs = []
    for role in dict.fromkeys(map(role_of, groups)):
        pairs += algorithm.credit([g for g in groups if role_of(g) == role]).pairs
    return Assignment(pairs, {})


def share_that_trains(algorithm: Algorithm, groups: Sequence[Group], credited: Assignment) -> float:
    """Share of the groups whose advantages differ from one another, beyond rounding; of several
    roles, of those with a policy that trains. Of an algorithm that does not compare within groups
    all, where the advantages of the step differ."""
    bounds: dict[tuple[str, str], tuple[float, float]] = {}
    for trajectory, advantage in credited.pairs:
        key = (trajectory.group_id, trajectory.role) if algorithm.compares else ("", "")
        low, high = bounds.get(key, (math.inf, -math.inf))
        least, most = extremes(advantage)
        bounds[key] = min(low, least), max(high, most)
    largest = max((max(abs(low), abs(high)) for low, high in bounds.values()), default=0.0)
    rounding = max(ROUNDING * largest, ROUNDING)
    differ = sum(high - low > rounding for low, high in bounds.values())
    number = sum(not all(t.fixed for t in group.trajectories) for group in groups)
    return (differ / max(number, 1)) if algorithm.compares else float(differ)


def annotated(
    groups: Sequence[Group], credited: Assignment, excluded: Mapping[str, str]
) -> list[Group]:
    """Returns the groups with their credited trajectories, which have their advantages, and reasons
    of exclusion in `dropped`."""
    credited_of = {t.id: with_advantages(t, advantage) for t, advantage in credited.pairs}

    def merged(t: Trajectory) -> Trajectory:
        return replace(credited_of.get(t.id, t), dropped=excluded.get(t.id))

    return [replace(g, trajectories=[merged(t) for t in g.trajectories]) for g in groups]
