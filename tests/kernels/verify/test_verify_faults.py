"""References with which no test is possible, kernels outside the subset, half precision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ludus.core.errors import DataError
from ludus.core.types import Task
from ludus.kernels.benchmark.benchmarker import Measured
from ludus.kernels.verify.problem import KernelProblem
from ludus.kernels.verify.result import VerifyStatus
from ludus.kernels.verify.verifier import KernelVerifier
from tests.kernels.verify.cheats import HONEST, REFERENCE, RIGHT, body

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROBLEM = KernelProblem("2 * relu(a) + b", REFERENCE)
OF = """
import torch
class Model(torch.nn.Module):
    def forward(self, a, b):
        return {}
def get_inputs():
    return [torch.randn(1000), torch.randn(1000)]
"""
BAD = {
    "torch.ones(1000)": "constant",
    "torch.arange(1000.0)": "does not depend",
    "a * 1e-4": "within 0.01",
    "a + torch.randn(1000)": "different outputs",
    "a": "equals the input a",
    "a @ b[:10]": "RuntimeError",
    "(a, b)": "tuple",
    "torch.sum(a * 0 + 1).reshape(1)": "does not depend",
    "a.to(torch.complex64)": "complex64",
    "__import__('os')._exit(0)": "exit code 0",
    "a / 0 * 0": "no finite value",
}


@pytest.mark.parametrize("expression", BAD)
async def test_bad_reference(verifier: KernelVerifier, expression: str) -> None:
    found = await verifier.verify(HONEST, KernelProblem("x", OF.format(expression)), seed=1)
    assert found.status == "bad_reference", found.message
    assert BAD[expression] in found.message


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (body('asm("mov.u32 %0, %0;" : "+r"(i)); ' + RIGHT), "inline PTX"),
        ("#include <cooperative_groups.h>\n" + HONEST, "cooperative_groups.h"),
        ("#include <mma.h>\n" + HONEST, "mma.h"),
        (body("long long t = clock64(); " + RIGHT), "clock"),
    ],
)
async def test_unsupported_is_told_by_name(
    verifier: KernelVerifier, source: str, name: str
) -> None:
    found = await verifier.verify(source, PROBLEM, seed=1)
    assert found.status == "unsupported", found.message
    assert name in found.message


async def test_parameters_numbers_and_half_precision(verifier: KernelVerifier) -> None:
    reference = """
import torch
class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.fc = torch.nn.Linear(size, size)
    def forward(self, x, scale):
        return (self.fc(x) * scale).half()
def get_inputs():
    return [torch.randn(8, 16), 3]
def get_init_inputs():
    return [16]
"""
    source = """#include <cuda_fp16.h>
// launch: fc<<<x.shape[0], x.shape[1]>>>(x, fc_weight, fc_bias, out, scale, 1.0f)
__global__ void fc(const float *x, const float *w, const float *b, __half *out, int s, float one) {
    int i = blockIdx.x, j = threadIdx.x;
    float sum = b[j];
    for (int k = 0; k < 16; k++) sum += x[i * 16 + k] * w[j * 16 + k];
    out[i * 16 + j] = __float2half(sum * s * one);
}
"""
    problem = KernelProblem("linear", reference)
    face = await verifier.interface(problem, seed=2)
    assert face.shapes == {"x": (8, 16), "fc_weight": (16, 16), "fc_bias": (16,), "out": (8, 16)}
    assert face.dtypes["out"] == "float16"
    assert face.numbers == {"scale": 3}
    found = await verifier.verify(source, problem, seed=2)
    assert found.ok, found.message
    assert found.max_error is not None
    assert found.max_error < 0.02
    wrong = await verifier.verify(source.replace("* s", "* (s + 1)"), problem, seed=2)
    assert wrong.status == "wrong"


async def test_same_seed_same_result_and_seconds_by_stage(verifier: KernelVerifier) -> None:
    first, again = [await verifier.verify(HONEST, PROBLEM, seed=3) for _ in range(2)]
    assert (first.status, first.max_error) == (again.status, again.max_error)
    assert set(first.seconds) == {"analyse", "reference", "compile", "build", "run"}
    assert first.compiled is not None
    assert first.compiled.kernel("kernel").registers > 0


async def test_interface_of_a_bad_reference_is_an_error(verifier: KernelVerifier) -> None:
    with pytest.raises(DataError, match="constant"):
        await verifier.interface(KernelProblem("x", OF.format("torch.ones(1000)")))


async def test_a_task_without_reference() -> None:
    with pytest.raises(DataError, match=r"task t: data\.reference is missing"):
        KernelProblem.of(Task(id="t", data={}))


async def test_what_the_shim_does_not_run_goes_to_the_device(
    verifier: KernelVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the shim can tell, as for tensors that are too large for it."""

    async def device() -> SimpleNamespace:
        return SimpleNamespace(architecture="sm_90")

    async def measure(*args: Any) -> Measured:
        return Measured(VerifyStatus.PASSED, "right on the device", 6, 0.0)

    monkeypatch.setattr("ludus.kernels.verify.shim_runs.MAX_BYTES", 1000)
    assert (await verifier.verify(HONEST, PROBLEM, seed=1)).status == "unsupported"
    benchmark = SimpleNamespace(device=device, measure=measure)
    monkeypatch.setattr(verifier, "_benchmark", benchmark)
    found = await verifier.verify(HONEST, PROBLEM, seed=1)
    assert (found.status, found.message) == ("passed", "right on the device")
