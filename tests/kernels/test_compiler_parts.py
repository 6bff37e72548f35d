"""The compiler's parts without a compiler: logs, names, occupancy, the cache's bound."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.errors import ConfigError, DataError
from ludus.kernels.cache import CompileCache, Entry
from ludus.kernels.cubin import read_cubin, readable
from ludus.kernels.diagnostics import MAX_DIAGNOSTICS, diagnostics_of, reported
from ludus.kernels.occupancy import ARCHITECTURES, REGISTERS_PER_SM, occupancy

LOG = """kernel.cu(1): warning #177-D: variable "unused" was declared but never referenced
  __global__ void k(float*a){ int unused=3; a[0]=1; }
                                  ^

Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"

/inc/a b.h(20): catastrophic error: cannot open source file "x"
  #include "x"
              ^

kernel.cu(7): error: no instance of function template "f" matches the argument list
            argument types are: (int)
      f(3);
      ^
          detected during instantiation of "g" at line 9

kernel.cu(8): error: no place is shown
2 errors detected in the compilation of "kernel.cu".
nvrtc: error: failed to open libnvrtc-builtins.so.13.0.
ptxas application ptx input, line 26; error   : Not a name of any known instruction: 'bogus'
ptxas fatal   : Ptx assembly aborted due to errors
"""
PTXAS = """ptxas info    : 4 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
ptxas         .     1160 bytes stack frame, 2032 bytes spill stores, 2448 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 1160 bytes cumulative stack size
ptxas info    : Compiling entry function 'second' for 'sm_75'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, 256+16 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'cut' for 'sm_75'
"""


def test_a_log_becomes_diagnostics() -> None:
    found = [(d.severity, d.file, d.line, d.column, d.code) for d in diagnostics_of(LOG)]
    assert found == [
        ("warning", "kernel.cu", 1, 33, "177-D"),
        ("error", "/inc/a b.h", 20, 13, ""),
        ("error", "kernel.cu", 7, 5, ""),
        ("error", "kernel.cu", 8, None, ""),
        ("error", "", None, None, ""),
        ("error", "", None, None, ""),
        ("error", "", None, None, ""),
    ]
    messages = [d.message for d in diagnostics_of(LOG)]
    assert messages[2].endswith("matches the argument list\nargument types are: (int)")
    assert messages[5] == "ptxas: Not a name of any known instruction: 'bogus'"
    assert str(diagnostics_of(LOG)[3]) == "kernel.cu:8: error: no place is shown"
    assert str(diagnostics_of(LOG)[6]) == "ptxas: Ptx assembly aborted due to errors"


def test_errors_at_the_end_of_the_source_and_notes() -> None:
    log = """At end of source: error: expected a "}"
