"""The tools of a run: checked calls, several at a time, each with a deadline.

    async with await Toolbox.open([Spec(name="calculator")]) as toolbox:
        toolbox.specs                                   the functions, for the model's prompt
        await toolbox.call([ToolCall(name="calculator", arguments={"expression": "2+3"})], "e1")
        await toolbox.end("e1")                         the episode is over

A call that the model got wrong (an unknown function, an argument of the wrong type) is a result
with `failed` and a text that says what is right. A tool that fails itself raises ToolError.
"""

from __future__ import annotations

import asyncio
import re
import time
from bdb import BdbQuit
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ludus.core.errors import ConfigError, DataError, LudusError, ToolError, described, did_you_mean
from ludus.core.modules import require
from ludus.core.types import Spec, ToolCall, ToolSpec
from ludus.telemetry.logs import get_logger
from ludus.telemetry.queues import Queue, queueing
from ludus.telemetry.traces import execute_tool
from ludus.tools import TOOLS
from ludus.tools.base import Tool, ToolResult

if TYPE_CHECKING:
    from ludus.tools.arguments import Function

log = get_logger(__name__)

T = TypeVar("T")

MAX_CHARS = 1_000_000
"""Characters of a result. The middle of a longer one is left out, before anything tokenises it."""

MAX_ERROR_CHARS = 400
OPEN_S = 60.0
"""Seconds that a tool has to list its functions: an MCP server starts meanwhile."""

END_S = 10.0
"""Seconds that a tool has to release an episode."""

