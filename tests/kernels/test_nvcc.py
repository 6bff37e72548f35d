"""nvcc in the sandbox: host code, errors with places, resources, the cache, compiler bombs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

import ludus.kernels.nvcc as module
from ludus.core.errors import ConfigError
from ludus.kernels.cache import CompileCache
from ludus.kernels.nvcc import LIMITS, NvccCompiler, find_nvcc, nvcc_diagnostics

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOURCE = """#include <cstdio>
__global__ void scale(float *x, int n) {
    __shared__ float s[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    s[threadIdx.x] = i < n ? x[i] : 0.0f;
    __syncthreads();
    if (i < n) x[i] = 2.0f * s[63 - threadIdx.x];
}
int main() {
    float *x;
    cudaMalloc(&x, 4096);
    scale<<<16, 64>>>(x, 1024);
    printf("%s\\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nvcc(layers: None) -> AsyncIterator[NvccCompiler]:
    """One compiler for all tests."""
    try:
        opened = NvccCompiler(replace(LIMITS, run_s=120.0), parallel=1)
    except ConfigError as error:
        pytest.skip(str(error))
    async with opened:
        yield opened


async def test_host_code_compiles_with_resources(nvcc: NvccCompiler) -> None:
    compiled = await nvcc.compile(SOURCE)
    assert compiled.ok, compiled.log
    assert compiled.compiler.startswith("nvcc ")
    kernel = compiled.kernel("scale")
    assert kernel.shared_bytes == 256
    assert 1 <= kernel.registers <= 64
    assert kernel.occupancy(64).share > 0
    assert compiled.cubin[:4] == b"\x7fELF"


async def test_errors_have_line_and_column(nvcc: NvccCompiler) -> None:
    device = await nvcc.compile(SOURCE.replace("x[i] = 2.0f", "y[i] = 2.0f"))
    assert device.status == "error"
    first = device.errors[0]
    assert (first.file, first.line, first.column) == ("kernel.cu", 7, 16)
    assert '"y" is undefined' in first.message
    host = await nvcc.compile(SOURCE.replace('printf("%s', 'print("%s'))
    assert host.errors[0].line == 13
    few = await nvcc.compile(SOURCE.replace("(x, 1024)", "(x)"))
    assert (few.errors[0].line, "too few arguments" in few.errors[0].message) == (12, True)


async def test_errors_of_the_host_compiler_have_places(nvcc: NvccCompiler) -> None:
    """The front end takes what g++ refuses."""
    source = SOURCE + 'static void f() { asm("" : : "Q9"(1)); }\nvoid g() { f(); }\n'
    compiled = await nvcc.compile(source)
    assert compiled.status == "error"
    assert compiled.errors


async def test_messages_of_g_plus_plus_and_of_the_driver() -> None:
    log = (
        "kernel.cu:3:7: error: 'x' was not declared\nnvcc fatal   : Unsupported gpu architecture\n"
    )
    first, second = nvcc_diagnostics(log)
    assert (first.line, first.column, first.severity) == (3, 7, "error")
    assert second.message == "nvcc: Unsupported gpu architecture"


async def test_files_of_the_host_are_not_there(nvcc: NvccCompiler) -> None:
    secret = Path("/etc/passwd").read_text(encoding="utf-8").splitlines()[0]
    for path in ("/etc/passwd", "/proc/1/environ", "../../../etc/passwd"):
        compiled = await nvcc.compile(f'#include "{path}"\n{SOURCE}')
        assert not compiled.ok
        assert secret not in compiled.log
    compiled = await nvcc.compile('asm(".incbin \\"/etc/passwd\\"");\n' + SOURCE)
    assert not compiled.ok
    assert secret not in compiled.log


@pytest.mark.slow
@pytest.mark.parametrize(
    "bomb",
    [
        "template <int N> struct T { static const int v = T<N - 1>::v + T<N * 2>::v; };\n"
        "int held = T<1>::v;\n",
        "__device__ char big[1ull << 35] = {1};\n",
        "int table[] = {[0 ... 2000000000] = 1};\n",
        '#include "kernel.cu"\n',
        "constexpr long f(long n) { return n < 2 ? 1 : f(n - 1) + f(n - 2); }\n"
        "static_assert(f(90) > 0);\n",
    ],
)
async def test_compiler_bombs_end(layers: None, bomb: str) -> None:
    try:
        find_nvcc()
    except ConfigError as error:
        pytest.skip(str(error))
    async with NvccCompiler(replace(LIMITS, run_s=15.0), parallel=1) as compiler:
        compiled = await compiler.compile(bomb + SOURCE)
        assert compiled.status in ("error", "time_limit", "memory_limit", "output_limit", "crashed")
        assert compiled.errors
        assert (await compiler.compile(SOURCE)).ok


async def test_the_cache_answers_the_second_time(nvcc: NvccCompiler, tmp_path: Path) -> None:
    async with NvccCompiler(cache=CompileCache(tmp_path), parallel=1) as compiler:
        first, again = [await compiler.compile(SOURCE) for _ in range(2)]
        assert (first.cached, again.cached) == (False, True)
        assert first.kernels == again.kernels
        bad = [await compiler.compile(SOURCE + "?") for _ in range(2)]
        assert (bad[0].errors, bad[1].cached) == (bad[1].errors, True)


async def test_options_that_reach_files_are_refused(nvcc: NvccCompiler) -> None:
    for option in ("-I/etc", "--compiler-options=-fplugin=x.so", "-ccbin=/tmp/x", "-o/tmp/x"):
        with pytest.raises(ConfigError, match="is not allowed"):
            await nvcc.compile(SOURCE, options=[option])


async def test_without_nvcc_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATH", "/nowhere")
    monkeypatch.setattr(module, "PACKAGES", ("nvidia-cuda-nvcc-that-is-absent",))
    monkeypatch.setattr(module.shutil, "which", lambda name, path: None)
    with pytest.raises(ConfigError, match=r"needs nvcc.*pip install nvidia-cuda-nvcc"):
        NvccCompiler()
