"""Wrong requests in words: the field, what is wrong, what would be right.

    items.0.output: must be text, or a list (of an object), got 3
    trut: is not a field (did you mean truth?)

The words are those of the configuration's errors (`config.messages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from ludus.config.messages import Type, dotted, explain_items

_PARAMETERS = {"query": "query_params", "path": "path_params", "header": "header_params"}


def wrong_field(problems: Sequence[Any], annotation: Any) -> tuple[str, str]:
    """Returns the dotted path of the first wrong field, and what is wrong.

    Args:
        problems: pydantic's errors.
        annotation: the type of what was sent.
    """
    if problems[0]["type"].startswith("union_tag"):  # it names the tags
        return dotted(problems[0]["loc"]), problems[0]["msg"]
    path, line = explain_items(problems, annotation, noun="a field")[0]
    field = dotted(path)
    told = line.removeprefix(field).lstrip(": ")
    words, got, value = told.partition(", got ")
    for kind in ("a section", "a mapping"):
        words = words.replace(kind, "an object")
    return field, words + got + value


def wrong_part(problems: Sequence[Any], request: Request) -> tuple[str, str]:
    """As `wrong_field`, for a request of a route: its body, or a parameter of its address."""
    where, *path = problems[0]["loc"]
    route = request.scope.get("route")
    if where == "body":
        body = getattr(route, "body_field", None)
        of_body = [problem for problem in problems if problem["loc"][0] == "body"]
        inner = [{**problem, "loc": problem["loc"][1:]} for problem in of_body]
        return wrong_field(inner, Any if body is None else body.field_info.annotation)
    name = str(path[0]) if path else ""
    parameters = getattr(getattr(route, "dependant", None), _PARAMETERS.get(where, ""), [])
    kind = next((Type.of(field.field_info) for field in parameters if field.alias == name), None)
    if kind is None or problems[0]["type"] == "missing":
        return name, problems[0]["msg"]
    return name, f"must be {kind.words()}, got {problems[0]['input']!r:.60}"
