"""Reads clients in turn, a piece of their data at a time.

By default, the event loop hands over up to 8 MB of a client's data, in reads of 256 KB, before it
looks at other clients. Thousands of requests or frames fit into one read. Here a read has at most
SLICE_BYTES, and a connection's protocol gets them in pieces: small ones where the data takes long
to parse. Data beyond TURN_S of a turn of the event loop waits; then the tenants are read in turn,
whatever the number of their connections.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ludus.services.server.connections import Connections

SLICE_BYTES = 4096
"""Bytes of a read. They may hold 512 frames, which take 1.4 ms to parse."""

MIN_PIECE_BYTES, FIRST_PIECE_BYTES = 64, 512
"""Bytes of the smallest piece, and of a connection's first."""

TURN_S = 0.0005
"""Seconds of a turn of the event loop in which data is read. Their requests take about four times
as long."""


class Lanes:
    """Connections of a process whose data waits: a lane a tenant, read in turn.

    `buffer` is that of all reads: each is copied before the next.
    """

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(SLICE_BYTES))
        self._lanes: dict[str, deque[Gate]] = {}
        self._spent_s = 0.0
        self._counting = self._scheduled = False

    @property
    def is_free(self) -> bool:
        """True if data may be read at once."""
        return not self._lanes and self._spent_s < TURN_S

    def spend(self, seconds: float) -> None:
        """Count the time of a read in this turn of the event loop."""
        self._spent_s += seconds
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def add(self, gate: Gate) -> None:
        """Read a slice of the connection when it is its turn."""
        self._lanes.setdefault(gate.protocol.tenant, deque()).append(gate)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._read)

    def _end_turn(self) -> None:
        self._spent_s, self._counting = 0.0, False

    def _read(self) -> None:
        self._scheduled = False
        ends = time.perf_counter() + TURN_S
        while self._lanes:
            tenant = next(iter(self._lanes))
            gates = self._lanes.pop(tenant)
            gate = gates.popleft()
            if gates:
                self._lanes[tenant] = gates  # behind the others
            gate.read_piece()
            if time.perf_counter() > ends:
                break
        if self._lanes and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._read)


class Gate(asyncio.BufferedProtocol):
    """The protocol of a transport, and the transport of `protocol`, which it feeds in pieces.

    `make_protocol` is called at the first bytes, so a connection without any costs little. While
    data waits here, the transport is not read.
    """

    def __init__(
        self,
        make_protocol: Callable[[], Any],
        connections: Connections,
        lanes: Lanes,
        opened: set[Any],
    ) -> None:
        self.protocol: Any = None
        self._make_protocol, self._connections, self._lanes = make_protocol, connections, lanes
        self._opened = opened
        self.transport: Any = None
        self.address = ""
        self._due = time.monotonic() + connections.limits.head_s
        self._waiting, self._piece = b"", FIRST_PIECE_BYTES
        self._paused = self._in_lane = False

    def __getattr__(self, name: str) -> Any:
        """Methods of the transport."""
        return getattr(self.transport, name)

    # A connection without bytes

    def overdue(self, now: float) -> bool:
        """Closes a connection that sends nothing."""
        if now > self._due:
            self.transport.close()
        return False

    def shutdown(self) -> None:
        """Close, as the server stops."""
        self.transport.close()

    def _begin(self) -> None:
        """Make the protocol."""
        self._connections.leave(self)
        self._opened.discard(self)
        self.protocol = self._make_protocol()
        self.protocol.connection_made(self)

    # Towards the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        address = transport.get_extra_info("peername")
        self.address = str(address[0]) if isinstance(address, tuple) else ""
        if self._connections.admit(self):
            self._opened.add(self)
        else:
            self._begin()  # to refuse it

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._lanes.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.protocol is None:
            self._begin()
        waited = bool(self._waiting)
        self._waiting += self._lanes.buffer[:nbytes]
        while not waited and self._may_go_on and self._lanes.is_free:
            self._lanes.spend(self._hand_over())
        if self._waiting:
            self.transport.pause_reading()
            self._go_on()

    def eof_received(self) -> bool | None:
        ended: bool | None = self.protocol and self.protocol.eof_received()
        return ended

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting = b""
        if self.protocol is None:
            self._connections.leave(self)
            self._opened.discard(self)
        else:
            self.protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.protocol.resume_writing()

    # Towards the protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        self._paused = True
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        self._go_on()

    # Towards the lanes

    def read_piece(self) -> None:
        """Hand over a piece of what waits."""
        self._in_lane = False
        if self._may_go_on:
            self._hand_over()
        self._go_on()

    @property
    def _may_go_on(self) -> bool:
        return bool(self._waiting) and not self._paused and not self.transport.is_closing()

    def _hand_over(self) -> float:
        """Hand over a piece. Returns the seconds it took, which decide the size of the next one."""
        piece, self._waiting = self._waiting[: self._piece], self._waiting[self._piece :]
        began = time.perf_counter()
        self.protocol.data_received(piece)
        took = time.perf_counter() - began
        if took > TURN_S / 2:
            self._piece = max(MIN_PIECE_BYTES, self._piece // 2)
        elif took < TURN_S / 8:
            self._piece = min(SLICE_BYTES, 2 * self._piece)
        return took

    def _go_on(self) -> None:
        if self.transport.is_closing():
            self._waiting = b""
        elif self._paused or self._in_lane:
            pass
        elif self._waiting:
            self._in_lane = True
            self._lanes.add(self)
        else:
            self.transport.resume_reading()
