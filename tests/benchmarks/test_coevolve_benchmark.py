"""The ablations of a co-evolution: their runs, and the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_coevolution import make_world

from ludus.coevolve.storage import Storage, read_rows, write_rows

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "coevolve.py"

TOY = """
name: toy
iterations: 1
shared:
  report: false
  model: {chat_template: plain, context_length: 128}
  rollout: {max_tokens_per_turn: 16, concurrency: 64}
start:
  model:
    architecture:
      name: qwen3
      args: {hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1}
    tokenizer: words
  env: problems
  tasks: {train: {name: env, args: {num_tasks: 16}}}
  demonstrations: {num_episodes: 16, num_workers: 1}
  sft: {steps: 2, episodes_per_step: 4}
curriculum:
  env: proposals
  tasks: {train: {name: env, args: {num_tasks: 4}}}
  rl: {steps: 1, groups_per_step: 2, group_size: 2}
executor:
  tasks:
    heldout: {name: "ludus.envs.synthetic.problems:read_problems", args: {num_tasks: 8}}
  rl: {algorithm: adpo, steps: 1, groups_per_step: 2, group_size: 2}
answers: {number: 2}
questions: {proposals: 4}
"""


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )


@pytest.mark.slow
def test_the_page_has_every_condition_seed_and_iteration(tmp_path: Path) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    make_world(out / "full-seed0")
    make_world(out / "full-seed1")
    stopped = make_world(out / "grpo-seed0", iterations=2).storage
    problems = read_rows(stopped.questions(1, "problems"))
    answers = read_rows(stopped.temporary(1, "answers"))
    kept = problems[-1]["question"]  # the one label that is true
    rows = [row | {"question": "what is 3 + 4 ?"} if row["question"] == kept else row
            for row in answers]  # fmt: skip
    write_rows(stopped.temporary(1, "answers"), rows)
    proposals = read_rows(stopped.questions(1, "proposals"))
    rows = [row | {"question": "what is 3 + 4 ?"} if row["question"] == kept else row
            for row in proposals]  # fmt: skip
    write_rows(stopped.questions(1, "proposals"), rows)
    done = benchmark("page", "--out", str(out), "--docs", str(docs), "--note", "A note.")
    assert done.returncode == 0, done.stderr[-2000:]
    page = (docs / "coevolve-tiny.md").read_text()
    assert page.startswith("# Co-evolution: coevolve-tiny, 2 conditions, 2 seeds\n")
    assert re.search(r"\| full \| 1 \| 3 \| 35.5 % .* \| \+39.5 .* \| yes \|", page)
    assert "| grpo | 0 | 2 |" in page
    assert "| full | 35.5 % (35.5, 35.5) | 55.0 % (55.0, 55.0) |" in page
    assert "| grpo | 63.0 % (63.0) | 56.0 % (56.0) |  |" in page
    assert "A note.\n" in page
    figures = json.loads((docs / "coevolve-tiny.json").read_text())
    label = figures[2]["iterations"]["1"]["Labels that are true"]
    share = figures[2]["iterations"]["1"]["Kept problems with a true answer"]
    known = round(share * len(problems))
    assert label == pytest.approx(1 / known, abs=1e-3)
    assert figures[0]["iterations"]["1"]["Labels that are true"] == 0.0
    assert "<svg" in (docs / "coevolve-tiny.svg").read_text()


@pytest.mark.slow
def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    done = benchmark("page", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "has no folder CONDITION-seedN" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_conditions_share_the_first_run(tmp_path: Path) -> None:
    """An untrained agent proposes nothing: each co-evolution ends at its filter, and is told of."""
    recipe, out = tmp_path / "toy.yaml", tmp_path / "out"
    recipe.write_text(TOY)
    options = ("--conditions", "full", "fixed", "--seeds", "0", "--jobs", "2")
    done = benchmark("run", "--recipe", str(recipe), "--out", str(out), *options)
    assert done.returncode == 1
    assert "full-seed0: exit code" in done.stderr
    assert "fixed-seed0: exit code" in done.stderr
    full, fixed = (Storage(out / f"{name}-seed0") for name in ("full", "fixed"))
    assert "the filter kept none of 4" in (out / "fixed-seed0.log").read_text()
    assert full.complete()["start"] == fixed.complete()["start"]
    weights = [one.model("start") / "model.safetensors" for one in (full, fixed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not (fixed.runs / "start-1").exists()
    assert "iteration-1/curriculum" in full.complete()
    assert "iteration-1/curriculum" not in fixed.complete()
    assert full.report.is_file()
    done = benchmark("page", "--out", str(out), "--docs", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| fixed | 0 | 0 |" in (tmp_path / "coevolve-tiny.md").read_text()
