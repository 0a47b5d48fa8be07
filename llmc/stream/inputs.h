/*
Layer inputs: x_l of each layer l stays from forward to backward. dx overwrites x_L.

    kept on the device   [L+1,rows,C], x_L last
    off-device           all layers overwrite one x [rows,C] on the device, in place. The store of x_l[c] starts when
                         x_l[c] is computed, and ends before layer l overwrites x_l[c]. In backward a second buffer
                         holds x_l of the current layer. Chunk by chunk the next layer's input is loaded over it. Each
                         element moves once each way.

Some models give each layer an input of its own, made from x_0 (layer/own_input.h). Then x_0 and its gradient through
these inputs stay on the device as well.

--inputs-every K keeps the input of every K-th layer. Before backward visits another layer, forward reruns from the last
kept input and fills K-1 more inputs: L/K + K-1 in place of L.
*/
#ifndef LLMC_INPUTS_H
#define LLMC_INPUTS_H
#include "sequence.h"

static int inputs_off_device(const StreamBP *s) {
    return is_off_device(&s->memory, PLACED_INPUTS) && s->now.pass >= PASS_FORWARD &&
           !method_is_chunk_major(s->setup->method);
}

static int input_is_kept(const StreamBP *s, size_t l) { return l % s->memory.every == 0; }

// Return the number of kept inputs, and of inputs that backward recomputes and holds at one time.
static size_t inputs_kept(const StreamBP *s) {
    return (s->model->config.num_hidden_layers + s->memory.every - 1) / s->memory.every;
}

static size_t inputs_restored(const StreamBP *s) {
    return min_size(s->memory.every, s->model->config.num_hidden_layers) - 1;
}

// Tells whether the input after x_l is a kept one, or l is the last layer.
static int input_is_last(const StreamBP *s, size_t l) {
    return (l + 1) % s->memory.every == 0 || l + 1 == s->model->config.num_hidden_layers;
}

// Returns the number of restored inputs, over all layers, that backward does not need at once.
static size_t inputs_stored_again(const StreamBP *s) {
    const size_t L = s->model->config.num_hidden_layers, every = s->memory.every, rest = L % every;
    return L / every * (max_size(every, 2) - 2) + max_size(rest, 2) - 2;
}

// Returns layer l's input in Inputs.kept, from row `row` on.
static Stored *kept_input(const StreamBP *s, size_t l, size_t row) {
    const size_t within = l % s->memory.every, slot = within ? inputs_kept(s) + within - 1 : l / s->memory.every;
    return stored_row(s, s->inputs.kept, slot * s->now.rows + row, s->model->config.hidden_size);
}

// ---- room -----------------------------------------------------------------------------------------------------------
// Tells whether a trained tensor needs the gradient of x_0.
static int first_input_trains(const StreamBP *s) {
    return s->now.pass >= PASS_FORWARD && (!s->memory.lora || lora_trains_embedding(s->memory.lora));
}

// Pushes x_0, and if needed its gradient, set to 0.
static void push_first_input(StreamBP *s) {
    const size_t count = s->now.rows * s->model->config.hidden_size, P = s->model->config.hidden_size_per_layer_input;
    Inputs *in = &s->inputs;
    if (!P) return;
    in->first = push_stored(s, SHARE_LAYER_INPUTS, "embeddings", count);
    in->norm = push_stored(s, SHARE_LAYER_INPUTS, "norm of the layers' own inputs", P);
    if (!first_input_trains(s)) return;
    in->dfirst = push_stored(s, SHARE_LAYER_INPUTS, "gradient of embeddings", count);
    in->dnorm = push_summed(s, SHARE_LAYER_INPUTS, "gradient of the norm of the layers' own inputs", P);
    s->ops->zero(in->dfirst, count * dtype_size(s->model->dtype));
    s->ops->zero(in->dnorm, P * dtype_size(dtype_of_sums(s->model->dtype)));
}

