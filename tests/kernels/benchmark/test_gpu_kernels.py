"""On a CUDA device: the shim's word is the device's, cheats of time are caught, faults stay apart.

Written without a device: none of these has run yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ludus.kernels.benchmark.benchmarker import Benchmarker
from ludus.kernels.expert import kernels_for
from ludus.kernels.triton.verifier import TritonVerifier
from ludus.kernels.verify.problem import KernelProblem
from ludus.kernels.verify.verifier import KernelVerifier
from ludus.tasks.kernels.generated import read_generated
from tests.kernels.in_triton.cheats import HONEST as IN_TRITON
from tests.kernels.verify.cheats import CHEATS, HONEST, REFERENCE, RIGHT, body

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="module")]

LARGE = REFERENCE.replace("1000", "1 << 24")
PROBLEM, BIG = KernelProblem("small", REFERENCE), KernelProblem("large", LARGE)
EMPTY = "__global__ void kernel(const float *a, const float *b, float *out, int n) {}\n"
TIME_CHEATS = {
    "another stream": HONEST.replace("256>>>", "256, 0, 1>>>"),
    "lazy: the output of the launch before": body(
        "out[i] = kept[i]; kept[i] = 2.0f * fmaxf(a[i], 0.0f) + b[i];",
        head="__device__ float kept[1 << 24];",
    ),
    "cached by address": body(
        "if (seen == a) out[i] = kept[i]; else { " + RIGHT + " kept[i] = out[i]; "
        "if (i == n - 1) seen = a; }",
        head="__device__ float kept[1 << 24]; __device__ const float *seen;",
    ),
    "right in the trials only": body(
        "if (done < 8) { " + RIGHT + " } if (i == 0) atomicAdd(&done, 1);",
        head="__device__ int done;",
    ),
    "half of the output": body(f"if (i < n / 2) {RIGHT}"),
    "lower precision": "#include <cuda_fp16.h>\n"
    + body("out[i] = __half2float(__float2half(2.0f * fmaxf(a[i], 0.0f) + b[i]));"),
    "decoy": HONEST.replace("void kernel(", "void other(") + EMPTY,
    "patched clock": '#define cudaEventRecord(...)\nextern "C" int cuEventElapsedTime;\n' + HONEST,
    "nothing at all": EMPTY + "// launch: kernel<<<1, 1>>>(a, b, out, n)\n",
    "reads what memory held": body("out[i] = out[i];"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def benchmarker() -> AsyncIterator[Benchmarker]:
    """One benchmarker: a kernel must not disturb the next."""
    async with Benchmarker(trust_references=True, kernel_s=20.0) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def timing(cpp: None, benchmarker: Benchmarker) -> AsyncIterator[KernelVerifier]:
    """A verifier with a device behind the shim."""
    async with KernelVerifier(parallel=1, benchmark=benchmarker) as opened:
        yield opened


@pytest.mark.parametrize("kind", ["elementwise", "reduction", "matmul", "transpose", "fused"])
async def test_shim_and_device_agree_on_honest_kernels(timing: KernelVerifier, kind: str) -> None:
    for task in read_generated(3, kinds=[kind]):  # type: ignore[list-item]
        for source in kernels_for(task):
            found = await timing.verify(source, KernelProblem.of(task), seed=1)
            assert found.ok, f"{task.id}: {found.message}\n{source}"
            assert found.speedups is not None
            assert found.speedups.kernel_s > 0


async def test_device_passes_no_kernel_that_the_shim_finds_wrong(
    timing: KernelVerifier, benchmarker: Benchmarker
) -> None:
    """The shim's `wrong` is the device's too, but for races and what no launch has written."""
    for name, (source, allowed) in CHEATS.items():
        found = await timing.verify(source, PROBLEM, seed=5)
        assert not found.ok, f"{name}: {found.message}"
        assert found.status in allowed, name
    assert (await timing.verify(HONEST, PROBLEM, seed=6)).ok


@pytest.mark.parametrize("name", TIME_CHEATS)
async def test_cheats_of_time_get_no_credit(timing: KernelVerifier, name: str) -> None:
    found = await timing.verify(TIME_CHEATS[name], BIG, seed=5)
    assert found.speedups is None, found.message
    assert not found.ok


async def test_a_large_copy_is_within_the_limits(
    timing: KernelVerifier, benchmarker: Benchmarker
) -> None:
    device = await benchmarker.device()
    found = await timing.verify(HONEST, BIG, seed=2)
    assert found.ok, found.message
    assert found.speedups is not None
    assert 0.2 < found.speedups.bandwidth_share <= 1.15  # type: ignore[operator]
    assert 0.3 < found.speedups.over_eager < 10
    assert device.architecture.startswith("sm_")


async def test_triton_runs_on_the_device(triton: None, benchmarker: Benchmarker) -> None:
    async with TritonVerifier(parallel=1, benchmark=benchmarker) as verifier:
        found = await verifier.verify(IN_TRITON, BIG, seed=2)
        assert found.ok, found.message
        assert found.speedups is not None


# Kernels that the CPU does not run go to the device at once: `clock64` keeps the shim out.
FAULTS = {
    "a write out of bounds": (RIGHT + " if (i == 0) out[1ll << 40] = 1.0f;", "crashed"),
    "a null pointer": (RIGHT + " if (i == 0) *(volatile int *)8 = 1;", "crashed"),
    "trap": ("__trap();", "crashed"),
    "never ends": ("volatile int x = 1; while (x) { x = x | 1; }", "time_limit"),
    "NaN": ("out[i] = __int_as_float(0x7fc00000);", "wrong"),
    "writes beside": (RIGHT + " if (i == 0) out[n] = 1.0f;", "wrong"),
    "changes an input": (RIGHT + " if (i == 3) const_cast<float *>(b)[i] = 0.0f;", "wrong"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_the_next_kernel_runs_after_a_fault(timing: KernelVerifier, name: str) -> None:
    statement, status = FAULTS[name]
    found = await timing.verify(body("long long t = clock64(); if (t) { " + statement + " }"),
                                PROBLEM, seed=3)  # fmt: skip
    assert found.status == status, found.message
    assert (await timing.verify(HONEST, PROBLEM, seed=4)).ok


async def test_all_of_the_memory(timing: KernelVerifier) -> None:
    source = "__device__ char big[1ull << 38];\n" + body(
        "long long t = clock64(); if (t) big[i] = 1; " + RIGHT
    )
    found = await timing.verify(source, PROBLEM, seed=3)
    assert found.status in ("memory_limit", "compile_error", "crashed"), found.message
    assert (await timing.verify(HONEST, PROBLEM, seed=4)).ok
