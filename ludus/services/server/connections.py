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
- Bodies and messages that are not complete have at most `max_received_bytes` in a process
  (`received`). Clients are read in turn (`gate`).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from ludus.services.server.received import ReceivedBytes

MIN_BYTES_PER_S = 65_536
"""Rate at which a client has to read a long answer, beyond `send_s`."""

SWEEP_S = 0.5
"""Seconds between two checks of all deadlines."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Numbers of connections and of bytes in unfinished bodies, and seconds to send headers, send a
    body, and read an answer."""

    max_connections: int = 8192
    max_per_address: int = 4096
    head_s: float = 10.0
    body_s: float = 60.0
    send_s: float = 30.0
    max_received_bytes: int = 2**26


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
        self.received = ReceivedBytes(limits.max_received_bytes)

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
        reset(oldest.transport)
        return True

    def _sweep(self) -> None:
        now = time.monotonic()
        for connection in list(self._open):
            if connection.overdue(now):
                reset(connection.transport)
        self._sweeping = bool(self._open)
        if self._sweeping:
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


class Sending:
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


def tenant_of(scope: Any, address: str) -> str:
    """The token of a request that was accepted with one, or the client's address."""
    return str((scope or {}).get("state", {}).get("owner", "")) or address


def reset(transport: asyncio.Transport) -> None:
    """Abort a connection, and drop what the kernel has not sent yet.

    A plain abort leaves up to 4 MB in the kernel, for minutes, if the client does not read.
    """
    if not transport.is_closing() or transport.get_write_buffer_size():  # still open
        no_linger = struct.pack("ii", 1, 0)  # on, 0 seconds
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
    transport.abort()
