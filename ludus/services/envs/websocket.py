"""WebSocket of the environment service: one call per message; sessions end with the socket."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from ludus.services.envs.api import CALL, MAX_CALLS, Call, CallExecutor, Close, Create, result_entry
from ludus.services.server.app import ServiceError, accepted, parse_object, receive_text
from ludus.services.server.shares import client_of
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)


def add_socket(app: FastAPI, executor: CallExecutor) -> None:
    """Serve `/ws`."""

    @app.websocket("/ws")
    async def socket(websocket: WebSocket) -> None:
        """Calls, one per message, each with an `id` that its answer repeats.

        Sessions that were opened here end with the socket.
        """
        connection = _Connection(websocket, executor)
        async with accepted(websocket):
            try:
                while True:
                    connection.start(await receive_text(websocket))
            finally:
                await connection.close()


class _Connection:
    """A WebSocket: its running calls, and the sessions that it opened."""

    def __init__(self, websocket: WebSocket, executor: CallExecutor) -> None:
        self._websocket, self._executor = websocket, executor
        self._client = client_of(websocket.scope)
        self._opened: set[str] = set()
        self._calls: set[asyncio.Task[None]] = set()

    def start(self, text: str) -> None:
        task = asyncio.create_task(self._answer(text))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def close(self) -> None:
        """Cancel the running calls and close the sessions."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        sessions = self._executor.sessions
        for id in self._opened:
            with suppress(ServiceError):
                await sessions.close(
                    sessions.by_id(id, self._client.token), "its socket was closed"
                )

    async def _answer(self, text: str) -> None:
        id: Any = None
        try:
            message = parse_object(text)
            given = message.pop("id", None)
            if isinstance(given, bool) or not isinstance(given, int | str | None):
                raise ServiceError(422, "invalid", "id: must be a number or a string")
            id = given
            entry = await self._run(message)
        except ServiceError as error:
            entry = error.entry
        except Exception as error:
            log.error("call failed", error=f"{type(error).__name__}: {error}")
            entry = ServiceError.internal().entry
        with suppress(RuntimeError, WebSocketDisconnect):
            await self._websocket.send_text(f'{{"id":{json.dumps(id)},{entry[1:]}')

    async def _run(self, message: dict[str, Any]) -> str:
        if len(self._calls) > MAX_CALLS:
            raise ServiceError(429, "too_many_calls", f"{MAX_CALLS} calls are running")
        try:
            call = CALL.validate_python(message)
        except ValidationError as error:
            raise ServiceError.from_validation(error.errors(), Call) from None
        if isinstance(call, Create):
            opened: Any = await self._executor.run(call, self._client)
            self._opened.add(opened.session)
            return result_entry(opened)
        if isinstance(call, Close):
            self._opened.discard(call.session)
        return await self._executor.entry(call, self._client)
