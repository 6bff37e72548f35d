"""A learner rank: an actor with one shard of the trainer."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ludus.backends.ray.cluster import facts, node_id, store_bytes
from ludus.backends.ray.publication.broadcast import BroadcastFailed, Meeting, Member, joined
from ludus.backends.ray.publication.weights import Weights, in_buckets, to_bucket
from ludus.config.schema import RunConfig
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Sample
from ludus.train.algorithms.base import Algorithm
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.checkpoint.state import seed_random, trained_tensors
from ludus.train.trainer import Restored, Trainer

if TYPE_CHECKING:
    from ludus.train.distributed import Rank, ShardedTrainer, ShardSettings


TOUCHED_BYTES = 64 << 20
"""Smaller publications are fast in any memory."""


class WholeTrainer(Trainer):
    """The trainer of a single rank: that of the back end `local`, bit for bit."""

    def weights(self, bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yields the trained tensors in buckets."""
        yield from map(dict, in_buckets(trained_tensors(self.model).items(), bucket_bytes))

    def finish_save(self) -> None:
        """Does nothing: `save` returns when the checkpoint is complete."""


class LearnerActor:
    """Hosts one rank. Every method but the first two is called on all ranks at once."""

    def __init__(self) -> None:
        self._trainer: WholeTrainer | ShardedTrainer
        self._rank = 0
        self._listener: socket.socket | None = None
        self._member: Member | None = None
        self._space: Any = None  # memory of a bucket, which the next one uses again

    def facts(self) -> dict[str, str]:
        return facts()

    def node_id(self) -> str:
        """Ray's name of the actor's node."""
        return node_id()

    def address(self) -> str:
        """Returns an address on this node at which this rank listens, for the rendezvous."""
        import ray

        from ludus.train.distributed import open_listener

        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._listener, address = open_listener(host)
        return address

    def prepare(
        self, config: RunConfig, tokenizer: Any, run_dir: Path, rank: Rank, shards: ShardSettings
    ) -> dict[str, Any]:
        """Build the shard; returns the sizes of the model and the peak rate of this device."""
        import torch

        from ludus.models.flops import Shape, peak_flops
        from ludus.train.checkpoint.policy import build_policy

        known: dict[str, Any] = {}

        def make_model() -> Any:
            model = build_policy(config.model, tokenizer, config.seed)
            parameter = next(model.parameters())
            half = "bfloat16" in (config.learner.dtype, config.sampler.args.get("dtype"))
            dtype = torch.bfloat16 if half else parameter.dtype
            known["shape"] = Shape.of(model)
            known["peak_flops"] = peak_flops(parameter.device, dtype)
            return model

        self._rank = rank.rank
        alone = rank.world_size == 1 and not shards.cpu_offload
        self._seeds: tuple[int, ...] = () if alone else (rank.rank,)
        if alone:
            if self._listener is not None:
                self._listener.close()
            self._trainer = WholeTrainer(make_model, tokenizer, config, run_dir)
        else:
            from ludus.train.distributed import ShardedTrainer

            self._trainer = ShardedTrainer(
                make_model, tokenizer, config, run_dir, rank, shards, self._listener
            )
        return known

    def begin_stage(self, settings: TrainSettings, algorithm: Algorithm) -> None:
        self._trainer.begin_stage(settings, algorithm)
        # For example LoRA's dropout, which each rank draws for its own samples.
        seed_random(derive_seed(settings.seed, "stage", settings.stage, *self._seeds))

    def shorten_stage(self, steps: int) -> None:
        self._trainer.shorten_stage(steps)

    def score(self, groups: Sequence[Group], algorithm: Algorithm) -> Sequence[Group]:
        return self._trainer.score(groups, algorithm)

    def train(
        self, samples: list[Sample], algorithm: Algorithm, policy_version: int
    ) -> dict[str, float]:
        return self._trainer.train(samples, algorithm, policy_version)

    def touch_store(self, bucket_bytes: int) -> None:
        """Let the object store use the memory of two publications once, in a thread.

        The kernel clears memory page by page at its first use, which would make the first two
        publications several times slower. A store without much more room is left alone.
        """
        size = sum(tensor.nbytes for tensor in trained_tensors(self._trainer.model).values())
        if TOUCHED_BYTES < size < store_bytes() // 4:
            count = -(-2 * size // bucket_bytes)
            Thread(target=_touch, args=(count, min(bucket_bytes, size)), daemon=True).start()

    def weights(
        self, version: int, bucket_bytes: int, meeting: Meeting | None = None
    ) -> Weights | None:
        """Put the weights into the object store, in buckets; only the first rank returns them.

        The object store keeps them as long as the driver has the result.

        Args:
            meeting: broadcast them to the samplers instead. Where that fails, the result says so.
        """
        buckets = self._trainer.weights(bucket_bytes)
        if self._rank:
            for _ in buckets:  # its parts of them
                pass
            return None
        if meeting is not None:
            return self._broadcast(meeting, version, buckets)
        weights = Weights(version, [], [])
        for tensors in buckets:
            bucket = to_bucket(tensors.items(), self._space)
            if self._space is None or len(bucket.data) > len(self._space):
                self._space = bucket.data
            weights.put(bucket)
        return weights

    def _broadcast(
        self, meeting: Meeting, version: int, buckets: Iterator[dict[str, Tensor]]
    ) -> Weights:
        """Send buckets to the samplers. All ranks have to gather all of them, also after a fault.

        The other ranks wait for as long as a bucket takes.
        """
        weights = Weights(version, [], [])
        serial, fault = meeting.serial, ""
        try:
            self._member = joined(self._member, meeting, 0)
            for tensors in buckets:
                index = len(weights.checksums)
                weights.checksums.append(self._member.send(serial, version, index, tensors))
            self._member.end(serial, len(weights.checksums))
        except BroadcastFailed as error:
            self._member, fault = None, str(error)
            for _ in buckets:
                pass
        return replace(weights, fault=fault)

    def save(
        self,
        stage: str,
        step: int,
        loop: dict[str, Any],
        metric: float | None,
        policy_version: int,
        pin: bool,
    ) -> Path:
        return self._trainer.save(stage, step, loop, metric, policy_version=policy_version, pin=pin)

    def finish_save(self) -> None:
        self._trainer.finish_save()

    def load(self, path: Path) -> Restored:
        return self._trainer.load(path)

    def load_weights(self, path: Path) -> int:
        return self._trainer.load_weights(path)


def _touch(count: int, num_bytes: int) -> None:
    """Put `count` arrays into the object store, and drop them."""
    import numpy as np
    import ray

    with suppress(ray.exceptions.RayError):
        zeros = np.zeros(num_bytes, np.uint8)
        kept = [ray.put(zeros) for _ in range(count)]
        kept.clear()
