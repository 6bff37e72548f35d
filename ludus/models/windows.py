"""Sliding windows of attention: what each layer sees, by the model's config, and its masks.

A token at position q sees positions p <= q with q - p < window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FULL, SLIDING = "full_attention", "sliding_attention"


class UnknownAttention(Exception):
    """A layer's attention is neither full nor a sliding window; the message gives the reason."""


def layer_windows(config: Any, context_length: int | None) -> list[int]:
    """Returns the window of each layer; 0: the layer sees the whole context.

    Args:
        config: of the text model.
        context_length: None: unknown, every window is shorter.

    Errors: UnknownAttention.
    """
    kinds = list(getattr(config, "layer_types", None) or [])
    window = int(getattr(config, "sliding_window", None) or 0)
    other = set(kinds) - {FULL, SLIDING}
    if other:
        raise UnknownAttention(f"it has layers of type {', '.join(sorted(other))}")
    if SLIDING in kinds and not window:
        raise UnknownAttention("it has sliding-window attention without a window")
    covered = not window or (context_length is not None and window >= context_length)
    narrow = 0 if covered else window
    if not kinds:
        return [narrow] * config.num_hidden_layers
    return [narrow if kind == SLIDING else 0 for kind in kinds]


def model_masks(
    config: Any, windows: Sequence[int], dtype: torch.dtype, mask: Callable[[int], Tensor]
) -> Tensor | dict[str, Tensor]:
    """Returns the argument `attention_mask` of a transformers model, by kind of layer where kinds
    differ.

    Args:
        windows: of the layers.
        dtype: of the model.
        mask: bool [R, 1, L, T] for a window, True where a query attends.
    """

    def convert(seen: Tensor) -> Tensor:
        if config._attn_implementation != "eager":
            return seen
        added = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return added.masked_fill_(~seen, torch.finfo(dtype).min)

    kinds = getattr(config, "layer_types", None)
    if not any(windows):
        return convert(mask(0))
    if not kinds:
        return convert(mask(windows[0]))
    by_kind = dict(zip(kinds, windows, strict=True))
    return {kind: convert(mask(window)) for kind, window in by_kind.items()}


@contextmanager
def narrowed(config: Any, window: int) -> Iterator[None]:
    """Limit the model's window to `window` tokens; transformers reads the config in each pass."""
    before = config.sliding_window
    config.sliding_window = min(window, before)
    try:
        yield
    finally:
        config.sliding_window = before
