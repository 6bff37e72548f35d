# ruff: noqa: E501 - kernels stand as they are
"""Honest kernels of the seven kinds of generated problems, each way of writing a kernel for many
problems: all must pass. `kernels_for` makes the sources of a task in the ways that fit it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ludus.core.types import Task

FUNCTIONS = {
    "torch.relu": "fmaxf({}, 0.0f)",
    "torch.sigmoid": "1.0f / (1.0f + expf(-({})))",
    "torch.tanh": "tanhf({})",
    "torch.nn.functional.gelu": "gelu({})",
    "torch.nn.functional.silu": "({0}) / (1.0f + expf(-({0})))",
    "torch.abs": "fabsf({})",
    "torch.square": "({0}) * ({0})",
    "torch.nn.functional.softplus": "softplus({})",
}
HELPERS = """
__device__ __forceinline__ float gelu(float x) {
    return 0.5f * x * (1.0f + erff(x * 0.70710678f));
}
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
"""


def c_of(expression: str) -> str:
    """The C of an expression of one element."""
    for name, form in FUNCTIONS.items():
        if expression.startswith(f"{name}("):
            return form.format(c_of(expression[len(name) + 1 : -1]))
    for name, function in (("torch.maximum", "fmaxf"), ("torch.minimum", "fminf")):
        if expression.startswith(f"{name}("):
            left, right = expression[len(name) + 1 : -1].split(", ")
            return f"{function}({c_of(left)}, {c_of(right)})"
    return re.sub(r"(\d+\.\d+)", r"\1f", expression)


def expression_of(task: Task) -> str:
    found = re.search(r"return (.*)\n\n\ndef get_inputs", task.data["reference"])
    assert found is not None
    return found[1]


def elementwise(task: Task) -> Iterator[str]:
    value = c_of(expression_of(task))
    names = list(task.data["inputs"])
    parameters = ", ".join(f"const float *{name}_" for name in names)
    load = " ".join(f"float {name} = {name}_[i];" for name in names)
    call = ", ".join(names)
    yield f"""{HELPERS}
// launch: kernel<<<(n + 255) / 256, 256>>>({call}, out, n)
extern "C" __global__ void kernel({parameters}, float *out, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    {load}
    out[i] = {value};
}}"""
    yield f"""{HELPERS}
// launch: stride<128><<<7, 128>>>({call}, out, n)
template <int BLOCK> __global__ void __launch_bounds__(BLOCK) stride({parameters.replace("*", "*__restrict__ ")},
                                                     float *__restrict__ out, size_t n) {{
    #pragma unroll 4
    for (size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x; i < n; i += (size_t)gridDim.x * BLOCK) {{
        {load.replace("[i]", "[i]")}
        out[i] = {value};
    }}
}}
template __global__ void stride<128>({", ".join(["const float *__restrict__"] * len(names))}, float *__restrict__, size_t);"""
    quads = " ".join(
        f"float4 {name}4 = reinterpret_cast<const float4 *>({name}_)[i];" for name in names
    )
    parts = "\n        ".join(
        f"{{ {' '.join(f'float {name} = {name}4.{part};' for name in names)} r.{part} = {value}; }}"
        for part in "xyzw"
    )
    rest = " ".join(f"float {name} = {name}_[k];" for name in names)
    yield f"""{HELPERS}
// launch: quads<<<(n / 4 + 64) / 64, 64>>>({call}, out, n)
__global__ void quads({parameters}, float *out, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n / 4) {{
        {quads}
        float4 r;
        {parts}
        reinterpret_cast<float4 *>(out)[i] = r;
    }} else if (i == n / 4) {{
        for (int k = n / 4 * 4; k < n; k++) {{ {rest} out[k] = {value}; }}
    }}
}}"""


def transpose(task: Task) -> Iterator[str]:
    shape = task.data["inputs"]["a"]
    if len(shape) == 2:
        yield """
#define TILE 16
// launch: turn<<<((a.shape[1] + 15) / 16, (a.shape[0] + 15) / 16), (16, 16)>>>(a, out, a.shape[0], a.shape[1])
__global__ void turn(const float *a, float *out, int rows, int cols) {
    __shared__ float tile[TILE][TILE + 1];
    int x = blockIdx.x * TILE + threadIdx.x, y = blockIdx.y * TILE + threadIdx.y;
    if (x < cols && y < rows) tile[threadIdx.y][threadIdx.x] = a[y * cols + x];
    __syncthreads();
    x = blockIdx.y * TILE + threadIdx.x;
    y = blockIdx.x * TILE + threadIdx.y;
    if (x < rows && y < cols) out[y * rows + x] = tile[threadIdx.x][threadIdx.y];
}"""
        axes = [1, 0]
        shape = [1, *shape]
        axes = [0, 2, 1]
    else:
        axes = [int(x) for x in re.findall(r"\d", expression_of(task).split("permute")[1])]
    strides = [shape[1] * shape[2], shape[2], 1]
    to = [shape[axis] for axis in axes]
    step = [strides[axis] for axis in axes]
    yield f"""