Acquire = Callable[[str], Awaitable[None]]
"""Waits until a function may be called (a rate limiter)."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")


class Toolbox:
    """The functions of several tools, by name. Use it in one event loop.

    Args:
        tools: place in the configuration ("tools.0") and tool.
        deadline_s: seconds that a call may take, without its wait for a turn (in a sandbox).
        acquire: awaited before each call with the function's name; its time does not count for the
            deadline.
    """

    def __init__(
        self,
        tools: Sequence[tuple[str, Tool]],
        functions: Mapping[str, Function],
        deadline_s: float,
        acquire: Acquire | None = None,
    ) -> None:
        self._tools, self._functions = [tool for _, tool in tools], dict(functions)
        self._deadline_s, self._acquire = deadline_s, acquire
        self.specs = [function.spec for function in functions.values()]

    @classmethod
    async def open(
        cls,
        specs: Sequence[Spec | str],
        *,
        where: str = "tools",
        deadline_s: float = 60.0,
        acquire: Acquire | None = None,
    ) -> Self:
        """Build the tools and gather their functions.

        Errors: ConfigError with the place for a wrong spec, a function's name or schema that is
        not valid, and two functions of one name; ToolError where a tool cannot list its functions.
        """
        tools: list[tuple[str, Tool]] = []
        try:
            for number, spec in enumerate(specs):
                place = f"{where}.{number}"
                tools.append((place, _built(spec, place)))
            return cls(tools, await _gather(tools), deadline_s, acquire)
        except BaseException:
            await _release([tool.close() for _, tool in tools])
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(
        self, calls: Sequence[ToolCall], episode: str, acquire: Acquire | None = None
    ) -> list[ToolResult]:
        """Answer the calls of a turn, all at the same time; results in the order of the calls.

        Args:
            acquire: in place of the toolbox's own.

        Errors: ToolError where a tool failed or exceeded its deadline; the others are cancelled.
        """
        acquire = acquire or self._acquire
        tasks = [asyncio.create_task(self._traced(call, episode, acquire)) for call in calls]
        try:
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def keeps_state(self, name: str) -> bool:
        """True if a call of this function may need what earlier calls of its episode left."""
        function = self._functions.get(name)
        return function is not None and function.tool.keeps_state

    async def end(self, episode: str) -> None:
        """Release what an episode left in the tools."""
        await _release([tool.end(episode) for tool in self._tools])

    async def close(self) -> None:
        """Release the tools."""
        await _release([tool.close() for tool in self._tools])

    async def _traced(self, call: ToolCall, episode: str, acquire: Acquire | None) -> ToolResult:
        with execute_tool(call.name, call_id=call.id, arguments=call.arguments) as span:
            result = await self._call(call, episode, acquire)
            span.result(result.content)
            if result.failed:
                span.failed("tool_failed", result.content[:MAX_ERROR_CHARS])
        return result

    async def _call(self, call: ToolCall, episode: str, acquire: Acquire | None) -> ToolResult:
        function = self._functions.get(call.name)
        if function is None:
            near = did_you_mean(call.name, self._functions)
            return _wrong(f"There is no tool {call.name!r:.80}{near}.")
        if fault := function.fault(call.arguments):
            return _wrong(f"{call.name}: wrong arguments: {fault}")
        if acquire is not None:
            await acquire(call.name)
        with queueing() as queue:
            task = asyncio.create_task(_contained(call.name, function.tool.call(call, episode)))
        try:
            await _wait(task, queue, self._deadline_s)
            if not task.done():
                raise ToolError(f"{call.name} gave no answer within {self._deadline_s:g} s")
            if task.cancelled():  # by itself: a caller's cancellation interrupts the wait
                raise ToolError(f"{call.name} raised CancelledError")
            return _checked(call.name, task.result())
        except (LudusError, BdbQuit, asyncio.CancelledError):
            raise
        except Exception as error:
            raise ToolError(f"{call.name} raised {described(error)}") from error
        finally:
            _abandon(task)


def _built(spec: Spec | str, place: str) -> Tool:
    """Errors: ConfigError, DataError with the place."""
    try:
        return TOOLS.build(spec, place)
    except (ConfigError, DataError) as error:
        if type(error) not in (ConfigError, DataError) or str(error).startswith(place):
            raise
        raise type(error)(f"{place}: {error}") from error


async def _wait(task: asyncio.Task[ToolResult], queue: Queue, deadline_s: float) -> None:
    """Wait for a call until its deadline, without the time in which it waits for its turn."""
    started = time.monotonic()
    while (left := started + deadline_s + queue.until_now() - time.monotonic()) > 0:
        # asyncio.timeout would wait for a tool that swallows its cancellation.
        if (await asyncio.wait({task}, timeout=left))[0]:
            return


async def _gather(tools: Sequence[tuple[str, Tool]]) -> dict[str, Function]:
    """The functions of all tools, by name."""
    require("jsonschema", "tools", "tools: the check of arguments")
    from ludus.tools.arguments import checked_function

    listed = await asyncio.gather(*(_listed(place, tool) for place, tool in tools))
    functions: dict[str, Function] = {}
    owners: dict[str, str] = {}
    for (place, tool), specs in zip(tools, listed, strict=True):
        for spec in specs:
            if not _NAME.fullmatch(spec.name):
                raise ConfigError(
                    f"{place}: {spec.name!r:.150} cannot be a function's name: letters, digits, "
                    "`_`, `-` and `.`, at most 128, and a letter or `_` first"
                )
            if spec.name in owners:
                raise ConfigError(
                    f"{place}: {owners[spec.name]} also offers a function {spec.name!r}: remove "
                    "one of the two, or give one another name"
                )
            owners[spec.name] = place
            functions[spec.name] = checked_function(place, spec, tool)
    return functions


async def _listed(place: str, tool: Tool) -> Sequence[ToolSpec]:
    try:
        async with asyncio.timeout(OPEN_S):
            return await tool.specs()
    except TimeoutError:
        raise ToolError(f"{place}: no list of functions within {OPEN_S:g} s") from None
    except (ConfigError, ToolError) as error:
        raise type(error)(f"{place}: {error}") from error


def _checked(name: str, result: ToolResult) -> ToolResult:
    """A result whose text can be tokenised. Errors: ToolError where it is none."""
    if not isinstance(result, ToolResult):
        raise ToolError(f"{name} returned {type(result).__name__}, not a ToolResult")
    text = shortened(result.content, MAX_CHARS)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ToolError(f"{name} answered half a surrogate pair, which is no text") from error
    return result.model_copy(update={"content": text})


def shortened(text: str, limit: int) -> str:
    """The text; if it has more than `limit` characters, its head and its tail."""
    if len(text) <= limit:
        return text
    half = limit // 2
    note = f"\n[... {len(text) - 2 * half:,} characters left out ...]\n"
    return text[:half] + note + text[len(text) - half :]


def _wrong(text: str) -> ToolResult:
    text = text.encode("utf-8", "replace").decode()  # it quotes the model
    return ToolResult(content=shortened(text, MAX_ERROR_CHARS), failed=True)


async def _contained(name: str, work: Awaitable[T]) -> T:
    """A tool's work. Its SystemExit or GeneratorExit would end the run: it becomes a ToolError."""
    try:
        return await work
    except (Exception, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ToolError(f"{name} raised {described(error)}") from error


def _abandon(task: asyncio.Future[Any]) -> None:
    """Cancel a task and do not wait for it; its error, if it has one, is of no interest."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _release(releases: Sequence[Awaitable[None]]) -> None:
    """Carry out all releases; one that fails or hangs is logged, and stops no other."""

    async def bounded(release: Awaitable[None]) -> None:
        task = asyncio.ensure_future(release)
        await asyncio.wait({task}, timeout=END_S)
        if not task.done():
            _abandon(task)
            raise TimeoutError(f"not done within {END_S:g} s")
        await task

    results = await asyncio.gather(*map(bounded, releases), return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            log.warning("a tool could not release what it holds", error=described(result))
