/*
Ranks that share a sequence, by ring attention (arXiv 2310.01889): for full-attention layers whose K, V of the whole
sequence do not fit a rank. A rank stores the block of K, V of its own tokens, and the blocks pass around the ranks. In
step i a rank has the block of rank - i. All own queries attend to this block while the next block is in flight.

Forward accumulates the blocks' outputs in Summed and rounds once, after the last block. In backward a block's gradients
travel round one step after the block. A rank adds its own part when they arrive. After the last step they are back at
the block's owner. So queries, outputs and their gradients are held for all own tokens of a layer (RingLayer).
*/
#ifndef LLMC_RING_H
#define LLMC_RING_H
#include "gather.h"
#include "scan.h"

// K, V or dK, dV of the tokens of a rank: the rank's first range, then its second range
typedef struct {
    void *k, *v; // [most tokens of a rank,NKV*HD] Stored K, V, or Summed dK, dV
} Block;

// Tensors of own tokens in a layer, held while the blocks pass
typedef struct {
    Stored *q;              // [rows,NH*HD]
    Stored *attention_out;  // [rows,NH*HD]
    Stored *dattention_out; // [rows,NH*HD]
    Summed *lse;            // [rows,NH]
    Stored *gate;           // [rows,NH*HD]  gate of the output, then its gradient; NULL without a gate
    Summed *dq;             // [rows,NH*HD]
} RingLayer;

// Tells whether this pass reads attention's output in place of a round.
static int saved_round(const Visit *v) { return finds_kept(v) && keeps(v, LEVEL_ATTENTION) && !keeps(v, LEVEL_ALL); }

// Pushes a layer's tensors, or points at kept tensors. Backward starts loading attention's output if it was saved.
static RingLayer ring_begin(Visit *v) {
    StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const size_t count = s->now.rows * d->Q;
    Activations a = {0};
    v->c.row = 0;
    if (keeps(v, LEVEL_ALL)) {
        kept_set(v, &a);
    } else {
        a.q = push_stored(s, SHARE_WORKSPACE, "queries of one layer", count);
        if (d->gate) a.gate = push_stored(s, SHARE_WORKSPACE, "gates of one layer", count);
        if (keeps(v, LEVEL_ATTENTION) && !v->layer->off) {
            kept_set(v, &a);
        } else {
            a.attention_out = push_stored(s, SHARE_WORKSPACE, "attention output of one layer", count);
            a.lse = push_summed(s, SHARE_WORKSPACE, "log-sum-exp of one layer", s->now.rows * d->NH);
            if (saved_round(v)) kept_load_layer(v, &a);
        }
    }
    RingLayer r = {a.q, a.attention_out, NULL, a.lse, keeps(v, LEVEL_ALL) ? NULL : a.gate, NULL};
    if (s->now.pass == PASS_BACKWARD)
        r.dattention_out = push_stored(s, SHARE_WORKSPACE, "gradient of one layer's attention output", count);
    return r;
}

// Pushes chunk c's activations up to the MLP. Tensors that RingLayer holds point at its rows.
static Activations ring_activations(const Visit *v, const RingLayer *r) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    if (keeps(v, LEVEL_ALL)) return chunk_activations(v);
    Activations a = activations_begin(v);
    a.q = stored_row(s, r->q, v->c.row, d->Q);
    a.attention_out = stored_row(s, r->attention_out, v->c.row, d->Q);
    a.lse = summed_row(s, r->lse, v->c.row, d->NH);
    if (r->gate) a.gate = stored_row(s, r->gate, v->c.row, d->Q);
    push_side(v, &a, SIDE_MIXER);
    return a;
}

// Pushes the receive buffers: two buffers used in turn, with two ranks one buffer.
static void push_passing(const StreamBP *s, size_t l, Block passing[2]) {
    const size_t count = s->kv.rows[0] * layer_of(s, l)->shape.KV, blocks = min_size(2, s->now.ranks - 1);
    for (size_t i = 0; i < blocks; i++) {
        passing[i].k = push_stored(s, SHARE_KV, i ? "keys that come next" : "keys that pass by", count);
        passing[i].v = push_stored(s, SHARE_KV, i ? "values that come next" : "values that pass by", count);
    }
}

