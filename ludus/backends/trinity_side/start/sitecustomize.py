"""First module of each Python process of Trinity on a CPU: its folder is on PYTHONPATH.

It imports nothing of ludus until one of the modules of LUDUS_TRINITY_CPU was imported: Ray starts
many processes.
"""

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

_LEFT = set(filter(None, os.environ.get("LUDUS_TRINITY_CPU", "").split(",")))


class _Watch(MetaPathFinder):
    """Finds the modules to change, and lets `cpu` change each after its import."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """The module's own specification, with a loader that changes the module; or None."""
        if name not in _LEFT:
            return None
        _LEFT.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _change_after(spec.loader, name)
        return spec


def _change_after(loader: Loader, name: str) -> None:
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        original(module)
        from ludus.backends.trinity_side.cpu import CHANGES

        CHANGES[name](module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


if _LEFT:
    sys.meta_path.insert(0, _Watch())
