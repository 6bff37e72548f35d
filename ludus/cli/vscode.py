"""`ludus vscode`: configurations of VS Code's debugger for a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.cli.options import Overrides, Recipe, load
from ludus.core.errors import ConfigError

app = typer.Typer()

PATH = Path(".vscode/launch.json")


@app.command()
def vscode(
    recipe: Recipe,
    overrides: Overrides = None,
    force: Annotated[
        bool, typer.Option("--force", help=f"Replace a {PATH} that is there.")
    ] = False,
) -> None:
    """Write .vscode/launch.json: debug or train a recipe in VS Code, attach it to a breakpoint."""
    from ludus.core.files import atomic_write

    load(recipe, overrides)  # a wrong recipe would fail in the editor
    if PATH.exists() and not force:
        raise ConfigError(f"{PATH} is there already: --force replaces it, with all that it holds")
    text = json.dumps(launch_configurations(recipe, overrides or []), indent=2)
    try:
        PATH.parent.mkdir(exist_ok=True)
        atomic_write(PATH, f"{text}\n")
    except OSError as error:
        raise ConfigError(f"{PATH}: cannot be written: {error.strerror}") from error
    typer.echo(f"{PATH}: open this folder in VS Code, then Run and Debug")


def launch_configurations(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Returns the content of launch.json. Commands run in the folder that VS Code has open."""

    def command(verb: str) -> dict[str, Any]:
        return {
            "name": f"ludus {verb} {recipe}",
            "type": "debugpy",
            "request": "launch",
            "module": "ludus",
            "args": [verb, recipe, *overrides],
            "cwd": "${workspaceFolder}",
            "console": "integratedTerminal",
        }

    attach = {
        "name": "ludus: attach to a breakpoint",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": "${input:port}"},
    }
    port = {
        "id": "port",
        "type": "promptString",
        "description": "Port that `ludus train --break TAG --debugger debugpy` printed",
    }
    return {
        "version": "0.2.0",
        "configurations": [command("debug"), command("train"), attach],
        "inputs": [port],
    }
