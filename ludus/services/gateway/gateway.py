"""Serves the sessions of a run's agents over HTTP, in a thread of its own.

    Gateway.admit(session)      -> base URL and key of the episode
    POST /v1/chat/completions   with that key -> session.call, in the event loop of the rollouts
    POST /v1/responses, /v1/messages, /v1/completions: the same

A session is named by its key: as bearer token, as `x-api-key`, or in the URL (`/s/KEY/v1/...`).
The learner and the sampler compute in the event loop of the rollouts, so the server has a loop of
its own: it answers `/health` and refuses wrong requests at any time.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ludus.rollout.sessions.agent_session import AgentSession
from ludus.rollout.sessions.call_options import Address
from ludus.services.gateway.api import gateway_app
from ludus.services.gateway.sessions import Sessions
from ludus.services.server.connections import ConnectionLimits
from ludus.services.server.serve import BACKLOG, listen, server_config

START_S = 30.0
LIMITS = ConnectionLimits(max_connections=4096, max_per_address=4096)


class HttpGateway:
    """A `Gateway` on a port of this machine. It starts with the first session, and again, on the
    same port, with the next session after its server has died.

    Args:
        unix: listen on a Unix socket too, for agents in a sandbox.

    Errors: ConfigError where the port is taken.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, unix: bool = False) -> None:
        self._host, self._port, self._unix = host, port, unix
        self.sessions = Sessions()
        app = gateway_app(self.sessions)
        app.middleware_stack = app.build_middleware_stack()  # once, before several threads call it
        self._app = KeyInPath(app)
        self._opened = ExitStack()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._url = ""
        self._folder: TemporaryDirectory[str] | None = None
        self._socket: Path | None = None

    def admit(self, session: AgentSession) -> Address:
        if self._thread is None or not self._thread.is_alive():
            self._stop()
            self._start()
        key = self.sessions.add(session)
        # A URL of its own: LangChain shares a client between all agents with the same URL, which
        # fails, since each episode has an event loop of its own.
        return Address(f"{self._url}/s/{key}/v1", key, self._socket)

    def dismiss(self, session: AgentSession) -> None:
        if session.address is not None:
            self.sessions.remove(session.address.api_key)

    def transport(self) -> httpx.AsyncBaseTransport:
        return InProcess(app=self._app)

    def close(self) -> None:
        """Stop the server. Idempotent."""
        self._stop()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = self._socket = None

    def _stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
        if self._thread is not None:
            self._thread.join(5)
        self._opened.close()
        self._server = self._thread = None

    def _start(self) -> None:
        # Every request needs the key of an episode, so no token is needed besides.
        listening, self._url = self._opened.enter_context(listen(self._host, self._port, ("key",)))
        self._port = listening.getsockname()[1]
        sockets = [listening]
        if self._unix:
            # A server that starts again is found in the same folder, which sandboxes show.
            self._folder = self._folder or TemporaryDirectory(prefix="ludus-gateway-")
            self._socket = Path(self._folder.name) / "socket"
            sockets.append(self._opened.enter_context(unix_socket(self._socket)))
        config = server_config(self._app, LIMITS)
        config.lifespan = "off"
        self._server = server = uvicorn.Server(config)
        ready = threading.Event()

        async def serve() -> None:
            asyncio.get_running_loop().call_soon(ready.set)
            await server.serve(sockets=sockets)

        def run() -> None:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(serve())

        # uvicorn installs no signal handlers outside of the main thread.
        self._thread = threading.Thread(target=run, name="ludus-gateway", daemon=True)
        self._thread.start()
        ready.wait(START_S)


class InProcess(httpx.ASGITransport):
    """Calls an application in the caller's event loop, within the client's timeout."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        limit = request.extensions.get("timeout", {}).get("read")
        late = httpx.ReadTimeout(f"no answer within {limit} s", request=request)
        try:
            async with asyncio.timeout(limit) as timer:
                response = await super().handle_async_request(request)
        except TimeoutError:
            raise late from None
        if timer.expired():  # the guard has answered that the call was cancelled
            raise late
        return response


def unix_socket(path: Path) -> socket.socket:
    """A listening socket that every user of this machine may connect to, as to a port."""
    listening = socket.socket(socket.AF_UNIX)
    path.unlink(missing_ok=True)
    listening.bind(str(path))
    path.parent.chmod(0o755)
    path.chmod(0o666)
    listening.listen(BACKLOG)
    listening.setblocking(False)
    return listening


class KeyInPath:
    """Middleware: `/s/KEY/v1/...` is `/v1/...` with this key, for agents that cannot set one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = scope["path"].split("/", 3) if scope["type"] == "http" else []
        if len(parts) == 4 and parts[1] == "s":
            own = (b"authorization", b"x-api-key")
            headers = [header for header in scope["headers"] if header[0] not in own]
            headers.append((b"x-api-key", parts[2].encode("latin-1", "replace")))
            path = f"/{parts[3]}"
            scope = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await self._app(scope, receive, send)
