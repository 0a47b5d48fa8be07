/*
Chunk-major methods: spaco's gradient is unbiased. Its expectation over all subsets of chunks, each weighted by its
probability, is the exact gradient. Draws depend on seed and sequence alone.
*/
#include "test/base/testing.h"
#include "test/model/tiny.h"

static const char *const models[] = {
    TINY_LLAMA,
    TINY_GEMMA ",sliding_window=4,layer_types=ssf", // a window that slides, shorter than a chunk
    TINY_GEMMA ",sliding_window=9,layer_types=ssf", // longer
    TINY_LLLF,
    TINY_OLMO ",sliding_window=6",
};
enum { CHUNK = 5, CHUNKS = 6, SUBSETS = 1 << CHUNKS };

static TinyCase case_make(const char *text, ObjectiveKind kind) {
    static const size_t length[] = {9, 1, 18};
    TinyCase c = tiny_case(text, kind == OBJECTIVE_DPO ? 2 : 0);
    c.settings.objective = tiny_objective(kind);
    const size_t pairs[] = {9, 12, 3, 4};
    c.batch = kind == OBJECTIVE_DPO ? tiny_batch(pairs, 4, c.model.config.vocab_size, 1, 11)
                                    : tiny_batch(length, 3, c.model.config.vocab_size, 1, 11);
    if (kind != OBJECTIVE_SFT) tiny_answers(&c.batch, kind, 1, c.model.config.vocab_size, 3);
    c.settings.gradient_type = dtype_of_sums(c.model.dtype);
    return c;
}

// Returns gradient and loss with backward for these chunks alone.
static TinyResult subset_run(const TinyCase *c, RunSettings settings, size_t subset) {
    const Model *table = tiny_table(c);
    const double Z = objective_normaliser(&settings.objective, batch_count(&c->batch));
    TinyResult result = {0, NULL, table->elements};
    TinyRun r;
    settings.backward = 1;
    tiny_begin(&r, ops_device, settings, c->weights, c->adapters, &c->batch);
    for (size_t i = 0; i < CHUNKS; i++) r.s.now.sparse.drawn[i] = subset >> i & 1;
    result.loss = chunk_major_walk(&r.s, &c->batch, Z, 1, NULL);
    result.gradient = device_read(ops_device, r.s.memory.gradients, settings.gradient_type, table->elements);
    tiny_end(&r);
    return result;
}

// Returns the relative distance of the expected gradient from the exact one.
static double bias(const TinyCase *c, double keep) {
    const Model *table = tiny_table(c);
    RunSettings settings = tiny_settings(c, METHOD_SPACO, CHUNK, 4);
    TinyResult exact = tiny_case_run(c, METHOD_FULL, 0, 0, &c->batch, 1);
    double *sum = case_doubles(table->elements), difference = 0, size = 0;
    settings.sparse.keep = keep;
    for (size_t subset = 0; subset < SUBSETS; subset++) {
        size_t count = 0;
        for (size_t i = 0; i < CHUNKS; i++) count += subset >> i & 1;
        const double p = pow(keep, (double)count) * pow(1 - keep, (double)(CHUNKS - count));
        TinyResult found = subset_run(c, settings, subset);
        if (!(fabs(found.loss - exact.loss) <= 1e-12 * fabs(exact.loss)))
            test_fail("the loss %.17g is not the exact %.17g", found.loss, exact.loss);
        for (size_t j = 0; j < table->elements; j++) sum[j] += p * found.gradient[j];
        free(found.gradient);
    }
    for (size_t j = 0; j < table->elements; j++) {
        difference += pow(sum[j] - exact.gradient[j], 2);
        size += exact.gradient[j] * exact.gradient[j];
    }
    free(exact.gradient);
    return sqrt(difference / size);
}

TEST(expectation_is_the_gradient) {
    static const ObjectiveKind kinds[] = {OBJECTIVE_SFT, OBJECTIVE_GRPO, OBJECTIVE_DPO};
    for (size_t i = 0; i < COUNT_OF(models); i++)
        for (size_t k = 0; k < (i ? 1u : 3u); k++) {
            TinyCase c = case_make(models[i], kinds[k]);
            test_case("%.40s, %s", models[i], objective_names[kinds[k]]);
            const double found = bias(&c, i % 2 ? 0.5 : 0.25);
            if (!(found <= 1e-10)) test_fail("the expectation is off by %.3g", found);
            tiny_case_free(&c);
        }
}

TEST(draws) {
    uint8_t drawn[2][1000];
    Sparse sparse = {0.25, 1, drawn[0]};
    size_t count = 0, wrong = 0;
    for (sparse.seed = 1; sparse.seed <= 40; sparse.seed++) {
        chunks_draw(&sparse, 1000);
        for (size_t i = 0; i < 1000; i++) count += drawn[0][i];
    }
    if (count < 9600 || count > 10400) test_fail("%zu of 40000 chunks drawn with probability 0.25", count);
    sparse.seed = 7, chunks_draw(&sparse, 1000), sparse.drawn = drawn[1], chunks_draw(&sparse, 1000);
    assert_memory_equal(drawn[0], drawn[1], 1000);
    sparse.seed = 8, chunks_draw(&sparse, 1000);
    for (size_t i = 0; i < 1000; i++) wrong += drawn[0][i] != drawn[1][i];
    assert_true(wrong > 200);
    size_t place[10] = {0}; // all are drawn equally often
    for (sparse.seed = 0, sparse.keep = 0.3; sparse.seed < 10000; sparse.seed++) {
        chunks_draw(&sparse, 10);
        for (size_t i = 0; i < 10; i++) place[i] += drawn[1][i];
    }
    for (size_t i = 0; i < 10; i++)
        if (place[i] < 2800 || place[i] > 3200) test_fail("chunk %zu drawn %zu times of 10000", i, place[i]);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
