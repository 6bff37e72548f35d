"""Attacks on the environment service: its memory, and the latency of another client meanwhile.

    python benchmarks/service_attacks.py

One process attacks with a second valid token, another steps TextCraft and measures. On few cores an
attacker costs others time without touching the service. So each attack is compared with a process
that only computes, and uses as much processor time as the attacker did, and with the same attack on
a server of its own, a sink. The four cases alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import uvloop
from common import machine, processor_seconds, tabulate, write
from env_service import memory_of, service

TOKENS = ("bystanders-token-16", "attackers-token-16")
BEARER = f"Authorization: Bearer {TOKENS[1]}"


@dataclass(frozen=True)
class Row:
    """p99 in ms of the bystander's steps: alone; beside a process that computes as much as the
    attacker; beside the attack on another server, a sink; under attack. `attacker_cores`: processor
    seconds of the attacker in a second. The service's memory in MB."""

    attack: str
    alone_ms: float
    computing_ms: float
    sink_ms: float
    during_ms: float
    attacker_cores: float
    failed: int
    memory_before_mb: float
    memory_most_mb: float


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=0.5)


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def frame(data: bytes, opcode: int = 1) -> bytes:
    size = len(data)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes([0x80 | opcode]) + length + bytes(4) + data


def flood_socket(port: int, data: bytes) -> None:
    """Send WebSocket messages until disconnected; never read an answer."""
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", key)
    with suppress(OSError), dial(port) as connection:
        connection.sendall(head("GET /ws", BEARER, *upgrade))
        connection.recv(1000)
        while True:
            with suppress(TimeoutError):
                connection.sendall(data)


def compute(cores: float) -> None:
    """Use so many processor seconds a second, and nothing else."""
    began, used = time.monotonic(), time.process_time()
    while True:
        while time.process_time() - used < cores * (time.monotonic() - began):
            pass
        time.sleep(0.001)


def unread_answers(port: int) -> None:
    """A WebSocket client that never reads."""
    while True:
        flood_socket(port, frame(json.dumps({"op": "fly", "id": "x" * 10_000}).encode()))


def unread_pongs(port: int) -> None:
    """Pings without an end, no pong read."""
    while True:
        flood_socket(port, frame(b"x" * 100, 9) * 100)
        time.sleep(0.05)


def small_messages(port: int) -> None:
    """WebSocket messages of two bytes without an end."""
    while True:
        flood_socket(port, frame(b"{}") * 10_000)


def small_chunks(port: int) -> None:
    """Bodies in chunks of one byte."""
    while True:
        with suppress(OSError), dial(port) as connection:
            connection.sendall(head("POST /sessions", BEARER, "Transfer-Encoding: chunked"))
            connection.sendall(b"1\r\n \r\n" * 100_000)


def connects(port: int) -> None:
    """Connections opened and closed at once."""
    while True:
        with suppress(OSError):
            dial(port).close()


def wrong_tokens(port: int) -> None:
    """Requests with a wrong token, one a connection."""
    while True:
        with suppress(OSError), dial(port) as connection:
            connection.sendall(head("GET /envs", "Authorization: Bearer wrong"))
            connection.recv(1000)


def long_headers(port: int) -> None:
    """Headers of 20 MB."""
    while True:
        with suppress(OSError), dial(port) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nX: ")
            for _ in range(20):
                connection.sendall(b"x" * 2**20)


def half_sent(port: int, data: bytes) -> None:
    """A thousand connections with unfinished requests, renewed as they are closed."""
    kept: list[socket.socket] = []
    while True:
        for _ in range(50):
            with suppress(OSError):
                connection = dial(port)
                connection.sendall(data)
                kept.append(connection)
        for connection in kept[:-1000]:
            connection.close()
        kept = kept[-1000:]
        time.sleep(0.1)


def half_headers(port: int) -> None:
    """A thousand connections with half-sent headers."""
    half_sent(port, b"GET / HTTP/1.1\r\nX: ")


def half_bodies(port: int) -> None:
    """A thousand connections with half-sent bodies of 900 KB, with a token."""
    half_sent(port, head("POST /sessions", BEARER, "Content-Length: 900000") + b"{" * 10_000)


def all_sessions(port: int) -> None:
    """Sessions until they are refused, and on."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        headers = {"Authorization": f"Bearer {TOKENS[1]}"}
        calls = {"calls": [{"op": "create", "env": "textcraft"}] * 100}
        while True:
            client.post("/batch", json=calls, headers=headers)
            time.sleep(0.1)


def pipelined(port: int) -> None:
    """Requests by the thousand, sent ahead of their answers."""
    while True:
        with suppress(OSError), dial(port) as connection:
            connection.sendall(head("GET /envs", BEARER) * 1000)
        time.sleep(0.05)


ATTACKS: tuple[Callable[[int], None], ...] = (
    unread_answers,
    unread_pongs,
    small_messages,
    small_chunks,
    connects,
    wrong_tokens,
    long_headers,
    half_headers,
    half_bodies,
    all_sessions,
    pipelined,
)


class Sink(asyncio.Protocol):
    """A server that reads everything and answers each request with an empty response."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        if data.startswith((b"GET", b"POST")):
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


def sink(listening: socket.socket) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        await (await loop.create_server(Sink, sock=listening)).serve_forever()

    uvloop.run(serve())


