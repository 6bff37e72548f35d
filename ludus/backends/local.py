"""The local back end: the learner in this process, and a sampler on the same machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ludus.core.schema import OptimizerConfig, RunConfig
from ludus.models import SAMPLERS
from ludus.models.renderer import Renderer
from ludus.models.sampler import PolicySampler
from ludus.train.checkpoint import CheckpointStore, load, random_state, set_random_state
from ludus.train.learner import Learner
from ludus.train.losses import LossFn
from ludus.train.packing import Batch


class LocalBackend:
    """Trains in this process, and samples with what `config.sampler` names.

    By default that is the very module that is trained: nothing is copied, so no weights can be
    stale.

    Args:
        model: a Hugging Face causal LM.
        renderer: decodes ids where stop strings are configured.
        config: the run's configuration.
        run_dir: holds `checkpoints/`, and batches that broke training.
    """

    def __init__(self, model: Any, renderer: Renderer, config: RunConfig, run_dir: Path) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        # On CUDA torch has no deterministic cumulative sum, which sampling needs.
        torch.use_deterministic_algorithms(config.model.device == "cpu")
        self.model = model
        self._run_dir = run_dir
        self._sampler: PolicySampler = SAMPLERS.build(
            config.sampler,
            "sampler",
            model=model,
            context_length=config.model.context_length,
            decode=renderer.tokenizer.decode,
            deterministic=config.rollout.deterministic,
            tokenizer=renderer.tokenizer,
            folder=run_dir / "sampler",
        )
        self.checkpoints = CheckpointStore(
            run_dir / "checkpoints", config.checkpoint.keep_last, config.checkpoint.keep_best
        )
        self._learner: Learner | None = None
        self._published = 0

    @property
    def sampler(self) -> PolicySampler:
        return self._sampler

    @property
    def policy_version(self) -> int:
        """The version of the weights that were last published."""
        return self._published

    @property
    def learner(self) -> Learner:
        """The learner of the stage under way."""
        if self._learner is None:
            raise RuntimeError("begin_stage has not been called")
        return self._learner

    def begin_stage(self, optimizer: OptimizerConfig, num_steps: int, temperature: float) -> None:
        """Start a stage with a fresh optimizer."""
        self._learner = Learner(
            self.model,
            optimizer,
            num_steps,
            temperature=temperature,
            dump_dir=self._run_dir,
        )

    async def train_step(self, batch: Batch, loss: LossFn) -> dict[str, float]:
        """One optimizer step."""
        return self.learner.train_step(batch, loss)

    async def publish_weights(self) -> int:
        """Count the version up, and have the sampler take the weights."""
        self._publish(self._published + 1)
        return self._published

    def save(
        self, stage: str, step: int, state: dict[str, Any], metric: float | None, *, pin: bool
    ) -> Path:
        """Write a checkpoint: weights, optimizer, counters, and the loop's own state."""
        everything = {
            "loop": state,
            "optimizer_step": self.learner.step,
            "policy_version": self._published,
            "random": random_state(),
        }
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
        everything = load(path, model=self.model, optimizer=self.learner.optimizer)
        self.learner.step = everything["optimizer_step"]
        self._publish(everything["policy_version"])
        set_random_state(everything["random"])
        state: dict[str, Any] = everything["loop"]
        return state

    def _publish(self, version: int) -> None:
        self._sampler.publish(version)
        self._published = version

    def close(self) -> None:
        """End the sampler; the model belongs to the caller."""
        self._sampler.shutdown()
