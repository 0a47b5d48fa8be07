/*
attention_calls.h: the calls of a chunk cover each query-key pair once, within the library's limits; and the share of
pairs left to our own kernels, at real sizes of calls, over the chunks of a run. Part of test_plan.c.
*/
#ifndef TEST_PLAN_ATTENTION_CALLS_H
#define TEST_PLAN_ATTENTION_CALLS_H
#include "llmc/ops/attention_calls.h"
#include "llmc/stream/sequence.h"
#include "test/base/testing.h"

typedef struct {
    const AttentionCut *cut;
    KeyRange range;        // the shape's keys
    size_t first, queries; // the span's queries, counted from its document
    int *pairs;            // [queries][keys]
} Covered;

static void cover_pairs(const Covered *c, const AttentionCall *call) {
    const size_t document = call->span.document, window = c->cut->window;
    for (size_t t = call->span.begin; t < call->span.end; t++)
        for (size_t key = max_size(first_key(document, t, window), call->keys.begin); key < call->keys.end; key++) {
            if (key > t && call->rows && !call->causal) test_fail("query %zu meets key %zu", t, key);
            if (key > t) break;
            c->pairs[(t - document - c->first) * 2000 + key - document]++;
        }
}

static void cover(void *to, const AttentionCall *call) {
    const Covered *c = (const Covered *)to;
    const size_t grid = c->cut->grid, document = call->span.document, window = c->cut->window;
    const size_t keys = call->keys.end - call->keys.begin;
    if (call->rows) {
        const size_t lowest = max_size(c->range.begin, first_key(document, document + c->first, window));
        if (call->rows % grid || call->rows > c->cut->block || keys % (grid / 2) || c->cut->NKV % call->heads ||
            call->span.end - call->span.begin > call->rows || call->keys.begin < lowest ||
            keys * c->cut->NKV * c->cut->HD > c->cut->elements ||
            (!c->cut->any_order && call->rows * keys * call->heads * c->cut->NH / c->cut->NKV > c->cut->terms) ||
            attention_call_bytes(c->cut, call->rows, keys, call->heads) > c->cut->workspace)
            test_fail("a call of %zu rows, keys %zu to %zu, %zu heads", call->rows, call->keys.begin, call->keys.end,
                      call->heads);
        if (call->causal && call->keys.end != call->span.end) test_fail("the causal call ends elsewhere");
    }
    cover_pairs(c, call);
}

// Checks that every call but the first of its queries is merged, and none has more keys than the library can count.
static void cover_forward(void *to, const AttentionCall *call) {
    const Covered *c = (const Covered *)to;
    const size_t query = call->span.begin - call->span.document - c->first, keys = call->keys.end - call->keys.begin;
    int before = 0;
    for (size_t key = 0; key < 2000; key++) before += c->pairs[query * 2000 + key];
    if (call->rows && (call->rows % c->cut->grid || keys % (c->cut->grid / 2) || call->rows > c->cut->block ||
                       (call->causal && call->rows > keys) || keys * c->cut->NKV * c->cut->HD > c->cut->elements ||
                       (before && !call->merged)))
        test_fail("forward: a call of %zu rows, keys %zu to %zu", call->rows, call->keys.begin, call->keys.end);
    cover_pairs(c, call);
}

