"""A process group of the publishing rank and the samplers, through which weights are broadcast.

    driver          a TCPStore: headers of buckets, members that came, buckets that each has,
                    why a group ended
    learner rank 0  --bucket--> sampler 0, sampler 1, ...      NCCL between GPUs, gloo between CPUs

The group stands beside the learner's own, and no `torch.distributed` default group is touched. It
serves until a member dies, joins or fails; the driver then forms another. Each wait has a deadline,
and ends as soon as a member, or the driver, notes in the store that the group has ended.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ludus.backends.ray.publication.weights import (
    Bucket,
    Entry,
    checksum,
    fill,
    layout,
    verified,
)
from ludus.core.errors import LudusError, TrainingError, described

LOOK_S = 0.05
"""Seconds between two looks whether the group has ended."""

SETTLE_S = 0.2
"""Seconds in which the driver notes the death that broke a connection."""

ENDED = "ended"
NO_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
"""Keeps NCCL's watchdog from ending the process where another member has died."""


class BroadcastFailed(LudusError):
    """The group has ended: a member died, did not answer in time, or received damaged weights."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A group, and one publication through it.

    Args:
        number: of the group.
        serial: of the publication.
        host, port: of the driver's store.
        names: of the members, by rank; the first one sends.
        device: type of the members' devices, `cpu` or `cuda`.
        timeout_s: longest wait for the members, and for each bucket; twice as long for word of the
            next one.
    """

    number: int
    serial: int
    host: str
    port: int
    names: tuple[str, ...]
    device: str
    timeout_s: float

    @property
    def transport(self) -> str:
        return "NCCL" if self.device == "cuda" else "gloo"


