/*
--sp auto: the levels of groups that the deals of a run choose from (llmc/data/deal.h). Plans tell how long a sequence
fits each level; the estimate tells how many seconds a document takes on it. Both are computed before the run and are
equal on all ranks.

Validation, and everything except training steps, shares sequences on the home level (choose_plan.h). Its settings, for
example the places of tensors, hold for all levels. Smaller levels take shorter sequences; memory is planned for the
largest pass.
*/
#ifndef LLMC_LEVELS_H
#define LLMC_LEVELS_H
#include "bound.h"

// Returns assumed rates of a CPU's core. Only their ratios matter, and they decide nothing but deals.
static Machine levels_cpu(void) {
    Machine m = machines[MACHINE_H100];
    for (int i = PEAK_FLOPS; i <= DELTA_FLOPS; i++) m.value[i] = 5e10;
    m.value[MEMORY_BANDWIDTH] = 1e10, m.value[LINK_WITHIN] = m.value[LINK_BETWEEN] = 2e9;
    m.value[HOP_WITHIN] = m.value[HOP_BETWEEN] = 2e-5, m.value[LAUNCH_GAP] = 2e-6;
    return m;
}

static RunSettings level_settings(const Run *run, size_t sp) {
    RunSettings settings = run->settings;
    settings.world.sp = sp;
    return settings;
}

// Returns the plan of N positions on groups of sp ranks.
static Plan level_plan(const Run *run, size_t sp, SequenceBound bound, size_t N) {
    const RunSettings settings = level_settings(run, sp);
    const SequenceBound part = {N, min_size(bound.documents, N), min_size(bound.longest, N), 0, 0};
    Batch shape = batch_shape(part);
    const Plan plan = plan_make(&settings, &shape);
    batch_free(&shape);
    return plan;
}

// Keeps the larger plan of each place.
static void plan_join(Plan *plan, const Plan *other) {
    for (int place = 0; place < PLACES; place++)
        if (other->arena[place].peak > plan->arena[place].peak) plan->arena[place] = other->arena[place];
    plan->total_bytes = plan->arena[PLACE_DEVICE].peak;
    plan->disk_bytes = max_size(plan->disk_bytes, other->disk_bytes);
    plan->host_bytes = max_size(plan->host_bytes, other->host_bytes);
    for (int share = 0; share < SHARES; share++) plan->share[share] = arena_share(plan->arena, (Share)share);
}

// Returns the most positions, up to a 64th of them, that fit on every rank together with the plans so far.
static size_t level_capacity(const Run *run, size_t sp, SequenceBound bound, const Limits *limits) {
    size_t low = 0, high = bound.N, middle = high, whose;
    for (; high > low; middle = high - (high - low) / 2) {
        Plan plan = level_plan(run, sp, bound, middle);
        plan_join(&plan, &run->plan);
        if (plan_pressure(&plan, limits) <= 1)
            low = middle;
        else
            high = high - low > low / 64 ? middle - 1 : low;
    }
    return dist_smallest(low, &whose);
}

typedef enum {
    LEVEL_PASS,
    LEVEL_ALONE, // a pass that waits neither for weights of other ranks nor for transfers between places
    LEVEL_STEP   // a step with one pass
} LevelPart;

// Estimates the seconds of `documents` documents of n positions each, on groups of sp ranks.
static double level_seconds(const Run *run, const Machine *machine, size_t sp, size_t documents, size_t n,
                            LevelPart part) {
    const SequenceBound bound = {documents * n, documents, n, 0, 0};
    RunSettings settings = level_settings(run, sp);
    if (part == LEVEL_ALONE) settings.world.zero = 0;
    RunSettings device = settings; // places change no work
    for (int kind = 0; kind < PLACED; kind++) device.place[kind] = PLACE_DEVICE;
    device.defers = 0;
    Batch shape = batch_shape(bound);
    const PassWork work = pass_work(machine, &device, &shape);
    const Moved moved = plan_make(part == LEVEL_ALONE ? &device : &settings, &shape).moved;
    batch_free(&shape);
    return part == LEVEL_STEP ? step_seconds(machine, &settings, &work, &moved, 1)
                              : sequence_seconds(machine, &settings, &work, &moved, &work.other);
}

