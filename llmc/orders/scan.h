/*
Ranks that share a sequence, in layers of linear attention: S ranks pass states, not keys and values. The sequence has
2 S parts, which belong to ranks 0, 1, ..., S-1, S-1, ..., 1, 0 in this order (sequence_part). A part maps the state
before it to the state after it. It maps the state's gradient D after it to D before it. Both maps are affine:

    state after = T * state before + U        D before = T^T * D after + D of its own tokens

T [DK,DK] and U [DK,DV] of each value head need no other rank, so all ranks walk their parts in parallel, from a zero
state. Then a scan passes the states along the parts, and each rank adds T * state to its U. The scan is a chain of
2 (S - 1) messages of one state each, for any number of tokens. U depends on the convolution's last inputs before the
part, which are all-gathered first.

    forward    1. gather the inputs before own parts; compute T, U of own parts; run the chain
               2. run the chunks of own parts, from the state before each part
    backward   1. chunks last to first: MLP, output, gate; and, of the delta rule, only D of own tokens
               2. run the chain back
               3. chunks last to first: delta rule, convolution and the products of their inputs
               4. send gradients of inputs that other parts' convolutions read to their owner, for products and norm

T and the states before parts stay from forward to backward (RangeStates). A token takes more FLOPs than in one process:
forward and backward each run the products of q, k, v, b and a once more, 2 C (W + 2 HV). Forward adds the delta rule's
state and 4 HV DK^2 for T, backward the state's gradient (delta_flops). Memory of a rank: 2 HV DK (DK + DV) sums of each
layer; in backward the gradient of one layer's delta rule output, HV DV elements of each own token.
*/
#ifndef LLMC_SCAN_H
#define LLMC_SCAN_H
#include "streambp.h"

// ---- the 2 S parts of a sequence, in its order ----------------------------------------------------------------------
static size_t part_of_half(const StreamBP *s, size_t half) {
    return half ? 2 * s->now.ranks - 1 - sequence_rank(s) : sequence_rank(s);
}

static Range part_at(const StreamBP *s, size_t part) {
    const size_t S = s->now.ranks, half = part >= S;
    return sequence_part(s->now.N, S, half ? 2 * S - 1 - part : part, half);
}

static size_t part_end(const StreamBP *s, size_t part) { return part_at(s, part).begin + part_at(s, part).count; }

// ---- states and transitions of own ranges ---------------------------------------------------------------------------
static size_t range_slot(const StreamBP *s, size_t l, size_t half) {
    return 2 * (s->ranges.layers > 1 ? layer_of(s, l)->state : 0) + half;
}

static KeptState range_state(const StreamBP *s, size_t l, size_t half) {
    const Shapes d = shapes_of(s->model);
    const KeptState before = {summed_row(s, s->ranges.before, range_slot(s, l, half), d.linear.S),
                              stored_row(s, s->ranges.columns, range_slot(s, l, half), d.linear.columns)};
    return before;
}

static Summed *range_transition(const StreamBP *s, size_t l, size_t half) {
    const Shapes d = shapes_of(s->model);
    return summed_row(s, s->ranges.transition, range_slot(s, l, half), d.linear.transfer);
}

// Makes the following ops count once a layer, not once a chunk.
static void once_in_a_layer(StreamBP *s) { walk_count(&s->memory.walk, s->ops, 1); }

// ---- the convolution's inputs before a part -------------------------------------------------------------------------
// Returns the last tokens of an own range, at most taps - 1, which the convolutions of later parts read.
static Chunk tail_of_range(const StreamBP *s, size_t half) {
    const Range own = s->now.own[half];
    const size_t n = min_size(own.count, shapes_of(s->model).linear.taps - 1);
    return chunk_of(s, own.begin + own.count - n, n);
}

static Linear tail_product(const Visit *v) {
    Linear product = linear_part(v, IN_QKV_WEIGHT, IN_QKV_WEIGHT, IN_QKV_WEIGHT);
    product.stride = product.out;
    return product;
}

// All-gathers x[2 S,taps-1,W]. Every rank has the rows of its two parts.
static void columns_share(StreamBP *s, void *x, size_t size) {
    const size_t columns = shapes_of(s->model).linear.columns, count = s->now.ranks * columns;
    int64_t ticket = 0;
    for (size_t half = 0; half < 2; half++)
        ticket = ranks_gather(&s->memory, TRAFFIC_STATES, half ? RANKS_SEQUENCE_REVERSED : RANKS_SEQUENCE,
                              at(x, half * count, size), count, columns, size);
    s->ops->await(ticket);
}

