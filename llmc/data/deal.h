/*
Deals the samples of a step to groups of ranks, for --sp auto. Groups lie in a tree: all ranks are its root, a group's
parts are its children, single ranks the leaves. A rank computes the sequences of the groups on its path from the root
down, so that the ranks of a group begin together. It ends after the sum of their loads: seconds of samples, by a table
of the caller, and of sequences besides these. All ranks are to end early, as in FlexSP (arXiv 2412.01523), where a
rank has one group a step. Groups are aligned, so they stay within a node while they can.

1. deal_bound finds a time that no deal is faster than.
2. deal_all deals the samples, the longest first, to end within a time a little above the bound: each to the level of
   least seconds times ranks among those that end within it, there to the group that ends first.
3. deal_improve deals samples of the slowest rank and of another again, many times; deal_search tries all deals of few.
4. deal_pack packs the samples of each group into sequences, the longest first.

A deal depends on the samples and the table alone, so every rank makes the same one, and a resumed run, too.
Where all ranks go through every pass together (--zero 2 and 3), a step lasts the sum over passes of the slowest one.
The deal is the same: as near the bound with one pass a rank, up to 2.2 times it with more passes.
*/
#ifndef LLMC_DEAL_H
#define LLMC_DEAL_H
#include "llmc/base/random.h"
#include "llmc/base/utils.h"
#include <stddef.h>

#define DEAL_LEVELS 24
#define DEAL_WORK   150000 // groups whose paths deal_improve computes
#define DEAL_BEGINS 8      // a sample on several ranks that takes longer than so many begins of a sequence is not packed

// Groups of equally many ranks
typedef struct {
    size_t ranks;
    size_t capacity; // positions of a sequence whose plan fits; 0: none does
    double begin;    // s: of a sequence besides its samples
    double least;    // s: no sequence takes less: weights are gathered or loaded meanwhile
    size_t first;    // its groups in Deal.group
} DealLevel;

typedef struct {
    size_t ranks, levels, groups; // levels: from single ranks to all
    DealLevel level[DEAL_LEVELS];
} DealLevels;

// A group, or a joint: where a group has more than two parts, joints make the tree binary.
typedef struct {
    size_t level, up, part[2]; // in Deal.group; part[1] = 0: a single rank
    size_t positions, large;   // sums; large: samples that share no sequence
    double work, load;         // s: of its samples; with its sequences
    double longest;            // s: of the longest path from here down
    double least[DEAL_LEVELS]; // s: the same through each group of a level; of these the least
    int redealt;               // its samples are being dealt again
    size_t begin, sequences;   // results: its sequences, of Deal.begin
} DealGroup;

typedef struct {
    DealLevels levels;
    size_t samples, nodes; // nodes: groups and joints
    uint32_t *positions;   // [samples], longest first
    double *seconds;       // [samples,levels]
    DealGroup *group;      // [2 ranks] level by level, single ranks first; then joints
    uint32_t *order;       // results: [samples] sequence by sequence
    uint32_t *begin;       // [samples + 1] of each sequence in order
    size_t sequences;
    double load, bound;            // s: of the slowest rank; that no deal is below
    uint32_t *place, *best, *room; // [samples] the group of each now, in the best deal so far; scratch
    size_t work;                   // groups whose paths were computed
} Deal;

// Returns levels of 1, 2, 4 ... ranks that divide all, and of all.
static DealLevels deal_levels(size_t ranks) {
    DealLevels l = {.ranks = ranks};
    for (size_t S = 1; S == 1 || ranks % S == 0; S *= 2) l.level[l.levels++].ranks = S;
    if (l.level[l.levels - 1].ranks != ranks) l.level[l.levels++].ranks = ranks;
    for (size_t k = 0; k < l.levels; k++) l.level[k].first = l.groups, l.groups += ranks / l.level[k].ranks;
    return l;
}

static size_t deal_root(const Deal *d) { return d->levels.groups - 1; }

