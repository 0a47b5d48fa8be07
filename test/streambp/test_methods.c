/*
Gradients of stream = checkpoint = full, for every parameter: over families, ratios of query to key/value heads, chunk
sizes, documents that end on and around chunk boundaries, masked chunks and documents, accumulation. In the double build
the bound is 1e-12. Finite differences of the loss check method full itself, lest all three be wrong together.
test_places.c tests places.
*/
#include "test/base/testing.h"
#include "test/model/tiny.h"

static double bound(void) {
    return ops_device->stored == DTYPE_FP64 ? 1e-12 : ops_device->stored == DTYPE_FP32 ? 2e-5 : 0.05;
}

static const char *const models[] = {
    TINY_GPT2,
    TINY_LLAMA,
    TINY_BIASED,
    "qwen2,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=8,num_key_value_heads=1,"
    "vocab_size=31,tie_word_embeddings=true",
    TINY_QWEN3,
    TINY_TIED,
    TINY_ROTATED,
    TINY_BARE,
    // windows in some layers: longer and shorter than chunks
    TINY_GEMMA ",sliding_window=9,layer_types=ssf",
    TINY_GEMMA ",sliding_window=2,layer_types=sfs,rope_type=linear,factor=4",
    // in all of them: nothing is as long as the stream
    TINY_MISTRAL ",sliding_window=5",
    TINY_OLMO ",sliding_window=6",
    // linear attention in some layers, in all, in none of a family that has it
    TINY_LLLF,
    TINY_HYBRID ",num_hidden_layers=2,layer_types=l,linear_num_value_heads=2,linear_conv_kernel_dim=2",
    TINY_HYBRID ",num_hidden_layers=2,layer_types=f,linear_num_value_heads=2,tie_word_embeddings=true",
    TINY_SHORT,
    TINY_SHORT3,
    "lfm2,hidden_size=20,intermediate_size=16,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"
    "head_dim=8,vocab_size=29,layer_types=c,linear_conv_kernel_dim=7,tie_word_embeddings=false",
    TINY_SHAPES,
    TINY_MAMBA,
    TINY_GRANITE,
    TINY_GRANITE_DENSE,
    TINY_BAMBA,
    // experts: one for each token, weights that do not add up to 1; all of them
    TINY_MIXED,
    TINY_EXPERTS ",num_experts_per_tok=1",
    TINY_EXPERTS ",num_experts_per_tok=6,norm_topk_prob=true,decoder_sparse_step=2",
    TINY_SINKS,
    TINY_BESIDE,
    TINY_OWN,
    TINY_LATENT,
    TINY_NARROW,
};
enum { MODELS = COUNT_OF(models) };

// The double build runs more chunk sizes, as rounding hides nothing there.
static int thinned(void) { return !all_cases() && ops_device->stored != DTYPE_FP64; }

// All models; on emulated kernels every third, from `first` on: the tests together cover all.
#define FOR_MODELS(i, first) for (size_t i = EMULATED ? (first) : 0; i < MODELS; i += EMULATED ? 3 : 1)

// Compares every method and chunk size with full on one batch.
static void methods_agree_on(TinyCase c, const char *text, const size_t *length, size_t documents, int masked) {
    tiny_router_losses(&c.model, &c.settings);
    c.batch = tiny_batch(length, documents, c.model.config.vocab_size, masked, 11);
    const int few = thinned() && ops_device->stored == DTYPE_BF16;
    const size_t N = c.batch.N, sizes[] = {1, 7, N / 3 ? N / 3 : 1, N > 1 ? N - 1 : 1, N, N + 1};
    test_case("%.40s..., %zu tokens, %zu documents, mask %d", text, N, documents, masked);
    TinyResult full = tiny_case_run(&c, METHOD_FULL, 0, 0, &c.batch, 1);
    if (!isfinite(full.loss) || (masked < 3 && full.loss <= 0)) test_fail("full's loss is %g", full.loss);
    TinyResult other = tiny_case_run(&c, METHOD_CHECKPOINT, 0, 0, &c.batch, 1);
    tiny_expect_same(&c.model, other, full, bound(), 0, 0);
    free(other.gradient);
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        if (EMULATED && i == 0 && documents > 1) continue; // chunks of one token: of one document, and in other rows
        if (EMULATED && family_has_linear(c.model.config.family) && i % 3 != 1)
            continue; // blocks of 64 tokens cost most
        for (size_t j = 0; j < COUNT_OF(sizes); j++) {
            if (i != j && (EMULATED || few || (!all_cases() && j != (i + 2) % COUNT_OF(sizes))))
                continue; // the diagonal, some
            static const Method methods[] = {METHOD_STREAM, METHOD_MST, METHOD_SECO};
            for (size_t m = 0; m < COUNT_OF(methods); m++) {
                if ((EMULATED || ops_device->stored == DTYPE_BF16) && m != (i + j) % 3) continue; // all in other rows
                if (methods[m] == METHOD_SECO && c.model.config.num_kv_shared_layers) continue;   // refused
                test_case("%.40s..., method %d, %zu tokens, %zu documents, mask %d, chunks %zu and %zu", text,
                          methods[m], N, documents, masked, sizes[i], sizes[j]);
                other = tiny_case_run(&c, methods[m], sizes[i], sizes[j], &c.batch, 1);
                tiny_expect_same(&c.model, other, full, bound(), 0, 0);
                free(other.gradient);
            }
        }
    }
    free(full.gradient);
    tiny_case_free(&c);
}

