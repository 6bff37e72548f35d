"""Reads clients in turn, a slice of their data at a time.

By default, the event loop hands over up to 8 MB of a client's data, in reads of 256 KB, before it
looks at other clients. Thousands of requests or frames fit into one read. Here a read has at most
SLICE_BYTES. Slices beyond TURN_S of a turn of the event loop wait; then the tenants are read in
turn, whatever the number of their connections.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

SLICE_BYTES = 4096
"""Bytes of a read. They may hold hundreds of frames or chunks, which take about a millisecond."""

TURN_S = 0.001
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
            gate.read_slice()
            if time.perf_counter() > ends:
                break
        if self._lanes and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._read)


class Gate(asyncio.BufferedProtocol):
    """The protocol of a transport, and the transport of `protocol`, which it feeds in slices.

    While a slice waits here, the transport is not read.
    """

    def __init__(self, protocol: Any, lanes: Lanes) -> None:
        self.protocol, self._lanes = protocol, lanes
        self._transport: Any = None
        self._waiting = b""
        self._paused = self._in_lane = False

    def __getattr__(self, name: str) -> Any:
        """Methods of the transport."""
        return getattr(self._transport, name)

    # Towards the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.protocol.connection_made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._lanes.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._lanes.buffer[:nbytes])
        if not self._waiting and not self._paused and self._lanes.is_free:
            began = time.perf_counter()
            self.protocol.data_received(data)
            self._lanes.spend(time.perf_counter() - began)
            return
        self._waiting += data
        self._transport.pause_reading()
        self._go_on()

    def eof_received(self) -> bool | None:
        ended: bool | None = self.protocol.eof_received()
        return ended

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting = b""
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
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        self._go_on()

    # Towards the lanes

    def read_slice(self) -> None:
        """Hand over the slice that waits."""
        self._in_lane = False
        if not self._paused and not self._transport.is_closing():
            data, self._waiting = self._waiting, b""
            self.protocol.data_received(data)
        self._go_on()

    def _go_on(self) -> None:
        if self._transport.is_closing():
            self._waiting = b""
        elif self._paused or self._in_lane:
            pass
        elif self._waiting:
            self._in_lane = True
            self._lanes.add(self)
        else:
            self._transport.resume_reading()
