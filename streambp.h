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

A layer of linear attention (Gated DeltaNet) has no keys and values. What joins its chunks is a state, [DK,DV] for each
head, that passes from token to token; its gradient passes back, so last to first is the order here, too:

    linear_attention_forward(l, c)    x_l[c], S before c -> y[c], S behind c
    linear_attention_backward(l, c)   dx[c] of y, dS behind c -> dx[c] of x_l, in place; dS before c; dW +=

Backward needs S before each chunk: it is kept at intervals and computed again between (linear_memory.h).

A method is an order of these steps and a choice of what stays in memory between forward and backward:

    method      keeps of a layer   chunk   logits chunk
    full        every activation   N       N             standard backpropagation
    checkpoint  its input          N       N             gradient checkpointing
    stream      its input          n       m             StreamBP

Memory in bytes, beside weights, gradients and optimizer. N tokens, L layers, C hidden, Q = NH*HD, KV = NKV*HD, H = 2 FF
(gate and up), V vocabulary; s bytes of an element, 4 of a sum. A token's activations in a layer are A = 3C + 2Q + H +
FF elements (Q more with QK-norm, 2Q with a gate, C for a norm behind each branch, C less for each norm that the family
does not have before them) and NH sums; the sums are left out here.

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

A layer of linear attention projects E = 2 HK DK + 2 HV DV + 2 HV elements, of which W = 2 HK DK + HV DV go through a
convolution: A = 3C + E + W + 2 HV DV + H + FF and P = C E + HV DV C + C H + FF C. The delta rule's FLOPs (delta_flops
in ops.h) take the place of those of pairs, and N / max(n, 1024) states of HV DK DV sums that of K, V, dK, dV, of which
the layers of either kind have the memory in turn. States cost stream 2 N C (W + 2 HV) and the rule once more.

Every tensor is pushed on the arena where it is needed and popped where it dies. The steps never look inside a tensor; a
plan is this same code on op set "dry" (llmc/plan/plan.h). Linear layers have their adapters with them (modules.h): with
LoRA dW is that of the adapters. A layer with a sliding window stores the keys of its window, which slides with the
chunks (attention_memory.h). Other orders of the same steps are in llmc/orders/: methods mst, seco and spaco, processes
that share a sequence, generation.
*/
#ifndef STREAMBP_H
#define STREAMBP_H
#include "llmc/stream/linear_memory.h" // where layer inputs, keys, values and states lie; --keep attention
#include "llmc/stream/modules.h"       // linear layers, norms, rotary embedding, the MLP's activation
#include "llmc/stream/residency.h"     // where weights and gradients are
#include "llmc/stream/sequence.h"      // the sequence on the device; chunks and layers: what loops visit

// ---- what one chunk costs -------------------------------------------------------------------------------------------
// Forward leaves these for backward. Method full: one set for each layer, n = N.
struct Activations {
    Stored *norm1;            // [n,C]      norm of x_l; x_l where the family has none
    Stored *q_linear;         // [n,NH*HD]  queries before QK-norm; NULL without QK-norm
    Stored *q;                // [n,NH*HD]  after QK-norm and RoPE
    Stored *attention_out;    // [n,NH*HD]  softmax(scale q k^T) v
    Summed *lse;              // [n,NH]     log-sum-exp of the scores
    Stored *gate;             // [n,NH*HD]  of attention's output; NULL where the family has none
    Stored *projected;        // [n,E]      linear attention in place of q .. gate: q | k | v | z | b | a
    Stored *mixed;            // [n,W]      q | k | v behind the convolution
    Stored *delta_out;        // [n,HV*DV]  what the delta rule reads from the state
    Stored *gated;            // [n,NH*HD]  attention's output behind its gate, or delta_out's [n,HV*DV] behind the norm
    Stored *attention_branch; // [n,C]      attention branch before its post norm; NULL where the family has none
    Stored *y;                // [n,C]      x_l + attention branch
    Stored *norm2;            // [n,C]      norm of y; y where the family has none
    Stored *gate_up;          // [n,H]      gate and up (H = 2FF), or GELU's input (H = FF)
    Stored *activated;        // [n,FF]     after the activation
    Stored *mlp_branch;       // [n,C]      MLP branch before its post norm; NULL where the family has none
    Stored *dnorm1;           // [n,C]      backward: gradient of norm 1, from queries, keys and values
    size_t mark;              // of the arena, before all of them
};

