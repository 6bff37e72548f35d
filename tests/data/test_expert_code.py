"""Demonstrations in the format `code`: the expert's code runs; its result stands in the turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.config.schema import MarkersConfig
from ludus.core.errors import EnvError
from ludus.core.types import Spec, Task
from ludus.data.demonstrations import dropped_path, generate_demonstrations, load_demonstrations
from ludus.data.expert import CodeBlocks, run_expert
from ludus.envs.reasoning import Reasoning
from ludus.envs.textcraft.env import TextCraft
from ludus.tools.toolbox import Toolbox

ARITHMETIC = ("chain_sum", "basic_arithmetic", "products", "gcd", "lcm", "simple_equations")
PYTHON = Spec(name="python", args={"sandbox": {"name": "plain_sandbox:PlainSandbox"}})


async def test_the_code_of_each_data_set_finds_the_answer() -> None:
    markers = MarkersConfig()
    async with await Toolbox.open([PYTHON]) as toolbox:
        for name in ARITHMETIC:
            for seed in range(4):
                task = Reasoning.task(name, seed)
                blocks = CodeBlocks(markers, toolbox)
                demo = await run_expert(Reasoning(level=1), task, "code", blocks=blocks)
                assert demo.success
                _, code, result, answer, _ = demo.messages
                assert code.content.startswith("<code>")
                assert code.content.endswith("</code>")
                assert (result.role, result.name) == ("tool", "python")
                given = answer.content.removeprefix("<answer>").removesuffix("</answer>")
                assert float(given) == float(result.content)
                assert demo.num_turns == 2


async def test_an_environment_without_code_only_answers() -> None:
    async with await Toolbox.open([PYTHON]) as toolbox:
        blocks = CodeBlocks(MarkersConfig(answer=("[", "]")), toolbox)
        demo = await run_expert(TextCraft(), TextCraft.task("depth-1", 0), "code", blocks=blocks)
    turns = [message.content for message in demo.messages if message.role == "assistant"]
    assert all(turn.startswith("[") and turn.endswith("]") for turn in turns)
    assert not any(message.role == "tool" for message in demo.messages)


async def test_code_that_fails_is_told() -> None:
    class Wrong(Reasoning):
        def expert_code(self) -> str:
            return "1 / 0"

    async with await Toolbox.open([PYTHON]) as toolbox:
        blocks = CodeBlocks(MarkersConfig(), toolbox)
        with pytest.raises(EnvError, match=r"(?s)the expert's code failed: .*ZeroDivisionError"):
            await run_expert(Wrong(), Reasoning.task("chain_sum", 0), "code", blocks=blocks)


def test_worker_processes_run_the_code(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    tasks: list[Task] = [Reasoning.task("products", seed) for seed in range(3)]
    generate_demonstrations(
        Spec(name="reasoning"),
        tasks,
        path,
        num_workers=1,
        format="code",
        tools=[PYTHON],
    )
    assert dropped_path(path).read_text() == ""
    assert [demo.messages[2].role for demo in load_demonstrations(path)] == ["tool"] * 3


def test_a_share_of_the_episodes_runs_the_code(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    tasks: list[Task] = [Reasoning.task("products", seed) for seed in range(40)]
    generate_demonstrations(
        Spec(name="reasoning"),
        tasks,
        path,
        num_workers=1,
        format="code",
        code_share=0.5,
        tools=[PYTHON],
    )
    demos = list(load_demonstrations(path))
    assert len(demos) == 40
    ran = [demo for demo in demos if any(m.role == "tool" for m in demo.messages)]
    assert 10 < len(ran) < 30
    at_once = [demo for demo in demos if demo not in ran]
    assert all(demo.num_turns == 1 for demo in at_once)
    assert all(demo.messages[1].content.startswith("<answer>") for demo in at_once)
