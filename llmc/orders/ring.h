/*
Ranks that share a sequence, by ring attention (arXiv 2310.01889), for layers that see everything and whose keys and
values of the whole sequence do not fit: a rank stores those of its own tokens, and these blocks pass around the ranks.
Step i has the block of the rank i before this one; the next block is on its way while the queries of all own tokens
meet the present one.

Forward, what the blocks give is summed in Summed and rounded once, behind the last one. Backward, the gradients of a
block follow it around, one step behind: what a rank has found is added when they arrive, and after the last step every
block's are at home. Queries, outputs and their gradients are therefore of a whole layer's own tokens (RingLayer).
*/
#ifndef LLMC_RING_H
#define LLMC_RING_H
#include "gather.h"

// Keys and values, or their gradients: the two ranges of a rank, one behind the other.
typedef struct {
    Stored *k, *v; // [most tokens of a rank,NKV*HD]
} KeyBlock;
typedef struct {
    Summed *dk, *dv; // [most tokens of a rank,NKV*HD]
} GradientBlock;

// What a layer holds of the rank's own tokens while blocks of keys pass by
typedef struct {
    Stored *q;              // [rows,NH*HD]
    Stored *attention_out;  // [rows,NH*HD]
    Stored *dattention_out; // [rows,NH*HD]
    Summed *lse;            // [rows,NH]
    Summed *dq;             // [rows,NH*HD]
} RingLayer;

// Room for attention's output and log-sum-exp of a layer; saved ones are loaded in backward.
static void ring_push_attention(StreamBP *s, size_t l, RingLayer *r) {
    Shapes d = shapes_of(s->model);
    const Range all = {0, s->rows};
    if (saves_attention(s) && !saves_in_host_memory(s)) {
        r->attention_out = saved_attention_out(s, l, 0), r->lse = saved_lse(s, l, 0);
        return;
    }
    r->attention_out = push_stored(s, SHARE_WORKSPACE, "attention output of one layer", s->rows * d.Q);
    r->lse = push_summed(s, SHARE_WORKSPACE, "log-sum-exp of one layer", s->rows * d.NH);
    if (attention_saved(s)) saved_attention_load(s, l, all, 0, r->attention_out, r->lse);
}

static RingLayer ring_begin(StreamBP *s, size_t l) {
    Shapes d = shapes_of(s->model);
    RingLayer r = {0};
    if (keeps_activations(s)) {
        Activations a = kept_activations(s, l, 0);
        r.q = a.q, r.attention_out = a.attention_out, r.lse = a.lse;
    } else {
        r.q = push_stored(s, SHARE_WORKSPACE, "queries of one layer", s->rows * d.Q);
        ring_push_attention(s, l, &r);
    }
    if (s->pass == PASS_BACKWARD)
        r.dattention_out = push_stored(s, SHARE_WORKSPACE, "gradient of one layer's attention output", s->rows * d.Q);
    return r;
}

// Room for chunk c's activations, with those that the layer has of all rows
static Activations ring_activations(StreamBP *s, size_t l, Chunk c, const RingLayer *r) {
    Shapes d = shapes_of(s->model);
    Activations a = {0};
    if (keeps_activations(s)) return kept_activations(s, l, c.row);
    a.mark = arena_mark(s->arena);
    a.q = stored_row(s, r->q, c.row, d.Q);
    a.attention_out = stored_row(s, r->attention_out, c.row, d.Q);
    a.lse = summed_row(s, r->lse, c.row, d.NH);
    push_attention_activations(s, &a, c.n);
    return a;
}

// Where a block comes to: two by turns, but of two ranks one is enough.
static void push_passing(StreamBP *s, KeyBlock passing[2]) {
    const size_t count = s->kv.rows[0] * shapes_of(s->model).KV, blocks = min_size(2, s->ranks - 1);
    for (size_t i = 0; i < blocks; i++) {
        passing[i].k = push_stored(s, SHARE_KV, i ? "keys that come next" : "keys that pass by", count);
        passing[i].v = push_stored(s, SHARE_KV, i ? "values that come next" : "values that pass by", count);
    }
}

// Whose block this rank has in a step.
static size_t block_owner(const StreamBP *s, size_t step) {
    return (sequence_rank(s) + s->ranks - step % s->ranks) % s->ranks;
}

