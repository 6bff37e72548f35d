"""Recognises errors that mean a lack of memory."""

from __future__ import annotations

import torch

_TEXTS = (
    "not enough memory",  # torch's CPU allocator
    "can't allocate memory",
    "out of memory",  # CUDA outside of torch's allocator
    "status_alloc_failed",  # cuBLAS, cuDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means out of memory: on a GPU, in torch's CPU allocator, in Python."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)
