/*
Ratios of speed, within one process: each repeat times one large matrix product and every variant of a pass in turn,
so that other load on the machine affects all equally; prints medians of the repeats' ratios. Built by dev/bench.sh.

    bench layers    [REPEATS]       decoder layers of Qwen3-0.6B's widths, T = 2048, 16384: share of the product's rate
    bench methods   [REPEATS [T]]   time of stream over time of checkpoint, at T = 4096 and 8192 or at T
    bench orders    [REPEATS [T]]   time of mst and seco over stream's, of spaco over seco's, T = 8192 or T, chunks of
                                    1024: a dense model, a hybrid, one with windows
    bench chunks    [REPEATS]       stream at several chunk sizes over checkpoint, T = 8192
    bench pass T V  [REPEATS]       the first with V words: what each op takes of a pass, its rate over the product's or
                                    a copy's
    bench seconds   [REPEATS]       median seconds of a `layers` pass, for comparing builds
    bench gpt2 B T METHOD [REPEATS]   median seconds of one training step of GPT-2 124M (forward, backward, AdamW)
    bench decode MODEL TEXTS PROMPT NEW GROUP [TEMPERATURE [TOP_P]]   completes texts for each line of stdin; on stdout
                                    seconds and ids. dev/compare/decode.py does so in turns with transformers
    bench token CONFIG PROMPT [REPEATS]   milliseconds of a greedy token after a prompt of PROMPT tokens, with random
                                    weights: bench_decode token qwen3-8b 32768; beside plan --for sample
    bench prefill   [REPEATS]       prompts packed into passes over prompts one after the other: 256 of 4 to 64 tokens,
                                    64 of 16 to 4096 (lognormal, in slots for 16); 4 layers of Qwen3-0.6B's widths
On a GPU: decode, token and prefill. make BACKEND=cuda PRECISION=bf16 build/.../bench_decode
*/
#include "llmc/plan/plan.h"
#include "llmc/estimate/profile.h"
#include "llmc/run/threads.h"
#include "llmc/generate/sampler.h"
#include "llmc/optimizer/update.h"
#include "llmc/files/weights.h"

double product_rate(void) __attribute__((weak)); // dev/product_rate.c; not in a build for GPUs

#define MOST 64

typedef struct {
    Model model;
    RunSettings settings;
    Plan plan;
    Arena arena[PLACES];
    StreamBP stream;
    OptimizerState state;
    Batch batch;
    void *memory;
} BenchPass;

static BenchPass pass_open(const char *text, Method method, size_t B, size_t T, size_t chunk, int optimizer) {
    Config config = config_from_text(text, "bench", EXIT_USAGE);
    BenchPass pass = {0};
    pass.model = model_build(&config, ops_device->stored);
    pass.settings.method = method;
    pass.settings.chunk = chunk;
    pass.settings.backward = 1, pass.settings.gradient_type = ops_device->stored;
    pass.settings.optimizer = optimizer, pass.settings.moment_type = dtype_of_sums(ops_device->stored);
    pass.batch = batch_allocate(B * T, B);
    batch_random(&pass.batch, B, T, 0, config.vocab_size, 1, 0);
    return pass;
}

// Plans and allocates, once the pass lies where it stays: the stream refers to its model and arena.
static void pass_place(BenchPass *pass, const Batch *batch) {
    pass->settings.model = &pass->model;
    pass->plan = plan_make(&pass->settings, batch);
    pass->memory = ops_device->allocate(pass->plan.total_bytes);
    if (!pass->memory) die("no memory for %zu bytes", pass->plan.total_bytes);
    arena_init(pass->arena, pass->memory, pass->plan.total_bytes);
    run_begin(&pass->stream, &pass->state, &pass->settings, ops_device, pass->arena, batch);
}

static void pass_begin(BenchPass *pass) {
    pass_place(pass, &pass->batch);
    weights_init_random(&pass->model, sharding_whole(), ops_device, pass->stream.memory.weights, 1);
    if (pass->settings.optimizer) optimizer_step(&pass->stream.memory, &pass->state, NULL);
}