// Gathers the convolution's inputs before this rank's two ranges into range_state. Each rank projects the last tokens
// of its ranges; all ranks share the projections. A part may be shorter than taps - 1, so the inputs may come from
// several parts.
static void columns_gather(Visit *v) {
    StreamBP *s = v->s;
    const Shapes d = v->layer->shape;
    const size_t mark = arena_mark(s->arena), halo = d.linear.taps - 1;
    if (!d.linear.columns) return;
    Stored *tails = push_stored(s, SHARE_KV, "last inputs of all parts", 2 * s->now.ranks * d.linear.columns);
    for (size_t half = 0; half < 2; half++) {
        if (!s->now.own[half].count) continue;
        v->c = tail_of_range(s, half);
        once_in_a_layer(s);
        Activations a = mixer_norm(v);
        Stored *rows = stored_row(s, tails, (part_of_half(s, half) + 1) * halo - v->c.n, d.linear.W);
        linear_forward_part(v, tail_product(v), rows, a.norm[0], NULL);
        drop(v, &a);
    }
    columns_share(s, tails, d.stored);
    for (size_t half = 0; half < 2; half++) {
        size_t part = part_of_half(s, half);
        const size_t begin = s->now.own[half].begin;
        Stored *before = range_state(s, v->l, half).columns;
        for (size_t back = 1; back <= halo; back++) { // tokens begin - 1, begin - 2, ...
            Stored *row = stored_row(s, before, halo - back, d.linear.W);
            if (back > begin) {
                s->ops->zero(row, d.linear.W * d.stored);
                continue;
            }
            while (part_at(s, part).begin > begin - back || part_end(s, part) <= begin - back) part--;
            const size_t from_end = part_end(s, part) - (begin - back);
            s->ops->copy(row, stored_row(s, tails, (part + 1) * halo - from_end, d.linear.W), d.linear.W * d.stored);
        }
    }
    arena_pop(s->arena, mark);
}

// ---- the chain ------------------------------------------------------------------------------------------------------
static void states_move(const StreamBP *s, const Message *messages, size_t n) {
    s->ops->await(s->ops->exchange(RANKS_SEQUENCE, messages, n));
}

// Passes states (back: gradients) along the parts. own[2,HV,DK,DV]: U of each range becomes the state after the range
// (back: D of own tokens becomes D before it). before[2,HV,DK,DV]: receives each range's incoming state (back: D)
static void states_pass(StreamBP *s, size_t l, Summed *own, Summed *before, int back) {
    const Shapes d = shapes_of(s->model);
    const Chunk none = {0};
    const DeltaShape shape = delta_shape(s, none, d.linear);
    const size_t S = s->now.ranks, rank = sequence_rank(s), bytes = d.linear.S * d.summed;
    const size_t first = back != 0, second = !first; // halves in the order of the walk
    Summed *const in[2] = {summed_row(s, before, first, d.linear.S), summed_row(s, before, second, d.linear.S)};
    Summed *const out[2] = {summed_row(s, own, first, d.linear.S), summed_row(s, own, second, d.linear.S)};
    const Message come = {rank - 1, NULL, in[0], 0, bytes}, leave = {rank - 1, out[1], NULL, bytes, 0};
    const Message turn[2] = {{rank + 1, out[0], NULL, bytes, 0}, {rank + 1, NULL, in[1], 0, bytes}};
    const double sent = (double)((rank > 0) + (rank + 1 < S)), mean = 2 * (double)(S - 1) / (double)S;
    once_in_a_layer(s);
    count_sent(&s->memory, TRAFFIC_STATES, (s->memory.walk.dry ? mean : sent) * (double)bytes, 2 * (double)(S - 1));
    if (!rank) s->ops->zero(in[0], bytes);
    states_move(s, &come, rank > 0);
    s->ops->state_combine(out[0], range_transition(s, l, first), in[0], back, &shape);
    if (rank + 1 == S) s->ops->copy(in[1], out[0], bytes);
    states_move(s, turn, rank + 1 < S ? 2 : 0);
    s->ops->state_combine(out[1], range_transition(s, l, second), in[1], back, &shape);
    states_move(s, &leave, rank > 0);
}

