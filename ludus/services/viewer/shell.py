"""The page's files, and the headers that keep it apart from other sites.

The files hold no data, so they need no token. The page sends the token with each request for data.
Model output is untrusted: the page's script writes it as text, and the Content-Security-Policy
allows scripts and styles of this address only, and no request to another.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from importlib import resources

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ludus.services.server.app import ServiceError
from ludus.services.server.auth import LOCAL_HOSTS

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """The content and the type of each file, by its path."""
    found: dict[str, tuple[bytes, str]] = {}
    for file in resources.files("ludus.services.viewer").joinpath("static").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in KINDS:
            path = "/" if file.name == "index.html" else f"/static/{file.name}"
            found[path] = file.read_bytes(), KINDS[suffix]
    return found


def add_page(app: FastAPI, files: dict[str, tuple[bytes, str]]) -> None:
    """Serve the page's files, and nothing else of that folder."""

    def route_of(content: bytes, kind: str) -> Callable[[], Response]:
        return lambda: Response(content, media_type=kind)

    for path, file in files.items():
        app.add_api_route(path, route_of(*file), include_in_schema=False)


class Shell:
    """Middleware: the headers of every answer; without tokens, only hosts of this machine.

    The latter stops DNS rebinding: another site's name that points to this machine.
    """

    def __init__(self, app: ASGIApp, tokens: Sequence[str]) -> None:
        self._app, self._open = app, not tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if self._open and not is_local(dict(scope["headers"]).get(b"host", b"")):
            error = ServiceError(
                403, "wrong_host", "without a token, open the page as localhost or 127.0.0.1"
            )
            answer = JSONResponse(error.body, error.status)
            await answer(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def is_local(host: bytes) -> bool:
    """True for a Host header that names this machine."""
    name = host.decode("latin-1").lower()
    name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
    if name in LOCAL_HOSTS or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
