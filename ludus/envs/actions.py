"""Helpers of text environments: parse the model's action, reply, define tools."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ludus.core.types import Message, ToolCall, ToolSpec
from ludus.envs.base import Env

JSON_NAMES: Mapping[type, str] = {str: "string", int: "integer", dict: "object"}
LONGEST_ACTION = 500
"""Characters of an action that are read; all commands are far shorter."""

Guide = Annotated[
    bool, Field(description="Open with an explanation, for a model that reads English.")
]
Texts = Annotated[
    Literal["ludus", "agentgym"],
    Field(description="agentgym: the observations of AgentGym's server, word for word."),
]
MaxSteps = Annotated[int | None, Field(ge=1, description="Actions in an episode; null: no limit.")]


def action_text(env: Env, message: Message) -> str:
    """The action of an assistant's message, in lower case with single spaces.

    The first tool call takes precedence over the text; other calls are ignored. A call that fits
    no tool becomes "?", which the environment answers as an unknown action.
    """
    text = message.content
    if message.tool_calls:
        try:
            text = env.text_of(message.tool_calls[0])
        except ValueError:
            text = "?"
    return " ".join(text[:LONGEST_ACTION].lower().split()).strip(" .`\"'")


def printable(text: str) -> str:
    """The printable ASCII characters of an action, for parsers that fail on others; "?" if none."""
    return "".join(c for c in text if " " <= c <= "~").strip() or "?"


def answer(message: Message, text: str) -> list[Message]:
    """The environment's reply: a user message, or a tool message for each call."""
    if not message.tool_calls:
        return [Message(role="user", content=text)]
    first, *others = message.tool_calls
    return [
        _tool_message(first, text),
        *(_tool_message(call, "ignored: one action a turn.") for call in others),
    ]


def call_text(call: ToolCall, arguments: Mapping[str, type]) -> list[str]:
    """The call's arguments as text, in the order of `arguments`. Errors: ValueError."""
    if missing := sorted(set(arguments) - set(call.arguments)):
        raise ValueError(f"the argument {missing[0]} is missing")
    if unknown := sorted(set(call.arguments) - set(arguments)):
        raise ValueError(f"there is no argument {unknown[0]}")
    for name, kind in arguments.items():
        if type(call.arguments[name]) is not kind:
            raise ValueError(f"the argument {name} has to be of type {JSON_NAMES[kind]}")
    return [str(call.arguments[name]) for name in arguments]


def parameters_of(form: str) -> list[str]:
    """The parameters of a command's form: ["thing", "place"] of `put {thing} in {place}`."""
    return re.findall(r"{(\w+)}", form)


def pattern_of(form: str) -> re.Pattern[str]:
    """The pattern that parses a command of this form, with a group for each parameter."""
    return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>.+)", form))


def command_text(form: str, call: ToolCall, kinds: Mapping[str, type] | None = None) -> str:
    """The command of a call; parameters are texts unless `kinds` has another type.

    Errors: ValueError.
    """
    names = parameters_of(form)
    values = call_text(call, {name: (kinds or {}).get(name, str) for name in names})
    return form.format(**dict(zip(names, values, strict=True)))


def tool_spec(name: str, description: str, /, **arguments: dict[str, Any]) -> ToolSpec:
    """A tool with these required arguments (name to JSON schema) and no others."""
    parameters = {
        "type": "object",
        "properties": arguments,
        "required": list(arguments),
        "additionalProperties": False,
    }
    return ToolSpec(name=name, description=description, parameters=parameters)


def act_tool(words: Collection[str] = ()) -> ToolSpec:
    """The tool `act`, with an action's text as argument; `words` restricts it to an enum."""
    schema: dict[str, Any] = {"type": "string", "description": "One of the actions."}
    if words:
        schema["enum"] = list(words)
    return tool_spec("act", "Take one action.", action=schema)


class OneTool(Env):
    """An environment with a single tool, whose single argument is the action's text."""

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
