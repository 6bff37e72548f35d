/* Forward pass of a Llama-shaped decoder over the new tokens of many sequences.

   Compiled twice: in float32, and with HALF in bfloat16. There the factors of products (weights,
   activations, keys, values) have 8 bits of precision; sums, norms, softmax and the residual stream
   stay in float32.

   A token's results depend on its own sequence only: sums have a fixed order, independent of the
   other tokens of the pass and of the number of threads. Hence a token has the same bits in prefill
   and decode, alone and in a batch.

   Weights are packed into panels of PANEL output columns, [panel][input][PANEL], so that the inner
   loop reads them in order. Keys and values are stored in blocks of BLOCK positions: keys as
   [block][kv head][head_dim][BLOCK], values as [block][kv head][BLOCK][stride]. In bfloat16, two
   numbers along the summed dimension are adjacent: [panel][input / 2][PANEL][2],
   [head_dim / 2][BLOCK][2], [BLOCK / 2][stride][2]. Rows of activations are zero-padded to whole
   panels. */

#include "attention.h"
#include "vectors.h"

int ludus_panel(void) { return PANEL; }
int ludus_lanes(void) { return LANES; }
int ludus_block(void) { return BLOCK; }
int ludus_pair(void) { return PAIR; }

/* ---------------------------------------------------------------- matrices ------------------- */

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

/* ---------------------------------------------------------------- attention ------------------ */

