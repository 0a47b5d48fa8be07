/*
StreamBP: exact backpropagation in a fraction of the memory (arXiv 2506.03077).

The idea (section 3.1). Let Z = f(X, W) be a linear layer, an MLP, attention's projections or the head. Let Z_1, ...,
Z_D be chunks of its output along the tokens of the sequence. The gradient of the weights is a sum over chunks,

    dL/dW = sum_i (dZ_i/dW)^T dL/dZ_i

so a chunk's activations can be computed, used and dropped before the next chunk's exist. Nothing is approximated: the
terms are those of standard backpropagation, in another order. Attention joins the chunks, but causally: the queries of
chunk c see the keys of chunks <= c, so the keys and values of chunk c receive gradient from chunks >= c alone. Backward
therefore visits a layer's chunks last to first. dK[c], dV[c] are complete once chunk c's own queries are done, so the
same visit takes them on to dx[c].

A layer is a mixer and an MLP: x_l -> y -> x_{l+1}. One buffer dx holds dL/dx_{l+1}, then dL/dy, then dL/dx_l. For a
layer l and a chunk c of tokens [t0, t1) the steps are

    mixer_keys(l, c)       x_l[c] -> K_l[c], V_l[c]
    mixer_forward(l, c)    x_l[c], K_l[:t1], V_l[:t1] -> y[c]
    mlp_forward(l, c)      y[c] -> x_{l+1}[c]
    head_step(c)           x_L[c] -> logits[c] -> log-probabilities; dlogits -> dx[c], over x_L[c]; dW +=
    mixer_begin(l)         K_l, V_l of all tokens again; dK = dV = 0
    recompute(l, c)        x_l[c] -> y[c] again, with the activations between them
    mlp_backward(l, c)     the MLP's activations again; dx[c] of x_{l+1} -> dx[c] of y, in place; dW +=
    mixer_backward(l, c)   dx[c] of y -> dx[c] of x_l, in place; dK[:t1], dV[:t1] +=; dW +=

In a layer of linear attention (Gated DeltaNet) a state S, [DK,DV] for each head, joins the chunks in place of K and V.
S passes from token to token and its gradient passes back, so last to first is the order here, too. Backward needs S
before each chunk: mixer_begin keeps it at intervals, mixer_restore recomputes those between.

A method is an order of these steps and a choice of what stays in memory from forward to backward:

    method      keeps of a layer   chunk   logits chunk
    full        every activation   N       N             standard backpropagation
    checkpoint  its input          N       N             gradient checkpointing
    stream      its input          n       m             StreamBP

Memory in bytes, beside weights, gradients and optimizer. N tokens, L layers, C hidden, Q = NH*HD, KV = NKV*HD, H = 2 FF
(gate and up), V vocabulary; s bytes of a stored element, 4 of a sum (dW, dK, dV). A token's activations in a layer are
A = 3C + 2Q + H + FF elements: two norms and y, q and attention's output, gate and up, the activation. QK-norm adds Q,
a gate of attention 2Q, each norm after a branch C; each missing norm before one saves C. NH log-sum-exps are left out.

    full        N ((L+1) C + L A + 2 L KV) s  +  max(8 N KV, N (V + C) s)
    checkpoint  N (L+1) C s  +  max(N A s + 2 N KV (s + 4), N (V + C) s)
    stream      N (L+1) C s  +  max(n A s + 2 N KV (s + 4), m (V + C) s)

plus 20 N for the batch (token, target, position, weight, log-probability), and one chunk's workspace. dx lies where x_L
was: no second tensor of N x C exists. K, V, dK, dV are one layer's. Layer inputs in host memory or on a disk leave
2 N C s of them on the device; with the input of every K-th layer kept they take N (L/K + K) C s (stream/inputs.h).

FLOPs of a pass, exactly as `train plan` counts them. P = C Q + 2 C KV + Q C + C H + FF C parameters in a layer's
products, `pairs` query-key pairs of a layer:

    forward     F = 2 N (L P + C V) + 4 L Q pairs
    backward    B = 4 N (L P + C V) + 10 L Q pairs
    recompute   R = 2 N L (P - FF C) + 4 L Q pairs       all of a layer's forward except the last product
                    (+ 2 N L C KV with QK-norm, whose backward needs K before the norm)

    full F + B; checkpoint and stream F + B + R, whatever the chunk: K and V are projected once per pass, never once per
    chunk over the prefix. --keep attention saves attention's outputs and spares the 4 L Q pairs of R.

A layer of linear attention projects E = 2 HK DK + 2 HV DV + 2 HV elements, of which W = 2 HK DK + HV DV go through a
convolution: A = 3C + E + W + 2 HV DV + H + FF and P = C E + HV DV C + C H + FF C. The delta rule's FLOPs (delta_flops
in ops.h) replace those of pairs. N / max(n, 1024) states of HV DK DV sums replace K, V, dK, dV, in the same memory. For
these states method stream repeats 2 N C (W + 2 HV) FLOPs of projections, and the delta rule.

Every tensor is pushed on the arena where it is needed and popped where it dies. The steps never look inside a tensor: a
plan is this same code on op set "dry" (llmc/plan/plan.h). There visit and visit_layer make one chunk or layer count for
all of its shape. Linear layers include their adapters (stream/modules.h): with LoRA dW is that of the adapters. Other
orders of the same steps are in llmc/orders/: methods mst, seco and spaco, processes that share a sequence, generation.
orders.h chooses.
*/
#ifndef STREAMBP_H
#define STREAMBP_H
#include "llmc/layer/mixer.h"      // attention or linear attention: what joins the chunks of a layer
#include "llmc/layer/mlp.h"        // the MLP
#include "llmc/stream/residency.h" // weights and gradients: acquire, prefetch, release

