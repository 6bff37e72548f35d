"""Devices for `ludus plan`: known GPUs, and this machine, measured."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ludus.config.schema import ModelConfig
from ludus.core.errors import ConfigError, did_you_mean
from ludus.core.system.machine import machine_memory
from ludus.models.flops import peak_flops


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device.

    Args:
        memory: bytes.
        bandwidth: of the memory, in bytes per second.
        flops: operations per second of dense matrix products in bfloat16.
        flops32: the same in float32 (on GPUs without TF32, which ludus does not use).
        layer_s: minimum time of a pass through one layer, in seconds.
        source: source of the figures.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    flops32: float
    layer_s: float = 50e-6  # a dozen kernels of 4 us
    source: str = "its data sheet"


def _gpu(name: str, gib: float, gbs: float, bf16: float, fp32: float) -> Hardware:
    return Hardware(name, gib * 1e9, gbs * 1e9, bf16 * 1e12, fp32 * 1e12)


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        _gpu("b200", 180, 8000, 2250, 75),
        _gpu("h200", 141, 4800, 989, 67),
        _gpu("h100", 80, 3350, 989, 67),
        _gpu("a100-80gb", 80, 2039, 312, 19.5),
        _gpu("a100-40gb", 40, 1555, 312, 19.5),
        _gpu("l40s", 48, 864, 362, 91.6),
        _gpu("a10g", 24, 600, 70, 31.2),
        _gpu("l4", 24, 300, 121, 30.3),
        _gpu("t4", 16, 320, 65, 8.1),
        _gpu("rtx-4090", 24, 1008, 165, 82.6),
        _gpu("rtx-3090", 24, 936, 71, 35.6),
    )
}
"""Peak rates of dense products by the manufacturers' data sheets (T4: in float16)."""


def find_hardware(name: str, model: ModelConfig) -> Hardware:
    """Returns a row of HARDWARE, or for `here` the model's device on this machine, measured.

    Errors: ConfigError.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    if name != "here":
        names = [*HARDWARE, "here"]
        raise ConfigError(f"--hardware: there is no {name!r}{did_you_mean(name, names)}")
    device = torch.device(model.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--hardware here: model.device is {model.device}, and this machine has no CUDA "
            "device; name the GPU that the run will have, e.g. --hardware h100"
        )
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        memory = float(machine_memory())
    return Hardware(
        "here",
        memory,
        _bandwidth(device),
        _peak(device, torch.bfloat16),
        _peak(device, torch.float32),
        source="measured just now",
    )


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the peak with torch's threads, or with one where that is faster: on a busy machine,
    each product of several threads waits for the last one."""
    found, threads = peak_flops(device, dtype), torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return found
    torch.set_num_threads(1)
    try:
        return max(found, peak_flops(device, dtype))
    finally:
        torch.set_num_threads(threads)


def _bandwidth(device: torch.device) -> float:
    """Returns the bytes per second read by a copy: the best of five copies of 256 MB."""
    source = torch.zeros(1 << 26, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return source.numel() * 4 / best