static void methods_agree(const char *text, const size_t *length, size_t documents, int masked) {
    methods_agree_on(tiny_case(text, 0), text, length, documents, masked);
}

// With chunks of 7 the third case ends at 6, 7, 8, 14, 15, 21, 28: before, on and after boundaries.
TEST(chunks_and_documents_agree) {
    static const struct {
        size_t documents, length[8];
        int masked;
    } cases[] = {{1, {37}, 0}, {1, {1}, 0}, {8, {6, 1, 1, 6, 1, 6, 7, 9}, 1}, {4, {5, 16, 3, 21}, 2}};
    for (size_t j = 0; j < COUNT_OF(cases); j++)
        FOR_MODELS(i, (j + 1) % 3) methods_agree(models[i], cases[j].length, cases[j].documents, cases[j].masked);
}

TEST(everything_masked) {
    const size_t length[] = {9, 5};
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

// Windows in every relation to chunks, documents and sequence, in any of the layers; two sequences of different length
// under one plan. Some gradients are zero up to rounding: of queries that see one key.
TEST(windows_anywhere) {
    static const char *const families_tried[] = {"qwen2", "qwen3", "gemma3"};
    for (size_t i = 0; i < (EMULATED ? 6u : all_cases() ? 150u : 60u); i++) {
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
            batches[part].targets[0] = 3; // at least one counts
        }
        test_case("%s, %zu and %zu tokens in %zu documents, chunk %zu", text, batches[0].N, batches[1].N, documents,
                  chunk);
        c.settings.gradient_type = dtype_of_sums(c.model.dtype);
        TinyResult full = tiny_case_run(&c, METHOD_FULL, 0, 0, batches, 2);
        for (int m = 0; m < 2; m++) {
            TinyResult found = tiny_case_run(&c, m ? METHOD_SECO : METHOD_STREAM, chunk, 1 + chunk / 2, batches, 2);
            tiny_expect_same(&c.model, found, full, bound(), 0, 0.01);
            free(found.gradient);
        }
        free(full.gradient);
        batch_free(&batches[0]), batch_free(&batches[1]);
        tiny_case_free(&c);
    }
}

// Compares the gradient by `full` with finite differences along a random direction in each parameter. Double build
static void slopes_agree(TinyCase c, double h, double allowed) {
    const size_t length[] = {9, 1, 6};
    c.model.config.pad_token_id = NO_ROW; // with one the gradient is not the slope
    c.batch = tiny_batch(length, 3, c.model.config.vocab_size, 1, 13);
    tiny_router_losses(&c.model, &c.settings);
    TinyResult full = tiny_case_run(&c, METHOD_FULL, 0, 0, &c.batch, 1);
    for (size_t j = 0; j < c.model.parameter_count; j++) {
        const Parameter *p = &c.model.parameters[j];
        tiny_expect_slope(&c, p->name, full.gradient, p->offset, parameter_elements(p), j, h, allowed, METHOD_FULL, 0,
                          0);
    }
    free(full.gradient);
    tiny_case_free(&c);
}

