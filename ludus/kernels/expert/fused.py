# ruff: noqa: E501 - kernels stand as they are
"""Kernels of fused problems."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ludus.core.types import Task
from ludus.kernels.expert.simple import HELPERS, c_of, expression_of


def fused(task: Task) -> Iterator[str]:
    """Softmax, layer norm, sums and maxima of rows, products with an epilogue."""
    text = expression_of(task)
    shapes = task.data["inputs"]
    if text.startswith("torch.softmax"):
        rows, cols = shapes["a"]
        scale = re.search(r"softmax\(([\d.]+) \*", text)
        assert scale is not None
        yield f"""
#include <float.h>
// launch: softmax<<<{rows}, 64>>>(a, out)
__global__ void softmax(const float *a, float *out) {{
    __shared__ float s[64];
    const float *row = a + blockIdx.x * {cols};
    int t = threadIdx.x;
    float best = -FLT_MAX;
    for (int j = t; j < {cols}; j += 64) best = max(best, {scale[1]}f * row[j]);
    s[t] = best;
    __syncthreads();
    for (int w = 32; w; w >>= 1) {{ if (t < w) s[t] = max(s[t], s[t + w]); __syncthreads(); }}
    best = s[0];
    __syncthreads();
    float sum = 0;
    for (int j = t; j < {cols}; j += 64) sum += __expf({scale[1]}f * row[j] - best);
    s[t] = sum;
    __syncthreads();
    for (int w = 32; w; w >>= 1) {{ if (t < w) s[t] += s[t + w]; __syncthreads(); }}
    for (int j = t; j < {cols}; j += 64)
        out[blockIdx.x * {cols} + j] = __expf({scale[1]}f * row[j] - best) / s[0] * {cols};
}}"""
    elif "layer_norm" in text:
        rows, cols = shapes["a"]
        yield f"""
__inline__ __device__ float warp_sum(float v) {{
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);
    return v;
}}
// launch: norm<<<({rows} + 3) / 4, (32, 4)>>>(a, b, c, out)
__global__ void norm(const float *a, const float *b, const float *c, float *out) {{
    int row = blockIdx.x * 4 + threadIdx.y;
    if (row >= {rows}) return;
    float sum = 0, square = 0;
    for (int j = threadIdx.x; j < {cols}; j += 32) sum += a[row * {cols} + j];
    float mean = warp_sum(sum) / {cols};
    for (int j = threadIdx.x; j < {cols}; j += 32) {{
        float d = a[row * {cols} + j] - mean;
        square += d * d;
    }}
    float scale = rsqrtf(warp_sum(square) / {cols} + 1e-5f);
    for (int j = threadIdx.x; j < {cols}; j += 32)
        out[row * {cols} + j] = (a[row * {cols} + j] - mean) * scale * b[j] + c[j];
}}"""
    elif "a - b" in text:
        rows, cols = shapes["a"]
        value = c_of(text[len("torch.sum(") :].rpartition(", dim=1)")[0].replace("a - b", "d"))
        yield f"""{HELPERS}
// launch: sums<<<{rows}, 32>>>(a, b, out)
__global__ void sums(const float *a, const float *b, float *out) {{
    float sum = 0;
    for (int j = threadIdx.x; j < {cols}; j += 32) {{
        float d = a[blockIdx.x * {cols} + j] - b[blockIdx.x * {cols} + j];
        sum += {value};
    }}
    for (int k = 1; k < 32; k <<= 1) {{
        float other = __shfl_up_sync(0xffffffff, sum, k);
        if (threadIdx.x >= k) sum += other;
    }}
    if (threadIdx.x == 31) out[blockIdx.x] = sum;
}}"""
    else:
        rows, inner = shapes["a"]
        cols = shapes["b"][1]
        top = text.startswith("torch.amax")
        core = text[len("torch.amax(") :].rpartition(", dim=1)")[0] if top else text
        core = core.replace("a @ b", "p")
        tail = ""
        if found := re.search(r"( \* [\d.]+ \+ c)$", core):
            core, tail = core[: found.start()], found[1].replace("c", "c[j]")
            tail = re.sub(r"(\d+\.\d+)", r"\1f", tail)
        value = "(" + c_of(core).replace("+ c", "+ c[j]") + ")" + tail
        product = f"float p = 0; for (int k = 0; k < {inner}; k++) p += a[i * {inner} + k] * b[k * {cols} + j];"
        if top:
            yield f"""#include <math.h>{HELPERS}
// launch: best<<<{rows}, 64>>>(a, b, out)
__global__ void best(const float *a, const float *b, float *out) {{
    __shared__ float s[64];
    int i = blockIdx.x;
    float v = -INFINITY;
    for (int j = threadIdx.x; j < {cols}; j += 64) {{ {product} v = fmaxf(v, {value}); }}
    s[threadIdx.x] = v;
    __syncthreads();
    if (threadIdx.x == 0) {{
        for (int t = 1; t < 64; t++) v = fmaxf(v, s[t]);
        out[i] = v;
    }}
}}"""
        else:
            yield f"""{HELPERS}
// launch: dense<<<(({cols} + 15) / 16, ({rows} + 7) / 8), (16, 8)>>>(a, b, c, out)
__global__ void dense(const float *a, const float *b, const float *c, float *out) {{
    int j = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y;
    if (i < {rows} && j < {cols}) {{ {product} out[i * {cols} + j] = {value}; }}
}}"""
