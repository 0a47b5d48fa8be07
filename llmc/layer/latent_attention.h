/*
Latent attention (arXiv 2405.04434): all heads' keys and values of a token follow from one short vector, its latent.
With h the mixer's norm, R the rotated elements of a head of HD, and rms an RMSNorm with an epsilon of its own:

    q = W_q rms(W_qd h), or W_q h          per head HD - R elements, then R rotated ones
    c = rms(W_c h)                         the latent; kv.k holds c in place of keys
    r = rotate(W_r h)                      R elements that the keys of all heads share; kv.v holds r
    [k | v] = W_kv c, k = [k | r]          per head HD - R elements of the key, and VD <= HD of the value

Only c and r of all tokens are stored, moved and kept. Keys and values of heads exist in one of two ways:

    layer     of all tokens of one layer: each latent is expanded once a pass over the layer. Attention then runs as in
              any layer. In backward dK, dV of a chunk are folded into dc and dr at the chunk's own visit.
    ranges    of a range of tokens at a time: a chunk's queries take its ranges in turn, and attention merges the
              results as a ring does (orders/ring.h). Backward expands a range again, and folds its dK, dV at once.

dc, dr are Summed and complete at the visit of their own chunk.

    bytes     layer 2 N NH HD (s + 4 in backward)
    FLOPs     an expansion of N latents takes 2 N kv_rank NH (HD - R + VD), and its folding twice that, with frozen
              weights once. For n queries that see N keys by ranges: kv_rank (HD - R + VD) / (2 n HD) of attention's
              forward

Adapters of W_kv are run with each expansion, as in any linear layer. W_kv + s B A, made once, would round adapters away
that are below half a unit in the last place of a bf16 weight.
*/
#ifndef LLMC_LATENT_ATTENTION_H
#define LLMC_LATENT_ATTENTION_H
#include "branch.h"

enum { LATENT_CHUNKS = 4 }; // chunks in a range: a merge reads and writes a chunk's sums

static int is_latent(const Visit *v) { return v->layer->shape.shared_key != 0; }

// ---- queries, latents -----------------------------------------------------------------------------------------------
// The norm of queries of low rank and of latents, which ignores rms_norm_eps
static const Norm latent_norm = {1e-6, 0, NORM_RMS};

// Rotates the part of keys that heads share, x[n,R], in place; backward: rotates it back.
static void shared_key_rotate(const Visit *v, Stored *x, int backward) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    s->ops->rope(x, s->now.position + v->c.row, s->setup->inverse_frequency[0] + (d->HD - d->shared_key) / 2, v->c.n, 1,
                 d->shared_key, d->shared_key, rotation_of(&s->model->config, 0, 0), backward);
}

// Returns the norm of queries of low rank, pushed.
static Stored *push_low_norm(const Visit *v, const Stored *low) {
    const size_t width = v->layer->shape.low;
    Stored *norm = push_stored(v->s, SHARE_WORKSPACE, "norm of queries of low rank", v->c.n * width);
    v->s->ops->norm_forward(norm, low, weight_of(v, Q_NORM), NULL, NULL, v->c.n, width, latent_norm);
    return norm;
}

// q[n,NH*HD] from `low`[n,rank], the product of QUERY_DOWN
static void latent_queries(const Visit *v, Stored *q, const Stored *low) {
    const size_t mark = arena_mark(v->s->arena);
    linear_forward(v, Q_WEIGHT, q, push_low_norm(v, low), NULL);
    rotate(v, Q_NORM, q, 0);
    arena_pop(v->s->arena, mark);
}

// Adds the gradient through queries to dnorm. Overwrites dq.
static void latent_queries_backward(const Visit *v, Activations *a, Stored *dq) {
    const StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena), width = v->layer->shape.low;
    rotate(v, Q_NORM, dq, 1);
    const Stored *norm = push_low_norm(v, a->q_linear);
    Stored *dlow = push_stored(s, SHARE_WORKSPACE, "gradient of queries of low rank", v->c.n * width);
    linear_backward(v, Q_WEIGHT, dlow, dq, norm, 0);
    norm_kind_backward(s, latent_norm, dlow, sum_of(v, Q_NORM), NULL, dlow, a->q_linear, weight_of(v, Q_NORM), v->c.n,
                       width, 0);
    mixer_input_backward(v, a, linear_of(v, QUERY_DOWN), dlow);
    arena_pop(s->arena, mark);
}

