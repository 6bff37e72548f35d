/* Attention over blocks of keys and values: of one token (decode), of tiles of tokens (prefill).
   Both give a token the same bits. */

#include "vectors.h"

#define SPAN 4 /* blocks scored together, for enough independent sums */

/* Scores of `heads` queries [heads][dim] against the keys of SPAN blocks. */
INLINE void score_keys(const num *query, int dim, const num *const keys[SPAN],
                  const num *const next[SPAN], float *scores, long stride, const int heads) {
    vec sum[4][SPAN][PARTS];
    for (int h = 0; h < heads; h++)
        for (int b = 0; b < SPAN; b++)
            for (int p = 0; p < PARTS; p++) sum[h][b][p] = (vec){0};
    for (int i = 0; i < dim; i += PAIR) {
        for (int b = 0; b < SPAN; b++) __builtin_prefetch(next[b] + i * BLOCK);
        for (int h = 0; h < heads; h++) {
            nums q = splat(query + h * dim + i);
            for (int b = 0; b < SPAN; b++)
                for (int p = 0; p < PARTS; p++)
                    sum[h][b][p] = dot(sum[h][b][p], q,
                                       load_nums(keys[b] + i * BLOCK + p * LANES * PAIR));
        }
    }
    for (int h = 0; h < heads; h++)
        for (int b = 0; b < SPAN; b++)
            for (int p = 0; p < PARTS; p++)
                store(scores + h * stride + b * BLOCK + p * LANES, sum[h][b][p]);
}

/* Exponentials of `length` scores in place, zero-padded to a whole vector; returns 1 / their sum. */
INLINE float softmax(float *scores, long length, float scale) {
    for (long j = length; j % LANES; j++) scores[j] = -INFINITY;
    float top = max_of(scores, length);
    vec sum = {0};
    for (long j = 0; j < length; j += LANES) {
        vec e = exp_vec((load(scores + j) - top) * scale);
        store(scores + j, e);
        sum += e;
    }
    float total = 0;
    for (int l = 0; l < LANES; l++) total += sum[l];
    return 1.f / total;
}

#define SUMS (ROWS / 2 > 4 ? ROWS / 2 : 4) /* rows of `weighted_sum`: four sums each */

/* Sum of values weighted by shares, two vectors wide, for `heads` heads. Even and odd pairs of
   positions are summed separately. */
INLINE void weighted_sum(const num *shares, long stride, long length, const num *values,
                  const int32_t *table, long block_size, long value_stride, vec out[][2],
                  const int heads) {
    const long line = value_stride * PAIR;
    vec sum[SUMS][2][2];
    for (int h = 0; h < heads; h++)
        for (int c = 0; c < 2; c++) sum[h][c][0] = sum[h][c][1] = (vec){0};
    for (long start = 0; start < length; start += BLOCK) {
        const num *row = values + table[start / BLOCK] * block_size;
        long count = length - start < BLOCK ? length - start : BLOCK, j = 0;
        for (; j + 2 * PAIR <= count; j += 2 * PAIR, row += 2 * line) {
            nums a0 = load_nums(row), a1 = load_nums(row + LANES * PAIR);
            nums b0 = load_nums(row + line), b1 = load_nums(row + line + LANES * PAIR);
            for (int h = 0; h < heads; h++) {
                nums even = splat(shares + h * stride + start + j);
                nums odd = splat(shares + h * stride + start + j + PAIR);
                sum[h][0][0] = dot(sum[h][0][0], even, a0);
                sum[h][1][0] = dot(sum[h][1][0], even, a1);
                sum[h][0][1] = dot(sum[h][0][1], odd, b0);
                sum[h][1][1] = dot(sum[h][1][1], odd, b1);
            }
        }
        for (; j < count; j += PAIR, row += line) {
            nums a0 = load_nums(row), a1 = load_nums(row + LANES * PAIR);
            if (j + PAIR > count) /* the second was never written */
                a0 = first_of_pair(a0), a1 = first_of_pair(a1);
            for (int h = 0; h < heads; h++) {
                nums share = splat(shares + h * stride + start + j);
                if (j / PAIR % 2) {
                    sum[h][0][1] = dot(sum[h][0][1], share, a0);
                    sum[h][1][1] = dot(sum[h][1][1], share, a1);
                } else {
                    sum[h][0][0] = dot(sum[h][0][0], share, a0);
                    sum[h][1][0] = dot(sum[h][1][0], share, a1);
                }
            }
        }
    }
    for (int h = 0; h < heads; h++)
        for (int c = 0; c < 2; c++) out[h][c] = sum[h][c][0] + sum[h][c][1];
}

