"""The fields of a row of a data set -> the fields of a task."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ludus.core.errors import did_you_mean, first_fault
from ludus.core.types import Message, Spec, Task

_MESSAGES = TypeAdapter(list[Message])

REMEDY = "set the reader's `{key}` to the field that holds it"
REMEDIES = {
    "answer": f"{REMEDY}, or to null where judge and environment need no answer",
    "data": "set the reader's `data` to fields of each row, or to null for all",
}


class NoField(ValueError):
    """A row has not the field that it should have; `name`: of the field, `known`: the row's."""

    def __init__(self, name: str, known: list[str], remedy: str) -> None:
        super().__init__(f"has no field {name!r}{did_you_mean(name, known)}: {remedy}")
        self.name, self.known, self.remedy = name, known, remedy


@dataclass(frozen=True, slots=True)
class FieldMapping:
    """Maps the fields of a row to the fields of a task."""

    source: str
    prompt: str
    answer: str | None
    id: str | None
    tier: str | None
    tools: str | None
    consistency: str | None
    data: list[str] | None
    env: Spec | None
    judge: Spec | None

    def task(self, number: int, row: dict[str, Any]) -> Task:
        """Returns the task of a row. Errors: ValueError with the reason for a malformed row."""
        tier = None if self.tier is None else self._text(row, self.tier, "tier")
        return Task(
            id=f"{self.source}:{number}" if self.id is None else self._text(row, self.id, "id"),
            prompt=self._messages(self._field(row, self.prompt, "prompt")),
            answer=None if self.answer is None else self._field(row, self.answer, "answer"),
            tier=tier,
            data=self._rest(row),
            source=self.source,
            env=self.env,
            judge=self.judge,
            tools=None if self.tools is None else self._names(row, self.tools, "tools"),
            consistency=None if self.consistency is None else self._share(row, self.consistency),
        )

    def _field(self, row: dict[str, Any], name: str, key: str) -> Any:
        if name not in row:
            remedy = REMEDIES.get(key, REMEDY).format(key=key)
            raise NoField(name, list(row), remedy)
        return row[name]

    def _text(self, row: dict[str, Any], name: str, key: str) -> str:
        value = self._field(row, name, key)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise ValueError(f"field {name!r} must be a text or an integer, got {value!r:.80}")
        return str(value)

    def _names(self, row: dict[str, Any], name: str, key: str) -> list[str] | None:
        value = self._field(row, name, key)
        if value is None or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            return value
        raise ValueError(f"field {name!r} must be a list of names or null, got {value!r:.80}")

    def _share(self, row: dict[str, Any], name: str) -> float | None:
        value = self._field(row, name, "consistency")
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            return float(value)
        raise ValueError(f"field {name!r} must be a number from 0 to 1, got {value!r:.80}")

    def _messages(self, value: Any) -> list[Message]:
        if isinstance(value, str):
            if not value.strip():
                raise ValueError(f"field {self.prompt!r} is empty")
            return [Message(role="user", content=value)]
        if not isinstance(value, list) or not value:
            raise ValueError(
                f"field {self.prompt!r} must be a text or a list of messages, got {value!r:.80}"
            )
        try:
            return _MESSAGES.validate_python([_from_openai(message) for message in value])
        except ValidationError as error:
            fault = first_fault(error)
            raise ValueError(f"field {self.prompt!r}, message {fault}") from None

    def _rest(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.data is not None:
            return {name: self._field(row, name, "data") for name in self.data}
        named = {self.prompt, self.answer, self.id, self.tier, self.tools, self.consistency}
        return {name: value for name, value in row.items() if name not in named}


def _from_openai(message: Any) -> Any:
    """A message with tool calls in OpenAI's form, as a Message has them; any other as it is."""
    if not isinstance(message, dict) or not isinstance(calls := message.get("tool_calls"), list):
        return message
    content = message.get("content") or ""
    return {**message, "content": content, "tool_calls": [_call_from_openai(c) for c in calls]}


def _call_from_openai(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    own = {key: value for key, value in call.items() if key not in ("type", "function", "index")}
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):  # the check of the message names it
            arguments = json.loads(arguments)
    return {**own, **function, "arguments": arguments}