class Member:
    """One end of a group. Blocking: of one thread.

    Errors of all methods: BroadcastFailed.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank
        self._wait_s = timedelta(seconds=meeting.timeout_s)
        self._device = torch.device(meeting.device)
        self._count = 0  # of buckets that went through
        self._sent: list[str] = []  # keys of headers
        self._space: list[Tensor] = []
        """Memory of buckets, which the next publication uses again."""
        with self._told("the driver's store does not answer"):
            store = TCPStore(
                meeting.host,
                meeting.port,
                is_master=False,
                timeout=self._wait_s,
                wait_for_workers=False,
            )
            self._store = PrefixStore(f"group {meeting.number}", store)
        self._group: Any = self._join()

    def send(self, serial: int, version: int, index: int, tensors: Mapping[str, Tensor]) -> str:
        """Broadcast a bucket; returns its checksum. The first call of a serial has the index 0."""
        entries, size = layout(tensors)
        data = self._memory(0, size)
        fill(data, entries, tensors)
        digest = checksum(Bucket(entries, data))
        header = [version, digest, size, [list(asdict(entry).values()) for entry in entries]]
        self._announce(serial, index, header)
        self._broadcast(data)
        return digest

    def end(self, serial: int, count: int) -> None:
        """Tell the receivers that a publication has `count` buckets."""
        self._announce(serial, count, None)

    def receive(self, serial: int, version: int) -> tuple[list[Bucket], list[str]]:
        """Returns the buckets of a publication, verified, and their checksums.

        Their memory is used again by the next call.
        """
        buckets: list[Bucket] = []
        checksums: list[str] = []
        while (header := self._header(serial, len(buckets))) is not None:
            sent, expected, size, rows = header
            if sent != version:
                raise self.fail(f"weights {sent} came, not {version}")
            data = self._memory(len(buckets), size)
            self._broadcast(data)
            entries = [Entry(name, kind, tuple(shape), *at) for name, kind, shape, *at in rows]
            try:
                buckets.append(verified(Bucket(entries, data), expected, version))
            except TrainingError as error:
                raise self.fail(f"{self._name}: {error}") from None
            checksums.append(expected)
        return buckets, checksums

    def fail(self, reason: str) -> BroadcastFailed:
        """End the group, for all members; returns the error, with the first reason of all."""
        with suppress(RuntimeError):  # of the store
            reason = self._store.compare_set(ENDED, "", reason).decode() or reason
        self.close()
        return BroadcastFailed(reason)

    def close(self) -> None:
        """Leave the group. Idempotent. A broadcast that hangs goes on in its thread and keeps its
        own memory."""
        group, self._group = getattr(self, "_group", None), None
        if group is not None and self.meeting.device == "cuda":
            threading.Thread(target=group.abort, daemon=True).start()

    @property
    def _name(self) -> str:
        return self.meeting.names[self.rank]

    # Forming the group

    def _join(self) -> Any:
        """Returns the process group, once all members are there and connected."""
        names = self.meeting.names
        with self._told("the driver's store does not answer"):
            self._store.set(f"joined/{self.rank}", self._place())
            absent = dict(enumerate(names))

            def all_came() -> bool:
                for rank in [r for r in absent if self._store.check([f"joined/{r}"])]:
                    del absent[rank]
                return not absent

            self._wait_for(all_came, lambda: f"{_listed(absent.values())} did not come")
            places = [self._store.get(f"joined/{rank}").decode() for rank in range(len(names))]
        if self.meeting.device == "cuda":
            for rank, place in enumerate(places):
                if (other := places.index(place)) < rank:
                    raise self.fail(
                        f"{names[other]} and {names[rank]} share a GPU, which NCCL refuses"
                    )
        return self._run(self._connect, lambda: "the members did not connect")

    def _place(self) -> str:
        """Identifies the member's GPU; on a CPU, its process."""
        if self.meeting.device == "cuda":
            return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return f"{socket.gethostname()} {os.getpid()}"

    def _connect(self) -> Any:
        store, size = PrefixStore("group", self._store), len(self.meeting.names)
        limit = 2 * self._wait_s  # our own deadline comes first, and names the member
        if self.meeting.device == "cpu":
            return dist.ProcessGroupGloo(store, self.rank, size, limit)
        if not dist.is_nccl_available():
            raise RuntimeError("its torch has no NCCL")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        with _environment(*NO_HANDLING):
            return dist.ProcessGroupNCCL(store, self.rank, size, options)

    # Buckets

    def _memory(self, index: int, size: int) -> Tensor:
        if index == len(self._space):
            self._space.append(torch.empty(0, dtype=torch.uint8))
        if self._space[index].numel() < size:
            try:
                self._space[index] = torch.empty(size, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:  # of a GPU
                raise self.fail(f"{self._name} has no room: {described(error):.200}") from None
        return self._space[index][:size]

    def _announce(self, serial: int, index: int, header: Any) -> None:
        with self._told("the driver's store does not answer"):
            if index == 0:  # all members have had those of before
                for key in self._sent:
                    self._store.delete_key(key)
                self._sent.clear()
            self._sent.append(f"bucket/{serial}/{index}")
            self._store.set(self._sent[-1], json.dumps(header))

    def _header(self, serial: int, index: int) -> Any:
        """Returns what comes next, None for the end."""
        key = f"bucket/{serial}/{index}"
        sender = self.meeting.names[0]
        with self._told("the driver's store does not answer"):
            patience = 2 * self.meeting.timeout_s  # the sender may wait for another: it knows whom
            self._wait_for(
                lambda: self._store.check([key]), lambda: f"{sender} sent no bucket", patience
            )
            return json.loads(self._store.get(key))

    def _broadcast(self, data: Tensor) -> None:
        def run() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            self._group.broadcast([data], options).wait()
            if data.is_cuda:
                torch.cuda.current_stream(data.device).synchronize()

        if data.is_cuda:
            torch.cuda.synchronize(data.device)  # NCCL has a stream of its own
        if data.numel():
            self._run(run, self._behind)
        self._count += 1
        with self._told("the driver's store does not answer"):
            self._store.set(f"at/{self.rank}", str(self._count))

    def _behind(self) -> str:
        """Tells where a broadcast hangs."""
        counts: dict[str, int] = {}
        for rank, name in enumerate(self.meeting.names):
            key = f"at/{rank}"
            counts[name] = int(self._store.get(key)) if self._store.check([key]) else 0
        late = [name for name, count in counts.items() if count == min(counts.values())]
        if len(late) == len(counts):
            return f"no member received bucket {self._count + 1}"
        return f"{_listed(late)} did not receive bucket {min(counts.values()) + 1}"

    # Waiting

    def _wait_for(
        self, is_done: Callable[[], bool], late: Callable[[], str], wait_s: float | None = None
    ) -> None:
        """Wait until `is_done`. Errors: BroadcastFailed that begins with `late`, at the deadline,
        or where the group has ended."""
        wait_s = self.meeting.timeout_s if wait_s is None else wait_s
        end = time.monotonic() + wait_s
        look, pause = time.monotonic() + LOOK_S, 0.0002
        while not is_done():
            now = time.monotonic()
            if now > look:
                look = now + LOOK_S
                with self._told("the driver's store does not answer"):
                    if self._store.check([ENDED]):
                        raise self.fail("")
                    if now > end:
                        raise self.fail(f"{late()} within {wait_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.005)

    def _run(self, work: Callable[[], Any], late: Callable[[], str]) -> Any:
        """Returns the result of `work`, which runs in a thread, for it may hang."""
        done: list[Any] = []

        def run() -> None:
            try:
                done.append(work())
            except Exception as error:
                done.append(error)

        thread = threading.Thread(target=run, name="ludus-broadcast", daemon=True)
        thread.start()
        self._wait_for(lambda: not thread.is_alive(), late)
        if isinstance(error := done[0], Exception):
            time.sleep(SETTLE_S)
            raise self.fail(f"{self._name} lost the others: {described(error):.200}")
        return done[0]

    @contextmanager
    def _told(self, text: str) -> Iterator[None]:
        """Turns an error of the store into a BroadcastFailed."""
        try:
            yield
        except RuntimeError as error:  # torch's errors of stores are some
            raise BroadcastFailed(f"{self._name}: {text}: {described(error):.200}") from None


def joined(member: Member | None, meeting: Meeting, rank: int) -> Member:
    """Returns the member of a group: the one of before, or a new one. Errors: BroadcastFailed."""
    if member is not None and member.meeting.number == meeting.number:
        return member
    if member is not None:
        member.close()
    return Member(meeting, rank)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable for a moment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _listed(names: Any) -> str:
    return ", ".join(names)
