/*
What the tests of generation have in common: tiny models of every family, and a run that has exactly the memory of its
plan, filled with NaN, with a cache to generate into.
*/
#ifndef TEST_SAMPLER_RUN_H
#define TEST_SAMPLER_RUN_H
#include "test/base/testing.h"
#include "test/model/tiny.h"
#include "llmc/files/safetensors.h"
#include "llmc/files/weights.h"
#include "llmc/generate/sampler.h"

// Both norms, learned positions and RoPE, tied and not, biases, heads that share keys, a single layer.
static const char *const models[] = {
    "gpt2,hidden_size=24,num_hidden_layers=2,num_attention_heads=3,vocab_size=19,max_position_embeddings=16",
    "llama,hidden_size=24,intermediate_size=28,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,vocab_"
    "size=17",
    "llama,hidden_size=20,intermediate_size=33,num_hidden_layers=1,num_attention_heads=5,num_key_value_heads=1,head_"
    "dim=6,"
    "vocab_size=14,tie_word_embeddings=true,attention_bias=true,mlp_bias=true",
    "qwen2,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=8,num_key_value_heads=1,"
    "vocab_size=15,tie_word_embeddings=true",
    "qwen3,hidden_size=20,intermediate_size=24,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_"
    "dim=8,"
    "vocab_size=16",
    // windows that the texts outgrow: keys and values slide
    "gemma3,hidden_size=20,intermediate_size=24,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,head_"
    "dim=8,vocab_size=18,tie_word_embeddings=false,sliding_window=3,layer_types=sfs",
    "mistral,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_"
    "size=13,sliding_window=2",
};
#define MODELS (sizeof(models) / sizeof(models[0]))

typedef struct {
    Model model;
    RunSettings settings;
    Plan plan;
    void *memory;
    Arena arena;
    StreamBP s;
    OptimizerState state;
    Sampler sampler;
} Run;

static RunSettings sampling_run(size_t chunk, size_t cache_tokens) {
    RunSettings settings = {0};
    settings.chunk = chunk, settings.cache_tokens = cache_tokens;
    settings.gradient_type = ops_device->stored, settings.moment_type = DTYPE_FP32;
    return settings;
}

// Plans, allocates exactly the plan, and fills it with NaN. batch NULL: nothing but generation.
static Run *run_open(const Config *config, RunSettings settings, const Batch *batch) {
    Run *run = (Run *)checked_calloc(1, sizeof(*run), "a run");
    static const Batch none = {0};
    run->model = model_build(config, ops_device->stored);
    settings.model = &run->model, run->settings = settings;
    run->plan = plan_make(&settings, batch ? batch : &none);
    run->memory = poisoned_memory(ops_device, run->plan.total_bytes);
    arena_init(&run->arena, run->memory, run->plan.total_bytes);
    sampler_allocate(&run->sampler, &run->model, settings.cache_tokens);
    run_begin(&run->s, &run->state, &settings, ops_device, &run->arena, batch ? batch : &none);
    return run;
}

// models[i] with weights whose first element of the final norm is times `factor`.
static Run *run_of(size_t i, RunSettings settings, const Batch *batch, double factor) {
    const Config config = config_from_text(models[i], "test", EXIT_USAGE);
    Run *run = run_open(&config, settings, batch);
    double *weights = tiny_weights(&run->model, 5);
    weights[run->model.model_offset[FINAL_NORM_WEIGHT]] *= factor;
    device_write(ops_device, run->s.memory.weights, run->model.dtype, weights, run->model.elements);
    free(weights);
    return run;
}

static void run_close(Run *run) {
    sampler_free(&run->sampler);
    run_end(&run->s);
    ops_device->release(run->memory, run->plan.total_bytes);
    model_free(&run->model);
    free(run);
}

static size_t vocabulary(size_t i) { return config_from_text(models[i], "test", EXIT_USAGE).vocab_size; }

// A text from ids[prompt] on, in place; nothing may allocate meanwhile.
static void generate(Run *run, int32_t *ids, size_t prompt, size_t count, const SamplingSettings *settings) {
    allocation_guard = 1;
    sampler_begin(&run->sampler, &run->s);
    sampler_feed(&run->sampler, ids, prompt);
    for (size_t t = prompt; t < count; t++) ids[t] = sampler_next(&run->sampler, settings);
    sampler_end(&run->sampler);
    allocation_guard = 0;
}

// An int32 tensor of a golden model's reference; lasts until the next case.
static int32_t *golden_ids(const char *folder, const char *name, size_t *count) {
    SafeTensors list = {NULL, 0};
    char path[256];
    snprintf(path, sizeof(path), "%s/reference.safetensors", folder);
    InputFile file = input_open(path);
    safetensors_read_header(&list, &file, 0);
    safetensors_sort(&list);
    SafeTensor *tensor = safetensors_find(&list, name);
    if (!tensor || strcmp(tensor->dtype, "I32") != 0) test_fail("%s has no int32 tensor %s", path, name);
    *count = (size_t)tensor->shape[0];
    int32_t *ids = (int32_t *)case_memory(*count * sizeof(int32_t));
    input_read(&file, tensor->begin, ids, *count * sizeof(int32_t));
    input_close(&file);
    safetensors_free(&list);
    return ids;
}

// A golden model, with the prompt and the greedy text that transformers made of it.
typedef struct {
    Run *run;
    int32_t *prompt, *greedy; // [6], [12]
} Golden;
enum { PROMPTED = 6, GREEDY = 12 };

static Golden golden_open(const char *name, RunSettings settings) {
    char folder[256];
    size_t prompted, count;
    Golden golden;
    snprintf(folder, sizeof(folder), "test/golden/%s", name);
    golden.prompt = golden_ids(folder, "prompt", &prompted), golden.greedy = golden_ids(folder, "greedy", &count);
    assert_true(prompted == PROMPTED && count == GREEDY);
    WeightSource *source = weights_open(folder);
    golden.run = run_open(&source->config, settings, NULL);
    weights_load(source, &golden.run->model, sharding_whole(), ops_device, golden.run->s.memory.weights);
    weights_close(source);
    return golden;
}

#endif
