"""Several processes that serve one port, with sessions that stay where they were opened.

All workers accept from one listening socket, so a request may reach any of them. A session's number
says whose it is (`number % num_workers`); a worker that is asked for another's hands the request
over, through a Unix socket that every worker listens on as well. A client that talks over a
WebSocket opens its sessions in the worker that it is connected to, and nothing is handed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ludus.services.app import ServiceError, read_body, replayed

HANDED = b"x-ludus-handed-over"
"""Marks what comes from another worker: it is not handed on."""

PATH = re.compile(r"^/(?:sessions|rollouts)/([0-9a-f]{1,64})")
TIMEOUT_S = 120.0


class Peers:
    """The other workers.

    `folder` holds a Unix socket each; `tokens` says that requests need one.
    """

    def __init__(self, worker: int, num_workers: int, folder: Path, tokens: bool) -> None:
        self.worker, self.num_workers = worker, num_workers
        self._folder, self._tokens = folder, tokens
        self._clients: dict[int, httpx.AsyncClient] = {}

    def socket_of(self, worker: int) -> Path:
        """The Unix socket that a worker listens on."""
        return self._folder / f"worker-{worker}.sock"

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
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"authorization", b"content-type")
        }
        query = scope["query_string"].decode("latin-1")
        path = scope["path"] + (f"?{query}" if query else "")
        answer = await self._send(worker, scope["method"], path, headers, body)
        kind = answer.headers.get("content-type")
        return Response(answer.content, answer.status_code, media_type=kind)

    async def _send(
        self, worker: int, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> httpx.Response:
        if worker not in self._clients:
            transport = httpx.AsyncHTTPTransport(uds=str(self.socket_of(worker)))
            self._clients[worker] = httpx.AsyncClient(
                transport=transport, base_url="http://worker", timeout=TIMEOUT_S
            )
        given: dict[str, Any] = {
            **headers,
            HANDED.decode(): "1",
            "content-type": "application/json",
        }
        try:
            return await self._clients[worker].request(method, path, headers=given, content=body)
        except httpx.HTTPError as error:
            raise ServiceError(503, "worker_lost", f"the session's worker: {error!r}") from error


class HandOver:
    """Before the routes: sends a request to the worker whose session it names."""

    def __init__(self, app: ASGIApp, peers: Peers) -> None:
        self._app, self._peers = app, peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handed = any(name == HANDED for name, _ in scope.get("headers", ()))
        if scope["type"] != "http" or handed:
            await self._app(scope, receive, send)
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


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
