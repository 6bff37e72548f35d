"""The part that all services share: tokens, `/health`, `/metrics`, JSON errors, body limit.

    app = create_app("environments", Settings(tokens=("secret",)), health=lambda: {"sessions": 3})
    app.add_api_route(...)

Every error is `{"error": {"type": "unknown_session", "message": "..."}}`. The status is 4xx if the
client can fix it, else 5xx.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
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
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from ludus import __version__
from ludus.core.errors import LudusError
from ludus.services.server.auth import match_token
from ludus.services.server.validation import wrong_field, wrong_part
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

OPEN_PATHS = ("/health",)
"""Paths without a token: a load balancer has none."""

NO_JSON_TYPE = "send it with the header Content-Type: application/json"
"""A browser sends that type to another site only with its leave, so no page can make a call."""

RETRY_AFTER_S = 1
"""Of the header Retry-After, and of the field `retry_after` on a WebSocket: a service that is full
may have room as soon as any session ends."""

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)


class ServiceError(LudusError):
    """An error response: status, `kind` for programs, message for people."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind

    @classmethod
    def invalid(cls, field: str, message: str) -> ServiceError:
        """A request with a wrong field; `field` is its dotted path, or empty."""
        return cls(422, "invalid", f"{field or 'the body'}: {message}")

    @classmethod
    def not_json(cls, message: str) -> ServiceError:
        """A request whose body is not JSON."""
        return cls(400, "invalid_json", f"not JSON: {message}")

    @classmethod
    def from_http(cls, status: int, message: str) -> ServiceError:
        """An error of the HTTP framework, such as an unknown path."""
        kinds = {400: "invalid_json", 404: "unknown_path", 405: "wrong_method"}
        return cls(status, kinds.get(status, "http"), message)

    @classmethod
    def from_validation(cls, problems: Sequence[Any], annotation: Any) -> ServiceError:
        """The first of pydantic's errors about a value of the type `annotation`."""
        return cls.invalid(*wrong_field(problems, annotation))

    @classmethod
    def from_request(cls, problems: Sequence[Any], request: Request) -> ServiceError:
        """The first of pydantic's errors about a request."""
        first = problems[0]
        if first["type"] == "json_invalid":
            return cls.not_json(str(first.get("ctx", {}).get("error", "")))
        return cls.invalid(*wrong_part(problems, request))

    @classmethod
    def internal(cls) -> ServiceError:
        """An unexpected failure; details go to the log only."""
        return ServiceError(500, "internal", "internal error; see the service's log")

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"type": self.kind, "message": str(self)}}

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which the same request may succeed; None: it will not by itself."""
        return RETRY_AFTER_S if self.status in (429, 503) else None

    @property
    def entry(self) -> str:
        """The error as JSON: an entry of `POST /batch`, or a WebSocket message."""
        wait = {} if self.retry_after_s is None else {"retry_after": self.retry_after_s}
        return json.dumps({"status": self.status, **self.body, **wait})


class ErrorDetail(BaseModel):
    """An error: `type` for programs, `message` for people."""

    type: str
    message: str


class ErrorBody(BaseModel):
    """The body of every response that is not 2xx."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be carried out."},
    "5XX": {"model": ErrorBody, "description": "The service or its back end failed."},
}
"""Error responses of a route in the OpenAPI description."""


@dataclass(frozen=True)
class Settings:
    """Settings of any service. Without tokens, every client has access; `open_paths` need none."""

    tokens: tuple[str, ...] = ()
    max_body_bytes: int = 1_000_000
    open_paths: tuple[str, ...] = OPEN_PATHS
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    error_body: Callable[[str, ServiceError], dict[str, Any]] = lambda path, error: error.body
    """The body of an error at a path."""


