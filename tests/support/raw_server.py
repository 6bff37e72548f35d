"""An HTTP server that answers with given bytes, or worse: it hangs, closes, or floods.

async with RawServer() as server:
    server.script = [CLOSE, answer({"x": 1})]     # the last is repeated
    server.bodies                                 # of the requests, parsed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

CLOSE, HANG, FLOOD = b"close", b"hang", b"flood"


def answer(body: Any, status: int = 200, *headers: str) -> bytes:
    """A response; `body` is bytes or written as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(content)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + content


class RawServer:
    """`script` holds answers, or functions from the request's body to one."""

    def __init__(self) -> None:
        self.script: list[bytes | Callable[[Any], bytes]] = [answer({})]
        self.bodies: list[Any] = []
        self.heads: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.delay_s = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while await self._one(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        sizes = [
            line.partition(":")[2]
            for line in head.lower().split("\r\n")
            if "content-length:" in line
        ]
        content = await reader.readexactly(int(sizes[0]) if sizes else 0)
        self.heads.append(head)
        self.bodies.append(json.loads(content) if content else None)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.in_flight -= 1
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        sent = entry(self.bodies[-1]) if callable(entry) else entry
        if sent == HANG:
            await asyncio.sleep(3600)
        if sent == FLOOD:
            writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 1000000000\r\n\r\n")
            for _ in range(1000):
                writer.write(b"x" * 1_000_000)
                await writer.drain()
        if sent != CLOSE:
            writer.write(sent)
            await writer.drain()
        return sent != CLOSE
