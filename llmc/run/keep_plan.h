/*
Spends free memory on speed (--keep auto), after all other choices: it keeps products or all activations of as many
layers as fit, if a step is then faster by estimate, and makes logits chunks larger. Other choices do not change.
run_plan makes all choices of a run, run_plan_levels those of --sp auto.
*/
#ifndef LLMC_KEEP_PLAN_H
#define LLMC_KEEP_PLAN_H
#include "choose_plan.h"

#define KEPT_SHARE_GPU 0.95 // share of a GPU's memory that plans with kept products take, less 1 GiB
#define KEPT_SHARE_CPU 0.5  // share of a CPU's available memory; other programs use the rest

// Returns the limits of plans with kept products.
static Limits kept_limits(const Run *run, const Search *search) {
    const int gpu = run->settings.gpu || strcmp(ops_device->name, "cpu") != 0;
    Limits limits = search->limits;
    if (limits.bytes[PLACE_DEVICE] == SIZE_MAX || (!gpu && run->options->memory_limit)) return limits;
    limits.bytes[PLACE_DEVICE] = (size_t)((gpu ? KEPT_SHARE_GPU : KEPT_SHARE_CPU) * (double)limits.bytes[PLACE_DEVICE]);
    if (gpu) limits.bytes[PLACE_DEVICE] -= min_size(limits.bytes[PLACE_DEVICE], GIBIBYTE);
    return limits;
}

typedef struct {
    const Search *search;
    const Batch *shape;
    Limits limits;
    RunSettings settings; // settings tried
    Plan plan;
    size_t layers;  // most layers to keep
    double seconds; // of a step
    size_t bytes[PLACES];
} KeptChoice;

// Plans c->settings. Returns 0 if the plan does not fit on every rank. Collective.
static int choice_fits(KeptChoice *c) {
    c->plan = plan_make(&c->settings, c->shape);
    double beyond = plan_pressure(&c->plan, &c->limits) > 1;
    dist_sum(RANKS_ALL, &beyond, 1);
    plan_bytes(&c->plan, c->bytes);
    return beyond == 0;
}

// Plans a level. Returns 0 if the plan does not fit on every rank. Collective.
static int kept_fits(KeptChoice *c, KeepLevel level, size_t layers, size_t off, Place place) {
    const Keeping keep = {level, layers < c->layers ? layers : 0, place > PLACE_DEVICE && off < layers ? off : 0};
    c->settings.keep = keep, c->settings.place[PLACED_KEPT] = place;
    return choice_fits(c);
}

// Returns the most layers that keep a level on the device; 0: none fits.
static size_t kept_most(KeptChoice *c, KeepLevel level) {
    size_t fits = 0, beyond = c->layers + 1;
    for (size_t n = c->layers; beyond - fits > 1; n = fits + (beyond - fits) / 2)
        *(kept_fits(c, level, n, 0, PLACE_DEVICE) ? &fits : &beyond) = n;
    return fits;
}

// Returns how few of `layers` layers must keep a level off-device so that the plan fits; 0: too many.
static size_t kept_fewest_off(KeptChoice *c, KeepLevel level, size_t layers, Place place) {
    size_t beyond = 0, fits = layers + 1;
    for (size_t off = layers; fits - beyond > 1; off = beyond + (fits - beyond) / 2)
        *(kept_fits(c, level, layers, off, place) ? &fits : &beyond) = off;
    return fits <= layers ? fits : 0;
}

// Sets the seconds of a step by a choice that was planned last. *still: seconds if nothing moved
static void kept_time(KeptChoice *c, double *still) {
    const Moved none = {PHASE_FORWARD, {{0}}};
    RunSettings device = c->settings; // places change no work
    for (int kind = 0; kind < PLACED; kind++) device.place[kind] = PLACE_DEVICE;
    device.defers = 0;
    const PassWork work = pass_work(c->search->machine, &device, c->shape);
    c->seconds =
        of_main_rank(step_seconds(c->search->machine, &c->settings, &work, &c->plan.moved, c->search->sequences));
    *still = of_main_rank(step_seconds(c->search->machine, &c->settings, &work, &none, c->search->sequences));
}

// Takes `other` in place of *best if it is faster by more than 1 %, or less than 1 % slower with fewer bytes.
static void kept_compare(KeptChoice *best, const KeptChoice *other) {
    const int less = other->bytes[PLACE_DEVICE] + other->bytes[PLACE_HOST] + other->bytes[PLACE_DISK] <
                     best->bytes[PLACE_DEVICE] + best->bytes[PLACE_HOST] + best->bytes[PLACE_DISK];
    const double ratio = other->seconds / best->seconds;
    if (of_main_rank(ratio < 0.99 || (ratio < 1.01 && less)) > 0) *best = *other;
}

// Compares `best` with what fits on the device: all, then products, of as many layers as possible.
static void keep_on_device(KeptChoice *best) {
    KeptChoice other = *best;
    double still;
    for (int level = LEVEL_ALL; level >= LEVEL_PRODUCTS; level--) {
        const size_t most = kept_most(&other, (KeepLevel)level);
        if (!most || !kept_fits(&other, (KeepLevel)level, most, 0, PLACE_DEVICE)) continue;
        kept_time(&other, &still);
        kept_compare(best, &other);
        if (most == best->layers) return;
    }
}

