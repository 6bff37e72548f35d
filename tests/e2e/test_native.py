"""A run on a machine without a C compiler says so: in the terminal, the log and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TEXTCRAFT


@pytest.mark.slow
def test_a_run_without_a_compiler_says_which_path_ran(tmp_path: Path) -> None:
    small = ["demonstrations.num_episodes=8", "sft.steps=1", "rl=null", "tasks.heldout=null"]
    absent = {"CC": str(tmp_path / "no-compiler"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "ludus", "train", TEXTCRAFT, *small],
        cwd=tmp_path, env=os.environ | absent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no native code, torch computes" in done.stderr
    [folder] = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    [line] = [line for line in lines if line["event"] == "no native code, torch computes"]
    assert line["level"] == "warning"
    assert "no-compiler" in line["reason"]
    assert "apt-get install gcc" in line["remedy"]
    report = (folder / "report.html").read_text()
    assert "none, torch computes: " in report
    assert "no-compiler could not build the kernels" in report
