/*
StreamBP: exact backpropagation in a fraction of the memory (arXiv 2506.03077).

The idea (section 3.1). Let Z = f(X, W) be a linear layer, an MLP, attention's projections or the head. Let Z_1, ...,
Z_D be chunks of its output along the tokens of the sequence. The gradient of the weights is a sum over chunks,

    dL/dW = sum_i (dZ_i/dW)^T dL/dZ_i

so a chunk's activations can be computed, used and dropped before the next chunk's exist. Nothing is approximated: the
sum has the same terms as in standard backpropagation, in another order. Attention joins the chunks, but causally: the
queries of chunk c see the keys of chunks <= c, so the keys and values of chunk c receive gradient from chunks >= c
alone. Backward therefore visits a layer's chunks last to first. dK[c], dV[c] are complete once chunk c's own queries
are done, so the same visit adds the gradient through K[c], V[c] to dx[c].

A layer is a mixer (attention) and an MLP: x_l -> y -> x_{l+1}. One buffer dx [N,C] holds dL/dx_{l+1}, then dL/dy, then
dL/dx_l. [c] means the rows of chunk c, tokens t0 to t1 - 1; [:t1] the rows of all tokens before t1. Forward visits
layers and chunks first to last and keeps only each layer's input. The head takes each chunk forward and backward at
once. Backward visits layers and chunks last to first and recomputes the activations:

    mixer_keys       x_l[c] -> K_l[c], V_l[c]
    mixer_forward    x_l[c], K_l[:t1], V_l[:t1] -> y[c]
    mlp_forward      y[c] -> x_{l+1}[c]
    head_backward    x_L[c] -> logits[c] -> log-probabilities; dlogits -> dx[c], over x_L[c]; dW +=
    mixer_begin      once a layer: x_l -> K_l, V_l of all tokens again; dK = dV = 0
    recompute        x_l[c] -> y[c] again, with the activations between them that are not kept
    mlp_backward     the MLP's activations again; dx[c] of x_{l+1} -> dx[c] of y, in place; dW +=
    mixer_backward   dx[c] of y -> dx[c] of x_l, in place; dK[:t1], dV[:t1] +=; dW +=
    input_done       x_l[c] is used up: with inputs off-device, starts loading x_{l-1}[c] over it
    drop             frees the chunk's activations: all memory is a stack, the arena, pushed and popped

The mixer may be linear attention, which passes a state from token to token in place of K and V. The state's gradient
passes back, so backward goes last to first here, too. It needs the state before each chunk: mixer_begin saves states at
intervals, mixer_restore recomputes the states between them (stream/linear_memory.h).

A method is an order of these steps and a choice of the tensors that stay in memory from forward to backward. n and m
are the tokens of a chunk of a layer and of the head:

    method      keeps of a layer   chunk   logits chunk
    full        every activation   N       N             standard backpropagation
    checkpoint  its input          N       N             gradient checkpointing
    stream      its input          n       m             StreamBP

Memory in bytes, besides weights, gradients and optimizer. N tokens, L layers, C hidden, Q = NH*HD, KV = NKV*HD, H = 2FF
(gate and up), V vocabulary; s bytes of a stored element, 4 of a sum (dW, dK, dV). A token's activations in a layer are
A = 3C + 2Q + H + FF elements: two norms and y, q and attention's output, gate and up, the activation. An MLP's
gradients overwrite its activations. The first term stays from forward to backward; max takes the larger of one layer's
backward and the head:

    full        N ((L+1) C + L A + 2 L KV) s  +  max(8 N KV, N (V + C) s)
    checkpoint  N (L+1) C s  +  max(N A s + 2 N KV (s + 4), N (V + C) s)
    stream      N (L+1) C s  +  max(n A s + 2 N KV (s + 4), m (V + C) s)

plus 20 N for the batch (token, target, position, weight, log-probability), and one chunk's workspace. dx lies where x_L
was: no second tensor of N x C exists. Only one layer's K, V, dK, dV exist at a time (full: K, V of all layers). With
layer inputs in host memory or on a disk, the device holds 2 N C s of them. With the input of every K-th layer kept,
inputs take N (L/K + K) C s (stream/inputs.h).

FLOPs of a pass. A layer's products have P = C Q + 2 C KV + Q C + C H + FF C parameters, its attention `pairs` query-key
pairs: N (N + 1) / 2 of one document:

    forward     F = 2 N (L P + C V) + 4 L Q pairs
    backward    B = 4 N (L P + C V) + 10 L Q pairs
    recompute   R = 2 N L (P - FF C) + 4 L Q pairs       all of a layer's forward except the last product

    full F + B; checkpoint and stream F + B + R for any chunk: backward projects K and V of all tokens once, not once
    per chunk. --keep attention saves attention's outputs, so R loses the 4 L Q pairs. --keep products saves outputs of
    products, too: R = 0. Between them lies a number of layers (layer/kept.h).

plan/flops.h counts FLOPs for layers of every family, plan/plan.h memory: a plan is this same code on op set "dry",
where each push on the arena counts. Linear layers include their adapters (stream/modules.h): with LoRA dW is the
adapters' gradient. Other orders of the same steps are in llmc/orders/: methods mst, seco and spaco, processes that
share a sequence, generation. orders.h chooses the order.
*/
#ifndef STREAMBP_H
#define STREAMBP_H
#include "llmc/layer/embedding.h"  // tokens to x_0, and back to the tables
#include "llmc/layer/head_loss.h"  // logits to log-probabilities, and to their gradient
#include "llmc/layer/mixer.h"      // the steps of a layer: its mixer, which joins the chunks, and its MLP
#include "llmc/stream/residency.h" // weights and gradients: acquire, prefetch, release

