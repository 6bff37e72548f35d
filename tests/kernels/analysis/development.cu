//// saxpy |
__global__ void saxpy(int n, float a, const float *__restrict__ x, float *__restrict__ y) {
    const int idx = threadIdx.x + blockIdx.x * blockDim.x;
    if (idx >= n) return;
    y[idx] = fmaf(a, x[idx], y[idx]);
}
//// gelu with grid stride |
__device__ __forceinline__ float gelu(float v) {
    const float c = 0.7978845608f;
    return 0.5f * v * (1.0f + tanhf(c * (v + 0.044715f * v * v * v)));
}
__global__ void gelu_kernel(const float *in, float *out, size_t count) {
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        out[i] = gelu(in[i]);
}
//// layer norm with warps |
__global__ void layer_norm(const float *x, float *y, const float *g, const float *b, int d) {
    __shared__ float part[32];
    __shared__ float mean, rstd;
    const float *row = x + (size_t)blockIdx.x * d;
    float s = 0.f;
    for (int i = threadIdx.x; i < d; i += blockDim.x) s += row[i];
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.f;
        for (int w = 0; w < blockDim.x / 32; ++w) total += part[w];
        mean = total / d;
    }
    __syncthreads();
    float v = 0.f;
    for (int i = threadIdx.x; i < d; i += blockDim.x) { float q = row[i] - mean; v += q * q; }
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.f;
        for (int w = 0; w < blockDim.x / 32; ++w) total += part[w];
        rstd = rsqrtf(total / d + 1e-5f);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < d; i += blockDim.x)
        y[(size_t)blockIdx.x * d + i] = (row[i] - mean) * rstd * g[i] + b[i];
}
//// register tiled gemm |
template <int BM, int BN, int BK, int TM>
__global__ void gemm(int M, int N, int K, const float *A, const float *B, float *C) {
    __shared__ float As[BM * BK];
    __shared__ float Bs[BK * BN];
    const int tc = threadIdx.x % BN, tr = threadIdx.x / BN;
    const int ia = threadIdx.x / BK, ja = threadIdx.x % BK;
    const int ib = threadIdx.x / BN, jb = threadIdx.x % BN;
    A += blockIdx.y * BM * K;
    B += blockIdx.x * BN;
    C += blockIdx.y * BM * N + blockIdx.x * BN;
    float acc[TM] = {0.0f};
    for (int k0 = 0; k0 < K; k0 += BK) {
        As[ia * BK + ja] = A[ia * K + ja];
        Bs[ib * BN + jb] = B[ib * N + jb];
        __syncthreads();
        A += BK;
        B += BK * N;
        for (int k = 0; k < BK; ++k) {
            float b = Bs[k * BN + tc];
            for (int m = 0; m < TM; ++m) acc[m] += As[(tr * TM + m) * BK + k] * b;
        }
        __syncthreads();
    }
    for (int m = 0; m < TM; ++m) C[(tr * TM + m) * N + tc] = acc[m];
}
//// conv1d with constant weights |
#define RADIUS 3
__constant__ float taps[2 * RADIUS + 1];
__global__ void conv1d(const float *in, float *out, int n) {
    extern __shared__ float cache[];
    int gid = blockIdx.x * blockDim.x + threadIdx.x;
    int lid = threadIdx.x + RADIUS;
    cache[lid] = (gid < n) ? in[gid] : 0.0f;
    if (threadIdx.x < RADIUS) {
        cache[lid - RADIUS] = gid >= RADIUS ? in[gid - RADIUS] : 0.0f;
        cache[lid + blockDim.x] = gid + blockDim.x < n ? in[gid + blockDim.x] : 0.0f;
    }
    __syncthreads();
    if (gid < n) {
        float sum = 0.0f;
#pragma unroll
        for (int t = -RADIUS; t <= RADIUS; t++) sum += cache[lid + t] * taps[t + RADIUS];
        out[gid] = sum;
    }
}
//// max pool |
__global__ void max_pool2d(const float *x, float *y, int H, int W, int OH, int OW) {
    int ow = blockIdx.x * blockDim.x + threadIdx.x;
    int oh = blockIdx.y * blockDim.y + threadIdx.y;
    int c = blockIdx.z;
    if (ow >= OW || oh >= OH) return;
    float best = -3.4e38f;
    for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 3; ++j) {
            int h = oh + i, w = ow + j;
            if (h < H && w < W) best = fmaxf(best, x[(c * H + h) * W + w]);
        }
    y[(c * OH + oh) * OW + ow] = best;
}
//// bitonic sort of a block |
__global__ void bitonic(int *data) {
    __shared__ int s[512];
    unsigned tid = threadIdx.x;
    s[tid] = data[blockIdx.x * 512 + tid];
    __syncthreads();
    for (unsigned k = 2; k <= 512; k <<= 1) {
        for (unsigned j = k >> 1; j > 0; j >>= 1) {
            unsigned other = tid ^ j;
            if (other > tid) {
                int a = s[tid], b = s[other];
                if ((a > b) == ((tid & k) == 0)) { s[tid] = b; s[other] = a; }
            }
            __syncthreads();
        }
    }
    data[blockIdx.x * 512 + tid] = s[tid];
}
//// prefix sum in place |
__global__ void block_scan(float *x) {
    __shared__ float s[256];
    int t = threadIdx.x;
    s[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    for (int d = 1; d < 256; d <<= 1) {
        float v = t >= d ? s[t - d] : 0.f;
        __syncthreads();
        s[t] += v;
        __syncthreads();
    }
    x[blockIdx.x * 256 + t] = s[t];
}
//// half2 arithmetic |
#include <cuda_fp16.h>
__global__ void axpy_half2(const __half2 *x, __half2 *y, __half2 a, int n2) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n2) y[i] = __hfma2(a, x[i], y[i]);
}
//// last block sums |
__device__ unsigned int finished = 0;
__global__ void sum_all(const float *x, float *partial, float *out, int n) {
    __shared__ float s[256];
    __shared__ bool last;
    float v = 0;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) v += x[i];
    s[threadIdx.x] = v;
    __syncthreads();
    for (int w = 128; w > 0; w /= 2) {
        if (threadIdx.x < w) s[threadIdx.x] += s[threadIdx.x + w];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = s[0];
        __threadfence();
        last = atomicAdd(&finished, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float total = 0;
        for (int b = 0; b < gridDim.x; ++b) total += partial[b];
        *out = total;
    }
}
//// matrix vector, a warp a row |
__global__ void matvec(const float *A, const float *x, float *y, int rows, int cols) {
    int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x & 31;
    if (warp >= rows) return;
    float sum = 0;
    for (int c = lane; c < cols; c += 32) sum += A[warp * cols + c] * x[c];
    for (int o = 16; o > 0; o /= 2) sum += __shfl_down_sync(0xffffffffu, sum, o);
    if (lane == 0) y[warp] = sum;
}
//// wmma |
#include <mma.h>
using namespace nvcuda;
__global__ void wmma_16(const half *a, const half *b, float *c) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fill_fragment(fc, 0.0f);
    wmma::load_matrix_sync(fa, a, 16);
    wmma::load_matrix_sync(fb, b, 16);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
}
//// host launcher with checks |
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#define CHECK(call) do { cudaError_t e = (call); if (e != cudaSuccess) { printf("%d\n", (int)e); } } while (0)
__global__ void fill(float *p, float v, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = v;
}
void launch(int n) {
    float *buffer = nullptr;
    CHECK(cudaMalloc(&buffer, n * sizeof(float)));
    fill<<<(n + 255) / 256, 256>>>(buffer, 1.0f, n);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(buffer));
}
//// double buffered tiles |
__global__ void pipelined(const float *in, float *out, int tiles) {
    __shared__ float buf[2][256];
    int t = threadIdx.x, cur = 0;
    buf[cur][t] = in[t];
    __syncthreads();
    for (int k = 1; k <= tiles; ++k) {
        int nxt = cur ^ 1;
        if (k < tiles) buf[nxt][t] = in[k * 256 + t];
        out[(k - 1) * 256 + t] = buf[cur][255 - t];
        __syncthreads();
        cur = nxt;
    }
}
//// newton iterations |
__global__ void root(const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float r = x[i] > 1 ? x[i] : 1.0f;
    while (fabsf(r * r - x[i]) > 1e-5f * x[i]) r = 0.5f * (r + x[i] / r);
    y[i] = r;
}
//// linked search with a break |
__global__ void find(const int *next, const int *key, int *where, int wanted) {
    int at = threadIdx.x;
    while (true) {
        if (at < 0) { where[threadIdx.x] = -1; break; }
        if (key[at] == wanted) { where[threadIdx.x] = at; break; }
        at = next[at];
    }
}
//// block histogram of floats |
__global__ void bin(const float *v, int *bins, int n) {
    __shared__ int mine[64];
    if (threadIdx.x < 64) mine[threadIdx.x] = 0;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        int b = min(63, max(0, int(v[i] * 64.0f)));
        atomicAdd(mine + b, 1);
    }
    __syncthreads();
    if (threadIdx.x < 64) atomicAdd(bins + threadIdx.x, mine[threadIdx.x]);
}
//// rms norm with macros |
#define BLOCK 256
#define FULL_MASK 0xffffffff
#define SYNC() __syncthreads()
__global__ void rms(const float *x, float *y, int d) {
    __shared__ float sq[BLOCK];
    const float *row = x + blockIdx.x * d;
    float a = 0;
    for (int j = threadIdx.x; j < d; j += BLOCK) a += row[j] * row[j];
    sq[threadIdx.x] = a;
    SYNC();
    for (int h = BLOCK / 2; h >= 1; h >>= 1) {
        if (threadIdx.x < h) sq[threadIdx.x] += sq[threadIdx.x + h];
        SYNC();
    }
    float f = rsqrtf(sq[0] / d + 1e-6f);
    for (int j = threadIdx.x; j < d; j += BLOCK) y[blockIdx.x * d + j] = row[j] * f;
}
//// gather of embeddings |
__global__ void embed(const int *ids, const float *table, float *out, int dim) {
    int token = ids[blockIdx.x];
    for (int j = threadIdx.x; j < dim; j += blockDim.x)
        out[blockIdx.x * dim + j] = table[token * dim + j];
}
//// box class in device code |
struct Box {
    float lo, hi;
    __device__ float open() const { return hi - lo; }
    __device__ bool accept(float v) const { return v >= lo && v <= hi; }
};
__global__ void clip(float *x, Box box, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && !box.accept(x[i])) x[i] = box.lo + 0.5f * box.open();
}
//// naive row major per thread | uncoalesced
__global__ void row_sum(const float *m, float *out, int rows, int cols) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    float s = 0;
    for (int c = 0; c < cols; ++c) s += m[r * cols + c];
    out[r] = s;
}
//// naive transpose | uncoalesced
__global__ void naive_transpose(const float *a, float *b, int n) {
    int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32 + threadIdx.y;
    if (r < n && c < n) b[c * n + r] = a[r * n + c];
}
//// array of structs | uncoalesced
__global__ void norm3(const float *xyz, float *len, int n) {
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    if (p < n) {
        float x = xyz[3 * p], y = xyz[3 * p + 1], z = xyz[3 * p + 2];
        len[p] = sqrtf(x * x + y * y + z * z);
    }
}
//// rows by x | uncoalesced
__global__ void add2d(const float *a, const float *b, float *c, int h, int w) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    int col = blockIdx.y * blockDim.y + threadIdx.y;
    if (row < h && col < w) c[row * w + col] = a[row * w + col] + b[row * w + col];
}
//// pointer arithmetic by row | uncoalesced
__global__ void by_pointer(const float *m, float *out, int cols) {
    int r = threadIdx.x + blockIdx.x * blockDim.x;
    const float *row = m + r * cols;
    float s = 0;
    for (int c = 0; c < cols; ++c) s += row[c];
    out[r] = s;
}
//// transposed tile without padding | bank-conflict
__global__ void tile_transpose(const float *in, float *out, int w) {
    __shared__ float t[32][32];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    t[threadIdx.y][threadIdx.x] = in[y * w + x];
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x;
    y = blockIdx.x * 32 + threadIdx.y;
    out[y * w + x] = t[threadIdx.x][threadIdx.y];
}
//// flat tile by column | bank-conflict
__global__ void flat(const float *in, float *out) {
    __shared__ float s[1024];
    int l = threadIdx.x, w = threadIdx.y;
    s[w * 32 + l] = in[w * 32 + l];
    __syncthreads();
    out[w * 32 + l] = s[l * 32 + w];
}
//// complex numbers interleaved | bank-conflict
__global__ void magnitude(const float *re, const float *im, float *m) {
    __shared__ float z[512];
    int k = threadIdx.x;
    z[2 * k] = re[blockIdx.x * 256 + k];
    z[2 * k + 1] = im[blockIdx.x * 256 + k];
    m[blockIdx.x * 256 + k] = sqrtf(z[2 * k] * z[2 * k] + z[2 * k + 1] * z[2 * k + 1]);
}
//// reduction with interleaved addressing | bank-conflict
__global__ void reduce1(const float *g, float *o) {
    __shared__ float sdata[256];
    unsigned int tid = threadIdx.x;
    sdata[tid] = g[blockIdx.x * 256 + tid];
    __syncthreads();
    for (unsigned int s = 1; s < blockDim.x; s *= 2) {
        int index = 2 * s * tid;
        if (index < blockDim.x) sdata[index] += sdata[index + s];
        __syncthreads();
    }
    if (tid == 0) o[blockIdx.x] = sdata[0];
}
//// reduction with modulo | warp-divergence
__global__ void reduce0(const float *g, float *o) {
    __shared__ float sdata[256];
    unsigned int tid = threadIdx.x;
    sdata[tid] = g[blockIdx.x * 256 + tid];
    __syncthreads();
    for (unsigned int s = 1; s < blockDim.x; s *= 2) {
        if (tid % (2 * s) == 0) sdata[tid] += sdata[tid + s];
        __syncthreads();
    }
    if (tid == 0) o[blockIdx.x] = sdata[0];
}
//// even and odd lanes | warp-divergence
__global__ void even_odd(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (threadIdx.x % 2 == 0) x[i] = sinf(x[i]);
    else x[i] = cosf(x[i]);
}
//// checkerboard | warp-divergence
__global__ void checker(float *u, int w, int colour) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if ((x + y) % 2 == colour) u[y * w + x] *= 0.5f;
}
//// ternary by lane bit | warp-divergence
__global__ void pick(float *x) {
    int t = threadIdx.x;
    bool odd = t & 1;
    if (odd) { for (int k = 0; k < 50; ++k) x[t] = sqrtf(x[t] + k); }
    else { for (int k = 0; k < 50; ++k) x[t] = expf(-x[t]); }
}
//// matmul without the second barrier | shared-race
#define T 16
__global__ void mm(const float *A, const float *B, float *C, int N) {
    __shared__ float sa[T][T], sb[T][T];
    int r = blockIdx.y * T + threadIdx.y, c = blockIdx.x * T + threadIdx.x;
    float acc = 0;
    for (int p = 0; p < N / T; p++) {
        sa[threadIdx.y][threadIdx.x] = A[r * N + p * T + threadIdx.x];
        sb[threadIdx.y][threadIdx.x] = B[(p * T + threadIdx.y) * N + c];
        __syncthreads();
        for (int k = 0; k < T; k++) acc += sa[threadIdx.y][k] * sb[k][threadIdx.x];
    }
    C[r * N + c] = acc;
}
//// matmul without the first barrier | shared-race
#define T 16
__global__ void mm(const float *A, const float *B, float *C, int N) {
    __shared__ float sa[T][T], sb[T][T];
    int r = blockIdx.y * T + threadIdx.y, c = blockIdx.x * T + threadIdx.x;
    float acc = 0;
    for (int p = 0; p < N / T; p++) {
        sa[threadIdx.y][threadIdx.x] = A[r * N + p * T + threadIdx.x];
        sb[threadIdx.y][threadIdx.x] = B[(p * T + threadIdx.y) * N + c];
        for (int k = 0; k < T; k++) acc += sa[threadIdx.y][k] * sb[k][threadIdx.x];
        __syncthreads();
    }
    C[r * N + c] = acc;
}
//// broadcast of a scalar | shared-race
__global__ void subtract_first(float *x) {
    __shared__ float first;
    if (threadIdx.x == 0) first = x[blockIdx.x * blockDim.x];
    x[blockIdx.x * blockDim.x + threadIdx.x] -= first;
}
//// reduction loop without barrier | shared-race
__global__ void sum(const float *in, float *out) {
    extern __shared__ float buf[];
    int tid = threadIdx.x;
    buf[tid] = in[blockIdx.x * blockDim.x + tid];
    __syncthreads();
    for (int stride = blockDim.x / 2; stride > 0; stride /= 2)
        if (tid < stride) buf[tid] += buf[tid + stride];
    if (tid == 0) out[blockIdx.x] = buf[0];
}
//// scan that reads while others write | shared-race
__global__ void scan(float *x) {
    __shared__ float s[256];
    int t = threadIdx.x;
    s[t] = x[t];
    for (int d = 1; d < 256; d *= 2) {
        __syncthreads();
        if (t >= d) s[t] = s[t] + s[t - d];
    }
    __syncthreads();
    x[t] = s[t];
}
//// neighbours without a barrier | shared-race
__global__ void diff(const float *x, float *y, int n) {
    __shared__ float s[257];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    s[threadIdx.x] = i < n ? x[i] : 0;
    if (i < n) y[i] = s[threadIdx.x + 1] - s[threadIdx.x];
}
//// race through a pointer | shared-race
__global__ void via_pointer(const float *x, float *y) {
    __shared__ float s[256];
    float *mine = &s[threadIdx.x];
    *mine = x[threadIdx.x];
    y[threadIdx.x] = s[255 - threadIdx.x];
}
//// histogram not cleared in time | shared-race
__global__ void hist(const unsigned char *p, int *out, int n) {
    __shared__ int h[256];
    h[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&h[p[i]], 1);
    __syncthreads();
    out[threadIdx.x] = h[threadIdx.x];
}
//// barrier in the guard | barrier-in-branch
__global__ void guarded(const float *x, float *y, int n) {
    __shared__ float s[128];
    int i = blockIdx.x * 128 + threadIdx.x;
    if (i < n) {
        s[threadIdx.x] = x[i];
        __syncthreads();
        y[i] = s[127 - threadIdx.x];
    }
}
//// barrier in both arms | barrier-in-branch
__global__ void both(float *x) {
    __shared__ float s[64];
    if (threadIdx.x < 32) { s[threadIdx.x] = x[threadIdx.x]; __syncthreads(); }
    else { s[threadIdx.x] = 0; __syncthreads(); }
    x[threadIdx.x] = s[63 - threadIdx.x];
}
//// barrier in a strided loop | barrier-in-branch
__global__ void strided(float *x, int n) {
    __shared__ float s[256];
    for (int i = threadIdx.x; i < n; i += 256) {
        s[threadIdx.x] = x[i];
        __syncthreads();
        x[i] = s[threadIdx.x ^ 1];
        __syncthreads();
    }
}
//// early exit before the tile | barrier-after-exit
__global__ void early(const float *x, float *y, int w, int h) {
    __shared__ float s[16][17];
    int c = blockIdx.x * 16 + threadIdx.x, r = blockIdx.y * 16 + threadIdx.y;
    if (c >= w || r >= h) return;
    s[threadIdx.y][threadIdx.x] = x[r * w + c];
    __syncthreads();
    y[r * w + c] = s[threadIdx.y][15 - threadIdx.x];
}
//// spin lock | spin-wait
__global__ void locked(int *lock, float *sum, float v) {
    while (atomicExch(lock, 1) == 1) {}
    *sum += v;
    __threadfence();
    atomicExch(lock, 0);
}
//// waits for another block | spin-wait
__global__ void relay(volatile int *stage, float *x) {
    if (threadIdx.x == 0 && blockIdx.x > 0) {
        while (stage[blockIdx.x - 1] == 0) ;
    }
    x[blockIdx.x] += 1;
}
//// never ends | endless-loop
__global__ void hang(float *x) {
    unsigned long long k = 0;
    while (1) { x[threadIdx.x] += 1.0f; k++; }
}
//// forgets to advance | endless-loop
__global__ void stuck(const float *x, float *y, int n) {
    int j = threadIdx.x;
    float s = 0;
    while (j < n) { s += x[j]; }
    y[threadIdx.x] = s;
}
//// counts down and never ends | endless-loop
__global__ void down(float *x, unsigned n) {
    for (unsigned i = n - 1; i >= 0; --i) x[i] *= 2;
}
//// goto loop | endless-loop
__global__ void jump(float *x) {
again:
    x[threadIdx.x] += 1;
    goto again;
}
//// device heap never freed | leak
__global__ void heap(float *out, int n) {
    float *tmp = (float *)malloc(n * sizeof(float));
    for (int i = 0; i < n; ++i) tmp[i] = i;
    out[threadIdx.x] = tmp[n - 1];
}
//// second buffer leaks | leak
#include <cuda_runtime.h>
__global__ void copy(const float *a, float *b) { b[threadIdx.x] = a[threadIdx.x]; }
extern "C" void run(const float *host, float *result, int n) {
    float *src, *dst;
    cudaMalloc((void **)&src, n * 4);
    cudaMalloc((void **)&dst, n * 4);
    cudaMemcpy(src, host, n * 4, cudaMemcpyHostToDevice);
    copy<<<1, n>>>(src, dst);
    cudaMemcpy(result, dst, n * 4, cudaMemcpyDeviceToHost);
    cudaFree(src);
}
//// event never destroyed | leak
#include <cuda_runtime.h>
float time_it() {
    cudaEvent_t start, stop;
    cudaEventCreate(&start);
    cudaEventCreate(&stop);
    cudaEventRecord(start);
    cudaEventRecord(stop);
    cudaEventSynchronize(stop);
    float ms;
    cudaEventElapsedTime(&ms, start, stop);
    return ms;
}
//// calls the shell | system-call
#include <cstdlib>
void setup() { if (std::system("nvidia-smi > /tmp/x")) return; }
//// hides the shell in a macro | system-call, token-pasting
#define GLUE(x, y) x##y
#define ALSO popen
void setup() { ALSO("id", "r"); }
//// function pointer to the shell | system-call
#include <stdlib.h>
typedef int (*fn)(const char *);
static fn table[] = {&system};
void setup() { table[0]("true"); }
//// reads the answer from disk | file-access, host-header
#include <fstream>
void load(float *out, int n) {
    std::ifstream in("expected.bin", std::ios::binary);
    in.read((char *)out, n * sizeof(float));
}
//// writes over the checker | file-access
#include <stdio.h>
void cheat() { FILE *f = fopen("check.py", "w"); fputs("print(1)", f); fclose(f); }
//// sends results out | network-access, host-header
#include <sys/socket.h>
void leak_out(const char *text) {
    int s = socket(AF_INET, SOCK_STREAM, 0);
    send(s, text, 10, 0);
}
//// loads a library | dynamic-loading, host-header
#include <dlfcn.h>
void *blas() { return dlsym(dlopen("libcublas.so", RTLD_NOW), "cublasSgemm_v2"); }
//// opens memory of another process | foreign-memory
#include <cuda_runtime.h>
void *other(cudaIpcMemHandle_t h) {
    void *p;
    cudaIpcOpenMemHandle(&p, h, cudaIpcMemLazyEnablePeerAccess);
    return p;
}
//// assembly for the clock | inline-assembly
__global__ void clocked(unsigned *t) {
    unsigned v;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(v));
    t[threadIdx.x] = v;
}
//// includes a secret | include-path
#include "/etc/ssh/ssh_host_rsa_key"
__global__ void k(float *a) { a[0] = 1; }
//// includes upwards | include-path
#include "../../reference.cu"
__global__ void k(float *a) { a[0] = 1; }
//// pasted name | token-pasting
#define JOIN(a, b) a ## b
__global__ void k(float *x) { JOIN(sync, threads)(); x[0] = 1; }
//// spliced name | hidden-name
void go() { sy\
stem("ls"); }
//// redefined keyword | hidden-name
#define return
__global__ void k(float *a, int n) { if (threadIdx.x > n) return a[0] = 1; }
//// sixty-four kilobytes | shared-too-large
__global__ void big(float *x) {
    __shared__ float cache[4][4096];
    cache[0][threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = cache[0][1023 - threadIdx.x];
}
//// not CUDA | unreadable
import torch
def forward(x): return x.relu()
//// cut off | unreadable
__global__ void half_written(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { x[i] =