// dc[c], dr[c], which are complete -> their part of dnorm. linear: the product of latents. Pushes; the caller pops
static void latents_backward(const Visit *v, Activations *a, const Stored *linear) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const size_t n = v->c.n;
    Stored *dlatent = push_stored(s, SHARE_WORKSPACE, "gradient of latents", n * d->KV);
    Stored *dshared = push_stored(s, SHARE_WORKSPACE, "gradient of the shared part of keys", n * d->VV);
    s->ops->round_sums(dlatent, key_gradient_at(s, KEYS, v->l, v->c.token), n * d->KV);
    s->ops->round_sums(dshared, key_gradient_at(s, VALUES, v->l, v->c.token), n * d->VV);
    norm_kind_backward(s, latent_norm, dlatent, sum_of(v, K_NORM), NULL, dlatent, linear, weight_of(v, K_NORM), n,
                       d->KV, 0);
    mixer_input_backward(v, a, linear_of(v, K_WEIGHT), dlatent);
    shared_key_rotate(v, dshared, 1);
    mixer_input_backward(v, a, linear_of(v, V_WEIGHT), dshared);
}

// ---- expanding and folding ------------------------------------------------------------------------------------------
// Returns the visit of a range's tokens, for their products.
static Visit range_visit(const Visit *v, Range range) {
    Visit of = *v;
    of.c.token = range.begin, of.c.n = range.count;
    return of;
}

// Returns x's rows from token `from` on.
static HeadKeys head_keys_from(const Visit *v, HeadKeys x, size_t from) {
    const StreamBP *s = v->s;
    const size_t Q = v->layer->shape.Q;
    const HeadKeys rows = {stored_row(s, x.k, from, Q), stored_row(s, x.v, from, Q),
                           x.dk ? summed_row(s, x.dk, from, Q) : NULL, x.dv ? summed_row(s, x.dv, from, Q) : NULL};
    return rows;
}

// Pushes the product of the latents of at most n tokens.
static Stored *push_product(const Visit *v, size_t n) {
    return push_stored(v->s, SHARE_KV, "product of latents", n * linear_of(v, KEY_VALUE_UP).out);
}

// Makes K, V of the range from its latents. to: rows of the range
static void latents_expand(const Visit *v, Range range, HeadKeys to, Stored *product) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const Visit of = range_visit(v, range);
    linear_forward(&of, KEY_VALUE_UP, product, key_value_at(s, KEYS, v->l, of.c.token), NULL);
    s->ops->latent_expand(to.k, to.v, product, key_value_at(s, VALUES, v->l, of.c.token), of.c.n, d->NH, d->HD, d->VD,
                          d->shared_key);
}

// Adds dK, dV of the range, of at most n tokens, to dc, dr of its tokens; dW +=
static void latents_fold(const Visit *v, Range range, HeadKeys from, Stored *product, size_t n) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const Visit of = range_visit(v, range);
    const size_t mark = arena_mark(s->arena), token = of.c.token;
    Stored *dlatent = push_stored(s, SHARE_WORKSPACE, "gradient of a range's latents", n * d->KV);
    s->ops->latent_fold(product, key_gradient_at(s, VALUES, v->l, token), from.dk, from.dv, of.c.n, d->NH, d->HD, d->VD,
                        d->shared_key);
    linear_backward(&of, KEY_VALUE_UP, dlatent, product, key_value_at(s, KEYS, v->l, token), 0);
    s->ops->sums_add(key_gradient_at(s, KEYS, v->l, token), dlatent, of.c.n * d->KV);
    arena_pop(s->arena, mark);
}

// ---- a layer at once ------------------------------------------------------------------------------------------------
// Tells whether latents of the visited layer are expanded by ranges, again for each chunk.
static int expands_ranges(const Visit *v) { return is_latent(v) && !v->s->kv.heads.k; }

// Expands or folds the latents that the index-th chunk is the first to see, a chunk's tokens at a time. The dry run
// that visits one chunk for many counts their calls, too.
static void latents_of_chunk(const Visit *v, size_t index, int fold) {
    StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena), most = min_size(s->now.N, layer_chunk(s));
    const Range part = tokens_first_seen(s, index);
    Stored *product = push_product(v, most);
    for (size_t done = 0, times = 1, n = 0; done < part.count; done += times * n) {
        n = min_size(most, part.count - done);
        const Range range = {part.begin + done, n};
        const HeadKeys rows = head_keys_from(v, s->kv.heads, range.begin);
        if (visits_shapes(s)) times = (part.count - done) / n;
        if (visits_shapes(s)) walk_count(&s->memory.walk, s->ops, (double)times);
        if (fold)
            latents_fold(v, range, rows, product, most);
        else
            latents_expand(v, range, rows, product);
    }
    if (visits_shapes(s)) walk_count(&s->memory.walk, s->ops, v->c.times);
    arena_pop(s->arena, mark);
}