// ---- one layer, chunk by chunk --------------------------------------------------------------------------------------
// Runs mixer and MLP of the visited layer on chunk c, after its mixer_keys. Drops the activations that do not stay.
static void rest_forward(const Visit *v, Activations *a) {
    mixer_forward(v, a);
    mlp_forward(v, a);
    kept_store(v, a);
    drop(v, a);
}

static void layer_forward(Visit *v) {
    weights_prefetch(&v->s->memory, v->l);
    for (size_t i = 0; i < chunk_count(v->s); i++) {
        v->c = visit(v->s, chunk_at(v->s, i));
        Activations a = forward_activations(v);
        mixer_keys(v, &a);
        rest_forward(v, &a);
    }
}

// Runs the visited layer backward: dx of x_{l+1} -> dx of x_l. weights_prefetch starts loading the next layer's
// weights, unless they are on the device. visit makes c the current chunk. gradient_at points at dx[c].
static void layer_backward(Visit *v) {
    StreamBP *s = v->s;
    mixer_begin(v); // K, V of all tokens again; dK = dV = 0
    weights_prefetch(&s->memory, v->l);
    for (size_t i = chunk_count(s); i-- > 0;) { // last to first: chunks before c give nothing to dK[c], dV[c]
        mixer_restore(v, i);                    // linear attention: the state before chunk i
        v->c = visit(s, chunk_at(s, i));
        Stored *dx = gradient_at(s, v->c.row);
        Activations a = recompute(v);
        mlp_backward(v, &a, dx);
        mixer_backward(v, &a, dx);
        input_done(s, v->l, v->c); // x_l[c] is used up: off-device inputs load x_{l-1}[c] over it
        drop(v, &a);
    }
}

static const LayerLoops stream_loops = {layer_forward, layer_backward};

// ---- the embedding --------------------------------------------------------------------------------------------------
static void embedding_forward(StreamBP *s) {
    GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    for (size_t i = 0; i < chunk_count(s); i++) embedding_step(s, visit(s, chunk_at(s, i)), w);
    weights_release(&s->memory, GROUP_EMBEDDING);
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
    Stored *logits;                 // [n,V], rows logits_stride apart; backward: overwritten by their gradient
    Adapter adapter;
    int adapted; // 1: the head has an adapter
} HeadActivations;