TEST(attention_calls_cover_every_pair_once) {
    static const size_t workspaces[] = {0, 20000, 50000, 1000000};
    size_t taken = 0;
    for (size_t i = 0; i < 400; i++) {
        const AttentionChoice choice = {i % 3 == 0, workspaces[i / 5 % 4]};
        AttentionCut cut = attention_cut(8, 4, 16, i % 5 ? 0 : 1 + test_random_below(150), choice);
        cut.windows = 1, cut.grid = 16, cut.block = 64, cut.elements = i % 7 ? 100000 : 30000;
        cut.terms = i % 11 ? 1000000 : 16 * 64 * (2 + i % 5);
        cut.workspace = choice.workspace ? choice.workspace : 200000;
        const size_t document = test_random_below(50), before = test_random_below(i % 2 ? 900 : 60);
        const size_t queries = 1 + test_random_below(300), begin = document + before, end = begin + queries;
        const Span span = {document, begin, end, test_random_below(40)};
        AttentionShape shape = {{&span, 1, cut.window, 0}, 8, 4,     16, 1.0, all_keys,
                                i % 4 == 1 && !cut.window, 0, {0, 0}};
        if (shape.partial) shape.keys.begin = test_random_below(end);
        if (shape.partial) shape.keys.end = shape.keys.begin + test_random_below(end);
        test_case("queries %zu to %zu of document %zu, window %zu, keys %zu to %zu", begin, end, document, cut.window,
                  shape.keys.begin, shape.keys.end);
        Covered c = {&cut, shape.keys, before, queries, (int *)calloc(queries * 2000, sizeof(int))};
        AttentionCounts backward = {&cut, 1, 0, 0, 0, 0, 0, 0}, forward = {&cut, 0, 0, 0, 0, 0, 0, 0};
        for (size_t row = 0; row < span.row + queries; row += cut.block) {
            attention_backward_calls(&cut, &shape, row, cut.block, cover, &c);
            attention_backward_calls(&cut, &shape, row, cut.block, attention_count, &backward);
        }
        Covered seen_forward = c;
        seen_forward.pairs = (int *)calloc(queries * 2000, sizeof(int));
        attention_forward_calls(&cut, &shape, attention_count, &forward);
        attention_forward_calls(&cut, &shape, cover_forward, &seen_forward);
        for (size_t t = begin; t < end; t++)
            for (size_t key = document; key < end; key++) {
                const int seen = key <= t && key >= first_key(document, t, cut.window) && key >= shape.keys.begin &&
                                 key < shape.keys.end;
                const int found = c.pairs[(t - begin) * 2000 + key - document];
                const int again = seen_forward.pairs[(t - begin) * 2000 + key - document];
                if (found != seen) test_fail("query %zu meets key %zu %d times, not %d", t, key, found, seen);
                if (again != seen) test_fail("forward: query %zu meets key %zu %d times, not %d", t, key, again, seen);
            }
        const double pairs = span_pairs(span, shape.keys, cut.window);
        if (backward.own + backward.library != pairs || forward.own + forward.library != pairs)
            test_fail("%g and %g pairs forward, %g and %g backward, not %g", forward.own, forward.library, backward.own,
                      backward.library, pairs);
        taken += backward.library > 0;
        free(c.pairs), free(seen_forward.pairs);
    }
    if (taken < 200) test_fail("the library takes something of %zu spans", taken);
}

static size_t times_asked;
static int asked_to_take(const AttentionCut *cut, const AttentionCall *call, int backward) {
    (void)cut, (void)call, (void)backward;
    times_asked++;
    return 1;
}

TEST(attention_calls_of_a_million_queries) { // 32 heads of 128: 2^31 elements are 524288 queries
    const AttentionChoice choice = {0, 0};
    AttentionCut cut = attention_cut(32, 8, 128, 0, choice);
    const Span span = {0, 0, 1200000, 0};
    const AttentionShape shape = {{&span, 1, 0, 0}, 32, 8, 128, 1.0, all_keys, 0, 0, {0, 0}};
    AttentionCounts forward = {&cut, 0, 0, 0, 0, 0, 0, 0}, backward = {&cut, 1, 0, 0, 0, 0, 0, 0};
    attention_forward_calls(&cut, &shape, attention_count, &forward);
    if (forward.calls > 1000 || forward.own > 1e-4 * forward.library) // 293 pieces, two calls before the last of each
        test_fail("%g calls of %g pairs", forward.calls, forward.library);
    cut.takes = asked_to_take; // once or twice per length of a piece's calls, not per block
    attention_backward_calls(&cut, &shape, 0, 1200000, attention_count, &backward);
    if (!(backward.calls > 40000) || times_asked > 6000)
        test_fail("asked %zu times for %g calls", times_asked, backward.calls);
}

// With STREAMBP_WGMMA our kernels for Hopper compute backward: no calls, no memory for staged results.
TEST(attention_calls_without_backward) {
    const AttentionChoice choice = {0, 0};
    for (int on = 0; on < 2; on++) {
        if (on) setenv("STREAMBP_WGMMA", "1", 1);
        for (size_t HD = 64; HD <= 256; HD *= 2) {
            const int all = LIBRARY_FORWARD + LIBRARY_BACKWARD;
            const size_t own = cuda_attention_scratch(8192, 32, 8, HD, no_slots);
            const size_t planned = gpu_attention_scratch(choice, wgmma_takes_head(HD), 2, 8192, 32, 8, HD, no_slots);
            assert_int_equal(cudnn_directions(90, HD), on ? LIBRARY_FORWARD : all);
            assert_int_equal(cudnn_directions(80, 64), all);
            if (planned < own || (planned > own + 8192 * 32 * HD) != !on)
                test_fail("heads of %zu: %zu elements with the library, %zu without", HD, planned, own);
        }
        assert_int_equal(cudnn_directions(90, 96), LIBRARY_FORWARD + LIBRARY_BACKWARD);
    }
    unsetenv("STREAMBP_WGMMA");
}

