// Deals of samples to groups of ranks, and the passes of each rank: small cases against all deals, long-tailed lengths
// against the bound, invariants of any deal.
#include "test/base/child.h"
#include "llmc/data/step_deal.h"

// ---- steps ----------------------------------------------------------------------------------------------------------
// Seconds of n tokens of a model of 8 billion parameters on a GPU, and of a group's traffic of keys and values.
static double seconds_of(double n, double ranks) {
    const double traffic = ranks > 1 ? n * 36 * 4096 * 3 / (ranks > 8 ? 50e9 : 450e9) : 0;
    return (n * 1e-4 + n * n * 1.1e-9) / ranks * (1 + 0.01 * ranks / (ranks + 1)) + traffic;
}

// Makes steps of as many samples on so many ranks. A single rank's sequence has as many positions as `capacity`.
static Deal steps_of(size_t ranks, size_t samples, size_t capacity, double begin) {
    DealLevels levels = deal_levels(ranks);
    for (size_t k = 0; k < levels.levels; k++)
        levels.level[k].capacity = capacity * levels.level[k].ranks, levels.level[k].begin = begin;
    Deal d = deal_allocate(levels, samples);
    d.samples = samples;
    return d;
}

// Fills a step with lengths of a lognormal distribution, or (sigma = 0) equal ones; deals it.
static void deal_lengths(Deal *d, double median, double sigma, size_t most) {
    const size_t levels = d->levels.levels, largest = min_size(most, d->levels.level[levels - 1].capacity);
    for (size_t i = 0; i < d->samples; i++) {
        const uint32_t n = (uint32_t)fmin(fmax(median * exp(sigma * test_normal()), 16), (double)largest);
        size_t j = i;
        for (; j && d->positions[j - 1] < n; j--) d->positions[j] = d->positions[j - 1];
        d->positions[j] = n;
    }
    for (size_t i = 0; i < d->samples; i++)
        for (size_t k = 0; k < levels; k++)
            d->seconds[i * levels + k] = seconds_of(d->positions[i], (double)d->levels.level[k].ranks);
    deal_make(d);
}

// ---- invariants of any deal -----------------------------------------------------------------------------------------
// Computes a rank's load from the result alone; checks its sequences.
static double load_of(const Deal *d, size_t rank) {
    double load = 0;
    for (size_t k = 0; k < d->levels.levels; k++) {
        const DealLevel *l = &d->levels.level[k];
        const DealGroup *g = &d->group[l->first + rank / l->ranks];
        for (size_t s = g->begin; s < g->begin + g->sequences; s++) {
            size_t positions = 0;
            if (d->begin[s] >= d->begin[s + 1]) test_fail("sequence %zu is empty", s);
            for (size_t i = d->begin[s]; i < d->begin[s + 1]; i++) {
                positions += d->positions[d->order[i]];
                load += deal_seconds(d, d->order[i], k);
            }
            if (positions > l->capacity) test_fail("%zu positions of %zu", positions, l->capacity);
            load += l->begin;
        }
    }
    return load;
}

static void check_passes(const Deal *deal, int in_step) {
    DealTable table = {.levels = deal->levels, .in_step = in_step};
    StepDeal s = {.table = &table, .deal = *deal};
    unsigned char *seen = (unsigned char *)case_memory(deal->sequences);
    memset(seen, 0, deal->sequences);
    for (size_t rank = 0; rank < deal->levels.ranks; rank++) {
        const size_t passes = step_deal_sequences(&s, rank);
        for (size_t i = 0; i < passes; i++) {
            const DealtPass pass = step_deal_pass(&s, rank, i), first = step_deal_pass(&s, rank - rank % pass.sp, i);
            if (pass.sequence >= deal->sequences) test_fail("rank %zu, pass %zu: no sequence", rank, i);
            if (rank % pass.sp == 0) seen[pass.sequence]++;
            if (first.sp != pass.sp || first.sequence != pass.sequence)
                test_fail("rank %zu, pass %zu: another sequence than the first rank of its group", rank, i);
        }
        if (step_deal_pass(&s, rank, passes).sequence != deal->sequences) test_fail("rank %zu: one more pass", rank);
    }
    for (size_t i = 0; i < deal->sequences; i++)
        if (seen[i] != 1) test_fail("sequence %zu is computed %d times", i, seen[i]);
}

static void check_deal(Deal *d) {
    double slowest = 0;
    uint32_t *seen = (uint32_t *)case_memory(2 * d->samples * sizeof(uint32_t)), *order = seen + d->samples;
    memset(seen, 0, d->samples * sizeof(uint32_t));
    assert_int_equal(d->begin[d->sequences], d->samples);
    for (size_t i = 0; i < d->samples; i++)
        if (d->order[i] >= d->samples || seen[d->order[i]]++) test_fail("sample %u is not dealt once", d->order[i]);
    for (size_t rank = 0; rank < d->levels.ranks; rank++) slowest = fmax(slowest, load_of(d, rank));
    if (fabs(slowest - d->load) > 1e-9 * slowest) test_fail("load %.12g, expected %.12g", d->load, slowest);
    if (d->bound > slowest) test_fail("bound %.12g, load %.12g", d->bound, slowest);
    check_passes(d, 0);
    memcpy(order, d->order, d->samples * sizeof(uint32_t));
    slowest = d->load, deal_make(d);
    if (d->load != slowest || memcmp(order, d->order, d->samples * sizeof(uint32_t)))
        test_fail("dealt otherwise again");
}