// Returns the rank whose block this rank has in a step.
static size_t block_owner(const StreamBP *s, size_t step) {
    return (sequence_rank(s) + s->now.ranks - step % s->now.ranks) % s->now.ranks;
}

// Sends this step's block to the next rank and receives the next step's block from the previous rank. row: bytes of a
// row
static int64_t block_pass(StreamBP *s, TrafficKind kind, size_t step, Block here, Block next, size_t row) {
    const size_t S = s->now.ranks, rank = sequence_rank(s);
    const size_t leaves = sequence_tokens(s->now.N, S, block_owner(s, step));
    const size_t comes = sequence_tokens(s->now.N, S, block_owner(s, step + 1));
    const double mean = 2 * (double)(s->now.N * row) / (double)S; // bytes of a mean block: K and V of N / S tokens
    Messages p = {0};
    messages_add(&p, (rank + 1) % S, 1, here.k, here.v, leaves * row);
    messages_add(&p, (rank + S - 1) % S, 0, next.k, next.v, comes * row);
    return ranks_exchange(&s->memory, kind, RANKS_SEQUENCE, p.message, p.count, mean);
}

// ---- own queries and one block --------------------------------------------------------------------------------------
// Runs attention of each own chunk over the block of a step. Forward adds to sums[rows,NH*HD]; backward (`gradients`)
// adds to the block's dK, dV and to r->dq. The dry run computes two blocks of other ranks, as all use the same two
// buffers. It counts all of a chunk's pairs at the chunk's own range.
static void block_attention(StreamBP *s, size_t l, const RingLayer *r, Block block, Summed *sums,
                            const Block *gradients, size_t step) {
    const Shapes *d = &layer_of(s, l)->shape;
    const size_t mark = arena_mark(s->arena), owner = block_owner(s, step);
    const size_t row = d->KV * d->stored, sums_row = d->KV * d->summed;
    const Range first = sequence_part(s->now.N, s->now.ranks, owner, 0);
    Summed *scratch = push_summed(
        s, SHARE_WORKSPACE, "attention scratch",
        s->ops->attention_scratch(min_size(layer_chunk(s), s->now.rows), d->NH, d->NKV, d->HD, s->kv.slots));
    for (size_t half = 0; half < 2 && !(s->memory.walk.dry && step > 2); half++) {
        const Range part = sequence_part(s->now.N, s->now.ranks, owner, half);
        const size_t skipped = part.begin - (half ? first.count : 0);
        Stored *k = (Stored *)token_0(block.k, skipped, row), *v = (Stored *)token_0(block.v, skipped, row);
        for (size_t i = 0; part.count && i < chunk_count(s); i++) {
            const Chunk c = visit(s, chunk_at(s, i));
            if (part.begin >= c.token + c.n) continue; // causal: the keys come after the chunk
            AttentionShape shape = attention_shape(s, l, make_spans(s, c, 0, 0));
            if (step || own_half(s, c.token) != half) shape.spans.pairs = 0;
            shape.keys.begin = part.begin, shape.keys.end = part.begin + part.count;
            shape.partial = 1;
            shape.accumulate = step > 0 || half != (first.count == 0);
            Stored *q = stored_row(s, r->q, c.row, d->Q);
            Summed *lse = summed_row(s, r->lse, c.row, d->NH);
            if (gradients)
                s->ops->attention_backward(
                    summed_row(s, r->dq, c.row, d->Q), (Summed *)token_0(gradients->k, skipped, sums_row),
                    (Summed *)token_0(gradients->v, skipped, sums_row), stored_row(s, r->dattention_out, c.row, d->Q),
                    stored_row(s, r->attention_out, c.row, d->Q), q, k, v, lse, &shape, scratch);
            else
                s->ops->attention_forward(summed_row(s, sums, c.row, d->Q), lse, q, k, v, &shape, scratch);
        }
    }
    arena_pop(s->arena, mark);
}