def create_app(
    title: str,
    settings: Settings,
    *,
    health: Callable[[], Mapping[str, Any]],
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    middleware: Sequence[Middleware] = (),
    errors: type[ServiceError] = ServiceError,
    docs_url: str | None = "/docs",
) -> FastAPI:
    """An application with the common routes; the caller adds its own.

    `health()` returns the fields of `/health` besides `status`. `middleware` runs behind the guard.
    `errors` shapes the errors of validation and of the framework. The page at `docs_url` loads
    scripts from another site; None: no such page.
    """
    app = FastAPI(
        title=f"ludus: {title}",
        version=__version__,
        lifespan=lifespan,
        docs_url=docs_url,
        redoc_url=None,
        middleware=[Middleware(Guard, settings=settings), *middleware],
    )
    _add_error_handlers(app, errors, settings)

    @app.get("/health", tags=["service"])
    async def read_health() -> dict[str, Any]:
        """Status and load of the service."""
        return {"status": "ok", "version": __version__, **health()}

    @app.get("/metrics", tags=["service"], response_class=Response, responses=ERRORS)
    async def read_metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(generate_latest(settings.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _add_error_handlers(app: FastAPI, errors: type[ServiceError], settings: Settings) -> None:
    @app.exception_handler(ServiceError)
    async def on_service_error(request: Request, error: ServiceError) -> Response:
        wait = error.retry_after_s
        headers = None if wait is None else {"Retry-After": str(wait)}
        body = settings.error_body(request.url.path, error)
        return JSONResponse(body, error.status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        problems = error.errors()
        if problems and problems[0]["loc"] == ("body",) and not _says_json(request):
            return await on_service_error(request, errors.invalid("", NO_JSON_TYPE))
        return await on_service_error(request, errors.from_request(problems, request))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        wrong = errors.from_http(error.status_code, f"{path}: {error.detail}")
        body = settings.error_body(path, wrong)
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def on_crash(request: Request, error: Exception) -> Response:
        log.error("request failed", path=request.url.path, error=f"{type(error).__name__}: {error}")
        return await on_service_error(request, ServiceError.internal())


def _says_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def owner_of(scope: Scope) -> str:
    """The token of a request, which owns whatever the request opens. Empty without tokens."""
    return str(scope.get("state", {}).get("owner", ""))


class Guard:
    """The outermost middleware: checks the token, limits the body, measures latency.

    A body above the limit is refused as soon as the limit is passed, and never held in memory.
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
        if owner is None and scope["path"] not in self._settings.open_paths:
            error = ServiceError(401, "unauthorized", "send the header Authorization: Bearer TOKEN")
            await self._refuse(error, scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["owner"], state["authenticated"] = owner or "", owner is not None
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), 0

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            body = await read_body(receive, scope, self._settings.max_body_bytes)
            await self._app(scope, replayed(body, receive), send_and_note_status)
        except ServiceError as error:
            await self._refuse(error, scope, receive, send_and_note_status)
        except ClientGone:
            return
        except asyncio.CancelledError:  # by uvicorn, at the end of its shutdown
            if status:
                raise
            stopping = ServiceError(503, "stopping", "the service stops")
            await self._refuse(stopping, scope, receive, send_and_note_status)
        # A middleware may override the route: another worker's route, or None to skip counting.
        matched = getattr(scope.get("route"), "path", "none")
        if (route := scope["state"].get("route", matched)) is not None:
            self._seconds.labels(route, str(status)).observe(time.perf_counter() - started)

    def _owner(self, scope: Scope) -> str | None:
        """The request's token; "" if none is needed, None if it is missing or unknown."""
        if not self._settings.tokens:
            return ""
        headers = dict(scope["headers"])
        return match_token(headers.get(b"authorization", b""), self._settings.tokens)

    async def _refuse(
        self, error: ServiceError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": 1008, "reason": error.kind})
            return
        body = self._settings.error_body(scope["path"], error)
        await JSONResponse(body, error.status)(scope, receive, send)


class ClientGone(Exception):
    """The client disconnected, or was disconnected, before its request was complete."""


async def read_body(receive: Receive, scope: Scope, limit: int) -> bytes:
    """The whole body. Errors: ServiceError 413 above `limit` bytes; ClientGone."""
    too_large = ServiceError(413, "too_large", f"a request may have at most {limit} bytes")
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            break
    return bytes(body)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body that was read already, then the server's messages."""
    waiting = True

    async def receive_again() -> Message:
        nonlocal waiting
        if waiting:
            waiting = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return receive_again


@asynccontextmanager
async def accepted(websocket: WebSocket) -> AsyncIterator[None]:
    """Accept a WebSocket and close it at the end; a disconnect ends the block quietly."""
    await websocket.accept()
    try:
        yield
    except WebSocketDisconnect:
        pass
    finally:
        with suppress(RuntimeError, WebSocketDisconnect):
            await websocket.close()


async def receive_text(websocket: WebSocket) -> str:
    """The next message. Errors: WebSocketDisconnect, for a message of bytes too.

    Starlette's own raises RuntimeError where an answer to an earlier message could not be sent.
    """
    if websocket.application_state is not WebSocketState.CONNECTED:
        raise WebSocketDisconnect(1006)
    message = await websocket.receive()
    text: str | None = message.get("text")
    if text is None:  # a disconnect, or bytes
        raise WebSocketDisconnect(message.get("code", 1003))
    return text


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object in a WebSocket message. Errors: ServiceError 400, 422."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServiceError.not_json(str(error)) from None
    if not isinstance(message, dict):
        raise ServiceError(422, "invalid", "a message must be a JSON object")
    return message