// launch: permute<<<(n + 127) / 128, 128>>>(a, out, n)
__global__ void permute(const float *a, float *out, int n) {{
    int i = blockIdx.x * 128 + threadIdx.x;
    if (i < n) {{
        int z = i % {to[2]}, y = i / {to[2]} % {to[1]}, x = i / {to[1] * to[2]};
        out[i] = __ldg(a + x * {step[0]} + y * {step[1]} + z * {step[2]});
    }}
}}"""


REDUCTIONS = {  # start, step (v with x), combination, end
    "torch.sum(torch.square": ("0.0f", "v += x * x", "a + b", "v"),
    "torch.sqrt": ("0.0f", "v += x * x", "a + b", "sqrtf(v)"),
    "torch.sum": ("0.0f", "v += x", "a + b", "v"),
    "torch.amax": ("-INFINITY", "v = fmaxf(v, x)", "fmaxf(a, b)", "v"),
    "torch.amin": ("INFINITY", "v = fminf(v, x)", "fminf(a, b)", "v"),
}


def reduction(task: Task) -> Iterator[str]:
    text = expression_of(task).lstrip("(")
    start, step, joined, end = next(v for k, v in REDUCTIONS.items() if text.startswith(k))
    rows, cols = task.data["inputs"]["a"]
    if "dim=" not in text:
        scale = re.search(r"/ ([\d.]+)\)", text)
        end = f"v / {scale[1]}f" if scale else "v"
        outer, inner, apart, along = 1, rows * cols, 0, 1
    elif "dim=1" in text:
        outer, inner, apart, along = rows, cols, cols, 1
    else:
        outer, inner, apart, along = cols, rows, 1, cols
    join = f"#include <math.h>\n__device__ float join(float a, float b) {{ return {joined}; }}"
    yield f"""{join}
// launch: rows<<<{outer}, 128>>>(a, out)
__global__ void rows(const float *a, float *out) {{
    __shared__ float s[128];
    int t = threadIdx.x;
    float v = {start};
    for (int j = t; j < {inner}; j += 128) {{ float x = a[blockIdx.x * {apart} + j * {along}]; {step}; }}
    s[t] = v;
    __syncthreads();
    for (int w = 64; w > 0; w /= 2) {{
        if (t < w) s[t] = join(s[t], s[t + w]);
        __syncthreads();
    }}
    v = s[0];
    if (t == 0) out[blockIdx.x] = {end};
}}"""
    yield f"""{join}
// launch: warps<<<{outer}, dim3(32, 4), 4 * 4>>>(a, out, {inner})
__global__ void warps(const float *__restrict__ a, float *__restrict__ out, int inner) {{
    extern __shared__ float part[];
    float v = {start};
    for (int j = threadIdx.y * 32 + threadIdx.x; j < inner; j += 128) {{
        float x = a[blockIdx.x * {apart} + j * {along}];
        {step};
    }}
    for (int d = 16; d > 0; d >>= 1) v = join(v, __shfl_xor_sync(0xffffffff, v, d));
    if (threadIdx.x == 0) part[threadIdx.y] = v;
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {{
        v = join(join(part[0], part[1]), join(part[2], part[3]));
        out[blockIdx.x] = {end};
    }}
}}"""
    yield f"""
#include <cmath>
// launch: alone<<<({outer} + 31) / 32, 32>>>(a, out)
__global__ void alone(const float *a, float *out) {{
    int i = blockIdx.x * 32 + threadIdx.x;
    if (i >= {outer}) return;
    float v = {start};
    for (int j = 0; j < {inner}; ++j) {{ const float x = a[i * {apart} + j * {along}]; {step}; }}
    out[i] = {end};
}}"""


def matvec(task: Task) -> Iterator[str]:
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


WAYS = {
    "elementwise": elementwise, "transpose": transpose, "reduction": reduction, "matvec": matvec,
    "matmul": matmul, "convolution": convolution,
}  # fmt: skip


def fused(task: Task) -> Iterator[str]:
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


WAYS["fused"] = fused


def kernels_for(task: Task) -> Iterator[str]:
    """The sources for a generated task."""
    return WAYS[task.data["kind"]](task)
