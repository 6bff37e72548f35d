/* Kernels of a training pass besides matrix products, forward and backward, and attention over the
   tiles of a row.

   Compiled twice: with HALF, activations (`num`) are bfloat16, and sums, norms, softmax and the
   residual stream stay float32. Sums do not depend on the number of threads: rows are independent, and
   sums over rows use BLOCKS parts of fixed size.

   T tokens, E hidden size, H query heads, K key heads, D head size, R rotary dimensions, I inner
   size, V vocabulary. Matrices are row-major. */

#include <math.h>
#include <string.h>

#include "lanes.h"

#define BLOCKS 16
#define WIDEST 512 /* the largest head size */
#define SIMD _Pragma("omp simd")

long ludus_blocks(void) { return BLOCKS; }
long ludus_widest(void) { return WIDEST; }

/* exp within 2 ulp; Cephes' polynomial. NaN stays NaN. */
INLINE float exponential(float x) {
    x = x < -87 ? -87 : x > 88 ? 88 : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int32_t i; float f; } two = {((int32_t)n + 127) << 23};
    return (p * r * r + r + 1) * two.f;
}

/* RMS norm: y = x r w with r = 1 / sqrt(mean(x^2) + eps). */
void ludus_norm(long T, long E, const float *x, const float *w, float eps, num *y, float *r,
                long threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long t = 0; t < T; t++) {
        const float *in = x + t * E;
        num *out = y + t * E;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long e = 0; e < E; e++) sum += in[e] * in[e];
        float scale = r[t] = 1 / sqrtf(sum / E + eps);
        SIMD for (long e = 0; e < E; e++) out[e] = narrow(in[e] * scale * w[e]);
    }
}

/* dx = add + d(norm)/dx; dw [BLOCKS, E] accumulates parts of dw; initialise with 0. */
void ludus_norm_back(long T, long E, const float *x, const float *w, const float *r, const num *dy,
                     const float *add, float *dx, float *dw, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long b = 0; b < BLOCKS; b++) {
        float *part = dw + b * E;
        for (long t = T * b / BLOCKS; t < T * (b + 1) / BLOCKS; t++) {
            const float *in = x + t * E, *residual = add + t * E;
            const num *d = dy + t * E;
            float *out = dx + t * E;
            float sum = 0, scale = r[t];
#pragma omp simd reduction(+ : sum)
            for (long e = 0; e < E; e++) sum += widen(d[e]) * w[e] * in[e];
            float mean = sum * scale * scale * scale / E;
            SIMD for (long e = 0; e < E; e++) {
                float g = widen(d[e]) * scale;
                out[e] = residual[e] + g * w[e] - mean * in[e];
                part[e] += g * in[e];
            }
        }
    }
}

/* Queries and keys of a token: [H + 2 K, D] -> [H + K, D], normalised if there are weights,
   and rotated by halves of the first R dimensions. r [T, H + K]: the norms' factors. */
void ludus_rotate(long T, long H, long K, long D, long R, const num *qkv, const float *wq,
                  const float *wk, float eps, const float *cosine, const float *sine, num *out,
                  float *r, long threads) {
    long half = R / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long t = 0; t < T; t++) {
        const float *c = cosine + t * R, *s = sine + t * R;
        for (long h = 0; h < H + K; h++) {
            const num *in = qkv + (t * (H + 2 * K) + h) * D;
            const float *w = h < H ? wq : wk;
            num *to = out + (t * (H + K) + h) * D;
            float x[WIDEST], sum = 0;
            SIMD for (long d = 0; d < D; d++) x[d] = widen(in[d]);
            if (w) {
#pragma omp simd reduction(+ : sum)
                for (long d = 0; d < D; d++) sum += x[d] * x[d];
                float scale = r[t * (H + K) + h] = 1 / sqrtf(sum / D + eps);
                SIMD for (long d = 0; d < D; d++) x[d] *= scale * w[d];
            }
            SIMD for (long d = 0; d < half; d++) {
                to[d] = narrow(x[d] * c[d] - x[d + half] * s[d]);
                to[d + half] = narrow(x[d + half] * c[d + half] + x[d] * s[d + half]);
            }
            for (long d = R; d < D; d++) to[d] = narrow(x[d]);
        }
    }
}

/* Gradients of rotated queries and keys, and of values, [H + 2 K, D] per token -> gradients of
   qkv. dw [BLOCKS, 2, D] accumulates parts of the norms' gradients; initialise with 0. */
