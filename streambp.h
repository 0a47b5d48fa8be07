/*
StreamBP: exact backpropagation in a fraction of the memory (arXiv 2506.03077).

The idea (section 3.1). Let Z = f(X, W) be a linear layer, an MLP, attention's projections or the head, and
Z_1, ..., Z_D chunks of its output along the tokens of the sequence. The gradient of the weights is a sum over chunks,

    dL/dW = sum_i (dZ_i/dW)^T dL/dZ_i

so a chunk's activations can be computed, used and dropped before the next chunk's exist. Nothing is approximated: the
terms are those of standard backpropagation, and only the order of the sum is another. Attention joins the chunks, but
causally: the queries of chunk c see the keys of chunks <= c, so the keys and values of chunk c receive gradient from
chunks >= c alone. A layer's chunks are therefore visited last to first: dK[c], dV[c] are complete the moment chunk c's
own queries have been through backward, dx[c] is final in the same visit, and it overwrites what it came from.

A few steps on a layer l and a chunk c of tokens [t0, t1) are all there is:

    kv_project(l, c)          x_l[c] -> K_l[c], V_l[c]
    attention_forward(l, c)   x_l[c], K_l[:t1], V_l[:t1] -> y[c]
    mlp_forward(l, c)         y[c] -> x_{l+1}[c]
    mlp_backward(l, c)        dx[c] of x_{l+1} -> dx[c] of y, in place; dW +=
    attention_backward(l, c)  dx[c] of y -> the queries' part of the gradient of norm 1; dK[:t1], dV[:t1] +=; dW +=
    kv_backward(l, c)         dK[c], dV[c] -> the keys' and values' part; then dx[c] of x_l, in place; dW +=
    head_step(c)              x_L[c] -> logits[c] -> log-probabilities; dlogits -> dx[c] over x_L[c]; dW +=

A method is an order of these steps and a choice of what stays in memory between forward and backward:

    method      keeps of a layer   chunk   logits chunk
    full        every activation   N       N             standard backpropagation
    checkpoint  its input          N       N             gradient checkpointing
    stream      its input          n       m             StreamBP

Memory in bytes, beside weights, gradients and optimizer. N tokens, L layers, C hidden, Q = NH*HD, KV = NKV*HD, H = 2 FF
(gate and up), V vocabulary; s bytes of an element, 4 of a sum. A token's activations in a layer are A = 3C + 2Q + H +
FF elements (Q more with QK-norm) and NH sums; the sums are left out here.

    full        N ((L+1) C + L A + 2 L KV) s  +  max(8 N KV, N (V + C) s)
    checkpoint  N (L+1) C s  +  max(N A s + 2 N KV (s + 4), N (V + C) s)
    stream      N (L+1) C s  +  max(n A s + 2 N KV (s + 4), m (V + C) s)

and 20 N of the batch (token, target, position, weight, log-probability), and workspace of one chunk. dx lives where x_L
was: no second tensor of N x C exists. K, V, dK, dV are one layer's. Where layer inputs lie in host memory or on
a disk, 2 N C s of them are on the device; where that of one layer in K is kept, N (L/K + K) C s (stream/inputs.h).

FLOPs of a pass, exactly as `train plan` counts them. P = C Q + 2 C KV + Q C + C H + FF C parameters in a layer's
products, `pairs` query-key pairs of a layer:

    forward     F = 2 N (L P + C V) + 4 L Q pairs
    backward    B = 4 N (L P + C V) + 10 L Q pairs
    recompute   R = 2 N L (P - FF C) + 4 L Q pairs       all of a layer's forward but the last product
                    (+ 2 N L C KV with QK-norm, whose backward needs K before the norm)

    full F + B; checkpoint and stream F + B + R, whatever the chunk: K and V are projected once per pass, never once per
    chunk over the prefix. --keep attention saves attention's outputs and spares the 4 L Q pairs of R.

Every tensor is pushed on the arena where it is needed and popped where it dies. The steps never look inside a tensor; a
plan is this same code on op set "dry" (llmc/plan/plan.h). Linear layers have their adapters with them (modules.h): with
LoRA dW is that of the adapters. A layer with a sliding window stores the keys of its window, which slides with the
chunks (attention_memory.h). Other orders of the same steps are in llmc/orders/: several processes to a sequence,
generation.
*/
#ifndef STREAMBP_H
#define STREAMBP_H
#include "llmc/stream/attention_memory.h" // where layer inputs, keys and values lie; --keep attention
#include "llmc/stream/modules.h"          // linear layers, norms, rotary embedding, the MLP's activation
#include "llmc/stream/residency.h"        // where weights and gradients are
#include "llmc/stream/sequence.h"         // the sequence on the device; chunks and layers: what loops visit