// Keys and queries of linear attention are normalised: short ones bend the loss within a small step. The scale of a
// shared expert has no loss of routers.
TEST(full_is_the_gradient) {
    if (ops_device->stored != DTYPE_FP64) {
        test_skip("finite differences need the double build");
        return;
    }
    FOR_MODELS(i, 1) {
        TinyCase c = tiny_case(models[i], 0);
        test_case("model %zu, %.40s...", i, models[i]);
        const int kinks = c.model.config.family->activation == ACTIVATION_CLAMPED;
        slopes_agree(c, kinks || layers_of_kind(&c.model.config, LAYER_LINEAR) ? 3e-6 : 1e-4, 1e-7);
    }
    test_case("a shared expert with a scale");
    slopes_agree(tiny_case(TINY_SHARED, 0), 3e-6, 1e-7);
}

// Layer inputs in host memory change no bit, of every layer or every second one.
static void inputs_agree(const Config *config) {
    static const Method method[] = {METHOD_STREAM, METHOD_MST};
    const size_t length[] = {9, 1, 6};
    TinyCase c = tiny_case_of(*config, 0);
    c.batch = tiny_batch(length, 3, c.model.config.vocab_size, 1, 13);
    for (size_t i = 0; i < 2 * COUNT_OF(method); i++) {
        RunSettings settings = tiny_settings(&c, method[i / 2], 3, 11);
        TinyResult expected = tiny_run_on(ops_device, settings, c.weights, &c.batch, 1);
        settings.place[PLACED_INPUTS] = PLACE_HOST, settings.inputs_every = 1 + i % 2;
        TinyResult found = tiny_run_on(ops_device, settings, c.weights, &c.batch, 1);
        tiny_expect_bits(found, expected, method_names[method[i / 2]]);
        free(found.gradient), free(expected.gradient);
    }
    tiny_case_free(&c);
}

// Compares every choice with `full` and, in the double build, with finite differences.
static void config_agrees(const Config *config, const char *what) {
    const size_t length[] = {9, 1, 6};
    methods_agree_on(tiny_case_of(*config, 0), what, length, 3, 1);
    inputs_agree(config);
    if (ops_device->stored != DTYPE_FP64) return;
    test_case("slopes, %s", what);
    slopes_agree(tiny_case_of(*config, 0), 3e-6, 1e-6);
}

// Families that are in no table. Letters of layers (config.h): one branch a block (F, L, C, p), two mixers summed in
// one branch (b, B), a convolution alone (c), an MLP without a gate. Each has a norm before, after, both or neither.
// Attention has a gate, too. The last one has experts.
TEST(families_beyond_the_table) {
    static const struct {
        const char *layers;
        int none_before, after, gated_attention, gelu, experts;
    } families[] = {{"lfl", 0, 0, 0, 1, 0}, {"lfl", 0, 1, 1, 0, 0}, {"lfl", 1, 0, 0, 0, 0}, {"lfl", 1, 1, 1, 1, 0},
                    {"FpL", 0, 0, 1, 0, 0}, {"pLF", 1, 1, 0, 1, 0}, {"fbB", 0, 0, 0, 0, 0}, {"lb", 1, 0, 1, 1, 0},
                    {"Bp", 0, 1, 0, 1, 0},  {"cfC", 0, 0, 0, 1, 0}, {"Clc", 1, 1, 0, 0, 0}, {"lf", 1, 0, 0, 0, 1}};
    for (size_t i = 0; i < COUNT_OF(families); i++) {
        const char *dense = TINY_HYBRID ",num_hidden_layers=3,linear_num_value_heads=2";
        Config config = config_from_text(families[i].experts ? TINY_SHARED : dense, "test", EXIT_USAGE);
        Family family = *config.family;
        char what[64];
        if (EMULATED && i % 4 != 1) continue;
        family.no_pre_norms = families[i].none_before, family.post_norms = families[i].after;
        family.gated_attention = families[i].gated_attention;
        if (families[i].gelu) family.activation = ACTIVATION_GELU;
        if (family.no_pre_norms) family.names.layer.NORM1_WEIGHT = family.names.layer.NORM2_WEIGHT = NULL;
        if (family.post_norms) family.names.layer.POST_NORM1 = "post1", family.names.layer.POST_NORM2 = "post2";
        config.family = &family, config.num_hidden_layers = strlen(families[i].layers);
        snprintf(config.layer_types, sizeof(config.layer_types), "%s", families[i].layers);
        snprintf(what, sizeof(what), "family %zu beyond the table, layers %s", i, families[i].layers);
        config_agrees(&config, what);
    }
}

// ---- chunks are values ----------------------------------------------------------------------------------------------
enum { HELD = 32 };

