"""Decoder protocol: computes logits over a paged KV cache."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ludus.models.kv_cache.step_inputs import StepInputs


def check_inputs(inputs: StepInputs, num_embeddings: int, num_positions: int | None = None) -> None:
    """Check ids and positions: native code and CUDA kernels do not.

    Errors: IndexError for an id or a position that the model does not have.
    """
    for name, values, limit in (
        ("token id", inputs.ids, num_embeddings),
        ("position", inputs.positions, num_positions),
    ):
        if limit is not None and len(values):
            low, high = int(values.min()), int(values.max())
            if low < 0 or high >= limit:
                raise IndexError(
                    f"{name} {low if low < 0 else high} in a decoder's inputs: the model has "
                    f"0 to {limit - 1}"
                )


class Decoder(Protocol):
    """Computes forward passes and owns the KV-cache storage; the scheduler assigns the blocks.

    Shape suffixes: R rows, V vocabulary.
    """

    name: str
    """For logs and messages."""

    mixed_batches: bool
    """True if prefill and decode rows cost no more in one pass than in two."""

    batch_invariant: bool
    """True if a token's results are bit-identical in any batch."""

    max_blocks: int | None
    """Capacity of the KV cache in blocks; None: unlimited. See `capacity`."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the decoder's own weights, which change in `refresh` only; 0: it reads the
        model's parameters in place."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block's keys and values in all layers."""

    def reserve(self, num_blocks: int) -> None:
        """Extend the storage to `num_blocks`; stored values are kept."""

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a block to another block, in all layers."""

    def forward(self, inputs: StepInputs) -> Tensor:
        """Returns logits [R, V] of the rows' output tokens; valid until the next call.

        Errors: IndexError for an id or a position that the model does not have.
        """

    def refresh(self) -> None:
        """Compute with the model's present weights from now on.

        Weights of the decoder's own are copied from the model's.
        """

    def limit_windows(self, most: int | None) -> None:
        """Let layers with a sliding window attend to at most `most` positions, for a trial pass;
        None: to those of their own window."""

    def clear(self) -> None:
        """Free the KV-cache storage."""
