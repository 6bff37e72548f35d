"""Sources go in, cubins or errors come out: resources, limits, attacks, the cache."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.core.errors import ConfigError
from ludus.kernels import compiler as module
from ludus.kernels.cache import CompileCache
from ludus.kernels.compiler import CudaCompiler, compile_cuda
from ludus.kernels.cubin import SECTION
from ludus.kernels.result import CompileStatus
from ludus.sandbox.base import Limits
from tests.kernels.analysis.honest import HONEST
from tests.kernels.conftest import PATIENT

pytestmark = [pytest.mark.usefixtures("nvrtc"), pytest.mark.asyncio(loop_scope="module")]

ADD = """extern "C" __global__ void add(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
"""
TWO = """
__constant__ float weights[100];

namespace tiles {
template <int N> __global__ void reverse(float *x) {
    __shared__ float tile[N];
    tile[threadIdx.x] = x[threadIdx.x] * weights[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[N - 1 - threadIdx.x];
}
template __global__ void reverse<64>(float *);
}

extern "C" __global__ void __launch_bounds__(256) local(float *a, int n) {
    float held[64];
    for (int i = 0; i < n; i++) held[i] = a[i];
    a[0] = held[n];
}
"""
SPILLING = """
extern "C" __global__ void BOUNDS mix(float *a) {
    float r[100];
    #pragma unroll
    for (int i = 0; i < 100; i++) r[i] = a[i * 32 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 100; i++) r[i] = r[i] * r[(i * 7 + 3) % 100];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 100; i++) a[i * 32 + threadIdx.x] = r[i];
}
"""
HEADERS = """
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <mma.h>
#include <stdint.h>
#include <math.h>
#include <cfloat>
#include <stdlib.h>
#include <string.h>
extern "C" __global__ void half_max(const __half *x, float *y, int64_t n) {
    float best = n ? -FLT_MAX : -INFINITY * float(M_PI);
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) best = fmaxf(best, __half2float(x[i]));
    y[threadIdx.x] = best;
}
"""
LONG = """
constexpr long add_up(long n) {
    long sum = 0;
    for (long i = 0; i < n; i++) sum += i;
    return sum;
}
template <class A, class B> struct Pair {};
template <int N, class T> struct Grow { typedef typename Grow<N - 1, Pair<T, T>>::type type; };
template <class T> struct Grow<0, T> { typedef T type; };
__global__ void k(int *a) { a[0] = sizeof(typename Grow<60, int>::type); }
"""


async def test_a_kernel_compiles(compiler: CudaCompiler) -> None:
    compiled = await compiler.compile(ADD)
    assert compiled.ok
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.diagnostics == ()
    [kernel] = compiled.kernels
    assert (kernel.name, kernel.symbol, kernel.architecture) == ("add", "add", "sm_90")
    assert 4 <= kernel.registers <= 32
    assert (kernel.shared_bytes, kernel.spills, kernel.stack_bytes, kernel.max_threads) == (
        (0, 0, 0, None)
    )
    assert kernel.parameter_bytes == 28
    assert compiled.seconds > 0
    assert compiled.compiler.startswith("NVRTC 1")


async def test_two_kernels_of_a_file_have_resources_of_their_own(compiler: CudaCompiler) -> None:
    compiled = await compiler.compile(TWO)
    reverse, local = compiled.kernel("tiles::reverse"), compiled.kernel("local")
    assert reverse.symbol == "_ZN5tiles7reverseILi64EEEvPf"
    assert (reverse.shared_bytes, reverse.barriers, reverse.max_threads) == (256, 1, None)
    assert (local.shared_bytes, local.stack_bytes, local.max_threads) == (0, 256, 256)
    assert reverse.constant_bytes == 400
    with pytest.raises(KeyError):
        compiled.kernel("absent")


async def test_registers_are_those_of_the_cubin(compiler: CudaCompiler) -> None:
    """ptxas' text against the file that it wrote: attribute REGCOUNT of `.nv.info`."""
    compiled = await compiler.compile(TWO)
    data = compiled.cubin
    [offset] = struct.unpack_from("<Q", data, 40)
    _, number, names_at = struct.unpack_from("<HHH", data, 58)
    headers = [SECTION.unpack_from(data, offset + SECTION.size * i) for i in range(number)]

    def text(table: tuple[int, ...], start: int) -> str:
        begin = table[4] + start
        return data[begin : data.index(b"\0", begin)].decode()

    sections = {text(headers[names_at], header[0]): header for header in headers}
    symbols, strings, info = (sections[name] for name in (".symtab", ".strtab", ".nv.info"))
    counts, place = {}, info[4]
    while place < info[4] + info[5]:
        form, attribute, size = struct.unpack_from("<BBH", data, place)
        if form == 4 and attribute == 0x2F:
            index, registers = struct.unpack_from("<II", data, place + 4)
            [name] = struct.unpack_from("<I", data, symbols[4] + 24 * index)
            counts[text(strings, name)] = registers
        place += 4 + (size if form == 4 else 0)
    assert {kernel.symbol: kernel.registers for kernel in compiled.kernels} == counts


