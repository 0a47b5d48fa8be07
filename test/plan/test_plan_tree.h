/*
Plans of documents that share prefixes: the plan of a tree equals the whole walk in bytes and FLOPs, for every family
and method; a bound's plan holds every tree within it; shapes have the rows and forks of their bound; rows and pairs of
five examples are exact. Part of test_plan.c.
*/
#ifndef TEST_PLAN_TREE_H
#define TEST_PLAN_TREE_H
#include "llmc/run/bound.h"
#include "test/base/testing.h"

// A document of `length` positions, length + 1 tokens: the first `shared` tokens of an earlier document, then its own
typedef struct {
    size_t length, of, shared;
} Path;

// Returns the leading rows that two documents share.
static size_t paths_common(const Batch *b, size_t x, size_t y) {
    const size_t *start = b->document_start, most = min_size(text_length(b, x), text_length(b, y));
    size_t n = 0;
    while (n < most && b->tokens[start[x] + n] == b->tokens[start[y] + n] &&
           b->targets[start[x] + n] == b->targets[start[y] + n])
        n++;
    return n;
}

// Tells whether document x comes before y by their tokens.
static int path_is_before(const Batch *b, size_t x, size_t y) {
    const size_t n = paths_common(b, x, y), i = b->document_start[x] + n, j = b->document_start[y] + n;
    if (n == text_length(b, x) || n == text_length(b, y)) return text_length(b, x) < text_length(b, y);
    return b->tokens[i] != b->tokens[j] ? b->tokens[i] < b->tokens[j] : b->targets[i] < b->targets[j];
}

// Returns the batch of these documents with its tree. Free it with batch_free.
static Batch forest(const Path *path, size_t documents) {
    size_t N = 0;
    for (size_t d = 0; d < documents; d++) N += path[d].length;
    Batch b = batch_allocate(N, documents);
    for (size_t d = 0; d < documents; d++) b.document_start[d] = d ? b.document_start[d - 1] + path[d - 1].length : 0;
    batch_set_positions(&b);
    for (size_t d = 0; d < documents; d++)
        for (size_t t = 0; t <= path[d].length; t++) { // the id is the document that the token is of
            size_t of = d;
            while (of && t < path[of].shared) of = path[of].of;
            if (t < path[d].length) b.tokens[b.document_start[d] + t] = (int32_t)of;
            if (t) b.targets[b.document_start[d] + t - 1] = (int32_t)of;
        }
    batch_allocate_tree(&b, N);
    size_t *const order = b.room->order, *const common = b.room->common;
    for (size_t d = 0, i; d < documents; d++) { // sorted
        for (i = d; i && path_is_before(&b, d, order[i - 1]); i--) order[i] = order[i - 1];
        order[i] = d;
    }
    for (size_t i = 1; i < documents; i++) common[i] = paths_common(&b, order[i - 1], order[i]);
    b.tree = tree_build(b.room, &b, order, common);
    return b;
}

// Draws a forest of at most 6 documents of at most `most` positions.
static Batch drawn_forest(size_t most) {
    Path path[6];
    const size_t documents = 2 + test_random_below(5);
    for (size_t d = 0; d < documents; d++) {
        Path *p = &path[d];
        p->length = 1 + test_random_below(most), p->of = d ? test_random_below(d) : 0, p->shared = 0;
        if (d && test_random_below(5)) p->shared = test_random_below(min_size(p->length, path[p->of].length) + 2);
    }
    return forest(path, documents);
}

static SequenceBound bound_of(const Batch *b) {
    SequenceBound bound = {b->N, b->documents, 0, b->tree ? b->tree->rows.N : 0, b->tree ? b->tree->forks : 0};
    for (size_t d = 0; d < b->documents; d++) bound.longest = max_size(bound.longest, text_length(b, d));
    return bound;
}