/* Rotary position embedding (half rotation) of the first `rotary` dimensions of a head. */
INLINE void rotate(float *head, const float *cosine, const float *sine, int rotary) {
    int half = rotary / 2;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

/* ---------------------------------------------------------------- the decoder ---------------- */

typedef struct {
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
    const num *qkv, *output, *gate_up, *down;
    num *keys, *values;
} Layer;

typedef struct {
    int32_t hidden, layers, heads, kv_heads, head_dim, rotary, inner, vocab, activation;
    float eps, attention_scale, embedding_scale;
    const float *embeddings, *final_norm, *cosine, *sine;
    const num *head;
    const Layer *layer;
} Model;

/* Inputs of a forward pass: tokens with their positions and rows (each row has a block table),
   cache writes of tokens to slots, tokens whose logits are returned. See step_inputs.py. */
typedef struct {
    int32_t tokens, writes, outputs, table_stride, max_length;
    const int64_t *ids;
    const int32_t *positions, *rows, *write_tokens, *write_slots, *tables, *output_tokens;
} StepInputs;

/* Floats from a row's scores to the next's: an odd number of chunks, else the rows of a tile would
   share few sets of the cache where the length is a power of two. */
static long score_stride(long length) { return round_up(length, CHUNK) | CHUNK; }

/* Floats of a thread: scores, sums, shares and queries of a tile. */
static long thread_scratch(long stride, long dim) {
    return TILE * round_up(stride + 2 * round_up(dim, 2 * LANES) + CHUNK + dim, PANEL);
}

/* Scratch size of `ludus_forward`, in floats. */
long ludus_scratch(const Model *m, const StepInputs *p, int threads) {
    long o = (long)m->heads * m->head_dim, q = o + 2L * m->kv_heads * m->head_dim;
    long row = 2 * round_up(m->hidden, PANEL) + round_up(q, PANEL) + o + (PAIR > 1 ? o : 0) +
               round_up(m->inner, LANES);
    /* The final norm writes a row per output, over buffers that are no longer read. Outputs may
       outnumber tokens: equal prompts share theirs. */
    long outputs = p->outputs * round_up(m->hidden, PANEL);
    return p->tokens * row + round_up(p->tokens + 1, PANEL) + PANEL + outputs +
           threads * thread_scratch(score_stride(p->max_length), m->head_dim);
}

/* Split the tokens into runs of up to `most` consecutive positions of a row; `starts` gets the first
   token of each run, and the number of tokens. Returns the number of runs. */
static long split_runs(const StepInputs *p, long most, int32_t *starts) {
    long runs = 0;
    for (long n = 0; n < p->tokens; n++)
        if (!runs || n - starts[runs - 1] >= most || p->rows[n] != p->rows[n - 1] ||
            p->positions[n] != p->positions[n - 1] + 1)
            starts[runs++] = n;
    starts[runs] = p->tokens;
    return runs;
}

#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

/* Computes logits [outputs][vocab padded to panels]. */
void ludus_forward(const Model *m, const StepInputs *p, float *scratch, float *logits,
                   int threads) {
    const long N = p->tokens, D = m->hidden, dim = m->head_dim, H = m->heads, KV = m->kv_heads;
    const long x_stride = round_up(D, PANEL), q_stride = round_up((H + 2 * KV) * dim, PANEL);
    const long o_stride = H * dim, a_stride = round_up(m->inner, LANES);
    const long value_stride = round_up(dim, 2 * LANES);
    const long stride = score_stride(p->max_length);
    const long key_size = KV * dim * BLOCK, value_size = KV * BLOCK * value_stride;
    const long group = H / KV;
    /* A tile has all heads of a key head, or some where they are many. */
    const long tile_heads = group <= ROWS / 2 ? group : ROWS / 3;
    int32_t *starts = (int32_t *)scratch;
    const long runs = split_runs(p, TILE / tile_heads, starts);
    const int long_runs = 2 * runs <= N;
    float *x = scratch + round_up(N + 1, PANEL), *qkv = x + N * x_stride, *all_scores = qkv + N * q_stride;
    num *h = (num *)(all_scores + threads * thread_scratch(stride, dim)), *o = h + N * x_stride;
    num *a = o + N * o_stride, *queries = PAIR > 1 ? a + N * a_stride : (num *)qkv;
    const long query_stride = PAIR > 1 ? o_stride : q_stride;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *scores = all_scores + THREAD * thread_scratch(stride, dim);
        float *sums = scores + TILE * stride;
        num *shares = (num *)(sums + TILE * 2 * value_stride), *tile_queries = shares + TILE * CHUNK;
        /* A single token has up to four rows. */
        num *row_shares = PAIR > 1 ? (num *)(scores + 4 * stride) : (num *)scores;
#pragma omp for schedule(static)
        for (long n = 0; n < N; n++) {
            const float *e = m->embeddings + p->ids[n] * D;
            for (long i = 0; i < D; i++) x[n * x_stride + i] = e[i] * m->embedding_scale;
            memset(x + n * x_stride + D, 0, (x_stride - D) * sizeof(float));
            memset(h + n * x_stride + D, 0, (x_stride - D) * sizeof(num));
        }
        for (int l = 0; l < m->layers; l++) {
            const Layer *w = m->layer + l;
#pragma omp for schedule(static)
            for (long n = 0; n < N; n++)
                rms_norm(x + n * x_stride, w->attention_norm, h + n * x_stride, D, m->eps);
            multiply(h, x_stride, w->qkv, w->qkv_bias, qkv, q_stride, N, q_stride, D, STORE);
#pragma omp for schedule(static)
            for (long n = 0; n < N; n++) {
                const float *c = m->cosine + (long)p->positions[n] * m->rotary;
                const float *s = m->sine + (long)p->positions[n] * m->rotary;
                for (int k = 0; k < H + KV; k++) {
                    float *head = qkv + n * q_stride + k * dim;
                    const float *norm = k < H ? w->query_norm : w->key_norm;
                    if (norm) {
                        float by = inverse_rms(head, dim, m->eps);
                        for (long i = 0; i < dim; i++) head[i] = head[i] * by * norm[i];
                    }
                    rotate(head, c, s, m->rotary);
                }
                if (PAIR > 1)
                    for (long i = 0; i < H * dim; i++)
                        queries[n * query_stride + i] = narrow(qkv[n * q_stride + i]);
            }
#pragma omp for schedule(static)
            for (long i = 0; i < p->writes; i++) {
                long block = p->write_slots[i] / BLOCK, at = p->write_slots[i] % BLOCK;
                const float *from = qkv + p->write_tokens[i] * q_stride + H * dim;
                for (long k = 0; k < KV; k++, from += dim) {
                    num *key = w->keys + block * key_size + k * dim * BLOCK + at * PAIR;
                    num *value = w->values + block * value_size + at % PAIR +
                                 (k * BLOCK + at / PAIR * PAIR) * value_stride;
                    for (long j = 0; j < dim; j++) {
                        key[j / PAIR * PAIR * BLOCK + j % PAIR] = narrow(from[j]);
                        value[j * PAIR] = narrow(from[KV * dim + j]);
                    }
                }
            }
            /* Rows with common blocks are adjacent, so the blocks stay in the CPU cache. In prefill,
               the heads are the outer loop for the same reason. */
#pragma omp for schedule(dynamic, 8)
            for (long i = 0; i < runs * KV; i++) {
                long run = long_runs ? i % runs : i / KV, k = long_runs ? i / runs : i % KV;
                long n = starts[run], tokens = starts[run + 1] - n;
                const int32_t *table = p->tables + (long)p->rows[n] * p->table_stride;
                const num *keys = w->keys + k * dim * BLOCK;
                const num *values = w->values + k * BLOCK * value_stride;
                const num *query = queries + n * query_stride + k * group * dim;
                num *out = o + n * o_stride + k * group * dim;
                if (tokens > 1) {
                    const Tile tile = {dim, value_stride, key_size, value_size, stride,
                                       query_stride, o_stride, keys, values, m->attention_scale,
                                       scores, sums, shares, tile_queries};
                    for (long g = 0; g < group; g += tile_heads)
                        attend_tile(&tile, query + g * dim, table, p->positions[n] + tokens - 1,
                                    tokens, group - g < tile_heads ? group - g : tile_heads,
                                    out + g * dim);
                    continue;
                }
#define CASE(G)                                                                                  \
    case G:                                                                                      \
        attend(query + g * dim, dim, value_stride, keys, values, table, key_size, value_size,    \
               p->positions[n] + 1, m->attention_scale, scores, row_shares, stride,              \
               out + g * dim, G);                                                                \
        break;
                for (long g = 0; g < group; g += 4)
                    switch (group - g < 4 ? group - g : 4) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
            }
            multiply(o, o_stride, w->output, w->output_bias, x, x_stride, N, x_stride, H * dim, ADD);
#pragma omp for schedule(static)
            for (long n = 0; n < N; n++)
                rms_norm(x + n * x_stride, w->mlp_norm, h + n * x_stride, D, m->eps);
            multiply(h, x_stride, w->gate_up, w->gate_up_bias, a, a_stride, N, 2 * a_stride, D,
                     m->activation);
            multiply(a, a_stride, w->down, w->down_bias, x, x_stride, N, x_stride, m->inner, ADD);
        }
#pragma omp for schedule(static)
        for (long r = 0; r < p->outputs; r++)
            rms_norm(x + p->output_tokens[r] * x_stride, m->final_norm, h + r * x_stride, D, m->eps);
        multiply(h, x_stride, m->head, 0, logits, round_up(m->vocab, PANEL), p->outputs,
                 round_up(m->vocab, PANEL), D, STORE);
    }
}

/* Copy the first `count` positions of one block to another, in one layer. */
void ludus_copy(const Model *m, int layer, long from, long to, int count) {
    const long dim = m->head_dim, KV = m->kv_heads, value_stride = round_up(dim, 2 * LANES);
    const Layer *w = m->layer + layer;
    for (long row = 0; row < KV * dim; row += PAIR)
        memcpy(w->keys + (to * KV * dim + row) * BLOCK, w->keys + (from * KV * dim + row) * BLOCK,
               count * PAIR * sizeof(num));
    for (long k = 0; k < KV; k++)
        memcpy(w->values + (to * KV + k) * BLOCK * value_stride,
               w->values + (from * KV + k) * BLOCK * value_stride,
               round_up(count, PAIR) * value_stride * sizeof(num));
}

/* ---------------------------------------------------------------- sampling ------------------- */

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
