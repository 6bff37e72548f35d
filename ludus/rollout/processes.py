"""Rollout processes: each plays a part of the groups, with a sampler and environments of its own.

    this process     groups 0 2 4 ...     samples, steps environments, keeps books
    process 1        groups 1 3 5 ...     the same, at the same time

Python runs on one core of a process, so a step's episodes take half the time with two. Results do
not depend on the number of processes: seeds derive from the names of the episodes, and a token's
results do not depend on its batch. Only samplers with that property may be used.

Consumes groups that are laid out, and the policy's weights; waits for all processes; is unblocked
by the slowest; produces the groups' trajectories, in place. If a process dies, its groups are
played here, with the same result, and the run continues without it.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ludus.config.schema import RolloutConfig, RunConfig
from ludus.core.errors import described
from ludus.core.types import Group, Trajectory
from ludus.rollout.threads import WorkerThread
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

END_S = 5.0
"""Seconds that a process has to end after its connection is closed."""


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


@dataclass(frozen=True, slots=True)
class Share:
    """The groups that one process plays."""

    stage: str
    config: RolloutConfig
    groups: list[Group]
    version: int


@dataclass(frozen=True, slots=True)
class Played:
    """The trajectories of a share, a list per group; what the sampler has computed for them."""

    trajectories: list[list[Trajectory]]
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
            raise reply
        assert isinstance(reply, Played)
        return reply

    def _ask(self, share: Share) -> Any:
        try:
            if not self._ready:
                if (fault := self._connection.recv()) is not None:
                    raise ProcessDied(str(fault))
                self._ready = True
            self._connection.send(share)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            code = self._process.poll()
            raise ProcessDied(f"it ended with code {code}" if code else described(error)) from error

    def close(self) -> None:
        """End the process; it may be playing. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):
            self._connection.close()


@dataclass(slots=True)
class RolloutProcesses:
    """Divides groups among this process and others.

    Args:
        processes: the others.
        prepare: called before the groups are played; hands the weights over, returns their version.
        count: called with the counters of a share that another process played.
        around: context of the playing: this process computes on its part of the cores.
    """

    processes: list[RolloutProcess]
    prepare: Callable[[], int]
    count: Callable[[dict[str, int]], None]
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    async def play(
        self,
        groups: Sequence[Group],
        stage: str,
        config: RolloutConfig,
        play_here: Callable[[Sequence[Group], RolloutConfig], Awaitable[None]],
        on_episode: Callable[[Trajectory], None] | None,
    ) -> None:
        """Play all groups. Errors: the first that concerns the run; no process is left then."""
        size = 1 + len(self.processes)
        config = config.model_copy(update={"concurrency": -(-config.concurrency // size)})
        others = [g for g in groups if _can_leave(g)]
        shares = [others[number::size] for number in range(1, size)]
        away = {g.id for share in shares for g in share}
        version = self.prepare()
        asked = [
            asyncio.create_task(process.play(Share(stage, config, share, version)))
            for process, share in zip(self.processes, shares, strict=True)
            if share
        ]
        busy = [(p, s) for p, s in zip(self.processes, shares, strict=True) if s]
        lost: list[Group] = []
        try:
            with self.around():
                await play_here([g for g in groups if g.id not in away], config)
            for (process, share), reply in zip(busy, asked, strict=True):
                try:
                    played = await reply
                except ProcessDied as error:
                    lost += share
                    self._drop(process, error)
                    continue
                self._take(share, played, on_episode)
        except BaseException:
            for reply in asked:
                reply.cancel()
            self.close()  # they may be playing still
            await asyncio.gather(*asked, return_exceptions=True)
            raise
        if lost:
            await play_here(lost, config)

    def _take(
        self,
        share: Sequence[Group],
        played: Played,
        on_episode: Callable[[Trajectory], None] | None,
    ) -> None:
        self.count(played.counters)
        for group, trajectories in zip(share, played.trajectories, strict=True):
            group.trajectories = trajectories
            if on_episode is not None:
                for trajectory in trajectories:
                    on_episode(trajectory)

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


def _can_leave(group: Group) -> bool:
    """True if another process can play the group: its task brings no judge and no environment."""
    return group.task.judge is None and group.task.env is None


def _has_fd(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
