"""Attacks on the environment service: its memory, and the latency of another client meanwhile.

    python benchmarks/service_attacks.py

One process attacks with a second valid token, another steps TextCraft and measures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

import httpx
from common import machine, tabulate, write
from env_service import memory_of, service

TOKENS = ("bystanders-token-16", "attackers-token-16")
BEARER = f"Authorization: Bearer {TOKENS[1]}"


@dataclass(frozen=True)
class Row:
    """p99 in ms of the bystander's steps alone and under attack; the service's memory in MB."""

    attack: str
    alone_ms: float
    during_ms: float
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
    """Send WebSocket messages; never read an answer."""
    connection = dial(port)
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", key)
    connection.sendall(head("GET /ws", BEARER, *upgrade))
    connection.recv(1000)
    with suppress(ConnectionError):
        while True:
            with suppress(TimeoutError):
                connection.sendall(data)


def idle_attacker(port: int) -> None:
    """None: a process that only computes"""
    while port:
        pass


def unread_answers(port: int) -> None:
    """A WebSocket client that never reads."""
    while True:
        flood_socket(port, frame(json.dumps({"op": "fly", "id": "x" * 10_000}).encode()))


def unread_pongs(port: int) -> None:
    """Pings without an end, no pong read."""
    while True:
        flood_socket(port, frame(b"x" * 100, 9) * 100)
        time.sleep(0.05)


def long_headers(port: int) -> None:
    """Headers of 20 MB."""
    while True:
        connection = dial(port)
        with suppress(OSError):
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
        connection = dial(port)
        with suppress(OSError):
            connection.sendall(head("GET /envs", BEARER) * 1000)
        time.sleep(0.05)


ATTACKS: tuple[Callable[[int], None], ...] = (
    idle_attacker,
    unread_answers,
    unread_pongs,
    long_headers,
    half_headers,
    half_bodies,
    all_sessions,
    pipelined,
)


class Bystander:
    """A client that steps an episode every 5 ms."""

    def __init__(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {TOKENS[0]}"}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=30)
        made = self.client.post("/sessions", json={"env": "textcraft"}).json()
        self.path = f"/sessions/{made['session']}"
        self.client.post(f"{self.path}/reset", json={"seed": 1}).raise_for_status()
        self.failed = 0

    def p99_ms(self, seconds: float, watch: Callable[[], object]) -> float:
        times = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            began = time.perf_counter()
            try:
                answer = self.client.post(f"{self.path}/step", json={"action": "inventory"})
                self.failed += answer.status_code != 200
            except httpx.HTTPError:
                self.failed += 1
            times.append(time.perf_counter() - began)
            watch()
            time.sleep(0.005)
        return 1000 * statistics.quantiles(times, n=100)[98]


def measured(attack: Callable[[int], None], seconds: float) -> Row:
    with service("textcraft", "--max-sessions", "200") as (url, pid):
        bystander = Bystander(url)
        bystander.p99_ms(1, lambda: None)
        alone = bystander.p99_ms(seconds, lambda: None)
        before = memory_of(pid)
        most = [before]
        port = int(url.rpartition(":")[2])
        attacker = multiprocessing.get_context("fork").Process(target=attack, args=(port,))
        attacker.start()
        time.sleep(1)
        during = bystander.p99_ms(seconds, lambda: most.append(memory_of(pid)))
        attacker.kill()
        attacker.join()
    return Row(attack.__name__, alone, during, bystander.failed, before, max(most))


PAGE = """# Attacks on the environment service

`benchmarks/service_attacks.py`: one process attacks `ludus serve env textcraft` (one worker) for
{seconds:g} s, where a token is needed with a valid one; a client with another token steps an
episode meanwhile. Attacker, client and service share the machine's 2 cores with other work, and an
attacker that sends without a pause takes one of them: *idle attacker* is a process that only
computes, for comparison.

- *p99*: of the client's steps, without the attack and during it.
- *failed*: of the client's steps.
- *memory*: resident memory of the service, before the attack and at most during it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--quick", action="store_true", help="a moment of each, nothing written")
    given = parser.parse_args()
    os.environ["LUDUS_TOKENS"] = ",".join(TOKENS)
    facts = machine(1)
    rows = []
    for attack in ATTACKS:
        rows.append(measured(attack, 1.0 if given.quick else given.seconds))
        print(rows[-1], file=sys.stderr, flush=True)
    names = {attack.__name__: (attack.__doc__ or "").rstrip(".") for attack in ATTACKS}
    table = tabulate(
        rows,
        ("attack", lambda row: names[row.attack]),
        ("p99 alone", lambda row: f"{row.alone_ms:.3g} ms"),
        ("p99 during", lambda row: f"{row.during_ms:.3g} ms"),
        ("ratio", lambda row: f"{row.during_ms / row.alone_ms:.2f}"),
        ("failed", lambda row: str(row.failed)),
        ("memory before", lambda row: f"{row.memory_before_mb:.0f} MB"),
        ("memory at most", lambda row: f"{row.memory_most_mb:.0f} MB"),
    )
    text = f"{PAGE.format(seconds=given.seconds)}\n{table}"
    if given.quick:
        print(text)
        return
    write("service-attacks", text, facts, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
