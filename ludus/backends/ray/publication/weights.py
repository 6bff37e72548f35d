"""Weights on their way from the learner to the samplers, in buckets.

Each bucket carries a checksum, and a publication is identified by its version and the checksums of
all. Two transports bring buckets:

    Ray's object store    on one node, a sampler reads a bucket in shared memory, without a copy;
                          between nodes Ray transfers it once a node
    broadcast             `broadcast.py`: from GPU to GPU by NCCL, between CPUs by gloo
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.errors import TrainingError
from ludus.train.checkpoint.state import trained_tensors

# Arrays from Ray's object store are read-only, and `Bucket.tensors` only reads them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

ALIGNMENT = 64
"""Bytes at which each tensor of a bucket begins."""

CHUNK = 1 << 22
"""Words whose products a GPU's checksum keeps at once (32 MiB)."""


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
    """Tensors in one array of bytes: of the host, or of a GPU."""

    entries: list[Entry]
    data: NDArray[np.uint8] | Tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, which share the bucket's memory: read them only."""
        for entry in self.entries:
            raw = self.data[entry.start : entry.start + entry.num_bytes]
            if not entry.num_bytes:
                raw = torch.empty(0, dtype=torch.uint8)
            flat = raw if isinstance(raw, Tensor) else torch.from_numpy(raw)
            yield entry.name, flat.view(getattr(torch, entry.dtype)).view(entry.shape)


@dataclass(frozen=True, slots=True)
class Weights:
    """A publication: references to its buckets, and their checksums.

    A broadcast leaves no buckets, and a `fault` where it failed.
    """

    version: int
    buckets: list[Any]
    checksums: list[str]
    fault: str = ""

    @property
    def is_stored(self) -> bool:
        """True if the object store has the buckets."""
        return len(self.buckets) == len(self.checksums) and not self.fault

    def put(self, bucket: Bucket) -> None:
        """Put a bucket into the object store, which loses it with this process."""
        import ray

        self.checksums.append(checksum(bucket))
        self.buckets.append(ray.put(bucket))

    @property
    def checksum(self) -> str:
        return xxhash.xxh3_128_hexdigest("".join(self.checksums).encode())


def to_bucket(
    named: Iterable[tuple[str, Tensor]], space: NDArray[np.uint8] | None = None
) -> Bucket:
    """Copy tensors into a bucket; into `space`, if that is large enough."""
    tensors = dict(named)
    entries, size = layout(tensors)
    if space is None or len(space) < size:
        space = np.empty(size, np.uint8)
    data = space[:size]
    fill(torch.from_numpy(data), entries, tensors)
    return Bucket(entries, data)


def layout(tensors: Mapping[str, Tensor]) -> tuple[list[Entry], int]:
    """Returns the places of tensors in a bucket, and its bytes."""
    entries: list[Entry] = []
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(tensor.shape), end, size))
        end += _padded(size)
    return entries, end


def fill(data: Tensor, entries: Iterable[Entry], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors to their places in a bucket's bytes; the gaps become 0."""
    for entry in entries:
        end = entry.start + entry.num_bytes
        raw = tensors[entry.name].detach().contiguous().view(-1).view(torch.uint8)
        data[entry.start : end].copy_(raw)
        data[end : entry.start + _padded(entry.num_bytes)] = 0


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def checksum(bucket: Bucket) -> str:
    """Returns the checksum of names, types, shapes and bytes.

    Bytes of the host are hashed by XXH3; those of a GPU are summed there (`word_sums`), without a
    copy to the host.
    """
    digest = xxhash.xxh3_128(repr(bucket.entries).encode())
    data = bucket.data
    if isinstance(data, Tensor):
        digest.update(data.numpy().data if data.device.type == "cpu" else word_sums(data))
    else:
        digest.update(data.data)
    return str(digest.hexdigest())


def word_sums(data: Tensor) -> bytes:
    """Returns two sums modulo 2^64 of the words w_i of 8 bytes: of w_i, and of w_i (2 i + 1).

    An odd factor has an inverse modulo 2^64, so a change of one word always changes both sums; two
    words in each other's place change the second unless 2^63 divides their difference times their
    distance. Sums of integers do not depend on their order, so all devices agree.
    """
    words = data.view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        end = start + len(part)
        odd = torch.arange(2 * start + 1, 2 * end, 2, dtype=torch.int64, device=data.device)
        sums += torch.stack([part.sum(), (part * odd).sum()])
    return bytes(sums.cpu().numpy().tobytes())


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
def own_memory(model: Any) -> None:
    """Copy a model's trained tensors out of the file that they are mapped from.

    Otherwise the kernel does it page by page, when the first weights are copied into them.
    """
    for tensor in trained_tensors(model).values():
        tensor.data = tensor.data.clone()


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
