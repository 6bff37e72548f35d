"""The run's tools in the hands of a user's agent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import played_tools
import pytest
from rollout_world import Scripted, World

from ludus.config.schema import RolloutConfig, RunConfig
from ludus.core.errors import ConfigError, ToolError
from ludus.core.types import Spec, Status, Task, ToolCall, Trajectory
from ludus.models.chat.by_task import TaskRenderers
from ludus.pipeline.parts.checks import check
from ludus.rollout.agent_tools import AgentTools
from ludus.rollout.collect import Collector
from ludus.rollout.tool_use import RunTools, read_functions
from ludus.rollout.workflow import Agent

SAID = [{"role": "user", "content": "red"}]


@pytest.fixture(autouse=True)
def fresh_tools() -> Iterator[None]:
    yield
    for record in (played_tools.RUNNING, played_tools.FAILURES):
        record.clear()
    played_tools.ENDED.clear()
    played_tools.CLOSED.clear()


async def play(
    world: World, run: Any, *names: str, limits: Mapping[str, Any] = {}, **settings: Any
) -> Trajectory:
    specs = [Spec(name=name if ":" in name else f"played_tools:{name}") for name in names]
    functions = await read_functions(specs)
    settings = {"tool_calls": dict(limits), "max_retries": 0, **settings}
    parameters = frozenset(inspect.signature(run).parameters)
    collector = Collector(
        Scripted(world.renderer(), "blue"),
        TaskRenderers(world.renderer()),
        RolloutConfig(max_tokens_per_turn=40, deterministic=False, **settings),
        None,
        tools=RunTools(specs, functions, 0.3),
        agent=Agent(run, parameters, not inspect.iscoroutinefunction(run)),
    )
    try:
        (group,) = await collector.collect([Task(id="t")], 0, 1)
    finally:
        await collector.close()
    return group.trajectories[0]


async def test_a_call_and_a_turn_of_calls(world: World) -> None:
    async def run(task: Task, model: Any, tools: AgentTools) -> float:
        assert [spec.name for spec in tools.specs] == ["double", "broken"]
        await model.chat(SAID)
        assert await tools.call("double", number=4) == "8"
        assert "wrong arguments" in await tools.call("double", number="four")
        calls = [ToolCall(name="broken", arguments={}, id="a"), ToolCall(name="nosuch", id="b")]
        said = await tools.answer(calls)
        assert [message.tool_call_id for message in said] == ["a", "b"]
        assert "it is broken" in said[0].content
        assert "There is no tool 'nosuch'" in said[1].content
        return 1.0

    played = await play(world, run, "double", "broken")
    assert (played.status, played.error, played.reward) == (Status.COMPLETED, None, 1.0)
    counts = [played.metrics[f"tool_{name}"] for name in ("calls", "failed", "malformed")]
    assert counts == [3.0, 2.0, 1.0]


def test_a_function_has_the_signature_of_its_schema(world: World) -> None:
    functions: list[Any] = []

    def run(task: Task, model: Any, tools: AgentTools) -> float:
        functions.extend(tools.functions())
        asyncio.run(model.chat(SAID))
        return float(asyncio.run(functions[0](number=3)) == "6")

    played = asyncio.run(play(world, run, "double", f"{__name__}:forecast"))
    assert played.reward == 1.0
    double, forecast = functions
    assert (double.__name__, str(inspect.signature(double))) == (
        "double",
        "(*, number: int) -> str",
    )
    signature = inspect.signature(forecast)
    assert str(signature) == "(*, city: str, days: int | None = 1) -> str"
    assert inspect.getdoc(forecast) == (
        "The weather.\n\nArgs:\n    city: its name, in English.\n    days:"
    )


async def forecast(city: str, days: int = 1) -> str:
    """The weather.

    Args:
        city: its name, in English.
    """
    return f"{city}: rain for {days} days"


async def test_the_limit_of_a_turn_counts_from_the_models_last(world: World) -> None:
    async def run(task: Task, model: Any, tools: AgentTools) -> float:
        said = []
        for _ in range(2):
            await model.chat(SAID)
            said += [await tools.call("double", number=2) for _ in range(2)]
        assert [text[:7] for text in said] == ["4", "Not run", "4", "Not run"]
        return 1.0

    played = await play(world, run, "double", limits={"max_per_turn": 1})
    assert (played.error, played.reward) == (None, 1.0)


async def test_a_failing_tool_ends_the_attempt_whatever_the_agent_does(world: World) -> None:
    """Frameworks catch the errors of tools, and tell them to the model."""

    async def run(task: Task, model: Any, tools: AgentTools) -> float:
        await model.chat(SAID)
        try:
            await tools.call("note", word="red")
        except ToolError:
            return 0.0
        return 1.0

    id = "rl-000000/g0000/e000"
    played_tools.FAILURES[id] = 1
    played = await play(world, run, "Recorder")
    assert (played.status, played.reward) == (Status.ERROR_TOOL, None)
    assert "the server is away" in (played.error or "")
    played_tools.FAILURES[id] = 1
    played_tools.ENDED.clear()
    played = await play(world, run, "Recorder", max_retries=1)
    assert (played.status, played.reward) == (Status.COMPLETED, 1.0)
    assert [id, f"{id}/retry-1"] == played_tools.ENDED


async def test_a_tool_that_hangs(world: World) -> None:
    async def run(task: Task, model: Any, tools: AgentTools) -> None:
        await model.chat(SAID)
        await tools.call("hang")

    played = await play(world, run, "hang")
    assert (played.status, played.error) == (
        Status.ERROR_TOOL, "hang gave no answer within 0.3 s"
    )  # fmt: skip


async def test_a_result_that_ends_the_episode_is_told(world: World) -> None:
    async def run(task: Task, model: Any, tools: AgentTools) -> float:
        await model.chat(SAID)
        assert not tools.done
        await tools.call("finish")
        return float(tools.done)

    assert (await play(world, run, "finish")).reward == 1.0


async def odd() -> Any:
    """Not called."""


async def test_an_argument_without_a_python_name(world: World) -> None:
    async def run(task: Task, model: Any, tools: AgentTools) -> None:
        await model.chat(SAID)
        spec = tools.specs[0]
        tools.specs = [spec.model_copy(update={"parameters": {"properties": {"a-b": {}}}})]
        tools.functions()

    with pytest.raises(ConfigError, match=r"the argument 'a-b' of odd is no name in Python"):
        await play(world, run, f"{__name__}:odd")


async def plain(task: Task, model: Any) -> None:
    """Takes no tools."""


async def with_tools(task: Task, model: Any, tools: Any) -> None:
    """Takes tools."""


async def maybe_tools(task: Task, model: Any, tools: Any = None) -> None:
    """Takes tools where there are some."""


@pytest.mark.parametrize(
    ("agent", "tools", "refused"),
    [
        ("plain", ["calculator"], "tools: the agent takes no `tools`"),
        ("with_tools", [], "agent: it takes `tools`, and the run has none"),
        ("with_tools", ["calculator"], None),
        ("maybe_tools", ["calculator"], None),
        ("maybe_tools", [], None),
        ("plain", [], None),
    ],
)
def test_tools_and_agent_fit(agent: str, tools: list[str], refused: str | None) -> None:
    config = RunConfig.model_validate(
        {
            "name": "x",
            "model": {"architecture": "qwen3", "tokenizer": "words", "chat_template": "plain"},
            "agent": f"{__name__}:{agent}",
            "tools": tools,
            "judge": "answer",
            "tasks": {"train": {"name": "json", "args": {"path": "t.json"}}},
            "rollout": {"deterministic": False},
            "rl": {"algorithm": "grpo", "steps": 1},
        }
    )
    if refused is None:
        check(config)
    else:
        with pytest.raises(ConfigError, match=refused):
            check(config)
