/*
Layer inputs: x_l of each layer l, from forward to backward, and x_L, whose place dx takes.

    kept on the device   [L+1,rows,C], x_L behind the others
    elsewhere            layers overwrite one x [rows,C] on the device in place. x_l[c] is stored as soon as it is made,
                         and stored before layer l overwrites it. In backward a second buffer holds x_l of the layer at
                         hand; chunk by chunk the input that is needed next takes its rows. Every element goes once
                         each way.

With --inputs-every K the input of one layer of K is kept. Before backward visits a layer whose input was not, forward
runs again from the last one that was, and fills K-1 more inputs: L/K + K-1 in place of L.
*/
#ifndef LLMC_INPUTS_H
#define LLMC_INPUTS_H
#include "sequence.h"

static int inputs_elsewhere(const StreamBP *s) {
    return is_elsewhere(&s->memory, PLACED_INPUTS) && s->pass >= PASS_FORWARD && !method_is_chunk_major(s->method);
}

static int input_is_kept(const StreamBP *s, size_t l) { return l % s->memory.every == 0; }

// Layers whose inputs are kept, and others' that exist at one time in backward
static size_t inputs_kept(const StreamBP *s) {
    return (s->model->config.num_hidden_layers + s->memory.every - 1) / s->memory.every;
}

static size_t inputs_restored(const StreamBP *s) {
    return min_size(s->memory.every, s->model->config.num_hidden_layers) - 1;
}

// The last layer behind an input that is kept and before the next one
static int input_is_last(const StreamBP *s, size_t l) {
    return (l + 1) % s->memory.every == 0 || l + 1 == s->model->config.num_hidden_layers;
}

// Restored inputs that backward does not need at once, of all layers
static size_t inputs_stored_again(const StreamBP *s) {
    const size_t L = s->model->config.num_hidden_layers, every = s->memory.every, rest = L % every;
    return L / every * (max_size(every, 2) - 2) + max_size(rest, 2) - 2;
}

// The layer's [rows,C] in Inputs.kept, from row `row` on
static Stored *kept_input(StreamBP *s, size_t l, size_t row) {
    const size_t within = l % s->memory.every, slot = within ? inputs_kept(s) + within - 1 : l / s->memory.every;
    return stored_row(s, s->inputs.kept, slot * s->rows + row, s->model->config.hidden_size);
}

// ---- room -----------------------------------------------------------------------------------------------------------
static void push_inputs(StreamBP *s) {
    const size_t C = s->model->config.hidden_size, count = s->rows * C, size = dtype_size(s->model->dtype);
    const size_t layers = s->pass == PASS_FORWARD_ONLY ? 0 : inputs_kept(s) + inputs_restored(s);
    const Inputs none = {0};
    s->inputs = none;
    if (!layers || inputs_elsewhere(s)) s->inputs.x = push_stored(s, SHARE_LAYER_INPUTS, "layer input", count);
    if (!layers) return;
    Arena *memory = inputs_elsewhere(s) ? memory_of(&s->memory, PLACED_INPUTS) : s->arena;
    s->inputs.kept =
        (Stored *)arena_push(memory, SHARE_LAYER_INPUTS, "layer inputs", (layers + !inputs_elsewhere(s)) * count, size);
    if (!inputs_elsewhere(s)) s->inputs.x = stored_row(s, s->inputs.kept, layers * s->rows, C);
}

// ---- where an input is ----------------------------------------------------------------------------------------------
// Device memory of x_l from row `row` on; in backward x_L is dx.
static Stored *layer_input(StreamBP *s, size_t l, size_t row) {
    const size_t C = s->model->config.hidden_size;
    const int forward = s->pass <= PASS_FORWARD, last = l == s->model->config.num_hidden_layers;
    row -= s->inputs.begin;
    if (last || s->pass < PASS_FORWARD) return stored_row(s, s->inputs.x, row, C);
    if (inputs_elsewhere(s)) return stored_row(s, forward ? s->inputs.x : s->inputs.layer, row, C);
    return forward && !input_is_kept(s, l) ? stored_row(s, s->inputs.x, row, C) : kept_input(s, l, row);
}

// Memory for x_l[c], which is made now: over that of the layer before where inputs are elsewhere and this has left
static Stored *layer_output(StreamBP *s, size_t l, Chunk c) {
    if (inputs_elsewhere(s)) s->ops->await_transfer(s->inputs.ticket[c.index % INPUT_TICKETS]);
    return layer_input(s, l, c.row);
}

// ---- on the way -----------------------------------------------------------------------------------------------------
// A plan's visit to one layer of a kind stands for all of it: bytes are counted as if each layer had the mean of them.
static int64_t input_transfer(StreamBP *s, size_t l, Chunk c, int in, double mean) {
    Residency *r = &s->memory;
    const size_t bytes = c.n * r->model->config.hidden_size * dtype_size(r->model->dtype);
    const double repeat = r->chunk_repeat * (r->plan ? mean : 1);
    const Place place = r->place[PLACED_INPUTS];
    Stored *device = layer_input(s, l, c.row), *kept = kept_input(s, s->dry ? 0 : l, c.row);
    return in ? place_load(r->ops, &r->moved, place, device, kept, bytes, repeat)
              : place_store(r->ops, &r->moved, place, kept, device, bytes, repeat);
}

// x_l[c] was made. A restored one that backward needs at once stays where it is.
static void input_save(StreamBP *s, size_t l, Chunk c) {
    const size_t L = s->model->config.num_hidden_layers, kept = inputs_kept(s);
    const int forward = s->pass == PASS_FORWARD;
    const int wanted = forward ? input_is_kept(s, l) && l < L : !input_is_last(s, l);
    update_poke(&s->memory);
    if (!inputs_elsewhere(s) || (!wanted && !s->dry)) return;
    const double mean = !forward ? (double)inputs_stored_again(s) / (double)(L - kept)
                        : l      ? (double)(kept - 1) / (double)L
                                 : 1;
    if (mean == 0) return; // in a plan: no layer of this kind does
    s->inputs.ticket[c.index % INPUT_TICKETS] = input_transfer(s, l, c, 0, mean);
}

// Waits for all that is on its way.
static void inputs_await(StreamBP *s) {
    for (size_t i = 0; i < INPUT_TICKETS && inputs_elsewhere(s); i++) {
        s->ops->await_transfer(s->inputs.ticket[i]);
        s->inputs.ticket[i] = 0;
    }
}

// Room for x_l in backward, and the first one that it needs
static void inputs_begin(StreamBP *s) {
    const size_t L = s->model->config.num_hidden_layers;
    if (!inputs_elsewhere(s)) return;
    s->inputs.layer = push_stored(s, SHARE_LAYER_INPUTS, "one layer's input", s->rows * s->model->config.hidden_size);
    for (size_t i = 0; i < chunk_count(s); i++)
        s->inputs.ticket[0] =
            input_transfer(s, (L - 1) / s->memory.every * s->memory.every, visit(s, chunk_at(s, i)), 1, 1);
}

// Backward is done with x_l[c]: the input that is needed next takes its rows.
static void input_done(StreamBP *s, size_t l, Chunk c) {
    const size_t L = s->model->config.num_hidden_layers, next = layer_before(&s->memory, l);
    if (!inputs_elsewhere(s) || (next >= L && !s->dry)) return;
    s->inputs.ticket[0] = input_transfer(s, s->dry ? 0 : next, c, 1, (double)(L - 1) / (double)L);
}

#endif