// Makes all chunks of a layer before using the first.
static size_t chunks_held(const StreamBP *s, Chunk chunk[HELD]) {
    for (size_t i = 0; i < chunk_count(s); i++) chunk[i] = chunk_at(s, i);
    return chunk_count(s);
}

static void held_forward(Visit *v) {
    StreamBP *s = v->s;
    Chunk chunk[HELD];
    const size_t count = chunks_held(s, chunk);
    for (size_t i = 0; i < count; i++) {
        v->c = visit(s, chunk[i]);
        Activations a = forward_activations(v);
        mixer_keys(v, &a);
        make_spans(s, chunk[count - 1], 0, 0); // another chunk's
        rest_forward(v, &a);
    }
}

static void held_backward(Visit *v) {
    StreamBP *s = v->s;
    Chunk chunk[HELD];
    mixer_begin(v);
    for (size_t i = chunks_held(s, chunk); i-- > 0;) {
        mixer_restore(v, i);
        v->c = visit(s, chunk[i]);
        Stored *dx = gradient_at(s, v->c.row);
        Activations a = recompute(v);
        make_spans(s, chunk[0], 0, 0);
        mlp_backward(v, &a, dx);
        mixer_backward(v, &a, dx);
        drop(v, &a);
    }
}

// A loop that keeps all chunks of a layer and uses the older ones gives the same bits.
TEST(older_chunks_stay_valid) {
    static const LayerLoops held = {held_forward, held_backward};
    const size_t length[] = {9, 1, 14, 16};
    FOR_MODELS(i, 1) {
        TinyCase c = tiny_case(models[i], 0);
        TinyRun r;
        test_case("%.40s...", models[i]);
        c.batch = tiny_batch(length, 4, c.model.config.vocab_size, 1, 5);
        c.settings.gradient_type = dtype_of_sums(c.model.dtype), c.settings.backward = 1;
        TinyResult expected = tiny_case_run(&c, METHOD_STREAM, 7, 7, &c.batch, 1), found = expected;
        tiny_begin(&r, ops_device, tiny_settings(&c, METHOD_STREAM, 7, 7), c.weights, NULL, &c.batch);
        r.s.loops = &held;
        found.loss = forward_backward(&r.s, &c.batch, batch_count(&c.batch).tokens, 1, NULL);
        found.gradient = device_read(ops_device, r.s.memory.gradients, c.settings.gradient_type, c.model.elements);
        tiny_expect_bits(found, expected, "holding all chunks");
        tiny_end(&r);
        free(expected.gradient), free(found.gradient);
        tiny_case_free(&c);
    }
}

// A second pass gives the same bits, a forward alone the same loss. A gradient stored in another type than sums, with a
// buffer of sums, is the same gradient.
TEST(one_pass_again) {
    const size_t length[] = {50, 31};
    FOR_MODELS(i, 0) {
        TinyCase c = tiny_case(models[i], 0);
        TinyRun r;
        c.batch = tiny_batch(length, 2, c.model.config.vocab_size, 1, 5);
        test_case("%.40s...", models[i]);
        c.settings.gradient_type = dtype_of_sums(c.model.dtype);
        TinyResult first = tiny_case_run(&c, METHOD_STREAM, 16, 10, &c.batch, 1);
        TinyResult again = tiny_case_run(&c, METHOD_STREAM, 16, 10, &c.batch, 1);
        tiny_expect_bits(again, first, "a second pass");
        c.settings.gradient_type = DTYPE_BF16;
        TinyResult rounded = tiny_case_run(&c, METHOD_STREAM, 16, 10, &c.batch, 1);
        tiny_expect_same(&c.model, rounded, first, ops_device->stored == DTYPE_BF16 ? 0.02 : 0.005, 0, 0);
        tiny_begin(&r, ops_device, tiny_settings(&c, METHOD_STREAM, 16, 10), c.weights, NULL, &c.batch);
        const double loss = forward_only(&r.s, &c.batch, batch_count(&c.batch).tokens, NULL);
        if (loss != first.loss) test_fail("loss %.17g alone, %.17g with backward", loss, first.loss);
        tiny_end(&r);
        free(first.gradient), free(again.gradient), free(rounded.gradient);
        tiny_case_free(&c);
    }
}

