"""The ranks of a sharded learner: rendezvous, agreement, and faults that name their rank.

A fault that a rank finds before a collective is shared, and raised by all ranks alike (`jointly`,
`agree`). A rank that fails between two collectives of a pass cannot go on: it notes its error in
the rendezvous' store and closes its connections, so that the others fail at once, with its error.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from stat import S_ISSOCK
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, _set_pg_timeout

from ludus.core.errors import (
    AbsentCheckpoint,
    CheckpointError,
    ConfigError,
    LudusError,
    TrainingError,
)
from ludus.train.distributed.settings import OtherRankLost, Rank

T = TypeVar("T")
Address = tuple[Any, ...]

LOST = re.compile(r"Connection (closed|reset)|Broken pipe|gloo|NCCL|Timed? ?out|TCPStore", re.I)
"""Messages of a collective that failed; torch raises RuntimeError for all of them."""
TIMED_OUT = re.compile(r"Timed? ?out", re.I)
_KINDS: dict[str, type[LudusError]] = {
    kind.__name__: kind for kind in (ConfigError, CheckpointError, AbsentCheckpoint, TrainingError)
}


class Group:
    """The connections of one rank.

    Args:
        rank: of this process.
        device: of the weights: gloo connects CPUs, NCCL CUDA devices.
        timeout_s: longest wait for the other ranks.
        tensor_parallel: ranks that share matrices, and compute the same samples; they follow each
            other.
        listener: of rank 0, at the rank's address; belongs to the group from now on. Without it
            rank 0 opens the port itself.

    `mesh` has the dimensions `dp` and, with tensor parallelism, `tp`.

    Errors: OtherRankLost that names the ranks that did not come.
    """

    def __init__(
        self,
        rank: Rank,
        device: torch.device,
        timeout_s: float,
        tensor_parallel: int = 1,
        listener: socket.socket | None = None,
    ) -> None:
        if dist.is_initialized():
            raise TrainingError(f"{rank}: this process is already a rank of another group")
        self.place, self.rank, self.size = rank, rank.rank, rank.world_size
        self.timeout_s = timeout_s
        self.num_parts, self.part = self.size // tensor_parallel, self.rank // tensor_parallel
        """Number of parts that samples are split into, and the part of this rank."""
        self.is_first = self.rank % tensor_parallel == 0
        """True on one of the ranks that compute the same samples."""
        self.broken = False
        self._agreed: BaseException | None = None
        self._count = 0
        self._store = self._meet(listener)
        timeout = timedelta(seconds=timeout_s)
        before = _sockets()
        try:
            dist.init_process_group(
                "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=PrefixStore("ranks", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
            )
            self._control = dist.new_group(backend="gloo", timeout=timeout)
            self.background = dist.new_group(backend="gloo", timeout=timeout)
            """For the thread that writes checkpoints."""
            self.mesh = _mesh(device, self.num_parts, tensor_parallel)
            for group in (None, self._control, self.background):
                dist.all_reduce(torch.zeros(1), group=group)  # connects
            for group in self.mesh.get_all_groups():
                _set_pg_timeout(timeout, group)
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        except RuntimeError as error:
            raise OtherRankLost(f"{rank}: the ranks could not connect: {_line(error)}") from error
        self._links = self._own_links(before)

    def _meet(self, listener: socket.socket | None) -> TCPStore:
        """Returns the store of all ranks, once all are there."""
        place, wait = self.place, timedelta(seconds=self.timeout_s)
        try:
            store = TCPStore(
                place.host,
                place.port,
                self.size,
                is_master=self.rank == 0,
                timeout=wait,
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        except (RuntimeError, OSError) as error:
            verb = "listen at" if self.rank == 0 else "reach rank 0 at"
            raise OtherRankLost(
                f"{place} cannot {verb} {place.address} within {self.timeout_s:g} s: {_line(error)}"
            ) from error
        store.set(f"joined/{self.rank}", "1")
        keys = {r: f"joined/{r}" for r in range(self.size)}
        end = time.monotonic() + self.timeout_s
        while missing := [r for r, key in keys.items() if not store.check([key])]:
            if time.monotonic() > end:
                raise OtherRankLost(
                    f"{place}: {_ranks(missing)} did not come to {place.address} within "
                    f"{self.timeout_s:g} s"
                )
            time.sleep(0.02)
        return store

    def share(self, value: T) -> list[T]:
        """Returns the values of all ranks, by rank."""
        self._note_progress()
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def numbers(self, value: float) -> list[float]:
        """`share` of a number, which costs less."""
        self._note_progress()
        found = torch.empty(self.size, dtype=torch.float64)
        own = torch.tensor([value], dtype=torch.float64)
        dist.all_gather_into_tensor(found, own, group=self._control)
        return [float(number) for number in found]

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks on rank 0, and [] elsewhere."""
        self._note_progress()
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._control)
        return values or []

    def sum_(self, tensors: list[torch.Tensor]) -> None:
        """Replace small tensors by their sums over the ranks."""
        for tensor in tensors:
            total = tensor.detach().cpu()
            dist.all_reduce(total, group=self._control)
            tensor.copy_(total)

    def jointly(self, work: Callable[[], T]) -> T:
        """Do `work`, which has no collective, on all ranks.

        Errors: where a rank fails, all ranks raise its error, with its number.
        """
        outcome, error = None, None
        try:
            outcome = work()
        except Exception as caught:
            error = caught
        told = self.share(None if error is None else (type(error).__name__, str(error)))
        failed = {r: fault for r, fault in enumerate(told) if fault is not None}
        if not failed:
            return outcome  # type: ignore[return-value]
        first = min(failed)
        if error is not None and len(set(told)) == 1:
            raise self.agree(error)
        kind, text = failed[first]
        where = "" if len(failed) == self.size else f"rank {first} of {self.size}: "
        raise self.agree(_KINDS.get(kind, TrainingError)(where + text)) from error

    def agree(self, error: Exception) -> Exception:
        """Returns an error that all ranks raise now: it does not break the group."""
        self._agreed = error
        return error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context of a method that all ranks call.

        Errors: OtherRankLost where another rank left, or did not answer in time.
        """
        if self.broken:
            raise OtherRankLost(f"{self.place} has lost the other ranks: {self._first_fault()}")
        try:
            yield
        except BaseException as error:
            if error is self._agreed:
                raise
            self.broken = True
            lost = isinstance(error, RuntimeError) and LOST.search(str(error))
            fault = self._leave(self._loss(error) if lost else f"{self.place} left: {_told(error)}")
            if not lost:
                raise
            raise OtherRankLost(fault) from error

    def _loss(self, error: BaseException) -> str:
        """Describes a failed collective."""
        time.sleep(0.2)  # for the error of the rank that left
        late = []
        if TIMED_OUT.search(str(error)):
            with suppress(RuntimeError):
                late = [r for r in range(self.size) if self._progress(r) < self._count]
            names = _ranks(late) if late else "a rank"
            return f"no answer from {names} of {self.size} for {self.timeout_s:g} s"
        gone = sorted({link.rank for link in self._links if not link.is_open()})
        names = f"{_ranks(gone)} of {self.size}" if gone else "another rank"
        return f"{names} closed the connection: it ended, or was killed"

    def _note_progress(self) -> None:
        self._count += 1
        self._store.set(f"at/{self.rank}", str(self._count))

    def _progress(self, rank: int) -> int:
        key = f"at/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _leave(self, fault: str) -> str:
        """Note the fault unless there is an earlier one, which is returned; cut the connections."""
        first = fault
        with suppress(RuntimeError):  # rank 0, which has the store, may be gone
            first = self._store.compare_set("fault", "", fault).decode()
        for link in self._links:
            link.shut_down()
        return first

    def _first_fault(self) -> str:
        with suppress(RuntimeError):
            if self._store.check(["fault"]):
                return str(self._store.get("fault").decode())
        return "a collective failed"

    def _own_links(self, before: set[int]) -> list[_Link]:
        """Returns the connections to the other ranks, which gloo hides: the new sockets whose two
        addresses another rank has too."""
        own = {fd: ends for fd in _sockets() - before if (ends := _ends(fd))}
        every = self.share(list(own.values()))
        theirs = {(b, a): r for r, links in enumerate(every) for a, b in links if r != self.rank}
        return [_Link(theirs[e], fd, e) for fd, e in own.items() if e in theirs]

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self.broken = True
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class _Link:
    """A connection to a rank: the descriptor of its socket, and both addresses."""

    rank: int
    descriptor: int
    ends: tuple[Address, Address]

    def is_open(self) -> bool:
        """False once the other rank has closed it, also where gloo has closed it since."""
        if _ends(self.descriptor) != self.ends:
            return False
        with suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as connection:
            try:
                return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
            except BlockingIOError:
                return True
        return False

    def shut_down(self) -> None:
        """End the connection, unless its descriptor is another's by now."""
        if _ends(self.descriptor) == self.ends:
            with suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _mesh(device: torch.device, num_parts: int, ways: int) -> DeviceMesh:
    if ways == 1:
        return init_device_mesh(device.type, (num_parts,), mesh_dim_names=("dp",))
    return init_device_mesh(device.type, (num_parts, ways), mesh_dim_names=("dp", "tp"))


def _sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            if S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
    return found


def _ends(fd: int) -> tuple[Address, Address] | None:
    """Returns both addresses of a TCP connection."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            return connection.getsockname()[:2], connection.getpeername()[:2]
    return None


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _told(error: BaseException) -> str:
    text = _line(error)
    return text if isinstance(error, LudusError) else f"{type(error).__name__}: {text}"
