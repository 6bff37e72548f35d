"""The toolbox: functions by name, checked arguments, concurrent calls, deadlines."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from ludus.core.errors import ConfigError, ToolError
from ludus.core.types import Spec, ToolCall, ToolSpec
from ludus.telemetry.queues import queued, queueing
from ludus.tools.base import Tool, ToolResult
from ludus.tools.toolbox import MAX_CHARS, Toolbox

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
HERE = "test_toolbox"


class Sums(Tool):
    """`add`, and functions that misbehave."""

    def __init__(self, name: str = "add", parameters: dict[str, Any] | None = None) -> None:
        self.name, self.parameters = name, parameters or ADD
        self.ended: list[str] = []
        self.waiting = 0
        self.met = asyncio.Event()

    async def specs(self) -> Sequence[ToolSpec]:
        others = ["meet", "hang", "stubborn", "boom", "huge", "surrogate", "none", "exit", "closed"]
        others += ["cancelled", "cancels_itself", "queued"]
        first = ToolSpec(name=self.name, parameters=self.parameters)
        return [first, *(ToolSpec(name=f"{self.name}_{other}") for other in others)]

    async def call(self, call: ToolCall, episode: str) -> ToolResult:
        match call.name.removeprefix(self.name):
            case "_meet":  # answers once two calls are under way
                self.waiting += 1
                if self.waiting == 2:
                    self.met.set()
                await self.met.wait()
                return ToolResult(content="met")
            case "_hang":
                await asyncio.sleep(3600)
            case "_stubborn":
                for _ in range(3):
                    try:
                        await asyncio.sleep(0.5)
                    except asyncio.CancelledError:
                        continue
            case "_boom":
                raise ZeroDivisionError("of the tool")
            case "_huge":
                return ToolResult(content="a" + "b" * MAX_CHARS * 3 + "c")
            case "_surrogate":
                return ToolResult(content="\ud800")
            case "_exit":
                sys.exit(0)
            case "_closed":
                raise GeneratorExit
            case "_cancelled":
                raise asyncio.CancelledError
            case "_cancels_itself":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(3600)
            case "_queued":
                async with queued(PLACES):
                    pass
                return ToolResult(content="its turn")
            case "_none":
                return None  # type: ignore[return-value]
        return ToolResult(content=str(call.arguments["a"] + call.arguments["b"]))

    async def end(self, episode: str) -> None:
        if episode == "faulty":
            raise RuntimeError("cannot end")
        self.ended.append(episode)


PLACES = asyncio.Semaphore(1)


async def opened(**options: Any) -> Toolbox:
    return await Toolbox.open([f"{HERE}:Sums"], **options)


def named(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


async def test_results_are_in_the_order_of_the_calls() -> None:
    async with await opened() as toolbox:
        calls = [
            named("add", a=1, b=2),
            named("add_meet"),
            named("add_meet"),
            named("add", a=3, b=4),
        ]
        results = await toolbox.call(calls, "e")
    assert [result.content for result in results] == ["3", "met", "met", "7"]
    assert await toolbox.call([], "e") == []


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (named("ad", a=1, b=2), "There is no tool 'ad' (did you mean add?)."),
        (named("add", a=1, b="2"), "add: wrong arguments: b: '2' is not of type 'integer'"),
        (named("add", a=1, b=True), "add: wrong arguments: b: True is not of type 'integer'"),
        (named("add", a=1), "add: wrong arguments: 'b' is a required property"),
        (named("add", a=1, b=2, bb=3), "there is no argument 'bb' (did you mean b?)"),
        (named("add_meet", x=1), "there is no argument 'x': it takes none"),
        (named("\ud800"), "There is no tool"),
        (named("add", a=1, b="x" * 10_000), "is not of type 'integer'"),
    ],
)
async def test_a_wrong_call_is_told_to_the_model(call: ToolCall, told: str) -> None:
    async with await opened() as toolbox:
        (result,) = await toolbox.call([call], "e")
    assert result.failed
    assert told in result.content
    assert len(result.content) < 500
    result.content.encode()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("add_hang", "add_hang gave no answer within 0.05 s"),
        ("add_stubborn", "add_stubborn gave no answer within 0.05 s"),
        ("add_boom", "add_boom raised ZeroDivisionError: of the tool"),
        ("add_surrogate", "half a surrogate pair"),
        ("add_none", "returned NoneType, not a ToolResult"),
        ("add_exit", "add_exit raised SystemExit: 0"),
        ("add_closed", "add_closed raised GeneratorExit"),
        ("add_cancelled", "add_cancelled raised CancelledError"),
        ("add_cancels_itself", "add_cancels_itself raised CancelledError"),
    ],
)
async def test_a_tool_that_fails_is_a_tool_error(function: str, told: str) -> None:
    async with await opened(deadline_s=0.05) as toolbox:
        with pytest.raises(ToolError, match=told):
            await toolbox.call([named("add", a=1, b=1), named(function)], "e")


async def test_one_failure_cancels_the_other_calls_of_the_turn() -> None:
    async with await opened(deadline_s=3600) as toolbox:
        with pytest.raises(ToolError, match="add_boom"):
            await toolbox.call([named("add_hang"), named("add_boom")], "e")


async def test_a_huge_result_keeps_head_and_tail() -> None:
    async with await opened() as toolbox:
        (result,) = await toolbox.call([named("add_huge")], "e")
    assert MAX_CHARS < len(result.content) < MAX_CHARS + 100
    assert result.content.startswith("ab")
    assert result.content.endswith("bc")
    assert "2,000,002 characters left out" in result.content


async def test_the_limiter_is_asked_before_each_call() -> None:
    asked: list[str] = []

    async def acquire(name: str) -> None:
        asked.append(name)

    async with await opened(acquire=acquire) as toolbox:
        await toolbox.call([named("add", a=1, b=2), named("add", a=1, b="x")], "e")
    assert asked == ["add"]  # a wrong call costs no permit


async def test_a_failing_end_stops_no_other() -> None:
    tools = [Sums(), Sums()]
    toolbox = Toolbox([("0", tool) for tool in tools], {}, 1.0)
    await toolbox.end("faulty")
    await toolbox.end("e")
    assert [tool.ended for tool in tools] == [["e"], ["e"]]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({}, "tools.1: tools.0 also offers a function 'add'"),
        ({"name": "two words"}, "tools.1: 'two words' cannot be a function's name"),
        ({"name": "x", "parameters": {"type": "array"}}, 'must be a schema of type "object"'),
        (
            {"name": "x", "parameters": {"type": "object", "required": 3}},
            "tools.1: x: parameters are not a JSON schema",
        ),
        ({"nam": "x"}, "tools.1.args.nam is not an argument"),
    ],
)
async def test_wrong_tools_are_refused_with_their_place(args: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        await Toolbox.open([f"{HERE}:Sums", Spec(name=f"{HERE}:Sums", args=args)])


async def test_a_schema_by_url_is_not_fetched() -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/a.json"}}}
    spec = Spec(name=f"{HERE}:Sums", args={"name": "x", "parameters": parameters})
    async with await Toolbox.open([spec]) as toolbox:
        with pytest.raises(ToolError, match="its schema refers to 'http"):
            await toolbox.call([named("x", a=1)], "e")


async def test_the_deadline_does_not_run_while_a_call_waits_for_its_turn() -> None:
    async with await opened(deadline_s=0.05) as toolbox:
        async with PLACES:
            with queueing() as queue:
                call = asyncio.create_task(toolbox.call([named("add_queued")], "e"))
                await asyncio.sleep(0.3)
            assert not call.done()
        assert (await call)[0].content == "its turn"
    assert queue.seconds > 0.2


async def test_a_schema_that_refers_to_itself_is_not_the_models_fault() -> None:
    loop = {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": loop}
    spec = Spec(name=f"{HERE}:Sums", args={"parameters": schema})
    async with await Toolbox.open([spec]) as toolbox:
        with pytest.raises(ToolError, match="refers to itself without end"):
            await toolbox.call([named("add", a=1)], "e")
