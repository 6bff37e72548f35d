/* Packed weights, their products with rows of activations, and RMS norms. */

#ifndef PRODUCTS_H
#define PRODUCTS_H

#include "vectors.h"

/* Pack weight [outputs][inputs] into panels; `from` is the number of outputs already packed. With
   `pair` 0 or 1 the weight fills the first or second half of each panel (gate and up). */
void ludus_pack(const float *weight, num *packed, long outputs, long inputs, long from, int pair) {
    long unit = pair < 0 ? PANEL : LANES;
    for (long n = 0; n < outputs; n++) {
        long panel = (from + n) / unit, column = (from + n) % unit + (pair > 0 ? LANES : 0);
        num *to = packed + panel * round_up(inputs, PAIR) * PANEL + column * PAIR;
        const float *row = weight + n * inputs;
        for (long k = 0; k < inputs; k++) to[k / PAIR * PAIR * PANEL + k % PAIR] = narrow(row[k]);
    }
}

enum { STORE, ADD, SILU, GELU };

INLINE vec activate(vec x, vec up, int kind) {
    /* gelu(x), tanh form: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)) */
    vec z = x;
    if (kind == GELU) z = 1.5957691216f * (x + 0.044715f * x * x * x);
    return x * up / (1.f + exp_vec(-z));
}

/* `rows` rows of x times one panel. With an activation y is an array of nums, else of floats. */
INLINE void multiply_tile(const num *x, long x_stride, const num *panel, const float *bias, void *y,
                 long y_stride, long inputs, int kind, const int rows) {
    vec sum[ROWS][2];
    for (int r = 0; r < rows; r++) {
        sum[r][0] = bias ? load(bias) : (vec){0};
        sum[r][1] = bias ? load(bias + LANES) : (vec){0};
    }
    for (long k = 0; k < inputs; k += PAIR) {
        nums w0 = load_nums(panel + k * PANEL), w1 = load_nums(panel + k * PANEL + LANES * PAIR);
        for (int r = 0; r < rows; r++) {
            nums v = splat(x + r * x_stride + k);
            sum[r][0] = dot(sum[r][0], v, w0);
            sum[r][1] = dot(sum[r][1], v, w1);
        }
    }
    for (int r = 0; r < rows; r++) {
        float *to = (float *)y + r * y_stride;
        if (kind == STORE) {
            store(to, sum[r][0]);
            store(to + LANES, sum[r][1]);
        } else if (kind == ADD) {
            store(to, load(to) + sum[r][0]);
            store(to + LANES, load(to + LANES) + sum[r][1]);
        } else {
            store_nums((num *)y + r * y_stride, activate(sum[r][0], sum[r][1], kind));
        }
    }
}

/* y (+)= x W + bias for all rows; with an activation, y = act(gate) * up. Called by all threads. */
static void multiply(const num *x, long x_stride, const num *packed, const float *bias, void *y,
                     long y_stride, long rows, long outputs, long inputs, int kind) {
    long panels = outputs / PANEL;
    long step = kind >= SILU ? LANES * sizeof(num) : PANEL * sizeof(float);
    long y_size = kind >= SILU ? sizeof(num) : sizeof(float);
#define CASE(R)                                                                                  \
    case R:                                                                                      \
        multiply_tile(from, x_stride, panel, b, to, y_stride, inputs, kind, R);                  \
        break;
#pragma omp for schedule(static)
    for (long p = 0; p < panels; p++) {
        const num *panel = packed + p * round_up(inputs, PAIR) * PANEL;
        const float *b = bias ? bias + p * PANEL : 0;
        for (long m = 0; m < rows; m += ROWS) {
            const num *from = x + m * x_stride;
            char *to = (char *)y + m * y_stride * y_size + p * step;
            switch (rows - m < ROWS ? rows - m : ROWS) {
                ROW_CASES
            }
        }
    }
#undef CASE
}

/* 1 / rms(x) */
INLINE float inverse_rms(const float *x, long size, float eps) {
    vec part = {0};
    float total = 0;
    long n = 0;
    for (; n + LANES <= size; n += LANES) part += load(x + n) * load(x + n);
    for (int j = 0; n + j < size; j++) part[j] += x[n + j] * x[n + j];
    for (int j = 0; j < LANES; j++) total += part[j];
    return 1.f / sqrtf(total / size + eps);
}

/* y = x / rms(x) * weight */
INLINE void rms_norm(const float *x, const float *weight, num *y, long size, float eps) {
    float scale = inverse_rms(x, size, eps);
    long n = 0;
    for (; n + LANES <= size; n += LANES) store_nums(y + n, load(x + n) * scale * load(weight + n));
    for (; n < size; n++) y[n] = narrow(x[n] * scale * weight[n]);
}

/* The input of a branch: normalised, or as it is. */
INLINE void enter_branch(const float *x, const float *weight, num *y, long size, float eps) {
    if (weight) rms_norm(x, weight, y, size, eps);
    else
        for (long n = 0; n < size; n++) y[n] = narrow(x[n]);
}

/* x += scale * y, or scale * (y / rms(y) * weight) */
INLINE void add_branch(float *x, const float *y, const float *weight, long size, float eps,
                       float scale) {
    float by = weight ? inverse_rms(y, size, eps) : 1;
    for (long n = 0; n < size; n++) x[n] += (weight ? y[n] * by * weight[n] : y[n]) * scale;
}

#endif