static void push_inputs(StreamBP *s) {
    const size_t C = s->model->config.hidden_size, count = s->now.rows * C, size = dtype_size(s->model->dtype);
    const size_t layers = s->now.pass == PASS_FORWARD_ONLY ? 0 : inputs_kept(s) + inputs_restored(s);
    const Inputs none = {0};
    s->inputs = none;
    push_first_input(s);
    if (!layers || inputs_off_device(s)) s->inputs.x = push_stored(s, SHARE_LAYER_INPUTS, "layer input", count);
    if (!layers) return;
    Arena *memory = inputs_off_device(s) ? memory_of(&s->memory, PLACED_INPUTS) : s->arena;
    s->inputs.kept = (Stored *)arena_push(memory, SHARE_LAYER_INPUTS, "layer inputs",
                                          (layers + !inputs_off_device(s)) * count, size);
    if (!inputs_off_device(s)) s->inputs.x = stored_row(s, s->inputs.kept, layers * s->now.rows, C);
}

// Keeps x_0[n,C] of rows [row, row + n), and the norm's weight, from the embedding's group.
static void first_input_keep(const StreamBP *s, const Stored *x, size_t row, size_t n, GroupWeights w) {
    const Shapes d = shapes_of(s->model);
    if (!s->inputs.first) return;
    s->ops->copy(stored_row(s, s->inputs.first, row - s->inputs.begin, d.C), x, n * d.C * d.stored);
    s->ops->copy(s->inputs.norm, at(w.base, s->model->model_offset[INPUTS_NORM], d.stored), d.P * d.stored);
}

// ---- where an input is ----------------------------------------------------------------------------------------------
// Returns the device memory of x_l, from row `row` on. In backward layer_input of x_L is dx.
static Stored *layer_input(const StreamBP *s, size_t l, size_t row) {
    const size_t C = s->model->config.hidden_size;
    const int forward = s->now.pass <= PASS_FORWARD, last = l == s->model->config.num_hidden_layers;
    row -= s->inputs.begin;
    if (last || s->now.pass < PASS_FORWARD) return stored_row(s, s->inputs.x, row, C);
    if (inputs_off_device(s)) return stored_row(s, forward ? s->inputs.x : s->inputs.layer, row, C);
    return forward && !input_is_kept(s, l) ? stored_row(s, s->inputs.x, row, C) : kept_input(s, l, row);
}

// Returns dx, which lies where x_L was, from row `row` on.
static Stored *gradient_at(const StreamBP *s, size_t row) {
    return layer_input(s, s->model->config.num_hidden_layers, row);
}

// Adds the gradient through the layers' own inputs to dx of x_0, rows [row, row + n), and to dW of their norm. Sets
// both sums back to 0, for another chunk.
static void first_input_backward(const StreamBP *s, size_t row, size_t n, GroupSums dw) {
    const Shapes d = shapes_of(s->model);
    const Inputs *in = &s->inputs;
    if (!in->dfirst) return;
    Stored *dfirst = stored_row(s, in->dfirst, row - in->begin, d.C);
    s->ops->dropout(layer_input(s, d.L, row), dfirst, n, d.C, 0, 0, 0, 1); // dx += dfirst: rate 0 drops nothing
    s->ops->zero(dfirst, n * d.C * d.stored);
    if (!dw.tables || s->memory.lora) return;
    s->ops->gradient_add(at(dw.tables, s->model->model_offset[INPUTS_NORM], dtype_size(dw.tables_type)), dw.tables_type,
                         in->dnorm, d.P);
    s->ops->zero(in->dnorm, d.P * d.summed);
}

// Returns the memory to compute x_l[c] into. Off-device it holds x_{l-1}[c], whose store is awaited first.
static Stored *layer_output(const StreamBP *s, size_t l, Chunk c) {
    page_finish(s->ops, &s->inputs.slot[c.index % INPUT_SLOTS]);
    return layer_input(s, l, c.row);
}

