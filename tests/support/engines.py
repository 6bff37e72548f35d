"""Foreign engines: packages with an environment of their own, which `make <name>` installs."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def engine_python(name: str) -> Path:
    """The engine's interpreter. `LUDUS_<NAME>_PYTHON` names another than `.venv-<name>` has."""
    default = ROOT / f".venv-{name}" / "bin" / "python"
    return Path(os.environ.get(f"LUDUS_{name.upper()}_PYTHON", default))
