/*
Attention of op sets against the reference: documents of every length in one stream, chunks that begin and end inside
documents, every ratio of query to key heads, scores that sharpen the softmax. Keys that a chunk must not read are NaN.
Part of test_ops.c.
*/
#ifndef TEST_OPS_ATTENTION_H
#define TEST_OPS_ATTENTION_H
#if defined(_OPENMP)
#include <omp.h>
#endif
#include "reference.h"
#include "test_ops_tensors.h"

typedef struct {
    size_t NH, NKV, HD;
} Heads;

static const Heads head_shapes[] = {{1, 1, 16},  {3, 3, 20}, {4, 2, 64},  {4, 1, 80},  {8, 1, 16},
                                    {8, 2, 20},  {9, 3, 64}, {5, 5, 128}, {2, 1, 128}, {7, 1, 20},
                                    {8, 1, 128}, {3, 1, 96}, {2, 1, 256}};
enum { HEAD_SHAPES = sizeof(head_shapes) / sizeof(head_shapes[0]) };

// Of the cases below; 0: none. Set by the tests of windows alone.
static size_t case_window;

// The spans of the chunk [t0, t1) of a stream of documents; span[] has room for one per document.
static Spans spans_of(const size_t *lengths, size_t documents, size_t t0, size_t t1, Span *span) {
    size_t start = 0;
    Spans spans = {0};
    spans.span = span, spans.window = case_window;
    for (size_t d = 0; d < documents; start += lengths[d++]) {
        size_t end = start + lengths[d], begin = start > t0 ? start : t0, stop = end < t1 ? end : t1;
        if (begin >= stop) continue;
        span->document = start, span->begin = begin, span->end = stop, span->row = begin - t0;
        for (size_t t = begin; t < stop; t++) spans.pairs += (double)(t + 1 - first_key(start, t, case_window));
        span++, spans.count++;
    }
    return spans;
}

static size_t sum_of(const size_t *lengths, size_t documents) {
    size_t N = 0;
    for (size_t d = 0; d < documents; d++) N += lengths[d];
    return N;
}

// For each of N tokens, whether a query of the spans sees its key.
static char *seen_by(Spans spans, size_t N) {
    char *seen = (char *)case_memory(N);
    for (size_t s = 0; s < spans.count; s++)
        for (size_t t = attention_first_key(spans, s, spans.span[s].begin); t < spans.span[s].end; t++) seen[t] = 1;
    return seen;
}

// K or V of the whole stream; NaN in tokens that are not seen.
static Guarded *keys_or_values(const char *name, size_t N, const char *seen, size_t row, double amplitude) {
    double *values = case_doubles(N * row);
    for (size_t i = 0; i < N * row; i++) values[i] = seen[i / row] ? amplitude * test_normal() : NAN;
    return guarded_values(INPUT, name, ops_device->stored, values, N * row);
}

static void expect_untouched(const Guarded *t, const char *seen, size_t row) {
    for (size_t i = 0; i < t->count; i++)
        if (!seen[i / row] && result(t, i) != t->values[i])
            test_fail("%s[%zu] belongs to no key of these spans, but was changed", t->name, i);
}

// dout . v - delta: two sums of HD products, which nearly cancel in short documents. Of few keys roundings of operands
// hardly average out.
static double inner_slack(size_t HD) {
    return fmax(1.0, sqrt((double)HD / 128.0)) * (testing.operands > 0.0 ? 2.0 : 1.0);
}

