"""Verbs that read a run answer without loading torch or transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ludus.cli import PANELS, app
from ludus.config.load import dump_config, load_config
from ludus.core.types import Group, Segment, Task, Trajectory
from ludus.store import RunStore
from ludus.train.checkpoint.manifest import manifest_sha256

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "ray", "vllm", "wandb")


@pytest.mark.parametrize("argv", [["runs"], ["show", "demo-1"], ["show", "demo-1", "t-1"]])
def test_reading_a_store_loads_no_torch(tmp_path: Path, argv: list[str]) -> None:
    segments = [Segment(-1, [5, 6]), Segment(0, [8, 9], [-0.1, -0.7])]
    trajectory = Trajectory("t-1", "g-1", "task-1", segments, reward=1.0)
    with RunStore.open(None, tmp_path) as store:
        store.create_run("demo-1", "demo", {}, {})
        groups = [Group("g-1", Task(id="task-1"), [trajectory])]
        store.record_step("demo-1", "rl", 0, groups, {})
    lines = printed_with_modules([*argv, "--runs-dir", str(tmp_path)])
    assert any("demo-1" in line or "t-1" in line for line in lines[:-1])
    assert lines[-1] == "[]"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["checkpoint", "list", "demo-1"], "sft-000003: sft step 3, evaluate/success 0.5, best, l"),
        (["checkpoint", "check", "demo-1"], "all files are intact"),
        (["report", "demo-1"], "report.html"),
    ],
)
def test_verbs_that_compute_nothing_load_no_torch(
    tmp_path: Path, argv: list[str], said: str
) -> None:
    """A run of SFT. The report of RL shows episodes, and loads a tokenizer for that."""
    run = tmp_path / "demo-1"
    checkpoint = run / "checkpoints" / "sft-000003"
    checkpoint.mkdir(parents=True)
    manifest = {"format": 1, "sequence": 1, "stage": "sft", "step": 3, "pinned": False}
    manifest |= {"metric": 0.5, "metric_name": "evaluate/success", "files": {}}
    manifest["sha256"] = manifest_sha256(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (run / "metrics.jsonl").touch()
    (run / "config.yaml").write_text(dump_config(load_config("textcraft-tiny", ["rl=null"])))
    with RunStore.open(None, tmp_path) as store:
        store.create_run("demo-1", "demo", {}, {})
        store.record_step("demo-1", "sft", 0, [], {"loss": 1.0})
    lines = printed_with_modules([*argv, "--runs-dir", str(tmp_path)])
    assert said in lines[0]
    assert lines[-1] == "[]"


def printed_with_modules(argv: list[str]) -> list[str]:
    """Returns what a command prints, and the heavy modules that it loaded in the last line."""
    code = (
        f"import sys; from ludus.cli import app; app({argv!r}, standalone_mode=False); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_help_lists_every_verb_once_under_its_purpose() -> None:
    named = [verb for verbs in PANELS.values() for verb in verbs]
    assert sorted(named) == sorted(set(named))
    shown = CliRunner().invoke(app, ["--help"]).output
    assert [panel for panel in PANELS if f"─ {panel} ─" in shown] == list(PANELS)
    for verb in named:
        assert f"│ {verb} " in shown, verb
    registered: Any = typer.main.get_command(app)
    assert set(registered.commands) == set(named)
