/*
Long memory of a text (llmc/orders/context_memory.h): a text that fits the window is computed as usual; of longer ones a
model of one layer is computed again in double, with every choice of blocks; a run keeps to its plan in every place.
*/
#include "sampler_run.h"
#include "llmc/ops/ops_reference.h"

static RunSettings context_run(size_t chunk, size_t tokens, size_t window, size_t block, size_t loaded, Place place) {
    RunSettings settings = sampling_run(chunk, tokens);
    settings.context.window = window, settings.context.block = block, settings.context.loaded = loaded;
    settings.place[PLACED_INPUTS] = place;
    return settings;
}

// ---- short texts ---------------------------------------------------------------------------------------------------
TEST(short_texts_are_as_usual) {
    enum { T = 14 };
    static const size_t chunks[] = {1, 7, 512}, length[] = {T}, tried[] = {1, 4, 5, 7, 8};
    for (size_t i = 0; i < COUNT_OF(tried) * COUNT_OF(chunks); i++) {
        const size_t model = tried[i / COUNT_OF(chunks)], V = vocabulary(model);
        Batch text = tiny_batch(length, 1, V, 0, 3);
        test_case("%.40s..., chunks of %zu", models[model], chunks[i % COUNT_OF(chunks)]);
        Run *usual = run_of(model, sampling_run(chunks[i % COUNT_OF(chunks)], 4 * T), NULL, 1);
        Run *run = run_of(model, context_run(chunks[i % COUNT_OF(chunks)], 4 * T, T, 4, 2, PLACE_DEVICE), NULL, 1);
        sampler_begin(&usual->sampler, &usual->tiny.s), sampler_begin(&run->sampler, &run->tiny.s);
        for (size_t t = 0; t < T; t += t ? 1 : 9) {
            sampler_feed(&usual->sampler, text.tokens + t, t ? 1 : 9);
            sampler_feed(&run->sampler, text.tokens + t, t ? 1 : 9);
            const double *expected = sampler_logits(&usual->sampler), *found = sampler_logits(&run->sampler);
            for (size_t v = 0; v < V; v++) expect_logit(found[v], expected[v], v, t);
        }
        sampler_end(&usual->sampler), sampler_end(&run->sampler);
        run_close(usual), run_close(run), batch_free(&text);
    }
}

// ---- long texts, of one layer, again in double ---------------------------------------------------------------------
enum { C = 16, HEADS = 4, KEY_HEADS = 2, HD = 8, WIDTH = 20, V = 17, WINDOW = 24, BLOCK = 8, LOADED = 2, LONG = 120 };
#define ONE_LAYER                                                                                                      \
    "llama,hidden_size=16,intermediate_size=20,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=2,"       \
    "head_dim=8,vocab_size=17"

typedef struct {
    double x[LONG][C], q[LONG][HEADS * HD], k[LONG][KEY_HEADS * HD], v[LONG][KEY_HEADS * HD];
    double received[LONG], block_key[LONG][KEY_HEADS * HD]; // of block b: tokens BLOCK b, ...
} Reference;

static const double *layer_tensor(const Model *model, const double *weights, LayerTensor tensor) {
    return weights + model->layer_starts[0] + layer_offsets(model, 0)[tensor];
}

static double rotated_dot(const Run *run, const double *q, int32_t at_q, const double *k, int32_t at_k) {
    const Rotation how = {1, 0, 0, 0};
    float frequency[HD / 2];
    double a[HD], b[HD], sum = 0;
    rope_frequencies(&run->model.config, 0, frequency);
    memcpy(a, q, sizeof(a)), memcpy(b, k, sizeof(b));
    reference_rope(a, &at_q, frequency, 1, 1, HD, HD, how, 0);
    reference_rope(b, &at_k, frequency, 1, 1, HD, HD, how, 0);
    for (size_t i = 0; i < HD; i++) sum += a[i] * b[i];
    return sum;
}

// The best blocks of 1 .. left - 1 for the queries of tokens [from, to)
static void reference_choose(const Run *run, const Reference *r, size_t from, size_t to, size_t left, char *chosen) {
    double score[LONG] = {0};
    for (size_t b = 1; b < left; b++)
        for (size_t t = from; t < to; t++)
            for (size_t h = 0; h < HEADS; h++)
                score[b] += rotated_dot(run, &r->q[t][h * HD], WINDOW, &r->block_key[b][h / 2 * HD], 0);
    memset(chosen, 0, LONG);
    for (size_t i = 0; i < LOADED; i++) {
        size_t best = 0;
        for (size_t b = 1; b < left; b++)
            if (!chosen[b] && (!best || score[b] > score[best])) best = b;
        chosen[best] = 1;
    }
    chosen[0] = left > 0; // the first tokens
}

