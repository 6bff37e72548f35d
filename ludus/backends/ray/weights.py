"""Weights on their way from the learner to the samplers: buckets in Ray's object store.

On one node, a sampler reads a bucket in shared memory, without a copy; between nodes Ray transfers
it once a node. Each bucket carries a checksum, and a publication is identified by its version and
the checksums of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.errors import TrainingError
from ludus.train.checkpoint.state import trained_tensors

ALIGNMENT = 64
"""Bytes at which each tensor of a bucket begins."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors in one array of bytes."""

    entries: list[Entry]
    data: NDArray[np.uint8]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, which share the bucket's memory: read them only."""
        for entry in self.entries:
            raw = self.data[entry.start : entry.start + entry.num_bytes]
            flat = torch.from_numpy(raw) if entry.num_bytes else torch.empty(0, dtype=torch.uint8)
            yield entry.name, flat.view(getattr(torch, entry.dtype)).view(entry.shape)


@dataclass(frozen=True, slots=True)
class Weights:
    """A publication: references to its buckets, and their checksums.

    `num_bytes` counts the tensors.
    """

    version: int
    buckets: list[Any]
    checksums: list[str]
    num_bytes: int

    @property
    def checksum(self) -> str:
        return xxhash.xxh3_128_hexdigest("".join(self.checksums).encode())


def to_bucket(named: Iterable[tuple[str, Tensor]]) -> Bucket:
    """Copy tensors into a bucket."""
    tensors = [(name, tensor.detach().contiguous()) for name, tensor in named]
    entries: list[Entry] = []
    end = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(tensor.shape), end, size))
        end += -(-size // ALIGNMENT) * ALIGNMENT
    data = np.empty(end, np.uint8)
    target = torch.from_numpy(data)
    for entry, (_, tensor) in zip(entries, tensors, strict=True):
        raw = tensor.view(-1).view(torch.uint8)
        target[entry.start : entry.start + entry.num_bytes].copy_(raw)
        padded = -(-entry.num_bytes // ALIGNMENT) * ALIGNMENT
        data[entry.start + entry.num_bytes : entry.start + padded] = 0
    return Bucket(entries, data)


def checksum(bucket: Bucket) -> str:
    """Returns the checksum of names, types, shapes and bytes."""
    digest = xxhash.xxh3_128(repr(bucket.entries).encode())
    digest.update(bucket.data.data)
    return str(digest.hexdigest())


def in_buckets(
    named: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors into lists of at most `bucket_bytes`; a larger tensor stands alone."""
    group: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        own = tensor.numel() * tensor.element_size()
        if group and size + own > bucket_bytes:
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += own
    if group:
        yield group


def verified(bucket: Bucket, expected: str, version: int) -> Bucket:
    """Returns the bucket. Errors: TrainingError where its checksum is another."""
    if (actual := checksum(bucket)) != expected:
        raise TrainingError(
            f"weights {version} arrived damaged: a bucket has the checksum {actual}, not {expected}"
        )
    return bucket


@torch.no_grad()
def copy_into(model: Any, buckets: Iterable[Bucket], version: int) -> None:
    """Copy weights into a model's trained tensors of these names.

    Errors: TrainingError where the names or shapes are not those of the model's trained tensors.
    """
    parameters = trained_tensors(model)
    missing = set(parameters)
    for bucket in buckets:
        for name, tensor in bucket.tensors():
            own = parameters.get(name)
            if own is None or own.shape != tensor.shape:
                raise TrainingError(
                    f"weights {version}: {name} {tuple(tensor.shape)} is not a trained tensor "
                    "of the sampler's model"
                )
            own.copy_(tensor)
            missing.discard(name)
    if missing:
        raise TrainingError(f"weights {version} lack {sorted(missing)[0]} of the sampler's model")
