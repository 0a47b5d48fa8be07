/*
stream = checkpoint = full, for every parameter: over families, ratios of query to key/value heads, chunk sizes, documents that
end on and around chunk boundaries, masked chunks and documents, accumulation. In the double build the bound is 1e-12.
And full is held against finite differences of the loss, so that not all three are wrong together.
*/
#include "test/base/testing.h"
#include "test/model/tiny.h"

static double bound(void) {
    return ops_device->stored == DTYPE_FP64 ? 1e-12 : ops_device->stored == DTYPE_FP32 ? 2e-5 : 0.05;
}

static Model tiny_model(const char *text) {
    Config config = config_from_text(text, "test", EXIT_USAGE);
    return model_build(&config, ops_device->stored);
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

static void expect_same(const Model *model, TinyResult found, TinyResult expected, double allowed) {
    double difference = fabs(found.loss - expected.loss);
    if (!(difference <= allowed * fabs(expected.loss)))
        test_fail("loss %.17g, full gives %.17g", found.loss, expected.loss);
    for (size_t i = 0; i < model->parameter_count; i++) {
        difference = tiny_difference(&model->parameters[i], found.gradient, expected.gradient);
        if (!(difference <= allowed))
            test_fail("gradient of %s differs from full's by %.3g, allowed %.3g", model->parameters[i].name, difference,
                      allowed);
        testing.worst = fmax(testing.worst, difference / allowed);
    }
}

// Every method and chunk size on one batch against full.
static void methods_agree(const char *text, const size_t *length, size_t documents, int masked) {
    Model model = tiny_model(text);
    double *weights = tiny_weights(&model, 7);
    Batch batch = tiny_batch(length, documents, model.config.vocab_size, masked, 11);
    size_t N = batch.N, sizes[] = {1, 7, N / 3 ? N / 3 : 1, N > 1 ? N - 1 : 1, N, N + 1};
    test_case("%.40s..., %zu tokens, %zu documents, mask %d", text, N, documents, masked);
    TinyResult full = tiny_run(&model, weights, METHOD_FULL, 0, 0, &batch);
    if (!isfinite(full.loss) || (masked < 3 && full.loss <= 0)) test_fail("full's loss is %g", full.loss);
    TinyResult other = tiny_run(&model, weights, METHOD_CHECKPOINT, 0, 0, &batch);
    expect_same(&model, other, full, bound());
    free(other.gradient);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (size_t j = 0; j < sizeof(sizes) / sizeof(sizes[0]); j++) {
            if (i != j && (EMULATED || (i + j) % 3)) continue; // all of the diagonal, a third of the rest
            test_case("%.40s..., %zu tokens, %zu documents, mask %d, chunks %zu and %zu", text, N, documents, masked,
                      sizes[i], sizes[j]);
            other = tiny_run(&model, weights, METHOD_STREAM, sizes[i], sizes[j], &batch);
            expect_same(&model, other, full, bound());
            free(other.gradient);
        }
    }
    free(full.gradient);
    free(weights);
    batch_free(&batch);
    model_free(&model);
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
    size_t length[] = {9, 5}, i, j;
    FOR_MODELS(i, 2) {
        Model model = tiny_model(models[i]);
        double *weights = tiny_weights(&model, 7);
        Batch batch = tiny_batch(length, 2, model.config.vocab_size, 3, 11);
        TinyResult found = tiny_run(&model, weights, METHOD_STREAM, 4, 4, &batch);
        if (found.loss != 0) test_fail("loss %g of no target", found.loss);
        for (j = 0; j < model.elements; j++)
            if (found.gradient[j] != 0) test_fail("gradient %g of no target", found.gradient[j]);
        free(found.gradient);
        free(weights);
        batch_free(&batch);
        model_free(&model);
    }
}

// Of tensors whose gradient is zero but for rounding (queries that see one key), too: a hundredth of the whole gradient's length is
// added to a tensor's own.
static void expect_same_but_rounding(const Model *model, TinyResult found, TinyResult expected) {
    double whole = 0;
    if (!(fabs(found.loss - expected.loss) <= bound() * fabs(expected.loss)))
        test_fail("loss %.17g, full gives %.17g", found.loss, expected.loss);
    for (size_t j = 0; j < model->elements; j++) whole += expected.gradient[j] * expected.gradient[j];
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        double difference = 0, size = 0;
        for (size_t j = p->offset; j < p->offset + parameter_elements(p); j++) {
            difference += (found.gradient[j] - expected.gradient[j]) * (found.gradient[j] - expected.gradient[j]);
            size += expected.gradient[j] * expected.gradient[j];
        }
        double allowed = bound() * (sqrt(size) + 0.01 * sqrt(whole));
        if (!(sqrt(difference) <= allowed))
            test_fail("gradient of %s differs from full's by %.3g, allowed %.3g", p->name, sqrt(difference), allowed);
        testing.worst = fmax(testing.worst, sqrt(difference) / allowed);
    }
}

