"""Padded layout of step inputs for attention in torch; key and value storage by slot.

Shape suffixes: N tokens, R rows with new tokens, L new tokens of the longest (others
are padded on the left), T positions of the longest, W writes, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.models.kv_cache.paging import BLOCK
from ludus.models.kv_cache.step_inputs import StepInputs


@dataclass(slots=True)
class PaddedInputs:
    """Step inputs in padded rows: token places, attention mask, cache slots.

    A padding query attends to position 0, so that its softmax is defined; its result is not used.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    place_N: Tensor
    """Index of each token in the flattened rows."""
    slots_RT: Tensor
    mask_R1LT: Tensor
    write_tokens_W: Tensor
    write_places_W: Tensor
    write_slots_W: Tensor
    output_rows: Tensor
    output_columns: Tensor
    masks: dict[int, Tensor] = field(default_factory=dict)
    """Masks of sliding windows, by their size."""

    @classmethod
    def of(cls, inputs: StepInputs, device: torch.device) -> PaddedInputs:
        """Pad step inputs on the left."""
        rows, start_R, row_N, count_R = np.unique(
            inputs.rows, return_index=True, return_inverse=True, return_counts=True
        )
        width = int(count_R.max())
        column_N = width - count_R[row_N] + np.arange(len(row_N)) - start_R[row_N]
        place_N = row_N * width + column_N
        ids_RL = np.zeros((len(rows), width), np.int64)
        ids_RL.reshape(-1)[place_N] = inputs.ids
        positions_RL = np.zeros((len(rows), width), np.int64)
        positions_RL.reshape(-1)[place_N] = inputs.positions
        position_T = np.arange(int(inputs.positions.max()) + 1)
        tables = inputs.tables[rows].astype(np.int64)
        slots_RT = BLOCK * tables[:, position_T // BLOCK] + position_T % BLOCK
        positions = torch.from_numpy(positions_RL).to(device)
        column_T = torch.arange(len(position_T), device=device)

        def to_device(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        return cls(
            ids_RL=to_device(ids_RL),
            positions_RL=positions,
            place_N=to_device(place_N),
            slots_RT=to_device(slots_RT),
            mask_R1LT=column_T <= positions[:, None, :, None],
            write_tokens_W=to_device(inputs.write_tokens),
            write_places_W=to_device(place_N[inputs.write_tokens]),
            write_slots_W=to_device(inputs.write_slots),
            output_rows=to_device(row_N[inputs.outputs]),
            output_columns=to_device(column_N[inputs.outputs]),
        )

    def mask(self, window: int = 0) -> Tensor:
        """Returns the mask [R, 1, L, T] of a sliding window; 0: of all positions."""
        if not window:
            return self.mask_R1LT
        if window not in self.masks:
            column_T = torch.arange(self.mask_R1LT.shape[3], device=self.mask_R1LT.device)
            near_R1LT = column_T > self.positions_RL[:, None, :, None] - window
            self.masks[window] = self.mask_R1LT & near_R1LT
        return self.masks[window]


class SlotStore:
    """One layer's keys or values, [slots, H, D]; grows to `num_slots` at the next write."""

    slot_dim = 0

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
        """Copy `count` slots, from slot `source` on, to slot `target` on."""
        if self.stored is not None:
            self._grow(self.stored.transpose(0, self.slot_dim))
            states = self.stored.narrow(self.slot_dim, source, count).clone()
            self.stored.narrow(self.slot_dim, target, count).copy_(states)

    def _grow(self, like_NHD: Tensor) -> None:
        old, (_, heads, size) = self.stored, like_NHD.shape
        num_old = 0 if old is None else old.shape[self.slot_dim]
        if num_old < self.num_slots:
            shape = (heads, self.num_slots) if self.slot_dim else (self.num_slots, heads)
            self.stored = like_NHD.new_zeros(*shape, size)
            if old is not None:
                self.stored.narrow(self.slot_dim, 0, num_old).copy_(old)