// Forward and backward of spans of a stream of N tokens. amplitude: of q and k; slack: how much their size costs in
// accuracy.
static void attention_spans_case(Spans spans, size_t N, Heads heads, double amplitude, double slack) {
    const Ops *ops = ops_device;
    size_t NH = heads.NH, NKV = heads.NKV, HD = heads.HD, n = spans_rows(spans);
    size_t queries = n * NH * HD, keys = N * NKV * HD, key_row = NKV * HD;
    double scale = 1.0 / sqrt((double)HD);
    const char *seen = seen_by(spans, N);
    slack *= inner_slack(HD);
    double *p = case_doubles(N);

    Guarded *q = guarded_normal(INPUT, "q", ops->stored, queries, 0.0, amplitude);
    Guarded *k = keys_or_values("k", N, seen, key_row, amplitude);
    Guarded *v = keys_or_values("v", N, seen, key_row, 1.0);
    Guarded *out = guarded_poison(CHANGED, "out", ops->stored, queries);
    Guarded *lse = guarded_poison(CHANGED, "lse", ops->summed, n * NH);
    size_t scratch_count = ops->attention_scratch(n, NH, NKV, HD);
    Guarded *scratch = guarded_poison(SCRATCH, "scratch", ops->summed, scratch_count);
    const AttentionShape shape = {spans, NH, NKV, HD, scale, all_keys, 0, 0};
    CALL(ops->attention_forward(out->data, lse->data, q->data, k->data, v->data, &shape, scratch->data));
    double *expected_out = case_doubles(queries), *expected_lse = case_doubles(n * NH);
    reference_attention_forward(expected_out, expected_lse, q->values, k->values, v->values, spans, NH, NKV, HD, scale,
                                p);
    expect_within(out, expected_out, slack, 0.0);
    expect_within(lse, expected_lse, slack, 1.0);

    Guarded *given_out = guarded_values(INPUT, "given out", ops->stored, expected_out, queries);
    Guarded *given_lse = guarded_values(INPUT, "given lse", ops->summed, expected_lse, n * NH);
    Guarded *dout = guarded_normal(INPUT, "dout", ops->stored, queries, 0.0, 1.0);
    Guarded *g_dq = guarded_poison(CHANGED, "dq", ops->stored, queries);
    Guarded *g_dk = guarded_normal(CHANGED, "dk", ops->summed, keys, 0.0, 1.0);
    Guarded *g_dv = guarded_normal(CHANGED, "dv", ops->summed, keys, 0.0, 1.0);
    CALL(ops->attention_backward(g_dq->data, g_dk->data, g_dv->data, dout->data, given_out->data, q->data, k->data,
                                 v->data, given_lse->data, &shape, scratch->data));
    double *dq = case_doubles(queries), *dk = case_copy(g_dk->values, keys), *dv = case_copy(g_dv->values, keys);
    reference_attention_backward(dq, dk, dv, dout->values, given_out->values, q->values, k->values, v->values, spans,
                                 NH, NKV, HD, scale, p);
    expect_within(g_dq, dq, slack, 0.3 * amplitude);
    expect_within(g_dk, dk, slack, 0.3 * amplitude);
    expect_within(g_dv, dv, slack, 0.3);
    expect_untouched(g_dk, seen, key_row);
    expect_untouched(g_dv, seen, key_row);
}

// The chunk [t0, t1) alone.
static void attention_chunk_case(const size_t *lengths, size_t documents, size_t t0, size_t t1, Heads heads,
                                 double amplitude, double slack) {
    size_t N = sum_of(lengths, documents);
    test_case("chunk %zu to %zu of %zu tokens, %zu documents, NH=%zu NKV=%zu HD=%zu, amplitude %g, window %zu", t0, t1,
              N, documents, heads.NH, heads.NKV, heads.HD, amplitude, case_window);
    Span *span = (Span *)case_memory(documents * sizeof(Span));
    attention_spans_case(spans_of(lengths, documents, t0, t1, span), N, heads, amplitude, slack);
}

// `count` spans of up to `most` queries somewhere in documents of `room` tokens each: between two of them there are
// other documents' later keys, and they come in no order of the stream.
static void attention_gaps_case(size_t count, size_t most, size_t room, Heads heads) {
    size_t row = 0;
    test_case("%zu spans of up to %zu queries in documents of %zu, NH=%zu NKV=%zu HD=%zu, window %zu", count, most,
              room, heads.NH, heads.NKV, heads.HD, case_window);
    Span *span = (Span *)case_memory(count * sizeof(Span));
    Spans spans = {0};
    spans.span = span, spans.count = count, spans.window = case_window;
    for (size_t s = 0; s < count; s++) { // a shuffle of the documents
        size_t other = test_random_below(s + 1);
        span[s].document = span[other].document, span[other].document = s * room;
    }
    for (size_t s = 0; s < count; s++) {
        const size_t queries = 1 + test_random_below(most), before = test_random_below(room - queries + 1);
        span[s].begin = span[s].document + before, span[s].end = span[s].begin + queries;
        span[s].row = row, row += queries;
    }
    attention_spans_case(spans, count * room, heads, 1.0, 1.0);
}

