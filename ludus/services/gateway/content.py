"""Content of messages in the forms of the APIs' items and blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ValidationError

from ludus.core.types import ToolCall
from ludus.services.model.requests import ApiError, Text


def _is_text(kind: Any) -> Any:
    """Errors: ValueError for a part that is no text."""
    if isinstance(kind, str) and any(word in kind for word in ("image", "file", "audio", "doc")):
        raise ValueError(f"{kind[:40]!r} is not supported: the model reads text only")
    return kind


TextOnly = BeforeValidator(_is_text)


class Part(BaseModel):
    """A part of a content; only text is supported."""

    type: Annotated[str, TextOnly] = "text"
    text: Text


def text_of(content: str | Sequence[Part] | None, between: str = "") -> str:
    """The text of a content: a text, or parts."""
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content or ()
    return between.join(part.text for part in parts)


def given(value: Any, place: str) -> Any:
    """A field that this kind of item needs. Errors: ApiError 400 where it is missing."""
    if value is None:
        raise ApiError(400, f"{place}: Field required", param=place)
    return value


def tool_call(name: str, arguments: str | dict[str, Any], id: str, place: str) -> ToolCall:
    """A call of an earlier turn. Errors: ApiError 400 where the arguments are no JSON object."""
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        return ToolCall(name=name, arguments=parsed, id=id)
    except (ValueError, RecursionError, ValidationError):
        raise ApiError(400, f"{place}: not a JSON object", param=place) from None