// The block of this step goes to the next rank, while that of the next step comes from the one before. k and v, or dk
// and dv; rows of `row` bytes.
static int64_t block_pass(StreamBP *s, TrafficKind kind, size_t step, const void *const out[2], void *const in[2],
                          size_t row) {
    const size_t S = s->ranks, rank = sequence_rank(s);
    const size_t leaves = sequence_tokens(s->N, S, block_owner(s, step));
    const size_t comes = sequence_tokens(s->N, S, block_owner(s, step + 1));
    const double mean = 2 * (double)(s->N * row) / (double)S; // a step's blocks are all of the stream
    Message message[4];
    size_t count = 0;
    for (size_t i = 0; i < 2; i++) {
        const Message to = {(rank + 1) % S, out[i], NULL, leaves * row, 0};
        const Message from = {(rank + S - 1) % S, NULL, in[i], 0, comes * row};
        if (leaves) message[count++] = to;
        if (comes) message[count++] = from;
    }
    return ranks_exchange(&s->memory, kind, RANKS_SEQUENCE, message, count, mean);
}

static int64_t keys_pass(StreamBP *s, size_t step, KeyBlock here, KeyBlock next) {
    const void *const out[2] = {here.k, here.v};
    void *const in[2] = {next.k, next.v};
    return block_pass(s, TRAFFIC_KEYS_VALUES, step, out, in, shapes_of(s->model).KV * shapes_of(s->model).stored);
}

static int64_t gradients_pass(StreamBP *s, size_t step, GradientBlock here, GradientBlock next) {
    const void *const out[2] = {here.dk, here.dv};
    void *const in[2] = {next.dk, next.dv};
    return block_pass(s, TRAFFIC_KEY_VALUE_GRADIENTS, step, out, in,
                      shapes_of(s->model).KV * shapes_of(s->model).summed);
}

// ---- own queries and one block --------------------------------------------------------------------------------------
// One range of a block, as attention takes it.
typedef struct {
    KeyRange keys;
    size_t skipped; // tokens before the block's row 0
    int first;      // nothing came before it
} BlockRange;

static BlockRange block_range(const StreamBP *s, size_t step, size_t half) {
    const size_t owner = block_owner(s, step);
    const Range part = sequence_part(s->N, s->ranks, owner, half), before = sequence_part(s->N, s->ranks, owner, 0);
    BlockRange b = {{part.begin, part.begin + part.count}, part.begin - (half ? before.count : 0), 0};
    b.first = step == 0 && half == (before.count == 0);
    return b;
}

// Where token 0 of the stream would be: rows outside of the range need not be memory.
static void *token_0(void *block, size_t skipped, size_t row) {
    return (void *)((uintptr_t)block - skipped * row); // NOLINT(performance-no-int-to-ptr)
}

// A chunk's spans. A plan counts all of a chunk's pairs where it meets its own range.
static Spans ring_spans(const StreamBP *s, Chunk c, size_t step, size_t half) {
    Spans spans = c.spans;
    if (step || own_half(s, c.token) != half) spans.pairs = 0;
    return spans;
}

// A plan of thousands of ranks looks at two blocks of others: all lie in the same two places.
static int block_is_known(const StreamBP *s, size_t step) { return s->dry && step > 2; }

static AttentionShape block_shape(StreamBP *s, size_t l, BlockRange b, Spans spans) {
    AttentionShape shape = attention_shape(s, l, spans);
    shape.keys = b.keys, shape.partial = 1, shape.accumulate = !b.first;
    return shape;
}

// Attention of an own chunk to the keys of a block's range; sums: of the chunk's output so far.
static void chunk_forward_part(StreamBP *s, size_t l, Chunk c, const RingLayer *r, KeyBlock block, BlockRange b,
                               Spans spans, Summed *sums, Summed *scratch) {
    Shapes d = shapes_of(s->model);
    const size_t row = d.KV * d.stored;
    const AttentionShape shape = block_shape(s, l, b, spans);
    s->ops->attention_forward(summed_row(s, sums, c.row, d.Q), summed_row(s, r->lse, c.row, d.NH),
                              stored_row(s, r->q, c.row, d.Q), (Stored *)token_0(block.k, b.skipped, row),
                              (Stored *)token_0(block.v, b.skipped, row), &shape, scratch);
}