@contextmanager
def running(target: Callable[..., None], argument: Any) -> Iterator[int]:
    """The id of a process that runs meanwhile."""
    process = multiprocessing.get_context("fork").Process(target=target, args=(argument,))
    process.start()
    assert process.pid is not None
    yield process.pid
    process.kill()
    process.join()


class Bystander:
    """A client that steps an episode every 5 ms."""

    def __init__(self, url: str, pid: int) -> None:
        headers = {"Authorization": f"Bearer {TOKENS[0]}"}
        self.client, self.pid = httpx.Client(base_url=url, headers=headers, timeout=30), pid
        made = self.client.post("/sessions", json={"env": "textcraft"}).json()
        self.path = f"/sessions/{made['session']}"
        self.client.post(f"{self.path}/reset", json={"seed": 1}).raise_for_status()
        self.failed, self.memory_mb = 0, memory_of(pid)

    def steps_ms(self, seconds: float) -> list[float]:
        """Latencies of the steps in so many seconds."""
        times = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            began = time.perf_counter()
            try:
                answer = self.client.post(f"{self.path}/step", json={"action": "inventory"})
                self.failed += answer.status_code != 200
            except httpx.HTTPError:
                self.failed += 1
            times.append(1000 * (time.perf_counter() - began))
            self.memory_mb = max(self.memory_mb, memory_of(self.pid))
            time.sleep(0.005)
        return times

    def beside(
        self, target: Callable[..., None], argument: float, seconds: float
    ) -> tuple[list[float], float]:
        """The same while another process runs, and that process' processor seconds a second."""
        with running(target, argument) as other:
            time.sleep(0.5)
            began, used = time.monotonic(), processor_seconds(other)
            times = self.steps_ms(seconds)
            cores = (processor_seconds(other) - used) / (time.monotonic() - began)
        time.sleep(0.5)
        return times, cores


def measured(attack: Callable[[int], None], seconds: float, rounds: int) -> Row:
    alone, computing, sunk, during, cores = [], [], [], [], []
    with service("textcraft", "--max-sessions", "200") as (url, pid):
        bystander = Bystander(url, pid)
        bystander.steps_ms(1)
        before = bystander.memory_mb
        for _ in range(rounds):
            alone += bystander.steps_ms(seconds)
            times, used = bystander.beside(attack, int(url.rpartition(":")[2]), seconds)
            during += times
            cores.append(used)
            computing += bystander.beside(compute, used, seconds)[0]
            listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
            with listening, running(sink, listening):
                sunk += bystander.beside(attack, listening.getsockname()[1], seconds)[0]
    return Row(
        attack.__name__,
        *(statistics.quantiles(times, n=100)[98] for times in (alone, computing, sunk, during)),
        attacker_cores=statistics.mean(cores),
        failed=bystander.failed,
        memory_before_mb=before,
        memory_most_mb=bystander.memory_mb,
    )


PAGE = """# Attacks on the environment service

`benchmarks/service_attacks.py`: one process attacks `ludus serve env textcraft` (one worker),
where a token is needed with a valid one; a client with another token steps an episode meanwhile.
Attacker, client and service share the machine's 2 cores with other work, so an attacker also costs
the client time that the service cannot give back. Hence a comparison: a process that does not
touch the service and computes for as much processor time as the attacker used. The system's network
costs time too: another comparison is the same attack on a *sink*, a server that reads everything
and answers nothing of length. The four cases alternate, {rounds} times {seconds:g} s each.

- *p99*: of the client's steps: alone, beside the process that computes, beside the attack on the
  sink, under attack.
- *ratio*: p99 under attack to p99 beside the process that computes; in brackets to p99 alone.
- *attacker*: its processor seconds a second.
- *failed*: of the client's steps.
- *memory*: resident memory of the service, before the attack and at most during it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case")
    parser.add_argument("--only", nargs="*", default=[], help="names of attacks; nothing written")
    parser.add_argument("--quick", action="store_true", help="a moment of each, nothing written")
    given = parser.parse_args()
    os.environ["LUDUS_TOKENS"] = ",".join(TOKENS)
    facts = machine(1)
    rows = []
    seconds, rounds = (1.0, 1) if given.quick else (given.seconds, given.rounds)
    for attack in ATTACKS:
        if given.only and attack.__name__ not in given.only:
            continue
        rows.append(measured(attack, seconds, rounds))
        print(rows[-1], file=sys.stderr, flush=True)
    names = {attack.__name__: (attack.__doc__ or "").rstrip(".") for attack in ATTACKS}
    table = tabulate(
        rows,
        ("attack", lambda row: names[row.attack]),
        ("p99 alone", lambda row: f"{row.alone_ms:.3g} ms"),
        ("beside computing", lambda row: f"{row.computing_ms:.3g} ms"),
        ("beside a sink", lambda row: f"{row.sink_ms:.3g} ms"),
        ("p99 attacked", lambda row: f"{row.during_ms:.3g} ms"),
        (
            "ratio",
            lambda row: (
                f"{row.during_ms / row.computing_ms:.2f} ({row.during_ms / row.alone_ms:.2f})"
            ),
        ),
        ("attacker", lambda row: f"{row.attacker_cores:.2f}"),
        ("failed", lambda row: str(row.failed)),
        ("memory before", lambda row: f"{row.memory_before_mb:.0f} MB"),
        ("memory at most", lambda row: f"{row.memory_most_mb:.0f} MB"),
    )
    text = f"{PAGE.format(seconds=seconds, rounds=rounds)}\n{table}"
    if given.quick or given.only:
        print(text)
        return
    write("service-attacks", text, facts, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
