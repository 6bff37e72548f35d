"""Runs a service: one process or several on one port, with a clean shutdown.

SIGTERM and Ctrl-C stop the service: it accepts no new connections, running calls have GRACE_S
seconds to finish, then the application's lifespan closes what it holds. With `drain_s`, SIGTERM
first lets open sessions finish for so long, while no new ones open; a second one stops at once. A
dead worker is replaced; its state is lost.
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
from starlette.types import ASGIApp

from ludus.core.errors import ConfigError
from ludus.core.system.signals import end_tasks
from ludus.services.server.app import Settings
from ludus.services.server.auth import require_tokens
from ludus.services.server.connections import ConnectionLimits, Connections
from ludus.services.server.drain import Drain
from ludus.services.server.gate import Gate, Lanes
from ludus.services.server.limited_http import REQUESTS_LOG, LimitedHttp
from ludus.services.server.limited_websocket import LimitedWebSocket
from ludus.services.server.peers import Peers, socket_path, total_count
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
    """Address, number of processes, client tokens, limits of each process's connections, and
    seconds that open sessions have after SIGTERM."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    tokens: tuple[str, ...] = ()
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    drain_s: float = 0.0


def serve(
    make_app: AppFactory, options: ServeOptions, on_ready: Callable[[str], object] = lambda _: None
) -> None:
    """Serve until a signal; `on_ready` gets the address.

    Errors: ConfigError if the port is taken, a token is missing, or the workers do not start.
    """
    with listen(options.host, options.port, options.tokens) as (listening, address):
        if options.workers == 1:
            app = make_app(Settings(options.tokens), peers=None)
            run(
                app,
                [listening],
                options.connections,
                lambda: on_ready(address),
                drain_s=options.drain_s,
            )
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
        # For the connections, which inherit it. asyncio sets it only where the socket names TCP;
        # without it, an answer in two parts takes 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        listening.listen(BACKLOG)
        listening.setblocking(False)
        yield listening, f"http://{host}:{listening.getsockname()[1]}"


def server_config(app: ASGIApp, limits: ConnectionLimits) -> uvicorn.Config:
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


def run(
    app: FastAPI,
    sockets: list[socket.socket],
    limits: ConnectionLimits,
    on_ready: Callable[[], object] = lambda: None,
    *,
    drain_s: float = 0.0,
) -> None:
    """Serve in this process until a signal. `on_ready` is called just before the first request can
    be answered."""
    config = server_config(app, _within_open_files(limits))
    gc.collect()
    gc.freeze()  # a full collection took 23 ms, nearly all of it for modules
    with (
        asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
        contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt),
    ):
        try:
            on_ready()
            runner.run(_Server(config, drain_s).serve(sockets=sockets))
        finally:
            runner.run(end_tasks())


class _Server(uvicorn.Server):
    """Calls `app.state.on_stop`, if there is any, at the signal: an endless answer can end then.

    With `drain_s`, the first SIGTERM drains the service (`drain.add_drain`) for so long at most.
    """

    def __init__(self, config: uvicorn.Config, drain_s: float) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._drained_by: float | None = None

    async def on_tick(self, counter: int) -> bool:
        """True if the server has to stop; called ten times a second."""
        if self._drained_by is not None and not self.should_exit:
            state = self.config.app.state  # type: ignore[union-attr]
            if not state.num_open() or time.monotonic() > self._drained_by:
                self.handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if sig == signal.SIGTERM and self._drain_s and self._drained_by is None:
            self._drained_by = time.monotonic() + self._drain_s
            self.config.app.state.drain.set(True)  # type: ignore[union-attr]
            return
        super().handle_exit(sig, frame)
        on_stop = getattr(getattr(self.config.app, "state", None), "on_stop", None)
        if on_stop is not None:
            on_stop()


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
            if stop.number == signal.SIGTERM:
                _drain(pool, options, Path(folder), stop)
        finally:
            pool.stop()


def _drain(pool: _WorkerPool, options: ServeOptions, folder: Path, stop: _Stop) -> None:
    """Wait until all sessions are closed, `drain_s` have passed, or the next signal comes."""
    if not options.drain_s:
        return
    Drain(folder).set(True)
    stop.clear()
    deadline = time.monotonic() + options.drain_s
    while total_count(folder, options.workers) and time.monotonic() < deadline:
        if stop.wait(0.2):
            return
        pool.replace_dead()


class _Stop(threading.Event):
    """Set by a signal, whose number it has."""

    number = 0

    def handle(self, number: int, frame: Any) -> None:
        self.number = number
        self.set()


@contextlib.contextmanager
def _stop_event() -> Iterator[_Stop]:
    """An event that SIGTERM and SIGINT set."""
    stop = _Stop()
    handlers = {
        number: signal.signal(number, stop.handle) for number in (signal.SIGTERM, signal.SIGINT)
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
    # uvicorn raises the signal again once it has stopped, and the default would end the process
    # without its exit handlers, which remove folders and processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