static double pass_seconds(BenchPass *pass, int64_t step) {
    double begin = seconds_now();
    const Parameter *bad;
    AdamW adamw = {1e-4, 0.9, 0.999, 1e-8, 0, 1, step, 1, 0, 0, NULL, NULL};
    ops_device->zero(pass->stream.memory.gradients, pass->model.elements * dtype_size(pass->settings.gradient_type));
    forward_backward(&pass->stream, &pass->batch, batch_count(&pass->batch).tokens, 1, NULL);
    if (pass->settings.optimizer) {
        gradient_norm(&pass->stream.memory, &bad);
        optimizer_step(&pass->stream.memory, &pass->state, &adamw);
    }
    return seconds_now() - begin;
}

#define LAYERS "qwen3-0.6b,num_hidden_layers=2,vocab_size=256"

// Shares of the product's rate, of a pass over T tokens.
static void bench_length(size_t T, size_t repeats, int seconds_only) {
    static BenchPass pass;
    double executed[MOST], model[MOST], seconds[MOST];
    pass = pass_open(LAYERS, METHOD_STREAM, 1, T, 0, 0);
    pass_begin(&pass);
    pass_seconds(&pass, 1), product_rate();
    for (size_t i = 0; i < repeats; i++) {
        double rate = seconds_only ? 1 : 0.5 * product_rate();
        seconds[i] = pass_seconds(&pass, 1);
        if (!seconds_only) rate += 0.5 * product_rate(); // before and after the pass
        executed[i] = pass.plan.counts.flops / seconds[i] / rate, model[i] = pass.plan.model_flops / seconds[i] / rate;
    }
    if (seconds_only)
        printf("%.6f\n", median(seconds, repeats));
    else
        printf("layers: T = %zu: %.3f of the product's rate, recomputation counted; %.3f not counted (chunk %zu, %zu "
               "repeats)\n",
               T, median(executed, repeats), median(model, repeats), pass.plan.chunk, repeats);
    fflush(stdout);
    ops_device->release(pass.memory, pass.plan.total_bytes);
}

static void bench_layers(size_t repeats) {
    bench_length(2048, repeats, 0);
    bench_length(16384, repeats < 3 ? repeats : 3, 0);
}
static void bench_seconds(size_t repeats) { bench_length(2048, repeats, 1); }

static void bench_methods(size_t repeats, size_t T) {
    const size_t lengths[] = {T ? T : 4096, 8192}, count = T ? 1 : 2;
    for (size_t j = 0; j < count; j++) {
        static BenchPass stream, checkpoint;
        double ratio[MOST];
        stream = pass_open(LAYERS, METHOD_STREAM, 1, lengths[j], 0, 0);
        checkpoint = pass_open(LAYERS, METHOD_CHECKPOINT, 1, lengths[j], 0, 0);
        pass_begin(&stream), pass_begin(&checkpoint);
        if (lengths[j] <= 16384) pass_seconds(&stream, 1), pass_seconds(&checkpoint, 1); // of minutes none is lost
        for (size_t i = 0; i < repeats; i++) {                                           // the order alternates
            double a = i % 2 ? 0 : pass_seconds(&stream, 1), b = pass_seconds(&checkpoint, 1);
            if (i % 2) a = pass_seconds(&stream, 1);
            ratio[i] = a / b;
        }
        printf("methods: T = %zu: stream takes %.3f of checkpoint's time (chunk %zu, %zu repeats)\n", lengths[j],
               median(ratio, repeats), stream.plan.chunk, repeats);
        ops_device->release(stream.memory, stream.plan.total_bytes);
        ops_device->release(checkpoint.memory, checkpoint.plan.total_bytes);
    }
}

