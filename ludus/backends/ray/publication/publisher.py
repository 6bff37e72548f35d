"""Publication of the learner's weights to the samplers, seen from the driver.

publish --> broadcast, if there is a group        learner rank 0 and samplers, at the same time
        --> object store, else or where it failed learner ranks, then samplers
        --> swap                                  each sampler, with what it has received
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

from ludus.backends.ray.channel import ActorLost, reason_of
from ludus.backends.ray.learner_group import LearnerGroup, LearnerThread
from ludus.backends.ray.publication.broadcast import ENDED, Meeting
from ludus.backends.ray.publication.weights import Weights
from ludus.backends.ray.sampler_pool import Replica, SamplerPool, WeightsLost
from ludus.core.errors import LudusError
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

RESTORE_S = 0.1
"""Seconds between two looks whether lost weights are there again."""

GRACE_S = 20.0
"""Seconds that a sampler has to answer once its group has ended; then it is ended, too."""

FAULTS = 2
"""Broadcasts in a row that may fail without a death, before the run makes no more."""


class Broadcasts:
    """Forms the groups of a run, one after the other. A new member or a fault ends a group.

    Args:
        device: type of the devices of learner rank 0 and of the samplers.
        timeout_s: see `Meeting`.
        policy: for messages, in a run of several: ` (NAME)`.
    """

    def __init__(self, device: str, timeout_s: float, policy: str = "") -> None:
        self._device, self._timeout_s, self._policy = device, timeout_s, policy
        self._store: Any = None
        self._meeting: Meeting | None = None
        self._members: list[Any] = []
        self._count = 0
        self._faults = 0

    @property
    def are_on(self) -> bool:
        """False after too many faults."""
        return self._faults < FAULTS

    def meet(self, sender: Any, replicas: list[Replica]) -> Meeting:
        """Returns the next publication to these actors: by the same group, if they are the same."""
        members = [sender, *(replica.channel.actor for replica in replicas)]
        same = len(members) == len(self._members) and all(
            a is b for a, b in zip(members, self._members, strict=True)
        )
        self._count += 1
        if self._meeting is None or not same:
            self.end("another group takes its place")
            host, port = self._address()
            others = (replica.channel.name for replica in replicas)
            names = (f"learner rank 0{self._policy}", *others)
            self._meeting = Meeting(
                self._count, 0, host, port, names, self._device, self._timeout_s
            )
            self._members = members
        self._meeting = replace(self._meeting, serial=self._count)
        return self._meeting

    def end(self, reason: str) -> None:
        """End the group, if there is one; its members notice it at once. Any thread may call it."""
        from torch._C._distributed_c10d import PrefixStore

        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            store = PrefixStore(f"group {meeting.number}", self._store)
            store.compare_set(ENDED, "", reason or "it has ended")

    def note(self, fault: str, *, died: bool) -> None:
        """Count the outcome of a broadcast; an empty fault is a success."""
        if not fault or died:
            self._faults = 0
        else:
            self._faults += 1
        if fault:
            self.end(fault)
            rest = "" if self.are_on else ", as all further ones"
            log.warning(f"weights go by the object store{rest}", reason=fault)

    def _address(self) -> tuple[str, int]:
        """Returns the address of the store of this process, which outlives all members."""
        from ray.util import get_node_ip_address
        from torch._C._distributed_c10d import TCPStore

        host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        if self._store is None:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port


class Publisher:
    """Gives the learner's weights to the samplers.

    Args:
        in_thread: the thread that calls the learner.
        broadcasts: None: all weights go by the object store.
    """

    def __init__(
        self,
        learners: LearnerGroup,
        sampler: SamplerPool,
        in_thread: LearnerThread,
        bucket_bytes: int,
        broadcasts: Broadcasts | None,
    ) -> None:
        self._learners, self._sampler, self._in_thread = learners, sampler, in_thread
        self._bucket_bytes, self._broadcasts = bucket_bytes, broadcasts
        self.deferred: int | None = None
        """A version that no sampler has yet."""
        self._publishing = asyncio.Lock()
        sampler.refresh = self.publish_deferred
        sampler.restore = self.restore

    async def publish(self, version: int) -> None:
        """Give the present weights to the samplers. Errors: TrainingError; LudusError."""
        while True:
            began = time.perf_counter()
            received: list[Replica] = []
            weights = None
            if self._broadcasts is not None and self._broadcasts.are_on and self._sampler.alive:
                weights, received = await self._broadcast(version, self._broadcasts)
            if weights is None:
                weights = await self._in_thread(partial(self._gather, version))
            self._sampler.publication["time/publish_gather_s"] = time.perf_counter() - began
            try:
                await self._sampler.update(weights, version, received)
            except WeightsLost:  # the rank has died since, or a sampler joined
                continue
            return

    async def publish_deferred(self) -> None:
        """Publish weights whose publication was put off."""
        if self.deferred is None:
            return
        async with self._publishing:
            if (version := self.deferred) is not None:
                await self.publish(version)
                self.deferred = None

    async def restore(self, lost: Weights) -> Weights | None:
        """Returns published weights that are not stored, for a new sampler.

        While the ranks train, their weights are no longer these; then others are published.
        """
        while self.deferred is None and self._sampler.weights is lost:
            if self._in_thread.is_idle and self._learners.has_published:
                stored: Weights = await self._in_thread(partial(self._gather, lost.version))
                return stored
            await asyncio.sleep(RESTORE_S)
        return None if self.deferred is not None else self._sampler.weights

    def _gather(self, version: int, *meeting: Meeting) -> Weights:
        """Put the current weights into the object store, or broadcast them."""
        weights: Weights = self._learners.call("weights", version, self._bucket_bytes, *meeting)[0]
        return weights

    # Broadcasts

    async def _broadcast(
        self, version: int, broadcasts: Broadcasts
    ) -> tuple[Weights | None, list[Replica]]:
        """Returns the weights, and the samplers that have received them.

        Where a rank died, the weights are those that its successor put into the object store; None
        where the broadcast failed otherwise.
        """
        replicas = self._sampler.alive
        meeting = broadcasts.meet(self._learners.actors[0], replicas)
        receiving = [
            asyncio.ensure_future(self._receive(replica, rank, meeting, version, broadcasts))
            for rank, replica in enumerate(replicas, 1)
        ]
        try:
            weights: Weights = await self._in_thread(partial(self._gather, version, meeting))
            if ended := weights.fault or weights.is_stored:
                broadcasts.end(weights.fault)
            limit = GRACE_S + (0.0 if ended else meeting.timeout_s)
            _, late = await asyncio.wait(receiving, timeout=limit)
            for replica, task in zip(replicas, receiving, strict=True):
                if task in late:
                    self._end(replica, f"did not answer within {limit:g} s after a broadcast")
            outcomes = [task.result() for task in receiving if task not in late]
        except BaseException:
            broadcasts.end("the publication has ended")
            raise
        finally:
            for task in receiving:
                if not task.cancel() and not task.cancelled():
                    task.exception()  # asyncio warns of those that nobody has seen
        deaths = [reply for reply in outcomes if isinstance(reply, ActorLost)]
        others = [reply for reply in outcomes if isinstance(reply, str)]
        other_sums = any(isinstance(r, list) and r != weights.checksums for r in outcomes)
        fault = next(map(str, deaths), weights.fault or next(iter(others), ""))
        if weights.is_stored:
            broadcasts.note(fault or "a learner rank has died", died=True)
            return weights, []
        if not fault and other_sums:
            fault = f"weights {version} arrived with other checksums"
        broadcasts.note(fault, died=bool(deaths or late))
        return (None, []) if fault or late else (weights, replicas)

    async def _receive(
        self,
        replica: Replica,
        rank: int,
        meeting: Meeting,
        version: int,
        broadcasts: Broadcasts,
    ) -> list[str] | str | ActorLost:
        """Returns the checksums that a sampler received, or why it did not."""
        from ray.exceptions import RayActorError, RayTaskError

        try:
            checksums: list[str] = await replica.channel.actor.receive_broadcast.remote(
                meeting, rank, version
            )
            return checksums
        except RayActorError as error:
            lost = ActorLost(f"{meeting.names[rank]} has died: {reason_of(error)}")
            broadcasts.end(str(lost))
            self._sampler.lose(replica, lost)
            return lost
        except RayTaskError as error:
            fault = error.cause
            if not isinstance(fault, LudusError):
                raise
            broadcasts.end(str(fault))
            return str(fault)

    def _end(self, replica: Replica, reason: str) -> None:
        """Kill a sampler that does not answer, and replace it."""
        import ray

        ray.kill(replica.channel.actor)
        self._sampler.lose(replica, ActorLost(f"{replica.channel.name} {reason}"))
