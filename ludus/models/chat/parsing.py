"""Parses a turn's text: thinking block, tool calls, ReAct action.

Malformed output never raises. It gives an error text that is sent back to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from ludus.core.errors import ConfigError, did_you_mean
from ludus.core.types import Message, ToolCall, ToolSpec

Thinking = Literal["keep", "strip", "forbid"]
"""Policy for thinking blocks, see `ModelConfig.thinking`."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
CALL_FORM = f'{CALL_OPEN}{{"name": ..., "arguments": {{...}}}}{CALL_CLOSE}'

_MAX_ERROR = 400


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed turn. With an `error` (sent to the model), the message has no tool calls."""

    message: Message
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ReAct:
    """A parsed ReAct turn. With an `error` (sent to the model), there is no action."""

    thought: str = ""
    action: str = ""
    error: str | None = None


def parse_react(text: str) -> ReAct:
    """Returns the text after `Action:`, which must occur exactly once, as the action.

    `Thought: the ball is left\\n\\nAction: turn left` gives ("the ball is left", "turn left").
    """
    before, *actions = text.split("Action:")
    thought = before.strip().removeprefix("Thought:").strip()
    if not actions:
        return ReAct(thought, error="No action found: end your turn with `Action:` and one action.")
    if len(actions) > 1:
        return ReAct(thought, error=f"{len(actions)} actions found: give one `Action:` a turn.")
    action = actions[0].strip()
    if not action:
        return ReAct(thought, error="Nothing follows `Action:`: write one action after it.")
    return ReAct(thought, action)


def split_thinking(text: str, *, opened: bool = False) -> tuple[str | None, str, bool]:
    """Returns (thinking or None, content, whether the block was closed).

    `opened`: the generation prompt has opened the block. A block is recognised only at the start of
    the turn. As in Qwen3's template, text before a lone `</think>` is thinking too.
    """
    head = text.lstrip()
    started = head.startswith(THINK_OPEN)
    body = head[len(THINK_OPEN) :] if started else text
    thinking, marker, content = body.partition(THINK_CLOSE)
    if marker:
        return thinking.strip("\n"), content.lstrip("\n"), True
    if started or opened:
        return body.strip("\n"), "", False
    return None, text, True


def between(text: str, opening: str, closing: str) -> tuple[list[str], str]:
    """Returns the texts from each mark `opening` to the next `closing`, and the text around them.

    The time is linear: no mark is looked for behind the last `closing`, so a model that repeats
    `opening` thousands of times holds up nothing.
    """
    last = text.rfind(closing)
    end = 0 if last < 0 else last + len(closing)
    marked = re.compile(f"{re.escape(opening)}(.*?){re.escape(closing)}", re.DOTALL)
    return marked.findall(text[:end]), marked.sub("", text[:end]) + text[end:]


def without_calls(text: str) -> str:
    """The text around the complete tool calls."""
    return between(text, CALL_OPEN, CALL_CLOSE)[1]


class ToolParser:
    """Parses tool calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Hermes and Qwen use this form. Arguments are validated against the tool's JSON schema.
    Errors: ConfigError at construction where a tool's `parameters` are not a JSON schema.
    """

    def __init__(self, tools: Iterable[ToolSpec]) -> None:
        self._validators: dict[str, Any] = {}
        for tool in tools:
            try:
                Draft202012Validator.check_schema(tool.parameters)
            except SchemaError as error:
                raise ConfigError(
                    f"tool {tool.name!r}: parameters are not a JSON schema: {error.message}"
                ) from None
            self._validators[tool.name] = Draft202012Validator(tool.parameters)

    def parse(self, text: str) -> tuple[str, list[ToolCall], str | None]:
        """Returns (text around the calls, calls, error). One bad call invalidates all calls."""
        calls: list[ToolCall] = []
        found, rest = between(text, CALL_OPEN, CALL_CLOSE)
        for written in found:
            call = self._call(written)
            if isinstance(call, str):
                return text, [], call[:_MAX_ERROR]
            calls.append(call)
        if CALL_OPEN in rest or CALL_CLOSE in rest:
            return text, [], f"A tool call is not complete. Write {CALL_FORM}"
        return (rest.strip() if calls else text), calls, None

    def _call(self, text: str) -> ToolCall | str:
        """Returns the call, or an error text."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            return f"The tool call is not valid JSON ({reason}). Write {CALL_FORM}"
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return f"The tool call has no name. Write {CALL_FORM}"
        if extra := sorted(set(value) - {"name", "arguments"}):
            return f"The tool call has keys it may not have: {', '.join(extra)}. Write {CALL_FORM}"
        name, arguments = value["name"], value.get("arguments", {})
        if name not in self._validators:
            return f"There is no tool {name!r}{did_you_mean(name, self._validators)}."
        if not isinstance(arguments, dict):
            return f"{name}: the arguments are not a JSON object. Write {CALL_FORM}"
        try:
            json.dumps(value, ensure_ascii=False).encode()
            wrong = best_match(self._validators[name].iter_errors(arguments))
        except UnicodeEncodeError:
            return f"{name}: the arguments hold half a surrogate pair, which is no text."
        except RecursionError:
            return f"{name}: the arguments are nested too deeply."
        if wrong is not None:
            place = wrong.json_path.replace("$", "arguments", 1)
            return f"{name}: wrong arguments: {place}: {wrong.message}"
        return ToolCall(name=name, arguments=arguments)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def external_reference(schema: Any) -> str:
    """A reference to another document, which checking a call would load; "" if there is none."""
    if isinstance(schema, dict):
        for key in ("$ref", "$dynamicRef"):
            if isinstance(schema.get(key), str) and not schema[key].startswith("#"):
                return str(schema[key])
        schema = list(schema.values())
    references = map(external_reference, schema) if isinstance(schema, list) else ()
    return next(filter(None, references), "")
