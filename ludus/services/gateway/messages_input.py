"""Requests of Anthropic's Messages API, as messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ludus.core.types import Message, ToolSpec
from ludus.services.gateway.common import check_choice, refuse, tool_specs
from ludus.services.gateway.content import Part, TextOnly, given, text_of, tool_call
from ludus.services.model.requests import ApiError, Stop, Text, schema_of

IGNORED = ("thinking",)

Kind = Annotated[
    Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"], TextOnly
]


class Block(BaseModel):
    """A block of a message's content; which fields it needs depends on `type`."""

    type: Kind
    text: Text | None = None
    thinking: Text | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Text | list[Part] | None = None
    is_error: bool | None = None


class Turn(BaseModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]


class AnthropicTool(BaseModel):
    """A function that the model may call; `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: Text | None = None
    input_schema: dict[str, Any]


class ToolChoice(BaseModel):
    """The wanted use of tools. `any` and `tool` are wishes: nothing is constrained."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    """`disabled`: no thinking blocks in the answer. The model thinks as it does."""

    model_config = ConfigDict(extra="allow")

    type: str = "enabled"


class Conversation(BaseModel):
    """The fields of both routes."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[Turn] = Field(min_length=1, max_length=10_000)
    system: Text | list[Part] | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    context_management: dict[str, Any] | None = Field(
        None, description="Ignored, as is what follows."
    )
    cache_control: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    def check(self) -> None:
        """Errors: ApiError 400 for unsupported fields."""
        choice = self.tool_choice
        if choice is not None and choice.type == "tool":
            check_choice(choice.model_dump(), [tool.name for tool in self.tools or []])
        refuse({"mcp_servers": bool(self.mcp_servers)})
        if self.messages[-1].role == "assistant":
            told = "the last one has to be the user's: an assistant's turn is not continued"
            raise ApiError(400, f"messages: {told}", param="messages")

    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer, or None. Errors: ApiError 400."""
        if wanted := _mapping((self.output_config or {}).get("format")):
            return schema_of("output_config.format", wanted)
        return schema_of("output_format", self.output_format)

    @property
    def wants_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    def offered(self) -> list[ToolSpec]:
        """The tools. Errors: ApiError 400."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return tool_specs((t.name, t.description, t.input_schema) for t in self.tools or [])

    def conversation(self) -> list[Message]:
        """The messages. Errors: ApiError 400."""
        system = text_of(self.system, "\n")
        messages = [Message(role="system", content=system)] if system else []
        for index, turn in enumerate(self.messages):
            place = f"messages.{index}.content"
            if isinstance(turn.content, str):
                messages.append(Message(role=turn.role, content=turn.content))
            elif turn.role == "assistant":
                messages.append(_said(turn.content, place))
            else:
                messages += _told(turn.role, turn.content, place)
        return messages


class MessagesRequest(Conversation):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: list[Stop] | None = Field(None, max_length=16)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    container: str | dict[str, Any] | None = None
    metadata: dict[str, Any] | None = Field(None, description="Ignored, as is what follows.")
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        refuse({"container": self.container is not None})


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _said(blocks: list[Block], place: str) -> Message:
    """A turn of the assistant. Errors: ApiError 400."""
    message = Message(role="assistant")
    for index, block in enumerate(blocks):
        where = f"{place}.{index}"
        if block.type == "text":
            message.content += given(block.text, f"{where}.text")
        elif block.type == "thinking":
            message.thinking = (message.thinking or "") + given(block.thinking, f"{where}.thinking")
        elif block.type == "tool_use":
            name, id = given(block.name, f"{where}.name"), given(block.id, f"{where}.id")
            arguments = given(block.input, f"{where}.input")
            message.tool_calls.append(tool_call(name, arguments, id, f"{where}.input"))
        elif block.type == "tool_result":
            raise ApiError(400, f"{where}: a tool_result belongs to the user", param=where)
    return message


def _told(role: Literal["user", "system"], blocks: list[Block], place: str) -> list[Message]:
    """The messages of a user's turn: results of tools are messages of their own.

    Errors: ApiError 400.
    """
    messages: list[Message] = []
    for index, block in enumerate(blocks):
        where = f"{place}.{index}"
        if block.type == "tool_result":
            content = text_of(block.content, "\n")
            content = f"Error: {content}" if block.is_error else content
            id = given(block.tool_use_id, f"{where}.tool_use_id")
            messages.append(Message(role="tool", content=content, tool_call_id=id))
        elif block.type != "text":
            raise ApiError(400, f"{where}: {block.type} belongs to the assistant", param=where)
        elif messages and messages[-1].role == role:
            messages[-1].content += "\n" + given(block.text, f"{where}.text")
        else:
            messages.append(Message(role=role, content=given(block.text, f"{where}.text")))
    return messages or [Message(role=role)]
