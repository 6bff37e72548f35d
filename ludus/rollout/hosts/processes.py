"""Rollout processes: each plays a part of the groups, with a sampler and environments of its own.

    this process     groups  0 to 11     samples, steps environments, keeps books
    process 1        groups 12 to 23     the same, at the same time
    the first free   groups 24 to 31     one by one

Python runs on one core of a process, so a step's episodes take half the time with two. Results do
not depend on the number of processes, or on who plays what: seeds derive from the names of the
episodes, and a token's results do not depend on its batch. Only samplers with that property may be
used.

Consumes groups that are laid out, and the policy's weights; waits for all processes; is unblocked
by the slowest; produces the groups' trajectories, in place. If a process dies, its groups are
played here, with the same result, and the run continues without it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ludus.config.schema import RolloutConfig, RunConfig
from ludus.core.errors import LudusError, described
from ludus.core.system.processes import terminate
from ludus.core.types import Group, Task, Trajectory
from ludus.rollout.hosts.threads import WorkerThread
from ludus.telemetry.logs import get_logger
from ludus.telemetry.relayed_logs import LogLine, log_again

log = get_logger(__name__)

END_S = 5.0
"""Seconds that a process has to end after its connection is closed."""

POLL_S = 1.0
"""Seconds after which a process without a message is looked at: it may have ended."""

READY_S = 120.0
"""Seconds that a process has to start; it takes 4."""

LATE_S = 60.0
"""Seconds after which a wait for another process' episodes is told."""


COUNTERS = ("num_prefill_tokens", "num_prompt_tokens", "num_decode_tokens")
"""Numbers of a sampler that the processes add up."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts that a rollout process is built from.

    Args:
        folder: the run's.
        threads: of torch.
        path: where modules are found: environments may be the user's.
    """

    config: RunConfig
    folder: Path
    threads: int
    path: list[str]


FIRST = 0.75
"""Part of the groups that is divided beforehand: the rest evens out what episodes of different
lengths, and trajectories on their way between processes, cost."""

MOST_QUEUED = 1000
"""Groups that are not divided beforehand: as integers, they fit into any pipe."""


class Queue:
    """The numbers of the groups that are left, each taken by one process: a pipe of integers."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd, self._write = os.pipe()
            os.set_blocking(fd, False)
        self.fd = fd

    def put(self, numbers: Iterable[int]) -> None:
        """Add up to MOST_QUEUED numbers to an empty queue."""
        os.write(self._write, array("i", numbers).tobytes())

    def take(self) -> int | None:
        """Returns a number that no other process gets; None: none is left."""
        try:
            taken = os.read(self.fd, array("i").itemsize)
        except BlockingIOError:
            return None
        return array("i", taken)[0] if taken else None

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write)


@dataclass(frozen=True, slots=True)
class Share:
    """The groups of a step, and the numbers of those that a process plays before it takes from the
    queue."""

    stage: str
    config: RolloutConfig
    groups: list[Group]
    first: range
    version: int

    def episodes(self, queue: Queue, taken: list[int]) -> Iterator[tuple[Task, Trajectory]]:
        """Yields the episodes that this process plays, when it begins them; adds the numbers of
        their groups to `taken`."""
        for number in chain(self.first, iter(queue.take, None)):
            taken.append(number)
            group = self.groups[number]
            for trajectory in group.trajectories:
                yield group.task, trajectory


@dataclass(frozen=True, slots=True)
class Played:
    """The trajectories that a process has played, by the number of their group; what its sampler
    has computed."""

    trajectories: dict[int, list[Trajectory]]
    counters: dict[str, int]


class ProcessDied(Exception):
    """A rollout process ended, or could not start."""


class RolloutProcess:
    """One process. It starts at once; the first `play` waits until it is ready.

    Args:
        module: its main module; gets the numbers of the connection and of `files` as arguments.
        setup: its first message.
        files: further file descriptors that it inherits.
    """

    def __init__(self, module: str, setup: Any, files: Sequence[int] = ()) -> None:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), *files]
        # In a session of its own, Ctrl-C does not reach it: the step that goes on needs it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_fd(sys.stderr) else subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._ready = False
        with suppress(OSError):  # it died: the first `play` reports it
            self._connection.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def play(self, share: Share) -> Played:
        """Errors: ProcessDied; the error of the share, where it concerns the run."""

        async def ask() -> Any:
            return self._ask(share)

        thread = WorkerThread.take()
        try:
            reply = await thread.run(ask)
        except asyncio.CancelledError:
            thread.retire(None)
            raise
        thread.give_back()
        if isinstance(reply, Exception):
            raise _located(reply)
        assert isinstance(reply, Played)
        return reply

    def _ask(self, share: Share) -> Any:
        try:
            if not self._ready:
                if (fault := self._receive(READY_S)) is not None:
                    raise ProcessDied(str(fault))
                self._ready = True
            self._connection.send(share)
            return self._receive()
        except (EOFError, OSError) as error:
            raise ProcessDied(self._end(error)) from error

    def _receive(self, limit_s: float | None = None) -> Any:
        """The next message that is no log line: those are logged here.

        Errors: EOFError; ProcessDied where there is none within the limit.
        """
        started = time.monotonic()
        while True:
            if self._connection.poll(POLL_S):
                message = self._connection.recv()
                if not isinstance(message, LogLine):
                    return message
                log_again(message, rollout_process=self.pid)
            elif self._process.poll() is not None:  # a process that it forked holds the connection
                raise EOFError
            elif limit_s is not None and time.monotonic() - started > limit_s:
                raise ProcessDied(f"it was not ready after {limit_s:g} s")

    def _end(self, error: Exception) -> str:
        """The process' end, after an error of the connection."""
        try:
            return f"it ended with code {self._process.wait(POLL_S)}"
        except subprocess.TimeoutExpired:
            return described(error)

    def close(self) -> None:
        """End the process; it may be playing. Idempotent."""
        terminate(self._process, END_S)
        with suppress(OSError):
            self._connection.close()


