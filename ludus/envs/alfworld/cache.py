"""ALFWorld's files in the user's cache folder: generated games and translated problems.

Files are gzipped JSON. A damaged file (gzip has a checksum) is treated as absent.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

from ludus.core.files import atomic_write


def cache_root() -> Path:
    """The cache folder, in $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "ludus" / "alfworld"


def read(path: Path) -> Any:
    """The content of a file; None if it is absent or damaged."""
    try:
        return json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error):
        return None


def write(path: Path, value: Any) -> None:
    """Atomic: other processes read and write the same files. Errors: OSError."""
    data = gzip.compress(json.dumps(value, separators=(",", ":")).encode(), 6, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, data, flush=False)
