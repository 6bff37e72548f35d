"""Runs vLLM's server as a child process.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from ludus.core.errors import ConfigError, LudusError

SIDE = Path(__file__).parent / "vllm_side" / "ludus_vllm_side.py"
NUM_LOG_LINES = 12
_ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: .")


def require_vllm(python: str) -> None:
    """Check that `python` exists and has vLLM. Errors: ConfigError."""
    script = "import importlib.util as u; raise SystemExit(not u.find_spec('vllm'))"
    command = [python, "-c", script]
    try:
        missing = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode
    except OSError as error:
        raise ConfigError(f"sampler.args.python: {python}: {error.strerror}") from None
    if missing:
        raise ConfigError(
            f"sampler.args.python: {python} has no vLLM; `make vllm` creates an environment with it"
        )


class VllmServer:
    """A vLLM server process.

    Args:
        python: a Python with vLLM.
        flags: flags of `vllm serve`.
        environment: variables added to those of this process.
        log: file for the server's output.
    """

    def __init__(
        self, python: str, flags: Sequence[str], environment: dict[str, str], log: Path
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ludus-vllm-"))  # socket paths must be short
        self.socket = str(self._folder / "socket")
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, str(SIDE), "--uds", self.socket, *flags],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT, **environment},
                start_new_session=True,
            )
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=self.socket), base_url="http://vllm", timeout=None
        )
        atexit.register(self.stop)

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
                if self._is_listening() and self._client.get("/health", timeout=5).is_success:
                    return
            if not self.alive:
                code = self._process.returncode
                self.stop()
                raise LudusError(self.explain(f"vLLM exited during startup (code {code})"))
            if time.monotonic() > until:
                self.stop()
                limit = f"sampler.args.startup_deadline_s = {deadline_s:g} s"
                raise LudusError(self.explain(f"vLLM did not respond within {limit}"))
            if cancelled.wait(0.1):
                self.stop()
                raise LudusError("the startup of vLLM was cancelled")

    def _is_listening(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return not connection.connect_ex(self.socket)

    def post(self, path: str, body: Any = None) -> Any:
        """Send a request, blocking; returns the JSON response.

        Errors: httpx.TransportError where the server is gone, LudusError for an error status.
        """
        response = self._client.post(path, json=body)
        if not response.is_success:
            raise LudusError(self.explain(f"vLLM answered {response.status_code} to {path}"))
        return response.json() if response.content else None

    def explain(self, message: str) -> str:
        """Returns the message, followed by errors from the server's log and its last lines."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return message
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


_ENVIRONMENT = {
    "PYTHONPATH": str(SIDE.parent),
    "VLLM_SERVER_DEV_MODE": "1",  # enables the routes to pause, load weights and resume
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
