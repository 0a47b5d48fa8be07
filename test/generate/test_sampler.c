/*
Generation: the cache gives the logits of a full forward pass for every family, however the prompt is fed; greedy text
equals that of Hugging Face transformers on the golden models; a run keeps to its plan and allocates nothing; refusals.
*/
#include "sampler_run.h"
#include "llmc/files/safetensors.h"
#include "llmc/files/weights.h"
#include "llmc/plan/plan.h"

// ---- the cache against a full forward pass -------------------------------------------------------------------------
// Returns logp[T,V] of every token at every position: a forward pass for each v with v as every target.
static double *full_forward(size_t i, const Batch *text) {
    size_t V = vocabulary(i), T = text->N;
    double *logp = case_doubles(T * V);
    Run *run = run_of(i, sampling_run(5, 1), text, 1);
    for (size_t v = 0; v < V; v++) {
        for (size_t t = 0; t < T; t++) text->targets[t] = (int32_t)v;
        forward_only(&run->tiny.s, text, 1, NULL);
        for (size_t t = 0; t < T; t++)
            logp[t * V + v] = element_to_double(run->tiny.s.now.host_sums, ops_device->summed, t);
    }
    run_close(run);
    return logp;
}

static void expect_logp(const double *logits, const double *logp, size_t V, size_t t) {
    double sum = 0, largest = logits[0];
    for (size_t v = 1; v < V; v++) largest = fmax(largest, logits[v]);
    for (size_t v = 0; v < V; v++) sum += exp(logits[v] - largest);
    for (size_t v = 0; v < V; v++) expect_logit(logits[v] - largest - log(sum), logp[v], v, t);
}

TEST(cache_equals_full_pass) {
    enum { T = 14 };
    static const size_t chunks[] = {1, 3, T + 5}, length[] = {T};
    for (size_t i = 0; i < MODELS; i++) {
        const size_t V = vocabulary(i);
        Batch text = tiny_batch(length, 1, V, 0, 3);
        test_case("%.40s...", models[i]);
        double *logp = full_forward(i, &text);
        for (size_t c = 0; c < COUNT_OF(chunks); c++) {
            Run *run = run_of(i, sampling_run(chunks[c], T), NULL, 1);
            for (size_t t = 1; t <= T; t++) { // all of it as a prompt
                sampler_begin(&run->sampler, &run->tiny.s);
                sampler_feed(&run->sampler, text.tokens, t);
                expect_logp(sampler_logits(&run->sampler), logp + (t - 1) * V, V, t - 1);
                sampler_end(&run->sampler);
            }
            sampler_begin(&run->sampler, &run->tiny.s);
            sampler_feed(&run->sampler, text.tokens, 4); // four, then one by one
            for (size_t t = 4; t <= T; t++) {
                expect_logp(sampler_logits(&run->sampler), logp + (t - 1) * V, V, t - 1);
                if (t < T) sampler_feed(&run->sampler, text.tokens + t, 1);
            }
            sampler_end(&run->sampler);
            sampler_begin(&run->sampler, &run->tiny.s); // two, then others, then rewinds
            sampler_feed(&run->sampler, text.tokens, 2);
            sampler_feed(&run->sampler, text.tokens + 1, T - 2);
            const size_t kept = sampler_rewind(&run->sampler, 2);
            sampler_feed(&run->sampler, text.tokens + kept, T - kept);
            expect_logp(sampler_logits(&run->sampler), logp + (T - 1) * V, V, T - 1);
            sampler_end(&run->sampler);
            run_close(run);
        }
        batch_free(&text);
    }
}