// Computes logits[c] from x_L[c], and pushes them. v: visit of chunk c with the head's weights
static HeadActivations head_logits(const Visit *v) {
    const StreamBP *s = v->s;
    Shapes d = shapes_of(s->model);
    HeadActivations h;
    const size_t bias = s->model->model_offset[FINAL_NORM_BIAS];
    h.norm = (const Stored *)v->w.weights;
    h.norm_bias = bias == ABSENT ? NULL : (const Stored *)at(v->w.weights, d.C, d.stored);
    h.matrix = (const Stored *)v->w.matrix;
    h.norm_out = push_stored(s, SHARE_LOGITS, "final norm", v->c.n * d.C);
    h.logits = push_stored(s, SHARE_LOGITS, "logits", v->c.n * d.logits_stride);
    s->ops->norm_forward(h.norm_out, layer_input(s, d.L, v->c.row), h.norm, h.norm_bias, NULL, v->c.n, d.C, norm_of(s));
    matrix_forward(v, s->model->model_offset[LM_HEAD] - group_begin(s->model, GROUP_HEAD), h.matrix, h.logits,
                   h.norm_out, NULL, NULL, d.C, d.V, d.logits_stride);
    h.adapted = outer_adapter(s, v->w, LM_HEAD, &h.adapter);
    if (h.adapted) adapter_forward(v, &h.adapter, d.C, d.logits_stride, h.logits, h.norm_out, h.logits);
    return h;
}

// Runs the head backward: dlogits[c] -> dx[c], which overwrites x_L[c]; dW of matrix or adapter, and of the norm, +=
static void logits_backward(const Visit *v, const HeadActivations *h) {
    const StreamBP *s = v->s;
    const Shapes d = shapes_of(s->model);
    const Linear linear = {LAYER_TENSORS, LAYER_TENSORS, d.C, d.V, LAYER_TENSORS, d.logits_stride};
    Stored *x = gradient_at(s, v->c.row), *dlogits = h->logits, *dnorm_out = h->norm_out;
    Summed *dnorm_bias = v->dw.norm && h->norm_bias ? summed_row(s, v->dw.norm, 1, d.C) : NULL;
    if (v->dw.head)
        s->ops->linear_backward_weight(v->dw.head, NULL, dlogits, h->norm_out, v->c.n, d.C, d.V, d.logits_stride);
    Stored *dh = h->adapted ? adapter_backward(v, &h->adapter, linear, dlogits, h->norm_out) : NULL;
    s->ops->linear_backward_input(dnorm_out, dlogits, h->matrix, v->c.n, d.C, d.V, d.logits_stride, 0);
    if (h->adapted) adapter_backward_input(v, &h->adapter, d.C, dnorm_out, dh, 1);
    norm_rows_backward(s, x, v->dw.norm, dnorm_bias, dnorm_out, x, h->norm, v->c.n, d.C, 0);
}

// Computes log-probabilities of chunk c's targets from x_L[c].
static void head_forward(const Visit *v) {
    const size_t mark = arena_mark(v->s->arena);
    const HeadActivations h = head_logits(v);
    head_loss(v, h.logits, 0);
    arena_pop(v->s->arena, mark);
}

/*
Runs the head on chunk c, forward and backward. An objective (llmc/data/objective.h) gives a weight per token:
dlogits = weight / temperature * (onehot - softmax). The weights of sft are known before the head runs. The weights of
grpo and ppo follow from the chunk's own log-probabilities, in the same visit. The weights of pairs and gspo need the
log-probabilities of the whole sequence, so the head runs forward twice.
*/
static void head_backward(const Visit *v) {
    const StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena);
    const HeadActivations h = head_logits(v);
    if (objective_weights_wait(&s->setup->objective) == WEIGHTS_BY_TOKEN) {
        head_loss(v, h.logits, 0);
        sequence_chunk_weights(s, v->c);
    }
    head_loss(v, h.logits, 1); // dlogits overwrite the logits
    logits_backward(v, &h);
    arena_pop(s->arena, mark);
}

// Runs a step of the head on all logits chunks.
static void head_steps(Visit *v, void (*step)(const Visit *v)) {
    for (size_t i = 0; i < logits_chunk_count(v->s); i++) {
        v->c = visit(v->s, logits_chunk_at(v->s, i));
        step(v);
    }
}

static void head_forward_backward(StreamBP *s) {
    Visit v = {0};
    v.s = s, v.w = weights_acquire(&s->memory, GROUP_HEAD), v.dw = grads_acquire(&s->memory, GROUP_HEAD);
    if (objective_weights_wait(&s->setup->objective) == WEIGHTS_BY_SEQUENCE) {
        head_steps(&v, head_forward);
        host_collect(s, s->now.host_sums, s->now.logp);
        sequence_weights(s);
    }
    head_steps(&v, head_backward);
    grads_release(&s->memory, GROUP_HEAD, v.dw);
    weights_release(&s->memory, GROUP_HEAD);
}