// Returns settings of a pass by number: methods that trees have, chunks, levels of --keep, --inputs-every, objectives.
static RunSettings tree_settings(const Model *model, size_t i) {
    static const size_t chunks[] = {0, 1, 3, 7, 16, 64};
    static const ObjectiveKind kinds[] = {OBJECTIVE_SFT, OBJECTIVE_GRPO, OBJECTIVE_DPO, OBJECTIVE_KTO};
    const Method method = (Method)(i % METHOD_SECO);
    RunSettings settings = pass_settings(model, method, method_has_chunks(method) ? chunks[i / 4 % 6] : 0, 1);
    tiny_keep(&settings, (i / 4 + i / 24) % (method > METHOD_CHECKPOINT ? 3 : TINY_KEEPS));
    settings.inputs_every = method_recomputes(method) ? 1 + i / 8 % 3 : 1;
    settings.objective.kind = kinds[i / 3 % 4];
    settings.reference =
        i % 5 && !objective_needs_mismatched(&settings.objective) ? REFERENCE_NOT_COMPUTED : REFERENCE_MODEL;
    return settings;
}

// The plan visits one chunk of each length; the whole walk visits each, with a call for each range of ancestors.
TEST(trees_count_the_same) {
    const size_t step = all_cases() ? 1 : 17;
    size_t walks = 0, forks = 0;
    for (size_t m = 0; m < MODELS; m++) {
        SCOPED(model_free) Model model = planned_model(models[m], m % 2 ? DTYPE_BF16 : DTYPE_FP32);
        for (size_t i = m % step; i < 4 * 6 * 8; i += step) {
            Batch batch = drawn_forest(i % 7 ? 40 : 90);
            RunSettings settings = tree_settings(&model, i);
            OpCounts whole;
            size_t peak;
            test_case("model %zu, case %zu", m, i);
            settings.objective.kind = OBJECTIVE_SFT, settings.reference = REFERENCE_NOT_COMPUTED;
            const Plan plan = plan_make(&settings, &batch);
            whole_walk(&settings, &batch, &whole, &peak);
            const size_t N = batch_rows(&batch)->N, chunk = settings.chunk, rest = chunk ? N % chunk : 0;
            const int even = chunk && N > chunk && rest && rest < chunk / 8; // see abbreviation_counts_the_same
            if (plan.total_bytes < peak || (!even && plan.total_bytes > peak))
                test_fail("plan %zu bytes, whole walk %zu", plan.total_bytes, peak);
            const double allowed = even ? 0.05 : 1e-9;
            if (!(fabs(plan.counts.flops - whole.flops) <= allowed * whole.flops))
                test_fail("plan %.17g FLOP, whole walk %.17g", plan.counts.flops, whole.flops);
            const double found = flops_forward_backward(&settings, &batch);
            if (!(fabs(found - plan.counts.flops) <= 1e-14 * found))
                test_fail("%.17g FLOP by the formula, the walk counts %.17g", found, plan.counts.flops);
            walks++, forks += batch.tree && batch.tree->forks;
            batch_free(&batch);
        }
    }
    printf("             %zu walks, %zu with forks\n", walks, forks);
    assert_true(2 * forks > walks);
}

// A run is planned for a bound of its data: every tree within it fits. The shape has the bound's rows and forks.
TEST(trees_fit_their_bound) {
    const size_t step = all_cases() ? 1 : 17;
    for (size_t m = 0; m < MODELS; m++) {
        SCOPED(model_free) Model model = planned_model(models[m], m % 2 ? DTYPE_BF16 : DTYPE_FP32);
        for (size_t i = m % step; i < 4 * 6 * 8; i += step) {
            Batch batch = drawn_forest(40);
            const RunSettings settings = tree_settings(&model, i);
            SequenceBound bound = bound_of(&batch);
            if (bound.rows && i % 3) bound.rows += test_random_below(20), bound.N += 20 + test_random_below(90);
            if (bound.rows && i % 3 == 1) bound.documents += test_random_below(9), bound.forks += test_random_below(3);
            Batch shape = batch_shape(bound);
            test_case("model %zu, case %zu", m, i);
            assert_int_equal(shape.tree != NULL, bound.rows != 0);
            if (shape.tree) {
                const Batch *rows = &shape.tree->rows;
                assert_int_equal(rows->N, bound.rows);
                assert_int_equal(shape.tree->forks, bound.forks);
                assert_int_equal(rows->document_start[rows->documents], rows->N);
            }
            const size_t bytes = plan_make(&settings, &batch).total_bytes,
                         most = plan_make(&settings, &shape).total_bytes;
            if (bytes > most) test_fail("a tree needs %zu bytes, the bound's plan has %zu", bytes, most);
            if (i % 3 == 0 && bytes != most) test_fail("a tree needs %zu bytes, its own bound %zu", bytes, most);
            batch_free(&batch), batch_free(&shape);
        }
    }
}