TEST(attention_one_document) {
    static const size_t lengths[] = {1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++)
        for (size_t h = i % (2 * CASE_STEP); h < HEAD_SHAPES; h += CASE_STEP * (lengths[i] < 20 ? 1 : 4))
            attention_chunk_case(&lengths[i], 1, 0, lengths[i], head_shapes[h], 1.0, 1.0);
    for (size_t i = 0; i < 3; i++) { // several blocks of keys whatever the block
        static const size_t longer[] = {257, 300, 521};
        static const Heads shapes[] = {{4, 1, 20}, {3, 3, 16}, {2, 1, 16}};
        attention_chunk_case(&longer[i], 1, 0, longer[i], shapes[i], 1.0, 1.0);
    }
}

TEST(attention_documents) {
    static const size_t lengths[] = {1, 5, 1, 1, 64, 17, 2, 33, 1};
    static const size_t ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    static const Heads few = {2, 1, 16};
    size_t many[150];
    for (size_t h = 0; h < HEAD_SHAPES; h += CASE_STEP) {
        attention_chunk_case(lengths, 9, 0, sum_of(lengths, 9), head_shapes[h], 1.0, 1.0);
        attention_chunk_case(ones, 20, 0, 20, head_shapes[(h + 1) % HEAD_SHAPES], 1.0, 1.0);
    }
    for (size_t d = 0; d < 150; d++) many[d] = 1 + d % 3;
    // more than an op set may want to take at once
    attention_chunk_case(many, 150, 0, 300, few, 1.0, 1.0);
    attention_chunk_case(many, 150, 7, 292, few, 1.0, 1.0);
}

// Chunks that begin and end anywhere: K, V before the chunk's first document and after the chunk are NaN.
TEST(attention_chunk_of_a_stream) {
    static const size_t lengths[] = {3, 70, 1, 41, 26};
    static const size_t ranges[][2] = {{0, 1},   {1, 2},    {2, 3},    {2, 4},     {3, 4},     {4, 5},     {3, 35},
                                       {35, 73}, {36, 74},  {40, 115}, {72, 75},   {73, 74},   {74, 75},   {74, 138},
                                       {75, 76}, {80, 114}, {90, 120}, {114, 115}, {114, 116}, {115, 140}, {139, 141}};
    for (size_t r = 0; r < sizeof(ranges) / sizeof(ranges[0]); r++) {
        if (r % 2 == 0 || CASE_STEP < 6)
            attention_chunk_case(lengths, 5, ranges[r][0], ranges[r][1], head_shapes[r % HEAD_SHAPES], 1.0, 1.0);
        if (CASE_STEP > 1) continue;
        attention_chunk_case(lengths, 5, ranges[r][0], ranges[r][1], head_shapes[(r + 3) % HEAD_SHAPES], 1.0, 1.0);
    }
    for (size_t r = 0; r < 40; r += CASE_STEP) {
        size_t t0 = test_random_below(141), t1 = t0 + 1 + test_random_below(141 - t0);
        attention_chunk_case(lengths, 5, t0, t1, head_shapes[r % HEAD_SHAPES], 1.0, 1.0);
    }
    for (size_t r = 0; r < 24; r += 2 * CASE_STEP - 1) { // documents of several blocks of keys
        static const size_t longer[] = {140, 5, 269, 1};
        size_t t0 = test_random_below(415), t1 = t0 + 1 + test_random_below(415 - t0 < 70 ? 415 - t0 : 70);
        attention_chunk_case(longer, 4, t0, t1, head_shapes[r % HEAD_SHAPES], 1.0, 1.0);
    }
}

// Every size that kernels are padded to, with many tiles of keys for a query and of queries for a key, none of them a
// whole one.
TEST(attention_tiles) {
    static const size_t lengths[] = {5, 205, 30};
    static const Heads shapes[] = {{2, 1, 32}, {2, 1, 64}, {2, 2, 80}, {2, 1, 96}, {2, 1, 128}, {2, 1, 256}};
    for (size_t h = 0; h < sizeof(shapes) / sizeof(shapes[0]); h++) {
        // 14 after the document begins: of some tiles one key alone is hidden
        if (CASE_STEP == 1 || h % 2 == 0) attention_chunk_case(lengths, 3, 19, 233, shapes[h], 1.0, 1.0);
        if (CASE_STEP == 1 || h % 2) attention_chunk_case(lengths, 2, 170, 207, shapes[h], 1.0, 1.0);
    }
}