void ludus_rotate_back(long T, long H, long K, long D, long R, const num *qkv, const float *wq,
                       const float *wk, const float *cosine, const float *sine, const float *r,
                       const float *grad, num *dqkv, float *dw, long threads) {
    long half = R / 2, all = H + 2 * K;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long b = 0; b < BLOCKS; b++)
        for (long t = T * b / BLOCKS; t < T * (b + 1) / BLOCKS; t++) {
            const float *c = cosine + t * R, *s = sine + t * R;
            for (long h = 0; h < all; h++) {
                const num *in = qkv + (t * all + h) * D;
                const float *g = grad + (t * all + h) * D, *w = h < H ? wq : wk;
                float *part = dw + (2 * b + (h >= H)) * D, x[WIDEST], sum = 0;
                num *to = dqkv + (t * all + h) * D;
                memcpy(x, g, D * sizeof *x);
                if (h < H + K) {
                    SIMD for (long d = 0; d < half; d++) {
                        x[d] = g[d] * c[d] + g[d + half] * s[d + half];
                        x[d + half] = g[d + half] * c[d + half] - g[d] * s[d];
                    }
                    if (w) {
                        float scale = r[t * (H + K) + h];
#pragma omp simd reduction(+ : sum)
                        for (long d = 0; d < D; d++) sum += x[d] * w[d] * widen(in[d]);
                        float mean = sum * scale * scale * scale / D;
                        SIMD for (long d = 0; d < D; d++) {
                            float y = widen(in[d]), dy = x[d] * scale;
                            part[d] += dy * y;
                            x[d] = dy * w[d] - mean * y;
                        }
                    }
                }
                SIMD for (long d = 0; d < D; d++) to[d] = narrow(x[d]);
            }
        }
}

/* act(g) = g s with s = sigmoid(z): SiLU z = g; GELU by tanh z = 1.596 (g + 0.0447 g^3). */
#define CUBIC 0.044715f
#define SLOPE 1.5957691216f /* 2 sqrt(2 / pi) */
INLINE float sigmoid(float z) { return 1 / (1 + exponential(-z)); }

/* [gate | up] -> act(gate) up */
void ludus_gate(long T, long I, const num *x, num *y, long gelu, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long t = 0; t < T; t++) {
        const num *gate = x + 2 * t * I, *up = gate + I;
        num *out = y + t * I;
        SIMD for (long i = 0; i < I; i++) {
            float g = widen(gate[i]), z = gelu ? SLOPE * (g + CUBIC * g * g * g) : g;
            out[i] = narrow(g * sigmoid(z) * widen(up[i]));
        }
    }
}

void ludus_gate_back(long T, long I, const num *x, const num *dy, num *dx, long gelu,
                     long threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long t = 0; t < T; t++) {
        const num *gate = x + 2 * t * I, *up = gate + I, *d = dy + t * I;
        num *dgate = dx + 2 * t * I, *dup = dgate + I;
        SIMD for (long i = 0; i < I; i++) {
            float g = widen(gate[i]), z = gelu ? SLOPE * (g + CUBIC * g * g * g) : g;
            float s = sigmoid(z), slope = gelu ? SLOPE * (1 + 3 * CUBIC * g * g) : 1;
            float dz = widen(d[i]);
            dup[i] = narrow(dz * g * s);
            dgate[i] = narrow(dz * widen(up[i]) * (s + g * s * (1 - s) * slope));
        }
    }
}

/* Log-sum-exp and entropy of the logits z [T, V] times `scale`. */
void ludus_scores(long T, long V, const num *z, float scale, float *total, float *entropy,
                  long threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long t = 0; t < T; t++) {
        const num *in = z + t * V;
        float top = -INFINITY, sum = 0, dot = 0;
#pragma omp simd reduction(max : top)
        for (long v = 0; v < V; v++) {
            float x = widen(in[v]) * scale;
            top = x > top ? x : top;
        }
#pragma omp simd reduction(+ : sum, dot)
        for (long v = 0; v < V; v++) {
            float x = widen(in[v]) * scale - top, e = exponential(x);
            sum += e;
            dot += e * x;
        }
        total[t] = top + logf(sum);
        entropy[t] = logf(sum) - dot / sum;
    }
}

/* -p (share + heat (log p + entropy)), with p = softmax(scale z) */
void ludus_scores_back(long T, long V, const num *z, float scale, const float *total,
                       const float *entropy, const float *share, const float *heat, float *grad,
                       long threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long t = 0; t < T; t++) {
        const num *in = z + t * V;
        float *out = grad + t * V;
        float constant = -share[t] - heat[t] * entropy[t], slope = -heat[t];
        float all = total[t];
        SIMD for (long v = 0; v < V; v++) {
            float x = widen(in[v]) * scale - all;
            out[v] = exponential(x) * (constant + slope * x);
        }
    }
}

/* Attention */

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE long whole(long n) { return (n + PANEL - 1) / PANEL * PANEL; }

INLINE void micro(const int m, long K, const float *a, long row, long column, const float *b,
                  long ldb, float *c, long ldc) {
    vec sum[ROWS][2];
    for (int i = 0; i < m; i++) sum[i][0] = sum[i][1] = (vec){0};
    for (long k = 0; k < K; k++, a += column, b += ldb) {
        vec b0 = load(b), b1 = load(b + LANES);
#pragma GCC unroll 12
        for (int i = 0; i < m; i++) {
            vec x = a[i * row] - (vec){0};
            sum[i][0] += x * b0;
            sum[i][1] += x * b1;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
        *(vec *)(c + i * ldc) = sum[i][0];
        *(vec *)(c + i * ldc + LANES) = sum[i][1];
    }
}

/* C [M, N] = A [M, K] B [K, N]; A has any strides, N is whole panels. */
static void product(long M, long N, long K, const float *a, long row, long column, const float *b,
                    long ldb, float *c, long ldc) {
    for (long n = 0; n < N; n += PANEL) {
        long m = 0;
        for (; m + ROWS <= M; m += ROWS)
            micro(ROWS, K, a + m * row, row, column, b + n, ldb, c + m * ldc + n, ldc);
        for (; m + 4 <= M; m += 4)
            micro(4, K, a + m * row, row, column, b + n, ldb, c + m * ldc + n, ldc);
        for (; m < M; m++)
            micro(1, K, a + m * row, row, column, b + n, ldb, c + m * ldc + n, ldc);
    }
}

#define BLOCK 64 /* tokens whose rows fit the first cache */

/* Keys or values [T, K, D], with the given strides -> [K, D, T]. */
void ludus_turn(long T, long K, long D, const num *x, long token, long head, num *y,
                long threads) {
#pragma omp parallel for num_threads(threads) collapse(2) schedule(static)
    for (long k = 0; k < K; k++)
        for (long start = 0; start < T; start += BLOCK) {
            const num *in = x + k * head;
            long stop = start + BLOCK < T ? start + BLOCK : T;
            for (long d = 0; d < D; d++) {
                num *out = y + (k * D + d) * T;
                for (long t = start; t < stop; t++) out[t] = in[t * token + d];
            }
        }
}

/* Queries [start, stop) see the keys of their spans: all queries see the first `full` keys; of the
   others, a query sees those not in `hidden` [stop - start, keys - full]. */
typedef struct {
    int64_t start, stop, full, keys, spans, num_spans;
    const uint8_t *hidden;
} Tile;

/* Strides of heads and tokens count numbers, not bytes; G query heads share a key head. Gradients
   are [T, heads, D] with the given token strides. */
typedef struct {
    int64_t num_tiles, K, G, D, q_head, q_token, k_head, k_token, v_head, v_token, o_token;
    int64_t dq_token, dk_token, dv_token, tokens, scratch;
    const Tile *tiles;
    const int64_t *spans; /* pairs */
    const num *q, *k, *v;
    const num *keys, *values; /* transposed: [K, D, tokens]; values in the backward pass only */
    num *o;       /* [T, H, D] */
    float *total; /* [T, H], log-sum-exp */
    const num *grad; /* of o */
    float *dq, *dk, *dv;
    float *work; /* [threads, scratch] */
    float scale, softcap; /* scores are cap * tanh(scale * q k / cap); 0: no cap */
} Attention;

/* Floats per thread for a tile with the given rows (queries times G) and keys. */
long ludus_attention_scratch(long rows, long keys, long D) {
    long wide = whole(keys), deep = whole(D);
    return 2 * rows * wide + 4 * rows * deep + 3 * wide * deep + rows;
}

/* The tile's keys or values, [keys, deep]. */
static void gather(const Attention *a, const Tile *tile, const num *from, long token, float *to,
                   long deep) {
    for (long n = 0; n < tile->num_spans; n++) {
        const int64_t *span = a->spans + 2 * (tile->spans + n);
        for (long j = span[0]; j < span[1]; j++, to += deep) {
            const num *in = from + j * token;
            SIMD for (long d = 0; d < a->D; d++) to[d] = widen(in[d]);
            for (long d = a->D; d < deep; d++) to[d] = 0;
        }
    }
}

/* Transposed, [D, wide], from transposed keys or values [D, tokens]. */
static void gather_turned(const Attention *a, const Tile *tile, const num *from, float *to,
                          long wide) {
    for (long d = 0; d < a->D; d++, from += a->tokens, to += wide) {
        long at = 0;
        for (long n = 0; n < tile->num_spans; n++) {
            const int64_t *span = a->spans + 2 * (tile->spans + n);
            long length = span[1] - span[0];
            SIMD for (long j = 0; j < length; j++) to[at + j] = widen(from[span[0] + j]);
            at += length;
        }
        for (; at < wide; at++) to[at] = 0;
    }
}

static void scatter(const Attention *a, const Tile *tile, const float *from, float *to,
                    long token, long deep) {
    for (long n = 0; n < tile->num_spans; n++) {
        const int64_t *span = a->spans + 2 * (tile->spans + n);
        for (long j = span[0]; j < span[1]; j++, from += deep)
            SIMD for (long d = 0; d < a->D; d++) to[j * token + d] += from[d];
    }
}

/* Rows of queries, or of their gradients: [(query, group), deep]. */
static void rows_of(const Attention *a, const Tile *tile, const num *from, long head, long token,
                    float scale, float *to, long deep) {
    for (long i = tile->start; i < tile->stop; i++)
        for (long g = 0; g < a->G; g++, to += deep) {
            const num *in = from + i * token + g * head;
            SIMD for (long d = 0; d < a->D; d++) to[d] = widen(in[d]) * scale;
            for (long d = a->D; d < deep; d++) to[d] = 0;
        }
}

static void hide(const Attention *a, const Tile *tile, float *scores, long wide) {
    long part = tile->keys - tile->full;
    for (long i = 0; i < tile->stop - tile->start; i++)
        for (long g = 0; g < a->G; g++, scores += wide) {
            const uint8_t *hidden = tile->hidden + i * part;
            float *s = scores + tile->full;
            SIMD for (long j = 0; j < part; j++) s[j] = hidden[j] ? -INFINITY : s[j];
            for (long j = tile->keys; j < wide; j++) scores[j] = -INFINITY;
        }
}

/* tanh: a polynomial near 0 (Cephes), else 1 - 2 / (1 + e^2x). */
INLINE float tanh_of(float x) {
    float z = x * x, near = -5.70498872745e-3f * z + 2.06390887954e-2f;
    near = near * z - 5.37397155531e-2f;
    near = near * z + 1.33314422036e-1f;
    near = near * z - 3.33332819422e-1f;
    return z < 0.390625f ? near * z * x + x : 1 - 2 / (1 + exponential(2 * x));
}

static void cap_scores(float *scores, long num, float cap) {
    SIMD for (long j = 0; j < num; j++) scores[j] = cap * tanh_of(scores[j] / cap);
}

static void attend(const Attention *a, const Tile *tile, long k, float *work) {
    long rows = (tile->stop - tile->start) * a->G, wide = whole(tile->keys), deep = whole(a->D);
    long H = a->K * a->G;
    float *q = work, *keys = q + rows * deep, *values = keys + wide * deep;
    float *p = values + wide * deep, *out = p + rows * wide;
    rows_of(a, tile, a->q + k * a->G * a->q_head, a->q_head, a->q_token, a->scale, q, deep);
    gather_turned(a, tile, a->keys + k * a->D * a->tokens, keys, wide);
    gather(a, tile, a->v + k * a->v_head, a->v_token, values, deep);
    product(rows, wide, a->D, q, deep, 1, keys, wide, p, wide);
    if (a->softcap) cap_scores(p, rows * wide, a->softcap);
    hide(a, tile, p, wide);
    for (long n = 0; n < rows; n++) {
        float *s = p + n * wide, top = -INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
        for (long j = 0; j < wide; j++) top = s[j] > top ? s[j] : top;
#pragma omp simd reduction(+ : sum)
        for (long j = 0; j < wide; j++) {
            float e = exponential(s[j] - top);
            s[j] = s[j] == -INFINITY ? 0 : e;
            sum += s[j];
        }
        long token = tile->start + n / a->G, head = k * a->G + n % a->G;
        a->total[token * H + head] = top + logf(sum);
        q[n] = 1 / sum; /* the queries are no longer needed */
    }
    product(rows, deep, tile->keys, p, wide, 1, values, deep, out, deep);
    for (long n = 0; n < rows; n++) {
        long token = tile->start + n / a->G, head = k * a->G + n % a->G;
        num *to = a->o + token * a->o_token + head * a->D;
        SIMD for (long d = 0; d < a->D; d++) to[d] = narrow(out[n * deep + d] * q[n]);
    }
}

static void attend_back(const Attention *a, const Tile *tile, long k, float *work) {
    long rows = (tile->stop - tile->start) * a->G, wide = whole(tile->keys), deep = whole(a->D);
    long H = a->K * a->G, D = a->D;
    float *q = work, *grad = q + rows * deep, *out = grad + rows * deep, *dq = out + rows * deep;
    float *turned = dq + rows * deep, *straight = turned + wide * deep;
    float *dkeys = straight + wide * deep, *p = dkeys + wide * deep, *dp = p + rows * wide;
    float *delta = dp + rows * wide;
    rows_of(a, tile, a->q + k * a->G * a->q_head, a->q_head, a->q_token, a->scale, q, deep);
    rows_of(a, tile, a->grad + k * a->G * D, D, a->o_token, 1, grad, deep);
    rows_of(a, tile, a->o + k * a->G * D, D, a->o_token, 1, out, deep);
    for (long n = 0; n < rows; n++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long d = 0; d < deep; d++) sum += grad[n * deep + d] * out[n * deep + d];
        delta[n] = sum;
    }
    gather_turned(a, tile, a->keys + k * D * a->tokens, turned, wide);
    product(rows, wide, D, q, deep, 1, turned, wide, p, wide);
    if (a->softcap) cap_scores(p, rows * wide, a->softcap);
    hide(a, tile, p, wide);
    gather_turned(a, tile, a->values + k * D * a->tokens, turned, wide);
    product(rows, wide, D, grad, deep, 1, turned, wide, dp, wide);
    for (long n = 0; n < rows; n++) {
        float *s = p + n * wide, *ds = dp + n * wide, d = delta[n];
        float total = a->total[(tile->start + n / a->G) * H + k * a->G + n % a->G];
        if (a->softcap) /* the slope of the cap; a hidden score has a share of 0 below */
            SIMD for (long j = 0; j < wide; j++) {
                float t = s[j] == -INFINITY ? 0 : s[j] / a->softcap;
                ds[j] = d + (ds[j] - d) * (1 - t * t);
            }
        SIMD for (long j = 0; j < wide; j++) {
            float e = exponential(s[j] - total);
            s[j] = s[j] == -INFINITY ? 0 : e;
            ds[j] = s[j] * (ds[j] - d);
        }
    }
    product(tile->keys, deep, rows, p, 1, wide, grad, deep, dkeys, deep);
    scatter(a, tile, dkeys, a->dv + k * D, a->dv_token, deep);
    product(tile->keys, deep, rows, dp, 1, wide, q, deep, dkeys, deep);
    scatter(a, tile, dkeys, a->dk + k * D, a->dk_token, deep);
    gather(a, tile, a->k + k * a->k_head, a->k_token, straight, deep);
    product(rows, deep, tile->keys, dp, wide, 1, straight, deep, dq, deep);
    for (long n = 0; n < rows; n++) {
        long token = tile->start + n / a->G, head = k * a->G + n % a->G;
        float *to = a->dq + token * a->dq_token + head * D;
        SIMD for (long d = 0; d < D; d++) to[d] = dq[n * deep + d] * a->scale;
    }
}

#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

void ludus_attention(const Attention *a, long threads) {
#pragma omp parallel for num_threads(threads) collapse(2) schedule(dynamic)
    for (long n = 0; n < a->num_tiles; n++)
        for (long k = 0; k < a->K; k++) attend(a, a->tiles + n, k, a->work + THREAD * a->scratch);
}

/* Tiles of a head add to the same gradients of keys and values: in order, on one thread. */
void ludus_attention_back(const Attention *a, long threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long k = 0; k < a->K; k++)
        for (long n = 0; n < a->num_tiles; n++)
            attend_back(a, a->tiles + n, k, a->work + THREAD * a->scratch);
}
