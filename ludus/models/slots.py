"""The key-value cache of the in-process engine: one slot an episode, kept between its turns.

Shape suffixes: S slots, R rows of the current forward pass, L new tokens of a row (padded on the
left), T cached positions, H key-value heads, D head size, N the valid new tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 256  # positions by which storage grows: episodes rarely need the whole context


@dataclass(slots=True)
class _Plan:
    """Where the forward pass under way writes and reads."""

    slots_R: Tensor
    contiguous: bool  # the rows are slots 0..R-1, in order: read a view, not a copy
    valid_RL: Tensor | None  # None: no row is padded
    slot_N: Tensor
    position_N: Tensor
    length: int  # cached positions that attention reads


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one decoder layer, [S, H, T, D]."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_zeros((0, key_states.shape[1], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((0, value_states.shape[1], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [R, H, L, D]; return those of all positions so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._grown(self.keys)
        self.values = self._grown(self.values)
        self._write(self.keys, key_states)
        self._write(self.values, value_states)
        return self._read(self.keys), self._read(self.values)

    def _write(self, stored: Tensor, states: Tensor) -> None:
        plan = self.cache.plan
        states_RLHD = states.transpose(1, 2)
        stored[plan.slot_N, :, plan.position_N] = (
            states_RLHD.flatten(0, 1) if plan.valid_RL is None else states_RLHD[plan.valid_RL]
        )

    def _read(self, stored: Tensor) -> Tensor:
        plan = self.cache.plan
        if plan.contiguous:
            return stored[: len(plan.slots_R), :, : plan.length]
        return stored[:, :, : plan.length].index_select(0, plan.slots_R)

    def _grown(self, stored: Tensor) -> Tensor:
        slots, heads, length, size = stored.shape
        if slots >= self.cache.num_slots and length >= self.cache.capacity:
            return stored
        grown = stored.new_zeros((self.cache.num_slots, heads, self.cache.capacity, size))
        grown[:slots, :, :length] = stored
        return grown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.plan.length, 0

    def get_seq_length(self) -> int:
        return self.cache.plan.length

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """A transformers cache whose rows are episodes that come and go.

    Before each forward pass `prepare` says which slots take part, and which positions are new. The
    returned mask goes to the model as its 4D attention mask.
    """

    plan: _Plan

    def __init__(self, num_layers: int) -> None:
        self.num_slots = 0
        self.capacity = 0
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])

    def prepare(
        self, slots: list[int], starts: list[int], counts: list[int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Plan a pass that adds `counts[r]` tokens to slot `slots[r]` from position `starts[r]` on.

        Returns positions_RL (0 where padded) and mask_R1LT (bool; a padded query sees position 0,
        so that its softmax is defined: its result is never used).
        """
        width = max(counts)
        length = max(s + c for s, c in zip(starts, counts, strict=True))
        self.num_slots = max(self.num_slots, max(slots) + 1)
        self.capacity = max(self.capacity, -(-length // GROWTH) * GROWTH)
        slots_R = torch.tensor(slots, device=device)
        starts_R = torch.tensor(starts, device=device)
        slots_RL = slots_R[:, None].expand(-1, width)
        padding = [width - count for count in counts]
        positions_RL = starts_R[:, None] + torch.arange(width, device=device)
        valid_RL = None
        if any(padding):
            positions_RL -= torch.tensor(padding, device=device)[:, None]
            valid_RL = positions_RL >= starts_R[:, None]
            positions_RL = torch.where(valid_RL, positions_RL, 0)
        self.plan = _Plan(
            slots_R=slots_R,
            contiguous=slots == list(range(len(slots))),
            valid_RL=valid_RL,
            slot_N=slots_RL.flatten() if valid_RL is None else slots_RL[valid_RL],
            position_N=positions_RL.flatten() if valid_RL is None else positions_RL[valid_RL],
            length=length,
        )
        mask_R1LT = torch.arange(length, device=device) <= positions_RL[:, None, :, None]
        return positions_RL, mask_R1LT


def cached_logits(
    model: Any,
    cache: SlotCache,
    slots: list[int],
    starts: list[int],
    new_tokens: list[list[int]],
    device: torch.device,
) -> Tensor:
    """Logits [R, 1, V] after the last new token of each row; the cache holds the new tokens too.

    Args:
        slots: the cache's slot of each row.
        starts: how many tokens of each row the cache holds already.
    """
    counts = [len(ids) for ids in new_tokens]
    width = max(counts)
    positions_RL, mask_R1LT = cache.prepare(slots, starts, counts, device)
    ids_RL = torch.tensor([[0] * (width - len(ids)) + ids for ids in new_tokens], device=device)
    logits_R1V: Tensor = model(
        input_ids=ids_RL,
        attention_mask=mask_R1LT,
        position_ids=positions_RL,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits_R1V
