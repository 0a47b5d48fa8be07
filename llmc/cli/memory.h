/*
The memory of a run: the plan for its largest sequence, and the choices that the options leave open, taken so that the
plan fits. run_allocate makes the one allocation, or says before it what would fit.
*/
#ifndef LLMC_MEMORY_H
#define LLMC_MEMORY_H
#include "llmc/ops/link_rates.h"
#include "levels.h"

// --memory-limit, or the available memory where that is less; 0: not known
static size_t memory_limit(const Options *o, size_t available) {
    return available && (!o->memory_limit || available < o->memory_limit) ? available : o->memory_limit;
}

// ---- choosing what fits --------------------------------------------------------------------------------------------
// Returns the largest chunk to try on a GPU: doubled, up to four times, while an expert gets few of its rows.
static size_t largest_chunk(const Config *c) {
    const size_t k = c->num_experts_per_tok, E = c->family->router ? c->num_experts : 0;
    size_t chunk = LARGEST_CHUNK;
    while (chunk < 4 * LARGEST_CHUNK && chunk * k < ROWS_OF_EXPERT * E) chunk *= 2;
    return chunk;
}

// Returns what the options leave open, and the limits of a rank. limit: of device memory, 0: not known. Host memory
// is one if a machine or --host-limit says how much there is, or the device has its own memory; for attention's outputs
// also if they are to be kept.
static Search run_search(const Run *run, size_t limit) {
    const Options *o = run->options;
    const World world = run->settings.world;
    const Machine *named = option_given(o, "machine") ? machine_from_options(o) : NULL;
    const int plans = o->verb == VERB_PLAN, on_cpu = !strcmp(ops_device->name, "cpu"), own_memory = !on_cpu && !plans;
    const int gpu = run->settings.gpu || !on_cpu;
    Search c = {0};
    c.open = run->settings, c.open.attention.workspace = 0;
    settings_name_places(&c.open, o); // also where run_plan has decided
    if (o->method == METHOD_AUTO) c.open.method = METHOD_STREAM;
    c.machine = named ? named : plans ? NULL : machine_of_device(ops_device->device_name());
    if (!c.machine) c.machine = &machines[MACHINE_H100];
    c.sequences = max_size(1, assigned_batches(run->assignment));
    const double node = fmin((double)world_ranks(world), c.machine->value[GPUS_PER_NODE]);
    const double sharing = plans ? node : (double)dist_local_ranks();
    const double most[PLACES] = {0, plans && named ? machine_host_gib(named, node) : 0,
                                 plans && named ? named->disk_gib : 0};
    const size_t given[PLACES] = {0, o->host_limit, o->disk_limit};
    c.limits = device_limit(limit ? limit : SIZE_MAX), c.limits.tables = gpu;
    for (int place = PLACE_HOST; place < PLACES; place++)
        if (given[place] || most[place] > 0)
            c.limits.bytes[place] = (size_t)((given[place] ? (double)given[place] : most[place] * GIBIBYTE) / sharing);
    const int host = o->host_limit || most[PLACE_HOST] > 0 || own_memory, kept = host || o->keep == KEEP_ATTENTION;
    const int disk = o->disk || (plans && (o->disk_limit || most[PLACE_DISK] > 0));
    if (o->disk && !plans)
        c.limits.bytes[PLACE_DISK] = min_size(c.limits.bytes[PLACE_DISK], ops_device->disk_available(o->disk));
    if (!plans) c.limits.host = ops_device->host_available;
    for (int kind = 0; kind < PLACED; kind++)
        c.places[kind] = (1u << PLACE_DEVICE | (unsigned)(kind == PLACED_KEPT ? kept : host) << PLACE_HOST |
                          (unsigned)disk << PLACE_DISK) &
                         ~run->barred;
    c.ring = o->kv == KEYS_AUTO && world_sp(world) > 1;
    const int asked = options_train(o) || option_given(o, "keep") || option_given(o, "keep-on");
    c.keep = o->keep == KEEP_AUTO && asked && method_recomputes(c.open.method);
    c.spare = on_cpu && !plans && !o->memory_limit ? 0.25 : 0; // other programs live in the same memory
    c.defers = o->update == UPDATE_AUTO && c.open.optimizer;
    c.method = o->method == METHOD_AUTO && world_sp(world) == 1 && !run->settings.deals &&
               !(world_ranks(world) > 1 && world.zero == 3) && !run->model.config.num_kv_shared_layers;
    c.every = !o->inputs_every && c.places[PLACED_INPUTS] != 1u << PLACE_DEVICE && c.open.backward &&
              method_recomputes(c.open.method);
    if (!method_has_chunks(c.open.method) || c.open.method == METHOD_MST) return c;
    c.chunk = !o->chunk && c.open.backward, c.logits_chunk = c.chunk && !o->logits_chunk;
    c.open.chunk = o->chunk ? o->chunk : c.chunk && gpu ? largest_chunk(&run->model.config) : ops_device->chunk;
    c.open.logits_chunk = o->logits_chunk ? o->logits_chunk
                          : gpu           ? (size_t)CUDA_LOGITS_CHUNK
                                          : ops_device->logits_chunk;
    return c;
}

