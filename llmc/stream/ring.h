/*
Ring attention (arXiv 2310.01889), for streams whose keys and values do not fit, of one layer: a rank holds those of
its own tokens, and these blocks pass around the ranks of the stream. Step i has the block of the rank i before this
one; the next block is on its way while the queries of all own tokens meet the present one.

Forward, what a block gives is added up in Summed and rounded once, behind the last one. Backward, the gradients of a
block follow it around, one step behind: what a rank has found is added when they arrive, and after the last step every
block's are at home. Queries, outputs and their gradients are of a whole layer's own tokens, therefore (RingLayer).
*/
#ifndef LLMC_RING_H
#define LLMC_RING_H
#include "kept_attention.h"

// Keys and values, or their gradients: the two ranges of a rank, one behind the other.
typedef struct {
    Stored *k, *v; // [most tokens of a rank,NKV*HD]
} KeyBlock;
typedef struct {
    Summed *dk, *dv; // [most tokens of a rank,NKV*HD]
} GradientBlock;

// Where attention's outputs of a layer are, and are to be in its backward pass where they have been kept.
static void ring_push_attention(StreamBP *s, size_t l) {
    Shapes d = shapes_of(s->model);
    RingLayer *r = &s->ring_layer;
    const Range all = {0, s->own_tokens};
    if (saves_attention(s) && !saves_in_host_memory(s)) {
        r->attention_out = kept_attention_out(s, l, 0), r->lse = kept_lse(s, l, 0);
        return;
    }
    r->attention_out = push_stored(s, SHARE_WORKSPACE, "attention output of one layer", s->own_tokens * d.Q);
    r->lse = push_summed(s, SHARE_WORKSPACE, "log-sum-exp of one layer", s->own_tokens * d.NH);
    if (attention_saved(s)) kept_attention_load(s, l, all, 0, r->attention_out, r->lse);
}

static void ring_begin(StreamBP *s, size_t l, int backward) {
    Shapes d = shapes_of(s->model);
    RingLayer *r = &s->ring_layer;
    const size_t n = s->own_tokens;
    if (s->kept.norm1) {
        Activations a = kept_activations(s, l, 0);
        r->q = a.q, r->attention_out = a.attention_out, r->lse = a.lse;
    } else {
        r->q = push_stored(s, SHARE_WORKSPACE, "queries of one layer", n * d.Q);
        ring_push_attention(s, l);
    }
    r->dattention_out =
        backward ? push_stored(s, SHARE_WORKSPACE, "gradient of one layer's attention output", n * d.Q) : NULL;
}

static void ring_end(StreamBP *s) {
    if (s->ring_layer.q) kept_attention_finish(s);
    memset(&s->ring_layer, 0, sizeof(s->ring_layer));
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
    if (step || own_half(s, c.place) != half) spans.pairs = 0;
    return spans;
}

// A plan of thousands of ranks looks at two blocks of others: all lie in the same two places.
static int block_is_known(const StreamBP *s, size_t step) { return s->dry && step > 2; }

static AttentionShape block_shape(const StreamBP *s, size_t l, BlockRange b, Spans spans) {
    AttentionShape shape = attention_shape(s, l, spans);
    shape.keys = b.keys, shape.partial = 1, shape.accumulate = !b.first;
    return shape;
}

// Attention of an own chunk to the keys of a block's range; sums: of the chunk's output so far.
static void chunk_forward_part(StreamBP *s, size_t l, Chunk c, KeyBlock block, BlockRange b, Spans spans, Summed *sums,
                               Summed *scratch) {
    Shapes d = shapes_of(s->model);
    const size_t row = d.KV * d.stored;
    const RingLayer *r = &s->ring_layer;
    const AttentionShape shape = block_shape(s, l, b, spans);
    s->ops->attention_forward(at(sums, c.begin * d.Q, d.summed), (Summed *)at(r->lse, c.begin * d.NH, d.summed),
                              (Stored *)at(r->q, c.begin * d.Q, d.stored), (Stored *)token_0(block.k, b.skipped, row),
                              (Stored *)token_0(block.v, b.skipped, row), &shape, scratch);
}

