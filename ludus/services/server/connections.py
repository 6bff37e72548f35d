"""Connection limits: number, header size, time to receive, time to send.

uvicorn limits none of these. A client could hold connections with half-sent headers before any
authentication, or fill the server's memory by not reading its answers. Here:

- A request has at most MAX_HEADERS headers, MAX_LINE_BYTES in a line and MAX_HEAD_BYTES in all.
- Its headers arrive within `head_s`, its body within `body_s`. A connection without an accepted
  token is idle for at most `head_s`.
- A client that stops reading is not read either; after `send_s` it is disconnected.
- `max_connections` are open in a process, `max_per_address` from one address. Beyond that, the
  oldest connection that has sent no complete headers is closed in favour of the new one; if there
  is none, the new one is refused.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ludus.services.server.app import ServiceError
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_HEADERS = 100
MAX_LINE_BYTES = 8_000
MAX_HEAD_BYTES = 32_000
"""Limits of a request's line and headers; `websockets` refuses a line of 8,192 bytes."""

MAX_PIPELINED = 16
"""Requests that a client may send ahead of its answers."""

MAX_FRAGMENTS = 1024
"""Fragments of a WebSocket message."""

MAX_PINGS = 100
"""Pings of a WebSocket client in SWEEP_S seconds."""

CHUNK_SLACK = 2**18
"""Bytes of a read of the event loop, which may hold the ends of several requests."""

MIN_BYTES_PER_S = 65_536
"""Rate at which a client has to read a long answer, beyond `send_s`."""

SWEEP_S = 0.5
"""Seconds between two checks of all deadlines."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Numbers of connections, and seconds to send headers, send a body, and read an answer."""

    max_connections: int = 8192
    max_per_address: int = 4096
    head_s: float = 10.0
    body_s: float = 60.0
    send_s: float = 30.0


class Connection(Protocol):
    """A connection of either protocol."""

    address: str
    transport: asyncio.Transport

    def overdue(self, now: float) -> bool:
        """True if the connection has to be aborted; it may answer first."""


class Connections:
    """All connections of a process."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: dict[Connection, None] = {}
        self._pending: dict[Connection, None] = {}
        self._by_address: Counter[str] = Counter()
        self._sweeping = False

    def admit(self, connection: Connection) -> bool:
        """Register a connection; False if it has to be refused. Peers' sockets have no address."""
        if address := connection.address:
            if self._by_address[address] >= self.limits.max_per_address:
                if not self._evict(address):
                    return False
            elif len(self._open) >= self.limits.max_connections and not self._evict(None):
                return False
            self._by_address[address] += 1
            self._pending[connection] = None
        self._open[connection] = None
        if not self._sweeping:
            self._sweeping = True
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        return True

    def has_sent_head(self, connection: Connection) -> None:
        """The connection is no longer one of those that are closed in favour of others."""
        self._pending.pop(connection, None)

    def replace(self, old: Connection, new: Connection) -> None:
        """A WebSocket takes over an HTTP connection."""
        self.leave(old)
        self._open[new] = None
        self._by_address[new.address] += bool(new.address)

    def leave(self, connection: Connection) -> None:
        """Forget a connection; may be called again."""
        self._pending.pop(connection, None)
        if connection not in self._open:
            return
        del self._open[connection]
        if connection.address:
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    def _evict(self, address: str | None) -> bool:
        """Close the oldest pending connection, of an address or of all; False if there is none."""
        matches = (c for c in self._pending if address is None or c.address == address)
        oldest = next(matches, None)
        if oldest is None:
            return False
        self.leave(oldest)
        _reset(oldest.transport)
        return True

    def _sweep(self) -> None:
        now = time.monotonic()
        for connection in list(self._open):
            if connection.overdue(now):
                _reset(connection.transport)
        self._sweeping = bool(self._open)
        if self._sweeping:
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


class _Sending:
    """The deadline of a client that does not read."""

    transport: asyncio.Transport
    _connections: Connections
    _drained_by: float | None = None

    def _start_draining(self) -> None:
        size = self.transport.get_write_buffer_size()
        allowed = self._connections.limits.send_s + size / MIN_BYTES_PER_S
        self._drained_by = time.monotonic() + allowed

    def _is_stalled(self, now: float) -> bool:
        if self.transport.is_closing() and self._drained_by is None:
            self._start_draining()  # a closing transport waits until its buffer is sent
        return self._drained_by is not None and now > self._drained_by


