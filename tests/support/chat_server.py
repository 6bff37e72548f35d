"""A small OpenAI-compatible server on loopback: real HTTP, and a model of the test's own.

with ChatServer(lambda body: text("Action: win")) as server:
    Endpoint(server.url, "m")
"""

from __future__ import annotations

import inspect
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Answer = dict[str, Any] | Response
Say = Callable[[dict[str, Any]], Any]


def text(content: str, finish_reason: str = "stop", **more: Any) -> dict[str, Any]:
    """A chat completion that says this."""
    message = {"role": "assistant", "content": content}
    return {"choices": [{"message": message, "finish_reason": finish_reason, **more}]}


def call(name: str, arguments: str) -> dict[str, Any]:
    """A chat completion that calls a tool."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "call_x", "type": "function", "function": function}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return {"choices": [{"message": message, "finish_reason": "tool_calls"}]}


def num_turns(body: dict[str, Any]) -> int:
    """Turns of the model that the conversation already has."""
    return sum(message["role"] == "assistant" for message in body["messages"])


class ChatServer:
    """Serves `say`, a function or coroutine function of the request's body, in a thread."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        said = self._say(body)
        if inspect.isawaitable(said):
            said = await said
        if isinstance(said, Response):
            return said
        return Response(json.dumps(said), media_type="application/json")

    def __enter__(self) -> ChatServer:
        app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])
        config = uvicorn.Config(app, log_level="critical", access_log=False)
        self._server = uvicorn.Server(config)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(512)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        run = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.force_exit = True
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()
