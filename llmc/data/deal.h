/*
Deals the samples of a step to groups of ranks, for --sp auto. Groups lie in a tree: all ranks are its root, a group's
parts are its children, single ranks the leaves. A rank computes the sequences of its groups one after the other, from
the root down, so that the ranks of a group begin together. All ranks are to end early (FlexSP, arXiv 2412.01523, has
this goal, but gives a rank one group a step).

    level       groups of equally many ranks, side by side: aligned, so that a group stays within a node while it can
    load        seconds of a group: of its samples, by a table of the caller, and of its sequences besides them
    bound       no deal is faster: the least T with (samples' seconds times ranks, each at the level where that is
                least among those with at most T seconds) <= T times all ranks: the linear program's optimum, whose
                samples may be cut over groups, but take no longer than the longest may

Between bound and twice the bound, T is bisected: the longest sample first, each goes to the level of least seconds
times ranks that ends within T, there to the group that ends first. Then samples of the slowest ranks are moved and
exchanged. Few samples are searched to the end.

A deal depends on the samples, the table and nothing else, so every rank makes the same one, and a resumed run, too.
*/
#ifndef LLMC_DEAL_H
#define LLMC_DEAL_H
#include "llmc/base/utils.h"

#define DEAL_LEVELS 24
#define DEAL_WORK   60000 // visits to groups' paths, of one search
#define DEAL_BEGINS 8     // a sample on several ranks that takes longer than so many begins of a sequence is not packed

// Groups of equally many ranks
typedef struct {
    size_t ranks;
    size_t capacity; // positions of a sequence whose plan fits; 0: none does
    double begin;    // s: of a sequence besides its samples
    size_t first;    // its groups in Deal.group
} DealLevel;

typedef struct {
    size_t ranks, levels, groups; // levels: from single ranks to all
    DealLevel level[DEAL_LEVELS];
} DealLevels;

typedef struct {
    size_t level, parts;       // parts: children
    double work;               // s: sum of its samples'
    size_t positions, large;   // sums; large: samples that share no sequence
    double load;               // s
    double least[DEAL_LEVELS]; // s: of the paths through each group of a level below, the longest; of these the least
    size_t begin, sequences;   // results: its sequences, of Deal.begin
} DealGroup;

typedef struct {
    DealLevels levels;
    size_t samples;
    uint32_t *positions; // [samples], longest first
    double *seconds;     // [samples,levels]
    DealGroup *group;    // [groups] level by level, single ranks first
    uint32_t *order;     // results: [samples] sequence by sequence
    uint32_t *begin;     // [samples + 1] of each sequence in order
    size_t sequences;
    double load, bound; // s: of the slowest rank; bound
    // the search
    uint32_t *place, *best; // [samples] the group of each
    uint32_t *room;         // [samples] of a sequence
    size_t work;
} Deal;

// What a log says of a deal
typedef struct {
    double load, mean, bound;   // s: of the slowest rank, of all on average, that no deal falls below; 0: no deal
    size_t groups[DEAL_LEVELS]; // of each level, that have sequences
} DealSummary;

// Returns levels of 1, 2, 4 ... ranks that divide all, and of all.
static DealLevels deal_levels(size_t ranks) {
    DealLevels l = {.ranks = ranks};
    for (size_t S = 1; S == 1 || ranks % S == 0; S *= 2) l.level[l.levels++].ranks = S;
    if (l.level[l.levels - 1].ranks != ranks) l.level[l.levels++].ranks = ranks;
    for (size_t k = 0; k < l.levels; k++) l.level[k].first = l.groups, l.groups += ranks / l.level[k].ranks;
    return l;
}

// Allocates for steps of at most `samples`.
static Deal deal_allocate(DealLevels levels, size_t samples) {
    const char *const what = "the deals of steps";
    Deal d = {.levels = levels};
    d.positions = (uint32_t *)checked_calloc(samples, sizeof(uint32_t), what);
    d.seconds = (double *)checked_calloc(samples * levels.levels, sizeof(double), what);
    d.group = (DealGroup *)checked_calloc(levels.groups, sizeof(DealGroup), what);
    d.order = (uint32_t *)checked_calloc(samples, sizeof(uint32_t), what);
    d.begin = (uint32_t *)checked_calloc(samples + 1, sizeof(uint32_t), what);
    d.place = (uint32_t *)checked_calloc(samples, sizeof(uint32_t), what);
    d.best = (uint32_t *)checked_calloc(samples, sizeof(uint32_t), what);
    d.room = (uint32_t *)checked_calloc(samples, sizeof(uint32_t), what);
    return d;
}