// Estimates seconds per document length on this level. Fixed cost of a sequence: 2 x (half chunk) - (whole chunk). A
// document takes its share of a full sequence of equal documents, or a whole sequence if the deal packs no other
// document with it (deal_alone). Passes within the least time count without communication and transfers.
static void level_table(const Run *run, const Machine *machine, DealTable *table, size_t k) {
    DealLevel *level = &table->levels.level[k];
    const size_t S = level->ranks, n = 128, half = min_size(S * run->plan.chunk, level->capacity) / (2 * n);
    level->least = level->begin = level_seconds(run, machine, S, 1, min_size(16 * S, level->capacity), LEVEL_PASS);
    if (half)
        level->begin = 2 * level_seconds(run, machine, S, half, n, LEVEL_ALONE) -
                       level_seconds(run, machine, S, 2 * half, n, LEVEL_ALONE);
    for (size_t i = 1; i < table->lengths; i++) {
        const size_t length = table->length[i], full = min_size(max_size(level->capacity / length, 1), 256);
        const double own = level_seconds(run, machine, S, 1, length, LEVEL_ALONE) - level->begin;
        const size_t documents = deal_alone(&table->levels, k, own) ? 1 : full;
        double all = level_seconds(run, machine, S, documents, length, LEVEL_PASS);
        if (all <= level->least) all = level_seconds(run, machine, S, documents, length, LEVEL_ALONE);
        table->seconds[i][k] = fmax(all - level->begin, 0) / (double)documents;
    }
    table->seconds[0][k] = table->seconds[1][k] / (double)table->length[1];
}

// Estimates a step of long-tailed documents: the longest, one half as long, one a third, and so on.
static double levels_seconds(const Run *run, const Machine *machine, size_t longest) {
    const DealTable *table = &run->table;
    const Options *o = run->options;
    const size_t levels = table->levels.levels, samples = o->samples ? o->samples : o->batch * o->grad_accum;
    Deal d = deal_allocate(table->levels, samples);
    double seconds[2], positions = 0; // [0] the deal, [1] the rest of the step
    for (d.samples = 0; d.samples < samples; positions += d.positions[d.samples++]) {
        d.positions[d.samples] = (uint32_t)max_size(longest / (d.samples + 1), 1);
        for (size_t k = 0; k < levels; k++)
            d.seconds[d.samples * levels + k] = deal_table_seconds(table, d.positions[d.samples], k);
    }
    deal_make(&d);
    const size_t n = max_size((size_t)(positions / (double)table->levels.ranks), 1); // positions of a rank
    seconds[0] = d.load;
    seconds[1] = level_seconds(run, machine, 1, 1, n, LEVEL_STEP) - level_seconds(run, machine, 1, 1, n, LEVEL_PASS);
    deal_free(&d);
    dist_broadcast(RANKS_ALL, seconds, sizeof(seconds), 0);
    return seconds[0] + seconds[1];
}

// Makes the table of a run whose settings are chosen, and joins its plan with the plans of other levels. Returns the
// seconds of a step.
static double run_levels(Run *run, SequenceBound bound, const Search *search) {
    const Machine cpu = levels_cpu();
    const int on_cpu = !strcmp(ops_device->name, "cpu") && !run->settings.gpu;
    const Machine *machine = on_cpu ? &cpu : search->machine;
    DealTable *table = &run->table;
    PassWorks *const outside = pass_works;
    double next = 256; // shorter documents have few pairs
    pass_works = NULL; // there are too many plans to keep
    table->levels = deal_levels(world_ranks(run->settings.world));
    table->levels.turns =
        world_ranks(run->settings.world) > 1 && (sharding_of(run->settings.world, ZERO_GRADIENTS).ranks > 1 ||
                                                 run->settings.gradient_type != dtype_of_sums(run->model.dtype));
    table->length[0] = 1, table->lengths = 1;
    for (size_t length = 0; length < bound.longest && table->lengths < DEAL_LENGTHS; next *= 1.4142135623730951)
        table->length[table->lengths++] = length = min_size((size_t)next, max_size(bound.longest, 2));
    for (size_t k = 0; k < table->levels.levels; k++) {
        DealLevel *level = &table->levels.level[k];
        level->capacity = level_capacity(run, level->ranks, bound, &search->limits);
        if (!level->capacity) continue;
        const Plan plan = level_plan(run, level->ranks, bound, level->capacity);
        plan_join(&run->plan, &plan);
        if (is_main_rank()) level_table(run, machine, table, k);
    }
    pass_works = outside;
    dist_broadcast(RANKS_ALL, table, sizeof(*table), 0);
    return levels_seconds(run, machine, bound.longest);
}

// Shares sequences among groups of sp ranks from now on.
static void run_share(Run *run, size_t sp) {
    const DealLevel *level = run->table.levels.level;
    while (level->ranks != sp) level++;
    run->settings.world.sp = run->streambp.memory.world.sp = sp;
    run->streambp.loops = loops_of(run->settings.method, run->settings.world);
    run->streambp.memory.visits = pass_visits(&run->streambp, level->capacity); // visits of the level's plan
    dist_split(sp);
}

#endif
