"""The recipe of docs/gateway.md, Structured output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from harness import Ludus

import ludus
from ludus.core.types import Status

ROOT = Path(ludus.__file__).parents[1]
RECIPE = ROOT / "examples" / "agents" / "structured-tiny.yaml"

pytest.importorskip("llguidance", reason="needs the extra agents")


@pytest.fixture
def recipe(ludus: Ludus) -> str:
    config = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    config["agent"] = str(ROOT / config["agent"])
    for reader in config["tasks"].values():
        reader["name"] = str(ROOT / reader["name"])
    (ludus.cwd / "recipe.yaml").write_text(yaml.safe_dump(config))
    return "recipe.yaml"


@pytest.mark.slow
def test_it_learns_from_scratch(ludus: Ludus, recipe: str) -> None:
    ludus("train", recipe, "rl.steps=20").ok()
    run = "structured-tiny-1"
    rewards = [step["rollout/reward"] for step in ludus.metrics(run) if step["stage"] == "rl"]
    assert sum(rewards[:2]) / 2 < 0.6
    assert rewards[-1] > 0.9
    with ludus.store() as store:
        rows = store.trajectories(run, limit=100)
        found = [store.trajectory(run, row.id) for row in rows]
    for trajectory in found:
        (turn,) = [s for s in trajectory.segments if s.sampled]
        assert turn.constraint is not None
        assert turn.message is not None
        if trajectory.status is Status.COMPLETED:
            assert [*json.loads(turn.message.content)] == ["colour", "sure"]
    assert any(trajectory.status is Status.COMPLETED for trajectory in found)