// ---- forward --------------------------------------------------------------------------------------------------------
// Computes T of own ranges and the states before them.
static void range_states_forward(Visit *v) {
    StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const LinearShape *linear = &d->linear;
    const size_t mark = arena_mark(s->arena), size = layer_chunk(s), l = v->l;
    const Chunk none = {0};
    const DeltaShape shape = delta_shape(s, none, *linear);
    Summed *own = push_summed(s, SHARE_KV, "what own tokens add to a state", 2 * linear->S);
    columns_gather(v);
    for (size_t half = 0; half < 2; half++) {
        Summed *transition = range_transition(s, l, half);
        once_in_a_layer(s);
        s->ops->zero(s->linear.state, linear->S * d->summed);
        if (linear->columns)
            s->ops->copy(s->linear.columns, range_state(s, l, half).columns, linear->columns * d->stored);
        s->ops->transfer_begin(transition, &shape);
        for (size_t i = 0; i < range_chunks(s, half, size); i++) {
            v->c = visit(s, range_chunk(s, half, i, size));
            chunk_state(v, transition);
        }
        s->ops->copy(summed_row(s, own, half, linear->S), s->linear.state, linear->S * d->summed);
    }
    states_pass(s, l, own, range_state(s, l, 0).state, 0);
    arena_pop(s->arena, mark);
}

static void scan_layer_forward(Visit *v) {
    StreamBP *s = v->s;
    const size_t size = layer_chunk(s);
    if (s->now.pass != PASS_RESTORE) range_states_forward(v);
    weights_prefetch(&s->memory, v->l);
    for (size_t half = 0; half < 2; half++) {
        if (s->now.own[half].count) state_copy(s, range_state(s, v->l, half), 0);
        for (size_t i = 0; i < range_chunks(s, half, size); i++) {
            v->c = visit(s, range_chunk(s, half, i, size));
            Activations a = forward_activations(v);
            rest_forward(v, &a);
        }
    }
}

// ---- backward -------------------------------------------------------------------------------------------------------
// Computes ddelta_out[n,HV*DV] from dx of y; dx += the gradient through z and the mixer's norm. dstate: the gradient at
// the chunk's end becomes the gradient at its start
static void scan_output_backward(const Visit *v, Activations *a, Stored *dx, Stored *ddelta_out) {
    const StreamBP *s = v->s;
    const DeltaShape shape = visit_delta_shape(v);
    const LayerTensor z = gate_of_inputs(v->layer);
    mixer_gradient_begin(v, a, dx);
    const size_t mark = arena_mark(s->arena);
    Stored *dprojected =
        push_stored(s, SHARE_WORKSPACE, "gradient of linear attention's inputs", v->c.n * v->layer->shape.linear.E);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "delta rule's scratch", rule_backward_scratch(v));
    linear_backward(v, OUT_WEIGHT, ddelta_out, branch_sum_backward(v, 0, a, dx), a->delta_norm, 0);
    gated_norm_backward(v, a, ddelta_out, dprojected);
    mixer_input_backward(v, a, linear_part(v, IN_QKV_WEIGHT, z, z), projected_part(v, dprojected, z));
    mixer_gradient_end(v, a, dx);
    rule_backward(v, &shape, NULL, NULL, ddelta_out, a->mixed, a->projected, NULL, scratch);
    arena_pop(s->arena, mark);
}

// Runs the rest of the mixer backward; dx += the gradient through q, k, v, b, a and the mixer's norm.
static void scan_inputs_backward(const Visit *v, Stored *dx, Stored *ddelta_out) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const KeptState before = state_before(s, v->c);
    if (d->linear.columns) s->ops->copy(s->linear.columns, before.columns, d->linear.columns * d->stored);
    Activations a = state_activations(v);
    mixer_gradient_begin(v, &a, dx);
    Stored *dprojected = push_stored(s, SHARE_WORKSPACE, "gradient of linear attention's inputs", v->c.n * d->linear.E);
    delta_backward(v, &a, before, ddelta_out, dprojected);
    mixer_input_backward(v, &a, linear_part(v, IN_QKV_WEIGHT, IN_QKV_WEIGHT, IN_QKV_WEIGHT),
                         projected_part(v, dprojected, IN_QKV_WEIGHT));
    mixer_input_backward(v, &a, rule_inputs(v), projected_part(v, dprojected, IN_B_WEIGHT));
    mixer_gradient_end(v, &a, dx);
    drop(v, &a);
}

