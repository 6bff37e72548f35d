"""The trainer of one rank: `Trainer` over several processes.

All ranks call the same methods in the same order with the same arguments. Each computes its share
of the tokens, with its part of the weights gathered layer by layer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludus.config.schema import RunConfig
from ludus.core.seeds import derive_seed
from ludus.core.types import Group as Rollouts
from ludus.core.types import Sample
from ludus.models.vocabulary import Vocabulary, fingerprint
from ludus.train.algorithms.base import Algorithm
from ludus.train.batches.minibatches import (
    TrainSettings,
    pack_weighted,
    staleness,
    to_minibatches,
    train_metrics,
    weighted,
)
from ludus.train.batches.packing import Batch
from ludus.train.checkpoint.state import seed_random
from ludus.train.distributed.group import Group
from ludus.train.distributed.learner import ShardedLearner
from ludus.train.distributed.parallel import check_model
from ludus.train.distributed.reference import ShardedReference
from ludus.train.distributed.saving import ShardedCheckpoints
from ludus.train.distributed.scoring import ShardedScorer
from ludus.train.distributed.settings import Rank, ShardSettings, check_supported
from ludus.train.distributed.sharding import Parts, ShardedForward, skeleton_of
from ludus.train.distributed.split import assign
from ludus.train.distributed.weights import buckets
from ludus.train.reference import require_same_vocabulary
from ludus.train.trainer import Restored, checkpoint_store, configure_torch, reference_model


class ShardedTrainer:
    """Trains a part of a model, with other ranks.

    A rank that fails in the middle of a pass leaves the others: they raise its error, and no rank
    can be used again (`broken`). Other errors are the same on all ranks, which go on.

    Args:
        make_model: builds the policy, the same on all ranks: a Hugging Face causal LM. A rank holds
            it whole until it is sharded.
        tokenizer: the policy's.
        config: the run's configuration.
        run_dir: a folder that all ranks reach; receives `checkpoints/`, `reference/` and the
            batches of failed steps.
        rank: of this process.
        settings: of the sharding.
        listener: of rank 0, with the address of its `rank`: `open_listener`.

    Errors: ConfigError for settings that a sharded learner cannot honour; TrainingError where ranks
    do not come.
    """

    def __init__(
        self,
        make_model: Callable[[], Any],
        tokenizer: Any,
        config: RunConfig,
        run_dir: Path,
        rank: Rank,
        settings: ShardSettings | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._shards = settings or ShardSettings()
        check_supported(config, self._shards, rank.world_size)
        configure_torch(config)
        device = torch.device(config.model.device)
        if device.type == "cuda":
            torch.cuda.set_device(rank.local_rank)
        ways = self._shards.tensor_parallel
        self.group = Group(rank, device, self._shards.timeout_s, ways, listener)
        self._config, self._tokenizer, self._run_dir = config, tokenizer, run_dir
        self._pad_id = tokenizer.pad_token_id or 0
        with self.group.guarded():
            self._mesh = self.group.mesh
            self._vocabulary = Vocabulary.of(tokenizer)
            self.model = self.group.jointly(make_model)
            if ways > 1:
                self.group.jointly(lambda: check_model(self.model, ways))
            self._skeleton = skeleton_of(self.model)
            self.checkpoints = checkpoint_store(config, run_dir)
            self._saving = ShardedCheckpoints(
                self.group,
                self._mesh,
                self.checkpoints,
                self.model,
                fingerprint(tokenizer),
                config.seed,
            )
            self._forward = self.group.jointly(lambda: self._passes(self.model, config.learner))
            self._forward.shard(self._mesh, self._shards)
        # Each rank draws its own dropout.
        seed_random(derive_seed(config.seed, "rank", rank.rank))
        self._learner: ShardedLearner | None = None
        self._settings: TrainSettings
        self._reference: ShardedReference | None = None
        self._iteration = 0

    def _passes(self, model: Any, settings: Any = None, temperature: float = 1.0) -> ShardedForward:
        return ShardedForward(
            model,
            temperature=temperature,
            context_length=self._config.model.context_length,
            settings=settings,
            vocabulary=self._vocabulary,
        )

    @property
    def learner(self) -> ShardedLearner:
        """The learner of the current stage."""
        if self._learner is None:
            raise RuntimeError("begin_stage has not been called")
        return self._learner

    @property
    def broken(self) -> bool:
        """True if the ranks lost each other: new processes have to go on."""
        return self.group.broken

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Context of a method that all ranks call."""
        with self.group.guarded():
            self._saving.raise_failure()
            yield

    def begin_stage(self, settings: TrainSettings, algorithm: Algorithm) -> None:
        """Start a stage with a new optimizer, critic and reference model.

        Errors: ConfigError for a reference model that cannot be loaded or has another vocabulary.
        """
        with self._called():
            self._settings, self._iteration = settings, 0
            self._learner = ShardedLearner(
                self.group,
                self._forward,
                Parts(self.model),
                settings.optimizer,
                settings.optimizer_steps,
                temperature=settings.temperature,
                dump_dir=self._run_dir,
                critic_lr=algorithm.critic_lr,
            )
            self._reference = None
            if algorithm.reference is not None:
                self._reference = self._make_reference(algorithm.reference.model)

    def shorten_stage(self, steps: int) -> None:
        """End the stage after `steps` steps: the schedule of the rate ends with them."""
        self._settings = replace(self._settings, steps=steps)
        self.learner.num_steps = self._settings.optimizer_steps

    def _make_reference(self, path: str | None) -> ShardedReference:
        forward = self.learner.passes
        if path is None:
            return ShardedReference.of_policy(
                self.group, forward, self._skeleton, self._mesh, self._shards
            )

        def named() -> ShardedForward:
            model = reference_model(path, self._config, self._tokenizer)
            require_same_vocabulary(self.model, model)
            return self._passes(model.requires_grad_(False).eval(), None, forward.temperature)

        made = self.group.jointly(named)
        made.shard(self._mesh, self._shards)
        return ShardedReference(self.group, made)

    def score(self, groups: Sequence[Rollouts], algorithm: Algorithm) -> Sequence[Rollouts]:
        """Returns the groups with the model scores that `algorithm` asks for on rank 0, and []
        elsewhere. All ranks get all groups."""
        with self._called():
            learner, limit = self.learner, self._settings.tokens_per_batch
            if algorithm.importance or learner.critic:
                scorer = ShardedScorer(
                    learner.passes, limit, self._pad_id, learner.critic, self.group
                )
                groups = scorer(groups, "learner_logprobs" if algorithm.importance else None)
            if self._reference is not None:
                with self._reference.active():
                    scorer = ShardedScorer(
                        self._reference.forward, limit, self._pad_id, None, self.group
                    )
                    groups = scorer(groups, "ref_logprobs")
            return groups if self.group.rank == 0 else []

    def train(
        self, samples: list[Sample], algorithm: Algorithm, policy_version: int
    ) -> dict[str, float]:
        """One policy iteration on samples, of which all ranks get all; returns `train/NAME`.

        Args:
            policy_version: of the published weights; staleness is counted from it.

        Errors: TrainingError; the weights of the failed step are unchanged.
        """
        with self._called():
            parts = to_minibatches(samples, algorithm, self._settings, self._iteration)
            self._iteration += 1
            steps = [self._step(part, algorithm, policy_version) for part in parts]
            return {**train_metrics(steps), **self.learner.adapt(steps)}

    def _step(
        self, part: list[Sample], algorithm: Algorithm, policy_version: int
    ) -> dict[str, float]:
        batch, num_tokens = self.group.jointly(lambda: self._own_batch(part, algorithm))
        metrics = self.learner.train_step(batch, algorithm.loss)
        positions = sum(m.token_ids_RT.numel() for m in batch.micro_batches)
        counts = (positions, batch.num_unique_tokens, batch.num_loss_tokens)
        counts = counts if self.group.is_first else (0, 0, 0)
        total, unique, loss_tokens = map(sum, zip(*self.group.share(counts), strict=True))
        return {
            **metrics,
            "padding": 1 - unique / total if total else 0.0,
            "tokens": float(num_tokens),
            "unique_tokens": float(unique),
            "loss_tokens": float(loss_tokens),
            "staleness": staleness(part, policy_version),
        }

    def _own_batch(self, part: list[Sample], algorithm: Algorithm) -> tuple[Batch, int]:
        """Returns this rank's share of a minibatch, with the weights of the whole, and the number
        of tokens of the whole."""
        layout, pairs = self._forward.layout, weighted(part, algorithm)
        group = self.group
        mine = assign([sample for sample, _ in pairs], group.num_parts, layout)[group.part]
        limit = self._settings.tokens_per_batch
        batch = pack_weighted([pairs[i] for i in mine], algorithm, limit, self._pad_id, layout)
        return batch, sum(len(sample.token_ids) for sample, _ in pairs)

    def weights(
        self, bucket_bytes: int = 64 << 20, *, merged: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """Yields the weights for samplers, whole tensors by name, on all ranks.

        At most one bucket is whole at a time. All ranks have to iterate to the end.

        Args:
            bucket_bytes: most bytes of a bucket; a larger tensor is alone.
            merged: all weights under the names of the plain model, with adapters merged; else the
                trained tensors, under the names of `trained_tensors` of the model.
        """
        with self._called():
            yield from buckets(self.model, bucket_bytes, merged=merged)

    def save(
        self,
        stage: str,
        step: int,
        loop: dict[str, Any],
        metric: float | None,
        *,
        policy_version: int,
        pin: bool,
        wait: bool = False,
    ) -> Path:
        """Copy the state and write a checkpoint of it, in the background unless `wait`.

        The folder appears once it is complete. Errors: CheckpointError; an error of the background
        write is raised by the next call of any method.
        """
        with self._called():
            self._saving.finish()
            everything = {
                "loop": loop,
                "optimizer_step": self.learner.step,
                "steps_per_iteration": self._settings.steps_per_iteration,
                "rate_scale": self.learner.saved_scale,
                "policy_version": policy_version,
            }
            if self.learner.critic is not None:
                everything["critic"] = self.learner.critic.state_dict()
            if self._reference is not None:
                everything["reference"] = self._reference.save(
                    self._run_dir / "reference", self._saving
                )
            path = self._saving.start(
                stage, step, self.learner.optimizer, self.learner.parts, everything, metric, pin
            )
            if wait:
                self._saving.finish()
            return path

    def finish_save(self) -> None:
        """Wait for the background write. Errors: CheckpointError."""
        with self.group.guarded():
            self._saving.finish()

    def load(self, path: Path) -> Restored:
        """Restore a checkpoint of the stage that has begun, sharded over any number of ranks or
        not. Errors: CheckpointError."""
        with self._called():
            self._saving.finish()
            learner = self.learner
            everything = self._saving.load(path, learner.optimizer, learner.parts)
            self._iteration = int(path.name.rpartition("-")[2])  # its name is STAGE-STEP
            learner.step = self._settings.restored(everything)
            learner.restore_scale(everything.get("rate_scale"))
            if learner.critic is not None and "critic" in everything:
                learner.critic.load_state_dict(everything["critic"])
            if self._reference is not None:
                content = everything.get("reference")
                self._reference.load(self._run_dir / "reference", content, self._saving)
            self._saving.restore_random(everything)
            return Restored(everything["policy_version"], everything["loop"])

    def load_weights(self, path: Path) -> int:
        """Take only the weights of a checkpoint, of any stage; returns their version.

        Errors: CheckpointError.
        """
        with self._called():
            self._saving.finish()
            return int(self._saving.load(path)["policy_version"])

    def close(self) -> None:
        """Wait for the background write and leave the group. Idempotent."""
        self._saving.join()
        self.group.close()