// Makes groups first ... first + count - 1 the parts of group or joint g, in halves.
static void deal_join(Deal *d, size_t g, size_t level, size_t first, size_t count) {
    d->group[g].level = level;
    for (size_t p = 0; p < 2; p++) {
        const size_t half = p ? count - count / 2 : count / 2, part = half > 1 ? d->nodes++ : first;
        d->group[g].part[p] = part, d->group[part].up = g;
        if (half > 1) deal_join(d, part, level, first, half);
        first += half;
    }
}

// Allocates for steps of at most `samples`.
static Deal deal_allocate(DealLevels levels, size_t samples) {
    const char *const what = "the deals of steps";
    Deal d = {.levels = levels};
    d.positions = (uint32_t *)checked_calloc(6 * samples + 1, sizeof(uint32_t), what);
    d.order = d.positions + samples, d.place = d.order + samples, d.best = d.place + samples;
    d.room = d.best + samples, d.begin = d.room + samples;
    d.seconds = (double *)checked_calloc(samples * levels.levels, sizeof(double), what);
    d.group = (DealGroup *)checked_calloc(2 * levels.ranks, sizeof(DealGroup), what);
    d.nodes = levels.groups;
    for (size_t k = 1; k < levels.levels; k++) {
        const DealLevel *l = &levels.level[k];
        const size_t parts = l->ranks / l[-1].ranks;
        for (size_t i = 0; i < levels.ranks / l->ranks; i++)
            deal_join(&d, l->first + i, k, l[-1].first + i * parts, parts);
    }
    return d;
}

