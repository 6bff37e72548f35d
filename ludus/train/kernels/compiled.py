"""torch.compile for the decoder's layers, in training passes only.

The in-process sampler runs the same modules with changing shapes, which would recompile all the
time. So the compiled calls are active during a training pass only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ludus.telemetry.logs import get_logger
from ludus.train.kernels.logprobs import backbone

log = get_logger(__name__)

BACKEND = "inductor"


class CompiledLayers:
    """The compiled calls of a model's layers; none without a C++ compiler."""

    def __init__(self, model: Any) -> None:
        self._calls: list[tuple[nn.Module, Any]] = []
        if not has_compiler():
            log.warning("learner.compile is off: no C++ compiler found (CXX, g++ or clang++)")
            return
        lists = [m for m in backbone(model).children() if isinstance(m, nn.ModuleList)]
        for layer in max(lists, key=len, default=nn.ModuleList()):
            self._calls.append(
                (layer, torch.compile(layer._call_impl, dynamic=True, backend=BACKEND))
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the layers compiled. `nn.Module.compile` sets the same attribute permanently."""
        for layer, call in self._calls:
            layer._compiled_call_impl = call
        try:
            yield
        finally:
            for layer, _ in self._calls:
                layer._compiled_call_impl = None


def has_compiler() -> bool:
    """True if inductor finds a C++ compiler."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return any(name and shutil.which(name) for name in names)
