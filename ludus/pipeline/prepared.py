"""A run's objects, from its folder: what plays its episodes, and what its stages are made of."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ludus.backends.local import LocalBackend
from ludus.config.schema import EvaluateConfig, RunConfig
from ludus.core.errors import DataError
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Task
from ludus.envs import ENVS
from ludus.envs.mixture import Mixture
from ludus.evaluate import Evaluation, summarise
from ludus.judges import JUDGES
from ludus.loop.loop import Stage
from ludus.models.build import build_model
from ludus.models.chat.tokenizers import load_tokenizer
from ludus.pipeline.assemble import Conversation, make_renderer, make_renderers, replay_all
from ludus.pipeline.progress import Observer
from ludus.rollout.collect import Collector
from ludus.rollout.prefetch import Prefetch
from ludus.rollout.replay import ReplayCollector
from ludus.store.folders import RunFolder
from ludus.tasks.mixture import part_of, task_sampler
from ludus.telemetry.occupancy import busy
from ludus.train import ALGORITHMS
from ludus.train.meter import Meter
from ludus.train.schedule import turn_limit


class PreparedRun:
    """A run whose model can play and be trained, once `build` has made it.

    Args:
        folder: where everything is; its configuration is stored already.
        observer: told of progress.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, observer: Observer) -> None:
        self.folder = folder
        self.config = config
        self.observer = observer
        self.ratios: dict[str, int] = {}
        self._left_out: list[tuple[str, str]] = []
        self._verified = 0

    def build(self, heldout: Sequence[Task]) -> None:
        """Tokenizer, renderer, model, back end, collector: from the run's folder."""
        config = self.config
        self.heldout = heldout
        self.tokenizer = load_tokenizer(str(self.folder.tokenizer))
        self.renderer = make_renderer(config, self.tokenizer)
        self.renderers = make_renderers(config, self.tokenizer)
        self.model = build_model(config.model, self.tokenizer, derive_seed(config.seed, "model"))
        self.backend = LocalBackend(self.model, self.renderer, config, self.folder.path)
        self.meter = Meter(self.model, self.backend.sampler)
        self.collector = Collector(
            sampler=self.backend.sampler,
            renderer=self.renderer,
            renderers=self.renderers,
            config=config.rollout,
            env=config.env,
            judge=JUDGES.build(config.judge, "judge") if config.judge else None,
            seed=config.seed,
            on_episode=self.observer.episode,
        )

    async def play(
        self, label: str, step: int, settings: EvaluateConfig
    ) -> tuple[list[Group], Evaluation]:
        """Play held-out tasks with the current weights; nothing is recorded."""
        collector = self.collector.with_config(
            f"evaluate/{label}", temperature=settings.temperature, top_p=1.0, top_k=0
        )
        started = time.perf_counter()
        tasks = self.heldout[: settings.num_tasks]
        groups = await collector.collect(tasks, step, settings.samples_per_task)
        env = ENVS.build(self.config.env, "env") if self.config.env else None
        result = summarise(
            groups,
            success_at=env.success_at if env else 1.0,
            success_of=env.success_of if isinstance(env, Mixture) else None,
            confidence=settings.confidence,
            label=f"{label} {step}" if step else label,
            policy_version=self.backend.sampler.policy_version,
            temperature=settings.temperature,
            seconds=time.perf_counter() - started,
        )
        return groups, result

    def _sft_stage(self, conversations: Sequence[Conversation]) -> Stage:
        settings = self.config.sft
        assert settings is not None
        limit = self.config.model.context_length
        tasks, played, self._left_out = replay_all(
            conversations, self.renderer, limit, self.renderers
        )
        if self._left_out:
            told = (
                f"{len(self._left_out)} of {len(conversations)} conversations left out, the first"
            )
            told = "sft: {} ({}): {}".format(told, *self._left_out[0])
            if not played:
                raise DataError(told)
            self.observer.note(told)
        if missing := sorted(set(self.ratios) - {part_of(task) for task in tasks}):
            self.observer.note(f"sft: no conversation of {', '.join(missing)}: the others have all")
        return Stage(
            name="sft",
            steps=settings.steps,
            tasks=task_sampler(
                tasks, derive_seed(self.config.seed, "sft"), shuffle=True, ratios=self.ratios
            ),
            groups_per_step=settings.episodes_per_step,
            collect=ReplayCollector(played).collect,
            algorithm=ALGORITHMS.build("sft"),
            optimizer=settings.optimizer,
            tokens_per_batch=settings.tokens_per_batch,
            pad_id=self.tokenizer.pad_token_id or 0,
            seed=self.config.seed,
        )

    def _rl_stage(self, train: Sequence[Task]) -> Stage:
        settings = self.config.rl
        assert settings is not None

        def collector_of(step: int) -> Collector:
            if not settings.horizon:
                return self.collector
            return self.collector.with_config("rl", max_turns=turn_limit(self.config, step))

        async def collect(tasks: Sequence[Task], step: int, first_group: int) -> list[Group]:
            collector = collector_of(step)
            with self.meter.rollout():
                groups = await collector.collect(tasks, step, settings.group_size, first_group)
            if self.config.verify:
                await self._verify(groups, settings.tokens_per_batch)
            return groups

        seed = derive_seed(self.config.seed, "rl")
        shuffle = self.config.tasks.shuffle
        sampler = task_sampler(train, seed, shuffle=shuffle, ratios=self.ratios)
        ahead: Prefetch | None = None
        if settings.max_staleness:
            ahead = Prefetch(
                collector_of,
                sampler,
                steps=settings.steps,
                groups_per_step=settings.groups_per_step,
                group_size=settings.group_size,
                max_staleness=settings.max_staleness,
                around=self.meter.rollout,
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
            pad_id=self.tokenizer.pad_token_id or 0,
            epochs=settings.epochs,
            minibatches=settings.minibatches,
            temperature=self.config.rollout.temperature,
            seed=self.config.seed,
            ahead=ahead,
        )

    async def _verify(self, groups: Sequence[Group], tokens_per_batch: int) -> None:
        """Count the sampled tokens on which sampler and learner agree in every bit."""
        played = [trajectory for group in groups for trajectory in group.trajectories]
        pad_id = self.tokenizer.pad_token_id or 0
        with busy("train"):
            self._verified += await self.backend.verify(played, tokens_per_batch, pad_id)
