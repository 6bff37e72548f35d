"""Stand-in for SGLang's kernels on a CPU without AMX; `make sglang` puts it into .venv-sglang.

SGLang imports names of this package at startup, and computes with torch where a CPU has no AMX. A
kernel that is called all the same raises. `torch.ops.sgl_kernel` stays empty, so that SGLang finds
no CPU kernels.
"""

from collections.abc import Callable
from typing import Any

import torch

if not hasattr(torch._C._cpu, "_is_amx_tile_supported"):  # torch 2.13 has no such function
    torch._C._cpu._is_amx_tile_supported = lambda: False


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not available on this CPU")

    return kernel
