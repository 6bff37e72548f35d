"""Kernels as they should be: the usual ones, written with care."""

HONEST = {
    "add": """
__global__ void add(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}""",
    "grid stride": """
__global__ void scale(float *x, float f, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        x[i] *= f;
}""",
    "matmul": """
#define TILE 32
__global__ void matmul(const float *A, const float *B, float *C, int n) {
    __shared__ float a[TILE][TILE + 1], b[TILE][TILE + 1];
    int row = blockIdx.y * TILE + threadIdx.y, col = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int t = 0; t < (n + TILE - 1) / TILE; ++t) {
        int x = t * TILE + threadIdx.x, y = t * TILE + threadIdx.y;
        a[threadIdx.y][threadIdx.x] = (row < n && x < n) ? A[row * n + x] : 0.0f;
        b[threadIdx.y][threadIdx.x] = (y < n && col < n) ? B[y * n + col] : 0.0f;
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < TILE; ++k) sum += a[threadIdx.y][k] * b[k][threadIdx.x];
        __syncthreads();
    }
    if (row < n && col < n) C[row * n + col] = sum;
}""",
    "transpose": """
constexpr int TILE = 32;
__global__ void transpose(const float *in, float *out, int w, int h) {
    __shared__ float tile[TILE][TILE + 1];
    int x = blockIdx.x * TILE + threadIdx.x, y = blockIdx.y * TILE + threadIdx.y;
    for (int j = 0; j < TILE; j += 8)
        if (x < w && y + j < h) tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * w + x];
    __syncthreads();
    x = blockIdx.y * TILE + threadIdx.x;
    y = blockIdx.x * TILE + threadIdx.y;
    for (int j = 0; j < TILE; j += 8)
        if (x < h && y + j < w) out[(y + j) * h + x] = tile[threadIdx.x][threadIdx.y + j];
}""",
    "reduce": """
__global__ void reduce(const float *x, float *out, int n) {
    extern __shared__ float s[];
    unsigned tid = threadIdx.x, i = blockIdx.x * blockDim.x * 2 + tid;
    s[tid] = (i < n ? x[i] : 0) + (i + blockDim.x < n ? x[i + blockDim.x] : 0);
    __syncthreads();
    for (unsigned w = blockDim.x / 2; w > 0; w >>= 1) {
        if (tid < w) s[tid] += s[tid + w];
        __syncthreads();
    }
    if (tid == 0) atomicAdd(out, s[0]);
}""",
    "warp reduce": """
__inline__ __device__ float warp_sum(float v) {
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_down_sync(0xffffffff, v, offset);
    return v;
}
__global__ void reduce(const float *x, float *out, int n) {
    __shared__ float sums[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float v = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)
        v += x[i];
    v = warp_sum(v);
    if (lane == 0) sums[warp] = v;
    __syncthreads();
    v = threadIdx.x < blockDim.x / 32 ? sums[lane] : 0;
    if (warp == 0) v = warp_sum(v);
    if (threadIdx.x == 0) out[blockIdx.x] = v;
}""",
    "softmax": """
#include <float.h>
__global__ void softmax(const float *x, float *y, int cols) {
    __shared__ float s[256];
    const float *row = x + blockIdx.x * cols;
    float *to = y + blockIdx.x * cols;
    int t = threadIdx.x;
    float best = -FLT_MAX;
    for (int j = t; j < cols; j += blockDim.x) best = fmaxf(best, row[j]);
    s[t] = best;
    __syncthreads();
    for (int w = blockDim.x / 2; w > 0; w >>= 1) {
        if (t < w) s[t] = fmaxf(s[t], s[t + w]);
        __syncthreads();
    }
    best = s[0];
    __syncthreads();
    float sum = 0;
    for (int j = t; j < cols; j += blockDim.x) sum += expf(row[j] - best);
    s[t] = sum;
    __syncthreads();
    for (int w = blockDim.x / 2; w > 0; w >>= 1) {
        if (t < w) s[t] += s[t + w];
        __syncthreads();
    }
    sum = s[0];
    for (int j = t; j < cols; j += blockDim.x) to[j] = expf(row[j] - best) / sum;
}""",
    "histogram": """
__global__ void histogram(const unsigned char *x, unsigned *bins, int n) {
    __shared__ unsigned local[256];
    local[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)
        atomicAdd(&local[x[i]], 1u);
    __syncthreads();
    atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}""",
    "scan": """
__global__ void scan(const float *x, float *y, int n) {
    __shared__ float s[2][1024];
    int t = threadIdx.x, out = 0, in = 1;
    s[out][t] = t < n ? x[t] : 0;
    __syncthreads();
    for (int offset = 1; offset < n; offset *= 2) {
        out = 1 - out;
        in = 1 - out;
        if (t >= offset) s[out][t] = s[in][t] + s[in][t - offset];
        else s[out][t] = s[in][t];
        __syncthreads();
    }
    if (t < n) y[t] = s[out][t];
}""",
    "stencil": """
__global__ void blur(const float *in, float *out, int n) {
    __shared__ float s[258];
    int g = blockIdx.x * blockDim.x + threadIdx.x, l = threadIdx.x + 1;
    s[l] = g < n ? in[g] : 0;
    if (threadIdx.x == 0) s[0] = g > 0 ? in[g - 1] : 0;
    if (threadIdx.x == blockDim.x - 1) s[blockDim.x + 1] = g + 1 < n ? in[g + 1] : 0;
    __syncthreads();
    if (g < n) out[g] = (s[l - 1] + s[l] + s[l + 1]) / 3;
}""",
    "vector loads": """
__global__ void relu(const float4 *x, float4 *y, int n4) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n4) {
        float4 v = x[i];
        y[i] = make_float4(fmaxf(v.x, 0), fmaxf(v.y, 0), fmaxf(v.z, 0), fmaxf(v.w, 0));
    }
}""",
    "template": """
template <typename T, int N> __global__ void sum_rows(const T *x, T *out) {
    __shared__ T s[N];
    int t = threadIdx.x;
    s[t] = x[blockIdx.x * N + t];
    __syncthreads();
    #pragma unroll
    for (int w = N / 2; w > 0; w >>= 1) {
        if (t < w) s[t] += s[t + w];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = s[0];
}
template __global__ void sum_rows<float, 128>(const float *, float *);""",
    "cooperative groups": """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
__global__ void mirror(float *x) {
    __shared__ float s[256];
    cg::thread_block block = cg::this_thread_block();
    s[threadIdx.x] = x[threadIdx.x];
    block.sync();
    x[threadIdx.x] = s[255 - threadIdx.x];
}""",
    "compare and swap": """
__device__ void atomic_max(float *to, float v) {
    int *p = (int *)to, old = *p, seen;
    do {
        seen = old;
        old = atomicCAS(p, seen, __float_as_int(fmaxf(v, __int_as_float(seen))));
    } while (seen != old);
}
__global__ void top(const float *x, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomic_max(out, x[i]);
}""",
    "host code": """
#include <cuda_runtime.h>
#include <stdio.h>
__global__ void twice(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}
int main() {
    float *x, host[64] = {1};
    cudaMalloc(&x, sizeof(host));
    cudaMemcpy(x, host, sizeof(host), cudaMemcpyHostToDevice);
    twice<<<1, 64>>>(x, 64);
    cudaMemcpy(host, x, sizeof(host), cudaMemcpyDeviceToHost);
    cudaFree(x);
    printf("%f", host[0]);
    return 0;
}""",
}
