/*
Attention over ranges of keys, one at a time, against the reference with all keys at once. K, V, dK and dV of a range
are tensors of their own, with guards at both ends: everything outside of the range is NaN and must not be written.
Ranges are cut at random, some of them empty, and come in any order. Part of test_ops.c.
*/
#ifndef TEST_OPS_ATTENTION_PART_H
#define TEST_OPS_ATTENTION_PART_H
#include "test_ops_attention.h"

enum { MOST_PARTS = 5 };

typedef struct {
    KeyRange keys;
    Guarded *k, *v, *dk, *dv; // [keys.end - keys.begin,NKV,HD]
} Part;

typedef struct {
    Spans spans;
    Heads heads;
    size_t n, N, parts;
    double scale;
    double *k, *v, *dk, *dv; // [N,NKV,HD]  of all parts
    Part part[MOST_PARTS];
    Guarded *q, *out_sum, *lse, *out, *dout, *given_out, *given_lse, *dq_sum, *dq, *scratch;
} PartCase;

// Returns the address of token 0 of the stream, for a tensor that begins with token `first`.
static void *from_token_zero(const Guarded *t, size_t first, size_t row) {
    return (void *)((uintptr_t)t->data - first * row * dtype_size(t->type));
}

static AttentionShape part_shape(const PartCase *c, const Part *p, int accumulate) {
    const AttentionShape shape = {c->spans, c->heads.NH, c->heads.NKV, c->heads.HD, c->scale,
                                  p->keys,  1,           accumulate,   case_slots};
    return shape;
}

static void part_forward(const PartCase *c, const Part *p, int accumulate) {
    const size_t row = c->heads.NKV * c->heads.HD, first = p->keys.begin;
    const AttentionShape shape = part_shape(c, p, accumulate);
    ops->attention_forward(c->out_sum->data, c->lse->data, c->q->data, from_token_zero(p->k, first, row),
                           from_token_zero(p->v, first, row), &shape, c->scratch->data);
}

static void parts_forward(const PartCase *c) {
    for (size_t i = 0; i < c->parts; i++) part_forward(c, &c->part[i], i > 0);
    ops->round_sums(c->out->data, c->out_sum->data, c->out->count);
}

static void parts_backward(const PartCase *c) {
    const size_t row = c->heads.NKV * c->heads.HD;
    for (size_t i = 0; i < c->parts; i++) {
        const Part *p = &c->part[i];
        const size_t first = p->keys.begin;
        const AttentionShape shape = part_shape(c, p, i > 0);
        ops->attention_backward(c->dq_sum->data, from_token_zero(p->dk, first, row), from_token_zero(p->dv, first, row),
                                c->dout->data, c->given_out->data, c->q->data, from_token_zero(p->k, first, row),
                                from_token_zero(p->v, first, row), c->given_lse->data, &shape, c->scratch->data);
    }
    ops->round_sums(c->dq->data, c->dq_sum->data, c->dq->count);
}

// Cuts the stream [0, N) into c->parts shuffled ranges.
static void cut_parts(PartCase *c, size_t row) {
    size_t other, cut[MOST_PARTS + 1] = {0};
    for (size_t i = 1; i < c->parts; i++) cut[i] = test_random_below(c->N + 1);
    cut[c->parts] = c->N;
    for (size_t i = 1; i < c->parts; i++) // sorted
        for (other = i; other > 1 && cut[other - 1] > cut[other]; other--) {
            const size_t swapped = cut[other];
            cut[other] = cut[other - 1], cut[other - 1] = swapped;
        }
    for (size_t i = 0; i < c->parts; i++) {
        other = test_random_below(i + 1);
        c->part[i].keys = c->part[other].keys;
        c->part[other].keys.begin = cut[i], c->part[other].keys.end = cut[i + 1];
    }
    for (size_t i = 0; i < c->parts; i++) {
        Part *p = &c->part[i];
        const size_t at = p->keys.begin * row, count = (p->keys.end - p->keys.begin) * row;
        p->k = guarded_values(INPUT, "k", ops->stored, c->k + at, count);
        p->v = guarded_values(INPUT, "v", ops->stored, c->v + at, count);
        p->dk = guarded_values(CHANGED, "dk", ops->summed, c->dk + at, count);
        p->dv = guarded_values(CHANGED, "dv", ops->summed, c->dv + at, count);
    }
}