// out[HEADS,HD] of token t, whose window begins at token `begin`; adds what the window's keys receive
static void reference_attend(const Run *run, Reference *r, size_t t, size_t begin, const char *chosen, double *out) {
    double p[LONG];
    for (size_t h = 0; h < HEADS; h++) {
        double sum = 0;
        memset(out + h * HD, 0, HD * sizeof(double));
        for (size_t j = 0; j <= t; j++) {
            const int inside = j >= begin;
            p[j] = inside || chosen[j / BLOCK]
                       ? exp(rotated_dot(run, &r->q[t][h * HD], inside ? (int32_t)(t - begin) : WINDOW,
                                         &r->k[j][h / 2 * HD], inside ? (int32_t)(j - begin) : 0) /
                             sqrt(HD))
                       : 0;
            sum += p[j];
        }
        for (size_t j = 0; j <= t; j++) {
            if (j >= begin) r->received[j] += p[j] / sum;
            for (size_t i = 0; i < HD; i++) out[h * HD + i] += p[j] / sum * r->v[j][h / 2 * HD + i];
        }
    }
}

static void reference_block_key(Reference *r, size_t b) {
    for (size_t i = 0; i < CONTEXT_REPRESENTATIVES; i++) {
        size_t best = b * BLOCK;
        for (size_t j = best; j < (b + 1) * BLOCK; j++)
            if (r->received[j] > r->received[best]) best = j;
        for (size_t e = 0; e < KEY_HEADS * HD; e++) r->block_key[b][e] += r->k[best][e];
        r->received[best] = -1;
    }
}

// logits[V] after the text, fed in one call, in chunks of at most `chunk`
static void reference_text(const Run *run, const double *weights, const int32_t *tokens, size_t chunk, double *logits) {
    const Model *m = &run->model;
    const Norm norm = {m->config.norm_eps, 0, NORM_RMS};
    const Activation swiglu = {ACTIVATION_SWIGLU, 0, 0};
    Reference *r = (Reference *)checked_calloc(1, sizeof(Reference), "a reference");
    double normed[C], out[HEADS * HD], y[C], up[2 * WIDTH], activated[WIDTH];
    char chosen[LONG] = {0};
    size_t left = 0;
    for (size_t t = 0; t < LONG; t++) {
        memcpy(r->x[t], weights + m->model_offset[EMBEDDING] + (size_t)tokens[t] * C, sizeof(r->x[t]));
        reference_norm_forward(normed, r->x[t], layer_tensor(m, weights, NORM1_WEIGHT), NULL, NULL, 1, C, norm);
        reference_linear_forward(r->q[t], normed, layer_tensor(m, weights, Q_WEIGHT), NULL, NULL, 1, C, HEADS * HD, 0);
        reference_linear_forward(r->k[t], normed, layer_tensor(m, weights, K_WEIGHT), NULL, NULL, 1, C, KEY_HEADS * HD,
                                 0);
        reference_linear_forward(r->v[t], normed, layer_tensor(m, weights, V_WEIGHT), NULL, NULL, 1, C, KEY_HEADS * HD,
                                 0);
    }
    for (size_t from = 0, to; from < LONG; from = to) {
        to = from + min_size(chunk, from + 1 < LONG ? LONG - 1 - from : 1); // the last token alone
        for (; to - left * BLOCK > WINDOW; left++) reference_block_key(r, left);
        reference_choose(run, r, from, to, left, chosen);
        for (size_t t = from; t < to; t++) reference_attend(run, r, t, left * BLOCK, chosen, out);
    }
    reference_linear_forward(y, out, layer_tensor(m, weights, O_WEIGHT), NULL, r->x[LONG - 1], 1, HEADS * HD, C, 0);
    reference_norm_forward(normed, y, layer_tensor(m, weights, NORM2_WEIGHT), NULL, NULL, 1, C, norm);
    reference_linear_forward(up, normed, layer_tensor(m, weights, GATE_WEIGHT), NULL, NULL, 1, C, 2 * WIDTH, 0);
    reference_activation_forward(activated, up, swiglu, 1, WIDTH);
    reference_linear_forward(out, activated, layer_tensor(m, weights, DOWN_WEIGHT), NULL, y, 1, WIDTH, C, 0);
    reference_norm_forward(normed, out, weights + m->model_offset[FINAL_NORM_WEIGHT], NULL, NULL, 1, C, norm);
    reference_linear_forward(logits, normed, weights + m->model_offset[LM_HEAD], NULL, NULL, 1, C, V, 0);
    free(r);
}

TEST(long_texts_equal_the_reference) {
    static const size_t chunks[] = {1, 3, 7, 512}, length[] = {LONG};
    const Config config = config_from_text(ONE_LAYER, "test", EXIT_USAGE);
    if (ops_device->stored == DTYPE_BF16) return; // other roundings, other blocks
    for (size_t i = 0; i < COUNT_OF(chunks); i++) {
        Batch text = tiny_batch(length, 1, V, 0, 5 + i);
        Run *run = run_open(&config, context_run(chunks[i], LONG, WINDOW, BLOCK, LOADED, PLACE_HOST), NULL);
        double *weights = tiny_weights(&run->model, 5 + i), expected[V];
        test_case("chunks of %zu", chunks[i]);
        device_write(run->tiny.ops, run->tiny.s.memory.weights, run->model.dtype, weights, run->model.elements);
        reference_text(run, weights, text.tokens, min_size(chunks[i], (WINDOW - BLOCK) / 2), expected);
        sampler_begin(&run->sampler, &run->tiny.s);
        sampler_feed(&run->sampler, text.tokens, LONG);
        const double *found = sampler_logits(&run->sampler);
        for (size_t v = 0; v < V; v++) expect_logit(found[v], expected[v], v, LONG - 1);
        sampler_end(&run->sampler);
        free(weights), run_close(run), batch_free(&text);
    }
}

