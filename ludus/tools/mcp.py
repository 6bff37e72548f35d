"""MCP servers as tools, through the official SDK.

    {name: mcp, args: {command: [npx, -y, "@modelcontextprotocol/server-everything"]}}
    {name: mcp, args: {url: "http://127.0.0.1:8000/mcp"}}

All episodes share a connection, or each has its own (`per_episode`), which ends with the episode. A
server that dies in the middle of a call is a ToolError; the next call connects anew. A server that
is started by a command is stopped with all its processes, also if ludus is killed.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    CallToolResult,
    EmbeddedResource,
    TextContent,
    TextResourceContents,
)
from pydantic import Field

from ludus.core.errors import ConfigError, ToolError, described, did_you_mean
from ludus.core.remote import MAX_BYTES, authorization
from ludus.core.types import ToolCall, ToolSpec
from ludus.tools.base import Tool, ToolResult

GUARD = Path(__file__).with_name("mcp_guard.py")
MAX_LINE_BYTES = 4_000_000
"""Bytes of a message over stdio. The SDK's reader takes quadratic time in the length of a line."""

MAX_LOG_LINE = 65_536
LOG_S = 1.0
"""Seconds in which the rest of an ended server's stderr is read."""

MAX_PAGES = 100
RESTART_PAUSE_S = 1.0
"""Seconds between two attempts to connect: a server that dies at once is not started in a loop."""

MAX_SILENT = 3
"""Calls in a row without an answer, after which the server is connected anew."""

CLOSE_S = 6.0
"""Seconds that a server has to stop: longer than the SDK's own steps."""


class Mcp(Tool):
    """The tools of an MCP server.

    Errors: ConfigError for wrong arguments, and for a name in `only` that the server lacks.
    """

    def __init__(
        self,
        command: Annotated[
            list[str] | None,
            Field(min_length=1, description="Program and arguments of a server (stdio)."),
        ] = None,
        url: Annotated[
            str | None, Field(description="In place of `command`: a server (streamable HTTP).")
        ] = None,
        env: Annotated[
            dict[str, str] | None,
            Field(description="Environment variables of `command`, besides PATH, HOME and alike."),
        ] = None,
        only: Annotated[
            list[str] | None, Field(description="The server's tools to offer; null: all.")
        ] = None,
        prefix: Annotated[str, Field(description="Put before the functions' names.")] = "",
        per_episode: Annotated[
            bool, Field(description="A connection (and a process) for each episode.")
        ] = False,
        deadline_s: Annotated[float, Field(gt=0, description="Seconds of a call.")] = 30.0,
        token_env: Annotated[
            str | None, Field(description="With `url`: environment variable with its token.")
        ] = None,
    ) -> None:
        if (command is None) == (url is None):
            raise ConfigError("mcp: give either `command` (a program) or `url` (a server)")
        self._command, self._url, self._env = command, url, env
        self._headers = authorization(token_env)
        self._only, self._prefix = only, prefix
        self._per_episode, self._deadline_s = per_episode, deadline_s
        self._names: dict[str, str] = {}
        self._connections: dict[str, _Connection] = {}

    async def specs(self) -> Sequence[ToolSpec]:
        found: list[Any] = []
        cursor: str | None = None
        connection = self._connection("")
        for _ in range(MAX_PAGES):
            page = await connection.run(lambda client: client.list_tools(cursor=cursor))
            found += page.tools
            if (cursor := page.next_cursor) is None:
                break
        known = [tool.name for tool in found]
        for name in self._only or ():
            if name not in known:
                raise ConfigError(f"only: the server has no {name!r}{did_you_mean(name, known)}")
        offered = [tool for tool in found if self._only is None or tool.name in self._only]
        self._names = {self._named(tool.name): tool.name for tool in offered}
        if self._per_episode:
            await self.end("")
        return [
            ToolSpec(
                name=self._named(tool.name),
                description=tool.description or tool.title or "",
                parameters={"type": "object", **tool.input_schema},
            )
            for tool in offered
        ]

    async def call(self, call: ToolCall, episode: str) -> ToolResult:
        name = self._names[call.name]
        connection = self._connection(episode if self._per_episode else "")
        try:
            result = await connection.run(lambda client: client.call_tool(name, call.arguments))
        except _Blamed as error:
            return ToolResult(content=f"{call.name}: {error}", failed=True)
        return _read(result)

    async def end(self, episode: str) -> None:
        if self._per_episode and (connection := self._connections.pop(episode, None)):
            await connection.close()

    async def close(self) -> None:
        connections, self._connections = list(self._connections.values()), {}
        await asyncio.gather(*(connection.close() for connection in connections))

    def _named(self, name: str) -> str:
        return self._prefix + re.sub(r"[^A-Za-z0-9_.-]", "_", name)

    def _connection(self, key: str) -> _Connection:
        if key not in self._connections:
            kind = _EpisodeConnection if key else _Connection
            self._connections[key] = kind(self._transport, self._told, self._deadline_s)
        return self._connections[key]

    @property
    def _told(self) -> str:
        return self._url or f"`{' '.join(self._command or [])}`"

    def _transport(self) -> Any:
        """Transport that the SDK's client connects to."""
        if self._command is None:
            return _http(str(self._url), self._headers)
        command = self._command
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", str(GUARD), str(MAX_LINE_BYTES), *command]
        return _stdio(StdioServerParameters(command=command[0], args=command[1:], env=self._env))


