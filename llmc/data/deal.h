/*
Deals the samples of a step to groups of ranks, for --sp auto. Groups lie in a tree: all ranks are its root, a group's
parts are its children, single ranks the leaves. A rank computes the sequences of the groups on its path from the root
down, so that the ranks of a group begin together. It ends after the sum of their loads: seconds of samples, by a table
of the caller, plus fixed seconds per sequence. The aim is that the last rank ends early, as in FlexSP (arXiv
2412.01523), where a rank has one group per step. Groups are aligned, so they stay within a node while they can.

1. deal_bound finds a time below which no deal can end.
2. deal_all deals the samples, the longest first, to end within a time a little above the bound: each sample to the
   level with the least seconds times ranks that ends within this time, and there to the group that ends first.
3. deal_improve deals samples of the slowest rank and of another rank again, many times; deal_search tries all deals if
   there are few samples.
4. deal_pack packs the samples of each group into sequences, the longest first.

With --zero 2 and 3 all ranks go through every pass together, so there are turns: a rank has at most one sequence in a
turn, and a step lasts as long as the sum of its turns, each as long as its slowest rank. deal_turns fills turn after
turn with the longest remaining samples that end within a time T. deal_take_turns keeps the T of the shortest step.

A deal depends only on the samples and the table, so every rank makes the same deal, and so does a resumed run.
*/
#ifndef LLMC_DEAL_H
#define LLMC_DEAL_H
#include "llmc/base/random.h"
#include "llmc/base/utils.h"
#include <stddef.h>

#define DEAL_LEVELS 24
#define DEAL_WORK   150000 // limit on the groups whose paths deal_improve computes
#define DEAL_NONE   UINT32_MAX
#define DEAL_BEGINS 8 // in fixed costs of a sequence: on several ranks a longer sample is alone in its sequence

// A level: groups of equally many ranks
typedef struct {
    size_t ranks;
    size_t capacity; // positions of the longest sequence whose plan fits; 0: none fits
    double begin;    // s: fixed cost of a sequence, in addition to the samples' time
    double least;    // s: least time of a sequence, in which weights are gathered or loaded
    size_t first;    // index of the level's first group in Deal.group
} DealLevel;

typedef struct {
    size_t ranks, levels, groups; // number of levels: from single ranks up to all ranks
    int turns;                    // 1: all ranks begin every pass together (ZeRO 2, 3)
    DealLevel level[DEAL_LEVELS];
} DealLevels;

// Sums over the samples of a group
typedef struct {
    double work;         // s: time of all samples
    size_t positions;    // positions of the samples that may share a sequence
    size_t large, alone; // samples that fill more than half a sequence; samples that share no sequence
} DealSum;

typedef struct {
    size_t level, up, part, parts; // up: group that contains this group; part: index in Deal.group of its first part
    DealSum sum;
    double load;               // s: time of the group's sequences
    double longest;            // s: time of the longest path from this group down to a rank
    double least[DEAL_LEVELS]; // s: [level] least time of the longest path through a group of that level
} DealGroup;

typedef struct {
    DealLevels levels;
    size_t samples;
    uint32_t *positions; // [samples], longest first
    double *seconds;     // [samples,levels]
    DealGroup *group;    // [groups], level by level, single ranks first
    uint32_t *order;     // results: [samples] samples, sequence by sequence
    uint32_t *begin;     // [samples + 1] first sample of each sequence; a rank computes sequences in this order
    uint32_t *to;        // [samples] group of each sequence
    uint32_t *turn;      // [samples] turn of each sample
    size_t sequences;
    double load, bound;            // s: time of the slowest rank, or of all turns; lower bound of all deals
    uint32_t *place, *best, *room; // [samples] group of each sample now; in the best deal so far; scratch
    size_t work;                   // number of groups whose paths were computed
} Deal;

