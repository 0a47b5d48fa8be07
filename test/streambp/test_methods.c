/*
stream = checkpoint = full, for every parameter: over families, ratios of query to key/value heads, chunk sizes,
documents that end on and around chunk boundaries, masked chunks and documents, accumulation. In the double build the
bound is 1e-12. And full is held against finite differences of the loss, so that not all three are wrong together.
*/
#include "test/base/testing.h"
#include "test/model/tiny.h"

static double bound(void) {
    return ops_device->stored == DTYPE_FP64 ? 1e-12 : ops_device->stored == DTYPE_FP32 ? 2e-5 : 0.05;
}

static const char *const models[] = {
    "gpt2,hidden_size=24,num_hidden_layers=2,num_attention_heads=3,vocab_size=37,max_position_embeddings=64",
    "llama,hidden_size=24,intermediate_size=28,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,vocab_"
    "size=41",
    "llama,hidden_size=20,intermediate_size=33,num_hidden_layers=1,num_attention_heads=5,num_key_value_heads=1,head_"
    "dim=6,"
    "vocab_size=29,tie_word_embeddings=true,attention_bias=true,mlp_bias=true",
    "qwen2,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=8,num_key_value_heads=1,"
    "vocab_size=31,tie_word_embeddings=true",
    "qwen3,hidden_size=20,intermediate_size=24,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_"
    "dim=8,"
    "vocab_size=43",
    "qwen3,hidden_size=12,intermediate_size=16,num_hidden_layers=2,num_attention_heads=1,num_key_value_heads=1,head_"
    "dim=16,"
    "vocab_size=23,tie_word_embeddings=true",
    // windows in some layers: longer and shorter than chunks
    "gemma3,hidden_size=20,intermediate_size=24,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,head_"
    "dim=8,"
    "vocab_size=33,sliding_window=9,layer_types=ssf,query_pre_attn_scalar=5",
    "gemma3,hidden_size=12,intermediate_size=20,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,head_"
    "dim=6,"
    "vocab_size=21,sliding_window=2,layer_types=sf,rope_type=linear,factor=4",
    // in all of them: nothing is as long as the stream
    "mistral,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"
    "vocab_size=31,sliding_window=5",
};
#define MODELS (sizeof(models) / sizeof(models[0]))

// All models; on emulated kernels every third one, beginning with `first`, so that the tests together meet all of them.
#define FOR_MODELS(i, first) for (i = EMULATED ? (first) : 0; i < MODELS; i += EMULATED ? 3 : 1)

// Every method and chunk size on one batch against full.
static void methods_agree(const char *text, const size_t *length, size_t documents, int masked) {
    TinyCase c = tiny_case(text, 0);
    c.batch = tiny_batch(length, documents, c.model.config.vocab_size, masked, 11);
    const size_t N = c.batch.N, sizes[] = {1, 7, N / 3 ? N / 3 : 1, N > 1 ? N - 1 : 1, N, N + 1};
    test_case("%.40s..., %zu tokens, %zu documents, mask %d", text, N, documents, masked);
    TinyResult full = tiny_case_run(&c, METHOD_FULL, 0, 0, &c.batch, 1);
    if (!isfinite(full.loss) || (masked < 3 && full.loss <= 0)) test_fail("full's loss is %g", full.loss);
    TinyResult other = tiny_case_run(&c, METHOD_CHECKPOINT, 0, 0, &c.batch, 1);
    tiny_expect_same(&c.model, other, full, bound(), 0, 0);
    free(other.gradient);
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        for (size_t j = 0; j < COUNT_OF(sizes); j++) {
            if (i != j && (EMULATED || (i + j) % 3)) continue; // all of the diagonal, a third of the rest
            test_case("%.40s..., %zu tokens, %zu documents, mask %d, chunks %zu and %zu", text, N, documents, masked,
                      sizes[i], sizes[j]);
            other = tiny_case_run(&c, METHOD_STREAM, sizes[i], sizes[j], &c.batch, 1);
            tiny_expect_same(&c.model, other, full, bound(), 0, 0);
            free(other.gradient);
        }
    }
    free(full.gradient);
    tiny_case_free(&c);
}

