"""Answers of a service that is broken or hostile end in an EnvError that names the service."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from ludus.core.errors import EnvError
from ludus.core.types import Message, Task
from ludus.envs import remote
from ludus.envs.remote import RemoteEnv

TASK = Task(id="a", source="remote", data={"tier": None, "seed": 1})
NO_SERVICE = "does not answer as an environment service"


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[str]:
    """An HTTP server with one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


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
        (200, b" " * 2_000_000, "the answer is too large, or too slow"),
    ],
)
def test_descriptions(monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, said: str) -> None:
    monkeypatch.setattr(remote, "MAX_BYTES", 1_000_000)
    with answering(status, body) as url, pytest.raises(EnvError, match=said):
        RemoteEnv(url=url, env="x").tools()
    with answering(status, body) as url, pytest.raises(EnvError):
        RemoteEnv(url=url)._only_env()


def test_a_redirect_names_its_address() -> None:
    said = "redirects to 'https://elsewhere/': give that address"
    with answering(302, b"", Location="https://elsewhere/") as url:
        env = RemoteEnv(url=url, env="x")
        with pytest.raises(EnvError, match=said):
            env.tools()


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
    monkeypatch.setattr(remote, "MAX_BYTES", 1_000_000)

    async def hostile(socket: ServerConnection) -> None:
        left = list(answers)
        async for _ in socket:
            if not left:
                return  # cut in the middle of a call
            await socket.send(left.pop(0))

    async with serve(hostile, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        env = RemoteEnv(url=f"http://127.0.0.1:{port}", env="x", patience_s=0.0)
        with pytest.raises(EnvError, match=said):
            await _play(env)
        await env.close()


async def _play(env: RemoteEnv) -> None:
    await env.reset(TASK)
    await env.step(Message(role="assistant", content="x"))
