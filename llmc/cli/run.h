/*
A run: what the verbs that touch tensors have in common. A model is opened, settings come from the options, the plan is
made and held against the memory there is, one allocation follows, and weights are filled in. After that nothing is
allocated.
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H
#include "llmc/files/adapter_file.h"
#include "llmc/data/dataloader.h"
#include "llmc/ranks/world.h"
#include "llmc/ranks/dist.h"
#include "llmc/data/logprobs.h"
#include "llmc/plan/plan.h"
#include "llmc/files/model_path.h"
#include "options_out.h"
#include "report.h"
#include "llmc/tokenizer/tokenizer_file.h"
#include "llmc/files/weights.h"
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct {
    const Options *options;
    FILE *text; // for people: stdout, or stderr where stdout is JSON; of a rank that does not speak, nowhere
    size_t memory_at_start;
    WeightSource *source; // open until the weights are read; NULL: random weights
    Model model;
    Lora lora;             // of rank 0: none
    WeightSource *adapter; // of --adapter; open until it is read
    BaseKey adapter_base;  // what it says of its base
    BaseKey base;          // with LoRA, where adapters are written: of the model
    RunSettings settings;
    Assignment assignment; // of the step's micro-batches
    Plan plan;
    void *memory;      // plan.total_bytes
    void *host_memory; // plan.host_bytes
    Arena arena;
    StreamBP streambp;
    OptimizerState optimizer;
    FlopCount flop_count;
    LogprobFile reference, old;    // of --data, where they are named
    char tokenizer_path[PATH_MAX]; // the model's tokenizer.json or tokenizer.tok, or empty
} Run;

static DType dtype_from_name(const char *name, DType otherwise) {
    if (!strcmp(name, "fp32")) return DTYPE_FP32;
    if (!strcmp(name, "bf16")) return DTYPE_BF16;
    if (!strcmp(name, "double")) return DTYPE_FP64;
    return otherwise;
}

// ---- LoRA and the objective -----------------------------------------------------------------------------------------
// Those of --adapter, or new ones of --lora-rank.
static void run_open_lora(Run *run) {
    const Options *o = run->options;
    Lora *lora = &run->lora;
    char found[PATH_MAX];
    if (o->adapter)
        run->adapter =
            adapter_open(adapter_path_find(o->adapter, found, o->quiet), &run->model, lora, &run->adapter_base);
    if (o->adapter && dist_ranks() > 1) dist_check("adapters", weights_key(run->adapter));
    if (!o->lora_rank) return;
    lora->rank = o->lora_rank;
    lora->alpha = isnan(o->lora_alpha) ? 2 * (double)lora->rank : o->lora_alpha;
    lora->dropout = o->lora_dropout;
    lora->rslora = o->rslora;
    lora->modules = lora_modules(run->model.config.family, o->lora_targets, "--lora-targets", EXIT_USAGE);
    lora_build(lora, &run->model);
}

static Objective objective_from_options(const Options *o) {
    Objective objective = {0};
    objective.temperature = 1;
    objective.kind = (ObjectiveKind)objective_word(objective_names, OBJECTIVES, o->objective);
    objective.dpo_loss = (DpoLoss)objective_word(dpo_loss_names, DPO_LOSSES, o->dpo_loss);
    objective.normalisation = (Normalisation)objective_word(normalisation_names, NORMALISATIONS, o->normalisation);
    objective.beta = o->beta, objective.gamma = o->gamma, objective.label_smoothing = o->label_smoothing;
    objective.clip_low = o->clip_low, objective.clip_high = o->clip_high;
    objective.completion_tokens = (double)o->max_new_tokens;
    if (objective_is_of_policy(&objective)) objective.temperature = o->temperature;
    objective_resolve(&objective);
    return objective;
}

// Documents that --batch counts as one: the two of a pair, the completions of a group.
static size_t unit_documents(const Options *o) {
    const Objective objective = objective_from_options(o);
    if (objective_is_of_pairs(&objective)) return 2;
    return objective.kind == OBJECTIVE_GRPO || objective.kind == OBJECTIVE_GSPO ? o->group_size : 1;
}

// From --model or --init, or from `model` where a run that is resumed names neither.
static void run_open_model(Run *run, const Options *options, const char *model) {
    Config config;
    char remark[256] = "", found[PATH_MAX];
    memset(run, 0, sizeof(*run));
    run->memory_at_start = ops_device->memory_peak();
    run->options = options;
    run->text = options->json && is_main_rank() ? stderr : stdout;
    options_check_dtype(options, dtype_name(ops_device->stored));
    if (!options->init && !model) model = model_path_find(options->model, found, options->quiet);
    if (options->init) {
        config = config_from_text(options->init, "--init", EXIT_USAGE);
    } else if (options->verb == VERB_PLAN && model && path_is_directory(model)) {
        config = hf_directory_config(model, remark, sizeof(remark)); // a plan needs no weights
    } else {
        run->source = weights_open(model);
        if (dist_ranks() > 1) dist_check("model files", weights_key(run->source));
        config = run->source->config;
        memcpy(remark, run->source->remark, sizeof(remark));
    }
    if (*remark && !options->quiet) note("%s", remark);
    run->model = model_build(&config, dtype_from_name(options->dtype, ops_device->stored));
    run_open_lora(run);
}

// How positions limit T: a learned table ends, rotary positions only leave what the model was trained on.
static void check_positions(const Run *run, size_t T, const char *what) {
    const Config *c = &run->model.config;
    if (T <= c->max_position_embeddings) return;
    if (c->family->learned_positions)
        die_usage("%s %zu is above the %zu positions of this model's table; use at most %zu", what, T,
                  c->max_position_embeddings, c->max_position_embeddings);
    if (run->options->verb != VERB_PLAN)
        note("%s %zu is above max_position_embeddings %zu: the model has not seen such positions", what, T,
             c->max_position_embeddings);
}

// The processes of this run, or of the one that is planned: as its last rank, whose portions are the largest.
static World world_from_options(const Options *o) {
    World world;
    world.ranks = o->verb == VERB_PLAN ? o->ranks : dist_ranks();
    world.rank = o->verb == VERB_PLAN ? o->ranks - 1 : dist_rank();
    world.zero = o->zero, world.sp = o->sp;
    if (world.ranks % world.sp)
        die_usage("--sp %zu: does not divide the %zu ranks of the run; ranks share streams in groups of equal size",
                  world.sp, world.ranks);
    return world;
}

// Without a file of its log-probabilities, the reference under adapters is the model without them, and that of a single
// pass the model itself: computed as they are needed. A run that trains a model has computed them before its first step
// (reference.h).
static int computes_reference(const Run *run, const RunSettings *settings) {
    const Options *o = run->options;
    const int single = o->verb == VERB_BP || (o->verb == VERB_PLAN && !strcmp(o->plan_for, "bp"));
    return objective_needs_reference(&settings->objective) && !o->reference_logprobs && (run->lora.rank || single);
}

static RunSettings settings_from_options(const Run *run) {
    const Options *o = run->options;
    DType stored = run->model.dtype;
    int trains = o->verb == VERB_TRAIN || (o->verb == VERB_PLAN && !strcmp(o->plan_for, "train"));
    RunSettings settings = {0};
    options_check_storage(o, dtype_name(stored));
    settings.model = &run->model;
    settings.world = world_from_options(o);
    settings.ring = !strcmp(o->kv, "ring");
    if (o->keep && !strcmp(o->keep, "attention"))
        settings.keep = !strcmp(o->keep_on, "host") ? KEEP_IN_HOST_MEMORY : KEEP_ON_DEVICE;
    settings.lora = run->lora.rank ? &run->lora : NULL;
    settings.objective = objective_from_options(o);
    settings.reference = computes_reference(run, &settings);
    if (o->method && !strcmp(o->method, "checkpoint")) settings.method = METHOD_CHECKPOINT;
    if (o->method && !strcmp(o->method, "full")) settings.method = METHOD_FULL;
    settings.chunk = o->chunk, settings.logits_chunk = o->logits_chunk;
    if (settings.method != METHOD_STREAM && (o->chunk || o->logits_chunk))
        note("--method %s works on the whole stream at once: --chunk and --logits-chunk are ignored", o->method);
    if (settings.method == METHOD_FULL && settings.keep) {
        note("--method full keeps every activation: --keep attention is ignored");
        settings.keep = KEEP_NOTHING;
    }
    settings.backward = trains || o->verb == VERB_BP || o->verb == VERB_PLAN;
    settings.gradient_type = o->grad_accum > 1 || (o->rollout && o->batch > 1) ? dtype_of_sums(stored) : stored;
    if (o->grad_dtype) settings.gradient_type = dtype_from_name(o->grad_dtype, settings.gradient_type);
    if (stored == DTYPE_FP64) settings.gradient_type = DTYPE_FP64;
    settings.optimizer = trains;
    settings.moment_type = stored == DTYPE_FP64 ? DTYPE_FP64 : dtype_from_name(o->moments, DTYPE_FP32);
    settings.master = trains && stored == DTYPE_BF16 && strcmp(o->master, "none") != 0;
    return settings;
}

// What the options say of a run whose model is open.
static void run_resolve(Run *run) {
    run->settings = settings_from_options(run);
    run->assignment = assign_step(run->settings.world, run->options->grad_accum);
}

// The model's tokenizer, that shards must have been made with: its tokenizer.json, or the file made of that beside a
// run.
static void run_find_tokenizer(Run *run) {
    const char *model = run->options->model, *path = run->source ? run->source->path : model;
    *run->tokenizer_path = 0;
    if (!model) return;
    if (path_is_directory(model)) path_join(run->tokenizer_path, model, "tokenizer.json");
    if (*run->tokenizer_path && path_exists(run->tokenizer_path)) return;
    if (!tokenizer_beside(path, run->tokenizer_path)) *run->tokenizer_path = 0;
}

// Whether advantages are divided by the standard deviation of their group's rewards.
static int run_scales_rewards(const Options *o) {
    if (strcmp(o->scale_rewards, "auto") != 0) return !strcmp(o->scale_rewards, "group");
    return strcmp(o->normalisation, "dr_grpo") != 0;
}

// What --data and --val-data are opened with.
static DataLoader run_open_data(Run *run, const PathList *paths, Shuffle shuffle) {
    const Options *o = run->options;
    DataSettings settings = {0};
    settings.B = o->batch, settings.T = o->seq_len, settings.vocab_size = run->model.config.vocab_size;
    settings.shuffle = shuffle, settings.seed = o->seed;
    settings.use = o->verb == VERB_LOGPROBS ? DATA_READS : o->rollout ? DATA_PROMPTS : DATA_TRAINS;
    settings.objective = &run->settings.objective;
    settings.scale_rewards = run_scales_rewards(o);
    if (!strcmp(o->long_documents, "truncate")) settings.long_documents = LONG_TRUNCATE;
    if (!strcmp(o->long_documents, "refuse")) settings.long_documents = LONG_REFUSE;
    if (paths == &o->data && o->reference_logprobs) {
        logprobs_open(&run->reference, o->reference_logprobs);
        settings.reference = &run->reference;
    }
    if (paths == &o->data && o->old_logprobs) {
        logprobs_open(&run->old, o->old_logprobs);
        settings.old = &run->old;
    }
    run_find_tokenizer(run);
    if (*run->tokenizer_path && !o->any_tokenizer) settings.tokenizer_path = run->tokenizer_path;
    DataLoader loader = dataloader_open(paths->path, paths->count, &settings);
    if (dist_ranks() > 1) dist_check("data", dataloader_fingerprint(&loader));
    return loader;
}

// As --shuffle says; a pass and an evaluation read in the order of the files.
static Shuffle run_shuffle(const Options *o) {
    int trains = o->verb == VERB_TRAIN || (o->verb == VERB_PLAN && !strcmp(o->plan_for, "train"));
    if (!trains || !strcmp(o->shuffle, "off")) return SHUFFLE_OFF;
    return !strcmp(o->shuffle, "on") ? SHUFFLE_ON : SHUFFLE_AUTO;
}

// B documents of T tokens. B = 0: there is no stream, only generation
static SequenceBound regular_bound(size_t B, size_t T) {
    SequenceBound bound;
    if (B && T > PLAN_LONGEST / B) die_usage("--batch %zu x --seq-len %zu: more than %zu tokens", B, T, PLAN_LONGEST);
    bound.N = B * T, bound.documents = B, bound.longest = T;
    return bound;
}

static SequenceBound larger_bound(SequenceBound a, SequenceBound b) {
    a.N = max_size(a.N, b.N), a.documents = max_size(a.documents, b.documents),
    a.longest = max_size(a.longest, b.longest);
    return a;
}

// The largest stream of this rank, of data or (NULL) of random documents.
static SequenceBound run_bound(const Run *run, const DataLoader *data) {
    const Options *o = run->options;
    const size_t parts = run->assignment.parts;
    if (data && data->of_documents) return dataloader_part_bound(data, parts);
    assign_check_regular(run->assignment, run->settings.world, o->batch);
    return data ? dataloader_part_bound(data, parts) : regular_bound(o->batch / parts * unit_documents(o), o->seq_len);
}

// Documents of T tokens that fill the largest stream.
static size_t bound_documents(SequenceBound bound, size_t T) { return (bound.N + T - 1) / T; }

// A batch of that size but without its tokens: all that a plan needs. Documents are as long as any, the last ones
// empty.
static Batch batch_shape(SequenceBound bound) {
    Batch batch = {0};
    batch.N = bound.N, batch.documents = bound.documents;
    if (bound.N) batch.documents = max_size(bound.documents, (bound.N + bound.longest - 1) / bound.longest);
    batch.document_start = (size_t *)checked_calloc(batch.documents + 1, sizeof(size_t), "the documents of a plan");
    for (size_t d = 0; d <= batch.documents; d++) batch.document_start[d] = min_size(d * bound.longest, bound.N);
    return batch;
}

// What a rank may use: --memory-limit, or what is available where that is less; 0: not known.
static size_t run_limit(const Run *run, const char **whose) {
    const size_t limit = run->options->memory_limit, available = ops_device->memory_available();
    const int less = available && (!limit || available < limit);
    *whose = less ? "the memory available" : "--memory-limit";
    return less ? available : limit;
}

// What is left open: whether keys and values pass around the ranks of a stream, and whether what --keep keeps is in host
// memory. Either spares memory of the device; the second costs less time.
enum { IN_HOST_MEMORY = 1, AROUND = 2, CHOICES = 4 };

static int run_may_choose(const Run *run, int choice) {
    const int keeps = !strcmp(run->options->keep_on, "auto") && run->settings.keep != KEEP_NOTHING;
    const int ranks = !strcmp(run->options->kv, "auto") && world_sp(run->settings.world) > 1;
    return (keeps || !(choice & IN_HOST_MEMORY)) && (ranks || !(choice & AROUND));
}

static RunSettings run_chosen(const Run *run, int choice) {
    RunSettings settings = run->settings;
    if (choice & IN_HOST_MEMORY) settings.keep = KEEP_IN_HOST_MEMORY;
    if (choice & AROUND) settings.ring = 1;
    return settings;
}

// Of a run: a plan may be made for another machine.
static HostAvailable run_host(const Run *run) {
    return run->options->verb == VERB_PLAN ? NULL : ops_device->host_available;
}

// The first choice that fits into `limit` on every rank (0: no limit), or else the smallest.
static void run_choose(Run *run, const Batch *shape, size_t limit) {
    const Run open = *run;
    for (int choice = 0; choice < CHOICES; choice++) {
        const RunSettings settings = run_chosen(&open, choice);
        if (!run_may_choose(&open, choice)) continue;
        Plan plan = choice ? plan_make(&settings, shape) : run->plan;
        double beyond = (limit && plan.total_bytes > limit) || host_is_short(&plan, run_host(run));
        dist_sum(RANKS_ALL, &beyond, 1);
        if (beyond == 0 || plan.total_bytes < run->plan.total_bytes) run->settings = settings, run->plan = plan;
        if (beyond == 0) return;
    }
}

// The longest documents, B to a stream, that fit, whatever is chosen.
static size_t run_longest(const Run *run, size_t B, size_t limit) {
    size_t longest = 0;
    for (int choice = 0; choice < CHOICES; choice++) {
        const RunSettings settings = run_chosen(run, choice);
        if (run_may_choose(run, choice)) longest = max_size(longest, plan_longest(&settings, B, limit, run_host(run)));
    }
    return longest;
}

// Refuses a run that does not fit, before anything is allocated, and says what would. B: 0 where there is only
// generation. limit, whose: of run_limit
static void check_memory(const Run *run, size_t B, size_t limit, const char *whose) {
    if (!limit || run->plan.total_bytes <= limit) return;
    if (!B)
        die("weights and a key/value cache of %zu tokens need %s, %s is %s; shorten the prompt or --max-new-tokens",
            run->settings.cache_tokens, human_bytes((double)run->plan.total_bytes), whose, human_bytes((double)limit));
    size_t longest = run_longest(run, B, limit);
    if (longest)
        die("the plan needs %s, %s is %s; with these options --seq-len %zu would fit",
            human_bytes((double)run->plan.total_bytes), whose, human_bytes((double)limit), longest);
    die("the plan needs %s, %s is %s, and no length fits: the model with its gradients and optimizer alone is larger",
        human_bytes((double)run->plan.total_bytes), whose, human_bytes((double)limit));
}

static void check_host_memory(const Run *run) {
    if (host_is_short(&run->plan, run_host(run)))
        die("--keep attention would take %s of host memory, %s of it are available; take a shorter --seq-len%s or "
            "--keep none",
            human_bytes((double)run->plan.host_bytes),
            human_bytes((double)ops_device->host_available(run->plan.total_bytes)),
            run_may_choose(run, IN_HOST_MEMORY) ? "" : ", --keep-on device"); // else it has been tried
}

static void run_allocate_host(Run *run) {
    const size_t bytes = run->plan.host_bytes;
    if (!bytes) return;
    run->host_memory = ops_device->host_allocate(bytes);
    if (!run->host_memory)
        die("the system refused %s of host memory that --keep attention needs; take a shorter --seq-len, --keep-on "
            "device or --keep none",
            human_bytes((double)bytes));
}

// Plan and allocate: afterwards nothing more is, and the weights are still to be filled in.
static void run_allocate(Run *run, SequenceBound bound) {
    Batch shape = batch_shape(bound);
    const char *whose;
    if (shape.N > INT32_MAX)
        die_usage("--batch x --seq-len: %zu tokens in one stream, at most %d can be indexed; use --grad-accum", shape.N,
                  INT32_MAX);
    run->plan = plan_make(&run->settings, &shape);
    size_t limit = run_limit(run, &whose);
    run_choose(run, &shape, limit);
    check_memory(run, bound.N ? bound_documents(bound, run->options->seq_len) : 0, limit, whose);
    check_host_memory(run);
    dist_barrier(); // who goes on takes memory that other ranks of the host have yet to see
    run->memory = ops_device->allocate(run->plan.total_bytes);
    if (!run->memory)
        die("the device refused one allocation of %s that the plan needs; see `train plan` for what takes it",
            human_bytes((double)run->plan.total_bytes));
    run_allocate_host(run);
    arena_init(&run->arena, run->memory, run->plan.total_bytes);
    run_begin(&run->streambp, &run->optimizer, &run->settings, ops_device, &run->arena, &shape);
    arena_init(&run->streambp.host, run->host_memory, run->plan.host_bytes);
    if (shape.N) flop_count_begin(&run->flop_count, &run->settings, &shape);
    free(shape.document_start);
}

static void run_reference(Run *run, Batch *batch) {
    if (run->settings.reference) forward_policy(&run->streambp, batch, 1, batch->reference);
}

// A file that is kept open keeps its place on the disk, also when it is pruned.
static void run_close_source(Run *run) {
    if (run->source) weights_close(run->source);
    if (run->adapter) weights_close(run->adapter);
    run->source = run->adapter = NULL;
}

// The model's; with LoRA the weights below the adapters, which must be those that the adapters of --adapter are for.
static void run_load_base(Run *run) {
    const Options *o = run->options;
    const Sharding held = weights_sharding(&run->streambp.memory);
    if (run->source)
        weights_load(run->source, &run->model, held, ops_device, run->streambp.memory.weights);
    else
        weights_init_random(&run->model, held, ops_device, run->streambp.memory.weights, run->options->seed);
    weights_check_finite(&run->model, held, ops_device, run->streambp.memory.weights);
    if (run->adapter_base.weights || (run->settings.lora && o->verb == VERB_TRAIN && o->out))
        run->base = base_key(&run->model, sharding_of(run->streambp.memory.world, ZERO_WEIGHTS), ops_device,
                             run->streambp.memory.weights);
    if (run->adapter) adapter_check_base(run->adapter->path, &run->adapter_base, &run->base, o->model);
}

static void run_load_adapters(Run *run) {
    const Model *table = &run->lora.table;
    const Sharding held = weights_sharding(&run->streambp.memory);
    char when[PATH_MAX + 8];
    if (!run->adapter) {
        weights_init_random(table, held, ops_device, run->streambp.memory.adapters, run->options->seed);
        return;
    }
    weights_load(run->adapter, table, held, ops_device, run->streambp.memory.adapters);
    snprintf(when, sizeof(when), "%s: ", run->adapter->path);
    weights_check_finite_at(table, held, ops_device, run->streambp.memory.adapters, when,
                            "take another copy or an earlier checkpoint");
}

static void run_load_weights(Run *run) {
    run_load_base(run);
    if (run->settings.lora) run_load_adapters(run);
    run_close_source(run);
}

static void run_close(Run *run) {
    run_end(&run->streambp);
    flop_count_end(&run->flop_count);
    if (run->memory) ops_device->release(run->memory, run->plan.total_bytes);
    if (run->host_memory) ops_device->host_release(run->host_memory, run->plan.host_bytes);
    run_close_source(run);
    logprobs_close(&run->reference), logprobs_close(&run->old);
    model_free(&run->model);
    lora_free(&run->lora);
}

// What is trained: the model or its adapters.
static const Model *run_trained(const Run *run) { return trained_table(&run->streambp.memory); }

#ifdef _OPENMP
// What this rank may use of its host, where others run, too: mpirun binds each to a core of its own, or lets all have all.
static size_t processors_of_rank(void) {
    const size_t granted = (size_t)omp_get_num_procs(), ranks = dist_local_ranks();
    const size_t share = max_size((size_t)sysconf(_SC_NPROCESSORS_ONLN) / ranks, 1);
    if (granted < share)
        note("each rank is bound to %zu of this host's processors, its share would be %zu (mpirun --bind-to none)",
             granted, share);
    return min_size(granted, share);
}
#endif

// oneDNN cuts its work into omp_get_max_threads() pieces. Where the OpenMP runtime then starts fewer threads
// (OMP_THREAD_LIMIT, OMP_DYNAMIC, OMP_MAX_ACTIVE_LEVELS), results are wrong without a word. So, before any plan: what
// is promised is from now on what a team has. wanted 0: as many as there are; of several ranks on a host, its share.
static void use_threads(size_t wanted) {
    size_t team = 1;
#ifdef _OPENMP
    omp_set_dynamic(0);
    if (wanted)
        omp_set_num_threads((int)wanted);
    else if (dist_local_ranks() > 1 && !getenv("OMP_NUM_THREADS"))
        omp_set_num_threads((int)processors_of_rank());
#pragma omp parallel
#pragma omp single
    team = (size_t)omp_get_num_threads();
    omp_set_num_threads((int)team);
#endif
    if (wanted > team) note("--threads %zu: the OpenMP runtime grants this process %zu", wanted, team);
}

static int cpu_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// FLOP/s of the op set's own product of two n x n matrices, the best of a few, in memory of the arena that is not in
// use (between two streams: nearly all of it); 0 where that is too small.
static double run_product_rate(Run *run, size_t n) {
    const size_t size = dtype_size(run->model.dtype), mark = arena_mark(&run->arena);
    double best = 0;
    Stored *x[3];
    if (run->arena.capacity - run->arena.used < 3 * (n * n * size + ARENA_ALIGNMENT)) return 0;
    for (size_t i = 0; i < 3; i++) {
        x[i] = (Stored *)arena_push(&run->arena, SHARE_WORKSPACE, "peak measurement", n * n, size);
        ops_device->zero(x[i], n * n * size);
    }
    for (size_t i = 0; i < 4; i++) {
        double begin = seconds_now();
        ops_device->linear_forward(x[0], x[1], x[2], NULL, NULL, n, n, n);
        ops_device->finish();
        double rate = 2.0 * (double)(n * n * n) / (seconds_now() - begin);
        if (rate > best) best = rate;
    }
    arena_pop(&run->arena, mark);
    return best;
}

// The machine's peak as far as this op set reaches it: larger products until one takes a few milliseconds.
static double run_peak_flops(Run *run) {
    double best = 0, rate = 1;
    for (size_t n = 1024; n <= 8192 && rate > 0; n *= 2) {
        rate = run_product_rate(run, n);
        if (rate > best) best = rate;
        if (2.0 * (double)(n * n * n) > 5e-3 * best) break;
    }
    return best;
}

static void report_header(const Run *run) {
    if (run->options->quiet) return;
    fputs("command  ", run->text);
    options_echo(run->text, run->options);
    report_model(run->text, &run->model);
    report_world(run->text, run->settings.world, run->settings.ring);
    if (run->lora.rank)
        fprintf(run->text, "adapters rank %zu, alpha %g%s, dropout %g: %s parameters%s%s\n", run->lora.rank,
                run->lora.alpha, run->lora.rslora ? " (rsLoRA)" : "", run->lora.dropout,
                human_count((double)run->lora.table.elements), run->options->adapter ? " of " : "",
                run->options->adapter ? run->options->adapter : "");
    fprintf(run->text, "plan     %s, %s, chunk %zu, logits chunk %zu, %s per pass; at the peak:\n",
            human_bytes((double)run->plan.total_bytes), run->options->method ? run->options->method : "forward only",
            run->plan.chunk, run->plan.logits_chunk, human_flops(run->plan.flops));
    report_regions(run->text, &run->plan.arena);
    if (run->plan.host_bytes)
        fprintf(run->text, "  %11s  in host memory: attention's outputs\n", human_bytes((double)run->plan.host_bytes));
    fflush(run->text);
}

// Of shards of documents: what was made of them, and the stream that was planned for.
static void report_data(const Run *run, const DataLoader *data, SequenceBound bound) {
    if (run->options->quiet || !data->of_documents) return;
    if (data->documents.settings.use == DATA_PROMPTS)
        fprintf(run->text, "data     %zu prompts of at most %zu tokens, tokenizer %s\n", data->documents.prompts,
                data->documents.longest_prompt, data->documents.shard[0].header.tokenizer_name);
    else
        documents_report(run->text, &data->documents);
    fprintf(run->text, "longest  the plan is for a stream of %zu positions, of at most %zu documents\n", bound.N,
            bound.documents);
    fflush(run->text);
}

// What one step computes, and how, into an open object.
static void report_work_json(JsonOut *json, const Run *run, double flops, double model_flops) {
    json_text(json, "method", run->options->method);
    json_size(json, "chunk", run->plan.chunk);
    json_size(json, "logits_chunk", run->plan.logits_chunk);
    json_number(json, "flops", flops);
    json_number(json, "model_flops", model_flops);
    json_text(json, "dtype", dtype_name(run->model.dtype));
}

#endif
