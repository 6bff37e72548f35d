"""What text environments share: reading the model's action, and answering it."""

from __future__ import annotations

from collections.abc import Mapping

from ludus.core.types import Message, ToolCall
from ludus.envs.base import Env

LONGEST_ACTION = 500
"""Characters of an action that are looked at; no command of ours comes near it."""


def action_text(env: Env, message: Message) -> str:
    """The action of an assistant's message, in lower case with single spaces.

    A tool call counts before the text. Only the first call is taken: one turn, one action.
    """
    text = env.text_of(message.tool_calls[0]) if message.tool_calls else message.content
    return " ".join(text[: LONGEST_ACTION + 1].lower().split()).strip(" .`\"'")


def answer(message: Message, text: str) -> list[Message]:
    """The environment's reply: a user message, or one tool message for each call."""
    if not message.tool_calls:
        return [Message(role="user", content=text)]
    first, *others = message.tool_calls
    return [
        _tool_message(first, text),
        *(_tool_message(call, "ignored: one action a turn.") for call in others),
    ]


def call_text(call: ToolCall, arguments: Mapping[str, type]) -> list[str] | None:
    """The call's arguments in order, as text; None where they are not exactly those expected."""
    if set(call.arguments) != set(arguments):
        return None
    values = [call.arguments[name] for name in arguments]
    if any(type(value) is not kind for value, kind in zip(values, arguments.values(), strict=True)):
        return None
    return [str(value) for value in values]


def _tool_message(call: ToolCall, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)
