"""A process with verifiers that plays the episodes of a taskset, spoken to over pipes.

verifiers pins packages that ludus has in other versions, so it lives in an environment of its own
(`make verifiers`). A process takes seconds to start and plays many episodes at once, so all
episodes of the same arguments share one. It ends with this process, in whatever way, since it reads
from a pipe of this process.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludus.core.errors import ConfigError, EnvError, EnvLost

SIDE = Path(__file__).parent / "verifiers_side" / "ludus_verifiers_side.py"
HOW = "`make verifiers` creates an environment with it"
START_S = 180.0
NUM_LOG_LINES = 20
MAX_ANSWER = 64 * 2**20
"""Bytes of an answer."""

_PROCESSES: dict[str, VerifiersProcess] = {}
_LOCK = threading.Lock()


def process_of(python: str, arguments: Mapping[str, Any]) -> VerifiersProcess:
    """The running process of these arguments; started if there is none. Errors: ConfigError."""
    key = json.dumps([python, arguments], sort_keys=True)
    with _LOCK:
        found = _PROCESSES.get(key)
        if found is None or not (found.is_alive or found.is_refused):
            found = _PROCESSES[key] = VerifiersProcess(python, arguments)
        return found


def _after_fork() -> None:
    """A child has no thread that reads the answers: it starts processes of its own."""
    global _LOCK
    _LOCK = threading.Lock()
    _PROCESSES.clear()


os.register_at_fork(after_in_child=_after_fork)


class VerifiersProcess:
    """The process, and the calls that wait for its answers. Any thread may call."""

    def __init__(self, python: str, arguments: Mapping[str, Any]) -> None:
        path = Path(python).expanduser()
        if not path.exists():
            raise ConfigError(f"python: there is no {python}; {HOW}")
        self._waiting: dict[int, Future[Any]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._log: deque[str] = deque(maxlen=NUM_LOG_LINES)
        self._over = False
        self.started = self._expect(0)
        try:
            self._process = subprocess.Popen(
                [str(path.absolute()), str(SIDE), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"python: {python} cannot be run: {error.strerror}; {HOW}") from None
        for work in (self._read_answers, self._read_log):
            threading.Thread(target=work, name="ludus-verifiers", daemon=True).start()
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._over

    @property
    def is_refused(self) -> bool:
        """True if the arguments are wrong: another process would refuse them too."""
        return self.started.done() and isinstance(self.started.exception(), ConfigError)

    def ask(self, op: str, timeout_s: float = START_S, **fields: Any) -> Any:
        """The result of a call; blocks. Errors: as `call`."""
        try:
            self.started.result(timeout_s)
            return self._send(op, fields).result(timeout_s)
        except TimeoutError:
            raise EnvLost(f"verifiers gave no answer to {op} within {timeout_s:g} s") from None

    async def call(self, op: str, **fields: Any) -> Any:
        """The result of a call. Errors: EnvError, EnvLost; ConfigError for wrong arguments."""
        await asyncio.wrap_future(self.started)
        return await asyncio.wrap_future(self._send(op, fields))

    def tell(self, op: str, **fields: Any) -> None:
        """Make a call whose result is not needed."""
        with suppress(EnvError):
            self._send(op, fields)

    def stop(self) -> None:
        """Kill the process and what it started. Idempotent."""
        atexit.unregister(self.stop)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, op: str, fields: Mapping[str, Any]) -> Future[Any]:
        with self._lock:
            self._number += 1
            number = self._number
        answer = self._expect(number)
        line = json.dumps({"id": number, "op": op, **fields}).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (OSError, ValueError):
            self._waiting.pop(number, None)
            raise self._lost() from None
        return answer

    def _expect(self, number: int) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a caller that gives up does not cancel the call
        self._waiting[number] = future
        return future

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            while line := self._process.stdout.readline(MAX_ANSWER):
                answer = json.loads(line)
                waiting = self._waiting.pop(answer["id"], None)
                if waiting is None:
                    continue
                if (error := answer.get("error")) is None:
                    waiting.set_result(answer.get("result"))
                else:
                    kind = ConfigError if error["type"] == "config" else EnvError
                    waiting.set_exception(kind(error["message"]))
        self._over = True
        self.stop()
        while self._waiting:
            self._waiting.popitem()[1].set_exception(self._lost())
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as log:
            for line in log:
                self._log.append(line.decode(errors="replace").rstrip()[:300])

    def _lost(self) -> EnvError:
        told = "".join(f"\n    {line}" for line in self._log if line)
        if "No module named 'verifiers'" in told or "No module named 'aiohttp'" in told:
            return EnvError(f"python: the interpreter has no verifiers; {HOW}")
        return EnvLost(f"the process of verifiers ended; the end of its output:{told or ' (none)'}")
