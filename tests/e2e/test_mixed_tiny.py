"""A short run of the recipe mixed-tiny: exact shares, and each part is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Ludus

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.slow
def test_a_short_run_reports_each_part(ludus: Ludus) -> None:
    short = ("demonstrations.num_episodes=40", "sft.steps=4", "rl.steps=2", "rl.group_size=2")
    few = ("evaluate.num_tasks=9", "evaluate.every=0", "evaluate.num_tasks_between=null")
    sandbox = "tools.0.args.sandbox.name=plain_sandbox:PlainSandbox"
    judges = [
        f"tasks.{split}.args.parts.code.judge.args.sandbox.name=plain_sandbox:PlainSandbox"
        for split in ("train", "heldout")
    ]
    ludus("train", RECIPES / "mixed-tiny.yaml", *short, *few, sandbox, *judges).ok()
    lines = [line for line in ludus.metrics("mixed-tiny-1") if line["stage"] == "rl"]
    assert len(lines) == 2
    for line in lines:
        assert [line[f"mixture/{part}/share"] for part in ("code", "search", "maths")] == [
            0.4,
            0.3,
            0.3,
        ]
    for stage in ("evaluate/before", "evaluate/after"):
        (found,) = [line for line in ludus.metrics("mixed-tiny-1") if line["stage"] == stage]
        for part in ("code", "search", "maths"):
            assert 0 <= found[f"evaluate/success_{part}"] <= 1