// Returns levels of 1, 2, 4 ... ranks that divide all ranks, and of all ranks.
static DealLevels deal_levels(size_t ranks) {
    DealLevels l = {.ranks = ranks};
    for (size_t S = 1; S == 1 || ranks % S == 0; S *= 2) l.level[l.levels++].ranks = S;
    if (l.level[l.levels - 1].ranks != ranks) l.level[l.levels++].ranks = ranks;
    for (size_t k = 0; k < l.levels; k++) l.level[k].first = l.groups, l.groups += ranks / l.level[k].ranks;
    return l;
}

static size_t deal_root(const Deal *d) { return d->levels.groups - 1; }

static int deal_has(const Deal *d, size_t group, size_t rank) {
    const DealLevel *l = &d->levels.level[d->group[group].level];
    return group == l->first + rank / l->ranks;
}

// Allocates for steps of at most `samples` samples.
static Deal deal_allocate(DealLevels levels, size_t samples) {
    const char *const what = "the deals of steps";
    Deal d = {.levels = levels};
    d.positions = (uint32_t *)checked_calloc(8 * samples + 1, sizeof(uint32_t), what);
    d.order = d.positions + samples, d.place = d.order + samples, d.best = d.place + samples;
    d.room = d.best + samples, d.to = d.room + samples, d.turn = d.to + samples, d.begin = d.turn + samples;
    d.seconds = (double *)checked_calloc(samples * levels.levels, sizeof(double), what);
    d.group = (DealGroup *)checked_calloc(levels.groups, sizeof(DealGroup), what);
    for (const DealLevel *l = levels.level + 1; l < levels.level + levels.levels; l++)
        for (size_t parts = l->ranks / l[-1].ranks, i = 0; i < levels.ranks / l[-1].ranks; i++) {
            DealGroup *group = &d.group[l->first + i / parts];
            d.group[l[-1].first + i].up = l->first + i / parts;
            if (i % parts == 0)
                group->level = (size_t)(l - levels.level), group->parts = parts, group->part = l[-1].first + i;
        }
    return d;
}

static void deal_free(Deal *d) {
    free(d->positions), free(d->seconds), free(d->group);
    memset(d, 0, sizeof(*d));
}

static double deal_seconds(const Deal *d, size_t i, size_t k) { return d->seconds[i * d->levels.levels + k]; }
static int deal_fits(const Deal *d, size_t i, size_t k) { return d->positions[i] <= d->levels.level[k].capacity; }

// Returns the seconds of `sequences` sequences on a level, whose samples take `work` seconds.
static double deal_sequence(const DealLevel *l, size_t sequences, double work) {
    return fmax(l->least * (double)sequences, l->begin * (double)sequences + work);
}

// Tells whether a sample is alone in its sequence on a level. On several ranks, packing a long sample gives the ranks
// unequal shares of the query-key pairs. In turns a rank has only one sequence, so samples are packed.
static int deal_alone(const DealLevels *levels, size_t k, double seconds) {
    const DealLevel *l = &levels->level[k];
    return l->ranks > 1 && !levels->turns && seconds > DEAL_BEGINS * fmax(l->begin, l->least);
}

// Adds sample i to the sums of a group of level k, or with in = 0 takes the sample out.
static DealSum deal_add(const Deal *d, DealSum sum, size_t i, size_t k, int in) {
    const DealLevel *l = &d->levels.level[k];
    const size_t one = in ? 1 : SIZE_MAX, n = d->positions[i];
    const double seconds = deal_seconds(d, i, k);
    const int alone = deal_alone(&d->levels, k, seconds);
    sum.alone += alone ? one : 0, sum.large += !alone && 2 * n > l->capacity ? one : 0;
    sum.positions += alone ? 0 : one * n;
    sum.work = sum.positions || sum.alone ? sum.work + (in ? seconds : -seconds) : 0;
    return sum;
}

