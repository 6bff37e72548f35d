"""Slices of clients' data, read in turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop

from ludus.services.server import gate
from ludus.services.server.connections import ConnectionLimits, Connections
from ludus.services.server.gate import SLICE_BYTES, Gate, Lanes
from ludus.services.server.received import ReceivedBytes


class Reads(asyncio.Protocol):
    """Notes what it gets; pauses reading at every fifth slice."""

    def __init__(self, tenant: str, slices: list[tuple[str, bytes]]) -> None:
        self.tenant, self.slices = tenant, slices
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.slices.append((self.tenant, data))
        if len(self.slices) % 5 == 0:
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(0.001, self.transport.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


def gate_of(protocol: Reads, lanes: Lanes) -> Gate:
    return Gate(lambda: protocol, Connections(ConnectionLimits()), lanes, set())


@pytest.mark.parametrize("turn_s", [0.0, 60.0])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_clients_are_read_in_slices(
    loop: Any, turn_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes in order, whether slices wait for their turn or not."""
    monkeypatch.setattr(gate, "TURN_S", turn_s)
    data = bytes(range(256)) * 1000

    async def read() -> list[tuple[str, bytes]]:
        lanes, slices = Lanes(), list[tuple[str, bytes]]()
        protocol = Reads("a", slices)
        running = asyncio.get_running_loop()
        server = await running.create_server(lambda: gate_of(protocol, lanes), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(data)
        writer.close()
        await protocol.lost.wait()
        server.close()
        return slices

    with asyncio.Runner(loop_factory=loop) as runner:
        slices = runner.run(read())
    assert b"".join(slice for _, slice in slices) == data
    assert max(len(slice) for _, slice in slices) <= SLICE_BYTES


class Transport:
    """A transport that is never closed."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


async def test_tenants_are_read_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connections each has."""
    monkeypatch.setattr(gate, "TURN_S", 0.0)
    lanes, slices = Lanes(), list[tuple[str, bytes]]()
    for tenant in ["many"] * 50 + ["one", "other"]:
        feeding = gate_of(Reads(tenant, slices), lanes)
        feeding.connection_made(Transport())  # type: ignore[arg-type]
        feeding.get_buffer(-1)[:1] = b"x"
        feeding.buffer_updated(1)
    while len(slices) < 52:
        await asyncio.sleep(0)
    assert [tenant for tenant, _ in slices[:6]] == ["many", "one", "other", "many", "many", "many"]


class Holds:
    """A connection; notes whether it gave way."""

    gave_way = False

    def give_way(self) -> None:
        self.gave_way = True


def test_the_oldest_of_the_heaviest_tenant_gives_way() -> None:
    received = ReceivedBytes(100)
    heavy, light = [Holds() for _ in range(3)], Holds()
    for connection in heavy:
        received.hold(connection, "heavy", 10)
        received.hold(connection, "heavy", 30)
    received.hold(light, "light", 10)
    assert not any(connection.gave_way for connection in [*heavy, light])
    received.hold(light, "light", 20)
    assert [connection.gave_way for connection in [*heavy, light]] == [True, False, False, False]
    received.hold(light, "heavy", 20)  # its token is known now
    assert received.total == 80
    received.hold(light, "heavy", 0)
    for connection in heavy:
        received.release(connection)
    assert received.total == 0
