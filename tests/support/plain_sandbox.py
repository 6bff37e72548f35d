"""A sandbox without walls for the tests' own code: real interpreters, with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE

from ludus.core.errors import ToolError
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus, Sandbox

DRIVER = r"""
import contextlib, io, json, sys, traceback
space = {"__name__": "__main__"}
for line in sys.stdin:
    out, err, status = io.StringIO(), io.StringIO(), "finished"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(json.loads(line), space)
        except BaseException:
            traceback.print_exc()
            status = "error"
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""


class PlainSandbox(Sandbox):
    """Python only; keeps the time limit. `broken`: each run fails as a lost sandbox does."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.sessions: dict[str, asyncio.subprocess.Process] = {}

    async def run(
        self, code: Code, limits: Limits | None = None, *, session: str | None = None
    ) -> RunResult:
        if self.broken:
            raise ToolError("no worker is left")
        process = self.sessions.get(session or "")
        if process is None:
            text = code.text if session is None else DRIVER
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-c", text, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=10**8
            )
            if session is not None:
                self.sessions[session] = process
        try:
            async with asyncio.timeout((limits or Limits()).run_s):
                if session is not None:
                    return await self._line(process, code)
                out, err = await process.communicate(code.stdin)
        except TimeoutError:
            self.sessions.pop(session or "", None)
            await stop(process)
            return RunResult(RunStatus.TIME_LIMIT)
        status = RunStatus.ERROR if process.returncode else RunStatus.FINISHED
        texts = [text.decode("utf-8", "replace") for text in (out, err)]
        return RunResult(status, *texts, exit_code=process.returncode)

    async def _line(self, process: asyncio.subprocess.Process, code: Code) -> RunResult:
        """Runs code in the interpreter of a session."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(code.text).encode() + b"\n")
        status, out, err = json.loads(await process.stdout.readline())
        return RunResult(RunStatus(status), out, err, exit_code=int(status != "finished"))

    async def close_session(self, session: str) -> None:
        if process := self.sessions.pop(session, None):
            await stop(process)

    async def close(self) -> None:
        for session in list(self.sessions):
            await self.close_session(session)


class LostSandbox(PlainSandbox):
    def __init__(self) -> None:
        super().__init__(broken=True)


async def stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()
