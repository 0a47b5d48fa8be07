/*
The memory of a run: the largest sequence that data holds, the plan for it, and the choices that the options leave
open, taken so that the plan fits. run_allocate makes the one allocation, or says before it what would fit.
*/
#ifndef LLMC_MEMORY_H
#define LLMC_MEMORY_H
#include "run.h"

// ---- the largest sequence ------------------------------------------------------------------------------------------
// B documents of T tokens. B = 0: only generation
static SequenceBound regular_bound(size_t B, size_t T) {
    if (B && T > PLAN_LONGEST / B) die_usage("--batch %zu x --seq-len %zu: more than %zu tokens", B, T, PLAN_LONGEST);
    SequenceBound bound = {B * T, B, T};
    return bound;
}

static SequenceBound larger_bound(SequenceBound a, SequenceBound b) {
    SequenceBound bound = {max_size(a.N, b.N), max_size(a.documents, b.documents), max_size(a.longest, b.longest)};
    return bound;
}

// The largest sequence of this rank, of data or (NULL) of random documents. A step of so many samples may be of as many
// micro-batches as there are replicas, which are not divided into parts then.
static SequenceBound run_bound(const Run *run, const DataLoader *data) {
    const Options *o = run->options;
    const size_t parts = o->samples ? 1 : run->assignment.parts;
    if (data && !data->regular) return dataloader_part_bound(data, parts);
    if (parts > 1) assign_check_regular(run->assignment, run->settings.world, o->batch);
    return data ? dataloader_part_bound(data, parts)
                : regular_bound(o->batch / parts * sample_documents(o), o->seq_len);
}

// Documents of T tokens that fill the largest sequence.
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

// ---- choosing what fits --------------------------------------------------------------------------------------------
// Choices left open by --kv auto and --keep-on auto: a ring of keys and values, attention outputs in host memory.
// Either saves device memory; the second costs less time.
enum { CHOOSE_HOST = 1, CHOOSE_RING = 2, CHOICES = 4 };

// Sets what a choice stands for; 0 where it is not open.
static int settings_choose(RunSettings *settings, const Options *o, int choice) {
    if (choice & CHOOSE_HOST) {
        if (o->keep_on != PLACE_AUTO || !settings->keep) return 0;
        settings->place[PLACED_KEPT] = PLACE_HOST;
    }
    if (choice & CHOOSE_RING) {
        if (o->kv != KEYS_AUTO || world_sp(settings->world) == 1) return 0;
        settings->ring = 1;
    }
    return 1;
}

// A run is held against the memory of its host; a plan may be made for another machine.
static HostAvailable run_host(const Run *run) {
    return run->options->verb == VERB_PLAN ? NULL : ops_device->host_available;
}

// The library that takes attention of this run, the same on all ranks; of a plan that of the GPU that is planned.
static const char *attention_library(const Run *run) {
    const Config *c = &run->model.config;
    const size_t window = layers_with_window(c) == c->num_hidden_layers ? window_of_model(c) : 0;
    const int on_gpu = machine_from_options(run->options) || strcmp(ops_device->name, "cpu") != 0;
    if (run->options->verb == VERB_PLAN) return on_gpu && !window ? machine_attends(&run->model) : NULL;
    const char *library =
        ops_device->attention_library(c->num_attention_heads, c->num_key_value_heads, c->head_dim, window);
    double have = library != NULL;
    dist_sum(RANKS_ALL, &have, 1);
    if (have > 0 && have < (double)dist_ranks())
        die("only %.0f of %zu ranks have cuDNN for attention, and results depend on it; install it for all, or give "
            "all STREAMBP_CUDNN=0",
            have, dist_ranks());
    return library;
}

// Workspaces for that library's calls in backward, the largest first, 0 (the op set's own choice) last. With more it
// takes more heads and keys in a call, so results depend on it in their last bits: a run that is resumed takes the one
// it began with, or else a smaller one.
static size_t run_workspace(const Run *run, const RunSettings *settings, const Batch *shape, size_t index) {
    const Config *c = &run->model.config;
    const size_t chunk = settings->chunk ? settings->chunk : (size_t)CUDA_CHUNK;
    const AttentionChoice smallest = {settings->attention.any_order, 0};
    const AttentionCut cut = attention_cut(c->num_attention_heads, c->num_key_value_heads, c->head_dim, 0, smallest);
    const size_t keys = shape->N - min_size(shape->N, chunk); // before the last chunk
    if (!run->attention || !settings->backward) return 0;
    if (!run->has_begun) return attention_workspace_choice(cut, keys, index);
    return index ? min_size(attention_workspace_choice(cut, keys, index - 1), run->workspace) : run->workspace;
}

