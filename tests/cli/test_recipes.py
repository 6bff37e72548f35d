"""`ludus recipes`: the recipes of the package, listed, printed, copied."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import ludus
from ludus.cli import app
from ludus.config.load import load_config
from ludus.core.errors import ConfigError

FOLDER = Path(ludus.__file__).parents[1] / "recipes"


def call(*words: str) -> str:
    done = CliRunner().invoke(app, ["recipes", *words], catch_exceptions=False)
    return done.stdout


def test_every_recipe_is_listed_with_one_sentence() -> None:
    lines = [line.split(maxsplit=1) for line in call().splitlines()]
    assert [name for name, _ in lines] == sorted(path.stem for path in FOLDER.glob("*.yaml"))
    assert all(len(text) > 40 and text[0].isupper() and text.endswith(".") for _, text in lines)


def test_a_recipe_is_printed_and_copied(tmp_path: Path) -> None:
    source = (FOLDER / "babyai-tiny.yaml").read_text()
    assert call("babyai-tiny") == source
    copy = tmp_path / "mine.yaml"
    assert f"ludus train {copy}" in call("babyai-tiny", "--copy", str(copy))
    assert copy.read_text() == source
    assert load_config(copy) == load_config("babyai-tiny")
    copy.write_text("mine")
    with pytest.raises(ConfigError, match="File exists"):
        call("babyai-tiny", "--copy", str(copy))
    assert copy.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["babyai-tny"], r"'babyai-tny' is not a recipe .*did you mean babyai-tiny\?"),
        (["--copy", "x.yaml"], "name the recipe too"),
        (["babyai-tiny", "--copy", "no/folder/x.yaml"], "No such file or directory"),
    ],
)
def test_wrong_uses(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(*words)


def test_a_copied_recipe_of_co_evolution_names_its_verb(tmp_path: Path) -> None:
    copy = tmp_path / "mine.yaml"
    done = call("coevolve-qwen3-4b", "--copy", str(copy))
    assert f"ludus coevolve {copy}" in done
    with pytest.raises(ConfigError, match="this is a recipe of co-evolution"):
        load_config(copy)


def test_the_keys_of_a_co_evolution_are_printed() -> None:
    done = CliRunner().invoke(app, ["config", "coevolve"], catch_exceptions=False)
    assert "questions.min_consistency" in done.stdout
    assert "frontier.num_tasks" in done.stdout