// Pushes attention's part for n tokens; what has memory already keeps it.
static void push_attention_activations(StreamBP *s, Activations *a, size_t n) {
    Shapes d = shapes_of(s->model);
    if (!a->norm1 && d.pre_norms) a->norm1 = push_stored(s, SHARE_WORKSPACE, "first norm", n * d.C);
    if (d.qk_norm) a->q_linear = push_stored(s, SHARE_WORKSPACE, "queries before QK-norm", n * d.Q);
    if (!a->q) a->q = push_stored(s, SHARE_WORKSPACE, "queries", n * d.Q);
    if (!a->attention_out) {
        a->attention_out = push_stored(s, SHARE_WORKSPACE, "attention output", n * d.Q);
        a->lse = push_summed(s, SHARE_WORKSPACE, "log-sum-exp", n * d.NH);
    }
    if (d.hybrid && !a->gate) a->gate = push_stored(s, SHARE_WORKSPACE, "gate of attention output", n * d.Q);
    if (d.hybrid) a->gated = push_stored(s, SHARE_WORKSPACE, "attention output behind its gate", n * d.Q);
    if (d.post_norms) a->attention_branch = push_stored(s, SHARE_WORKSPACE, "attention before its norm", n * d.C);
    if (!a->y) a->y = push_stored(s, SHARE_WORKSPACE, "after attention", n * d.C);
}

// Pushes linear attention's part for n tokens; what has memory already keeps it.
static void push_linear_activations(StreamBP *s, Activations *a, size_t n) {
    Shapes d = shapes_of(s->model);
    if (!a->norm1) a->norm1 = push_stored(s, SHARE_WORKSPACE, "first norm", n * d.C);
    a->projected = push_stored(s, SHARE_WORKSPACE, "inputs of linear attention", n * d.E);
    a->mixed = push_stored(s, SHARE_WORKSPACE, "after the convolution", n * d.W);
    a->delta_out = push_stored(s, SHARE_WORKSPACE, "delta rule's output", n * d.DVs);
    a->gated = push_stored(s, SHARE_WORKSPACE, "delta rule's output behind its norm", n * d.DVs);
    if (!a->y) a->y = push_stored(s, SHARE_WORKSPACE, "after linear attention", n * d.C);
}

static void push_mlp_activations(StreamBP *s, Activations *a, size_t n) {
    Shapes d = shapes_of(s->model);
    a->norm2 = d.pre_norms ? push_stored(s, SHARE_WORKSPACE, "second norm", n * d.C) : a->y;
    a->gate_up = push_stored(s, SHARE_WORKSPACE, d.gated ? "gate and up" : "before GELU", n * d.H);
    a->activated = push_stored(s, SHARE_WORKSPACE, "after activation", n * d.FF);
    if (d.post_norms) a->mlp_branch = push_stored(s, SHARE_WORKSPACE, "MLP before its norm", n * d.C);
}

// Method full: the set of layer l, from row `row` on
static Activations kept_activations(StreamBP *s, size_t l, size_t row) {
    Shapes d = shapes_of(s->model);
    const int linear = layer_is_linear(&s->model->config, l);
    Activations a = s->kept[linear];
    Stored *const x = layer_input(s, l, row);
    row -= s->inputs.begin;
    const size_t attention = attention_layers_before(s, l),
                 of_kind = (linear ? l - attention : attention) * s->rows + row;
    row += l * s->rows;
    a.norm1 = d.pre_norms ? stored_row(s, a.norm1, row, d.C) : x;
    if (linear) {
        a.projected = stored_row(s, a.projected, of_kind, d.E);
        a.mixed = stored_row(s, a.mixed, of_kind, d.W);
        a.delta_out = stored_row(s, a.delta_out, of_kind, d.DVs);
        a.gated = stored_row(s, a.gated, of_kind, d.DVs);
    } else {
        if (d.qk_norm) a.q_linear = stored_row(s, a.q_linear, of_kind, d.Q);
        a.q = stored_row(s, a.q, of_kind, d.Q);
        a.attention_out = stored_row(s, a.attention_out, of_kind, d.Q);
        a.lse = summed_row(s, a.lse, of_kind, d.NH);
        if (d.hybrid) a.gate = stored_row(s, a.gate, of_kind, d.Q);
        if (d.hybrid) a.gated = stored_row(s, a.gated, of_kind, d.Q);
    }
    a.y = stored_row(s, a.y, row, d.C);
    a.norm2 = d.pre_norms ? stored_row(s, a.norm2, row, d.C) : a.y;
    a.gate_up = stored_row(s, a.gate_up, row, d.H);
    a.activated = stored_row(s, a.activated, row, d.FF);
    if (d.post_norms) a.attention_branch = stored_row(s, a.attention_branch, row, d.C);
    if (d.post_norms) a.mlp_branch = stored_row(s, a.mlp_branch, row, d.C);
    a.mark = arena_mark(s->arena);
    return a;
}

