"""A short run of the recipe cuda-tiny: kernels are written, verified and rewarded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness import Ludus

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_run_verifies_the_kernels_of_the_model(ludus: Ludus, nvrtc: None) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: apt install g++")
    short = ("demonstrations.num_episodes=28", "demonstrations.timeout_s=120", "sft.steps=3")
    rl = ("rl.steps=2", "rl.group_size=2", "rl.groups_per_step=7")
    few = ("evaluate.num_tasks=7", "evaluate.every=0", "evaluate.num_tasks_between=null")
    found = ludus.start("train", RECIPES / "cuda-tiny.yaml", *short, *rl, *few).wait(500).ok()
    assert "28 demonstrations" in found.all
    lines = ludus.metrics("cuda-tiny-1")
    steps = [line for line in lines if line["stage"] == "rl"]
    assert [line["rollout/episodes"] for line in steps] == [14, 14]
    for line in steps:
        assert line["rollout/excluded"] == 0
        assert line["score/correctness"] == line["rollout/success"]
    for stage in ("evaluate/before", "evaluate/after"):
        (played,) = [line for line in lines if line["stage"] == stage]
        assert 0 <= played["evaluate/success"] <= 1