// Rows without a key have out 0 and lse -infinity. Sets these to 0 on both sides for the next comparison.
static void expect_keyless_rows(const PartCase *c, const double *out, double *lse) {
    const size_t HD = c->heads.HD;
    for (size_t r = 0; r < c->lse->count; r++) {
        if (lse[r] != -INFINITY) continue;
        if (result(c->lse, r) != -INFINITY) test_fail("lse[%zu] is %g without a key", r, result(c->lse, r));
        for (size_t d = 0; d < HD; d++)
            if (result(c->out_sum, r * HD + d) != out[r * HD + d])
                test_fail("out[%zu] is %g without a key", r * HD + d, result(c->out_sum, r * HD + d));
        lse[r] = 0.0;
        element_write(c->lse->after + c->lse->offset, c->lse->type, r, 0.0);
    }
}

// Returns a case without the parts' own tensors.
static PartCase part_case(Spans spans, size_t N, Heads heads, size_t parts, double amplitude) {
    const char *seen = seen_by(spans, N, 0);
    const size_t row = heads.NKV * heads.HD;
    PartCase c = {0};
    c.spans = spans, c.heads = heads, c.N = N, c.parts = parts, c.n = spans_rows(spans);
    c.scale = 1.0 / sqrt((double)heads.HD);
    size_t queries = c.n * heads.NH * heads.HD;
    c.k = values_of_seen(N, seen, row, amplitude), c.v = values_of_seen(N, seen, row, 1.0);
    c.dk = case_doubles(N * row), c.dv = case_doubles(N * row);
    for (size_t i = 0; i < N * row; i++)
        c.dk[i] = round_to(ops->summed, test_normal()), c.dv[i] = round_to(ops->summed, test_normal());
    c.q = guarded_normal(INPUT, "q", ops->stored, queries, 0.0, amplitude);
    c.out_sum = guarded_poison(CHANGED, "sums of out", ops->summed, queries);
    c.lse = guarded_poison(CHANGED, "lse", ops->summed, c.n * heads.NH);
    c.out = guarded_poison(CHANGED, "out", ops->stored, queries);
    c.scratch = guarded_poison(SCRATCH, "scratch", ops->summed,
                               ops->attention_scratch(c.n, heads.NH, heads.NKV, heads.HD, case_slots));
    cut_parts(&c, row);
    return c;
}

// amplitude and slack as in attention_spans_case
static void attention_parts_case(Spans spans, size_t N, Heads heads, size_t parts, double amplitude, double slack) {
    const size_t NH = heads.NH, NKV = heads.NKV, HD = heads.HD, row = NKV * HD;
    PartCase c = part_case(spans, N, heads, parts, amplitude);
    const size_t queries = c.q->count;
    double *out = case_doubles(queries), *lse = case_doubles(c.n * NH), *dq = case_doubles(queries);
    slack *= attention_slack(HD);
    AttentionShape first = part_shape(&c, &c.part[0], 0), whole = first;
    whole.keys = all_keys;
    CALL(part_forward(&c, &c.part[0], 0));
    reference_attention_forward(out, lse, c.q->values, c.k, c.v, &first, NULL);
    expect_keyless_rows(&c, out, lse);
    expect_within(c.out_sum, out, slack, 1.0);
    expect_within(c.lse, lse, slack, 1.0);
    CALL(parts_forward(&c));
    reference_attention_forward(out, lse, c.q->values, c.k, c.v, &whole, NULL);
    expect_within(c.out_sum, out, slack, 0.0);
    expect_within(c.out, out, slack, 0.0);
    expect_within(c.lse, lse, slack, 1.0);

    c.given_out = guarded_values(INPUT, "given out", ops->stored, out, queries);
    c.given_lse = guarded_values(INPUT, "given lse", ops->summed, lse, c.n * NH);
    c.dout = guarded_normal(INPUT, "dout", ops->stored, queries, 0.0, 1.0);
    c.dq_sum = guarded_poison(CHANGED, "sums of dq", ops->summed, queries);
    c.dq = guarded_poison(CHANGED, "dq", ops->stored, queries);
    CALL(parts_backward(&c));
    reference_attention_backward(dq, c.dk, c.dv, c.dout->values, c.given_out->values, c.q->values, c.k, c.v, NULL,
                                 &whole, NULL);
    expect_within(c.dq_sum, dq, slack, 0.3 * amplitude);
    expect_within(c.dq, dq, slack, 0.3 * amplitude);
    for (size_t i = 0; i < parts; i++) { // keys that no query sees are as they were
        expect_within(c.part[i].dk, c.dk + c.part[i].keys.begin * row, slack, 0.3 * amplitude);
        expect_within(c.part[i].dv, c.dv + c.part[i].keys.begin * row, slack, 0.3);
    }
}

