"""Policies that do not train, in sampler actors of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ludus.backends.ray import cluster
from ludus.backends.ray.actors import Actors
from ludus.backends.ray.publication.weights import Weights, in_buckets, to_bucket
from ludus.backends.ray.sampler_pool import SamplerPool
from ludus.train.checkpoint.loading import load
from ludus.train.checkpoint.state import trained_tensors


class FixedSamplers:
    """A `FixedPolicy` of a Ray cluster.

    Args:
        group: the placement group of the actors.
        actors: starts the samplers; their weights are the policy's.
        mirror: returns a model of this process, shaped like the run's policy.
        pool: makes the pool of samplers.
    """

    def __init__(
        self,
        group: Any,
        actors: Actors,
        mirror: Callable[[], Any],
        bucket_bytes: int,
        pool: Callable[[Actors, list[Any], Mapping[str, Any]], SamplerPool],
    ) -> None:
        self._group, self._actors = group, actors
        self._mirror, self._bucket_bytes = mirror, bucket_bytes
        try:
            samplers, ready = actors.start_samplers()
            self.sampler = pool(actors, samplers, actors.check_versions((), ready))
        except BaseException:
            self._leave()
            raise
        self.sampler.refresh = self._publish
        self._taken: Weights | None = None
        self._publishing = asyncio.Lock()

    def take(self, model: Any, version: int) -> None:
        """Put the weights into the object store; the samplers get them before their next turn."""
        taken = Weights(version, [], [])
        for tensors in in_buckets(trained_tensors(model).items(), self._bucket_bytes):
            taken.put(to_bucket(tensors))
        self._taken = taken

    def restore(self, path: Path, version: int) -> None:
        """Read a checkpoint in this process, so that only this node needs its folder."""
        mirror = self._mirror()
        load(path, model=mirror)
        self.take(mirror, version)

    def close(self) -> None:
        self.sampler.shutdown()
        self._leave()

    async def _publish(self) -> None:
        if self._taken is None:
            return
        async with self._publishing:
            if (taken := self._taken) is not None:
                await self.sampler.update(taken, taken.version)
                if self._taken is taken:
                    self._taken = None

    def _leave(self) -> None:
        self._actors.close()
        cluster.release(self._group)