TEST(one_document) {
    size_t length[] = {37}, i;
    (void)cmocka_state;
    FOR_MODELS(i, 1) methods_agree(models[i], length, 1, 0);
}

TEST(one_token) {
    size_t length[] = {1}, i;
    FOR_MODELS(i, 2) methods_agree(models[i], length, 1, 0);
}

// With chunks of 7: ends at 6, 7, 8, 14, 15, 21, 28, so before, on and after boundaries, and documents of one token.
TEST(documents_around_boundaries) {
    size_t length[] = {6, 1, 1, 6, 1, 6, 7, 9}, i;
    FOR_MODELS(i, 0) methods_agree(models[i], length, 8, 1);
}

TEST(masked_documents_and_chunks) {
    size_t length[] = {5, 16, 3, 21}, i;
    FOR_MODELS(i, 1) methods_agree(models[i], length, 4, 2);
}

TEST(everything_masked) {
    size_t length[] = {9, 5}, i;
    FOR_MODELS(i, 2) {
        TinyCase c = tiny_case(models[i], 0);
        c.batch = tiny_batch(length, 2, c.model.config.vocab_size, 3, 11);
        TinyResult found = tiny_case_run(&c, METHOD_STREAM, 4, 4, &c.batch, 1);
        if (found.loss != 0) test_fail("loss %g of no target", found.loss);
        for (size_t j = 0; j < c.model.elements; j++)
            if (found.gradient[j] != 0) test_fail("gradient %g of no target", found.gradient[j]);
        free(found.gradient);
        tiny_case_free(&c);
    }
}

// Windows of every relation to chunks, documents and sequence, in any of the layers; two sequences of different length
// by one plan. Some gradients are zero but for rounding: of queries that see one key.
TEST(windows_anywhere) {
    static const char *const families_tried[] = {"qwen2", "qwen3", "gemma3"};
    for (size_t i = 0; i < (EMULATED ? 12u : all_cases() ? 150u : 60u); i++) {
        const size_t L = 1 + test_random_below(4), documents = 1 + test_random_below(5);
        const size_t window = 1 + test_random_below(i % 3 ? 12 : 60), chunk = 1 + test_random_below(i % 2 ? 9 : 50);
        char text[512], types[8] = "";
        size_t length[5];
        Batch batches[2];
        for (size_t d = 0; d < L; d++) types[d] = test_random_below(3) ? 's' : 'f';
        snprintf(text, sizeof(text),
                 "%s,hidden_size=12,intermediate_size=10,num_hidden_layers=%zu,num_attention_heads=2,num_key_value_"
                 "heads=1,head_dim=6,vocab_size=19,layer_types=%s,sliding_window=%zu",
                 families_tried[i % 3], L, types, window);
        TinyCase c = tiny_case(text, 0);
        for (size_t part = 0; part < 2; part++) {
            for (size_t d = 0; d < documents; d++) length[d] = 1 + test_random_below(documents > 2 ? 12 : 30);
            batches[part] = tiny_batch(length, documents, 19, 1, 2 * i + part);
            batches[part].targets[0] = 3; // one at least counts
        }
        test_case("%s, %zu and %zu tokens in %zu documents, chunk %zu", text, batches[0].N, batches[1].N, documents,
                  chunk);
        c.settings.gradient_type = dtype_of_sums(c.model.dtype);
        TinyResult full = tiny_case_run(&c, METHOD_FULL, 0, 0, batches, 2);
        TinyResult found = tiny_case_run(&c, METHOD_STREAM, chunk, 1 + chunk / 2, batches, 2);
        tiny_expect_same(&c.model, found, full, bound(), 0, 0.01);
        free(full.gradient), free(found.gradient);
        batch_free(&batches[0]), batch_free(&batches[1]);
        tiny_case_free(&c);
    }
}

