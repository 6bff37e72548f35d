"""Requests between worker processes.

All workers accept from one listening socket, so a request may reach any of them. An id in a request
says which worker owns it (`id % num_workers`). A worker that gets a request for another worker's id
forwards it over that worker's Unix socket. Routes about the service as a whole are aggregated over
all workers (`aggregate`).

Metrics count each request once: in the worker that accepted it, under the route that the worker
which answered it has matched.
"""

from __future__ import annotations

import asyncio
import mmap
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ludus.services.server.aggregate import Aggregate, Answers
from ludus.services.server.app import ServiceError, read_body, replayed

FORWARDED = b"x-ludus-handed-over"
"""Marks a request from another worker, with the workers' shared secret. Such a request is answered
here and not counted."""

ROUTE = b"x-ludus-route"
"""Response header: the route that a forwarded request matched."""

TIMEOUT_S = 120.0
AGGREGATE_TIMEOUT_S = 1.0
"""Seconds to wait for the other workers' part of an aggregate."""

COUNTS = "counts"
"""The file of a SharedCounter."""

NO_LIMIT = httpx.Limits(max_connections=None, max_keepalive_connections=64)


@dataclass(frozen=True)
class Routing:
    """A service's rules for its requests.

    `id_in(path, query, body)` returns the id that a request names, or None. `aggregates` maps a GET
    path to the function that merges the workers' answers.
    """

    id_in: Callable[[str, bytes, bytes], int | None]
    aggregates: Mapping[str, Aggregate]


def socket_path(folder: Path, worker: int) -> Path:
    """The Unix socket that a worker listens on."""
    return folder / f"worker-{worker}.sock"


class Peers:
    """Connections to the other workers.

    `folder` holds their Unix sockets, `num_tokens` is the number of clients' tokens, `secret`
    authenticates the workers to each other.
    """

    def __init__(
        self, worker: int, num_workers: int, folder: Path, num_tokens: int, secret: str
    ) -> None:
        self.worker, self.num_workers = worker, num_workers
        self.counter = SharedCounter(folder, worker, num_workers, 1 + num_tokens)
        self.folder, self._needs_token, self._secret = folder, bool(num_tokens), secret
        self._clients: dict[int, httpx.AsyncClient] = {}

    def is_from_peer(self, scope: Scope) -> bool:
        """True if another worker sent the request."""
        given = dict(scope["headers"]).get(FORWARDED, b"")
        return secrets.compare_digest(given, self._secret.encode())

    def owner(self, id: int | None) -> int:
        """The worker that owns an id; this worker for None."""
        return self.worker if id is None else id % self.num_workers

    async def post(self, worker: int, path: str, body: bytes, token: str) -> httpx.Response:
        """Post JSON to another worker. Errors: ServiceError 503."""
        headers = {"authorization": f"Bearer {token}"} if self._needs_token else {}
        return await self._send(worker, "POST", path, headers, body)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def forward(self, worker: int, scope: Scope, body: bytes) -> Response:
        """Another worker's response to a request."""
        query = scope["query_string"].decode("latin-1")
        path = scope["path"] + (f"?{query}" if query else "")
        answer = await self._send(worker, scope["method"], path, _forwarded_headers(scope), body)
        scope["state"]["route"] = answer.headers.get(ROUTE.decode(), "none")
        kind = answer.headers.get("content-type")
        return Response(answer.content, answer.status_code, media_type=kind)

    async def ask_all(self, scope: Scope) -> Answers:
        """The other workers' bodies for a GET request; None without an answer of status 200."""
        others = [worker for worker in range(self.num_workers) if worker != self.worker]
        answers = await asyncio.gather(*(self._ask(worker, scope) for worker in others))
        return dict(zip(others, answers, strict=True))

    async def _ask(self, worker: int, scope: Scope) -> bytes | None:
        try:
            async with asyncio.timeout(AGGREGATE_TIMEOUT_S):
                headers = _forwarded_headers(scope)
                answer = await self._send(worker, "GET", scope["path"], headers, b"")
        except (TimeoutError, ServiceError):
            return None
        return answer.content if answer.status_code == 200 else None

    async def _send(
        self, worker: int, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> httpx.Response:
        if worker not in self._clients:
            uds = str(socket_path(self.folder, worker))
            self._clients[worker] = httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=uds, limits=NO_LIMIT),
                base_url="http://worker",
                timeout=TIMEOUT_S,
            )
        own = {FORWARDED.decode(): self._secret, "content-type": "application/json"}
        try:
            return await self._clients[worker].request(
                method, path, headers={**headers, **own}, content=body
            )
        except httpx.HTTPError as error:
            raise ServiceError(503, "worker_lost", f"the session's worker: {error!r}") from error


