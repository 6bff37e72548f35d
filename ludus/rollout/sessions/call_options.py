"""A call of an agent, and its reply: the options, the address, and the tools that it offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ludus.core.errors import ConfigError, EpisodeError
from ludus.core.types import Message, ToolSpec
from ludus.models.samplers.base import Completion

if TYPE_CHECKING:
    from ludus.models.chat.renderer import Renderer

MAX_RENDERERS = 64


class CallRefused(EpisodeError):
    """A call that cannot be answered: the episode has ended, or made too many calls."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The sampling of the answer to a call.

    The distribution of trained turns is the run's: `temperature`, `top_p` and `top_k` are for
    calls that are not `trained`, where None is the run's value. `seed` is mixed with the episode's.
    Without `parallel`, the message has the first tool call alone. With `schema`, a JSON schema, the
    message is JSON of that schema, or tool calls where tools are offered.
    """

    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    trained: bool = True
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


DEFAULT = CallOptions()


@dataclass(frozen=True, slots=True)
class CallReply:
    """A sampled turn. `error` tells why its text is no valid turn: the message is all of it."""

    message: Message
    finish_reason: Literal["stop", "length"]
    error: str | None
    prompt_ids: list[int]
    completion: Completion


@dataclass(frozen=True, slots=True)
class Address:
    """The model's HTTP address for an agent. `socket`: a Unix socket that serves the same."""

    base_url: str
    api_key: str
    socket: Path | None = None


class AgentRenderers:
    """Renderers of one template by the tools of a call."""

    def __init__(self, default: Renderer) -> None:
        self._bare = default.with_tools(())
        self._by_tools: dict[str, Renderer] = {}

    def of(self, tools: Sequence[ToolSpec]) -> Renderer:
        """Errors: ConfigError for tools that cannot be shown."""
        if not tools:
            return self._bare
        key = "\n".join(tool.model_dump_json() for tool in tools)
        if key not in self._by_tools:
            if len(self._by_tools) >= MAX_RENDERERS:
                self._by_tools.clear()
            from ludus.models.chat.parsing import external_reference  # needs jsonschema

            for tool in tools:
                if reference := external_reference(tool.parameters):
                    raise ConfigError(
                        f"tools: {tool.name}: external reference {reference!r:.80}; references "
                        "must begin with #"
                    )
            self._by_tools[key] = self._bare.with_tools(tools)
        return self._by_tools[key]


def shortened(message: Message, options: CallOptions) -> Message:
    """The message up to the call's first stop string, with as many tool calls as it allows."""
    if not options.parallel and len(message.tool_calls) > 1:
        message = message.model_copy(update={"tool_calls": message.tool_calls[:1]})
    positions = [found for stop in options.stop if (found := message.content.find(stop)) >= 0]
    if not positions:
        return message
    return message.model_copy(update={"content": message.content[: min(positions)]})