// Prints the time of each order over stream's; of spaco over seco's, the mean over SEEDS seeds.
static void bench_orders(size_t repeats, size_t T) {
    static const char *const models[] = {LAYERS, "qwen3.5-0.8b,num_hidden_layers=4,vocab_size=256",
                                         "gemma3-270m,num_hidden_layers=6,vocab_size=256"};
    static const Method methods[] = {METHOD_STREAM, METHOD_MST, METHOD_SECO, METHOD_SPACO};
    enum { METHODS = 4, SEEDS = 4 };
    for (size_t m = 0; m < sizeof(models) / sizeof(models[0]); m++) {
        static BenchPass pass[METHODS];
        double ratio[METHODS][MOST], sparse = 0, drawn = 0;
        size_t chunks = (T + 1023) / 1024, seeds = repeats * SEEDS;
        for (size_t j = 0; j < METHODS; j++) {
            pass[j] = pass_open(models[m], methods[j], 1, T, 1024, 0);
            pass[j].settings.sparse.keep = 0.25;
            pass_begin(&pass[j]);
            pass_seconds(&pass[j], 1);
        }
        for (size_t i = 0; i < repeats; i++) {
            double seconds[METHODS] = {0};
            for (size_t j = 0; j < 3; j++) {
                const size_t turn = (i + j) % 3;
                seconds[turn] = pass_seconds(&pass[turn], 1);
            }
            for (size_t seed = 0; seed < SEEDS; seed++) {
                pass[3].stream.now.sparse.seed = i * SEEDS + seed;
                sparse += pass_seconds(&pass[3], 1) / seconds[2] / (double)seeds;
                for (size_t c = 0; c < chunks; c++)
                    drawn += pass[3].stream.now.sparse.drawn[c] / (double)(chunks * seeds);
            }
            for (size_t j = 1; j < 3; j++) ratio[j][i] = seconds[j] / seconds[0];
        }
        printf(
            "orders: %s, T = %zu: of stream's time mst takes %.3f, seco %.3f; spaco, q = 0.25, %.3f of seco's (mean of "
            "%zu seeds, which drew %.3f; %zu repeats)\n",
            models[m], T, median(ratio[1], repeats), median(ratio[2], repeats), sparse, seeds, drawn, repeats);
        fflush(stdout);
        for (size_t j = 0; j < METHODS; j++) ops_device->release(pass[j].memory, pass[j].plan.total_bytes);
    }
}

static void bench_chunks(size_t repeats) {
    static const size_t chunks[] = {64, 128, 256, 512, 1024, 2048, 4096};
    static BenchPass pass[8];
    double ratio[8][MOST];
    size_t count = sizeof(chunks) / sizeof(chunks[0]);
    for (size_t j = 0; j <= count; j++) {
        pass[j] = pass_open(LAYERS, j ? METHOD_STREAM : METHOD_CHECKPOINT, 1, 8192, j ? chunks[j - 1] : 0, 0);
        pass_begin(&pass[j]);
        pass_seconds(&pass[j], 1);
    }
    for (size_t i = 0; i < repeats; i++) {
        double base = pass_seconds(&pass[0], 1);
        for (size_t j = 1; j <= count; j++) ratio[j][i] = pass_seconds(&pass[j], 1) / base;
    }
    for (size_t j = 1; j <= count; j++)
        printf("chunks: T = 8192, chunk %4zu: %.3f of checkpoint's time, workspace %s\n", chunks[j - 1],
               median(ratio[j], repeats), human_bytes((double)pass[j].plan.share[SHARE_WORKSPACE]));
}

static void bench_gpt2(size_t B, size_t T, const char *name, size_t repeats) {
    Method method = !strcmp(name, "full")         ? METHOD_FULL
                    : !strcmp(name, "checkpoint") ? METHOD_CHECKPOINT
                                                  : METHOD_STREAM;
    BenchPass pass = pass_open("gpt2", method, B, T, 0, 1);
    double seconds[MOST];
    pass_begin(&pass);
    pass_seconds(&pass, 1);
    for (size_t i = 0; i < repeats; i++) seconds[i] = pass_seconds(&pass, (int64_t)i + 2);
    printf("%.6f\n", median(seconds, repeats));
}

// Bytes/s of a copy as large as a chunk's gate and up, reads and writes counted.
static double copy_rate(void) {
    static char *memory;
    const size_t bytes = (size_t)24 << 20;
    if (!memory && !(memory = (char *)ops_device->allocate(2 * bytes))) die("no memory for %zu bytes", 2 * bytes);
    ops_device->copy(memory + bytes, memory, bytes);
    const double begin = seconds_now();
    ops_device->copy(memory, memory + bytes, bytes);
    return 2 * (double)bytes / (seconds_now() - begin);
}

