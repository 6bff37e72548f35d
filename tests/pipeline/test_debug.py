"""Debugging: one thread, all turns and rows printed, nothing written."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import ludus
from ludus.config.load import dump_config, load_config
from ludus.core.errors import ConfigError
from ludus.pipeline.debug import debug, row_lines
from ludus.pipeline.launch import resume, train
from ludus.pipeline.monitoring.progress import Display

ROOT = Path(ludus.__file__).parents[1]
ENVS = f"{ROOT}/tests/support/debugged_envs.py"
RECIPE = """
name: debugged
model:
  architecture:
    name: qwen3
    args:
      {{hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 8,
        intermediate_size: 16}}
  tokenizer: {{name: words}}
  chat_template: plain
  context_length: 128
env: "{envs}:{env}"
tasks:
  train: {{name: env, args: {{num_tasks: 20}}}}
rollout: {{max_tokens_per_turn: 4, max_turns: 3, system_prompt: count}}
demonstrations: {{num_episodes: 4}}
sft: {{steps: 1}}
rl: {{steps: 1, group_size: 4, groups_per_step: 1}}
"""


def recipe(folder: Path, env: str = "Count", more: str = "") -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(envs=ENVS, env=env) + more)
    return path


def shown(folder: Path, num_tasks: int = 1, **how: Any) -> str:
    """Returns the output of `debug` on 80 columns."""
    console = Console(file=io.StringIO(), width=80, color_system=None, _environ={})
    debug(load_config(recipe(folder, **how)), num_tasks, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_rows_with_model_scores_are_those_before_the_first_update(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    console = Console(file=io.StringIO(), width=80, color_system=None, _environ={})
    row = "{name: ppo, args: {kl_coefficient: 0.1, kl_in: reward, importance_cap: 2}}"
    debug(load_config(path, [f"rl.algorithm={row}"]), 1, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "RL rl-000000/g0000/e000" in printed
    assert "no training row" not in printed


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_turns_and_rows_are_printed(tmp_path: Path):
    out = shown(tmp_path, 2)
    heads = re.findall(r"(SFT|RL) (\S+)  task (\S+)", out)
    assert heads == [
        ("SFT", "sft-000000/g0000/e000", "count/0"),
        ("SFT", "sft-000000/g0001/e000", "count/1"),
        ("RL", "rl-000000/g0000/e000", "count/0"),
        ("RL", "rl-000000/g0000/e001", "count/0"),
        ("RL", "rl-000000/g0001/e000", "count/1"),
        ("RL", "rl-000000/g0001/e001", "count/1"),
    ]
    first = out.partition("SFT sft-000000/g0001")[0]
    assert "status completed, reward 1" in first
    assert "<|system|>count<|user|>count : 0<|assistant|>" in first
    assert "+ 1<|end|>" in first
    assert "training row 1: 16 tokens, 4 with a loss" in first
    assert out.endswith("debug: nothing was trained, nothing was saved\n")
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"], "nothing is written"


def test_rows_of_sft_have_the_weight_of_observations(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None, _environ={})
    weight = "sft.observation_weight=0.25"
    debug(load_config(recipe(tmp_path), [weight]), 1, console)
    first, _, rl = console.file.getvalue().partition("RL rl-0")  # type: ignore[attr-defined]
    assert "training row 1: 16 tokens, 15 with a loss" in first, "nothing predicts the first token"
    rows = re.findall(r"^ +\d+ +\d+ +([01]) +\S+ +(\S+)  ('.*')", first, re.M)
    assert [token for _, advantage, token in rows if advantage == "1.0000"] == [
        "'1'", "'<|end|>'", "'2'", "'<|end|>'"
    ]  # fmt: skip
    assert [mask + " " + advantage for mask, advantage, _ in rows].count("1 0.2500") == 11
    assert "0.2500" not in rl, "RL trains sampled tokens alone"


def test_rows_are_columns_of_at_most_80(tmp_path: Path):
    lines = shown(tmp_path).splitlines()
    assert max(map(len, lines)) <= 80
    header = lines.index("  pos      id mask   logprob advantage  token")
    shape = re.compile(r" *(\d+) +(\d+) +([01]) +(\S+) +(\S+)  ('.*')")
    rows = [shape.fullmatch(line) for line in lines[header + 1 :]]
    rows = rows[: rows.index(None)]
    marked = [row[6] for row in rows if row and row[3] == "1"]
    assert marked == ["'1'", "'<|end|>'", "'2'", "'<|end|>'"]
    assert [row[1] for row in rows if row] == [str(n) for n in range(len(rows))]


def test_conversations_that_do_not_fit_are_named_and_rl_is_shown(tmp_path: Path):
    console = Console(file=io.StringIO(), width=80, color_system=None, _environ={})
    long = "rollout.system_prompt=" + "count " * 20
    debug(load_config(recipe(tmp_path), ["model.context_length=16", long]), 1, console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tokens exceed model.context_length = 16" in " ".join(output.split())
    assert "RL" in output
    assert "nothing was trained" in output


def test_control_characters_in_a_token_are_escaped():
    from ludus.core.types import Sample

    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "\x1b[31m\n\u202e"

    (line,) = row_lines(Sample([5], [True], [-0.5], [1.0], "t"), Tokenizer())
    assert line == r"    0       5    1   -0.5000    1.0000  '\x1b[31m\n\u202e'"


def test_everything_runs_in_the_main_thread(tmp_path: Path):
    out = shown(tmp_path, env="Threads")
    assert f"called in {threading.main_thread().name}" in out
    assert "ludus-env" not in out


def test_an_environment_error_is_printed_with_its_traceback(tmp_path: Path):
    out = shown(tmp_path, env="Broken")
    assert "status error_env, reward none: the environment's reset raised" in out
    assert "no training row: error_env" in out
    assert re.search(r"debugged_envs\.py:\d+ in reset", out)
    assert "ZeroDivisionError: integer" in out


def test_sft_data_of_a_file(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text(
        '{"messages": [{"role": "user", "content": "count : 7"}, '
        '{"role": "assistant", "content": "8"}]}\n'
    )
    config = load_config(recipe(tmp_path), ["demonstrations=null", "rl=null", f"sft.data={data}"])
    console = Console(file=io.StringIO(), width=80, color_system=None, _environ={})
    debug(config, 3, console)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "<|system|>count<|user|>count : 7<|assistant|>" in out
    assert "+ 8<|end|>" in out


@pytest.mark.slow
def test_a_breakpoint_in_the_environment_works(tmp_path: Path):
    """Also through `ludus train` with `backend: debug`."""
    path = recipe(tmp_path, "Stops", "backend: debug\n")
    feed = "p 'the number is', self.number\n" + "c\n" * 40
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONBREAKPOINT"}
    done = subprocess.run(
        [sys.executable, "-m", "ludus", "train", str(path)],
        cwd=tmp_path, input=feed, capture_output=True, text=True, timeout=120,
        env={**environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "(Pdb) ('the number is', 0)" in done.stdout
    assert done.stdout.endswith("debug: nothing was trained, nothing was saved\n")
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


def test_the_parts_of_a_score_and_the_judges_explanation_are_shown(tmp_path: Path) -> None:
    length = "{name: overlong, args: {max_tokens: 99, buffer: 9}}"
    judge = f"judge: {{name: sum, args: {{parts: {{length: {length}}}}}}}"
    text = shown(tmp_path, more=judge)
    assert re.search(r"scores +length 0\s", text)
    assert re.search(r"judge +length 0: \d+ sampled tokens\s", text)


def test_quitting_the_debugger_stops_the_command(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        shown(tmp_path, env="Quits")


def test_training_with_the_debug_back_end_is_refused(tmp_path: Path):
    config = load_config(recipe(tmp_path, more="backend: debug\n"))
    with pytest.raises(ConfigError, match="backend: debug trains nothing"):
        train(config, Display())
    run = tmp_path / "runs" / "debugged-1"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(load_config(recipe(tmp_path))))
    with pytest.raises(ConfigError, match="backend: debug trains nothing"):
        resume("debugged-1", "runs", Display(), ["backend=debug"])