// Finds the library that takes attention of this run, the same on all ranks; of a plan that of the planned GPU.
static void run_attention(Run *run) {
    const Config *c = &run->model.config;
    const Machine *planned = machine_from_options(run->options);
    const int on_cpu = !strcmp(ops_device->name, "cpu");
    double have[4] = {0}; // forward, backward; of global heads
    run->attention = NULL, run->settings.library = on_cpu ? 0 : LIBRARY_ASKED;
    if (run->options->verb == VERB_PLAN) {
        run->settings.library =
            planned || !on_cpu ? machine_attends(planned ? planned : &machines[MACHINE_H100], &run->model) : 0;
        if (run->settings.library) run->attention = "cuDNN";
        return;
    }
    for (int i = 0; i < (c->global_head_dim ? 4 : 2); i++) {
        int backward = i % 2, found = 0;
        const unsigned form = i < 2 ? FORM_WINDOW : FORM_FULL;
        const char *library =
            ops_device->attention_library(c->num_attention_heads, key_value_heads_of(c, form), head_dim_of(c, form),
                                          form ? window_of_heads(c) : 0, backward);
        if (!library || (backward && !run->settings.backward)) continue;
        have[i] = 1, found |= backward ? LIBRARY_BACKWARD : LIBRARY_FORWARD;
        run->settings.library |= form ? found : LIBRARY_GLOBAL * found;
        if (!i) run->attention = library;
    }
    dist_sum(RANKS_ALL, have, 4);
    for (int i = 0; i < 4; i++)
        if (have[i] > 0 && have[i] < (double)dist_ranks())
            die("only %.0f of %zu ranks have cuDNN for attention, and results depend on it; install it for all, or "
                "give all STREAMBP_CUDNN=0",
                have[i], dist_ranks());
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
    if (!(run->settings.library & LIBRARY_BACKWARD) || !settings->backward) return 0;
    if (!run->has_begun) return attention_workspace_choice(cut, keys, index);
    return index ? min_size(attention_workspace_choice(cut, keys, index - 1), run->workspace) : run->workspace;
}

// Takes a candidate with its plan, and the largest workspace that fits on every rank. Returns 0 if it does not fit.
static int run_take(Run *run, const Search *search, const Batch *shape, const Candidate *candidate) {
    RunSettings settings = candidate_settings(search, candidate);
    for (size_t i = 0;; i++) {
        settings.attention.workspace = run_workspace(run, &settings, shape, i);
        Plan plan = plan_make(&settings, shape);
        double beyond = plan_pressure(&plan, &search->limits) > 1;
        dist_sum(RANKS_ALL, &beyond, 1);
        if (beyond == 0 || !settings.attention.workspace) {
            run->settings = settings, run->plan = plan;
            return beyond == 0;
        }
    }
}

// Returns the estimated seconds of a step of the plan that run_take made, with its workspace.
static double run_seconds(const Run *run, const Search *search, const Batch *shape) {
    RunSettings device = run->settings; // places change no work
    if (!shape->N) return 0;            // only generation
    for (int kind = 0; kind < PLACED; kind++) device.place[kind] = PLACE_DEVICE;
    device.defers = 0;
    const PassWork work = pass_work(search->machine, &device, shape);
    return step_seconds(search->machine, &run->settings, &work, &run->plan.moved, search->sequences);
}

