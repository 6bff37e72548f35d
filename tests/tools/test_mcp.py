"""MCP servers as tools: the SDK's own servers, over stdio and HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from raw_server import FLOOD, RawServer, answer
from service_world import alive, until

from ludus.core.errors import ConfigError, LudusError, ToolError
from ludus.core.types import Spec, ToolCall
from ludus.tools.base import ToolResult
from ludus.tools.mcp import GUARD
from ludus.tools.toolbox import Toolbox

WORLD = str(Path(__file__).parents[1] / "support" / "mcp_world.py")
COMMAND = [sys.executable, WORLD]


async def opened(**args: Any) -> Toolbox:
    args = args if "url" in args else {"command": COMMAND, **args}
    return await Toolbox.open([Spec(name="mcp", args=args)])


async def call(toolbox: Toolbox, name: str, episode: str = "e", /, **arguments: Any) -> ToolResult:
    (result,) = await toolbox.call([ToolCall(name=name, arguments=arguments)], episode)
    return result


@asynccontextmanager
async def http_world() -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    try:
        await asyncio.to_thread(
            until, lambda: socket.create_connection(("127.0.0.1", port)).close() or True
        )
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


async def test_a_server_over_stdio() -> None:
    async with await opened() as toolbox:
        (add,) = [spec for spec in toolbox.specs if spec.name == "add"]
        assert add.description == "Add two numbers."
        assert add.parameters["properties"]["a"]["type"] == "integer"
        assert await call(toolbox, "add", a=1, b=2) == ToolResult(content="3")
        wrong = await call(toolbox, "add", a=1, b="2")
        assert wrong.failed
        assert "b: '2' is not of type 'integer'" in wrong.content
        raised = await call(toolbox, "boom")
        assert raised.failed
        assert "out of cheese" in raised.content
        numbers = await toolbox.call([ToolCall(name="next_number")] * 5, "e")
        assert sorted(result.content for result in numbers) == list("12345")


@pytest.mark.slow
async def test_a_server_over_http_that_dies_and_returns() -> None:
    async with http_world() as (url, process), await opened(url=url, deadline_s=10) as toolbox:
        assert await call(toolbox, "add", a=1, b=2) == ToolResult(content="3")
        assert (await call(toolbox, "boom")).failed
        with pytest.raises(ToolError):
            await call(toolbox, "die")
        process.wait()
        with pytest.raises(ToolError):
            await call(toolbox, "add", a=1, b=2)
        port = url.split(":")[2].split("/")[0]
        again = subprocess.Popen([*COMMAND, port], stderr=subprocess.DEVNULL)
        try:
            await asyncio.to_thread(
                until,
                lambda: socket.create_connection(("127.0.0.1", int(port))).close() or True,
            )
            assert await call(toolbox, "add", a=2, b=2) == ToolResult(content="4")
        finally:
            again.kill()
            again.wait()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("die", "the MCP server is lost"),
        pytest.param("huge", "the MCP server is lost", marks=pytest.mark.slow),
        pytest.param("rubbish", "lost", marks=pytest.mark.slow),
    ],
)
async def test_a_server_that_is_lost_in_mid_call_is_started_anew(name: str, told: str) -> None:
    no_utf8 = f"{sys.executable} {WORLD} | LC_ALL=C sed -u 's/RUBBISH/\\xff\\xfe/g'"
    command = ["sh", "-c", no_utf8] if name == "rubbish" else COMMAND
    async with await opened(command=command) as toolbox:
        with pytest.raises(ToolError, match=told):
            await call(toolbox, name)
        assert await call(toolbox, "add", a=1, b=2) == ToolResult(content="3")


def test_noise_of_a_server_is_dropped() -> None:
    program = """printf 'debug\\n{"a": 1}\\n\\n more\\n {"b":'; head -c 300000 /dev/zero >&2
    sleep 0.2; printf '2}\\n'"""
    reader, writer = os.pipe()
    command = [sys.executable, "-I", "-S", str(GUARD), "4000000", "sh", "-c", program]
    try:
        done = subprocess.run(command, stdin=reader, capture_output=True, timeout=60)
    finally:
        os.close(reader)
        os.close(writer)
    assert done.returncode == 0
    assert done.stdout == b'{"a": 1}\n {"b":2}\n'
    assert 100_000 <= done.stderr.count(b"\0") < 200_000
    assert b"that are no messages: 'debug'" in done.stderr
    assert b"' more'" not in done.stderr  # said once
    assert b"the rest is dropped" in done.stderr


async def test_all_calls_under_way_end_with_a_lost_server() -> None:
    async with await opened() as toolbox:
        hanging = asyncio.create_task(call(toolbox, "hang"))
        await asyncio.sleep(0.2)
        with pytest.raises(ToolError):
            await call(toolbox, "die")
        with pytest.raises(ToolError, match="lost"):
            await hanging


@pytest.mark.slow
async def test_a_hanging_call_meets_its_deadline() -> None:
    async with await opened(deadline_s=10) as toolbox:
        with pytest.raises(ToolError, match="no answer within 10 s"):
            await call(toolbox, "hang")


@pytest.mark.slow
async def test_a_server_that_is_silent_three_times_is_started_anew() -> None:
    async with await opened(deadline_s=15) as toolbox:
        assert (await call(toolbox, "next_number")).content == "1"
        await asyncio.gather(*(call(toolbox, "hang") for _ in range(3)), return_exceptions=True)
        assert (await call(toolbox, "next_number")).content == "1"


async def test_no_process_remains() -> None:
    toolbox = await opened()
    pids = [int(pid) for pid in (await call(toolbox, "offspring")).content.split()]
    assert len(pids) == 3
    assert all(map(alive, pids))
    await toolbox.close()
    await asyncio.to_thread(until, lambda: not any(map(alive, pids)))


async def test_no_process_remains_when_the_server_dies() -> None:
    async with await opened() as toolbox:
        pids = [int(pid) for pid in (await call(toolbox, "offspring")).content.split()]
        with pytest.raises(ToolError):
            await call(toolbox, "die")
        await asyncio.to_thread(until, lambda: not any(map(alive, pids)))


KILLED = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from test_mcp import call, opened
async def main():
    toolbox = await opened()
    print((await call(toolbox, "offspring")).content, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.slow
def test_no_process_remains_when_the_client_is_killed() -> None:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(map(str, (root, root / "tests" / "support")))
    program = KILLED.format(folder=str(Path(__file__).parent))
    client = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert client.stdout is not None
    pids = [int(pid) for pid in client.stdout.readline().split()]
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    assert len(pids) == 3
    until(lambda: not any(map(alive, pids)))


@pytest.mark.slow
async def test_a_connection_for_each_episode() -> None:
    async with await opened(per_episode=True, only=["next_number"]) as toolbox:
        assert (await call(toolbox, "next_number", "one")).content == "1"
        assert (await call(toolbox, "next_number", "one")).content == "2"
        assert (await call(toolbox, "next_number", "two")).content == "1"
        await toolbox.end("one")
        assert (await call(toolbox, "next_number", "one")).content == "1"


async def test_an_episode_ends_with_its_connection() -> None:
    async with await opened(per_episode=True) as toolbox:
        pid = int((await call(toolbox, "offspring")).content.split()[0])
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: not alive(pid))
        await asyncio.sleep(0.2)  # the SDK notices
        with pytest.raises(ToolError, match="lost"):
            await call(toolbox, "next_number")
        with pytest.raises(ToolError, match="with the episode's state"):
            await call(toolbox, "next_number")


async def test_names_and_a_choice_of_tools() -> None:
    async with await opened(only=["add"], prefix="world_") as toolbox:
        assert [spec.name for spec in toolbox.specs] == ["world_add"]
        assert (await call(toolbox, "world_add", a=1, b=1)).content == "2"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"command": ["no-such-program-at-all"]}, "there is no program 'no-such-program-at-all'"),
        (
            {"command": [sys.executable, "-c", "import no_such_module_at_all"]},
            "does not start .*its stderr ends with: ModuleNotFoundError: .*no_such_module_at_all",
        ),
        ({"command": ["true"]}, r"tools\.0: `true`: the MCP server"),
        ({"command": ["echo", "hello"]}, "the MCP server"),
        ({"only": ["addd"]}, r"the server has no 'addd' \(did you mean add\?\)"),
        ({"url": "http://127.0.0.1:9/mcp"}, "the MCP server does not start"),
        ({"command": ["true"], "url": "http://x"}, "give either `command`"),
    ],
)
async def test_servers_that_do_not_serve(args: dict[str, Any], told: str) -> None:
    with pytest.raises(LudusError, match=told) as caught:
        await opened(deadline_s=10, **args)
    assert isinstance(caught.value, ConfigError | ToolError)


@pytest.mark.parametrize("response", [answer(b"<html>"), answer({}, 500), answer([1]), FLOOD])
async def test_an_address_that_speaks_no_mcp(response: bytes) -> None:
    async with RawServer() as server:
        server.script = [response]
        with pytest.raises(ToolError):
            await opened(url=server.url, deadline_s=5)
