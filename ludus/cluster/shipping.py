"""The files that a recipe refers to, copied into a folder that Ray ships to the cluster.

A job runs in a copy of that folder, so a relative path of the recipe means the same file as here.

    recipes/mine.yaml                    the recipe
    env: my_envs/duel.py:Duel            the file, and the modules of the user that it imports
    tasks.train.args.path: data/a.jsonl  a file; a folder too, where the path has a slash

An absolute path stays as it is: the cluster must have it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ludus.core.errors import ConfigError
from ludus.core.sources import own_sources

MAX_BYTES = 95 * 2**20
"""Ray's dashboard takes 100 MiB."""

OUTPUTS = {"name", "runs_dir", "store", "mirror", "notify", "report"}
"""Keys of a run whose text names no input."""

_CODE = re.compile(r"^(?P<module>[\w./~-]+?)(:[A-Za-z_]\w*)?$")


@dataclass(frozen=True, slots=True)
class Shipment:
    """A folder to ship, and the recipe's name in it."""

    folder: Path
    recipe: str
    files: list[str]


def stage(recipe: str, config: BaseModel, folder: Path) -> Shipment:
    """Copy the recipe and the files that it refers to into `folder`.

    Errors: ConfigError for a file outside of the working folder, and for too much.
    """
    here = Path.cwd()
    name, sources = _recipe(recipe, here)
    for path in _referred(config.model_dump(mode="json"), here):
        sources[path] = _inside(path, here)
    _check_size(sources)
    for source, target in sorted(sources.items()):
        place = folder / target
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, dirs_exist_ok=True, ignore=_left_out)
        else:
            shutil.copyfile(source, place)
    return Shipment(folder, name, sorted(map(str, sources.values())))


def _recipe(recipe: str, here: Path) -> tuple[str, dict[Path, Path]]:
    """The recipe's name in the shipped folder, and its files with their places there."""
    text, colon, function = recipe.partition(":")
    path = Path(text).expanduser()
    if not path.is_file():  # a recipe of the package, or a module's function
        modules = _module_files(text, here) if colon else []
        return recipe, {file: _inside(file, here) for file in modules}
    resolved = path.resolve()
    if path.suffix == ".py":
        files = {file: _inside(file, here) for file in own_sources(resolved)}
        return f"{files[resolved]}{colon}{function}", files
    place = Path(path.name)
    if resolved.is_relative_to(here.resolve()):
        place = resolved.relative_to(here.resolve())
    return str(place), {resolved: place}


def _referred(value: Any, here: Path, key: str = "") -> Iterator[Path]:
    """Yields the existing files and folders that texts of a configuration name."""
    if isinstance(value, dict):
        for name, item in value.items():
            own = "" if name == "name" and key else name  # the name of a plug-in may be a file
            if key or name not in OUTPUTS:
                yield from _referred(item, here, own or "plugin")
    elif isinstance(value, list):
        for item in value:
            yield from _referred(item, here, key)
    elif isinstance(value, str) and 0 < len(value) < 1024 and "\n" not in value:
        yield from _files(value, here, key)


def _files(text: str, here: Path, key: str) -> Iterator[Path]:
    if text.startswith(("/", "~")) or "://" in text or "\0" in text:
        return
    hit = _CODE.match(text)
    if hit is not None and hit["module"].endswith(".py") and (here / hit["module"]).is_file():
        yield from own_sources((here / hit["module"]).resolve())
        return
    if ":" in text:
        yield from _module_files(text.partition(":")[0], here)
        return
    path = here / text
    if path.is_file():
        named = key != "plugin"
    else:
        named = (
            path.is_dir() and path.resolve() != here.resolve() and ("/" in text or key == "path")
        )
    if named:
        yield path.resolve()


def _module_files(name: str, here: Path) -> list[Path]:
    """The files of a module below the working folder, and of what it imports; else none."""
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        return []
    base = here.joinpath(*name.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            packages = [p / "__init__.py" for p in file.parents if here in p.parents]
            inits = [init for init in packages if init.is_file()]
            return [*own_sources(file.resolve()), *(init.resolve() for init in inits)]
    return []


def _inside(path: Path, here: Path) -> Path:
    """The path relative to the working folder. Errors: ConfigError for one outside of it."""
    root = here.resolve()
    if not path.resolve().is_relative_to(root):
        raise ConfigError(
            f"{path} lies outside of the working folder {root}, so it cannot be shipped: run "
            "`ludus submit` from a folder above it, or give a path that the cluster has"
        )
    return path.resolve().relative_to(root)


def _left_out(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name in ("__pycache__", ".git")}


def _check_size(sources: dict[Path, Path]) -> None:
    sizes: dict[Path, int] = {}
    for source, target in sources.items():
        files = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
        sizes[target] = sum(file.stat().st_size for file in files)
    if (total := sum(sizes.values())) > MAX_BYTES:
        largest = max(sizes, key=lambda target: sizes[target])
        raise ConfigError(
            f"the recipe refers to {total / 2**20:.0f} MiB of files, and Ray ships at most "
            f"{MAX_BYTES / 2**20:.0f}: put {largest} ({sizes[largest] / 2**20:.0f} MiB) on storage "
            "that all nodes have, and give its absolute path"
        )
