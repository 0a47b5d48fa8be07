/*
Ranks that share a sequence, in layers of linear attention: states pass between them, not keys and values. The sequence
is 2 S parts; in its order they belong to ranks 0, 1, ..., S-1, S-1, ..., 1, 0 (sequence_part). A part maps the
state before it to the state after it, and the state's gradient D after it to D before it. Both maps are affine:

    state after = T * state before + U        D before = T^T * D after + D of its own tokens

T [DK,DK] and U [DK,DV] of each value head need no other rank, so all ranks walk their parts in parallel, from a zero
state. Then a scan passes the states along the parts, each rank adding T * state to its U. It is a chain of 2 (S - 1)
messages of one state, for any number of tokens. U depends on the convolution's last inputs before the part: these are
all-gathered first.

    forward    1. inputs before own parts; T, U of own parts; the chain
               2. chunks of own parts, from the state before each
    backward   1. chunks last to first: all that needs no gradient from later parts; of the delta rule only D
               2. the chain, back
               3. chunks last to first: delta rule, convolution and the products of their inputs
               4. gradients of inputs that other parts' convolutions read: back to their owner, its products and norm 1

T and the states before parts are kept from forward to backward (RangeStates). FLOPs of a token above those of one
process, forward and backward each: the products that make q, k, v, b and a once more, 2 C (W + 2 HV). Forward adds the
delta rule's state and 4 HV DK^2 for T, backward the state's gradient (delta_flops). Memory of a rank: 2 HV DK (DK + DV)
sums of each layer; in backward the gradient of one layer's delta rule output, HV DV elements of each own token.
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
    return 2 * (s->ranges.layers > 1 ? layers_before(&s->model->config, LAYER_LINEAR, l) : 0) + half;
}

static KeptState range_state(const StreamBP *s, size_t l, size_t half) {
    const Shapes d = shapes_of(s->model);
    const KeptState before = {summed_row(s, s->ranges.before, range_slot(s, l, half), d.S),
                              stored_row(s, s->ranges.columns, range_slot(s, l, half), d.columns)};
    return before;
}

static Summed *range_transition(const StreamBP *s, size_t l, size_t half) {
    const Shapes d = shapes_of(s->model);
    return summed_row(s, s->ranges.transition, range_slot(s, l, half), d.HV * d.DK * d.DK);
}

// Makes the ops that follow count once a layer, not once a chunk.
static void once_in_a_layer(StreamBP *s) {
    s->memory.chunk_repeat = s->memory.layers_repeat;
    s->ops->repeat(s->memory.layers_repeat);
}

// ---- the convolution's inputs before a part -------------------------------------------------------------------------
// Returns the last tokens of an own range, at most taps - 1: those that convolutions of later parts read.
static Chunk tail_of_range(const StreamBP *s, size_t half) {
    const Range own = s->now.own[half];
    const size_t n = min_size(own.count, shapes_of(s->model).taps - 1);
    return chunk_of(s, own.begin + own.count - n, n);
}

static Linear tail_product(const StreamBP *s, size_t l) {
    Linear product = linear_part(s, l, IN_QKV_WEIGHT, IN_QKV_WEIGHT, IN_QKV_WEIGHT);
    product.stride = product.out;
    return product;
}

// All-gathers x[2 S,taps-1,W], where every rank has the rows of its own parts.
static void columns_share(StreamBP *s, void *x, size_t size) {
    const size_t columns = shapes_of(s->model).columns, count = s->now.ranks * columns;
    int64_t ticket = 0;
    for (size_t half = 0; half < 2; half++)
        ticket = ranks_gather(&s->memory, TRAFFIC_STATES, half ? RANKS_SEQUENCE_REVERSED : RANKS_SEQUENCE,
                              at(x, half * count, size), count, columns, size);
    s->ops->await(ticket);
}

// Projects the last tokens of own ranges, gathers all parts', and writes the inputs before own ranges to range_state.
// Parts may be shorter than taps - 1, so these inputs may be of several parts.
static void columns_gather(StreamBP *s, size_t l, GroupWeights w) {
    const Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena), halo = d.taps - 1;
    if (!d.columns) return;
    Stored *tails = push_stored(s, SHARE_KV, "last inputs of all parts", 2 * s->now.ranks * d.columns);
    for (size_t half = 0; half < 2; half++) {
        if (!s->now.own[half].count) continue;
        const Chunk c = tail_of_range(s, half);
        once_in_a_layer(s);
        Activations a = norm1_activations(s, l, c, w);
        Stored *rows = stored_row(s, tails, (part_of_half(s, half) + 1) * halo - c.n, d.W);
        linear_forward_part(s, l, c, w, tail_product(s, l), rows, a.norm1, NULL);
        drop(s, &a);
    }
    columns_share(s, tails, d.stored);
    for (size_t half = 0; half < 2; half++) {
        size_t part = part_of_half(s, half);
        const size_t begin = s->now.own[half].begin;
        Stored *before = range_state(s, l, half).columns;
        for (size_t back = 1; back <= halo; back++) { // tokens begin - 1, begin - 2, ...
            Stored *row = stored_row(s, before, halo - back, d.W);
            if (back > begin) {
                s->ops->zero(row, d.W * d.stored);
                continue;
            }
            while (part_at(s, part).begin > begin - back || part_end(s, part) <= begin - back) part--;
            const size_t from_end = part_end(s, part) - (begin - back);
            s->ops->copy(row, stored_row(s, tails, (part + 1) * halo - from_end, d.W), d.W * d.stored);
        }
    }
    arena_pop(s->arena, mark);
}

// ---- the chain ------------------------------------------------------------------------------------------------------
static void states_move(const StreamBP *s, const Message *messages, size_t n) {
    s->ops->await(s->ops->exchange(RANKS_SEQUENCE, messages, n));
}

// Passes states (back: gradients) along the parts. own[2,HV,DK,DV]: U of each range (back: its local D); becomes the
// state after it (D before it). before[2,HV,DK,DV]: the incoming one of each
static void states_pass(StreamBP *s, size_t l, Summed *own, Summed *before, int back) {
    const Shapes d = shapes_of(s->model);
    const Chunk none = {0};
    const DeltaShape shape = delta_shape(s, none);
    const size_t S = s->now.ranks, rank = sequence_rank(s), bytes = d.S * d.summed;
    const size_t first = back != 0, second = !first; // halves in the order of the walk
    Summed *const in[2] = {summed_row(s, before, first, d.S), summed_row(s, before, second, d.S)};
    Summed *const out[2] = {summed_row(s, own, first, d.S), summed_row(s, own, second, d.S)};
    const Message come = {rank - 1, NULL, in[0], 0, bytes}, leave = {rank - 1, out[1], NULL, bytes, 0};
    const Message turn[2] = {{rank + 1, out[0], NULL, bytes, 0}, {rank + 1, NULL, in[1], 0, bytes}};
    const double sent = (double)((rank > 0) + (rank + 1 < S)), mean = 2 * (double)(S - 1) / (double)S;
    once_in_a_layer(s);
    count_sent(&s->memory, TRAFFIC_STATES, (s->memory.plan ? mean : sent) * (double)bytes, 2 * (double)(S - 1));
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
static void range_states_forward(StreamBP *s, size_t l, GroupWeights w) {
    const Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena), size = layer_chunk(s);
    const Chunk none = {0};
    const DeltaShape shape = delta_shape(s, none);
    Summed *own = push_summed(s, SHARE_KV, "what own tokens add to a state", 2 * d.S);
    columns_gather(s, l, w);
    for (size_t half = 0; half < 2; half++) {
        Summed *transition = range_transition(s, l, half);
        once_in_a_layer(s);
        s->ops->zero(s->linear.state, d.S * d.summed);
        if (d.columns) s->ops->copy(s->linear.columns, range_state(s, l, half).columns, d.columns * d.stored);
        s->ops->transfer_begin(transition, &shape);
        for (size_t i = 0; i < range_chunks(s, half, size); i++)
            chunk_state(s, l, visit(s, range_chunk(s, half, i, size)), w, transition);
        s->ops->copy(summed_row(s, own, half, d.S), s->linear.state, d.S * d.summed);
    }
    states_pass(s, l, own, range_state(s, l, 0).state, 0);
    arena_pop(s->arena, mark);
}

static void scan_layer_forward(StreamBP *s, size_t l, GroupWeights w) {
    const size_t size = layer_chunk(s);
    if (s->now.pass != PASS_RESTORE) range_states_forward(s, l, w);
    weights_prefetch(&s->memory, l);
    for (size_t half = 0; half < 2; half++) {
        if (s->now.own[half].count) state_copy(s, range_state(s, l, half), 0);
        for (size_t i = 0; i < range_chunks(s, half, size); i++) {
            const Chunk c = visit(s, range_chunk(s, half, i, size));
            Activations a = forward_activations(s, l, c, w);
            rest_forward(s, l, c, w, &a);
        }
    }
}

// ---- backward -------------------------------------------------------------------------------------------------------
// dx of y -> ddelta_out[n,HV*DV]; dx += z's part through norm 1. dstate: in, at the chunk's end; out, at its start
static void scan_output_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a,
                                 Stored *dx, Stored *ddelta_out) {
    const Shapes d = shapes_of(s->model);
    const DeltaShape shape = delta_shape(s, c);
    const size_t mark = arena_mark(s->arena);
    a->dnorm1 = push_norm1_gradient(s, c, dx);
    Stored *dprojected = push_stored(s, SHARE_WORKSPACE, "gradient of linear attention's inputs", c.n * d.E);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "delta rule's scratch", s->ops->delta_backward_scratch(&shape));
    branch_out_backward(s, l, c, w, dw, linear_branch, ddelta_out, dx, a->attention_branch, a->delta_norm);
    gated_norm_backward(s, c, w, dw, a, ddelta_out, dprojected);
    linear_backward_part(s, l, c, w, dw, linear_part(s, l, IN_QKV_WEIGHT, IN_Z_WEIGHT, IN_Z_WEIGHT), a->dnorm1,
                         projected_part(s, dprojected, IN_Z_WEIGHT), a->norm1, adds_to_dx(s));
    norm1_backward(s, l, c, w, dw, a, dx);
    s->ops->delta_backward(NULL, NULL, NULL, NULL, NULL, s->linear.dstate, ddelta_out, a->mixed,
                           projected_part(s, a->projected, IN_B_WEIGHT), projected_part(s, a->projected, IN_A_WEIGHT),
                           weight_of(s, w, A_LOG), weight_of(s, w, DT_BIAS), NULL, &shape, scratch);
    arena_pop(s->arena, mark);
}

// Runs the rest of the layer backward; dx += the other parts of norm 1's gradient.
static void scan_inputs_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Stored *dx,
                                 const Stored *ddelta_out) {
    const Shapes d = shapes_of(s->model);
    const KeptState before = state_before(s, c);
    if (d.columns) s->ops->copy(s->linear.columns, before.columns, d.columns * d.stored);
    Activations a = state_activations(s, l, c, w);
    const size_t mark = arena_mark(s->arena);
    a.dnorm1 = push_norm1_gradient(s, c, dx);
    Stored *dprojected = push_stored(s, SHARE_WORKSPACE, "gradient of linear attention's inputs", c.n * d.E);
    delta_backward(s, c, w, dw, &a, before, ddelta_out, dprojected);
    linear_backward_part(s, l, c, w, dw, linear_part(s, l, IN_QKV_WEIGHT, IN_QKV_WEIGHT, IN_QKV_WEIGHT), a.dnorm1,
                         dprojected, a.norm1, adds_to_dx(s));
    linear_backward_part(s, l, c, w, dw, linear_part(s, l, IN_QKV_WEIGHT, IN_B_WEIGHT, IN_A_WEIGHT), a.dnorm1,
                         projected_part(s, dprojected, IN_B_WEIGHT), a.norm1, 1);
    norm1_backward(s, l, c, w, dw, &a, dx);
    arena_pop(s->arena, mark);
    drop(s, &a);
}

// Sums the gradients that later parts have for the last inputs of an own range; runs their product and norm 1 backward,
// to dx. dtails[2 S,taps-1,W]: each part's gradients of the inputs before it
static void tail_backward(StreamBP *s, size_t l, GroupWeights w, GroupSums dw, size_t half, Summed *dtails) {
    const Shapes d = shapes_of(s->model);
    const Chunk c = tail_of_range(s, half);
    const size_t halo = d.taps - 1, end = c.token + c.n, parts = 2 * s->now.ranks;
    once_in_a_layer(s);
    Activations a = norm1_activations(s, l, c, w);
    const size_t mark = arena_mark(s->arena);
    Summed *sums = push_summed(s, SHARE_WORKSPACE, "gradient of a range's last inputs", c.n * d.W);
    Stored *dtail = push_stored(s, SHARE_WORKSPACE, "gradient of a range's last inputs, rounded", c.n * d.W);
    a.dnorm1 = push_norm1_gradient(s, c, layer_input(s, d.L, c.row));
    s->ops->zero(sums, c.n * d.W * d.summed);
    for (size_t part = part_of_half(s, half) + 1; part < parts && part_at(s, part).begin < end + halo; part++)
        for (size_t j = 0; j < halo; j++) {
            const size_t token = part_at(s, part).begin + j; // the input's token, + halo
            if (token < c.token + halo || token >= end + halo) continue;
            s->ops->gradient_add(summed_row(s, sums, token - halo - c.token, d.W), dtype_of_sums(s->model->dtype),
                                 summed_row(s, dtails, part * halo + j, d.W), d.W);
        }
    s->ops->round_sums(dtail, sums, c.n * d.W);
    linear_backward_part(s, l, c, w, dw, tail_product(s, l), a.dnorm1, dtail, a.norm1, adds_to_dx(s));
    norm1_backward(s, l, c, w, dw, &a, layer_input(s, d.L, c.row));
    arena_pop(s->arena, mark);
    drop(s, &a);
}

// Tells whether tail_backward needs tokens of chunk c.
static int has_tail(const StreamBP *s, size_t half, Chunk c) {
    const Range own = s->now.own[half];
    return c.token + c.n + shapes_of(s->model).taps - 1 > own.begin + own.count;
}

static void scan_layer_backward(StreamBP *s, size_t l, GroupWeights w, GroupSums dw) {
    const Shapes d = shapes_of(s->model);
    const size_t size = layer_chunk(s), mark = arena_mark(s->arena);
    Summed *own = push_summed(s, SHARE_KV, "gradient of a state, from own tokens", 2 * d.S);
    Summed *behind = push_summed(s, SHARE_KV, "gradient of the state behind a range", 2 * d.S);
    Summed *dtails = push_summed(s, SHARE_KV, "gradient of inputs before all parts", 2 * s->now.ranks * d.columns);
    Stored *ddelta_out = push_stored(s, SHARE_WORKSPACE, "gradient of one layer's delta rule", s->now.rows * d.DVs);
    for (size_t half = 0; half < 2; half++) {
        if (!s->now.own[half].count) continue;
        state_copy(s, range_state(s, l, half), 0);
        state_copy(s, kept_state(s, half, 0), 1);
    }
    states_begin(s, l, w);
    for (size_t half = 2; half-- > 0;) { // 1. without gradients from later parts
        s->ops->zero(s->linear.dstate, d.S * d.summed);
        for (size_t i = range_chunks(s, half, size); i-- > 0;) {
            states_restore(s, l, w, half, i);
            const Chunk c = visit(s, range_chunk(s, half, i, size));
            Stored *dx = layer_input(s, d.L, c.row);
            Activations a = recompute(s, l, c, w);
            mlp_backward(s, l, c, w, dw, &a, dx);
            scan_output_backward(s, l, c, w, dw, &a, dx, stored_row(s, ddelta_out, c.row, d.DVs));
            drop(s, &a);
        }
        s->ops->copy(summed_row(s, own, half, d.S), s->linear.dstate, d.S * d.summed);
    }
    states_pass(s, l, own, behind, 1); // 2.
    weights_prefetch(&s->memory, l);
    for (size_t half = 2; half-- > 0;) {               // 3. the rest
        if (visits_shapes(s) && !keeps_activations(s)) // counts the second states_restore
            states_count(s, l, w, half, chunks_visited_below(size, chunks_of_range(s, half)));
        s->ops->copy(s->linear.dstate, summed_row(s, behind, half, d.S), d.S * d.summed);
        if (d.columns) s->ops->zero(s->linear.dcolumns, d.columns * d.summed);
        for (size_t i = range_chunks(s, half, size); i-- > 0;) {
            states_restore(s, l, w, half, i);
            const Chunk c = visit(s, range_chunk(s, half, i, size));
            scan_inputs_backward(s, l, c, w, dw, layer_input(s, d.L, c.row), stored_row(s, ddelta_out, c.row, d.DVs));
            if (!has_tail(s, half, c)) input_done(s, l, c);
        }
        if (d.columns)
            s->ops->copy(summed_row(s, dtails, part_of_half(s, half), d.columns), s->linear.dcolumns,
                         d.columns * d.summed);
    }
    if (d.columns) columns_share(s, dtails, d.summed); // 4. gradients of inputs that other parts read
    for (size_t half = 2; half-- > 0;) {
        if (d.columns && s->now.own[half].count) tail_backward(s, l, w, dw, half, dtails);
        for (size_t i = range_chunks(s, half, size); i-- > 0;) {
            const Chunk c = visit(s, range_chunk(s, half, i, size));
            if (has_tail(s, half, c)) input_done(s, l, c);
        }
    }
    arena_pop(s->arena, mark);
}

#endif
