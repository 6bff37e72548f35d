"""Several processes that serve one port, with sessions that stay where they were opened.

All workers accept from one listening socket, so a request may reach any of them. A session's number
says whose it is (`number % num_workers`); a worker that is asked for another's hands the request
over, through a Unix socket that every worker listens on as well. A client that talks over a
WebSocket opens its sessions in the worker that it is connected to, and nothing is handed over.
What tells of the service as a whole is asked of all workers (`together`).

In the metrics each request counts once: in the worker that accepted it, under the route that the
worker which carried it out has found.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ludus.services.server.aggregate import JOINED, Answers
from ludus.services.server.app import ServiceError, read_body, replayed

HANDED = b"x-ludus-handed-over"
"""Marks what comes from another worker, by the secret that the workers share: it is answered here,
and not counted."""

ROUTE = b"x-ludus-route"
"""Tells the worker that handed a request over which route it was."""

PATH = re.compile(r"^/(?:sessions|rollouts)/([0-9a-f]{1,64})")
TIMEOUT_S = 120.0
ASK_S = 1.0
"""Seconds that a worker has to tell of itself; the others do not wait for longer."""

NO_LIMIT = httpx.Limits(max_connections=None, max_keepalive_connections=64)


def socket_of(folder: Path, worker: int) -> Path:
    """The Unix socket that a worker listens on."""
    return folder / f"worker-{worker}.sock"


class Peers:
    """The other workers.

    `folder` holds a Unix socket each; `tokens` says that requests need one; `secret` is what the
    workers know each other by.
    """

    def __init__(
        self, worker: int, num_workers: int, folder: Path, tokens: bool, secret: str
    ) -> None:
        self.worker, self.num_workers = worker, num_workers
        self.tally = SharedTally(folder, worker, num_workers)
        self._folder, self._tokens, self._secret = folder, tokens, secret
        self._clients: dict[int, httpx.AsyncClient] = {}

    def is_from_peer(self, scope: Scope) -> bool:
        """Whether another worker sent the request."""
        given = dict(scope["headers"]).get(HANDED, b"")
        return secrets.compare_digest(given, self._secret.encode())

    def worker_of(self, session: str) -> int:
        """Whose session it is; this worker answers for what is no id at all."""
        try:
            return int(session, 16) % self.num_workers
        except ValueError:
            return self.worker

    async def carry_out(self, worker: int, call: bytes, owner: str) -> str:
        """Another worker's outcome of a call, as JSON."""
        headers = {"authorization": f"Bearer {owner}"} if self._tokens else {}
        body = b'{"calls":[' + call + b"]}"
        answer = await self._send(worker, "POST", "/batch", headers, body)
        if answer.status_code != 200:
            return json.dumps({"status": answer.status_code, **answer.json()})
        return json.dumps(answer.json()["results"][0])

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.aclose()

    async def forward(self, worker: int, scope: Scope, body: bytes) -> Response:
        """The owner's answer to a request."""
        headers = _handed_on(scope)
        query = scope["query_string"].decode("latin-1")
        path = scope["path"] + (f"?{query}" if query else "")
        answer = await self._send(worker, scope["method"], path, headers, body)
        scope["state"]["route"] = answer.headers.get(ROUTE.decode(), "none")
        kind = answer.headers.get("content-type")
        return Response(answer.content, answer.status_code, media_type=kind)

    async def ask_all(self, path: str, headers: Mapping[str, str]) -> Answers:
        """What the other workers answer; None for one that does not, or not with 200."""
        others = [worker for worker in range(self.num_workers) if worker != self.worker]
        answers = await asyncio.gather(*(self._ask(worker, path, headers) for worker in others))
        return dict(zip(others, answers, strict=True))

    async def _ask(self, worker: int, path: str, headers: Mapping[str, str]) -> bytes | None:
        try:
            async with asyncio.timeout(ASK_S):
                answer = await self._send(worker, "GET", path, headers, b"")
        except (TimeoutError, ServiceError):
            return None
        return answer.content if answer.status_code == 200 else None

    async def _send(
        self, worker: int, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> httpx.Response:
        if worker not in self._clients:
            own = str(socket_of(self._folder, worker))
            transport = httpx.AsyncHTTPTransport(uds=own, limits=NO_LIMIT)
            self._clients[worker] = httpx.AsyncClient(
                transport=transport, base_url="http://worker", timeout=TIMEOUT_S
            )
        given: dict[str, Any] = {
            **headers,
            HANDED.decode(): self._secret,
            "content-type": "application/json",
        }
        try:
            return await self._clients[worker].request(method, path, headers=given, content=body)
        except httpx.HTTPError as error:
            raise ServiceError(503, "worker_lost", f"the session's worker: {error!r}") from error


class SharedTally:
    """A `Tally` in memory that all workers map: a number each, from a file in `folder`.

    A worker that is started in the place of a dead one begins again with none.
    """

    def __init__(self, folder: Path, worker: int, num_workers: int) -> None:
        self._worker = worker
        with (folder / "sessions").open("a+b") as file:
            file.truncate(8 * num_workers)
            shared = mmap.mmap(file.fileno(), 8 * num_workers)
        self._counts = memoryview(shared).cast("Q")
        self.tell(0)

    def tell(self, count: int) -> None:
        self._counts[self._worker] = count

    def others(self) -> int:
        return sum(self._counts) - self._counts[self._worker]


class HandOver:
    """Before the routes: sends a request to the worker whose session it names, or to all."""

    def __init__(self, app: ASGIApp, peers: Peers) -> None:
        self._app, self._peers = app, peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._peers.is_from_peer(scope):
            scope["state"]["route"] = None  # counted where it came from
            await self._app(scope, receive, _telling_route(scope, send))
            return
        if scope["method"] == "GET" and scope["path"] in JOINED:
            await self._all(scope, receive, send)
            return
        body = await read_body(receive, scope, 2**31)  # bounded by the guard that stands before
        worker = self._worker(scope, body)
        if worker == self._peers.worker:
            await self._app(scope, replayed(body, receive), send)
            return
        try:
            response = await self._peers.forward(worker, scope, body)
        except ServiceError as error:
            response = JSONResponse(error.body, error.status)
        await response(scope, _nothing, send)

    async def _all(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer for all workers."""
        others = asyncio.ensure_future(self._peers.ask_all(scope["path"], _handed_on(scope)))
        try:
            status, own = await _answer_of(self._app, scope, receive)
            answers = {self._peers.worker: own, **await others}
        finally:
            others.cancel()
        response = JOINED[scope["path"]](answers) if status == 200 else Response(own, status)
        await response(scope, _nothing, send)

    def _worker(self, scope: Scope, body: bytes) -> int:
        path: str = scope["path"]
        if found := PATH.match(path):
            return self._peers.worker_of(found[1])
        if not path.startswith("/agentgym/"):
            return self._peers.worker
        number = _number(scope["query_string"], body)
        return self._peers.worker if number is None else number % self._peers.num_workers


def _number(query: bytes, body: bytes) -> int | None:
    """The session that an AgentGym request names, in its query or in its body."""
    if found := re.search(rb"(?:^|&)(?:id|env_idx)=(\d{1,40})(?:&|$)", query):
        return int(found[1])
    try:
        given = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return None  # the route will say so
    if not isinstance(given, dict):
        return None
    number = given.get("id", given.get("env_idx"))
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _handed_on(scope: Scope) -> dict[str, str]:
    """The headers of a request that another worker needs."""
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in (b"authorization", b"content-type")
    }


def _telling_route(scope: Scope, send: Send) -> Send:
    """A `send` that adds the route to the answer's headers."""

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            route = getattr(scope.get("route"), "path", "none").encode("latin-1", "replace")
            message = {**message, "headers": [*message.get("headers", ()), (ROUTE, route)]}
        await send(message)

    return telling


async def _answer_of(app: ASGIApp, scope: Scope, receive: Receive) -> tuple[int, bytes]:
    """Status and body of what an application answers."""
    status, body = 500, bytearray()

    async def keep(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        body.extend(message.get("body", b""))

    await app(scope, receive, keep)
    return status, bytes(body)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
