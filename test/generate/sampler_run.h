/*
Common parts of the generation tests: tiny models of every family, and a run inside the fence (fence.h) with a cache. It
has exactly its planned memory, filled with NaN.
*/
#ifndef TEST_SAMPLER_RUN_H
#define TEST_SAMPLER_RUN_H
#include "test/base/child.h"
#include "test/model/tiny.h"
#include "test/ops/fence.h"
#include "llmc/generate/sampler.h"

// Both norms, learned positions and RoPE, tied and not, biases, heads that share keys, a single layer.
static const char *const models[] = {
    "gpt2,hidden_size=24,num_hidden_layers=2,num_attention_heads=3,vocab_size=19,max_position_embeddings=16",
    "llama,hidden_size=24,intermediate_size=28,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,vocab_"
    "size=17",
    "llama,hidden_size=20,intermediate_size=33,num_hidden_layers=1,num_attention_heads=5,num_key_value_heads=1,"
    "head_dim=6,vocab_size=14,tie_word_embeddings=true,attention_bias=true,mlp_bias=true",
    "qwen2,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=8,num_key_value_heads=1,"
    "vocab_size=15,tie_word_embeddings=true",
    "qwen3,hidden_size=20,intermediate_size=24,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"
    "head_dim=8,vocab_size=16",
    // windows shorter than the texts: keys and values slide
    "gemma3,hidden_size=20,intermediate_size=24,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,head_"
    "dim=8,vocab_size=18,tie_word_embeddings=false,sliding_window=3,layer_types=sfs",
    "mistral,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_"
    "size=13,sliding_window=2",
    // experts in two of three layers
    "qwen3_moe,hidden_size=16,intermediate_size=20,num_hidden_layers=3,num_attention_heads=2,num_key_value_heads=1,"
    "head_dim=8,vocab_size=17,num_experts=5,num_experts_per_tok=2,moe_intermediate_size=12,mlp_only_layers=1",
    // a state beside keys and values, a state alone
    TINY_LLLF,
    TINY_HYBRID ",num_hidden_layers=2,layer_types=l,linear_num_value_heads=2,linear_conv_kernel_dim=1",
};
enum { MODELS = COUNT_OF(models) };

typedef struct {
    Model model;
    TinyRun tiny;
    Sampler sampler;
} Run;

static RunSettings sampling_run(size_t chunk, size_t cache_tokens) {
    RunSettings settings = {0};
    settings.chunk = chunk, settings.cache_tokens = cache_tokens;
    settings.gradient_type = ops_device->stored, settings.moment_type = DTYPE_FP32;
    return settings;
}

// Opens a run; batch NULL: for generation alone. constants: of a router and of layers; NULL: as they begin
static Run *run_open_with(const Config *config, const Model *constants, RunSettings settings, const Batch *batch) {
    Run *run = (Run *)checked_calloc(1, sizeof(*run), "a run");
    static const Batch none = {0};
    run->model = model_build(config, ops_device->stored);
    if (constants) model_copy_constants(&run->model, constants);
    settings.model = &run->model;
    sampler_allocate(&run->sampler, &run->model, settings.cache_tokens, settings.context);
    tiny_begin(&run->tiny, EMULATED ? ops_device : ops_fenced(), settings, NULL, NULL, batch ? batch : &none);
    return run;
}

static Run *run_open(const Config *config, RunSettings settings, const Batch *batch) {
    return run_open_with(config, NULL, settings, batch);
}

// Opens models[i], with the first element of the final norm's weights scaled by `factor`.
static Run *run_of(size_t i, RunSettings settings, const Batch *batch, double factor) {
    const Config config = config_from_text(models[i], "test", EXIT_USAGE);
    Run *run = run_open(&config, settings, batch);
    double *weights = tiny_weights(&run->model, 5);
    weights[run->model.model_offset[FINAL_NORM_WEIGHT]] *= factor;
    device_write(run->tiny.ops, run->tiny.s.memory.weights, run->model.dtype, weights, run->model.elements);
    free(weights);
    return run;
}

static void run_close(Run *run) {
    sampler_free(&run->sampler);
    tiny_end(&run->tiny);
    model_free(&run->model);
    free(run);
}

static size_t vocabulary(size_t i) { return config_from_text(models[i], "test", EXIT_USAGE).vocab_size; }

// Generates text from ids[prompt] on, in place; nothing may allocate meanwhile.
static void generate(Run *run, int32_t *ids, size_t prompt, size_t count, const SamplingSettings *settings) {
    allocation_guard = 1;
    sampler_begin(&run->sampler, &run->tiny.s);
    sampler_feed(&run->sampler, ids, prompt);
    for (size_t t = prompt; t < count; t++) ids[t] = sampler_next(&run->sampler, settings);
    sampler_end(&run->sampler);
    allocation_guard = 0;
}

// Returns the logits [V] of the next token.
static double *sampler_logits(Sampler *sampler) {
    const size_t V = sampler->streambp->model->config.vocab_size;
    void *stored = case_memory(V * dtype_size(ops_device->stored));
    double *logits = case_doubles(V);
    sampler_feed(sampler, NULL, 0);
    cache_logits(&sampler->cache, sampler->streambp, stored);
    for (size_t v = 0; v < V; v++) logits[v] = element_to_double(stored, ops_device->stored, v);
    return logits;
}

// Absolute bound for logits and log-probabilities. Logits go up to 14: fp32 rounding leaves 7e-6 (either path's
// distance to the double build). bf16 logits near 4 are 0.016 apart.
static void expect_logit(double found, double expected, size_t v, size_t t) {
    const double bound = ops_device->stored == DTYPE_FP64 ? 1e-12 : ops_device->stored == DTYPE_FP32 ? 5e-5 : 0.12;
    const double difference = fabs(found - expected);
    if (!(difference <= bound)) test_fail("token %zu after position %zu: %.9g, expected %.9g", v, t, found, expected);
    testing.worst = fmax(testing.worst, difference / bound);
}

// Expects a child to end with this code and message; 0: without error.
static void expect_end(ChildBody body, const void *context, int code, const char *message) {
    if (code) {
        expect_refused(body, context, code, message);
        return;
    }
    const Child *child = run_child(body, context);
    if (child->code != 0) test_fail("refused what is fine: %s", child->err);
}

#endif
