"""A pass as padded rows, for attention in torch, and its keys and values by slot.

Shape suffixes: N tokens of the pass, R rows with new tokens, L new tokens of the longest (others
are padded on the left), T positions of the longest, W writes, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.models.kv_cache.paging import BLOCK
from ludus.models.kv_cache.step_inputs import StepInputs


@dataclass(slots=True)
class PaddedInputs:
    """Where a pass's tokens lie in padded rows, what they see and where they are stored.

    A padded query sees position 0, so that its softmax is defined; its result is never used.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    place_N: Tensor
    """Each token's index in the flattened rows."""
    slots_RT: Tensor
    mask_R1LT: Tensor
    write_tokens_W: Tensor
    write_places_W: Tensor
    write_slots_W: Tensor
    output_rows: Tensor
    output_columns: Tensor

    @classmethod
    def of(cls, batch: StepInputs, device: torch.device) -> PaddedInputs:
        """Lay a pass out."""
        rows, start_R, row_N, count_R = np.unique(
            batch.rows, return_index=True, return_inverse=True, return_counts=True
        )
        width = int(count_R.max())
        column_N = width - count_R[row_N] + np.arange(len(row_N)) - start_R[row_N]
        place_N = row_N * width + column_N
        ids_RL = np.zeros((len(rows), width), np.int64)
        ids_RL.reshape(-1)[place_N] = batch.ids
        positions_RL = np.zeros((len(rows), width), np.int64)
        positions_RL.reshape(-1)[place_N] = batch.positions
        position_T = np.arange(int(batch.positions.max()) + 1)
        tables = batch.tables[rows].astype(np.int64)
        slots_RT = BLOCK * tables[:, position_T // BLOCK] + position_T % BLOCK
        positions = torch.from_numpy(positions_RL).to(device)
        seen_T = torch.arange(len(position_T), device=device)

        def moved(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        return cls(
            ids_RL=moved(ids_RL),
            positions_RL=positions,
            place_N=moved(place_N),
            slots_RT=moved(slots_RT),
            mask_R1LT=seen_T <= positions[:, None, :, None],
            write_tokens_W=moved(batch.write_tokens),
            write_places_W=moved(place_N[batch.write_tokens]),
            write_slots_W=moved(batch.write_slots),
            output_rows=moved(row_N[batch.outputs]),
            output_columns=moved(column_N[batch.outputs]),
        )


class Store(Protocol):
    """Keys or values of one layer, by slot."""

    num_slots: int
    """For how many slots it must have room when it is next written to."""

    def write(self, states_NHD: Tensor, slots_W: Tensor, /) -> None:
        """Store states in slots."""
        ...

    def read(self, slots_RT: Tensor, /) -> Tensor:
        """[R, H, T, D]"""
        ...

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` slots from `source` on to `target` on."""
        ...


class SlotStore:
    """Keys or values of one layer, [slots, H, D]."""

    def __init__(self) -> None:
        self.stored: Tensor | None = None
        self.num_slots = 0

    def write(self, states_NHD: Tensor, slots_W: Tensor) -> None:
        """Store states in slots."""
        self._grow(states_NHD)
        assert self.stored is not None
        self.stored[slots_W] = states_NHD

    def read(self, slots_RT: Tensor) -> Tensor:
        """[R, H, T, D]"""
        assert self.stored is not None
        return self.stored[slots_RT].transpose(1, 2)

    @torch.inference_mode()
    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` slots from `source` on to `target` on."""
        if self.stored is not None:
            self._grow(self.stored)
            self.stored[target : target + count] = self.stored[source : source + count].clone()

    def _grow(self, like: Tensor) -> None:
        old = self.stored
        if old is None or len(old) < self.num_slots:
            grown = like.new_zeros((self.num_slots, *like.shape[1:]))
            if old is not None:
                grown[: len(old)] = old
            self.stored = grown
