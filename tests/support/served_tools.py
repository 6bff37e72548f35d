"""Tools that tests serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ludus.core.errors import ToolError
from ludus.core.types import ToolCall, ToolSpec
from ludus.tools.base import Tool, ToolResult

TEXT = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}


class Counts(Tool):
    """`count` says how often it was called in an episode; `fail` fails; `stop` ends it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ended: list[str] = []

    async def specs(self) -> Sequence[ToolSpec]:
        stop = ToolSpec(name="stop", description="End the episode.")
        return [*(ToolSpec(name=name, parameters=TEXT) for name in ("count", "fail")), stop]

    async def call(self, call: ToolCall, episode: str) -> ToolResult:
        if call.name == "stop":
            return ToolResult(content="stopped", done=True)
        if call.name == "fail":
            raise ToolError("its server is lost")
        self.counts[episode] += 1
        return ToolResult(content=f"{call.arguments['word']} {self.counts[episode]}")

    async def end(self, episode: str) -> None:
        self.counts.pop(episode, None)
        self.ended.append(episode)
