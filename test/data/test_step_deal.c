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
static Deal steps_of(size_t ranks, size_t samples, size_t capacity, double begin, double least, int turns) {
    DealLevels levels = deal_levels(ranks);
    levels.turns = turns;
    for (size_t k = 0; k < levels.levels; k++) {
        levels.level[k].capacity = capacity * levels.level[k].ranks;
        levels.level[k].begin = begin, levels.level[k].least = least;
    }
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
static void check_sequences(const Deal *d) {
    for (size_t s = 0; s < d->sequences; s++) {
        size_t positions = 0;
        if (d->begin[s] >= d->begin[s + 1]) test_fail("sequence %zu is empty", s);
        for (size_t i = d->begin[s]; i < d->begin[s + 1]; i++) positions += d->positions[d->order[i]];
        if (positions > d->levels.level[d->group[d->to[s]].level].capacity) test_fail("%zu positions", positions);
    }
}

// Goes through the passes of all ranks: a group's ranks reach each of its sequences together, and once. Returns the
// seconds of the slowest rank, or of all turns.
static double check_passes(const Deal *deal) {
    DealTable table = {.levels = deal->levels};
    StepDeal s = {.table = &table, .deal = *deal};
    unsigned char *seen = (unsigned char *)case_memory(deal->sequences);
    double *turn = case_doubles(deal->sequences), slowest = 0;
    memset(seen, 0, deal->sequences), memset(turn, 0, deal->sequences * sizeof(*turn));
    for (size_t rank = 0; rank < deal->levels.ranks; rank++) {
        double own = 0;
        size_t i = 0, passes = step_deal_passes(&s, rank);
        for (; i < passes; i++) {
            const DealtPass pass = step_deal_pass(&s, rank, i), first = step_deal_pass(&s, rank - rank % pass.sp, i);
            if (pass.sequence == deal->sequences && (pass.sp != 1 || (i + 1 < passes && !deal->levels.turns)))
                test_fail("rank %zu, pass %zu of %zu: no sequence", rank, i, passes);
            if (pass.sequence == deal->sequences) continue;
            const double seconds = deal_sequence_seconds(deal, pass.sequence);
            own += seconds, turn[i] = fmax(turn[i], seconds);
            if (rank % pass.sp == 0) seen[pass.sequence]++;
            if (first.sp != pass.sp || first.sequence != pass.sequence)
                test_fail("rank %zu, pass %zu: another sequence than the first rank of its group", rank, i);
        }
        if (step_deal_pass(&s, rank, passes).sequence != deal->sequences) test_fail("rank %zu: one more pass", rank);
        slowest = fmax(slowest, own);
    }
    for (size_t i = 0; i < deal->sequences; i++)
        if (seen[i] != 1) test_fail("sequence %zu is computed %d times", i, seen[i]);
    if (!deal->levels.turns) return slowest;
    slowest = 0;
    for (size_t i = 0; i < deal->sequences; i++) slowest += turn[i];
    return slowest;
}

static void check_deal(Deal *d) {
    uint32_t *seen = (uint32_t *)case_memory(2 * d->samples * sizeof(uint32_t)), *order = seen + d->samples;
    memset(seen, 0, d->samples * sizeof(uint32_t));
    assert_int_equal(d->begin[d->sequences], d->samples);
    for (size_t i = 0; i < d->samples; i++)
        if (d->order[i] >= d->samples || seen[d->order[i]]++) test_fail("sample %u is not dealt once", d->order[i]);
    check_sequences(d);
    const double seconds = check_passes(d);
    if (fabs(seconds - d->load) > 1e-9 * seconds) test_fail("load %.12g, expected %.12g", d->load, seconds);
    if (d->bound > seconds * (1 + 1e-9)) test_fail("bound %.12g, load %.12g", d->bound, seconds);
    memcpy(order, d->order, d->samples * sizeof(uint32_t));
    deal_make(d);
    if (fabs(seconds - d->load) > 1e-9 * seconds || memcmp(order, d->order, d->samples * sizeof(uint32_t)))
        test_fail("dealt otherwise again");
}

// ---- all deals of few samples ---------------------------------------------------------------------------------------
#define FEW 8

typedef struct {
    const Deal *d;
    double best;                  // s: of the best deal
    double work[FEW];             // s: of each sequence so far
    size_t group[FEW], turn[FEW]; // of each sequence so far
    size_t room[FEW];             // of each sequence so far
    size_t sequences, sample;
} AllDeals;

// Returns the seconds of the slowest rank so far, or of all turns; INFINITY: a rank has two sequences in a turn.
static double all_seconds(const AllDeals *a) {
    const DealLevels *l = &a->d->levels;
    double path[FEW] = {0}, turn[FEW] = {0}, sum = 0;
    unsigned busy[FEW] = {0};
    for (size_t s = 0; s < a->sequences; s++) {
        const DealLevel *level = &l->level[a->d->group[a->group[s]].level];
        const double seconds = deal_sequence(level, 1, a->work[s]);
        turn[a->turn[s]] = fmax(turn[a->turn[s]], seconds);
        for (size_t r = (a->group[s] - level->first) * level->ranks, end = r + level->ranks; r < end; r++) {
            if (l->turns && busy[a->turn[s]] >> r & 1) return INFINITY;
            busy[a->turn[s]] |= 1u << r, path[r] += seconds;
        }
    }
    for (size_t i = 0; i < FEW; i++) sum = l->turns ? sum + turn[i] : fmax(sum, path[i]);
    return sum;
}

// Puts the next sample into each sequence so far that has room, and into a new one of each group, in each turn.
static void try_all(AllDeals *a) {
    const Deal *d = a->d;
    const size_t i = a->sample, n = d->positions[i], sequences = a->sequences;
    size_t turns = 0;
    if (all_seconds(a) >= a->best) return;
    if (i == d->samples) {
        a->best = all_seconds(a);
        return;
    }
    a->sample++;
    for (size_t s = 0; s < sequences; s++) turns = max_size(turns, d->levels.turns ? a->turn[s] + 1 : 0);
    for (size_t s = 0; s < sequences + (turns + 1) * d->levels.groups; s++) {
        const size_t at = min_size(s, sequences), g = s < sequences ? a->group[s] : (s - sequences) % d->levels.groups;
        const size_t k = d->group[g].level;
        const int alone = deal_alone(&d->levels, k, deal_seconds(d, i, k));
        if (s >= sequences) {
            a->room[at] = d->levels.level[k].capacity, a->group[at] = g, a->work[at] = 0;
            a->turn[at] = (s - sequences) / d->levels.groups;
        }
        if (a->room[at] < n || (alone && s < sequences)) continue;
        const size_t room = a->room[at];
        const double work = a->work[at];
        a->sequences = max_size(sequences, at + 1), a->room[at] = alone ? 0 : room - n;
        a->work[at] += deal_seconds(d, i, k);
        try_all(a);
        a->sequences = sequences, a->room[at] = room, a->work[at] = work;
    }
    a->sample--;
}

static void few_samples(int turns, double most, double mean) {
    static const struct { size_t ranks, samples; } cases[] = {{2, 6}, {4, 5}, {8, 4}, {3, 5}, {6, 5}};
    double worst = 0, sum = 0;
    for (size_t round = 0; round < 500; round++) {
        const size_t ranks = cases[round % 5].ranks,
                     samples = 1 + test_random_below(cases[round % 5].samples - (turns != 0));
        const double begin = 0.05 + 0.1 * test_uniform(), least = round % 3 ? 0 : begin + 0.3 * test_uniform();
        SCOPED(deal_free)
        Deal d = steps_of(ranks, samples, (size_t)8192 << test_random_below(4), begin, least, turns);
        deal_lengths(&d, 4900, 1.3, SIZE_MAX);
        AllDeals all = {.d = &d, .best = d.load * (1 + 1e-9)};
        try_all(&all);
        test_case("round %zu: %zu samples on %zu ranks: %.6g s, bound %.6g, the best %.6g", round, samples, ranks,
                  d.load, d.bound, all.best);
        if (d.load > most * all.best) test_fail("more than %g times the best", most);
        if (d.bound > all.best * (1 + 1e-9)) test_fail("the bound is above the best");
        worst = fmax(worst, d.load / all.best), sum += d.load / all.best;
        check_deal(&d);
    }
    if (sum > 500 * mean) test_fail("on average %g times the best", sum / 500);
    testing.worst = (worst - 1) / (most - 1);
}

TEST(few_samples_are_dealt_as_well_as_can_be) { few_samples(0, 1.03, 1.001); }
TEST(few_samples_take_turns) { few_samples(1, 1.5, 1.01); }

// Rank 0 computes nothing in the first turn, where rank 1 has a sequence; both share that of the second.
TEST(a_rank_may_wait_in_a_turn) {
    DealTable table = {.levels = deal_levels(2)};
    table.levels.turns = 1;
    StepDeal s = {.table = &table, .deal = deal_allocate(table.levels, 2)};
    Deal *d = &s.deal;
    d->samples = d->sequences = 2;
    for (uint32_t i = 0; i < 2; i++) d->to[i] = i + 1, d->turn[i] = d->order[i] = i, d->begin[i + 1] = i + 1;
    for (size_t rank = 0; rank < 2; rank++) {
        assert_int_equal(step_deal_passes(&s, rank), 2);
        assert_int_equal(step_deal_pass(&s, rank, 0).sequence, rank ? 0 : 2);
        assert_int_equal(step_deal_pass(&s, rank, 0).sp, 1);
        assert_int_equal(step_deal_pass(&s, rank, 1).sequence, 1);
        assert_int_equal(step_deal_pass(&s, rank, 1).sp, 2);
    }
    deal_free(d);
}

// ---- many samples ---------------------------------------------------------------------------------------------------
TEST(long_tailed_lengths_end_near_the_bound) {
    static const struct {
        double median, sigma;
        size_t most;
    } lengths[] = {{1200, 1.2, 32768}, {800, 1.4, 131072}, {400, 1.6, 393216}};
    for (size_t i = 0; i < 6 * COUNT_OF(lengths); i++) {
        const int turns = i % 2;
        SCOPED(deal_free) Deal d = steps_of(64, 1024, 32768, 0.08, turns ? 0.2 : 0, turns);
        deal_lengths(&d, lengths[i / 6].median, lengths[i / 6].sigma, lengths[i / 6].most);
        test_case("lengths %zu, turns %d: %.6g s, bound %.6g", i / 6, turns, d.load, d.bound);
        if (d.load > (turns ? 1.2 : 1.05) * d.bound) test_fail("too far above the bound");
        testing.worst = fmax(testing.worst, (d.load / d.bound - 1) / (turns ? 0.2 : 0.05));
        if (i % 6 < 2) check_deal(&d);
    }
}

// Steps with equal and unequal lengths, with room for one or several samples a sequence, some only on all ranks.
TEST(any_step_is_dealt) {
    static const size_t ranks[] = {1, 2, 3, 7, 12, 64, 1023, 1024}, samples[] = {1, 2, 9, 300};
    for (size_t i = 0; i < COUNT_OF(ranks) * COUNT_OF(samples); i++) {
        const size_t P = ranks[i / 4], n = samples[i % 4], capacity = 16 + test_random_below(2000);
        const double sigma = i % 3 ? 1.5 : 0;
        SCOPED(deal_free) Deal d = steps_of(P, n, capacity, i % 5 ? 0.05 : 0, i % 4 ? 0 : 0.1, i % 3 == 1);
        for (size_t k = 0; i % 2 && k + 1 < d.levels.levels; k++) d.levels.level[k].capacity = i % 7 ? 0 : 16;
        test_case("%zu ranks, %zu samples, capacity %zu, sigma %g", P, n, capacity, sigma);
        deal_lengths(&d, (double)capacity * 0.6, sigma, SIZE_MAX);
        check_deal(&d);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
