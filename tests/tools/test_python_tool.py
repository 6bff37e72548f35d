"""The Python tool over the sandbox protocol."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.core.errors import ToolError
from ludus.core.types import Spec, ToolCall
from ludus.telemetry.queues import queueing
from ludus.tools.base import ToolResult
from ludus.tools.python import NO_OUTPUT
from ludus.tools.toolbox import Toolbox

PLAIN: dict[str, Any] = {"name": "plain_sandbox:PlainSandbox"}


async def opened(**args: Any) -> Toolbox:
    return await Toolbox.open([Spec(name="python", args={"sandbox": PLAIN, **args})])


async def run(toolbox: Toolbox, *codes: str, episode: str = "e") -> list[ToolResult]:
    calls = [ToolCall(name="python", arguments={"code": code}) for code in codes]
    return await toolbox.call(calls, episode)


async def test_it_answers_what_the_code_printed() -> None:
    async with await opened() as toolbox:
        results = await run(toolbox, "print(6 * 7)", "x = 1", "import sys\nsys.stderr.write('w')")
    assert [result.content for result in results] == ["42", NO_OUTPUT, "w"]
    assert not any(result.failed for result in results)


async def test_a_traceback_is_a_failed_result() -> None:
    async with await opened() as toolbox:
        (result,) = await run(toolbox, "print('before')\n1 / 0")
    assert result.failed
    assert result.content.startswith("before\nTraceback")
    assert result.content.endswith("ZeroDivisionError: division by zero")


async def test_stateless_calls_share_nothing() -> None:
    async with await opened() as toolbox:
        await run(toolbox, "x = 3")
        (result,) = await run(toolbox, "print(x)")
        assert "NameError" in result.content
        assert "Each call is a new interpreter" in toolbox.specs[0].description


async def test_stateful_calls_share_an_episodes_interpreter_in_order() -> None:
    async with await opened(stateful=True) as toolbox:
        results = await run(toolbox, "x = [1]", "x.append(2)", "print(x)")
        assert results[-1].content == "[1, 2]"
        assert "NameError" in (await run(toolbox, "print(x)", episode="other"))[0].content
        await toolbox.end("e")
        assert "NameError" in (await run(toolbox, "print(x)"))[0].content
        assert "Variables stay" in toolbox.specs[0].description


async def test_a_limit_is_told_and_loses_the_state() -> None:
    async with await opened(stateful=True, timeout_s=1) as toolbox:
        await run(toolbox, "x = 3")
        (result,) = await run(toolbox, "while True: pass")
        assert result.failed
        assert result.content == "(stopped after 1 s; all variables are gone)"
        assert "NameError" in (await run(toolbox, "print(x)"))[0].content


async def test_a_broken_sandbox_is_a_tool_error() -> None:
    async with await opened(sandbox={**PLAIN, "args": {"broken": True}}) as toolbox:
        with pytest.raises(ToolError, match="no worker is left"):
            await run(toolbox, "print(1)")


async def test_in_the_jail() -> None:
    spec = Spec(name="python", args={"stateful": True, "timeout_s": 2})
    async with await Toolbox.open([spec]) as toolbox:
        results = await run(toolbox, "x = 6", "print(x * 7)", "1 / 0", "open('/etc/shadow')")
        assert results[1].content == "42"
        assert results[2].content.endswith("ZeroDivisionError: division by zero")
        assert results[3].failed
        (stopped,) = await run(toolbox, "while True: pass")
        assert stopped.content == "(stopped after 2 s; all variables are gone)"
        assert "NameError" in (await run(toolbox, "print(x)"))[0].content


async def test_the_code_must_be_text() -> None:
    async with await opened() as toolbox:
        (result,) = await toolbox.call([ToolCall(name="python", arguments={"code": 3})], "e")
    assert result.failed
    assert "code: 3 is not of type 'string'" in result.content


async def test_the_wait_for_a_place_in_the_sandbox_is_measured() -> None:
    sandbox = {"name": "jail", "args": {"max_runs": 1, "packages": [], "isolation": "none"}}
    async with await opened(sandbox=sandbox) as toolbox:
        with queueing() as queue:
            results = await run(toolbox, *["import time; time.sleep(0.3); print(1)"] * 2)
    assert [result.content for result in results] == ["1", "1"]
    assert queue.seconds > 0.2  # of the second
