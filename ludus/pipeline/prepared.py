"""A run's objects, from its folder: what plays its episodes, and what its stages are made of."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ludus.backends.local import LocalBackend
from ludus.config.schema import EvaluateConfig, RunConfig
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Task
from ludus.envs import ENVS
from ludus.evaluate import Evaluation, summarise
from ludus.judges import JUDGES
from ludus.loop.loop import Stage
from ludus.models.build import build_model
from ludus.models.chat.tokenizers import load_tokenizer
from ludus.pipeline.assemble import Conversation, make_renderer, make_renderers
from ludus.pipeline.progress import Observer
from ludus.pipeline.stages import rl_stage, sft_stage
from ludus.rollout.collect import Collector
from ludus.store.folders import RunFolder
from ludus.train.meter import Meter


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
            success_of=env.success_of if env and env.members() else None,
            confidence=settings.confidence,
            label=f"{label} {step}" if step else label,
            policy_version=self.backend.sampler.policy_version,
            temperature=settings.temperature,
            seconds=time.perf_counter() - started,
        )
        return groups, result

    @property
    def pad_id(self) -> int:
        """The tokenizer's padding id, or 0."""
        return self.tokenizer.pad_token_id or 0

    def _sft_stage(self, conversations: Sequence[Conversation]) -> Stage:
        stage, self._left_out = sft_stage(
            self.config,
            conversations,
            self.renderer,
            self.renderers,
            ratios=self.ratios,
            pad_id=self.pad_id,
            note=self.observer.note,
        )
        return stage

    def _rl_stage(self, train: Sequence[Task]) -> Stage:
        def on_verified(count: int) -> None:
            self._verified += count

        return rl_stage(
            self.config,
            train,
            self.collector,
            self.backend,
            self.meter,
            ratios=self.ratios,
            pad_id=self.pad_id,
            on_verified=on_verified,
        )
