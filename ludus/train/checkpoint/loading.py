"""Load a checkpoint: verify its files and its model, then copy the tensors in place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.errors import CheckpointError
from ludus.train.checkpoint.manifest import OPTIMIZER_GROUPS, STATE, read_manifest, require_intact
from ludus.train.checkpoint.state import (
    Named,
    all_tensors,
    digest,
    layout,
    load_optimizer,
    packed_names,
    require_same_optimizer,
)
from ludus.train.checkpoint.tensors import TensorFiles


def load(
    path: str | Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load a checkpoint into `model` and `optimizer` in place; returns the loop's state.

    Parameters keep their storage, so modules that share them see the new weights. Before any
    change, the function checks that the files are intact and that the model has the same class, the
    same tensors and the same frozen base.

    Errors: CheckpointError with the file, or the first tensors that differ.
    """
    folder = Path(path)
    require_intact(folder)
    manifest = read_manifest(folder)
    assert isinstance(manifest, dict)
    tensors = all_tensors(model)
    saved = TensorFiles.model(folder, manifest)
    trained = {name: tensor for name, tensor in tensors.items() if name in saved.names}
    require_same_model(folder, identity(model, trained), manifest["model"])
    groups = None
    if optimizer is not None:
        groups = saved_groups(folder, manifest, optimizer, model)
    with torch.no_grad():
        for name in saved.names:
            tensors[name].copy_(saved.read(name))
    if optimizer is not None and groups is not None:
        moments_of = TensorFiles.optimizer(folder, manifest)
        moments = {name: moments_of.read(name) for name in moments_of.names}
        load_optimizer(optimizer, model, moments, groups)
    return _read_state(folder)


def saved_groups(
    folder: Path, manifest: Mapping[str, Any], optimizer: torch.optim.Optimizer, model: Named
) -> dict[str, Any]:
    """Returns the saved description of an optimizer. Errors: CheckpointError where it is of
    another one, or absent."""
    if OPTIMIZER_GROUPS not in manifest["files"]:
        raise CheckpointError(f"{folder} holds no optimizer state: the run cannot resume from it")
    groups: dict[str, Any] = json.loads((folder / OPTIMIZER_GROUPS).read_text(encoding="utf-8"))
    try:
        require_same_optimizer(optimizer, model, groups)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return groups


def read_state(path: str | Path, *, verified: bool = False) -> dict[str, Any]:
    """Returns only the loop's state of a checkpoint; needed to build the model.

    Args:
        verified: the files are intact; else they are verified. Errors: CheckpointError.
    """
    if not verified:
        require_intact(Path(path))
    return _read_state(Path(path))


def _read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return state


def identity(model: nn.Module, trained: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the model's class, its tensors' layouts, and a digest of the frozen tensors."""
    tensors = all_tensors(model)
    packed = packed_names(model, tensors)  # another device rounds them otherwise
    frozen = tensors.keys() - trained.keys() - packed
    base = {name: tensor for name, tensor in tensors.items() if name in frozen}
    layouts = {name: layout(tensor) for name, tensor in tensors.items()}
    return {
        "class": type(model).__name__,
        "signature": hashlib.sha256(json.dumps(layouts, sort_keys=True).encode()).hexdigest(),
        "base": digest(base) if base else None,
        "tensors": layouts,
    }


def require_same_model(folder: Path, now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Compare the `identity` of a model with a saved one.

    Errors: CheckpointError with the first tensors that differ.
    """
    ours, theirs = now["tensors"], saved["tensors"]
    differing = [
        f"{name}: {theirs.get(name, 'absent')} in the checkpoint, "
        f"{ours.get(name, 'absent')} in the model"
        for name in dict.fromkeys([*theirs, *ours])
        if theirs.get(name) != ours.get(name)
    ]
    if differing:
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise CheckpointError(
            f"{folder} is a checkpoint of another model: {'; '.join(differing[:3])}{more}"
        )
    if now["class"] != saved["class"]:
        raise CheckpointError(
            f"{folder} is a checkpoint of another model: its class is {saved['class']}, here "
            f"{now['class']}"
        )
    if now["base"] is not None and now["base"] != saved["base"]:
        raise CheckpointError(
            f"{folder} was trained on another base model: its adapters fit, but the frozen weights "
            "differ: load the base model of the run"
        )