// Room for chunk c's activations, as far as the MLP
static Activations chunk_activations(StreamBP *s, size_t l, Chunk c) {
    Activations a = {0};
    if (keeps_activations(s)) return kept_activations(s, l, c.row);
    a.mark = arena_mark(s->arena);
    if (layer_is_linear(&s->model->config, l)) {
        push_linear_activations(s, &a, c.n);
        return a;
    }
    saved_attention_chunk(s, l, c, &a.attention_out, &a.lse);
    push_attention_activations(s, &a, c.n);
    return a;
}

// Method full: room for the activations of all layers, in kept[0] of those with attention, in kept[1] of the others
static void push_kept_activations(StreamBP *s, Activations kept[2]) {
    Shapes d = shapes_of(s->model);
    const size_t attention = attention_layers_before(s, d.L), rows = d.L * s->rows;
    if (d.pre_norms) kept[0].norm1 = push_stored(s, SHARE_WORKSPACE, "first norm", rows * d.C);
    kept[0].y = push_stored(s, SHARE_WORKSPACE, "after attention", rows * d.C);
    push_mlp_activations(s, &kept[0], rows);
    kept[1] = kept[0];
    if (attention) push_attention_activations(s, &kept[0], attention * s->rows);
    if (attention < d.L) push_linear_activations(s, &kept[1], (d.L - attention) * s->rows);
}

static void drop(StreamBP *s, const Activations *a) { arena_pop(s->arena, a->mark); }

// ---- attention, forward (section 3.2.2) ----------------------------------------------------------------------
static void norm1_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, Activations *a) {
    if (!shapes_of(s->model).pre_norms) {
        a->norm1 = layer_input(s, l, c.row);
        return;
    }
    norm_forward(s, a->norm1, layer_input(s, l, c.row), weight_of(s, w, NORM1_WEIGHT), weight_of(s, w, NORM1_BIAS),
                 NULL, c.n);
}

static void kv_project(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    window_slide_forward(s, l, c); // a layer with a window makes room
    Stored *k = key_value_at(s, s->kv.k, l, c.token), *v = key_value_at(s, s->kv.v, l, c.token);
    Stored *k_linear = s->kv.k_linear ? key_value_at(s, s->kv.k_linear, l, c.token) : k;
    linear_forward(s, l, c, w, K_WEIGHT, k_linear, a->norm1, NULL);
    linear_forward(s, l, c, w, V_WEIGHT, v, a->norm1, NULL);
    rotary_forward(s, l, c, w, K_NORM, k, k_linear);
}

static void queries_project(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    Stored *q_linear = d.qk_norm ? a->q_linear : a->q;
    if (d.hybrid) { // queries and gates, head by head
        const size_t mark = arena_mark(s->arena);
        Stored *both = push_stored(s, SHARE_WORKSPACE, "queries and gates", 2 * c.n * d.Q);
        linear_forward(s, l, c, w, Q_WEIGHT, both, a->norm1, NULL);
        s->ops->split_heads(both, q_linear, a->gate, c.n, d.NH, d.HD, 0);
        arena_pop(s->arena, mark);
    } else {
        linear_forward(s, l, c, w, Q_WEIGHT, q_linear, a->norm1, NULL);
    }
    rotary_forward(s, l, c, w, Q_NORM, a->q, q_linear);
}

// y = x_l + (post norm of) attention's output, gated and projected
static void attention_output(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const Stored *x = layer_input(s, l, c.row), *out = a->gate ? a->gated : a->attention_out;
    if (a->gate) s->ops->gate_forward(a->gated, a->attention_out, a->gate, c.n * shapes_of(s->model).Q);
    if (a->attention_branch) {
        linear_forward(s, l, c, w, O_WEIGHT, a->attention_branch, out, NULL);
        norm_forward(s, a->y, a->attention_branch, weight_of(s, w, POST_NORM1), NULL, x, c.n);
    } else {
        linear_forward(s, l, c, w, O_WEIGHT, a->y, out, x);
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

// dattention_out[n,NH*HD] = gradient of attention's output; the gate's is written over it
static void output_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                            const Stored *dx, Stored *dattention_out) {
    const Stored *dbranch = branch_backward(s, c, w, dw, POST_NORM1, a->attention_branch, dx);
    linear_backward(s, l, c, w, dw, O_WEIGHT, dattention_out, dbranch, a->gate ? a->gated : a->attention_out, 0);
    if (a->gate)
        s->ops->gate_backward(dattention_out, a->gate, dattention_out, a->attention_out, a->gate,
                              c.n * shapes_of(s->model).Q);
}

// Where the gradient of norm 1's output goes: dx itself where the family has no norm there
static Stored *push_norm1_gradient(StreamBP *s, Chunk c, Stored *dx) {
    const Shapes d = shapes_of(s->model);
    return d.pre_norms ? push_stored(s, SHARE_WORKSPACE, "gradient of the first norm", c.n * d.C) : dx;
}

// dnorm1 = (without the norm +=) the part that comes through the queries and their gates; dq is used up
static void queries_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                             Stored *dq) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    Stored *dout = dq;
    rotary_backward(s, l, c, w, dw, Q_NORM, dq, a->q_linear);
    if (a->gate) {
        dout = push_stored(s, SHARE_WORKSPACE, "gradient of queries and gates", 2 * c.n * d.Q);
        s->ops->split_heads(dout, dq, a->gate, c.n, d.NH, d.HD, 1);
    }
    linear_backward(s, l, c, w, dw, Q_WEIGHT, a->dnorm1, dout, a->norm1, !d.pre_norms);
    arena_pop(s->arena, mark);
}

