"""The WebSocket of the environment service: calls, one a message, and sessions that end with it."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from ludus.services.envs.api import CALL, MAX_CALLS, Close, Create, Service
from ludus.services.server.app import ServiceError, invalid, owner_of, parse_json
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)


def add_socket(app: FastAPI, service: Service) -> None:
    """Serve `/ws`."""

    @app.websocket("/ws")
    async def socket(websocket: WebSocket) -> None:
        """Calls, one a message, each with an `id` that its answer repeats.

        Sessions that were opened here end with the socket.
        """
        await websocket.accept()
        talk = _Talk(websocket, service)
        try:
            while True:
                talk.hear(await websocket.receive_text())
        except (WebSocketDisconnect, KeyError):  # KeyError: a message of bytes
            pass
        finally:
            await talk.end()
            with suppress(RuntimeError, WebSocketDisconnect):
                await websocket.close()


class _Talk:
    """One socket: its calls under way, and the sessions that it opened."""

    def __init__(self, websocket: WebSocket, service: Service) -> None:
        self._websocket, self._service = websocket, service
        self._owner = owner_of(websocket.scope)
        self._opened: set[str] = set()
        self._calls: set[asyncio.Task[None]] = set()

    def hear(self, text: str) -> None:
        """Start to carry out a message's call."""
        task = asyncio.create_task(self._answer(text))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def end(self) -> None:
        """Stop what is under way, and close the sessions."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for id in self._opened:
            with suppress(ServiceError):
                session = self._service.sessions.by_id(id, self._owner)
                await self._service.sessions.close(session, "its socket was closed")

    async def _answer(self, text: str) -> None:
        number: Any = None
        try:
            message = parse_json(text)
            if not isinstance(message, dict):
                raise ServiceError(422, "invalid", "a message is a JSON object")
            given = message.pop("id", None)
            if isinstance(given, bool) or not isinstance(given, int | str | None):
                raise ServiceError(422, "invalid", "id: it has to be a number or a text")
            number = given
            outcome = await self._carry_out(message)
        except ServiceError as error:
            outcome = error.outcome
        except Exception as error:
            log.error("a call broke", error=f"{type(error).__name__}: {error}")
            broke = ServiceError(500, "internal", "the service broke; its log says how")
            outcome = broke.outcome
        with suppress(RuntimeError, WebSocketDisconnect):
            await self._websocket.send_text(f'{{"id":{json.dumps(number)},{outcome[1:]}')

    async def _carry_out(self, message: dict[str, Any]) -> str:
        if len(self._calls) > MAX_CALLS:
            raise ServiceError(429, "too_many_calls", f"{MAX_CALLS} calls are under way")
        try:
            call = CALL.validate_python(message)
        except ValidationError as error:
            raise invalid(error.errors()) from None
        if isinstance(call, Create):
            opened = self._service.create(call.env, self._owner)
            self._opened.add(opened.session)
            return f'{{"status":200,"result":{opened.model_dump_json()}}}'
        if isinstance(call, Close):
            self._opened.discard(call.session)
        return await self._service.outcome(call, self._owner)