// ---- what one chunk costs -------------------------------------------------------------------------------------------
// Forward leaves these for backward. Method full: one set for each layer, n = N.
struct Activations {
    Stored *norm1;            // [n,C]      norm of x_l
    Stored *q_linear;         // [n,NH*HD]  queries before QK-norm; NULL without QK-norm
    Stored *q;                // [n,NH*HD]  after QK-norm and RoPE
    Stored *attention_out;    // [n,NH*HD]  softmax(scale q k^T) v
    Summed *lse;              // [n,NH]     log-sum-exp of the scores
    Stored *attention_branch; // [n,C]      attention branch before its post norm; NULL where the family has none
    Stored *y;                // [n,C]      x_l + attention branch
    Stored *norm2;            // [n,C]      norm of y
    Stored *gate_up;          // [n,H]      gate and up (H = 2FF), or GELU's input (H = FF)
    Stored *activated;        // [n,FF]     after the activation
    Stored *mlp_branch;       // [n,C]      MLP branch before its post norm; NULL where the family has none
    Stored *dnorm1;           // [n,C]      backward: gradient of norm 1, from queries, keys and values
    size_t mark;              // of the arena, before all of them
};

// Pushes attention's part for n tokens; q, attention_out and lse only where they have no memory yet.
static void push_attention_activations(StreamBP *s, Activations *a, size_t n) {
    Shapes d = shapes_of(s->model);
    a->norm1 = push_stored(s, SHARE_WORKSPACE, "first norm", n * d.C);
    if (d.qk_norm) a->q_linear = push_stored(s, SHARE_WORKSPACE, "queries before QK-norm", n * d.Q);
    if (!a->q) a->q = push_stored(s, SHARE_WORKSPACE, "queries", n * d.Q);
    if (!a->attention_out) {
        a->attention_out = push_stored(s, SHARE_WORKSPACE, "attention output", n * d.Q);
        a->lse = push_summed(s, SHARE_WORKSPACE, "log-sum-exp", n * d.NH);
    }
    if (d.post_norms) a->attention_branch = push_stored(s, SHARE_WORKSPACE, "attention before its norm", n * d.C);
    a->y = push_stored(s, SHARE_WORKSPACE, "after attention", n * d.C);
}

static void push_mlp_activations(StreamBP *s, Activations *a, size_t n) {
    Shapes d = shapes_of(s->model);
    a->norm2 = push_stored(s, SHARE_WORKSPACE, "second norm", n * d.C);
    a->gate_up = push_stored(s, SHARE_WORKSPACE, d.gated ? "gate and up" : "before GELU", n * d.H);
    a->activated = push_stored(s, SHARE_WORKSPACE, "after activation", n * d.FF);
    if (d.post_norms) a->mlp_branch = push_stored(s, SHARE_WORKSPACE, "MLP before its norm", n * d.C);
}

// Method full: the set of layer l, from row `row` on
static Activations kept_activations(StreamBP *s, size_t l, size_t row) {
    Shapes d = shapes_of(s->model);
    Activations a = *s->kept;
    row += l * s->rows;
    a.norm1 = stored_row(s, a.norm1, row, d.C);
    if (d.qk_norm) a.q_linear = stored_row(s, a.q_linear, row, d.Q);
    a.q = stored_row(s, a.q, row, d.Q);
    a.attention_out = stored_row(s, a.attention_out, row, d.Q);
    a.lse = summed_row(s, a.lse, row, d.NH);
    a.y = stored_row(s, a.y, row, d.C);
    a.norm2 = stored_row(s, a.norm2, row, d.C);
    a.gate_up = stored_row(s, a.gate_up, row, d.H);
    a.activated = stored_row(s, a.activated, row, d.FF);
    if (d.post_norms) a.attention_branch = stored_row(s, a.attention_branch, row, d.C);
    if (d.post_norms) a.mlp_branch = stored_row(s, a.mlp_branch, row, d.C);
    a.mark = arena_mark(s->arena);
    return a;
}

