/*
Ranks that share a sequence, by gathering (sequence parallelism). Each rank runs the layers on its own tokens. Before
attention it receives the other ranks' keys and values that its queries see. In backward it sends their dK, dV back:

    full-attention layers    all-gather of K, V of each half of the sequence, in token order;
                             reduce-scatter of dK, dV of a half
    layers with a window     each range receives its halo, the earlier keys that its queries see, from their owners;
                             dK, dV of a halo are sent back to the owners and added

Attention is causal: queries of the first half need the first half's keys alone, so the second half's keys are in flight
meanwhile. Backward visits chunks last to first, so dK, dV of the second half are complete when the first half begins.

dK, dV of a chunk are complete only after the exchange, so kv_backward runs in loops of its own. The gradient of the
mixer's norm arrives in two parts: through queries, later through keys and values. The norm's backward is linear in this
gradient, so its results for both parts add up.
*/
#ifndef LLMC_GATHER_H
#define LLMC_GATHER_H
#include "streambp.h"

// ---- full-attention layers: gather and reduce-scatter ---------------------------------------------------------------
// All-gathers K, V of a half. gradients: reduce-scatters dK, dV instead; rows of own tokens become sums over all ranks.
// Rows after the last token are padding, zero in dK, dV. Returns the ticket, or 0 if there is nothing to await.
static int64_t half_share(StreamBP *s, size_t l, size_t half, int gradients) {
    const Shapes *d = &layer_of(s, l)->shape;
    const RankGroup group = half ? RANKS_SEQUENCE_REVERSED : RANKS_SEQUENCE;
    const Range all = sequence_half(s->now.N, s->now.ranks, half);
    int64_t ticket = 0;
    for (int i = KEYS; i <= VALUES && all.count; i++) {
        const size_t width = key_width(d, (KeyTensor)i), count = all.count * width;
        Stored *keys = key_value_at(s, (KeyTensor)i, l, all.begin);
        Summed *sums = key_gradient_at(s, (KeyTensor)i, l, all.begin);
        ticket = gradients ? ranks_sum(&s->memory, TRAFFIC_KEY_VALUE_GRADIENTS, group, sums, count, width)
                           : ranks_gather(&s->memory, TRAFFIC_KEYS_VALUES, group, keys, count, width, d->stored);
    }
    return ticket;
}

// ---- layers with a window -------------------------------------------------------------------------------------------
// Returns the tokens of rank `owner`'s range `part` that are in the halo of rank `seer`'s range `half`.
static Range halo_part(const StreamBP *s, size_t seer, size_t half, size_t owner, size_t part) {
    const Range held = window_range_of_rank(s, seer, half), own = sequence_part(s->now.N, s->now.ranks, seer, half);
    const Range owned = sequence_part(s->now.N, s->now.ranks, owner, part);
    const size_t begin = max_size(held.begin, owned.begin);
    const size_t end = min_size(held.begin + held.count - own.count, owned.begin + owned.count);
    const Range both = {begin, begin < end ? end - begin : 0};
    return both;
}

// Returns the mean number of halo tokens of a rank in the dry run, else 0.
static double halo_mean(const StreamBP *s) {
    size_t tokens = 0;
    for (size_t rank = 0; rank < s->now.ranks && s->memory.walk.dry; rank++)
        for (size_t half = 0; half < 2; half++)
            tokens +=
                window_range_of_rank(s, rank, half).count - sequence_part(s->now.N, s->now.ranks, rank, half).count;
    return (double)tokens / (double)s->now.ranks;
}

enum { HALO_MESSAGES = 16 }; // with one peer, each way: 2 halos from 2 ranges, K and V

typedef struct {
    Message message[HALO_MESSAGES];
    size_t count;
} Messages;

// Adds messages that send K and V (or dK and dV) of `bytes` each to a peer, or receive them from it.
static void messages_add(Messages *p, size_t peer, int out, void *k, void *v, size_t bytes) {
    for (size_t i = 0; i < 2 && bytes; i++) {
        void *x = i ? v : k;
        const Message send = {peer, x, NULL, bytes, 0}, receive = {peer, NULL, x, 0, bytes};
        p->message[p->count++] = out ? send : receive;
    }
}

// Receives the halos, from one peer a step: in step i from rank - i. Returns the last ticket.
static int64_t halos_gather(StreamBP *s, size_t l) {
    const Shapes *d = &layer_of(s, l)->shape;
    const size_t S = s->now.ranks, rank = sequence_rank(s), row = d->KV * d->stored;
    const double mean = 2 * halo_mean(s) * (double)row / (double)(S - 1); // bytes a step
    int64_t ticket = 0;
    for (size_t i = 1; i < S; i++) {
        const size_t to = (rank + i) % S, from = (rank + S - i) % S;
        Messages p = {0};
        for (size_t j = 0; j < 4; j++) {
            const Range out = halo_part(s, to, j / 2, rank, j % 2), in = halo_part(s, rank, j / 2, from, j % 2);
            messages_add(&p, to, 1, key_value_at(s, KEYS, l, out.begin), key_value_at(s, VALUES, l, out.begin),
                         out.count * row);
            messages_add(&p, from, 0, key_value_at(s, KEYS, l, in.begin), key_value_at(s, VALUES, l, in.begin),
                         in.count * row);
        }
        ticket = ranks_exchange(&s->memory, TRAFFIC_KEYS_VALUES, RANKS_SEQUENCE, p.message, p.count, mean);
    }
    return ticket;
}