// ---- examples -------------------------------------------------------------------------------------------------------
static double triangle(double n) { return n * (n + 1) / 2; }

static void expect_tree(const char *name, Batch *b, double positions, double rows, double alone, double pairs,
                        size_t forks) {
    const Range texts = {0, b->N}, all = {0, b->tree ? b->tree->rows.N : 0};
    test_case("%s", name);
    if (!b->tree) test_fail("nothing is shared");
    const double found[] = {(double)b->N, (double)all.count, range_pairs(b, texts, 0),
                            range_pairs(&b->tree->rows, all, 0)};
    const double expected[] = {positions, rows, alone, pairs};
    for (size_t i = 0; i < 4; i++)
        if (found[i] != expected[i]) test_fail("value %zu is %.17g, not %.17g", i, found[i], expected[i]);
    if (b->tree->forks != forks) test_fail("%zu forks, not %zu", b->tree->forks, forks);
    printf("             %-28s %8.0f rows of %8.0f, %8.1f of %8.1f Mpairs, %zu fork(s)\n", name, found[1], found[0],
           1e-6 * found[3], 1e-6 * found[2], b->tree->forks);
    batch_free(b);
}

// B documents of T tokens that share their first P: B branches of T - P + 1 rows below a root of P - 1.
static void expect_shared(const char *name, size_t B, size_t T, size_t P) {
    Path path[64] = {{0}};
    const double b = (double)B, t = (double)T, p = (double)P - 1;
    for (size_t d = 0; d < B; d++) path[d].length = T, path[d].shared = d ? P : 0;
    Batch texts = forest(path, B);
    Batch shape = batch_shape((SequenceBound){B * T, B, T, rows_of_shared(B, T, P), 1});
    const double rows = p + b * (t - p), pairs = triangle(p) + b * (triangle(t) - triangle(p));
    expect_tree(name, &texts, b * t, rows, b * triangle(t), pairs, 1);
    expect_tree("  its shape", &shape, b * t, rows, b * triangle(t), pairs, 1);
}

// 40 turns: document k is the first k / 40 of 64k tokens. With reasoning each turn ends in 1000 tokens that later turns
// do not see; its last 200 tokens follow them again.
TEST(examples_are_exact) {
    enum { TURNS = 40, ALL = 65536, LEFT = 200, THOUGHT = 1000 };
    Path path[TURNS + 1] = {{0}};
    double positions = 0, alone = 0, rows = ALL, pairs = triangle(ALL);
    expect_shared("8 answers of 4k on 32k", 8, 36864, 32768);
    expect_shared("a pair of 1k on 8k", 2, 9216, 8192);
    expect_shared("64 answers of 512 on 2k", 64, 2560, 2048);
    path[0].length = ALL;
    for (size_t k = 0; k < TURNS; k++) {
        path[k].length = ALL - ALL * k / TURNS, path[k].shared = k ? path[k].length + 1 : 0;
        positions += (double)path[k].length, alone += triangle((double)path[k].length);
    }
    Batch agent = forest(path, TURNS);
    expect_tree("an agent's 40 turns to 64k", &agent, positions, rows, alone, pairs, 0);
    for (size_t k = 1; k <= TURNS; k++) { // path[0]: the whole conversation
        const size_t before = ALL * k / TURNS - LEFT;
        path[k].length = before + THOUGHT + LEFT, path[k].of = 0, path[k].shared = before;
        rows += (double)(path[k].length - (before - 1));
        pairs += triangle((double)path[k].length) - triangle((double)before - 1);
    }
    positions = alone = 0;
    for (size_t k = 0; k <= TURNS; k++) positions += (double)path[k].length, alone += triangle((double)path[k].length);
    Batch thinks = forest(path, TURNS + 1);
    expect_tree("the same, reasoning left out", &thinks, positions, rows, alone, pairs, TURNS);
}

#endif