static void bench_pass(size_t T, size_t V, size_t repeats) {
    static BenchPass pass;
    char text[128];
    double seconds = 0, product = 0, copy = 0;
    snprintf(text, sizeof(text), "qwen3-0.6b,num_hidden_layers=2,vocab_size=%zu", V);
    pass = pass_open(text, METHOD_STREAM, 1, T, 0, 0);
    pass_begin(&pass);
    pass_seconds(&pass, 1);
    const Ops timed = ops_timed(ops_device, 0);
    pass.stream.ops = pass.stream.memory.ops = &timed;
    for (size_t i = 0; i < repeats; i++) {
        product = fmax(product, product_rate()), copy = fmax(copy, copy_rate());
        seconds += pass_seconds(&pass, 1);
    }
    timing_sort();
    printf("pass: T = %zu, V = %zu, %.1f %% outside of ops\n", T, V, 100 * seconds_not_in_ops(seconds) / seconds);
    for (const TimedRow *row = timing.row; row < timing.row + timing.count; row++) {
        const double flops = row->counts.flops, rate = (flops > 0 ? flops : row_bytes(row)) / row->seconds;
        char shape[48] = "";
        if (!(rate > 0)) continue; // nothing is counted
        if (row->cols) snprintf(shape, sizeof(shape), "[%zu,%zu]", max_size(row->rows, 1), row->cols);
        printf("%7.2f %%  %-22s %-14s %6.3f of the %s rate\n", 100 * row->seconds / seconds, row->op, shape,
               rate / (flops > 0 ? product : copy), flops > 0 ? "product's" : "copy's");
    }
}

// Token t of text i is a number that decode.py makes, too; GROUP texts have the same prompt.
// TEMPERATURE 0, unless given: greedy.
static void bench_decode(const char *folder, size_t texts, size_t prompt, size_t new_tokens, size_t group,
                         SamplingSettings settings) {
    static BenchPass pass;
    static const Batch none;
    WeightSource *source = weights_open(folder);
    SamplerBatch sampler;
    char line[64];
    const size_t V = source->config.vocab_size;
    int32_t *ids = (int32_t *)checked_calloc(texts * (prompt + new_tokens), sizeof(int32_t), "texts");
    Completion *text = (Completion *)checked_calloc(texts, sizeof(Completion), "texts");
    pass.model = model_build(&source->config, ops_device->stored);
    pass.settings.gradient_type = ops_device->stored, pass.settings.moment_type = dtype_of_sums(ops_device->stored);
    pass.settings.rollout_slots = texts, pass.settings.rollout_tokens = prompt + new_tokens;
    pass_place(&pass, &none);
    weights_load(source, &pass.model, sharding_whole(), ops_device, pass.stream.memory.weights);
    weights_close(source);
    sampler_batch_allocate(&sampler, &pass.model, texts, prompt + new_tokens);
    for (size_t i = 0; i < texts; i++) {
        int32_t *begin = ids + i * (prompt + new_tokens);
        for (size_t t = 0; t < prompt; t++) begin[t] = (int32_t)((i / group * 7919 + t * 104729 + 1) % V);
        text[i] = (Completion){.prompt = ids + i / group * group * (prompt + new_tokens),
                               .prompt_tokens = prompt,
                               .seed = i,
                               .ids = begin + prompt};
        text[i].room = new_tokens;
    }
    while (fgets(line, sizeof(line), stdin)) {
        const double begin = seconds_now();
        sampler_batch(&sampler, &pass.stream, text, texts, &settings, NULL, 0);
        printf("%.6f", seconds_now() - begin);
        for (size_t i = 0; i < texts; i++)
            for (size_t t = 0; t < new_tokens; t++) printf(" %d", text[i].ids[t]);
        printf("\n");
        fflush(stdout);
    }
}

