"""The start of the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import ludus

SWALLOWS = """
import signal

try:
    signal.raise_signal(signal.SIGTERM)
except BaseException:
    pass
raise ImportError("half of it is loaded")
"""


def test_an_error_after_a_signal_that_an_import_swallowed_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "sqlalchemy.py").write_text(SWALLOWS)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "ludus.db").touch()
    done = start(tmp_path, "runs")
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "ludus: stopped\n")


def test_ctrl_c_during_the_imports_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import signal\n\nsignal.raise_signal(signal.SIGINT)\n")
    done = start(tmp_path, "runs")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def start(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, whose modules come first."""
    paths = (str(folder), str(Path(ludus.__file__).parents[1]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    argv = (sys.executable, "-m", "ludus", *argv)
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, env=environment)
