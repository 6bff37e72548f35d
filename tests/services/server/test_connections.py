"""Connection limits: raw sockets against a running service."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_world import LIGHTLY, OBEYS, Command, command, service, until
from variants import variants

from ludus.services.server.connections import ConnectionLimits
from ludus.services.server.limited_http import MAX_HEADERS, MAX_PIPELINED
from ludus.services.server.limited_websocket import MAX_FRAGMENTS

TOKEN = "a-token-of-sixteen-letters"
LIMITS = ConnectionLimits(max_connections=12, max_per_address=8, head_s=1.0, body_s=1.5, send_s=1.0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with service(OBEYS, tokens=(TOKEN,), connections=LIMITS) as address:
        yield address


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


@contextmanager
def dial(
    url: str, source: str = "127.0.0.1", receive_buffer: int | None = None
) -> Iterator[socket.socket]:
    with closing(socket.socket()) as opened:
        if receive_buffer is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        opened.settimeout(20)
        opened.bind((source, 0))
        opened.connect(address_of(url))
        yield opened


def answered(connection: socket.socket) -> tuple[int, str]:
    """Status and error type of the answer; (0, "") if there is none. Waits until the close."""
    told = b""
    with suppress(ConnectionError):
        while part := connection.recv(65536):
            told += part
    if not told:
        return 0, ""
    head, _, body = told.partition(b"\r\n\r\n")
    return int(head.split()[1]), str(json.loads(body)["error"]["type"])


def answer(connection: socket.socket) -> bytes:
    """One answer, of a head and of a body with a length. It may come in parts."""
    told = b""
    while (part := connection.recv(65536)) and b"\r\n\r\n" not in (told := told + part):
        pass
    head, _, body = told.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    assert length is not None, told
    while len(body) < int(length[1]) and (part := connection.recv(65536)):
        body += part
    return head


def send(connection: socket.socket, data: bytes) -> None:
    """Send as much as the server takes."""
    with suppress(ConnectionError):
        connection.sendall(data)


def head(path: str = "/envs", **headers: Any) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    method = "POST" if "Content_Length" in headers else "GET"
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


BEARER = f"Bearer {TOKEN}"

LONG_HEADS = {
    "a long header": b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 10_000 + b"\r\n\r\n",
    "a long path": b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n",
    "many headers": head(**{f"x{number}": 1 for number in range(MAX_HEADERS)}),
    "much in all": head(**{f"x{number}": "y" * 1000 for number in range(40)}),
    "an endless header": b"GET / HTTP/1.1\r\nX: " + b"x" * 5_000_000,
    "an endless path": b"GET /" + b"x" * 5_000_000,
}


@pytest.mark.parametrize("sent", LONG_HEADS.values(), ids=list(LONG_HEADS))
def test_long_heads_are_refused(url: str, sent: bytes) -> None:
    with dial(url) as connection:
        send(connection, sent)
        assert answered(connection) in [(431, "headers_too_large"), (0, "")]
        # (0, ""): closed with unread data, which resets the connection
    with dial(url) as connection:
        send(connection, sent[:30_000])
        status = answered(connection)[0]
        assert status in (431, 408)


def test_ordinary_requests_pass(url: str) -> None:
    """As many headers as browsers and proxies send, and a body in small chunks."""
    headers = {f"x-{number}": "y" * 500 for number in range(40)}
    with httpx.Client(base_url=url, headers={**headers, "Authorization": BEARER}) as client:
        body = json.dumps({"env": OBEYS}).encode()
        chunks = (body[place : place + 1] for place in range(len(body)))
        json_type = {"content-type": "application/json"}
        answer = client.post("/sessions", content=chunks, headers=json_type)
        assert answer.status_code == 200, answer.text
        path = f"/sessions/{answer.json()['session']}"
        assert client.delete(path).status_code == 200


def test_bodies_in_tiny_chunks_are_refused(url: str) -> None:
    with dial(url) as connection:
        sent = head("/sessions", Transfer_Encoding="chunked", Authorization=BEARER)
        send(connection, sent.replace(b"GET", b"POST") + b"1\r\n \r\n" * 300)
        assert answered(connection) == (413, "too_many_chunks")


UNFINISHED = {
    "half a head": head()[:-2],
    "half a line": b"GET /en",
    "half a body": head("/sessions", Content_Length=100, Authorization=BEARER) + b"{",
    "half a chunk": head("/sessions", Transfer_Encoding="chunked", Authorization=BEARER).replace(
        b"GET", b"POST"
    )
    + b"10\r\n{",
}


@pytest.mark.parametrize("kind", variants(UNFINISHED, ["half a head", "half a body"]))
def test_unfinished_requests_end(url: str, kind: str) -> None:
    with dial(url) as connection:
        send(connection, UNFINISHED[kind])
        assert answered(connection) == (408, "timeout")


def test_slow_heads_end_though_bytes_keep_coming(url: str) -> None:
    with dial(url) as connection:
        with suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"\r\n")
                time.sleep(0.05)
        assert answered(connection)[0] in (408, 0)


def test_only_clients_with_a_token_may_be_idle(url: str) -> None:
    with dial(url) as silent, dial(url) as unknown, dial(url) as known:
        send(unknown, head("/health"))
        send(known, head(Authorization=BEARER))
        for connection in (unknown, known):
            assert answer(connection).startswith(b"HTTP/1.1 200")
        assert silent.recv(1) == b""
        assert unknown.recv(1) == b""
        send(known, head(Authorization=BEARER))
        assert answer(known).startswith(b"HTTP/1.1 200")


def test_half_sent_heads_do_not_take_the_place_of_requests() -> None:
    """The oldest of them is closed for a new connection, of the same address or in all."""
    limits = ConnectionLimits(max_connections=12, max_per_address=8, head_s=60)
    with service(OBEYS, connections=limits) as url, ExitStack() as stack:
        for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            for _ in range(20):
                connection = stack.enter_context(dial(url, source))
                send(connection, b"GET / HT")
        for _ in range(5):
            assert httpx.get(f"{url}/envs").status_code == 200


def test_connections_are_limited_by_address_and_in_all(url: str) -> None:
    def busy(source: str) -> socket.socket:
        connection = stack.enter_context(dial(url, source))
        send(connection, head(Authorization=BEARER))
        connection.recv(65536)
        return connection

    def refused(source: str) -> tuple[int, str]:
        with dial(url, source) as connection:
            return answered(connection)

    with ExitStack() as stack:
        for _ in range(8):
            busy("127.0.0.2")
        assert refused("127.0.0.2") == (503, "too_many_connections")
        for _ in range(4):
            busy("127.0.0.3")
        assert refused("127.0.0.3") == (503, "too_many_connections")
    until(lambda: refused_not(url))


def refused_not(url: str) -> bool:
    return httpx.get(f"{url}/health").status_code == 200


def test_pipelined_requests_are_limited(url: str) -> None:
    with dial(url) as connection:
        send(connection, head(Authorization=BEARER) * 4)
        until_count(connection, b"HTTP/1.1 200", 4)
        send(connection, head(Authorization=BEARER) * (100 * MAX_PIPELINED))
        told = b""
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                told += part
        assert told.count(b"HTTP/1.1 200") <= 2 * MAX_PIPELINED


def until_count(connection: socket.socket, what: bytes, number: int) -> None:
    told = b""
    while told.count(what) < number:
        part = connection.recv(65536)
        assert part, told
        told += part


# Bytes of unfinished bodies

OTHER = "another-token-of-letters"


@pytest.fixture(scope="module")
def narrow() -> Iterator[str]:
    """A service that holds 2 MB of unfinished bodies and messages, of all clients together."""
    limits = ConnectionLimits(max_received_bytes=2_000_000)
    with service(OBEYS, tokens=(TOKEN, OTHER), connections=limits) as address:
        yield address


def whole_body(url: str, token: str) -> httpx.Response:
    """The answer to a complete request of 800 KB."""
    body = {"env": OBEYS + " " * 800_000}
    return httpx.post(f"{url}/sessions", json=body, headers={"Authorization": f"Bearer {token}"})


def test_half_sent_bodies_have_a_limit_in_all(narrow: str) -> None:
    """Bodies of the token that has sent most give way; other clients are served.

    The oldest goes first: that of the head which the service read first, which under load is not
    always the one sent first.
    """
    half = head("/sessions", Content_Length=890_000, Authorization=BEARER) + b"{" * 800_000
    with ExitStack() as stack:
        opened = [stack.enter_context(dial(narrow)) for _ in range(5)]
        for connection in opened:
            send(connection, half)
        waiting = list(opened)
        while len(waiting) > 2:  # two fit
            ready, _, _ = select.select(waiting, [], [], 20)
            assert ready
            for connection in ready:
                assert answered(connection) == (503, "busy")
                waiting.remove(connection)
        assert whole_body(narrow, OTHER).json()["error"]["type"] == "unknown_env"
        assert whole_body(narrow, TOKEN).json()["error"]["type"] == "unknown_env"


def test_half_sent_messages_have_a_limit_in_all(narrow: str) -> None:
    data = b"{" * 950_000
    half = b"\x81\xff" + len(data).to_bytes(8, "big") + bytes(4) + data[:900_000]
    with ExitStack() as stack:
        opened = [stack.enter_context(websocket(narrow)) for _ in range(3)]
        for connection in opened:
            send(connection, half)
        assert is_ended(opened[0])
        assert whole_body(narrow, OTHER).json()["error"]["type"] == "unknown_env"


def test_bytes_of_finished_bodies_are_counted_no_longer(narrow: str) -> None:
    for _ in range(5):
        assert whole_body(narrow, TOKEN).json()["error"]["type"] == "unknown_env"
    with ExitStack() as stack:
        for _ in range(6):
            connection = stack.enter_context(dial(narrow))
            send(connection, head("/sessions", Content_Length=890_000, Authorization=BEARER))
            send(connection, b"{" * 600_000)
            connection.close()
        assert whole_body(narrow, TOKEN).json()["error"]["type"] == "unknown_env"


# WebSockets


def upgrade(path: str = "/ws", *, token: str = TOKEN) -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    return head(
        path,
        Authorization=f"Bearer {token}",
        Connection="Upgrade",
        Upgrade="websocket",
        Sec_WebSocket_Version=13,
        Sec_WebSocket_Key=key,
    )


def frame(data: bytes, opcode: int = 1, *, fin: bool = True) -> bytes:
    size = len(data)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes([opcode | 0x80 * fin]) + length + bytes(4) + data  # masked with zeros


@contextmanager
def websocket(url: str, path: str = "/ws") -> Iterator[socket.socket]:
    with dial(url, receive_buffer=4096) as connection:
        send(connection, upgrade(path))
        assert connection.recv(4096).startswith(b"HTTP/1.1 101")
        yield connection


def flooded_until_closed(connection: socket.socket, data: bytes) -> None:
    """Send whole frames and read nothing, until the server ends the connection."""
    connection.settimeout(0.5)
    ends, rest = time.monotonic() + 60, b""
    while time.monotonic() < ends:
        rest = rest or data
        try:
            rest = rest[connection.send(rest) :]
        except TimeoutError:
            pass
        except OSError:
            return
    raise AssertionError("the server does not end the connection")


def flooded(connection: socket.socket, data: bytes, seconds: float) -> None:
    """Send for a time, or until the server takes no more; never read."""
    connection.settimeout(0.5)
    ends = time.monotonic() + seconds
    with suppress(OSError):
        while time.monotonic() < ends:
            connection.sendall(data)


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.fixture(scope="module")
def served() -> Iterator[Command]:
    with command(OBEYS, env={"LUDUS_TOKENS": TOKEN}) as made:
        yield made


FLOODS = {
    "calls": frame(json.dumps({"op": "fly", "id": "x" * 10_000}).encode()),
    "envs": frame(b'{"op": "create", "env": "no such environment"}'),
    "pings": frame(b"x" * 100, 9) * 100,
    "fragments": frame(b"", 1, fin=False) + frame(b"", 0, fin=False) * 100_000,
}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("kind", variants(FLOODS, ["calls", "fragments"]))
def test_memory_is_flat_though_a_client_does_not_read(served: Command, kind: str) -> None:
    pid, before = served.process.pid, resident_mb(served.process.pid)
    with websocket(served.url) as connection:
        flooded(connection, FLOODS[kind], 3)
        assert resident_mb(pid) < before + 40
        assert httpx.get(f"{served.url}/health").status_code == 200


def sessions(url: str) -> int:
    return int(httpx.get(f"{url}/health").json()["sessions"])


def step_with_much_to_read(connection: socket.socket) -> bytes:
    """Open a session; returns the frame of a step that is answered with 100 KB."""
    send(connection, frame(json.dumps({"op": "create", "env": OBEYS}).encode()))
    id = connection.recv(4096).partition(b'"session":"')[2].partition(b'"')[0].decode()
    send(connection, frame(json.dumps({"op": "reset", "session": id, "seed": 1}).encode()))
    connection.recv(4096)
    return frame(json.dumps({"op": "step", "session": id, "action": "much"}).encode())


def test_client_that_does_not_read_is_disconnected_and_its_sessions_closed(url: str) -> None:
    before = sessions(url)
    with websocket(url) as connection:
        flooded_until_closed(connection, step_with_much_to_read(connection))
        until(lambda: sessions(url) == before)


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT is Linux's")
def test_client_that_leaves_few_answers_unread_is_disconnected_too(url: str) -> None:
    """Answers of a megabyte in all, which the kernel holds for it."""
    before = sessions(url)
    with websocket(url) as connection:
        send(connection, step_with_much_to_read(connection) * 10)
        until(lambda: sessions(url) == before)


def test_client_of_openenv_that_does_not_read_is_disconnected(url: str) -> None:
    before = sessions(url)
    with websocket(url, f"/openenv/{OBEYS}/ws") as connection:
        send(connection, frame(b'{"type": "reset", "data": {"seed": 1}}'))
        until(lambda: sessions(url) == before + 1)
        step = frame(b'{"type": "step", "data": {"text": "much"}}')
        flooded_until_closed(connection, step)
        until(lambda: sessions(url) == before)


def is_ended(connection: socket.socket) -> bool:
    """True if the server ends the connection without a word; waits for it."""
    with suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


@pytest.mark.slow
def test_unfinished_messages_and_fragments_end_the_socket(url: str) -> None:
    with websocket(url) as connection:
        send(connection, frame(b"{}")[:-1])
        assert is_ended(connection)
    with websocket(url) as connection:
        send(connection, frame(b"{", 1, fin=False) + frame(b"x", 0, fin=False))
        assert is_ended(connection)
    with websocket(url) as connection:
        send(connection, frame(b"", 1, fin=False) + frame(b"", 0, fin=False) * MAX_FRAGMENTS)
        assert is_ended(connection)


def test_a_client_that_leaves_in_the_middle_of_calls_is_no_error(url: str) -> None:
    """Answers that cannot be sent, while further calls wait to be read."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("uvicorn.error").addHandler(handler)
    before = sessions(url)
    try:
        for _ in range(5):
            with websocket(url) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                send(connection, frame(json.dumps({"op": "create", "env": OBEYS}).encode()))
                connection.recv(4096)
                flooded(connection, frame(json.dumps({"op": "x" * 8000}).encode()) * 3, 0.3)
        with websocket(url) as connection:
            send(connection, frame(b"bytes", 2))
            assert connection.recv(4096)[:1] == b"\x88"  # closed
        until(lambda: sessions(url) == before)
    finally:
        logging.getLogger("uvicorn.error").removeHandler(handler)
    assert [record.getMessage() for record in records if record.exc_info] == []


