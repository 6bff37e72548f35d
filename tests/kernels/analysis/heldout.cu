//// leaky relu |
template <typename scalar_t>
__global__ void leaky_relu(const scalar_t *__restrict__ in, scalar_t *__restrict__ out, scalar_t slope, int64_t size) {
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (index < size) { const scalar_t v = in[index]; out[index] = v > scalar_t(0) ? v : v * slope; }
}
//// batch norm statistics |
__global__ void bn_stats(const float *x, float *mean, float *var, int N, int C, int HW) {
    __shared__ float ssum[256], ssq[256];
    const int c = blockIdx.x, tid = threadIdx.x;
    float a = 0.f, q = 0.f;
    for (int i = tid; i < N * HW; i += blockDim.x) {
        const int n = i / HW, p = i % HW;
        const float v = x[(n * C + c) * HW + p];
        a += v; q += v * v;
    }
    ssum[tid] = a; ssq[tid] = q;
    __syncthreads();
    for (int off = 128; off > 0; off >>= 1) {
        if (tid < off) { ssum[tid] += ssum[tid + off]; ssq[tid] += ssq[tid + off]; }
        __syncthreads();
    }
    if (tid == 0) { mean[c] = ssum[0] / (N * HW); var[c] = ssq[0] / (N * HW) - mean[c] * mean[c]; }
}
//// online softmax |
__global__ void online_softmax(const float *x, float *y, int cols) {
    const float *row = x + (long)blockIdx.x * cols;
    float m = -1e30f, d = 0.f;
    for (int j = threadIdx.x; j < cols; j += 32) {
        float old = m;
        m = fmaxf(m, row[j]);
        d = d * __expf(old - m) + __expf(row[j] - m);
    }
    for (int o = 16; o > 0; o >>= 1) {
        float mo = __shfl_xor_sync(0xffffffff, m, o), dd = __shfl_xor_sync(0xffffffff, d, o);
        float big = fmaxf(m, mo);
        d = d * __expf(m - big) + dd * __expf(mo - big);
        m = big;
    }
    for (int j = threadIdx.x; j < cols; j += 32) y[(long)blockIdx.x * cols + j] = __expf(row[j] - m) / d;
}
//// cross entropy with a labelled loop |
__global__ void cross_entropy(const float *logits, const int *label, float *loss, int classes) {
    __shared__ float red[128];
    const float *l = logits + blockIdx.x * classes;
    float peak = -INFINITY;
    for (int i = threadIdx.x; i < classes; i += 128) peak = fmaxf(peak, l[i]);
    red[threadIdx.x] = peak;
    for (int s = 64; s > 0; s >>= 1) {
        __syncthreads();
        if (threadIdx.x < s) red[threadIdx.x] = fmaxf(red[threadIdx.x], red[threadIdx.x + s]);
    }
    __syncthreads();
    peak = red[0];
    __syncthreads();
    float sum = 0;
    for (int i = threadIdx.x; i < classes; i += 128) sum += expf(l[i] - peak);
    red[threadIdx.x] = sum;
    for (int s = 64; s > 0; s >>= 1) {
        __syncthreads();
        if (threadIdx.x < s) red[threadIdx.x] += red[threadIdx.x + s];
    }
    if (threadIdx.x == 0) loss[blockIdx.x] = logf(red[0]) + peak - l[label[blockIdx.x]];
}
//// depthwise convolution |
__global__ void depthwise(const float *x, const float *k, float *y, int C, int H, int W) {
    int w = threadIdx.x + blockIdx.x * blockDim.x, h = blockIdx.y, c = blockIdx.z;
    if (w >= W) return;
    float acc = 0;
    #pragma unroll
    for (int dy = -1; dy <= 1; dy++) {
        #pragma unroll
        for (int dx = -1; dx <= 1; dx++) {
            int yy = h + dy, xx = w + dx;
            if (yy >= 0 && yy < H && xx >= 0 && xx < W) acc += x[(c * H + yy) * W + xx] * k[c * 9 + (dy + 1) * 3 + dx + 1];
        }
    }
    y[(c * H + h) * W + w] = acc;
}
//// shared lookup table |
__global__ void quantise(const float *x, unsigned char *q, const float *edges, int n) {
    __shared__ float table[64];
    if (threadIdx.x < 64) table[threadIdx.x] = edges[threadIdx.x];
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        int lo = 0, hi = 64;
        while (hi - lo > 1) { int mid = (lo + hi) >> 1; if (x[i] >= table[mid]) lo = mid; else hi = mid; }
        q[i] = lo;
    }
}
//// dropout with a counter |
__device__ unsigned mix(unsigned s) { s ^= s << 13; s ^= s >> 17; s ^= s << 5; return s; }
__global__ void dropout(float *x, float p, unsigned seed, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = (mix(seed + i) & 0xffffff) / 16777216.0f < p ? 0.f : x[i] / (1 - p);
}
//// vectorised copy with a tail |
__global__ void copy4(const float *src, float *dst, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float4 *s4 = reinterpret_cast<const float4 *>(src);
    float4 *d4 = reinterpret_cast<float4 *>(dst);
    if (i < n / 4) d4[i] = s4[i];
    if (i < n % 4) dst[n - n % 4 + i] = src[n - n % 4 + i];
}
//// attention scores for one query |
__global__ void scores(const float *q, const float *K, float *s, int T, int D) {
    extern __shared__ float qs[];
    for (int d = threadIdx.x; d < D; d += blockDim.x) qs[d] = q[d];
    __syncthreads();
    int warp = threadIdx.x / warpSize, lane = threadIdx.x % warpSize;
    for (int t = warp; t < T; t += blockDim.x / warpSize) {
        float a = 0;
        for (int d = lane; d < D; d += warpSize) a += qs[d] * K[t * D + d];
        for (int o = warpSize / 2; o; o /= 2) a += __shfl_down_sync(0xffffffff, a, o);
        if (lane == 0) s[t] = a * rsqrtf((float)D);
    }
}
//// game of life |
__global__ void life(const unsigned char *a, unsigned char *b, int w, int h) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= w || y >= h) return;
    int alive = 0;
    for (int dy = -1; dy <= 1; ++dy)
        for (int dx = -1; dx <= 1; ++dx)
            if (dx || dy) alive += a[((y + dy + h) % h) * w + (x + dx + w) % w];
    b[y * w + x] = alive == 3 || (alive == 2 && a[y * w + x]);
}
//// prefix sums of warps |
__global__ void scan256(const int *x, int *y) {
    __shared__ int totals[8];
    int t = threadIdx.x, lane = t & 31, w = t >> 5, v = x[blockIdx.x * 256 + t];
    for (int d = 1; d < 32; d <<= 1) { int o = __shfl_up_sync(~0u, v, d); if (lane >= d) v += o; }
    if (lane == 31) totals[w] = v;
    __syncthreads();
    if (w == 0) {
        int s = lane < 8 ? totals[lane] : 0;
        for (int d = 1; d < 8; d <<= 1) { int o = __shfl_up_sync(~0u, s, d); if (lane >= d) s += o; }
        if (lane < 8) totals[lane] = s;
    }
    __syncthreads();
    y[blockIdx.x * 256 + t] = v + (w > 0 ? totals[w - 1] : 0);
}
//// streams and graphs on the host |
#include <cuda_runtime.h>
__global__ void work(float *p) { p[blockIdx.x * blockDim.x + threadIdx.x] += 1.f; }
int main() {
    cudaStream_t s[2];
    float *p;
    cudaMallocManaged(&p, 1 << 20);
    for (int i = 0; i < 2; ++i) cudaStreamCreate(&s[i]);
    for (int i = 0; i < 2; ++i) work<<<1024, 128, 0, s[i]>>>(p + i * 131072);
    cudaDeviceSynchronize();
    for (int i = 0; i < 2; ++i) cudaStreamDestroy(s[i]);
    cudaFree(p);
    return p != nullptr ? 0 : 1;
}
//// matrix power by repeated kernels |
constexpr int B = 16;
__global__ void square(const double *a, double *c, int n) {
    __shared__ double l[B][B], r[B][B + 1];
    const int i = blockIdx.y * B + threadIdx.y, j = blockIdx.x * B + threadIdx.x;
    double s = 0;
    for (int m = 0; m < n; m += B) {
        l[threadIdx.y][threadIdx.x] = a[i * n + m + threadIdx.x];
        r[threadIdx.y][threadIdx.x] = a[(m + threadIdx.y) * n + j];
        __syncthreads();
        for (int k = 0; k < B; ++k) s += l[threadIdx.y][k] * r[k][threadIdx.x];
        __syncthreads();
    }
    c[i * n + j] = s;
}
//// euclidean algorithm |
__global__ void gcd(const int *a, const int *b, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int p = a[i], q = b[i];
    while (q) { int r = p % q; p = q; q = r; }
    out[i] = p;
}
//// block wide vote |
__global__ void any_nan(const float *x, int *flag, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int bad = i < n && isnan(x[i]);
    if (__syncthreads_or(bad)) {
        if (threadIdx.x == 0) atomicOr(flag, 1);
    }
}
//// swap through shared memory |
__global__ void reverse_blocks(float *x) {
    __shared__ float tmp[128];
    const int base = blockIdx.x * 128, t = threadIdx.x;
    tmp[127 - t] = x[base + t];
    __syncthreads();
    x[base + t] = tmp[t];
}
//// strided channels | uncoalesced
__global__ void rgb_to_grey(const unsigned char *rgb, unsigned char *grey, int n) {
    int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i < n) grey[i] = 0.299f * rgb[i * 3] + 0.587f * rgb[i * 3 + 1] + 0.114f * rgb[i * 3 + 2];
}
//// a chunk for each thread | uncoalesced
__global__ void chunks(const float *x, float *y, int n, int per) {
    int first = (blockIdx.x * blockDim.x + threadIdx.x) * per;
    for (int k = first; k < first + per && k < n; ++k) y[k] = x[k] * 2.0f;
}
//// row softmax by one thread | uncoalesced
__global__ void softmax_rows(const float *in, float *out, int rows, int cols) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r < rows) {
        float m = in[r * cols], s = 0;
        for (int c = 1; c < cols; c++) m = fmaxf(m, in[r * cols + c]);
        for (int c = 0; c < cols; c++) s += expf(in[r * cols + c] - m);
        for (int c = 0; c < cols; c++) out[r * cols + c] = expf(in[r * cols + c] - m) / s;
    }
}
//// column major by mistake | uncoalesced
#define IDX(r, c, ld) ((r) * (ld) + (c))
__global__ void col(const float *a, float *b, int ld) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    for (int c = 0; c < ld; ++c) b[IDX(r, c, ld)] = a[IDX(r, c, ld)];
}
//// power of two pitch | bank-conflict
__global__ void pitch(const float *x, float *y) {
    __shared__ float m[64][64];
    int c = threadIdx.x, r = threadIdx.y;
    for (int k = r; k < 64; k += blockDim.y) m[k][c] = x[k * 64 + c];
    __syncthreads();
    for (int k = r; k < 64; k += blockDim.y) y[k * 64 + c] = m[c][k];
}
//// stride of four | bank-conflict
__global__ void quad(const float *x, float *y) {
    extern __shared__ float s[];
    unsigned t = threadIdx.x;
    for (int k = 0; k < 4; ++k) s[4 * t + k] = x[k * blockDim.x + t];
    for (int k = 0; k < 4; ++k) y[k * blockDim.x + t] = s[4 * t + k] + 1.0f;
}
//// doubles by column | bank-conflict
#define DIM 32
__global__ void dcol(const double *x, double *y) {
    __shared__ double t[DIM][DIM];
    t[threadIdx.y][threadIdx.x] = x[threadIdx.y * DIM + threadIdx.x];
    __syncthreads();
    y[threadIdx.y * DIM + threadIdx.x] = t[threadIdx.x][threadIdx.y];
}
//// eight ways | bank-conflict
__global__ void eight(float *x) {
    __shared__ float s[2048];
    int t = threadIdx.x;
    s[t << 3] = x[t];
    __syncthreads();
    x[t] = s[t << 3] * 2;
}
//// thirds of a warp | warp-divergence
__global__ void thirds(float *x) {
    int tid = threadIdx.x;
    if (tid % 3 == 0) x[tid] = sinf(x[tid]);
    else if (tid % 3 == 1) x[tid] = cosf(x[tid]);
    else x[tid] = tanf(x[tid]);
}
//// switch by lane | warp-divergence
__global__ void ops(float *x, int n) {
    int gid = blockIdx.x * blockDim.x + threadIdx.x;
    if (gid >= n) return;
    switch (gid & 3) {
        case 0: x[gid] = expf(x[gid]); break;
        case 1: x[gid] = logf(x[gid]); break;
        default: x[gid] = 0;
    }
}
//// odd even sort without barriers | shared-race
__global__ void odd_even(int *v) {
    __shared__ int s[256];
    int t = threadIdx.x;
    s[t] = v[t];
    __syncthreads();
    for (int p = 0; p < 256; ++p) {
        if (t % 2 == p % 2 && t < 255 && s[t] > s[t + 1]) { int h = s[t]; s[t] = s[t + 1]; s[t + 1] = h; }
    }
    __syncthreads();
    v[t] = s[t];
}
//// tile used at once | shared-race
__global__ void stencil2d(const float *u, float *v, int w) {
    __shared__ float t[18][18];
    int x = threadIdx.x + 1, y = threadIdx.y + 1, g = (blockIdx.y * 16 + threadIdx.y) * w + blockIdx.x * 16 + threadIdx.x;
    t[y][x] = u[g];
    if (threadIdx.x == 0) t[y][0] = u[g - 1];
    if (threadIdx.x == 15) t[y][17] = u[g + 1];
    v[g] = 0.25f * (t[y - 1][x] + t[y + 1][x] + t[y][x - 1] + t[y][x + 1]);
}
//// partial sums read too early | shared-race
__global__ void mean(const float *x, float *y, int n) {
    __shared__ float sums[8];
    float s = 0;
    for (int i = threadIdx.x; i < n; i += 256) s += x[i];
    for (int o = 16; o; o >>= 1) s += __shfl_down_sync(0xffffffff, s, o);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = s;
    if (threadIdx.x == 0) { float t = 0; for (int w = 0; w < 8; ++w) t += sums[w]; y[0] = t / n; }
}
//// maximum in a shared variable | shared-race
__global__ void shift_by_max(int *x) {
    __shared__ int best;
    if (threadIdx.x == 0) best = -2147483647;
    atomicMax(&best, x[threadIdx.x]);
    __syncthreads();
    x[threadIdx.x] -= best;
}
//// result buffer reused | shared-race
__global__ void two_phase(const float *a, const float *b, float *out) {
    __shared__ float buf[256];
    int t = threadIdx.x;
    buf[t] = a[t];
    __syncthreads();
    float left = buf[(t + 1) % 256];
    buf[t] = b[t];
    __syncthreads();
    out[t] = left + buf[(t + 1) % 256];
}
//// fill by thread zero | shared-race
__global__ void weights(const float *w, const float *x, float *y) {
    __shared__ float k[9];
    if (threadIdx.x == 0)
        for (int i = 0; i < 9; ++i) k[i] = w[i];
    float s = 0;
    for (int i = 0; i < 9; ++i) s += k[i] * x[threadIdx.x + i];
    y[threadIdx.x] = s;
}
//// barrier for one warp only | barrier-in-branch
__global__ void one_warp(float *x) {
    __shared__ float s[32];
    int warp = threadIdx.x / 32;
    if (warp == 0) { s[threadIdx.x] = x[threadIdx.x]; __syncthreads(); x[threadIdx.x] = s[31 - threadIdx.x]; }
}
//// barrier while data decides | barrier-in-branch
__global__ void until_done(float *x, int n) {
    int i = threadIdx.x;
    float v = x[i];
    while (v > 1.0f) { v *= 0.5f; __syncthreads(); }
    x[i] = v;
}
//// barrier behind a short circuit | barrier-in-branch
__global__ void tail(float *x, int n) {
    __shared__ float s[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    bool inside = i < n;
    if (inside) {
        s[threadIdx.x] = x[i];
        __syncthreads();
        x[i] = s[threadIdx.x / 2];
    }
}
//// returns in a loop before the barrier | barrier-after-exit
__global__ void leave(const int *x, int *y, int n) {
    __shared__ int s[256];
    for (int k = threadIdx.x; k < n; k += 256) if (x[k] < 0) return;
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[255 - threadIdx.x];
}
//// grid barrier by hand | spin-wait
__device__ volatile int arrived;
__global__ void grid_sync(float *x) {
    x[blockIdx.x] += 1;
    if (threadIdx.x == 0) { atomicAdd((int *)&arrived, 1); while (arrived < gridDim.x) {} }
}
//// ticket lock | spin-wait
__global__ void ticket(int *next, int *serving, float *v) {
    int mine = atomicAdd(next, 1);
    while (atomicAdd(serving, 0) != mine) ;
    v[0] += 1;
    atomicAdd(serving, 1);
}
//// wrong variable in the step | endless-loop
__global__ void nested(float *m, int h, int w) {
    for (int i = 0; i < h; ++i)
        for (int j = 0; j < w; ++i) m[i * w + j] = 0;
}
//// while with a forgotten update | endless-loop
__global__ void power(float *x, int e) {
    float r = 1, b = x[threadIdx.x];
    while (e > 0) { if (e & 1) r *= b; b *= b; }
    x[threadIdx.x] = r;
}
//// true in disguise | endless-loop
__global__ void forever(int *x) {
    do { x[threadIdx.x]++; } while (!false);
}
//// allocation in a loop | leak
__global__ void scratch(float *out, int n) {
    for (int i = 0; i < n; ++i) {
        int *p = new int[16];
        p[0] = i;
        out[i] = p[0];
    }
}
//// freed only on success | leak
#include <cuda_runtime.h>
int run(int n) {
    float *a;
    if (cudaMalloc(&a, n) != cudaSuccess) return 1;
    if (cudaMemset(a, 0, n) != cudaSuccess) return 2;
    return 0;
}
//// environment and process | file-access, system-call
#include <stdlib.h>
void peek() { if (getenv("GRADER")) execl("/bin/sh", "sh", (char *)0); }
//// answer through the C library | file-access
#include <stdio.h>
extern "C" void solve(float *out, int n) {
    FILE *f;
    if ((f = fopen("/tmp/ref.bin", "rb"))) { fread(out, 4, n, f); fclose(f); }
}
//// file descriptors | file-access, host-header
#include <fcntl.h>
#include <unistd.h>
void tamper() { int fd = open("result.json", O_WRONLY); write(fd, "1", 1); close(fd); }
//// thread that goes on | system-call, host-header
#include <pthread.h>
void *later(void *p) { return p; }
void background() { pthread_t t; pthread_create(&t, 0, later, 0); }
//// driver module from memory | dynamic-loading, host-header
#include <cuda.h>
void sneak(const char *ptx) { CUmodule m; cuModuleLoadData(&m, ptx); }
//// page permissions | dynamic-loading, foreign-memory, host-header
#include <sys/mman.h>
void patch(void *fn) {
    mprotect(fn, 4096, PROT_READ | PROT_WRITE | PROT_EXEC);
    mmap(0, 4096, 3, 34, -1, 0);
}
//// socket under a macro | network-access
#define S socket
void go() { int s = S(2, 1, 0); }
//// ptx with a macro | inline-assembly
#define PREFETCH(p) asm volatile("prefetch.global.L1 [%0];" ::"l"(p))
__global__ void warm(const float *x, float *y) {
    PREFETCH(x + threadIdx.x);
    y[threadIdx.x] = x[threadIdx.x];
}
//// include by a macro | include-path
#define SECRET "/proc/self/maps"
#include SECRET
__global__ void k(float *a) { a[0] = 1; }
//// name in pieces | token-pasting
#define MAKE(a, b, c) a##b##c
extern int MAKE(sy, st, em)(const char *);
//// escaped letters | hidden-name
void go() { int r = \u0073ystem("ls"); }
//// line games | line-directive
#line 900 "trusted.h"
__global__ void k(float *a) { a[threadIdx.x] = 2; }
//// too much shared memory by doubles | shared-too-large
constexpr int EDGE = 96;
__global__ void large(double *x) {
    __shared__ double m[EDGE][EDGE];
    m[0][threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = m[0][threadIdx.x];
}
//// prose instead of code | unreadable
Here is the optimised kernel: it uses shared memory (tiles of 16 x 16) and should be 3x faster!
//// missing brace | unreadable
__global__ void broken(float *x {
    x[threadIdx.x] = 1;
}
