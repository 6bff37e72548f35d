/* Samples tokens from logits. */

#ifndef SAMPLING_H
#define SAMPLING_H

#include "vectors.h"

#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

/* Sample one token per row from softmax(logits / temperature) over the first `vocab` ids: invert the
   cumulative distribution at the row's uniform number. Temperature 0 takes the first maximum. Log-
   probabilities are of that distribution (temperature 0: of temperature 1). `scratch` holds vocab
   floats per thread. Returns the first row whose logits are not finite, or -1. */
long ludus_sample(const float *logits, long stride, long rows, long vocab, const double *temperatures,
                  const double *uniforms, float *scratch, int64_t *tokens, double *logprobs,
                  int threads) {
    long bad = rows;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(min : bad)
    for (long r = 0; r < rows; r++) {
        const float *l = logits + r * stride;
        float *e = scratch + THREAD * vocab, best = max_of(l, vocab);
        float inverse = temperatures[r] > 0 ? (float)(1 / temperatures[r]) : 1.f;
        for (long j = 0; j < vocab; j += LANES) {
            long left = vocab - j < LANES ? vocab - j : LANES;
            vec d = (vec){0} - INFINITY;
            if (left == LANES) d = load(l + j);
            else memcpy(&d, l + j, left * sizeof(float));
            d = d - best;
            d = exp_vec(blend(d == 0.f, d, d * inverse));
            if (left == LANES) store(e + j, d);
            else memcpy(e + j, &d, left * sizeof(float));
        }
        /* float32 sums of 64 numbers, added in float64, so the search can skip whole groups. */
        double total = 0;
        for (long j = 0; j < vocab; j += 64) total += sum_of(e + j, vocab - j < 64 ? vocab - j : 64);
        if (!isfinite(total)) {
            bad = r < bad ? r : bad;
            continue;
        }
        long token = 0;
        if (temperatures[r] == 0) {
            while (l[token] != best) token++;
        } else {
            double reach = uniforms[r] * total, before = 0;
            long last = 0;
            token = -1;
            for (long j = 0; j < vocab && token < 0; j += 64) {
                long stop = j + 64 < vocab ? j + 64 : vocab, i = j;
                float sum = sum_of(e + j, stop - j);
                if (before + sum <= reach) {
                    if (sum > 0) last = j;
                    before += sum;
                    continue;
                }
                double within = before;
                for (i = j; i < stop && token < 0; i++) {
                    within += e[i];
                    if (within > reach) token = i;
                }
                if (token < 0) { /* rounding: the last token of nonzero probability */
                    for (i = j; i < stop; i++)
                        if (e[i] > 0) token = i;
                }
            }
            if (token < 0)
                for (long i = last; i < vocab && i < last + 64; i++)
                    if (e[i] > 0) token = i;
        }
        tokens[r] = token;
        double scale = temperatures[r] > 0 ? 1 / temperatures[r] : 1;
        double distance = (double)l[token] - best;
        logprobs[r] = (distance == 0 ? 0 : distance * scale) - log(total);
    }
    return bad < rows ? bad : -1;
}

#endif