// gradients: of the block, added to
static void chunk_backward_part(StreamBP *s, size_t l, Chunk c, KeyBlock block, BlockRange b, Spans spans,
                                const GradientBlock *gradients, Summed *scratch) {
    Shapes d = shapes_of(s->model);
    const size_t row = d.KV * d.stored, sums_row = d.KV * d.summed;
    const RingLayer *r = &s->ring_layer;
    const AttentionShape shape = block_shape(s, l, b, spans);
    s->ops->attention_backward(
        at(r->dq, c.begin * d.Q, d.summed), (Summed *)token_0(gradients->dk, b.skipped, sums_row),
        (Summed *)token_0(gradients->dv, b.skipped, sums_row), (Stored *)at(r->dattention_out, c.begin * d.Q, d.stored),
        (Stored *)at(r->attention_out, c.begin * d.Q, d.stored), (Stored *)at(r->q, c.begin * d.Q, d.stored),
        (Stored *)token_0(block.k, b.skipped, row), (Stored *)token_0(block.v, b.skipped, row),
        (Summed *)at(r->lse, c.begin * d.NH, d.summed), &shape, scratch);
}

// Of each own chunk that sees keys of the block: forward into sums, or backward where there are gradients.
static void block_attention(StreamBP *s, size_t l, KeyBlock block, Summed *sums, const GradientBlock *gradients,
                            size_t step, size_t size) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "attention scratch",
                                  s->ops->attention_scratch(min_size(size, s->own_tokens), d.NH, d.NKV, d.HD));
    for (size_t half = 0; half < 2 && !block_is_known(s, step); half++) {
        const BlockRange b = block_range(s, step, half);
        for (size_t i = 0; b.keys.begin < b.keys.end && i < chunk_visits(s, size); i++) {
            const Chunk c = chunk_visit(s, i, size);
            if (b.keys.begin >= c.place + c.n) continue;
            if (gradients)
                chunk_backward_part(s, l, c, block, b, ring_spans(s, c, step, half), gradients, scratch);
            else
                chunk_forward_part(s, l, c, block, b, ring_spans(s, c, step, half), sums, scratch);
        }
    }
    arena_pop(s->arena, mark);
}

// ---- once around ----------------------------------------------------------------------------------------------------
static KeyBlock own_block(StreamBP *s, size_t l) {
    const KeyBlock own = {layer_keys(s, s->kv.k, l), layer_keys(s, s->kv.v, l)};
    return own;
}

// q, and own K, V -> attended, lse, unless these have been kept
static void ring_forward(StreamBP *s, size_t l, size_t size) {
    const size_t mark = arena_mark(s->arena), count = s->own_tokens * shapes_of(s->model).Q;
    const Range all = {0, s->own_tokens};
    KeyBlock passing[2];
    int64_t ticket = 0;
    if (attention_saved(s)) {
        kept_attention_finish(s);
        return;
    }
    Summed *sums = push_summed(s, SHARE_WORKSPACE, "sums of attention output", count);
    push_passing(s, passing);
    for (size_t step = 0; step < s->ranks; step++) {
        const KeyBlock here = step ? passing[(step - 1) % 2] : own_block(s, l);
        if (step) s->ops->await(ticket);
        if (step + 1 < s->ranks) ticket = keys_pass(s, step, here, passing[step % 2]);
        block_attention(s, l, here, sums, NULL, step, size);
    }
    s->ops->round_sums(s->ring_layer.attention_out, sums, count);
    if (!s->kept.norm1) kept_attention_store(s, l, all, 0, s->ring_layer.attention_out, s->ring_layer.lse);
    arena_pop(s->arena, mark);
}

// ... and dattended -> dq, and dK, dV of the own tokens in kv.dk, kv.dv: of the two that travel by turns, where they
// end.
static void ring_backward(StreamBP *s, size_t l, size_t size) {
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
        block_attention(s, l, here, NULL, &to, step, size);
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

#endif
