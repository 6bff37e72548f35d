"""Runs an engine's server, vLLM's or SGLang's, as a child process.

The server listens on a Unix socket in a private folder, so there are no port conflicts and no
access by other users. Its processes form a process group. It holds one end of a pipe and stops when
the other end is closed, so it ends with its parent process even after a crash.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx

from ludus.core.errors import ConfigError, LudusError
from ludus.core.system.processes import started

NUM_LOG_LINES = 12
BASE_URL = "http://server"
_PROGRESS_BAR = re.compile(r"\d% Completed \||\d%\|")
_ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: .")
_VARIABLES = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


def require_package(python: str, package: str, engine: str) -> None:
    """Check that `python` exists and has the package of an engine. Errors: ConfigError."""
    script = f"import importlib.util as u; raise SystemExit(not u.find_spec('{package}'))"
    command = [python, "-c", script]
    try:
        missing = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode
    except OSError as error:
        raise ConfigError(f"sampler.args.python: {python}: {error.strerror}") from None
    if missing:
        raise ConfigError(
            f"sampler.args.python: {python} has no {engine}; `make {package}` creates an "
            "environment with it"
        )


class ServerProcess:
    """A server process of an engine; subclasses name the engine and its program.

    The program takes `--uds SOCKET` and flags of the engine.

    Args:
        python: a Python with the engine.
        flags: flags of the engine's server.
        environment: variables added to those of this process.
        log: file for the server's output.
    """

    engine: ClassVar[str]
    """Name of the engine in messages."""
    program: ClassVar[Path]
    """Runs inside the engine's environment; its folder is on the path there."""
    variables: ClassVar[Mapping[str, str]]
    """Environment variables of the engine."""
    ready_route: ClassVar[str] = "/health"
    """It succeeds once the server takes turns."""

    def __init__(
        self, python: str, flags: Sequence[str], environment: dict[str, str], log: Path
    ) -> None:
        prefix = f"ludus-{self.engine.lower()}-"
        self._folder = Path(tempfile.mkdtemp(prefix=prefix))  # socket paths must be short
        self.socket = str(self._folder / "socket")
        self.log = log
        own = {"PYTHONPATH": str(self.program.parent), **_VARIABLES, **self.variables}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, str(self.program), "--uds", self.socket, *flags],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own, **environment},
                start_new_session=True,
            )
        started(self._process.pid, f"{self.engine} server")
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=self.socket), base_url=BASE_URL, timeout=None
        )
        atexit.register(self.stop)

    def client(self) -> httpx.AsyncClient:
        """Returns a client for one turn: its connections are closed in the event loop that made
        them, and several loops may use a sampler."""
        transport = httpx.AsyncHTTPTransport(uds=self.socket, verify=False)  # Unix socket: no TLS
        return httpx.AsyncClient(
            transport=transport, base_url=BASE_URL, timeout=None, trust_env=False
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_up(self, deadline_s: float, cancelled: threading.Event) -> None:
        """Wait until the server responds. Errors: LudusError, with the server stopped, where it
        dies, does not respond within `deadline_s` seconds, or `cancelled` is set."""
        until = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self._is_listening() and self._is_ready():
                    return
            if not self.alive:
                code = self._process.returncode
                self.stop()
                message = f"{self.engine} exited during startup (code {code})"
                raise LudusError(self.explain(message))
            if time.monotonic() > until:
                self.stop()
                limit = f"sampler.args.startup_deadline_s = {deadline_s:g} s"
                raise LudusError(self.explain(f"{self.engine} did not respond within {limit}"))
            if cancelled.wait(0.1):
                self.stop()
                raise LudusError(f"the startup of {self.engine} was cancelled")

    def _is_ready(self) -> bool:
        return self._client.get(self.ready_route, timeout=5).is_success

    def _is_listening(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return not connection.connect_ex(self.socket)

    def post(self, path: str, body: Any = None) -> Any:
        """Send a request, blocking; returns the JSON response.

        Errors: httpx.TransportError where the server is gone, LudusError for an error status or
        an answer that is not JSON.
        """
        response = self.send(path, body)
        if not response.is_success:
            status = f"{self.engine} answered {response.status_code} to {path}"
            raise LudusError(self.explain(status))
        try:
            return response.json() if response.content else None
        except ValueError:
            answer = f"{self.engine} did not answer {path} with JSON"
            raise LudusError(self.explain(answer)) from None

    def send(self, path: str, body: Any = None) -> httpx.Response:
        """Send a request, blocking; returns any response. Errors: httpx.TransportError."""
        return self._client.post(path, json=body)

    def explain(self, message: str) -> str:
        """Returns the message, followed by errors from the server's log and its last lines."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return message
        lines = [s for s in text.splitlines() if s.strip() and not _PROGRESS_BAR.search(s)]
        last = lines[-NUM_LOG_LINES:]
        errors = list(dict.fromkeys(line for line in lines if _ERROR_LINE.search(line)))
        excerpt = [line[:300] for line in [*[e for e in errors if e not in last][-3:], *last]]
        return "\n    ".join([f"{message}; end of {self.log}:", *excerpt])

    def stop(self) -> None:
        """Kill all processes of the server. Idempotent."""
        atexit.unregister(self.stop)
        self._client.close()
        with contextlib.suppress(ProcessLookupError):  # the group may outlive its leader
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)
