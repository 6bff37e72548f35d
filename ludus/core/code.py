"""A hash of the code that runs."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

SUFFIXES = {".py", ".cpp", ".c", ".h", ".cu"}


@cache
def code_hash() -> str:
    """Returns 12 hexadecimal digits of the SHA-256 of ludus' source files, paths and contents.

    Equal hashes mean equal code, whatever the version says.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in SUFFIXES:
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]