static void deal_free(Deal *d) {
    free(d->positions), free(d->seconds), free(d->group), free(d->order), free(d->begin);
    free(d->place), free(d->best), free(d->room);
    memset(d, 0, sizeof(*d));
}

static double deal_seconds(const Deal *d, size_t i, size_t k) { return d->seconds[i * d->levels.levels + k]; }
static int deal_fits(const Deal *d, size_t i, size_t k) { return d->positions[i] <= d->levels.level[k].capacity; }

// Tells whether a sample has a sequence of its own: several ranks would have unequal parts of packed samples' pairs.
static int deal_alone(const Deal *d, size_t i, size_t k) {
    return d->levels.level[k].ranks > 1 && deal_seconds(d, i, k) > DEAL_BEGINS * d->levels.level[k].begin;
}

// Tells whether no two such samples share a sequence.
static int deal_large(const Deal *d, size_t i, size_t k) {
    return 2 * (size_t)d->positions[i] > d->levels.level[k].capacity || deal_alone(d, i, k);
}

// ---- the bound ------------------------------------------------------------------------------------------------------
// Returns the least seconds times ranks of sample i, with its share of full sequences, at levels where it takes at
// most T seconds; INFINITY: at none.
static double deal_area(const Deal *d, size_t i, double T) {
    double least = INFINITY;
    for (size_t k = 0; k < d->levels.levels; k++) {
        const DealLevel *l = &d->levels.level[k];
        if (!deal_fits(d, i, k) || l->begin + deal_seconds(d, i, k) > T) continue;
        const double share = l->begin * (double)d->positions[i] / (double)l->capacity;
        least = fmin(least, (double)l->ranks * (deal_seconds(d, i, k) + share));
    }
    return least;
}

static double deal_bound(const Deal *d) {
    double low = 0, high = 1e-9;
    for (int found = 0, i = 0; i < 30; i += found) {
        const double T = found ? (low + high) / 2 : high;
        double sum = 0;
        for (size_t s = 0; s < d->samples && sum < INFINITY; s++) sum += deal_area(d, s, T);
        const int may = sum <= T * (double)d->levels.ranks;
        if (may) found = 1, high = T;
        if (!may) low = T, high = found ? high : 2 * high;
    }
    return low;
}

// ---- groups ---------------------------------------------------------------------------------------------------------
// Updates the paths of a group and of those that it is a part of.
static void deal_update(Deal *d, size_t g) {
    for (;; d->work++) {
        DealGroup *group = &d->group[g];
        const size_t k = group->level, index = g - d->levels.level[k].first;
        const DealGroup *part = k ? &d->group[d->levels.level[k - 1].first + index * group->parts] : NULL;
        double longest = 0;
        for (size_t j = 0; j < k; j++) group->least[j] = INFINITY;
        for (size_t p = 0; p < group->parts; p++) {
            longest = fmax(longest, part[p].least[k - 1]);
            for (size_t j = 0; j < k; j++) group->least[j] = fmin(group->least[j], group->load + part[p].least[j]);
        }
        group->least[k] = group->load + longest;
        if (k + 1 == d->levels.levels) return;
        g = d->levels.level[k + 1].first + index / d->group[d->levels.level[k + 1].first].parts;
    }
}

// Returns the load of group g with sample i in place of nothing, or without it.
static double deal_load(const Deal *d, size_t g, size_t i, int in) {
    const DealGroup *group = &d->group[g];
    const DealLevel *l = &d->levels.level[group->level];
    const size_t n = d->positions[i], large = (size_t)deal_large(d, i, group->level);
    const double work = group->work + (in ? 1 : -1) * deal_seconds(d, i, group->level);
    const size_t positions = in ? group->positions + n : group->positions - n;
    const size_t full = (positions + l->capacity - 1) / l->capacity;
    return positions ? work + l->begin * (double)max_size(full, in ? group->large + large : group->large - large) : 0;
}

