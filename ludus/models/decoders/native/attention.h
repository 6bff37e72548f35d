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

/* Shares of `length` scores, of whole vectors, before division by their sum: exponentials of the
   distance to `top`. Returns `sum` plus the shares. In float32 they may replace the scores. */
INLINE vec exponentials(const float *scores, long length, float top, float scale, num *shares,
                        vec sum) {
    for (long j = 0; j < length; j += LANES) {
        vec e = exp_vec((load(scores + j) - top) * scale);
        store_nums(shares + j, e);
        sum += e;
    }
    return sum;
}

INLINE float inverse_of(vec sum) {
    float total = 0;
    for (int l = 0; l < LANES; l++) total += sum[l];
    return 1.f / total;
}

#define SUMS (ROWS / 2 > 4 ? ROWS / 2 : 4) /* rows of `weighted_sum`: four sums each */
#define SUM_SIZE (4 * LANES)               /* floats of a row's sums */

/* Add the first `length` values, weighted by shares, to the sums of `heads` heads, two vectors wide.
   Even and odd pairs of positions are summed separately. */
INLINE void weighted_sum(const num *shares, long stride, long length, const num *values,
                         const int32_t *table, long block_size, long value_stride, float *sums,
                         long sum_stride, const int heads) {
    const long line = value_stride * PAIR;
    vec sum[SUMS][2][2];
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < 4; i++) sum[h][i / 2][i % 2] = load(sums + h * sum_stride + i * LANES);
    for (long start = 0; start < length; start += BLOCK) {
        const num *row = values + table[start / BLOCK] * block_size;
        const long next = table[(start + BLOCK < length ? start + BLOCK : start) / BLOCK];
        const long ahead = (next - table[start / BLOCK]) * block_size;
        long count = length - start < BLOCK ? length - start : BLOCK, j = 0;
        for (; j + 2 * PAIR <= count; j += 2 * PAIR, row += 2 * line) {
            nums a0 = load_nums(row), a1 = load_nums(row + LANES * PAIR);
            nums b0 = load_nums(row + line), b1 = load_nums(row + line + LANES * PAIR);
            for (int i = 0; i < 4; i++)
                __builtin_prefetch(row + ahead + i / 2 * line + i % 2 * LANES * PAIR);
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
        for (int i = 0; i < 4; i++) store(sums + h * sum_stride + i * LANES, sum[h][i / 2][i % 2]);
}

/* Two vectors of an output, of which `left` numbers exist. */
INLINE void store_output(const float *sums, float inverse, num *out, int left) {
    num found[2 * LANES];
    for (int i = 0; i < 2; i++)
        store_nums(found + i * LANES,
                   (load(sums + 2 * i * LANES) + load(sums + (2 * i + 1) * LANES)) * inverse);
    memcpy(out, found, (left < 2 * LANES ? left : 2 * LANES) * sizeof(num));
}

/* Soft cap of `length` scaled scores, of whole vectors. */
INLINE void cap_scores(float *scores, long length, float scale, float cap) {
    for (long j = 0; j < length; j += LANES)
        store(scores + j, cap * tanh_vec(load(scores + j) * (scale / cap)));
}

/* Attention of one token in up to four query heads that share their keys, over `length` positions
   of which it does not see the first `hidden`, fewer than BLOCK. */
INLINE void attend(const num *query, int dim, long value_stride, const num *keys,
                   const num *values, const int32_t *table, long key_size, long value_size,
                   long length, long hidden, float scale, float softcap, float *scores, num *shares,
                   long stride, num *out, const int heads) {
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
        float *row = scores + h * stride;
        if (softcap) cap_scores(row, length, scale, softcap);
        for (long j = 0; j < hidden; j++) row[j] = -INFINITY;
        for (long j = length; j % LANES; j++) row[j] = -INFINITY;
        inverse[h] = inverse_of(exponentials(row, length, max_of(row, length), softcap ? 1 : scale,
                                             shares + h * stride, (vec){0}));
    }
    for (int c = 0; c < dim; c += 2 * LANES) {
        float sums[4 * SUM_SIZE] = {0};
        weighted_sum(shares, stride, length, values + c * PAIR, table, value_size, value_stride,
                     sums, SUM_SIZE, heads);
        for (int h = 0; h < heads; h++)
            store_output(sums + h * SUM_SIZE, inverse[h], out + h * dim + c, dim - c);
    }
}