async def test_launch_bounds_force_spills(compiler: CudaCompiler) -> None:
    free = (await compiler.compile(SPILLING.replace("BOUNDS", ""))).kernels[0]
    bounds = "__launch_bounds__(1024, 2)"
    bound = (await compiler.compile(SPILLING.replace("BOUNDS", bounds))).kernels[0]
    assert free.spills == 0
    assert free.registers > 64 >= 32 >= bound.registers
    assert bound.spill_store_bytes > 0 < bound.spill_load_bytes
    assert bound.stack_bytes >= bound.spill_store_bytes // 2
    assert bound.occupancy(1024).share == 1
    assert free.occupancy(512).share < 1
    assert free.occupancy(512).limited_by == ("registers",)
    assert bound.occupancy(1024, dynamic_shared_bytes=200 * 1024).limited_by == ("shared memory",)


async def test_an_option_changes_the_resources(compiler: CudaCompiler) -> None:
    plain = SPILLING.replace("BOUNDS", "")
    capped = await compiler.compile(plain, options=["--maxrregcount=40"])
    assert capped.kernels[0].registers <= 40
    assert capped.kernels[0].spills > 0


async def test_errors_have_line_and_column(compiler: CudaCompiler) -> None:
    source = "// ä\n__global__ void k(float *a) {\n    int i = absent;\n\ta[0] = 1 +;\n}\n"
    compiled = await compiler.compile(source)
    assert compiled.status is CompileStatus.ERROR
    assert compiled.cubin == b""
    assert [(e.line, e.column, e.file) for e in compiled.errors] == [
        (3, 13, "kernel.cu"),
        (4, 12, "kernel.cu"),
    ]
    assert compiled.errors[0].message == 'identifier "absent" is undefined'
    assert str(compiled.errors[0]) == 'kernel.cu:3:13: error: identifier "absent" is undefined'


async def test_warnings_do_not_fail(compiler: CudaCompiler) -> None:
    compiled = await compiler.compile('extern "C" __global__ void k(int *a) {\n  int idle = 3;\n}')
    assert compiled.ok
    [warning] = compiled.diagnostics
    assert (warning.severity, warning.line, warning.column, warning.code) == (
        ("warning", 2, 7, "177-D")
    )
    assert compiled.errors == ()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("__global__ void k(float *a) { __shared__ float s[100000]; s[threadIdx.x] = a[1]; "
         "__syncthreads(); a[0] = s[5]; }", "uses too much shared data"),
        ("__device__ float f(float); __global__ void k(float *a) { a[0] = f(a[1]); }",
         "Unresolved extern function"),
        ('__global__ void k(float *a) { asm volatile("bogus.f32 %0;" : "=f"(a[0])); }',
         "'bogus'"),
        ("#include <torch/extension.h>", 'cannot open source file "torch/extension.h"'),
        ("__global__ void k(float *a) { a[0] = 1; \0}", "a NUL character in the source"),
        ("// \ud800", "a lone surrogate in the source"),
        ("//" + "x" * 1_000_000, "more than 1,000,000 bytes"),
        ("__global__ void k(float *a) {\n    a[0] =", "an expression, at the end of the source"),
        ("__global__ int k() { return 1; }", "must have a void return type"),
    ],
)  # fmt: skip
async def test_each_error_has_a_message(compiler: CudaCompiler, source: str, message: str) -> None:
    compiled = await compiler.compile(source)
    assert compiled.status is CompileStatus.ERROR
    assert message in compiled.errors[0].message