// Room for attention's part of chunk c's activations
static Activations chunk_activations(StreamBP *s, size_t l, Chunk c) {
    Activations a = {0};
    if (keeps_activations(s)) return kept_activations(s, l, c.row);
    a.mark = arena_mark(s->arena);
    saved_attention_chunk(s, l, c, &a.attention_out, &a.lse);
    push_attention_activations(s, &a, c.n);
    return a;
}

static void drop(StreamBP *s, const Activations *a) { arena_pop(s->arena, a->mark); }

// ---- attention, forward (section 3.2.2) ----------------------------------------------------------------------
static void norm1_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    norm_forward(s, a->norm1, layer_input(s, l, c.row), weight_of(s, w, NORM1_WEIGHT), weight_of(s, w, NORM1_BIAS),
                 NULL, c.n);
}

static void kv_project(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    window_slide_forward(s, l, c); // a layer with a window makes room
    Stored *k = key_value_at(s, s->kv.k, l, c.token), *v = key_value_at(s, s->kv.v, l, c.token);
    Stored *k_linear = s->kv.k_linear ? key_value_at(s, s->kv.k_linear, l, c.token) : k;
    linear_forward(s, l, c, w, K_WEIGHT, k_linear, a->norm1, NULL);
    linear_forward(s, l, c, w, V_WEIGHT, v, a->norm1, NULL);
    rotary_forward(s, l, c, k, k_linear, weight_of(s, w, K_NORM), d.NKV);
}

static void queries_project(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    Stored *q_linear = d.qk_norm ? a->q_linear : a->q;
    linear_forward(s, l, c, w, Q_WEIGHT, q_linear, a->norm1, NULL);
    rotary_forward(s, l, c, a->q, q_linear, weight_of(s, w, Q_NORM), d.NH);
}

// y = x_l + (post norm of) attention's output projected
static void attention_output(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const Stored *x = layer_input(s, l, c.row);
    if (a->attention_branch) {
        linear_forward(s, l, c, w, O_WEIGHT, a->attention_branch, a->attention_out, NULL);
        norm_forward(s, a->y, a->attention_branch, weight_of(s, w, POST_NORM1), NULL, x, c.n);
    } else {
        linear_forward(s, l, c, w, O_WEIGHT, a->y, a->attention_out, x);
    }
}

static void attention_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "attention scratch", s->ops->attention_scratch(c.n, d.NH, d.NKV, d.HD));
    queries_project(s, l, c, w, a);
    if (!attention_saved(s)) {
        const AttentionShape shape = attention_shape(s, layer_spans(s, l, c));
        s->ops->attention_forward(a->attention_out, a->lse, a->q, layer_keys(s, s->kv.k, l), layer_keys(s, s->kv.v, l),
                                  &shape, scratch);
    }
    attention_output(s, l, c, w, a);
    arena_pop(s->arena, mark);
}

// ---- attention, backward (section 3.2.2). dx[n,C]: gradient of the residual stream, updated in place ----------------
// Gradient of a residual branch: dx itself, or with a post norm the gradient of its input `branch`, over it
static const Stored *branch_backward(StreamBP *s, Chunk c, GroupWeights w, GroupSums dw, LayerTensor norm,
                                     Stored *branch, const Stored *dx) {
    if (!branch) return dx;
    norm_backward(s, branch, sum_of(s, dw, norm), NULL, dx, branch, weight_of(s, w, norm), c.n, shapes_of(s->model).C,
                  0);
    return branch;
}

// dattention_out[n,NH*HD] = gradient of attention's output
static void output_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                            const Stored *dx, Stored *dattention_out) {
    const Stored *dbranch = branch_backward(s, c, w, dw, POST_NORM1, a->attention_branch, dx);
    linear_backward(s, l, c, w, dw, O_WEIGHT, dattention_out, dbranch, a->attention_out, 0);
}

