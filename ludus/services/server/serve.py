"""Running a service: one process or several, one port, a clean end.

SIGTERM and Ctrl-C stop it: no new connections, calls under way have a few seconds to end, sessions
and what they hold are closed. A worker that dies is replaced; its sessions are lost, and their
clients are told so.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from ludus.core.errors import ConfigError
from ludus.core.types import Spec
from ludus.services.envs.manager import SessionLimits
from ludus.services.envs.service import environment_service
from ludus.services.envs.session import ServedEnv
from ludus.services.server.app import Settings
from ludus.services.server.peers import Peers, socket_of
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

GRACE_S = 5
"""Seconds that calls under way have to end in, when the service stops."""

KEEP_ALIVE_S = 75
"""Seconds that a connection may be unused, as nginx has it. An agent thinks, and a trainer
computes, for longer than uvicorn's 5; and a request that meets a closing connection is lost."""

BACKLOG = 4096


@dataclass(frozen=True)
class ServeOptions:
    """What `ludus serve env` was told."""

    envs: tuple[Spec, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    tokens: tuple[str, ...] = ()
    isolate: bool = False
    limits: SessionLimits = field(default_factory=SessionLimits)


def serve(options: ServeOptions, ready: Callable[[str], object] = lambda _: None) -> None:
    """Serve until told to stop; `ready` is called with the address.

    Errors: ConfigError where the port is taken or an environment cannot be served.
    """
    require_tokens(options.host, options.tokens)
    for spec in options.envs:  # before anything listens: a mistake is told at once
        _ = ServedEnv(spec).schema
    listening = listen(options.host, options.port)
    with listening:
        address = f"http://{options.host}:{listening.getsockname()[1]}"
        if options.workers == 1:
            ready(address)
            run(_app(options, None), [listening])
        else:
            _supervise(options, listening, lambda: ready(address))


def require_tokens(host: str, tokens: tuple[str, ...]) -> None:
    """Errors: ConfigError for an address that others reach, and no token that they would need."""
    if not tokens and host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"--host {host} is open to other machines: set a token in LUDUS_TOKENS, or "
            "serve on 127.0.0.1"
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Errors: ConfigError where the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listening.listen(BACKLOG)
    listening.setblocking(False)
    return listening


def _app(options: ServeOptions, peers: Peers | None) -> FastAPI:
    settings = Settings(tokens=options.tokens)
    return environment_service(
        options.envs, settings, options.limits, isolate=options.isolate, peers=peers
    )


def run(app: FastAPI, sockets: list[socket.socket]) -> None:
    """Serve in this process until a signal.

    No pings are sent: a trainer does not answer while it computes. A client that is gone is noticed
    by its closed connection, or else by its idle sessions.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        ws_max_size=1_000_000,
        backlog=BACKLOG,
    )
    server = uvicorn.Server(config)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve_quietly(server, sockets))


async def _serve_quietly(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        await server.serve(sockets=sockets)


def _supervise(
    options: ServeOptions, listening: socket.socket, ready: Callable[[], object]
) -> None:
    """Keep the workers running until a signal, then stop them."""
    with tempfile.TemporaryDirectory(prefix="ludus-serve-") as folder, _stopping() as stop:
        crew = _Crew(options, listening, Path(folder))
        try:
            crew.start()
            ready()
            while not stop.wait(0.2):
                crew.replace_dead()
        finally:
            crew.stop()


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Crew:
    """The worker processes. Each holds a pipe to this one, and ends when it closes."""

    def __init__(self, options: ServeOptions, listening: socket.socket, folder: Path) -> None:
        self._options, self._listening, self._folder = options, listening, folder
        self._secret = secrets.token_hex(16)
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[int, tuple[Any, Connection]] = {}

    def start(self) -> None:
        """Start all, and wait until each listens."""
        for worker in range(self._options.workers):
            self._start(worker)
        sockets = [socket_of(self._folder, w) for w in range(self._options.workers)]
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in sockets):
            if time.monotonic() > deadline or not all(p.is_alive() for p, _ in self._all()):
                raise ConfigError("the workers did not start; what they said stands above")
            time.sleep(0.05)

    def replace_dead(self) -> None:
        """Start a worker anew where one has died."""
        for worker, (process, pipe) in list(self._workers.items()):
            if not process.is_alive():
                log.error("a worker died", worker=worker, exit_code=process.exitcode)
                pipe.close()
                self._start(worker)

    def stop(self) -> None:
        """End all: gently, then not."""
        for process, _ in self._all():
            process.terminate()
        deadline = time.monotonic() + GRACE_S + 5
        for process, pipe in self._all():
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()

    def _all(self) -> list[tuple[Any, Connection]]:
        return list(self._workers.values())

    def _start(self, worker: int) -> None:
        ours, theirs = self._context.Pipe()
        place = (worker, self._folder, self._secret)
        args = (self._options, *place, self._listening, theirs)
        process = self._context.Process(target=_work, args=args)
        process.start()
        theirs.close()
        self._workers[worker] = (process, ours)


def _work(
    options: ServeOptions,
    worker: int,
    folder: Path,
    secret: str,
    listening: socket.socket,
    pipe: Connection,
) -> None:
    """A worker process."""
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    peers = Peers(worker, options.workers, folder, bool(options.tokens), secret)
    path = socket_of(folder, worker)
    path.unlink(missing_ok=True)
    app = _app(options, peers)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        own.bind(str(path))
        own.listen(BACKLOG)
        own.setblocking(False)
        run(app, [listening, own])


def _end_with(pipe: Connection) -> None:
    """End this process when the one that started it is gone."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    log.error("the parent process is gone")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGTERM)
