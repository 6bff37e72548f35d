"""The Makefile's commands: listed by `make`, and those that the docs name exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import ludus

ROOT = Path(ludus.__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.M))
FILES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "scripts").glob("*"),
    *(ROOT / "ludus").rglob("*.py"),
    *(ROOT / ".github").rglob("*.yml"),
    ROOT / ".ci" / "run",
]


def named(text: str) -> set[str]:
    """Targets of the `make` commands in code."""
    return set(re.findall(r"(?:`|^|&& |run: )make ([a-z][a-z0-9-]*)", text, re.M))


def test_make_lists_every_described_target() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^  make (\S+)  +\S", done.stdout, re.M))
    assert listed == set(re.findall(r"^([a-z][a-z0-9-]*):.*## ", MAKEFILE, re.M))
    assert {"demo", "test", "quick", "test-slow", "test-engines", "gpu-kit", "gpu"} <= listed


def test_every_target_without_a_file_is_phony() -> None:
    lines = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M)
    assert set(" ".join(lines).split()) == TARGETS


def test_commands_that_are_named_exist() -> None:
    for path in FILES:
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert named(text) <= TARGETS, path


def test_the_readme_names_the_test_commands() -> None:
    assert {"demo", "test"} <= named((ROOT / "README.md").read_text(encoding="utf-8"))
    pages = (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "installation.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    commands = {"setup", "check", "test", "quick", "test-slow", "test-engines", "vllm", "gpu-kit"}
    assert commands | {"gpu"} <= named(text)


def test_continuous_integration_starts_with_make_test() -> None:
    """No step before it may hide what `make test` lacks."""
    commands = re.findall(r"^ *(?:part )?make (\S+)", (ROOT / ".ci" / "run").read_text(), re.M)
    assert commands == [
        "test",
        "test-slow",
        "vllm",
        "verifiers",
        "appworld",
        "verl",
        "test-engines",
        "site",
        "triton",
        "test-triton",
    ]
