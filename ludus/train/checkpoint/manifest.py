"""The manifest of a checkpoint, and verification of the files beside it.

{"format": 1, "sequence": 7, "stage": "rl", "step": 40, "pinned": false,
 "metric": 0.81, "metric_name": "evaluate/success",
 "run": {"id": "babyai-tiny-1", "identity": "5f0c93d2a1b4e6f0"},
 "ludus": "0.1.0", "torch": "2.13.0", "model": {"class": ..., "tensors": {...}, ...},
 "files": {"model.safetensors": {"size": 3230416, "sha256": "..."}, ...},
 "sha256": "..."}          of the manifest's other content, to detect damage of the manifest itself
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ludus.core.errors import AbsentCheckpoint, CheckpointError
from ludus.store.folders import RunFolder
from ludus.train.checkpoint.shards import incomplete

FORMAT = 1
MANIFEST, MODEL, STATE = "manifest.json", "model.safetensors", "state.json"
OPTIMIZER, OPTIMIZER_GROUPS = "optimizer.safetensors", "optimizer.json"
Kind = Literal["missing", "truncated", "altered", "unreadable", "extra", "foreign"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A damaged, missing or extra file of a checkpoint; foreign: a manifest of another run."""

    checkpoint: Path
    file: str
    kind: Kind
    detail: str

    def __str__(self) -> str:
        return f"{self.checkpoint / self.file} is {self.kind}: {self.detail}"


def read_manifest(folder: Path) -> dict[str, Any] | Problem:
    """Returns the manifest of a checkpoint, or the problem that makes it unusable.

    In a run's folder, a checkpoint of another run is unusable: its weights fit where the shapes are
    equal, but they were trained with other settings. A copy outside of any run is usable.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Problem(folder, MANIFEST, "missing", "the other files cannot be verified")
    except (OSError, ValueError, RecursionError) as error:
        return Problem(folder, MANIFEST, "unreadable", str(error))
    if not isinstance(manifest, dict) or manifest.get("sha256") != manifest_sha256(manifest):
        return Problem(folder, MANIFEST, "altered", "it does not match its own SHA-256")
    if manifest["format"] != FORMAT:
        detail = f"format {manifest['format']}, this ludus reads format {FORMAT}"
        return Problem(folder, MANIFEST, "unreadable", detail)
    foreign = _foreign(folder, manifest)
    return Problem(folder, MANIFEST, "foreign", foreign) if foreign else manifest


def run_of(folder: Path) -> RunFolder:
    """Returns the run whose checkpoint lies in `folder`: `<run>/checkpoints/<name>`."""
    return RunFolder(folder.absolute().parent.parent)


def _foreign(folder: Path, manifest: dict[str, Any]) -> str | None:
    """Returns why a checkpoint does not belong to the run, or to the step, that its path names."""
    run = run_of(folder)
    if (identity := run.identity()) is None:
        return None
    origin = manifest.get("run") or {}
    if origin.get("identity") != identity:
        saver = origin.get("id", "of an unknown id")
        other = "another run of the same id" if saver == run.id else f"run {saver}"
        return f"{other} saved the checkpoint, but this is the folder of run {run.id}: move it out"
    name = f"{manifest['stage']}-{manifest['step']:06d}"
    if folder.name != name and not folder.name.startswith("."):
        return f"the checkpoint was saved as {name}: rename it back, or move it out"
    return None


def problems_of(folder: Path, *, hashes: bool = True) -> list[Problem]:
    """Returns the problems of one checkpoint; without `hashes`, compares sizes only.

    Errors: AbsentCheckpoint, also where the process that trains removes the checkpoint meanwhile.
    """
    try:
        problems = _problems(folder, hashes)
    except FileNotFoundError:
        if folder.is_dir():
            raise
        problems = []
    if not folder.is_dir():
        raise AbsentCheckpoint(
            f"there is no checkpoint {folder}. A training in progress keeps the newest and the "
            "best: name one of those, or repeat the command"
        )
    return problems


def _problems(folder: Path, hashes: bool) -> list[Problem]:
    manifest = read_manifest(folder)
    if isinstance(manifest, Problem):
        return [manifest]
    problems = []
    for name, saved in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            problems.append(Problem(folder, name, "missing", f"{saved['size']} bytes expected"))
            continue
        size = path.stat().st_size
        if size != saved["size"]:
            detail = f"{size} bytes, {saved['size']} expected"
            kind: Kind = "truncated" if size < saved["size"] else "altered"
            problems.append(Problem(folder, name, kind, detail))
        elif hashes and file_sha256(path) != saved["sha256"]:
            problems.append(Problem(folder, name, "altered", "its SHA-256 differs"))
    if not problems:
        problems += [Problem(folder, "shards", "missing", t) for t in incomplete(folder, manifest)]
    expected = {MANIFEST, *manifest["files"]}
    problems += [
        Problem(folder, path.name, "extra", "not a file of the checkpoint")
        for path in sorted(folder.iterdir())
        if path.name not in expected
    ]
    return problems


def damage_of(folder: Path, *, hashes: bool = True) -> list[Problem]:
    """Returns the problems that prevent loading; extra files do not."""
    return [problem for problem in problems_of(folder, hashes=hashes) if problem.kind != "extra"]


def require_intact(folder: Path) -> None:
    """Errors: CheckpointError with each damaged file and its damage."""
    if damage := damage_of(folder):
        raise CheckpointError("; ".join(map(str, damage)))


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_sha256(manifest: dict[str, Any]) -> str:
    """Returns the SHA-256 of the manifest without its own `sha256`."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damage_among(folders: Iterable[Path], name: str) -> list[Problem]:
    """The problems of the checkpoints of one name in several folders; each has to be there."""
    problems: list[Problem] = []
    for path in (folder / name for folder in folders):
        if path.is_dir():
            problems += damage_of(path)
        else:
            problems.append(Problem(path, MANIFEST, "missing", "the run's own needs it"))
    return problems