// Saved attention equals recomputed attention to the bit, with fewer operations and memory by a formula. Windows differ
// in bits: backward projects their keys in other chunks. Two sequences: the second finds the first's leftovers.
static void saving_changes_nothing(TinyCase *c, size_t chunk, const Batch *batches) {
    const Shapes d = shapes_of(&c->model);
    const Method method = chunk ? METHOD_STREAM : METHOD_CHECKPOINT;
    const Config *config = &c->model.config;
    const size_t N = batches[0].N, layers = layers_of_kind(config, LAYER_FULL) + layers_of_kind(config, LAYER_WINDOW);
    size_t Q = 0, bytes;
    for (size_t l = 0; l < d.L; l++)
        Q += layer_kind(config, l) <= LAYER_WINDOW ? shapes_in(&c->model, layer_form(config, l)).Q : 0;
    bytes = (N * Q * d.stored + 255) / 256 * 256 + (N * layers * d.NH * d.summed + 255) / 256 * 256;
    const Range all = {0, N};
    const double expanded = d.shared_key ? latents_seen(&batches[0], all, chunk ? chunk : N, 0) : 0; // latents
    RunSettings settings = tiny_settings(c, method, chunk, 11);
    settings.backward = 1;
    const Plan without = plan_make(&settings, &batches[0]);
    TinyResult expected = tiny_run_on(ops_device, settings, c->weights, batches, 2);
    for (size_t keep = 1; keep <= 2; keep++) {
        tiny_keep(&settings, keep);
        const Plan plan = plan_make(&settings, &batches[0]);
        TinyResult found = tiny_run_on(ops_device, settings, c->weights, batches, 2);
        if (layers_of_kind(&c->model.config, LAYER_WINDOW))
            tiny_expect_same(&c->model, found, expected, bound(), 0, 0.01);
        else
            tiny_expect_bits(found, expected, keep == 1 ? "the device" : "host memory");
        const double latents =
            settings.latent_ranges * expanded * 2 * (double)(d.L * d.KV * (d.NH * (d.HD - d.shared_key) + d.O));
        if (plan.counts.flops != without.counts.flops - without.counts.attention_forward / 2 - latents ||
            plan.counts.attention_forward != without.counts.attention_forward / 2)
            test_fail("%.17g operations, %.17g without, of which %.17g for attention forward", plan.counts.flops,
                      without.counts.flops, without.counts.attention_forward);
        if ((keep == 1 ? plan.share[SHARE_KEPT] - without.share[SHARE_KEPT] : plan.host_bytes) != bytes)
            test_fail("%zu and %zu bytes are planned, not %zu", plan.share[SHARE_KEPT], plan.host_bytes, bytes);
        free(found.gradient);
    }
    free(expected.gradient);
}

// Kept tensors have the recomputed bits at every level, in every place, with inputs of some layers restored. Windows
// and linear attention keep forward's keys and states, which backward otherwise makes in another way.
static void keeping_changes_nothing(TinyCase *c, size_t chunk, const Batch *batches, size_t keep) {
    RunSettings settings = tiny_settings(c, chunk ? METHOD_STREAM : METHOD_CHECKPOINT, chunk, 11);
    const int windows = level_changes_bits(&c->model.config);
    TinyResult expected = tiny_run_on(ops_device, settings, c->weights, batches, 2);
    tiny_keep(&settings, keep), settings.inputs_every = 1 + keep % 3;
    if (keep % 4 == 2) settings.place[PLACED_INPUTS] = PLACE_HOST;
    TinyResult found = tiny_run_on(ops_device, settings, c->weights, batches, 2);
    if (windows)
        tiny_expect_same(&c->model, found, expected, bound(), 0, 0.01);
    else
        tiny_expect_bits(found, expected, "recomputed");
    free(found.gradient), free(expected.gradient);
}

// Compares kept tensors with recomputed tensors: attention's outputs alone, and in turn the levels above.
TEST(kept_tensors) {
    static const size_t chunks[] = {0, 1, 7, 23, 24, 46, 47};
    const size_t length[] = {23, 9, 14}, shorter[] = {8, 5};
    FOR_MODELS(i, 2) {
        TinyCase c = tiny_case(models[i], 0);
        const size_t V = c.model.config.vocab_size;
        Batch batches[2] = {tiny_batch(length, 3, V, 1, 5), tiny_batch(shorter, 2, V, 1, 6)};
        c.settings.gradient_type = dtype_of_sums(c.model.dtype);
        for (size_t j = 0; j < COUNT_OF(chunks); j++) {
            const size_t keep = 3 + (j + i) % (TINY_KEEPS - 3);
            const int thins = thinned() && !EMULATED;
            test_case("%.40s..., chunk %zu, keep %zu", models[i], chunks[j], keep);
            if (EMULATED ? j == 1 + i % 6 : !thins || (i + j) % 2 == 0) saving_changes_nothing(&c, chunks[j], batches);
            if (EMULATED ? j != 1 && keep % 3 == i % 3 : !thins || (i + keep) % 2 == 0)
                keeping_changes_nothing(&c, chunks[j], batches, keep);
        }
        batch_free(&batches[0]), batch_free(&batches[1]);
        tiny_case_free(&c);
    }
}