// Puts sample i into group g, or takes it out.
static void deal_put(Deal *d, size_t i, size_t g, int in) {
    DealGroup *group = &d->group[g];
    const size_t n = d->positions[i], large = (size_t)deal_large(d, i, group->level);
    group->load = deal_load(d, g, i, in);
    group->work += (in ? 1 : -1) * deal_seconds(d, i, group->level);
    group->positions = in ? group->positions + n : group->positions - n;
    group->large = in ? group->large + large : group->large - large;
    if (!group->positions) group->work = 0;
    d->place[i] = (uint32_t)g;
    deal_update(d, g);
}

static void deal_empty(Deal *d) {
    const DealLevels *l = &d->levels;
    memset(d->group, 0, l->groups * sizeof(DealGroup));
    for (size_t k = 0; k < l->levels; k++)
        for (size_t g = l->level[k].first; g < l->level[k].first + l->ranks / l->level[k].ranks; g++)
            d->group[g].level = k, d->group[g].parts = k ? l->level[k].ranks / l->level[k - 1].ranks : 0;
}

// Returns the group of level k whose longest path is the least; k of all levels: a single rank on the longest path.
static size_t deal_find(const Deal *d, size_t k) {
    const DealLevels *l = &d->levels;
    const int longest = k == l->levels;
    size_t g = l->groups - 1;
    for (size_t at = l->levels - 1; longest ? at > 0 : at > k; at--) {
        const size_t first = l->level[at - 1].first + (g - l->level[at].first) * d->group[g].parts;
        const size_t j = longest ? at - 1 : k, parts = d->group[g].parts;
        g = first;
        for (size_t p = 1; p < parts; p++)
            if (longest ? d->group[first + p].least[j] > d->group[g].least[j]
                        : d->group[first + p].least[j] < d->group[g].least[j])
                g = first + p;
    }
    return g;
}

static double deal_longest(const Deal *d) { return d->group[d->levels.groups - 1].least[d->levels.levels - 1]; }

// Returns the group for sample i: of those that end within T the one of least work, else the one that ends first.
// *end: its longest path then
static size_t deal_choose(const Deal *d, size_t i, double T, double *end) {
    const DealGroup *root = &d->group[d->levels.groups - 1];
    double least = INFINITY;
    size_t found = d->levels.groups;
    *end = INFINITY;
    for (size_t k = 0; k < d->levels.levels; k++) {
        const double ranks = (double)d->levels.level[k].ranks;
        if (!deal_fits(d, i, k) || ranks * deal_seconds(d, i, k) >= least) continue;
        const size_t g = deal_find(d, k);
        const double added = deal_load(d, g, i, 1) - d->group[g].load, ends = root->least[k] + added;
        if (ends <= T ? ranks * added >= least : least < INFINITY || ends >= *end) continue;
        if (ends <= T) least = ranks * added;
        found = g, *end = ends;
    }
    return found;
}

// Deals all samples anew; returns the slowest rank's load.
static double deal_all(Deal *d, double T) {
    double end;
    deal_empty(d);
    for (size_t i = 0; i < d->samples; i++) deal_put(d, i, deal_choose(d, i, T, &end), 1);
    return deal_longest(d);
}

// Keeps the current deal if it is the best so far.
static void deal_keep(Deal *d, double load) {
    if (!(load < d->load)) return;
    d->load = load;
    memcpy(d->best, d->place, d->samples * sizeof(uint32_t));
}

// ---- moves ----------------------------------------------------------------------------------------------------------
static int deal_holds(const Deal *d, size_t g, size_t rank) {
    const DealLevel *l = &d->levels.level[d->group[g].level];
    return g - l->first == rank / l->ranks;
}

// Puts sample i where it ends first. Returns the slowest rank's load.
static double deal_put_best(Deal *d, size_t i) {
    double end;
    deal_put(d, i, deal_choose(d, i, deal_longest(d), &end), 1);
    return deal_longest(d);
}

