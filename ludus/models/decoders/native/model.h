/* A decoder's sizes and weights, and the inputs of a pass. */

#ifndef MODEL_H
#define MODEL_H

#include "vectors.h"

/* Absent parts are null: norms before or after a branch (attention, MLP), norms of queries and keys,
   biases, rotary tables (a layer without positions), the router (an MLP that is no mixture). `window`:
   positions that a token sees, its own included; 0: all. */
typedef struct {
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm;
    const float *attention_post_norm, *mlp_post_norm, *cosine, *sine;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
    const num *qkv, *output, *gate_up, *down, *router;
    num *keys, *values;
    int64_t window;
} Layer;

/* `separate`: a branch's output is normalised or scaled before it is added, or is a mixture's.
   `whole_norms`: norms of queries and keys over all heads. `interleaved`: rotary pairs are
   neighbours. Soft caps: cap * tanh(x / cap); 0: none. `experts`: 0 without mixtures; a token takes
   `top` of them. */
typedef struct {
    int32_t hidden, layers, heads, kv_heads, head_dim, rotary, inner, vocab, activation;
    int32_t separate, whole_norms, interleaved, experts, top, expert_inner, normalised;
    float eps, attention_scale, embedding_scale;
    float residual_scale, logit_scale, attention_softcap, logit_softcap;
    const float *embeddings, *final_norm;
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

#endif