static void attention_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a,
                               Stored *dx) {
    Shapes d = shapes_of(s->model);
    a->dnorm1 = push_norm1_gradient(s, c, dx);
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
    if (!shapes_of(s->model).pre_norms) return;
    norm_backward(s, dx, sum_of(s, dw, NORM1_WEIGHT), sum_of(s, dw, NORM1_BIAS), a->dnorm1, layer_input(s, l, c.row),
                  weight_of(s, w, NORM1_WEIGHT), c.n, shapes_of(s->model).C, 1);
}

// dnorm1 += the part that comes through keys and values; = where none came through the queries yet
static void kv_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a, Stored *dx) {
    Shapes d = shapes_of(s->model);
    const int accumulate = a->dnorm1 || !d.pre_norms;
    if (!a->dnorm1) a->dnorm1 = push_norm1_gradient(s, c, dx);
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
    rotary_backward(s, l, c, w, dw, K_NORM, dkv, k_linear);
    linear_backward(s, l, c, w, dw, K_WEIGHT, a->dnorm1, dkv, a->norm1, accumulate);
    s->ops->round_sums(dkv, key_gradient_at(s, s->kv.dv, l, c.token), c.n * d.KV);
    linear_backward(s, l, c, w, dw, V_WEIGHT, a->dnorm1, dkv, a->norm1, 1);
    norm1_backward(s, l, c, w, dw, a, dx);
    arena_pop(s->arena, mark);
}

// ---- linear attention (Gated DeltaNet, arXiv 2412.06464): chunks are joined by a state alone ------------------------
// Columns of projected[n,E], from the first of a part on
static Stored *projected_part(const StreamBP *s, Stored *projected, LayerTensor part) {
    Shapes d = shapes_of(s->model);
    const size_t z = d.W, b = z + d.DVs, column = part == IN_Z_WEIGHT ? z : part == IN_B_WEIGHT ? b : b + d.HV;
    return stored_row(s, projected, part == IN_QKV_WEIGHT ? 0 : column, 1);
}

static void convolution_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const DeltaShape shape = delta_shape(s, c);
    s->ops->conv_forward(a->mixed, layer_columns(s, l), a->projected, weight_of(s, w, CONV_WEIGHT), &shape);
}

// The state passes through chunk c, whose tokens read it. out[n,HV*DV]; NULL: the state alone. transfer: or NULL
static void delta_step(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a, Stored *out,
                       Summed *transfer) {
    const DeltaShape shape = delta_shape(s, c);
    const size_t mark = arena_mark(s->arena);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "delta rule's scratch", s->ops->delta_forward_scratch(&shape));
    s->ops->delta_forward(out, layer_state(s, l), transfer, a->mixed, projected_part(s, a->projected, IN_B_WEIGHT),
                          projected_part(s, a->projected, IN_A_WEIGHT), weight_of(s, w, A_LOG),
                          weight_of(s, w, DT_BIAS), &shape, scratch);
    arena_pop(s->arena, mark);
}

static void gated_norm_forward(StreamBP *s, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    s->ops->gated_norm_forward(a->gated, a->delta_out, projected_part(s, a->projected, IN_Z_WEIGHT),
                               weight_of(s, w, GATED_NORM), c.n, d.HV, d.DV, d.E, s->model->config.norm_eps);
}

static void linear_attention_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    linear_forward(s, l, c, w, IN_QKV_WEIGHT, a->projected, a->norm1, NULL);
    convolution_forward(s, l, c, w, a);
    delta_step(s, l, c, w, a, a->delta_out, NULL);
    gated_norm_forward(s, c, w, a);
    linear_forward(s, l, c, w, OUT_WEIGHT, a->y, a->gated, layer_input(s, l, c.row));
}