// ---- once around ----------------------------------------------------------------------------------------------------
static Block own_block(const StreamBP *s, size_t l) {
    const Block own = {layer_keys(s, KEYS, l), layer_keys(s, VALUES, l)};
    return own;
}

// Runs attention round the ring: q, own K, V -> attention_out, lse. If both were saved, only awaits their load.
static void ring_forward(const Visit *v, const RingLayer *r) {
    StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const size_t mark = arena_mark(s->arena), count = s->now.rows * d->Q;
    Block passing[2];
    int64_t ticket = 0;
    if (saved_round(v)) {
        kept_finish(s);
        return;
    }
    Summed *sums = push_summed(s, SHARE_WORKSPACE, "sums of attention output", count);
    push_passing(s, v->l, passing);
    for (size_t step = 0; step < s->now.ranks; step++) {
        const Block here = step ? passing[(step - 1) % 2] : own_block(s, v->l);
        if (step) s->ops->await(ticket);
        if (step + 1 < s->now.ranks)
            ticket = block_pass(s, TRAFFIC_KEYS_VALUES, step, here, passing[step % 2], d->KV * d->stored);
        block_attention(s, v->l, r, here, sums, NULL, step);
    }
    s->ops->round_sums(r->attention_out, sums, count);
    sinks_forward(v, r->attention_out, r->lse, s->now.rows);
    arena_pop(s->arena, mark);
}

// Runs attention backward round the ring: q, own K, V, dattention_out -> r->dq; kv.dk, kv.dv = dK, dV of own tokens (+=
// for lent keys). The travelling gradients alternate between two buffers and end in the first buffer.
static void ring_backward(StreamBP *s, size_t l, const RingLayer *r) {
    const Shapes *d = &layer_of(s, l)->shape;
    const DType type = dtype_of_sums(s->model->dtype);
    const size_t mark = arena_mark(s->arena), S = s->now.ranks, block = s->kv.rows[0] * d->KV;
    Block found, travelling[2] = {{s->kv.dk, s->kv.dv}, {NULL, NULL}}, passing[2];
    int64_t keys = 0, gradients = 0;
    if (shares_keys(layer_of(s, l))) {
        travelling[0].k = push_summed(s, SHARE_KV, "gradient of lent keys", block);
        travelling[0].v = push_summed(s, SHARE_KV, "gradient of lent values", block);
    }
    travelling[1].k = push_summed(s, SHARE_KV, "gradient of keys that pass by", block);
    travelling[1].v = push_summed(s, SHARE_KV, "gradient of values that pass by", block);
    found.k = push_summed(s, SHARE_KV, "gradient of keys found here", block);
    found.v = push_summed(s, SHARE_KV, "gradient of values found here", block);
    push_passing(s, l, passing);
    for (size_t step = 0; step < S; step++) {
        const Block here = step ? passing[(step - 1) % 2] : own_block(s, l);
        const Block on = travelling[(S - step) % 2], next = travelling[(S - step - 1) % 2], to = step ? found : on;
        const size_t count = sequence_tokens(s->now.N, S, block_owner(s, step)) * d->KV;
        if (step) s->ops->await(keys);
        if (step + 1 < S) keys = block_pass(s, TRAFFIC_KEYS_VALUES, step, here, passing[step % 2], d->KV * d->stored);
        s->ops->zero(to.k, count * d->summed);
        s->ops->zero(to.v, count * d->summed);
        block_attention(s, l, r, here, NULL, &to, step);
        if (step) {
            s->ops->await(gradients);
            s->ops->gradient_add(on.k, type, (Summed *)found.k, count);
            s->ops->gradient_add(on.v, type, (Summed *)found.v, count);
        }
        gradients = block_pass(s, TRAFFIC_KEY_VALUE_GRADIENTS, step, on, next, d->KV * d->summed);
    }
    s->ops->await(gradients);
    if (shares_keys(layer_of(s, l))) {
        const size_t count = sequence_tokens(s->now.N, S, sequence_rank(s)) * d->KV;
        s->ops->gradient_add(s->kv.dk, type, (Summed *)travelling[0].k, count);
        s->ops->gradient_add(s->kv.dv, type, (Summed *)travelling[0].v, count);
    }
    arena_pop(s->arena, mark);
}

