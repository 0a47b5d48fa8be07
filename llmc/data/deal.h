/*
Deals the samples of a step to groups of ranks, for --sp auto. Groups lie in a tree: all ranks are its root, a group's
parts are its children, single ranks the leaves. A rank computes the sequences of its groups one after the other, from
the root down, so that the ranks of a group begin together. All ranks are to end early (FlexSP, arXiv 2412.01523, has
this goal, but gives a rank one group a step).

    level       groups of equally many ranks, side by side: aligned, so that a group stays within a node while it can
    load        seconds of a group: of its samples, by a table of the caller, and of its sequences besides them
    path        a rank's groups, from the root down; their loads sum to the time at which the rank ends
    bound       no deal is faster: see deal_excludes

1. deal_bound bisects the bound.
2. deal_all deals all samples, the longest first, for a time T to end within. Each goes to the level of least seconds
   times ranks among those that end within T, there to the group that ends first. T is bisected above the bound.
3. deal_improve deals samples of the slowest rank and of another one again, many times. deal_search tries all deals
   of few samples.
4. deal_pack packs the samples of each group into sequences.

A deal depends on the samples, the table and nothing else, so every rank makes the same one, and a resumed run, too.
*/
#ifndef LLMC_DEAL_H
#define LLMC_DEAL_H
#include "llmc/base/random.h"
#include "llmc/base/utils.h"

#define DEAL_LEVELS 24
#define DEAL_WORK   60000 // groups whose paths deal_improve computes

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

// A group, or a joint of groups: where a group has more than two parts, joints make the tree binary.
typedef struct {
    size_t level, up, part[2]; // in Deal.group; part[1] = 0: a single rank
    int redealt;               // its samples are being dealt again
    size_t positions, large;   // sums; large: samples of more than half a sequence
    double work, load;         // s: of its samples; with its sequences
    double longest;            // s: of the longest path from here down
    double least[DEAL_LEVELS]; // s: the same through each group of a level; of these the least
    size_t begin, sequences;   // results: its sequences, of Deal.begin
} DealGroup;

