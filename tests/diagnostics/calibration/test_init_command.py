"""Wrong arguments of `ludus init` are told before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus.cli import app


def refusal(*argv: str) -> str:
    done = CliRunner().invoke(app, ["init", *argv])
    assert done.exit_code != 0
    return str(done.exception)


def test_a_file_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no/a.yaml cannot be written" in refusal("textcraft", "--out", "no/a.yaml")
    (tmp_path / "old.yaml").write_text("mine")
    assert "old.yaml exists" in refusal("textcraft", "--out", "old.yaml")
    assert (tmp_path / "old.yaml").read_text() == "mine"


def test_wrong_subjects_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "did you mean textcraft?" in refusal("textcrafft")
    assert "is not a tier" in refusal("textcraft", "--tiers", "depth-99x")
    (tmp_path / "rows.jsonl").write_text('{"q": "1 + 1", "a": "2"}\n')
    assert "name the one with the prompt" in refusal("rows.jsonl")
    assert "a data set has rows" in refusal("rows.jsonl", "--tiers", "x")
    assert "nothere.jsonl does not exist" in refusal("nothere.jsonl")
