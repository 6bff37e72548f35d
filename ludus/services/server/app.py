"""What every service shares: tokens, `/health`, `/metrics`, errors as JSON, a limit on bodies.

    app = create_app("environments", Settings(tokens=("secret",)), health=lambda: {"sessions": 3})
    app.add_api_route(...)

Every error is `{"error": {"type": "unknown_session", "message": "..."}}`, with an honest status:
4xx where the client can mend it, 5xx where it cannot.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ludus import __version__
from ludus.core.errors import LudusError
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

OPEN_PATHS = ("/health",)
"""What needs no token: a load balancer has none."""

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)


class ServiceError(LudusError):
    """What a client is told: a status, a type that programs read, a message that people read."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"type": self.kind, "message": str(self)}}

    @property
    def outcome(self) -> str:
        """As the entry of a batch, or a message of a socket."""
        return json.dumps({"status": self.status, **self.body})


class ErrorDetail(BaseModel):
    """What went wrong: `type` for programs, `message` for people."""

    type: str
    message: str


class ErrorBody(BaseModel):
    """The body of every answer that is not 2xx."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be carried out."},
    "5XX": {"model": ErrorBody, "description": "The service or what it serves broke."},
}
"""What routes say of their errors in the OpenAPI description."""


@dataclass(frozen=True)
class Settings:
    """Of any service. No tokens: everybody may do everything."""

    tokens: tuple[str, ...] = ()
    max_body_bytes: int = 1_000_000
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)


def create_app(
    title: str,
    settings: Settings,
    *,
    health: Callable[[], Mapping[str, Any]],
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    middleware: Sequence[Middleware] = (),
) -> FastAPI:
    """An application with the common routes and rules; the caller adds its own routes.

    `health()` gives what `/health` tells besides `status`; `middleware` sees what the guard let in.
    """
    app = FastAPI(
        title=f"ludus: {title}",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
        middleware=[Middleware(Guard, settings=settings), *middleware],
    )
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_crash)

    @app.get("/health", tags=["service"])
    async def read_health() -> dict[str, Any]:
        """Whether the service works, and how busy it is."""
        return {"status": "ok", "version": __version__, **health()}

    @app.get("/metrics", tags=["service"], response_class=Response, responses=ERRORS)
    async def read_metrics() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(settings.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def owner_of(scope: Scope) -> str:
    """The token that a request came with: what it opens belongs to it. Empty without tokens."""
    owner: str = scope.get("state", {}).get("owner", "")
    return owner


class Guard:
    """Before all routes: checks the token, bounds the body, and measures.

    A body that is too long is refused as soon as that is known, and never held in memory.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._seconds = Histogram(
            "ludus_http_seconds",
            "Time to answer, by route and status",
            ["route", "status"],
            registry=settings.registry,
            buckets=BUCKETS_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        owner = self._owner(scope)
        if owner is None and scope["path"] not in OPEN_PATHS:
            error = ServiceError(401, "unauthorized", "send the header Authorization: Bearer TOKEN")
            await self._refuse(error, scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = owner or ""
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            body = await read_body(receive, scope, self._settings.max_body_bytes)
        except ServiceError as error:
            await self._refuse(error, scope, receive, watched)
        else:
            await self._app(scope, replayed(body, receive), watched)
        # What stands between may know better: another process found the route, or counts it (None).
        found = getattr(scope.get("route"), "path", "none")
        if (route := scope["state"].get("route", found)) is not None:
            self._seconds.labels(route, str(status)).observe(time.perf_counter() - started)

    def _owner(self, scope: Scope) -> str | None:
        """The known token of the request, "" where none is needed, None where it has none."""
        if not self._settings.tokens:
            return ""
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        kind, _, token = given.partition(b" ")
        if kind.lower() != b"bearer":
            return None
        known = [t for t in self._settings.tokens if secrets.compare_digest(t.encode(), token)]
        return known[0] if known else None

    @staticmethod
    async def _refuse(error: ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": 1008, "reason": error.kind})
            return
        await JSONResponse(error.body, error.status)(scope, receive, send)


async def read_body(receive: Receive, scope: Scope, limit: int) -> bytes:
    """The whole body. Errors: ServiceError 413 where it is longer than `limit` bytes."""
    too_long = ServiceError(413, "too_large", f"a request may have at most {limit} bytes")
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise too_long
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_long
        parts.append(part)
        if not message.get("more_body", False):
            break
    return b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once more, and then what the server has to say."""
    waiting = True

    async def again() -> Message:
        nonlocal waiting
        if waiting:
            waiting = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body, error.status, headers=headers)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _on_service_error(request, invalid(error.errors()))


def invalid(problems: Any) -> ServiceError:
    """The error for what pydantic found: 400 where it is no JSON, else 422 with the place."""
    first = problems[0] if problems else {"loc": (), "msg": "it is not what is asked for"}
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    if first.get("type") == "json_invalid":
        return ServiceError(400, "invalid_json", f"the body is no JSON: {first.get('ctx', {})}")
    return ServiceError(422, "invalid", f"{place or 'the body'}: {first['msg']}")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kinds = {404: "unknown_path", 405: "wrong_method"}
    kind = kinds.get(error.status_code, "invalid_json" if error.status_code == 400 else "http")
    body = ServiceError(error.status_code, kind, f"{request.url.path}: {error.detail}").body
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _on_crash(request: Request, error: Exception) -> Response:
    log.error("a request broke", path=request.url.path, error=f"{type(error).__name__}: {error}")
    return JSONResponse(
        ServiceError(500, "internal", "the service broke; its log says how").body, 500
    )


def parse_json(text: str | bytes) -> Any:
    """JSON from a socket. Errors: ServiceError 400."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServiceError(400, "invalid_json", f"this is no JSON: {error}") from None
