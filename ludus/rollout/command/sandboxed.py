"""Programs in the jail: nothing of the network but the gateway, no files but their own.

The jail has no network. Its process 1 forwards 127.0.0.1:PORT to the gateway's Unix socket, so SDKs
need only a URL.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ludus.core.errors import ConfigError, EnvError, EpisodeTimeout
from ludus.rollout.command.base import (
    LOOPBACK,
    OUTCOME_FILE,
    TASK_FILE,
    Ended,
    Run,
    too_long,
    too_much,
)
from ludus.sandbox.base import Code, Limits, RunStatus
from ludus.sandbox.jail import Jail

if TYPE_CHECKING:
    from ludus.rollout.workflow import Model

T = TypeVar("T")

PORT = 8000
"""Port of the gateway in the jail, where each program has a loopback device of its own."""
JAIL, WORK = "/work", "work"
"""The jail's folder, and in it the working folder of the program."""
MAX_RUNS = 4096
"""Programs at the same time; `rollout.concurrency` sets fewer."""
FOREVER_S = 1e6
"""The episode's deadline ends a program that has no limit of its own."""


class SandboxedProgram:
    """Runs programs in a jail. `folder` is copied for each.

    Errors: ConfigError where the jail does not work here, or the folder does not fit.
    """

    def __init__(
        self,
        folder: Path | None,
        packages: Sequence[str],
        memory_mb: int,
        num_processes: int,
        disk_mb: int,
    ) -> None:
        self._files, self._executables = read_folder(folder, disk_mb) if folder else ({}, [])
        self._packages, self._memory_mb = list(packages), memory_mb
        self._num_processes, self._disk_mb = num_processes, disk_mb
        self._jail: Jail | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._make_jail()  # its errors belong to the configuration

    async def run(self, model: Model, run: Run) -> Ended:
        return await model.at_home(self._run(model, run))

    async def close(self) -> None:
        jail, self._jail = self._jail, None
        for task in self._running:  # of episodes that were cancelled: their groups go first
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if jail is not None:
            await jail.close()

    def _make_jail(self) -> Jail:
        return Jail(packages=self._packages, warm=False, max_runs=MAX_RUNS)

    async def _run(self, model: Model, run: Run) -> Ended:
        if self._jail is None:
            if model.socket is None:
                raise EnvError("this episode has no gateway, which a command needs")
            self._jail = self._make_jail()
            self._jail.forward(PORT, model.socket)
        limits = Limits(
            run_s=run.timeout_s or FOREVER_S,
            memory_mb=self._memory_mb,
            num_processes=self._num_processes,
            disk_mb=self._disk_mb,
            output_bytes=run.max_output,
        )
        url = f"http://127.0.0.1:{PORT}{urlsplit(model.base_url).path}"
        command, env = run.placed(
            base_url=url, task=f"{JAIL}/{TASK_FILE}", python=self._jail.python
        )
        env = {"NO_PROXY": LOOPBACK, **env}
        code = Code(
            self._script(command, env),
            "bash",
            run.stdin,
            {TASK_FILE: run.task, **self._files},
            [f"{WORK}/{OUTCOME_FILE}"],
        )
        result = await self._noted(self._jail.run(code, limits))
        if result.status is RunStatus.TIME_LIMIT:
            raise EpisodeTimeout(too_long(run.timeout_s))
        stdout, stderr = result.stdout.encode(), result.stderr.encode()
        if result.status is RunStatus.OUTPUT_LIMIT:
            fetched = max(len(stdout), len(stderr)) < run.max_output
            if fetched:
                raise EnvError(f"{OUTCOME_FILE} has more than {self._disk_mb} MB")
            name = "stdout" if len(stdout) >= run.max_output else "stderr"
            raise EnvError(too_much(name, run.max_output))
        if result.status is RunStatus.MEMORY_LIMIT:
            raise EnvError(f"the command needed more than agent.memory_mb = {self._memory_mb}")
        code_or_signal = 1 if result.exit_code is None else result.exit_code
        outcome = result.files.get(f"{WORK}/{OUTCOME_FILE}")
        return Ended(code_or_signal, stdout, stderr, outcome)

    async def _noted(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await work
        finally:
            self._running.discard(task)

    def _script(self, command: Sequence[str], env: Mapping[str, str]) -> str:
        lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
        lines.append(f"mkdir -p {WORK} && cd {WORK}")
        if self._executables:
            lines.append(shlex.join(["chmod", "+x", "--", *self._executables]))
        return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def read_folder(folder: Path, disk_mb: int) -> tuple[dict[str, bytes], list[str]]:
    """The files of a folder by their path in the jail, and the names of those that are programs.

    Errors: ConfigError where they exceed `disk_mb`.
    """
    files: dict[str, bytes] = {}
    executables, size = [], 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        size += path.stat().st_size
        if size > disk_mb << 20:
            raise ConfigError(
                f"agent.folder: {folder} has more than agent.disk_mb = {disk_mb} MB, which a "
                "program's files have together"
            )
        name = str(path.relative_to(folder))
        files[f"{WORK}/{name}"] = path.read_bytes()
        if os.access(path, os.X_OK):
            executables.append(f"./{name}")
    return files, executables