// A document's gradient does not depend on its neighbours in the sequence.
TEST(packed_equals_alone) {
    size_t length[] = {13, 8, 17}, i;
    FOR_MODELS(i, 0) {
        TinyCase c = tiny_case(models[i], 0);
        Batch alone[3];
        c.batch = tiny_batch(length, 3, c.model.config.vocab_size, 1, 5);
        for (size_t d = 0; d < 3; d++) {
            const size_t from = c.batch.document_start[d];
            alone[d] = batch_allocate(length[d], 1);
            batch_set_positions(&alone[d]);
            memcpy(alone[d].tokens, c.batch.tokens + from, length[d] * sizeof(int32_t));
            memcpy(alone[d].targets, c.batch.targets + from, length[d] * sizeof(int32_t));
            memcpy(alone[d].loss_weight, c.batch.loss_weight + from, length[d] * sizeof(float));
        }
        test_case("%.40s...", models[i]);
        TinyResult packed = tiny_case_run(&c, METHOD_STREAM, 5, 3, &c.batch, 1);
        c.settings.gradient_type = dtype_of_sums(c.model.dtype); // accumulated
        TinyResult apart = tiny_case_run(&c, METHOD_STREAM, 4, 6, alone, 3);
        tiny_expect_same(&c.model, apart, packed, bound(), 0, 0);
        for (size_t d = 0; d < 3; d++) batch_free(&alone[d]);
        free(packed.gradient), free(apart.gradient);
        tiny_case_free(&c);
    }
}

// Along a random direction in each parameter
TEST(full_is_the_gradient) {
    size_t length[] = {9, 1, 6}, i;
    if (ops_device->stored != DTYPE_FP64) {
        test_skip("finite differences need the double build");
        return;
    }
    FOR_MODELS(i, 1) {
        TinyCase c = tiny_case(models[i], 0);
        c.batch = tiny_batch(length, 3, c.model.config.vocab_size, 1, 13);
        TinyResult full = tiny_case_run(&c, METHOD_FULL, 0, 0, &c.batch, 1);
        for (size_t j = 0; j < c.model.parameter_count; j++) {
            const Parameter *p = &c.model.parameters[j];
            tiny_expect_slope(&c, p->name, full.gradient, p->offset, parameter_elements(p), j, 1e-4, 1e-7, METHOD_FULL,
                              0, 0);
        }
        free(full.gradient);
        tiny_case_free(&c);
    }
}

// Stored gradients of either type, with a buffer of sums or without one.
TEST(gradient_types) {
    size_t length[] = {19}, i;
    FOR_MODELS(i, 2) {
        TinyCase c = tiny_case(models[i], 0);
        c.batch = tiny_batch(length, 1, c.model.config.vocab_size, 0, 5);
        c.settings.gradient_type = dtype_of_sums(c.model.dtype);
        TinyResult expected = tiny_case_run(&c, METHOD_STREAM, 5, 5, &c.batch, 1);
        c.settings.gradient_type = DTYPE_BF16;
        TinyResult found = tiny_case_run(&c, METHOD_STREAM, 5, 5, &c.batch, 1);
        test_case("%.40s...", models[i]);
        tiny_expect_same(&c.model, found, expected, ops_device->stored == DTYPE_BF16 ? 0.02 : 0.005, 0, 0);
        free(expected.gradient), free(found.gradient);
        tiny_case_free(&c);
    }
}

static void expect_same_bits(const Model *model, TinyResult found, TinyResult expected, const char *what) {
    if (found.loss != expected.loss || memcmp(found.gradient, expected.gradient, model->elements * sizeof(double)) != 0)
        test_fail("%s gave other bits", what);
}

TEST(deterministic) {
    size_t length[] = {50, 31}, i;
    FOR_MODELS(i, 0) {
        TinyCase c = tiny_case(models[i], 0);
        const size_t documents = c.model.config.family->learned_positions ? 1 : 2;
        c.batch = tiny_batch(length, documents, c.model.config.vocab_size, 0, 5);
        TinyResult first = tiny_case_run(&c, METHOD_STREAM, 16, 10, &c.batch, 1);
        TinyResult again = tiny_case_run(&c, METHOD_STREAM, 16, 10, &c.batch, 1);
        test_case("%.40s...", models[i]);
        expect_same_bits(&c.model, again, first, "a second pass");
        free(first.gradient), free(again.gradient);
        tiny_case_free(&c);
    }
}

