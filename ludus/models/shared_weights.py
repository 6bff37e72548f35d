"""A model's weights in memory that processes of one machine share: a file without a name."""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64


class SharedWeights:
    """The parameters and buffers of a model, one after the other, in its own types.

    The owner writes while nobody reads. Both sides have models of the same shape.

    Args:
        fd: of the owner's file; None: this side is the owner.
    """

    def __init__(self, model: Any, fd: int | None = None) -> None:
        self._model = model
        places, size = _layout(model)
        with ExitStack() as stack:
            if fd is None:
                file = stack.enter_context(tempfile.TemporaryFile(prefix="ludus-weights-"))
                file.truncate(size)
                fd = file.fileno()
            self.fd = os.dup(fd)
            self._memory = mmap.mmap(fd, size)
        self._views = [
            torch.frombuffer(
                self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=start
            ).view(tensor.shape)
            for tensor, start in places
        ]

    def close(self) -> None:
        """Close the file: no further process can open it. The memory stays."""
        os.close(self.fd)

    @torch.no_grad()
    def write(self) -> None:
        """Copy the model's weights into the memory."""
        for tensor, view in zip(_tensors(self._model), self._views, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def read(self) -> None:
        """Copy the memory into the model's weights."""
        for tensor, view in zip(_tensors(self._model), self._views, strict=True):
            tensor.copy_(view)


def weight_bytes(model: Any) -> int:
    """Returns the bytes of a model's parameters and buffers."""
    return _layout(model)[1]


def _tensors(model: Any) -> list[Tensor]:
    """Each tensor once, also where two modules share it."""
    unique = {tensor.data_ptr(): tensor for tensor in model.state_dict().values() if tensor.numel()}
    return list(unique.values())


def _layout(model: Any) -> tuple[list[tuple[Tensor, int]], int]:
    places, end = [], 0
    for tensor in _tensors(model):
        places.append((tensor, end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, end