// Scores of hundreds, over several blocks of keys: the running maximum must be right, what was summed before it must
// shrink when it grows, and exp must not overflow. fp32 scores of size s err by s * 6e-8.
TEST(attention_sharp_scores) {
    static const size_t lengths[] = {290, 20};
    for (size_t h = 0; h < HEAD_SHAPES; h += CASE_STEP == 1 ? 2 : 6) {
        attention_chunk_case(lengths, 2, 220, 310, head_shapes[h], 8.0, 60.0);
        attention_chunk_case(lengths, 2, 150, 190, head_shapes[h], 1.5, 2.0);
    }
}

// A row's output is a sum over all its keys, here with nearly equal weights of values around 2. Backward takes it from
// every dout . v, so it must be much better than an fp32 sum of so many terms (2e-6).
TEST(attention_long_sums) {
    const Ops *ops = ops_device;
    const size_t T = EMULATED ? 200000 / 9 : 200000, n = 3, HD = 8;
    const Span span = {0, T - n, T, 0};
    test_case("%zu keys", T);
    Spans spans = {0};
    spans.span = &span, spans.count = 1;
    Guarded *q = guarded_normal(INPUT, "q", ops->stored, n * HD, 0.0, 1.0);
    Guarded *k = guarded_normal(INPUT, "k", ops->stored, T * HD, 0.0, 0.003);
    Guarded *v = guarded_normal(INPUT, "v", ops->stored, T * HD, 2.0, 0.3);
    Guarded *out = guarded_poison(CHANGED, "out", ops->stored, n * HD);
    Guarded *lse = guarded_poison(CHANGED, "lse", ops->summed, n);
    Guarded *scratch = guarded_poison(SCRATCH, "scratch", ops->summed, ops->attention_scratch(n, 1, 1, HD));
    const AttentionShape shape = {spans, 1, 1, HD, 1.0, all_keys, 0, 0};
    CALL(ops->attention_forward(out->data, lse->data, q->data, k->data, v->data, &shape, scratch->data));
    double *expected_out = case_doubles(n * HD), *expected_lse = case_doubles(n);
    reference_attention_forward(expected_out, expected_lse, q->values, k->values, v->values, spans, 1, 1, HD, 1.0,
                                case_doubles(T));
    double slack = ops->stored == DTYPE_FP32   ? 0.15
                   : ops->stored == DTYPE_BF16 ? 1.0
                                               : 20.0; // double: the reference's own error
    expect_within(out, expected_out, slack, 0.0);
    expect_within(lse, expected_lse, ops->stored == DTYPE_FP64 ? 20.0 : 1.0, 0.0);
}

// A quiet NaN whose last bits are `payload`, as element i of an input.
static void set_nan(Guarded *t, size_t i, uint64_t payload) {
    const uint64_t quiet[] = {0x7fc0, 0x7fc00000, 0x7ff8000000000000}, size = dtype_size(t->type);
    const uint64_t bits = quiet[size / 4] | payload; // little-endian: its first `size` bytes
    memcpy(t->before + t->offset + i * size, &bits, size);
}

// Whatever bits a NaN has: a query's own output is NaN, and so is that of all that see a key with one.
TEST(attention_nan_shows) {
    static const uint64_t payloads[] = {0, 1, 2, 3, 5, 8, 21, 42, 63};
    const Ops *ops = ops_device;
    const size_t n = 150, HD = 20, bad = 97;
    const Span span = {0, 0, n, 0};
    for (size_t p = 0; p < 2 * sizeof(payloads) / sizeof(payloads[0]); p++) {
        int key = (int)(p % 2);
        test_case("NaN with payload %d in a %s", (int)payloads[p / 2], key ? "key" : "query");
        Spans spans = {0};
        spans.span = &span, spans.count = 1;
        Guarded *q = guarded_normal(INPUT, "q", ops->stored, n * HD, 0.0, 1.0);
        Guarded *k = guarded_normal(INPUT, "k", ops->stored, n * HD, 0.0, 1.0);
        Guarded *v = guarded_normal(INPUT, "v", ops->stored, n * HD, 0.0, 1.0);
        Guarded *out = guarded_poison(CHANGED, "out", ops->stored, n * HD);
        Guarded *lse = guarded_poison(CHANGED, "lse", ops->summed, n);
        Guarded *scratch = guarded_poison(SCRATCH, "scratch", ops->summed, ops->attention_scratch(n, 1, 1, HD));
        set_nan(key ? k : q, bad * HD + 3, payloads[p / 2]);
        tensors_load();
        const AttentionShape shape = {spans, 1, 1, HD, 0.2, all_keys, 0, 0};
        ops->attention_forward(out->data, lse->data, q->data, k->data, v->data, &shape, scratch->data);
        tensors_check(0);
        for (size_t i = bad; i < (key ? n : bad + 1); i++) {
            for (size_t d = 0; d < HD; d++)
                if (!isnan(result(out, i * HD + d)))
                    test_fail("out[%zu] of query %zu is %g, not NaN", d, i, result(out, i * HD + d));
            if (!isnan(result(lse, i))) test_fail("lse of query %zu is %g, not NaN", i, result(lse, i));
        }
        for (size_t i = 0; i < 80 * HD; i++) // far enough before
            if (!isfinite(result(out, i))) test_fail("out[%zu] does not see the NaN, but is %g", i, result(out, i));
    }
}