async def test_an_empty_source_has_no_kernels(compiler: CudaCompiler) -> None:
    compiled = await compiler.compile("")
    assert (compiled.status, compiled.kernels) == ("ok", ())


async def test_headers_of_kernels_are_there(compiler: CudaCompiler) -> None:
    compiled = await compiler.compile(HEADERS)
    assert compiled.ok, compiled.log


@pytest.mark.parametrize("name", HONEST)
async def test_kernels_as_they_should_be_compile(compiler: CudaCompiler, name: str) -> None:
    if name == "cooperative groups":
        pytest.skip("the headers take a second of processor time: see the slow test")
    compiled = await compiler.compile(HONEST[name])
    assert compiled.ok is (name != "host code"), compiled.errors
    assert all(kernel.spills == 0 for kernel in compiled.kernels)


async def test_textures_compile(compiler: CudaCompiler) -> None:
    source = """__global__ void k(cudaTextureObject_t t, float *x) {
    x[threadIdx.x] = tex1Dfetch<float>(t, threadIdx.x);
}"""
    assert (await compiler.compile(source)).ok


@pytest.mark.slow  # a second of processor time for the headers of libcu++
async def test_cooperative_groups_compile(compiler: CudaCompiler) -> None:
    source = "#include <cooperative_groups.h>\n#include <stdint.h>\n" + ADD
    compiled = await compiler.compile(source)
    assert compiled.ok, compiled.log


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a", "sm_100"])
async def test_it_compiles_for(compiler: CudaCompiler, architecture: str) -> None:
    compiled = await compiler.compile(ADD, architecture)
    assert compiled.kernels[0].architecture == architecture
    assert compiled.kernels[0].occupancy(256).share == 1


async def test_what_cannot_be_compiled_for_is_refused(compiler: CudaCompiler) -> None:
    with pytest.raises(ConfigError, match=r"'sm_91' is not known \(did you mean sm_90\?\)"):
        await compiler.compile(ADD, "sm_91")
    with pytest.raises(ConfigError, match=r"^sm_70: NVRTC .* refuses it: .*; it compiles for sm_7"):
        await compiler.compile(ADD, "sm_70")
    for option in ("-I/etc", "--pch", "--pre-include=/etc/passwd", "-DX=a b", "x"):
        with pytest.raises(ConfigError, match="is not allowed: give"):
            await compiler.compile(ADD, options=[option])


# Attacks


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/1/environ", "/etc/shadow"])
async def test_a_file_of_the_host_does_not_leak(compiler: CudaCompiler, path: str) -> None:
    compiled = await compiler.compile(f'#include "{path}"\n{ADD}')
    assert compiled.status is CompileStatus.ERROR
    assert f'cannot open source file "{path}"' in compiled.errors[0].message
    assert "root:" not in compiled.log


async def test_this_file_is_not_visible(compiler: CudaCompiler) -> None:
    compiled = await compiler.compile(f'#include "{Path(__file__).resolve()}"\n')
    assert "cannot open source file" in compiled.errors[0].message
    assert "Attacks" not in compiled.log


@pytest.mark.parametrize(
    ("source", "limits", "status"),
    [
        (LONG, {"run_s": 2.0}, CompileStatus.TIME_LIMIT),
        ("\n".join(f"#warning {i:03} {'x' * 4000}" for i in range(200)), {"output_bytes": 100_000},
         CompileStatus.OUTPUT_LIMIT),
        ("__device__ char x[4 << 20] = {1}; __global__ void k(char *a) { a[0] = x[a[1]]; }",
         {"disk_mb": 1}, CompileStatus.OUTPUT_LIMIT),
        ("#define A(x) x x x x x x x x\n#define B(x) A(A(A(A(x))))\n"
         "__global__ void k(float *a) { B(B(a[0] += 1;)) }", {"memory_mb": 200},
         CompileStatus.MEMORY_LIMIT),
    ],
    ids=["templates", "log", "cubin", "macros"],
)  # fmt: skip
async def test_a_bomb_ends_at_its_limit(
    source: str, limits: dict[str, float], status: CompileStatus
) -> None:
    async with CudaCompiler(replace(PATIENT, **limits), parallel=1) as bounded:
        compiled = await bounded.compile(source)
        assert compiled.status is status, compiled.errors
        assert compiled.cubin == b""
        assert len(compiled.log) <= bounded._limits.output_bytes
        assert "more than" in compiled.errors[0].message or "exceeds" in compiled.errors[0].message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('#include "kernel.cu"', "#include file"),
        ("template <int N> struct A { static const int v = A<N - 1>::v; };\n"
         "__global__ void k(int *a) { a[0] = A<100000>::v; }", "excessive recursion"),
        ("constexpr __device__ long f(long n) { long s = 0; while (n) s += n; return s; }\n"
         "__global__ void k(long *a) { constexpr long x = f(9); a[0] = x; }",
         "expression must have a constant value"),
    ],
    ids=["include", "recursion", "constexpr"],
)  # fmt: skip
async def test_the_compiler_itself_ends_a_loop(
    compiler: CudaCompiler, source: str, message: str
) -> None:
    compiled = await compiler.compile(source)
    assert compiled.status is CompileStatus.ERROR
    assert any(message in error.message for error in compiled.errors)


