# ruff: noqa: E501 - kernels stand as they are
"""Kernels of element-wise problems, transposes and reductions."""

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
    """The expression that a generated reference returns."""
    found = re.search(r"return (.*)\n\n\ndef get_inputs", task.data["reference"])
    assert found is not None
    return found[1]


def elementwise(task: Task) -> Iterator[str]:
    """A thread for each element; a grid-stride loop; four elements a thread."""
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
    """Tiles in shared memory, of matrices; a thread for each element."""
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
    """A block in shared memory; warps with shuffles; a thread for each result."""
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
