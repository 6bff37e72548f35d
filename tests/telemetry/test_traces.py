"""Spans reach a real receiver; one that fails harms nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from otlp_receiver import Received, receiving

from ludus.config.load import load_config
from ludus.config.schema import TracesConfig
from ludus.core.errors import ConfigError, MissingDependency, ToolError
from ludus.core.types import Message, ToolCall
from ludus.models.samplers.base import SamplingParams
from ludus.telemetry import span_export, traces
from ludus.telemetry.span_export import exported, require_otel
from ludus.telemetry.traces import OFF, chat, execute_tool, invoke_agent

PARAMS = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, stop=("END",), seed=5)


def config(url: str, **settings: Any) -> TracesConfig:
    return TracesConfig(endpoint=url, **settings)


async def episode(number: int) -> None:
    with invoke_agent("agent", conversation=f"e{number}", task=f"t{number}", attempt=1) as agent:
        with chat(params=PARAMS) as turn:
            await asyncio.sleep(0)
            turn.answered(input_tokens=40, output_tokens=number, finish_reason="stop")
        await asyncio.gather(call("python"), call("search"))
        agent.set(status="completed", nothing=None)
        agent.scored("reward", 0.5)


async def call(name: str) -> None:
    with execute_tool(name, call_id=f"{name}-1", arguments={"code": "1"}) as span:
        await asyncio.sleep(0)
        span.result("42")


async def two_episodes() -> None:
    await asyncio.gather(episode(1), episode(2))


def test_spans_of_concurrent_episodes_reach_the_receiver() -> None:
    with receiving() as receiver, exported(config(receiver.url), run="tiny-1", model="qwen3"):
        asyncio.run(two_episodes())
    assert set(receiver.paths) == {"/v1/traces"}
    agents = {span.attributes["gen_ai.conversation.id"]: span for span in receiver.named("invoke")}
    assert set(agents) == {"e1", "e2"}
    assert len(receiver.spans) == 8
    for name, agent in agents.items():
        children = [span for span in receiver.spans if span.parent == agent.id]
        assert sorted(span.name for span in children) == [
            "chat qwen3", "execute_tool python", "execute_tool search"
        ]  # fmt: skip
        assert {span.trace for span in children} == {agent.trace}
        turn = next(span for span in children if span.name == "chat qwen3")
        assert turn.attributes["gen_ai.usage.output_tokens"] == int(name[1:])
    first = agents["e1"]
    assert first.attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "ludus",
        "gen_ai.agent.name": "agent",
        "gen_ai.conversation.id": "e1",
        "ludus.task": "t1",
        "ludus.attempt": 1,
        "ludus.status": "completed",
    }
    score = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.5}
    assert first.events == [("gen_ai.evaluation.result", score)]
    assert first.resource["service.name"] == "ludus"
    assert first.resource["ludus.run"] == "tiny-1"


def span_of(receiver: Any, name: str) -> Received:
    [span] = receiver.named(name)
    return span


def test_a_completion_has_the_attributes_of_the_conventions() -> None:
    with (
        receiving() as receiver,
        exported(config(receiver.url), run="r", model="qwen3"),
        chat("gpt", params=PARAMS, conversation="c", role="judge") as span,
    ):
        assert not span.has_content
        span.messages([Message(role="user", content="secret")], None)
        span.answered(input_tokens=3, output_tokens=4, finish_reason="length", model="gpt-7")
    turn = span_of(receiver, "chat gpt")
    assert turn.kind == 3  # CLIENT
    assert turn.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ludus",
        "gen_ai.request.model": "gpt",
        "gen_ai.conversation.id": "c",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.stop_sequences": ["END"],
        "gen_ai.request.seed": 5,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.response.model": "gpt-7",
        "ludus.role": "judge",
    }


def test_content_is_exported_on_request() -> None:
    tool_call = ToolCall(name="python", arguments={"code": "1"}, id="c1")
    answer = Message(role="assistant", thinking="hm", content="so", tool_calls=[tool_call])
    result = Message(role="tool", content="1 \ud800", name="python", tool_call_id="c1")
    with receiving() as receiver, exported(config(receiver.url, content=True), run="r", model="m"):
        with chat() as turn:
            assert turn.has_content
            turn.messages([Message(role="user", content="hi"), answer, result], answer)
        with execute_tool("python", call_id="c1", arguments={"code": "1"}) as span:
            span.result("2" * 200_000)
    told = span_of(receiver, "chat m").attributes
    given = json.loads(told["gen_ai.input.messages"])
    parts = [
        {"type": "reasoning", "content": "hm"},
        {"type": "text", "content": "so"},
        {"type": "tool_call", "id": "c1", "name": "python", "arguments": {"code": "1"}},
    ]
    assert given[0] == {"role": "user", "parts": [{"type": "text", "content": "hi"}]}
    assert given[1] == {"role": "assistant", "parts": parts}
    assert given[2]["parts"][0]["type"] == "tool_call_response"
    assert json.loads(told["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": parts, "finish_reason": "stop"}
    ]
    tool = span_of(receiver, "execute_tool").attributes
    assert json.loads(tool["gen_ai.tool.call.arguments"]) == {"code": "1"}
    assert len(tool["gen_ai.tool.call.result"]) == traces.MAX_CONTENT


def test_an_error_marks_the_span_and_passes() -> None:
    with receiving() as receiver, exported(config(receiver.url), run="r", model="m"):
        with pytest.raises(ToolError), execute_tool("python"):
            raise ToolError("no sandbox \ud800")
        with execute_tool("search") as span:
            span.failed("tool_failed", "no such page")
    assert span_of(receiver, "execute_tool python").failed
    assert span_of(receiver, "execute_tool python").attributes["error.type"] == "ToolError"
    assert span_of(receiver, "execute_tool search").attributes["error.type"] == "tool_failed"


def test_a_span_of_another_task_names_its_parent() -> None:
    with receiving() as receiver, exported(config(receiver.url), run="r", model="m"):
        with invoke_agent("a", conversation="c") as agent:
            pass
        with chat(parent=agent.parent):
            pass
    agent_span, turn = span_of(receiver, "invoke_agent"), span_of(receiver, "chat")
    assert turn.parent == agent_span.id


def test_a_share_of_the_episodes_is_exported() -> None:
    async def many() -> None:
        await asyncio.gather(*(episode(number) for number in range(200)))

    with receiving() as receiver, exported(config(receiver.url, share=0.2), run="r", model="m"):
        asyncio.run(many())
    agents = receiver.named("invoke_agent")
    assert 10 < len(agents) < 90
    assert len(receiver.spans) == 4 * len(agents), "whole episodes only"


def test_nothing_is_loaded_or_done_without_an_endpoint() -> None:
    with exported(None, run="r", model="m"):
        assert invoke_agent("a", conversation="c") is OFF
        assert chat() is OFF
        assert execute_tool("t") is OFF
        with chat() as turn:
            turn.answered(input_tokens=1)
            turn.messages([], None)
            turn.scored("reward", 1.0)
            turn.set(a=1)
            turn.failed("x", "y")
        assert turn.parent is None


@pytest.mark.parametrize("fault", ["absent", "refuses", "hangs"])
def test_a_receiver_that_fails_costs_spans_only(
    fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_export, "EXPORT_S", 0.3)
    caplog.set_level(logging.WARNING)
    hold = threading.Event() if fault == "hangs" else None
    with receiving(status=400, hold=hold) as receiver:
        url = "http://127.0.0.1:9" if fault == "absent" else receiver.url
        with exported(config(url), run="r", model="m"):
            asyncio.run(two_episodes())
    told = [record.getMessage() for record in caplog.records]
    assert "traces: spans were lost" in told
    assert len(told) <= 2, told
    assert chat() is OFF


def test_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc")
    with receiving() as receiver, exported(config(receiver.url), run="r", model="m"), chat():
        pass
    assert receiver.headers[0]["x-key"] == "abc"


def test_the_absent_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_otel()
    monkeypatch.setattr(span_export, "find_spec", lambda _: None)
    with pytest.raises(MissingDependency, match=r"pip install 'ludus-rl\[otel\]'"):
        require_otel()


def test_the_path_of_an_endpoint_is_added() -> None:
    assert config("http://h:4318").endpoint == "http://h:4318/v1/traces"
    assert config("http://h:4318/").endpoint == "http://h:4318/v1/traces"
    full = "https://h/api/public/otel/v1/traces"
    assert config(full).endpoint == full
    assert config(config("http://h:1").endpoint).endpoint == "http://h:1/v1/traces"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("grpc://h:4317", "traces.endpoint must be text that matches"),
        ("http://", "traces.endpoint must be text that matches"),
        ("http://h:99999", r"traces.endpoint: it must be http\(s\)://HOST"),
        ("http://me:secret@h:4318", "OTEL_EXPORTER_OTLP_HEADERS"),
        (7, "traces.endpoint must be text"),
    ],
)
def test_wrong_endpoints_are_refused(value: Any, said: str) -> None:
    raw = {"model": {"path": "x"}, "tasks": {"train": "x"}, "traces": {"endpoint": value}}
    with pytest.raises(ConfigError, match=said) as refused:
        load_config(raw)
    assert "secret" not in str(refused.value)


def test_traces_needs_an_endpoint() -> None:
    raw = {"model": {"path": "x"}, "tasks": {"train": "x"}, "traces": {"share": 0.5}}
    with pytest.raises(ConfigError, match=r"traces\.endpoint is required"):
        load_config(raw)


def test_the_module_loads_no_package_of_opentelemetry(tmp_path: Path) -> None:
    import subprocess

    code = "import ludus.telemetry.traces, ludus.telemetry.span_export, sys\n"
    code += "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