// Checks the chunk [t0, t1) of a stream of documents.
static void chunk_in_parts(const size_t *lengths, size_t documents, size_t t0, size_t t1, Heads heads, size_t parts,
                           double amplitude, double slack) {
    const size_t N = sum_of(lengths, documents);
    case_of("", "%zu parts of %zu tokens, %zu documents, queries %zu to %zu, NH=%zu NKV=%zu HD=%zu, window %zu", parts,
            N, documents, t0, t1, heads.NH, heads.NKV, heads.HD, case_window);
    Span *span = (Span *)case_memory(documents * sizeof(Span));
    attention_parts_case(spans_of(lengths, documents, t0, t1, span), N, heads, parts, amplitude, slack);
}

TEST(attention_parts_equal_whole) {
    static const size_t lengths[] = {1, 2, 5, 16, 33, 64, 65, 129, 200, 300};
    size_t h = 0;
    for (size_t i = 0; i < COUNT_OF(lengths); i++)
        for (size_t parts = 1 + i % (CASE_STEP > 1 ? MOST_PARTS : 3); parts <= MOST_PARTS;
             parts += 3 * CASE_STEP, h++) {
            chunk_in_parts(&lengths[i], 1, 0, lengths[i], head_shapes[h % HEAD_SHAPES], parts, 1.0, 1.0);
            chunk_in_parts(&lengths[i], 1, lengths[i] / 2, lengths[i], head_shapes[(h + 5) % HEAD_SHAPES], parts, 1.0,
                           1.0); // ranges before all queries: nothing is masked
        }
}

TEST(attention_parts_of_documents) {
    static const size_t lengths[] = {3, 70, 1, 41, 26}, longer[] = {140, 5, 269, 1};
    static const size_t windows[] = {0, 0, 1, 7, 31, 64, 65, 128, 200, 1000};
    const size_t step = 4 * CASE_STEP - 1;
    size_t h = 0;
    for (size_t w = 0; w < COUNT_OF(windows); w++) {
        case_window = windows[w];
        for (size_t r = 0; r < 9; r += step, h++) {
            const size_t t0 = test_random_below(141), t1 = t0 + 1 + test_random_below(141 - t0);
            const size_t from = test_random_below(415), room = 415 - from < 90 ? 415 - from : 90;
            chunk_in_parts(lengths, 5, t0, t1, head_shapes[h % HEAD_SHAPES], 1 + h % MOST_PARTS, 1.0, 1.0);
            chunk_in_parts(longer, 4, from, from + 1 + test_random_below(room), head_shapes[(h + 3) % HEAD_SHAPES],
                           1 + (h + 2) % MOST_PARTS, 1.0, 1.0);
        }
    }
    case_window = 0;
}

// The largest score may be in any of the ranges, far above the earlier ones.
TEST(attention_parts_sharp_scores) {
    static const size_t lengths[] = {290, 20};
    for (size_t h = 1; h < HEAD_SHAPES; h += CASE_STEP == 1 ? 2 : 6) {
        chunk_in_parts(lengths, 2, 220, 310, head_shapes[h], 2 + h % 4, 8.0, 60.0);
        chunk_in_parts(lengths, 2, 100, 190, head_shapes[h], 2 + h % 4, 1.5, 2.0);
    }
}

