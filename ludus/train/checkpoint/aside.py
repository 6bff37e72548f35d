"""Folders that appear whole or not at all: written aside, flushed, then renamed.

    .tmp-<name>-<pid>    being written, or being removed
    .old-<name>-<pid>    what <name> was, for the moment between the two renames that replace it

A process that is killed leaves at most these two behind; `recover` clears them away.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ludus.core.errors import CheckpointError

_LEFTOVER = re.compile(r"\.(tmp|old)-(.+)-(\d+)")
_in_progress: set[Path] = set()


@contextmanager
def written_aside(target: Path, num_bytes: int) -> Iterator[Path]:
    """Yields an empty folder that becomes `target`, in place of a former one, if the body succeeds.

    Whatever goes wrong, `target` stays as it was and nothing half-written is left.

    Args:
        target: the folder to appear.
        num_bytes: about how much will be written; told to the user when the disk is full.

    Errors: CheckpointError where the disk refuses (full, over quota, not writable).
    """
    aside = _beside(target, "tmp")
    _in_progress.add(aside)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        yield aside
        _flush(aside)
        _rename_over(aside, target)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(
                f"{target} cannot be written: {error}. It needs {human_size(num_bytes)}, "
                f"{human_size(_free(target))} are free; what was there before is intact"
            ) from error
        raise
    finally:
        _in_progress.discard(aside)


def remove(folder: Path) -> None:
    """Remove `folder`: at once from sight, then from the disk."""
    aside = _beside(folder, "tmp")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def recover(parent: Path, name: str | None = None) -> None:
    """Clear what dead processes left in `parent`: of the folder `name` only, or of any.

    A replacement that was cut in two is undone. Processes of other machines count as dead.
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
        else:
            shutil.rmtree(path, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write and flush a text file."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def human_size(num_bytes: int) -> str:
    """`1.5 MB`; powers of 1000."""
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{kind}-{target.name}-{os.getpid()}")


def _rename_over(aside: Path, target: Path) -> None:
    """Put `aside` at `target`. No call of the operating system swaps two folders portably."""
    if not target.exists():
        os.rename(aside, target)
        _flush_folder(target.parent)
        return
    old = _beside(target, "old")
    os.rename(target, old)
    try:
        os.rename(aside, target)
    except OSError:
        os.rename(old, target)
        raise
    _flush_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Have every file below `folder`, and the folders themselves, on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        _flush_folder(Path(parent))


def _flush_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free(target: Path) -> int:
    """Free bytes where `target` would be."""
    existing = next(path for path in target.absolute().parents if path.exists())
    return shutil.disk_usage(existing).free


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
