"""Runs test_mirror_s3.py in a process of its own: server and clients have threads of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("s3fs", reason="needs the extra `s3`")
pytest.importorskip("moto.server", reason="needs moto[s3], flask and flask-cors")


@pytest.mark.slow
def test_the_mirror_on_s3() -> None:
    apart = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    file = str(Path(__file__).with_name("test_mirror_s3.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file],
        capture_output=True, text=True, timeout=240, env=apart, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