@dataclass(slots=True)
class RolloutProcesses:
    """Divides groups among this process and others.

    Args:
        processes: the others.
        queue: its `fd` is inherited by the others.
        prepare: called before the groups are played; hands the weights over, returns their version.
        count: called with the counters of what another process played.
        around: context of the playing: this process computes on its part of the cores.
    """

    processes: list[RolloutProcess]
    queue: Queue
    prepare: Callable[[], int]
    count: Callable[[dict[str, int]], None]
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    async def play(
        self,
        groups: Sequence[Group],
        stage: str,
        config: RolloutConfig,
        play_here: Callable[[Iterable[tuple[Task, Trajectory]], RolloutConfig], Awaitable[None]],
        on_episode: Callable[[Trajectory], None] | None,
    ) -> None:
        """Play all groups. Errors: the first that concerns the run; no process is left then."""
        if not self.processes:
            await play_here(episodes_of(groups), config)
            return
        shared = [g for g in groups if _can_leave(g)]
        own = [g for g in groups if not _can_leave(g)]
        total, size = len(shared), 1 + len(self.processes)
        first = max(int(FIRST * total), total - MOST_QUEUED) // size
        # No more at the same time than were divided: else the first to start takes all the rest.
        begun = max(sum(len(g.trajectories) for g in [*own, *shared[:first]]), 1)
        concurrency = min(-(-config.concurrency // size), begun)
        config = config.model_copy(update={"concurrency": concurrency})
        version = self.prepare()
        shares = [
            Share(stage, config, shared, range(n * first, (n + 1) * first), version)
            for n in range(size)
        ]
        self.queue.put(range(size * first, total))
        asked = [
            asyncio.create_task(process.play(share))
            for process, share in zip(self.processes, shares[1:], strict=True)
        ]
        taken: list[int] = []
        left = dict(enumerate(shared))
        try:
            with self.around():
                shared_here = shares[0].episodes(self.queue, taken)
                await play_here(chain(episodes_of(own), shared_here), config)
            for process, reply in zip([*self.processes], asked, strict=True):
                try:
                    played = await _awaited(process, reply)
                except ProcessDied as error:
                    self._drop(process, error)
                    continue
                self.count(played.counters)
                for number, trajectories in played.trajectories.items():
                    left.pop(number).trajectories = trajectories
                    if on_episode is not None:
                        for trajectory in trajectories:
                            on_episode(trajectory)
        except BaseException:
            for reply in asked:
                reply.cancel()
            self.close()  # they may be playing still
            await asyncio.gather(*asked, return_exceptions=True)
            raise
        for number in taken:
            del left[number]
        if left:  # a process died
            await play_here(episodes_of(left.values()), config)

    def _drop(self, process: RolloutProcess, error: ProcessDied) -> None:
        reason = str(error)
        log.warning("a rollout process died: its episodes are played here", reason=reason)
        self.processes = [other for other in self.processes if other is not process]
        process.close()

    def close(self) -> None:
        """End all processes; groups are played here from then on. Idempotent."""
        processes, self.processes = self.processes, []
        for process in processes:
            process.close()
        if processes:
            self.queue.close()


async def _awaited(process: RolloutProcess, reply: asyncio.Task[Played]) -> Played:
    """The reply of a process; a long wait is told."""
    await asyncio.wait([reply], timeout=LATE_S)
    if not reply.done():
        log.warning("waiting for a rollout process", rollout_process=process.pid, seconds=LATE_S)
    return await reply


def episodes_of(groups: Iterable[Group]) -> Iterator[tuple[Task, Trajectory]]:
    """The episodes of groups that are laid out."""
    return ((group.task, t) for group in groups for t in group.trajectories)


def _can_leave(group: Group) -> bool:
    """True if another process can play the group: its task brings no judge and no environment."""
    return group.task.judge is None and group.task.env is None


def _located(error: Exception) -> Exception:
    """The error of another process, which says where it happened: here, nothing failed."""
    if isinstance(error, LudusError):
        where = "in a process that plays beside the run's own; with rollout.processes: 1, none does"
        error.args = (f"{error} ({where})",)
    return error


def _has_fd(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
