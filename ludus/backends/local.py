"""The local back end: the learner in this process, and a sampler on the same machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from ludus.config.schema import ModelConfig, OptimizerConfig, RunConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Spec, Trajectory
from ludus.models import SAMPLERS
from ludus.models.build import build_model
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import PolicySampler
from ludus.models.samplers.engine import InProcessSampler
from ludus.train.algorithms.base import Algorithm
from ludus.train.algorithms.losses import LossFn
from ludus.train.checkpoint.store import CheckpointStore, load, random_state, set_random_state
from ludus.train.learner import Learner
from ludus.train.packing import Batch, Layout
from ludus.train.reference import Reference
from ludus.train.scoring import Scorer
from ludus.train.verify import ExactForward, unscored, verify

T = TypeVar("T")


class LocalBackend:
    """Trains in this process, and samples with what `config.sampler` names.

    By default that is the very module that is trained: nothing is copied, so no weights can be
    stale.

    With `rl.max_staleness`, the learner computes in a thread of its own, so that episodes go on
    meanwhile. From the first look of a step at the weights to their publication the sampler is
    paused: it never computes with weights that change, nor with weights that have no version yet.

    Args:
        model: a Hugging Face causal LM.
        renderer: decodes ids where stop strings are configured.
        config: the run's configuration.
        run_dir: holds `checkpoints/`, `reference/` where the policy was copied as a reference
            model, and batches that broke training.
    """

    def __init__(self, model: Any, renderer: Renderer, config: RunConfig, run_dir: Path) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        # On CUDA torch has no deterministic cumulative sum, which sampling needs.
        torch.use_deterministic_algorithms(config.model.device == "cpu")
        self.model = model
        self._config, self._tokenizer = config, renderer.tokenizer
        self._run_dir = run_dir
        self._sampler: PolicySampler = SAMPLERS.build(
            Spec(name="exact") if config.verify else config.sampler,
            "sampler",
            model=model,
            context_length=config.model.context_length,
            decode=renderer.tokenizer.decode,
            deterministic=config.rollout.deterministic,
            tokenizer=renderer.tokenizer,
            folder=run_dir / "sampler",
        )
        self._shares = isinstance(self._sampler, InProcessSampler)  # weights, thread and cores
        self.checkpoints = CheckpointStore(
            run_dir / "checkpoints", config.checkpoint.keep_last, config.checkpoint.keep_best
        )
        self._learner: Learner | None = None
        self._algorithm: Algorithm | None = None
        self._reference: Reference | None = None
        self._published = 0
        self._thread: ThreadPoolExecutor | None = None
        if config.rl and config.rl.max_staleness:
            self._thread = ThreadPoolExecutor(1, "ludus-learner")

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

    @property
    def layout(self) -> Layout:
        """How batches are laid out for the model."""
        return self.learner.forward.layout

    def begin_stage(
        self,
        optimizer: OptimizerConfig,
        num_steps: int,
        temperature: float,
        algorithm: Algorithm | None = None,
    ) -> None:
        """Start a stage with a fresh optimizer, critic and reference.

        Errors: ConfigError for a reference model that cannot be loaded, or has other tokens.
        """
        self._algorithm = algorithm
        self._learner = Learner(
            self.model,
            optimizer,
            num_steps,
            temperature=temperature,
            context_length=self._config.model.context_length,
            settings=self._config.learner,
            num_ids=len(self._tokenizer),
            dump_dir=self._run_dir,
            critic_lr=algorithm.critic_lr if algorithm else None,
        )
        if self._config.verify:
            self._learner.forward = ExactForward(
                self.model,
                temperature=self._learner.temperature,
                context_length=self._config.model.context_length,
                settings=self._config.learner,
                num_ids=len(self._tokenizer),
            )
        self._reference = None
        if algorithm is not None and algorithm.reference is not None:
            self._reference = self._make_reference(algorithm.reference.model, temperature)

    def _make_reference(self, path: str | None, temperature: float) -> Reference:
        model, config = None, self._config.model
        if path is not None:
            named = ModelConfig(
                path=path,
                context_length=config.context_length,
                dtype=config.dtype,
                device=config.device,
            )
            try:
                model = build_model(named, self._tokenizer, seed=0)
            except ConfigError as error:
                raise ConfigError(f"rl.algorithm.args.kl_reference: {error}") from error
        return Reference(
            self.model,
            model,
            temperature=temperature,
            context_length=config.context_length,
            num_ids=len(self._tokenizer),
        )

    async def score(
        self, trajectories: Sequence[Trajectory], tokens_per_batch: int, pad_id: int
    ) -> None:
        """Ask the learner, its critic and the reference about the sampled tokens."""
        await self._apart(lambda: self._score(trajectories, tokens_per_batch, pad_id))

    def _score(
        self, trajectories: Sequence[Trajectory], tokens_per_batch: int, pad_id: int
    ) -> None:
        learner, algorithm = self.learner, self._algorithm
        if algorithm is not None and (algorithm.importance or learner.critic):
            scorer = Scorer(learner.forward, tokens_per_batch, pad_id, learner.critic)
            scorer(trajectories, "learner_logprobs" if algorithm.importance else None)
        if self._reference is not None:
            with self._reference.active():
                scorer = Scorer(self._reference.forward, tokens_per_batch, pad_id)
                scorer(trajectories, "ref_logprobs")

    async def train_step(self, batch: Batch, loss: LossFn) -> dict[str, float]:
        """One optimizer step."""
        return await self._apart(lambda: self.learner.train_step(batch, loss))

    async def _apart(self, work: Callable[[], T]) -> T:
        """Have the learner compute: here, or in its thread while the sampler is paused."""
        if self._thread is None:
            return work()
        self._sampler.pause()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def verify(
        self, trajectories: Sequence[Trajectory], tokens_per_batch: int, pad_id: int
    ) -> int:
        """Compare the learner's log-probabilities with those that the sampler gave just now.

        Returns how many tokens are equal in every bit. Errors: TrainingError for one that is not.
        """
        forward = self.learner.forward
        batch = unscored(trajectories, tokens_per_batch, pad_id, forward.layout)
        return await verify(forward, batch, self._published)

    async def publish_weights(self) -> int:
        """Count the version up, and have the sampler take the weights.

        A server takes its time: turns, timers and environments go on meanwhile.
        """
        version = self._published + 1
        if self._shares:
            self._sampler.publish(version)
        else:
            await asyncio.to_thread(self._sampler.publish, version)
        self._note_published(version)
        return version

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
        everything = load(path, model=self.model, optimizer=self.learner.optimizer)
        self.learner.step = everything["optimizer_step"]
        if self.learner.critic is not None and "critic" in everything:
            self.learner.critic.load_state_dict(everything["critic"])
        if self._reference is not None:
            self._reference.load(self._run_dir / "reference", everything.get("reference"))
        self._sampler.publish(everything["policy_version"])
        self._note_published(everything["policy_version"])
        set_random_state(everything["random"])
        state: dict[str, Any] = everything["loop"]
        return state

    def _note_published(self, version: int) -> None:
        self._published = version
        if self._thread is not None:
            self._sampler.resume()

    def close(self) -> None:
        """End the sampler and the learner's thread; the model belongs to the caller."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._sampler.shutdown()