// dgated[n,HV*DV] becomes the gradient of delta_out; z's part of dprojected[n,E]
static void gated_norm_backward(StreamBP *s, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                                Stored *dgated, Stored *dprojected) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "gated norm's scratch", s->ops->gated_norm_backward_scratch(c.n, d.HV, d.DV));
    s->ops->gated_norm_backward(dgated, projected_part(s, dprojected, IN_Z_WEIGHT), sum_of(s, dw, GATED_NORM), dgated,
                                a->delta_out, projected_part(s, a->projected, IN_Z_WEIGHT), weight_of(s, w, GATED_NORM),
                                c.n, d.HV, d.DV, d.E, s->model->config.norm_eps, scratch);
    arena_pop(s->arena, mark);
}

// ddelta_out[n,HV*DV] -> all of dprojected[n,E] but z's part. The gradients of the state and of the convolution's
// inputs pass from behind chunk c to before it. before: what chunk c's forward found
static void delta_backward(StreamBP *s, Chunk c, GroupWeights w, GroupSums dw, const Activations *a, KeptState before,
                           const Stored *ddelta_out, Stored *dprojected) {
    const DeltaShape shape = delta_shape(s, c);
    const size_t mark = arena_mark(s->arena);
    const size_t conv = s->ops->conv_backward_scratch(&shape), delta = s->ops->delta_backward_scratch(&shape);
    Stored *dmixed = push_stored(s, SHARE_WORKSPACE, "gradient behind the convolution", c.n * shapes_of(s->model).W);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "linear attention's scratch", max_size(conv, delta));
    s->ops->delta_backward(dmixed, projected_part(s, dprojected, IN_B_WEIGHT),
                           projected_part(s, dprojected, IN_A_WEIGHT), sum_of(s, dw, A_LOG), sum_of(s, dw, DT_BIAS),
                           s->linear.dstate, ddelta_out, a->mixed, projected_part(s, a->projected, IN_B_WEIGHT),
                           projected_part(s, a->projected, IN_A_WEIGHT), weight_of(s, w, A_LOG),
                           weight_of(s, w, DT_BIAS), before.state, &shape, scratch);
    s->ops->conv_backward(dprojected, sum_of(s, dw, CONV_WEIGHT), s->linear.dcolumns, dmixed, a->projected,
                          before.columns, weight_of(s, w, CONV_WEIGHT), &shape, scratch);
    arena_pop(s->arena, mark);
}

static void linear_attention_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a,
                                      Stored *dx) {
    Shapes d = shapes_of(s->model);
    a->dnorm1 = push_stored(s, SHARE_WORKSPACE, "gradient of the first norm", c.n * d.C);
    const size_t mark = arena_mark(s->arena);
    Stored *dgated = push_stored(s, SHARE_WORKSPACE, "gradient of the delta rule's output", c.n * d.DVs);
    Stored *dprojected = push_stored(s, SHARE_WORKSPACE, "gradient of linear attention's inputs", c.n * d.E);
    linear_backward(s, l, c, w, dw, OUT_WEIGHT, dgated, dx, a->gated, 0);
    gated_norm_backward(s, c, w, dw, a, dgated, dprojected);
    delta_backward(s, c, w, dw, a, state_before(s, c), dgated, dprojected);
    linear_backward(s, l, c, w, dw, IN_QKV_WEIGHT, a->dnorm1, dprojected, a->norm1, 0);
    norm1_backward(s, l, c, w, dw, a, dx);
    arena_pop(s->arena, mark);
}

// ---- the MLP (section 3.2.2): a chunk of tokens depends on no other -------------------------------------------------
// The MLP as far as its backward needs it: up to the activation, or the end where a post norm follows
static void mlp_activate(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    if (d.pre_norms)
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
    Stored *dactivated = a->activated, *dgate_up = a->gate_up, *dnorm2 = d.pre_norms ? a->norm2 : dx;
    const Stored *dbranch = branch_backward(s, c, w, dw, POST_NORM2, a->mlp_branch, dx);
    linear_backward(s, l, c, w, dw, DOWN_WEIGHT, dactivated, dbranch, a->activated, 0);
    s->ops->activation_backward(dgate_up, dactivated, a->gate_up, d.activation, c.n, d.FF);
    linear_backward(s, l, c, w, dw, GATE_WEIGHT, dnorm2, dgate_up, a->norm2, !d.pre_norms);
    if (d.pre_norms)
        norm_backward(s, dx, sum_of(s, dw, NORM2_WEIGHT), sum_of(s, dw, NORM2_BIAS), dnorm2, a->y,
                      weight_of(s, w, NORM2_WEIGHT), c.n, d.C, 1);
    arena_pop(s->arena, mark);
}

