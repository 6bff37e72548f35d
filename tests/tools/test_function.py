"""Tools from functions: schema, values, errors; a row of the registry without a class."""

from __future__ import annotations

import asyncio
import datetime
import sys
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from ludus.core.errors import ConfigError, ToolError
from ludus.core.types import Spec, ToolCall
from ludus.tools.base import Tool, ToolResult
from ludus.tools.function import FunctionTool
from ludus.tools.toolbox import Toolbox

HERE = "test_function"


class Unit(StrEnum):
    METRES = "m"
    FEET = "ft"


@dataclass
class Point:
    x: float
    y: float


async def distance(a: Point, b: Point, unit: Unit = Unit.METRES) -> str:
    """The distance of two points.

    Of more use than it seems.

    Args:
        a: where it begins.
        unit (Unit): metres or feet,
            metres by default.

    Returns: a text.
    """
    length = ((a.x - b.x) ** 2 + (a.y - b.y) ** 2) ** 0.5
    return f"{length:g} {unit}"


Fault = Literal["raise", "raise surrogate", "exit", "lost", "hang", "bytes", "object", "surrogate"]


def misbehave(how: Fault) -> Any:
    """Do what no tool should do."""
    match how:
        case "raise":
            raise ValueError("no such thing")
        case "lost":
            try:
                raise ConnectionRefusedError("port 9")
            except OSError as error:
                raise RuntimeError("a library's own error") from error
        case "exit":
            sys.exit(3)
        case "raise surrogate":
            raise ValueError("'\ud800'")
        case "hang":
            threading.Event().wait()
        case "bytes":
            return b"\xff\xfe"
        case "object":
            return object()
    return "\ud800"


def facts(day: datetime.date, deep: bool = False) -> dict[str, Any]:
    return {"day": day, "week": day.isocalendar().week, "thread": threading.current_thread().name}


def enough() -> ToolResult:
    return ToolResult(content="enough", done=True)


def make(word: str) -> Tool:
    """A factory: it returns a Tool."""

    def say() -> str:
        return word

    return FunctionTool(say)


async def leave() -> None:
    sys.exit(3)


def untyped(value):  # type: ignore[no-untyped-def]
    return value


def open_ended(**rest: str) -> str:
    return str(rest)


def of_socket(value: asyncio.Event) -> str:
    return str(value)


async def answer(name: str, deadline_s: float = 30.0, /, **arguments: Any) -> ToolResult:
    async with await Toolbox.open([f"{HERE}:{name}"], deadline_s=deadline_s) as toolbox:
        (result,) = await toolbox.call([ToolCall(name=name, arguments=arguments)], "e")
    return result


async def test_the_schema_comes_from_signature_and_docstring() -> None:
    async with await Toolbox.open([f"{HERE}:distance"]) as toolbox:
        (spec,) = toolbox.specs
    assert spec.name == "distance"
    assert spec.description == "The distance of two points.\n\nOf more use than it seems."
    properties = spec.parameters["properties"]
    assert properties["a"]["description"] == "where it begins."
    assert properties["unit"]["description"] == "metres or feet, metres by default."
    assert "description" not in properties["b"]
    assert spec.parameters["required"] == ["a", "b"]
    assert spec.parameters["additionalProperties"] is False


async def test_arguments_arrive_as_the_signature_says() -> None:
    result = await answer("distance", a={"x": 0, "y": 0}, b={"x": 3, "y": 4}, unit="ft")
    assert result == ToolResult(content="5 ft")


async def test_a_value_is_written_as_json_and_a_plain_function_has_a_thread() -> None:
    result = await answer("facts", day="2024-02-29")
    assert result.content == '{"day":"2024-02-29","week":9,"thread":"ludus-tool"}'
    assert await answer("enough") == ToolResult(content="enough", done=True)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("distance", {"a": {"x": 0, "y": "0"}, "b": {"x": 1, "y": 1}}, "a.y: '0' is not of type"),
        ("distance", {"a": {"x": 0}, "b": {"x": 1, "y": 1}}, "'y' is a required property"),
        ("distance", {}, "'a' is a required property"),
        ("facts", {"day": "today"}, "facts: wrong arguments: day: Input should be a valid date"),
        ("facts", {"day": "2024-02-29", "dep": True}, "'dep' (did you mean deep?)"),
        ("misbehave", {"how": "dance"}, "'dance' is not one of ['raise'"),
        ("misbehave", {"how": "raise"}, "misbehave raised ValueError: no such thing"),
        ("misbehave", {"how": "raise surrogate"}, "misbehave raised ValueError: '?'"),
        ("misbehave", {"how": "exit"}, "misbehave raised SystemExit: 3"),
        ("leave", {}, "leave raised SystemExit: 3"),
    ],
)
async def test_the_model_is_told_what_was_wrong(
    name: str, arguments: dict[str, Any], told: str
) -> None:
    result = await answer(name, **arguments)
    assert result.failed
    assert told in result.content


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("lost", "misbehave raised RuntimeError: a library's own error"),
        ("hang", "gave no answer within 0.2 s"),
        ("bytes", "returned bytes, which is no text"),
        ("object", "returned object, which is no text"),
        ("surrogate", "half a surrogate pair"),
    ],
)
async def test_a_tool_that_fails_is_a_tool_error(how: str, told: str) -> None:
    with pytest.raises(ToolError, match=told):
        await answer("misbehave", 0.2 if how == "hang" else 30.0, how=how)


async def test_hanging_calls_do_not_hold_up_others() -> None:
    async with await Toolbox.open(
        [f"{HERE}:misbehave", f"{HERE}:enough"], deadline_s=0.5
    ) as toolbox:
        hanging = ToolCall(name="misbehave", arguments={"how": "hang"})
        for _ in range(2):
            with pytest.raises(ToolError):
                await toolbox.call([hanging] * 40, "e")
        assert (await toolbox.call([ToolCall(name="enough")], "e"))[0].done


async def test_a_function_that_returns_a_tool_is_a_factory() -> None:
    spec = Spec(name=f"{HERE}:make", args={"word": "hello"})
    async with await Toolbox.open([spec]) as toolbox:
        assert (await toolbox.call([ToolCall(name="say")], "e"))[0].content == "hello"


async def test_name_and_description_can_be_given() -> None:
    args = {"name": "stop", "description": "Ends it."}
    async with await Toolbox.open([Spec(name=f"{HERE}:enough", args=args)]) as toolbox:
        assert [(spec.name, spec.description) for spec in toolbox.specs] == [("stop", "Ends it.")]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("untyped", "value has no type: write value: str"),
        ("open_ended", "rest has no schema: name each parameter"),
        ("of_socket", "of_socket"),
    ],
)
async def test_a_function_without_a_schema_is_refused(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        await Toolbox.open([f"{HERE}:{name}"])


def bounded(size: Annotated[int, Field(ge=1, le=3, description="How many.")] = 1) -> str:
    return "x" * size


async def test_constraints_of_a_field_are_checked() -> None:
    assert (await answer("bounded", size=3)).content == "xxx"
    result = await answer("bounded", size=4)
    assert result.failed
    assert "size: 4 is greater than the maximum of 3" in result.content