// Sends dK, dV of the halos back to their owners. Adds the received dK, dV in the order of the steps.
static void halos_return(StreamBP *s, size_t l) {
    const Shapes *d = &layer_of(s, l)->shape;
    const DType type = dtype_of_sums(s->model->dtype);
    const size_t S = s->now.ranks, rank = sequence_rank(s), row = d->KV * d->summed, mark = arena_mark(s->arena);
    const size_t most = min_size(s->now.rows, 2 * (window_of_model(&s->model->config) - 1));
    const double mean = 2 * halo_mean(s) * (double)row / (double)(S - 1); // bytes a step
    Summed *dk = push_summed(s, SHARE_KV, "gradient of keys from a peer", most * d->KV);
    Summed *dv = push_summed(s, SHARE_KV, "gradient of values from a peer", most * d->KV);
    for (size_t i = 1; i < S; i++) {
        const size_t to = (rank + S - i) % S, from = (rank + i) % S;
        Messages p = {0};
        for (size_t j = 0, done = 0; j < 4; j++) {
            const Range out = halo_part(s, rank, j / 2, to, j % 2), in = halo_part(s, from, j / 2, rank, j % 2);
            messages_add(&p, to, 1, key_gradient_at(s, KEYS, l, out.begin), key_gradient_at(s, VALUES, l, out.begin),
                         out.count * row);
            messages_add(&p, from, 0, summed_row(s, dk, done, d->KV), summed_row(s, dv, done, d->KV), in.count * row);
            done += in.count;
        }
        s->ops->await(
            ranks_exchange(&s->memory, TRAFFIC_KEY_VALUE_GRADIENTS, RANKS_SEQUENCE, p.message, p.count, mean));
        for (size_t j = 0, done = 0; j < 4; j++) {
            const Range in = halo_part(s, from, j / 2, rank, j % 2);
            if (!in.count) continue;
            s->ops->gradient_add(key_gradient_at(s, KEYS, l, in.begin), type, summed_row(s, dk, done, d->KV),
                                 in.count * d->KV);
            s->ops->gradient_add(key_gradient_at(s, VALUES, l, in.begin), type, summed_row(s, dv, done, d->KV),
                                 in.count * d->KV);
            done += in.count;
        }
    }
    arena_pop(s->arena, mark);
}

// ---- one layer ------------------------------------------------------------------------------------------------------
// Projects own K, V half by half and starts the exchange. Await ticket[half] before that half's queries. Halos span
// both halves, so with a window both tickets are the same.
static void gather_keys(Visit *v, int64_t ticket[2]) {
    StreamBP *s = v->s;
    const size_t size = layer_chunk(s);
    if (v->layer->borrows) return;
    for (size_t half = 0; half < 2; half++) {
        for (size_t i = 0; i < range_chunks(s, half, size); i++) {
            v->c = visit(s, range_chunk(s, half, i, size));
            chunk_kv_project(v);
        }
        if (!v->layer->window)
            ticket[half] = half_share(s, v->l, half, 0);
        else if (half == 1)
            ticket[0] = ticket[1] = halos_gather(s, v->l);
    }
}

static void gather_layer_forward(Visit *v) {
    StreamBP *s = v->s;
    const size_t size = layer_chunk(s);
    int64_t ticket[2] = {0, 0};
    gather_keys(v, ticket);
    weights_prefetch(&s->memory, v->l);
    for (size_t half = 0; half < 2; half++) {
        s->ops->await(ticket[half]);
        for (size_t i = 0; i < range_chunks(s, half, size); i++) {
            v->c = visit(s, range_chunk(s, half, i, size));
            Activations a = forward_activations(v);
            rest_forward(v, &a);
        }
    }
}

// Runs a chunk backward, except for the part of the mixer's gradient through keys and values.
static void gather_chunk_backward(const Visit *v) {
    Stored *dx = gradient_at(v->s, v->c.row);
    Activations a = recompute(v);
    mlp_backward(v, &a, dx);
    attention_backward(v, &a, dx);
    mixer_gradient_end(v, &a, dx); // the gradient's part through queries
    drop(v, &a);
}

static void gather_layer_backward(Visit *v) {
    StreamBP *s = v->s;
    const size_t size = layer_chunk(s);
    const int shares = shares_keys(v->layer);
    int64_t ticket[2] = {0, 0};
    if (!shares) zero_key_value_gradients(s, v->l, s->kv.rows[v->layer->window != 0]);
    kept_prefetch(v, chunk_count(s));
    if (!keeps(v, LEVEL_ALL) && !shares) gather_keys(v, ticket);
    weights_prefetch(&s->memory, v->l);
    for (size_t half = 0; half < 2; half++) s->ops->await(ticket[half]); // the second ticket may be 0
    for (size_t half = 2; half-- > 0;) {
        for (size_t i = range_chunks(s, half, size); i-- > 0;) {
            v->c = visit(s, range_chunk(s, half, i, size));
            gather_chunk_backward(v);
        }
        ticket[half] = 0;                // await it before dK, dV of own tokens of this half
        if (v->layer->borrows) continue; // the lender's backward sends dK, dV back
        if (!v->layer->window)
            ticket[half] = half_share(s, v->l, half, 1);
        else if (half == 0)
            halos_return(s, v->l);
    }
    for (size_t half = 2; half-- > 0;) {
        s->ops->await(ticket[half]);
        for (size_t i = range_chunks(s, half, size); i-- > 0;) {
            v->c = visit(s, range_chunk(s, half, i, size));
            Stored *dx = gradient_at(s, v->c.row);
            Activations a = mixer_norm(v);
            if (!v->layer->borrows) kv_backward(v, &a, dx); // the part through keys and values
            input_done(s, v->l, v->c);
            drop(v, &a);
        }
    }
}

#endif