/* Scores of `rows` queries [dim / PAIR][ROWS][PAIR] against the keys of all blocks. */
INLINE void score_rows(const num *queries, int dim, const num *keys, const int32_t *table,
                       long key_size, long blocks, float *scores, long stride, const int rows) {
    for (long v = 0; v < blocks * PARTS; v += 2) {
        const num *k[4]; /* the last two are prefetched */
        for (int i = 0; i < 4; i++) {
            long at = v + i < blocks * PARTS ? v + i : v; /* of an odd number, the last twice */
            k[i] = keys + table[at / PARTS] * key_size + at % PARTS * LANES * PAIR;
        }
        vec sum[ROWS][2];
        for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (vec){0};
        for (int i = 0; i < dim; i += PAIR) {
            nums k0 = load_nums(k[0] + i * BLOCK), k1 = load_nums(k[1] + i * BLOCK);
            for (int b = 2; b < 4; b++) __builtin_prefetch(k[b] + i * BLOCK);
            for (int r = 0; r < rows; r++) {
                nums q = splat(queries + i * ROWS + r * PAIR);
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

#define TILE (4 * ROWS)      /* rows that share chunks of keys and of values */
#define CHUNK (SPAN * BLOCK) /* positions whose keys or values stay in the first-level cache */

/* Numbers for `attend_tile`: shared by all tiles of a layer and key head. */
typedef struct {
    int dim;
    long value_stride, key_size, value_size, stride, query_stride, out_stride;
    const num *keys, *values;
    float scale, *scores, *sums; /* scratch: [TILE][stride], [TILE][2 * value_stride] */
    num *shares, *queries;       /* scratch: [TILE][CHUNK], [TILE / ROWS][dim / PAIR][ROWS][PAIR] */
    float softcap;               /* 0: none */
    long window;                 /* positions that a token sees, its own included; 0: all */
} Tile;

/* Scores of `rows` rows, from row `r`, against the keys of `blocks` blocks from position `from`. */
static void score_chunk(const Tile *t, const int32_t *table, long from, long blocks, int r,
                        int rows) {
    const num *queries = t->queries + r * t->dim;
    float *scores = t->scores + r * t->stride + from;
#define CASE(R)                                                                                  \
    case R:                                                                                      \
        score_rows(queries, t->dim, t->keys, table + from / BLOCK, t->key_size, blocks, scores,  \
                   t->stride, R);                                                                \
        break;
    switch (rows) {
        ROW_CASES
    }
#undef CASE
}

/* Add the weighted values of positions [from, from + length) to the sums of `rows` rows. */
static void sum_chunk(const Tile *t, const int32_t *table, long from, long length, int r,
                      int rows) {
    const num *shares = t->shares + r * CHUNK;
    const long sum_stride = 2 * t->value_stride;
    for (int c = 0; c < t->dim; c += 2 * LANES) {
        const num *values = t->values + c * PAIR;
        float *sums = t->sums + r * sum_stride + 2 * c;
#define CASE(R)                                                                                  \
    case R:                                                                                      \
        weighted_sum(shares, CHUNK, length, values, table + from / BLOCK, t->value_size,         \
                     t->value_stride, sums, sum_stride, R);                                      \
        break;
        switch (rows) {
            CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS > 8
            CASE(5) CASE(6)
#endif
        }
#undef CASE
    }
}

/* Positions of a chunk from `from` that a row sees which sees the first `seen` of all. */
INLINE long seen_in(long seen, long from) {
    return seen <= from ? 0 : seen - from < CHUNK ? seen - from : CHUNK;
}

/* Attention of `tokens` consecutive positions of a sequence, the last at `last`, in `heads` query
   heads that share their keys; tokens * heads <= TILE. All rows read a chunk of keys, and in a
   second pass of values, while it is in the cache; the scores in between are written and read once.
   The sums of a row have the same order as in `attend`, so it has the same bits: positions that it
   does not see have shares of 0. */
static void attend_tile(const Tile *t, const num *query, const int32_t *table, long last,
                        int tokens, int heads, num *out) {
    const int dim = t->dim, rows = tokens * heads;
    const long length = last + 1, stride = t->stride;
    long seen[TILE], hidden[TILE]; /* a row sees positions from `hidden` up to `seen` */
    vec tops[TILE], totals[TILE];
    float top[TILE];
    for (int r = 0; r < rows; r++) {
        const num *from = query + r / heads * t->query_stride + r % heads * dim;
        num *to = t->queries + r / ROWS * ROWS * dim + r % ROWS * PAIR;
        for (int i = 0; i < dim; i++) to[i / PAIR * PAIR * ROWS + i % PAIR] = from[i];
        seen[r] = length - tokens + 1 + r / heads;
        hidden[r] = t->window && seen[r] > t->window ? seen[r] - t->window : 0;
        tops[r] = (vec){0} - INFINITY;
        totals[r] = (vec){0};
    }
    for (long from = 0; from < length; from += CHUNK) {
        for (int r = 0; r < rows; r += ROWS) {
            int count = rows - r < ROWS ? rows - r : ROWS;
            long blocks = round_up(seen_in(seen[r + count - 1], from), BLOCK) / BLOCK;
            if (blocks && hidden[r] < from + CHUNK)
                score_chunk(t, table, from, blocks, r, count);
        }
        for (int r = 0; r < rows; r++) {
            float *scores = t->scores + r * stride + from;
            long count = seen_in(seen[r], from), before = seen_in(hidden[r], from);
            if (before == CHUNK) continue;
            if (t->softcap) cap_scores(scores, count, t->scale, t->softcap);
            for (long j = 0; j < before; j++) scores[j] = -INFINITY;
            for (; count % LANES; count++) scores[count] = -INFINITY;
            for (long j = 0; j < count; j += LANES) tops[r] = larger(load(scores + j), tops[r]);
        }
    }
    for (int r = 0; r < rows; r++) top[r] = max_of((float *)&tops[r], LANES);
    memset(t->sums, 0, rows * 2 * t->value_stride * sizeof(float));
    for (long from = 0; from < length; from += CHUNK) {
        for (int r = 0; r < rows; r++) {
            long count = round_up(seen_in(seen[r], from), LANES);
            num *shares = t->shares + r * CHUNK;
            if (hidden[r] >= from + CHUNK) count = 0;
            totals[r] = exponentials(t->scores + r * stride + from, count, top[r],
                                     t->softcap ? 1 : t->scale, shares, totals[r]);
            if (count < CHUNK) memset(shares + count, 0, (CHUNK - count) * sizeof(num));
        }
        for (int r = 0; r < rows; r += SUMS) {
            int count = rows - r < SUMS ? rows - r : SUMS;
            long positions = seen_in(seen[r + count - 1], from);
            if (positions && hidden[r] < from + CHUNK)
                sum_chunk(t, table, from, positions, r, count);
        }
    }
    for (int r = 0; r < rows; r++) {
        float inverse = inverse_of(totals[r]);
        num *to = out + r / heads * t->out_stride + r % heads * dim;
        for (int c = 0; c < dim; c += 2 * LANES)
            store_output(t->sums + r * 2 * t->value_stride + 2 * c, inverse, to + c, dim - c);
    }
}
