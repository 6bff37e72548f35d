# ruff: noqa: E501 - sources of kernels, one a line
"""Each rule finds what it is for, and leaves alone what only looks like it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tree_sitter_cuda", reason="needs tree-sitter-cuda: ludus-rl[kernels]")

import ludus
from ludus.kernels.analysis import RULES, Finding, Severity, analyse
from ludus.kernels.analysis.pitfalls import bank_ways
from tests.kernels.analysis.honest import HONEST


def kernel(body: str, parameters: str = "float *a, float *b, int n", before: str = "") -> str:
    return f'{before}\nextern "C" __global__ void k({parameters}) {{\n{body}\n}}\n'


def host(body: str, before: str = "") -> str:
    return (
        f"{before}\n__global__ void k(float *a) {{ a[threadIdx.x] = 1; }}\nvoid run() {{ {body} }}"
    )


T = "int t = threadIdx.x; int i = blockIdx.x * blockDim.x + threadIdx.x;"
TILE = f"__shared__ float s[256]; {T}"
TILE2 = "__shared__ float s[32][32]; int x = threadIdx.x, y = threadIdx.y;"

BAD = {
    "system-call": [
        host('system("ls");'),
        host('std::system("ls");'),
        host("auto f = &system;"),
        host('RUN("ls");', "#define RUN system"),
        host("pid_t p = fork();"),
        host("kill(1, 9);"),
        host("long r = syscall(59, 0);"),
    ],
    "file-access": [
        host('FILE *f = fopen("x", "r");'),
        host('std::ifstream f("/etc/passwd");'),
        host('std::filesystem::remove_all("/");'),
        host('int d = open("x", 0);'),
        host('char *v = getenv("HOME");'),
        host('READ("x");', "#define READ(p) open(p, 0)"),
    ],
    "network-access": [
        host("int s = socket(2, 1, 0);"),
        host("connect(s, 0, 0);"),
        host("struct sockaddr_in address;"),
    ],
    "dynamic-loading": [
        host('void *h = dlopen("libc.so.6", 1);'),
        host("cuModuleLoadData(&m, image);"),
        host("mprotect(p, 4096, 7);"),
    ],
    "foreign-memory": [
        host("void *p = mmap(0, 4096, 3, 2, 1, 0);"),
        host("cudaIpcOpenMemHandle(&p, h, 1);"),
    ],
    "host-header": ["#include <unistd.h>\n", "#include <sys/mman.h>\n", "#include <fstream>\n"],
    "include-path": [
        '#include "/etc/passwd"\n', "#include </proc/self/environ>\n", '#include "../secret.h"\n',
        "#define WHERE <x.h>\n#include WHERE\n",
    ],
    "inline-assembly": [
        kernel('asm volatile("trap;");'),
        kernel('unsigned x; asm("mov.u32 %0, %%clock;" : "=r"(x)); a[0] = x;'),
        kernel("TRAP;", before='#define TRAP asm volatile("trap;")'),
    ],
    "token-pasting": [
        host('CAT(sys, tem)("ls");', "#define CAT(a, b) a##b"),
        host('X(s)("ls");', "#define X(a) a ## ystem"),
    ],
    "hidden-name": [
        host('sys\\\ntem("ls");'),
        host('\\u0073ystem("ls");'),
        kernel("while (n) { a[0] = 1; n--; }", before="#define while if"),
        kernel("int caf\u200be = 1; a[0] = cafe;"),
    ],
    "line-directive": ['#line 1 "other.cu"\n' + kernel("a[0] = 1;")],
    "unreadable": [
        kernel("a[0] = ;;) 1"),
        kernel("a[0] = " + "(" * 250 + "1" + ")" * 250 + ";"),
        "// " + "x" * 100_001,
        kernel("a[0] = 1; // \0"),
    ],
    "endless-loop": [
        kernel("while (true) a[0] += 1;"),
        kernel("while (1) { a[0] += 1; }"),
        kernel("for (;;) { a[0] += 1; }"),
        kernel("do { a[0] += 1; } while (1 == 1);"),
        kernel("for (;;) { for (int i = 0; i < n; i++) if (a[i] > 0) break; }"),
        kernel("while (true) { switch (n) { case 0: break; } }"),
        kernel("int i = 0; while (i < n) { a[0] += 1; }"),
        kernel("for (int i = 0; i < n; i--) a[i] = 0;"),
        kernel("for (int i = 0, j = 0; i < n; j++) a[i] = 0;"),
        kernel("for (unsigned i = n; i >= 0; i--) a[i] = 0;"),
    ],
    "spin-wait": [
        kernel("while (atomicCAS(lock, 0, 1) != 0);", "float *a, int *lock"),
        kernel("while (flag[0] == 0);", "float *a, volatile int *flag"),
        kernel("while (*flag == 0) {}", "float *a, volatile int *flag"),
    ],
    "leak": [
        kernel("float *p = (float *)malloc(n); p[0] = 1; a[0] = p[0];"),
        kernel("float *p = new float[4]; a[0] = p[0];"),
        host("float *d; cudaMalloc(&d, 400); k<<<1, 1>>>(d);"),
        host("float *d; cudaMalloc((void **)&d, 400); cudaFree(e);"),
        host("cudaStream_t s; cudaStreamCreate(&s);"),
    ],
    "barrier-in-branch": [
        kernel("if (threadIdx.x < 16) __syncthreads();"),
        kernel(f"{T} if (i < n) {{ a[i] = 1; __syncthreads(); }}"),
        kernel("for (int i = threadIdx.x; i < n; i += blockDim.x) { a[i] = 0; __syncthreads(); }"),
        kernel("int lane = threadIdx.x % 32; bool first = lane == 0; if (first) __syncthreads();"),
        kernel("if (threadIdx.x) { wait(); }",
               before="__device__ void wait() { __syncthreads(); }"),
        kernel("if (a[threadIdx.x] > 0) { __syncthreads(); }"),
        kernel("int go = 0; if (threadIdx.x > 3) go = 1; while (go) { __syncthreads(); go--; }"),
        kernel("switch (threadIdx.x) { case 0: __syncthreads(); }"),
    ],
    "barrier-after-exit": [
        kernel(f"{TILE} if (i >= n) return; s[t] = a[i]; __syncthreads(); a[i] = s[255 - t];"),
        kernel("if (threadIdx.x > 8) { return; } __syncthreads();"),
    ],
    "shared-race": [
        kernel(f"{TILE} s[t] = a[i]; b[i] = s[255 - t];"),
        kernel(f"{TILE} s[t] = a[i]; b[i] = s[t + 1];"),
        kernel(f"{TILE} if (t == 0) s[0] = a[0]; b[i] = s[0];"),
        kernel(
            f"{TILE} s[t] = a[i]; __syncthreads();"
            "for (int w = 128; w > 0; w >>= 1) { if (t < w) s[t] += s[t + w]; }"
        ),
        kernel(
            f"{TILE2} float sum = 0; for (int m = 0; m < n; m++) {{ s[y][x] = a[m * 32 + x];"
            "__syncthreads(); for (int k = 0; k < 32; k++) sum += s[y][k] * s[k][x]; } b[x] = sum;"
        ),
        kernel(f"{TILE2} s[y][x] = a[y * 32 + x]; b[y * 32 + x] = s[x][y];"),
        kernel(f"{TILE} s[t] = 0; atomicAdd(&s[(int)a[i]], 1.0f); __syncthreads(); b[i] = s[t];"),
        kernel(f"extern __shared__ float d[]; {T} d[t] = a[i]; b[i] = d[blockDim.x - 1 - t];"),
        kernel(f"{TILE} s[t] = a[i]; __syncwarp(); b[i] = 0; s[t] = 1; float z = s[t ^ 1]; b[i] = z;"),
    ],
    "shared-too-large": [
        kernel("__shared__ float s[16384]; s[threadIdx.x] = 1;"),
        kernel("__shared__ double s[128][64]; s[0][threadIdx.x] = 1;"),
        kernel("__shared__ float s[N][N]; s[0][threadIdx.x] = 1;", before="#define N 128"),
    ],
    "bank-conflict": [
        kernel(f"{TILE2} b[x] = s[x][0];"),
        kernel(f"{TILE2} s[x][y] = a[y * 32 + x];"),
        kernel(f"{TILE} s[t * 2] = a[i];"),
        kernel(f"{TILE} s[32 * t + 1] = a[i];"),
        kernel("__shared__ float s[N][N]; s[threadIdx.x][threadIdx.y] = 1;",
               before="#define N 64"),
        kernel("const int W = 16; __shared__ float s[16][W]; s[threadIdx.x][threadIdx.y] = 1;"),
        kernel(f"{TILE} for (int w = 1; w < 256; w *= 2) {{ int j = 2 * w * t; s[j] = a[i]; }}"),
        kernel("__shared__ double s[32][32]; s[threadIdx.x][0] = 1;"),
    ],
    "uncoalesced": [
        kernel(f"{T} for (int j = 0; j < n; j++) b[i] += a[i * n + j];"),
        kernel(f"{T} b[i] = a[i * 2];"),
        kernel("int row = threadIdx.x, col = threadIdx.y; a[row * n + col] = 0;"),
        kernel(f"{T} b[i << 3] = 1;"),
        kernel("b[threadIdx.x * WIDTH] = 0;", before="#define WIDTH 64"),
        kernel("#pragma unroll\nfor (int j = 0; j < 4; j++) b[threadIdx.x * 4 + j] = 0;"),
    ],
    "warp-divergence": [
        kernel(f"{T} if (t % 2 == 0) a[i] = 1; else a[i] = 2;"),
        kernel(f"{T} if (i & 1) a[i] = 1;"),
        kernel(f"{T} switch (t % 4) {{ case 0: a[i] = 1; break; default: a[i] = 2; }}"),
        kernel(f"{T} for (int w = 1; w < 256; w *= 2) if (t % (2 * w) == 0) a[i] += 1;"),
    ],
}  # fmt: skip

GOOD = {
    "system-call": [
        "// system(\"ls\")\n" + kernel("a[0] = 1;"),
        kernel('printf("system");'),
        kernel("a[0] = system(1.0f);", before="__device__ float system(float x) { return x; }"),
        kernel("a[0] = box.kill(1);", "float *a, Box box"),
        host('#if 0\nsystem("ls");\n#endif\n'),
        kernel("float wait = a[0]; a[1] = wait;"),
    ],
    "file-access": [
        kernel("float open = a[0], read = a[1]; b[0] = open + read;"),
        kernel("a[0] = read(b);", before="__device__ float read(float *p) { return p[0]; }"),
    ],
    "network-access": [kernel("int send = n; a[0] = send;"), kernel("a[0] = q.send(1);")],
    "dynamic-loading": [kernel("// dlopen\na[0] = 1;")],
    "foreign-memory": [kernel("float mmap2 = 1; a[0] = mmap2;")],
    "host-header": ["#include <cuda_runtime.h>\n#include <math.h>\n#include <cooperative_groups.h>\n"],
    "include-path": ['#include <cuda/std/array>\n#include "helpers.cuh"\n'],
    "inline-assembly": [kernel("// asm\nfloat asmx = 1; a[0] = asmx;")],
    "token-pasting": [kernel("a[0] = MAX(a[0], 1);", before="#define MAX(x, y) ((x) > (y) ? (x) : (y))")],
    "hidden-name": [
        kernel("a[0] = SUM(a[0],\\\n a[1]);", before="#define SUM(x, y) \\\n  ((x) + (y))"),
        kernel('printf("\\u00e9");'),
    ],
    "line-directive": ["#pragma once\n" + kernel("#pragma unroll\nfor (int i = 0; i < 4; i++) a[i] = 0;")],
    "unreadable": [kernel("a[0] = " + "(" * 20 + "1" + ")" * 20 + ";")],
    "endless-loop": [
        kernel("while (true) { if (a[0] > 1) break; a[0] += 1; }"),
        kernel("for (;;) { if (n-- == 0) return; }"),
        kernel("for (int i = 0; i < n; i++) a[i] = 0;"),
        kernel("for (int i = n; i > 0; i >>= 1) a[i] = 0;"),
        kernel("for (int i = n - 1; i >= 0; --i) a[i] = 0;"),
        kernel("for (int i = 0; n > i; i += 2) a[i] = 0;"),
        kernel("int lo = 0, hi = n; while (lo < hi) { int m = (lo + hi) / 2; if (a[m] < 1) lo = m + 1; else hi = m; }"),
        kernel("int i = 0; while (i < n) { step(&i); }"),
        kernel("do { n /= 2; } while (n > 0);"),
        kernel("while (next(&n)) { a[0] += 1; }"),
    ],
    "spin-wait": [
        kernel("int old = n, seen; do { seen = old; old = atomicCAS(p, seen, seen + 1); } while (seen != old);", "int *p, int n"),
        kernel("int i = 0; while (a[i] > 0) i++;"),
    ],
    "leak": [
        kernel("float *p = (float *)malloc(n); a[0] = p[0]; free(p);"),
        kernel("float *p = new float[4]; a[0] = p[0]; delete[] p;"),
        host("float *d; cudaMalloc(&d, 400); k<<<1, 1>>>(d); cudaFree(d);"),
        "float *make() { float *d; cudaMalloc(&d, 4); return d; }",
        host("cudaStream_t s; cudaStreamCreate(&s); cudaStreamDestroy(s);"),
    ],
    "barrier-in-branch": [
        kernel("if (blockIdx.x == 0) __syncthreads();"),
        kernel("for (int i = 0; i < n; i++) { __syncthreads(); }"),
        kernel("if (n > 4) { __syncthreads(); }"),
        kernel("if (__syncthreads_or(a[threadIdx.x] > 0)) { __syncthreads(); }"),
        kernel("for (int w = blockDim.x / 2; w > 0; w >>= 1) { if (threadIdx.x < w) a[0] = 1; __syncthreads(); }"),
        kernel("if (threadIdx.x < 32) { __syncwarp(); }"),
    ],
    "barrier-after-exit": [
        kernel("if (n == 0) return; __syncthreads();"),
        kernel("__syncthreads(); if (threadIdx.x > 0) return; a[0] = 1;"),
    ],
    "shared-race": [
        kernel(f"{TILE} s[t] = a[i]; __syncthreads(); b[i] = s[255 - t];"),
        kernel(f"{TILE} s[t] = a[i]; b[i] = s[t] * 2;"),
        kernel(f"{TILE} s[threadIdx.x] = a[i]; s[t] += 1; b[i] = s[threadIdx.x];"),
        kernel(f"{TILE} if (t == 0) {{ s[0] = 1; s[1] = s[0] + 1; }} __syncthreads(); b[i] = s[1];"),
        kernel(
            f"{TILE} s[t] = a[i]; __syncthreads();"
            "for (int w = 128; w > 0; w >>= 1) { if (t < w) s[t] += s[t + w]; __syncthreads(); }"
            "if (t == 0) b[0] = s[0];"
        ),
        kernel(f"{TILE} s[t] = 0; __syncthreads(); atomicAdd(&s[(int)a[i]], 1.0f); __syncthreads(); b[i] = s[t];"),
        kernel(f"{TILE} atomicAdd(&s[t & 7], 1.0f); atomicAdd(&s[t & 3], 1.0f);"),
        kernel(f"{TILE} s[t] = a[i]; block.sync(); b[i] = s[255 - t];"),
        kernel(f"{TILE} s[t] = a[i]; WAIT; b[i] = s[255 - t];", before="#define WAIT __syncthreads()"),
        kernel(f"{TILE} s[t] = a[i]; rest(); b[i] = s[255 - t];", before="__device__ void rest() { __syncthreads(); }"),
        kernel(
            "__shared__ float s[2][256]; int t = threadIdx.x; s[0][t] = a[t]; __syncthreads();"
            "s[1][t] = s[0][255 - t]; __syncthreads(); b[t] = s[1][t ^ 1];"
        ),
    ],
    "shared-too-large": [
        kernel("__shared__ float s[12288]; s[threadIdx.x] = 1;"),
        kernel("extern __shared__ float s[]; s[threadIdx.x] = 1;"),
    ],
    "bank-conflict": [
        kernel(f"{TILE2} s[y][x] = a[y * 32 + x];"),
        kernel("__shared__ float s[32][33]; b[threadIdx.x] = s[threadIdx.x][0];"),
        kernel(f"{TILE} s[t * 3] = a[i];"),
        kernel("__shared__ double s[256]; s[threadIdx.x] = 1;"),
        kernel("__shared__ float4 s[64]; s[threadIdx.x] = make_float4(0, 0, 0, 0);"),
        kernel("__shared__ half s[256]; s[threadIdx.x] = 1;"),
        kernel(f"{TILE2} b[x] = s[y][0];"),
        kernel(f"{TILE} s[lookup[t]] = a[i];"),
        kernel("__shared__ float s[N][N + 1]; s[threadIdx.x][threadIdx.y] = 1;", before="#define N 32"),
    ],
    "uncoalesced": [
        kernel(f"{T} b[i] = a[i] + a[i + 1] + a[n - i];"),
        kernel("int row = threadIdx.y, col = threadIdx.x; b[row * n + col] = a[col];"),
        kernel("for (int i = threadIdx.x; i < n; i += blockDim.x) a[i] = 0;"),
        kernel(f"{T} b[i] = a[index[i]];", "float *a, float *b, int *index"),
        kernel(f"{T} float local[8]; local[t * 2 % 8] = 1; b[i] = local[0];"),
    ],
    "warp-divergence": [
        kernel(f"{T} if (t % 32 == 0) a[i] = 1;"),
        kernel(f"{T} if (i < n) a[i] = 1;"),
        kernel(f"{T} if ((t & 31) == 0) a[i] = 1;"),
        kernel(f"{T} if (n % 2) a[i] = 1;"),
        kernel(f"{T} if (t / 32 % 2) a[i] = 1;"),
    ],
}  # fmt: skip


def cases(table: dict[str, list[str]]) -> list[object]:
    return [
        pytest.param(rule, source, id=f"{rule}-{number}")
        for rule, sources in table.items()
        for number, source in enumerate(sources)
    ]


def test_the_documented_rules_are_these() -> None:
    page = (Path(ludus.__file__).parents[1] / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = [
        line for line in page.splitlines() if re.match(r"\| `[a-z-]+` \| (safety|corr|perf)", line)
    ]
    assert rows == [
        f"| `{name}` | {rule.kind} | {rule.severity} | {rule.risk:g} | {rule.summary} |"
        for name, rule in RULES.items()
    ]


def test_each_rule_has_both_kinds_of_tests() -> None:
    assert BAD.keys() == GOOD.keys() == RULES.keys()


@pytest.mark.parametrize(("rule", "source"), cases(BAD))
def test_a_rule_finds(rule: str, source: str) -> None:
    found = analyse(source)
    assert rule in found.rules, found.findings
    assert found.risk >= RULES[rule].risk - 1e-9
    assert any(reason.startswith(f"{rule} (") for reason in found.reasons)


@pytest.mark.parametrize(("rule", "source"), cases(GOOD))
def test_a_rule_leaves_alone(rule: str, source: str) -> None:
    found = analyse(source)
    assert rule not in found.rules, found.findings


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_kernel_has_no_errors(name: str) -> None:
    found = analyse(HONEST[name])
    assert [item for item in found.findings if item.severity is Severity.ERROR] == []
    assert found.safe


def test_a_finding_has_its_place() -> None:
    found = analyse("// ä\n__global__ void k(float *a) {\n  while (true) a[0] = 1;\n}\n")
    [item] = found.findings
    assert (item.line, item.column, item.rule, item.kind) == (3, 3, "endless-loop", "safety")
    assert item.severity is Severity.ERROR
    assert str(item) == (
        "3:3: error: endless-loop: the condition is always true, and nothing ends it; give the "
        "loop a condition that ends it"
    )
    assert not found.safe
    assert found.risk == pytest.approx(0.6)


def test_the_risk_counts_each_rule_once() -> None:
    one = kernel("if (threadIdx.x % 2) a[threadIdx.x] = 1;")
    two = kernel("if (threadIdx.x % 2) a[threadIdx.x] = 1; if (threadIdx.x % 4) a[threadIdx.x]=2;")
    assert len(analyse(two).findings) == 2
    assert analyse(one).risk == analyse(two).risk == pytest.approx(0.1)
    assert analyse("").risk == 0
    both = analyse(BAD["system-call"][0] + BAD["leak"][0])
    assert both.risk == pytest.approx(1 - 0.1 * 0.7)
    assert [reason.partition(" ")[0] for reason in both.reasons] == ["system-call", "leak"]


@pytest.mark.parametrize(
    ("stride", "size", "ways"),
    [(0, 4, 1), (1, 4, 1), (2, 4, 2), (3, 4, 1), (32, 4, 32), (33, 4, 1), (16, 4, 16), (-2, 4, 2),
     (1, 8, 1), (2, 8, 2), (16, 8, 16), (1, 16, 1), (1, 2, 1), (64, 2, 32), (1, 1, 1)],
)  # fmt: skip
def test_bank_ways(stride: int, size: int, ways: int) -> None:
    assert bank_ways(stride, size) == ways


PIECES = [
    "__global__", "void", "k", "(", ")", "{", "}", "[", "]", "if", "for", "while", "threadIdx.x",
    "__shared__ float s[32];", "s[t]", "=", "1", ";", "__syncthreads();", "#define X", "\n", "\\",
    "a##b", "int t = threadIdx.x;", "?", "template <int N>", "/*", "\"", "é", "\0", "new", "asm(",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=60))
def test_any_text_can_be_analysed(pieces: list[str]) -> None:
    found = analyse(" ".join(pieces))
    assert all(isinstance(item, Finding) and item.line >= 1 for item in found.findings)
    assert 0 <= found.risk <= 1


@pytest.mark.parametrize(
    "source",
    [
        kernel(TILE + "for (int i = 0; i < n; i++) {" * 60 + "s[t] = a[0];" + "}" * 60),
        kernel(
            "int v0 = a[0];"
            + "".join(f"int v{i + 1} = v{i} * v{i};" for i in range(60))
            + "a[v60] = 1;"
        ),
        kernel(TILE + "s[t] = a[i + 1]; b[i] = s[t + 1];\n" * 2_400),
        host("float *p; cudaMalloc(&p, 1);" * 3_000),
        "(" * 90_000,
    ],
    ids=["loops", "names", "statements", "allocations", "parentheses"],
)
@pytest.mark.timeout(60)  # far above what it takes: without their bounds, hours
def test_a_source_cannot_make_the_analysis_hang(source: str) -> None:
    analyse(source)