// ---- one layer, chunk by chunk --------------------------------------------------------------------------------------
// norm 1 -> y: attention, or linear attention
static void mixer_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    if (layer_is_linear(&s->model->config, l)) {
        linear_attention_forward(s, l, c, w, a);
    } else {
        kv_project(s, l, c, w, a);
        attention_forward(s, l, c, w, a);
        saved_attention_store_chunk(s, l, c, a->attention_out, a->lse);
    }
}

static void layer_forward(StreamBP *s, size_t l, GroupWeights w) {
    weights_prefetch(&s->memory, l);
    for (size_t i = 0; i < chunk_count(s); i++) {
        Chunk c = chunk_at(s, i);
        Activations a = chunk_activations(s, l, c);
        if (!keeps_activations(s)) push_mlp_activations(s, &a, c.n);
        norm1_forward(s, l, c, w, &a);
        mixer_forward(s, l, c, w, &a);
        mlp_forward(s, l, c, w, &a);
        drop(s, &a);
    }
}

// dx of y -> dx of x_l
static void mixer_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a, Stored *dx) {
    if (layer_is_linear(&s->model->config, l)) {
        linear_attention_backward(s, l, c, w, dw, a, dx);
    } else {
        attention_backward(s, l, c, w, dw, a, dx); // dQ[c]; dK, dV of all chunks up to c
        kv_backward(s, l, c, w, dw, a, dx);        // dK[c], dV[c] are complete now
    }
}

