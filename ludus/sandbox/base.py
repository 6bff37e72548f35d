"""The sandbox protocol: code in, what it printed and wrote out.

    async with sandbox:
        result = await sandbox.run(Code("print(1 + 1)", "python"))
        result.stdout       '2\\n'

A session keeps an interpreter's state from one run to the next:

    await sandbox.run(Code("x = 3", "python"), session="episode-7")
    await sandbox.run(Code("print(x)", "python"), session="episode-7")
    await sandbox.close_session("episode-7")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self


class RunStatus(StrEnum):
    """End of a run. A failed compilation is an `error`, with the compiler's text in `stderr`."""

    FINISHED = "finished"  # with exit code 0
    ERROR = "error"  # with another exit code, or killed by a signal
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run.

    `run_s` and `compile_s`: seconds of wall time. `memory_mb`: of all processes together where the
    machine lets the sandbox bound that, else of each. `num_processes`: processes and threads.
    `disk_mb`: of the files that the run writes, and of those in `Code.fetch` together; those beyond
    are left out, and the status is `output_limit`. `output_bytes`: of stdout and of stderr each;
    what exceeds it is cut, and the run is stopped.
    """

    run_s: float = 10.0
    compile_s: float = 10.0
    memory_mb: int = 512
    num_processes: int = 32
    disk_mb: int = 64
    output_bytes: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Code:
    """Code to run.

    `files` are written into the working folder before the run, by relative path; `fetch` names
    those to read after it. `stdin` is the standard input.
    """

    text: str
    language: str = "python"
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class RunResult:
    """Results of a run.

    `stdout` and `stderr` are UTF-8; bytes that are not are replaced. `exit_code` is negative for a
    signal that ended the run, and None where a limit did. `seconds` of wall time, without the
    compilation's `compile_seconds`. `files` holds those of `Code.fetch` that exist.
    """

    status: RunStatus
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    compile_seconds: float | None = None
    compile_failed: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)


class Sandbox(ABC):
    """Runs untrusted code.

    Errors of `run`: ConfigError for a language that it does not have, and for files that cannot be
    written (a path that leaves the working folder, too many bytes); ToolError where the sandbox
    itself failed (no worker, a lost server): the code is not to blame, so no reward may depend on
    it.
    """

    has_sessions = True

    @abstractmethod
    async def run(
        self, code: Code, limits: Limits | None = None, *, session: str | None = None
    ) -> RunResult:
        """Run code. With `session`, in the interpreter of that name, which is made at its first
        run; a run that exceeds a limit ends the interpreter, and its state is lost."""

    @abstractmethod
    async def close_session(self, session: str) -> None:
        """End a session's interpreter; nothing happens if there is none."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:  # noqa: B027 - not every sandbox holds something
        """Stop all that runs, and release what the sandbox holds."""