// Windows of every relation to chunks, documents and stream, in any of the layers; two streams of different length by one plan.
TEST(windows_anywhere) {
    static const char *const families_tried[] = {"qwen2", "qwen3", "gemma3"};
    for (size_t i = 0; i < (EMULATED ? 12u : 150u); i++) {
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
        Model model = tiny_model(text);
        double *weights = tiny_weights(&model, i);
        for (size_t part = 0; part < 2; part++) {
            for (size_t d = 0; d < documents; d++) length[d] = 1 + test_random_below(documents > 2 ? 12 : 30);
            batches[part] = tiny_batch(length, documents, 19, 1, 2 * i + part);
            batches[part].targets[0] = 3; // one at least counts
        }
        test_case("%s, %zu and %zu tokens in %zu documents, chunk %zu", text, batches[0].N, batches[1].N, documents,
                  chunk);
        RunSettings settings = {0};
        settings.model = &model, settings.gradient_type = dtype_of_sums(model.dtype);
        settings.method = METHOD_FULL;
        TinyResult full = tiny_run_on(ops_device, settings, weights, batches, 2);
        settings.method = METHOD_STREAM, settings.chunk = chunk, settings.logits_chunk = 1 + chunk / 2;
        TinyResult found = tiny_run_on(ops_device, settings, weights, batches, 2);
        expect_same_but_rounding(&model, found, full);
        free(full.gradient), free(found.gradient), free(weights);
        batch_free(&batches[0]), batch_free(&batches[1]);
        model_free(&model);
    }
}

// A document's gradient does not depend on its neighbours in the stream.
TEST(packed_equals_alone) {
    size_t length[] = {13, 8, 17}, i, d, t, j;
    FOR_MODELS(i, 0) {
        Model model = tiny_model(models[i]);
        double *weights = tiny_weights(&model, 3);
        Batch packed = tiny_batch(length, 3, model.config.vocab_size, 1, 5), alone[3];
        RunSettings settings;
        TinyResult together = tiny_run(&model, weights, METHOD_STREAM, 5, 3, &packed), apart;
        for (d = 0; d < 3; d++) {
            alone[d] = batch_allocate(length[d], 1);
            batch_set_positions(&alone[d]);
            for (t = 0; t < length[d]; t++) {
                size_t from = packed.document_start[d] + t;
                alone[d].tokens[t] = packed.tokens[from], alone[d].targets[t] = packed.targets[from];
                alone[d].loss_weight[t] = packed.loss_weight[from];
            }
        }
        memset(&settings, 0, sizeof(settings));
        settings.model = &model, settings.chunk = 4, settings.logits_chunk = 6;
        settings.gradient_type = dtype_of_sums(model.dtype); // accumulated
        apart = tiny_run_on(ops_device, settings, weights, alone, 3);
        test_case("%.40s...", models[i]);
        expect_same(&model, apart, together, bound());
        for (d = 0; d < 3; d++) batch_free(&alone[d]);
        for (j = 0; j < 1; j++) free(together.gradient), free(apart.gradient);
        free(weights);
        batch_free(&packed);
        model_free(&model);
    }
}

