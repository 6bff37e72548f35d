"""Writes the generated pages of docs/. `make docs` runs it; a test compares the pages."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ludus.cli import app

DOCS = Path(__file__).parents[1] / "docs"

CLI_HEAD = """\
# Command line

An error message gives the place, the fault and the correct form. Exit codes: 2 for a wrong
configuration or call, 1 for other errors, 130 for Ctrl-C. `dotted.key=value` overrides a setting;
the value is YAML:

```sh
ludus train recipes/babyai-tiny.yaml rl.steps=50 'env.args={level: GoToObj}'
```
"""


def configuration() -> str:
    """The configuration page, as `ludus config --markdown` prints it.

    Raises:
        LookupError: a plug-in's package is not installed, so its arguments are unknown.
    """
    command = [sys.executable, "-m", "ludus", "config", "--markdown"]
    page = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if missing := re.findall(r"^.* which is not installed: .*$", page, re.MULTILINE):
        raise LookupError("; ".join(missing))
    return page


def command_line() -> str:
    """The command-line page: every command, with its arguments and options."""
    parts = [CLI_HEAD]
    for path, command in commands():
        if getattr(command, "commands", None):
            continue
        rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
        usage = " ".join(filter(None, [path, *map(_usage, command.params)]))
        lines = [f"## `{path}`", "", command.help or "", "", "```text", usage, "```", ""]
        if rows:
            lines += ["| | | default |", "|---|---|---|", *rows, ""]
        parts.append("\n".join(lines))
    return "\n".join(parts).rstrip() + "\n"


def decisions() -> str:
    """The index of the decisions: its head is kept, its list is generated."""
    head, _, _ = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8").partition("## All")
    lines = []
    for page in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        title = page.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({page.name})")
    return "\n".join([f"{head}## All", "", *lines]) + "\n"


def commands(path: str = "ludus", command: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield the path and the command of every command and group, the root first."""
    command = command or typer.main.get_command(app)
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(f"{path} {name}", child)


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return ""
    name = (parameter.metavar or parameter.name).upper() + "..." * (parameter.nargs == -1)
    return name if parameter.required else f"[{name}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        name = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if not parameter.is_flag:
            name += f" {parameter.metavar or parameter.name.upper()}"
    else:
        name = (parameter.metavar or parameter.name).upper()
    flag_off = parameter.default is False or parameter.default is None
    shown = "required" if parameter.required else "" if flag_off else f"`{parameter.default}`"
    cells = [f"`{name}`", parameter.help or "", shown]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


PAGES = {
    "configuration.md": configuration,
    "cli.md": command_line,
    "decisions/README.md": decisions,
}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
