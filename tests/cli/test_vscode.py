"""`ludus vscode`: VS Code's launch.json."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from ludus.cli import app
from ludus.cli.vscode import PATH
from ludus.core.errors import ConfigError

TEXT = {"type": "string", "minLength": 1}
PORT = {"type": ["number", "string"]}
SCHEMA = {
    "type": "object",
    "required": ["version", "configurations"],
    "properties": {
        "version": {"const": "0.2.0"},
        "configurations": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "type", "request"],
                "properties": {"name": TEXT, "type": {"const": "debugpy"}},
                "oneOf": [
                    {
                        "required": ["module"],
                        "properties": {
                            "name": True, "type": True, "request": {"const": "launch"},
                            "module": TEXT, "args": {"type": "array", "items": {"type": "string"}},
                            "cwd": TEXT, "console": {"enum": ["integratedTerminal"]},
                        },
                        "additionalProperties": False,
                    },
                    {
                        "required": ["connect"],
                        "properties": {
                            "name": True, "type": True, "request": {"const": "attach"},
                            "connect": {
                                "required": ["port"], "properties": {"host": TEXT, "port": PORT}
                            },
                        },
                        "additionalProperties": False,
                    },
                ],
            },
        },
        "inputs": {
            "type": "array",
            "items": {
                "required": ["id", "type", "description"],
                "properties": {"id": TEXT, "type": {"const": "promptString"}, "description": TEXT},
            },
        },
    },
    "additionalProperties": False,
}  # fmt: skip
"""The parts of the schemas of VS Code and of its extension debugpy that ludus uses."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def vscode(*argv: str) -> str:
    done = CliRunner().invoke(app, ["vscode", *argv], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_it_writes_what_the_editor_reads() -> None:
    assert str(PATH) in vscode("babyai-tiny", "rl.steps=3")
    content = json.loads(PATH.read_text())
    jsonschema.validate(content, SCHEMA)
    debug, train, attach = content["configurations"]
    assert debug["args"] == ["debug", "babyai-tiny", "rl.steps=3"]
    assert train["args"] == ["train", "babyai-tiny", "rl.steps=3"]
    assert attach["connect"]["port"] == f"${{input:{content['inputs'][0]['id']}}}"


def test_it_replaces_a_file_only_if_told() -> None:
    PATH.parent.mkdir()
    PATH.write_text("// mine\n")
    with pytest.raises(ConfigError, match=r"launch\.json is there already: --force"):
        vscode("babyai-tiny")
    assert PATH.read_text() == "// mine\n"
    vscode("babyai-tiny", "--force")
    assert json.loads(PATH.read_text())["configurations"]


def test_what_cannot_work_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="babyai-tny"):
        vscode("babyai-tny")
    assert not PATH.parent.exists()
    PATH.parent.write_text("a file")
    with pytest.raises(ConfigError, match="cannot be written: "):
        vscode("babyai-tiny")