// ---- experts --------------------------------------------------------------------------------------------------------
// Kernels whose logits are another expert's by a rounding error in backward, as those of another chunk size may be
static struct {
    const StreamBP *s;
    RouterShape router;
    int chooses; // routes anew, as a program would that stores none
} other;

static void other_logits(Summed *logits, const Stored *x, const Stored *weight, const Stored *bias, size_t n, size_t C,
                         size_t E, int accumulate) {
    double *z = (double *)(void *)logits;
    ops_device->router_logits(logits, x, weight, bias, n, C, E, accumulate);
    if (other.s->now.pass != PASS_BACKWARD) return;
    for (size_t i = 1; i < n * E; i++)
        if (i % E && z[i] == z[i - 1]) z[i] += 1e-15 * fabs(z[i]);
    if (other.chooses) ops_device->router_choose(stored_routes(other.s, 2, 0), logits, NULL, n, &other.router, 0);
}

// Two experts with the same row of the router tie at every token. Backward takes forward's choice though its logits
// differ; routes chosen again would give the gradient of another function.
TEST(ties_stay_as_forward_chose) {
    const size_t length[] = {40};
    if (ops_device->stored != DTYPE_FP64) {
        test_skip("a rounding error is told from a wrong route in the double build");
        return;
    }
    TinyCase c = tiny_case(TINY_EXPERTS ",num_experts_per_tok=1,mlp_only_layers=0+1", 0);
    const size_t C = c.model.config.hidden_size,
                 at = group_begin(&c.model, 2) + layer_offsets(&c.model, 2)[ROUTER_WEIGHT];
    for (size_t e = 1; e < c.model.config.num_experts; e++)
        memcpy(c.weights + at + e * C, c.weights + at, C * sizeof(double));
    c.batch = tiny_batch(length, 1, c.model.config.vocab_size, 0, 3);
    TinyResult expected = tiny_case_run(&c, METHOD_CHECKPOINT, 0, 0, &c.batch, 1), found = expected;
    Ops ops = *ops_device;
    ops.router_logits = other_logits;
    for (other.chooses = 0; other.chooses < 2; other.chooses++) {
        RunSettings settings = tiny_settings(&c, METHOD_CHECKPOINT, 0, 0);
        TinyRun r;
        settings.backward = 1;
        tiny_begin(&r, &ops, settings, c.weights, NULL, &c.batch);
        other.s = &r.s, other.router = shapes_of(&c.model).router;
        found.loss = forward_backward(&r.s, &c.batch, batch_count(&c.batch).tokens, 1, NULL);
        found.gradient = device_read(&ops, r.s.memory.gradients, settings.gradient_type, c.model.elements);
        const Parameter *down = &c.model.parameters[group_parameters(&c.model, 2).begin];
        while (!down->experts) down++;
        const double difference = tiny_difference(down, found.gradient, expected.gradient);
        if (!other.chooses) tiny_expect_same(&c.model, found, expected, bound(), 0, 0);
        if (other.chooses && !(difference > 0.5))
            test_fail("routes chosen again changed %.3g of a gradient", difference);
        free(found.gradient);
        tiny_end(&r);
    }
    free(expected.gradient);
    tiny_case_free(&c);
}

// Forgets gate_up where it need not be kept, as kernels that never write it.
static void forgetful_activate(Stored *out, Stored *gate_up, const Stored *x, const Stored *weight, const Stored *bias,
                               const Summed *factor, const int32_t *first, const int32_t *source, size_t rows, size_t E,
                               size_t C, size_t I, Activation activation, int keep) {
    ops_device->experts_activate(out, gate_up, x, weight, bias, factor, first, source, rows, E, C, I, activation, keep);
    if (!keep)
        memset((void *)gate_up, 0xff, rows * activation_width(activation.kind, I) * dtype_size(ops_device->stored));
}