// dnorm1 = the part that comes through the queries; dq is used up
static void queries_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                             Stored *dq) {
    rotary_backward(s, l, c, dq, sum_of(s, dw, Q_NORM), a->q_linear, weight_of(s, w, Q_NORM), shapes_of(s->model).NH);
    linear_backward(s, l, c, w, dw, Q_WEIGHT, a->dnorm1, dq, a->norm1, 0);
}

static void attention_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a,
                               const Stored *dx) {
    Shapes d = shapes_of(s->model);
    a->dnorm1 = push_stored(s, SHARE_WORKSPACE, "gradient of the first norm", c.n * d.C);
    const size_t mark = arena_mark(s->arena);
    Stored *dattention_out = push_stored(s, SHARE_WORKSPACE, "gradient of attention output", c.n * d.Q);
    Stored *dq = push_stored(s, SHARE_WORKSPACE, "gradient of queries", c.n * d.Q);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "attention scratch", s->ops->attention_scratch(c.n, d.NH, d.NKV, d.HD));
    output_backward(s, l, c, w, dw, a, dx, dattention_out);
    const AttentionShape shape = attention_shape(s, layer_spans(s, l, c));
    s->ops->attention_backward(dq, s->kv.dk, s->kv.dv, dattention_out, a->attention_out, a->q,
                               layer_keys(s, s->kv.k, l), layer_keys(s, s->kv.v, l), a->lse, &shape, scratch);
    queries_backward(s, l, c, w, dw, a, dq);
    arena_pop(s->arena, mark);
}

// dx of y -> dx of x_l
static void norm1_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                           Stored *dx) {
    norm_backward(s, dx, sum_of(s, dw, NORM1_WEIGHT), sum_of(s, dw, NORM1_BIAS), a->dnorm1, layer_input(s, l, c.row),
                  weight_of(s, w, NORM1_WEIGHT), c.n, shapes_of(s->model).C, 1);
}

// dnorm1 += the part that comes through keys and values; = where none came through the queries yet
static void kv_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a, Stored *dx) {
    Shapes d = shapes_of(s->model);
    const int accumulate = a->dnorm1 != NULL;
    if (!accumulate) a->dnorm1 = push_stored(s, SHARE_WORKSPACE, "gradient of the first norm", c.n * d.C);
    const size_t mark = arena_mark(s->arena);
    Stored *dkv = push_stored(s, SHARE_WORKSPACE, "gradient of keys or values", c.n * d.KV);
    Stored *k_linear = NULL; // keys before QK-norm, projected again where they were not kept
    if (d.qk_norm && s->kv.k_linear) {
        k_linear = key_value_at(s, s->kv.k_linear, l, c.token);
    } else if (d.qk_norm) {
        k_linear = push_stored(s, SHARE_WORKSPACE, "keys before QK-norm", c.n * d.KV);
        linear_forward(s, l, c, w, K_WEIGHT, k_linear, a->norm1, NULL);
    }
    s->ops->round_sums(dkv, key_gradient_at(s, s->kv.dk, l, c.token), c.n * d.KV);
    rotary_backward(s, l, c, dkv, sum_of(s, dw, K_NORM), k_linear, weight_of(s, w, K_NORM), d.NKV);
    linear_backward(s, l, c, w, dw, K_WEIGHT, a->dnorm1, dkv, a->norm1, accumulate);
    s->ops->round_sums(dkv, key_gradient_at(s, s->kv.dv, l, c.token), c.n * d.KV);
    linear_backward(s, l, c, w, dw, V_WEIGHT, a->dnorm1, dkv, a->norm1, 1);
    norm1_backward(s, l, c, w, dw, a, dx);
    arena_pop(s->arena, mark);
}

// ---- the MLP (section 3.2.2): a chunk of tokens depends on no other -------------------------------------------------
// The MLP as far as its backward needs it: up to the activation, or the end where a post norm follows
static void mlp_activate(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    norm_forward(s, a->norm2, a->y, weight_of(s, w, NORM2_WEIGHT), weight_of(s, w, NORM2_BIAS), NULL, c.n);
    linear_forward(s, l, c, w, GATE_WEIGHT, a->gate_up, a->norm2, NULL);
    s->ops->activation_forward(a->activated, a->gate_up, d.activation, c.n, d.FF);
    if (a->mlp_branch) linear_forward(s, l, c, w, DOWN_WEIGHT, a->mlp_branch, a->activated, NULL);
}

