"""The checkpoints of a run as their manifests describe them. Needs no torch."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.core.errors import AbsentCheckpoint, CheckpointError
from ludus.train.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    STATE,
    Problem,
    problems_of,
    read_manifest,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*-\d{6,}")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint, from its manifest. `sequence` grows with every save of a run.

    `metric` is the value of the metric `metric_name`; both are None where nothing was measured.
    """

    path: Path
    stage: str
    step: int
    sequence: int
    metric: float | None
    pinned: bool
    metric_name: str | None = None


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Returns the checkpoints in a folder with a readable manifest, oldest first."""
    infos = [
        _info(checkpoint, manifest)
        for checkpoint in checkpoint_folders(folder)
        if isinstance(manifest := read_manifest(checkpoint), dict)
    ]
    return sorted(infos, key=lambda info: info.sequence)


def unreadable(folder: Path) -> list[Problem]:
    """Returns the checkpoints that `list_checkpoints` leaves out: their manifest is damaged.

    Without those that the process that trains removed meanwhile.
    """
    manifests = map(read_manifest, checkpoint_folders(folder))
    problems = (item for item in manifests if isinstance(item, Problem))
    return [problem for problem in problems if problem.checkpoint.is_dir()]


def best(infos: list[CheckpointInfo]) -> CheckpointInfo | None:
    """Returns the checkpoint with the highest metric, of equal metrics the newest, or None.

    If `checkpoint.metric` changed during the run, only the newest metric counts.
    """
    return next(iter(ranked(infos)), None)


def ranked(infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
    """Returns the checkpoints with the metric that the newest of them has, best first."""
    measured = [info for info in infos if info.metric is not None]
    name = measured[-1].metric_name if measured else None
    scored = [(i.metric, i.sequence, i) for i in measured if i.metric_name == name]
    return [info for _, _, info in sorted(scored, key=lambda row: row[:2], reverse=True)]


def check(path: str | Path) -> list[Problem]:
    """Returns all problems of a checkpoint, or of all checkpoints of a run.

    Args:
        path: a checkpoint, a run, or a run's `checkpoints` folder.

    Errors: CheckpointError if there is no checkpoint at `path`.
    """
    folder = Path(path)
    if any((folder / name).exists() for name in (MANIFEST, MODEL, STATE)):
        return problems_of(folder)
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    folders = checkpoint_folders(folder)
    if not folders:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run with checkpoints")
    problems: list[Problem] = []
    for checkpoint in folders:
        with suppress(AbsentCheckpoint):  # removed meanwhile by the process that trains
            problems += problems_of(checkpoint)
    return problems


def checkpoint_folders(folder: Path) -> list[Path]:
    """Returns the folders in `folder` with the name of a checkpoint, in alphabetical order."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))


def _info(folder: Path, manifest: dict[str, Any]) -> CheckpointInfo:
    stage, step, sequence, pinned = (manifest[k] for k in ("stage", "step", "sequence", "pinned"))
    metric, name = manifest["metric"], manifest.get("metric_name")
    return CheckpointInfo(folder, stage, step, sequence, metric, pinned, name)