// gradients: of the block, added to
static void chunk_backward_part(StreamBP *s, size_t l, Chunk c, const RingLayer *r, KeyBlock block, BlockRange b,
                                Spans spans, const GradientBlock *gradients, Summed *scratch) {
    Shapes d = shapes_of(s->model);
    const size_t row = d.KV * d.stored, sums_row = d.KV * d.summed;
    const AttentionShape shape = block_shape(s, l, b, spans);
    s->ops->attention_backward(summed_row(s, r->dq, c.row, d.Q), (Summed *)token_0(gradients->dk, b.skipped, sums_row),
                               (Summed *)token_0(gradients->dv, b.skipped, sums_row),
                               stored_row(s, r->dattention_out, c.row, d.Q),
                               stored_row(s, r->attention_out, c.row, d.Q), stored_row(s, r->q, c.row, d.Q),
                               (Stored *)token_0(block.k, b.skipped, row), (Stored *)token_0(block.v, b.skipped, row),
                               summed_row(s, r->lse, c.row, d.NH), &shape, scratch);
}

// Of each own chunk that sees keys of the block: forward into sums, or backward where there are gradients.
static void block_attention(StreamBP *s, size_t l, const RingLayer *r, KeyBlock block, Summed *sums,
                            const GradientBlock *gradients, size_t step) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "attention scratch",
                    s->ops->attention_scratch(min_size(effective_chunk(s, s->chunk), s->rows), d.NH, d.NKV, d.HD));
    for (size_t half = 0; half < 2 && !block_is_known(s, step); half++) {
        const BlockRange b = block_range(s, step, half);
        for (size_t i = 0; b.keys.begin < b.keys.end && i < chunk_count(s); i++) {
            const Chunk c = chunk_at(s, i);
            if (b.keys.begin >= c.token + c.n) continue;
            if (gradients)
                chunk_backward_part(s, l, c, r, block, b, ring_spans(s, c, step, half), gradients, scratch);
            else
                chunk_forward_part(s, l, c, r, block, b, ring_spans(s, c, step, half), sums, scratch);
        }
    }
    arena_pop(s->arena, mark);
}

// ---- once around ----------------------------------------------------------------------------------------------------
static KeyBlock own_block(StreamBP *s, size_t l) {
    const KeyBlock own = {layer_keys(s, s->kv.k, l), layer_keys(s, s->kv.v, l)};
    return own;
}

// q and own K, V -> attention_out, lse, unless these were saved
static void ring_forward(StreamBP *s, size_t l, const RingLayer *r) {
    const size_t mark = arena_mark(s->arena), count = s->rows * shapes_of(s->model).Q;
    const Range all = {0, s->rows};
    KeyBlock passing[2];
    int64_t ticket = 0;
    if (attention_saved(s)) {
        saved_attention_finish(s);
        return;
    }
    Summed *sums = push_summed(s, SHARE_WORKSPACE, "sums of attention output", count);
    push_passing(s, passing);
    for (size_t step = 0; step < s->ranks; step++) {
        const KeyBlock here = step ? passing[(step - 1) % 2] : own_block(s, l);
        if (step) s->ops->await(ticket);
        if (step + 1 < s->ranks) ticket = keys_pass(s, step, here, passing[step % 2]);
        block_attention(s, l, r, here, sums, NULL, step);
    }
    s->ops->round_sums(r->attention_out, sums, count);
    saved_attention_store(s, l, all, 0, r->attention_out, r->lse);
    arena_pop(s->arena, mark);
}

// ... and dattention_out -> dq, and dK, dV of the own tokens in kv.dk, kv.dv: where the two that travel by turns end
static void ring_backward(StreamBP *s, size_t l, const RingLayer *r) {
    Shapes d = shapes_of(s->model);
    const DType type = dtype_of_sums(s->model->dtype);
    const size_t mark = arena_mark(s->arena), S = s->ranks, block = s->kv.rows[0] * d.KV;
    GradientBlock found, travelling[2] = {{s->kv.dk, s->kv.dv}, {NULL, NULL}};
    KeyBlock passing[2];
    int64_t keys = 0, gradients = 0;
    travelling[1].dk = push_summed(s, SHARE_KV, "gradient of keys that pass by", block);
    travelling[1].dv = push_summed(s, SHARE_KV, "gradient of values that pass by", block);
    found.dk = push_summed(s, SHARE_KV, "gradient of keys found here", block);
    found.dv = push_summed(s, SHARE_KV, "gradient of values found here", block);
    push_passing(s, passing);
    for (size_t step = 0; step < S; step++) {
        const KeyBlock here = step ? passing[(step - 1) % 2] : own_block(s, l);
        const GradientBlock on = travelling[(S - step) % 2], to = step ? found : on;
        const size_t count = sequence_tokens(s->N, S, block_owner(s, step)) * d.KV;
        if (step) s->ops->await(keys);
        if (step + 1 < S) keys = keys_pass(s, step, here, passing[step % 2]);
        s->ops->zero(to.dk, count * d.summed);
        s->ops->zero(to.dv, count * d.summed);
        block_attention(s, l, r, here, NULL, &to, step);
        if (step) {
            s->ops->await(gradients);
            s->ops->gradient_add(on.dk, type, found.dk, count);
            s->ops->gradient_add(on.dv, type, found.dv, count);
        }
        gradients = gradients_pass(s, step, on, travelling[(S - step - 1) % 2]);
    }
    s->ops->await(gradients);
    arena_pop(s->arena, mark);
}

