"""A job gets the files that its recipe refers to, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.cluster import shipping
from ludus.cluster.shipping import stage
from ludus.config.load import load_config
from ludus.core.errors import ConfigError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def recipe(path: Path, **keys: Any) -> str:
    content = {"model": {"path": "models/tiny"}, "tasks": {"train": "env"}, **keys}
    write(path, yaml.safe_dump(content))
    return str(path)


def shipped(name: str, target: Path) -> list[str]:
    target.mkdir()
    found = stage(name, load_config(name), target)
    assert (target / found.recipe.partition(":")[0]).is_file()
    return sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())


def test_files_of_a_recipe(here: Path, tmp_path: Path) -> None:
    """The environment's module with what it imports, data, a template, a model's folder."""
    write(here / "envs" / "duel.py", "import rules\nfrom shared.text import words\n")
    write(here / "envs" / "rules.py")
    write(here / "shared" / "__init__.py")
    write(here / "shared" / "text.py")
    write(here / "data" / "a.jsonl")
    write(here / "data" / "unused.jsonl")
    write(here / "models" / "tiny" / "config.json", "{}")
    write(here / "chat.jinja")
    write(here / "runs" / "old" / "log")
    write(here / "babyai" / "x")
    name = recipe(
        here / "recipes" / "duel.yaml",
        model={"path": "models/tiny", "chat_template": "chat.jinja"},
        env={"name": "envs/duel.py:Duel", "args": {"board": "babyai"}},
        tasks={"train": {"name": "jsonl", "args": {"path": "data/a.jsonl"}}},
    )
    assert shipped("recipes/duel.yaml", tmp_path / "out") == [
        "chat.jinja",
        "data/a.jsonl",
        "envs/duel.py",
        "envs/rules.py",
        "models/tiny/config.json",
        "recipes/duel.yaml",
        "shared/__init__.py",
        "shared/text.py",
    ]
    assert shipped(name, tmp_path / "absolute")  # the recipe's absolute path is inside too


def test_a_module_below_the_working_folder(here: Path, tmp_path: Path) -> None:
    write(here / "mine" / "__init__.py")
    write(here / "mine" / "env.py")
    recipe(here / "r.yaml", env="mine.env:Env")
    files = shipped("r.yaml", tmp_path / "out")
    assert files == ["mine/__init__.py", "mine/env.py", "r.yaml"]


def test_a_recipe_elsewhere_is_shipped_by_its_name(here: Path, tmp_path: Path) -> None:
    name = recipe(tmp_path / "r.yaml")
    assert shipped(name, tmp_path / "out") == ["r.yaml"]


def test_a_recipe_in_python(here: Path, tmp_path: Path) -> None:
    write(here / "lib.py", "LEVEL = 1\n")
    text = "import lib\n\ndef config():\n    return {'model': {'path': 'x'}, 'tasks': {}}\n"
    write(here / "r.py", text)
    text = text.replace("{}", "{'train': 'env'}")
    write(here / "r.py", text)
    assert shipped("r.py:config", tmp_path / "out") == ["lib.py", "r.py"]


def test_a_recipe_of_the_package_needs_no_file(here: Path, tmp_path: Path) -> None:
    found = stage("babyai-tiny", load_config("babyai-tiny"), tmp_path)
    assert (found.recipe, found.files) == ("babyai-tiny", [])


def test_a_file_outside_of_the_working_folder_is_refused(here: Path, tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl")
    tasks = {"train": {"name": "jsonl", "args": {"path": "../data.jsonl"}}}
    name = recipe(here / "r.yaml", tasks=tasks)
    with pytest.raises(ConfigError, match=r"data.jsonl lies outside of the working folder"):
        stage(name, load_config(name), tmp_path / "out")


def test_too_much_is_refused(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "MAX_BYTES", 2**20)
    write(here / "models" / "tiny" / "weights", 2**21 * "x")
    name = recipe(here / "r.yaml")
    with pytest.raises(ConfigError, match=r"put models/tiny \(2 MiB\) on storage"):
        stage(name, load_config(name), tmp_path / "out")