static double of_main_rank(double x) {
    x = is_main_rank() ? x : 0;
    dist_sum(RANKS_ALL, &x, 1);
    return x;
}

#define TRIED 8 // choices whose workspaces are compared

// Plans the fastest candidate that fits into `limit` on every rank (0: no limit), or else the nearest to it. What takes
// less memory leaves a larger workspace to attention, so the first choices are compared with theirs, then other chunks
// and the other --update. The main rank's order counts: the plans of ranks differ a little.
static void run_plan_places(Run *run, const Batch *shape, size_t limit) {
    static PassWorks here;
    PassWorks *const outside = pass_works;
    run_attention(run);
    const int attends = run->settings.library & LIBRARY_BACKWARD; // then workspaces differ
    const Search search = run_search(run, limit);
    const Candidates all = candidates_make(&search);
    if (!outside) pass_works = &here, here.count = 0;
    const int open =
        search.keep || search.method || !run_take(run, &search, shape, all.candidate); // else all is on the device
    Choice *choices = NULL, best = {0};
    size_t least, count = 0, tries = attends ? TRIED : 1;
    if (open) count = search_choices(&search, &all, shape, &choices, &least);
    count = choices_thin(choices, count);
    const size_t most = open ? (size_t)of_main_rank((double)count) : 0;
    run->chosen = 0;
    for (size_t i = 0; i < most + all.count; i++) {
        if (i < most ? !tries : !run->chosen || !attends) continue;
        const size_t index = i < most ? (size_t)of_main_rank(i < count ? (double)choices[i].candidate : 0) : i - most;
        if (i >= most && !candidate_varies(&all.candidate[index], &all.candidate[best.candidate])) continue;
        if (!run_take(run, &search, shape, &all.candidate[index])) continue;
        const double seconds = run_seconds(run, &search, shape);
        if (i < most) tries--;
        if (of_main_rank(run->chosen && seconds >= best.seconds) > 0) continue;
        if (i < count) best.on_device = choices[i].on_device;
        best.candidate = index, best.seconds = seconds, run->chosen = 1;
    }
    if (open)
        run_take(run, &search, shape,
                 &all.candidate[run->chosen ? best.candidate : (size_t)of_main_rank((double)least)]);
    run->choice = best, pass_works = outside;
    free(choices), free(all.candidate);
}

// ---- texts written in parallel -------------------------------------------------------------------------------------
// Returns whether a planned run fits on every rank, with weights in this place. Collective.
static int run_fits_with(const Run *run, size_t limit, Place weights) {
    const Search search = run_search(run, limit);
    double beyond = plan_pressure(&run->plan, &search.limits) > 1 || run->settings.place[PLACED_WEIGHTS] != weights;
    dist_sum(RANKS_ALL, &beyond, 1);
    return beyond == 0;
}

// Plans as run_plan_places. --slots auto: with the most slots, up to settings.rollout_slots, that fit where weights lie
// with one slot: weights that are loaded for each token cost more than slots gain.
static void run_plan(Run *run, const Batch *shape, size_t limit) {
    RunSettings *s = &run->settings;
    const int open = s->rollout_slots > 1 && !run->options->slots;
    if (open) s->rollout_slots = min_size(s->rollout_slots, max_size(1, (INT32_MAX - CACHE_PASS) / s->rollout_tokens));
    const Run most = *run;
    run_plan_places(run, shape, limit);
    if (!open || s->rollout_slots == 1 || run_fits_with(run, limit, PLACE_DEVICE)) return;
    Run trial = most;
    trial.settings.rollout_slots = 1;
    run_plan_places(&trial, shape, limit);
    const Place weights = trial.settings.place[PLACED_WEIGHTS];
    if (run_fits_with(run, limit, weights)) return;
    *run = trial;
    for (size_t fits = 1, beyond = most.settings.rollout_slots; beyond - fits > 1;) {
        const size_t slots = fits + (beyond - fits) / 2;
        trial = most, trial.settings.rollout_slots = slots;
        run_plan_places(&trial, shape, limit);
        const int good = run_fits_with(&trial, limit, weights);
        *(good ? &fits : &beyond) = slots;
        if (good) *run = trial;
    }
}