// ---- threads --------------------------------------------------------------------------------------------------------
static void set_threads(int threads) {
#if defined(_OPENMP)
    omp_set_num_threads(threads);
#else
    (void)threads;
#endif
}

static int threads_now(void) {
#if defined(_OPENMP)
    return omp_get_max_threads();
#else
    return 1;
#endif
}

#ifndef CUDA_ON_CPU // whose kernels know nothing of the CPU's threads
// Work is shared in other ways: whole heads, query blocks, segments of keys.
TEST(attention_with_any_threads) {
    static const int threads[] = {1, 3, 5, 16, 40};
    static const size_t lengths[] = {140, 5, 269, 1, 3};
    static const Heads shapes[] = {{4, 1, 20}, {3, 3, 16}, {4, 2, 20}};
    const int before = threads_now();
    for (size_t i = 0; i < sizeof(threads) / sizeof(threads[0]); i++)
        for (size_t h = CASE_STEP > 1 ? i % 3 : 0; h < 3; h += CASE_STEP) {
            set_threads(threads[i]);
            attention_chunk_case(lengths, 5, 120 + 10 * i, 330 + 20 * i, shapes[h], 1.0, 1.0);
            attention_gaps_case(9, 1 + 20 * h, 60, shapes[h]);
        }
    set_threads(before);
}
#endif

// Plans take the scratch memory of the largest chunk for all. A multiple of the threads must not be a multiple of
// memory.
TEST(attention_scratch_of_any_threads) {
    static const int threads[] = {1, 2, 3, 8, 16, 64, 192};
    const int before = threads_now();
    size_t n, sixteen = 0;
    for (size_t i = 0; i < sizeof(threads) / sizeof(threads[0]); i++) {
        set_threads(threads[i]);
        for (size_t h = 0; h < HEAD_SHAPES; h++) {
            size_t least = 0;
            test_case("%d threads, NH=%zu NKV=%zu HD=%zu", threads[i], head_shapes[h].NH, head_shapes[h].NKV,
                      head_shapes[h].HD);
            for (n = 1; n < 20000; n += 1 + n / 50) {
                size_t now = ops_device->attention_scratch(n, head_shapes[h].NH, head_shapes[h].NKV, head_shapes[h].HD);
                if (now < least) test_fail("n = %zu needs less than fewer queries: %zu after %zu", n, now, least);
                least = now;
            }
        }
        n = ops_device->attention_scratch(1024, 32, 8, 128);
        if (threads[i] == 16) sixteen = n;
        if (sixteen && n > 4 * sixteen) test_fail("%zu elements with %d threads, %zu with 16", n, threads[i], sixteen);
    }
    set_threads(before);
}

// ---- a whole stream, chunk by chunk ---------------------------------------------------------------------------------
typedef struct {
    Guarded *out, *lse, *q, *k, *v, *dout, *dq, *dk, *dv, *scratch;
    const size_t *lengths;
    size_t documents, N, chunk;
    Span *span;
    Heads heads;
    double scale;
} Stream;

static void *at(const Guarded *t, size_t element) { return (char *)t->data + element * dtype_size(t->type); }

