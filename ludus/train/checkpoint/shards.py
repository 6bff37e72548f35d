"""The regions of tensors in the files of a sharded checkpoint. Needs no torch.

Each rank writes one file of weights and one of the optimizer's state, in the safetensors format of
torch.distributed.checkpoint (DCP):

    shard-00001-model-00001-of-00002.safetensors    rank 0, names `model/NAME`
    shard-00001-model-00002-of-00002.safetensors    rank 0, names `optimizer/NAME/KEY`
    shard-00002-model-00001-of-00002.safetensors    rank 1 ...

A file's metadata has the offsets of each region within its tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARD = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")
MODEL_PREFIX, OPTIMIZER_PREFIX = "model/", "optimizer/"
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
          "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
          "BOOL": "bool"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor in a file.

    Args:
        key: the region's name in the file.
        dtype: as torch names it.
    """

    path: Path
    key: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def shard_files(folder: Path, manifest: Mapping[str, Any]) -> list[Path]:
    """Returns the files of a sharded checkpoint; [] for one that is not sharded."""
    return [folder / name for name in sorted(manifest["files"]) if SHARD.fullmatch(name)]


def regions(path: Path) -> list[Region]:
    """Returns the regions in a file of tensors; a tensor without offsets is whole.

    Errors: ValueError or OSError for a file in another format.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    extra = header.pop("__metadata__", None) or {}
    offsets = json.loads(extra.get("DCP_SHARDING_INFO", "{}"))
    return [
        Region(
            path,
            key,
            _TYPES.get(entry["dtype"], entry["dtype"]),
            tuple(offsets.get(key, {}).get("saved_offsets", [0] * len(entry["shape"]))),
            tuple(entry["shape"]),
        )
        for key, entry in header.items()
    ]


def shape_of(parts: Iterable[Region]) -> tuple[int, ...]:
    """Returns the shape of the tensor that regions form."""
    ends = [[o + s for o, s in zip(p.offsets, p.sizes, strict=True)] for p in parts]
    return tuple(map(max, zip(*ends, strict=True)))


def incomplete(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns the tensors of a sharded checkpoint whose regions are not all there, or whose type or
    shape is another than the manifest's, with their faults."""
    found: dict[str, list[Region]] = {}
    files = shard_files(folder, manifest)
    if not files:
        return []
    for path in files:
        for region in regions(path):
            found.setdefault(region.key, []).append(region)
    faults: list[str] = []
    layouts: Mapping[str, str] = manifest["model"]["tensors"]
    expected = {name: layouts[name] for name in manifest["model"].get("trained", [])}
    absent = [name for name in expected if MODEL_PREFIX + name not in found]
    faults += [f"{name} is in no shard" for name in absent]
    for key, parts in found.items():
        shape = shape_of(parts)
        stored, needed = sum(math.prod(p.sizes) for p in parts), math.prod(shape)
        if stored != needed:
            faults.append(f"{key}: the shards hold {stored} of {needed} entries")
        name = key.removeprefix(MODEL_PREFIX)
        layout = f"{parts[0].dtype}{list(shape)}"
        if name != key and layouts.get(name) != layout:
            faults.append(f"{name}: {layout} in the shards, {layouts.get(name, 'absent')} expected")
    return faults