class _Blamed(Exception):
    """The server says that the arguments are wrong."""


class _Connection:
    """A connection that is made when it is needed, and again after it was lost.

    The SDK's client must be opened and closed in one task: `_serve` is that task.
    """

    def __init__(self, transport: Any, told: str, deadline_s: float) -> None:
        self._transport, self._told, self._deadline_s = transport, told, deadline_s
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] | None = None
        self._stop = asyncio.Event()
        self._started = -RESTART_PAUSE_S
        self._silent = 0

    async def run(self, use: Any) -> Any:
        """The value of `use(client)`.

        Errors: _Blamed; ToolError where the server is lost, or gives no answer in time.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._run(use)
        except TimeoutError:
            self._silent += 1
            if self._silent == MAX_SILENT:
                self._stop.set()
            raise ToolError(f"{self._told}: no answer within {self._deadline_s:g} s") from None

    async def _run(self, use: Any) -> Any:
        client, task = await self._connected()
        call = asyncio.ensure_future(use(client))
        try:
            await asyncio.wait({call, task}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ToolError(f"{self._told}: the MCP server is lost")
            value = call.result()
            self._silent = 0
            return value
        except MCPError as error:
            if error.error.code == INVALID_PARAMS:
                raise _Blamed(error.error.message) from error
            if error.error.code == CONNECTION_CLOSED:
                self._stop.set()
                raise ToolError(f"{self._told}: the MCP server is lost") from error
            raise ToolError(f"{self._told}: {error.error.message:.400}") from error
        except (ToolError, asyncio.CancelledError):
            raise
        except Exception as error:  # of the SDK: an answer of another form, a lost stream
            self._stop.set()
            raise ToolError(f"{self._told}: {described(error):.400}") from error
        finally:
            call.cancel()
            call.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _connected(self) -> tuple[Client, asyncio.Task[None]]:
        """Errors: ToolError where the server does not start."""
        if self._task is None or self._task.done() or self._stop.is_set():
            self._check_new()
            clock = asyncio.get_running_loop().time
            start = max(clock(), self._started + RESTART_PAUSE_S)
            self._started, self._silent = start, 0
            self._stop, self._client = asyncio.Event(), asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(
                self._serve(self._task, start - clock(), self._stop, self._client)
            )
        task, client = self._task, self._client
        assert client is not None
        pair: set[asyncio.Future[Any]] = {task, client}
        await asyncio.wait(pair, return_when=asyncio.FIRST_COMPLETED)
        if not client.done():
            failure = None if task.cancelled() else task.exception()
            reason = _first(failure) if failure else "it ended"
            raise ToolError(f"{self._told}: the MCP server does not start ({reason})")
        return client.result(), task

    def _check_new(self) -> None:
        """Errors: ToolError where a new connection cannot replace the former."""

    async def _serve(
        self,
        former: asyncio.Task[None] | None,
        pause_s: float,
        stop: asyncio.Event,
        ready: asyncio.Future[Client],
    ) -> None:
        if former is not None:
            await asyncio.wait({former})
        await asyncio.sleep(pause_s)
        async with Client(self._transport()) as client:
            ready.set_result(client)
            await stop.wait()

    async def close(self) -> None:
        if (task := self._task) is None:
            return
        self._stop.set()
        if self._client is not None and not self._client.done():
            task.cancel()  # it is still connecting
        _, pending = await asyncio.wait({task}, timeout=CLOSE_S)
        if pending:
            task.cancel()
            await asyncio.wait({task}, timeout=CLOSE_S)
        if task.done() and not task.cancelled():
            task.exception()


class _EpisodeConnection(_Connection):
    """The connection of an episode. If it is lost, so is what the episode's calls left."""

    def _check_new(self) -> None:
        if self._client is not None and self._client.done():
            raise ToolError(f"{self._told}: the MCP server is lost, with the episode's state")