TEST(experts_read_what_they_keep) {
    const size_t length[] = {13, 6};
    const char *const mixtures[] = {TINY_MIXED, TINY_EXPERTS ",num_experts_per_tok=2"};
    Ops ops = *ops_device;
    ops.experts_activate = forgetful_activate;
    for (size_t i = 0; i < COUNT_OF(mixtures); i++) {
        TinyCase c = tiny_case(mixtures[i], 0);
        c.batch = tiny_batch(length, 2, c.model.config.vocab_size, 1, 7);
        for (size_t keep = 0; keep < TINY_KEEPS; keep++) {
            RunSettings settings =
                tiny_settings(&c, keep % 2 ? METHOD_STREAM : METHOD_CHECKPOINT, keep % 2 ? 7 : 0, 11);
            test_case("%.40s..., keep %zu", mixtures[i], keep);
            tiny_keep(&settings, keep);
            TinyResult expected = tiny_run_on(ops_device, settings, c.weights, &c.batch, 1),
                       found = tiny_run_on(&ops, settings, c.weights, &c.batch, 1);
            tiny_expect_bits(found, expected, "where gate_up is forgotten");
            free(found.gradient), free(expected.gradient);
        }
        TinyResult full = tiny_run_on(&ops, tiny_settings(&c, METHOD_FULL, 0, 0), c.weights, &c.batch, 1);
        if (!isfinite(full.loss)) test_fail("full's loss is %g", full.loss);
        free(full.gradient);
        tiny_case_free(&c);
    }
}

// ---- latent attention -----------------------------------------------------------------------------------------------
static size_t expanded;

static void counted_expand(Stored *k, Stored *v, const Stored *kv, const Stored *shared, size_t n, size_t heads,
                           size_t head, size_t value, size_t width) {
    ops_device->latent_expand(k, v, kv, shared, n, heads, head, value, width);
    expanded += n;
}

// A pass over a layer expands each latent once, or by ranges once for each chunk that sees it; both in one chunk of all
// tokens, too. Backward attends again below --keep attention. Documents end within and between chunks.
TEST(latents_are_expanded_as_counted) {
    static const size_t chunks[] = {0, 6, 7, 23, 46}, length[] = {23, 9, 14};
    TinyCase c = tiny_case(TINY_LATENT, 0);
    c.batch = tiny_batch(length, 3, c.model.config.vocab_size, 1, 5);
    const Range all = {0, c.batch.N};
    Ops ops = *ops_device;
    ops.latent_expand = counted_expand;
    for (size_t i = 0; i < COUNT_OF(chunks) * 4; i++) {
        const size_t chunk = chunks[i / 4], keep = i % 2;
        RunSettings settings = tiny_settings(&c, chunk ? METHOD_STREAM : METHOD_CHECKPOINT, chunk, 11);
        settings.latent_ranges = i / 2 % 2, settings.keep.level = keep ? LEVEL_ATTENTION : LEVEL_NONE;
        test_case("chunk %zu, by ranges %d, keep %zu", chunk, settings.latent_ranges, keep);
        expanded = 0;
        free(tiny_run_on(&ops, settings, c.weights, &c.batch, 1).gradient);
        const double once = latents_seen(&c.batch, all, settings.latent_ranges && chunk ? chunk : c.batch.N, 0);
        const double times = settings.latent_ranges && !keep ? 3 : 2;
        assert_int_equal(expanded, times * once * (double)c.model.config.num_hidden_layers);
    }
    tiny_case_free(&c);
}

// ---- linear attention -----------------------------------------------------------------------------------------------
// Chunks below, of and above the rule's blocks of 64, and states kept at every level's intervals. Chunks end within and
// between documents, some of 1 to 3 tokens.
TEST(states_at_any_chunk) {
    if (EMULATED) test_skip("the tests of the ops cut calls and documents on emulated kernels");
    static const char *const kinds[] = {TINY_LLLF,
                                        TINY_HYBRID ",num_hidden_layers=3,layer_types=flf,linear_num_value_heads=6"};
    static const size_t chunks[] = {1, 2, 3, 7, 37, 64, 100, 158}, length[] = {1, 2, 3, 68, 1, 63, 3, 17};
    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        TinyCase c = tiny_case(kinds[i], 0);
        c.batch = tiny_batch(length, COUNT_OF(length), c.model.config.vocab_size, 0, 11);
        TinyResult full = tiny_case_run(&c, METHOD_FULL, 0, 0, &c.batch, 1);
        for (size_t j = thinned() ? 4 : 0; j < COUNT_OF(chunks); j++) {
            test_case("%.40s..., chunk %zu", kinds[i], chunks[j]);
            TinyResult found = tiny_case_run(&c, METHOD_STREAM, chunks[j], 60, &c.batch, 1);
            tiny_expect_same(&c.model, found, full, bound(), 0, 0);
            free(found.gradient);
        }
        free(full.gradient);
        tiny_case_free(&c);
    }
}

