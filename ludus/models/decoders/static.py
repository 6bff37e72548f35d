"""The decoder for GPUs: decode steps of a few fixed shapes, replayed as CUDA graphs.

A step of one token a row is padded to a bucket (rows, blocks of a row, groups, rows and blocks of a
group). A bucket that comes back is captured as a CUDA graph and replayed from then on; up to GRAPHS
of them are kept. Without CUDA the same code runs as it is. What rows share is read once for all of
them (`cascade`). Prompts are computed as `lean` does.

The model's own parameters are read where they are: weights that change in place need nothing, and
one that is replaced is seen at the next `refresh`, which then drops the graphs. Until then a graph
keeps the memory of the old one and reads that.

Keys and values have the room that was ever needed, up to `max_blocks`, and keep it between
rollouts, for the graphs hold its addresses. The sampler makes room in what is full.

Shape suffixes as in lean.py, and: B rows, O blocks of a row's own, P groups, M rows of a group,
S blocks that they share, G query heads of a key-value head, T positions.
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

from ludus.models.decoders.lean import LeanDecoder
from ludus.models.decoders.llama import Llama
from ludus.models.kv_cache.paging import BLOCK
from ludus.models.kv_cache.step_inputs import StepInputs
from ludus.models.kv_cache.shared_prefix import (
    Groups,
    Partial,
    Shared,
    bucket,
    merged,
    of_rows,
    partial,
)

GRAPHS = 32
"""The most graphs kept; the one that was not used for longest goes first."""

MEMORY = 0.5
"""Of what is free on the device at the start, for keys and values. The learner has the rest."""


Array = TypeVar("Array")


class Sizes(NamedTuple):
    """A bucket."""

    rows: int
    own: int
    groups: int
    members: int
    shared: int


class Inputs(NamedTuple, Generic[Array]):
    """What a step is told. What fills a bucket up writes to the spare block and reads that."""

    ids_B: Array
    positions_B: Array
    slots_B: Array
    """Where keys and values go."""
    own_BO: Array
    """Blocks that a row reads by itself."""
    lengths_B: Array
    """How many of their positions it sees."""
    places_B: Array
    """A row's place in the flattened groups; -1: in none."""
    rows_PM: Array
    shared_PS: Array
    """Blocks that a group reads."""
    lengths_P: Array


class BlockStore:
    """Keys or values of one layer, [K, slots, D]: a head's positions lie together."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.stored: Tensor | None = None
        self.num_slots = 0

    def write(self, states_NKD: Tensor, slots_W: Tensor, /) -> None:
        """Store states in slots."""
        states_NKD = states_NKD.to(self._dtype)
        self.grow(states_NKD)
        assert self.stored is not None
        self.stored.index_copy_(1, slots_W, states_NKD.transpose(0, 1))

    def read(self, slots_RT: Tensor, /) -> Tensor:
        """[R, K, T, D]"""
        assert self.stored is not None
        return self.stored[:, slots_RT].transpose(0, 1)

    def blocks(self, table: Tensor) -> Tensor:
        """The blocks that a table [R, B] names, [K * R, T, D]."""
        assert self.stored is not None
        heads, slots, size = self.stored.shape
        stored = self.stored.view(heads, slots // BLOCK, BLOCK * size)
        found = stored.index_select(1, table.flatten())
        return found.view(heads * len(table), -1, size)

    @torch.inference_mode()
    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` slots from `source` on to `target` on."""
        if self.stored is not None:
            self.grow(self.stored.transpose(0, 1))
            states = self.stored[:, source : source + count].clone()
            self.stored[:, target : target + count] = states

    def grow(self, like_NKD: Tensor) -> None:
        """Have room for all slots; what is stored stays."""
        old, (_, heads, size) = self.stored, like_NKD.shape
        if old is None or old.shape[1] < self.num_slots:
            grown = like_NKD.new_zeros(heads, self.num_slots, size)
            if old is not None:
                grown[:, : old.shape[1]] = old
            self.stored = grown


@dataclass(slots=True)
class Step:
    """The inputs of a bucket on the device, views of one tensor that is filled by one copy."""

    sizes: Sizes
    host: Tensor
    device: Tensor
    inputs: Inputs[Tensor]
    copied: Any = None
    """The event after which `host` may be written again."""
    graph: Any = None
    logits: Tensor | None = None
    runs: int = 0

    @classmethod
    def of(cls, sizes: Sizes, device: torch.device) -> Step:
        """Empty inputs."""
        rows, own, groups, members, shared = sizes
        size = rows * (own + 5) + groups * (members + shared + 1)
        cuda = device.type == "cuda"
        host = torch.zeros(size, dtype=torch.int64, pin_memory=cuda)
        there = torch.zeros(size, dtype=torch.int64, device=device)
        copied = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        return cls(sizes, host, there, _views(there, sizes), copied)

    def fill(self, inputs: Inputs[NDArray[Any]]) -> None:
        """Copy a step's inputs to the device."""
        if self.copied is not None:
            self.copied.synchronize()
        for part, array in zip(_views(self.host, self.sizes), inputs, strict=True):
            part.numpy()[:] = array
        self.device.copy_(self.host, non_blocking=True)
        if self.copied is not None:
            self.copied.record()


def _views(whole: Tensor, sizes: Sizes) -> Inputs[Tensor]:
    rows, own, groups, members, shared = sizes
    of_rows = [(rows,), (rows,), (rows,), (rows, own), (rows,), (rows,)]
    shapes = [*of_rows, (groups, members), (groups, shared), (groups,)]
    parts = torch.split_with_sizes(whole, [math.prod(shape) for shape in shapes])
    return Inputs(*[part.view(shape) for part, shape in zip(parts, shapes, strict=True)])


class StaticDecoder(LeanDecoder):
    """A `Decoder` of a model read by `ludus.models.decoders.llama.read`, fastest on a GPU.

    Args:
        max_blocks: the most blocks of keys and values; by default, on a GPU, what MEMORY holds.
    """

    def __init__(
        self, llama: Llama, *, autocast: bool = False, max_blocks: int | None = None
    ) -> None:
        self._device = llama.embedding.weight.device
        self._cuda = self._device.type == "cuda"
        self.name = "CUDA graphs" if self._cuda else "static"
        self._steps: OrderedDict[Sizes, Step] = OrderedDict()
        self._groups = Groups()
        self._dtype = torch.bfloat16 if autocast else llama.embedding.weight.dtype
        super().__init__(llama, autocast=autocast)
        self._sources = self._weights()
        if max_blocks is None and self._cuda:
            free, _ = torch.cuda.mem_get_info(self._device)
            max_blocks = int(MEMORY * free) // self.bytes_per_block - 1
        self.max_blocks = max_blocks

    @property
    def bytes_per_block(self) -> int:
        """Of keys and values, in all layers."""
        llama = self._llama
        return (
            2 * len(llama.layers) * llama.kv_heads * llama.head_dim * BLOCK * self._dtype.itemsize
        )

    @property
    def num_graphs(self) -> int:
        """Buckets that are replayed."""
        return sum(step.graph is not None for step in self._steps.values())

    def reserve(self, num_blocks: int) -> None:
        # One block more: rows that only fill a bucket up write there.
        if BLOCK * (num_blocks + 1) > self._num_slots:
            self._steps.clear()  # they hold the addresses of the storage before
            super().reserve(num_blocks + 1)

    def refresh(self) -> None:
        """Weights are read where they are; where one is somewhere else now, begin anew."""
        found = self._weights()
        if [_address(a) for a in found] != [_address(b) for b in self._sources]:
            self._steps.clear()
        self._sources = found

    def clear(self) -> None:
        """Nothing stored is read again. Where graphs hold its address, storage stays."""
        self._groups = Groups()
        if not self.num_graphs:
            self._steps.clear()
            self._num_slots = 0
            super().clear()

    def _store(self) -> BlockStore:
        return BlockStore(self._dtype)

    def _weights(self) -> list[Any]:
        """What graphs depend on: the model's tensors, and which adapters are on."""
        adapters = [
            (module.disable_adapters, tuple(module.active_adapters), module.merged)
            for module in self._llama.model.modules()
            if hasattr(module, "base_layer") and hasattr(module, "active_adapters")
        ]
        return [*[p.detach() for p in self._llama.model.parameters()], *adapters]

    @torch.inference_mode()
    def forward(self, batch: StepInputs) -> Tensor:
        if not _is_step(batch):
            return super().forward(batch)
        rows = len(batch.ids)
        sizes, inputs = self._inputs(batch)
        step = self._steps.pop(sizes, None) or Step.of(sizes, self._device)
        self._steps[sizes] = step
        if len(self._steps) > GRAPHS:
            self._steps.popitem(last=False)
        step.fill(inputs)
        step.runs += 1
        if step.graph is not None:
            step.graph.replay()
        elif self._cuda and step.runs == 2:  # what comes once is not worth a graph
            self._capture(step)
        else:
            step.logits = self._run(step)
        assert step.logits is not None
        return step.logits[:rows]

    def _capture(self, step: Step) -> None:
        """Record the step as a graph, and replay that."""
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            self._run(step)  # what is chosen or allocated at a first run must not be recorded
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Graphs run one after another, so they may share their memory.
        pool = next((other.graph.pool() for other in self._steps.values() if other.graph), None)
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step.logits = self._run(step)
        step.graph = graph
        graph.replay()

    def _run(self, step: Step) -> Tensor:
        """Logits [B, V] of the step's inputs."""
        inputs = step.inputs

        def attend(number: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
            with torch.autocast(self._device.type, enabled=False):
                return self._attend(number, q_BHD, k_BKD, v_BKD, inputs)

        # Casts may not be kept beyond a graph's capture.
        with torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._autocast, cache_enabled=False
        ):
            return self._logits(self._layers(inputs.ids_B, inputs.positions_B, attend))

    def _attend(
        self, number: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, inputs: Inputs[Tensor]
    ) -> Tensor:
        """Attention of one token a row, [B, H * D]; stores its keys and values."""
        keys, values = self._keys[number], self._values[number]
        assert isinstance(keys, BlockStore)
        assert isinstance(values, BlockStore)
        keys.write(k_BKD, inputs.slots_B)
        values.write(v_BKD, inputs.slots_B)
        rows, heads, size = q_BHD.shape
        q_BKGD = q_BHD.view(rows, self._llama.kv_heads, -1, size)
        scale = self._llama.attention_scale

        def over(q_RKXD: Tensor, tables: Tensor, lengths: Tensor) -> Partial:
            return partial(q_RKXD, keys.blocks(tables), values.blocks(tables), lengths, scale)

        part = over(q_BKGD, inputs.own_BO, inputs.lengths_B)
        members = inputs.rows_PM.shape[1]
        if members:
            q_PKXD = q_BKGD[inputs.rows_PM].transpose(1, 2).flatten(2, 3)  # X: M * G
            found = over(q_PKXD, inputs.shared_PS, inputs.lengths_P)
            place_B = inputs.places_B
            part = merged(part, tuple(of_rows(x, members, place_B) for x in found), place_B >= 0)
        sums_BKGD, weights_BKG1, _ = part
        return (sums_BKGD / weights_BKG1).to(q_BHD.dtype).reshape(rows, heads * size)

    def _inputs(self, batch: StepInputs) -> tuple[Sizes, Inputs[NDArray[Any]]]:
        """The bucket of a step, and its inputs."""
        whole_R = batch.positions // BLOCK
        groups = self._groups.of(batch.tables, whole_R)
        skipped_R = np.zeros(len(whole_R), np.int64)
        for group in groups:
            skipped_R[group.rows] = len(group.blocks)
        own = int((whole_R - skipped_R).max()) + 1
        sizes = _sizes(len(whole_R), own, groups)
        spare = self._num_slots // BLOCK - 1
        column_RO = skipped_R[:, None] + np.arange(sizes.own)
        own_RO = np.take_along_axis(
            batch.tables, np.minimum(column_RO, batch.tables.shape[1] - 1), axis=1
        )
        place_R, rows_PM, shared_PS, lengths_P = _laid_out(groups, sizes, len(whole_R), spare)
        lengths_R = batch.positions + 1 - BLOCK * skipped_R

        def fit(array: NDArray[Any], filler: int) -> NDArray[np.int64]:
            padded = np.full((sizes.rows, *array.shape[1:]), filler, np.int64)
            padded[: len(array)] = array
            return padded

        return sizes, Inputs(
            ids_B=fit(batch.ids, 0),
            positions_B=fit(batch.positions, 0),
            slots_B=fit(batch.write_slots, BLOCK * spare),
            own_BO=fit(own_RO, spare),
            lengths_B=fit(lengths_R, 1),
            places_B=fit(place_R, -1),
            rows_PM=rows_PM,
            shared_PS=shared_PS,
            lengths_P=lengths_P,
        )


