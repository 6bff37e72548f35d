"""What text environments share: reading the model's action, answering it, and its tools."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ludus.core.types import Message, ToolCall, ToolSpec
from ludus.envs.base import Env

JSON_NAMES: Mapping[type, str] = {str: "string", int: "integer", dict: "object"}
LONGEST_ACTION = 500
"""Characters of an action that are looked at; no command of ours comes near it."""


def action_text(env: Env, message: Message) -> str:
    """The action of an assistant's message, in lower case with single spaces.

    A tool call counts before the text, and only the first one: one turn, one action. A call that
    fits no tool becomes a text that is no action, so that the environment's answer says so.
    """
    text = message.content
    if message.tool_calls:
        try:
            text = env.text_of(message.tool_calls[0])
        except ValueError:
            text = "?"
    return " ".join(text[:LONGEST_ACTION].lower().split()).strip(" .`\"'")


def printable(text: str) -> str:
    """The action without what no command has, for parsers that take other characters ill; "?"
    where nothing is left."""
    return "".join(c for c in text if " " <= c <= "~").strip() or "?"


def answer(message: Message, text: str) -> list[Message]:
    """The environment's reply: a user message, or one tool message for each call."""
    if not message.tool_calls:
        return [Message(role="user", content=text)]
    first, *others = message.tool_calls
    return [
        _tool_message(first, text),
        *(_tool_message(call, "ignored: one action a turn.") for call in others),
    ]


def call_text(call: ToolCall, arguments: Mapping[str, type]) -> list[str]:
    """The call's arguments as text, in the order given. ValueError says what is wrong with them."""
    if missing := sorted(set(arguments) - set(call.arguments)):
        raise ValueError(f"the argument {missing[0]} is missing")
    if unknown := sorted(set(call.arguments) - set(arguments)):
        raise ValueError(f"there is no argument {unknown[0]}")
    for name, kind in arguments.items():
        if type(call.arguments[name]) is not kind:
            raise ValueError(f"the argument {name} has to be of type {JSON_NAMES[kind]}")
    return [str(call.arguments[name]) for name in arguments]


def tool_spec(name: str, description: str, /, **arguments: dict[str, Any]) -> ToolSpec:
    """A tool that takes all of these arguments, each with its JSON schema, and no other."""
    parameters = {
        "type": "object",
        "properties": arguments,
        "required": list(arguments),
        "additionalProperties": False,
    }
    return ToolSpec(name=name, description=description, parameters=parameters)


def act_tool(words: Collection[str] = ()) -> ToolSpec:
    """The tool `act`, which takes an action's text: one of these words, where any are given."""
    schema: dict[str, Any] = {"type": "string", "description": "One of the actions."}
    if words:
        schema["enum"] = list(words)
    return tool_spec("act", "Take one action.", action=schema)


class OneTool(Env):
    """An environment with one tool, whose one argument is the action's text."""

    tool: ToolSpec

    def tools(self) -> Sequence[ToolSpec]:
        return [self.tool]

    def text_of(self, call: ToolCall) -> str:
        if call.name != self.tool.name:
            raise ValueError(f"there is no such tool; there is {self.tool.name}")
        [argument] = self.tool.parameters["required"]
        return call_text(call, {argument: str})[0]

    def call_of(self, action: str) -> ToolCall:
        [argument] = self.tool.parameters["required"]
        return ToolCall(name=self.tool.name, arguments={argument: action})


def _tool_message(call: ToolCall, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)
