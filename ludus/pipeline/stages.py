"""Build the stages of a training run: SFT and RL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ludus.backends.local import LocalBackend
from ludus.config.schema import RunConfig
from ludus.core.errors import DataError
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Task
from ludus.loop.loop import Stage
from ludus.models.chat.renderer import Renderer
from ludus.pipeline.conversations import Conversation, replay_all
from ludus.rollout.collect import Collector
from ludus.rollout.prefetch import Prefetch
from ludus.rollout.replay import ReplayCollector
from ludus.tasks.mixture import part_of, task_sampler
from ludus.telemetry.occupancy import busy
from ludus.train import ALGORITHMS
from ludus.train.meter import Meter
from ludus.train.schedule import turn_limit


def sft_stage(
    config: RunConfig,
    conversations: Sequence[Conversation],
    renderer: Renderer,
    renderers: Mapping[str, Renderer],
    *,
    ratios: Mapping[str, int],
    pad_id: int,
    note: Callable[[str], None],
) -> tuple[Stage, list[tuple[str, str]]]:
    """Returns the SFT stage, and (task id, reason) of each conversation that it excludes.

    `ratios` are the shares of a mixture's parts; `note` receives messages for the user.

    Errors: DataError where no conversation fits the context.
    """
    settings = config.sft
    assert settings is not None
    limit = config.model.context_length
    tasks, played, excluded = replay_all(conversations, renderer, limit, renderers)
    if excluded:
        task_id, reason = excluded[0]
        message = f"{len(excluded)} of {len(conversations)} conversations skipped, the first"
        message = f"sft: {message} ({task_id}): {reason}"
        if not played:
            raise DataError(message)
        note(message)
    if missing := sorted(set(ratios) - {part_of(task) for task in tasks}):
        note(f"sft: no conversation of {', '.join(missing)}: the others have all")
    seed = derive_seed(config.seed, "sft")
    stage = Stage(
        name="sft",
        steps=settings.steps,
        tasks=task_sampler(tasks, seed, shuffle=True, ratios=dict(ratios)),
        groups_per_step=settings.episodes_per_step,
        collect=ReplayCollector(played).collect,
        algorithm=ALGORITHMS.build("sft"),
        optimizer=settings.optimizer,
        tokens_per_batch=settings.tokens_per_batch,
        pad_id=pad_id,
        seed=config.seed,
    )
    return stage, excluded


def rl_stage(
    config: RunConfig,
    tasks: Sequence[Task],
    collector: Collector,
    backend: LocalBackend,
    meter: Meter,
    *,
    ratios: Mapping[str, int],
    pad_id: int,
    on_verified: Callable[[int], None],
) -> Stage:
    """Returns the RL stage. With `verify`, `on_verified` receives the count of equal tokens."""
    settings = config.rl
    assert settings is not None

    def collector_of(step: int) -> Collector:
        if not settings.horizon:
            return collector
        return collector.with_config("rl", max_turns=turn_limit(config, step))

    async def collect(tasks: Sequence[Task], step: int, first_group: int) -> list[Group]:
        with meter.rollout():
            groups = await collector_of(step).collect(tasks, step, settings.group_size, first_group)
        if config.verify:
            on_verified(await verify(backend, groups, settings.tokens_per_batch, pad_id))
        return groups

    seed = derive_seed(config.seed, "rl")
    sampler = task_sampler(tasks, seed, shuffle=config.tasks.shuffle, ratios=dict(ratios))
    ahead: Prefetch | None = None
    if settings.max_staleness:
        ahead = Prefetch(
            collector_of,
            sampler,
            steps=settings.steps,
            groups_per_step=settings.groups_per_step,
            group_size=settings.group_size,
            max_staleness=settings.max_staleness,
            around=meter.rollout,
        )
    return Stage(
        name="rl",
        steps=settings.steps,
        tasks=sampler,
        groups_per_step=settings.groups_per_step,
        collect=collect,
        algorithm=ALGORITHMS.build(settings.algorithm, "rl.algorithm"),
        optimizer=settings.optimizer,
        tokens_per_batch=settings.tokens_per_batch,
        pad_id=pad_id,
        epochs=settings.epochs,
        minibatches=settings.minibatches,
        temperature=config.rollout.temperature,
        seed=config.seed,
        ahead=ahead,
    )


async def verify(
    backend: LocalBackend, groups: Sequence[Group], tokens_per_batch: int, pad_id: int
) -> int:
    """Returns how many sampled tokens have the same bits in sampler and learner."""
    played = [trajectory for group in groups for trajectory in group.trajectories]
    with busy("train"):
        return await backend.verify(played, tokens_per_batch, pad_id)
