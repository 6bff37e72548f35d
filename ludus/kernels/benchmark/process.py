"""A process that can die, hang or talk nonsense, and is then replaced."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludus.core.errors import ToolError
from ludus.core.system.processes import started
from ludus.sandbox.zygotes import receive, send

MODULE = "ludus.kernels.benchmark.worker"
MAX_ANSWER = 4 << 30


class GoneError(Exception):
    """The process gave no answer: it `died`, was `late`, or its answer is `malformed`."""

    def __init__(self, how: str, text: str) -> None:
        super().__init__(text)
        self.how = how


class Process:
    """One call at a time; after a call without a proper answer, the next has a new process.

    Args:
        module: a module of Python whose `main` serves the socket given as its argument.
    """

    def __init__(self, module: str = MODULE) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._turn = asyncio.Lock()
        self.starts = 0

    async def ask(
        self, job: Mapping[str, Any], blobs: Sequence[bytes], seconds: float
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a job, and wait for its answer.

        Errors: GoneError without an answer.
        """
        async with self._turn:
            sock = self._sock or self._start()
            try:
                async with asyncio.timeout(seconds):
                    await send(sock, job, blobs)
                    return await receive(sock, MAX_ANSWER)
            except TimeoutError:
                self._end()
                raise GoneError("late", f"no answer after {seconds:g} s") from None
            except (ToolError, OSError) as error:
                how, text = self._ended(error)
                raise GoneError(how, text) from None
            except BaseException:
                self._end()
                raise

    def retire(self) -> None:
        """End the process: the next call has a new one."""
        self._end()

    def _ended(self, error: Exception) -> tuple[str, str]:
        process = self._process
        code: int | None = None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(0.5)
        self._end()
        if code is None:
            return "malformed", str(error)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return "died", f"its process ended {how}"

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        started(self._process.pid, "kernels")
        ours.setblocking(False)
        self._sock = ours
        self.starts += 1
        return ours

    def _end(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def close(self) -> None:
        """End the process."""
        async with self._turn:
            self._end()
