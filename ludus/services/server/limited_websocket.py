"""A WebSocket connection with limits (see `connections`)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ludus.services.server.connections import Connections, Sending, reset, tenant_of

MAX_FRAGMENTS = 1024
"""Fragments of a WebSocket message."""

MAX_PINGS = 100
"""Pings of a WebSocket client in SWEEP_S seconds."""


class LimitedWebSocket(Sending, WebSocketsSansIOProtocol):
    """A WebSocket with limits. While its client does not read, it is not read either."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections, self._limits = connections, connections.limits
        self.address = ""
        self._since = time.monotonic()
        self._num_messages = self._num_seen = self._num_pings = self._untaken = 0

    @property
    def tenant(self) -> str:
        """The token that the socket was accepted with, or the client's address."""
        return tenant_of(getattr(self, "scope", None), self.address)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        self._connections.received.release(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_draining()
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._drained_by = None
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """The next message, once the answers are sent."""
        await self.writable.wait()
        if not self.queue.empty():  # other clients first
            await asyncio.sleep(0)
        message = await super().receive()
        if self.queue.empty():
            self._untaken = 0
            self._count_received()
        if not self.writable.is_set() and not self.transport.is_closing():
            self.transport.pause_reading()
        return message

    def handle_ping(self) -> None:
        self._num_pings += 1
        if self._num_pings > MAX_PINGS:
            reset(self.transport)
        else:
            super().handle_ping()

    def handle_cont(self, event: Any) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            reset(self.transport)
        else:
            super().handle_cont(event)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._count_received()

    def give_way(self) -> None:
        """Close the socket, whose messages are among those that fill the memory."""
        reset(self.transport)

    def _count_received(self) -> None:
        """Count the bytes of a message that is not complete, and of those that wait."""
        if not self.disconnected:
            size = len(self.conn.reader.buffer) + sum(map(len, self.frames)) + self._untaken
            self._connections.received.hold(self, self.tenant, size)

    def send_receive_event_to_app(self) -> None:
        self._num_messages += 1
        self._untaken += sum(map(len, self.frames))
        super().send_receive_event_to_app()

    def overdue(self, now: float) -> bool:
        """True if the client does not read, or its handshake or a message does not end."""
        self._num_pings = 0
        incomplete = not self.handshake_complete or bool(self.frames or self.conn.reader.buffer)
        if not incomplete or self.read_paused or self._num_seen != self._num_messages:
            self._since, self._num_seen = now, self._num_messages
        limit = self._limits.body_s if self.handshake_complete else self._limits.head_s
        return self._is_stalled(now) or now - self._since > limit