static AttentionShape stream_shape(const Stream *s, size_t t0, size_t t1) {
    const Spans spans = spans_of(s->lengths, s->documents, t0, t1, s->span);
    const AttentionShape shape = {spans, s->heads.NH, s->heads.NKV, s->heads.HD, s->scale, all_keys, 0, 0};
    return shape;
}

static void stream_forward(const Stream *s) {
    size_t row = s->heads.NH * s->heads.HD;
    for (size_t t0 = 0; t0 < s->N; t0 += s->chunk) {
        size_t t1 = t0 + s->chunk < s->N ? t0 + s->chunk : s->N;
        const AttentionShape shape = stream_shape(s, t0, t1);
        ops_device->attention_forward(at(s->out, t0 * row), at(s->lse, t0 * s->heads.NH), at(s->q, t0 * row),
                                      s->k->data, s->v->data, &shape, s->scratch->data);
    }
}

static void stream_backward(const Stream *s) { // last chunk first
    size_t chunks = (s->N + s->chunk - 1) / s->chunk, row = s->heads.NH * s->heads.HD;
    while (chunks-- > 0) {
        size_t t0 = chunks * s->chunk, t1 = t0 + s->chunk < s->N ? t0 + s->chunk : s->N;
        const AttentionShape shape = stream_shape(s, t0, t1);
        ops_device->attention_backward(at(s->dq, t0 * row), s->dk->data, s->dv->data, at(s->dout, t0 * row),
                                       at(s->out, t0 * row), at(s->q, t0 * row), s->k->data, s->v->data,
                                       at(s->lse, t0 * s->heads.NH), &shape, s->scratch->data);
    }
}

static void stream_both(const Stream *s) {
    stream_forward(s);
    stream_backward(s);
}

// The chunks together must give what the reference gives for the whole stream at once.
static void attention_stream_case(const size_t *lengths, size_t documents, size_t chunk, Heads heads) {
    const Ops *ops = ops_device;
    Stream s;
    s.lengths = lengths, s.documents = documents, s.N = sum_of(lengths, documents), s.chunk = chunk, s.heads = heads;
    s.scale = 1.0 / sqrt((double)heads.HD);
    size_t queries = s.N * heads.NH * heads.HD, keys = s.N * heads.NKV * heads.HD;
    test_case("%zu tokens, %zu documents, chunks of %zu, NH=%zu NKV=%zu HD=%zu", s.N, documents, chunk, heads.NH,
              heads.NKV, heads.HD);
    s.span = (Span *)case_memory(documents * sizeof(Span));
    s.q = guarded_normal(INPUT, "q", ops->stored, queries, 0.0, 1.0);
    s.k = guarded_normal(INPUT, "k", ops->stored, keys, 0.0, 1.0);
    s.v = guarded_normal(INPUT, "v", ops->stored, keys, 0.0, 1.0);
    s.dout = guarded_normal(INPUT, "dout", ops->stored, queries, 0.0, 1.0);
    s.out = guarded_poison(CHANGED, "out", ops->stored, queries);
    s.lse = guarded_poison(CHANGED, "lse", ops->summed, s.N * heads.NH);
    s.dq = guarded_poison(CHANGED, "dq", ops->stored, queries);
    s.dk = guarded_normal(CHANGED, "dk", ops->summed, keys, 0.0, 1.0);
    s.dv = guarded_normal(CHANGED, "dv", ops->summed, keys, 0.0, 1.0);
    size_t size = ops->attention_scratch(chunk < s.N ? chunk : s.N, heads.NH, heads.NKV, heads.HD);
    s.scratch = guarded_poison(SCRATCH, "scratch", ops->summed, size);
    CALL(stream_both(&s));

    double *out = case_doubles(queries), *lse = case_doubles(s.N * heads.NH), *rounded = case_doubles(queries),
           *p = case_doubles(s.N);
    double *dq = case_doubles(queries), *dk = case_copy(s.dk->values, keys), *dv = case_copy(s.dv->values, keys);
    Spans whole = spans_of(lengths, documents, 0, s.N, s.span);
    reference_attention_forward(out, lse, s.q->values, s.k->values, s.v->values, whole, heads.NH, heads.NKV, heads.HD,
                                s.scale, p);
    for (size_t i = 0; i < queries; i++) rounded[i] = result(s.out, i);
    reference_attention_backward(dq, dk, dv, s.dout->values, rounded, s.q->values, s.k->values, s.v->values, whole,
                                 heads.NH, heads.NKV, heads.HD, s.scale, p);
    expect_near(s.out, out);
    expect_within(s.lse, lse, 1.0, 1.0);
    expect_within(s.dq, dq, 1.0, 0.3);
    expect_within(s.dk, dk, 1.0, 0.3);
    expect_within(s.dv, dv, 1.0, 0.3);
}