// d loss / d direction by central differences, in the double build: along a random direction in each parameter.
TEST(full_is_the_gradient) {
    size_t length[] = {9, 1, 6}, i, j, k;
    if (ops_device->stored != DTYPE_FP64) {
        test_skip("finite differences need the double build");
        return;
    }
    FOR_MODELS(i, 1) {
        Model model = tiny_model(models[i]);
        double *weights = tiny_weights(&model, 9), h = 1e-4;
        Batch batch = tiny_batch(length, 3, model.config.vocab_size, 1, 13);
        TinyResult full = tiny_run(&model, weights, METHOD_FULL, 0, 0, &batch);
        for (j = 0; j < model.parameter_count; j++) {
            const Parameter *p = &model.parameters[j];
            double slope = 0, size = 0, loss[4], numeric;
            int side;
            for (side = 0; side < 4; side++) { // at -2h, -h, h, 2h
                double step = (side < 2 ? side - 2 : side - 1) * h;
                TinyResult at_step;
                for (k = 0; k < parameter_elements(p); k++) weights[p->offset + k] += step * random_normal(17, j, k);
                at_step = tiny_run(&model, weights, METHOD_FULL, 0, 0, &batch);
                for (k = 0; k < parameter_elements(p); k++) weights[p->offset + k] -= step * random_normal(17, j, k);
                loss[side] = at_step.loss;
                free(at_step.gradient);
            }
            for (k = 0; k < parameter_elements(p); k++) {
                slope += full.gradient[p->offset + k] * random_normal(17, j, k);
                size += full.gradient[p->offset + k] * full.gradient[p->offset + k];
            }
            numeric = (8 * (loss[2] - loss[1]) - (loss[3] - loss[0])) / (12 * h);
            if (!(fabs(numeric - slope) <= 1e-7 * (sqrt(size) + 1e-3)))
                test_fail("%.30s...: %s: slope %.12g, by differences %.12g", models[i], p->name, slope, numeric);
        }
        free(full.gradient);
        free(weights);
        batch_free(&batch);
        model_free(&model);
    }
}

// Stored gradients of either type, with a buffer of sums or without one.
TEST(gradient_types) {
    size_t length[] = {19}, i;
    FOR_MODELS(i, 2) {
        Model model = tiny_model(models[i]);
        double *weights = tiny_weights(&model, 3);
        Batch batch = tiny_batch(length, 1, model.config.vocab_size, 0, 5);
        RunSettings settings;
        TinyResult expected, found;
        memset(&settings, 0, sizeof(settings));
        settings.model = &model, settings.chunk = 5, settings.logits_chunk = 5;
        settings.gradient_type = dtype_of_sums(model.dtype);
        expected = tiny_run_on(ops_device, settings, weights, &batch, 1);
        settings.gradient_type = DTYPE_BF16;
        found = tiny_run_on(ops_device, settings, weights, &batch, 1);
        test_case("%.40s...", models[i]);
        expect_same(&model, found, expected, ops_device->stored == DTYPE_BF16 ? 0.02 : 0.005);
        free(expected.gradient), free(found.gradient);
        free(weights);
        batch_free(&batch);
        model_free(&model);
    }
}

// The same call twice gives the same bits.
TEST(deterministic) {
    size_t length[] = {50, 31}, i;
    FOR_MODELS(i, 0) {
        Model model = tiny_model(models[i]);
        double *weights = tiny_weights(&model, 3);
        Batch batch = tiny_batch(length, model.config.family->learned_positions ? 1 : 2, model.config.vocab_size, 0, 5);
        TinyResult first = tiny_run(&model, weights, METHOD_STREAM, 16, 10, &batch);
        TinyResult again = tiny_run(&model, weights, METHOD_STREAM, 16, 10, &batch);
        test_case("%.40s...", models[i]);
        if (first.loss != again.loss || memcmp(first.gradient, again.gradient, model.elements * sizeof(double)) != 0)
            test_fail("a second pass gave other bits");
        free(first.gradient), free(again.gradient);
        free(weights);
        batch_free(&batch);
        model_free(&model);
    }
}

// What is kept is what would be computed again: the same bits (but behind windows, whose keys are projected in other pieces
// backward), from fewer operations, in memory that a formula gives. Two streams, so that the second finds what the first
// one left.
static void keeping_changes_nothing(const Model *model, const double *weights, RunSettings settings,
                                    const Batch *batches, TinyResult expected, Plan without) {
    const Shapes d = shapes_of(model);
    const size_t rows = d.L * batches[0].N;
    const size_t bytes = (rows * d.Q * d.stored + 255) / 256 * 256 + (rows * d.NH * d.summed + 255) / 256 * 256;
    for (int keep = KEEP_ON_DEVICE; keep <= KEEP_IN_HOST_MEMORY; keep++) {
        settings.keep = (Keep)keep, settings.backward = 1;
        Plan plan = plan_make(&settings, &batches[0]);
        TinyResult found = tiny_run_on(ops_device, settings, weights, batches, 2);
        if (layers_with_window(&model->config))
            expect_same_but_rounding(model, found, expected);
        else if (found.loss != expected.loss ||
                 memcmp(found.gradient, expected.gradient, model->elements * sizeof(double)) != 0)
            test_fail("keeping attention (%d) gave other bits", keep);
        if (plan.flops != without.flops - without.attention_forward / 2 ||
            plan.attention_forward != without.attention_forward / 2)
            test_fail("%.17g operations, %.17g without, of which %.17g for attention forward", plan.flops,
                      without.flops, without.attention_forward);
        if ((keep == KEEP_ON_DEVICE ? plan.share[SHARE_KEPT] : plan.host_bytes) != bytes)
            test_fail("%zu and %zu bytes are planned, not %zu", plan.share[SHARE_KEPT], plan.host_bytes, bytes);
        free(found.gradient);
    }
}