// ---- greedy text against transformers ------------------------------------------------------------------------------
// Returns an int32 tensor [count] of a golden model's reference.
static void golden_ids(const char *folder, const char *name, int32_t *ids, size_t count) {
    SafeTensors list = {NULL, 0};
    char path[256];
    snprintf(path, sizeof(path), "%s/reference.safetensors", folder);
    InputFile file = input_open(path);
    safetensors_read_header(&list, &file, 0);
    safetensors_sort(&list);
    const SafeTensor *tensor = safetensors_find(&list, name);
    if (!tensor || strcmp(tensor->dtype, "I32") || tensor->shape[0] != count) test_fail("%s: %s", path, name);
    input_read(&file, tensor->begin, ids, count * sizeof(int32_t));
    input_close(&file);
    safetensors_free(&list);
}

TEST(greedy_text_of_golden_models) {
    enum { PROMPTED = 6, GREEDY = 12 };
    static const char *const names[] = {"gpt2",
                                        "gpt2-hub",
                                        "llama",
                                        "llama-sharded",
                                        "llama-tied",
                                        "qwen2",
                                        "qwen2-fp16",
                                        "qwen3",
                                        "qwen3-bf16",
                                        "llama3",
                                        "llama-linear",
                                        "qwen2-yarn",
                                        "qwen3-yarn",
                                        "mistral",
                                        "mistral-full",
                                        "qwen2-sliding",
                                        "gemma3",
                                        "gemma3-linear",
                                        "qwen3_5",
                                        "qwen3_5-heads",
                                        "qwen3_5-one",
                                        "qwen3_5-linear",
                                        "qwen3_5-full",
                                        "qwen3_5-yarn",
                                        "ministral3",
                                        "smollm3",
                                        "olmo2",
                                        "olmo3",
                                        "phi3",
                                        "glm4",
                                        "granite",
                                        "seed_oss",
                                        "ernie4_5",
                                        "hunyuan_v1_dense",
                                        "muse_glimmer",
                                        "lfm2",
                                        "lfm3",
                                        "lfm2_moe",
                                        "qwen3_next",
                                        "olmo_hybrid",
                                        "nemotron_h-dense",
                                        "granitemoehybrid",
                                        "granitemoehybrid-dense",
                                        "bamba",
                                        "glm4_moe_lite",
                                        "deepseek_v3",
                                        "deepseek_v3-full",
                                        "mistral4"};
    static const size_t chunks[] = {1, 3, 6, 1024};
    static const SamplingSettings greedy = {0, 0, 0, 1, 0};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        int32_t text[PROMPTED + GREEDY], expected[GREEDY];
        char folder[256];
        test_case("%s, chunks of %zu", names[i], chunks[i % 4]);
        snprintf(folder, sizeof(folder), "test/golden/%s", names[i]);
        golden_ids(folder, "prompt", text, PROMPTED);
        golden_ids(folder, "greedy", expected, GREEDY);
        WeightSource *source = weights_open(folder);
        Run *run =
            run_open_with(&source->config, &source->model, sampling_run(chunks[i % 4], PROMPTED + GREEDY - 1), NULL);
        weights_load(source, &run->model, sharding_whole(), run->tiny.ops, run->tiny.s.memory.weights);
        weights_close(source);
        generate(run, text, PROMPTED, PROMPTED + GREEDY, &greedy);
        assert_memory_equal(text + PROMPTED, expected, sizeof(expected));
        run_close(run);
    }
}

// ---- seeds ---------------------------------------------------------------------------------------------------------
enum { CAPACITY = 24 };

TEST(seeds_reproduce) {
    size_t different = 0;
    for (size_t i = 1; i < MODELS; i++) { // the first, GPT-2, ends before CAPACITY
        int32_t first[CAPACITY] = {1, 4, 2, 7}, again[CAPACITY] = {1, 4, 2, 7}, other[CAPACITY] = {1, 4, 2, 7};
        SamplingSettings settings = {1.5, 0, 0, 0.95, 9};
        Run *run = run_of(i, sampling_run(3, CAPACITY), NULL, 1);
        test_case("%.40s...", models[i]);
        generate(run, first, 4, CAPACITY, &settings);
        generate(run, again, 4, CAPACITY, &settings);
        assert_memory_equal(first, again, sizeof(first));
        // the same text from half of it as the prompt: draws are numbered by position
        memset(again, 0, sizeof(again));
        memcpy(again, first, 12 * sizeof(int32_t));
        if (ops_device->stored != DTYPE_BF16) { // bf16 logits may differ by a rounding when fed otherwise
            generate(run, again, 12, CAPACITY, &settings);
            assert_memory_equal(first, again, sizeof(first));
        }
        settings.seed = 10;
        generate(run, other, 4, CAPACITY, &settings);
        different += memcmp(first, other, sizeof(first)) != 0;
        for (size_t t = 0; t < CAPACITY; t++) assert_true(first[t] >= 0 && (size_t)first[t] < vocabulary(i));
        run_close(run);
    }
    assert_int_equal(different, MODELS - 1);
}