// ---- in flight ------------------------------------------------------------------------------------------------------
// Starts loading (`in`) or storing x_l[c]. mean: transfers of a layer on average, by which the dry run counts bytes
static void input_move(StreamBP *s, size_t l, Chunk c, int in, double mean) {
    Residency *r = &s->memory;
    const size_t bytes = c.n * r->model->config.hidden_size * dtype_size(r->model->dtype);
    page_move(chunk_pager(r, PLACED_INPUTS, mean), &s->inputs.slot[in ? 0 : c.index % INPUT_SLOTS], in,
              layer_input(s, l, c.row), kept_input(s, s->memory.walk.dry ? 0 : l, c.row), bytes);
}

// Starts storing x_l[c] after it was computed. A recomputed input that backward reads next is not stored: it stays.
static void input_save(StreamBP *s, size_t l, Chunk c) {
    const size_t L = s->model->config.num_hidden_layers, kept = inputs_kept(s);
    const int forward = s->now.pass == PASS_FORWARD;
    const int wanted = forward ? input_is_kept(s, l) && l < L : !input_is_last(s, l);
    if (s->memory.hook.context) s->memory.hook.chunk(&s->memory);
    if (!inputs_off_device(s) || (!wanted && walk_is_in_order(&s->memory.walk))) return;
    const double mean = !forward ? (double)inputs_stored_again(s) / (double)(L - kept)
                        : l      ? (double)(kept - 1) / (double)L
                                 : 1;
    if (mean > 0) input_move(s, l, c, 0, mean); // mean 0: the dry run stores nothing
}

static void inputs_await(const StreamBP *s) {
    for (size_t i = 0; i < INPUT_SLOTS; i++) page_finish(s->ops, &s->inputs.slot[i]);
    page_await(s->ops, &s->inputs.slot[0]);
}

// Pushes backward's buffer for x_l, and starts loading the input that backward needs first.
static void inputs_begin(StreamBP *s) {
    const size_t L = s->model->config.num_hidden_layers;
    if (!inputs_off_device(s)) return;
    s->inputs.layer =
        push_stored(s, SHARE_LAYER_INPUTS, "one layer's input", s->now.rows * s->model->config.hidden_size);
    for (size_t i = 0; i < chunk_count(s); i++)
        input_move(s, (L - 1) / s->memory.every * s->memory.every, visit(s, chunk_at(s, i)), 1, 1);
}

// Returns the layers to rerun forward before backward's layer l: from the last kept input up to x_l, once per group of
// K layers. Returns none if their inputs exist.
static Range missing_layers(const StreamBP *s, size_t l) {
    const size_t every = s->memory.every;
    const Range missing = {l / every * every, input_is_last(s, l) ? l % every : 0};
    return missing;
}

// Begins the walk over the missing layers. The dry run visits v's layer in their place, and counts it for all missing
// layers like it.
static Visit first_missing(const Visit *v) {
    StreamBP *s = v->s;
    Walk *walk = &s->memory.walk;
    Range missing = missing_layers(s, v->l);
    size_t alike = 0;
    Visit r = *v;
    if (walk->dry) {
        for (size_t i = 0; i < s->model->config.num_hidden_layers; i++)
            alike += layer_of(s, i)->like == v->l && !input_is_last(s, i);
        missing.begin = v->l, missing.count = alike > 0;
    }
    inputs_await(s);
    r.layer = NULL, r.index = missing.begin, r.end = missing.begin + missing.count;
    if (!missing.count) return r;
    s->now.pass = PASS_RESTORE, walk->step = 1;
    layer_visit(&r, missing.begin);
    if (alike) walk->layers = (double)alike;
    return r;
}

// Returns to backward's layer after the walk over the missing layers.
static void backward_again(const Visit *v) {
    inputs_await(v->s);
    v->s->now.pass = PASS_BACKWARD, v->s->memory.walk.step = -1, v->s->memory.walk.layers = v->times;
}

// Ends backward's use of x_l[c]: starts loading the input that backward needs next over it.
static void input_done(StreamBP *s, size_t l, Chunk c) {
    const size_t L = s->model->config.num_hidden_layers, next = layer_before(&s->memory, l);
    if (!inputs_off_device(s) || (next >= L && walk_is_in_order(&s->memory.walk))) return;
    input_move(s, next, c, 1, (double)(L - 1) / (double)L);
}

#endif
