"""Draining: a service opens nothing new, what is open finishes, then it can stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Request

from ludus.services.server.app import ERRORS, ServiceError
from ludus.services.server.auth import match_token

DRAIN_PATH = "/drain"


class Drain:
    """The switch that drains a service. With a folder, that of all its workers: a file there."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = folder / "draining" if folder else None
        self._on = False

    @property
    def on(self) -> bool:
        return self._on if self._file is None else self._file.exists()

    def set(self, on: bool) -> None:
        self._on = on
        if self._file is None:
            return
        if on:
            self._file.touch()
        else:
            self._file.unlink(missing_ok=True)

    def require_off(self) -> None:
        """Errors: ServiceError 503 while the service drains."""
        if self.on:
            raise ServiceError(503, "draining", "the service drains: it opens no new sessions")


def add_drain(app: FastAPI, drain: Drain, num_open: Callable[[], int], admin: str) -> None:
    """Note the drain for the server; serve `/drain` for the token `admin`, if there is one."""
    app.state.drain, app.state.num_open = drain, num_open
    if not admin:
        return

    def turn(request: Request, on: bool) -> dict[str, bool]:
        header = request.headers.get("authorization", "").encode("latin-1")
        if match_token(header, [admin]) is None:
            raise ServiceError(403, "forbidden", "the administrator's token is needed")
        drain.set(on)
        return {"draining": drain.on}

    @app.post(DRAIN_PATH, responses=ERRORS, tags=["service"])
    async def begin(request: Request) -> dict[str, bool]:
        """Open no new sessions; open ones go on. Needs the token in LUDUS_ADMIN_TOKEN."""
        return turn(request, True)

    @app.delete(DRAIN_PATH, responses=ERRORS, tags=["service"])
    async def end(request: Request) -> dict[str, bool]:
        """Open sessions again."""
        return turn(request, False)
