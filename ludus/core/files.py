"""Atomic writes: a file or folder appears complete or not at all.

The data is written beside the target, flushed to disk (fsync), then renamed over the target:

    .tmp-<name>-<pid>    being written, or being removed
    .old-<name>-<pid>    the former folder, between the two renames that replace a folder

A killed process leaves at most these two behind. `recover` removes them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_LEFTOVER = re.compile(r"\.(tmp|old)-(.+)-(\d+)")
_in_progress: set[Path] = set()


def searched(path: str | Path) -> str:
    """` in FOLDER` for a relative path, which counts from the folder of the command; else empty."""
    return "" if Path(path).is_absolute() else f" in {Path.cwd()}"


class InUse(Exception):
    """Another process holds the lock; `owner` is its id, or `?`."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"in use by process {owner}")
        self.owner = owner


NOT_REGULAR = "is a pipe or a device, not a file"


def not_there(path: Path) -> str:
    """The fault of a path that is no file and no folder, in words."""
    if path.exists():
        return NOT_REGULAR
    return f"does not exist{searched(path)}"


def lock(path: Path) -> IO[str]:
    """Lock a file, which is created, until the returned file is closed or the process ends.

    The file holds the id of this process. Errors: InUse; OSError.
    """
    file = open(path, "a+")  # noqa: SIM115 - the lock lasts as long as the file is open
    try:
        _flock(file)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "?"
        file.close()
        raise InUse(owner) from None
    except OSError:
        file.close()
        raise
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file. Anything else is refused: a pipe blocks, a device may do anything.

    Errors: OSError.
    """
    with suppress(FileNotFoundError):
        _require_regular(os.stat(path), path)  # before it is opened: that has effects on a device
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _require_regular(os.fstat(handle), path)
    except OSError:
        os.close(handle)
        raise
    return handle


def read_regular(path: Path) -> bytes:
    """Returns the content of a file. Errors: OSError, also for a pipe, which would block."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Errors: FileNotFoundError; ValueError for what cannot be read, or is no JSON.
    """
    try:
        return json.loads(read_regular(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(error.strerror) from None
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _require_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def lock_itself(handle: int, path: Path) -> None:
    """Lock an open file by what it is, whichever of its names (links) others use.

    The lock lasts until the handle is closed or the process ends. Errors: InUse; OSError.
    """
    try:
        _flock(handle)
    except BlockingIOError:
        raise InUse(str(locked_by(path) or "?")) from None


def _flock(file: IO[str] | int) -> None:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def locked_by(path: Path) -> int | None:
    """The process that holds the lock of a file; None if none does, or if it cannot be known.

    The file is not locked for that, so a process that begins meanwhile is not refused.
    """
    with suppress(OSError, ValueError, IndexError):
        number = f":{path.stat().st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 fe:00:123 0 EOF; `->`: it waits
            if "FLOCK" in fields and "->" not in fields and fields[5].endswith(number):
                return int(fields[4])
    return None


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A private folder in the system's folder for such, removed at the end.

    It is locked, so that this function also removes those of killed processes, and no others.
    """
    _remove_unlocked(prefix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        with suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.exists():  # another process may have removed it before it was locked
                break
            os.close(handle)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _remove_unlocked(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(handle).st_uid == os.geteuid():
                    _flock(handle)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def atomic_write(path: Path, content: str | bytes, *, flush: bool = True) -> None:
    """Write a file atomically; text as UTF-8. See `atomic_file`."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_file(path, flush=flush) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_file(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """Yields a temporary path for the caller to write; it replaces `path` if the body succeeds.

    On an error `path` stays as it was and the temporary file is removed. The parent folder has to
    exist. Threads and processes may write the same path at the same time; the last one wins.

    Args:
        flush: survive a power cut too; without it, only a killed process.

    Errors: OSError.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path  # a device or a pipe, such as /dev/stdout: written directly, never replaced
        return
    temporary = _beside(path, "tmp", f"{path.name}.{threading.get_ident()}")
    try:
        yield temporary
        if flush:
            _flush_file(temporary)
        os.replace(temporary, path)
        if flush:
            _flush_entries(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder; it replaces `target` if the body succeeds.

    On an error `target` stays as it was and the temporary folder is removed. Missing parents are
    created. Leftovers of killed processes are removed first.

    Errors: OSError.
    """
    temporary = _beside(target, "tmp")
    _in_progress.add(temporary)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target.parent, target.name)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        _flush_folder(temporary)
        _replace_folder(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        _in_progress.discard(temporary)


def remove_folder(folder: Path) -> None:
    """Remove `folder` atomically: it is renamed first, then deleted."""
    temporary = _beside(folder, "tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    os.rename(folder, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def recover(parent: Path, name: str | None = None) -> None:
    """Remove leftovers of dead processes from `parent`: those of folder `name`, or all.

    An unfinished replacement is undone. Processes of other machines count as dead.
    """
    if not parent.is_dir():
        return
    for path in sorted(parent.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or (name is not None and match[2] != name):
            continue
        if path in _in_progress or _is_another_live_process(int(match[3])):
            continue
        target = parent / match[2]
        if match[1] == "old" and not target.exists():
            os.rename(path, target)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _beside(target: Path, kind: str, name: str = "") -> Path:
    return target.with_name(f".{kind}-{name or target.name}-{os.getpid()}")


def _replace_folder(source: Path, target: Path) -> None:
    """Rename `source` to `target`. No portable system call swaps two folders."""
    if not target.exists():
        os.rename(source, target)
        _flush_entries(target.parent)
        return
    old = _beside(target, "old")
    os.rename(target, old)
    try:
        os.rename(source, target)
    except OSError:
        os.rename(old, target)
        raise
    _flush_entries(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    """Flush all files and folders below `folder`."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _flush_file(Path(parent, name))
        _flush_entries(Path(parent))


def _flush_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _flush_entries(folder: Path) -> None:
    """Flush the folder's own entries, such as a rename inside it."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_another_live_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