// Sums later parts' gradients of an own range's last inputs. Runs the inputs' product and the mixer's norm backward, to
// dx. dtails[2 S,taps-1,W]: each part's gradients of the inputs before it
static void tail_backward(Visit *v, size_t half, Summed *dtails) {
    StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const size_t W = d->linear.W, halo = d->linear.taps - 1, parts = 2 * s->now.ranks;
    const Chunk c = v->c = tail_of_range(s, half);
    const size_t end = c.token + c.n;
    Stored *dx = gradient_at(s, c.row);
    once_in_a_layer(s);
    Activations a = mixer_norm(v);
    Summed *sums = push_summed(s, SHARE_WORKSPACE, "gradient of a range's last inputs", c.n * W);
    Stored *dtail = push_stored(s, SHARE_WORKSPACE, "gradient of a range's last inputs, rounded", c.n * W);
    mixer_gradient_begin(v, &a, dx);
    s->ops->zero(sums, c.n * W * d->summed);
    for (size_t part = part_of_half(s, half) + 1; part < parts && part_at(s, part).begin < end + halo; part++)
        for (size_t j = 0; j < halo; j++) {
            const size_t token = part_at(s, part).begin + j; // the input's token, + halo
            if (token < c.token + halo || token >= end + halo) continue;
            s->ops->gradient_add(summed_row(s, sums, token - halo - c.token, W), dtype_of_sums(s->model->dtype),
                                 summed_row(s, dtails, part * halo + j, W), W);
        }
    s->ops->round_sums(dtail, sums, c.n * W);
    mixer_input_backward(v, &a, tail_product(v), dtail);
    mixer_gradient_end(v, &a, dx);
    drop(v, &a);
}

// Tells whether tail_backward needs tokens of chunk c.
static int has_tail(const StreamBP *s, size_t half, Chunk c) {
    const Range own = s->now.own[half];
    return c.token + c.n + shapes_of(s->model).linear.taps - 1 > own.begin + own.count;
}

static void scan_layer_backward(Visit *v) {
    StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const LinearShape *linear = &d->linear;
    const size_t size = layer_chunk(s), mark = arena_mark(s->arena), l = v->l, columns = linear->columns;
    const size_t state_bytes = linear->S * d->summed;
    Summed *own = push_summed(s, SHARE_KV, "gradient of a state, from own tokens", 2 * linear->S);
    Summed *behind = push_summed(s, SHARE_KV, "gradient of the state behind a range", 2 * linear->S);
    Summed *dtails = push_summed(s, SHARE_KV, "gradient of inputs before all parts", 2 * s->now.ranks * columns);
    Stored *ddelta_out =
        push_stored(s, SHARE_WORKSPACE, "gradient of one layer's delta rule", s->now.rows * linear->DVs);
    for (size_t half = 0; half < 2; half++) {
        if (!s->now.own[half].count) continue;
        state_copy(s, range_state(s, l, half), 0);
        state_copy(s, kept_state(s, half, 0), 1);
    }
    states_begin(v);
    for (size_t half = 2; half-- > 0;) { // 1. needs no gradients from later parts
        s->ops->zero(s->linear.dstate, state_bytes);
        for (size_t i = range_chunks(s, half, size); i-- > 0;) {
            states_restore(v, half, i);
            v->c = visit(s, range_chunk(s, half, i, size));
            Stored *dx = gradient_at(s, v->c.row);
            Activations a = recompute(v);
            mlp_backward(v, &a, dx);
            scan_output_backward(v, &a, dx, stored_row(s, ddelta_out, v->c.row, linear->DVs));
            drop(v, &a);
        }
        s->ops->copy(summed_row(s, own, half, linear->S), s->linear.dstate, state_bytes);
    }
    states_pass(s, l, own, behind, 1); // 2. the chain, back
    weights_prefetch(&s->memory, l);
    for (size_t half = 2; half-- > 0;) { // 3. the rest of the mixer
        if (visits_shapes(s))            // counts the second states_restore
            states_count(v, half, chunks_visited_below(size, chunks_of_range(s, half)));
        s->ops->copy(s->linear.dstate, summed_row(s, behind, half, linear->S), state_bytes);
        if (columns) s->ops->zero(s->linear.dcolumns, columns * d->summed);
        for (size_t i = range_chunks(s, half, size); i-- > 0;) {
            states_restore(v, half, i);
            v->c = visit(s, range_chunk(s, half, i, size));
            scan_inputs_backward(v, gradient_at(s, v->c.row), stored_row(s, ddelta_out, v->c.row, linear->DVs));
            if (!has_tail(s, half, v->c)) input_done(s, l, v->c);
        }
        if (columns)
            s->ops->copy(summed_row(s, dtails, part_of_half(s, half), columns), s->linear.dcolumns,
                         columns * d->summed);
    }
    if (columns) columns_share(s, dtails, d->summed); // 4. gradients of inputs that other parts read
    for (size_t half = 2; half-- > 0;) {
        if (columns && s->now.own[half].count) tail_backward(v, half, dtails);
        for (size_t i = range_chunks(s, half, size); i-- > 0;) {
            const Chunk c = visit(s, range_chunk(s, half, i, size));
            if (has_tail(s, half, c)) input_done(s, l, c);
        }
    }
    arena_pop(s->arena, mark);
}

#endif