// Moves samples of the slowest rank to other groups, alone or in exchange for another, while all end earlier.
static void deal_improve(Deal *d, size_t work) {
    const size_t end = d->work + work;
    double most = deal_longest(d);
    for (int found = 1; found && d->work < end;) {
        const size_t rank = deal_find(d, d->levels.levels);
        found = 0;
        for (size_t i = 0; i < d->samples && !found; i++) {
            const size_t home = d->place[i];
            if (!deal_holds(d, home, rank)) continue;
            deal_put(d, i, home, 0);
            double load = deal_put_best(d, i);
            for (size_t j = i + 1; !(load < most * (1 - 1e-9)) && j < d->samples && d->work < end; j++) {
                const size_t other = d->place[j], at = d->place[i];
                if (other == home || !deal_fits(d, i, d->group[other].level) || !deal_fits(d, j, d->group[home].level))
                    continue;
                deal_put(d, i, at, 0), deal_put(d, j, other, 0);
                deal_put(d, i, other, 1), deal_put(d, j, home, 1);
                load = deal_longest(d);
                if (load < most * (1 - 1e-9)) break;
                deal_put(d, i, other, 0), deal_put(d, j, home, 0);
                deal_put(d, j, other, 1), deal_put(d, i, at, 1);
            }
            if ((found = load < most * (1 - 1e-9))) most = load;
            if (!found) deal_put(d, i, d->place[i], 0), deal_put(d, i, home, 1);
        }
    }
}

// Deals samples i and later in all ways that may take less than the best so far.
static void deal_search(Deal *d, size_t i) {
    if (i == d->samples) {
        deal_keep(d, deal_longest(d));
        return;
    }
    for (size_t g = 0; g < d->levels.groups && d->work < 10 * DEAL_WORK; g++) {
        if (!deal_fits(d, i, d->group[g].level)) continue;
        deal_put(d, i, g, 1);
        if (deal_longest(d) < d->load) deal_search(d, i + 1);
        deal_put(d, i, g, 0);
    }
}

// ---- the result -----------------------------------------------------------------------------------------------------
// Packs the samples of every group into sequences by first-fit, the longest first.
static void deal_pack(Deal *d) {
    deal_empty(d);
    d->sequences = 0;
    for (size_t g = 0; g < d->levels.groups; g++) {
        DealGroup *group = &d->group[g];
        const DealLevel *level = &d->levels.level[group->level];
        group->begin = d->sequences;
        for (size_t i = 0, s; i < d->samples; i++) {
            if (d->best[i] != g) continue;
            const int alone = deal_alone(d, i, group->level);
            for (s = alone ? d->sequences : group->begin; s < d->sequences && d->room[s] < d->positions[i];) s++;
            if (s == d->sequences) d->room[d->sequences++] = alone ? d->positions[i] : (uint32_t)level->capacity;
            d->room[s] -= d->positions[i], d->place[i] = (uint32_t)s;
            group->work += deal_seconds(d, i, group->level);
        }
        group->sequences = d->sequences - group->begin;
        group->load = group->work + level->begin * (double)group->sequences;
        deal_update(d, g);
    }
    memset(d->begin, 0, (d->samples + 1) * sizeof(uint32_t));
    for (size_t i = 0; i < d->samples; i++) d->begin[d->place[i] + 1]++;
    for (size_t s = 0; s < d->sequences; s++) d->begin[s + 1] += d->begin[s], d->room[s] = d->begin[s];
    for (size_t i = 0; i < d->samples; i++) d->order[d->room[d->place[i]]++] = (uint32_t)i;
    d->load = deal_longest(d);
}

static DealSummary deal_summary(const Deal *d) {
    DealSummary s = {.load = d->load, .bound = d->bound};
    for (const DealGroup *g = d->group; g < d->group + d->levels.groups; g++) {
        s.mean += g->load * (double)d->levels.level[g->level].ranks / (double)d->levels.ranks;
        s.groups[g->level] += g->sequences > 0;
    }
    return s;
}

// Deals d->samples samples, each of which fits a level. The caller has set their positions and seconds.
static void deal_make(Deal *d) {
    double low = deal_bound(d), high = 2 * low;
    d->load = INFINITY, d->work = 0, d->bound = low;
    for (int i = 0; i < 12; i++) {
        const double T = i ? (low + high) / 2 : low * 1.0001, load = deal_all(d, T);
        deal_keep(d, load);
        if (load <= T * 1.0000001 && i == 0) break;
        *(load <= T ? &high : &low) = T;
    }
    deal_empty(d);
    for (size_t i = 0; i < d->samples; i++) deal_put(d, i, d->best[i], 1);
    deal_improve(d, DEAL_WORK);
    deal_keep(d, deal_longest(d));
    if (d->samples <= 8 && d->levels.groups <= 15) deal_empty(d), d->work = 0, deal_search(d, 0);
    deal_pack(d);
}

#endif
