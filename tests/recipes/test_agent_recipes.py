"""Recipes of agents: a few steps of each, and the game that they play."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.config.load import load_config
from ludus.core.errors import ConfigError, MissingDependency
from ludus.core.modules import load_module
from ludus.core.types import Task
from ludus.data.splits import read_splits
from ludus.pipeline.launch import train
from ludus.pipeline.monitoring.progress import Display
from ludus.pipeline.parts.checks import check
from ludus.report.collect import read_evaluations
from ludus.sandbox.layers import require_layers
from ludus.telemetry.metrics import MetricsLog

ROOT = Path(__file__).parents[2]
JAILED = [
    'agent={command: ["{python}", walk_command.py], folder: examples/agents, sandbox: true}',
]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    yield
    sys.modules.pop("walk", None)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(
    ("name", "overrides"), [("command", []), ("command", JAILED), ("agentscope", [])]
)
def test_a_few_steps(name: str, overrides: list[str], tmp_path: Path) -> None:
    """The whole run is `benchmarks/agents.py`."""
    if overrides:
        try:
            require_layers()
        except ConfigError as error:
            pytest.skip(str(error))
    small = ["rl.steps=2", "rl.groups_per_step=4", "rl.minibatches=2", "evaluate.num_tasks=8"]
    small += ["report=false", "rollout.concurrency=4", f"runs_dir={tmp_path}", *overrides]
    config = load_config(f"recipes/agent-tiny-{name}.yaml", small)
    try:
        check(config)
    except MissingDependency as error:
        pytest.skip(str(error))
    folder = train(config, Display())
    steps = [line.metrics for line in MetricsLog.read(folder.metrics) if line.stage == "rl"]
    assert [step["rollout/episodes"] for step in steps] == [32.0, 32.0]
    assert [step["rollout/excluded"] for step in steps] == [0.0, 0.0]
    assert all(2 <= step["rollout/turns"] <= 3 for step in steps)
    assert all(step["train/loss_tokens"] > 0 for step in steps)
    assert read_evaluations(folder, config)["after RL"].num_tasks == 8


@pytest.mark.parametrize("name", ["command", "agentscope"])
def test_tasks_are_made_and_told_apart(name: str) -> None:
    config = load_config(f"recipes/agent-tiny-{name}.yaml", ["agent=examples/agents/walk.py:Walk"])
    splits = read_splits(config)
    assert (len(splits.train), len(splits.heldout)) == (4000, 200)


def test_a_walk() -> None:
    """The goal is two or three steps away; a turn without a direction is lost."""
    walk_module = load_module("examples/agents/walk.py")
    tasks: list[Task] = walk_module.walks(50)
    assert tasks == walk_module.walks(50)
    for task in tasks:
        walk, lost = walk_module.Walk(task.data), walk_module.Walk(task.data)
        assert task.prompt[0].content == walk.view()
        steps = 0
        while not walk.done:
            ways = walk.view().split("the goal in the ")[1].split(" ,")[0].split()
            walk.move(f"go {ways[0]} south")
            steps += 1
        assert (walk.reward, steps) == (1.0, walk.turns)
        assert steps in (2, 3)
        while not lost.done:
            lost.move("stay")
        assert lost.reward == 0.0
