/* Mixtures of experts: a token's MLP is a weighted sum of the `top` experts with the highest scores.
   A token's result does not depend on the other tokens of the pass: the sum is in the order of the
   scores. */

#ifndef EXPERTS_H
#define EXPERTS_H

#include "model.h"
#include "products.h"

/* Buffers for N tokens. Rows of `inputs`, `inner` and `outputs` are sorted by expert. */
typedef struct {
    long x_stride, score_stride, inner_stride;
    float *scores, *shares, *outputs;  /* [N][score_stride], [N][top], [N * top][x_stride] */
    num *inputs, *inner;               /* [N * top][x_stride], [N * top][inner_stride] */
    int32_t *chosen, *places, *starts; /* [N][top]: experts and rows; [experts + 1] */
} Mixture;

/* Returns buffers for `tokens` tokens, from `at` on; `end` gets the first float after them. */
static Mixture mixture_at(const Model *m, long tokens, float *at, float **end) {
    const long rows = tokens * m->top;
    Mixture b = {.x_stride = round_up(m->hidden, PANEL),
                 .score_stride = round_up(m->experts, PANEL),
                 .inner_stride = round_up(m->expert_inner, LANES)};
    b.scores = at, at += tokens * b.score_stride;
    b.outputs = at, at += rows * b.x_stride;
    b.inputs = (num *)at, at += rows * b.x_stride;
    b.inner = (num *)at, at += rows * b.inner_stride;
    b.shares = at, at += round_up(rows, PANEL);
    b.chosen = (int32_t *)at, at += round_up(rows, PANEL);
    b.places = (int32_t *)at, at += round_up(rows, PANEL);
    b.starts = (int32_t *)at, at += round_up(m->experts + 1, PANEL);
    *end = at;
    return b;
}

/* The `top` experts of the highest scores, the first of equal ones, and their shares of the softmax.
   Overwrites the scores. */
static void choose(float *scores, int experts, int top, int normalised, int32_t *chosen,
                   float *shares) {
    float best = max_of(scores, experts), total = 0, sum = 0;
    for (long j = experts; j % LANES; j++) scores[j] = -INFINITY;
    for (long j = 0; j < experts; j += LANES) store(scores + j, exp_vec(load(scores + j) - best));
    total = sum_of(scores, experts);
    for (int k = 0; k < top; k++) {
        int at = 0;
        for (int j = 1; j < experts; j++) at = scores[j] > scores[at] ? j : at;
        chosen[k] = at;
        shares[k] = scores[at] / total;
        sum += shares[k];
        scores[at] = -1;
    }
    for (int k = 0; normalised && k < top; k++) shares[k] /= sum;
}

/* Sort the chosen experts of all tokens: `places` gets rows, `starts` the first row of each. */
static void sort_by_expert(const Model *m, const Mixture *b, long rows) {
    memset(b->starts, 0, (m->experts + 1) * sizeof(int32_t));
    for (long i = 0; i < rows; i++) b->starts[b->chosen[i] + 1]++;
    for (int e = 0; e < m->experts; e++) b->starts[e + 1] += b->starts[e];
    for (long i = 0; i < rows; i++) b->places[i] = b->starts[b->chosen[i]]++;
    for (int e = m->experts; e > 0; e--) b->starts[e] = b->starts[e - 1];
    b->starts[0] = 0;
}

/* y = the mixture of each token [N][x_stride]. Called by all threads. */
static void mix(const Model *m, const Layer *w, const Mixture *b, const num *h, float *y, long N) {
    const long D = m->hidden, X = b->x_stride, I = b->inner_stride, top = m->top;
    const long gate_up = 2 * I * round_up(D, PAIR), down = X * round_up(m->expert_inner, PAIR);
    multiply(h, X, w->router, 0, b->scores, b->score_stride, N, b->score_stride, D, STORE);
#pragma omp for schedule(static)
    for (long n = 0; n < N; n++)
        choose(b->scores + n * b->score_stride, m->experts, top, m->normalised, b->chosen + n * top,
               b->shares + n * top);
#pragma omp single
    sort_by_expert(m, b, N * top);
#pragma omp for schedule(static)
    for (long i = 0; i < N * top; i++)
        memcpy(b->inputs + b->places[i] * X, h + i / top * X, X * sizeof(num));
    for (int e = 0; e < m->experts; e++) {
        const long from = b->starts[e], count = b->starts[e + 1] - from;
        if (!count) continue;
        multiply(b->inputs + from * X, X, w->gate_up + e * gate_up, 0, b->inner + from * I, I,
                 count, 2 * I, D, m->activation);
        multiply(b->inner + from * I, I, w->down + e * down, 0, b->outputs + from * X, X, count, X,
                 m->expert_inner, STORE);
    }
#pragma omp for schedule(static)
    for (long n = 0; n < N; n++)
        for (long i = 0; i < X; i += LANES) {
            vec sum = {0};
            for (long k = n * top; k < (n + 1) * top; k++)
                sum += b->shares[k] * load(b->outputs + b->places[k] * X + i);
            store(y + n * X + i, sum);
        }
}

#endif
