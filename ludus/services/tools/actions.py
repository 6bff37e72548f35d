"""Finds the calls in an action: the text that a model wrote.

    <tool_call>{"name": "search", "arguments": {"query": "ludus"}}</tool_call>
    <python>print(1)</python>        a function with one text argument, by its name
    ```python
    print(1)
    ```                              the same, as a code block (also ```py)

verl-tool's tools read these marks. As there, all code blocks of an action are one program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ludus.core.types import ToolCall, ToolSpec
from ludus.models.chat.parsing import CALL_CLOSE, CALL_OPEN, between

_FORM = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
_SHORT = {"python": "py"}
"""Other names of a code block."""


def calls_of(action: str, specs: Sequence[ToolSpec]) -> list[ToolCall] | str:
    """The calls in a text; a text that says what is wrong where there is none."""
    if found := between(action, CALL_OPEN, CALL_CLOSE)[0]:
        return _written(found)
    for spec in specs:
        if (argument := _only_text(spec)) is None:
            continue
        texts = _marked(action, spec.name)
        if texts and argument == "code":
            texts = ["\n".join(texts)]
        if texts:
            return [ToolCall(name=spec.name, arguments={argument: text}) for text in texts]
    return f"No call is found. Write {_forms(specs)}."


def _written(found: Iterable[str]) -> list[ToolCall] | str:
    calls = []
    for text in found:
        try:
            value = json.loads(text)
            calls.append(ToolCall(name=value["name"], arguments=value.get("arguments", {})))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return f"A call is malformed. Write {_FORM}."
    return calls


def _marked(action: str, name: str) -> list[str]:
    """The texts between `<name>` and `</name>`; else those of code blocks of that name."""
    texts = between(action, f"<{name}>", f"</{name}>")[0]
    if not texts:
        names = "|".join(map(re.escape, filter(None, [name, _SHORT.get(name)])))
        texts = re.findall(f"```\n?(?:{names})[ \t]*\n(.*?)```", action, re.DOTALL)
    return [text.strip("\n") for text in texts]


def _only_text(spec: ToolSpec) -> str | None:
    """The argument of a function that needs one text and nothing else."""
    properties: dict[str, Any] = spec.parameters.get("properties", {})
    required = spec.parameters.get("required", [])
    if len(required) != 1 or properties.get(required[0], {}).get("type") != "string":
        return None
    return str(required[0])


def _forms(specs: Sequence[ToolSpec]) -> str:
    marked = [f"<{spec.name}>...</{spec.name}>" for spec in specs if _only_text(spec)]
    names = ", ".join(spec.name for spec in specs)
    return " or ".join([*marked[:4], f"{_FORM} with one of {names}"])