// Milliseconds of a token of one text, and seconds of its prompt.
static void bench_token(const char *config, size_t prompt, size_t repeats) {
    enum { WARM = 4 }; // tokens before the measured ones: a graph is recorded
    static BenchPass pass;
    static const Batch none;
    static const SamplingSettings greedy;
    const ContextSettings whole = {0, 0, 0};
    const Config of = config_from_text(config, "bench", EXIT_USAGE);
    int32_t *ids = (int32_t *)checked_calloc(prompt, sizeof(int32_t), "a prompt");
    double seconds[MOST];
    Sampler sampler;
    pass.model = model_build(&of, ops_device->stored);
    pass.settings.gradient_type = ops_device->stored, pass.settings.moment_type = dtype_of_sums(ops_device->stored);
    pass.settings.cache_tokens = prompt + WARM + repeats;
    pass_place(&pass, &none);
    weights_init_random(&pass.model, sharding_whole(), ops_device, pass.stream.memory.weights, 1);
    for (size_t t = 0; t < prompt; t++) ids[t] = (int32_t)random_below(1, 2, t, of.vocab_size);
    sampler_allocate(&sampler, &pass.model, pass.settings.cache_tokens, whole);
    sampler_begin(&sampler, &pass.stream);
    ops_device->finish();
    const double begin = seconds_now();
    sampler_feed(&sampler, ids, prompt);
    ops_device->finish();
    const double fed = seconds_now() - begin;
    for (size_t t = 0; t < WARM; t++) sampler_next(&sampler, &greedy);
    for (size_t t = 0; t < repeats; t++) {
        const double start = seconds_now();
        sampler_next(&sampler, &greedy);
        seconds[t] = seconds_now() - start;
    }
    printf("token: after %zu tokens %.3f ms (median of %zu), the prompt %.3f s\n", prompt,
           1e3 * median(seconds, repeats), repeats, fed);
    sampler_end(&sampler), sampler_free(&sampler), free(ids);
}

// Seconds of running prompts through the model, `slots` at a time: packed, or one after the other.
static double prefill_seconds(BenchPass *pass, Cache *cache, Append *prompt, size_t count, int packed) {
    cache_begin(cache, &pass->stream);
    ops_device->finish();
    const double begin = seconds_now();
    for (size_t first = 0; first < count; first += cache->slots) {
        for (size_t b = 0; b < cache->slots; b++) cache_clear(cache, &pass->stream, b);
        for (size_t b = 0; b < cache->slots && !packed; b++)
            cache_feed(cache, &pass->stream, b, prompt[first + b].tokens, prompt[first + b].n);
        if (packed) cache_append(cache, &pass->stream, prompt + first, cache->slots);
    }
    ops_device->finish();
    const double seconds = seconds_now() - begin;
    cache_end(cache, &pass->stream);
    return seconds;
}

static void bench_prefill(size_t repeats) {
    static const struct { size_t prompts, slots, least, most; } cases[] = {{256, 256, 4, 64}, {64, 16, 16, 4096}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        static BenchPass pass;
        static const Batch none;
        const size_t count = cases[i].prompts, slots = cases[i].slots, most = cases[i].most;
        double ratio[MOST], tokens = 0;
        Cache cache;
        Append *prompt = (Append *)checked_calloc(count, sizeof(Append), "prompts");
        int32_t *ids = (int32_t *)checked_calloc(most, sizeof(int32_t), "prompts");
        const BenchPass fresh = {0};
        pass = fresh;
        const Config config = config_from_text("qwen3-0.6b,num_hidden_layers=4", "bench", EXIT_USAGE);
        pass.model = model_build(&config, ops_device->stored);
        pass.settings.gradient_type = ops_device->stored, pass.settings.moment_type = dtype_of_sums(ops_device->stored);
        pass.settings.rollout_slots = slots, pass.settings.rollout_tokens = most;
        pass_place(&pass, &none);
        weights_init_random(&pass.model, sharding_whole(), ops_device, pass.stream.memory.weights, 1);
        for (size_t t = 0; t < most; t++) ids[t] = (int32_t)random_below(1, 2, t, config.vocab_size);
        for (size_t p = 0; p < count; p++) { // lognormal: 16 e^(1.8 + 1.2 z) tokens, z a sum of uniform numbers
            double z = -6;
            for (size_t k = 0; k < 12; k++) z += random_uniform(3, k, p);
            const double n = i ? 16 * exp(1.8 + 1.2 * z) : 4 + 61 * random_uniform(5, 6, p);
            const Append drawn = {p % slots, ids, (size_t)fmax(fmin(n, (double)most), (double)cases[i].least)};
            prompt[p] = drawn, tokens += (double)drawn.n;
        }
        cache_allocate(&cache, slots, most);
        for (int packed = 0; packed < 2; packed++) prefill_seconds(&pass, &cache, prompt, count, packed);
        for (size_t k = 0; k < repeats; k++) { // the order alternates
            double packed = k % 2 ? 0 : prefill_seconds(&pass, &cache, prompt, count, 1);
            const double alone = prefill_seconds(&pass, &cache, prompt, count, 0);
            if (k % 2) packed = prefill_seconds(&pass, &cache, prompt, count, 1);
            ratio[k] = packed / alone;
        }
        printf("prefill: %zu prompts of %zu to %zu tokens, %.0f in all: packed in %.3f of the time of one after the "
               "other (%zu repeats)\n",
               count, cases[i].least, most, tokens, median(ratio, repeats), repeats);
        fflush(stdout);
        cache_free(&cache);
        ops_device->release(pass.memory, pass.plan.total_bytes);
        free(prompt), free(ids);
    }
}