static void mlp_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    mlp_activate(s, l, c, w, a);
    Stored *out = layer_output(s, l + 1, c);
    if (a->mlp_branch)
        norm_forward(s, out, a->mlp_branch, weight_of(s, w, POST_NORM2), NULL, a->y, c.n);
    else
        linear_forward(s, l, c, w, DOWN_WEIGHT, out, a->activated, a->y);
    input_save(s, l + 1, c);
}

// Computes the MLP's activations again where they were not kept. Each gradient is written over its own values.
static void mlp_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a, Stored *dx) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    if (!keeps_activations(s)) {
        push_mlp_activations(s, a, c.n);
        mlp_activate(s, l, c, w, a);
    }
    Stored *dactivated = a->activated, *dgate_up = a->gate_up, *dnorm2 = a->norm2;
    const Stored *dbranch = branch_backward(s, c, w, dw, POST_NORM2, a->mlp_branch, dx);
    linear_backward(s, l, c, w, dw, DOWN_WEIGHT, dactivated, dbranch, a->activated, 0);
    s->ops->activation_backward(dgate_up, dactivated, a->gate_up, d.activation, c.n, d.FF);
    linear_backward(s, l, c, w, dw, GATE_WEIGHT, dnorm2, dgate_up, a->norm2, 0);
    norm_backward(s, dx, sum_of(s, dw, NORM2_WEIGHT), sum_of(s, dw, NORM2_BIAS), dnorm2, a->y,
                  weight_of(s, w, NORM2_WEIGHT), c.n, d.C, 1);
    arena_pop(s->arena, mark);
}

// ---- one layer, chunk by chunk --------------------------------------------------------------------------------------
static void layer_forward(StreamBP *s, size_t l, GroupWeights w) {
    weights_prefetch(&s->memory, l);
    for (size_t i = 0; i < chunk_count(s); i++) {
        Chunk c = chunk_at(s, i);
        Activations a = chunk_activations(s, l, c);
        if (!keeps_activations(s)) push_mlp_activations(s, &a, c.n);
        norm1_forward(s, l, c, w, &a);
        kv_project(s, l, c, w, &a);
        attention_forward(s, l, c, w, &a);
        saved_attention_store_chunk(s, l, c, a.attention_out, a.lse);
        mlp_forward(s, l, c, w, &a);
        drop(s, &a);
    }
}

// Norm 1 of chunk c alone, which keys and values need: computed, or in backward what was kept
static Activations norm1_activations(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    Activations a = {0};
    if (keeps_activations(s) && s->pass == PASS_BACKWARD) return kept_activations(s, l, c.row);
    a.mark = arena_mark(s->arena);
    a.norm1 = push_stored(s, SHARE_WORKSPACE, "first norm", c.n * shapes_of(s->model).C);
    norm1_forward(s, l, c, w, &a);
    return a;
}

// K and V of chunk c alone
static void chunk_kv_project(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    Activations a = norm1_activations(s, l, c, w);
    kv_project(s, l, c, w, &a);
    drop(s, &a);
}

// K, V of all tokens again, once per pass; dK = dV = 0. A layer with a window gets its keys chunk by chunk (recompute).
static void keys_begin(StreamBP *s, size_t l, GroupWeights w) {
    s->kv.first = s->N;
    if (layer_slides(s, l)) return;
    zero_key_value_gradients(s, s->kv.rows[layer_window(&s->model->config, l) != 0]);
    for (size_t i = 0; i < chunk_count(s) && !keeps_activations(s); i++) chunk_kv_project(s, l, chunk_at(s, i), w);
}

// The keys that come into a layer's window when it slides back to chunk c, projected again in chunks
static void window_project(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    const Range missing = window_slide_back(s, l, c);
    Chunk part = c;
    for (size_t done = 0; done < missing.count; done += part.n) {
        part.row = part.token = missing.begin + done;
        part.n = min_size(effective_chunk(s, s->chunk), missing.count - done);
        chunk_kv_project(s, l, part, w);
    }
}

