"""GPU decoder: decode steps of a few fixed shapes, replayed as CUDA graphs.

A decode step (one token per row) is padded to a bucket: rows, own blocks per row, groups, rows and
blocks per group. At its second use a bucket is captured as a CUDA graph, then replayed; up to
MAX_GRAPHS buckets are kept. Without CUDA the same code runs eagerly. Blocks that rows share are
read once (`shared_prefix`). Prefill is computed by `LeanDecoder`.

Parameters are read in place, so in-place updates need no action. `refresh` detects replaced
parameters and drops the graphs. Until then a graph keeps and reads the old parameter. A
`SamplingCopy` is refreshed in place, so its graphs stay.

KV-cache storage grows on demand up to `max_blocks`. It persists between rollouts, because graphs
hold its addresses. The scheduler evicts blocks when it is full.

Shape suffixes as in lean.py, and: B rows, O own blocks of a row, P groups, M rows of a group,
S shared blocks, G query heads per key-value head, T positions.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.models.decoders.base import check_inputs
from ludus.models.decoders.lean import LeanDecoder
from ludus.models.decoders.parts import Llama
from ludus.models.decoders.sampling_copy import SamplingCopy
from ludus.models.kv_cache.padded import SlotStore
from ludus.models.kv_cache.paging import BLOCK
from ludus.models.kv_cache.shared_prefix import (
    PartialAttention,
    PrefixGroups,
    SharedPrefix,
    gather_rows,
    merge_attention,
    partial_attention,
    round_up,
)
from ludus.models.kv_cache.step_inputs import StepInputs

MAX_GRAPHS = 32
"""Limit of buckets kept; the least recently used is dropped first."""

MEMORY_FRACTION = 0.5
"""Share of the free device memory used for keys and values; the learner has the rest."""

Array = TypeVar("Array")


class Bucket(NamedTuple):
    """Padded sizes of a step."""

    rows: int
    own: int
    groups: int
    members: int
    shared: int


class BucketInputs(NamedTuple, Generic[Array]):
    """Inputs of a step, padded to a bucket. Padding writes to and reads from the spare block."""

    ids_B: Array
    positions_B: Array
    slots_B: Array
    """Cache slots of the new keys and values."""
    own_BO: Array
    """Blocks that only this row reads in this step."""
    lengths_B: Array
    """Number of positions attended to in these blocks."""
    places_B: Array
    """Index of the row in the flattened groups; -1: no group."""
    rows_PM: Array
    shared_PS: Array
    """Blocks that the rows of a group share."""
    lengths_P: Array


class BlockStore(SlotStore):
    """One layer's keys or values, [K, slots, D]; the positions of a head are contiguous."""

    slot_dim = 1

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def write(self, states_NKD: Tensor, slots_W: Tensor) -> None:
        states_NKD = states_NKD.to(self._dtype)
        self._grow(states_NKD)
        assert self.stored is not None
        self.stored.index_copy_(1, slots_W, states_NKD.transpose(0, 1))

    def read(self, slots_RT: Tensor) -> Tensor:
        assert self.stored is not None
        return self.stored[:, slots_RT].transpose(0, 1)

    def blocks(self, table: Tensor) -> Tensor:
        """Returns the blocks of a table [R, B] as [K * R, T, D]."""
        assert self.stored is not None
        heads, slots, size = self.stored.shape
        stored = self.stored.view(heads, slots // BLOCK, BLOCK * size)
        blocks = stored.index_select(1, table.flatten())
        return blocks.view(heads * len(table), -1, size)


@dataclass(slots=True)
class BucketStep:
    """A bucket's inputs on the device (views of one tensor, filled by one copy), and its graph."""

    bucket: Bucket
    host: Tensor
    device: Tensor
    inputs: BucketInputs[Tensor]
    copied: Any = None
    """CUDA event after which `host` may be overwritten."""
    graph: Any = None
    logits: Tensor | None = None
    runs: int = 0

    @classmethod
    def allocate(cls, bucket: Bucket, device: torch.device) -> BucketStep:
        rows, own, groups, members, shared = bucket
        size = rows * (own + 5) + groups * (members + shared + 1)
        cuda = device.type == "cuda"
        host = torch.zeros(size, dtype=torch.int64, pin_memory=cuda)
        on_device = torch.zeros(size, dtype=torch.int64, device=device)
        copied = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        return cls(bucket, host, on_device, _views(on_device, bucket), copied)

    def fill(self, inputs: BucketInputs[NDArray[Any]]) -> None:
        """Copy a step's inputs to the device."""
        if self.copied is not None:
            self.copied.synchronize()
        for view, array in zip(_views(self.host, self.bucket), inputs, strict=True):
            view.numpy()[:] = array
        self.device.copy_(self.host, non_blocking=True)
        if self.copied is not None:
            self.copied.record()


def _views(flat: Tensor, bucket: Bucket) -> BucketInputs[Tensor]:
    rows, own, groups, members, shared = bucket
    row_shapes = [(rows,), (rows,), (rows,), (rows, own), (rows,), (rows,)]
    shapes = [*row_shapes, (groups, members), (groups, shared), (groups,)]
    parts = torch.split_with_sizes(flat, [math.prod(shape) for shape in shapes])
    return BucketInputs(*[part.view(shape) for part, shape in zip(parts, shapes, strict=True)])


class StaticDecoder(LeanDecoder):
    """`Decoder` for GPUs of a model read by `ludus.models.decoders.llama.read`.

    Args:
        max_blocks: KV-cache capacity; default on a GPU: what MEMORY_FRACTION allows.
    """

    def __init__(
        self, llama: Llama, *, copy: SamplingCopy | None = None, max_blocks: int | None = None
    ) -> None:
        self._device = llama.embedding.weight.device
        self._cuda = self._device.type == "cuda"
        self.batch_invariant = False
        self.name = "CUDA graphs" if self._cuda else "static"
        self._steps: OrderedDict[Bucket, BucketStep] = OrderedDict()
        self._groups = PrefixGroups()
        super().__init__(llama, copy=copy)
        self._sources = self._graph_sources()
        if max_blocks is None and self._cuda:
            free, _ = torch.cuda.mem_get_info(self._device)
            max_blocks = int(MEMORY_FRACTION * free) // self.bytes_per_block - 1
        self.max_blocks = max_blocks

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return sum(step.graph is not None for step in self._steps.values())

    def reserve(self, num_blocks: int) -> None:
        # One more block: padding rows write there.
        if BLOCK * (num_blocks + 1) > self._num_slots:
            self._steps.clear()  # graphs hold the addresses of the old storage
            super().reserve(num_blocks + 1)

    def refresh(self) -> None:
        """As in `LeanDecoder`; drop the graphs if a parameter moved or adapters were switched."""
        super().refresh()
        sources = self._graph_sources()
        if [_address(a) for a in sources] != [_address(b) for b in self._sources]:
            self._steps.clear()
        self._sources = sources

    def limit_windows(self, most: int | None) -> None:
        super().limit_windows(most)
        self._steps.clear()  # graphs hold the windows

    def clear(self) -> None:
        """Drop cached keys and values. The storage stays if graphs hold its address."""
        self._groups = PrefixGroups()
        if not self.num_graphs:
            self._steps.clear()
            self._num_slots = 0
            super().clear()

    def _new_store(self) -> BlockStore:
        return BlockStore(self._factor_dtype)

    def _graph_sources(self) -> list[Any]:
        """Inputs that invalidate graphs: the tensors of the model, and the active adapters."""
        adapters = [
            (module.disable_adapters, tuple(module.active_adapters), module.merged)
            for module in self._llama.model.modules()
            if hasattr(module, "base_layer") and hasattr(module, "active_adapters")
        ]
        return [*[p.detach() for p in self._llama.model.parameters()], *adapters]

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        if not _is_decode_step(inputs):
            return super().forward(inputs)
        check_inputs(inputs, *self._limits)
        rows = len(inputs.ids)
        bucket, bucket_inputs = self._pad_to_bucket(inputs)
        step = self._steps.pop(bucket, None) or BucketStep.allocate(bucket, self._device)
        self._steps[bucket] = step  # the last is the most recently used
        if len(self._steps) > MAX_GRAPHS:
            self._steps.popitem(last=False)
        step.fill(bucket_inputs)
        step.runs += 1
        if step.graph is not None:
            step.graph.replay()
        elif self._cuda and step.runs == 2:  # a bucket used once is not worth a graph
            self._capture(step)
        else:
            step.logits = self._run(step)
        assert step.logits is not None
        return step.logits[:rows]

    def _capture(self, step: BucketStep) -> None:
        """Capture the step as a CUDA graph and replay it."""
        side_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side_stream):
            self._run(step)  # warm-up: kernel selection and allocations must not be captured
        torch.cuda.current_stream(self._device).wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        # Graphs run one at a time, so they can share a memory pool.
        pool = next((other.graph.pool() for other in self._steps.values() if other.graph), None)
        # Other threads may use the device during capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step.logits = self._run(step)
        step.graph = graph
        graph.replay()

    def _run(self, step: BucketStep) -> Tensor:
        """Logits [B, V] of the step's inputs."""
        inputs = step.inputs

        def attend(number: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
            return self._attend(number, q_BHD, k_BKD, v_BKD, inputs)

        return self._logits(self._layers(inputs.ids_B, inputs.positions_B, attend))

    def _attend(
        self, number: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, inputs: BucketInputs[Tensor]
    ) -> Tensor:
        """Attention of one token per row, [B, H * D]; stores its keys and values."""
        keys, values = self._keys[number], self._values[number]
        assert isinstance(keys, BlockStore)
        assert isinstance(values, BlockStore)
        keys.write(k_BKD, inputs.slots_B)
        values.write(v_BKD, inputs.slots_B)
        rows, heads, size = q_BHD.shape
        q_BKGD = q_BHD.view(rows, self._llama.kv_heads, -1, size)
        scale, cap = self._llama.attention_scale, self._llama.attention_softcap
        window = self._windows[number]

        def attend(
            q_RKXD: Tensor, tables: Tensor, lengths: Tensor, starts_RX: Tensor | None
        ) -> PartialAttention:
            stored = keys.blocks(tables), values.blocks(tables)
            return partial_attention(q_RKXD, *stored, lengths, scale, starts_RX, cap)

        starts_B1 = inputs.lengths_B[:, None] - window if window else None
        result = attend(q_BKGD, inputs.own_BO, inputs.lengths_B, starts_B1)
        members = inputs.rows_PM.shape[1]
        if members:
            q_PKXD = q_BKGD[inputs.rows_PM].transpose(1, 2).flatten(2, 3)  # X: M * G
            starts_PX = None
            if window:
                starts_PM = inputs.positions_B[inputs.rows_PM] + 1 - window
                starts_PX = starts_PM.repeat_interleave(q_BKGD.shape[2], 1)
            shared = attend(q_PKXD, inputs.shared_PS, inputs.lengths_P, starts_PX)
            place_B = inputs.places_B
            shared = tuple(gather_rows(x, members, place_B) for x in shared)
            result = merge_attention(result, shared, place_B >= 0)
        sums_BKGD, weights_BKG1, _ = result
        return (sums_BKGD / weights_BKG1).to(q_BHD.dtype).reshape(rows, heads * size)

    def _pad_to_bucket(self, inputs: StepInputs) -> tuple[Bucket, BucketInputs[NDArray[Any]]]:
        """Returns the bucket of a decode step, and its padded inputs."""
        num_full_R = inputs.positions // BLOCK
        groups = self._groups.update(inputs.tables, num_full_R)
        skipped_R = np.zeros(len(num_full_R), np.int64)
        for group in groups:
            skipped_R[group.rows] = len(group.blocks)
        own = int((num_full_R - skipped_R).max()) + 1
        members = max((len(group.rows) for group in groups), default=0)
        shared = max((len(group.blocks) for group in groups), default=0)
        sizes = (len(num_full_R), own, len(groups), members, shared)
        bucket = Bucket(*map(round_up, sizes))
        spare = self._num_slots // BLOCK - 1
        column_RO = skipped_R[:, None] + np.arange(bucket.own)
        own_RO = np.take_along_axis(
            inputs.tables, np.minimum(column_RO, inputs.tables.shape[1] - 1), axis=1
        )
        place_R, rows_PM, shared_PS, lengths_P = _pad_groups(groups, bucket, len(num_full_R), spare)
        lengths_R = inputs.positions + 1 - BLOCK * skipped_R

        def pad(array: NDArray[Any], filler: int) -> NDArray[np.int64]:
            padded = np.full((bucket.rows, *array.shape[1:]), filler, np.int64)
            padded[: len(array)] = array
            return padded

        return bucket, BucketInputs(
            ids_B=pad(inputs.ids, 0),
            positions_B=pad(inputs.positions, 0),
            slots_B=pad(inputs.write_slots, BLOCK * spare),
            own_BO=pad(own_RO, spare),
            lengths_B=pad(lengths_R, 1),
            places_B=pad(place_R, -1),
            rows_PM=rows_PM,
            shared_PS=shared_PS,
            lengths_P=lengths_P,
        )


def _is_decode_step(inputs: StepInputs) -> bool:
    """True if the inputs are one token per row, which is also stored."""
    rows = np.arange(len(inputs.tables))
    return all(
        len(part) == len(rows) and bool((part == rows).all())
        for part in (inputs.rows, inputs.write_tokens, inputs.outputs)
    )


def _pad_groups(
    groups: list[SharedPrefix], bucket: Bucket, rows: int, spare: int
) -> tuple[NDArray[np.int64], ...]:
    """Returns each row's index in the flattened groups (-1: no group), and the groups' rows, blocks
    and lengths. Padding is row 0, and one position of the spare block."""
    place_R = np.full(rows, -1, np.int64)
    rows_PM = np.zeros((bucket.groups, bucket.members), np.int64)
    shared_PS = np.full((bucket.groups, bucket.shared), spare, np.int64)
    lengths_P = np.ones(bucket.groups, np.int64)
    for number, group in enumerate(groups):
        place_R[group.rows] = number * bucket.members + np.arange(len(group.rows))
        rows_PM[number, : len(group.rows)] = group.rows
        shared_PS[number, : len(group.blocks)] = group.blocks
        lengths_P[number] = BLOCK * len(group.blocks)
    return place_R, rows_PM, shared_PS, lengths_P


def _address(part: Any) -> Any:
    return (part.data_ptr(), part.dtype, part.shape) if isinstance(part, Tensor) else part
