"""Runs a service: one process or several on one port, with a clean shutdown.

SIGTERM and Ctrl-C stop the service: it accepts no new connections, running calls have GRACE_S
seconds to finish, then the application's lifespan closes what it holds. A dead worker is replaced;
its state is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import resource
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from ludus.core.errors import ConfigError
from ludus.core.signals import end_tasks
from ludus.services.server.app import Settings
from ludus.services.server.auth import require_tokens
from ludus.services.server.connections import ConnectionLimits, Connections
from ludus.services.server.gate import Gate, Lanes
from ludus.services.server.limited_http import REQUESTS_LOG, LimitedHttp
from ludus.services.server.limited_websocket import LimitedWebSocket
from ludus.services.server.peers import Peers, socket_path
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

GRACE_S = 5
"""Seconds that running calls have to finish after a signal."""

START_TIMEOUT_S = 60

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open, as in nginx. Agents and trainers are idle for longer
than uvicorn's 5 s, and a request that meets a closing connection is lost."""

BACKLOG = 4096

RESERVED_FILES = 256
"""Open files of a process that are not clients' connections."""


class AppFactory(Protocol):
    """Makes a worker's application; pickled, for it runs in the worker. `peers`: None if alone."""

    def __call__(self, settings: Settings, *, peers: Peers | None) -> FastAPI: ...


@dataclass(frozen=True)
class ServeOptions:
    """Address, number of processes, client tokens, and limits of each process's connections."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    tokens: tuple[str, ...] = ()
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


def serve(
    make_app: AppFactory, options: ServeOptions, on_ready: Callable[[str], object] = lambda _: None
) -> None:
    """Serve until a signal; `on_ready` gets the address.

    Errors: ConfigError if the port is taken, a token is missing, or the workers do not start.
    """
    with listen(options.host, options.port, options.tokens) as (listening, address):
        if options.workers == 1:
            on_ready(address)
            run(make_app(Settings(options.tokens), peers=None), [listening], options.connections)
        else:
            _supervise(make_app, options, listening, lambda: on_ready(address))


@contextlib.contextmanager
def listen(host: str, port: int, tokens: tuple[str, ...]) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket and its URL.

    Errors: ConfigError if the port is taken, or if the host is public and there is no token.
    """
    require_tokens(host, tokens)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        listening.listen(BACKLOG)
        listening.setblocking(False)
        yield listening, f"http://{host}:{listening.getsockname()[1]}"


def server_config(app: FastAPI, limits: ConnectionLimits) -> uvicorn.Config:
    """uvicorn's settings.

    No WebSocket pings: a trainer does not answer while it computes. A lost client is noticed by its
    closed connection, or by its idle sessions.
    """
    connections, lanes = Connections(limits), Lanes()

    def gate(**options: Any) -> Gate:
        make = partial(LimitedHttp, connections=connections, **options)
        return Gate(make, connections, lanes, options["server_state"].connections)

    http: Any = gate
    websocket: Any = partial(LimitedWebSocket, connections=connections)
    config = uvicorn.Config(
        app,
        http=http,
        ws=websocket,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        ws_max_size=1_000_000,
        backlog=BACKLOG,
    )
    for logger in (REQUESTS_LOG, logging.getLogger("uvicorn.error")):
        logger.addFilter(_is_no_cancellation)
    return config


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """False for a call that was cancelled at the end of GRACE_S: uvicorn logs its traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def run(app: FastAPI, sockets: list[socket.socket], limits: ConnectionLimits) -> None:
    """Serve in this process until a signal."""
    config = server_config(app, _within_open_files(limits))
    gc.collect()
    gc.freeze()  # a full collection took 23 ms, nearly all of it for modules
    with (
        asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
        contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt),
    ):
        try:
            runner.run(uvicorn.Server(config).serve(sockets=sockets))
        finally:
            runner.run(end_tasks())


def _within_open_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Raise this process's limit of open files; allow no more connections than it has files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            log.warning("the limit of open files allows fewer connections", open_files=soft)
            allowed = max(16, soft - RESERVED_FILES)
            return replace(
                limits,
                max_connections=allowed,
                max_per_address=min(limits.max_per_address, allowed),
            )
    return limits


def _supervise(
    make_app: AppFactory,
    options: ServeOptions,
    listening: socket.socket,
    on_ready: Callable[[], object],
) -> None:
    """Keep the workers running until a signal, then stop them."""
    with tempfile.TemporaryDirectory(prefix="ludus-serve-") as folder, _stop_event() as stop:
        pool = _WorkerPool(make_app, options, listening, Path(folder))
        try:
            pool.start()
            on_ready()
            while not stop.wait(0.2):
                pool.replace_dead()
        finally:
            pool.stop()


@contextlib.contextmanager
def _stop_event() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    handlers = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _WorkerPool:
    """Worker processes. Each holds a pipe to this process, and exits when the pipe closes."""

    def __init__(
        self, make_app: AppFactory, options: ServeOptions, listening: socket.socket, folder: Path
    ) -> None:
        self._make_app, self._options = make_app, options
        self._listening, self._folder = listening, folder
        self._secret = secrets.token_hex(16)
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[int, tuple[Any, Connection]] = {}

    def start(self) -> None:
        """Start all workers and wait until each listens."""
        for worker in range(self._options.workers):
            self._start(worker)
        sockets = [socket_path(self._folder, w) for w in range(self._options.workers)]
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(path.exists() for path in sockets):
            alive = all(process.is_alive() for process, _ in self._workers.values())
            if time.monotonic() > deadline or not alive:
                raise ConfigError("the workers did not start; see their output above")
            time.sleep(0.05)

    def replace_dead(self) -> None:
        for worker, (process, pipe) in list(self._workers.items()):
            if not process.is_alive():
                log.error("a worker died", worker=worker, exit_code=process.exitcode)
                pipe.close()
                self._start(worker)

    def stop(self) -> None:
        """Terminate all workers, and kill those that do not exit in time."""
        for process, _ in self._workers.values():
            process.terminate()
        deadline = time.monotonic() + GRACE_S + 5
        for process, pipe in self._workers.values():
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()

    def _start(self, worker: int) -> None:
        ours, theirs = self._context.Pipe()
        place = (worker, self._folder, self._secret)
        args = (self._make_app, self._options, *place, self._listening, theirs)
        process = self._context.Process(target=_work, args=args)
        process.start()
        theirs.close()
        self._workers[worker] = (process, ours)


def _work(
    make_app: AppFactory,
    options: ServeOptions,
    worker: int,
    folder: Path,
    secret: str,
    listening: socket.socket,
    pipe: Connection,
) -> None:
    """Main function of a worker process."""
    threading.Thread(target=_exit_with_parent, args=(pipe,), daemon=True).start()
    peers = Peers(worker, options.workers, folder, len(options.tokens), secret)
    path = socket_path(folder, worker)
    path.unlink(missing_ok=True)
    app = make_app(Settings(options.tokens), peers=peers)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        own.bind(str(path))
        own.listen(BACKLOG)
        own.setblocking(False)
        run(app, [listening, own], options.connections)


def _exit_with_parent(pipe: Connection) -> None:
    """End this process when its parent is gone."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    log.error("the parent process is gone")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGTERM)
