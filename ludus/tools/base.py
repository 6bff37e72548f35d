"""The tool protocol: a call of the model in, a text out.

    class Dice(Tool):
        async def specs(self):
            return [ToolSpec(name="roll", description="Roll a die.")]

        async def call(self, call, episode):
            return ToolResult(content=str(random.randint(1, 6)))

One Tool serves all episodes. What an episode leaves (an interpreter, a session at a server) belongs
to its id, and ends with `end`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ludus.core.types import ToolCall, ToolSpec, Wire


class ToolResult(Wire):
    """A tool's answer, as the model reads it.

    `failed`: the call was wrong, or its code raised; the text says why. That is a regular answer:
    the model may try again. `done` ends the episode.
    """

    content: str
    failed: bool = False
    done: bool = False


class Tool(ABC):
    """One function or several that the model may call.

    Errors of `call`: ToolError where the tool itself failed (a lost server, a deadline): the
    episode then ends with status error_tool, is retried, and never counts as a reward of 0. What
    the *model* did wrong is a ToolResult with `failed`.
    """

    @abstractmethod
    async def specs(self) -> Sequence[ToolSpec]:
        """The functions on offer: name, description, JSON schema of the arguments."""

    @abstractmethod
    async def call(self, call: ToolCall, episode: str) -> ToolResult:
        """Answer a call. Calls of one episode may run at the same time."""

    @property
    def keeps_state(self) -> bool:
        """True if a call may need what earlier calls of its episode left."""
        return type(self).end is not Tool.end

    async def end(self, episode: str) -> None:  # noqa: B027 - not every tool keeps something
        """The episode is over: release what it left."""

    async def close(self) -> None:  # noqa: B027
        """The run is over: release everything."""
