"""Trinity, verl 0.8 and vLLM 0.31 on a CPU. Never installed where there is a GPU.

Neither Trinity 0.6 nor verl 0.8 has a hook for other devices, and vLLM's worker is a process that
Trinity starts through vLLM. So each Python process starts with `start/sitecustomize.py`, which
watches for the modules below, and changes each as soon as it was imported:

    torch                       `torch.cpu` gets the functions of a device; those of `torch.cuda`
                                that Trinity calls do nothing; see also `host_side.cpu`
    vllm.v1.engine.async_llm    `start_weight_update` takes the argument of the vLLM that Trinity
                                was written for (0.23 at most)
    trinity...vllm_worker       the worker is vLLM's for CPUs (`cpu_worker`), and gets weights from
                                Trinity's synchronizer, which needs no NCCL
    verl.utils.device           the CPU's resource in Ray is a logical GPU; the back end is gloo
    verl.workers.engine.base    verl's engines for CUDA are taken: they run on any device
    verl.utils.attention_utils  unpadding in plain torch, as for an NPU: flash attention has no CPU
                                build
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _torch(torch: Any) -> None:
    from ludus.backends.host_side import cpu

    for name, function in cpu.device_functions().items():
        if not hasattr(torch.cpu, name) or name in ("current_device", "is_available"):
            setattr(torch.cpu, name, function)
    cpu.name_gloo_once()
    cpu.never_pin()
    torch.cuda.get_device_capability = lambda *_, **__: (0, 0)
    for name in ("synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)


def _async_llm(module: Any) -> None:
    original = module.AsyncLLM.start_weight_update

    async def start_weight_update(self: Any, is_checkpoint_format: bool = True) -> None:
        await original(self)

    module.AsyncLLM.start_weight_update = start_weight_update


def _worker(module: Any) -> None:
    from ludus.backends.trinity_side import cpu_worker

    module.TrinityGPUWorker = cpu_worker.CpuWorker


def _device(module: Any) -> None:
    module.get_resource_name = lambda: "GPU"
    module.get_nccl_backend = lambda: "gloo"


def _engine(module: Any) -> None:
    module.get_device_name = lambda: "cuda"


def _attention(module: Any) -> None:
    def functions() -> tuple[Any, ...]:
        from verl.utils import npu_flash_attn_utils as plain

        names = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
        return tuple(getattr(plain, name) for name in names)

    module._get_attention_functions = functions


CHANGES: dict[str, Callable[[Any], None]] = {
    "torch": _torch,
    "vllm.v1.engine.async_llm": _async_llm,
    "trinity.common.models.vllm_worker": _worker,
    "verl.utils.device": _device,
    "verl.workers.engine.base": _engine,
    "verl.utils.attention_utils": _attention,
}
"""Changes a module after its import."""