// Plans the levels of --sp auto. The home level is the one with the fastest step of those up to the first with weights
// and gradients on the device: larger ones would spare nothing. In place of run_plan
static void run_plan_levels(Run *run, const Batch *shape, SequenceBound bound, size_t limit) {
    const size_t batches = run->assignment.batches; // for any number of ranks
    const DealLevels levels = deal_levels(world_ranks(run->settings.world));
    const Run open = *run;
    double least = INFINITY;
    for (size_t k = 0, on_device = 0; k < levels.levels && !on_device; k++) {
        Run trial = open;
        trial.settings.world.sp = levels.level[k].ranks;
        run_plan(&trial, shape, limit);
        const Search search = run_search(&trial, limit);
        const Place *place = trial.settings.place;
        double beyond = plan_pressure(&trial.plan, &search.limits) > 1, seconds = INFINITY;
        dist_sum(RANKS_ALL, &beyond, 1);
        if (beyond == 0) seconds = run_levels(&trial, bound, &search);
        on_device = beyond == 0 && place[PLACED_WEIGHTS] <= PLACE_DEVICE && place[PLACED_GRADIENTS] <= PLACE_DEVICE;
        if (seconds < least || least == INFINITY) *run = trial, least = seconds;
    }
    run->home = world_sp(run->settings.world);
    run->assignment = assign_evaluation(run->settings.world, 1);
    run->assignment.batches = batches;
    dist_split(run->home);
}

// An option that changes nothing. After run_plan
static void note_attention(const Run *run) {
    if (run->settings.attention.any_order && !(run->settings.library & LIBRARY_BACKWARD))
        note("--deterministic off changes nothing: attention is by our own kernels%s, which add in one order",
             run->attention ? " backward" : "");
}

// Returns a run in which, with --sp auto, all ranks share a sequence.
static Run run_of_all(const Run *run) {
    Run largest = *run;
    if (run->settings.deals) largest.settings.world.sp = world_ranks(run->settings.world);
    return largest;
}

// Returns the most tokens of a document with which a sequence of B documents fits `limit` bytes, under the best
// candidate and the smallest workspace; 0: none.
static size_t run_longest(const Run *run, size_t B, size_t limit) {
    const Run largest = run_of_all(run);
    const Search search = run_search(&largest, limit);
    return search_longest(&search, B);
}

// ---- --seq-len auto ------------------------------------------------------------------------------------------------
// Returns T, or the largest length below it whose micro-batch fits `limit` bytes on every rank. tokens: of all data.
// Plans full documents; leaves a 64th of `limit` for more and shorter ones.
static size_t run_fitting_length(const Run *run, size_t tokens, size_t T, size_t limit) {
    const Options *o = run->options;
    const int deals = run->settings.deals;
    const size_t B = o->batch * sample_documents(o), parts = o->samples || deals ? 1 : run->assignment.parts;
    SequenceBound bound = {min_size(B * T, tokens), B, T};
    Run trial = *run;
    if (deals) trial.settings.world.sp = world_ranks(run->settings.world);
    const Search search = run_search(&trial, limit - limit / 64);
    size_t longest = T, whose;
    if (parts > 1) bound.N = min_size(bound.N, bound.N / parts + T);
    Batch shape = batch_shape(bound);
    run_plan(&trial, &shape, limit - limit / 64);
    free(shape.document_start);
    if (plan_pressure(&trial.plan, &search.limits) > 1) longest = search_longest(&search, bound_documents(bound, T));
    return dist_smallest(longest ? min_size(T, longest) : T, &whose); // 0: check_memory says so
}