TEST(kept_attention) {
    static const size_t chunks[] = {1, 7, 23, 24, 46, 47};
    size_t length[] = {23, 9, 14}, shorter[] = {8, 5}, i, j;
    FOR_MODELS(i, 2) {
        Model model = tiny_model(models[i]);
        double *weights = tiny_weights(&model, 3);
        const size_t V = model.config.vocab_size;
        Batch batches[2] = {tiny_batch(length, 3, V, 1, 5), tiny_batch(shorter, 2, V, 1, 6)};
        for (j = 0; j <= sizeof(chunks) / sizeof(chunks[0]); j++) {
            RunSettings settings;
            TinyResult expected;
            Plan plan;
            if (EMULATED && j != 1 + i % 6) continue;
            memset(&settings, 0, sizeof(settings));
            settings.model = &model, settings.gradient_type = dtype_of_sums(model.dtype);
            settings.method = j ? METHOD_STREAM : METHOD_CHECKPOINT;
            settings.chunk = j ? chunks[j - 1] : 0, settings.logits_chunk = 11;
            test_case("%.40s..., chunk %zu", models[i], settings.chunk);
            expected = tiny_run_on(ops_device, settings, weights, batches, 2);
            settings.backward = 1;
            plan = plan_make(&settings, &batches[0]);
            keeping_changes_nothing(&model, weights, settings, batches, expected, plan);
            free(expected.gradient);
        }
        free(weights);
        batch_free(&batches[0]), batch_free(&batches[1]);
        model_free(&model);
    }
}

// The loss of a forward alone is the loss of forward and backward.
TEST(forward_only_loss) {
    size_t length[] = {23, 9}, i;
    FOR_MODELS(i, 1) {
        Model model = tiny_model(models[i]);
        double *weights = tiny_weights(&model, 3), loss;
        Batch batch = tiny_batch(length, 2, model.config.vocab_size, 1, 5);
        TinyResult expected = tiny_run(&model, weights, METHOD_STREAM, 8, 5, &batch);
        RunSettings settings;
        OptimizerState state;
        StreamBP s;
        Arena arena;
        Plan plan;
        void *memory;
        memset(&settings, 0, sizeof(settings));
        settings.model = &model, settings.chunk = 8, settings.logits_chunk = 5;
        plan = plan_make(&settings, &batch);
        memory = ops_device->allocate(plan.total_bytes);
        arena_init(&arena, memory, plan.total_bytes);
        run_begin(&s, &state, &settings, ops_device, &arena, &batch);
        device_write(ops_device, s.memory.weights, model.dtype, weights, model.elements);
        loss = forward_only(&s, &batch, batch_count(&batch).tokens, NULL);
        if (loss != expected.loss)
            test_fail("%.30s...: loss %.17g alone, %.17g with backward", models[i], loss, expected.loss);
        run_end(&s);
        ops_device->release(memory, plan.total_bytes);
        free(expected.gradient);
        free(weights);
        batch_free(&batch);
        model_free(&model);
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        LISTED(one_document),
        LISTED(one_token),
        LISTED(documents_around_boundaries),
        LISTED(masked_documents_and_chunks),
        LISTED(everything_masked),
        LISTED(windows_anywhere),
        LISTED(packed_equals_alone),
        LISTED(full_is_the_gradient),
        LISTED(gradient_types),
        LISTED(deterministic),
        LISTED(kept_attention),
        LISTED(forward_only_loss),
    };
    RUN_TESTS(argc, argv, tests, NULL, NULL);
}