TEST(random_streams_do_not_overlap) {
    uint64_t bits[32 * 32];
    for (size_t i = 0; i < COUNT_OF(bits); i++) {
        bits[i] = random_bits(9, i / 32, i % 32);
        for (size_t k = 0; k < i; k++) assert_true(bits[k] != bits[i]);
    }
}

// Feeding tokens after draws continues the text, as if everything had been the prompt.
TEST(feeding_goes_on) {
    static const SamplingSettings greedy = {0, 0, 0, 1, 0};
    static const int32_t more[3] = {5, 6, 5};
    Run *run = run_of(1, sampling_run(3, CAPACITY), NULL, 1);
    int32_t text[CAPACITY] = {1, 4, 2, 7};
    double expected[17];
    sampler_begin(&run->sampler, &run->tiny.s);
    sampler_feed(&run->sampler, text, 4);
    text[4] = sampler_next(&run->sampler, &greedy);
    text[5] = sampler_next(&run->sampler, &greedy);
    memcpy(text + 6, more, sizeof(more));
    sampler_feed(&run->sampler, more, 3);
    memcpy(expected, sampler_logits(&run->sampler), vocabulary(1) * sizeof(double));
    sampler_end(&run->sampler);
    sampler_begin(&run->sampler, &run->tiny.s);
    sampler_feed(&run->sampler, text, 9);
    const double *logits = sampler_logits(&run->sampler);
    for (size_t v = 0; v < vocabulary(1); v++) expect_logit(logits[v], expected[v], v, 8);
    sampler_end(&run->sampler);
    run_close(run);
}

// ---- the plan, and training ----------------------------------------------------------------------------------------
static void plan_is_run(size_t i, size_t chunk, size_t capacity, Method method, const Batch *batch) {
    static const SamplingSettings settings = {1, 0, 0, 1, 0};
    RunSettings run_settings = sampling_run(chunk, capacity);
    int32_t *text = (int32_t *)case_memory((capacity + 1) * sizeof(int32_t));
    run_settings.method = method, run_settings.backward = run_settings.optimizer = batch != NULL;
    Run *run = run_of(i, run_settings, batch, 1);
    generate(run, text, capacity, capacity + 1, &settings);
    if (batch) forward_backward(&run->tiny.s, batch, 1, 1, NULL);
    generate(run, text, 1, capacity + 1, &settings);
    if (run->tiny.arena->peak != run->tiny.plan.total_bytes)
        test_fail("%.30s..., chunk %zu, cache %zu: used %zu bytes at most, planned %zu", models[i], chunk, capacity,
                  run->tiny.arena->peak, run->tiny.plan.total_bytes);
    run_close(run);
}

TEST(plan_is_what_a_run_uses) {
    static const size_t length[] = {9, 4}, chunks[] = {1, 8, 100}, capacities[] = {1, 8, 40};
    static const size_t tried[] = {1, 4, 7}; // Llama, Qwen3, a hybrid model
    Batch batch = tiny_batch(length, 2, 14, 0, 3);
    for (size_t c = 0; c < 3; c++) {
        for (size_t k = 0; k < 3; k++) {
            plan_is_run(tried[(c + k) % 3], chunks[c], capacities[k], METHOD_STREAM, NULL);
            plan_is_run(tried[(c + k + 1) % 3], chunks[c], capacities[k], (Method)((c + 2 * k) % 3), &batch);
        }
    }
    batch_free(&batch);
}

