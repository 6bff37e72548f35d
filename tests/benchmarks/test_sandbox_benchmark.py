"""The benchmark of the sandbox runs from its command line, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.sandbox.bubblewrap import jailed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sandbox.py"


def mounted(tmp_path: Path) -> set[str]:
    """The places where something is mounted, without those of tests that run at the same time."""
    places = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    return {place for place in places if not place.startswith(str(tmp_path.parents[1]))}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("layers")
def test_the_benchmark_measures_and_leaves_nothing(tmp_path: Path) -> None:
    if jailed(("numpy", "sympy")).absent:
        pytest.skip("numpy and sympy lie in a folder that the jail's user may not read")
    command = [sys.executable, str(SCRIPT), "--calls", "10", "--out", str(tmp_path)]
    mounts = mounted(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "sandbox.json").read_text())
    held = found["held"]
    for name in ("processes", "open files", "cgroups"):
        assert held["after"][name] == held["before"][name], name
    assert mounted(tmp_path) == mounts
    assert (held["closed"]["processes"], held["closed"]["cgroups"]) == (0, 0)
    assert "| python, warm | 10 |" in (tmp_path / "sandbox.md").read_text()


def test_gvisor_alone_needs_the_other_measurements(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--gvisor", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "measure them first: python benchmarks/sandbox.py --out" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
