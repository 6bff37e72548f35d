"""Atomic checkpoint folders, with the disk's errors explained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ludus.core.errors import CheckpointError
from ludus.core.files import atomic_folder


@contextmanager
def checkpoint_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """`atomic_folder` for a checkpoint; whoever may read the folder may read its files.

    Args:
        target: the checkpoint's folder.
        num_bytes: approximate size; reported when the disk is full.

    Errors: CheckpointError where the disk refuses (full, over quota, not writable).
    """
    try:
        with atomic_folder(target) as folder:
            yield folder
            for file in filter(Path.is_file, folder.iterdir()):
                # safetensors makes files that only their owner may read
                file.chmod(folder.stat().st_mode & 0o666)
    except (OSError, SafetensorError) as error:
        existing = next(path for path in target.absolute().parents if path.exists())
        raise CheckpointError(
            f"{target} cannot be written: {error}. It needs {_human_size(num_bytes)}, "
            f"{_human_size(shutil.disk_usage(existing).free)} are free; what was there before is "
            "intact"
        ) from error


def _human_size(num_bytes: int) -> str:
    """`1.5 MB`; powers of 1000."""
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
