"""Plug-ins in files of one's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.config.load import load_config
from ludus.config.registry import Registry
from ludus.core import modules
from ludus.core.errors import ConfigError, MissingDependency
from ludus.core.modules import load_module, missing_dependency, require
from ludus.core.sources import own_sources

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


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules and folders of a test's files are forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.setattr(modules.SIBLINGS, "folders", [])
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.usefixtures("apart")
def test_a_file_imports_the_modules_beside_it(tmp_path: Path):
    """At its top and within functions; the module beside it may import its own neighbour."""
    (tmp_path / "sizes_beside.py").write_text("import deep_beside\nSIZE = deep_beside.SIZE\n")
    (tmp_path / "deep_beside.py").write_text("SIZE = 5\n")
    (tmp_path / "late_beside").mkdir()
    (tmp_path / "late_beside" / "__init__.py").write_text("SIZE = 6\n")
    file = tmp_path / "own.py"
    file.write_text(
        "from sizes_beside import SIZE\n"
        "class Own:\n"
        "    size = SIZE\n"
        "    def late(self):\n"
        "        import late_beside\n"
        "        return late_beside.SIZE\n"
    )
    path = list(sys.path)
    own = registry().build(f"{file}:Own")
    assert (own.size, own.late()) == (5, 6)
    assert sys.path == path
    names = ["deep_beside.py", "__init__.py", "own.py", "sizes_beside.py"]
    assert [source.name for source in own_sources(file)] == names


@pytest.mark.usefixtures("apart")
def test_folders_beside_a_file_are_no_packages(tmp_path: Path):
    """`wandb/`, which a logger wrote, does not count as the package of that name."""
    (tmp_path / "logs_beside").mkdir()
    file = tmp_path / "own.py"
    file.write_text(SOURCE)
    load_module(str(file))
    with pytest.raises(MissingDependency):
        require("logs_beside", "metrics", "a sink")


@pytest.mark.usefixtures("apart")
def test_two_modules_of_one_name_beside_files_are_told(tmp_path: Path):
    """Python would give the second file the first one's module."""
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper_beside.py").write_text(f"NAME = '{folder}'\n")
        (tmp_path / folder / "own.py").write_text("from helper_beside import NAME\nOwn = dict\n")
    registry().load(f"{tmp_path}/a/own.py:Own")
    told = r"helper_beside is loaded from .*/a/helper_beside.py, not from .*/b: rename one"
    for _ in range(2):
        with pytest.raises(ConfigError, match=told):
            registry().load(f"{tmp_path}/b/own.py:Own")


@pytest.mark.usefixtures("apart")
def test_a_module_of_the_working_directory_imports_others_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "late_here.py").write_text("SIZE = 7\n")
    (tmp_path / "own_here.py").write_text(
        "class Own:\n    def late(self):\n        import late_here\n        return late_here.SIZE\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert registry().build("own_here:Own").late() == 7


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