// Heads above 256, whole and padded, have kernels of their own on a GPU: whole, in parts, with windows and gaps.
TEST(attention_wide_heads) {
    static const size_t lengths[] = {5, 100, 30}, windows[] = {0, 20, 70};
    static const Heads shapes[] = {{4, 1, 512}, {2, 2, 300}, {2, 1, 512}};
    for (size_t w = 0; w < COUNT_OF(windows); w++) {
        case_window = windows[w];
        attention_chunk_case(lengths, 3, 60, 120, shapes[w], 1.0, 1.0);
        chunk_in_parts(lengths, 3, 40, 80, shapes[(w + 1) % 3], 3, 1.0, 1.0);
        attention_gaps_case(3, 1 + 20 * w, 60, shapes[(w + 2) % 3]);
    }
    case_window = 0;
    attention_chunk_case(lengths, 2, 80, 105, shapes[2], 8.0, 60.0);
}

#ifndef CUDA_ON_CPU // emulated kernels ignore the CPU's threads
TEST(attention_parts_with_any_threads) {
    static const int threads[] = {1, 3, 5, 16, 40};
    static const size_t lengths[] = {140, 5, 269, 1, 3};
    static const Heads shapes[] = {{4, 1, 20}, {3, 3, 16}, {4, 2, 20}};
    const int before = threads_now();
    for (size_t i = 0; i < COUNT_OF(threads); i++)
        for (size_t h = i; h < i + 2; h += CASE_STEP) {
            set_threads(threads[i]);
            chunk_in_parts(lengths, 5, 120 + 10 * i, 330 + 20 * i, shapes[h % 3], 1 + (i + h) % MOST_PARTS, 1.0, 1.0);
        }
    set_threads(before);
}
#endif

#ifdef HAVE_CUDNN
#include "llmc/ops/cuda/cudnn_attention.h"

// Documents off the grid of cuDNN's blocks, longer than a block and shorter than the grid, whole and in ranges of keys:
// in any order, with memory for few heads, for all, for long blocks of keys.
TEST(attention_choices) {
    static const AttentionChoice own_choice = {0, 0}, choices[] = {{1, 0}, {0, 300000}, {0, 2000000}, {1, 600000}};
    static const size_t lengths[] = {5, 200, 1, 90}, windows[] = {0, 50};
    static const Heads shapes[] = {{8, 2, 64}, {4, 2, 128}, {6, 6, 16}};
    testing.all_aligned = 1;
    for (size_t i = 0; i < COUNT_OF(choices); i++)
        for (size_t w = 0; w < 2; w++) {
            const size_t from = test_random_below(120), end = 205 + test_random_below(92);
            ops->attention_choose(choices[i]), case_window = windows[w];
            attention_chunk_case(lengths, 4, from, end, shapes[i % 3], 1.0, 1.0);
            chunk_in_parts(lengths, 4, from, end, shapes[(i + 1) % 3], 2 + w, 1.0, 1.0);
        }
    case_window = 0, testing.all_aligned = 0;
    ops->attention_choose(own_choice);
}

// Runs last: checks that the tests above took cuDNN's path.
TEST(attention_used_cudnn) {
    if (!cudnn_attention_calls(0) || !cudnn_attention_calls(1))
        test_fail("%zu calls forward, %zu backward", cudnn_attention_calls(0), cudnn_attention_calls(1));
}
#endif

// Compares span_pairs, used by plans, with counting.
TEST(attention_pairs_of_a_range) {
    for (size_t i = 0; i < 2000; i++) {
        const size_t window = i % 3 ? 0 : 1 + test_random_below(40);
        size_t pairs = 0;
        Span span;
        KeyRange keys;
        span.document = test_random_below(20), span.begin = span.document + test_random_below(30), span.row = 0;
        span.end = span.begin + 1 + test_random_below(30);
        keys.begin = test_random_below(90), keys.end = keys.begin + test_random_below(40);
        for (size_t t = span.begin; t < span.end; t++)
            for (size_t key = first_key(span.document, t, window); key <= t; key++)
                pairs += key >= keys.begin && key < keys.end;
        if (span_pairs(span, keys, window) != (double)pairs)
            test_fail("queries %zu to %zu of document %zu, keys %zu to %zu, window %zu: %g pairs, not %zu", span.begin,
                      span.end, span.document, keys.begin, keys.end, window, span_pairs(span, keys, window), pairs);
    }
}

#endif