// Plans with the first choice that fits into `limit` on every rank (0: no limit), or else the smallest.
static void run_plan(Run *run, const Batch *shape, size_t limit) {
    const RunSettings open = run->settings;
    const int other = run->options->verb == VERB_PLAN && !strcmp(ops_device->name, "cpu"); // has no such workspace
    size_t least = SIZE_MAX;
    run->attention = attention_library(run);
    for (int choice = 0; choice < CHOICES; choice++) {
        RunSettings settings = open;
        if (!settings_choose(&settings, run->options, choice)) continue;
        for (size_t i = 0; i == 0 || settings.attention.workspace; i++) {
            settings.attention.workspace = run_workspace(run, &settings, shape, i);
            const Plan plan = plan_make(&settings, shape);
            const size_t bytes = plan.total_bytes + (other ? settings.attention.workspace : 0);
            double beyond = (limit && bytes > limit) || host_is_short(&plan, run_host(run));
            dist_sum(RANKS_ALL, &beyond, 1);
            if (beyond == 0 || bytes < least) run->settings = settings, run->plan = plan;
            least = min_size(least, bytes);
            if (beyond == 0) return;
        }
    }
}

// An option that changes nothing. After run_plan
static void note_attention(const Run *run) {
    if (run->settings.attention.any_order && !run->attention)
        note("--deterministic off changes nothing: attention is by our own kernels, which add in one order");
}

// The longest documents, B to a sequence, that fit, whatever is chosen, with the smallest workspace.
static size_t run_longest(const Run *run, size_t B, size_t limit) {
    size_t longest = 0;
    for (int choice = 0; choice < CHOICES; choice++) {
        RunSettings settings = run->settings;
        settings.attention.workspace = 0;
        if (settings_choose(&settings, run->options, choice))
            longest = max_size(longest, plan_longest(&settings, B, limit, run_host(run)));
    }
    return longest;
}

// One line per region alive at the peak: its bytes, a bar of its share of the total, its name.
static void report_regions(FILE *out, const Arena *plan) {
    size_t smaller = 0; // bytes of regions below 1 %
    for (size_t i = 0; i < plan->regions_at_peak; i++) {
        const Region *region = &plan->at_peak[i];
        const double part = (double)region->bytes / (double)max_size(plan->peak, 1);
        const int width = (int)(part * 32 + 0.5);
        if (part < 0.01)
            smaller += region->bytes;
        else
            fprintf(out, "  %11s  %5.1f %%  %-*.*s%*s  %s\n", human_bytes((double)region->bytes), 100 * part, width,
                    width, "################################", 32 - width, "", region->name);
    }
    if (smaller)
        fprintf(out, "  %11s  %5.1f %%  %32s  smaller ones together\n", human_bytes((double)smaller),
                100 * (double)smaller / (double)plan->peak, "");
}

// ---- where no length fits ------------------------------------------------------------------------------------------
#define WAYS_MOST 512 // bytes of the text

// Adds a line to `text` where run `way` fits: the options to type, and the length that they give.
static size_t way_out(const Run *way, size_t B, size_t limit, const char *options, char *text) {
    const size_t longest = run_longest(way, B, limit), used = strlen(text);
    if (longest)
        snprintf(text + used, WAYS_MOST - used, "\n  %-34s gives --seq-len %zu%s", options, longest,
                 world_ranks(way->settings.world) > 1 ? ", with as much memory for each" : "");
    return longest;
}

// Ways to let some length fit: adapters, a smaller optimizer, the fewest ranks that share a sequence.
static void ways_out(const Run *run, size_t B, size_t limit, char *text) {
    const Options *o = run->options;
    const World world = run->settings.world;
    const size_t ranks = world_ranks(world);
    char options[80];
    Run way = *run;
    if (run->settings.backward && !run->settings.lora) {
        Lora lora = {0};
        lora.rank = 32, lora.modules = lora_modules(run->model.config.family, "all", "--lora-targets", EXIT_RUNTIME);
        lora_build(&lora, &run->model);
        way.settings.lora = &lora, way.settings.reference = computed_reference(o, &way.settings.objective, &lora);
        way_out(&way, B, limit, "--lora-rank 32", text);
        lora_free(&lora);
        way = *run;
    }
    if (run->settings.optimizer && run->model.dtype != DTYPE_FP64 &&
        (run->settings.moment_type != DTYPE_BF16 || run->settings.master)) {
        way.settings.moment_type = DTYPE_BF16, way.settings.master = 0;
        way_out(&way, B, limit, "--moments bf16 --master none", text);
        way = *run;
    }
    if (o->rollout || !option_accepted(&option_rows[option_find("zero")], o->verb)) return;
    for (size_t P = ranks; P <= 64 * ranks; P *= 2) {
        way.settings.world.ranks = P, way.settings.world.rank = P - 1, way.settings.world.zero = ZERO_WEIGHTS;
        way.settings.world.sp = world_sp(world) * (P / ranks);
        snprintf(options, sizeof(options), "%s%zu%s --zero 3", o->verb == VERB_PLAN ? "--ranks " : "mpirun -n ", P,
                 o->verb == VERB_PLAN ? "" : " ...");
        if (way.settings.world.sp > 1) snprintf(options + strlen(options), 32, " --sp %zu", way.settings.world.sp);
        if ((P > 1 && (P > ranks || world.zero < 3)) && way_out(&way, B, limit, options, text)) return;
    }
}

