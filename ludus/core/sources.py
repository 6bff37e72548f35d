"""Python source without running it: its syntax tree, and the files of a user's plug-in."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

_Tree = TypeVar("_Tree")

_INSTALLED = {"site-packages", "dist-packages"}
_RETRIES = 20


def parse_module(source: str | bytes) -> ast.Module:
    """Returns the syntax tree of a module, from any thread. Errors: those of `ast.parse`.

    Before Python 3.11.8 and 3.12.2 all threads count the depth of their trees in one place, and
    `ast.parse` in two at once may raise SystemError (python/cpython issue 106905). It is retried.
    """
    return _retried(lambda: ast.parse(source))


def parse_expression(source: str) -> ast.expr:
    """Returns the syntax tree of an expression, as `parse_module`."""
    return _retried(lambda: ast.parse(source, mode="eval")).body


def _retried(parse: Callable[[], _Tree]) -> _Tree:
    for _ in range(_RETRIES):
        with suppress(SystemError):
            return parse()
    return parse()


def own_sources(file: Path) -> list[Path]:
    """Returns a Python file and the modules that it imports, directly or not, in order.

    Modules of Python, of ludus and of installed packages are left out. Imports within functions
    count; names that are computed (`importlib.import_module(name)`) are not found.
    """
    places = (*sys.path, "", str(file.parent))
    roots = [Path(entry or os.getcwd()).resolve() for entry in places]
    found: set[Path] = set()
    todo = {file.resolve()}
    while todo:
        path = todo.pop()
        found.add(path)
        imported = {p.resolve() for p in _imports(path, [r for r in roots if r.is_dir()])}
        todo |= {p for p in imported if not is_foreign(p)} - found
    return sorted(found)


def siblings(file: Path) -> list[Path]:
    """Returns the modules and packages in the folder of a file that the file imports by name."""
    folder = file.resolve().parent

    def top(path: Path) -> Path:
        return path.parent if path.name == "__init__.py" else path

    return [path for path in _imports(file, [folder]) if top(path).parent == folder]


def is_foreign(path: Path) -> bool:
    """True for a file of Python, of ludus or of an installed package."""
    python = Path(sysconfig.get_path("stdlib")).resolve()
    return bool(_INSTALLED & set(path.parts)) or python in path.parents or is_of_ludus(path)


def is_of_ludus(path: Path) -> bool:
    """True for a file of ludus."""
    return Path(__file__).resolve().parents[1] in path.parents


def _imports(path: Path, roots: list[Path]) -> Iterator[Path]:
    """Yields the files of the modules that a file imports, and of their packages."""
    try:
        tree = parse_module(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    if (init := path.with_name("__init__.py")).is_file():  # its package is imported first
        yield init
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(alias.name.split("."), roots)
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            places = [path.parents[node.level - 1]] if node.level else roots
            for alias in node.names:  # a name of the module, or a module of the package
                yield from _files([*module, alias.name], places)


def _files(names: list[str], roots: list[Path]) -> Iterator[Path]:
    """Yields the files of `a`, `a.b`, `a.b.c` in the first root that has `a`."""
    for root in roots:
        folder, files = root, []
        for name in names:
            package, module = folder / name / "__init__.py", folder / f"{name}.py"
            files += [path for path in (package, module) if path.is_file()][:1]
            folder = folder / name
        if files:
            yield from files
            return
