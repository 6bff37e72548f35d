/* Forward pass of a Llama-shaped decoder over the new tokens of many sequences. `model.h` lists the
   parts in which models differ.

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
#include "experts.h"
#include "model.h"
#include "products.h"
#include "sampling.h"

int ludus_panel(void) { return PANEL; }
int ludus_lanes(void) { return LANES; }
int ludus_block(void) { return BLOCK; }
int ludus_pair(void) { return PAIR; }

/* Rotary position embedding (half rotation) of the first `rotary` dimensions of a head. */
INLINE void rotate(float *head, const float *cosine, const float *sine, int rotary) {
    int half = rotary / 2;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

/* The same of neighbouring dimensions. */
INLINE void rotate_pairs(float *head, const float *cosine, const float *sine, int rotary) {
    for (int i = 0; i < rotary / 2; i++) {
        float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = a * cosine[i] - b * sine[i];
        head[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
}

/* Queries and keys of a token [heads + kv_heads][head_dim]: norms, then rotary positions. */
INLINE void place_heads(const Model *m, const Layer *w, float *heads, int position) {
    const long dim = m->head_dim, H = m->heads, KV = m->kv_heads;
    const float *c = w->cosine ? w->cosine + (long)position * m->rotary : 0;
    const float *s = w->cosine ? w->sine + (long)position * m->rotary : 0;
    float whole[2] = {0, 0}; /* factors over all heads */
    if (m->whole_norms) {
        if (w->query_norm) whole[0] = inverse_rms(heads, H * dim, m->eps);
        if (w->key_norm) whole[1] = inverse_rms(heads + H * dim, KV * dim, m->eps);
    }
    for (int k = 0; k < H + KV; k++) {
        float *head = heads + k * dim;
        const float *norm = k < H ? w->query_norm : w->key_norm;
        if (norm) {
            float by = m->whole_norms ? whole[k >= H] : inverse_rms(head, dim, m->eps);
            if (m->whole_norms) norm += (k < H ? k : k - H) * dim;
            for (long i = 0; i < dim; i++) head[i] = head[i] * by * norm[i];
        }
        if (c && m->interleaved) rotate_pairs(head, c, s, m->rotary);
        else if (c) rotate(head, c, s, m->rotary);
    }
}

/* The first position that a token at `position` sees, rounded down to a block, in blocks. */
INLINE long first_block(const Layer *w, long position) {
    return w->window && position + 1 > w->window ? (position + 1 - w->window) / BLOCK : 0;
}

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
    if (m->separate) row += round_up(m->hidden, PANEL);
    float *none = 0, *mixture = 0;
    if (m->experts) mixture_at(m, p->tokens, none, &mixture);
    return mixture - none + p->tokens * row + round_up(p->tokens + 1, PANEL) + PANEL + outputs +
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
    float *x = scratch + round_up(N + 1, PANEL), *branch = x + N * x_stride;
    float *qkv = branch + (m->separate ? N * x_stride : 0);
    const Mixture mixture = m->experts ? mixture_at(m, N, qkv, &qkv) : (Mixture){0};
    float *all_scores = qkv + N * q_stride;
    num *h = (num *)(all_scores + threads * thread_scratch(stride, dim)), *o = h + N * x_stride;
    num *a = o + N * o_stride, *queries = PAIR > 1 ? a + N * a_stride : (num *)qkv;
    const long query_stride = PAIR > 1 ? o_stride : q_stride;
    float *sum = m->separate ? branch : x;
    const int add = m->separate ? STORE : ADD;
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
                enter_branch(x + n * x_stride, w->attention_norm, h + n * x_stride, D, m->eps);
            multiply(h, x_stride, w->qkv, w->qkv_bias, qkv, q_stride, N, q_stride, D, STORE);
#pragma omp for schedule(static)
            for (long n = 0; n < N; n++) {
                place_heads(m, w, qkv + n * q_stride, p->positions[n]);
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
                table += first_block(w, p->positions[n]);
                const long skipped = first_block(w, p->positions[n]) * BLOCK;
                const long at = p->positions[n] - skipped; /* among the blocks of the table */
                if (tokens > 1) {
                    const Tile tile = {dim, value_stride, key_size, value_size, stride,
                                       query_stride, o_stride, keys, values, m->attention_scale,
                                       scores, sums, shares, tile_queries,
                                       m->attention_softcap, w->window};
                    for (long g = 0; g < group; g += tile_heads)
                        attend_tile(&tile, query + g * dim, table, at + tokens - 1, tokens,
                                    group - g < tile_heads ? group - g : tile_heads,
                                    out + g * dim);
                    continue;
                }
                const long hidden = w->window && at >= w->window ? at + 1 - w->window : 0;
#define CASE(G)                                                                                  \
    case G:                                                                                      \
        attend(query + g * dim, dim, value_stride, keys, values, table, key_size, value_size,    \
               at + 1, hidden, m->attention_scale, m->attention_softcap, scores, row_shares,     \
               stride, out + g * dim, G);                                                        \
        break;
                for (long g = 0; g < group; g += 4)
                    switch (group - g < 4 ? group - g : 4) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
            }
            multiply(o, o_stride, w->output, w->output_bias, sum, x_stride, N, x_stride, H * dim,
                     add);
            if (m->separate) {
#pragma omp for schedule(static)
                for (long n = 0; n < N; n++)
                    add_branch(x + n * x_stride, branch + n * x_stride, w->attention_post_norm, D,
                               m->eps, m->residual_scale);
            }
#pragma omp for schedule(static)
            for (long n = 0; n < N; n++)
                enter_branch(x + n * x_stride, w->mlp_norm, h + n * x_stride, D, m->eps);
            if (w->router) {
                mix(m, w, &mixture, h, branch, N);
            } else {
                multiply(h, x_stride, w->gate_up, w->gate_up_bias, a, a_stride, N, 2 * a_stride, D,
                         m->activation);
                multiply(a, a_stride, w->down, w->down_bias, sum, x_stride, N, x_stride, m->inner,
                         add);
            }
            if (m->separate) {
#pragma omp for schedule(static)
                for (long n = 0; n < N; n++)
                    add_branch(x + n * x_stride, branch + n * x_stride, w->mlp_post_norm, D, m->eps,
                               m->residual_scale);
            }
        }
#pragma omp for schedule(static)
        for (long r = 0; r < p->outputs; r++)
            rms_norm(x + p->output_tokens[r] * x_stride, m->final_norm, h + r * x_stride, D, m->eps);
        const long V = round_up(m->vocab, PANEL);
        multiply(h, x_stride, m->head, 0, logits, V, p->outputs, V, D, STORE);
        if (m->logit_scale != 1 || m->logit_softcap) {
#pragma omp for schedule(static)
            for (long i = 0; i < p->outputs * V; i += LANES) {
                vec z = load(logits + i) * m->logit_scale;
                if (m->logit_softcap) z = m->logit_softcap * tanh_vec(z / m->logit_softcap);
                store(logits + i, z);
            }
        }
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