// Expands the latents that chunk c sees, unless this pass over the layer has expanded them; each token once.
static void latents_expand_once(const Visit *v) {
    for (size_t *i = &v->s->kv.expanded; *i <= v->c.index; (*i)++) latents_of_chunk(v, *i, 0);
}

// Returns K, V of the layer, and their gradients, as attention takes them.
static HeadKeys attention_keys(const Visit *v) {
    const StreamBP *s = v->s;
    const HeadKeys stored = {layer_keys(s, KEYS, v->l), layer_keys(s, VALUES, v->l), s->kv.dk, s->kv.dv};
    if (!is_latent(v)) return stored;
    latents_expand_once(v);
    return s->kv.heads;
}

// ---- ranges ---------------------------------------------------------------------------------------------------------
// Attention of some of a chunk's queries, forward or backward, by ranges of keys
typedef struct {
    const Activations *a;
    Stored *dq, *dattention_out; // backward; else NULL
    Summed *sums;                // of out or dq over several ranges; NULL: one range has all keys
    Summed *scratch;
    Stored *product;
    HeadKeys of; // of the current range
    Range range;
} LatentAttention;

// Returns the tokens of a range.
static size_t latent_range(const StreamBP *s) { return min_size(s->now.N, LATENT_CHUNKS * layer_chunk(s)); }

// Pushes the tensors of a range. dq NULL: forward
static LatentAttention push_latent_attention(const Visit *v, const Activations *a, Stored *dq, Stored *dattention_out,
                                             Summed *scratch) {
    const StreamBP *s = v->s;
    const size_t R = latent_range(s), count = R * v->layer->shape.Q;
    LatentAttention x = {a, dq, dattention_out, NULL, scratch, NULL, {NULL, NULL, NULL, NULL}, {0, 0}};
    if (R < s->now.N || has_forks(s))
        x.sums = push_summed(s, SHARE_WORKSPACE, "sums of a chunk's ranges", v->c.n * v->layer->shape.Q);
    x.product = push_product(v, R);
    x.of.k = push_stored(s, SHARE_KV, "keys of a range", count);
    x.of.v = push_stored(s, SHARE_KV, "values of a range", count);
    if (!dq) return x;
    x.of.dk = push_summed(s, SHARE_KV, "gradient of keys of a range", count);
    x.of.dv = push_summed(s, SHARE_KV, "gradient of values of a range", count);
    return x;
}

// Expands the range's latents; in backward dK = dV = 0.
static void range_begin(const Visit *v, const LatentAttention *x) {
    const Shapes *d = &v->layer->shape;
    const size_t bytes = x->range.count * d->Q * d->summed;
    latents_expand(v, x->range, x->of, x->product);
    if (x->dq) v->s->ops->zero(x->of.dk, bytes), v->s->ops->zero(x->of.dv, bytes);
}

// Runs the attention op on the range, for the chunk's queries from row `row` on.
static void latent_op(const Visit *v, const LatentAttention *x, const AttentionShape *shape, size_t row) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const Activations *a = x->a;
    const size_t from = x->range.begin, bytes = d->Q * d->stored;
    const Stored *k = (const Stored *)token_0(x->of.k, from, bytes),
                 *values = (const Stored *)token_0(x->of.v, from, bytes);
    Summed *sums = x->sums ? summed_row(s, x->sums, row, d->Q) : NULL, *lse = summed_row(s, a->lse, row, d->NH);
    Stored *q = stored_row(s, a->q, row, d->Q), *out = stored_row(s, a->attention_out, row, d->Q);
    if (x->dq)
        s->ops->attention_backward(
            sums ? (void *)sums : stored_row(s, x->dq, row, d->Q), (Summed *)token_0(x->of.dk, from, d->Q * d->summed),
            (Summed *)token_0(x->of.dv, from, d->Q * d->summed), stored_row(s, x->dattention_out, row, d->Q), out, q, k,
            values, lse, shape, x->scratch);
    else
        s->ops->attention_forward(sums ? (void *)sums : out, lse, q, k, values, shape, x->scratch);
}