// Each layer that keeps products finds its own states at intervals of STATE_INTERVAL tokens.
TEST(kept_states) {
    static const Keeping keeping[] = {{LEVEL_PRODUCTS, 0, 0}, {LEVEL_ALL, 2, 0}};
    const size_t length[] = {1300, 2, 1047};
    TinyCase c = tiny_case(
        "qwen3_5,hidden_size=8,intermediate_size=4,num_hidden_layers=4,num_attention_heads=1,num_key_value_heads=1,"
        "head_dim=8,vocab_size=11,layer_types=llfl,linear_num_key_heads=1,"
        "linear_num_value_heads=2,linear_key_head_dim=3,linear_value_head_dim=2",
        0);
    c.batch = tiny_batch(length, 3, c.model.config.vocab_size, 1, 11);
    TinyResult expected = tiny_case_run(&c, METHOD_STREAM, 500, 100, &c.batch, 1);
    for (size_t i = 0; i < COUNT_OF(keeping) && !EMULATED; i++) {
        RunSettings settings = tiny_settings(&c, METHOD_STREAM, 500, 100);
        settings.keep = keeping[i];
        test_case("level %d, %zu layers", keeping[i].level, keeping[i].layers);
        TinyResult found = tiny_run_on(ops_device, settings, c.weights, &c.batch, 1);
        tiny_expect_same(&c.model, found, expected, bound(), 0, 0);
        free(found.gradient);
    }
    free(expected.gradient);
    tiny_case_free(&c);
}

// Several intervals of STATE_INTERVAL tokens: no two chunks of a level share a state, and memory equals the plan.
TEST(states_over_intervals) {
    static const size_t chunks[] = {1, 50}, length[] = {1300, 2, 1047};
    if (thinned()) test_skip("thousands of chunks are run in the double build");
    TinyCase c =
        tiny_case("qwen3_5,hidden_size=8,intermediate_size=4,num_hidden_layers=2,num_attention_heads=1,num_key_"
                  "value_heads=1,head_dim=8,vocab_size=11,layer_types=lf,linear_num_key_heads=1,linear_num_"
                  "value_heads=2,linear_key_head_dim=3,linear_value_head_dim=2",
                  0);
    const size_t states[] = {3 + 15 + 15 + 3, 3 + 10 + 1};
    c.batch = tiny_batch(length, 3, c.model.config.vocab_size, 1, 11);
    TinyResult full = tiny_case_run(&c, METHOD_FULL, 0, 100, &c.batch, 1);
    for (size_t i = 0; i < COUNT_OF(chunks); i++) {
        RunSettings settings = tiny_settings(&c, METHOD_STREAM, chunks[i], 100);
        TinyRun r;
        settings.backward = 1;
        test_case("chunk %zu", chunks[i]);
        tiny_begin(&r, ops_device, settings, c.weights, NULL, &c.batch);
        const double loss = forward_backward(&r.s, &c.batch, batch_count(&c.batch).tokens, 1, NULL);
        const TinyResult found = {
            loss, device_read(ops_device, r.s.memory.gradients, settings.gradient_type, c.model.elements),
            c.model.elements};
        tiny_expect_same(&c.model, found, full, bound(), 0, 0);
        gradient_squares(&r.s.memory);
        if (r.arena->peak != r.plan.total_bytes) test_fail("%zu bytes, planned %zu", r.arena->peak, r.plan.total_bytes);
        if (states_kept(chunks[i], (c.batch.N + chunks[i] - 1) / chunks[i]) != states[i])
            test_fail("%zu states are kept", states_kept(chunks[i], (c.batch.N + chunks[i] - 1) / chunks[i]));
        free(found.gradient);
        tiny_end(&r);
    }
    free(full.gradient);
    tiny_case_free(&c);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
