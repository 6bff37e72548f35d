"""Build the stages of a training run: SFT and RL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ludus.config.schema import RLConfig, SFTConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Spec, Task, by_role
from ludus.data.conversations import replay_all
from ludus.loop.loop import Stage
from ludus.pipeline.build import Run
from ludus.rollout.collect import Collector
from ludus.rollout.prefetch import PrefetchSource
from ludus.rollout.replay import ReplaySource
from ludus.rollout.source import DynamicSampling, GroupSource, SyncSource
from ludus.tasks.curriculum import TaskSampler
from ludus.tasks.mixture import part_of, task_sampler
from ludus.tasks.tiers import TierSampler
from ludus.train import ALGORITHMS
from ludus.train.algorithms.base import Algorithm
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.schedule import turn_limit


def sft_stage(run: Run, note: Callable[[str], None]) -> tuple[Stage, list[tuple[str, str]]]:
    """Returns the SFT stage, and (task id, reason) of each conversation that it excludes.

    `note` receives messages for the user. Errors: DataError where no conversation fits the context.
    """
    config, settings, ratios = run.config, run.config.sft, run.splits.train.ratios
    assert settings is not None
    limit = config.model.context_length
    tasks, played, excluded = replay_all(run.conversations, run.renderers, limit)
    if excluded:
        task_id, reason = excluded[0]
        message = f"{len(excluded)} of {len(run.conversations)} conversations skipped, the first"
        message = f"sft: {message} ({task_id}): {reason}"
        if not played:
            raise DataError(message)
        note(message)
    if missing := sorted(set(ratios) - {part_of(task) for task in tasks}):
        note(f"sft: no conversation of {', '.join(missing)}: the others have all")
    sampler = task_sampler(
        tasks,
        derive_seed(config.seed, "sft"),
        shuffle=True,
        ratios=ratios,
        batch_size=settings.episodes_per_step,
    )
    stage = Stage(
        TrainSettings(
            stage="sft",
            steps=settings.steps,
            optimizer=settings.optimizer,
            tokens_per_batch=settings.tokens_per_batch,
            seed=config.seed,
        ),
        groups_per_step=settings.episodes_per_step,
        source=ReplaySource(sampler, played),
        algorithm=sft_algorithm(settings),
    )
    return stage, excluded


def sft_algorithm(settings: SFTConfig) -> Algorithm:
    """Returns the algorithm of SFT: what has a loss, and with which weight."""
    args = {"observation_weight": settings.observation_weight}
    return ALGORITHMS.build(Spec(name="sft", args=args))


def rl_stage(run: Run) -> Stage:
    """Returns the RL stage."""
    config, settings = run.config, run.config.rl
    assert settings is not None
    algorithm = ALGORITHMS.build(settings.algorithm, "rl.algorithm")
    return Stage(
        TrainSettings(
            stage="rl",
            steps=settings.steps,
            optimizer=settings.optimizer,
            tokens_per_batch=settings.tokens_per_batch,
            epochs=settings.epochs,
            minibatches=settings.minibatches,
            temperature=config.rollout.temperature,
            seed=config.seed,
        ),
        groups_per_step=settings.groups_per_step,
        source=sample_until_signal(rollout_source(run, settings), algorithm),
        algorithm=algorithm,
    )


def sample_until_signal(source: GroupSource, algorithm: Algorithm) -> GroupSource:
    """Returns the source with the dynamic sampling that the algorithm asks for, if any."""
    if algorithm.max_rounds == 1:
        return source

    def count_useful(groups: list[Group]) -> int:
        return sum(bool(algorithm.screen(by_role([group])).groups) for group in groups)

    return DynamicSampling(source, count_useful, algorithm.max_rounds)


def _rl_tasks(run: Run, settings: RLConfig) -> TaskSampler:
    tasks, train = run.config.tasks, run.splits.train
    seed, size = derive_seed(run.config.seed, "rl"), settings.groups_per_step
    if tasks.curriculum is not None:
        return TierSampler(train, seed, tasks.shuffle, tasks.curriculum, train.ratios, size)
    return task_sampler(
        train,
        seed,
        shuffle=tasks.shuffle,
        ratios=train.ratios,
        batch_size=size,
        distinct=train.distinct,
    )


def rollout_source(run: Run, settings: RLConfig) -> GroupSource:
    """Returns the source of rollouts: synchronous, or prefetching with `rl.max_staleness`."""
    config, collector = run.config, run.collector

    def collector_of(step: int) -> Collector:
        if not settings.horizon:
            return collector
        return collector.with_config("rl", max_turns=turn_limit(config, step))

    score_groups = getattr(collector.judge, "score_groups", None)
    if score_groups is not None and settings.max_staleness:
        raise ConfigError(
            "rl.max_staleness must be 0 with a judge that scores the groups of a step together"
        )

    async def collect(tasks: Sequence[Task], step: int, *, first_group: int) -> list[Group]:
        groups = await collector_of(step).collect(
            tasks, step, settings.group_size, first_group=first_group
        )
        return groups if score_groups is None else await score_groups(groups, step)

    sampler = _rl_tasks(run, settings)
    if not settings.max_staleness:
        fixed = partial(collector.collect, group_size=settings.group_size)
        return SyncSource(
            sampler,
            collect if settings.horizon or score_groups else fixed,
            run.backend.meter.rollout,
            run.backend.verify if config.verify else None,
        )
    return PrefetchSource(
        collector_of,
        sampler,
        steps=settings.steps,
        groups_per_step=settings.groups_per_step,
        group_size=settings.group_size,
        max_staleness=settings.max_staleness,
        around=run.backend.meter.rollout,
    )