// The library may count elements of dS in 32 bits. 4096 queries of 32 heads and 16,384 keys have 2^31.
TEST(attention_calls_have_few_terms) {
    static const struct {
        size_t NH, NKV, HD, heads, block; // expected: key/value heads of a call with the longest block of keys
    } shapes[] = {{32, 8, 128, 4, 16384}, {64, 8, 64, 2, 16384},  {16, 8, 128, 8, 16384},
                  {64, 4, 64, 1, 16384},  {128, 8, 128, 2, 8192}, {32, 1, 128, 1, 8192}};
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        AttentionChoice choice = {0, (size_t)64 << 30};
        AttentionCut cut = attention_cut(shapes[i].NH, shapes[i].NKV, shapes[i].HD, 0, choice);
        const size_t block = attention_key_block(&cut, 4096, 100000), heads = attention_heads(&cut, 4096, block);
        test_case("%zu heads, %zu of keys: %zu heads, %zu keys", cut.NH, cut.NKV, heads, block);
        assert_int_equal(heads, shapes[i].heads), assert_int_equal(block, shapes[i].block);
        cut.workspace = CUDNN_WORKSPACE; // the largest useful workspace has room for this call, and for no larger call
        cut.workspace = attention_workspace_choice(cut, 100000, 0);
        if (block == 16384) assert_int_equal(cut.workspace, attention_call_bytes(&cut, 4096, block, heads));
        assert_int_equal(attention_heads(&cut, 4096, block), heads);
        cut.any_order = 1, cut.workspace = (size_t)64 << 30;
        assert_int_equal(attention_heads(&cut, 4096, 16384), cut.NKV);
    }
}

// One chunk after 8192 tokens, by hand: keys 0 to 8192 in one call, and its own square. Each result is read in 2 bytes
// and added in 4.
TEST(attention_calls_counted_by_hand) {
    const AttentionChoice choice = {0, (size_t)8 << 30};
    const AttentionCut cut = attention_cut(32, 8, 128, 0, choice);
    const Span span = {0, 8192, 12288, 0};
    const AttentionShape shape = {{&span, 1, 0, 0}, 32, 8, 128, 1.0, all_keys, 0, 0, {0, 0}};
    AttentionCounts forward = {&cut, 0, 0, 0, 0, 0, 0, 0}, backward = {&cut, 1, 0, 0, 0, 0, 0, 0};
    const double square = 4096.0 * 4097 / 2, staged = 10.0 * 128 * (2 * 32 * 4096 + 2 * 8 * 12288);
    attention_forward_calls(&cut, &shape, attention_count, &forward);
    attention_backward_calls(&cut, &shape, 0, 4096, attention_count, &backward);
    if (forward.calls != 1 || forward.masked != square || forward.library != square + 4096.0 * 8192)
        test_fail("forward: %g calls, %g of %g pairs masked", forward.calls, forward.masked, forward.library);
    if (backward.calls != 2 || backward.masked != square || backward.staged != staged)
        test_fail("backward: %g calls, %g pairs masked, %g bytes staged, not %g", backward.calls, backward.masked,
                  backward.staged, staged);
}

