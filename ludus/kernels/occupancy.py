"""Theoretical occupancy: blocks and warps that one multiprocessor (SM) holds at the same time.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Rounding:
`cuda_occupancy.h` of the CUDA toolkit, which a test compares with this file. A table of limits is
no measurement: how busy the warps are, only a device tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ludus.core.errors import ConfigError, did_you_mean

WARP = 32
KB = 1024
REGISTERS_PER_SM = REGISTERS_PER_BLOCK = 65536
MAX_REGISTERS = 256
REGISTER_UNIT = 256
"""Registers of a warp are allocated in multiples of it."""
PARTITIONS = 4
"""An SM's parts, each with its own registers: a block's warps are spread over them."""
MAX_THREADS_PER_BLOCK = 1024
OLDEST = 75
"""Oldest architecture that the compilers of CUDA 13 know."""


@dataclass(frozen=True, slots=True)
class ArchitectureLimits:
    """Limits of one SM. `shared_per_block`: with the opt-in above 48 KB; `reserved_shared`: of each
    block for the driver; `shared_unit`: shared memory is allocated in multiples of it, in bytes."""

    max_blocks: int
    max_warps: int
    shared_per_sm: int
    shared_per_block: int
    shared_unit: int = 128
    reserved_shared: int = KB


ARCHITECTURES = {
    "sm_70": ArchitectureLimits(32, 64, 96 * KB, 96 * KB, 256, 0),
    "sm_72": ArchitectureLimits(32, 64, 96 * KB, 96 * KB, 256, 0),
    "sm_75": ArchitectureLimits(16, 32, 64 * KB, 64 * KB, 256, 0),
    "sm_80": ArchitectureLimits(32, 64, 164 * KB, 163 * KB),
    "sm_86": ArchitectureLimits(16, 48, 100 * KB, 99 * KB),
    "sm_87": ArchitectureLimits(16, 48, 164 * KB, 163 * KB),
    "sm_89": ArchitectureLimits(24, 48, 100 * KB, 99 * KB),
    "sm_90": ArchitectureLimits(32, 64, 228 * KB, 227 * KB),
    "sm_100": ArchitectureLimits(32, 64, 228 * KB, 227 * KB),
    "sm_103": ArchitectureLimits(32, 64, 228 * KB, 227 * KB),
    "sm_120": ArchitectureLimits(24, 48, 100 * KB, 99 * KB),
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks and warps on one SM. `limited_by`: the resources that allow no further block, of
    `warps`, `blocks`, `registers`, `shared memory`, `launch bounds`. No block fits: all is 0."""

    blocks: int
    warps: int
    max_warps: int
    limited_by: tuple[str, ...]

    @property
    def share(self) -> float:
        """Share of the SM's warps, 0 to 1."""
        return self.warps / self.max_warps


def limits_of(architecture: str) -> ArchitectureLimits:
    """The limits of an architecture; a suffix (`sm_90a`, `sm_100f`) does not change them.

    Errors: ConfigError for one that the table lacks.
    """
    name = re.sub(r"(?<=\d)[af]$", "", architecture)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"architecture: {architecture[:40]!r} is not known{did_you_mean(name, ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def check_compilable(architecture: str) -> None:
    """Errors: ConfigError for an architecture that the table lacks, or that is too old for the
    compilers of CUDA 13. Others they may still refuse: only a compiler knows its own."""
    limits_of(architecture)
    if int(re.sub(r"\D", "", architecture)) < OLDEST:
        raise ConfigError(
            f"architecture: {architecture} is too old: the compilers of CUDA 13 know sm_{OLDEST} "
            "and newer ones"
        )


def occupancy(architecture: str, threads: int, registers: int, shared_bytes: int = 0) -> Occupancy:
    """The theoretical occupancy of a kernel.

    Args:
        threads: of a block.
        registers: of a thread.
        shared_bytes: of a block, static and dynamic together.

    Errors: ConfigError for an unknown architecture, or numbers that no launch can have.
    """
    limits = limits_of(architecture)
    if not 1 <= threads <= MAX_THREADS_PER_BLOCK:
        raise ConfigError(
            f"threads: a block has 1 to {MAX_THREADS_PER_BLOCK} threads, not {threads}"
        )
    if registers < 0 or shared_bytes < 0:
        raise ConfigError("registers and shared_bytes: they cannot be negative")
    warps = -(-threads // WARP)
    possible = {"warps": limits.max_warps // warps, "blocks": limits.max_blocks}
    if registers:
        possible["registers"] = _by_registers(registers, warps)
    shared = _rounded(shared_bytes + limits.reserved_shared, limits.shared_unit)
    if shared:
        fits = shared <= limits.shared_per_block + limits.reserved_shared
        possible["shared memory"] = limits.shared_per_sm // shared if fits else 0
    blocks = min(possible.values())
    limited = tuple(name for name, number in possible.items() if number == blocks)
    return Occupancy(blocks, blocks * warps, limits.max_warps, limited)


def _by_registers(registers: int, warps: int) -> int:
    of_warp = _rounded(registers * WARP, REGISTER_UNIT)
    of_block = of_warp * _rounded(warps, PARTITIONS)  # the hardware checks it so at the launch
    if of_block > REGISTERS_PER_BLOCK or registers > MAX_REGISTERS:
        return 0
    return REGISTERS_PER_SM // PARTITIONS // of_warp * PARTITIONS // warps


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit
