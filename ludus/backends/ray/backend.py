"""The back end `ray`: learner ranks, samplers and environment workers as actors of a Ray cluster.

    driver: the loop, the episodes
      |-- learner ranks      ShardedTrainer (FSDP2), one process each
      |-- samplers           a model of their own and the run's sampler, one process each
      |-- environment workers

Weights go from the ranks to Ray's object store, in buckets with checksums, and from there to the
samplers, which fetch them while turns go on, and stop for the swap only.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from ludus.backends.ray import cluster
from ludus.backends.ray.actors import START_S, Actors
from ludus.backends.ray.cluster import NAMESPACE_VARIABLE, Bundle, Demand
from ludus.backends.ray.env_pool import EnvPool, PooledJudge, WorkerEnvs
from ludus.backends.ray.learner_group import LearnerGroup
from ludus.backends.ray.sampler_pool import SamplerPool, WeightsLost
from ludus.backends.ray.weights import Weights
from ludus.config.messages import explain
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, LudusError
from ludus.core.signals import abandon
from ludus.core.types import Group, Sample, Spec
from ludus.judges import JUDGES
from ludus.judges.base import Judge
from ludus.models.chat.renderer import Renderer
from ludus.models.vocabulary import Vocabulary
from ludus.rollout.host import LocalEnvs
from ludus.telemetry.logs import get_logger
from ludus.train.algorithms.base import Algorithm
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.distributed.settings import ShardSettings, check_supported
from ludus.train.meter import Away, Meter
from ludus.train.minibatches import TrainSettings
from ludus.train.trainer import checkpoint_store

log = get_logger(__name__)

T = TypeVar("T")

MEBIBYTE = 2**20

LONGEST_S = 86_400
"""Of a time limit: a day."""


RESTORE_S = 0.1
"""Seconds between two looks whether lost weights are there again."""


class RayBackend:
    """Trains, samples and hosts environments in actors of a Ray cluster.

    Args:
        make_model: is not called here: the actors build the model from the configuration.
        renderer: has the tokenizer.
        config: the run's configuration.
        run_dir: on a file system that all nodes share, if learner ranks are on several.
    """

    def __init__(
        self,
        make_model: Callable[[], Any],
        renderer: Renderer,
        config: RunConfig,
        run_dir: Path,
        address: Annotated[
            str | None,
            Field(
                min_length=1,
                description="The cluster, HOST:PORT or `auto`; null: that of the Ray job that this "
                "process is part of, or a new one of this machine.",
            ),
        ] = None,
        learner_ranks: Annotated[
            int,
            Field(ge=1, le=10_000, description="Processes of the learner; they share it by FSDP2."),
        ] = 1,
        samplers: Annotated[int, Field(ge=1, le=10_000, description="Sampler processes.")] = 1,
        env_workers: Annotated[
            int,
            Field(
                ge=0,
                le=10_000,
                description="Processes that host environments; 0: the environments are hosted "
                "where the run was started.",
            ),
        ] = 0,
        colocated: Annotated[
            bool,
            Field(description="The n-th learner rank and the n-th sampler share a node and a GPU."),
        ] = False,
        cpus: Annotated[float, Field(ge=0.01, le=10_000, description="CPUs of an actor.")] = 1.0,
        tensor_parallel: Annotated[
            int,
            Field(
                ge=1,
                description="Ranks that share the matrices of each layer (Llama and Qwen models "
                "without adapters). Divides the number of ranks and of heads.",
            ),
        ] = 1,
        cpu_offload: Annotated[
            bool, Field(description="Keep the learner's weights and optimizer in CPU memory.")
        ] = False,
        reshard_after_forward: Annotated[
            bool,
            Field(
                description="Free the gathered weights of a layer after its forward pass: less "
                "memory, more communication."
            ),
        ] = True,
        bucket_mib: Annotated[
            int,
            Field(ge=1, le=1_000_000, description="Size of a bucket of published weights, in MiB."),
        ] = 256,
        max_deaths: Annotated[
            int,
            Field(
                ge=0,
                description="Times that learner ranks may die and be replaced, and also samplers, "
                "and environment workers, before the run stops.",
            ),
        ] = 10,
        collective_timeout_s: Annotated[
            float,
            Field(
                gt=0,
                le=LONGEST_S,
                description="Time limit of the ranks' communication, in seconds.",
            ),
        ] = 600.0,
        placement_deadline_s: Annotated[
            float,
            Field(
                gt=0,
                le=LONGEST_S,
                description="Time limit of the wait for the cluster's resources, in seconds.",
            ),
        ] = 120.0,
    ) -> None:
        args = {
            "learner_ranks": learner_ranks,
            "tensor_parallel": tensor_parallel,
            "cpu_offload": cpu_offload,
            "reshard_after_forward": reshard_after_forward,
            "collective_timeout_s": collective_timeout_s,
        }
        _require_honoured(config, args)
        shards = _shards(args)
        self._config, self._tokenizer = config, renderer.tokenizer
        run_dir = run_dir.resolve()
        namespace = os.environ.get(NAMESPACE_VARIABLE) or run_dir.name
        self._bucket_bytes = bucket_mib * MEBIBYTE
        self.checkpoints: CheckpointStore = checkpoint_store(config, run_dir)
        self.policy_version = 0
        self._thread = ThreadPoolExecutor(1, "ludus-learner")
        self._job: Future[Any] | None = None
        self._deferred: int | None = None  # a version that no sampler has yet
        self._publishing = asyncio.Lock()
        self._sft = False

        demand = _demand(
            config, learner_ranks, samplers, env_workers, cpus=cpus, colocated=colocated
        )
        self._connected = cluster.connect(address, namespace, demand)
        self._group: Any = None
        self._actors: Actors | None = None
        try:
            self._group, places = cluster.place(demand, placement_deadline_s)
            self._actors = Actors(config, self._tokenizer, run_dir, places, shards, namespace)
            self._start(self._actors, max_deaths)
        except BaseException:
            self._disconnect()
            raise

    @staticmethod
    def refuse(config: RunConfig, args: Mapping[str, Any]) -> None:
        """Check a configuration, with the arguments that it sets.

        Errors: ConfigError for keys that this back end does not honour, with those that do; for an
        address where no cluster answers; for actors that the cluster, or this machine, can never
        run.
        """
        _require_honoured(config, args)
        defaults = {n: p.default for n, p in inspect.signature(RayBackend).parameters.items()}
        names = ("learner_ranks", "samplers", "env_workers", "cpus", "colocated")
        demand = _demand(config, **{name: args.get(name, defaults[name]) for name in names})
        cluster.require_possible(args.get("address"), demand)

    def _start(self, actors: Actors, max_deaths: int) -> None:
        """Start all actors, at the same time."""
        envs = actors.start_envs()
        samplers, ready = actors.start_samplers()
        self.learners = LearnerGroup(
            actors.start_learners,
            actors.learner_args,
            max_deaths,
            START_S,
            lambda weights: self.sampler.put_again(weights),
        )
        self.learners.start()
        facts = actors.check_versions(envs, ready)
        vocabulary = Vocabulary.of(self._tokenizer)
        self.sampler = SamplerPool(
            samplers,
            actors.replace_sampler,
            facts["context_length"],
            lambda: vocabulary.grammars,
            deterministic=self._config.rollout.deterministic,
            max_deaths=max_deaths,
        )
        self.sampler.refresh = self._publish_deferred
        self.sampler.restore = self._restore
        self.envs = EnvPool(envs, actors.replace_env, max_deaths) if envs else None
        found = self.learners.model_facts
        peak = found["peak_flops"] * len(self.learners.actors)
        self.meter = Meter(Away(found["shape"], peak), self.sampler)

    # The protocol

    def make_envs(self, spec: Spec | None) -> LocalEnvs:
        """The environments of episodes: in the environment workers, or in this process."""
        return LocalEnvs(spec) if self.envs is None else WorkerEnvs(spec, self.envs)

    def host_judge(self, spec: Spec, judge: Judge) -> Judge:
        """A judge in the environment workers, unless it needs something of this process: rate
        limits, another model, all episodes of a step."""
        if self.envs is None or hasattr(judge, "score_groups"):
            return judge
        needed = inspect.signature(JUDGES.load(spec.name)).parameters.keys() & JUDGES.context
        return judge if needed else PooledJudge(spec, judge, self.envs)

    def begin_stage(self, settings: TrainSettings, algorithm: Algorithm) -> None:
        """Start a stage with a new optimizer, critic and reference model."""
        self._sft = settings.stage == "sft"
        self.learners.call("begin_stage", settings, algorithm, keep=True)

    async def score(self, groups: Sequence[Group], algorithm: Algorithm) -> Sequence[Group]:
        """Score the sampled tokens on the ranks."""
        if not algorithm.asks_models:
            return groups
        scored = await self._in_thread(lambda: self._shared("score", groups, algorithm))
        return list(scored[0])

    async def train(self, samples: list[Sample], algorithm: Algorithm) -> dict[str, float]:
        """Run the optimizer steps of one policy iteration on the ranks."""
        version = self.policy_version
        done = await self._in_thread(
            lambda: self._shared("train", samples, algorithm, version, keep=True)
        )
        metrics: dict[str, float] = done[0]
        return metrics

    def _shared(self, method: str, value: Any, *args: Any, keep: bool = False) -> list[Any]:
        """Call a method of all ranks, whose first argument goes through the object store."""
        import ray

        try:
            reference = ray.put(value)
        except ray.exceptions.RayError as error:
            raise cluster.no_room(error) or error from None
        return self.learners.call(method, reference, *args, keep=keep)

    async def verify(self, groups: Sequence[Group]) -> None:
        raise ConfigError("verify: true needs backend: local, where learner and sampler share bits")

    async def publish_weights(self) -> int:
        """Give the current weights to the samplers, under the next version.

        In SFT no turn is sampled before the next step, as a rule: the transfer waits for the first
        turn.
        """
        version = self.policy_version + 1
        if self._sft:
            self._deferred = self.policy_version = version
            return version
        self._deferred = None
        await self._publish(version)
        self.policy_version = version
        return version

    async def _publish(self, version: int) -> None:
        while True:
            began = time.perf_counter()
            weights = await self._in_thread(partial(self._gather, version))
            self.sampler.publication["time/publish_gather_s"] = time.perf_counter() - began
            try:
                await self.sampler.update(weights, version)
            except WeightsLost:  # the rank has died since: the next call notices it
                continue
            return

    async def _publish_deferred(self) -> None:
        if self._deferred is None:
            return
        async with self._publishing:
            if (version := self._deferred) is not None:
                await self._publish(version)
                self._deferred = None

    async def _restore(self, lost: Weights) -> Weights | None:
        """Returns weights whose rank has died, from a new rank; for a new sampler.

        While the ranks train, their weights are no longer these. But then they notice the death.
        """
        while self._deferred is None and self.sampler.weights is lost:
            if self._idle and self.learners.has_published:
                return await self._in_thread(partial(self._gather, lost.version))
            await asyncio.sleep(RESTORE_S)
        return None if self._deferred is not None else self.sampler.weights

    def _gather(self, version: int) -> Weights:
        """Put the current weights into the object store."""
        weights: Weights = self.learners.call("weights", version, self._bucket_bytes)[0]
        return weights

    def save(
        self, stage: str, step: int, state: dict[str, Any], metric: float | None, *, pin: bool
    ) -> Path:
        """Write a checkpoint, sharded over the ranks."""
        path: Path = self.learners.call(
            "save", stage, step, state, metric, self.policy_version, pin
        )[0]
        self.learners.checkpointed(path)
        if pin:  # the end of a stage
            self.finish_save()
        return path

    def finish_save(self) -> None:
        """Wait until the checkpoint of the last `save` is complete. Errors: CheckpointError."""
        self.learners.call("finish_save")

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint of the stage that `begin_stage` started."""
        restored = self.learners.call("load", path, keep=True)[0]
        self._deferred = self.policy_version = restored.policy_version
        self.sampler.policy_version = self.policy_version
        loop: dict[str, Any] = restored.loop
        return loop

    def load_weights(self, path: Path) -> None:
        """Take only the weights of a checkpoint, of any stage."""
        version = self.learners.call("load_weights", path, keep=True)[0]
        self._deferred = self.policy_version = version
        self.sampler.policy_version = version

    @property
    def _idle(self) -> bool:
        return self._job is None or self._job.done()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        self._job = job = self._thread.submit(work)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Wait for the checkpoint that is being written, end all actors, leave the cluster."""
        if self.learners.is_saving and self._idle:
            try:
                self.finish_save()
            except LudusError as error:
                log.error("the last checkpoint is not complete", reason=str(error))
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.envs is not None:
            self.envs.close()
        self.sampler.shutdown()
        self._disconnect()
        if self._job is not None:
            abandon(self._job)

    def _disconnect(self) -> None:
        """End all actors and free their resources. Idempotent."""
        import ray

        if self._actors is not None:
            self._actors.close()
        if self._group is not None:
            cluster.release(self._group)
            self._group = None
        if self._connected:
            self._connected = False
            with suppress(Exception):
                ray.shutdown()


def _require_honoured(config: RunConfig, args: Mapping[str, Any]) -> None:
    """Errors: ConfigError for keys that this back end does not honour, and where no cluster
    answers."""
    if args.get("address") is not None:
        cluster.require_answer(args["address"])
    where = "which the back end `ray` does not offer; use backend: local"
    if config.verify:
        raise ConfigError(f"verify: true compares bits of one process, {where}")
    if config.roles or config.policies:
        key = "roles" if config.roles else "policies"
        raise ConfigError(f"{key}: several policies in one run, {where}")
    shards, ranks = _shards(args), args.get("learner_ranks", 1)
    if ranks > 1 or shards.cpu_offload or shards.tensor_parallel > 1:
        check_supported(config, shards, ranks)


def _demand(
    config: RunConfig,
    learner_ranks: int,
    samplers: int,
    env_workers: int,
    *,
    cpus: float,
    colocated: bool,
) -> Demand:
    needs = {"CPU": cpus, "GPU": 1.0 if config.model.device == "cuda" else 0.0}
    actors: dict[str, tuple[int, Bundle]] = {
        "learner_ranks": (learner_ranks, needs),
        "samplers": (samplers, needs),
        "env_workers": (env_workers, {"CPU": cpus}),
    }
    return Demand(actors, colocated)


def _shards(args: Mapping[str, Any]) -> ShardSettings:
    """Returns the settings of the shards among the arguments. Errors: ConfigError."""
    names = ("tensor_parallel", "cpu_offload", "reshard_after_forward")
    values = {name: args[name] for name in names if name in args}
    if "collective_timeout_s" in args:
        values["timeout_s"] = args["collective_timeout_s"]
    try:
        return ShardSettings(**values)
    except ValidationError as error:
        lines = [text for _, text in explain(error, ShardSettings, "backend.args")]
        raise ConfigError("\n".join(lines)) from None
