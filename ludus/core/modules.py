"""Load modules by dotted name or by file path ("module:Class" of a config); name absent extras."""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ludus.core.errors import MissingDependency, described
from ludus.core.sources import is_foreign, is_of_ludus, siblings

DISTRIBUTION = "ludus-rl"


@dataclass(slots=True)
class Siblings:
    """Finds modules beside the files that were loaded, after all others.

    A folder without `__init__.py` is no module here: `wandb/` may be a logger's output.
    """

    folders: list[str] = field(default_factory=list)

    def add(self, folder: str) -> None:
        """Find modules in this folder from now on."""
        if folder not in self.folders:
            self.folders.append(folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Import's protocol: the spec of a top-level module; None for another's submodule."""
        spec = PathFinder.find_spec(name, self.folders) if path is None else None
        return spec if spec is not None and spec.origin is not None else None


SIBLINGS = Siblings()
sys.meta_path.append(SIBLINGS)


def load_module(name: str) -> ModuleType:
    """The module of a name (`my_package.env`) or of a file (`my/env.py`); a file is loaded once.

    Names are also looked up in the working directory, which is not on a console script's path. A
    file may import the modules beside it.

    Errors: ModuleNotFoundError; any error that the module itself raises.
    """
    if name.endswith(".py"):
        return _load_file(Path(name).expanduser())
    if not name or name.startswith("."):  # a relative name has no package here
        raise ModuleNotFoundError(f"no module named {name!r}", name=name)
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        return import_module(name)
    sys.path.append(here)
    SIBLINGS.add(here)  # for imports within functions
    try:
        return import_module(name)
    finally:
        sys.path.remove(here)


def told(error: BaseException, longest: int = 10_000) -> str:
    """Returns type, message and place of an error that a user's code raised.

    The message is cut to its `longest` first characters.
    A syntax error has its place in itself; its traceback ends in Python's own import. A place
    within ludus is left out: the user cannot change it.
    """
    if isinstance(error, SyntaxError) and error.filename:
        place: tuple[str, int | None] | None = (error.filename, error.lineno)
        message = f"{type(error).__name__}: {error.msg}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        real = [frame for frame in frames if not frame.filename.startswith("<")]
        frame = own_frame(error) or (real[-1] if real else None)
        if frame is not None and is_of_ludus(Path(frame.filename).resolve()):
            frame = None
        place = (frame.filename, frame.lineno) if frame else None
        message = described(error)
    where = f" [{Path(place[0]).name}, line {place[1]}]" if place else ""
    return f"{message[:longest]}{where}"


def not_async(whose: str, method: str, result: object) -> str:
    """Returns what to do about a method that should be async, by its result."""
    returned = type(result).__name__
    return f"{whose} is not async (it returned {returned}): write `async def {method}`"


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost frame of a user's code; None where ludus or a package called none."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    real = (frame for frame in frames if not frame.filename.startswith("<"))
    return next((frame for frame in real if not is_foreign(Path(frame.filename).resolve())), None)


def _load_file(path: Path) -> ModuleType:
    resolved = str(path.resolve())
    # The digest keeps two files of the same name apart; "@" cannot occur in an import statement.
    name = f"{path.stem}@{hashlib.sha256(resolved.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, resolved)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"there is no file {path}", name=str(path))
    module = module_from_spec(spec)
    SIBLINGS.add(str(Path(resolved).parent))
    sys.modules[name] = module  # before execution, as import does: dataclasses look it up
    try:
        spec.loader.exec_module(module)
        _require_own_siblings(Path(resolved))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _require_own_siblings(file: Path) -> None:
    """Refuse a module beside another file, loaded under the name of one that `file` imports."""
    for sibling in siblings(file):
        name = sibling.parent.name if sibling.name == "__init__.py" else sibling.stem
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded and not is_foreign(Path(loaded).resolve()) and Path(loaded).resolve() != sibling:
            raise ImportError(
                f"{name} is loaded from {loaded}, not from {file.parent}: rename one of the two"
            )


def extra_of(requirement: Requirement) -> str:
    """Returns the extra of a requirement of this distribution; "" for the core."""
    _, _, rest = str(requirement.marker or "").partition("extra == ")
    return rest.split('"')[1] if rest else ""


def require(package: str, extra: str, purpose: str) -> None:
    """Check that an import package is installed, without importing it.

    Errors: MissingDependency.
    """
    if find_spec(package) is None:
        raise MissingDependency(package, extra, purpose)


def missing_dependency(
    error: ModuleNotFoundError, extra: str, purpose: str
) -> MissingDependency | None:
    """The error in the user's words; None where no extra installs the module: then it is a fault.

    Args:
        extra: the extras of `purpose`, as in "serve,train"; another one, the first in
            pyproject.toml, is named where these do not install the module.
    """
    package = canonicalize_name((error.name or "").partition(".")[0])
    try:
        requirements = [Requirement(line) for line in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:  # a source tree that is not installed
        return None
    owners = [extra_of(item) for item in requirements if canonicalize_name(item.name) == package]
    if not (owners := [owner for owner in owners if owner not in ("", "all", "dev")]):
        return None
    named = extra if set(extra.split(",")) & set(owners) else owners[0]
    return MissingDependency(str(error.name), named, purpose)
