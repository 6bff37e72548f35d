"""Whole runs with what some rows need besides the policy: critic, reference, horizon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from harness import TEXTCRAFT, Ludus
from safetensors.torch import load_file

ROW = "rl.algorithm={name: ppo, args: {kl_coefficient: 0.1, importance_cap: 2}}"
HORIZON = "rl.horizon=[[0, 1], [1, 2]]"
SINGLES = ("rl.group_size=1", "rl.groups_per_step=4", "checkpoint.every=1")


@pytest.mark.slow
def test_critic_reference_and_horizon_are_resumed_to_the_same_bits(
    ludus: Ludus, tmp_path: Path
) -> None:
    (tmp_path / "again").mkdir()
    ludus_again = replace(ludus, cwd=tmp_path / "again")
    ludus("train", TEXTCRAFT, ROW, HORIZON, *SINGLES, "rl.steps=2").ok()
    with ludus.store() as store:
        for step in range(2):
            turns = {r.trajectory.num_turns for r in store.records("craft-1", "rl", step)}
            assert max(turns) <= step + 1
    first = [line for line in ludus.metrics("craft-1") if line["stage"] == "rl"]
    assert first[0]["train/reference_kl"] < 1e-6
    assert first[0]["train/value_error"] >= 0

    ludus_again("train", TEXTCRAFT, ROW, HORIZON, *SINGLES, "rl.steps=1").ok()
    ludus_again("train", "--resume", "craft-1", "rl.steps=2").ok()
    name = "checkpoints/rl-000002/model.safetensors"
    whole = load_file(ludus.run("craft-1") / name)
    pieces = load_file(ludus_again.run("craft-1") / name)
    assert whole.keys() == pieces.keys()
    assert all(whole[key].equal(pieces[key]) for key in whole)
    assert not any("critic" in key for key in whole)  # no part of the policy


@pytest.mark.slow
def test_a_reference_of_other_tokens_stops_the_run_with_its_place(ludus: Ludus) -> None:
    ludus("train", TEXTCRAFT, "rl=null", "sft.steps=1").ok()
    ludus("checkpoint", "export", "craft-1", "elsewhere").ok()
    row = "rl.algorithm={name: grpo, args: {kl_coefficient: 0.1, kl_reference: elsewhere}}"
    smaller = "model.tokenizer={name: bpe, args: {vocab_size: 600}}"
    done = ludus("train", TEXTCRAFT, row, smaller)
    done.refused(2, "rl.algorithm.args.kl_reference: ")
