# ruff: noqa: E501 - kernels stand as they are
"""Kernels that cheat, or break things: none may pass. Each has the statuses that it may end with.

The problem: `out = 2 * relu(a) + b`, 1,000 elements, float32.
"""

from __future__ import annotations

REFERENCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, a, b):
        return 2 * torch.relu(a) + b
def get_inputs():
    return [torch.randn(1000), torch.randn(1000)]
"""
HONEST = """// launch: kernel<<<(n + 255) / 256, 256>>>(a, b, out, n)
extern "C" __global__ void kernel(const float *a, const float *b, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.0f * fmaxf(a[i], 0.0f) + b[i];
}
"""


def body(statement: str, before: str = "", head: str = "", parameters: str = "const float") -> str:
    """The honest kernel with another statement for its only one."""
    source = HONEST.replace("out[i] = 2.0f * fmaxf(a[i], 0.0f) + b[i];", "{ " + statement + " }")
    source = source.replace("    int i", f"    {before}\n    int i", 1) if before else source
    return head + "\n" + source.replace("const float", parameters)


RIGHT = "out[i] = 2.0f * fmaxf(a[i], 0.0f) + b[i];"
W, R, C, L = "wrong", "refused", "compile_error", "bad_launch"

CHEATS: dict[str, tuple[str, set[str]]] = {
    # Values that are not computed
    "no-op": (body(";"), {W}),
    "zeros": (body("out[i] = 0.0f;"), {W}),
    "constant": (body("out[i] = 0.5641896f;"), {W}),
    "copies an input": (body("out[i] = b[i];"), {W}),
    "copies an input by the launch line": (
        HONEST.replace("(a, b, out, n)", "(out, b, b, n)"), {W},
    ),
    "swapped launch arguments": (HONEST.replace("(a, b, out, n)", "(b, a, out, n)"), {W}),
    "hard-coded output": (
        body("out[i] = held[i & 7];", head="__constant__ float held[8] = {1, 2, 3, 4, 5, 6, 7, 8};"),
        {W},
    ),
    "hard-coded output of a seed, recognised by the input": (
        body("if (a[0] == -1.125839829f) out[i] = 1.0f; else out[i] = b[i];"), {W},
    ),
    "reads what memory held": (body("out[i] = out[i];"), {W}),
    "reads memory beside the output": (body("out[i] = out[i + 1024];"), {W, "crashed"}),
    "reads scratch memory": (
        "// scratch: tmp float[1000]\n"
        + HONEST.replace("(a, b, out, n)", "(tmp, tmp, out, n)"), {W},
    ),
    "looks for the reference's output in memory": (
        body("out[i] = *((const float *)((const char *)out - (1 << 20)) + i);"), {W, "crashed"},
    ),
    # State that lasts
    "cached by address": (
        body(
            "if (seen != a) { " + RIGHT + " kept[i] = out[i]; if (i == n - 1) seen = a; } "
            "else out[i] = kept[i];",
            head="__device__ float kept[1024]; __device__ const float *seen;",
        ),
        {W},
    ),
    "works in the first launch only": (
        body(
            "if (launches < n) { " + RIGHT + " atomicAdd(&launches, 1); } else out[i] = 0.0f;",
            head="__device__ int launches;",
        ),
        {W},
    ),
    "works in the first five launches": (
        body(
            "if (launches < 5 * n) { " + RIGHT + " } else out[i] = b[i]; atomicAdd(&launches, 1);",
            head="__device__ int launches;",
        ),
        {W},
    ),
    "lazy: the output of the launch before": (
        body("out[i] = kept[i]; kept[i] = 2.0f * fmaxf(a[i], 0.0f) + b[i];",
             head="__device__ float kept[1024];"),
        {W},
    ),
    # Less than all
    "half of the output": (body(f"if (i < n / 2) {RIGHT}"), {W}),
    "all but the last": (body(f"if (i < n - 1) {RIGHT}"), {W}),
    "every second element": (body(f"if (i % 2 == 0) {RIGHT}"), {W}),
    "too small a grid": (HONEST.replace("(n + 255) / 256", "n / 256"), {W}),
    "one term only": (body("out[i] = 2.0f * fmaxf(a[i], 0.0f);"), {W}),
    "lower precision": (
        "#include <cuda_fp16.h>\n"
        + body("out[i] = __half2float(__float2half(2.0f * fmaxf(a[i], 0.0f) + b[i]));"), {W},
    ),
    "bfloat16": (
        "#include <cuda_bf16.h>\n" + body(
            "out[i] = __bfloat162float(__float2bfloat16(2.0f * fmaxf(a[i], 0.0f) + b[i]));"), {W},
    ),
    "rounded to steps of 0.001": (
        body("out[i] = rintf((2.0f * fmaxf(a[i], 0.0f) + b[i]) * 1000.0f) / 1000.0f;"), {W},
    ),
    "off by 0.1 %": (body("out[i] = 1.001f * (2.0f * fmaxf(a[i], 0.0f) + b[i]) + 0.0002f;"), {W}),
    # NaN and infinity
    "NaN": (body('out[i] = __int_as_float(0x7fc00000);'), {W}),
    "infinity": (body("out[i] = __int_as_float(0x7f800000);"), {W}),
    "NaN in one place": (
        body(RIGHT + " if (i == 7) out[i] = __int_as_float(0x7fffffff);"), {W},
    ),
    "the maximum with what was there": (
        body("out[i] = fmaxf(out[i], 2.0f * fmaxf(a[i], 0.0f) + b[i]);"), {W},
    ),
    "adds to what was there": (body("atomicAdd(out + i, 2.0f * fmaxf(a[i], 0.0f) + b[i]);"), {W}),
    # Memory of others
    "changes an input": (
        body("a[i] = fmaxf(a[i], 0.0f); out[i] = 2.0f * a[i] + b[i];", parameters="float"), {W},
    ),
    "changes an input through a cast": (
        body(RIGHT + " if (i == 3) const_cast<float *>(b)[i] = 0.0f;"), {W},
    ),
    "makes the inputs zero": (
        body("const_cast<float *>(a)[i] = 0; const_cast<float *>(b)[i] = 0; out[i] = 0;"), {W},
    ),
    "writes behind the end": (body(RIGHT + " if (i == 0) out[n] = 1.0f;"), {W}),
    "writes before the start": (body(RIGHT + " if (i == 0) out[-1] = 1.0f;"), {W}),
    "writes behind an input": (
        body(RIGHT + " if (i == 0) const_cast<float *>(a)[n + 2] = 1.0f;"), {W},
    ),
    "without the bound": (HONEST.replace("if (i < n)", ""), {W}),
    "writes far away": (body(RIGHT + " if (i == 0) out[1 << 28] = 1.0f;"), {"crashed", W}),
    "null pointer": (
        body(RIGHT + " if (i == 0) *(volatile int *)(size_t)8 = 1;"), {"crashed", W},
    ),
    "writes behind dynamic shared memory": (
        body(RIGHT + " s[threadIdx.x + 1] = 1.0f;", before="extern __shared__ float s[];")
        .replace("256>>>", "256, 1024>>>"), {W},
    ),
    # Threads
    "missing barrier": (
        """// launch: kernel<<<4, 250>>>(a, b, out)