// Saved attention is what would be computed again: the same bits (but behind windows, whose keys are projected in other
// chunks backward), from fewer operations, in memory that a formula gives. Two sequences: the second finds what the
// first left.
static void saving_changes_nothing(TinyCase *c, size_t chunk, const Batch *batches) {
    const Shapes d = shapes_of(&c->model);
    const Method method = chunk ? METHOD_STREAM : METHOD_CHECKPOINT;
    const size_t rows = d.L * batches[0].N;
    const size_t bytes = (rows * d.Q * d.stored + 255) / 256 * 256 + (rows * d.NH * d.summed + 255) / 256 * 256;
    RunSettings settings = tiny_settings(c, method, chunk, 11);
    settings.keep = KEEP_NOTHING, settings.backward = 1;
    const Plan without = plan_make(&settings, &batches[0]);
    TinyResult expected = tiny_run_on(ops_device, settings, c->weights, batches, 2);
    for (int keep = KEEP_ON_DEVICE; keep <= KEEP_IN_HOST_MEMORY; keep++) {
        settings.keep = (Keep)keep;
        const Plan plan = plan_make(&settings, &batches[0]);
        TinyResult found = tiny_run_on(ops_device, settings, c->weights, batches, 2);
        if (layers_with_window(&c->model.config))
            tiny_expect_same(&c->model, found, expected, bound(), 0, 0.01);
        else
            expect_same_bits(&c->model, found, expected, keep == KEEP_ON_DEVICE ? "the device" : "host memory");
        if (plan.counts.flops != without.counts.flops - without.counts.attention_forward / 2 ||
            plan.counts.attention_forward != without.counts.attention_forward / 2)
            test_fail("%.17g operations, %.17g without, of which %.17g for attention forward", plan.counts.flops,
                      without.counts.flops, without.counts.attention_forward);
        if ((keep == KEEP_ON_DEVICE ? plan.share[SHARE_KEPT] : plan.host_bytes) != bytes)
            test_fail("%zu and %zu bytes are planned, not %zu", plan.share[SHARE_KEPT], plan.host_bytes, bytes);
        free(found.gradient);
    }
    free(expected.gradient);
}

TEST(kept_attention) {
    static const size_t chunks[] = {0, 1, 7, 23, 24, 46, 47};
    size_t length[] = {23, 9, 14}, shorter[] = {8, 5}, i;
    FOR_MODELS(i, 2) {
        TinyCase c = tiny_case(models[i], 0);
        const size_t V = c.model.config.vocab_size;
        Batch batches[2] = {tiny_batch(length, 3, V, 1, 5), tiny_batch(shorter, 2, V, 1, 6)};
        c.settings.gradient_type = dtype_of_sums(c.model.dtype);
        for (size_t j = 0; j < COUNT_OF(chunks); j++) {
            if (EMULATED && j != 1 + i % 6) continue;
            test_case("%.40s..., chunk %zu", models[i], chunks[j]);
            saving_changes_nothing(&c, chunks[j], batches);
        }
        batch_free(&batches[0]), batch_free(&batches[1]);
        tiny_case_free(&c);
    }
}

// The loss of a forward alone is the loss of forward and backward.
TEST(forward_only_loss) {
    size_t length[] = {23, 9}, i;
    FOR_MODELS(i, 1) {
        TinyCase c = tiny_case(models[i], 0);
        TinyRun r;
        c.batch = tiny_batch(length, 2, c.model.config.vocab_size, 1, 5);
        TinyResult expected = tiny_case_run(&c, METHOD_STREAM, 8, 5, &c.batch, 1);
        tiny_begin(&r, ops_device, tiny_settings(&c, METHOD_STREAM, 8, 5), c.weights, NULL, &c.batch);
        const double loss = forward_only(&r.s, &c.batch, batch_count(&c.batch).tokens, NULL);
        if (loss != expected.loss)
            test_fail("%.30s...: loss %.17g alone, %.17g with backward", models[i], loss, expected.loss);
        tiny_end(&r);
        free(expected.gradient);
        tiny_case_free(&c);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