// Attention's part of chunk c's activations: computed again, or kept. A window slides back to the keys that c sees.
static Activations recompute(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    window_project(s, l, c, w);
    Activations a = chunk_activations(s, l, c);
    saved_attention_prefetch(s, l, c.index);
    if (keeps_activations(s)) return a;
    norm1_forward(s, l, c, w, &a);
    attention_forward(s, l, c, w, &a);
    return a;
}

static void layer_backward(StreamBP *s, size_t l, GroupWeights w, GroupSums dw) {
    saved_attention_prefetch(s, l, chunk_count(s));
    keys_begin(s, l, w); // K, V of all tokens; dK = dV = 0
    weights_prefetch(&s->memory, l);
    for (size_t i = chunk_count(s); i-- > 0;) { // last to first: chunks before c give nothing to dK[c], dV[c]
        Chunk c = chunk_at(s, i);
        Stored *dx = layer_input(s, s->model->config.num_hidden_layers, c.row); // where x_L was
        Activations a = recompute(s, l, c, w);
        mlp_backward(s, l, c, w, dw, &a, dx);
        attention_backward(s, l, c, w, dw, &a, dx); // dQ[c]; dK, dV of all chunks up to c
        kv_backward(s, l, c, w, dw, &a, dx);        // dK[c], dV[c] are complete now
        input_done(s, l, c);
        drop(s, &a);
    }
}

static const Order order_alone = {layer_forward, layer_backward};

// ---- the embedding --------------------------------------------------------------------------------------------------
static void embedding_step(StreamBP *s, Chunk c, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    size_t position = s->model->model_offset[POSITION_EMBEDDING];
    const Stored *wpe = position == ABSENT ? NULL : (const Stored *)at(w.weights, position, d.stored);
    s->ops->embedding_forward(layer_input(s, 0, c.row), s->tokens + c.row, s->position + c.row,
                              (const Stored *)w.weights, wpe, c.n, d.C, d.embedding_scale);
    input_save(s, 0, c);
}

static void embedding_forward(StreamBP *s) {
    GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    for (size_t i = 0; i < chunk_count(s); i++) embedding_step(s, chunk_at(s, i), w);
    weights_release(&s->memory, GROUP_EMBEDDING);
}

// dw[rows of the table,C] += dx by token, or by position
static void table_backward(StreamBP *s, GroupSums dw, ModelTensor table, const int32_t *index, size_t table_rows) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    void *sums = at(dw.tables, s->model->model_offset[table], dtype_size(dw.tables_type));
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "token order", s->ops->embedding_backward_scratch(s->rows, table_rows, d.C));
    s->ops->embedding_backward(sums, dw.tables_type, layer_input(s, d.L, 0), index, s->rows, table_rows, d.C,
                               table == EMBEDDING ? d.embedding_scale : 1, scratch);
    arena_pop(s->arena, mark);
}

static void embedding_backward(StreamBP *s) {
    Shapes d = shapes_of(s->model);
    GroupSums dw = grads_acquire(&s->memory, GROUP_EMBEDDING);
    if (dw.tables && s->rows) table_backward(s, dw, EMBEDDING, s->tokens, d.V);
    if (dw.tables && s->rows && !d.rotary)
        table_backward(s, dw, POSITION_EMBEDDING, s->position, s->model->config.max_position_embeddings);
    grads_release(&s->memory, GROUP_EMBEDDING, dw);
}

// ---- the head (section 3.2.1): of N x V logits those of one chunk exist -------------------------------------
typedef struct {
    const Stored *norm, *norm_bias; // [C] the final norm; norm_bias NULL with RMSNorm
    const Stored *matrix;           // [V,C]
    Stored *norm_out;               // [n,C]
    Stored *logits;                 // [n,V], rows logits_stride apart
} HeadActivations;

