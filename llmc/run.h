/*
A run: what the verbs that touch tensors have in common. A model is opened, settings come from the options, the plan is made and
held against the memory there is, one allocation follows, and weights are filled in. After that nothing is allocated.
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H
#include "plan.h"
#include "options.h"
#include "report.h"
#include "weights.h"
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct {
    const Options *options;
    FILE *text; // for people: stdout, or stderr where stdout is JSON
    size_t memory_at_start;
    WeightSource *source; // open until the weights are read; NULL: random weights
    Model model;
    RunSettings settings;
    Plan plan;
    void *memory; // plan.total_bytes
    Arena arena;
    StreamBP stream;
    OptimizerState optimizer;
} Run;

static inline DType dtype_from_name(const char *name, DType otherwise) {
    if (!strcmp(name, "fp32")) return DTYPE_FP32;
    if (!strcmp(name, "bf16")) return DTYPE_BF16;
    if (!strcmp(name, "double")) return DTYPE_FP64;
    return otherwise;
}

// From --model or --init, or from `model` where a run that is resumed names neither.
static inline void run_open_model(Run *run, const Options *options, const char *model) {
    Config config;
    char remark[256] = "";
    memset(run, 0, sizeof(*run));
    run->memory_at_start = ops_device->memory_peak();
    run->options = options;
    run->text = options->json ? stderr : stdout;
    options_check_dtype(options, dtype_name(ops_device->stored));
    if (options->init) {
        config = config_from_text(options->init, "--init", EXIT_USAGE);
    } else if (options->verb == VERB_PLAN && options->model && path_is_directory(options->model)) {
        config = hf_directory_config(options->model, remark, sizeof(remark)); // a plan needs no weights
    } else {
        run->source = weights_open(model ? model : options->model);
        config = run->source->config;
        memcpy(remark, run->source->remark, sizeof(remark));
    }
    if (*remark && !options->quiet) note("%s", remark);
    run->model = model_build(&config, dtype_from_name(options->dtype, ops_device->stored));
}

// How positions limit T: a learned table ends, rotary positions only leave what the model was trained on.
static inline void check_positions(const Run *run, size_t T, const char *what) {
    const Config *c = &run->model.config;
    if (T <= c->max_position_embeddings) return;
    if (c->family->learned_positions)
        die_usage("%s %zu is above the %zu positions of this model's table; use at most %zu", what, T,
                  c->max_position_embeddings, c->max_position_embeddings);
    if (run->options->verb != VERB_PLAN)
        note("%s %zu is above max_position_embeddings %zu: the model has not seen such positions", what, T,
             c->max_position_embeddings);
}

static inline RunSettings settings_from_options(const Run *run) {
    const Options *o = run->options;
    RunSettings settings;
    DType stored = run->model.dtype;
    int trains = o->verb == VERB_TRAIN || (o->verb == VERB_PLAN && !strcmp(o->plan_for, "train"));
    memset(&settings, 0, sizeof(settings));
    options_check_storage(o, dtype_name(stored));
    settings.model = &run->model;
    if (o->method && !strcmp(o->method, "checkpoint")) settings.method = METHOD_CHECKPOINT;
    if (o->method && !strcmp(o->method, "full")) settings.method = METHOD_FULL;
    settings.chunk = o->chunk, settings.logits_chunk = o->logits_chunk;
    if (settings.method != METHOD_STREAM && (o->chunk || o->logits_chunk))
        note("--method %s works on the whole stream at once: --chunk and --logits-chunk are ignored", o->method);
    settings.backward = trains || o->verb == VERB_BP || o->verb == VERB_PLAN;
    settings.gradient_type = o->grad_accum > 1 ? dtype_of_sums(stored) : stored;
    if (o->grad_dtype) settings.gradient_type = dtype_from_name(o->grad_dtype, settings.gradient_type);
    if (stored == DTYPE_FP64) settings.gradient_type = DTYPE_FP64;
    settings.optimizer = trains;
    settings.moment_type = stored == DTYPE_FP64 ? DTYPE_FP64 : dtype_from_name(o->moments, DTYPE_FP32);
    settings.master = trains && stored == DTYPE_BF16 && strcmp(o->master, "none") != 0;
    return settings;
}

// A batch with B documents of T tokens but without its tokens: all that a plan needs. B = 0: there is none, only generation
static inline Batch batch_shape(size_t B, size_t T) {
    Batch batch;
    size_t b;
    memset(&batch, 0, sizeof(batch));
    if (B && T > PLAN_LONGEST / B) die_usage("--batch %zu x --seq-len %zu: more than %zu tokens", B, T, PLAN_LONGEST);
    batch.N = B * T, batch.documents = B;
    batch.document_start = (size_t *)checked_calloc(B + 1, sizeof(size_t), "the documents of a plan");
    for (b = 0; b <= B; b++) batch.document_start[b] = b * T;
    return batch;
}

// Refuses a run that does not fit, before anything is allocated, and says what would. B: 0 where there is only generation
static inline void check_memory(const Run *run, size_t B) {
    size_t limit = run->options->memory_limit, available = ops_device->memory_available(), longest;
    const char *whose = "--memory-limit";
    if (available && (!limit || available < limit)) limit = available, whose = "the memory available";
    if (!limit || run->plan.total_bytes <= limit) return;
    if (!B)
        die("weights and a key/value cache of %zu tokens need %s, %s is %s; shorten the prompt or --max-new-tokens",
            run->settings.cache_tokens, human_bytes((double)run->plan.total_bytes), whose, human_bytes((double)limit));
    longest = plan_longest(&run->settings, B, limit);
    if (longest)
        die("the plan needs %s, %s is %s; with these options --seq-len %zu would fit",
            human_bytes((double)run->plan.total_bytes), whose, human_bytes((double)limit), longest);
    die("the plan needs %s, %s is %s, and no length fits: the model with its gradients and optimizer alone is larger",
        human_bytes((double)run->plan.total_bytes), whose, human_bytes((double)limit));
}

// Plan and allocate: afterwards nothing more is, and the weights are still to be filled in.
// Streams are B documents of T tokens; B = 0: there is only generation.
static inline void run_allocate(Run *run, size_t B, size_t T) {
    Batch shape = batch_shape(B, T);
    if (shape.N > INT32_MAX)
        die_usage("--batch x --seq-len: %zu tokens in one stream, at most %d can be indexed; use --grad-accum", shape.N,
                  INT32_MAX);
    run->plan = plan_make(&run->settings, &shape);
    check_memory(run, B);
    run->memory = ops_device->allocate(run->plan.total_bytes);
    if (!run->memory)
        die("the device refused one allocation of %s that the plan needs; see `train plan` for what takes it",
            human_bytes((double)run->plan.total_bytes));
    arena_init(&run->arena, run->memory, run->plan.total_bytes);
    run_begin(&run->stream, &run->optimizer, &run->settings, ops_device, &run->arena, &shape);
    free(shape.document_start);
}

// A file that is kept open keeps its place on the disk, also when it is pruned.
static inline void run_close_source(Run *run) {
    if (run->source) weights_close(run->source);
    run->source = NULL;
}

static inline void run_load_weights(Run *run) {
    if (run->source)
        weights_load(run->source, &run->model, ops_device, run->stream.memory.weights);
    else
        weights_init_random(&run->model, ops_device, run->stream.memory.weights, run->options->seed);
    weights_check_finite(&run->model, ops_device, run->stream.memory.weights);
    run_close_source(run);
}

static inline void run_close(Run *run) {
    run_end(&run->stream);
    if (run->memory) ops_device->release(run->memory, run->plan.total_bytes);
    run_close_source(run);
    model_free(&run->model);
}

// oneDNN cuts its work into omp_get_max_threads() pieces. Where the OpenMP runtime then starts fewer threads (OMP_THREAD_LIMIT,
// OMP_DYNAMIC, OMP_MAX_ACTIVE_LEVELS), results are wrong without a word. So, before any plan: what is promised is from now on
// what a team has. wanted 0: as many as there are.
static inline void settle_threads(size_t wanted) {
    size_t team = 1;
#ifdef _OPENMP
    omp_set_dynamic(0);
    if (wanted) omp_set_num_threads((int)wanted);
#pragma omp parallel
#pragma omp single
    team = (size_t)omp_get_num_threads();
    omp_set_num_threads((int)team);
#endif
    if (wanted > team) note("--threads %zu: the OpenMP runtime grants this process %zu", wanted, team);
}

static inline int cpu_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static inline size_t gradient_bytes(const Run *run) {
    return run->model.elements * dtype_size(run->settings.gradient_type);
}

// FLOP/s of the op set's own product of two n x n matrices, the best of a few, in memory of the arena that is not in use (between two
// streams: nearly all of it); 0 where that is too small.
static inline double run_product_rate(Run *run, size_t n) {
    const size_t size = dtype_size(run->model.dtype), mark = arena_mark(&run->arena);
    double best = 0;
    Stored *x[3];
    size_t i;
    if (run->arena.capacity - run->arena.used < 3 * (n * n * size + ARENA_ALIGNMENT)) return 0;
    for (i = 0; i < 3; i++) {
        x[i] = (Stored *)arena_push(&run->arena, SHARE_WORKSPACE, "peak measurement", n * n, size);
        ops_device->zero(x[i], n * n * size);
    }
    for (i = 0; i < 4; i++) {
        double begin = seconds_now(), rate;
        ops_device->linear_forward(x[0], x[1], x[2], NULL, NULL, n, n, n);
        ops_device->finish();
        rate = 2.0 * (double)(n * n * n) / (seconds_now() - begin);
        if (rate > best) best = rate;
    }
    arena_pop(&run->arena, mark);
    return best;
}

// The machine's peak as far as this op set reaches it: larger products until one takes a few milliseconds.
static inline double run_peak_flops(Run *run) {
    double best = 0, rate = 1;
    size_t n;
    for (n = 1024; n <= 8192 && rate > 0; n *= 2) {
        rate = run_product_rate(run, n);
        if (rate > best) best = rate;
        if (2.0 * (double)(n * n * n) > 5e-3 * best) break;
    }
    return best;
}

static inline void report_header(const Run *run) {
    if (run->options->quiet) return;
    fputs("command  ", run->text);
    options_echo(run->text, run->options);
    report_model(run->text, &run->model);
    fprintf(run->text, "plan     %s, %s, chunk %zu, logits chunk %zu, %s per pass; at the peak:\n",
            human_bytes((double)run->plan.total_bytes), run->options->method ? run->options->method : "forward only",
            run->plan.chunk, run->plan.logits_chunk, human_flops(run->plan.flops));
    report_regions(run->text, &run->plan.arena);
    fflush(run->text);
}

// What one step computes, and how, into an open object.
static inline void report_work_json(JsonOut *json, const Run *run) {
    double passes = (double)run->options->grad_accum;
    json_text(json, "method", run->options->method);
    json_size(json, "chunk", run->plan.chunk);
    json_size(json, "logits_chunk", run->plan.logits_chunk);
    json_number(json, "flops", passes * run->plan.flops);
    json_number(json, "model_flops", passes * run->plan.model_flops);
    json_text(json, "dtype", dtype_name(run->model.dtype));
}

#endif