// Norm 1 of chunk c alone, which keys and values need: computed, or in backward what was kept
static Activations norm1_activations(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    Activations a = {0};
    if (keeps_activations(s) && s->pass == PASS_BACKWARD) return kept_activations(s, l, c.row);
    a.mark = arena_mark(s->arena);
    if (shapes_of(s->model).pre_norms)
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

// Inputs of chunk c's delta rule: q, k, v behind the convolution, b and a; computed, or in backward as kept
static Activations state_activations(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    Activations a = norm1_activations(s, l, c, w);
    if (a.mixed) return a;
    a.projected = push_stored(s, SHARE_WORKSPACE, "inputs of linear attention", c.n * d.E);
    a.mixed = push_stored(s, SHARE_WORKSPACE, "after the convolution", c.n * d.W);
    linear_forward_part(s, l, c, w, linear_part(s, IN_QKV_WEIGHT, 1, IN_QKV_WEIGHT, IN_QKV_WEIGHT), a.projected,
                        a.norm1, NULL);
    linear_forward_part(s, l, c, w, linear_part(s, IN_QKV_WEIGHT, 1, IN_B_WEIGHT, IN_A_WEIGHT),
                        projected_part(s, a.projected, IN_B_WEIGHT), a.norm1, NULL);
    convolution_forward(s, l, c, w, &a);
    return a;
}

// The state passes through chunk c alone. transfer: or NULL
static void chunk_state(StreamBP *s, size_t l, Chunk c, GroupWeights w, Summed *transfer) {
    Activations a = state_activations(s, l, c, w);
    delta_step(s, l, c, w, &a, NULL, transfer);
    drop(s, &a);
}

// From the state before chunk `from` of a range, keeps the one before every `spacing`-th chunk as far as chunk `to`.
static void states_walk(StreamBP *s, size_t l, GroupWeights w, size_t half, Range chunks, size_t spacing) {
    if (chunks.count) state_copy(s, kept_state(s, half, chunks.begin), 0);
    for (size_t i = 0; i < chunks.count; i++) {
        chunk_state(s, l, range_chunk(s, half, chunks.begin + i, layer_chunk(s)), w, NULL);
        if ((i + 1) % spacing == 0) state_copy(s, kept_state(s, half, chunks.begin + i + 1), 1);
    }
}

// A plan's visit to one chunk of a range, in place of so many walks through chunks.
static void states_count(StreamBP *s, size_t l, GroupWeights w, size_t half, size_t visits) {
    if (!visits) return;
    Chunk c = range_chunk(s, half, 0, layer_chunk(s));
    s->ops->repeat(s->memory.layers_repeat * (double)visits);
    chunk_state(s, l, c, w, NULL);
}

// States at intervals; no gradient comes from behind the sequence. A plan counts all walks of the layer here.
static void states_begin(StreamBP *s, size_t l, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    s->ops->zero(s->linear.dstate, d.S * d.summed);
    if (d.columns) s->ops->zero(s->linear.dcolumns, d.columns * d.summed);
    for (size_t half = 0; half < 2 && !keeps_activations(s); half++) {
        const size_t chunks = chunks_of_range(s, half), spacing = state_spacing(layer_chunk(s), 0);
        const Range all = {0, chunks ? (chunks - 1) / spacing * spacing : 0};
        if (visits_shapes(s))
            states_count(s, l, w, half, chunks_visited_again(layer_chunk(s), 0, chunks));
        else
            states_walk(s, l, w, half, all, spacing);
    }
}

// Before backward comes to the index-th chunk of a range: the states that it and the chunks before it need are computed
// again from the last one of the level above, where this chunk is the last that does.
static void states_restore(StreamBP *s, size_t l, GroupWeights w, size_t half, size_t index) {
    Range block = {0, chunks_of_range(s, half)}; // of the level, that the chunk is in
    for (size_t level = 0; !visits_shapes(s) && !keeps_activations(s); level++) {
        const size_t spacing = state_spacing(layer_chunk(s), level), end = block.begin + block.count;
        const Range chunks = {block.begin, (block.count - 1) / spacing * spacing};
        if (level && index + 1 == end) states_walk(s, l, w, half, chunks, spacing);
        block.begin += (index - block.begin) / spacing * spacing;
        block.count = min_size(spacing, end - block.begin);
        if (spacing == 1) break;
    }
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

// Chunk c's activations as far as the MLP: computed again, or kept. A window slides back to the keys that c sees.
static Activations recompute(StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    const int linear = layer_is_linear(&s->model->config, l);
    if (linear && !keeps_activations(s)) state_copy(s, state_before(s, c), 0);
    if (!linear) window_project(s, l, c, w);
    Activations a = chunk_activations(s, l, c);
    saved_attention_prefetch(s, l, c.index);
    if (keeps_activations(s)) return a;
    norm1_forward(s, l, c, w, &a);
    if (linear)
        linear_attention_forward(s, l, c, w, &a);
    else
        attention_forward(s, l, c, w, &a);
    return a;
}

static void layer_backward(StreamBP *s, size_t l, GroupWeights w, GroupSums dw) {
    const int linear = layer_is_linear(&s->model->config, l);
    saved_attention_prefetch(s, l, chunk_count(s));
    if (linear)
        states_begin(s, l, w); // states at intervals; their gradient = 0
    else
        keys_begin(s, l, w); // K, V of all tokens; dK = dV = 0
    weights_prefetch(&s->memory, l);
    for (size_t i = chunk_count(s); i-- > 0;) { // last to first: chunks before c give nothing to dK[c], dV[c]
        if (linear) states_restore(s, l, w, 0, i);
        Chunk c = chunk_at(s, i);
        Stored *dx = layer_input(s, s->model->config.num_hidden_layers, c.row); // where x_L was
        Activations a = recompute(s, l, c, w);
        mlp_backward(s, l, c, w, dw, &a, dx);
        mixer_backward(s, l, c, w, dw, &a, dx);
        input_done(s, l, c);
        drop(s, &a);
    }
}

// ---- the embedding --------------------------------------------------------------------------------------------------
static void embedding_step(StreamBP *s, Chunk c, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    size_t position = s->model->model_offset[POSITION_EMBEDDING];
    const Stored *wpe = position == ABSENT ? NULL : (const Stored *)at(w.weights, position, d.stored);
    s->ops->embedding_forward(layer_input(s, 0, c.row), s->tokens + c.row, s->position + c.row,
                              (const Stored *)w.weights, wpe, c.n, d.C, d.embedding_scale);
    embedding_adapter_forward(s, layer_input(s, 0, c.row), c.row, c.n, w);
    input_save(s, 0, c);
}

static void embedding_forward(StreamBP *s) {
    GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    for (size_t i = 0; i < chunk_count(s); i++) embedding_step(s, chunk_at(s, i), w);
    weights_release(&s->memory, GROUP_EMBEDDING);
}

// dw[rows of the table,C] += dx[n,C] by token, or by position, of rows [row, row + n)
static void table_backward(StreamBP *s, size_t row, size_t n, GroupSums dw, ModelTensor table, const int32_t *index,
                           size_t table_rows) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    void *sums = at(dw.tables, s->model->model_offset[table], dtype_size(dw.tables_type));
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "token order", s->ops->embedding_backward_scratch(n, table_rows, d.C));
    s->ops->embedding_backward(sums, dw.tables_type, layer_input(s, d.L, row), index + row, n, table_rows, d.C,
                               table == EMBEDDING ? d.embedding_scale : 1,
                               table == EMBEDDING ? s->model->config.pad_token_id : NO_ROW, scratch);
    arena_pop(s->arena, mark);
}