// x_L of chunk c -> its logits, pushed
static HeadActivations head_forward(StreamBP *s, Chunk c, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    HeadActivations h;
    h.norm = (const Stored *)w.weights;
    h.norm_bias =
        s->model->model_offset[FINAL_NORM_BIAS] == ABSENT ? NULL : (const Stored *)at(w.weights, d.C, d.stored);
    h.matrix = (const Stored *)w.matrix;
    h.norm_out = push_stored(s, SHARE_LOGITS, "final norm", c.n * d.C);
    h.logits = push_stored(s, SHARE_LOGITS, "logits", c.n * d.logits_stride);
    norm_forward(s, h.norm_out, layer_input(s, d.L, c.row), h.norm, h.norm_bias, NULL, c.n);
    s->ops->linear_forward(h.logits, h.norm_out, h.matrix, NULL, NULL, c.n, d.C, d.V, d.logits_stride);
    return h;
}

/*
Log-probabilities of chunk c's targets; with dw also the gradients: of x_L[c], over x_L[c], and of the head.

An objective (llmc/data/objective.h) is a weight per token: dlogits = weight / temperature * (onehot - softmax). Weights
of sft are known before the head runs. Weights of grpo and ppo follow from the chunk's own log-probabilities, in the
same visit. Weights of pairs and gspo wait for the log-probabilities of the whole sequence, which take a pass of their
own.
*/
static void head_step(StreamBP *s, Chunk c, GroupWeights w, const GroupSums *dw) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    const int by_token = objective_weights_wait(&s->objective) == WEIGHTS_BY_TOKEN;
    HeadActivations h = head_forward(s, c, w);
    const int32_t *targets = s->targets + c.row;
    Summed *logp = summed_row(s, s->logp, c.row, 1);
    Summed *entropy = s->entropy ? summed_row(s, s->entropy, c.row, 1) : NULL;
    if (!dw || by_token)
        s->ops->logprob(logp, entropy, h.logits, targets, NULL, c.n, d.V, d.logits_stride, s->objective.temperature);
    if (dw) {
        Stored *x = layer_input(s, d.L, c.row), *dlogits = h.logits, *dnorm_out = h.norm_out;
        Summed *dnorm_bias = dw->norm && h.norm_bias ? summed_row(s, dw->norm, 1, d.C) : NULL;
        if (by_token) sequence_chunk_weights(s, c);
        s->ops->logprob(logp, NULL, dlogits, targets, summed_row(s, s->token_weight, c.row, 1), c.n, d.V,
                        d.logits_stride, s->objective.temperature);
        if (dw->head)
            s->ops->linear_backward_weight(dw->head, NULL, dlogits, h.norm_out, c.n, d.C, d.V, d.logits_stride);
        s->ops->linear_backward_input(dnorm_out, dlogits, h.matrix, c.n, d.C, d.V, d.logits_stride, 0);
        norm_backward(s, x, dw->norm, dnorm_bias, dnorm_out, x, h.norm, c.n, d.C, 0);
    }
    arena_pop(s->arena, mark);
}

static void head_logprobs(StreamBP *s, GroupWeights w) {
    for (size_t i = 0; i < logits_chunk_count(s); i++) head_step(s, logits_chunk_at(s, i), w, NULL);
}

static void head_forward_backward(StreamBP *s) {
    GroupWeights w = weights_acquire(&s->memory, GROUP_HEAD);
    GroupSums dw = grads_acquire(&s->memory, GROUP_HEAD);
    if (objective_weights_wait(&s->objective) == WEIGHTS_BY_SEQUENCE) {
        head_logprobs(s, w);
        host_collect(s, s->host_sums, s->logp);
        sequence_weights(s);
    }
    for (size_t i = 0; i < logits_chunk_count(s); i++) head_step(s, logits_chunk_at(s, i), w, &dw);
    grads_release(&s->memory, GROUP_HEAD, dw);
    weights_release(&s->memory, GROUP_HEAD);
}

// ---- all layers -----------------------------------------------------------------------------------------------------
static void layers_forward(StreamBP *s) {
    const size_t mark = arena_mark(s->arena);
    saved_attention_begin(s);
    layers_begin(&s->memory, 1);
    for (size_t i = 0; i < layer_count(s); i++) {
        size_t l = layer_at(s, i);
        GroupWeights w = weights_acquire(&s->memory, l);
        s->order->layer_forward(s, l, w);
        weights_release(&s->memory, l);
    }
    layers_end(&s->memory);
    saved_attention_finish(s);
    inputs_await(s);
    arena_pop(s->arena, mark);
}

