"""A tool from a function: its schema from the signature, its description from the docstring.

    async def weather(city: str, days: int = 1) -> str:
        \"\"\"The weather forecast of a city.

        Args:
            city: its name, in English.
            days: how many days ahead.
        \"\"\"

`name: "my_tools.py:weather"` in a configuration offers this to the model as the function
`weather`. A class with the protocol of `base.Tool` is for tools with several functions, or with
something to keep for an episode.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import threading
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import PydanticSerializationError, to_json

from ludus.core.errors import ConfigError, LudusError, ToolError, described, first_fault
from ludus.core.types import ToolCall, ToolSpec
from ludus.tools.base import Tool, ToolResult

_LOST = (ConnectionError, TimeoutError, socket.gaierror)
"""Errors of a tool's own connections: the model did not cause them."""

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Errors|Yields):.*")
_ENTRY = re.compile(r"(\s*)\**(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


class FunctionTool(Tool):
    """A function as a tool.

    An async function runs in the event loop, a plain one in a thread of its own. It returns text, a
    ToolResult, or a value that is written as JSON. An exception is told to the model, with its type
    and message; ToolError, and an error of a connection, means that the tool itself failed.

    Errors: ConfigError where a parameter has no JSON schema.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: Annotated[
            str | None, Field(description="The function's name for the model; null: its own.")
        ] = None,
        description: Annotated[
            str | None, Field(description="What it does, for the model; null: its docstring.")
        ] = None,
    ) -> None:
        self._function = function
        text, arguments = _documented(inspect.getdoc(function) or "")
        name = name or function.__name__
        self._arguments = _model(name, function, arguments)
        try:
            schema = self._arguments.model_json_schema()
        except Exception as error:
            raise ConfigError(f"the arguments of {name} have no JSON schema: {error}") from error
        schema.pop("title", None)
        for field in schema.setdefault("properties", {}).values():
            field.pop("title", None)
        self._spec = ToolSpec(name=name, description=description or text, parameters=schema)

    async def specs(self) -> Sequence[ToolSpec]:
        return [self._spec]

    async def call(self, call: ToolCall, episode: str) -> ToolResult:
        try:
            parsed = self._arguments.model_validate(call.arguments)
        except ValidationError as error:
            text = f"{self._spec.name}: wrong arguments: {first_fault(error)}"
            return ToolResult(content=text, failed=True)
        values = {key: getattr(parsed, key) for key in type(parsed).model_fields}
        try:
            if inspect.iscoroutinefunction(self._function):
                value = await self._function(**values)
            else:
                value = await _in_thread(lambda: self._function(**values))
        except (LudusError, BdbQuit):
            raise
        except (Exception, SystemExit) as error:
            text = f"{self._spec.name} raised {described(error)}"
            if any(isinstance(cause, _LOST) for cause in _causes(error)):
                raise ToolError(text) from error
            text = text.encode("utf-8", "replace").decode()  # lone surrogates
            return ToolResult(content=text, failed=True)
        return self._result(value)

    def _result(self, value: Any) -> ToolResult:
        if isinstance(value, ToolResult):
            return value
        if isinstance(value, str):
            return ToolResult(content=value)
        try:
            text = value.decode() if isinstance(value, bytes) else to_json(value).decode()
        except (PydanticSerializationError, UnicodeDecodeError, ValueError) as error:
            raise ToolError(
                f"{self._spec.name} returned {type(value).__name__}, which is no text "
                f"({error!s:.100}): return a string, a ToolResult, or what JSON can hold"
            ) from error
        return ToolResult(content=text)


def _model(name: str, function: Callable[..., Any], texts: Mapping[str, str]) -> type[BaseModel]:
    """A model of a function's parameters. Errors: ConfigError."""
    try:
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigError(f"{name}: *{parameter.name} has no schema: name each parameter")
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigError(f"{name}: {parameter.name} must be possible by name: remove `/`")
            if parameter.name not in hints:
                raise ConfigError(
                    f"{name}: {parameter.name} has no type: write {parameter.name}: str"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            kind = hints[parameter.name]
            if text := texts.get(parameter.name):
                kind = Annotated[kind, Field(description=text)]
            fields[parameter.name] = (kind, default)
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name}: its parameters cannot be read: {described(error)}") from error


def _documented(docstring: str) -> tuple[str, dict[str, str]]:
    """The description and the parameters' texts of a docstring in Google's style."""
    description: list[str] = []
    texts: dict[str, str] = {}
    section, indent, name = "", 0, ""
    for line in docstring.splitlines():
        if heading := _SECTION.fullmatch(line):
            section, indent, name = heading[1], 0, ""
        elif not section:
            description.append(line)
        elif line and not line[0].isspace():
            section = "other"
        elif section in ("Args", "Arguments", "Parameters"):
            entry = _ENTRY.fullmatch(line)
            if entry and (not indent or len(entry[1]) == indent):
                indent, name = len(entry[1]), entry[2]
                texts[name] = entry[3].strip()
            elif name and line.strip():
                texts[name] = f"{texts[name]} {line.strip()}".strip()
    return "\n".join(description).strip(), texts


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Run a plain function in a daemon thread of its own.

    asyncio.to_thread has a bounded pool, which a few hanging calls would fill, and the program
    would wait for them at its end.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if answer.done():  # given up meanwhile
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def work() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = function()
        except StopIteration as error:  # no future can hold it
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, name="ludus-tool", daemon=True).start()
    return await answer
