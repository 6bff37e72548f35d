"""What computes logits for the sampler: a decoder over blocks of keys and values."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ludus.models.kv_cache.step_inputs import StepInputs


class Decoder(Protocol):
    """Computes passes. It owns the storage of keys and values; which block is whose it is told.

    Shape suffixes: R rows, V vocabulary.
    """

    name: str
    """What it is, for people."""

    mixed_batches: bool
    """Whether rows of many new tokens and rows of one cost no more together than apart."""

    def reserve(self, num_blocks: int) -> None:
        """Have storage for so many blocks; what is stored stays."""
        ...

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a block to another, in all layers."""
        ...

    def forward(self, batch: StepInputs) -> Tensor:
        """Logits [R, V] of the rows' outputs; valid until the next call."""
        ...

    def refresh(self) -> None:
        """The model's weights, or its modules, have been replaced."""
        ...

    def clear(self) -> None:
        """Give storage back."""
        ...