// ---- one layer, chunk by chunk --------------------------------------------------------------------------------------
// Runs mixer and MLP of layer l on chunk c, after its mixer_keys. Drops the activations.
static void rest_forward(StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    mixer_forward(s, l, c, w, a);
    mlp_forward(s, l, c, w, a);
    drop(s, a);
}

static void layer_forward(StreamBP *s, size_t l, GroupWeights w) {
    weights_prefetch(&s->memory, l);
    for (size_t i = 0; i < chunk_count(s); i++) {
        const Chunk c = visit(s, chunk_at(s, i));
        Activations a = forward_activations(s, l, c, w);
        mixer_keys(s, l, c, w, &a);
        rest_forward(s, l, c, w, &a);
    }
}

static void layer_backward(StreamBP *s, size_t l, GroupWeights w, GroupSums dw) {
    mixer_begin(s, l, w); // K, V of all tokens again; dK = dV = 0
    weights_prefetch(&s->memory, l);
    for (size_t i = chunk_count(s); i-- > 0;) { // last to first: chunks before c give nothing to dK[c], dV[c]
        mixer_restore(s, l, w, i);              // linear attention: the state before chunk i
        const Chunk c = visit(s, chunk_at(s, i));
        Stored *dx = layer_input(s, s->model->config.num_hidden_layers, c.row); // where x_L was
        Activations a = recompute(s, l, c, w);
        mlp_backward(s, l, c, w, dw, &a, dx);
        mixer_backward(s, l, c, w, dw, &a, dx);
        input_done(s, l, c); // x_l[c] was used last: with inputs off-device x_{l-1}[c] loads over it
        drop(s, &a);
    }
}

static const LayerLoops stream_loops = {layer_forward, layer_backward};

// ---- the embedding --------------------------------------------------------------------------------------------------
// tokens, positions -> x_0[c]
static void embedding_step(StreamBP *s, Chunk c, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    size_t position = s->model->model_offset[POSITION_EMBEDDING];
    const Stored *wpe = position == ABSENT ? NULL : (const Stored *)at(w.weights, position, d.stored);
    s->ops->embedding_forward(layer_input(s, 0, c.row), s->now.tokens + c.row, s->now.position + c.row,
                              (const Stored *)w.weights, wpe, c.n, d.C, d.embedding_scale);
    embedding_adapter_forward(s, layer_input(s, 0, c.row), c.row, c.n, w);
    input_save(s, 0, c);
}

static void embedding_forward(StreamBP *s) {
    GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    for (size_t i = 0; i < chunk_count(s); i++) embedding_step(s, visit(s, chunk_at(s, i)), w);
    weights_release(&s->memory, GROUP_EMBEDDING);
}

