"""The back end protocol: the engine under the loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ludus.core.types import Group, Sample, Spec
from ludus.judges.base import Judge
from ludus.models.samplers.base import PolicySampler
from ludus.rollout.hosts.host import LocalEnvs
from ludus.train.algorithms.base import Algorithm
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.meter import Meter


class Backend(Protocol):
    """Owns the model: samples, scores, trains, publishes weights, saves checkpoints.

    A back end packs the samples itself (`train.batches.minibatches`), so it decides how they are
    split over devices. `backends.conformance` checks what each must do.
    """

    @property
    def sampler(self) -> PolicySampler:
        """Samples the turns of rollouts, with the published weights."""

    @property
    def meter(self) -> Meter:
        """Counts the tokens, FLOPs and memory of its devices."""

    @property
    def checkpoints(self) -> CheckpointStore:
        """The run's checkpoints."""

    @property
    def policy_version(self) -> int:
        """Version of the published weights: 0 at first, that of the checkpoint after `load`."""

    def make_envs(self, spec: Spec | None) -> LocalEnvs:
        """Returns the environments of episodes: `spec` is that of tasks that name none."""

    def host_judge(self, spec: Spec, judge: Judge) -> Judge:
        """Returns the judge of `spec` where this back end runs it: `judge`, which is built in this
        process, or one that asks a worker."""

    def begin_stage(self, settings: TrainSettings, algorithm: Algorithm) -> None:
        """Create the optimizer, and the critic and reference model that `algorithm` asks for.

        Errors: ConfigError for a reference model that cannot be loaded or has another vocabulary.
        """

    def shorten_stage(self, steps: int) -> None:
        """End the stage that has begun after `steps` steps: the schedule of its rate, too."""

    async def score(self, groups: Sequence[Group], algorithm: Algorithm) -> Sequence[Group]:
        """Returns the groups with the model scores that `algorithm` asks for: the segments'
        `learner_logprobs`, `ref_logprobs`, `values`."""

    async def train(self, samples: list[Sample], algorithm: Algorithm) -> dict[str, float]:
        """Run one policy iteration: all optimizer steps on the samples of one step.

        Returns `train/NAME` metrics, means over the optimizer steps. `train/optimizer_steps` is 0
        where nothing has a gradient. Errors: TrainingError; the weights of the failed optimizer
        step are unchanged.
        """

    async def verify(self, groups: Sequence[Group]) -> None:
        """Compare the log-probabilities of learner and sampler bit by bit (`verify: true`).

        The next `train` returns the number of equal tokens as `rollout/verified_tokens`.
        Errors: TrainingError for a token whose bits differ.
        """

    async def publish_weights(self) -> int:
        """Give the current weights to the sampler; returns their version, one above the last."""

    def save(
        self, stage: str, step: int, state: dict[str, Any], metric: float | None, *, pin: bool
    ) -> Path:
        """Write a checkpoint after `step` complete steps, with the loop's `state`."""

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint of the stage that has begun; returns the loop's state.

        Errors: CheckpointError.
        """

    def load_weights(self, path: Path) -> None:
        """Take only the weights of a checkpoint, of any stage, and publish them under its version.

        No stage has to have begun. Errors: CheckpointError.
        """

    def close(self) -> None:
        """Stop the sampler and release threads and devices."""
