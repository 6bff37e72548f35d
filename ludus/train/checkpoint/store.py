"""Checkpoints: the state that a run needs to resume exactly, without pickle.

    <run>/checkpoints/rl-000040/
        model.safetensors        the trained tensors: all weights, or the adapters of a LoRA run
        optimizer.safetensors    moments and step counts, named `parameter/key`
        optimizer.json           class, parameter groups with their settings, other scalars
        state.json               the loop's state
        manifest.json            size and SHA-256 of each file, the model's identity, a sequence
        number

A save is atomic and verified: a process killed at any time leaves every checkpoint complete or
absent. Loading verifies every file first.

A damaged newest checkpoint is an error: a fallback loses the work since the previous checkpoint, so
the user decides (`skip_damaged`). The damaged checkpoint is then renamed to `.damaged-<name>`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import ludus
from ludus.core.errors import AbsentCheckpoint, CheckpointError, ConfigError
from ludus.core.files import atomic_write, recover, remove_folder
from ludus.train.checkpoint.folder import checkpoint_folder
from ludus.train.checkpoint.listing import (
    CheckpointInfo,
    best,
    checkpoint_folders,
    list_checkpoints,
    ranked,
    unreadable,
)
from ludus.train.checkpoint.loading import identity
from ludus.train.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    OPTIMIZER_GROUPS,
    STATE,
    Problem,
    damage_among,
    damage_of,
    file_sha256,
    manifest_sha256,
    read_manifest,
    require_intact,
    run_of,
)
from ludus.train.checkpoint.state import (
    optimizer_state,
    raw,
    require_json,
    trained_tensors,
)

_STAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run. One process at a time may save; any process may read.

    The constructor removes leftovers of killed processes.

    Args:
        folder: `<run>/checkpoints`; created by the first save.
        keep_last: number of newest checkpoints to keep.
        keep_best: number of checkpoints with the highest metric to keep (of equal metrics, the
            newest). Pinned checkpoints are always kept.
        metric: name of the metric that `save` and `set_metric` receive.

    `others` are the folders of the run's further policies: a checkpoint is intact where theirs of
    the same name are.
    """

    def __init__(
        self,
        folder: str | Path,
        keep_last: int = 2,
        keep_best: int = 1,
        metric: str | None = None,
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ConfigError(
                f"checkpoint.keep_last = {keep_last} must be at least 1, "
                f"checkpoint.keep_best = {keep_best} at least 0"
            )
        self.folder = Path(folder)
        self.keep_last, self.keep_best, self.metric = keep_last, keep_best, metric
        self.others: tuple[Path, ...] = ()
        recover(self.folder)
        for checkpoint in checkpoint_folders(self.folder):
            recover(checkpoint)  # a manifest that `set_metric` was writing

    def save(
        self,
        stage: str,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        state: dict[str, Any],
        metric: float | None = None,
        pin: bool = False,
    ) -> Path:
        """Save and verify a checkpoint, then remove old checkpoints. Returns the folder.

        A checkpoint of the same stage and step is replaced.

        Args:
            stage, step: give the name `<stage>-<step:06d>`.
            state: the loop's state; JSON values only (tuples are read back as lists).
            metric: of `keep_best`; higher is better; NaN counts as None.
            pin: never remove the checkpoint, e.g. the end of a stage.

        Errors: CheckpointError if the disk refuses, or a value cannot be saved exactly; existing
        checkpoints are unchanged then.
        """
        target = self.target(stage, step)
        require_json(state, "state")
        trained = trained_tensors(model)
        moments, groups = optimizer_state(optimizer, model) if optimizer else ({}, None)
        num_bytes = sum(t.nbytes for t in [*trained.values(), *moments.values()]) + 4096
        with checkpoint_folder(target, num_bytes) as folder:
            write_tensors(folder / MODEL, trained)
            if groups is not None:
                write_tensors(folder / OPTIMIZER, moments)
                (folder / OPTIMIZER_GROUPS).write_text(json.dumps(groups), encoding="utf-8")
            (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
            files = {
                path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)}
                for path in sorted(folder.iterdir())
            }
            self.describe(folder, stage, step, identity(model, trained), files, metric, pin=pin)
            require_intact(folder)
        self.prune()
        return target

    def target(self, stage: str, step: int) -> Path:
        """Returns the folder of a checkpoint. Errors: CheckpointError for a wrong name."""
        if not _STAGE.fullmatch(stage) or step < 0:
            raise CheckpointError(f"{stage!r}, step {step}, cannot name a checkpoint")
        return self.folder / f"{stage}-{step:06d}"

    def describe(
        self,
        folder: Path,
        stage: str,
        step: int,
        model: Mapping[str, Any],
        files: Mapping[str, Mapping[str, Any]],
        metric: float | None,
        *,
        pin: bool,
    ) -> None:
        """Write the manifest of a checkpoint whose files are in `folder`, not yet in its place.

        Args:
            model: its `identity`.
            files: size and SHA-256 of each file.
        """
        run = run_of(self.target(stage, step))
        manifest = {
            "format": FORMAT,
            "sequence": max((info.sequence for info in self.list()), default=0) + 1,
            "run": {"id": run.id, "identity": run.identity()},
            "stage": stage,
            "step": step,
            **self._measured(metric),
            "pinned": pin,
            "ludus": ludus.__version__,
            "torch": str(torch.__version__),
            "model": dict(model),
            "files": dict(files),
        }
        manifest["sha256"] = manifest_sha256(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    def set_metric(self, stage: str, step: int, metric: float) -> bool:
        """Set the metric of a saved checkpoint, atomically, then remove old checkpoints.

        The same value writes the same bytes. Returns False where the checkpoint is absent or its
        manifest is damaged. Errors: CheckpointError if the disk refuses.
        """
        folder = self.folder / f"{stage}-{step:06d}"
        manifest = read_manifest(folder)
        if isinstance(manifest, Problem):
            return False
        manifest = {**manifest, **self._measured(metric)}
        manifest["sha256"] = manifest_sha256(manifest)
        try:
            atomic_write(folder / MANIFEST, json.dumps(manifest, indent=1))
        except OSError as error:
            raise CheckpointError(
                f"{folder / MANIFEST} cannot be written: {error}. The checkpoint is intact"
            ) from error
        self.prune()
        return True

    def _measured(self, metric: float | None) -> dict[str, Any]:
        """Returns the manifest's metric and its name; NaN counts as None."""
        if metric is None or math.isnan(metric):
            return {"metric": None, "metric_name": None}
        return {"metric": float(metric), "metric_name": self.metric}

    def list(self) -> list[CheckpointInfo]:
        """Returns the checkpoints with a readable manifest, oldest first."""
        return list_checkpoints(self.folder)

    def unreadable(self) -> tuple[Problem, ...]:
        """Returns the checkpoints that `list` leaves out, since their manifest is damaged."""
        return tuple(unreadable(self.folder))

    def latest(self, *, skip_damaged: bool = False) -> CheckpointInfo | None:
        """Returns the newest checkpoint, verified; None without checkpoints.

        Args:
            skip_damaged: skip damaged checkpoints, with a warning.

        Errors: CheckpointError if the newest is damaged, or none is intact.
        """
        damage = list(self.unreadable())
        intact = None
        for info in reversed(self.list()):
            try:
                problems = damage_of(info.path) + damage_among(self.others, info.path.name)
            except AbsentCheckpoint:  # the process that trains removed it: there are newer ones
                return self.latest(skip_damaged=skip_damaged)
            if not problems:
                intact = info
                break
            damage += problems
        if damage and (intact is None or not skip_damaged):
            text = "; ".join(map(str, damage))
            if intact is None:
                raise CheckpointError(f"{text}. No checkpoint of {self.folder} is intact")
            raise CheckpointError(
                f"{text}. The newest intact checkpoint is {intact.path.name}: to resume from it, "
                "add --skip-damaged to `ludus train --resume`"
            )
        for problem in damage:
            _log.warning("skipped a damaged checkpoint: %s", problem)
        return intact

    def discard_after(self, resumed: CheckpointInfo | None) -> None:
        """Rename the checkpoints after `resumed`, which a resumed run will not use."""
        last = resumed.sequence if resumed else 0
        kept = {info.path for info in self.list() if info.sequence <= last}
        for folder in checkpoint_folders(self.folder):
            if folder not in kept:
                self._try(_mark_damaged, folder)

    def named(self, name: str) -> CheckpointInfo:
        """Returns a checkpoint by its name. Errors: AbsentCheckpoint."""
        for info in self.list():
            if info.path.name == name:
                return info
        raise AbsentCheckpoint(f"{self.folder / name} is missing or damaged")

    def keep_only(self, names: Collection[str]) -> None:
        """Remove the checkpoints with other names, pinned or not."""
        for info in self.list():
            if info.path.name not in names:
                self._try(remove_folder, info.path)

    def best(self) -> CheckpointInfo | None:
        """See `best`."""
        return best(self.list())

    def prune(self) -> None:
        """Remove old checkpoints. Called after a save, so an intact checkpoint remains."""
        for folder in checkpoint_folders(self.folder):
            if damage := damage_of(folder, hashes=False):
                _log.warning("renamed to .damaged-%s: %s", folder.name, damage[0])
                self._try(_mark_damaged, folder)
        infos = self.list()
        keep = [*infos[-self.keep_last :], *ranked(infos)[: self.keep_best]]
        for info in infos:
            if not info.pinned and info not in keep:
                self._try(remove_folder, info.path)

    @staticmethod
    def _try(action: Callable[[Path], None], folder: Path) -> None:
        """Log, but do not raise, an error of removing a folder."""
        try:
            action(folder)
        except OSError as error:
            _log.warning("the old checkpoint %s was not removed: %s", folder, error)


def _mark_damaged(folder: Path) -> None:
    damaged = folder.with_name(f".damaged-{folder.name}")
    if damaged.exists():
        remove_folder(damaged)
    os.rename(folder, damaged)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write and flush tensors, then compare the file's tensors with the originals."""
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    with safe_open(path, framework="pt") as written:
        for name, tensor in tensors.items():
            if not torch.equal(raw(written.get_tensor(name)), raw(tensor)):
                raise CheckpointError(
                    f"{path}: {name} differs when read back: is the disk failing?"
                )