// ---- waits for the device ------------------------------------------------------------------------------------------
// The host waits for a layer where a block leaves its window, to choose representatives, and where blocks come from a
// disk. It waits nowhere else.
TEST(host_waits_only_for_leaving_blocks) {
    enum { BEFORE = 80, TOKENS = 16, SHORTEST = 24, EACH = 8, LAYERS = 3 };
    int32_t text[BEFORE + TOKENS] = {0};
    for (int place = PLACE_DEVICE; place < PLACES && !EMULATED; place++) {
        test_case("%s", place_names[place]);
        Run *run =
            run_of(1, context_run(8, BEFORE + TOKENS, SHORTEST, EACH, 2, (Place)place), NULL, 1); // 9 blocks, 2 loaded
        sampler_begin(&run->sampler, &run->tiny.s);
        sampler_feed(&run->sampler, text, BEFORE);
        const size_t before = fence.reads, leaving = TOKENS / EACH, fetched = place == PLACE_DISK ? TOKENS : 0;
        for (size_t t = 0; t < TOKENS; t++) sampler_feed(&run->sampler, text + BEFORE + t, 1);
        assert_int_equal(fence.reads - before, LAYERS * (leaving + fetched));
        sampler_end(&run->sampler), run_close(run);
    }
}

// ---- the plan ------------------------------------------------------------------------------------------------------
TEST(plan_is_what_a_run_uses) {
    static const size_t chunks[] = {1, 5, 100}, capacities[] = {1, 24, 40, 90}, tried[] = {1, 4, 5, 7, 8};
    static const SamplingSettings settings = {1, 0, 0, 1, 0};
    for (size_t i = 0; i < COUNT_OF(chunks) * COUNT_OF(capacities); i++) {
        const size_t capacity = capacities[i / COUNT_OF(chunks)], model = tried[i % COUNT_OF(tried)];
        const Place place = (Place)(i % PLACES);
        int32_t text[91] = {0};
        test_case("%.40s..., %zu tokens, %s", models[model], capacity, place_names[place]);
        Run *run = run_of(model, context_run(chunks[i % 3], capacity, 24, 8, 1 + i % 4, place), NULL, 1);
        for (size_t j = 0; j < 2; j++) generate(run, text, j ? 1 + capacity / 3 : capacity, capacity + 1, &settings);
        for (int p = 0; p < PLACES; p++)
            if (run->tiny.arena[p].peak != run->tiny.plan.arena[p].peak)
                test_fail("%s: used %zu bytes at most, planned %zu", place_names[p], run->tiny.arena[p].peak,
                          run->tiny.plan.arena[p].peak);
        run_close(run);
    }
}

// What a text adds to the device are keys of blocks: KV elements for each block and layer.
TEST(device_memory_grows_with_keys_of_blocks) {
    static const Batch none = {0};
    const Config config = config_from_text("qwen3-8b", "test", EXIT_USAGE);
    Model model = model_build(&config, DTYPE_BF16);
    RunSettings settings = context_run(0, (size_t)1 << 19, CONTEXT_WINDOW, CONTEXT_BLOCK, 16, PLACE_HOST);
    settings.model = &model;
    const Plan half = plan_make(&settings, &none);
    settings.cache_tokens *= 2;
    const Plan whole = plan_make(&settings, &none);
    const size_t blocks = ((size_t)1 << 19) / CONTEXT_BLOCK, keys = 36 * blocks * 1024 * 2;
    assert_in_range(whole.total_bytes - half.total_bytes, keys, keys + blocks * 8); // and scores
    assert_int_equal(whole.host_bytes - half.host_bytes, 2 * CONTEXT_BLOCK * keys);
    model_free(&model);
}

// ---- refusals ------------------------------------------------------------------------------------------------------
TEST(models_without_it) {
    static const struct {
        const char *model, *problem;
    } cases[] = {{"gpt2", "learned table"}, {"gemma4-e4b", "keys of earlier"}, {"qwen3-8b", NULL}, {"gemma3-1b", NULL}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const Config config = config_from_text(cases[i].model, "test", EXIT_USAGE);
        const char *problem = context_problem(&config);
        if (!problem != !cases[i].problem || (problem && !strstr(problem, cases[i].problem)))
            test_fail("%s: %s", cases[i].model, problem ? problem : "accepted");
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
