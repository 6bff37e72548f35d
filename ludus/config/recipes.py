"""The recipes of the package, by name: `ludus train babyai-tiny` works in any folder."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

FOLDERS = [
    Path(__file__).parents[1] / "recipes",  # an installed wheel
    Path(__file__).parents[2] / "recipes",  # a source tree
]


def shipped_recipes() -> dict[str, Path]:
    """Name to file of the recipes in the package."""
    folder = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0])
    paths = {path.stem: path for path in folder.glob("*.yaml")}
    return dict(sorted(paths.items()))


def summary(path: Path) -> str:
    """Returns the first sentence of a recipe's leading comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("# "), lines)
    text = " ".join(line.removeprefix("# ").strip() for line in comment)
    return re.split(r"(?<=\.) ", text, maxsplit=1)[0]
