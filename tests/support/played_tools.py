"""Tools for rollout tests: working, failing, slow, and a class that records its episodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from ludus.core.errors import ToolError
from ludus.core.types import ToolCall, ToolSpec
from ludus.tools.base import Tool, ToolResult

RUNNING: Counter[str] = Counter()
ENDED: list[str] = []
CLOSED: list[str] = []
FAILURES: Counter[str] = Counter()
"""Calls that still have to fail, by episode."""


async def double(number: int) -> str:
    """Twice the number."""
    return str(2 * number)


async def wordy(size: int) -> str:
    """Many words."""
    return " ".join(str(i) for i in range(size))


async def broken() -> str:
    """Raises."""
    raise ValueError("it is broken")


async def finish() -> ToolResult:
    """End the episode."""
    return ToolResult(content="the end", done=True)


async def hang() -> str:
    """Never answers."""
    await asyncio.sleep(3600)
    return ""


async def echo(code: str) -> str:
    """Repeat the code."""
    return f"ran {code}"


class Recorder(Tool):
    """Runs calls that overlap, and records which episodes it still holds."""

    async def specs(self) -> Sequence[ToolSpec]:
        schema = {"type": "object", "properties": {"word": {"type": "string"}}}
        return [ToolSpec(name="note", parameters=schema)]

    async def call(self, call: ToolCall, episode: str) -> ToolResult:
        RUNNING[episode] += 1
        if FAILURES[episode.partition("/retry")[0]] > 0:
            FAILURES[episode.partition("/retry")[0]] -= 1
            raise ToolError("the server is away")
        await asyncio.sleep(0.01)
        return ToolResult(content=f"{call.arguments.get('word')} {RUNNING[episode]}")

    async def end(self, episode: str) -> None:
        ENDED.append(episode)
        RUNNING.pop(episode, None)

    async def close(self) -> None:
        CLOSED.append("closed")
