"""Arguments that several verbs share, and their parsers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.core.errors import ConfigError

Recipe = Annotated[
    str,
    typer.Argument(
        help="A YAML file, a recipe's name (see `ludus recipes`), or `file.py:function` that "
        "returns a RunConfig."
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change: dotted.key=value ...")
]
RunsDir = Annotated[str, typer.Option("--runs-dir", help="Folder of the runs.")]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="URL of the run store, if not SQLite in runs-dir.")
]
Run = Annotated[str, typer.Argument(help="A run's id (see `ludus runs`).")]


def load(recipe: str, overrides: list[str] | None, runs_dir: str = "runs") -> Any:
    """Returns the recipe's configuration with overrides applied."""
    from ludus.config.load import load_config

    changes = list(overrides or [])
    if runs_dir != "runs":
        changes.append(f"runs_dir={runs_dir}")
    return load_config(recipe, changes)


def open_store(runs_dir: str, url: str | None) -> Any:
    """Open the run store read-only. Errors: ConfigError where there is none yet."""
    from ludus.store import RunStore

    if url is None and not (Path(runs_dir) / "ludus.db").is_file():
        raise ConfigError(f"{runs_dir} holds no runs yet: start one with `ludus train RECIPE`")
    return RunStore.open(url, runs_dir, read_only=True)


def spec(name: str, args: list[str] | None) -> Any:
    """Returns the Spec of a plug-in's name and `key=value` arguments."""
    from ludus.config import yaml12
    from ludus.core.types import Spec

    pairs: dict[str, Any] = {}
    for item in args or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"{item!r}: write arguments as key=value")
        pairs[key], _ = yaml12.parse(value, item)
    return Spec(name=name, args=pairs)


def env_specs(words: Sequence[str]) -> list[Any]:
    """Specs of environments with their arguments: `a x=1 b` is a with x=1, and b."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word:
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
        else:
            raise ConfigError(f"{word}: name an environment before its arguments")
    names = [name for name, _ in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{repeated[0]}: named twice; name each environment once")
    return [spec(name, args) for name, args in found]


def show_on_screen(renderable: Any) -> None:
    """Print a rich renderable."""
    from rich.console import Console

    Console().print(renderable)
