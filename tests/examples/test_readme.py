"""The README's example prints what the README says it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ludus

ROOT = Path(ludus.__file__).parents[1]


def test_the_example_and_its_output_are_real():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code, output = re.findall(r"```(?:python|text)\n(.*?)```", text, re.DOTALL)[:2]
    example = (ROOT / "examples" / "expert_plays.py").read_text(encoding="utf-8")
    assert example.endswith(code)
    played = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert played.stdout == output