// B documents of a token do not fit.
__attribute__((noreturn)) static void die_no_length(const Run *run, size_t B, size_t limit, const char *whose) {
    char ways[WAYS_MOST] = "", parts[128] = "";
    Batch shape = batch_shape(regular_bound(B, 1));
    const Plan least = plan_make(&run->settings, &shape);
    free(shape.document_start);
    for (int share = SHARE_WEIGHTS; share <= SHARE_OPTIMIZER; share++)
        if (least.share[share])
            snprintf(parts + strlen(parts), sizeof(parts) - strlen(parts), "%s%s %s", *parts ? ", " : "",
                     share_names[share], human_bytes((double)least.share[share]));
    ways_out(run, B, limit, ways);
    if (*ways && is_main_rank()) fprintf(stderr, "what would fit%s\n", ways);
    die("no length fits: %s is %s, and one token already needs %s (%s); take %s", whose, human_bytes((double)limit),
        human_bytes((double)least.total_bytes), parts, *ways ? "one of the above" : "a smaller model or more memory");
}

// ---- the refusal ---------------------------------------------------------------------------------------------------
// Refuses a run that does not fit, before anything is allocated, and says what would. B: documents of a sequence; 0
// where there is only generation
static void check_memory(const Run *run, size_t B, size_t limit, const char *whose) {
    const size_t bytes = run->plan.total_bytes;
    if (limit && bytes > limit) {
        if (is_main_rank() && !run->options->quiet) report_regions(stderr, run->plan.arena);
        const char *needed = human_bytes((double)bytes), *most = human_bytes((double)limit);
        if (!B)
            die("weights and a key/value cache of %zu tokens need %s, %s is %s; shorten the prompt or --max-new-tokens",
                run->settings.cache_tokens, needed, whose, most);
        const size_t longest = run_longest(run, B, limit);
        if (!longest) die_no_length(run, B, limit, whose);
        die("the plan needs %s, %s is %s; with these options --seq-len %zu would fit", needed, whose, most, longest);
    }
    if (host_is_short(&run->plan, run_host(run)))
        die("--keep attention would take %s of host memory, %s of it are available; take a shorter --seq-len%s or "
            "--keep none",
            human_bytes((double)run->plan.host_bytes), human_bytes((double)ops_device->host_available(bytes)),
            run->options->keep_on == PLACE_AUTO ? "" : ", --keep-on device"); // else it has been tried
}

// ---- the one allocation --------------------------------------------------------------------------------------------
// Plan and allocate: afterwards nothing more is, and the weights are still to be filled in.
static void run_allocate(Run *run, SequenceBound bound) {
    // --memory-limit, or the available memory where that is less; 0: not known
    const size_t wanted = run->options->memory_limit, available = ops_device->memory_available();
    const int less = available && (!wanted || available < wanted);
    const size_t limit = less ? available : wanted;
    Batch shape = batch_shape(bound);
    if (shape.N > INT32_MAX)
        die_usage("--batch x --seq-len: %zu tokens in one sequence, at most %d can be indexed; use --grad-accum",
                  shape.N, INT32_MAX);
    run->available = limit;
    run_plan(run, &shape, limit);
    note_attention(run);
    check_memory(run, bound.N ? bound_documents(bound, run->options->seq_len) : 0, limit,
                 less ? ops_device->memory_name() : "--memory-limit");
    dist_barrier(); // who goes on takes memory that other ranks of the host have yet to see
    run->memory = ops_device->allocate(run->plan.total_bytes);
    if (!run->memory)
        die("the device refused one allocation of %s: %s were free before, %s are now; see what else takes memory "
            "(nvidia-smi), and `%s plan`",
            human_bytes((double)run->plan.total_bytes), human_bytes((double)available),
            human_bytes((double)ops_device->memory_available()), program_called());
    if (run->plan.host_bytes) run->host_memory = ops_device->host_allocate(run->plan.host_bytes);
    if (run->plan.host_bytes && !run->host_memory)
        die("the system refused %s of host memory that --keep attention needs; take a shorter --seq-len, --keep-on "
            "device or --keep none",
            human_bytes((double)run->plan.host_bytes));
    if (run->plan.disk_bytes) run->disk_memory = ops_device->disk_allocate(run->options->disk, run->plan.disk_bytes);
    arena_init(&run->arena[PLACE_DEVICE], run->memory, run->plan.total_bytes);
    arena_init(&run->arena[PLACE_HOST], run->host_memory, run->plan.host_bytes);
    arena_init(&run->arena[PLACE_DISK], run->disk_memory, run->plan.disk_bytes);
    arena_watch(run->arena, ops_device->copy_in, ops_device->copy_out);
    run_begin(&run->streambp, &run->optimizer, &run->settings, ops_device, run->arena, &shape);
    free(shape.document_start);
}

#endif
