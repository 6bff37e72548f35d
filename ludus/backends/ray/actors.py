"""The actors of a run, each on its place in the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludus.backends.ray import cluster
from ludus.backends.ray.cluster import Place
from ludus.backends.ray.env_actor import EnvActor
from ludus.backends.ray.errors import explained
from ludus.backends.ray.learner_actor import LearnerActor
from ludus.backends.ray.sampler_actor import SamplerActor
from ludus.config.schema import RunConfig
from ludus.train.distributed.settings import Rank, ShardSettings

START_S = 600.0
"""Time limit of the start of an actor, in seconds: a large model is read from disk."""


class Actors:
    """Starts actors on their places, and ends them all.

    Args:
        places: those of each kind, from `cluster.place`.
        namespace: names the samplers' temporary folders.
        make_model: makes the samplers' model in their processes; None: the run's, as it begins.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Any,
        run_dir: Path,
        places: dict[str, list[Place]],
        shards: ShardSettings,
        namespace: str,
        make_model: Callable[[], Any] | None = None,
    ) -> None:
        self._config, self._tokenizer, self._run_dir = config, tokenizer, run_dir
        self._places, self._shards, self._namespace = places, shards, namespace
        self._make_model = make_model
        self._actors: list[Any] = []

    def start_samplers(self) -> tuple[list[Any], list[Any]]:
        """Returns the samplers, and references of their facts, which come when they are ready."""
        count = len(self._places["samplers"])
        actors, prepared = zip(*(self._sampler(index) for index in range(count)), strict=True)
        return list(actors), list(prepared)

    def start_envs(self) -> list[Any]:
        """Returns the environment workers."""
        return [self._new(EnvActor, place) for place in self._places["env_workers"]]

    def start_learners(self) -> list[Any]:
        """Returns the learner ranks, before their `prepare`."""
        return [self._new(LearnerActor, place) for place in self._places["learner_ranks"]]

    def learner_args(self, address: str) -> list[tuple[Any, ...]]:
        """Returns the arguments of `LearnerActor.prepare` of each rank, given rank 0's address."""
        count = len(self._places["learner_ranks"])
        return [
            (self._config, self._tokenizer, self._run_dir, Rank(n, count, address), self._shards)
            for n in range(count)
        ]

    async def replace_sampler(self, index: int) -> Any:
        """Returns a new sampler with the initial weights. Errors: those of `explained`."""
        actor, prepared = self._sampler(index)
        await _ready(prepared)
        return actor

    async def replace_env(self, index: int) -> Any:
        """Returns a new environment worker. Errors: those of `explained`."""
        actor = self._new(EnvActor, self._places["env_workers"][index])
        await _ready(actor.facts.remote())
        return actor

    def check_versions(self, envs: Sequence[Any], samplers: Sequence[Any]) -> dict[str, Any]:
        """Wait for the first actors; returns the facts of a sampler.

        Errors: ConfigError where a node has other versions than this one; those of `explained`.
        """
        import ray

        with explained():
            own = cluster.facts()
            ready = ray.get(list(samplers), timeout=START_S)
            cluster.require_equal(own, ready)
            facts = [env.facts.remote() for env in envs]
            cluster.require_equal(own, ray.get(facts, timeout=START_S))
        first: dict[str, Any] = ready[0]
        return first

    def close(self) -> None:
        """End all actors at once. Idempotent."""
        import ray

        actors, self._actors = self._actors, []
        for actor in actors:
            with suppress(Exception):
                ray.kill(actor)

    def _sampler(self, index: int) -> tuple[Any, Any]:
        actor = self._new(SamplerActor, self._places["samplers"][index])
        prepared = actor.prepare.remote(
            self._config, self._tokenizer, self._namespace, index, self._make_model
        )
        return actor, prepared

    def _new(self, kind: type[Any], place: Place) -> Any:
        import ray

        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": str(self._config.threads or max(1, round(place.num_cpus))),
        }
        options = {
            **place.options(),
            "max_restarts": 0,
            "runtime_env": {"env_vars": environment},
        }
        actor = ray.remote(kind).options(**options).remote()
        self._actors.append(actor)
        return actor


async def _ready(reference: Any) -> Any:
    """Await a reference without a thread: `ray.get` goes on after the cancellation of its caller,
    and sometimes after the death of the actor."""
    with explained():
        async with asyncio.timeout(START_S):
            return await reference