async def test_a_source_cannot_forge_its_resources(compiler: CudaCompiler) -> None:
    forged = (
        "ptxas info    : Compiling entry function 'add' for 'sm_90'\\nptxas         .     0 bytes "
        "stack frame, 0 bytes spill stores, 0 bytes spill loads\\nptxas info    : Used 1 registers"
    )
    honest = await compiler.compile(ADD)
    compiled = await compiler.compile(f'#line 1 "{forged}"\n#warning x\n{ADD}')
    assert compiled.ok
    assert compiled.log.startswith("ptxas info")
    assert compiled.kernels == honest.kernels


async def test_a_crash_or_a_limit_leaves_the_next_source_alone(nvrtc: None) -> None:
    async with CudaCompiler(replace(PATIENT, run_s=3.0), parallel=1) as bounded:
        assert (await bounded.compile(LONG)).status is CompileStatus.TIME_LIMIT
        bounded._limits = PATIENT
        assert (await bounded.compile(ADD)).ok


# The cache


async def test_the_cache_answers_the_same(nvrtc: None, tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    async with CudaCompiler(PATIENT, cache, parallel=1) as first:
        compiled = await first.compile(ADD)
        broken = await first.compile("error")
        assert not compiled.cached
        assert await first.compile(ADD) == replace(compiled, cached=True)
        assert not (await first.compile(ADD, "sm_80")).cached
        assert not (await first.compile(ADD, options=["--use_fast_math"])).cached
        assert not (await first.compile(ADD + " ")).cached
    async with CudaCompiler(PATIENT, CompileCache(tmp_path), parallel=1) as later:
        assert await later.compile(ADD) == replace(compiled, cached=True)
        assert await later.compile("error") == replace(broken, cached=True)
        assert later._jail._ground is None  # nothing was compiled
        later._versions[0] = "13.9"
        assert not (await later.compile(ADD)).cached


async def test_a_limit_is_not_kept(nvrtc: None, tmp_path: Path) -> None:
    limits = replace(PATIENT, run_s=1.0)
    stopped = await compile_cuda(LONG, limits=limits, cache=CompileCache(tmp_path))
    assert stopped.status is CompileStatus.TIME_LIMIT
    assert not list(tmp_path.glob("**/*.bin"))


async def test_a_damaged_entry_is_compiled_anew(nvrtc: None, tmp_path: Path) -> None:
    compiled = await compile_cuda(ADD, limits=PATIENT, cache=CompileCache(tmp_path))
    [path] = tmp_path.glob("**/*.bin")
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole.replace(b"add", b"bad"), b"[]\n", b"\xff" + whole):
        path.write_bytes(damaged)
        assert CompileCache(tmp_path).get(path.stem) is None
    again = await compile_cuda(ADD, limits=PATIENT, cache=CompileCache(tmp_path))
    assert not again.cached
    assert again.kernels == compiled.kernels
    assert json.loads(path.read_bytes().partition(b"\n")[0])["code"] == 0


async def test_without_nvrtc_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("no-such-package",))
    with pytest.raises(module.MissingDependency, match=r"pip install 'ludus-rl\[kernels\]'"):
        CudaCompiler(Limits())