// Runs the attention op on the range with the chunk's spans, and in a tree with forks with `calls` calls.
static void latent_calls(const Visit *v, const LatentAttention *x, Spans spans, size_t row, size_t calls, int first) {
    const StreamBP *s = v->s;
    AttentionShape shape = attention_shape(s, v->l, spans);
    shape.keys.begin = x->range.begin, shape.keys.end = x->range.begin + x->range.count;
    shape.slots = no_slots;
    shape.partial = x->sums != NULL, shape.accumulate = shape.partial && !first;
    latent_op(v, x, &shape, row);
    for (size_t i = 0; i < calls; i++) {
        TreeCall call = s->now.call[i];
        call.keys.begin = max_size(call.keys.begin, x->range.begin);
        call.keys.end = min_size(call.keys.end, x->range.begin + x->range.count);
        if (call.keys.begin >= call.keys.end) continue;
        attention_shape_call(&shape, &call);
        latent_op(v, x, &shape, row + call.row);
    }
}

// Runs attention of spans' queries, from row `row` of the chunk on, over the ranges of tokens `seen`.
static void latent_spans(const Visit *v, LatentAttention *x, Spans spans, size_t row, KeyRange seen, size_t calls) {
    for (size_t done = seen.begin; done < seen.end; done += x->range.count) {
        x->range.begin = done, x->range.count = min_size(latent_range(v->s), seen.end - done);
        const KeyRange keys = {done, done + x->range.count};
        spans.pairs = 0;
        for (size_t i = 0; i < spans.count; i++) spans.pairs += span_pairs(spans.span[i], keys, 0);
        range_begin(v, x);
        latent_calls(v, x, spans, row, calls, done == seen.begin);
        if (x->dq) latents_fold(v, x->range, x->of, x->product, latent_range(v->s));
    }
}

// Tells whether the dry run visits one range for all ranges of the chunks that c counts for.
static int counts_ranges(const Visit *v) {
    const StreamBP *s = v->s;
    return !v->c.given && (visits_shapes(s) || (s->memory.walk.dry && !has_forks(s)));
}

static void latent_count(const Visit *v, LatentAttention *x, Spans spans) {
    StreamBP *s = v->s;
    const Range chunks = {v->c.token, (size_t)v->c.times * v->c.n};
    const double seen = latents_seen(s->now.batch, chunks, v->c.n, 0);
    const size_t end = v->c.token + v->c.n, count = latent_range(s); // ranks' chunks differ: the most of any
    x->range.begin = max_size(end, count) - count, x->range.count = count;
    const double times = s->memory.walk.chunks / s->memory.walk.layers; // that the visit of c counts now
    walk_count(&s->memory.walk, s->ops, times / v->c.times * seen / (double)count);
    range_begin(v, x);
    if (x->dq) latents_fold(v, x->range, x->of, x->product, count);
    walk_count(&s->memory.walk, s->ops, times);
    latent_calls(v, x, spans, 0, 0, 1);
}

// Runs attention by ranges: q, c, r -> attention_out, lse; with dq backward: dq, dc, dr += from dattention_out
static void latent_attention(const Visit *v, const Activations *a, Stored *dq, Stored *dattention_out,
                             Summed *scratch) {
    const StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena), calls = tree_calls(s, v->c, 0);
    const Spans spans = layer_spans(s, v->l, v->c);
    LatentAttention x = push_latent_attention(v, a, dq, dattention_out, scratch);
    if (counts_ranges(v))
        latent_count(v, &x, spans);
    else if (!v->c.given)
        latent_spans(v, &x, spans, 0, keys_seen(s->now.batch, v->c.token, v->c.n), calls);
    for (size_t i = 0; v->c.given && i < spans.count; i++) { // generation: texts lie apart
        Span span = spans.span[i];
        const KeyRange seen = {span.document, span.end};
        const Spans one = {&span, 1, 0, 0};
        const size_t row = span.row;
        span.row = 0;
        latent_spans(v, &x, one, row, seen, 0);
    }
    if (x.sums) s->ops->round_sums(dq ? dq : a->attention_out, x.sums, v->c.n * v->layer->shape.Q);
    arena_pop(s->arena, mark);
}

#endif
