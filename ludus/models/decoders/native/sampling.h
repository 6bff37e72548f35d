/* Samples tokens from logits; the random numbers that they need. */

#ifndef SAMPLING_H
#define SAMPLING_H

#include <stdint.h>

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

/* ---------------------------------------------------------------- random numbers ------------- */

static uint32_t hashed(uint32_t value, uint32_t *constant, uint32_t factor) {
    value ^= *constant;
    *constant *= factor;
    value *= *constant;
    return value ^ value >> 16;
}

/* The first `count` numbers of numpy's Generator(Philox(seed)).random(): the key is that of its
   SeedSequence (O'Neill's seed_seq_fe), the numbers are those of Philox4x64-10 (Salmon et al. 2011)
   from counter 1 on. */
void ludus_uniforms(uint64_t seed, long count, double *out) {
    uint32_t pool[4], words[4], constant = 0x43b0d7e5u;
    for (int i = 0; i < 4; i++)
        pool[i] = hashed(i == 0 ? (uint32_t)seed : i == 1 ? (uint32_t)(seed >> 32) : 0, &constant,
                         0x931e8875u);
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++) {
            if (from == to) continue;
            uint32_t other = hashed(pool[from], &constant, 0x931e8875u);
            uint32_t mixed = 0xca01f9ddu * pool[to] - 0x4973f715u * other;
            pool[to] = mixed ^ mixed >> 16;
        }
    constant = 0x8b51f9ddu;
    for (int i = 0; i < 4; i++) words[i] = hashed(pool[i], &constant, 0x58f38dedu);
    for (long n = 0; n < count; n += 4) {
        uint64_t key[2] = {words[0] | (uint64_t)words[1] << 32, words[2] | (uint64_t)words[3] << 32};
        uint64_t x[4] = {(uint64_t)n / 4 + 1, 0, 0, 0};
        for (int round = 0; round < 10; round++) {
            unsigned __int128 a = (unsigned __int128)0xD2E7470EE14C6C93u * x[0];
            unsigned __int128 b = (unsigned __int128)0xCA5A826395121157u * x[2];
            x[0] = (uint64_t)(b >> 64) ^ x[1] ^ key[0];
            x[1] = (uint64_t)b;
            x[2] = (uint64_t)(a >> 64) ^ x[3] ^ key[1];
            x[3] = (uint64_t)a;
            key[0] += 0x9E3779B97F4A7C15u;
            key[1] += 0xBB67AE8584CAA73Bu;
        }
        for (long i = n; i < count && i < n + 4; i++) out[i] = (x[i - n] >> 11) * 0x1p-53;
    }
}

#endif