int main(int argc, char **argv) {
    threads_wait_briefly(argv);
    const char *what = argc > 1 ? argv[1] : "";
    size_t repeats = 7, B = 0, T = 0, group = 0;
    int at = !strcmp(what, "gpt2")                             ? 5
             : !strcmp(what, "pass") || !strcmp(what, "token") ? 4
             : !strcmp(what, "decode")                         ? argc
                                                               : 2;
    if (argc > at && (!parse_size(argv[at], &repeats) || !repeats || repeats > MOST))
        die_usage("repeats are 1 to %d", MOST);
    if ((!strcmp(what, "methods") || !strcmp(what, "orders")) && argc > 3 && (!parse_size(argv[3], &T) || !T))
        die_usage("T is a number of tokens");
    if (!product_rate && strcmp(what, "decode") != 0 && strcmp(what, "token") != 0 && strcmp(what, "prefill") != 0)
        die_usage("usage: bench_decode prefill [REPEATS], bench_decode token CONFIG PROMPT [REPEATS], bench_decode "
                  "decode MODEL TEXTS PROMPT NEW GROUP");
    if (!strcmp(what, "layers"))
        bench_layers(repeats);
    else if (!strcmp(what, "seconds"))
        bench_seconds(repeats);
    else if (!strcmp(what, "methods"))
        bench_methods(repeats, T);
    else if (!strcmp(what, "orders"))
        bench_orders(repeats, T ? T : 8192);
    else if (!strcmp(what, "chunks"))
        bench_chunks(repeats);
    else if (!strcmp(what, "prefill"))
        bench_prefill(repeats);
    else if (!strcmp(what, "gpt2") && argc > 4 && parse_size(argv[2], &B) && parse_size(argv[3], &T))
        bench_gpt2(B, T, argv[4], repeats);
    else if (!strcmp(what, "pass") && argc > 3 && parse_size(argv[2], &T) && parse_size(argv[3], &B))
        bench_pass(T, B, repeats);
    else if (!strcmp(what, "token") && argc > 3 && parse_size(argv[3], &T) && T)
        bench_token(argv[2], T, repeats);
    else if (!strcmp(what, "decode") && argc > 6 && parse_size(argv[3], &B) && B && parse_size(argv[4], &T) && T &&
             parse_size(argv[5], &repeats) && repeats && parse_size(argv[6], &group) && group)
        bench_decode(
            argv[2], B, T, repeats, group,
            (SamplingSettings){.temperature = argc > 7 ? atof(argv[7]) : 0, .top_p = argc > 8 ? atof(argv[8]) : 1});
    else
        die_usage("usage: bench layers|methods|orders|chunks|prefill|seconds [REPEATS [T]], pass T V [REPEATS], "
                  "gpt2 B T METHOD [REPEATS], token CONFIG PROMPT [REPEATS], decode MODEL TEXTS PROMPT NEW GROUP ..");
    return 0;
}