static void layers_backward(StreamBP *s) {
    const size_t mark = arena_mark(s->arena);
    push_key_value_gradients(s);
    saved_attention_begin(s);
    layers_begin(&s->memory, -1);
    inputs_begin(s);
    for (size_t i = layer_count(s); i-- > 0;) {
        size_t l = layer_at(s, i);
        restore_input(s, l); // x_l, where --inputs-every has not kept it
        GroupWeights w = weights_acquire(&s->memory, l);
        GroupSums dw = grads_acquire(&s->memory, l);
        s->order->layer_backward(s, l, w, dw);
        grads_release(&s->memory, l, dw);
        weights_release(&s->memory, l);
    }
    layers_end(&s->memory);
    saved_attention_finish(s);
    arena_pop(s->arena, mark);
}

// ---- one sequence through the model ---------------------------------------------------------------------------------
// The loss of a micro-batch: its share of the accumulated batch's, whose loss denominator is Z. Gradients are added to
// the stored ones, metrics (or NULL) to metrics. last: of the step's micro-batches; the stored gradient is then
// complete.
static double forward_backward(StreamBP *s, const Batch *batch, double Z, int last, Metrics *metrics) {
    Shapes d = shapes_of(s->model);
    const Marks mark = marks_of(s->arena);
    Activations kept = {0};
    sequence_begin(s, batch, Z, PASS_FORWARD);
    push_inputs(s);
    saved_attention_push(s);
    if (keeps_activations(s)) { // method full
        push_attention_activations(s, &kept, d.L * s->rows);
        push_mlp_activations(s, &kept, d.L * s->rows);
        s->kept = &kept;
    }
    grads_begin(&s->memory, last);
    const size_t kv_mark = arena_mark(s->arena);
    push_pass_key_value(s);
    embedding_forward(s);
    layers_forward(s);
    if (!keeps_activations(s)) arena_pop(s->arena, kv_mark); // K, V of the last layer die: the head takes their place
    head_forward_backward(s);
    sequence_end(s);
    const double loss = sequence_loss(s, metrics);
    if (!keeps_activations(s)) push_pass_key_value(s);
    s->pass = PASS_BACKWARD;
    layers_backward(s);
    arena_pop(s->arena, kv_mark);
    saved_attention_pop(s);
    embedding_backward(s);
    grads_end(&s->memory);
    s->kept = NULL;
    marks_pop(s->arena, mark);
    return loss;
}

// Log-probabilities alone, in host_sums: layer inputs are overwritten layer by layer, so memory does not grow with L.
// reference: of the model without its adapters, or as it was at the start
static void forward_logprobs(StreamBP *s, const Batch *batch, double Z, int reference) {
    const size_t mark = arena_mark(s->arena);
    if (reference) reference_swap(&s->memory);
    sequence_begin(s, batch, Z, PASS_FORWARD_ONLY);
    push_inputs(s);
    const size_t kv_mark = arena_mark(s->arena);
    push_pass_key_value(s);
    embedding_forward(s);
    layers_forward(s);
    arena_pop(s->arena, kv_mark);
    const GroupWeights head = weights_acquire(&s->memory, GROUP_HEAD);
    head_logprobs(s, head);
    weights_release(&s->memory, GROUP_HEAD);
    sequence_end(s);
    if (reference) reference_swap(&s->memory);
    arena_pop(s->arena, mark);
}

// The loss alone
static double forward_only(StreamBP *s, const Batch *batch, double Z, Metrics *metrics) {
    forward_logprobs(s, batch, Z, 0);
    return sequence_loss(s, metrics);
}

// out[N] = log-probabilities of the targets under the model, or without its adapters under the reference
static void forward_policy(StreamBP *s, const Batch *batch, int reference, float *out) {
    const DType type = dtype_of_sums(s->model->dtype);
    forward_logprobs(s, batch, 1, reference);
    for (size_t t = 0; t < batch->N; t++) out[t] = (float)value_at(s->host_sums, type, t);
}

#endif
