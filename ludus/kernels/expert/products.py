# ruff: noqa: E501 - kernels stand as they are
"""Kernels of products of matrices and vectors, and of convolutions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ludus.core.types import Task
from ludus.kernels.expert.simple import expression_of


def matvec(task: Task) -> Iterator[str]:
    """A warp for each row; atomic sums of slices."""
    rows, cols = task.data["inputs"]["a"]
    turned = "a.t()" in expression_of(task)
    outer, inner, apart, along = (cols, rows, 1, cols) if turned else (rows, cols, cols, 1)
    bias = "b" in task.data["inputs"]
    names, extra = ("a, x, b", ", const float *b") if bias else ("a, x", "")
    plus = " + b[i]" if bias else ""
    yield f"""
// launch: mv<<<{outer}, 32>>>({names}, out)
__global__ void mv(const float *a, const float *x{extra}, float *out) {{
    int i = blockIdx.x;
    float sum = 0.f;
    for (int j = threadIdx.x; j < {inner}; j += warpSize) sum = fmaf(a[i * {apart} + j * {along}], x[j], sum);
    for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, d);
    if (threadIdx.x == 0) out[i] = sum{plus};
}}"""
    yield f"""
// scratch: sums float[{outer}]
// launch: zero<<<({outer} + 63) / 64, 64>>>(sums, {outer})
// launch: gather<<<({inner} + 7) / 8, 64>>>(a, x, sums)
// launch: finish<<<({outer} + 63) / 64, 64>>>({"sums, b, out" if bias else "sums, out"})
__global__ void zero(float *v, unsigned n) {{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) v[i] = 0;
}}
__global__ void gather(const float *a, const float *x, float *sums) {{
    for (int i = threadIdx.x; i < {outer}; i += blockDim.x) {{
        float s = 0;
        for (int j = blockIdx.x * 8; j < min((int)(blockIdx.x + 1) * 8, {inner}); j++)
            s += a[i * {apart} + j * {along}] * x[j];
        atomicAdd(&sums[i], s);
    }}
}}
__global__ void finish(const float *sums{extra}, float *out) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < {outer}) out[i] = sums[i]{plus};
}}"""


def matmul(task: Task) -> Iterator[str]:
    """A thread for each element; tiles in shared memory."""
    text, a, b = expression_of(task), task.data["inputs"]["a"], task.data["inputs"]["b"]
    first, second = "a.t()" in text, "b.t()" in text
    batch = a[0] if len(a) == 3 else 1
    a, b = a[-2:], b[-2:]
    rows, inner = (a[1], a[0]) if first else (a[0], a[1])
    cols = b[0] if second else b[1]
    at_a = f"k * {rows} + i" if first else f"i * {inner} + k"
    at_b = f"j * {inner} + k" if second else f"k * {cols} + j"
    yield f"""
// launch: mm<<<(({cols} + 15) / 16, ({rows} + 15) / 16, {batch}), (16, 16, 1)>>>(a, b, out)
__global__ void mm(const float *a, const float *b, float *out) {{
    int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
    if (i >= {rows} || j >= {cols}) return;
    a += blockIdx.z * {rows * inner}; b += blockIdx.z * {inner * cols};
    float sum = 0;
    #pragma unroll
    for (int k = 0; k < {inner}; k++) sum += a[{at_a}] * b[{at_b}];
    out[(blockIdx.z * {rows} + i) * {cols} + j] = sum;
}}"""
    yield f"""
constexpr int T = 8;
// launch: tiled<<<(({cols} + 7) / 8, ({rows} + 7) / 8, {batch}), (8, 8)>>>(a, b, out)
__global__ void tiled(const float *__restrict__ a, const float *__restrict__ b, float *__restrict__ out) {{
    __shared__ float as[T][T + 1], bs[T][T + 1];
    const int i = blockIdx.y * T + threadIdx.y, j = blockIdx.x * T + threadIdx.x;
    a += (long)blockIdx.z * {rows * inner}; b += (long)blockIdx.z * {inner * cols};
    float sum = 0.0f;
    for (int t = 0; t < ({inner} + T - 1) / T; t++) {{
        int k = t * T + threadIdx.x;
        as[threadIdx.y][threadIdx.x] = i < {rows} && k < {inner} ? a[{at_a}] : 0.0f;
        k = t * T + threadIdx.y;
        bs[threadIdx.y][threadIdx.x] = k < {inner} && j < {cols} ? b[{at_b}] : 0.0f;
        __syncthreads();
        for (int q = 0; q < T; q++) sum += as[threadIdx.y][q] * bs[q][threadIdx.x];
        __syncthreads();
    }}
    if (i < {rows} && j < {cols}) out[((long)blockIdx.z * {rows} + i) * {cols} + j] = sum;
}}"""


def convolution(task: Task) -> Iterator[str]:
    """A thread for each element."""
    text = expression_of(task)
    x, w, out = task.data["inputs"]["x"], task.data["inputs"]["w"], task.data["output"]
    stride, padding = (int(v) for v in re.findall(r"(?:stride|padding)=(\d+)", text))
    if len(x) == 3:
        x, w, out = [x[0], x[1], 1, x[2]], [w[0], w[1], 1, w[2]], [out[0], out[1], 1, out[2]]
        pad_y, step_y = 0, 1
    else:
        pad_y, step_y = padding, stride
    yield f"""
struct Shape {{ int n, c, h, w; }};
__constant__ Shape X = {{{", ".join(map(str, x))}}}, Y = {{{", ".join(map(str, out))}}};
// launch: conv<<<(n + 63) / 64, 64>>>(x, w, out, n)
__global__ void conv(const float *x, const float *w, float *out, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int ox = i % Y.w, oy = i / Y.w % Y.h, o = i / (Y.w * Y.h) % Y.c, b = i / (Y.w * Y.h * Y.c);
    float sum = 0.f;
    for (int c = 0; c < X.c; ++c)
        for (int ky = 0; ky < {w[2]}; ++ky)
            for (int kx = 0; kx < {w[3]}; ++kx) {{
                int iy = oy * {step_y} + ky - {pad_y}, ix = ox * {stride} + kx - {padding};
                if (iy < 0 || iy >= X.h || ix < 0 || ix >= X.w) continue;
                sum += x[((b * X.c + c) * X.h + iy) * X.w + ix] * w[((o * X.c + c) * {w[2]} + ky) * {w[3]} + kx];
            }}
    out[i] = sum;
}}"""
