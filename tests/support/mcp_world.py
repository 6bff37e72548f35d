"""A real MCP server, of the SDK: `python mcp_world.py [PORT]`; stdio without a port."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("world")
count = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def next_number() -> int:
    """One more than the last time."""
    global count
    count += 1
    return count


@server.tool()
def boom() -> str:
    raise ToolError("out of cheese")


@server.tool()
def die() -> str:
    os._exit(7)


@server.tool()
def hang() -> str:
    time.sleep(3600)
    return ""


@server.tool()
def huge() -> str:
    return "x" * 40_000_000


@server.tool()
def rubbish() -> str:
    return "RUBBISH"


@server.tool()
def offspring() -> str:
    """Start processes that outlive the server: a child, and a detached one."""
    child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    gone = subprocess.Popen(
        ["sh", "-c", "setsid sleep 1000 & echo $!"], stdin=subprocess.DEVNULL, stdout=-1, text=True
    )
    assert gone.stdout is not None
    return f"{os.getpid()} {child.pid} {gone.stdout.readline().strip()}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
