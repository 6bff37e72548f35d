"""The tool service: verl-tool's wire format, state by trajectory, and ludus' own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from harness import Ludus
from service_world import command

from ludus.core.errors import ToolError
from ludus.core.types import Spec, ToolCall
from ludus.services.server.app import Settings
from ludus.services.tools.service import ToolLimits, tool_service
from ludus.tools.toolbox import Toolbox

PLAIN = Spec(name="python", args={"sandbox": "plain_sandbox:PlainSandbox", "stateful": True})


@asynccontextmanager
async def served(
    *specs: Any, tokens: tuple[str, ...] = (), **limits: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service in this event loop."""
    given = [Spec(name="served_tools:Counts"), *specs]
    app = tool_service(given, Settings(tokens=tokens), ToolLimits(**limits))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            yield client


async def observe(
    client: httpx.AsyncClient, *pairs: tuple[str, str], token: str = "", **fields: Any
) -> dict[str, Any]:
    body = {"trajectory_ids": [p[0] for p in pairs], "actions": [p[1] for p in pairs], **fields}
    headers = {"authorization": f"Bearer {token}"} if token else {}
    answer = await client.post("/get_observation", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_answer_has_verl_tools_fields() -> None:
    async with served() as client:
        answer = await observe(client, ("a", "<count>x</count>"), ("b", "I think. <stop></stop>"))
    assert answer["observations"][0] == "x 1"
    assert answer["dones"] == [False, False]
    assert answer["valids"] == [True, False]
    assert answer["processing_time_ms"] > 0
    assert answer["observations"][1]["obs"] == ""
    assert "<count>...</count>" in answer["observations"][1]["invalid_reason"]


@pytest.mark.parametrize(
    ("action", "observation", "done", "valid"),
    [
        (
            '<tool_call>{"name": "count", "arguments": {"word": "x"}}</tool_call>',
            "x 1",
            False,
            True,
        ),
        ('<tool_call>{"name": "stop"}</tool_call>', "stopped", True, True),
        ("<count>x</count> and <count>y</count>", "x 1\ny 2", False, True),
        ("```count\nx\n```", "x 1", False, True),
        ('<tool_call>{"name": "count", "arguments": {"word": 3}}</tool_call>', None, False, False),
        ('<tool_call>{"name": "cuont"}</tool_call>', None, False, False),
        ("<tool_call>{</tool_call>", None, False, False),
        ("<tool_call>[]</tool_call>", None, False, False),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None, False, False),
        ("<tool_call>" * 80_000, None, False, False),
        ("<count>" * 120_000, None, False, False),
        ("", None, False, False),
    ],
)
async def test_forms_of_an_action(
    action: str, observation: str | None, done: bool, valid: bool
) -> None:
    async with served() as client:
        answer = await observe(client, ("a", action))
    assert (answer["dones"], answer["valids"]) == ([done], [valid])
    if observation is not None:
        assert answer["observations"] == [observation]


async def test_the_code_blocks_of_an_action_are_one_program() -> None:
    async with served(PLAIN) as client:
        text = "```python\nx = 20\n```\nthen\n```py\nprint(x + 1)\n```"
        answer = await observe(client, ("a", text))
        assert answer["observations"] == ["21"]
        answer = await observe(
            client, ("a", "<python>print(x)</python>"), ("b", "<python>x</python>")
        )
    assert answer["observations"][0] == "20"
    assert "NameError" in answer["observations"][1]
    assert answer["valids"] == [True, False]


async def test_the_same_request_twice_runs_twice() -> None:
    async with served() as client:
        answers = [await observe(client, ("a", "<count>x</count>")) for _ in range(3)]
    assert [answer["observations"][0] for answer in answers] == ["x 1", "x 2", "x 3"]


async def test_actions_of_one_trajectory_run_in_their_order() -> None:
    async with served() as client:
        pairs = [(f"t{i % 3}", f"<count>{i}</count>") for i in range(12)]
        answer = await observe(client, *pairs)
    assert answer["observations"] == [f"{i} {i // 3 + 1}" for i in range(12)]


@pytest.mark.parametrize(
    "last",
    [
        {"finish": [True]},
        {"is_last_step": [True]},
        {"extra_fields": [{"finish": True}]},
        {"extra_fields": [{"is_last_step": True}]},
    ],
)
async def test_the_end_of_a_trajectory_releases_its_state(last: dict[str, Any]) -> None:
    async with served() as client:
        await observe(client, ("a", "<count>x</count>"), ("b", "<count>x</count>"))
        answer = await observe(client, ("a", "<count>x</count>"), **last)
        finished = "finish" in str(last)
        assert answer["observations"] == ["" if finished else "x 2"]
        assert answer["dones"] == [finished]
        assert (await client.get("/health")).json()["trajectories"] == 1
        assert (await observe(client, ("a", "<count>x</count>")))["observations"] == ["x 1"]


