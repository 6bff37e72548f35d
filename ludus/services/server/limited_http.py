"""An HTTP connection with limits (see `connections`)."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ludus.services.server.app import ServiceError
from ludus.services.server.connections import Connections, Sending, tenant_of
from ludus.services.server.gate import SLICE_BYTES

MAX_HEADERS = 100
MAX_LINE_BYTES = 8_000
MAX_HEAD_BYTES = 32_000
"""Limits of a request's line and headers; `websockets` refuses a line of 8,192 bytes."""

MAX_CHUNKS = 256
MIN_CHUNK_BYTES = 16
"""Number of small chunks of a body, and size of those that are not small, on average."""

REQUESTS_LOG = logging.getLogger("ludus.services.http")
REQUESTS_LOG.setLevel(logging.ERROR)  # no line for each request that is not HTTP

MAX_PIPELINED = 16
"""Requests that a client may send ahead of its answers."""


class LimitedHttp(Sending, HttpToolsProtocol):
    """An HTTP connection with limits."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections, self._limits = connections, connections.limits
        self.logger = REQUESTS_LOG
        self.address = ""
        self._due: float | None = None
        self._phase = "idle"
        self._received = self._body = self._head = self._num_chunks = self._unanswered = 0
        self._refusal: ServiceError | None = None

    @property
    def tenant(self) -> str:
        """The token that the last request was accepted with, or the client's address."""
        return tenant_of(self.cycle.scope if self.cycle else None, self.address)

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
        self._connections.received.release(self)
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
        # A slice may hold the ends of several requests; a body in chunks of 1 byte is sent as 6.
        if head_is_long or self._received > SLICE_BYTES + 2 * MAX_HEAD_BYTES + 8 * self._body:
            self._refuse(431, "headers_too_large", f"headers may have {MAX_HEAD_BYTES} bytes")
        else:
            self._count_received()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._received = self._body = self._head = self._num_chunks = 0
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
        self._unanswered += len(body)
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS + self._body // MIN_CHUNK_BYTES:
            message = f"a body may have {MAX_CHUNKS} chunks of less than {MIN_CHUNK_BYTES} bytes"
            self._refusal = ServiceError(413, "too_many_chunks", message)
            raise self._refusal
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase, self._due = "answer", None
        if self.cycle is not None and self.cycle.response_complete:
            self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._count_received()
        if self._phase == "answer" and not self.pipeline:
            self._wait_for_request()
        elif self._phase == "body" and self._due is not None:  # answered before it was complete
            self._due = min(self._due, time.monotonic() + self._limits.head_s)

    def give_way(self) -> None:
        """Refuse the request, whose body is among those that fill the memory."""
        self._refuse(503, "busy", "too many bytes of unfinished requests; try again later")

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

    def _count_received(self) -> None:
        """Count the bytes of a body that is not complete, and of requests sent ahead."""
        receiving = self._phase == "body" and not self.cycle.response_complete
        if not receiving and not self.pipeline:
            self._unanswered = 0
        if self.address:  # another worker's request was counted there
            self._connections.received.hold(self, self.tenant, self._unanswered)

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


def _answer(status: int, kind: str, message: str) -> bytes:
    body = json.dumps(ServiceError(status, kind, message).body).encode()
    head = f"HTTP/1.1 {status} {kind}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