// Compares `best` with products of more layers, some of them off-device, while the link is free: transfers make the
// step at most 2 % longer.
static void keep_off_device(KeptChoice *best, Place place) {
    KeptChoice other = *best;
    double still;
    for (size_t fits = 0, beyond = best->layers + 1, n = beyond - 1; beyond - fits > 1;
         n = fits + (beyond - fits) / 2) {
        const size_t off = kept_fewest_off(&other, LEVEL_PRODUCTS, n, place);
        int is_free = off && kept_fits(&other, LEVEL_PRODUCTS, n, off, place);
        if (is_free) kept_time(&other, &still), is_free = other.seconds <= 1.02 * still;
        if (is_free) kept_compare(best, &other);
        *(is_free ? &fits : &beyond) = n;
    }
}

// Keeps what a resumed run began to keep, if it fits. Returns 0 if it does not.
static int keep_as_begun(KeptChoice *best, Keeping begun, Place place) {
    KeptChoice other = *best;
    const size_t layers = begun.layers ? begun.layers : best->layers;
    other.limits = best->search->limits;
    const size_t off = place > PLACE_DEVICE ? kept_fewest_off(&other, begun.level, layers, place) : 0;
    if ((place > PLACE_DEVICE && !off) || !kept_fits(&other, begun.level, layers, off, place)) return 0;
    *best = other;
    return 1;
}

// Doubles logits chunks, up to LARGEST_LOGITS_CHUNK, while they fit: each chunk reads and writes the head's fp32 dW.
static void enlarge_logits_chunk(KeptChoice *best) {
    KeptChoice other = *best;
    while (other.settings.logits_chunk < min_size(LARGEST_LOGITS_CHUNK, batch_rows(best->shape)->N)) {
        other.settings.logits_chunk *= 2;
        if (!choice_fits(&other)) return;
        *best = other;
    }
}

// Keeps products or all of as many layers as free memory takes, if that is faster. The other choices stay as they are.
// A plan without a limit has the limit of a run on this machine. A resumed run keeps what it began to keep.
static void run_keep(Run *run, const Batch *shape, size_t limit) {
    const int unlimited = !limit && run->options->verb == VERB_PLAN && !option_given(run->options, "machine");
    const Search search = run_search(run, unlimited ? ops_device->memory_available() : limit);
    const RunSettings *s = &run->settings;
    const Place named = search.open.place[PLACED_KEPT];
    const size_t L = s->model->config.num_hidden_layers;
    KeptChoice best = {&search, shape, kept_limits(run, &search), *s, run->plan, L, 0, {0}};
    static PassWorks here;
    PassWorks *const outside = pass_works;
    double still;
    run->needed = run->plan.total_bytes, run->needs = s->keep.level, run->needs_logits_chunk = s->logits_chunk;
    const int one = world_sp(s->world) == 1 && !s->deals; // a process has all of a sequence
    const int gpu = s->gpu || strcmp(ops_device->name, "cpu") != 0;
    if (!search.keep || s->method > METHOD_CHECKPOINT || !one || !shape->N) return;
    if (best.limits.bytes[PLACE_DEVICE] == SIZE_MAX) return;
    if (!kept_fits(&best, s->keep.level, 0, 0, s->place[PLACED_KEPT])) return;
    if (!outside) pass_works = &here, here.count = 0;
    kept_time(&best, &still);
    const Keeping all = {LEVEL_ALL, run->begun.layers, 0}; // has the bits of products
    int begun = run->begun.level && named <= PLACE_DEVICE &&
                (keep_as_begun(&best, all, PLACE_DEVICE) || keep_as_begun(&best, run->begun, PLACE_DEVICE));
    if (!begun && named <= PLACE_DEVICE) keep_on_device(&best);
    for (int place = PLACE_HOST; place < PLACES; place++) {
        const int open = named == PLACE_AUTO && search.places[PLACED_KEPT] >> place & 1;
        const int whole = best.settings.keep.level > LEVEL_ATTENTION && !best.settings.keep.layers;
        if ((!open && named != (Place)place) || begun) continue;
        begun = run->begun.level && keep_as_begun(&best, run->begun, (Place)place);
        if (!begun && !whole) keep_off_device(&best, (Place)place);
    }
    pass_works = outside;
    if (search.logits_chunk && gpu && (!s->lora || s->lora->saves[LM_HEAD])) enlarge_logits_chunk(&best);
    run->settings = best.settings, run->plan = best.plan;
}

// Takes less than planned, after an allocation was refused: small logits chunks and half as many layers, at last what
// the run needs. Returns 0 if less is not possible. Collective.
static int run_keep_less(Run *run, const Batch *shape) {
    Keeping *keep = &run->settings.keep;
    const size_t L = run->model.config.num_hidden_layers, layers = (keep->layers ? keep->layers : L) / 2;
    const Keeping needed = {run->needs, 0, 0};
    const int keeps = keep->level > LEVEL_ATTENTION, large = run->settings.logits_chunk > run->needs_logits_chunk;
    if (run->options->keep.word != KEEP_AUTO || (!keeps && !large)) return 0;
    run->settings.logits_chunk = run->needs_logits_chunk;
    if (keeps && layers)
        keep->layers = layers, keep->off = min_size(keep->off, layers);
    else if (keeps)
        *keep = needed;
    run->plan = plan_make(&run->settings, shape);
    return 1;
}

// ---- all choices ----------------------------------------------------------------------------------------------------
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

#endif