TEST(attention_chunks_equal_whole) {
    static const size_t lengths[] = {9, 1, 50, 14, 23}; // 97 tokens
    static const size_t one[] = {97};
    static const size_t chunks[] = {1, 7, 9, 10, 32, 33, 60, 96, 97, 98};
    for (size_t c = 0; c < sizeof(chunks) / sizeof(chunks[0]); c += CASE_STEP) {
        attention_stream_case(lengths, 5, chunks[c], head_shapes[c % HEAD_SHAPES]);
        attention_stream_case(one, 1, chunks[c], head_shapes[(c + 4) % HEAD_SHAPES]);
    }
    for (size_t c = 0; c < 6; c += CASE_STEP == 1 ? 1 : 3) { // several blocks of keys
        static const size_t longer[] = {3, 280}, sizes[] = {40, 64, 127, 128, 131, 283};
        attention_stream_case(longer, 2, sizes[c], head_shapes[c == 0 ? 7 : c % 2 ? 3 : 5]);
    }
}

// Windows of every kind against the tiles: a query's own key alone, less and more than a tile, several, more than
// there is. Keys before the first query's window are NaN, and theirs are no gradients.
TEST(attention_windows) {
    static const size_t windows[] = {1, 2, 7, 31, 64, 65, 128, 200, 1000};
    static const size_t lengths[] = {3, 70, 1, 41, 26}, longer[] = {140, 5, 269, 1};
    size_t h = 0;
    for (size_t w = 0; w < sizeof(windows) / sizeof(windows[0]); w += CASE_STEP == 1 ? 1 : 2) {
        case_window = windows[w];
        attention_chunk_case(lengths, 5, 0, 141, head_shapes[h++ % HEAD_SHAPES], 1.0, 1.0);
        attention_chunk_case(longer, 4, 201, 331, head_shapes[h++ % HEAD_SHAPES], 1.0, 1.0);
        attention_chunk_case(longer, 4, 120, 150, head_shapes[h++ % HEAD_SHAPES], 1.0, 1.0);
        attention_chunk_case(longer, 4, 413, 415, head_shapes[h++ % HEAD_SHAPES], 1.0, 1.0);
        if (CASE_STEP == 1 || w % 4 == 0) attention_stream_case(longer, 4, 61 + w, head_shapes[h++ % HEAD_SHAPES]);
    }
    case_window = 0;
}

// A token of each of so many sequences, at positions of their own, as when a batch is decoded.
TEST(attention_batched_decoding) {
    static const size_t counts[] = {1, 2, 3, 7, 17, 64, 65, 70}, windows[] = {0, 1, 9, 64};
    size_t h = 0;
    for (size_t c = 0; c < 2 * sizeof(counts) / sizeof(counts[0]); c++) {
        case_window = windows[c % 4];
        attention_gaps_case(counts[c / 2], 1, 30 + 17 * (c % 3), head_shapes[h++ % HEAD_SHAPES]);
        if (CASE_STEP == 1 && counts[c / 2] < 20)
            attention_gaps_case(counts[c / 2], 1, 150, head_shapes[h++ % HEAD_SHAPES]);
    }
    case_window = 0;
}

// Several queries of each.
TEST(attention_gaps) {
    static const size_t windows[] = {0, 20, 0, 130};
    for (size_t c = 0; c < HEAD_SHAPES; c += CASE_STEP) {
        case_window = windows[c % 4];
        attention_gaps_case(2 + c % 9, 45, 160, head_shapes[c % HEAD_SHAPES]);
    }
    case_window = 0;
}

#ifdef HAVE_CUDNN
#include "llmc/ops/cuda/cudnn_attention.h"

// After the others: without this they would say nothing of the path that they are run for.
TEST(attention_used_cudnn) {
    if (!cudnn_attention_calls(0) || !cudnn_attention_calls(1))
        test_fail("%zu calls forward, %zu backward", cudnn_attention_calls(0), cudnn_attention_calls(1));
}
#endif

#endif