kernel.cu(3): note #3196-D: to match this "{"
      if (i < n) { x[i] =
                 ^

At end of source: catastrophic error #20: too deep
"""
    found = [(d.severity, d.message, d.line, d.column, d.code) for d in diagnostics_of(log)]
    assert found == [
        ("error", 'expected a "}", at the end of the source', None, None, ""),
        ("note", 'to match this "{"', 3, 16, "3196-D"),
        ("error", "too deep, at the end of the source", None, None, "20"),
    ]


def test_a_flood_of_diagnostics_is_cut() -> None:
    assert len(diagnostics_of("kernel.cu(1): error: x\n" * 1000)) == MAX_DIAGNOSTICS


@given(st.text(alphabet="kernel.cu(1): \n^ptxas info:Compiling entry function''for'sm_90'"))
def test_any_log_can_be_read(log: str) -> None:
    diagnostics_of(log)
    reported(log)


def test_resources_are_read_from_both_forms_of_the_spill_line() -> None:
    found = reported(PTXAS)
    assert found.keys() == {"first", "second"}
    first, second = found["first"], found["second"]
    assert (first.registers, first.stack_bytes, first.barriers, first.shared_bytes) == (
        (32, 1160, 1, 0)
    )
    assert (first.spill_store_bytes, first.spill_load_bytes) == (2032, 2448)
    assert (second.registers, second.shared_bytes, second.spill_store_bytes) == (12, 256, 0)


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("add", "add"),
        ("_Z4tilePf", "tile"),
        ("_Z1tILi64EEvPf", "t"),
        ("_ZN5tiles7reverseILi64EEEvPf", "tiles::reverse"),
        ("_ZN12_GLOBAL__N_11kEv", "_GLOBAL__N_1::k"),
        ("_Z", "_Z"),
        ("_Z999x", "x"),
    ],
)
def test_names_are_readable(symbol: str, name: str) -> None:
    assert readable(symbol) == name


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF\x02" + bytes(59), b"\x00" * 100])
def test_what_is_no_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="not a cubin"):
        read_cubin(data)


@given(st.binary(max_size=400))
def test_damaged_cubins_are_refused_or_read(data: bytes) -> None:
    head = b"\x7fELF\x02" + bytes(35) + b"\x40" + bytes(17) + b"\x40\x00\x02\x00\x01\x00"
    with suppress(DataError):
        assert read_cubin(head + data).constant_bytes >= 0


# Occupancy


@pytest.mark.parametrize(
    ("arguments", "blocks", "share", "limited"),
    [
        # worked by hand from the table of the CUDA C++ Programming Guide
        (("sm_90", 256, 32, 0), 8, 1.0, ("warps", "registers")),
        (("sm_90", 256, 64, 0), 4, 0.5, ("registers",)),
        (("sm_90", 32, 16, 0), 32, 0.5, ("blocks",)),
        (("sm_80", 128, 32, 40 * 1024), 4, 0.25, ("shared memory",)),
        (("sm_86", 1024, 32, 0), 1, 32 / 48, ("warps",)),
        (("sm_75", 1024, 128, 0), 0, 0.0, ("registers",)),
        (("sm_90a", 64, 8, 228 * 1024), 0, 0.0, ("shared memory",)),
    ],
)
def test_occupancy_by_hand(
    arguments: tuple[str, int, int, int], blocks: int, share: float, limited: tuple[str, ...]
) -> None:
    found = occupancy(*arguments)
    assert (found.blocks, found.share, found.limited_by) == (blocks, share, limited)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sm_60", 32, 8), "architecture: 'sm_60' is not known"),
        (("sm_90", 0, 8), "1 to 1024 threads, not 0"),
        (("sm_90", 1025, 8), "1 to 1024 threads, not 1025"),
        (("sm_90", 32, -1), "cannot be negative"),
    ],
)
def test_impossible_launches_are_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        occupancy(*arguments)


ORACLE = """
#include <cstdio>
#include <climits>
#include <cstddef>
#include "cuda_occupancy.h"
int main() {
    int major, minor, warps, threads, registers; size_t per_sm, per_block, reserved, shared;
    while (scanf("%d %d %d %zu %zu %zu %d %d %zu", &major, &minor, &warps, &per_sm, &per_block,
                 &reserved, &threads, &registers, &shared) == 9) {
        cudaOccDeviceProp device; cudaOccFuncAttributes function; cudaOccDeviceState state;
        device.computeMajor = major; device.computeMinor = minor;
        device.maxThreadsPerBlock = 1024; device.maxThreadsPerMultiprocessor = warps * 32;
        device.regsPerBlock = 65536; device.regsPerMultiprocessor = 65536; device.warpSize = 32;
        device.sharedMemPerBlock = 49152; device.sharedMemPerMultiprocessor = per_sm;
        device.numSms = 1; device.sharedMemPerBlockOptin = per_block;
        device.reservedSharedMemPerBlock = reserved;
        function.maxThreadsPerBlock = INT_MAX; function.numRegs = registers;
        function.sharedSizeBytes = 0; function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        function.maxDynamicSharedSizeBytes = shared; function.numBlockBarriers = 1;
        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        cudaOccResult result;
        int failed = cudaOccMaxActiveBlocksPerMultiprocessor(
            &result, &device, &function, &state, threads, shared);
        printf("%d\\n", failed ? -failed : result.activeBlocksPerMultiprocessor);
    }
}
"""


def test_occupancy_is_that_of_nvidias_calculator(tmp_path: Path) -> None:
    """`cuda_occupancy.h`, which computes on the host, for 15,840 launches of 11 architectures."""
    try:
        package = distribution("nvidia-cuda-runtime")
    except PackageNotFoundError:
        pytest.skip("nvidia-cuda-runtime is not installed: pip install 'ludus-rl[kernels]'")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    headers = {
        str(package.locate_file(f).parent)
        for f in package.files or ()
        if f.name == "cuda_occupancy.h"
    }  # type: ignore[attr-defined]
    (tmp_path / "oracle.cpp").write_text(ORACLE)
    command = ["g++", "-w", *(f"-I{folder}" for folder in headers), "oracle.cpp", "-o", "oracle"]
    subprocess.run(command, cwd=tmp_path, check=True)
    asked, launches = [], []
    for name, limits in ARCHITECTURES.items():
        for threads in (1, 32, 33, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1000, 1024):
            for registers in (0, 8, 16, 24, 32, 33, 40, 48, 64, 80, 96, 128, 168, 200, 255):
                for shared in (0, 1, 1000, 8192, 49152, 101376):
                    launches.append((name, threads, registers, shared))
                    asked.append(
                        f"{name[3:-1]} {name[-1]} {limits.max_warps} {limits.shared_per_sm} "
                        f"{limits.shared_per_block} {limits.reserved_shared} {threads} "
                        f"{registers} {shared}"
                    )
    told = subprocess.run(
        ["./oracle"], cwd=tmp_path, input="\n".join(asked), capture_output=True, text=True
    ).stdout.split()
    assert len(told) == len(launches) == 15_840
    differing = [
        (launch, occupancy(*launch).blocks, int(blocks))
        for launch, blocks in zip(launches, told, strict=True)
        if occupancy(*launch).blocks != int(blocks)
    ]
    assert not differing[:5]


@given(
    st.sampled_from(sorted(ARCHITECTURES)),
    st.integers(1, 1024),
    st.integers(0, 255),
    st.integers(0, 300_000),
)
def test_occupancy_is_within_the_limits(
    architecture: str, threads: int, registers: int, shared: int
) -> None:
    found, limits = occupancy(architecture, threads, registers, shared), ARCHITECTURES[architecture]
    assert 0 <= found.warps <= limits.max_warps
    assert found.blocks <= limits.max_blocks
    assert found.blocks * threads * registers <= REGISTERS_PER_SM
    assert found.blocks * shared <= limits.shared_per_sm
    assert found.limited_by


# The cache


def test_the_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, max_mb=1)
    keys = [cache.key(str(number)) for number in range(6)]
    for number, key in enumerate(keys[:4]):
        cache.put(key, Entry(0, 0.5, b"log", bytes([number]) * 200_000))
        path = cache._path(key)
        os.utime(path, (number, number))
    assert cache.get(keys[0]) == Entry(0, 0.5, b"log", bytes(200_000))  # now the latest used
    for key in keys[4:]:
        cache.put(key, Entry(6, 0.5, b"", b"\1" * 200_000))
    kept = [cache.get(key) is not None for key in keys]
    assert kept[0]
    assert not kept[1]
    assert kept[5]
    size = sum(path.stat().st_size for path in tmp_path.glob("**/*.bin"))
    assert size <= 1 << 20
    assert not list(tmp_path.glob("**/.tmp-*"))


def test_the_cache_refuses_what_exceeds_it_and_a_limit_of_nothing(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, max_mb=1)
    cache.put("ab", Entry(0, 1.0, b"", bytes(2 << 20)))
    assert cache.get("ab") is None
    with pytest.raises(ConfigError, match="max_mb: 0: a cache needs at least 1"):
        CompileCache(tmp_path, max_mb=0)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file")
    cache.put("ab", Entry(0, 1.0, b"", b""))
    assert cache.get("ab") is None


def test_keys_differ_by_each_part() -> None:
    assert CompileCache.key("ab", "c") != CompileCache.key("a", "bc")
    assert CompileCache.key("\ud800") != CompileCache.key("?")
