"""Per-slot state of the turns being decoded, in arrays; one decode slot per turn.

The bookkeeping of a decode step is a few array operations, independent of the number of turns.

Shape suffixes: S slots, W the most tokens a turn may sample, B blocks of the longest row, K stop
ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ludus.core.versions import Run
from ludus.models.kv_cache.paging import BLOCK, Block
from ludus.models.kv_cache.step_inputs import StepInputs
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.uniforms import fill_uniforms

Index = NDArray[np.intp]


@dataclass(slots=True)
class DecodeSlots:
    """Arrays indexed by slot; they grow on demand."""

    last_ids: NDArray[np.int64]
    """The turn's newest token: sampled, its keys and values not computed yet."""
    positions: NDArray[np.int32]
    """Position of that token in the conversation."""
    num_sampled: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    has_stop_strings: NDArray[np.bool_]
    has_grammar: NDArray[np.bool_]
    tables: NDArray[np.int32]  # [S, B]
    uniforms: NDArray[np.float64]  # [S, W]
    token_ids: NDArray[np.int64]  # [S, W]
    logprobs: NDArray[np.float64]  # [S, W]
    versions: NDArray[np.int64]  # [S, W]
    stop_ids: NDArray[np.int64]  # [S, K], -1: none
    free: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls) -> DecodeSlots:
        return cls(
            np.zeros(0, np.int64),
            np.zeros(0, np.int32),
            np.zeros(0, np.int32),
            np.zeros(0, np.int32),
            np.zeros(0, np.bool_),
            np.zeros(0, np.bool_),
            np.zeros((0, 0), np.int32),
            np.zeros((0, 0)),
            np.zeros((0, 0), np.int64),
            np.zeros((0, 0)),
            np.zeros((0, 0), np.int64),
            np.full((0, 0), -1, np.int64),
        )

    def acquire(self, params: SamplingParams) -> int:
        """Assign a slot to a turn. The turn's random numbers depend on its seed alone.

        Errors: ValueError and OverflowError for numbers that `check_turn` refuses; no slot is then
        assigned.
        """
        width = params.max_tokens
        uniforms = np.empty(width)
        fill_uniforms(params.seed, uniforms)
        stops = np.array(params.stop_token_ids, np.int64)
        self._grow(width, len(stops))
        slot = self.free.pop()
        self.num_sampled[slot] = 0
        self.max_tokens[slot] = width
        self.has_stop_strings[slot] = bool(params.stop)
        self.has_grammar[slot] = params.grammar is not None
        self.uniforms[slot, :width] = uniforms
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stops)] = stops
        return slot

    def set_table(self, slot: int, blocks: list[Block], position: int) -> None:
        """Set the blocks that the turn reads, and the position of its newest token."""
        if len(blocks) > self.tables.shape[1]:
            self.tables = _enlarged(self.tables, (len(self.tables), 2 * len(blocks)), 0)
        self.tables[slot, : len(blocks)] = [block.index for block in blocks]
        self.positions[slot] = position

    def step_inputs(self, slots: Index) -> StepInputs:
        """Returns the inputs of a decode step: the newest token of each slot."""
        positions = self.positions[slots]
        rows = np.arange(len(slots), dtype=np.int32)
        tables = self.tables[slots, : int(positions.max()) // BLOCK + 1]
        writes = tables[rows, positions // BLOCK] * np.int32(BLOCK) + positions % np.int32(BLOCK)
        return StepInputs(self.last_ids[slots], positions, rows, rows, writes, tables, rows)

    def record(
        self,
        slots: Index,
        token_ids: NDArray[np.int64],
        logprobs: NDArray[np.float64],
        policy_version: int,
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Append a token to each slot, sampled by the weights of `policy_version`.

        Returns masks of stop ids and of reached `max_tokens`.
        """
        number = self.num_sampled[slots]
        self.token_ids[slots, number] = token_ids
        self.logprobs[slots, number] = logprobs
        self.versions[slots, number] = policy_version
        self.last_ids[slots] = token_ids
        self.positions[slots] += 1
        self.num_sampled[slots] = number + 1
        stopped = (self.stop_ids[slots] == token_ids[:, None]).any(axis=1)
        return stopped, number + 1 >= self.max_tokens[slots]

    def sampled_ids(self, slot: int) -> list[int]:
        ids: list[int] = self.token_ids[slot, : self.num_sampled[slot]].tolist()
        return ids

    def sampled_logprobs(self, slot: int) -> list[float]:
        logprobs: list[float] = self.logprobs[slot, : self.num_sampled[slot]].tolist()
        return logprobs

    def sampled_runs(self, slot: int) -> list[Run]:
        """(version, number of tokens) of the slot's tokens, in order."""
        versions = self.versions[slot, : self.num_sampled[slot]]
        if versions[0] == versions[-1]:  # they never decrease
            return [(int(versions[0]), len(versions))]
        starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
        return [(int(versions[a]), b - a) for a, b in pairwise(starts)]

    def _grow(self, width: int, stops: int) -> None:
        """Make room for a free slot, `width` tokens and `stops` stop ids."""
        if self.free and width <= self.uniforms.shape[1] and stops <= self.stop_ids.shape[1]:
            return
        old = len(self.positions)
        size = old if self.free else 2 * (old + 1)
        self.free.extend(range(size - 1, old - 1, -1))
        width = max(width, self.uniforms.shape[1])
        widths = {
            "tables": self.tables.shape[1],
            "stop_ids": max(stops, self.stop_ids.shape[1]),
            **dict.fromkeys(("uniforms", "token_ids", "logprobs", "versions"), width),
        }
        for name in (f.name for f in fields(self) if f.name != "free"):
            array = getattr(self, name)
            shape = (size, widths[name]) if name in widths else (size,)
            if shape != array.shape:
                setattr(self, name, _enlarged(array, shape, -1 if name == "stop_ids" else 0))


def _enlarged(array: NDArray, shape: tuple[int, ...], filler: int) -> NDArray:  # type: ignore[type-arg]
    larger = np.full(shape, filler, array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger
