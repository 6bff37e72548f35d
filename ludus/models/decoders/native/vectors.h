/* Vectors of floats and of factors, exponentials, maxima and sums. */

#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "lanes.h"

#define BLOCK 16
#define PARTS (BLOCK / LANES) /* vectors per head dimension of a block's keys */

typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE long round_up(long n, long unit) { return (n + unit - 1) / unit * unit; }

/* Returns a where the mask is set, else b. */
INLINE vec blend(ints mask, vec a, vec b) { return (vec)((mask & (ints)a) | (~mask & (ints)b)); }

/* Factors of products: `num` is a scalar, PAIR of them are adjacent along the summed dimension,
   `nums` is a vector of pairs. */
#ifdef HALF
#define PAIR 2
typedef int32_t nums __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int32_t num_pair __attribute__((aligned(2), may_alias));

INLINE nums splat(const num *p) { return *(const num_pair *)p - (nums){0}; }
INLINE nums first_of_pair(nums v) { return v & 0xffff; }
#ifdef __AVX512BF16__
INLINE void store_nums(num *to, vec v) {
    *(__m256i_u *)to = (__m256i)_mm512_cvtneps_pbh((__m512)v);
}
INLINE vec dot(vec sum, nums a, nums b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
INLINE void store_nums(num *to, vec v) {
    for (int l = 0; l < LANES; l++) to[l] = narrow(v[l]);
}
INLINE vec dot(vec sum, nums a, nums b) {
    sum += (vec)(nums)(a & -65536) * (vec)(nums)(b & -65536);
    return sum + (vec)(nums)(a << 16) * (vec)(nums)(b << 16);
}
#endif
#else
#define PAIR 1
typedef vec nums;
INLINE void store_nums(num *to, vec v) { store(to, v); }
INLINE nums splat(const num *p) { return *p - (nums){0}; }
INLINE nums first_of_pair(nums v) { return v; }
INLINE vec dot(vec sum, nums a, nums b) { return sum + a * b; }
#endif
INLINE nums load_nums(const num *p) { return *(const nums *)p; }

/* e^x within 2 ulp (Cephes polynomial); 0 for very small x, infinity for very large x. */
INLINE vec exp_vec(vec x) {
#ifdef __AVX512F__
    x = (vec)_mm512_max_ps(_mm512_set1_ps(-200.f), (__m512)x); /* keeps NaN */
    vec n = (vec)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 0);
#else
    const float shift = 12582912.f; /* 1.5 * 2^23: adding it rounds to an integer */
    vec n = (x * 1.44269504f + shift) - shift;
#endif
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.f;
#ifdef __AVX512F__
    return (vec)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    n = blend(n < -126.f, (vec){0} - 126.f, blend(n > 127.f, (vec){0} + 127.f, n));
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    y = blend(x > 88.f, (vec){0} + INFINITY, y * (vec)power);
    return blend(x < -87.f, (vec){0}, y);
#endif
}

/* tanh(x): a polynomial near 0 (Cephes), else 1 - 2 / (1 + e^2x). */
INLINE vec tanh_vec(vec x) {
    vec z = x * x;
    vec near = -5.70498872745e-3f * z + 2.06390887954e-2f;
    near = near * z - 5.37397155531e-2f;
    near = near * z + 1.33314422036e-1f;
    near = near * z - 3.33332819422e-1f;
    near = near * z * x + x;
    return blend(z < 0.390625f, near, 1.f - 2.f / (1.f + exp_vec(2.f * x)));
}

/* The larger of each pair; `b` where `a` is NaN. */
INLINE vec larger(vec a, vec b) {
#ifdef __AVX512F__
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return blend(a > b, a, b);
#endif
}

/* Maximum of `size` numbers; NaN is ignored. */
INLINE float max_of(const float *x, long size) {
    float top = -INFINITY;
    vec part[4];
    for (int i = 0; i < 4; i++) part[i] = (vec){0} - INFINITY;
    long n = 0;
    for (; n + 4 * LANES <= size; n += 4 * LANES)
        for (int i = 0; i < 4; i++) part[i] = larger(load(x + n + i * LANES), part[i]);
    for (; n + LANES <= size; n += LANES) part[0] = larger(load(x + n), part[0]);
    for (; n < size; n++) top = x[n] > top ? x[n] : top;
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < LANES; l++) top = part[i][l] > top ? part[i][l] : top;
    return top;
}

/* Sum of `size` numbers, in an order that depends on `size` only. */
INLINE float sum_of(const float *x, long size) {
    float total = 0;
    vec part = {0};
    long n = 0;
    for (; n + LANES <= size; n += LANES) part += load(x + n);
    for (int l = 0; n + l < size; l++) part[l] += x[n + l];
    for (int l = 0; l < LANES; l++) total += part[l];
    return total;
}

#endif