// dw[index[t],:] += scale dx[t,:] for t in [row, row + n). index: tokens or positions; dw [table_rows,C]
static void table_backward(const StreamBP *s, size_t row, size_t n, GroupSums dw, ModelTensor table,
                           const int32_t *index, size_t table_rows) {
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

// dx of x_0, rows [row, row + n) -> gradients of the tables and of the embedding's adapter
static void tables_backward(StreamBP *s, size_t row, size_t n, GroupSums dw) {
    Shapes d = shapes_of(s->model);
    embedding_adapter_backward(s, layer_input(s, d.L, row), row, n, dw);
    if (dw.tables && n) table_backward(s, row, n, dw, EMBEDDING, s->now.tokens, d.V);
    if (dw.tables && n && s->model->model_offset[POSITION_EMBEDDING] != ABSENT)
        table_backward(s, row, n, dw, POSITION_EMBEDDING, s->now.position, s->model->config.max_position_embeddings);
}

static void embedding_backward(StreamBP *s) {
    GroupSums dw = grads_acquire(&s->memory, GROUP_EMBEDDING);
    tables_backward(s, 0, s->now.rows, dw);
    grads_release(&s->memory, GROUP_EMBEDDING, dw);
}

// ---- the head (section 3.2.1): the logits of one chunk exist at a time -------------------------------------------
typedef struct {
    const Stored *norm, *norm_bias; // [C] the final norm; norm_bias NULL with RMSNorm
    const Stored *matrix;           // [V,C]
    Stored *norm_out;               // [n,C]
    Stored *logits;                 // [n,V], rows logits_stride apart
} HeadActivations;

// x_L[c] -> logits[c], pushed
static HeadActivations head_forward(const StreamBP *s, Chunk c, GroupWeights w) {
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
Computes the log-probabilities of chunk c's targets. With dw also the head's dW, and dx[c], which overwrites x_L[c].

An objective (llmc/data/objective.h) is a weight per token: dlogits = weight / temperature * (onehot - softmax). Weights
of sft are known before the head runs. Weights of grpo and ppo follow from the chunk's own log-probabilities, in the
same visit. Weights of pairs and gspo need the log-probabilities of the whole sequence, so the head runs forward twice.
*/
static void head_step(const StreamBP *s, Chunk c, GroupWeights w, const GroupSums *dw) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    const int by_token = objective_weights_wait(&s->setup->objective) == WEIGHTS_BY_TOKEN;
    HeadActivations h = head_forward(s, c, w);
    const int32_t *targets = s->now.targets + c.row;
    Summed *logp = summed_row(s, s->now.logp, c.row, 1);
    Summed *entropy = s->now.entropy ? summed_row(s, s->now.entropy, c.row, 1) : NULL;
    if (!dw || by_token)
        s->ops->logprob(logp, entropy, h.logits, targets, NULL, c.n, d.V, d.logits_stride,
                        s->setup->objective.temperature);
    if (dw) {
        Stored *x = layer_input(s, d.L, c.row), *dlogits = h.logits, *dnorm_out = h.norm_out;
        Summed *dnorm_bias = dw->norm && h.norm_bias ? summed_row(s, dw->norm, 1, d.C) : NULL;
        if (by_token) sequence_chunk_weights(s, c);
        s->ops->logprob(logp, NULL, dlogits, targets, summed_row(s, s->now.token_weight, c.row, 1), c.n, d.V,
                        d.logits_stride, s->setup->objective.temperature);
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
    for (size_t i = 0; i < logits_chunk_count(s); i++) head_step(s, visit(s, logits_chunk_at(s, i)), w, NULL);
}

static void head_forward_backward(StreamBP *s) {
    GroupWeights w = weights_acquire(&s->memory, GROUP_HEAD);
    GroupSums dw = grads_acquire(&s->memory, GROUP_HEAD);
    if (objective_weights_wait(&s->setup->objective) == WEIGHTS_BY_SEQUENCE) {
        head_logprobs(s, w);
        host_collect(s, s->now.host_sums, s->now.logp);
        sequence_weights(s);
    }
    for (size_t i = 0; i < logits_chunk_count(s); i++) head_step(s, visit(s, logits_chunk_at(s, i)), w, &dw);
    grads_release(&s->memory, GROUP_HEAD, dw);
    weights_release(&s->memory, GROUP_HEAD);
}

// ---- all layers -----------------------------------------------------------------------------------------------------
static void layers_forward(StreamBP *s) {
    const size_t mark = arena_mark(s->arena);
    saved_attention_begin(s);
    layers_begin(&s->memory, 1);
    for (size_t i = 0; i < layer_count(s); i++) {
        const size_t l = visit_layer(s, layer_at(s, i));
        stop_poll(1); // a run that was asked to end may give its step up here
        const size_t layer_mark = push_layer_memory(s, l);
        GroupWeights w = weights_acquire(&s->memory, l);
        s->loops->forward(s, l, w);
        weights_release(&s->memory, l);
        arena_pop(s->arena, layer_mark);
    }
    layers_end(&s->memory);
    saved_attention_finish(s);
    inputs_await(s);
    arena_pop(s->arena, mark);
}

// Makes x_l available to backward. If it was not kept, reruns forward from the last saved input to layer l, once per
// group of K layers. The dry run reruns l once and counts it for all missing layers like it.
static void restore_input(StreamBP *s, size_t l) {
    const Config *config = &s->model->config;
    const size_t every = s->memory.every;
    const double repeat = s->memory.layers_repeat;
    Range missing = {l / every * every, input_is_last(s, l) ? l % every : 0};
    inputs_await(s);
    if (s->setup->dry) {
        size_t layers = 0; // like l
        for (size_t i = 0; i < config->num_hidden_layers; i++)
            layers += layer_like(&s->memory, i) == l && !input_is_last(s, i);
        missing.begin = l, missing.count = layers > 0;
        s->memory.layers_repeat = (double)layers;
    }
    if (missing.count) s->now.pass = PASS_RESTORE, s->memory.step = 1;
    for (size_t i = missing.begin; i < missing.begin + missing.count; i++) {
        const size_t mark = push_layer_memory(s, i);
        GroupWeights w = weights_acquire(&s->memory, i);
        s->loops->forward(s, i, w);
        weights_release(&s->memory, i);
        arena_pop(s->arena, mark);
    }
    inputs_await(s);
    s->now.pass = PASS_BACKWARD, s->memory.step = -1;
    s->memory.layers_repeat = repeat;
}

static void layers_backward(StreamBP *s) {
    const size_t mark = arena_mark(s->arena);
    saved_attention_begin(s);
    layers_begin(&s->memory, -1);
    inputs_begin(s);
    for (size_t i = layer_count(s); i-- > 0;) {
        const size_t l = visit_layer(s, layer_at(s, i));
        stop_poll(1);
        restore_input(s, l); // x_l, where --inputs-every has not kept it
        const size_t layer_mark = push_layer_memory(s, l);
        GroupWeights w = weights_acquire(&s->memory, l);
        GroupSums dw = grads_acquire(&s->memory, l);
        s->loops->backward(s, l, w, dw);
        grads_release(&s->memory, l, dw);
        weights_release(&s->memory, l);
        arena_pop(s->arena, layer_mark);
    }
    layers_end(&s->memory);
    saved_attention_finish(s);
    arena_pop(s->arena, mark);
}

// ---- one sequence through the model ---------------------------------------------------------------------------------
// Runs a micro-batch forward and backward, layer by layer (forward_backward of orders.h). Z: the loss denominator;
// last: of the step's micro-batches.
static double layer_major_pass(StreamBP *s, const Batch *batch, double Z, int last, Metrics *metrics) {
    const Marks mark = marks_of(s->arena);
    Activations kept = {0};
    sequence_begin(s, batch, Z, PASS_FORWARD);
    push_inputs(s);
    push_saved_mixers(s);
    if (keeps_activations(s)) { // method full
        push_kept_activations(s, &kept);
        s->kept = &kept;
    }
    grads_begin(&s->memory, last);
    const size_t kv_mark = arena_mark(s->arena);
    if (keeps_activations(s)) push_kept_keys(s);
    embedding_forward(s);
    layers_forward(s);
    head_forward_backward(s);
    sequence_end(s);
    const double loss = sequence_loss(s, metrics);
    s->now.pass = PASS_BACKWARD;
    layers_backward(s);
    arena_pop(s->arena, kv_mark);
    saved_attention_pop(s);
    embedding_backward(s);
    grads_end(&s->memory);
    s->kept = NULL;
    marks_pop(s->arena, mark);
    return loss;
}

// Computes log-probabilities alone, into host_sums. Layer inputs are overwritten layer by layer, so memory does not
// grow with L. reference: under the model without its adapters, or as it was at the start
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

// Returns the loss alone.
static double forward_only(StreamBP *s, const Batch *batch, double Z, Metrics *metrics) {
    forward_logprobs(s, batch, Z, 0);
    return sequence_loss(s, metrics);
}

// out[N] = log-probabilities of the targets under the model, or under the reference
static void forward_policy(StreamBP *s, const Batch *batch, int reference, float *out) {
    const DType type = dtype_of_sums(s->model->dtype);
    forward_logprobs(s, batch, 1, reference);
    for (size_t t = 0; t < batch->N; t++) out[t] = (float)value_at(s->now.host_sums, type, t);
}

#endif
