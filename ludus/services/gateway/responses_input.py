"""Requests of OpenAI's Responses API, as messages.

Items of one sampled turn are one message: reasoning, a text, calls. They are told by the ids of the
items and calls; where a client leaves these out, by their order.

    [reasoning, message, call a, call b, result a, result b]
    [call a, result a, call b, result b]                       the same turn: a and b have its ids
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ludus.core.types import Message, ToolCall, ToolSpec
from ludus.services.gateway.common import check_choice, refuse, tool_specs
from ludus.services.gateway.content import Part, TextOnly, given, text_of, tool_call
from ludus.services.model.requests import Text, schema_of

ITEM = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{24})(?:_\d+)?")
CALL = re.compile(r"call_(\d+)_\d+")
"""The ids that the gateway gives: of items (`item_ids`), and of calls (`CallTree.add_turn`)."""

Kind = Annotated[Literal["message", "function_call", "function_call_output", "reasoning"], TextOnly]
IGNORED = ("reasoning",)


class Item(BaseModel):
    """An item of a conversation; which fields it needs depends on `type`."""

    type: Kind = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Text | None = None
    output: Text | list[Part] | None = None


class FunctionTool(BaseModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(BaseModel):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(BaseModel):
    """`POST /v1/responses`."""

    model_config = ConfigDict(extra="forbid")

    model: str
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=10_000)]
    instructions: Text | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    store: bool | None = Field(None, description="false: not kept for `previous_response_id`.")
    include: list[str] | None = None
    text: TextOptions | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    context_management: list[Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: dict[str, Any] | None = Field(None, description="The model thinks as it does.")
    metadata: dict[str, Any] | None = Field(None, description="Ignored, as is what follows.")
    stream_options: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    def check(self) -> None:
        """Errors: ApiError 400 for unsupported fields."""
        refuse(
            {
                "background": bool(self.background),
                "conversation": self.conversation is not None,
                "prompt": self.prompt is not None,
                "max_tool_calls": self.max_tool_calls is not None,
                "context_management": bool(self.context_management),
                "truncation": self.truncation == "auto",
                "top_logprobs": bool(self.top_logprobs),
            }
        )
        if isinstance(self.tool_choice, dict):
            check_choice(self.tool_choice, [tool.name for tool in self.tools or []])

    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer, or None. Errors: ApiError 400."""
        return schema_of("text.format", self.text.format if self.text else None)

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def offered(self) -> list[ToolSpec]:
        """The tools. Errors: ApiError 400."""
        if self.tool_choice == "none":
            return []
        return tool_specs((t.name, t.description, t.parameters) for t in self.tools or [])

    def messages(self) -> list[Message]:
        """The new messages, without the instructions. Errors: ApiError 400."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        reader = _Reader()
        for index, item in enumerate(self.input):
            reader.add(item, f"input.{index}")
        return reader.messages

    def instructed(self, messages: list[Message]) -> list[Message]:
        """Messages after the instructions, if any."""
        if not self.instructions:
            return messages
        return [Message(role="system", content=self.instructions), *messages]


class _Reader:
    """Builds messages from items."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turns: dict[str, int] = {}
        self._keys: dict[int, set[str]] = {}
        self._open: int | None = None

    def add(self, item: Item, place: str) -> None:
        """Append an item. Errors: ApiError 400."""
        if item.type == "function_call_output":
            output = given(item.output, f"{place}.output")
            call_id = given(item.call_id, f"{place}.call_id")
            self._append(Message(role="tool", content=text_of(output), tool_call_id=call_id))
        elif item.type == "function_call":
            name = given(item.name, f"{place}.name")
            call_id = given(item.call_id, f"{place}.call_id")
            where = f"{place}.arguments"
            call = tool_call(name, given(item.arguments, where), call_id, where)
            self._turn(item).tool_calls.append(call)
        elif item.type == "reasoning":
            thought = text_of(item.content, "\n") or text_of(item.summary, "\n")
            if thought:
                self._turn(item).thinking = thought
        elif given(item.role, f"{place}.role") == "assistant":
            self._turn(item).content += text_of(item.content)
        else:
            role: Literal["user", "system"] = "user" if item.role == "user" else "system"
            self._append(Message(role=role, content=text_of(item.content)))

    def _append(self, message: Message) -> None:
        self.messages.append(message)
        self._open = None

    def _turn(self, item: Item) -> Message:
        """The assistant's message to which an item belongs."""
        found = ITEM.fullmatch(item.id or ""), CALL.fullmatch(item.call_id or "")
        keys = {f"{'ic'[n]}{match[1]}" for n, match in enumerate(found) if match}
        index = next((self._turns[key] for key in keys if key in self._turns), None)
        if index is None and self._open is not None and self._continues(item, keys):
            index = self._open
        if index is None:
            index = len(self.messages)
            self._append(Message(role="assistant"))
        self._open = index
        self._turns.update(dict.fromkeys(keys, index))
        self._keys.setdefault(index, set()).update(keys)
        return self.messages[index]

    def _continues(self, item: Item, keys: set[str]) -> bool:
        """Returns whether an item can belong to the turn before it."""
        assert self._open is not None
        own = {key[0] for key in self._keys.get(self._open, ())}
        if own & {key[0] for key in keys}:  # another turn's id of the same kind
            return False
        message = self.messages[self._open]
        return item.type == "function_call" or not (message.content or message.tool_calls)


def item_ids(token: str, calls: list[ToolCall]) -> tuple[str, str, list[str]]:
    """The ids of the reasoning, of the message and of the calls of a turn."""
    return f"rs_{token}", f"msg_{token}", [f"fc_{token}_{n}" for n in range(len(calls))]
