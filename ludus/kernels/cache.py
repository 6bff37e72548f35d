"""Results of compilations on disk, by content.

    <folder>/3f/3f9a....bin     a line of JSON (code, seconds, lengths, checksum), log, cubin

An entry appears whole or not at all, so processes may share a folder. A damaged one counts as
absent. Where the entries exceed `max_mb`, those least recently used are removed.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ludus.core.errors import ConfigError
from ludus.core.files import atomic_write

KEPT = 0.8
"""Share of the limit that stays after a removal."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The end of a compilation: NVRTC's code, its log and the cubin."""

    code: int
    seconds: float
    log: bytes
    cubin: bytes


def default_folder() -> Path:
    """The cache folder, in $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "ludus" / "kernels"


class CompileCache:
    """Entries below a folder, `max_mb` of them at most.

    Errors: ConfigError for a limit below 1.
    """

    def __init__(self, folder: Path | None = None, max_mb: int = 512) -> None:
        if max_mb < 1:
            raise ConfigError(f"max_mb: {max_mb}: a cache needs at least 1")
        self.folder = folder or default_folder()
        self._max_bytes = max_mb << 20
        self._bytes: int | None = None

    @staticmethod
    def key(*parts: str) -> str:
        """The key of a source, its options, architecture and compiler."""
        return hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def get(self, key: str) -> Entry | None:
        """The entry of a key; None if it is absent or damaged."""
        path = self._path(key)
        try:
            head, _, body = path.read_bytes().partition(b"\n")
            facts = json.loads(head)
            length = facts["log"]
            if facts["sha256"] != hashlib.sha256(body).hexdigest() or facts["key"] != key:
                return None
            entry = Entry(int(facts["code"]), float(facts["seconds"]), body[:length], body[length:])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        with suppress(OSError):
            os.utime(path)
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry. Those that exceed the limit alone, or do not fit the disk, are not."""
        body = entry.log + entry.cubin
        facts = {"key": key, "code": entry.code, "seconds": entry.seconds, "log": len(entry.log)}
        facts["sha256"] = hashlib.sha256(body).hexdigest()
        data = json.dumps(facts).encode() + b"\n" + body
        if len(data) > self._max_bytes * KEPT:
            return
        path = self._path(key)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, data, flush=False)
            self._bytes = self._size() if self._bytes is None else self._bytes + len(data)
            if self._bytes > self._max_bytes:
                self._bytes = self._remove_oldest()

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.bin"

    def _entries(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self.folder.glob("??/*.bin"):
            with suppress(OSError):  # another process has removed it
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        return sorted(found)

    def _size(self) -> int:
        return sum(size for _, size, _ in self._entries())

    def _remove_oldest(self) -> int:
        """Returns the bytes that are left; other processes may have written since the last look."""
        entries = self._entries()
        left = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if left <= self._max_bytes * KEPT:
                break
            path.unlink(missing_ok=True)
            left -= size
        return left
