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
#include "cases.h"

static const Heads head_shapes[] = {{1, 1, 16},  {3, 3, 20}, {4, 2, 64},  {4, 1, 80},  {8, 1, 16},
                                    {8, 2, 20},  {9, 3, 64}, {5, 5, 128}, {2, 1, 128}, {7, 1, 20},
                                    {8, 1, 128}, {3, 1, 96}, {2, 1, 256}};
enum { HEAD_SHAPES = COUNT_OF(head_shapes) };

// Returns the spans of the chunk [t0, t1) of a stream of documents; span[] has room for one per document.
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

// Checks the chunk [t0, t1) alone.
static void attention_chunk_case(const size_t *lengths, size_t documents, size_t t0, size_t t1, Heads heads,
                                 double amplitude, double slack) {
    size_t N = sum_of(lengths, documents);
    case_of("", "chunk %zu to %zu of %zu tokens, %zu documents, NH=%zu NKV=%zu HD=%zu, amplitude %g, window %zu", t0,
            t1, N, documents, heads.NH, heads.NKV, heads.HD, amplitude, case_window);
    Span *span = (Span *)case_memory(documents * sizeof(Span));
    attention_spans_case(spans_of(lengths, documents, t0, t1, span), N, heads, amplitude, slack);
}

// Checks `count` spans of up to `most` queries in documents of `room` tokens each. Other documents' later keys lie
// between them; their order is random.
static void attention_gaps_case(size_t count, size_t most, size_t room, Heads heads) {
    size_t row = 0;
    case_of("", "%zu spans of up to %zu queries in documents of %zu, NH=%zu NKV=%zu HD=%zu, window %zu", count, most,
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
    for (size_t i = 0; i < COUNT_OF(lengths); i++)
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
    for (size_t r = 0; r < COUNT_OF(ranges); r++) {
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

// Every padded head size, with many tiles of keys for a query and of queries for a key, none of them whole.
TEST(attention_tiles) {
    static const size_t lengths[] = {5, 205, 30};
    static const Heads shapes[] = {{2, 1, 32}, {2, 1, 64}, {2, 2, 80}, {2, 1, 96}, {2, 1, 128}, {2, 1, 256}};
    for (size_t h = 0; h < COUNT_OF(shapes); h++) {
        // 14 after the document begins: in some tiles a single key is hidden
        if (CASE_STEP == 1 || h % 2 == 0) attention_chunk_case(lengths, 3, 19, 233, shapes[h], 1.0, 1.0);
        if (CASE_STEP == 1 || h % 2) attention_chunk_case(lengths, 2, 170, 207, shapes[h], 1.0, 1.0);
    }
}

// Scores of hundreds, over several blocks of keys: a new running maximum must scale down the earlier sums, and exp must
// not overflow. fp32 scores of size s err by s * 6e-8.
TEST(attention_sharp_scores) {
    static const size_t lengths[] = {290, 20};
    for (size_t h = 0; h < HEAD_SHAPES; h += CASE_STEP == 1 ? 2 : 6) {
        attention_chunk_case(lengths, 2, 220, 310, head_shapes[h], 8.0, 60.0);
        attention_chunk_case(lengths, 2, 150, 190, head_shapes[h], 1.5, 2.0);
    }
}

typedef struct {
    Guarded *q, *k, *v, *out, *lse, *scratch;
    AttentionShape shape;
} OneHead;

// Returns the queries of tokens [begin, end) of one document and one head.
static OneHead one_head(size_t begin, size_t end, size_t HD, double scale, double of_keys, double mean,
                        double of_values) {
    Span *span = (Span *)case_memory(sizeof(Span));
    span->begin = begin, span->end = end;
    const size_t n = end - begin;
    const Spans spans = {span, 1, 0, 0.0};
    const OneHead h = {input("q", n * HD),
                       normal(INPUT, "k", ops->stored, end * HD, 0.0, of_keys),
                       normal(INPUT, "v", ops->stored, end * HD, mean, of_values),
                       output("out", n * HD),
                       sums_out("lse", n),
                       scratch_of(SCRATCH_FOR(attention, n, 1, 1, HD, no_slots)),
                       {spans, 1, 1, HD, scale, all_keys, 0, 0, {0, 0}}};
    return h;
}

// A row's output is a sum over all its keys, here with nearly equal weights of values around 2. Backward subtracts it
// from every dout . v: it must be much better than an fp32 sum of so many terms (2e-6).
TEST(attention_long_sums) {
    const size_t T = EMULATED ? 200000 / 9 : 200000;
    const double reference_error = ops->stored == DTYPE_FP64 ? 20.0 : 1.0;
    case_of("", "%zu keys", T);
    const OneHead h = one_head(T - 3, T, 8, 1.0, 0.003, 2.0, 0.3);
    CHECK(attention_forward, of(h.out), of(h.lse), of(h.q), of(h.k), of(h.v), &h.shape, of(h.scratch));
    expect(h.out, ops->stored == DTYPE_FP32 ? 0.15 : reference_error, 0.0);
    expect(h.lse, reference_error, 0.0);
}

// Sets element i of an input to a quiet NaN with last bits `payload`.
static void set_nan(Guarded *t, size_t i, uint64_t payload) {
    const uint64_t quiet[] = {0x7fc0, 0x7fc00000, 0x7ff8000000000000}, size = dtype_size(t->type);
    const uint64_t bits = quiet[size / 4] | payload; // little-endian: its first `size` bytes
    memcpy(t->before + t->offset + i * size, &bits, size);
}

// For any bits of a NaN: a query's own output is NaN, and so are those of all that see a NaN key.
TEST(attention_nan_shows) {
    static const uint64_t payloads[] = {0, 1, 2, 3, 5, 8, 21, 42, 63};
    enum { TOKENS = 150, HD = 20, BAD = 97 };
    for (size_t p = 0; p < 2 * COUNT_OF(payloads); p++) {
        const int key = (int)(p % 2);
        case_of("", "NaN with payload %d in a %s", (int)payloads[p / 2], key ? "key" : "query");
        const OneHead h = one_head(0, TOKENS, HD, 0.2, 1.0, 0.0, 1.0);
        set_nan(key ? h.k : h.q, BAD * HD + 3, payloads[p / 2]);
        tensors_load();
        ops->attention_forward(h.out->data, h.lse->data, h.q->data, h.k->data, h.v->data, &h.shape, h.scratch->data);
        tensors_check(0);
        for (size_t i = BAD * HD; i < (key ? TOKENS : BAD + 1) * HD; i++) {
            if (!isnan(result(h.out, i))) test_fail("out[%zu] is %g, not NaN", i, result(h.out, i));
            if (!isnan(result(h.lse, i / HD))) test_fail("lse[%zu] is %g, not NaN", i / HD, result(h.lse, i / HD));
        }
        for (size_t i = 0; i < 80 * HD; i++) // out of its reach
            if (!isfinite(result(h.out, i))) test_fail("out[%zu] does not see the NaN, but is %g", i, result(h.out, i));
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

#ifndef CUDA_ON_CPU // emulated kernels ignore the CPU's threads
// Divides the work in other ways: whole heads, query blocks, segments of keys.
TEST(attention_with_any_threads) {
    static const int threads[] = {1, 3, 5, 16, 40};
    static const size_t lengths[] = {140, 5, 269, 1, 3};
    static const Heads shapes[] = {{4, 1, 20}, {3, 3, 16}, {4, 2, 20}};
    const int before = threads_now();
    for (size_t i = 0; i < COUNT_OF(threads); i++)
        for (size_t h = CASE_STEP > 1 ? i % 3 : 0; h < 3; h += CASE_STEP) {
            set_threads(threads[i]);
            attention_chunk_case(lengths, 5, 120 + 10 * i, 330 + 20 * i, shapes[h], 1.0, 1.0);
            attention_gaps_case(9, 1 + 20 * h, 60, shapes[h]);
        }
    set_threads(before);
}
#endif

// Plans use the largest chunk's scratch for all. More threads must not multiply the memory.
TEST(attention_scratch_of_any_threads) {
    static const int threads[] = {1, 2, 3, 8, 16, 64, 192};
    const int before = threads_now();
    size_t n, sixteen = 0;
    for (size_t i = 0; i < COUNT_OF(threads); i++) {
        set_threads(threads[i]);
        for (size_t h = 0; h < HEAD_SHAPES; h++) {
            size_t least = 0;
            case_of("", "%d threads, NH=%zu NKV=%zu HD=%zu", threads[i], head_shapes[h].NH, head_shapes[h].NKV,
                    head_shapes[h].HD);
            for (n = 1; n < 20000; n += 1 + n / 50) {
                const Heads *of = &head_shapes[h];
                size_t now = ops_device->attention_scratch(n, of->NH, of->NKV, of->HD, no_slots);
                if (now < least) test_fail("n = %zu needs less than fewer queries: %zu after %zu", n, now, least);
                least = now;
            }
        }
        n = ops_device->attention_scratch(1024, 32, 8, 128, no_slots);
        if (threads[i] == 16) sixteen = n;
        if (sixteen && n > 4 * sixteen) test_fail("%zu elements with %d threads, %zu with 16", n, threads[i], sixteen);
    }
    set_threads(before);
}

// Windows of every kind against the tiles: a query's own key alone, less and more than a tile, several tiles, more than
// all keys. Keys before the first query's window are NaN and get no gradients.
TEST(attention_windows) {
    static const size_t windows[] = {1, 2, 7, 31, 64, 65, 128, 200, 1000};
    static const size_t lengths[] = {3, 70, 1, 41, 26}, longer[] = {140, 5, 269, 1};
    size_t h = 0;
    for (size_t w = 0; w < COUNT_OF(windows); w += CASE_STEP == 1 ? 1 : 2) {
        case_window = windows[w];
        attention_chunk_case(lengths, 5, 0, 141, head_shapes[h++ % HEAD_SHAPES], 1.0, 1.0);
        attention_chunk_case(longer, 4, 201, 331, head_shapes[h++ % HEAD_SHAPES], 1.0, 1.0);
        attention_chunk_case(longer, 4, 120, 150, head_shapes[h++ % HEAD_SHAPES], 1.0, 1.0);
        attention_chunk_case(longer, 4, 413, 415, head_shapes[h++ % HEAD_SHAPES], 1.0, 1.0);
    }
    case_window = 0;
}

// One token of each of several sequences, at different positions, as in batched decoding.
TEST(attention_batched_decoding) {
    static const size_t counts[] = {1, 2, 3, 7, 17, 64, 65, 70}, windows[] = {0, 1, 9, 64};
    size_t h = 0;
    for (size_t c = 0; c < 2 * COUNT_OF(counts);
         c += EMULATED && !all_cases() ? 3 : 1) { // 3: every count, every window
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

#endif
