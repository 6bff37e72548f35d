"""The trainer: model, learner, critic, reference model and checkpoints of one policy.

It is synchronous, and has no sampler: a back end connects it with one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ludus.config.schema import ModelConfig, RunConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Group, Sample
from ludus.models.build import build_model
from ludus.models.vocabulary import Vocabulary, fingerprint
from ludus.train.algorithms.base import Algorithm
from ludus.train.batches.minibatches import (
    TrainSettings,
    batch_metrics,
    staleness,
    to_batch,
    to_minibatches,
    train_metrics,
)
from ludus.train.checkpoint.policy import load_trained
from ludus.train.checkpoint.state import random_state, set_random_state
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.learner import Learner
from ludus.train.reference import Reference
from ludus.train.scoring import Scorer
from ludus.train.verify import ExactForward, unscored, verify


@dataclass(frozen=True, slots=True)
class Restored:
    """The content of a checkpoint besides the trainer's own state.

    Args:
        policy_version: of the weights.
        loop: the loop's state.
    """

    policy_version: int
    loop: dict[str, Any]


class Trainer:
    """Trains a model in this process.

    Args:
        make_model: builds the policy, a Hugging Face causal LM.
        tokenizer: the policy's.
        config: the run's configuration.
        run_dir: receives `checkpoints/`, `reference/` (a copy of the policy as reference model),
            and the batches of failed steps.
    """

    def __init__(
        self, make_model: Callable[[], Any], tokenizer: Any, config: RunConfig, run_dir: Path
    ) -> None:
        configure_torch(config)
        self.model = make_model()
        self.checkpoints = checkpoint_store(config, run_dir)
        self._config, self._tokenizer, self._run_dir = config, tokenizer, run_dir
        self._vocabulary = Vocabulary.of(tokenizer)
        self._fingerprint = fingerprint(tokenizer)
        self._pad_id = tokenizer.pad_token_id or 0
        self._learner: Learner | None = None
        self._settings: TrainSettings
        self._reference: Reference | None = None
        self._iteration = 0

    @property
    def learner(self) -> Learner:
        """The learner of the current stage."""
        if self._learner is None:
            raise RuntimeError("begin_stage has not been called")
        return self._learner

    def begin_stage(self, settings: TrainSettings, algorithm: Algorithm) -> None:
        """Start a stage with a new optimizer, critic and reference model.

        Errors: ConfigError for a reference model that cannot be loaded or has another vocabulary.
        """
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

    def shorten_stage(self, steps: int) -> None:
        """End the stage after `steps` steps: the schedule of the rate ends with them."""
        self._settings = replace(self._settings, steps=steps)
        self.learner.num_steps = self._settings.optimizer_steps

    def _make_reference(self, path: str | None, temperature: float) -> Reference:
        model = None if path is None else reference_model(path, self._config, self._tokenizer)
        return Reference(
            self.model,
            model,
            temperature=temperature,
            context_length=self._config.model.context_length,
            vocabulary=self._vocabulary,
        )

    def score(self, groups: Sequence[Group], algorithm: Algorithm) -> Sequence[Group]:
        """Returns the groups with the model scores that `algorithm` asks for."""
        learner, limit = self.learner, self._settings.tokens_per_batch
        if algorithm.importance or learner.critic:
            scorer = Scorer(learner.forward, limit, self._pad_id, learner.critic)
            groups = scorer(groups, "learner_logprobs" if algorithm.importance else None)
        if self._reference is not None:
            with self._reference.active():
                scorer = Scorer(self._reference.forward, limit, self._pad_id)
                groups = scorer(groups, "ref_logprobs")
        return groups

    def minibatches(self, samples: list[Sample], algorithm: Algorithm) -> list[list[Sample]]:
        """Returns the samples of each optimizer step of the next policy iteration."""
        parts = to_minibatches(samples, algorithm, self._settings, self._iteration)
        self._iteration += 1
        return parts

    def optimizer_steps(
        self, parts: Sequence[list[Sample]], algorithm: Algorithm, policy_version: int
    ) -> dict[str, float]:
        """Run an optimizer step on each part; returns `train/NAME`, means over the steps.

        Args:
            policy_version: of the published weights; staleness is counted from it.

        Errors: TrainingError; the weights of the failed step are unchanged.
        """
        learner = self.learner

        def step(part: list[Sample]) -> dict[str, float]:
            limit, layout = self._settings.tokens_per_batch, learner.forward.layout
            batch = to_batch(part, algorithm, limit, self._pad_id, layout)
            metrics = learner.train_step(batch, algorithm.loss)
            stale = staleness(part, policy_version)
            return {**metrics, **batch_metrics(batch), "staleness": stale}

        steps = [step(part) for part in parts]
        return {**train_metrics(steps), **learner.adapt(steps)}

    def train(
        self, samples: list[Sample], algorithm: Algorithm, policy_version: int
    ) -> dict[str, float]:
        """One policy iteration: `optimizer_steps` on the `minibatches` of the samples."""
        return self.optimizer_steps(self.minibatches(samples, algorithm), algorithm, policy_version)

    async def verify(self, groups: Sequence[Group], policy_version: int) -> int:
        """Compare the log-probabilities of learner and sampler bit by bit.

        Returns the number of equal tokens. Errors: TrainingError for one that differs.
        """
        forward, limit = self.learner.forward, self._settings.tokens_per_batch
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        batch = unscored(trajectories, limit, self._pad_id, forward.layout)
        return await verify(forward, batch, policy_version)

    def save(
        self,
        stage: str,
        step: int,
        loop: dict[str, Any],
        metric: float | None,
        *,
        policy_version: int,
        pin: bool,
    ) -> Path:
        """Write a checkpoint: weights, optimizer, critic, counters, random state, loop state.

        Errors: CheckpointError.
        """
        everything = {
            "loop": loop,
            "optimizer_step": self.learner.step,
            "steps_per_iteration": self._settings.steps_per_iteration,
            "rate_scale": self.learner.saved_scale,
            "policy_version": policy_version,
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

    def load(self, path: Path) -> Restored:
        """Restore a checkpoint of the stage that `begin_stage` started. Errors: CheckpointError."""
        everything = load_trained(
            path, self._fingerprint, model=self.model, optimizer=self.learner.optimizer
        )
        self._iteration = int(path.name.rpartition("-")[2])  # its name is STAGE-STEP
        self.learner.step = self._settings.restored(everything)
        self.learner.restore_scale(everything.get("rate_scale"))
        if self.learner.critic is not None and "critic" in everything:
            self.learner.critic.load_state_dict(everything["critic"])
        if self._reference is not None:
            self._reference.load(self._run_dir / "reference", everything.get("reference"))
        set_random_state(everything["random"])
        return Restored(everything["policy_version"], everything["loop"])

    def load_weights(self, path: Path) -> int:
        """Take only the weights of a checkpoint, of any stage; returns their version.

        Errors: CheckpointError.
        """
        state = load_trained(path, self._fingerprint, model=self.model)
        return int(state["policy_version"])


def configure_torch(config: RunConfig) -> None:
    """Set threads and determinism of this process."""
    if config.threads:
        torch.set_num_threads(config.threads)
    # On CUDA torch has no deterministic cumulative sum, which sampling needs.
    torch.use_deterministic_algorithms(config.model.device == "cpu")
    # Filling new tensors, a debugging aid of that mode, costs 2 to 7 % of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def checkpoint_store(config: RunConfig, run_dir: Path) -> CheckpointStore:
    """Returns the checkpoints of a run, with its rules for keeping them."""
    return CheckpointStore(
        run_dir / "checkpoints",
        config.checkpoint.keep_last,
        config.checkpoint.keep_best,
        config.best_by,
    )


def reference_model(path: str, config: RunConfig, tokenizer: Any) -> Any:
    """Returns the reference model that an algorithm names. Errors: ConfigError."""
    shared = config.model.model_dump(include={"context_length", "dtype", "device", "tf32"})
    try:
        return build_model(ModelConfig(path=path, **shared), tokenizer, seed=0)
    except ConfigError as error:
        raise ConfigError(f"rl.algorithm.args.kl_reference: {error}") from error