// Of shards of documents the longest one in steps of SEQ_LEN_STEP, as data/prepare.py prints it, at most the model's
// positions and what fits; of others the default. limit: of a plan, 0: not known
static void run_choose_length(Run *run, Options *o, size_t limit) {
    const Config *c = &run->model.config;
    size_t longest = 0, tokens = 0;
    char more[80] = "", scaling[32];
    if (!o->data.count || option_given(o, "seq-len")) return;
    documents_measure(o->data.path, o->data.count, &longest, &tokens);
    if (longest && o->val_data.count) documents_measure(o->val_data.path, o->val_data.count, &longest, &tokens);
    o->given[option_find("seq-len")] = 1; // is echoed
    if (!longest) check_positions(run, o->seq_len, "--seq-len");
    if (!longest) return;
    const size_t needed = max_size(longest + (o->rollout ? o->max_new_tokens : 0), 2) - 1;
    const size_t most = min_size((needed + SEQ_LEN_STEP - 1) / SEQ_LEN_STEP * SEQ_LEN_STEP, c->max_position_embeddings);
    if (o->verb != VERB_PLAN) limit = memory_limit(o, ops_device->memory_available());
    o->seq_len = o->rollout ? most : run_fitting_length(run, tokens, most, limit); // prompts are not cut
    const int few = o->seq_len < min_size(needed, most), cut = most < needed;
    if (o->quiet || (!few && !cut && o->seq_len <= SEQ_LEN_STEP)) return;
    if (few)
        snprintf(more, sizeof(more), "; --seq-len %zu would not fit", most);
    else if (cut && !c->family->learned_positions)
        snprintf(more, sizeof(more), "; --rope-scaling %s makes more", scaling_text(c, needed, scaling));
    note("--seq-len %zu is what %s: the longest document has %zu positions%s", o->seq_len,
         few   ? "memory takes"
         : cut ? "the model has positions for"
               : "the data needs",
         needed, more);
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

static const char *const placed_words[PLACED] = {"inputs",    "weights",        "gradients",
                                                 "optimizer", "kept attention", "reference"};

static const char *placed_word(const RunSettings *s, int kind) {
    const int keys = method_is_chunk_major(s->method) || s->context.window;
    return kind == PLACED_INPUTS && keys ? "keys and values" : placed_words[kind];
}

// The plan's tensors in a place, in words
static const char *placed_text(const Run *run, int place, char *text, size_t size) {
    const int keys = method_is_chunk_major(run->settings.method) || run->settings.context.window;
    const Share inputs = keys ? SHARE_KV : SHARE_LAYER_INPUTS;
    const Share shares[PLACED] = {inputs, SHARE_WEIGHTS, SHARE_GRADIENTS, SHARE_OPTIMIZER, SHARE_KEPT, SHARE_WEIGHTS};
    *text = 0;
    for (int kind = 0; kind < PLACED; kind++) {
        const size_t used = strlen(text), bytes = arena_share(&run->plan.arena[place], shares[kind]);
        const int again = kind == PLACED_REFERENCE && run->settings.place[PLACED_WEIGHTS] == (Place)place;
        if (run->settings.place[kind] == (Place)place && bytes && !again)
            snprintf(text + used, size - used, "%s%s %s", used ? ", " : "", placed_word(&run->settings, kind),
                     human_bytes((double)bytes));
    }
    if (place == PLACE_HOST && run->plan.disk_bytes)
        snprintf(text + strlen(text), size - strlen(text), "%stransfers with the disk %s", *text ? ", " : "",
                 human_bytes((double)DISK_PIECES));
    return text;
}

// ---- where no length fits ------------------------------------------------------------------------------------------
#define RECOMMENDED_BYTES 1024 // of the text

// Adds a line to `text` if some length of `trial` fits: the options to type, the longest length, and whether that is
// shorter than --seq-len.
static size_t recommend(const Run *trial, size_t B, size_t limit, const char *options, char *text) {
    const size_t longest = run_longest(trial, B, limit), used = strlen(text), wished = trial->options->seq_len;
    if (longest)
        snprintf(text + used, RECOMMENDED_BYTES - used,
                 longest < wished ? "\n  %-34s gives --seq-len %zu%s, not %zu" : "\n  %-34s gives --seq-len %zu%s",
                 options, longest, world_ranks(trial->settings.world) > 1 ? ", with as much memory for each" : "",
                 wished);
    return longest;
}

// Returns GiB per node of this place that make the length fit; 0: no amount does. Sets `o` to a command line with them.
static size_t place_needed(const Run *run, const Batch *shape, size_t limit, Place place, Options *o) {
    size_t *given = place == PLACE_HOST ? &o->host_limit : &o->disk_limit, least, most = 0;
    Run trial = *run;
    Choice *choices;
    *o = *run->options, *given = (size_t)1 << 62;
    trial.options = o;
    const Search search = run_search(&trial, limit);
    const Candidates all = candidates_make(&search);
    const double sharing = (double)*given / (double)search.limits.bytes[place];
    const size_t count = search_choices(&search, &all, shape, &choices, &least);
    for (size_t i = 0; i < count; i++)
        if (!most || choices[i].bytes[place] < most) most = choices[i].bytes[place];
    free(choices), free(all.candidate);
    most = (size_t)(sharing * (double)most / GIBIBYTE) + 1;
    *given = most << 30;
    return count ? most : 0;
}

// Lists what makes some length fit: bf16, host memory, a disk, adapters, a smaller optimizer, the fewest ranks that
// share a sequence.
static void recommendations(const Run *run, size_t B, size_t limit, char *text) {
    const Options *o = run->options;
    const World world = run->settings.world;
    const size_t ranks = world_ranks(world);
    char options[96];
    Run trial = *run;
    Options more;
    if (o->verb == VERB_PLAN && o->dtype == DTYPE_AUTO && run->model.dtype == DTYPE_FP32) {
        Run half;
        more = *o, more.dtype = DTYPE_BF16, more.quiet = 1;
        run_open(&half, &more, NULL);
        recommend(&half, B, limit, "--dtype bf16", text);
        run_close(&half);
    }
    Batch shape = batch_shape(regular_bound(B, o->seq_len));
    for (int place = PLACE_HOST; place < PLACES && run->settings.backward; place++) {
        const size_t gib = place_needed(run, &shape, limit, (Place)place, &more);
        if (!gib || (place == PLACE_DISK && o->verb != VERB_PLAN)) continue;
        snprintf(options, sizeof(options), "--%s-limit %zuGiB", place_names[place], gib);
        trial.options = &more;
        recommend(&trial, B, limit, options, text);
        trial = *run;
    }
    free(shape.document_start);
    if (run->settings.backward && !run->settings.storage) {
        const QuantFormat nf4_format = {QUANT_NF4, 1, QUANT_BLOCK, DTYPE_FP32};
        const int adapters = run->settings.lora != NULL;
        Lora lora = {0};
        Storage nf4;
        lora.rank = 32, lora.modules = lora_usual_modules(&run->model.config);
        lora_build(&lora, &run->model);
        if (!adapters) trial.settings.lora = &lora;
        trial.settings.reference = computed_reference(o, &trial.settings.objective, trial.settings.lora);
        if (!adapters) recommend(&trial, B, limit, "--lora-rank 32", text);
        storage_choose(&nf4, &run->model, nf4_format, 0);
        trial.settings.storage = &nf4;
        recommend(&trial, B, limit, adapters ? "--base nf4" : "--lora-rank 32 --base nf4", text);
        storage_free(&nf4), lora_free(&lora);
        trial = *run;
    }
    if (run->settings.optimizer && run->model.dtype != DTYPE_FP64 &&
        (run->settings.moment_type == DTYPE_FP32 || run->settings.master)) {
        const int fewer = run->settings.moment_type == DTYPE_INT8;
        trial.settings.moment_type = fewer ? DTYPE_INT8 : DTYPE_BF16, trial.settings.master = 0;
        recommend(&trial, B, limit, fewer ? "--master none" : "--moments bf16 --master none", text);
        trial = *run;
    }
    if (o->rollout || !option_accepted(&option_rows[option_find("zero")], o->verb)) return;
    const int alone = o->method >= METHOD_MST && o->method <= METHOD_SPACO; // whose sequences ranks cannot share
    if (alone) more = *o, more.method = trial.settings.method = METHOD_STREAM, trial.options = &more;
    const int gpu = run_search(run, limit).limits.tables;
    char *const end = text + strlen(text); // fewer ranks, if they do not reach --seq-len, leave no line
    for (size_t P = ranks; P <= 64 * ranks; P *= 2) {
        trial.settings.world.ranks = P, trial.settings.world.rank = P - 1, trial.settings.world.zero = ZERO_WEIGHTS;
        trial.settings.world.sp = world_sp(world) * (P / ranks);
        snprintf(options, sizeof(options), "%s%zu%s --zero 3", o->verb == VERB_PLAN ? "--ranks " : "mpirun -n ", P,
                 o->verb == VERB_PLAN ? "" : " ...");
        if (trial.settings.world.sp > 1) snprintf(options + strlen(options), 32, " --sp %zu", trial.settings.world.sp);
        if (alone) strcat(options, " --method stream");
        const int deals = run->settings.deals;
        const size_t more = gpu ? collectives_bytes(trial.settings.world, deals) - collectives_bytes(world, deals) : 0;
        if (P == 1 || (P == ranks && world.zero == ZERO_WEIGHTS) || more >= limit) continue;
        *end = 0;
        if (recommend(&trial, B, limit - more, options, text) >= o->seq_len) return;
    }
}

// Refuses a run that does not fit with one token per document.
__attribute__((noreturn)) static void die_no_length(const Run *run, size_t B, size_t limit, const char *whose) {
    char recommended[RECOMMENDED_BYTES] = "", parts[128] = "";
    Batch shape = batch_shape(regular_bound(B, 1));
    const Plan least = plan_make(&run->settings, &shape);
    free(shape.document_start);
    for (int share = SHARE_WEIGHTS; share <= SHARE_OPTIMIZER; share++)
        if (least.share[share])
            snprintf(parts + strlen(parts), sizeof(parts) - strlen(parts), "%s%s %s", *parts ? ", " : "",
                     share_names[share], human_bytes((double)least.share[share]));
    recommendations(run, B, limit, recommended);
    if (*recommended && is_main_rank()) fprintf(stderr, "what would fit%s\n", recommended);
    die("no length fits: %s is %s, and one token already needs %s (%s); take %s", whose, human_bytes((double)limit),
        human_bytes((double)least.total_bytes), parts,
        *recommended ? "one of the above" : "a smaller model or more memory");
}

// ---- the refusal ---------------------------------------------------------------------------------------------------
// Refuses a run that does not fit, before anything is allocated, and says what would. B: documents of a sequence; 0:
// only generation
static void check_memory(const Run *run, size_t B, size_t limit, const char *whose) {
    static const char *const words[PLACES] = {"", "host memory", "disk space"};
    const Plan *plan = &run->plan;
    const Search search = run_search(run, limit);
    const size_t available = plan->host_bytes && search.limits.host ? search.limits.host(plan->total_bytes) : 0;
    size_t bytes[PLACES];
    plan_bytes(plan, bytes);
    const size_t longest = B && plan_pressure(plan, &search.limits) > 1 ? run_longest(run, B, limit) : 0;
    char text[160], length[48] = "no --seq-len fits";
    bytes[PLACE_DEVICE] += page_table_bytes(bytes, &search.limits);
    if (bytes[PLACE_DEVICE] > search.limits.bytes[PLACE_DEVICE]) {
        if (is_main_rank() && !run->options->quiet) report_regions(stderr, plan->arena);
        const char *needed = human_bytes((double)bytes[PLACE_DEVICE]), *most = human_bytes((double)limit);
        const size_t texts = run->settings.rollout_slots;
        if (!B)
            die("weights and key/value caches of %zu text%s of up to %zu tokens need %s, %s is %s; shorten the prompt "
                "or "
                "--max-new-tokens%s",
                max_size(texts, 1), texts > 1 ? "s" : "",
                texts ? run->settings.rollout_tokens : run->settings.cache_tokens, needed, whose, most,
                texts > 1 ? ", or give fewer --slots" : "");
        if (!longest) die_no_length(run, B, limit, whose);
        Options more;
        Batch shape = batch_shape(regular_bound(B, run->options->seq_len));
        const int hosted = search.places[PLACED_INPUTS] >> PLACE_HOST & 1; // else host memory was not asked for
        const size_t gib = hosted ? 0 : place_needed(run, &shape, limit, PLACE_HOST, &more);
        if (gib) snprintf(text, sizeof(text), ", and this one with --host-limit %zuGiB", gib);
        die("the plan needs %s, %s is %s; with these options --seq-len %zu would fit%s", needed, whose, most, longest,
            gib ? text : "");
    }
    if (longest) snprintf(length, sizeof(length), "--seq-len %zu would fit", longest);
    for (int place = PLACE_HOST; place < PLACES; place++) {
        const size_t allowed = search.limits.bytes[place];
        const int taken = place == PLACE_HOST && available && available < allowed;
        const int kept = run->settings.place[PLACED_KEPT] == (Place)place && run->settings.keep;
        if (bytes[place] <= (taken ? available : allowed)) continue;
        die("the plan has %s in %s, %s of it are %s; %s%s%s", placed_text(run, place, text, sizeof(text)), words[place],
            human_bytes((double)(taken ? available : allowed)), taken ? "available" : "allowed", length,
            !kept                                 ? ""
            : run->options->keep_on == PLACE_AUTO ? ", or"
                                                  : ", or --keep-on device or",
            kept ? " --keep none" : "");
    }
}

// Bytes of a step that move in one direction of a kind of place.
static double moved_in_step(const Run *run, Way way) {
    const Moved *moved = &run->plan.moved;
    const double passes = (double)max_size(1, assigned_batches(run->assignment));
    return passes * (moved->bytes[PHASE_FORWARD][way] + moved->bytes[PHASE_BACKWARD][way]) +
           moved->bytes[PHASE_UPDATE][way];
}

// A disk on which a step would mostly wait; what is placed there is not yet.
static void note_slow_disk(const Run *run) {
    const size_t half = min_size(min_size(run->plan.disk_bytes, run->plan.total_bytes) / 2, (size_t)8 << 20);
    if (half < (size_t)8 << 20) return; // too little to tell
    const LinkRates r = link_rates(ops_device, (char *)run->disk_memory, (char *)run->memory, half);
    const double out = moved_in_step(run, WAY_DISK_OUT), in = moved_in_step(run, WAY_DISK_IN);
    if (fmin(r.out, r.in) < SLOW_DISK)
        note("--disk %s writes %.3g MB/s and reads %.3g: of a step it takes %s, %.0f s; give a folder on an SSD",
             run->options->disk, r.out * 1e-6, r.in * 1e-6, human_bytes(out + in), out / r.out + in / r.in);
}

// ---- the one allocation --------------------------------------------------------------------------------------------
// Plan and allocate: afterwards nothing more is, and the weights are still to be filled in.
static void run_allocate(Run *run, SequenceBound bound) {
    const size_t available = ops_device->memory_available(), limit = memory_limit(run->options, available);
    Batch shape = batch_shape(bound);
    if (shape.N > INT32_MAX)
        die_usage("--batch x --seq-len: %zu tokens in one sequence, at most %d can be indexed; use --grad-accum",
                  shape.N, INT32_MAX);
    run->available = limit;
    if (run->settings.deals)
        run_plan_levels(run, &shape, bound, limit);
    else
        run_plan(run, &shape, limit);
    note_attention(run);
    check_memory(run, bound.N ? bound_documents(bound, run->options->seq_len) : 0, limit,
                 limit == run->options->memory_limit ? "--memory-limit" : ops_device->memory_name());
    dist_barrier(); // who goes on takes memory that other ranks of the host have yet to see
    run->memory = ops_device->allocate(run->plan.total_bytes);
    if (!run->memory)
        die("the device refused one allocation of %s: %s were free before, %s are now; see what else takes "
            "memory%s, and `%s plan`",
            human_bytes((double)run->plan.total_bytes), human_bytes((double)available),
            human_bytes((double)ops_device->memory_available()),
            strcmp(ops_device->name, "cuda") ? "" : " (nvidia-smi)", program_called());
    const size_t host = run->plan.arena[PLACE_HOST].peak;
    if (host) run->host_memory = ops_device->host_allocate(host);
    if (host && !run->host_memory)
        die("the system refused %s of host memory; take a shorter --seq-len, less by --host-limit, or other places",
            human_bytes((double)host));
    if (run->plan.disk_bytes) run->disk_memory = ops_device->disk_allocate(run->options->disk, run->plan.disk_bytes);
    if (run->disk_memory) note_slow_disk(run);
    arena_init(&run->arena[PLACE_DEVICE], run->memory, run->plan.total_bytes);
    arena_init(&run->arena[PLACE_HOST], run->host_memory, host);
    arena_init(&run->arena[PLACE_DISK], run->disk_memory, run->plan.disk_bytes);
    arena_watch(run->arena, ops_device->copy_in, ops_device->copy_out);
    run_begin(&run->streambp, &run->optimizer, &run->settings, ops_device, run->arena, &shape);
    free(shape.document_start);
}

#endif