// The plan holds the cache. It shares bytes with the stream: the larger of the two counts.
TEST(plan_counts_the_cache) {
    static const size_t tokens[] = {1, 1000, 100000, 200000};
    static const Batch none = {0};
    size_t start[2] = {0, 30000}, limit = (size_t)20 << 30;
    Batch batch = none;
    Config config = config_from_text("llama3.2-1b", "test", EXIT_USAGE);
    Model model = model_build(&config, DTYPE_BF16);
    RunSettings settings = sampling_run(1024, 0);
    settings.model = &model, settings.gradient_type = DTYPE_BF16;
    batch.N = start[1], batch.documents = 1, batch.document_start = start;
    for (size_t i = 0; i < COUNT_OF(tokens); i++) {
        size_t cache = 16 * tokens[i] * 8 * 64 * 2 * 2; // L, tokens, NKV, HD, k and v, bytes
        settings.cache_tokens = 0, settings.optimizer = 1;
        size_t without = plan_make(&settings, &batch).total_bytes;
        settings.cache_tokens = tokens[i];
        size_t both = plan_make(&settings, &batch).total_bytes, alone = plan_make(&settings, &none).total_bytes;
        assert_int_equal(both, max_size(without, alone));
        assert_int_equal(plan_make(&settings, &none).share[SHARE_KV], cache);
        // one chunk of the residual stream, C of bf16, for any cache size
        assert_int_equal(plan_make(&settings, &none).share[SHARE_LAYER_INPUTS], min_size(tokens[i], 1024) * 2048 * 2);
    }
    settings.optimizer = 0, settings.backward = 1, settings.cache_tokens = 1000;
    const Limits limits = device_limit(limit);
    assert_true(plan_longest(&settings, 1, 0, 0, &limits) > 100000);
    settings.cache_tokens = 700000; // leaves no room for a stream
    assert_int_equal(plan_longest(&settings, 1, 0, 0, &limits), 0);
    model_free(&model);
}

// ---- refusals ------------------------------------------------------------------------------------------------------
typedef struct {
    size_t capacity, fed;
    int32_t id;
    double factor; // of the first element of the final norm
    int code;      // 0: accepted
    const char *message;
} Refused;

static void start_and_continue(const void *context) {
    static const SamplingSettings settings = {1, 0, 0, 1, 0};
    const Refused *refused = (const Refused *)context;
    int32_t text[64] = {0};
    Run *run = run_of(0, sampling_run(3, refused->capacity), NULL, refused->factor);
    sampler_begin(&run->sampler, &run->tiny.s);
    if (refused->fed) text[refused->fed - 1] = refused->id;
    sampler_feed(&run->sampler, text, refused->fed);
    for (size_t t = 0; t < 8; t++) sampler_next(&run->sampler, &settings);
    sampler_end(&run->sampler);
    run_close(run);
}

TEST(refusals) {
    static const Refused cases[] = {
        {16, 5, 18, 1, 0, ""},
        {17, 5, 0, 1, EXIT_USAGE, "17 tokens, but the position table of this gpt2 model has 16"},
        {11, 5, 0, 1, EXIT_RUNTIME, "12 tokens does not fit the key/value cache planned for 11"},
        {8, 9, 0, 1, EXIT_RUNTIME, "9 tokens does not fit"},
        {16, 5, 19, 1, EXIT_RUNTIME, "token 4 of the text is 19; an id must be from 0 to 18"},
        {16, 5, -1, 1, EXIT_RUNTIME, "is -1; an id must be from 0 to 18"},
        {16, 0, 0, 1, EXIT_RUNTIME, "the prompt is empty"},
        {16, 5, 0, NAN, EXIT_RUNTIME, "the weights are damaged or training has diverged"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        expect_end(start_and_continue, &cases[i], cases[i].code, cases[i].message);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
