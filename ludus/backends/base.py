"""What the loop asks of whatever samples and trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ludus.config.schema import OptimizerConfig
from ludus.core.types import Trajectory
from ludus.models.samplers.base import Sampler
from ludus.train.algorithms.base import Algorithm
from ludus.train.algorithms.losses import LossFn
from ludus.train.packing import Batch, Layout


class Backend(Protocol):
    """An engine under the loop: samples, trains, publishes, saves."""

    @property
    def sampler(self) -> Sampler:
        """Where rollouts get their turns from."""
        ...

    @property
    def policy_version(self) -> int:
        """The version that `publish_weights` last returned; that of a loaded checkpoint; or 0."""
        ...

    @property
    def layout(self) -> Layout:
        """How batches are laid out for the model."""
        ...

    def begin_stage(
        self,
        optimizer: OptimizerConfig,
        num_steps: int,
        temperature: float,
        algorithm: Algorithm | None = None,
    ) -> None:
        """Start with a fresh optimizer, and with the critic and the reference model that
        `algorithm` asks for. `num_steps` counts optimizer steps.

        Errors: ConfigError for a reference model that cannot serve.
        """
        ...

    async def score(
        self, trajectories: Sequence[Trajectory], tokens_per_batch: int, pad_id: int
    ) -> None:
        """Fill in what the stage's algorithm asks of models: the segments' `learner_logprobs`,
        `ref_logprobs`, `values`."""
        ...

    async def train_step(self, batch: Batch, loss: LossFn) -> dict[str, float]:
        """One optimizer step. Errors: TrainingError."""
        ...

    async def publish_weights(self) -> int:
        """Let the sampler see the current weights; returns their version."""
        ...

    def save(
        self, stage: str, step: int, state: dict[str, Any], metric: float | None, *, pin: bool
    ) -> Path:
        """Write a checkpoint of everything, `state` included. `step` steps are complete."""
        ...

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint; returns the state that was saved with it."""
        ...

    def close(self) -> None:
        """Release what the back end holds."""
        ...
