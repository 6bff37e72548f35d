"""Answers of a service that is broken or hostile end in an EnvError that names the service."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from threaded_server import reply, serving
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from ludus.core.errors import EnvError
from ludus.core.types import Message, Task
from ludus.envs.remote import ask, host, wire
from ludus.envs.remote.env import RemoteEnv

TASK = Task(id="a", source="remote", data={"tier": None, "seed": 1})
NO_SERVICE = "does not answer as an environment service"


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[str]:
    """An HTTP server with one answer to everything."""
    with serving(lambda request: reply(request, status, body, **headers)) as port:
        yield f"http://127.0.0.1:{port}"


SCHEMA = {"tools": [], "score_range": [0, 1], "success_at": 1, "max_turns": 3}


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, b"null", NO_SERVICE),
        (200, b"[1]", NO_SERVICE),
        (200, b"{}", f"{NO_SERVICE}: tools: Field required"),
        (200, json.dumps({**SCHEMA, "score_range": None}).encode(), f"{NO_SERVICE}: score_range"),
        (200, json.dumps({**SCHEMA, "max_turns": "many"}).encode(), f"{NO_SERVICE}: max_turns"),
        (200, b"{no json", "no environment service answers at"),
        (200, b"\xff\xfe", "no environment service answers at"),
        (200, b"[" * 100_000, "no environment service answers at"),
        (500, b"null", NO_SERVICE),
        (500, b'{"error": "x"}', f"{NO_SERVICE}: error"),
        (200, b" " * 2_000_000, "the answer has over 1,000,000 bytes"),
    ],
)
def test_descriptions(monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, said: str) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", 1_000_000)
    with answering(status, body) as url, pytest.raises(EnvError, match=said):
        RemoteEnv(url=url, env="x").tools()
    with answering(status, body) as url, pytest.raises(EnvError):
        RemoteEnv(url=url).tools()


def test_a_redirect_names_its_address() -> None:
    said = "redirects to 'https://elsewhere/': give that address"
    with answering(302, b"", Location="https://elsewhere/") as url:
        env = RemoteEnv(url=url, env="x")
        with pytest.raises(EnvError, match=said):
            env.tools()


@pytest.mark.parametrize(
    "limits",
    ['"score_range": [0, NaN], "success_at": 1', '"score_range": [0, 1], "success_at": Infinity'],
)
def test_limits_that_are_no_numbers_are_refused(limits: str) -> None:
    body = f'{{"status": "ok", "tools": [], "max_turns": 5, {limits}}}'
    with answering(200, body.encode()) as url, pytest.raises(EnvError, match=NO_SERVICE):
        RemoteEnv(url=url, env="x").tools()


def test_a_compressed_answer_is_refused_unread() -> None:
    body = gzip.compress(gzip.compress(b" " * 10_000_000))
    with answering(200, body, **{"Content-Encoding": "gzip, gzip"}) as url:
        env = RemoteEnv(url=url, env="x")
        with pytest.raises(EnvError, match="the answer is compressed"):
            env.tools()


@pytest.mark.parametrize("line", [b"x", b"HTTP/1.1 103 Early Hints\r\n\r\n"])
def test_a_header_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    over = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"" if line.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\nX: ")
        with suppress(OSError):
            while not over.wait(0.05):
                request.wfile.write(line)

    monkeypatch.setattr(ask, "CONNECT_S", 0.5)
    with serving(drip) as port:
        try:
            with pytest.raises(EnvError, match="the answer is too slow"):
                ask.ask(dict, f"http://127.0.0.1:{port}", "GET", "/health", answer_s=0.5)
        finally:
            over.set()


def ok(result: Any) -> str:
    return json.dumps({"status": 200, "result": result})


OPENED, STARTED = ok({"session": "s"}), ok({"messages": [{"role": "user", "content": "go"}]})


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (["{no json"], "no environment service answers"),
        ([b"\xff"], "no environment service answers"),
        (["null"], NO_SERVICE),
        (["{}"], f"{NO_SERVICE}: status"),
        ([json.dumps({"status": 503, "retry_after": float("nan")})], f"{NO_SERVICE}: retry_after"),
        ([json.dumps({"status": 418})], "no error is told"),
        ([ok(None)], NO_SERVICE),
        ([ok({"session": None})], f"{NO_SERVICE}: session"),
        ([OPENED, ok([])], NO_SERVICE),
        ([OPENED, ok({"messages": "x"})], f"{NO_SERVICE}: messages"),
        ([OPENED, STARTED, ok({"reward": "x"})], NO_SERVICE),
        ([OPENED, STARTED, " " * 2_000_000], "is gone"),
        ([OPENED, STARTED], "is gone"),
    ],
)
async def test_episodes(
    monkeypatch: pytest.MonkeyPatch, answers: list[str | bytes], said: str
) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", 1_000_000)

    async def hostile(socket: ServerConnection) -> None:
        left = list(answers)
        async for text in socket:
            if not left:
                return  # cut in the middle of a call
            answer, call = left.pop(0), json.loads(text)
            if isinstance(answer, str) and answer.startswith("{") and call["op"] != "close":
                with suppress(ValueError):  # no JSON is sent as it is
                    answer = json.dumps({**json.loads(answer), "id": call["id"]})
            await socket.send(answer)

    async with serve(hostile, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        env = RemoteEnv(url=f"http://127.0.0.1:{port}", env="x", patience_s=0.0)
        with pytest.raises(EnvError, match=said):
            await _play(env)
        await env.close()


async def test_a_redirected_session_is_refused() -> None:
    async def elsewhere(socket: ServerConnection) -> None:
        pytest.fail("the redirect was followed")

    async with serve(elsewhere, "127.0.0.1", 0) as other:
        place = f"ws://127.0.0.1:{next(iter(other.sockets)).getsockname()[1]}/ws"

        def redirect(socket: ServerConnection, request: Request) -> Response:
            return Response(302, "Found", Headers(Location=place))

        async with serve(elsewhere, "127.0.0.1", 0, process_request=redirect) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            env = RemoteEnv(url=f"http://127.0.0.1:{port}", env="x", patience_s=0.5)
            with pytest.raises(EnvError, match=f"redirects to '{place}': give that address"):
                await env.reset(TASK)


async def test_a_session_that_never_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CREATE_S", 0.2)

    async def mute(socket: ServerConnection) -> None:
        async for _ in socket:
            pass

    async with serve(mute, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        env = RemoteEnv(url=f"http://127.0.0.1:{port}", env="x", patience_s=0.5)
        with pytest.raises(EnvError, match=r"has not opened a session within 0\.2 s"):
            await env.reset(TASK)


async def _play(env: RemoteEnv) -> None:
    await env.reset(TASK)
    await env.step(Message(role="assistant", content="x"))