def _first(error: BaseException) -> str:
    """The text of an error; of a group, its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return described(error)[:300]


def _read(result: CallToolResult) -> ToolResult:
    """The texts of a result; other content is named, as the model cannot read it."""
    parts = []
    for block in result.content:
        if isinstance(block, TextContent):
            parts.append(block.text)
        elif isinstance(block, EmbeddedResource) and isinstance(
            block.resource, TextResourceContents
        ):
            parts.append(block.resource.text)
        else:
            parts.append(f"[{block.type}: not text, so not shown]")
    return ToolResult(content="\n".join(parts), failed=bool(result.is_error))


class _Log:
    """The stderr of a server: passed on, and its last line kept."""

    def __init__(self) -> None:
        source, sink = os.pipe()
        self.file = os.fdopen(sink, "w")
        self._last = b""
        self._reader = threading.Thread(target=self._pass_on, args=(source,), daemon=True)
        self._reader.start()

    def _pass_on(self, source: int) -> None:
        with os.fdopen(source, "rb") as lines, suppress(OSError):
            while line := lines.readline(MAX_LOG_LINE):
                self._last = line.strip() or self._last
                os.write(2, line)

    def last_line(self) -> str:
        """The last line of a server that has ended."""
        self._reader.join(LOG_S)
        return self._last.decode(errors="replace")[:300]


@asynccontextmanager
async def _stdio(server: StdioServerParameters) -> AsyncIterator[Any]:
    """The SDK's transport over stdio. Errors: ToolError with the server's last words."""
    log = _Log()
    try:
        async with stdio_client(server, log.file) as streams:
            log.file.close()  # the server has it
            yield streams
    except Exception as error:
        log.file.close()
        if last := await asyncio.to_thread(log.last_line):
            raise ToolError(f"{_first(error)}; its stderr ends with: {last}") from error
        raise
    finally:
        log.file.close()


@asynccontextmanager
async def _http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    """The SDK's transport over HTTP, with a limit of an answer's size."""
    client = httpx2.AsyncClient(
        headers={**headers, "accept-encoding": "identity"},
        timeout=httpx2.Timeout(30.0, read=300.0),
        transport=_Limited(httpx2.AsyncHTTPTransport()),
    )
    async with client, streamable_http_client(url, http_client=client) as streams:
        yield streams


class _Limited(httpx2.AsyncBaseTransport):
    """Cuts answers to a POST at MAX_BYTES."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        if request.method == "POST" and isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = _LimitedStream(response.stream, request)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, request: httpx2.Request) -> None:
        self._inner, self._request = inner, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._inner:
            size += len(part)
            if size > MAX_BYTES:
                message = f"the answer has more than {MAX_BYTES:,} bytes"
                raise httpx2.ReadError(message, request=self._request)
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()