/* Attention of one token in up to four query heads that share their keys. */
INLINE void attend(const num *query, int dim, long value_stride, const num *keys,
                   const num *values, const int32_t *table, long key_size, long value_size,
                   long length, float scale, float *scores, num *shares, long stride, num *out,
                   const int heads) {
    long blocks = round_up(length, BLOCK) / BLOCK;
    const num *span[SPAN], *next[SPAN];
    for (int i = 0; i < SPAN; i++) next[i] = keys + table[i < blocks ? i : blocks - 1] * key_size;
    for (long b = 0; b < blocks; b += SPAN) {
        /* Prefetch the keys of the next blocks; after the last block, the first values. */
        for (int i = 0; i < SPAN; i++) {
            long at = b + SPAN + i;
            span[i] = next[i];
            next[i] = b + SPAN >= blocks ? values + table[i < blocks ? i : blocks - 1] * value_size
                                         : keys + table[at < blocks ? at : blocks - 1] * key_size;
        }
        score_keys(query, dim, span, next, scores + b * BLOCK, stride, heads);
    }
    float inverse[4];
    for (int h = 0; h < heads; h++) {
        inverse[h] = softmax(scores + h * stride, length, scale);
        if (PAIR > 1)
            for (long j = 0; j < length; j += LANES)
                store_nums(shares + h * stride + j, load(scores + h * stride + j));
    }
    for (int c = 0; c < dim; c += 2 * LANES) {
        vec sum[4][2];
        weighted_sum(shares, stride, length, values + c * PAIR, table, value_size, value_stride,
                     sum, heads);
        for (int h = 0; h < heads; h++) {
            num found[2 * LANES];
            store_nums(found, sum[h][0] * inverse[h]);
            store_nums(found + LANES, sum[h][1] * inverse[h]);
            int count = dim - c < 2 * LANES ? dim - c : 2 * LANES;
            memcpy(out + h * dim + c, found, count * sizeof(num));
        }
    }
}

/* Scores of `rows` queries [rows][dim] against the keys of all blocks. */
INLINE void score_rows(const num *queries, int dim, const num *keys, const int32_t *table,
                       long key_size, long blocks, float *scores, long stride, const int rows) {
    for (long v = 0; v < blocks * PARTS; v += 2) {
        const num *k[2];
        for (int i = 0; i < 2; i++) {
            long at = v + i < blocks * PARTS ? v + i : v; /* of an odd number, the last twice */
            k[i] = keys + table[at / PARTS] * key_size + at % PARTS * LANES * PAIR;
        }
        vec sum[ROWS][2];
        for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (vec){0};
        for (int i = 0; i < dim; i += PAIR) {
            nums k0 = load_nums(k[0] + i * BLOCK), k1 = load_nums(k[1] + i * BLOCK);
            for (int r = 0; r < rows; r++) {
                nums q = splat(queries + r * dim + i);
                sum[r][0] = dot(sum[r][0], q, k0);
                sum[r][1] = dot(sum[r][1], q, k1);
            }
        }
        for (int r = 0; r < rows; r++) {
            store(scores + r * stride + v * LANES, sum[r][0]);
            store(scores + r * stride + (v + 1) * LANES, sum[r][1]);
        }
    }
}

/* Numbers for `attend_tile`: shared by all tiles of a layer and key head. */
typedef struct {
    int dim;
    long value_stride, key_size, value_size, stride, query_stride, out_stride;
    const num *keys, *values;
    float scale, *scores;
    num *shares, *queries; /* scratch: [ROWS][stride], [ROWS][dim] */
} Tile;

/* Attention of `tokens` consecutive positions of a sequence, the last at `last`, in `heads` query
   heads that share their keys; tokens * heads <= ROWS. A block's keys and values are read once for
   all rows. The sums of a row have the same order as in `attend`, so it has the same bits: positions
   that it does not see have shares of 0. */
static void attend_tile(const Tile *t, const num *query, const int32_t *table, long last,
                        int tokens, int heads, num *out) {
    const int dim = t->dim, rows = tokens * heads;
    const long length = last + 1, padded = round_up(length, BLOCK), stride = t->stride;
    for (int r = 0; r < rows; r++)
        memcpy(t->queries + r * dim, query + r / heads * t->query_stride + r % heads * dim,
               dim * sizeof(num));
#define CASE(R)                                                                                  \
    case R:                                                                                      \
        score_rows(t->queries, dim, t->keys, table, t->key_size, padded / BLOCK, t->scores,      \
                   stride, R);                                                                   \
        break;
    switch (rows) {
        ROW_CASES
    }
#undef CASE
    float inverse[ROWS];
    for (int r = 0; r < rows; r++) {
        float *scores = t->scores + r * stride;
        long seen = length - tokens + 1 + r / heads;
        inverse[r] = softmax(scores, seen, t->scale);
        for (long j = round_up(seen, LANES); j < padded; j += LANES) store(scores + j, (vec){0});
        if (PAIR > 1)
            for (long j = 0; j < padded; j += LANES)
                store_nums(t->shares + r * stride + j, load(scores + j));
    }
    for (int from = 0; from < rows; from += SUMS) {
        const num *shares = t->shares + from * stride;
        int count = rows - from < SUMS ? rows - from : SUMS;
        for (int c = 0; c < dim; c += 2 * LANES) {
            vec sum[SUMS][2];
#define CASE(R)                                                                                  \
    case R:                                                                                      \
        weighted_sum(shares, stride, length, t->values + c * PAIR, table, t->value_size,         \
                     t->value_stride, sum, R);                                                   \
        break;
            switch (count) {
                CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS > 8
                CASE(5) CASE(6)
#endif
            }
#undef CASE
            for (int i = 0; i < count; i++) {
                int r = from + i, width = dim - c < 2 * LANES ? dim - c : 2 * LANES;
                num found[2 * LANES];
                store_nums(found, sum[i][0] * inverse[r]);
                store_nums(found + LANES, sum[i][1] * inverse[r]);
                memcpy(out + r / heads * t->out_stride + r % heads * dim + c, found,
                       width * sizeof(num));
            }
        }
    }
}
