"""Load modules by dotted name or by file path; resolves "module:Class" of a config."""

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

    Names are also looked up in the working directory, which is not on a console script's path.

    Errors: ModuleNotFoundError; any error that the module itself raises.
    """
    if not name or name.startswith("."):  # a relative name has no package here
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
    # The digest keeps two files of the same name apart; "@" cannot occur in an import statement.
    name = f"{path.stem}@{hashlib.sha256(resolved.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, resolved)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"there is no file {path}", name=str(path))
    module = module_from_spec(spec)
    sys.modules[name] = module  # before execution, as import does: dataclasses look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