// Returns the load of a group's samples. If they exceed one sequence, counts as many full sequences as they and a 64th
// more would fill, so that packing needs no more; but at least one per large sample. INFINITY: several sequences in one
// turn
static double deal_load(const Deal *d, DealSum sum, size_t k) {
    const DealLevel *l = &d->levels.level[k];
    const size_t packed = sum.positions > l->capacity ? sum.positions + sum.positions / 64 : sum.positions;
    const size_t sequences = sum.alone + max_size((packed + l->capacity - 1) / max_size(l->capacity, 1), sum.large);
    return d->levels.turns && sequences > 1 ? INFINITY : deal_sequence(l, sequences, sum.work);
}

// ---- the bound ------------------------------------------------------------------------------------------------------
// Returns whether no deal ends within T. On the path of a rank let W be the seconds of samples, u the sum of their
// shares of a sequence's capacity, c the number of sequences. W + begin c <= T, and c is at least
//     1. u    2. 1    3. f + (u - f) / m: f full sequences end within T, one more only if it is m full, m < 1.
// So W + weight u <= T - less; and 4. u times the least time of a sequence <= T. These inequalities are summed over
// ranks, with each sample at the level where its term is least: the linear program's optimum. begin: least fixed cost
// of a sequence; rate: least seconds of samples that fill a sequence
static int deal_excludes(const Deal *d, double T, double begin, double rate) {
    const double f = floor(T / (rate + begin)), m = (T - begin * (f + 1)) / rate - f;
    const double weight[] = {begin, 0, 0, begin / m}, less[] = {0, begin, 0, begin * f * (1 - 1 / m)};
    for (int w = 0; w < (m > 0 && m < 1 ? 4 : 3); w++) {
        double left = (double)d->levels.ranks * (T - less[w]);
        for (size_t i = 0; i < d->samples; i++) {
            double least = INFINITY;
            for (size_t k = 0; k < d->levels.levels; k++) {
                const DealLevel *l = &d->levels.level[k];
                const double seconds = deal_seconds(d, i, k), share = d->positions[i] / (double)l->capacity;
                if (!deal_fits(d, i, k) || deal_sequence(l, 1, seconds) > T) continue;
                least = fmin(least, (double)l->ranks * (w == 2 ? l->least * share : seconds + weight[w] * share));
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
// Updates the paths through a group and through the groups that contain it.
static void deal_update(Deal *d, size_t g) {
    const int turns = d->levels.turns; // with turns only one group on a path has samples
    for (DealGroup *group = NULL; group != &d->group[deal_root(d)]; g = group->up, d->work += 1 + group->parts / 2) {
        group = &d->group[g];
        const DealGroup *part = &d->group[group->part];
        double below = 0;
        for (size_t p = 0; p < group->parts; p++) below = fmax(below, part[p].longest);
        for (size_t k = 0; k < group->level; k++) {
            double least = INFINITY;
            for (size_t p = 0; p < group->parts; p++) least = part[p].least[k] < least ? part[p].least[k] : least;
            group->least[k] = turns && group->load > 0 ? INFINITY : group->load + least;
        }
        group->longest = group->load + below;
        group->least[group->level] = turns && below > 0 ? INFINITY : group->longest;
    }
}

// Puts sample i into group g, or with in = 0 takes the sample out.
static void deal_put(Deal *d, size_t i, size_t g, int in) {
    DealGroup *group = &d->group[g];
    group->sum = deal_add(d, group->sum, i, group->level, in);
    group->load = deal_load(d, group->sum, group->level);
    d->place[i] = (uint32_t)g;
    deal_update(d, g);
}

static void deal_clear(Deal *d) {
    for (size_t g = 0; g < d->levels.groups; g++)
        memset(&d->group[g].sum, 0, sizeof(DealGroup) - offsetof(DealGroup, sum));
}

// Returns the group of level k whose longest path ends first; k = levels: the rank that ends last
static size_t deal_find(const Deal *d, size_t k) {
    const int last = k == d->levels.levels;
    size_t g = deal_root(d);
    while (last ? d->group[g].parts > 0 : d->group[g].level > k) {
        const DealGroup *group = &d->group[g];
        g = group->part;
        for (size_t p = g + 1; p < group->part + group->parts; p++)
            if (last ? d->group[p].longest > d->group[g].longest : d->group[p].least[k] < d->group[g].least[k]) g = p;
    }
    return g;
}

static double deal_longest(const Deal *d) { return d->group[deal_root(d)].longest; }

// Returns the group for sample i: among groups that end within T the group with the least work, else the group that
// ends first. DEAL_NONE: no group has room in this turn
static size_t deal_choose(const Deal *d, size_t i, double T) {
    const DealGroup *root = &d->group[deal_root(d)];
    double least = INFINITY, end = INFINITY;
    size_t found = DEAL_NONE;
    for (size_t k = 0; k < d->levels.levels; k++) {
        const DealLevel *l = &d->levels.level[k];
        const double load = root->least[k] + (root->least[k] > l->least ? deal_seconds(d, i, k) : 0);
        if (!deal_fits(d, i, k) || (d->levels.turns && load > T && root->longest > 0)) continue;
        const size_t g = deal_find(d, k);
        const double added = deal_load(d, deal_add(d, d->group[g].sum, i, k, 1), k) - d->group[g].load;
        const double area = (double)l->ranks * added, ends = root->least[k] + added;
        if (d->levels.turns && (ends == INFINITY || (ends > T && root->longest > 0))) continue;
        if (ends <= T ? area >= least : least < INFINITY || ends >= end) continue;
        if (ends <= T) least = area;
        found = g, end = ends;
    }
    return found;
}

// ---- the search -----------------------------------------------------------------------------------------------------
// Keeps the current deal if it is the best so far. Returns the time of the current deal.
static double deal_keep(Deal *d) {
    if (deal_longest(d) < d->load) d->load = deal_longest(d), memcpy(d->best, d->place, d->samples * sizeof(uint32_t));
    return deal_longest(d);
}

// Deals all samples to end within T; T = 0: repeats the best deal. Returns the deal's time.
static double deal_all(Deal *d, double T) {
    deal_clear(d);
    for (size_t i = 0; i < d->samples; i++) deal_put(d, i, T > 0 ? deal_choose(d, i, T) : d->best[i], 1);
    return deal_keep(d);
}

// Takes out most samples of the slowest rank and of another rank. Deals them again, the longest first. If the deal does
// not end earlier, puts them back.
static void deal_improve(Deal *d) {
    const size_t end = min_size(DEAL_WORK, 1000 * d->samples);
    for (uint64_t turn = 0; d->work < end && deal_longest(d) > d->bound * 1.0001; turn++) {
        const double T = deal_longest(d) * (1 - 1e-9);
        const size_t slowest = deal_find(d, d->levels.levels), other = random_below(1, 0, turn, d->levels.ranks);
        size_t count = 0;
        for (size_t i = 0; i < d->samples; i++) {
            const int theirs = deal_has(d, d->place[i], slowest) || deal_has(d, d->place[i], other);
            if (!theirs || random_below(1, 1, turn * d->samples + i, 4) == 0) continue;
            d->order[count] = (uint32_t)i, d->room[count++] = d->place[i];
            deal_put(d, i, d->place[i], 0);
        }
        for (size_t c = 0; c < count; c++) deal_put(d, d->order[c], deal_choose(d, d->order[c], T), 1);
        const int better = deal_longest(d) <= T;
        for (size_t c = 0; !better && c < count; c++)
            deal_put(d, d->order[c], d->place[d->order[c]], 0), deal_put(d, d->order[c], d->room[c], 1);
        d->work += 1 + d->samples / 64;
    }
    deal_keep(d);
}

// Deals samples i and later in all ways that may take less time than the best deal so far.
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
// Packs a turn's samples of every group into sequences by first-fit, the longest sample first, in the largest groups
// first.
static void deal_pack(Deal *d, size_t turn) {
    for (size_t g = d->levels.groups; g-- > 0;) {
        const size_t level = d->group[g].level, first = d->sequences;
        for (size_t i = 0; d->group[g].load > 0 && i < d->samples; i++) {
            if (d->place[i] != g || d->turn[i] != turn) continue;
            const int alone = deal_alone(&d->levels, level, deal_seconds(d, i, level));
            const size_t n = d->positions[i];
            size_t s = alone ? d->sequences : first;
            while (s < d->sequences && d->room[s] < n) s++;
            if (s == d->sequences) {
                d->to[s] = (uint32_t)g, d->room[s] = (uint32_t)(alone ? n : d->levels.level[level].capacity);
                d->begin[++d->sequences] = 0;
            }
            d->room[s] -= (uint32_t)n, d->best[i] = (uint32_t)s, d->begin[s + 1]++;
        }
    }
}

// Returns the seconds of sequence s.
static double deal_sequence_seconds(const Deal *d, size_t s) {
    const size_t k = d->group[d->to[s]].level;
    double work = 0;
    for (size_t i = d->begin[s]; i < d->begin[s + 1]; i++) work += deal_seconds(d, d->order[i], k);
    return deal_sequence(&d->levels.level[k], 1, work);
}

// Lists the samples of all sequences. Returns the seconds of the slowest rank.
static double deal_list(Deal *d) {
    for (size_t s = 0; s < d->sequences; s++) d->begin[s + 1] += d->begin[s], d->room[s] = d->begin[s];
    for (size_t i = 0; i < d->samples; i++) d->order[d->room[d->best[i]]++] = (uint32_t)i;
    deal_clear(d);
    for (size_t s = 0; s < d->sequences; s++)
        d->group[d->to[s]].load += deal_sequence_seconds(d, s), deal_update(d, d->to[s]);
    return deal_longest(d);
}

// Fills turns one after another with the samples that end within T (at least with the first remaining sample). Returns
// the seconds of all turns.
static double deal_turns(Deal *d, double T, int pack) {
    double seconds = 0;
    size_t left = d->samples;
    for (size_t i = 0; i < d->samples; i++) d->turn[i] = DEAL_NONE;
    for (uint32_t turn = 0; left; turn++, d->work += d->samples + d->levels.groups) {
        deal_clear(d);
        for (size_t i = 0; i < d->samples; i++) {
            const size_t g = d->turn[i] == DEAL_NONE ? deal_choose(d, i, T) : DEAL_NONE;
            if (g != DEAL_NONE) deal_put(d, i, g, 1), d->turn[i] = turn, left--;
        }
        seconds += deal_longest(d);
        if (pack) deal_pack(d, turn);
    }
    return seconds;
}

// Tries times of a turn a little above the bound and its fractions bound / i. Keeps the turns of the shortest step.
static void deal_take_turns(Deal *d) {
    static const double more[] = {1.01, 1.03, 1.06, 1.1, 1.2, 1.5};
    const size_t tries = sizeof(more) / sizeof(*more), most = tries * min_size(d->samples + 1, 64);
    double best = 0;
    for (size_t i = 0; i < most && d->work < 2 * DEAL_WORK && d->load > 1.01 * d->bound; i++) {
        const double T = d->bound / (double)(1 + i / tries) * more[i % tries], seconds = deal_turns(d, T, 0);
        if (seconds < d->load) d->load = seconds, best = T;
    }
    deal_turns(d, best, 1);
}

// Deals d->samples samples; each must fit some level. The caller has set their positions and seconds.
static void deal_make(Deal *d) {
    d->load = INFINITY, d->bound = deal_bound(d), d->work = d->sequences = d->begin[0] = 0;
    if (d->levels.turns) {
        deal_take_turns(d), deal_list(d);
        return;
    }
    for (double T = d->bound * 1.0001, more = 0.005; deal_all(d, T) > T && more < 0.2; more *= 2)
        T = d->bound * (1 + more);
    deal_all(d, 0), d->work = 0;
    deal_improve(d);
    if (d->samples <= 8 && d->levels.groups <= 15) deal_clear(d), d->work = 0, deal_search(d, 0);
    deal_all(d, 0);
    memset(d->turn, 0, d->samples * sizeof(uint32_t));
    deal_pack(d, 0);
    d->load = deal_list(d);
}

#endif