typedef struct {
    DealLevels levels;
    size_t samples;
    uint32_t *positions; // [samples], longest first
    double *seconds;     // [samples,levels]
    DealGroup *group;    // [2 ranks] level by level, single ranks first; then joints
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

static size_t deal_root(const Deal *d) { return d->levels.groups - 1; }

// Makes the parts of each group a binary tree: the first two of those in a queue are joined until two are left.
static void deal_join(Deal *d) {
    size_t joints = d->levels.groups, *const queue = (size_t *)checked_calloc(2 * d->levels.ranks, sizeof(size_t), "");
    for (size_t k = 0; k < d->levels.levels; k++) {
        const DealLevel *l = &d->levels.level[k];
        const size_t parts = k ? l->ranks / l[-1].ranks : 0;
        for (size_t i = 0; i < d->levels.ranks / l->ranks; i++) {
            size_t begin = 0, end = parts;
            for (size_t p = 0; p < parts; p++) queue[p] = l[-1].first + i * parts + p;
            d->group[l->first + i].level = k;
            for (; begin < end; begin += 2) {
                const size_t g = end - begin > 2 ? joints++ : l->first + i;
                d->group[g].level = k;
                for (size_t p = 0; p < 2; p++)
                    d->group[g].part[p] = queue[begin + p], d->group[queue[begin + p]].up = g;
                if (end - begin > 2) queue[end++] = g;
            }
        }
    }
    free(queue);
}

// Allocates for steps of at most `samples`.
static Deal deal_allocate(DealLevels levels, size_t samples) {
    const char *const what = "the deals of steps";
    Deal d = {.levels = levels};
    d.positions = (uint32_t *)checked_calloc(samples, sizeof(uint32_t), what);
    d.seconds = (double *)checked_calloc(samples * levels.levels, sizeof(double), what);
    d.group = (DealGroup *)checked_calloc(2 * levels.ranks, sizeof(DealGroup), what);
    d.order = (uint32_t *)checked_calloc(samples, sizeof(uint32_t), what);
    d.begin = (uint32_t *)checked_calloc(samples + 1, sizeof(uint32_t), what);
    d.place = (uint32_t *)checked_calloc(samples, sizeof(uint32_t), what);
    d.best = (uint32_t *)checked_calloc(samples, sizeof(uint32_t), what);
    d.room = (uint32_t *)checked_calloc(samples, sizeof(uint32_t), what);
    deal_join(&d);
    return d;
}

static void deal_free(Deal *d) {
    free(d->positions), free(d->seconds), free(d->group), free(d->order), free(d->begin);
    free(d->place), free(d->best), free(d->room);
    memset(d, 0, sizeof(*d));
}

static double deal_seconds(const Deal *d, size_t i, size_t k) { return d->seconds[i * d->levels.levels + k]; }
static int deal_fits(const Deal *d, size_t i, size_t k) { return d->positions[i] <= d->levels.level[k].capacity; }

// ---- the bound ------------------------------------------------------------------------------------------------------
// Returns whether no deal ends within T, as one of three inequalities shows. On a rank's path let W be the seconds of
// samples, u their shares of full sequences, c the number of sequences. Then W + begin c <= T, where
//     0: c >= u    1: c >= 1    2: c >= f + (u - f) / m, where f full sequences end within T, f + 1 only if their
//     shares sum to at most f + m, m < 1: a full one takes at least `rate`.
// So W + weight u <= T - less. Summed over ranks, each sample counts at its cheapest level: the linear program's optimum.
static int deal_excludes(const Deal *d, double T, int inequality, double begin, double rate) {
    const double f = floor(T / (rate + begin)), m = (T - begin * (f + 1)) / rate - f;
    if (inequality == 2 && (m <= 0 || m >= 1)) return 0;
    const double weight = begin * (inequality == 0 ? 1 : inequality == 1 ? 0 : 1 / m);
    const double less = begin * (inequality == 0 ? 0 : inequality == 1 ? 1 : f * (1 - 1 / m));
    double sum = 0;
    for (size_t i = 0; i < d->samples; i++) {
        double least = INFINITY;
        for (size_t k = 0; k < d->levels.levels; k++) {
            const DealLevel *l = &d->levels.level[k];
            const double seconds = deal_seconds(d, i, k);
            if (!deal_fits(d, i, k) || l->begin + seconds > T) continue;
            least = fmin(least, (double)l->ranks * (seconds + weight * d->positions[i] / (double)l->capacity));
        }
        sum += least;
    }
    return !(sum <= (double)d->levels.ranks * (T - less));
}

static double deal_bound(const Deal *d) {
    double low = 1e-9, begin = INFINITY, rate = INFINITY;
    for (size_t i = 0; i < d->samples; i++)
        for (size_t k = 0; k < d->levels.levels; k++) {
            const DealLevel *l = &d->levels.level[k];
            if (!deal_fits(d, i, k)) continue;
            begin = fmin(begin, l->begin);
            rate = fmin(rate, deal_seconds(d, i, k) * (double)l->capacity / d->positions[i]);
        }
    for (int inequality = 0; inequality < 3; inequality++) {
        double high = low * 1.001;
        if (!deal_excludes(d, high, inequality, begin, rate)) continue;
        for (; deal_excludes(d, high, inequality, begin, rate); high *= 2) low = high;
        while (high - low > 1e-5 * low) {
            const double T = (low + high) / 2;
            *(deal_excludes(d, T, inequality, begin, rate) ? &low : &high) = T;
        }
    }
    return low;
}

// ---- groups ---------------------------------------------------------------------------------------------------------
// Updates the paths through a group, also of those that it is a part of.
static void deal_update(Deal *d, size_t g) {
    for (;; g = d->group[g].up) {
        DealGroup *group = &d->group[g];
        const DealGroup *a = &d->group[group->part[0]], *b = &d->group[group->part[1]];
        group->longest = group->load + (group->part[1] ? fmax(a->longest, b->longest) : 0);
        for (size_t k = 0; k < group->level; k++) group->least[k] = group->load + fmin(a->least[k], b->least[k]);
        group->least[group->level] = g < d->levels.groups ? group->longest : INFINITY;
        d->work++;
        if (g == deal_root(d)) return;
    }
}

// Returns the load of group g with sample i in place of nothing, or without it. Sequences: at least as many as full ones
// and a 64th, so that their packing succeeds, and as large samples.
static double deal_load(const Deal *d, size_t g, size_t i, int in) {
    const DealGroup *group = &d->group[g];
    const DealLevel *l = &d->levels.level[group->level];
    const size_t n = d->positions[i], large = 2 * n > l->capacity;
    const double work = group->work + (in ? 1 : -1) * deal_seconds(d, i, group->level);
    const size_t positions = in ? group->positions + n : group->positions - n;
    const size_t packed = positions > l->capacity ? positions + positions / 64 : positions;
    const size_t full = (packed + l->capacity - 1) / l->capacity;
    return positions ? work + l->begin * (double)max_size(full, in ? group->large + large : group->large - large) : 0;
}

// Puts sample i into group g, or takes it out.
static void deal_put(Deal *d, size_t i, size_t g, int in) {
    DealGroup *group = &d->group[g];
    const size_t n = d->positions[i], large = 2 * n > d->levels.level[group->level].capacity;
    group->load = deal_load(d, g, i, in);
    group->work += (in ? 1 : -1) * deal_seconds(d, i, group->level);
    group->positions = in ? group->positions + n : group->positions - n;
    group->large = in ? group->large + large : group->large - large;
    if (!group->positions) group->work = 0;
    d->place[i] = (uint32_t)g;
    deal_update(d, g);
}

static void deal_empty(Deal *d) {
    for (DealGroup *g = d->group; g < d->group + 2 * d->levels.ranks; g++) {
        g->positions = g->large = g->sequences = 0;
        g->work = g->load = g->longest = 0;
        for (size_t k = 0; k < DEAL_LEVELS; k++) g->least[k] = 0;
    }
    for (size_t g = 0; g < d->levels.groups; g++) deal_update(d, g);
}

// Returns the group of level k whose longest path is the least.
static size_t deal_first(const Deal *d, size_t k) {
    size_t g = deal_root(d);
    while (g >= d->levels.groups || d->group[g].level > k) {
        const size_t *part = d->group[g].part;
        g = part[d->group[part[1]].least[k] < d->group[part[0]].least[k]];
    }
    return g;
}

// Returns the rank that ends last.
static size_t deal_slowest(const Deal *d) {
    size_t g = deal_root(d);
    while (d->group[g].part[1]) {
        const size_t *part = d->group[g].part;
        g = part[d->group[part[1]].longest > d->group[part[0]].longest];
    }
    return g;
}

static double deal_longest(const Deal *d) { return d->group[deal_root(d)].longest; }

// Returns the group for sample i: of those that end within T the one of least work, else the one that ends first.
static size_t deal_choose(const Deal *d, size_t i, double T) {
    double least = INFINITY, end = INFINITY;
    size_t found = d->levels.groups;
    for (size_t k = 0; k < d->levels.levels; k++) {
        const double ranks = (double)d->levels.level[k].ranks;
        if (!deal_fits(d, i, k) || ranks * deal_seconds(d, i, k) >= least) continue;
        const size_t g = deal_first(d, k);
        const double added = deal_load(d, g, i, 1) - d->group[g].load, ends = d->group[deal_root(d)].least[k] + added;
        if (ends <= T ? ranks * added >= least : least < INFINITY || ends >= end) continue;
        if (ends <= T) least = ranks * added;
        found = g, end = ends;
    }
    return found;
}

// ---- the search -----------------------------------------------------------------------------------------------------
// Keeps the current deal if it is the best so far. Returns whether all end within T.
static int deal_keep(Deal *d, double T) {
    if (deal_longest(d) < d->load) {
        d->load = deal_longest(d);
        memcpy(d->best, d->place, d->samples * sizeof(uint32_t));
    }
    return deal_longest(d) <= T;
}

// Deals all samples to end within T. Returns whether they do.
static int deal_all(Deal *d, double T) {
    deal_empty(d);
    for (size_t i = 0; i < d->samples; i++) deal_put(d, i, deal_choose(d, i, T), 1);
    return deal_keep(d, T);
}

static void deal_restore(Deal *d) {
    deal_empty(d);
    for (size_t i = 0; i < d->samples; i++) deal_put(d, i, d->best[i], 1);
}

// Takes three quarters of the samples on the paths of the slowest rank and of another out, and deals them again, the
// longest first, in what all end earlier, else puts them back.
static void deal_improve(Deal *d) {
    for (uint64_t turn = 0; d->work < DEAL_WORK && deal_longest(d) > d->bound * 1.0001; turn++) {
        const double T = deal_longest(d) * (1 - 1e-9);
        const size_t rank[2] = {deal_slowest(d), random_below(1, 0, turn, d->levels.ranks)};
        size_t count = 0;
        for (int redealt = 1; redealt >= 0; redealt--) {
            for (int r = 0; r < 2; r++)
                for (size_t g = rank[r];; g = d->group[g].up) {
                    d->group[g].redealt = redealt;
                    if (g == deal_root(d)) break;
                }
            for (size_t i = 0; redealt && i < d->samples; i++) {
                if (!d->group[d->place[i]].redealt || random_below(1, 1, turn * d->samples + i, 4) == 0) continue;
                d->order[count] = (uint32_t)i, d->room[count++] = d->place[i];
                deal_put(d, i, d->place[i], 0);
            }
        }
        for (size_t c = 0; c < count; c++) deal_put(d, d->order[c], deal_choose(d, d->order[c], T), 1);
        if (!(deal_longest(d) <= T)) {
            for (size_t c = 0; c < count; c++) deal_put(d, d->order[c], d->place[d->order[c]], 0);
            for (size_t c = 0; c < count; c++) deal_put(d, d->order[c], d->room[c], 1);
        }
        d->work += d->samples / 64;
    }
    deal_keep(d, INFINITY);
}

// Deals samples i and later in all ways that may take less than the best so far.
static void deal_search(Deal *d, size_t i) {
    if (i == d->samples) deal_keep(d, INFINITY);
    for (size_t g = 0; i < d->samples && g < d->levels.groups && d->work < 10 * DEAL_WORK; g++) {
        if (!deal_fits(d, i, d->group[g].level)) continue;
        deal_put(d, i, g, 1);
        if (deal_longest(d) < d->load) deal_search(d, i + 1);
        deal_put(d, i, g, 0);
    }
}

// ---- the result -----------------------------------------------------------------------------------------------------
// Packs the samples of every group into sequences by first-fit, the longest first.
static void deal_pack(Deal *d) {
    deal_restore(d);
    d->sequences = 0;
    for (size_t g = 0; g < d->levels.groups; g++) {
        DealGroup *group = &d->group[g];
        const DealLevel *level = &d->levels.level[group->level];
        group->begin = d->sequences;
        for (size_t i = 0, s; group->positions && i < d->samples; i++) {
            if (d->best[i] != g) continue;
            for (s = group->begin; s < d->sequences && d->room[s] < d->positions[i];) s++;
            if (s == d->sequences) d->room[d->sequences++] = (uint32_t)level->capacity;
            d->room[s] -= d->positions[i], d->place[i] = (uint32_t)s;
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
    double low = d->bound = deal_bound(d), high = 2 * low;
    d->load = INFINITY;
    if (!deal_all(d, low * 1.0001))
        while (high - low > .002 * low) {
            const double T = (low + high) / 2;
            *(deal_all(d, T) ? &high : &low) = T;
        }
    deal_restore(d), d->work = 0;
    deal_improve(d);
    if (d->samples <= 8 && d->levels.groups <= 15) deal_empty(d), d->work = 0, deal_search(d, 0);
    deal_pack(d);
}

#endif
