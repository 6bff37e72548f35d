"""Decoder for any Hugging Face causal LM: the model's own forward pass over a paged KV cache.

The slower path. All layers must attend to every position or to a sliding window, and the model must
take positions and attention mask from the caller; `probe` verifies both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ludus.models.decoders.base import check_inputs
from ludus.models.decoders.sampling_copy import SamplingCopy
from ludus.models.kv_cache.padded import PaddedInputs, SlotStore
from ludus.models.kv_cache.paging import BLOCK
from ludus.models.kv_cache.step_inputs import StepInputs
from ludus.models.windows import model_masks


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one decoder layer."""

    is_sliding = False

    def __init__(self, cache: BlockCache) -> None:
        super().__init__()
        self.cache = cache
        self.stores = (SlotStore(), SlotStore())
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: storage grows at the first write."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [R, H, L, D]; returns those of all positions so far."""
        padded = self.cache.padded
        for store, states_RHLD in zip(self.stores, (key_states, value_states), strict=True):
            states_NHD = states_RHLD.transpose(1, 2).flatten(0, 1)
            store.num_slots = self.cache.num_slots
            store.write(states_NHD[padded.write_places_W], padded.write_slots_W)
        return self.stores[0].read(padded.slots_RT), self.stores[1].read(padded.slots_RT)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.padded.slots_RT.shape[1], 0

    def get_seq_length(self) -> int:
        return int(self.cache.padded.slots_RT.shape[1])

    def get_max_length(self) -> int:
        return -1


class BlockCache(Cache):  # type: ignore[misc]
    """A transformers cache whose reads and writes follow the current pass's `PaddedInputs`."""

    padded: PaddedInputs

    def __init__(self, num_layers: int) -> None:
        self.num_slots = 0
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])


class GenericDecoder:
    """A `Decoder` that calls the model's own module, or that of a copy.

    Args:
        windows: sliding windows of the layers (`layer_windows`); None: all layers attend to every
            position.
    """

    name = "generic"
    batch_invariant = False
    mixed_batches = False
    max_blocks: int | None = None

    def __init__(
        self,
        model: Any,
        copy: SamplingCopy | None = None,
        windows: Sequence[int] | None = None,
    ) -> None:
        self._model = model if copy is None else copy.module
        self._copy = copy
        self._num_layers = model.config.get_text_config().num_hidden_layers
        self._windows = list(windows or [0] * self._num_layers)
        self._most: int | None = None
        self._cache = BlockCache(self._num_layers)
        self._bytes_per_slot = 0

    @property
    def bytes_per_block(self) -> int:
        """Known after a first pass: the module decides on the shapes."""
        assert self._bytes_per_slot, "no pass yet"
        return BLOCK * self._bytes_per_slot

    @property
    def weight_bytes(self) -> int:
        return 0 if self._copy is None else self._copy.num_bytes

    def reserve(self, num_blocks: int) -> None:
        self._cache.num_slots = max(self._cache.num_slots, BLOCK * num_blocks)

    def copy(self, source: int, target: int, count: int) -> None:
        for layer in self._cache.layers:
            for store in layer.stores:
                store.num_slots = self._cache.num_slots
                store.copy(BLOCK * source, BLOCK * target, count)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        check_inputs(inputs, len(self._model.get_input_embeddings().weight))
        if self._model.training:
            self._model.eval()
        padded = PaddedInputs.of(inputs, next(self._model.parameters()).device)
        self._cache.padded = padded
        width = padded.ids_RL.shape[1]
        most = self._most
        windows = self._windows if most is None else [min(w, most) for w in self._windows]
        config, dtype = self._model.config.get_text_config(), self._model.dtype
        columns, column_of_output = torch.unique(padded.output_columns, return_inverse=True)
        last = columns.tolist() == [width - 1]
        logits_RCV: Tensor = self._model(
            input_ids=padded.ids_RL,
            attention_mask=model_masks(config, windows, dtype, padded.mask),
            position_ids=padded.positions_RL,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1 if last else columns,
        ).logits
        stores = [store.stored for layer in self._cache.layers for store in layer.stores]
        self._bytes_per_slot = sum(stored[0].nbytes for stored in stores)
        if not last and logits_RCV.shape[1] == width:  # the model ignores logits_to_keep
            return logits_RCV[padded.output_rows, padded.output_columns]
        return logits_RCV[padded.output_rows, column_of_output]

    def refresh(self) -> None:
        if self._copy is not None:
            self._copy.refresh()

    def limit_windows(self, most: int | None) -> None:
        self._most = most

    def clear(self) -> None:
        self._cache = BlockCache(self._num_layers)
