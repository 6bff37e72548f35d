"""The back end `ray`: learner ranks, samplers and environment workers as actors of a Ray cluster.

    driver: the loop, the episodes
      |-- learner ranks      ShardedTrainer (FSDP2), one process each
      |-- samplers           a model of their own and the run's sampler, one process each
      |-- environment workers

Weights go from the ranks to the samplers in buckets with checksums, through Ray's object store or
by a broadcast. Samplers receive them while turns go on, and stop for the swap only.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ludus.backends.ray import cluster
from ludus.backends.ray.actors import START_S, Actors
from ludus.backends.ray.cluster import NAMESPACE_VARIABLE
from ludus.backends.ray.demand import (
    demand_of,
    fixed_demand,
    on_own_gpus,
    require_honoured,
    shards_of,
)
from ludus.backends.ray.env_pool import EnvPool, PooledJudge, WorkerEnvs
from ludus.backends.ray.errors import no_room
from ludus.backends.ray.fixed import FixedSamplers
from ludus.backends.ray.learner_group import LearnerGroup, LearnerThread
from ludus.backends.ray.publication.publisher import Broadcasts, Publisher
from ludus.backends.ray.publication.weights import Weights, copy_into
from ludus.backends.ray.sampler_pool import SamplerPool
from ludus.config.policies import POLICY
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, LudusError
from ludus.core.types import Group, Sample, Spec
from ludus.judges import JUDGES
from ludus.judges.base import Judge
from ludus.models.chat.renderer import Renderer
from ludus.models.vocabulary import Vocabulary
from ludus.rollout.hosts.host import LocalEnvs
from ludus.telemetry.logs import get_logger
from ludus.train.algorithms.base import Algorithm
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.checkpoint.policy import build_policy
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.meter import Away, Meter
from ludus.train.trainer import checkpoint_store

log = get_logger(__name__)

MEBIBYTE = 2**20

LONGEST_S = 86_400
"""Of a time limit: a day."""


class RayBackend:
    """Trains, samples and hosts environments in actors of a Ray cluster.

    Args:
        make_model: is not called here: the actors build the model from the configuration.
        renderer: has the tokenizer.
        config: the run's configuration.
        run_dir: on a file system that all nodes share, if learner ranks are on several.
    """

    trains_elsewhere = True
    """The ranks of several policies train at the same time."""

    of_other_policies: ClassVar[Mapping[str, Any]] = {"env_workers": 0}
    """Arguments of the back ends of a run's other policies, which host no environments."""

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
        fixed_samplers: Annotated[
            int,
            Field(
                ge=1,
                le=10_000,
                description="Sampler processes of each policy that does not train: of "
                "`policies.NAME.weights`, and of each version of `past`.",
            ),
        ] = 1,
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
        weights: Annotated[
            Literal["auto", "object_store", "broadcast"],
            Field(
                description="How weights reach the samplers: through Ray's object store (shared "
                "memory on a node), or broadcast by a process group, of NCCL between GPUs and of "
                "gloo between CPUs. `auto` broadcasts where the learner and each sampler have "
                "GPUs of their own."
            ),
        ] = "auto",
        broadcast_timeout_s: Annotated[
            float,
            Field(
                gt=0,
                le=LONGEST_S,
                description="Time limit of a broadcast's start and of each bucket, in seconds, and "
                "at most a third of `collective_timeout_s`; then these weights go through the "
                "object store.",
            ),
        ] = 60.0,
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
        require_honoured(config, args)
        shards = shards_of(args)
        self._config, self._tokenizer = config, renderer.tokenizer
        run_dir = run_dir.resolve()
        self._policy = _named(config, run_dir)
        namespace = os.environ.get(NAMESPACE_VARIABLE) or run_dir.name
        self._bucket_bytes = bucket_mib * MEBIBYTE
        self._broadcasts: Broadcasts | None = None
        if weights == "broadcast" or (weights == "auto" and on_own_gpus(config, colocated)):
            limit_s = min(broadcast_timeout_s, collective_timeout_s / 3)
            self._broadcasts = Broadcasts(config.model.device, limit_s, self._policy)
        self.checkpoints: CheckpointStore = checkpoint_store(config, run_dir)
        self.policy_version = 0
        self._in_thread = LearnerThread()
        self._sft = False

        counts = {
            "learner_ranks": learner_ranks,
            "samplers": samplers,
            "env_workers": env_workers,
            "fixed_samplers": fixed_samplers,
            "cpus": cpus,
            "colocated": colocated,
        }
        demand = demand_of(config, counts)
        self._fixed_demand = fixed_demand(config, counts)
        self._placement_deadline_s, self._max_deaths = placement_deadline_s, max_deaths
        self._actors_on = partial(
            Actors, config, self._tokenizer, run_dir, shards=shards, namespace=namespace
        )
        self._mirror: Any = None
        self._connected = cluster.connect(address, namespace, demand)
        self._group: Any = None
        self._actors: Actors | None = None
        try:
            self._group, places = cluster.place(demand, self._placement_deadline_s)
            self._actors = self._actors_on(places)
            self._start(self._actors)
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
        require_honoured(config, args)
        cluster.require_possible(args.get("address"), RayBackend.demand(config, args))

    @staticmethod
    def demand(config: RunConfig, args: Mapping[str, Any]) -> cluster.Demand:
        """The actors of a configuration, with the arguments that it sets."""
        defaults = {n: p.default for n, p in inspect.signature(RayBackend).parameters.items()}
        return demand_of(config, {**defaults, **args})

    def _start(self, actors: Actors) -> None:
        """Start all actors, at the same time."""
        envs = actors.start_envs()
        samplers, ready = actors.start_samplers()
        self.learners = LearnerGroup(
            actors.start_learners,
            actors.learner_args,
            self._max_deaths,
            START_S,
            lambda weights: self.sampler.put_again(weights),
            self._broadcasts.end if self._broadcasts is not None else lambda reason: None,
            self._policy,
        )
        self.learners.start()
        if self._broadcasts is None:
            self.learners.actors[0].touch_store.remote(self._bucket_bytes)
        self._vocabulary = Vocabulary.of(self._tokenizer)
        facts = actors.check_versions(envs, ready)
        self.sampler = self._pool(self._policy, actors, samplers, facts)
        self._publisher = Publisher(
            self.learners, self.sampler, self._in_thread, self._bucket_bytes, self._broadcasts
        )
        self.envs = EnvPool(envs, actors.replace_env, self._max_deaths) if envs else None
        found = self.learners.model_facts
        peak = found["peak_flops"] * len(self.learners.actors)
        self.meter = Meter(Away(found["shape"], peak), self.sampler)

    def _pool(
        self, policy: str, actors: Actors, samplers: list[Any], facts: Mapping[str, Any]
    ) -> SamplerPool:
        vocabulary = self._vocabulary
        return SamplerPool(
            samplers,
            actors.replace_sampler,
            facts["context_length"],
            lambda: vocabulary.grammars,
            deterministic=self._config.rollout.deterministic,
            max_deaths=self._max_deaths,
            policy=policy,
        )

    # Policies that do not train

    def fixed_policy(self, make_model: Callable[[], Any], folder: Path) -> FixedSamplers:
        """A policy in sampler actors of its own; `make_model` is called in each of them."""
        group, places = cluster.place(self._fixed_demand, self._placement_deadline_s)
        actors = self._actors_on({"samplers": places["fixed_samplers"]}, make_model=make_model)
        pool = partial(self._pool, f" (policies.{folder.name})")
        return FixedSamplers(group, actors, self._model_here, self._bucket_bytes, pool)

    def present_model(self) -> Any:
        """A model of this process, with the weights of the ranks."""
        import ray

        weights: Weights = self.learners.call("weights", self.policy_version, self._bucket_bytes)[0]
        model = self._model_here()
        copy_into(model, ray.get(list(weights.buckets)), weights.version)
        return model

    def _model_here(self) -> Any:
        """The run's model in the memory of this process; its weights are anyone's."""
        if self._mirror is None:
            here = self._config.model.model_copy(update={"device": "cpu"})
            self._mirror = build_policy(here, self._tokenizer, self._config.seed)
        return self._mirror

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

    def shorten_stage(self, steps: int) -> None:
        """End the stage after `steps` steps."""
        self.learners.call("shorten_stage", steps, keep=True)

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
            raise no_room(error) or error from None
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
            self._publisher.deferred = self.policy_version = version
            return version
        self._publisher.deferred = None
        await self._publisher.publish(version)
        self.policy_version = version
        return version

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
        self._publisher.deferred = self.policy_version = restored.policy_version
        self.sampler.policy_version = self.policy_version
        loop: dict[str, Any] = restored.loop
        return loop

    def load_weights(self, path: Path) -> None:
        """Take only the weights of a checkpoint, of any stage."""
        version = self.learners.call("load_weights", path, keep=True)[0]
        self._publisher.deferred = self.policy_version = version
        self.sampler.policy_version = version

    def close(self) -> None:
        """Wait for the checkpoint that is being written, end all actors, leave the cluster."""
        if self.learners.is_saving and self._in_thread.is_idle:
            try:
                self.finish_save()
            except LudusError as error:
                log.error("the last checkpoint is not complete", reason=str(error))
        self._in_thread.close()
        if self.envs is not None:
            self.envs.close()
        self.sampler.shutdown()
        self._disconnect()
        self._in_thread.abandon()

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


def _named(config: RunConfig, run_dir: Path) -> str:
    """For messages: the policy, in parentheses, in a run of several."""
    if run_dir.parent.name == "policies":  # see `open_policies`
        return f" (policies.{run_dir.name})"
    return f" ({POLICY})" if config.policies else ""