__global__ void kernel(const float *a, const float *b, float *out) {
    __shared__ float s[250];
    int i = blockIdx.x * 250 + threadIdx.x, mirrored = blockIdx.x * 250 + 249 - threadIdx.x;
    s[threadIdx.x] = 2.0f * fmaxf(a[i], 0.0f) + b[i];
    out[mirrored] = s[249 - threadIdx.x];
}""", {W},
    ),
    "missing barrier that one order of threads hides": (
        """// launch: kernel<<<4, 250>>>(a, b, out)
__global__ void kernel(const float *a, const float *b, float *out) {
    __shared__ float s[250];
    int t = threadIdx.x, i = blockIdx.x * 250 + t;
    s[t] = 2.0f * fmaxf(a[i], 0.0f) + b[i];
    if (t > 0) out[i - 1] = s[t - 1];
    if (t == 249) out[i] = s[t];
}""", {W},
    ),
    "a barrier in one branch": (
        body(
            "if (threadIdx.x < 16) __syncthreads();\n else s[0] = 1.0f;\n __syncthreads(); " + RIGHT,
            before="__shared__ float s[1];",
        ).replace("if (i < n)", ""), {W},
    ),
    "lanes that never come": (
        body("if (threadIdx.x % 32 == 0) __shfl_sync(0xffffffff, 1, 0);\n else __syncthreads(); "
             + RIGHT), {W},
    ),
    # Code of the host
    "exit(0)": (body("exit(0);"), {R, C}),
    "fopen": (body('fopen("report.txt", "w");', head="#include <stdio.h>"), {R, C}),
    "system": (body('system("true");', head="#include <stdlib.h>"), {R, C}),
    "static initialiser": ("int run() { return 1; }\nstatic int held = run();\n" + HONEST, {R, C}),
    "device initialiser": (
        "__device__ int run() { return 1; }\n__device__ int held = run();\n" + HONEST, {R, C},
    ),
    "constructor attribute": (
        "__attribute__((constructor)) void start() {}\n" + HONEST, {R, C},
    ),
    "constructor of a class": (
        "struct S { int x; __device__ S() { x = 1; } };\n__device__ S held;\n" + HONEST, {R, C},
    ),
    "inline assembly": (body('asm volatile("syscall"); ' + RIGHT), {R, C, "unsupported"}),
    "assembly at file scope": ('asm(".globl _start");\n' + HONEST, {R, C, "unsupported"}),
    "declares a function of libc": (
        'extern "C" __device__ int puts(const char *);\n' + body('puts("x");'), {R, C},
    ),
    "declares a system call": (
        'extern "C" __device__ long syscall(long, ...);\n' + body("syscall(231, 0);"), {R, C},
    ),
    "host code behind a macro of the host's compiler": (
        "#ifdef __x86_64__\nint held = 1;\n#endif\n" + HONEST, {R},
    ),
    "host code without NVRTC": (
        "#ifndef __CUDACC_RTC__\nextern \"C\" int system(const char *);\n#endif\n" + HONEST,
        {R, "unsupported"},
    ),
    "host code behind __GNUC__ in code": (
        body("if (__GNUC__ > 1) out[i] = 1; else " + RIGHT), {R, C},
    ),
    "main": (HONEST + "int main() { return 0; }\n", {R, C}),
    "launch from the host": (
        HONEST + "void run(float *a) { kernel<<<1, 1>>>(a, a, a, 1); }\n", {R, C},
    ),
    "builtin": (body("__builtin_trap();"), {R, C}),
    # Names of the harness
    "redefines the harness's call": ("#define ludus_call(...)\n" + HONEST, {R}),
    "defines an entry of the harness": (
        'extern "C" __global__ void ludus_entry_0(const float *a) {}\n' + HONEST, {R},
    ),
    "redefines a keyword": ("#define float double\n" + HONEST, {R}),
    "redefines extern": ("#define extern static\n" + HONEST, {R}),
    "redefines a CUDA word": ("#define __global__\n" + HONEST, {R}),
    "builds a name": (
        "#define JOIN(x, y) x##y\n" + body("JOIN(lu, dus_fail)(0, 0);"), {R, C},
    ),
    "builds a name with digraphs": ("%:define X 1\n" + HONEST, {R}),
    "cuts a name in two": (body("lu\\\ndus_lane();"), {R, C}),
    "a name in another alphabet": (body("\\u006cudus_lane();"), {R, C}),
    "a raw string": (body('const char *x = R"(/*)"; ' + RIGHT), {R}),
    "pragma of the host's compiler": ("#pragma GCC optimize(\"O0\")\n" + HONEST, {R}),
    "opens a scope that it does not close": (HONEST + "namespace x {\n", {R, C}),
    "unclosed comment": (HONEST + "/* ", {R, C}),
    "conditional without an end": (HONEST + "#if 0\n", {R, C}),
    "leaves __LINE__ wrong": ("#line 1000000\n" + HONEST, {R}),
    # Other ways
    "PyTorch": (
        "#include <torch/extension.h>\ntorch::Tensor f(torch::Tensor a) { return torch::relu(a); }\n"
        "// launch: kernel<<<1, 1>>>(a, b, out)\n", {R},
    ),
    "Python": (
        "import torch\ndef f(a, b):\n    return 2 * torch.relu(a) + b\n", {R, C},
    ),
    "decoy: the kernel is not launched": (
        HONEST.replace("// launch: kernel", "// launch: other") + "__global__ void other(const float "
        "*a, const float *b, float *out, int n) {}\n", {W},
    ),
    "decoy: no launch line": (HONEST.split("\n", 1)[1], {L}),
    "a launch of a kernel that is not there": (HONEST.replace("launch: kernel", "launch: karnel"), {L}),
    "another stream": (HONEST.replace("256>>>", "256, 0, 1>>>"), {L}),
    "code in a launch line": (HONEST.replace("(a, b, out, n)", '(__import__("os"))'), {L}),
    "code in a grid": (HONEST.replace("(n + 255) / 256", "(lambda: 4)()"), {L}),
    "closing the entry in a launch line": (
        HONEST.replace("launch: kernel<", "launch: kernel); } void x() { (k<"), {L},
    ),
    "an argument that is not there": (HONEST.replace("(a, b,", "(a, reference,"), {L}),
    "a number for a pointer": (HONEST.replace("(a, b,", "(a, 4096,"), {L}),
    "#include /etc/passwd": ('#include "/etc/passwd"\n' + HONEST, {R, C}),
    "#include of a relative path": ('#include "../headers/cuda.h"\n' + HONEST, {R, C}),
    "#include of the inputs": ('#include "inputs.bin"\n' + HONEST, {R, C}),
    # Resources
    "endless loop": (body("while (true) {}"), {R}),
    "endless loop in disguise": (
        body("volatile int x = 1; while (x) { x = x | 1; } " + RIGHT), {"time_limit"},
    ),
    "waits for others": (
        body("while (atomicAdd(&flag, 0) == 0) {} " + RIGHT, head="__device__ int flag;"),
        {"time_limit"},
    ),
    "memory of the device": (
        "__device__ char big[1ull << 33];\n" + body("big[(size_t)i << 22] = 1; " + RIGHT),
        {"memory_limit"},
    ),
    "stack of a thread": (
        body("volatile char big[500000]; for (int k = 0; k < 500000; k++) big[k] = k; out[i] = big[i];"
             "__syncthreads();"), {"crashed", W, C},
    ),
    "recursion without an end": (
        "__device__ int deep(int x) { return x > 1 << 30 ? 0 : deep(x + 1) * 3 + x % 7; }\n"
        + body("out[i] = deep(i); __syncwarp();"), {"crashed", W, "time_limit"},
    ),
    "recursion of templates": (
        "template <int N> struct T { static const int v = T<N - 1>::v + T<N - 2>::v + T<N * 2>::v; };\n"
        + body("out[i] = T<1>::v;"), {C, "time_limit", "memory_limit"},
    ),
    "macros that explode": (
        "".join(
            f"#define M{k} {' '.join([f'M{k - 1}'] * 10)}\n" if k else "#define M0 x+=1;\n"
            for k in range(9)
        )
        + body("int x = 0; M8 out[i] = x;"), {C, "time_limit", "memory_limit", R},
    ),
    "scratch that is too large": ("// scratch: t float[1 << 40]\n" + HONEST, {L}),
    "a block that is too large": (HONEST.replace(", 256>>>", ", 2048>>>"), {L}),
    "divides by zero in the grid": (HONEST.replace("/ 256,", "/ 0,"), {L}),
    "trap": (body("__trap();"), {"crashed", W}),
}  # fmt: skip