def test_requests_that_the_shutdown_cancels_are_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that hangs, and a body that never ends: 503, and no traceback in the log."""
    monkeypatch.setattr("ludus.services.server.serve.GRACE_S", 1)
    with ExitStack() as stack:
        with service(LIGHTLY) as url:
            session = httpx.post(f"{url}/sessions", json={"env": LIGHTLY}).json()["session"]
            httpx.post(f"{url}/sessions/{session}/reset", json={"seed": 1})
            body = b'{"action": "await"}'
            kind = {"Content_Length": len(body), "Content_Type": "application/json"}
            asked = head(f"/sessions/{session}/step", **kind) + body
            opened = [stack.enter_context(dial(url)) for _ in range(2)]
            send(opened[0], asked.replace(b"GET", b"POST"))
            send(opened[1], head("/sessions", Content_Length=100) + b"{")
            until(lambda: httpx.get(f"{url}/sessions/{session}").json()["state"] == "playing")
        assert [answered(connection) for connection in opened] == [(503, "stopping")] * 2
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_an_idle_socket_stays_open(url: str) -> None:
    """Trainers think between two steps, for longer than any of the limits here."""
    with websocket(url) as connection:
        time.sleep(2)
        send(connection, frame(b'{"id": 1, "op": "fly"}'))
        assert b'"id":1' in connection.recv(4096)