class LimitedHttp(_Sending, HttpToolsProtocol):
    """An HTTP connection with limits."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections, self._limits = connections, connections.limits
        self.address = ""
        self._due: float | None = None
        self._phase = "idle"
        self._received = self._body = self._head = 0
        self._refusal: ServiceError | None = None

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self.address and sys.platform == "linux":  # answers that only the kernel holds
            milliseconds = max(1, int(1000 * self._limits.send_s))
            opened = transport.get_extra_info("socket")
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._wait_for("idle", self._limits.head_s)
        if not self._connections.admit(self):
            self.transport.write(_answer(503, "too_many_connections", "too many connections"))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._connections.has_sent_head(self)
        self._due = None
        super().handle_websocket_upgrade()
        websocket: Any = self.transport.get_protocol()
        self._connections.replace(self, websocket)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_draining()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._drained_by = None

    # Request

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._phase == "idle":
            self._wait_for("head", self._limits.head_s)
        self._received += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._refusal is not None:
            return
        head_is_long = self._phase == "head" and self._received > MAX_HEAD_BYTES
        # A body in chunks of one byte is sent as six.
        if head_is_long or self._received > CHUNK_SLACK + 2 * MAX_HEAD_BYTES + 8 * self._body:
            self._refuse(431, "headers_too_large", f"headers may have {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._received = self._body = self._head = 0
        self._wait_for("head", self._limits.head_s)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._check_head(len(url), len(self.url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase == "body":  # trailers are ignored
            return
        self._check_head(len(name) + len(value), len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = ServiceError(429, "too_many_requests", "too many pipelined requests")
            raise self._refusal
        self._connections.has_sent_head(self)
        self._wait_for("body", self._limits.body_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase, self._due = "answer", None
        if self.cycle is not None and self.cycle.response_complete:
            self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase == "answer" and not self.pipeline:
            self._wait_for_request()
        elif self._phase == "body" and self._due is not None:  # answered before it was complete
            self._due = min(self._due, time.monotonic() + self._limits.head_s)

    def overdue(self, now: float) -> bool:
        """Answers 408 to a request that is late."""
        if self._is_stalled(now):
            return True
        late = self._due is not None and now > self._due and not self.flow.read_paused
        if late and not self.transport.is_closing():
            if self._phase == "idle":
                self.transport.close()
            else:
                self._refuse(408, "timeout", f"the request's {self._phase} did not arrive in time")
        return False

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP, or beyond the limits."""
        refusal = self._refusal or ServiceError(400, "invalid_http", "not an HTTP request")
        self._refuse(refusal.status, refusal.kind, str(refusal))

    def _check_head(self, size: int, line: int) -> None:
        self._head += size
        if line > MAX_LINE_BYTES or self._head > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refusal = ServiceError(
                431,
                "headers_too_large",
                f"a request may have {MAX_HEADERS} headers, {MAX_LINE_BYTES} bytes in a line and "
                f"{MAX_HEAD_BYTES} in all",
            )
            raise self._refusal

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Answer, unless another answer has begun, and close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True  # the application is not to answer too
                self.cycle.message_event.set()
            self.transport.write(_answer(status, kind, message))
        self.transport.close()

    def _wait_for(self, phase: str, seconds: float) -> None:
        self._phase, self._due = phase, time.monotonic() + seconds

    def _wait_for_request(self) -> None:
        """Idle for the time of uvicorn's keep-alive, or less without an accepted token."""
        known = self.cycle.scope["state"].get("authenticated", False)
        self._wait_for("idle", self.timeout_keep_alive if known else self._limits.head_s)


class LimitedWebSocket(_Sending, WebSocketsSansIOProtocol):
    """A WebSocket with limits. While its client does not read, it is not read either."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections, self._limits = connections, connections.limits
        self.address = ""
        self._since = time.monotonic()
        self._num_messages = self._num_seen = self._num_pings = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
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
        message = await super().receive()
        if not self.writable.is_set() and not self.transport.is_closing():
            self.transport.pause_reading()
        return message

    def handle_ping(self) -> None:
        self._num_pings += 1
        if self._num_pings > MAX_PINGS:
            _reset(self.transport)
        else:
            super().handle_ping()

    def handle_cont(self, event: Any) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            _reset(self.transport)
        else:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        self._num_messages += 1
        super().send_receive_event_to_app()

    def overdue(self, now: float) -> bool:
        """True if the client does not read, or its handshake or a message does not end."""
        self._num_pings = 0
        incomplete = not self.handshake_complete or bool(self.frames or self.conn.reader.buffer)
        if not incomplete or self.read_paused or self._num_seen != self._num_messages:
            self._since, self._num_seen = now, self._num_messages
        limit = self._limits.body_s if self.handshake_complete else self._limits.head_s
        return self._is_stalled(now) or now - self._since > limit


def protocols(limits: ConnectionLimits) -> dict[str, Callable[..., asyncio.Protocol]]:
    """uvicorn's options `http` and `ws`, with connections counted together."""
    connections = Connections(limits)
    return {
        "http": partial(LimitedHttp, connections=connections),
        "ws": partial(LimitedWebSocket, connections=connections),
    }


def _reset(transport: asyncio.Transport) -> None:
    """Abort a connection, and drop what the kernel has not sent yet.

    A plain abort leaves up to 4 MB in the kernel, for minutes, if the client does not read.
    """
    if not transport.is_closing() or transport.get_write_buffer_size():  # still open
        no_linger = struct.pack("ii", 1, 0)  # on, 0 seconds
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
    transport.abort()


def _answer(status: int, kind: str, message: str) -> bytes:
    body = json.dumps(ServiceError(status, kind, message).body).encode()
    head = f"HTTP/1.1 {status} {kind}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
