"""The local back end: learner in this process, sampler on the same machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ludus.backends.fixed import LocalFixed, share_base
from ludus.config.schema import RunConfig
from ludus.core.system.signals import abandon
from ludus.core.types import Group, Sample, Spec
from ludus.judges.base import Judge
from ludus.models import SAMPLERS
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import PolicySampler
from ludus.rollout.hosts.host import LocalEnvs
from ludus.telemetry.occupancy import busy
from ludus.train.algorithms.base import Algorithm
from ludus.train.batches.minibatches import TrainSettings, train_metrics
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.learner import Learner
from ludus.train.meter import Meter
from ludus.train.trainer import Trainer

T = TypeVar("T")


IN_PROCESS = Spec(name="in_process")


def make_sampler(
    config: RunConfig, model: Any, tokenizer: Any, folder: Path, *, spec: Spec | None = None
) -> PolicySampler:
    """Returns the sampler of a configuration for a model; with `spec`, another sampler."""
    sampler: PolicySampler = SAMPLERS.build(
        spec or (Spec(name="exact") if config.verify else config.sampler),
        "sampler",
        model=model,
        context_length=config.model.context_length,
        decode=tokenizer.decode,
        deterministic=config.rollout.deterministic,
        tokenizer=tokenizer,
        folder=folder,
    )
    return sampler


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
        self._config, self._tokenizer = config, renderer.tokenizer
        self.trainer = Trainer(make_model, renderer.tokenizer, config, run_dir)
        self.sampler = make_sampler(config, self.model, renderer.tokenizer, run_dir / "sampler")
        half = "bfloat16" in (config.learner.dtype, config.sampler.args.get("dtype"))
        self.meter = Meter(self.model, self.sampler, half=half)
        self.policy_version = 0
        self._verified: dict[str, float] = {}
        self._ahead = bool(config.rl and config.rl.max_staleness)
        self._thread = ThreadPoolExecutor(1, "ludus-learner")  # it starts at its first job
        self._job: Future[Any] | None = None

    @property
    def model(self) -> Any:
        """The policy."""
        return self.trainer.model

    @property
    def learner(self) -> Learner:
        """The learner of the current stage."""
        return self.trainer.learner

    @property
    def checkpoints(self) -> CheckpointStore:
        """The run's checkpoints."""
        return self.trainer.checkpoints

    def fixed_policy(self, make_model: Callable[[], Any], folder: Path) -> LocalFixed:
        """A policy in this process, whose frozen base may be that of the run's policy."""
        model = make_model()
        share_base(self.model, model)
        model.requires_grad_(False).eval()
        # A served sampler has the weights of the run's policy.
        spec = IN_PROCESS if self._config.sampler.name != IN_PROCESS.name else None
        sampler = make_sampler(self._config, model, self._tokenizer, folder, spec=spec)
        return LocalFixed(model, sampler)

    def present_model(self) -> Any:
        """The policy itself."""
        return self.model

    def make_envs(self, spec: Spec | None) -> LocalEnvs:
        """Environments in this process."""
        return LocalEnvs(spec)

    def host_judge(self, spec: Spec, judge: Judge) -> Judge:
        """A judge in this process."""
        return judge

    def begin_stage(self, settings: TrainSettings, algorithm: Algorithm) -> None:
        """Start a stage with a new optimizer, critic and reference model."""
        self.trainer.begin_stage(settings, algorithm)

    def shorten_stage(self, steps: int) -> None:
        """End the stage after `steps` steps."""
        self.trainer.shorten_stage(steps)

    async def score(self, groups: Sequence[Group], algorithm: Algorithm) -> Sequence[Group]:
        """Score the sampled tokens with the learner, its critic and the reference model."""
        if not algorithm.asks_models:
            return groups
        return await self._on_learner(lambda: self.trainer.score(groups, algorithm))

    async def train(self, samples: list[Sample], algorithm: Algorithm) -> dict[str, float]:
        """Run the optimizer steps of one policy iteration on the learner."""
        parts = self.trainer.minibatches(samples, algorithm)
        verified, self._verified = self._verified, {}
        if not parts:
            return {**train_metrics([]), **verified}

        if self.sampler.shares_weights:
            self.sampler.pause()  # the weights change, and have no version until `publish_weights`

        def work() -> dict[str, float]:
            return self.trainer.optimizer_steps(parts, algorithm, self.policy_version)

        return {**await self._on_learner(work), **verified}

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
        with busy("train"):
            count = await self.trainer.verify(groups, self.policy_version)
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
        return self.trainer.save(
            stage, step, state, metric, policy_version=self.policy_version, pin=pin
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint of the stage that `begin_stage` started."""
        restored = self.trainer.load(path)
        self._publish_loaded(restored.policy_version)
        return restored.loop

    def load_weights(self, path: Path) -> None:
        """Take only the weights of a checkpoint, of any stage, and publish them."""
        self._publish_loaded(self.trainer.load_weights(path))

    def _publish_loaded(self, version: int) -> None:
        self.sampler.publish(version)
        self._note_published(version)

    def _note_published(self, version: int) -> None:
        self.policy_version = version
        self.sampler.resume()

    def close(self) -> None:
        """Stop the sampler and the learner's thread, which ends after its present job."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._job is not None:
            abandon(self._job)
        self.sampler.shutdown()
