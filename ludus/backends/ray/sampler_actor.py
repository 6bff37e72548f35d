"""A sampler replica: an actor with a model of its own, and the run's sampler over it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ludus.backends.ray.cluster import facts, node_id
from ludus.backends.ray.publication.broadcast import Meeting, Member, joined
from ludus.backends.ray.publication.weights import (
    Bucket,
    Weights,
    copy_into,
    own_memory,
    verified,
)
from ludus.backends.ray.station import Station, Stationed
from ludus.config.schema import RunConfig
from ludus.models.samplers.base import Completion, PolicySampler, SamplingParams

COUNTERS = (
    "num_prefill_tokens",
    "num_prompt_tokens",
    "num_decode_tokens",
    "num_evicted_tokens",
    "weight_bytes",
    "cache_peak_bytes",
)
"""Numbers of a sampler that a run's meter adds up."""


class SamplerActor(Stationed):
    """Hosts one sampler. `prepare` has to be called first."""

    def __init__(self) -> None:
        self._sampler: PolicySampler
        self._model: Any = None
        self._station = Station(self, self._counters)
        self._received: list[Bucket] = []
        self._member: Member | None = None

    async def prepare(
        self,
        config: RunConfig,
        tokenizer: Any,
        namespace: str,
        index: int,
        make_model: Callable[[], Any] | None,
    ) -> dict[str, Any]:
        """Build the model and the sampler; returns the facts of the replica.

        The initial weights derive from the run's seed, so they equal the learner's; with
        `make_model`, they are those of a policy that does not train.
        """
        from ludus.backends.local import make_sampler
        from ludus.train.checkpoint.policy import build_policy

        if config.threads:
            import torch

            torch.set_num_threads(config.threads)
        own = partial(build_policy, config.model, tokenizer, config.seed)
        model = (make_model or own)()
        if config.model.device == "cpu":
            own_memory(model)
        folder = Path(tempfile.mkdtemp(prefix=f"ludus-{namespace[:40]}-sampler-{index}-"))
        self._folder = folder
        self._model = model
        self._sampler = make_sampler(config, model, tokenizer, folder)
        if make_model is not None:
            self._sampler.publish(0)  # a server has loaded the weights of the run's `model`
        return {**facts(), "context_length": self._sampler.context_length}

    async def facts(self) -> dict[str, str]:
        return facts()

    async def node_id(self) -> str:
        """Ray's name of the actor's node."""
        return node_id()

    def open(self, session: str) -> None:
        self._sampler.open(session)

    def close(self, session: str) -> None:
        self._sampler.close(session)

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, session: str
    ) -> Completion:
        return await self._sampler.sample(prompt_ids, params, session=session)

    async def receive(self, weights: Weights) -> None:
        """Fetch and verify weights, while turns go on. Errors: TrainingError."""
        import ray

        def fetch() -> list[Bucket]:
            buckets: list[Bucket] = ray.get(list(weights.buckets))
            pairs = zip(buckets, weights.checksums, strict=True)
            return [verified(bucket, expected, weights.version) for bucket, expected in pairs]

        self._received = await asyncio.to_thread(fetch)

    async def receive_broadcast(self, meeting: Meeting, rank: int, version: int) -> list[str]:
        """Receive and verify weights that the learner broadcasts, while turns go on.

        Returns the checksums of the buckets. Errors: BroadcastFailed.
        """
        self._received = []

        def receive() -> tuple[list[Bucket], list[str]]:
            member, self._member = self._member, None  # none, unless all goes well
            member = joined(member, meeting, rank)
            received = member.receive(meeting.serial, version)
            self._member = member
            return received

        self._received, checksums = await asyncio.to_thread(receive)
        return checksums

    async def swap(self, version: int) -> float:
        """Sample with the received weights; without any, give the present ones a version.

        Running turns wait for the swap and continue. Returns the seconds for which no step of the
        sampler could start. Errors: TrainingError.
        """
        began = time.perf_counter()
        received, self._received = self._received, []
        sampler = self._sampler
        if not received:
            sampler.pause()
            sampler.publish(version)
        elif sampler.shares_weights:
            sampler.pause()
            copy_into(self._model, received, version)
            sampler.publish(version)
        else:
            await asyncio.to_thread(copy_into, self._model, received, version)
            began = time.perf_counter()
            sampler.pause()
            await asyncio.to_thread(sampler.publish, version)
        sampler.resume()
        return time.perf_counter() - began

    async def shutdown(self) -> None:
        """Stop the sampler's processes."""
        import shutil

        self._sampler.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _counters(self) -> dict[str, float]:
        return {name: float(getattr(self._sampler, name, 0)) for name in COUNTERS}