// ---- one layer ------------------------------------------------------------------------------------------------------
// Queries, keys and values of all own tokens
static void ring_project(StreamBP *s, size_t l, GroupWeights w, const RingLayer *r) {
    for (size_t i = 0; i < chunk_count(s); i++) {
        Chunk c = chunk_at(s, i);
        Activations a = ring_activations(s, l, c, r);
        norm1_forward(s, l, c, w, &a);
        kv_project(s, l, c, w, &a);
        queries_project(s, l, c, w, &a);
        drop(s, &a);
    }
}

static void ring_layer_forward(StreamBP *s, size_t l, GroupWeights w) {
    const size_t mark = arena_mark(s->arena);
    const RingLayer r = ring_begin(s, l);
    ring_project(s, l, w, &r);
    ring_forward(s, l, &r);
    weights_prefetch(&s->memory, l);
    for (size_t i = 0; i < chunk_count(s); i++) {
        Chunk c = chunk_at(s, i);
        Activations a = ring_activations(s, l, c, &r);
        if (!keeps_activations(s)) push_mlp_activations(s, &a, c.n);
        attention_output(s, l, c, w, &a);
        mlp_forward(s, l, c, w, &a);
        drop(s, &a);
    }
    saved_attention_finish(s);
    arena_pop(s->arena, mark);
}

// dnorm1 = the queries' part, from the sums of dq that the ring has left
static void ring_queries_backward(StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, Activations *a,
                                  const RingLayer *r) {
    Shapes d = shapes_of(s->model);
    a->dnorm1 = push_stored(s, SHARE_WORKSPACE, "gradient of the first norm", c.n * d.C);
    const size_t mark = arena_mark(s->arena);
    Stored *dq = push_stored(s, SHARE_WORKSPACE, "gradient of queries", c.n * d.Q);
    if (d.qk_norm && !keeps_activations(s)) linear_forward(s, l, c, w, Q_WEIGHT, a->q_linear, a->norm1, NULL);
    s->ops->round_sums(dq, summed_row(s, r->dq, c.row, d.Q), c.n * d.Q);
    queries_backward(s, l, c, w, dw, a, dq);
    arena_pop(s->arena, mark);
}

static void ring_layer_backward(StreamBP *s, size_t l, GroupWeights w, GroupSums dw) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    RingLayer r = ring_begin(s, l);
    if (!keeps_activations(s)) {
        ring_project(s, l, w, &r);
        ring_forward(s, l, &r);
    }
    weights_prefetch(&s->memory, l);
    for (size_t i = chunk_count(s); i-- > 0;) {
        Chunk c = chunk_at(s, i);
        Stored *dx = input_load(&s->memory, d.L, c.row);
        Activations a = ring_activations(s, l, c, &r);
        if (!keeps_activations(s)) attention_output(s, l, c, w, &a);
        mlp_backward(s, l, c, w, dw, &a, dx);
        output_backward(s, l, c, w, dw, &a, dx, stored_row(s, r.dattention_out, c.row, d.Q));
        drop(s, &a);
    }
    r.dq = push_summed(s, SHARE_WORKSPACE, "sums of gradient of queries", s->rows * d.Q);
    ring_backward(s, l, &r);
    for (size_t i = chunk_count(s); i-- > 0;) {
        Chunk c = chunk_at(s, i);
        Activations a = ring_activations(s, l, c, &r);
        if (!keeps_activations(s)) norm1_forward(s, l, c, w, &a);
        ring_queries_backward(s, l, c, w, dw, &a, &r);
        kv_backward(s, l, c, w, dw, &a, input_load(&s->memory, d.L, c.row));
        drop(s, &a);
    }
    saved_attention_finish(s);
    arena_pop(s->arena, mark);
}

#endif