def _is_step(batch: StepInputs) -> bool:
    """Whether the pass computes and stores one token of each row."""
    rows = np.arange(len(batch.tables))
    return all(
        len(part) == len(rows) and bool((part == rows).all())
        for part in (batch.rows, batch.write_tokens, batch.outputs)
    )


def _sizes(rows: int, own: int, groups: list[Shared]) -> Sizes:
    members = max((len(group.rows) for group in groups), default=0)
    shared = max((len(group.blocks) for group in groups), default=0)
    return Sizes(*[bucket(n) for n in (rows, own, len(groups), members, shared)])


def _laid_out(
    groups: list[Shared], sizes: Sizes, rows: int, spare: int
) -> tuple[NDArray[np.int64], ...]:
    """Each row's place in the flattened groups (-1: in none); the groups' rows, blocks, lengths.
    What fills up is row 0, and one position of the spare block."""
    place_R = np.full(rows, -1, np.int64)
    rows_PM = np.zeros((sizes.groups, sizes.members), np.int64)
    shared_PS = np.full((sizes.groups, sizes.shared), spare, np.int64)
    lengths_P = np.ones(sizes.groups, np.int64)
    for number, group in enumerate(groups):
        place_R[group.rows] = number * sizes.members + np.arange(len(group.rows))
        rows_PM[number, : len(group.rows)] = group.rows
        shared_PS[number, : len(group.blocks)] = group.blocks
        lengths_P[number] = BLOCK * len(group.blocks)
    return place_R, rows_PM, shared_PS, lengths_P


def _address(part: Any) -> Any:
    return (part.data_ptr(), part.dtype, part.shape) if isinstance(part, Tensor) else part
