"""The tutorial's commands do what the page says, with its environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ludus
from ludus.cli import app
from ludus.config.load import load_config

PAGE = Path(ludus.__file__).parents[1] / "docs" / "tutorial.md"
SMALL = [
    "sft.steps=10",
    "sft.until.every=10",
    "sft.until.min_steps=0",
    "rl.steps=2",
    "rl.min_signal=null",
    "rl.groups_per_step=2",
    "demonstrations.num_episodes=64",
    "evaluate.num_tasks=8",
    "tasks.train.args.num_tasks=64",
    "tasks.heldout.args.num_tasks=8",
    "threads=1",
]


def test_the_example_is_the_page_s_environment() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert (PAGE.parents[1] / "examples" / "hanoi.py").read_text(encoding="utf-8").endswith(code)


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    commands = re.findall(r"^ludus (.*?)(?: {2,}#.*)?$", text, re.M)
    (tmp_path / "hanoi.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert commands[:3] == ["check-env hanoi.py:Hanoi", "init hanoi.py:Hanoi", "train hanoi.yaml"]
    checked = CliRunner().invoke(app, commands[0].split())
    assert checked.exit_code == 0, checked.output
    assert "error" not in checked.output
    for module, name, value in (
        ("calibrate", "NUM_EPISODES", 200),
        ("calibrate", "TRIAL_S", 20.0),
    ):
        monkeypatch.setattr(f"ludus.diagnostics.calibration.{module}.{name}", value)
    made = CliRunner().invoke(app, [*commands[1].split(), "--minutes", "1"])
    assert made.exit_code == 0, made.output
    assert "100% succeed" in made.output
    config = load_config("hanoi.yaml")
    assert config.sft is not None
    assert config.sft.until is not None
    assert config.rollout.max_turns is not None
    assert 10 <= config.rollout.max_turns <= 24
    trained = CliRunner().invoke(app, [*commands[2].split(), *SMALL])
    assert trained.exit_code == 0, trained.output
    for command in ("report hanoi-1", "show hanoi-1"):
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 0, done.output
    assert (tmp_path / "runs" / "hanoi-1" / "report.html").exists()