// ---- all deals of few samples ---------------------------------------------------------------------------------------
#define FEW 8

typedef struct {
    const Deal *d;
    double best, path[FEW]; // s: of the best deal; of each rank's groups so far
    size_t group[FEW];      // of each sequence so far
    size_t room[FEW];       // of each sequence so far
    size_t sequences, sample;
} AllDeals;

static void add_seconds(AllDeals *a, size_t g, double seconds) {
    const DealLevel *l = &a->d->levels.level[a->d->group[g].level];
    for (size_t r = (g - l->first) * l->ranks, end = r + l->ranks; r < end; r++) a->path[r] += seconds;
}

// Puts the next sample into each sequence so far that has room, and into a new one of each group.
static void try_all(AllDeals *a) {
    const Deal *d = a->d;
    const size_t i = a->sample, n = d->positions[i], sequences = a->sequences;
    double longest = 0;
    for (size_t r = 0; r < d->levels.ranks; r++) longest = fmax(longest, a->path[r]);
    if (longest >= a->best) return;
    if (i == d->samples) {
        a->best = longest;
        return;
    }
    a->sample++;
    for (size_t s = 0; s < sequences + d->levels.groups; s++) {
        const size_t at = min_size(s, sequences), g = s < sequences ? a->group[s] : s - sequences,
                     k = d->group[g].level;
        const double seconds = deal_seconds(d, i, k) + (s < sequences ? 0 : d->levels.level[k].begin);
        double path[FEW];
        if (s >= sequences) a->room[at] = d->levels.level[k].capacity, a->group[at] = g;
        if (a->room[at] < n) continue;
        memcpy(path, a->path, sizeof(path));
        a->sequences = max_size(sequences, at + 1), a->room[at] -= n;
        add_seconds(a, g, seconds);
        try_all(a);
        a->sequences = sequences, a->room[at] += n;
        memcpy(a->path, path, sizeof(path));
    }
    a->sample--;
}

TEST(few_samples_are_dealt_as_well_as_can_be) {
    static const struct { size_t ranks, samples; } cases[] = {{2, 6}, {4, 5}, {8, 4}, {3, 5}, {6, 5}};
    for (size_t round = 0; round < 500; round++) {
        const size_t ranks = cases[round % 5].ranks, samples = 1 + test_random_below(cases[round % 5].samples);
        SCOPED(deal_free)
        Deal d = steps_of(ranks, samples, (size_t)8192 << test_random_below(4), 0.05 + 0.1 * test_uniform());
        deal_lengths(&d, 4900, 1.3, SIZE_MAX);
        AllDeals all = {.d = &d, .best = d.load * (1 + 1e-9)};
        try_all(&all);
        test_case("round %zu: %zu samples on %zu ranks: %.6g s, bound %.6g, the best %.6g", round, samples, ranks,
                  d.load, d.bound, all.best);
        if (d.load > 1.03 * all.best) test_fail("more than 3 %% above the best");
        if (d.bound > all.best * (1 + 1e-9)) test_fail("the bound is above the best");
        check_deal(&d);
    }
}

// ---- many samples ---------------------------------------------------------------------------------------------------
TEST(long_tailed_lengths_end_near_the_bound) {
    static const struct {
        double median, sigma;
        size_t most;
    } lengths[] = {{1200, 1.2, 32768}, {800, 1.4, 131072}, {400, 1.6, 393216}};
    SCOPED(deal_free) Deal d = steps_of(64, 1024, 32768, 0.08);
    for (size_t i = 0; i < 3 * COUNT_OF(lengths); i++) {
        deal_lengths(&d, lengths[i / 3].median, lengths[i / 3].sigma, lengths[i / 3].most);
        test_case("lengths %zu: %.6g s, bound %.6g", i / 3, d.load, d.bound);
        if (d.load > 1.05 * d.bound) test_fail("more than 5 %% above the bound");
        if (i % 3 == 0) check_deal(&d);
    }
}

// Steps with equal and unequal lengths, with room for one or several samples a sequence, some only on all ranks.
TEST(any_step_is_dealt) {
    static const size_t ranks[] = {1, 2, 3, 7, 12, 64, 1023, 1024}, samples[] = {1, 2, 9, 300};
    for (size_t i = 0; i < COUNT_OF(ranks) * COUNT_OF(samples); i++) {
        const size_t P = ranks[i / 4], n = samples[i % 4], capacity = 16 + test_random_below(2000);
        const double sigma = i % 3 ? 1.5 : 0;
        SCOPED(deal_free) Deal d = steps_of(P, n, capacity, i % 5 ? 0.05 : 0);
        for (size_t k = 0; i % 2 && k + 1 < d.levels.levels; k++) d.levels.level[k].capacity = i % 7 ? 0 : 16;
        test_case("%zu ranks, %zu samples, capacity %zu, sigma %g", P, n, capacity, sigma);
        deal_lengths(&d, (double)capacity * 0.6, sigma, SIZE_MAX);
        check_deal(&d);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