// ---- one layer ------------------------------------------------------------------------------------------------------
// Projects queries, keys and values of all own tokens.
static void ring_project(Visit *v, const RingLayer *r) {
    StreamBP *s = v->s;
    for (size_t i = 0; i < chunk_count(s); i++) {
        v->c = visit(s, chunk_at(s, i));
        Activations a = ring_activations(v, r);
        branch_in(v, 0, &a);
        if (!shares_keys(v->layer) || s->now.pass != PASS_BACKWARD) mixer_keys(v, &a); // lent keys are kept
        queries_project(v, &a);
        drop(v, &a);
    }
}

static void ring_layer_forward(Visit *v) {
    StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena);
    const RingLayer r = ring_begin(v);
    ring_project(v, &r);
    ring_forward(v, &r);
    weights_prefetch(&s->memory, v->l);
    for (size_t i = 0; i < chunk_count(s); i++) {
        v->c = visit(s, chunk_at(s, i));
        Activations a = ring_activations(v, &r);
        push_side(v, &a, SIDE_MLP);
        output_begin(v, &a, 1);
        attention_output(v, &a);
        mlp_forward(v, &a);
        kept_store(v, &a);
        drop(v, &a);
    }
    kept_finish(s);
    arena_pop(s->arena, mark);
}

// Computes dnorm, the part of the norm's gradient through queries, from r->dq. Projects queries before QK-norm again.
// Their gates, of the same product, go to `gated` as scratch, because `gate` holds the gates' gradient now.
static void ring_queries_backward(const Visit *v, Activations *a, const RingLayer *r) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    mixer_gradient_begin(v, a, gradient_at(s, v->c.row));
    const size_t mark = arena_mark(s->arena), count = v->c.n * d->Q;
    Stored *dq = push_stored(s, SHARE_WORKSPACE, "gradient of queries", count);
    if (d->qk_norm && !keeps(v, LEVEL_ALL)) queries_linear(v, a, a->q_linear, a->gated);
    s->ops->round_sums(dq, summed_row(s, r->dq, v->c.row, d->Q), count);
    queries_backward(v, a, dq);
    arena_pop(s->arena, mark);
}

static void ring_layer_backward(Visit *v) {
    StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena), Q = v->layer->shape.Q;
    RingLayer r = ring_begin(v);
    if (!keeps(v, LEVEL_ALL)) {
        ring_project(v, &r);
        ring_forward(v, &r);
    }
    weights_prefetch(&s->memory, v->l);
    for (size_t i = chunk_count(s); i-- > 0;) {
        v->c = visit(s, chunk_at(s, i));
        Stored *dx = gradient_at(s, v->c.row);
        Activations a = ring_activations(v, &r);
        attention_output(v, &a);
        mlp_backward(v, &a, dx);
        output_backward(v, &a, branch_out_backward(v, 0, &a, dx), stored_row(s, r.dattention_out, v->c.row, Q));
        drop(v, &a);
    }
    r.dq = push_summed(s, SHARE_WORKSPACE, "sums of gradient of queries", s->now.rows * Q);
    ring_backward(s, v->l, &r);
    for (size_t i = chunk_count(s); i-- > 0;) {
        v->c = visit(s, chunk_at(s, i));
        Activations a = ring_activations(v, &r);
        Stored *dx = gradient_at(s, v->c.row);
        branch_in(v, 0, &a);
        ring_queries_backward(v, &a, &r);
        if (v->layer->borrows)
            mixer_gradient_end(v, &a, dx);
        else
            kv_backward(v, &a, dx);
        input_done(s, v->l, v->c);
        drop(v, &a);
    }
    kept_finish(s);
    arena_pop(s->arena, mark);
}

#endif
