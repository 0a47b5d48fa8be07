/*
Layer inputs: x_l of each layer l, from forward to backward, and x_L, whose place dx takes.

    kept on the device   [L+1,rows,C], x_L after the others
    off-device           layers overwrite one x [rows,C] on the device in place. The store of x_l[c] starts when it is
                         computed, and ends before layer l overwrites it. In backward a second buffer holds x_l of the
                         current layer; chunk by chunk the next layer's is loaded over it. Each element moves once each
                         way.

Where layers have inputs of their own (layer/own_input.h), which they make from x_0, that stays on the device beside
these, and its gradient through them.

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

// Layers whose inputs are kept; others' inputs that exist at one time in backward
static size_t inputs_kept(const StreamBP *s) {
    return (s->model->config.num_hidden_layers + s->memory.every - 1) / s->memory.every;
}

static size_t inputs_restored(const StreamBP *s) {
    return min_size(s->memory.every, s->model->config.num_hidden_layers) - 1;
}

// The last layer before the next kept input
static int input_is_last(const StreamBP *s, size_t l) {
    return (l + 1) % s->memory.every == 0 || l + 1 == s->model->config.num_hidden_layers;
}

// Restored inputs that backward does not need at once, of all layers
static size_t inputs_stored_again(const StreamBP *s) {
    const size_t L = s->model->config.num_hidden_layers, every = s->memory.every, rest = L % every;
    return L / every * (max_size(every, 2) - 2) + max_size(rest, 2) - 2;
}

// The layer's [rows,C] in Inputs.kept, from row `row` on
static Stored *kept_input(const StreamBP *s, size_t l, size_t row) {
    const size_t within = l % s->memory.every, slot = within ? inputs_kept(s) + within - 1 : l / s->memory.every;
    return stored_row(s, s->inputs.kept, slot * s->now.rows + row, s->model->config.hidden_size);
}

// ---- room -----------------------------------------------------------------------------------------------------------
// Tells whether x_0 has a gradient that anything trains.
static int first_input_trains(const StreamBP *s) {
    return s->now.pass >= PASS_FORWARD && (!s->memory.lora || lora_trains_embedding(s->memory.lora));
}

// Pushes x_0, with its gradient if that is needed: 0.
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
// Device memory of x_l from row `row` on; in backward x_L is dx.
static Stored *layer_input(const StreamBP *s, size_t l, size_t row) {
    const size_t C = s->model->config.hidden_size;
    const int forward = s->now.pass <= PASS_FORWARD, last = l == s->model->config.num_hidden_layers;
    row -= s->inputs.begin;
    if (last || s->now.pass < PASS_FORWARD) return stored_row(s, s->inputs.x, row, C);
    if (inputs_off_device(s)) return stored_row(s, forward ? s->inputs.x : s->inputs.layer, row, C);
    return forward && !input_is_kept(s, l) ? stored_row(s, s->inputs.x, row, C) : kept_input(s, l, row);
}

// dx from row `row` on: it lies where x_L was.
static Stored *gradient_at(const StreamBP *s, size_t row) {
    return layer_input(s, s->model->config.num_hidden_layers, row);
}

// dx of x_0, rows [row, row + n), += the gradient through the layers' own inputs; dW of their norm +=. Both sums are 0
// afterwards, for another chunk's.
static void first_input_backward(const StreamBP *s, size_t row, size_t n, GroupSums dw) {
    const Shapes d = shapes_of(s->model);
    const Inputs *in = &s->inputs;
    if (!in->dfirst) return;
    Stored *dfirst = stored_row(s, in->dfirst, row - in->begin, d.C);
    s->ops->dropout(layer_input(s, d.L, row), dfirst, n, d.C, 0, 0, 0, 1); // adds: a rate of 0 drops none
    s->ops->zero(dfirst, n * d.C * d.stored);
    if (!dw.tables || s->memory.lora) return;
    s->ops->gradient_add(at(dw.tables, s->model->model_offset[INPUTS_NORM], dtype_size(dw.tables_type)), dw.tables_type,
                         in->dnorm, d.P);
    s->ops->zero(in->dnorm, d.P * d.summed);
}

// Memory for x_l[c], which is computed now: off-device over that of the layer before, once this is stored
static Stored *layer_output(const StreamBP *s, size_t l, Chunk c) {
    page_finish(s->ops, &s->inputs.slot[c.index % INPUT_SLOTS]);
    return layer_input(s, l, c.row);
}

// ---- in flight ------------------------------------------------------------------------------------------------------
// The dry run visits one layer of a kind, and counts it as if each layer of the kind moved the mean.
static void input_move(StreamBP *s, size_t l, Chunk c, int in, double mean) {
    Residency *r = &s->memory;
    const size_t bytes = c.n * r->model->config.hidden_size * dtype_size(r->model->dtype);
    page_move(chunk_pager(r, PLACED_INPUTS, mean), &s->inputs.slot[in ? 0 : c.index % INPUT_SLOTS], in,
              layer_input(s, l, c.row), kept_input(s, s->memory.walk.dry ? 0 : l, c.row), bytes);
}

// Stores x_l[c], which was computed. A restored one that backward needs at once stays in place.
static void input_save(StreamBP *s, size_t l, Chunk c) {
    const size_t L = s->model->config.num_hidden_layers, kept = inputs_kept(s);
    const int forward = s->now.pass == PASS_FORWARD;
    const int wanted = forward ? input_is_kept(s, l) && l < L : !input_is_last(s, l);
    if (s->memory.hook.context) s->memory.hook.chunk(&s->memory);
    if (!inputs_off_device(s) || (!wanted && walk_is_in_order(&s->memory.walk))) return;
    const double mean = !forward ? (double)inputs_stored_again(s) / (double)(L - kept)
                        : l      ? (double)(kept - 1) / (double)L
                                 : 1;
    if (mean > 0) input_move(s, l, c, 0, mean); // else the dry run's layers of this kind store none
}

static void inputs_await(const StreamBP *s) {
    for (size_t i = 0; i < INPUT_SLOTS; i++) page_finish(s->ops, &s->inputs.slot[i]);
    page_await(s->ops, &s->inputs.slot[0]);
}

// Pushes room for x_l in backward, and loads the first one that it needs.
static void inputs_begin(StreamBP *s) {
    const size_t L = s->model->config.num_hidden_layers;
    if (!inputs_off_device(s)) return;
    s->inputs.layer =
        push_stored(s, SHARE_LAYER_INPUTS, "one layer's input", s->now.rows * s->model->config.hidden_size);
    for (size_t i = 0; i < chunk_count(s); i++)
        input_move(s, (L - 1) / s->memory.every * s->memory.every, visit(s, chunk_at(s, i)), 1, 1);
}

// Returns the layers whose forward makes the input of backward's layer, where it was not kept: from the last kept input
// to that layer, once per group of K layers.
static Range missing_layers(const StreamBP *s, size_t l) {
    const size_t every = s->memory.every;
    const Range missing = {l / every * every, input_is_last(s, l) ? l % every : 0};
    return missing;
}

// Begins the walk over them. The dry run visits backward's layer and counts it for all missing layers like it.
static Visit first_missing(const Visit *v) {
    StreamBP *s = v->s;
    Walk *walk = &s->memory.walk;
    Range missing = missing_layers(s, v->l);
    size_t alike = 0;
    Visit r = *v;
    for (size_t i = 0; i < s->model->config.num_hidden_layers && walk->dry; i++)
        alike += layer_like(&s->memory, i) == v->l && !input_is_last(s, i);
    if (walk->dry) missing.begin = v->l, missing.count = alike > 0;
    inputs_await(s);
    r.layer = NULL, r.index = missing.begin, r.end = missing.begin + missing.count;
    if (!missing.count) return r;
    s->now.pass = PASS_RESTORE, walk->step = 1;
    layer_visit(&r, missing.begin);
    if (alike) walk->layers = (double)alike;
    return r;
}

// Returns to backward's layer after that walk.
static void backward_again(const Visit *v) {
    inputs_await(v->s);
    v->s->now.pass = PASS_BACKWARD, v->s->memory.walk.step = -1, v->s->memory.walk.layers = v->times;
}

// Backward is done with x_l[c]: loads the input that is needed next into its rows.
static void input_done(StreamBP *s, size_t l, Chunk c) {
    const size_t L = s->model->config.num_hidden_layers, next = layer_before(&s->memory, l);
    if (!inputs_off_device(s) || (next >= L && walk_is_in_order(&s->memory.walk))) return;
    input_move(s, next, c, 1, (double)(L - 1) / (double)L);
}

#endif
