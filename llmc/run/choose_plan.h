/*
Chooses what the options leave open so that the plan of the largest sequence fits: chunk, places, method, workspaces,
slots, levels of --sp auto. Allocates nothing.
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
    const double node = fmin((double)world_ranks(world), c.machine->value[GPUS_PER_NODE]);
    const double sharing = plans ? node : (double)dist_local_ranks();
    const double most[PLACES] = {0, plans && named ? machine_host_gib(named, node) : 0,
                                 plans && named ? named->disk_gib : 0};
    const size_t given[PLACES] = {0, o->host_limit, o->disk_limit};
    c.limits = device_limit(limit ? limit : SIZE_MAX), c.limits.tables = gpu;
    for (int place = PLACE_HOST; place < PLACES; place++)
        if (given[place] || most[place] > 0)
            c.limits.bytes[place] = (size_t)((given[place] ? (double)given[place] : most[place] * GIBIBYTE) / sharing);
    const int host = o->host_limit || most[PLACE_HOST] > 0 || own_memory, kept = host || option_given(o, "keep");
    const int disk = o->disk || (plans && (o->disk_limit || most[PLACE_DISK] > 0));
    if (o->disk && !plans)
        c.limits.bytes[PLACE_DISK] = min_size(c.limits.bytes[PLACE_DISK], ops_device->disk_available(o->disk));
    if (!plans) c.limits.host = ops_device->host_available;
    for (int kind = 0; kind < PLACED; kind++)
        c.places[kind] = (1u << PLACE_DEVICE | (unsigned)(kind == PLACED_KEPT ? kept : host) << PLACE_HOST |
                          (unsigned)disk << PLACE_DISK) &
                         ~run->barred;
    c.ring = o->kv == KEYS_AUTO && world_sp(world) > 1;
    c.keep = o->keep.word == KEEP_AUTO && c.open.backward && method_recomputes(c.open.method);
    c.spare = on_cpu && !plans && !o->memory_limit ? 0.25 : 0; // other programs use this memory too
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
    const size_t keys = shape->N - min_size(shape->N, chunk); // keys before the last chunk
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

// ---- what stays of a layer ------------------------------------------------------------------------------------------
#define KEPT_SHARE_GPU 0.95 // share of a GPU's memory that plans with kept products take, less 1 GiB
#define KEPT_SHARE_CPU 0.5  // share of a CPU's available memory, of which other programs use the rest

// Returns the limits of plans with kept products.
static Limits kept_limits(const Run *run, const Search *search) {
    const int gpu = run->settings.gpu || strcmp(ops_device->name, "cpu") != 0;
    Limits limits = search->limits;
    if (limits.bytes[PLACE_DEVICE] == SIZE_MAX || run->options->memory_limit) return limits;
    limits.bytes[PLACE_DEVICE] =
        (size_t)((gpu ? KEPT_SHARE_GPU : KEPT_SHARE_CPU) * (double)limits.bytes[PLACE_DEVICE]);
    if (gpu) limits.bytes[PLACE_DEVICE] -= min_size(limits.bytes[PLACE_DEVICE], GIBIBYTE);
    return limits;
}

typedef struct {
    const Search *search;
    const Batch *shape;
    Limits limits;
    RunSettings settings; // settings tried
    Plan plan;
    size_t layers;     // most layers to keep
    double seconds;    // of a step
    size_t bytes[PLACES];
} KeptChoice;

// Plans a choice. Returns 0 if it does not fit on every rank. Collective.
static int kept_fits(KeptChoice *c, KeepLevel level, size_t layers, size_t off, Place place) {
    const Keeping keep = {level, layers < c->layers ? layers : 0, place > PLACE_DEVICE && off < layers ? off : 0};
    c->settings.keep = keep, c->settings.place[PLACED_KEPT] = place;
    c->plan = plan_make(&c->settings, c->shape);
    double beyond = plan_pressure(&c->plan, &c->limits) > 1;
    dist_sum(RANKS_ALL, &beyond, 1);
    plan_bytes(&c->plan, c->bytes);
    return beyond == 0;
}

// Returns the most layers that keep a level on the device; 0: none fits.
static size_t kept_most(KeptChoice *c, KeepLevel level) {
    size_t fits = 0, beyond = c->layers + 1;
    for (size_t n = c->layers; beyond - fits > 1; n = fits + (beyond - fits) / 2)
        *(kept_fits(c, level, n, 0, PLACE_DEVICE) ? &fits : &beyond) = n;
    return fits;
}

// Returns how few of `layers` layers must keep their products off-device so that the plan fits; 0: too many.
static size_t kept_fewest_off(KeptChoice *c, size_t layers, Place place) {
    size_t beyond = 0, fits = layers + 1;
    for (size_t off = layers; fits - beyond > 1; off = beyond + (fits - beyond) / 2)
        *(kept_fits(c, LEVEL_PRODUCTS, layers, off, place) ? &fits : &beyond) = off;
    return fits <= layers ? fits : 0;
}

// Sets the seconds of a step by a choice that was planned last. *still: seconds if nothing moved
static void kept_time(KeptChoice *c, double *still) {
    const Moved none = {PHASE_FORWARD, {{0}}};
    RunSettings device = c->settings; // places change no work
    for (int kind = 0; kind < PLACED; kind++) device.place[kind] = PLACE_DEVICE;
    device.defers = 0;
    const PassWork work = pass_work(c->search->machine, &device, c->shape);
    c->seconds = of_main_rank(step_seconds(c->search->machine, &c->settings, &work, &c->plan.moved, c->search->sequences));
    *still = of_main_rank(step_seconds(c->search->machine, &c->settings, &work, &none, c->search->sequences));
}

// Takes `other` in place of *best if it is faster by more than 1 %, or less than 1 % slower with fewer bytes.
static void kept_compare(KeptChoice *best, const KeptChoice *other) {
    const int less = other->bytes[PLACE_DEVICE] + other->bytes[PLACE_HOST] + other->bytes[PLACE_DISK] <
                     best->bytes[PLACE_DEVICE] + best->bytes[PLACE_HOST] + best->bytes[PLACE_DISK];
    const double ratio = other->seconds / best->seconds;
    if (of_main_rank(ratio < 0.99 || (ratio < 1.01 && less)) > 0) *best = *other;
}

// Keeps products or all of as many layers as free memory takes, if that is faster: the other choices stay as they are.
// On the device, and if a place for kept tensors is open there, too, as far as its link is free. A plan without a limit
// has the limit of a run on this machine.
static void run_keep(Run *run, const Batch *shape, size_t limit) {
    const int unlimited = !limit && run->options->verb == VERB_PLAN && !option_given(run->options, "machine");
    const Search search = run_search(run, unlimited ? ops_device->memory_available() : limit);
    const RunSettings *s = &run->settings;
    KeptChoice best = {&search, shape, kept_limits(run, &search), *s, run->plan, s->model->config.num_hidden_layers, 0, {0}};
    double still;
    run->needed = run->plan.total_bytes, run->needs = s->keep.level;
    if (!search.keep || s->method > METHOD_CHECKPOINT || world_sp(s->world) > 1 || s->deals || !shape->N ||
        best.limits.bytes[PLACE_DEVICE] == SIZE_MAX)
        return;
    if (!kept_fits(&best, s->keep.level, 0, 0, s->place[PLACED_KEPT])) return;
    static PassWorks here;
    PassWorks *const outside = pass_works;
    if (!outside) pass_works = &here, here.count = 0;
    kept_time(&best, &still);
    KeptChoice other = best;
    for (int level = LEVEL_ALL; level >= LEVEL_PRODUCTS && s->place[PLACED_KEPT] <= PLACE_DEVICE; level--) {
        const size_t most = kept_most(&other, (KeepLevel)level);
        if (!most || !kept_fits(&other, (KeepLevel)level, most, 0, PLACE_DEVICE)) continue;
        kept_time(&other, &still);
        kept_compare(&best, &other);
        if (most == best.layers) break;
    }
    for (int place = PLACE_HOST; place < PLACES && !(best.settings.keep.level > LEVEL_ATTENTION && !best.settings.keep.layers); place++) {
        if (!(search.places[PLACED_KEPT] >> place & 1) || search.open.place[PLACED_KEPT] != PLACE_AUTO) continue;
        for (size_t fits = 0, beyond = best.layers + 1, n = beyond - 1; beyond - fits > 1; n = fits + (beyond - fits) / 2) {
            const size_t off = kept_fewest_off(&other, n, (Place)place);
            int free_link = off && kept_fits(&other, LEVEL_PRODUCTS, n, off, (Place)place);
            if (free_link) kept_time(&other, &still), free_link = other.seconds <= 1.02 * still;
            if (free_link) kept_compare(&best, &other);
            *(free_link ? &fits : &beyond) = n;
        }
    }
    pass_works = outside;
    run->settings = best.settings, run->plan = best.plan;
}

// Keeps less than planned, after an allocation was refused: products of half as many layers, at last what the run needs.
// Returns 0 if less is not possible. Collective.
static int run_keep_less(Run *run, const Batch *shape) {
    Keeping *keep = &run->settings.keep;
    const size_t L = run->model.config.num_hidden_layers, layers = (keep->layers ? keep->layers : L) / 2;
    const Keeping needed = {run->needs, 0, 0};
    if (run->options->keep.word != KEEP_AUTO || keep->level <= LEVEL_ATTENTION) return 0;
    if (layers)
        keep->layers = layers, keep->off = min_size(keep->off, layers);
    else
        *keep = needed;
    run->plan = plan_make(&run->settings, shape);
    return 1;
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

// Plans like run_plan_slots, then keeps what fits.
static void run_plan(Run *run, const Batch *shape, size_t limit) {
    run_plan_slots(run, shape, limit);
    run_keep(run, shape, limit);
}

// Plans the levels of --sp auto, in place of run_plan. Tries levels up to the first with weights and gradients on the
// device, as larger ones would save no transfers. The fastest of them becomes the home level.
static void run_plan_levels(Run *run, const Batch *shape, SequenceBound bound, size_t limit) {
    const size_t batches = run->assignment.batches; // counted for any number of ranks
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