static void tables_backward(StreamBP *s, size_t row, size_t n, GroupSums dw) {
    Shapes d = shapes_of(s->model);
    embedding_adapter_backward(s, layer_input(s, d.L, row), row, n, dw);
    if (dw.tables && n) table_backward(s, row, n, dw, EMBEDDING, s->tokens, d.V);
    if (dw.tables && n && !d.rotary)
        table_backward(s, row, n, dw, POSITION_EMBEDDING, s->position, s->model->config.max_position_embeddings);
}

static void embedding_backward(StreamBP *s) {
    GroupSums dw = grads_acquire(&s->memory, GROUP_EMBEDDING);
    tables_backward(s, 0, s->rows, dw);
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
    matrix_forward(s, w, s->model->model_offset[LM_HEAD] - group_begin(s->model, GROUP_HEAD), h.matrix, h.logits,
                   h.norm_out, NULL, NULL, c.n, d.C, d.V, d.logits_stride);
    Adapter adapter;
    if (outer_adapter(s, w, LM_HEAD, &adapter)) adapter_add(s, c, &adapter, d.C, d.logits_stride, h.logits, h.norm_out);
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
        Adapter adapter;
        const Linear linear = {LAYER_TENSORS, LAYER_TENSORS, d.C, d.V, LAYER_TENSORS, d.logits_stride};
        const int adapted = outer_adapter(s, w, LM_HEAD, &adapter);
        Stored *dh = adapted ? adapter_backward(s, c, *dw, &adapter, linear, dlogits, h.norm_out) : NULL;
        s->ops->linear_backward_input(dnorm_out, dlogits, h.matrix, c.n, d.C, d.V, d.logits_stride, 0);
        if (adapted) adapter_backward_input(s, c, &adapter, d.C, dnorm_out, dh);
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
        stop_poll(1); // a run that was asked to end may give its step up here
        const size_t layer_mark = push_layer_memory(s, l);
        GroupWeights w = weights_acquire(&s->memory, l);
        s->order->layer_forward(s, l, w);
        weights_release(&s->memory, l);
        arena_pop(s->arena, layer_mark);
    }
    layers_end(&s->memory);
    saved_attention_finish(s);
    inputs_await(s);
    arena_pop(s->arena, mark);
}

static void layers_backward(StreamBP *s) {
    const size_t mark = arena_mark(s->arena);
    saved_attention_begin(s);
    layers_begin(&s->memory, -1);
    inputs_begin(s);
    for (size_t i = layer_count(s); i-- > 0;) {
        size_t l = layer_at(s, i);
        stop_poll(1);
        restore_input(s, l); // x_l, where --inputs-every has not kept it
        const size_t layer_mark = push_layer_memory(s, l);
        GroupWeights w = weights_acquire(&s->memory, l);
        GroupSums dw = grads_acquire(&s->memory, l);
        s->order->layer_backward(s, l, w, dw);
        grads_release(&s->memory, l, dw);
        weights_release(&s->memory, l);
        arena_pop(s->arena, layer_mark);
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
    return s->order->forward_backward(s, batch, Z, last, metrics);
}

// ... layer by layer
static double layer_major_pass(StreamBP *s, const Batch *batch, double Z, int last, Metrics *metrics) {
    Shapes d = shapes_of(s->model);
    const Marks mark = marks_of(s->arena);
    Activations kept[2] = {{0}, {0}};
    sequence_begin(s, batch, Z, PASS_FORWARD);
    push_inputs(s);
    saved_attention_push(s);
    push_range_states(s, layers_of_kind(&s->model->config, LAYER_LINEAR));
    if (keeps_activations(s)) { // method full
        push_kept_activations(s, kept);
        s->kept = kept;
    }
    grads_begin(&s->memory, last);
    const size_t kv_mark = arena_mark(s->arena);
    if (keeps_activations(s)) push_key_value(s, d.L, s->N, layer_chunk(s), d.qk_norm);
    embedding_forward(s);
    layers_forward(s);
    head_forward_backward(s);
    sequence_end(s);
    const double loss = sequence_loss(s, metrics);
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

static const Order order_alone = {layer_forward, layer_backward, layer_major_pass};

// Log-probabilities alone, in host_sums: layer inputs are overwritten layer by layer, so memory does not grow with L.
// reference: of the model without its adapters, or as it was at the start
static void forward_logprobs(StreamBP *s, const Batch *batch, double Z, int reference) {
    const size_t mark = arena_mark(s->arena);
    if (reference) reference_swap(&s->memory);
    sequence_begin(s, batch, Z, PASS_FORWARD_ONLY);
    push_inputs(s);
    embedding_forward(s);
    layers_forward(s);
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
