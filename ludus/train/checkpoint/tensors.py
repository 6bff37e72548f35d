"""Tensors of a checkpoint by name, or regions of them, from one file or from shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ludus.core.errors import CheckpointError
from ludus.train.checkpoint.manifest import MODEL, OPTIMIZER
from ludus.train.checkpoint.shards import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    Region,
    regions,
    shape_of,
    shard_files,
)


class TensorFiles:
    """The tensors in files.

    Args:
        prefix: begins the names of the tensors in the files; others are left out.
    """

    def __init__(self, paths: Iterable[Path], prefix: str = "") -> None:
        self._parts: dict[str, list[Region]] = {}
        for path in paths:
            for region in regions(path):
                if region.key.startswith(prefix):
                    self._parts.setdefault(region.key.removeprefix(prefix), []).append(region)
        self._shapes = {name: shape_of(parts) for name, parts in self._parts.items()}

    @classmethod
    def model(cls, folder: Path, manifest: Mapping[str, Any]) -> TensorFiles:
        """The trained tensors of a checkpoint."""
        return cls._of(folder, manifest, MODEL, MODEL_PREFIX)

    @classmethod
    def optimizer(cls, folder: Path, manifest: Mapping[str, Any]) -> TensorFiles:
        """The optimizer's state in a checkpoint, named `parameter/key`."""
        return cls._of(folder, manifest, OPTIMIZER, OPTIMIZER_PREFIX)

    @classmethod
    def _of(cls, folder: Path, manifest: Mapping[str, Any], whole: str, prefix: str) -> TensorFiles:
        if whole in manifest["files"]:
            return cls([folder / whole])
        return cls(shard_files(folder, manifest), prefix)

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a whole tensor."""
        return self._shapes[name]

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Returns a tensor, or its region of these sizes at these offsets.

        Errors: CheckpointError where the files do not hold all of it.
        """
        parts = self._parts[name]
        start = tuple(offsets if offsets is not None else [0] * len(self._shapes[name]))
        extent = tuple(sizes if sizes is not None else self._shapes[name])
        out = torch.empty(extent, dtype=getattr(torch, parts[0].dtype))
        filled = sum(_copy_overlap(out, start, part) for part in parts)
        if filled < out.numel():
            raise CheckpointError(
                f"{parts[0].path.parent}: the files hold {filled} of {out.numel()} entries of "
                f"{name}"
            )
        return out


def _copy_overlap(out: Tensor, start: Sequence[int], part: Region) -> int:
    """Copy the entries of a region that belong to `out`, which begins at `start`; returns their
    number."""
    into, source = [], []
    for begin, size, offset, length in zip(start, out.shape, part.offsets, part.sizes, strict=True):
        low, high = max(begin, offset), min(begin + size, offset + length)
        if high <= low:
            return 0
        into.append(slice(low - begin, high - begin))
        source.append(slice(low - offset, high - offset))
    with safe_open(part.path, framework="pt") as file:
        if not into:
            out.copy_(file.get_tensor(part.key))
            return 1
        piece = out[tuple(into)]
        piece.copy_(file.get_slice(part.key)[tuple(source)])
    return piece.numel()
