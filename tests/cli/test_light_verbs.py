"""`ludus runs` and `ludus show` answer without loading torch or transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ludus.core.types import Group, Segment, Task, Trajectory
from ludus.store import RunStore

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "ray", "vllm", "wandb")


@pytest.mark.parametrize("argv", [["runs"], ["show", "demo-1"], ["show", "demo-1", "t-1"]])
def test_reading_a_store_loads_no_torch(tmp_path: Path, argv: list[str]) -> None:
    segments = [Segment(-1, [5, 6]), Segment(0, [8, 9], [-0.1, -0.7])]
    trajectory = Trajectory("t-1", "g-1", "task-1", segments, reward=1.0)
    with RunStore.open(None, tmp_path) as store:
        store.create_run("demo-1", "demo", {}, {})
        groups = [Group("g-1", Task(id="task-1"), [trajectory])]
        store.record_step("demo-1", "rl", 0, groups, {})
    argv = [*argv, "--runs-dir", str(tmp_path)]
    code = (
        f"import sys; from ludus.cli import app; app({argv!r}, standalone_mode=False); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "demo-1" in done.stdout or "t-1" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