// Queries up to token 8192 in a window: forward is the library's, to the last pair; backward the one's that is faster.
TEST(attention_windows_go_to_the_faster) {
    static const struct {
        size_t HD, window, rows;
        int library; // takes backward
    } cases[] = {{128, 4096, 1024, 1}, {128, 4096, 4096, 1}, {128, 2048, 4096, 1}, {64, 4096, 1024, 1},
                 {128, 1024, 4096, 0}, {64, 128, 4096, 0},   {256, 1024, 4096, 0}, {256, 4096, 4096, 0}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const AttentionChoice choice = {0, 0};
        const size_t window = cases[i].window, rows = cases[i].rows;
        const Span span = {0, 8192 - rows, 8192, 0};
        const AttentionShape shape = {{&span, 1, window, 0}, 8, 2, cases[i].HD, 1.0, all_keys, 0, 0, {0, 0}};
        const AttentionCut cut = attention_cut_of(&shape, choice);
        AttentionCounts forward = {&cut, 0, 0, 0, 0, 0, 0, 0}, backward = {&cut, 1, 0, 0, 0, 0, 0, 0};
        const double pairs = (double)(rows * window);
        attention_forward_calls(&cut, &shape, attention_count, &forward);
        attention_backward_calls(&cut, &shape, 0, rows, attention_count, &backward);
        test_case("heads of %zu, a window of %zu, %zu queries", cases[i].HD, window, rows);
        if (forward.library != pairs || forward.own != 0)
            test_fail("forward: %g pairs in the library, %g not", forward.library, forward.own);
        if ((backward.library > 0) != cases[i].library || backward.own + backward.library != pairs)
            test_fail("backward: %g pairs in the library, %g not", backward.library, backward.own);
        const size_t keys = rows + (window - 1) / 256 * 256; // of one call; the rest, up to 255, are our kernels'
        if (cases[i].library && backward.unseen != (double)(rows * keys) - backward.library)
            test_fail("backward: %g pairs outside the window are computed", backward.unseen);
    }
}

// The calls of a run's chunks: counts, and the lengths that the library compiles
typedef struct {
    AttentionCut cut;
    AttentionCounts counts[2]; // forward, backward
    size_t lengths[2];
    AttentionCall length[2][1000];
} Taken;

typedef struct {
    Taken *taken;
    int backward;
} TakenWay;

static void take_length(void *to, const AttentionCall *call) {
    const TakenWay *way = (const TakenWay *)to;
    Taken *t = way->taken;
    const size_t known = t->lengths[way->backward];
    AttentionCall *of = t->length[way->backward], alike = *call;
    const size_t window = call->causal ? call->window : 0, keys = call->keys.end - call->keys.begin;
    size_t i = 0;
    attention_count(&t->counts[way->backward], call);
    if (!call->rows) return;
    alike.window = window, alike.keys.begin = 0, alike.keys.end = keys;
    while (i < known && (of[i].rows != call->rows || of[i].keys.end != keys || of[i].heads != call->heads ||
                         of[i].window != window || of[i].causal != call->causal))
        i++;
    if (i == COUNT_OF(t->length[0])) test_fail("more than %zu lengths", i);
    if (i == known) of[t->lengths[way->backward]++] = alike;
}

static void take_chunk(Taken *t, AttentionShape shape, AttentionChoice choice) {
    TakenWay forward = {t, 0}, backward = {t, 1};
    t->cut = attention_cut_of(&shape, choice);
    t->counts[0].cut = t->counts[1].cut = &t->cut, t->counts[1].backward = 1;
    attention_forward_calls(&t->cut, &shape, take_length, &forward);
    for (size_t row = 0; row < spans_rows(shape.spans); row += t->cut.block)
        attention_backward_calls(&t->cut, &shape, row, t->cut.block, take_length, &backward);
}

// Takes the calls of all chunks of 4096 tokens of all ranks; ring: one of its blocks of keys after the other.
static void take_calls(Taken *t, const Batch *batch, size_t ranks, size_t window, int ring, AttentionChoice choice) {
    const Ops ops = ops_dry(DTYPE_BF16, NULL, 0, 0);
    const Model model = {0};
    const Setup setup = {.method = METHOD_STREAM, .chunk = 4096};
    StreamBP s = {0};
    s.model = &model, s.ops = &ops, s.setup = &setup, s.now.batch = batch, s.now.N = batch->N, s.now.ranks = ranks;
    s.memory.walk.layers = 1;
    s.now.span = (Span *)calloc(batch->documents + 1, sizeof(Span));
    for (size_t rank = 0; rank < ranks; rank++) {
        for (size_t half = 0; half < 2; half++) s.now.own[half] = sequence_part(s.now.N, ranks, rank, half);
        s.now.rows = s.now.own[0].count + s.now.own[1].count;
        for (size_t i = 0; i < chunk_count(&s); i++) {
            AttentionShape shape = {
                make_spans(&s, chunk_at(&s, i), window, 0), 32, 8, 128, 1.0, all_keys, ring, 0, {0, 0}};
            if (!ring) take_chunk(t, shape, choice);
            for (size_t part = 0; ring && part < 2 * ranks; part++) {
                const Range keys = sequence_part(s.now.N, ranks, part / 2, part % 2);
                shape.keys.begin = keys.begin, shape.keys.end = keys.begin + keys.count;
                take_chunk(t, shape, choice);
            }
        }
    }
    free(s.now.span);
}

