"""The local back end: learner in this process, sampler on the same machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ludus.config.schema import ModelConfig, RunConfig
from ludus.core.errors import ConfigError
from ludus.core.signals import abandon
from ludus.core.types import Group, Sample, Spec
from ludus.models import SAMPLERS
from ludus.models.build import build_model
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import PolicySampler
from ludus.models.vocabulary import Vocabulary, fingerprint
from ludus.telemetry.occupancy import busy
from ludus.train.algorithms.base import Algorithm
from ludus.train.checkpoint.policy import load_trained
from ludus.train.checkpoint.state import random_state, set_random_state
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.learner import Learner
from ludus.train.meter import Meter
from ludus.train.minibatches import (
    TrainSettings,
    batch_metrics,
    staleness,
    to_batch,
    to_minibatches,
    train_metrics,
)
from ludus.train.reference import Reference
from ludus.train.scoring import Scorer
from ludus.train.verify import ExactForward, unscored, verify

T = TypeVar("T")


class LocalBackend:
    """Trains in this process, and samples with the plug-in `config.sampler`.

    A sampler that shares the learner's parameters is paused from their first change until their
    publication. A sampler with weights of its own is paused for the publication only. Hence none
    computes with changing weights, or with weights that have no version.

    With `rl.max_staleness`, the learner has a thread of its own while episodes continue.

    Args:
        make_model: builds the policy, a Hugging Face causal LM.
        renderer: has the tokenizer, which decodes ids for stop strings.
        config: the run's configuration.
        run_dir: receives `checkpoints/`, `reference/` (a copy of the policy as reference model),
            and the batches of failed steps.
    """

    def __init__(
        self, make_model: Callable[[], Any], renderer: Renderer, config: RunConfig, run_dir: Path
    ) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        # On CUDA torch has no deterministic cumulative sum, which sampling needs.
        torch.use_deterministic_algorithms(config.model.device == "cpu")
        # Filling new tensors, a debugging aid of that mode, costs 2 to 7 % of a step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.model = make_model()
        self._config, self._tokenizer = config, renderer.tokenizer
        self._vocabulary = Vocabulary.of(renderer.tokenizer)
        self._fingerprint = fingerprint(renderer.tokenizer)
        self._pad_id = renderer.tokenizer.pad_token_id or 0
        self._run_dir = run_dir
        self.sampler: PolicySampler = SAMPLERS.build(
            Spec(name="exact") if config.verify else config.sampler,
            "sampler",
            model=self.model,
            context_length=config.model.context_length,
            decode=renderer.tokenizer.decode,
            deterministic=config.rollout.deterministic,
            tokenizer=renderer.tokenizer,
            folder=run_dir / "sampler",
        )
        half = "bfloat16" in (config.learner.dtype, config.sampler.args.get("dtype"))
        self.meter = Meter(self.model, self.sampler, half=half)
        self.checkpoints = CheckpointStore(
            run_dir / "checkpoints",
            config.checkpoint.keep_last,
            config.checkpoint.keep_best,
            config.best_by,
        )
        self._learner: Learner | None = None
        self._settings: TrainSettings
        self._reference: Reference | None = None
        self._iteration = self.policy_version = 0
        self._verified: dict[str, float] = {}
        self._ahead = bool(config.rl and config.rl.max_staleness)
        self._thread = ThreadPoolExecutor(1, "ludus-learner")  # it starts at its first job
        self._job: Future[Any] | None = None

    @property
    def learner(self) -> Learner:
        """The learner of the current stage."""
        if self._learner is None:
            raise RuntimeError("begin_stage has not been called")
        return self._learner

    def begin_stage(self, settings: TrainSettings, algorithm: Algorithm) -> None:
        """Start a stage with a new optimizer, critic and reference model."""
        config = self._config
        options: dict[str, Any] = {
            "context_length": config.model.context_length,
            "settings": config.learner,
            "vocabulary": self._vocabulary,
        }
        self._settings, self._iteration = settings, 0
        self._learner = learner = Learner(
            self.model,
            settings.optimizer,
            settings.optimizer_steps,
            temperature=settings.temperature,
            dump_dir=self._run_dir,
            critic_lr=algorithm.critic_lr,
            **options,
        )
        if config.verify:
            learner.forward = ExactForward(self.model, temperature=learner.temperature, **options)
        self._reference = None
        if algorithm.reference is not None:
            self._reference = self._make_reference(algorithm.reference.model, settings.temperature)

    def _make_reference(self, path: str | None, temperature: float) -> Reference:
        model, config = None, self._config.model
        if path is not None:
            shared = config.model_dump(include={"context_length", "dtype", "device", "tf32"})
            named = ModelConfig(path=path, **shared)
            try:
                model = build_model(named, self._tokenizer, seed=0)
            except ConfigError as error:
                raise ConfigError(f"rl.algorithm.args.kl_reference: {error}") from error
        return Reference(
            self.model,
            model,
            temperature=temperature,
            context_length=config.context_length,
            vocabulary=self._vocabulary,
        )

    async def score(self, groups: Sequence[Group], algorithm: Algorithm) -> Sequence[Group]:
        """Score the sampled tokens with the learner, its critic and the reference model."""
        if not algorithm.asks_models:
            return groups
        return await self._on_learner(lambda: self._score(groups, algorithm))

    def _score(self, groups: Sequence[Group], algorithm: Algorithm) -> Sequence[Group]:
        learner, limit = self.learner, self._settings.tokens_per_batch
        if algorithm.importance or learner.critic:
            scorer = Scorer(learner.forward, limit, self._pad_id, learner.critic)
            groups = scorer(groups, "learner_logprobs" if algorithm.importance else None)
        if self._reference is not None:
            with self._reference.active():
                scorer = Scorer(self._reference.forward, limit, self._pad_id)
                groups = scorer(groups, "ref_logprobs")
        return groups

    async def train(self, samples: list[Sample], algorithm: Algorithm) -> dict[str, float]:
        """Run the optimizer steps of one policy iteration on the learner."""
        learner = self.learner
        parts = to_minibatches(samples, algorithm, self._settings, self._iteration)
        self._iteration += 1
        verified, self._verified = self._verified, {}
        if not parts:
            return {**train_metrics([]), **verified}

        if self.sampler.shares_weights:
            self.sampler.pause()  # the weights change, and have no version until `publish_weights`

        def optimizer_step(part: list[Sample]) -> dict[str, float]:
            limit, layout = self._settings.tokens_per_batch, learner.forward.layout
            batch = to_batch(part, algorithm, limit, self._pad_id, layout)
            metrics = learner.train_step(batch, algorithm.loss)
            stale = staleness(part, self.policy_version)
            return {**metrics, **batch_metrics(batch), "staleness": stale}

        done = await self._on_learner(lambda: [optimizer_step(part) for part in parts])
        return {**train_metrics(done), **verified}

    async def _on_learner(self, work: Callable[[], T]) -> T:
        """Run `work` here, or in the learner's thread; a sampler that shares the weights is paused
        until they are published."""
        if not self._ahead:
            return work()
        if self.sampler.shares_weights:
            self.sampler.pause()
        return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        self._job = job = self._thread.submit(work)
        return await asyncio.wrap_future(job)

    async def verify(self, groups: Sequence[Group]) -> None:
        """Compare the log-probabilities of learner and sampler, and count equal tokens."""
        forward, limit = self.learner.forward, self._settings.tokens_per_batch
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        batch = unscored(trajectories, limit, self._pad_id, forward.layout)
        with busy("train"):
            count = await verify(forward, batch, self.policy_version)
        name = "rollout/verified_tokens"
        self._verified = {name: self._verified.get(name, 0.0) + count}

    async def publish_weights(self) -> int:
        """Publish the weights under the next version.

        A sampler with weights of its own copies them in a thread, so the event loop stays free.
        """
        version = self.policy_version + 1
        if self.sampler.shares_weights:
            self.sampler.publish(version)
        else:
            self.sampler.pause()
            await self._in_thread(partial(self.sampler.publish, version))
        self._note_published(version)
        return version

    def save(
        self, stage: str, step: int, state: dict[str, Any], metric: float | None, *, pin: bool
    ) -> Path:
        """Write a checkpoint: weights, optimizer, critic, counters, random state, loop state."""
        everything = {
            "loop": state,
            "optimizer_step": self.learner.step,
            "policy_version": self.policy_version,
            "random": random_state(),
            "tokenizer": self._fingerprint,
        }
        if self.learner.critic is not None:
            everything["critic"] = self.learner.critic.state_dict()
        if self._reference is not None:
            everything["reference"] = self._reference.save(self._run_dir / "reference")
        return self.checkpoints.save(
            stage,
            step,
            model=self.model,
            optimizer=self.learner.optimizer,
            state=everything,
            metric=metric,
            pin=pin,
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint of the stage that `begin_stage` started."""
        everything = load_trained(
            path, self._fingerprint, model=self.model, optimizer=self.learner.optimizer
        )
        self._iteration = int(path.name.rpartition("-")[2])  # its name is STAGE-STEP
        self.learner.step = everything["optimizer_step"]
        if self.learner.critic is not None and "critic" in everything:
            self.learner.critic.load_state_dict(everything["critic"])
        if self._reference is not None:
            self._reference.load(self._run_dir / "reference", everything.get("reference"))
        self.sampler.publish(everything["policy_version"])
        self._note_published(everything["policy_version"])
        set_random_state(everything["random"])
        state: dict[str, Any] = everything["loop"]
        return state

    def load_weights(self, path: Path) -> None:
        """Take only the weights of a checkpoint, of any stage, and publish them."""
        state = load_trained(path, self._fingerprint, model=self.model)
        self.sampler.publish(state["policy_version"])
        self._note_published(state["policy_version"])

    def _note_published(self, version: int) -> None:
        self.policy_version = version
        self.sampler.resume()

    def close(self) -> None:
        """Stop the sampler and the learner's thread, which ends after its present job."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._job is not None:
            abandon(self._job)
        self.sampler.shutdown()
