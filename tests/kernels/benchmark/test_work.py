"""Cubins and arguments for a device, made without one."""

from __future__ import annotations

import struct

import pytest

from ludus.core.errors import DataError
from ludus.kernels.benchmark.work import Work, cuda_work, triton_work
from ludus.kernels.compiler import CudaCompiler
from ludus.kernels.cubin import read_cubin
from ludus.kernels.launches import Buffer, read_launches
from ludus.kernels.triton.compiler import TritonCompiler
from ludus.kernels.triton.launches import read_triton_launches, type_of, variant_of
from ludus.kernels.triton.source import read_source
from tests.kernels.in_triton.cheats import HONEST

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHAPES = {"a": (1000,), "b": (1000,), "out": (1000,)}
SOURCE = """// scratch: tmp float[64]
// launch: tile<64><<<4, dim3(16, 16), 128>>>(a, tmp, n, 0.5f, 3)
// launch: ns::plain<<<4, 256>>>(a, n, out, -1, 2)
// launch: c_one<<<4, 256>>>(a, -1, out)
template <int N> __global__ void tile(const float *a, float *out, int n, float s, double q) {
    out[0] = a[N] * s * q + n;
}
namespace ns {
__global__ void plain(const float *a, long long n, float *out, char c, unsigned short s) {
    out[n - 1] = a[1] + c + s;
}
}
extern "C" __global__ void c_one(const float *__restrict__ a, unsigned n, float *out) {
    out[n % 10] = a[1];
}
"""


async def _work(compiler: CudaCompiler, source: str) -> Work:
    work = await cuda_work(compiler, source, read_launches(source, SHAPES), "sm_90")
    assert isinstance(work, Work), work.errors
    return work


async def test_numbers_are_packed_as_the_kernel_takes_them(compiler: CudaCompiler) -> None:
    work = await _work(compiler, SOURCE)
    tile, plain, c_one = work.steps
    symbols = {kernel.symbol for kernel in read_cubin(work.modules[0]).kernels}
    assert {step.symbol for step in work.steps} <= symbols
    assert (tile.grid, tile.block, tile.shared_bytes) == ((4, 1, 1), (16, 16, 1), 128)
    assert [item.buffer for item in tile.parameters] == ["a", "tmp", None, None, None]
    data = [item.data for item in tile.parameters[2:]]
    assert data == [struct.pack("<i", 1000), struct.pack("<f", 0.5), struct.pack("<d", 3.0)]
    assert [item.data for item in plain.parameters if item.buffer is None] == [
        struct.pack("<q", 1000), struct.pack("<b", -1), struct.pack("<H", 2),
    ]  # fmt: skip
    assert c_one.parameters[1].data == b"\xff\xff\xff\xff"
    assert work.scratch == {"tmp": 256}
    for step in work.steps:
        size = sum(len(item.data) or 8 for item in step.parameters)
        [kernel] = [k for k in read_cubin(work.modules[0]).kernels if k.symbol == step.symbol]
        assert size <= kernel.parameter_bytes < size + 24  # and what alignment needs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("(a, -1)", "has 3 parameters, and the launch gives 2"),
        ("(a, b, out)", "`b` is a buffer, and the kernel takes a number"),
        ("(4096, -1, out)", "4096 is a number, and the kernel takes a pointer"),
    ],
)
async def test_arguments_that_do_not_fit(
    compiler: CudaCompiler, arguments: str, message: str
) -> None:
    source = SOURCE.replace("(a, -1, out)\ntemplate", f"{arguments}\ntemplate")
    with pytest.raises(DataError, match=message.replace("(", r"\(")) as caught:
        await _work(compiler, source)
    assert str(caught.value).startswith("line 4: ")


async def test_a_struct_by_value_is_told(compiler: CudaCompiler) -> None:
    source = "// launch: k<<<1, 1>>>(a, 1, out)\nstruct S { int x; };\n"
    source += "__global__ void k(const float *a, S s, float *out) { out[0] = s.x; }\n"
    with pytest.raises(DataError, match="a struct or a half"):
        await _work(compiler, source)


async def test_a_source_that_hides_the_tables_does_not_compile(compiler: CudaCompiler) -> None:
    plan = read_launches(SOURCE, SHAPES)
    for text in ("#if 0\n", "/* ", "namespace {\n"):
        work = await cuda_work(compiler, SOURCE + text, plan, "sm_90")
        assert not isinstance(work, Work)


async def test_work_of_triton(triton: None) -> None:
    read = read_source(HONEST)
    plan = read_triton_launches(HONEST, read.kernels, SHAPES)
    dtypes = dict.fromkeys(SHAPES, "float32")
    variant = variant_of(plan.launches[0], dtypes)
    async with TritonCompiler(parallel=1) as compiler:
        done = await compiler.compile(HONEST, [variant], "sm_90")
    assert done.compiled.ok, done.compiled.errors
    work = triton_work(done.images, plan, dtypes)
    [step] = work.steps
    assert (step.grid, step.block) == ((4, 1, 1), (128, 1, 1))
    assert [item.buffer for item in step.parameters[:3]] == ["a", "b", "out"]
    assert step.parameters[3].data == struct.pack("<i", 1000)
    assert len(step.parameters) == 6  # and two that Triton adds
    [kernel] = read_cubin(work.modules[0]).kernels
    assert (kernel.symbol, kernel.parameter_bytes) == (step.symbol, 48)


async def test_types_of_triton() -> None:
    assert type_of(Buffer("a"), {"a": "bfloat16"}) == "*bf16"
    assert [type_of(value, {}) for value in (True, 3, 1 << 40, 0.5)] == ["i1", "i32", "i64", "fp32"]