static void deal_free(Deal *d) {
    free(d->positions), free(d->seconds), free(d->group);
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
// Returns whether no deal ends within T. On the path of a rank let W be the seconds of samples, u the sum of their
// shares of a sequence's capacity, c the number of sequences. W + begin c <= T, and c is at least
//   1. u    2. 1    3. f + (u - f) / m: f full sequences end within T, one more only if it is m full, m < 1.
// So W + weight u <= T - less. These are summed over ranks, with each sample at the level where that is least: the
// linear program's optimum. begin, rate: least of any sequence, and of the samples of any full one
static int deal_excludes(const Deal *d, double T, double begin, double rate) {
    const double f = floor(T / (rate + begin)), m = (T - begin * (f + 1)) / rate - f;
    const double weight[] = {begin, 0, begin / m}, less[] = {0, begin, begin * f * (1 - 1 / m)};
    for (int w = 0; w < (m > 0 && m < 1 ? 3 : 2); w++) {
        double left = (double)d->levels.ranks * (T - less[w]);
        for (size_t i = 0; i < d->samples; i++) {
            double least = INFINITY;
            for (size_t k = 0; k < d->levels.levels; k++) {
                const DealLevel *l = &d->levels.level[k];
                const double seconds = deal_seconds(d, i, k);
                if (!deal_fits(d, i, k) || l->begin + seconds > T) continue;
                least = fmin(least, (double)l->ranks * (seconds + weight[w] * d->positions[i] / (double)l->capacity));
            }
            if ((left -= least) < 0) return 1;
        }
    }
    return 0;
}

static double deal_bound(const Deal *d) {
    double low = 1e-9, high = INFINITY, begin = INFINITY, rate = INFINITY;
    for (size_t i = 0; i < d->samples; i++)
        for (size_t k = 0; k < d->levels.levels; k++) {
            const DealLevel *l = &d->levels.level[k];
            if (!deal_fits(d, i, k)) continue;
            begin = fmin(begin, l->begin);
            rate = fmin(rate, deal_seconds(d, i, k) * (double)l->capacity / d->positions[i]);
        }
    while (!(high - low <= 1e-5 * low)) {
        const double T = high < INFINITY ? (low + high) / 2 : 2 * low;
        *(deal_excludes(d, T, begin, rate) ? &low : &high) = T;
    }
    return low;
}

// ---- groups ---------------------------------------------------------------------------------------------------------
// Updates the paths through a group, also of those that it is a part of.
static void deal_update(Deal *d, size_t g) {
    for (DealGroup *group = NULL; group != &d->group[deal_root(d)]; g = group->up, d->work++) {
        group = &d->group[g];
        const DealGroup *a = &d->group[group->part[0]], *b = &d->group[group->part[1]];
        group->longest = group->load + (group->part[1] ? fmax(a->longest, b->longest) : 0);
        for (size_t k = 0; k < group->level; k++) group->least[k] = group->load + fmin(a->least[k], b->least[k]);
        group->least[group->level] = group->longest;
    }
}

// Returns the load of a group. It has as many sequences as full ones, where more than one and a 64th, so that packing
// needs no more; but no fewer than large samples.
static double deal_load(const DealLevel *l, double work, size_t positions, size_t large) {
    const size_t packed = positions > l->capacity ? positions + positions / 64 : positions;
    return positions ? work + l->begin * (double)max_size((packed + l->capacity - 1) / l->capacity, large) : 0;
}

// Puts sample i into group g, or takes it out.
static void deal_put(Deal *d, size_t i, size_t g, int in) {
    DealGroup *group = &d->group[g];
    const DealLevel *l = &d->levels.level[group->level];
    const size_t n = d->positions[i], large = (size_t)deal_large(d, i, group->level);
    group->positions = in ? group->positions + n : group->positions - n;
    group->large = in ? group->large + large : group->large - large;
    group->work = group->positions ? group->work + (in ? 1 : -1) * deal_seconds(d, i, group->level) : 0;
    group->load = deal_load(l, group->work, group->positions, group->large);
    d->place[i] = (uint32_t)g;
    deal_update(d, g);
}

// Returns the group of level k whose longest path is the least; k = levels: the rank that ends last.
static size_t deal_find(const Deal *d, size_t k) {
    const int last = k == d->levels.levels;
    size_t g = deal_root(d);
    while (last ? d->group[g].part[1] != 0 : g >= d->levels.groups || d->group[g].level > k) {
        const size_t *part = d->group[g].part;
        const DealGroup *a = &d->group[part[0]], *b = &d->group[part[1]];
        g = part[last ? b->longest > a->longest : b->least[k] < a->least[k]];
    }
    return g;
}

static double deal_longest(const Deal *d) { return d->group[deal_root(d)].longest; }

// Returns the group for sample i: of those that end within T the one of least work, else the one that ends first.
static size_t deal_choose(const Deal *d, size_t i, double T) {
    double least = INFINITY, end = INFINITY;
    size_t found = d->levels.groups;
    for (size_t k = 0; k < d->levels.levels; k++) {
        if (!deal_fits(d, i, k)) continue;
        const DealLevel *l = &d->levels.level[k];
        const size_t g = deal_find(d, k), n = d->positions[i], large = (size_t)deal_large(d, i, k);
        const DealGroup *group = &d->group[g];
        const double work = group->work + deal_seconds(d, i, k);
        const double added = deal_load(l, work, group->positions + n, group->large + large) - group->load;
        const double area = (double)l->ranks * added, ends = d->group[deal_root(d)].least[k] + added;
        if (ends <= T ? area >= least : least < INFINITY || ends >= end) continue;
        if (ends <= T) least = area;
        found = g, end = ends;
    }
    return found;
}

// ---- the search -----------------------------------------------------------------------------------------------------
// Keeps the current deal if it is the best so far. Returns the time that it takes.
static double deal_keep(Deal *d) {
    if (deal_longest(d) < d->load) d->load = deal_longest(d), memcpy(d->best, d->place, d->samples * sizeof(uint32_t));
    return deal_longest(d);
}

// Deals all samples to end within T; T = 0: as in the best deal. Returns the time that they take.
static double deal_all(Deal *d, double T) {
    for (size_t g = 0; g < d->nodes; g++)
        memset(&d->group[g].positions, 0, sizeof(DealGroup) - offsetof(DealGroup, positions));
    for (size_t i = 0; i < d->samples; i++) deal_put(d, i, T > 0 ? deal_choose(d, i, T) : d->best[i], 1);
    return deal_keep(d);
}

// Marks or unmarks the groups on the path of a rank.
static void deal_mark(Deal *d, size_t rank, int redealt) {
    for (size_t g = rank; d->group[g].redealt = redealt, g != deal_root(d);) g = d->group[g].up;
}

// Takes out most samples of the slowest rank and of another, and deals them again, the longest first. If not all end
// earlier, puts them back.
static void deal_improve(Deal *d) {
    const size_t end = min_size(DEAL_WORK, 1000 * d->samples);
    for (uint64_t turn = 0; d->work < end && deal_longest(d) > d->bound * 1.0001; turn++) {
        const double T = deal_longest(d) * (1 - 1e-9);
        const size_t slowest = deal_find(d, d->levels.levels), other = random_below(1, 0, turn, d->levels.ranks);
        size_t count = 0;
        deal_mark(d, slowest, 1), deal_mark(d, other, 1);
        for (size_t i = 0; i < d->samples; i++) {
            if (!d->group[d->place[i]].redealt || random_below(1, 1, turn * d->samples + i, 4) == 0) continue;
            d->order[count] = (uint32_t)i, d->room[count++] = d->place[i];
            deal_put(d, i, d->place[i], 0);
        }
        deal_mark(d, slowest, 0), deal_mark(d, other, 0);
        for (size_t c = 0; c < count; c++) deal_put(d, d->order[c], deal_choose(d, d->order[c], T), 1);
        const int better = deal_longest(d) <= T;
        for (size_t c = 0; !better && c < count; c++)
            deal_put(d, d->order[c], d->place[d->order[c]], 0), deal_put(d, d->order[c], d->room[c], 1);
        d->work += 1 + d->samples / 64;
    }
    deal_keep(d);
}

// Deals samples i and later in all ways that may take less than the best so far.
static void deal_search(Deal *d, size_t i) {
    if (i == d->samples) deal_keep(d);
    for (size_t g = 0; i < d->samples && g < d->levels.groups && d->work < 4 * DEAL_WORK; g++) {
        if (!deal_fits(d, i, d->group[g].level)) continue;
        deal_put(d, i, g, 1);
        if (deal_longest(d) < d->load) deal_search(d, i + 1);
        deal_put(d, i, g, 0);
    }
}

// ---- the result -----------------------------------------------------------------------------------------------------
// Packs the samples of every group into sequences by first-fit, the longest first.
static void deal_pack(Deal *d) {
    deal_all(d, 0);
    d->sequences = 0;
    memset(d->begin, 0, (d->samples + 1) * sizeof(uint32_t));
    for (size_t g = 0; g < d->levels.groups; g++) {
        DealGroup *group = &d->group[g];
        const DealLevel *l = &d->levels.level[group->level];
        group->begin = d->sequences;
        for (size_t i = 0; group->positions && i < d->samples; i++) {
            size_t s = group->begin;
            if (d->best[i] != g) continue;
            const int alone = deal_alone(d, i, group->level);
            if (alone) s = d->sequences;
            while (s < d->sequences && d->room[s] < d->positions[i]) s++;
            if (s == d->sequences) d->room[d->sequences++] = alone ? d->positions[i] : (uint32_t)l->capacity;
            d->room[s] -= d->positions[i], d->place[i] = (uint32_t)s, d->begin[s + 1]++;
        }
        group->sequences = d->sequences - group->begin;
        group->load = group->work + l->begin * (double)group->sequences;
        deal_update(d, g);
    }
    for (size_t s = 0; s < d->sequences; s++) d->begin[s + 1] += d->begin[s], d->room[s] = d->begin[s];
    for (size_t i = 0; i < d->samples; i++) d->order[d->room[d->place[i]]++] = (uint32_t)i;
    d->load = deal_longest(d);
}

// Deals d->samples samples, each of which fits a level. The caller has set their positions and seconds.
static void deal_make(Deal *d) {
    d->load = INFINITY, d->bound = deal_bound(d);
    for (double T = d->bound * 1.0001, more = 0.005; deal_all(d, T) > T && more < 0.2; more *= 2)
        T = d->bound * (1 + more);
    deal_all(d, 0), d->work = 0;
    deal_improve(d);
    if (d->samples <= 8 && d->levels.groups <= 15) {
        for (size_t i = 0; i < d->samples; i++) deal_put(d, i, d->place[i], 0);
        d->work = 0, deal_search(d, 0);
    }
    deal_pack(d);
}

#endif