// Cuts a batch of N tokens into documents of random lengths.
static Batch random_documents(size_t *start, size_t N, size_t first, size_t shortest, size_t longest) {
    Batch batch = {0};
    for (start[0] = 0; start[batch.documents] < N; batch.documents++) {
        size_t length = shortest + test_random_below(longest - shortest + 1);
        if (!batch.documents && first) length = first;
        start[batch.documents + 1] = min_size(start[batch.documents] + length, N);
    }
    batch.document_start = start, batch.N = N;
    return batch;
}

// Returns the percentage of query-key pairs left to our own kernels: the larger of forward and backward.
static double own_percent(const Batch *batch, size_t ranks) {
    const AttentionChoice choice = {0, 0};
    Taken *t = (Taken *)calloc(1, sizeof(Taken));
    take_calls(t, batch, ranks, 0, 0, choice);
    const AttentionCounts forward = t->counts[0], backward = t->counts[1];
    const Range all = {0, batch->N};
    const double pairs = range_pairs(batch, all, 0);
    if (fabs(forward.own + forward.library - pairs) > 1e-9 * pairs ||
        fabs(backward.own + backward.library - pairs) > 1e-9 * pairs)
        test_fail("%.17g and %.17g pairs, not %.17g", forward.own + forward.library, backward.own + backward.library,
                  pairs);
    free(t);
    return 100 * fmax(forward.own, backward.own) / pairs;
}

// Shares left to our own kernels at chunk 4096. Blocks on a grid from the document's start left 18.4, 13, 12.8 and 13.2
// percent backward.
TEST(attention_that_leaves_the_library) {
    static const struct {
        size_t shortest, longest, first, N, ranks; // lengths of documents; length of the first one
        double most;
    } cases[] = {{1024, 8192, 0, 262144, 1, 6},
                 {8192, 65536, 0, 1048576, 1, 2},
                 {131072, 131072, 100, 131172, 1, 1},
                 {1000000, 1000000, 0, 1000000, 8, 0.5}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        size_t start[300];
        const Batch batch = random_documents(start, cases[i].N, cases[i].first, cases[i].shortest, cases[i].longest);
        const double percent = own_percent(&batch, cases[i].ranks);
        if (!(percent <= cases[i].most))
            test_fail("documents of %zu to %zu tokens, %zu ranks: %.2f %% of pairs, at most %g", cases[i].shortest,
                      cases[i].longest, cases[i].ranks, percent, cases[i].most);
    }
}

// Each length costs a compilation, and none is ever dropped: 600 documents of any length ask for few.
TEST(attention_calls_have_few_lengths) {
    static const struct {
        size_t shortest, longest, N, ranks, window; // ranks: of a ring
        AttentionChoice choice;
        size_t most[2]; // lengths, forward and backward
    } cases[] = {
        {1024, 8192, 32768, 1, 0, {0, 0}, {102, 32}},   {1024, 8192, 32768, 1, 0, {0, (size_t)5 << 30}, {102, 32}},
        {1, 8192, 32768, 1, 1024, {0, 0}, {30, 20}},    {1, 40000, 131072, 1, 4096, {0, 0}, {70, 40}},
        {1, 131072, 131072, 1, 0, {0, 0}, {150, 32}},   {1, 131072, 131072, 1, 0, {1, (size_t)3 << 30}, {150, 44}},
        {1, 1048576, 1048576, 1, 0, {0, 0}, {200, 32}}, {1024, 8192, 32768, 4, 0, {0, 0}, {102, 32}},
        {1, 131072, 131072, 4, 0, {0, 0}, {150, 32}}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Taken *t = (Taken *)calloc(1, sizeof(Taken));
        for (size_t documents = 0; documents < 600;) {
            static size_t start[40000];
            const Batch batch = random_documents(start, cases[i].N, 0, cases[i].shortest, cases[i].longest);
            documents += batch.documents;
            take_calls(t, &batch, cases[i].ranks, cases[i].window, cases[i].ranks > 1, cases[i].choice);
        }
        if (t->lengths[0] > cases[i].most[0] || t->lengths[1] > cases[i].most[1])
            test_fail("documents of %zu to %zu tokens, %zu ranks, window %zu: %zu lengths forward, %zu backward",
                      cases[i].shortest, cases[i].longest, cases[i].ranks, cases[i].window, t->lengths[0],
                      t->lengths[1]);
        free(t);
    }
}

#endif
