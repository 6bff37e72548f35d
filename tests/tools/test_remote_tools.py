"""The client of verl-tool's protocol, against answers of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from raw_server import CLOSE, HANG, RawServer, answer

from ludus.core.errors import ConfigError, ToolError
from ludus.core.types import Spec, ToolCall
from ludus.tools.base import ToolResult
from ludus.tools.toolbox import Toolbox

MARKED = {"action": "<python>{}</python>", "description": "Run Python."}


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    async with RawServer() as made:
        yield made


def observed(observation: Any, done: Any = False, valid: Any = True) -> bytes:
    return answer({"observations": [observation], "dones": [done], "valids": [valid]})


async def run(server: RawServer, code: str = "print(1)", **args: Any) -> ToolResult:
    spec = Spec(name="remote", args={"url": server.url, **MARKED, **args})
    async with await Toolbox.open([spec]) as toolbox:
        (result,) = await toolbox.call([ToolCall(name="python", arguments={"code": code})], "e")
        return result


async def test_a_call_at_verl_tools_own_server(server: RawServer) -> None:
    server.script = [observed("\n<result>\n1\n</result>\n")]
    spec = Spec(name="remote", args={"url": f"{server.url}/get_observation", **MARKED})
    async with await Toolbox.open([spec]) as toolbox:
        call = ToolCall(name="python", arguments={"code": "print(1)"})
        (result,) = await toolbox.call([call], "e")
        await toolbox.end("e")
        await toolbox.end("other")  # it made no call
    assert result == ToolResult(content="\n<result>\n1\n</result>\n")
    assert server.heads[0].startswith("POST /get_observation ")
    first, last = server.bodies
    assert first["actions"] == ["<python>print(1)</python>"]
    assert (first["finish"], last["finish"], last["is_last_step"]) == ([False], [True], [True])
    assert first["trajectory_ids"] == last["trajectory_ids"]


async def test_the_end_of_an_episode_does_not_wait_for_a_server_that_is_down(
    server: RawServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.script = [CLOSE]
    async with await Toolbox.open([Spec(name="remote", args={"url": server.url, **MARKED})]) as box:
        for number in range(5):
            with pytest.raises(ToolError):
                await box.call([ToolCall(name="python", arguments={"code": "1"})], f"e{number}")
        await asyncio.gather(*(box.end(f"e{number}") for number in range(5)))
    assert len(server.bodies) == 5
    assert not caplog.records


@pytest.mark.parametrize(
    ("response", "result"),
    [
        (observed("x", True), ToolResult(content="x", done=True)),
        (observed("Traceback", False, False), ToolResult(content="Traceback", failed=True)),
        (observed({"obs": "x", "reward": 1.0}), ToolResult(content="x")),
        (
            observed({"obs": "", "invalid_reason": "No valid tool found"}, False, False),
            ToolResult(content="No valid tool found", failed=True),
        ),
        (observed("x", 1, 0), ToolResult(content="x", done=True, failed=True)),
        (
            answer({"detail": "too long"}, 422),
            ToolResult(content="python: too long", failed=True),
        ),
    ],
)
async def test_regular_answers(server: RawServer, response: bytes, result: ToolResult) -> None:
    server.script = [response]
    assert await run(server) == result


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (observed({"obs": "", "error": "Tool processing failed: x"}, True, False), "processing"),
        (answer({"detail": "Action processing failed"}, 500), "answered 500: Action processing"),
        (answer({"observations": [], "dones": [], "valids": []}), "not a tool server's answer"),
        (answer({"observations": ["a", "b"], "dones": [0, 0], "valids": [1, 1]}), "observations"),
        (answer({"observations": [None], "dones": [False], "valids": [True]}), "observations"),
        (answer({"observations": ["x"]}), "dones"),
        (answer(["x"]), "not a tool server's answer"),
        (answer(b'{"observations": ["\\ud800"], "dones": [false], "valids": [true]}'), "surrog"),
        (HANG, "no answer within 0.3 s"),
    ],
)
async def test_a_failing_server_is_a_tool_error(
    server: RawServer, response: bytes, told: str
) -> None:
    server.script = [response]
    with pytest.raises(ToolError, match=told):
        await run(server, deadline_s=0.3)


@pytest.mark.parametrize("listed", [answer({}, 404), answer({"tools": []}), answer([{"nam": 1}])])
async def test_a_server_that_lists_no_functions(server: RawServer, listed: bytes) -> None:
    server.script = [listed]
    with pytest.raises(ToolError, match=r"tools\.0: "):
        await Toolbox.open([Spec(name="remote", args={"url": server.url})])


async def test_the_action_must_have_a_place_for_the_argument(server: RawServer) -> None:
    with pytest.raises(ConfigError, match="exactly once"):
        await run(server, action="<python></python>")
