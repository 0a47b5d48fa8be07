/*
Chooses what the options leave open so that the plan of the largest sequence fits: chunk, latents, places, method,
workspaces, slots. Allocates nothing.
*/
#ifndef LLMC_CHOOSE_PLAN_H
#define LLMC_CHOOSE_PLAN_H
#include "levels.h"

// Returns --memory-limit, or the available memory if that is less; 0: neither is known
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

// Returns what the options leave open, and the limits of a rank. limit: bytes of device memory, 0: unknown. Host memory
// is a place if a machine or --host-limit tells its size, or if the device has memory of its own; for attention's
// outputs also with --keep attention.
static Search run_search(const Run *run, size_t limit) {
    const Options *o = run->options;
    const World world = run->settings.world;
    const Machine *named = option_given(o, "machine") ? machine_from_options(o) : NULL;
    const int plans = o->verb == VERB_PLAN, on_cpu = !strcmp(ops_device->name, "cpu"), own_memory = !on_cpu && !plans;
    const int gpu = run->settings.gpu || !on_cpu;
    Search c = {0};
    c.open = run->settings, c.open.attention.workspace = 0;
    settings_name_places(&c.open, o); // sets named places also if run_plan has chosen some
    if (o->method == METHOD_AUTO) c.open.method = METHOD_STREAM;
    c.machine = named ? named : plans ? NULL : machine_of_device(ops_device->device_name());
    if (!c.machine) c.machine = &machines[MACHINE_H100];
    c.sequences = max_size(1, assigned_batches(run->assignment));
    c.shared = world_sp(world) > 1 ? 0 : shared_tokens(o, run->settings.lora);
    const double node = fmin((double)world_ranks(world), c.machine->value[GPUS_PER_NODE]);
    const double sharing = plans ? node : (double)dist_local_ranks();
    const double most[PLACES] = {0, plans && named ? machine_host_gib(named, node) : 0,
                                 plans && named ? named->disk_gib : 0};
    const size_t given[PLACES] = {0, o->host_limit, o->disk_limit};
    size_t taken[PLACES] = {0}; // by a teacher
    if (run->live) plan_bytes(&run->live->plan, taken);
    c.limits = device_limit(limit ? limit : SIZE_MAX), c.limits.tables = gpu;
    for (int place = PLACE_HOST; place < PLACES; place++)
        if (given[place] || most[place] > 0)
            c.limits.bytes[place] = (size_t)((given[place] ? (double)given[place] : most[place] * GIBIBYTE) / sharing);
    for (int place = PLACE_HOST; place < PLACES && plans && run->live; place++) // a run's limits see what is taken
        if (c.limits.bytes[place] < SIZE_MAX && !given[place])
            c.limits.bytes[place] -= min_size(c.limits.bytes[place], taken[place]);
    const int host = o->host_limit || most[PLACE_HOST] > 0 || own_memory, kept = host || option_given(o, "keep");
    const int disk = o->disk || (plans && (o->disk_limit || most[PLACE_DISK] > 0));
    if (o->disk && !plans)
        c.limits.bytes[PLACE_DISK] = min_size(c.limits.bytes[PLACE_DISK], ops_device->disk_available(o->disk));
    if (!plans) c.limits.host = ops_device->host_available;
    for (int kind = 0; kind < PLACED; kind++)
        c.places[kind] = (1u << PLACE_DEVICE | (unsigned)(kind == PLACED_KEPT ? kept : host) << PLACE_HOST |
                          (unsigned)disk << PLACE_DISK) &
                         ~run->barred;
    c.ring = o->kv == KEYS_AUTO && world_sp(world) > 1 && !run->model.config.kv_lora_rank;
    const int measured = !options_train(o) && option_given(o, "method"); // bp measures a named method as it is
    c.latent_ranges = o->latents == LATENTS_AUTO && run->model.config.kv_lora_rank;
    c.keep = o->keep.word == KEEP_AUTO && c.open.backward && method_recomputes(c.open.method) && !measured;
    c.spare = on_cpu && !plans && !o->memory_limit ? 0.25 : 0; // other programs use this memory too
    c.defers = o->update == UPDATE_AUTO && c.open.optimizer;
    c.method = o->method == METHOD_AUTO && world_sp(world) == 1 && !run->settings.deals &&
               !(world_ranks(world) > 1 && world.zero == 3) && !run->model.config.num_kv_shared_layers &&
               !prefixes_from_options(o, run->settings.lora);
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

// Chooses attention's library: agreed by all ranks; in a plan, the planned GPU's.
static void run_attention(Run *run) {
    const Config *c = &run->model.config;
    const Machine *planned = machine_from_options(run->options);
    const int on_cpu = !strcmp(ops_device->name, "cpu");
    double have[4] = {0}; // forward, backward; the same for global heads
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
            die("only %.0f of %zu ranks have cuDNN for attention, and results depend on it; install it for all ranks, "
                "or set STREAMBP_CUDNN=0 for all",
                have[i], dist_ranks());
}

// Returns workspace `index` to try for the backward calls of attention's library: the largest first, 0 (the op set's
// own choice) last. A larger workspace takes more heads and keys in a call, so the last bits of results depend on it. A
// resumed run takes the workspace it began with, or else a smaller workspace.
static size_t run_workspace(const Run *run, const RunSettings *settings, const Batch *shape, size_t index) {
    const Config *c = &run->model.config;
    const size_t chunk = settings->chunk ? settings->chunk : (size_t)CUDA_CHUNK;
    const AttentionChoice smallest = {settings->attention.any_order, 0};
    const AttentionCut cut = attention_cut(c->num_attention_heads, c->num_key_value_heads, c->head_dim, 0, smallest);
    const size_t rows = batch_rows(shape)->N, keys = rows - min_size(rows, chunk); // keys before the last chunk
    if (!(run->settings.library & LIBRARY_BACKWARD) || !settings->backward) return 0;
    if (!run->has_begun) return attention_workspace_choice(cut, keys, index);
    return index ? min_size(attention_workspace_choice(cut, keys, index - 1), run->workspace) : run->workspace;
}

// Plans a candidate with the largest workspace that fits on every rank. Returns 0 if it does not fit.
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
    if (!shape->N) return 0;            // without tokens the run only generates
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

// Plans the fastest candidate that fits into `limit` on every rank (0: no limit), or else the candidate nearest to it.
// A candidate that takes less memory leaves attention a larger workspace, so the first TRIED choices are compared with
// their workspaces. Then other chunks and the other --update are tried. All ranks follow the main rank's order, as the
// plans of ranks differ a little.
static void run_plan_places(Run *run, const Batch *shape, size_t limit) {
    static PassWorks here;
    PassWorks *const outside = pass_works;
    run_attention(run);
    const int attends = run->settings.library & LIBRARY_BACKWARD; // 1: workspaces differ between candidates
    const Search search = run_search(run, limit);
    const Candidates all = candidates_make(&search);
    if (!outside) pass_works = &here, here.count = 0;
    const int open =
        search.keep || search.method || !run_take(run, &search, shape, all.candidate); // 0: all fits on the device
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

// Plans like run_plan_places. With --slots auto, takes the most slots, up to settings.rollout_slots, that keep the
// weights in the place they have with one slot. Weights that are loaded for each token cost more than slots gain.
static void run_plan_slots(Run *run, const Batch *shape, size_t limit) {
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

// Notes that --deterministic off has no effect with our own attention. Call after run_plan.
static void note_attention(const Run *run) {
    if (run->settings.attention.any_order && !(run->settings.library & LIBRARY_BACKWARD))
        note("--deterministic off changes nothing: attention uses our own kernels%s, which add in one order",
             run->attention ? " backward" : "");
}

// Returns the most tokens of a document with which a sequence of B documents fits `limit` bytes, under the best
// candidate and the smallest workspace; 0: none.
static size_t run_longest(const Run *run, size_t B, size_t limit) {
    Run largest = *run;
    if (run->settings.deals) largest.settings.world.sp = world_ranks(run->settings.world); // all share a sequence
    const Search search = run_search(&largest, limit);
    return search_longest(&search, B);
}

#endif