async def test_a_failing_tool_is_an_observation_with_an_error() -> None:
    async with served() as client:
        answer = await observe(client, ("a", "<fail>x</fail>"), ("b", "<count>x</count>"))
    error = {"obs": "", "error": "its server is lost", "tool_type": "fail"}
    assert answer["observations"] == [error, "x 1"]
    assert answer["dones"] == [True, False]
    assert answer["valids"] == [False, True]


async def test_a_trajectory_belongs_to_its_token() -> None:
    async with served(tokens=("one", "two")) as client:
        assert (await client.post("/get_observation", json={})).status_code == 401
        for token in ("one", "two"):
            answer = await observe(client, ("a", "<count>x</count>"), token=token)
            assert answer["observations"] == ["x 1"]


async def test_trajectories_are_limited_and_idle_ones_end() -> None:
    async with served(max_trajectories=2, idle_s=0.2) as client:
        await observe(client, ("a", "<count>x</count>"), ("b", "<count>x</count>"))
        body = {"trajectory_ids": ["c"], "actions": ["<count>x</count>"]}
        refused = await client.post("/get_observation", json=body)
        assert refused.status_code == 429
        assert "2 trajectories are open" in refused.json()["error"]["message"]
        assert (await observe(client, ("a", "<count>x</count>")))["observations"] == ["x 2"]
        async with asyncio.timeout(20):
            while (await client.get("/health")).json()["trajectories"]:
                await asyncio.sleep(0.05)
        assert (await observe(client, ("c", "<count>x</count>")))["observations"] == ["x 1"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"trajectory_ids": ["a"], "actions": []}, "actions"),
        ({"trajectory_ids": ["a", "b"], "actions": ["x"]}, "actions has 1 entries"),
        ({"trajectory_ids": ["a"], "actions": ["x"], "finish": []}, "finish has 0 entries"),
        ({"trajectory_ids": "a", "actions": ["x"]}, "trajectory_ids"),
        ({"trajectory_ids": [3], "actions": ["x"]}, "trajectory_ids.0"),
    ],
)
async def test_a_wrong_request_is_refused(body: Any, told: str) -> None:
    async with served() as client:
        answer = await client.post("/get_observation", json=body)
    assert answer.status_code == 422
    assert told in answer.json()["error"]["message"]


async def test_the_command_and_ludus_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TOOLS", "s3cret-of-the-tools")
    with command(
        "calculator",
        "served_tools:Counts",
        verb="tools",
        env={"LUDUS_TOKENS": "s3cret-of-the-tools"},
    ) as running:
        args = {"url": running.url, "token_env": "TOKEN_OF_TOOLS", "deadline_s": 5}
        async with await Toolbox.open([Spec(name="remote", args=args)]) as toolbox:
            names = [spec.name for spec in toolbox.specs]
            assert names == ["calculator", "count", "fail", "stop"]

            def call(name: str, **arguments: Any) -> ToolCall:
                return ToolCall(name=name, arguments=arguments)

            results = await toolbox.call(
                [call("calculator", expression="2**10"), call("calculator", expression="1/0")], "e"
            )
            assert [(r.content, r.failed) for r in results] == [
                ("1024", False),
                ("calculator: division by zero", True),
            ]
            assert (await toolbox.call([call("stop")], "e"))[0].done
            assert (await toolbox.call([call("count", word="x")], "e"))[0].content == "x 1"
            assert (await toolbox.call([call("count", word="x")], "e"))[0].content == "x 2"
            with pytest.raises(ToolError, match="its server is lost"):
                await toolbox.call([call("fail", word="x")], "e")
            await toolbox.end("e")
            assert (await toolbox.call([call("count", word="x")], "e"))[0].content == "x 1"
            running.kill()
            with pytest.raises(ToolError):
                await toolbox.call([call("count", word="x")], "e")


async def test_a_server_that_was_restarted_has_lost_the_state() -> None:
    words = ("calculator", "served_tools:Counts")
    count = ToolCall(name="count", arguments={"word": "x"})
    total = ToolCall(name="calculator", arguments={"expression": "1+1"})
    with command(*words, verb="tools") as running:
        args = {"url": running.url, "deadline_s": 20}
        async with await Toolbox.open([Spec(name="remote", args=args)]) as toolbox:
            assert (await toolbox.call([count], "e"))[0].content == "x 1"
            assert (await toolbox.call([total], "f"))[0].content == "2"
            running.kill()
            with command(*words, verb="tools", port=running.port):
                for _ in range(2):
                    with pytest.raises(ToolError, match="the state of this trajectory is lost"):
                        await toolbox.call([count], "e")
                assert (await toolbox.call([total], "f"))[0].content == "2"  # it keeps nothing
                assert (await toolbox.call([count], "e/retry-1"))[0].content == "x 1"


def test_a_wrong_tool_is_told_before_the_service_listens(ludus: Ludus) -> None:
    said = "'calculater' is not a known tool (did you mean calculator?)"
    ludus("serve", "tools", "calculater").refused(2, said)
