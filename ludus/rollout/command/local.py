"""Programs on this machine: a process group each, with a folder of its own, both gone at its end.

LocalProgram.run    start, read the output and keep its end, wait, end the group
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.core.errors import EnvError, EpisodeTimeout
from ludus.core.system.processes import end, marked, started
from ludus.rollout.command.base import (
    LOOPBACK,
    MAX_OUTCOME_BYTES,
    OUTCOME_FILE,
    TASK_FILE,
    Ended,
    Run,
    too_long,
    too_much,
)

if TYPE_CHECKING:
    from ludus.rollout.workflow import Model

TERM_GRACE_S = 1.0
"""Seconds from SIGTERM to SIGKILL for a program that is stopped."""
POLL_S = 0.02
"""Seconds between looks at a program where the system has no pidfd."""
READ_BYTES = 1 << 16
KEPT_BYTES = 1 << 14
"""Bytes of the end of an output that are kept."""
NUM_READS = 64
"""Reads of an output after the end; more than a pipe holds."""
MARK = "LUDUS_AGENT_MARK"
"""Environment variable by which processes are found that left their group."""


class LocalProgram:
    """Runs programs with the rights of this process. `folder` is copied for each."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._mark = folder, secrets.token_hex(8)

    async def run(self, model: Model, run: Run) -> Ended:
        place = Path(tempfile.mkdtemp(prefix="ludus-agent-"))
        try:
            return await self._run(model, run, place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    async def close(self) -> None:
        """End processes that left their group, such as daemons."""
        end(marked(self._mark, MARK), signal.SIGKILL, TERM_GRACE_S)

    async def _run(self, model: Model, run: Run, place: Path) -> Ended:
        work, task = place / "work", place / TASK_FILE
        if self._folder is None:
            work.mkdir()
        else:
            shutil.copytree(self._folder, work, symlinks=True)
        task.write_bytes(run.task)
        command, env = run.placed(base_url=model.base_url, task=str(task), python=sys.executable)
        with tempfile.TemporaryFile() as stdin:
            stdin.write(run.stdin)
            stdin.seek(0)
            group = _start(command, self._environment(env), work, stdin.fileno())
        try:
            async with asyncio.timeout(run.timeout_s):
                await group.ended(run.max_output)
        except TimeoutError:
            raise EpisodeTimeout(too_long(run.timeout_s)) from None
        finally:
            await group.end()
        if name := group.exceeds(run.max_output):
            raise EnvError(too_much(name, run.max_output))
        stdout, stderr = (bytes(output.end) for output in group.outputs)
        return Ended(group.process.returncode, stdout, stderr, _read(work / OUTCOME_FILE))

    def _environment(self, own: Mapping[str, str]) -> dict[str, str]:
        env = {**os.environ, **own, MARK: self._mark}
        for name in ("NO_PROXY", "no_proxy"):  # the gateway is not behind the machine's proxy
            env[name] = ",".join(filter(None, [env.get(name), LOOPBACK]))
        return env


@dataclass(slots=True)
class Output:
    """An output: its size so far, and its end."""

    name: str
    fd: int
    size: int = 0
    end: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Read a piece; False if there is none."""
        try:
            piece = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return False
        self.size += len(piece)
        self.end = (self.end + piece)[-KEPT_BYTES:]
        return bool(piece)


@dataclass(slots=True, eq=False)
class Group:
    """A program with the processes that it starts."""

    process: subprocess.Popen[bytes]
    outputs: tuple[Output, Output]
    work: Path

    def exceeds(self, max_output: int) -> str:
        """The output that has more bytes than that, or an empty name."""
        return next((o.name for o in self.outputs if o.size > max_output), "")

    async def ended(self, max_output: int) -> None:
        """Wait until the program has ended, or has written too much."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        handle = os.pidfd_open(self.process.pid) if hasattr(os, "pidfd_open") else None

        def on_output(output: Output) -> None:
            if not output.read():
                loop.remove_reader(output.fd)
            elif output.size > max_output:
                stop.set()

        for output in self.outputs:
            loop.add_reader(output.fd, on_output, output)
        try:
            if handle is not None:
                loop.add_reader(handle, stop.set)
                await stop.wait()
            while handle is None and not stop.is_set() and self.runs():
                await asyncio.sleep(POLL_S)
        finally:
            for output in self.outputs:
                loop.remove_reader(output.fd)
            if handle is not None:
                loop.remove_reader(handle)
                os.close(handle)

    def runs(self) -> bool:
        """True if the program has not ended."""
        if not hasattr(os, "waitid"):
            return self.process.poll() is None
        # Its number stays its own, and its group's, until `wait`.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, options) is None

    async def end(self) -> None:
        """End the program if it still runs, and all processes of its group."""
        try:
            if self.runs():
                self.signal(signal.SIGTERM)
                with suppress(TimeoutError):
                    async with asyncio.timeout(TERM_GRACE_S):
                        await self.ended(sys.maxsize)
        finally:
            self.kill()
            for output in self.outputs:
                for _ in range(NUM_READS):
                    if not output.read():
                        break
                os.close(output.fd)

    def kill(self) -> None:
        """End the group at once."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        _groups.discard(self)

    def signal(self, number: signal.Signals) -> None:
        """Signal the group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _start(command: Sequence[str], env: Mapping[str, str], work: Path, stdin: int) -> Group:
    """Errors: EnvError."""
    readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
    try:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=env,
            stdin=stdin,
            stdout=writers[0],
            stderr=writers[1],
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        for fd in readers:
            os.close(fd)
        long = "; give long prompts on standard input" if _is_too_long(error) else ""
        raise EnvError(f"the command does not start: {error}{long}") from None
    finally:
        for fd in writers:
            os.close(fd)
    for fd in readers:
        os.set_blocking(fd, False)
    group = Group(process, (Output("stdout", readers[0]), Output("stderr", readers[1])), work)
    _groups.add(group)
    started(process.pid, "agent")
    return group


def _is_too_long(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.E2BIG


def _read(path: Path) -> bytes | None:
    """The content of a regular file, cut off beyond the limit; None where there is none."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return file.read(MAX_OUTCOME_BYTES + 1) if regular else None
    except OSError:
        return None


_groups: set[Group] = set()


def _end_all() -> None:
    """At the end of this process, which does not wait for the threads of agents."""
    for group in list(_groups):
        group.signal(signal.SIGKILL)
        shutil.rmtree(group.work.parent, ignore_errors=True)


atexit.register(_end_all)
os.register_at_fork(after_in_child=_groups.clear)
