"""Plug-ins in files of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ludus.config.load import load_config
from ludus.config.registry import Registry
from ludus.core.errors import ConfigError, MissingDependency
from ludus.core.modules import load_module, missing_dependency, require

SOURCE = """
from dataclasses import dataclass

@dataclass
class Own:
    size: int = 3
"""

UNREADABLE = """
class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no")

raise Unreadable
"""


def registry() -> Registry[Any]:
    return Registry("env", {})


def test_a_file_is_loaded_once(tmp_path: Path):
    file = tmp_path / "own_env.py"
    file.write_text(SOURCE)
    assert registry().build(f"{file}:Own").size == 3
    assert load_module(str(file)) is load_module(str(file))


def test_two_files_of_one_name_stay_apart(tmp_path: Path):
    for folder, size in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text(SOURCE.replace("3", str(size)))
    a, b = (registry().build(f"{tmp_path}/{folder}/env.py:Own") for folder in "ab")
    assert (a.size, b.size) == (1, 2)


def test_a_module_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "beside_the_recipe.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    path = list(sys.path)
    try:
        assert registry().build("beside_the_recipe:Own").size == 3
    finally:
        sys.modules.pop("beside_the_recipe", None)
    assert sys.path == path


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (None, r"env '.*env.py:Own': there is no file .*env.py"),
        ("x = 1", r"module .*env.py has no 'Own'"),
        ("import no_such_module", r"no module named 'no_such_module'"),
        ("1 / 0", r"raised ZeroDivisionError: division by zero \[env.py, line 1\]"),
        ("import sys; sys.exit(0)", r"raised SystemExit: 0 \[env.py, line 1\]"),
        ("def (", r"raised SyntaxError"),
        (UNREADABLE, r"raised Unreadable \(its message cannot be read\) \[env.py, line 6\]"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, source: str | None, complaint: str):
    file = tmp_path / "env.py"
    if source is not None:
        file.write_text(source)
    for _ in range(2):  # a failed import leaves nothing half-made behind
        with pytest.raises(ConfigError, match=complaint):
            registry().build(f"{file}:Own")


def test_a_plug_in_that_exits_when_it_is_built(tmp_path: Path):
    file = tmp_path / "env.py"
    file.write_text("import sys\nclass Own:\n    def __init__(self):\n        sys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"cannot be built: SystemExit: 0 \[env.py, line 4\]"):
        registry().build(f"{file}:Own")


def test_a_recipe_in_a_file_and_its_plug_ins_share_one_module(tmp_path: Path):
    file = tmp_path / "recipe.py"
    file.write_text(
        SOURCE + "loads = []\n"
        "def config():\n"
        "    loads.append(1)\n"
        "    return {'model': {'path': 'x'}, 'tasks': {'train': {'name': 'json'}}}\n"
    )
    for _ in range(2):
        load_config(f"{file}:config")
    assert load_module(str(file)).loads == [1, 1]


def test_an_absent_package_names_the_extra_of_the_command():
    def named(module: str, extra: str) -> str | None:
        missing = missing_dependency(ModuleNotFoundError(name=module), extra, "`ludus x`")
        return missing and missing.extra

    assert named("torch.nn", "train") == "train"
    assert named("prometheus_client", "serve") == "serve"
    assert named("torch", "serve,train") == "serve,train"
    assert named("minigrid", "train") == "envs"  # another extra than the command's
    assert named("no_such_package", "train") is None  # a fault of the code: a traceback
    assert named("typer", "train") is None  # a broken installation of the core


def test_require_imports_nothing():
    require("this", "train", "x")
    assert "this" not in sys.modules
    with pytest.raises(MissingDependency, match=r"x needs the package no_such, .*\[train\]"):
        require("no_such", "train", "x")
