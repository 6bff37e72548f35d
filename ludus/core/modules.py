"""Modules by dotted name, or by the path of their file: what "module:Class" in a config means."""

from __future__ import annotations

import hashlib
import os
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load_module(name: str) -> ModuleType:
    """The module of a name (`my_package.env`) or of a file (`my/env.py`); a file is loaded once.

    A name is looked up in the working directory too, which a console script has not on its path.

    Errors: ModuleNotFoundError where there is none; whatever the module itself raises.
    """
    if not name or name.startswith("."):  # relative to nothing
        raise ModuleNotFoundError(f"no module named {name!r}", name=name)
    if name.endswith(".py"):
        return _load_file(Path(name).expanduser())
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        return import_module(name)
    sys.path.append(here)
    try:
        return import_module(name)
    finally:
        sys.path.remove(here)


def _load_file(path: Path) -> ModuleType:
    resolved = str(path.resolve())
    # A name that no import statement can give, and that two files of one name do not share.
    name = f"{path.stem}@{hashlib.sha256(resolved.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, resolved)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"there is no file {path}", name=str(path))
    module = module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as import does: dataclasses look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
