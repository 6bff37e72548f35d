"""vLLM's server as a child process: started, watched, asked, ended.

It listens on a Unix socket in a folder of its own, so no port can be taken, and nobody else can
reach it. Its processes form a group, which ends with the process that started it, however that one
ends: the server holds one end of a pipe and stops when the other is gone.
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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from ludus.core.errors import ConfigError, LudusError

SIDE = Path(__file__).parent / "vllm_side" / "ludus_vllm_side.py"
NUM_LOG_LINES = 12
_FAULT = re.compile(r"\b\w*(Error|Exception)\b: .")


def require_vllm(python: str) -> None:
    """Refuse a Python that is not there, or has no vLLM. Errors: ConfigError."""
    command = [
        python,
        "-c",
        "import importlib.util as u; raise SystemExit(not u.find_spec('vllm'))",
    ]
    try:
        found = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode
    except OSError as error:
        raise ConfigError(f"sampler.args.python: {python}: {error.strerror}") from None
    if found:
        raise ConfigError(
            f"sampler.args.python: {python} has no vLLM; `make vllm` makes an environment that has"
        )


class VllmServer:
    """One run of vLLM's server.

    Args:
        python: a Python that has vLLM.
        flags: of `vllm serve`.
        environment: variables beside those of this process.
        log: the file that takes what the server prints.
    """

    def __init__(
        self, python: str, flags: Sequence[str], environment: dict[str, str], log: Path
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ludus-vllm-"))  # short: sockets need that
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

    def wait_until_up(self, deadline_s: float) -> None:
        """Return once the server answers. Errors: LudusError, and the server is ended, where it
        dies before, or does not answer within `deadline_s` seconds."""
        until = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self._listens() and self._client.get("/health", timeout=5).is_success:
                    return
            if not self.alive:
                code = self._process.returncode
                self.stop()
                raise LudusError(self.explain(f"vLLM ended before it answered (code {code})"))
            if time.monotonic() > until:
                self.stop()
                raise LudusError(
                    self.explain(
                        f"vLLM did not answer within sampler.args.startup_deadline_s = "
                        f"{deadline_s:g} s"
                    )
                )
            time.sleep(0.1)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return not connection.connect_ex(self.socket)

    def post(self, path: str, body: Any = None) -> Any:
        """Ask the server, in this thread; returns its JSON.

        Errors: httpx.TransportError where it is gone, LudusError where it refuses.
        """
        answer = self._client.post(path, json=body)
        if not answer.is_success:
            raise LudusError(self.explain(f"vLLM answered {answer.status_code} to {path}"))
        return answer.json() if answer.content else None

    def explain(self, what: str) -> str:
        """`what`, with the errors in the server's log and its last lines."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return what
        last = lines[-NUM_LOG_LINES:]
        faults = list(dict.fromkeys(line for line in lines if _FAULT.search(line)))
        shown = [line[:300] for line in [*[f for f in faults if f not in last][-3:], *last]]
        return "\n    ".join([f"{what}; {self.log} ends:", *shown])

    def stop(self) -> None:
        """End all of the server's processes. Idempotent."""
        atexit.unregister(self.stop)
        self._client.close()
        with contextlib.suppress(ProcessLookupError):  # killpg reaches what outlived its leader
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_ENVIRONMENT = {
    "PYTHONPATH": str(SIDE.parent),
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, load weights, resume
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