// ---- all layers -----------------------------------------------------------------------------------------------------
// Runs the visited layer forward on all chunks: x_l -> x_{l+1}.
static void visit_forward(Visit *v) {
    Residency *memory = &v->s->memory;
    const size_t mark = push_layer_memory(v);
    v->w = weights_acquire(memory, v->l);
    v->s->loops->forward(v);
    weights_release(memory, v->l);
    pop_layer_memory(v, mark);
}

static void layers_forward(StreamBP *s) {
    const size_t mark = walk_begin(s, 1);
    for (Visit v = first_layer(s); v.layer; next_layer(&v)) {
        stop_poll(1); // a run that was asked to end may give up its step here
        visit_forward(&v);
    }
    walk_end(s, mark);
}

// Makes x_l available to backward: if --inputs-every has not kept x_l, reruns forward from the last kept input, in a
// walk first to last. It fills the inputs between, too. backward_again turns the walk back to backward's layer.
static void restore_input(const Visit *v) {
    for (Visit missing = first_missing(v); missing.layer; next_layer(&missing)) visit_forward(&missing);
    backward_again(v);
}

static void layers_backward(StreamBP *s) {
    const size_t mark = walk_begin(s, -1);
    inputs_begin(s);
    for (Visit v = first_layer(s); v.layer; next_layer(&v)) {
        stop_poll(1);
        restore_input(&v);
        const size_t layer_mark = push_layer_memory(&v);
        v.w = weights_acquire(&s->memory, v.l), v.dw = grads_acquire(&s->memory, v.l);
        s->loops->backward(&v);
        grads_release(&s->memory, v.l, v.dw);
        weights_release(&s->memory, v.l);
        pop_layer_memory(&v, layer_mark);
    }
    walk_end(s, mark);
}

// ---- one sequence through the model ---------------------------------------------------------------------------------
// Runs a micro-batch forward and backward, layer by layer (forward_backward of orders.h). Z: the loss denominator;
// last: the step's last micro-batch.
static double layer_major_pass(StreamBP *s, const Batch *batch, double Z, int last, Metrics *metrics) {
    const Marks mark = marks_of(s->arena);
    sequence_begin(s, batch, Z, PASS_FORWARD);
    push_inputs(s);
    push_saved(s);
    grads_begin(&s->memory, last);
    embedding_forward(s);
    layers_forward(s);
    head_forward_backward(s);
    sequence_end(s);
    const double loss = sequence_loss(s, metrics);
    s->now.pass = PASS_BACKWARD;
    layers_backward(s);
    embedding_backward(s);
    grads_end(&s->memory);
    marks_pop(s->arena, mark);
    return loss;
}

// Computes log-probabilities alone, into host_sums. Layer inputs are overwritten layer by layer, so memory does not
// grow with L. reference: by the model without its adapters, or with its initial weights
static void forward_logprobs(StreamBP *s, const Batch *batch, double Z, int reference) {
    const size_t mark = arena_mark(s->arena);
    Visit head = {0};
    if (reference) reference_swap(&s->memory);
    sequence_begin(s, batch, Z, PASS_FORWARD_ONLY);
    push_inputs(s);
    embedding_forward(s);
    layers_forward(s);
    head.s = s, head.w = weights_acquire(&s->memory, GROUP_HEAD);
    head_steps(&head, head_forward);
    weights_release(&s->memory, GROUP_HEAD);
    sequence_end(s);
    if (reference) reference_swap(&s->memory);
    arena_pop(s->arena, mark);
}

// Runs a micro-batch forward alone and returns its loss.
static double forward_only(StreamBP *s, const Batch *batch, double Z, Metrics *metrics) {
    forward_logprobs(s, batch, Z, 0);
    return sequence_loss(s, metrics);
}

// Computes out[N], the log-probabilities of the batch's targets by the model, or by the reference.
static void forward_policy(StreamBP *s, const Batch *batch, int reference, float *out) {
    const DType type = dtype_of_sums(s->model->dtype);
    forward_logprobs(s, batch, 1, reference);
    for (size_t t = 0; t < batch->N; t++) out[t] = (float)value_at(s->now.host_sums, type, t);
}

#endif