class SharedCounter:
    """Counts per worker, in a memory-mapped file of `folder` that all workers read.

    Slot 0 is for all clients; each token has another. A restarted worker begins at 0.
    """

    def __init__(self, folder: Path, worker: int, num_workers: int, num_slots: int) -> None:
        self._worker, self._num_workers = worker, num_workers
        size = 8 * num_workers * num_slots
        with (folder / COUNTS).open("a+b") as file:
            file.truncate(size)
            shared = mmap.mmap(file.fileno(), size)
        self._counts = memoryview(shared).cast("Q")
        for slot in range(num_slots):
            self.set(0, slot)

    def set(self, count: int, slot: int = 0) -> None:
        self._counts[slot * self._num_workers + self._worker] = count

    def others(self, slot: int = 0) -> int:
        """The sum of the other workers' counts."""
        first = slot * self._num_workers
        return sum(
            self._counts[first + worker]
            for worker in range(self._num_workers)
            if worker != self._worker
        )


def total_count(folder: Path, num_workers: int) -> int:
    """The sum of all workers' counts, for the process that started them."""
    with (folder / COUNTS).open("rb") as file:
        return sum(memoryview(file.read(8 * num_workers)).cast("Q"))


class WorkerRouter:
    """Middleware that forwards a request to the worker that owns its id, or aggregates over all."""

    def __init__(self, app: ASGIApp, peers: Peers, routing: Routing) -> None:
        self._app, self._peers, self._routing = app, peers, routing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._peers.is_from_peer(scope):
            scope["state"]["route"] = None  # counted by the worker that accepted it
            await self._app(scope, receive, _with_route_header(scope, send))
            return
        if scope["method"] == "GET" and scope["path"] in self._routing.aggregates:
            await self._aggregate(scope, receive, send)
            return
        body = await read_body(receive, scope, 2**31)  # the guard has limited it already
        worker = self._peers.owner(self._routing.id_in(scope["path"], scope["query_string"], body))
        if worker == self._peers.worker:
            await self._app(scope, replayed(body, receive), send)
            return
        try:
            response = await self._peers.forward(worker, scope, body)
        except ServiceError as error:
            response = JSONResponse(error.body, error.status)
        await response(scope, _no_message, send)

    async def _aggregate(self, scope: Scope, receive: Receive, send: Send) -> None:
        others = asyncio.ensure_future(self._peers.ask_all(scope))
        try:
            status, own = await _response_of(self._app, scope, receive)
            answers = {self._peers.worker: own, **await others}
        finally:
            others.cancel()
        merge = self._routing.aggregates[scope["path"]]
        response = merge(answers) if status == 200 else Response(own, status)
        await response(scope, _no_message, send)


def _forwarded_headers(scope: Scope) -> dict[str, str]:
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in (b"authorization", b"content-type")
    }


def _with_route_header(scope: Scope, send: Send) -> Send:
    """A `send` that adds the matched route to the response's headers."""

    async def send_with_route(message: Message) -> None:
        if message["type"] == "http.response.start":
            route = getattr(scope.get("route"), "path", "none").encode("latin-1", "replace")
            message = {**message, "headers": [*message.get("headers", ()), (ROUTE, route)]}
        await send(message)

    return send_with_route


async def _response_of(app: ASGIApp, scope: Scope, receive: Receive) -> tuple[int, bytes]:
    """Status and body of an application's response."""
    status, body = 500, bytearray()

    async def collect(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        body.extend(message.get("body", b""))

    await app(scope, receive, collect)
    return status, bytes(body)


async def _no_message() -> Message:
    return {"type": "http.disconnect"}
