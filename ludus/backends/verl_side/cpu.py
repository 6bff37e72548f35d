"""verl on a CPU, through its hooks for other platforms. Never loaded where there is a GPU.

verl imports this module in each of its processes (`VERL_USE_EXTERNAL_MODULES`). It registers the
platform `cpu` (`VERL_PLATFORM`). verl's training engines are taken as those for CUDA, which run on
any device (`VERL_ENGINE_DEVICE`). Four libraries are adapted: see `host_side.cpu`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from ludus.backends.host_side.cpu import (
    CPU,
    device_functions,
    find_cpu_build,
    keep_weights_unpacked,
    name_gloo_once,
    never_pin,
)


class _Device(ModuleType):
    """`torch.cpu`, with the functions of `torch.cuda` that verl calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _device_module() -> _Device:
    module = _Device("ludus_verl_cpu")
    for name, function in device_functions().items():
        setattr(module, name, function)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """A CPU as one device. Ray counts it as a GPU, on which verl places its workers."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return CPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The allocator has no settings."""

    def empty_cache(self) -> None:
        """The allocator has no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """False: weights go to the sampler through shared memory."""
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {"VLLM_CPU_KVCACHE_SPACE": "1"}

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No profiler."""

    def profiler_stop(self) -> None:
        """No profiler."""

    def cudart(self) -> None:
        return None


if not torch.cuda.is_available():
    find_cpu_build()
    name_gloo_once()
    never_pin()
    if "vllm" in sys.modules:  # the processes of the sampler
        keep_weights_unpacked()
