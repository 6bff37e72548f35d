"""Services for tests: in a thread of this process, or as the `ludus serve` command."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from ludus.config.schema import RunConfig
from ludus.core.types import Spec
from ludus.services.envs.manager import SessionLimits
from ludus.services.envs.service import environment_service
from ludus.services.server.app import Settings
from ludus.services.server.connections import ConnectionLimits
from ludus.services.server.serve import server_config

HERE = Path(__file__).parent
OBEYS = "served_envs:Obeys"
LIGHTLY = "served_envs:ObeysLightly"


@contextmanager
def service(
    *envs: str,
    tokens: tuple[str, ...] = (),
    isolate: bool = False,
    connections: ConnectionLimits | None = None,
    recipe: RunConfig | None = None,
    **limits: Any,
) -> Iterator[str]:
    """A service in a thread; yields its address."""
    specs = [Spec(name=name) for name in envs]
    app = environment_service(
        specs,
        Settings(tokens=tokens, max_body_bytes=900_000),
        SessionLimits(**limits),
        isolate=isolate,
        recipe=recipe,
    )
    config = server_config(app, connections or ConnectionLimits())
    server = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(4096)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@dataclass
class Command:
    """`ludus serve env`, as a process."""

    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def start(
    *words: str, env: dict[str, str] | None = None, port: int = 0, verb: str = "env"
) -> Command:
    """Start `ludus serve` and wait until it serves."""
    command = [sys.executable, "-m", "ludus", "serve", verb, *words, "--port", str(port)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {}), "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"},
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    found = re.search(r"http://[\d.]+:\d+", said)
    assert found is not None, said
    until(lambda: httpx.get(found[0] + "/health").status_code == 200)
    return Command(process, found[0])


@contextmanager
def command(
    *words: str, env: dict[str, str] | None = None, port: int = 0, verb: str = "env"
) -> Iterator[Command]:
    """The command, running during a test."""
    started = start(*words, env=env, port=port, verb=verb)
    try:
        yield started
    finally:
        started.process.terminate()
        try:
            started.process.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()
            raise
        finally:
            assert started.process.stdout is not None
            started.process.stdout.close()


def until(true: Any, seconds: float = 30.0) -> None:
    """Wait until a condition holds; network errors count as false."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if true():
                return
        except (httpx.HTTPError, OSError):
            pass
        assert time.monotonic() < deadline, "the condition does not become true"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """True if a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
