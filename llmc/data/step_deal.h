/*
The deal of a step (deal.h): which sequences of its samples this rank takes, on groups of how many ranks.

The step has the same samples as with any --sp. Their seconds come from a table, made before the run, of the time that a
single document takes on each level: a sample takes as long as its documents together.

Gradients are reduced in the last pass of a rank, so ranks may have different numbers of passes. With turns all ranks
have equally many passes: a rank without a sequence in a turn computes a token that does not count, in a group of one
rank. Without turns, a rank adds a pass of one token if another rank of its last group has more passes. That other rank
joins the reductions in its own last pass, so exchanges between the two would otherwise wait forever.
*/
#ifndef LLMC_STEP_DEAL_H
#define LLMC_STEP_DEAL_H
#include "dataloader.h"
#include "deal.h"

#define DEAL_LENGTHS 96

// Seconds of a document by number of positions, interpolated linearly between the lengths
typedef struct {
    DealLevels levels;
    size_t lengths;
    size_t length[DEAL_LENGTHS]; // positions, ascending from 1
    double seconds[DEAL_LENGTHS][DEAL_LEVELS];
} DealTable;

typedef struct {
    const DealTable *table; // NULL: steps are not dealt
    Deal deal;
    PackingItem *item, *spare; // [samples of a step]
    size_t passes;             // passes of this rank in the current step, including passes that do not count
} StepDeal;

// A pass of a rank
typedef struct {
    size_t sp;       // ranks of the group
    size_t sequence; // index in Deal.begin; Deal.sequences: a token that does not count
} DealtPass;

// Figures of a deal for the log
typedef struct {
    double load, mean, bound;   // s: time of the slowest rank; mean over all ranks; lower bound of any deal; 0: no deal
    size_t groups[DEAL_LEVELS]; // number of sequences on each level
} DealSummary;

static double deal_table_seconds(const DealTable *t, size_t positions, size_t level) {
    const size_t i = min_size(last_at_most(t->length, sizeof(size_t), t->lengths, positions), t->lengths - 2);
    const double share = ((double)positions - (double)t->length[i]) / (double)(t->length[i + 1] - t->length[i]);
    return t->seconds[i][level] + share * (t->seconds[i + 1][level] - t->seconds[i][level]);
}

// Allocates for steps of at most `samples` samples.
static void step_deal_allocate(StepDeal *s, const DealTable *table, size_t samples) {
    s->table = table;
    s->deal = deal_allocate(table->levels, samples);
    s->item = (PackingItem *)checked_calloc(2 * samples, sizeof(PackingItem), "the deals of steps");
    s->spare = s->item + samples;
}

static void step_deal_free(StepDeal *s) {
    if (s->table) deal_free(&s->deal);
    free(s->item);
    memset(s, 0, sizeof(*s));
}

// Returns the i-th pass of a rank: the rank's i-th sequence, or with turns the rank's sequence in turn i.
static DealtPass step_deal_pass(const StepDeal *s, size_t rank, size_t i) {
    const Deal *d = &s->deal;
    DealtPass pass = {1, 0};
    for (; pass.sequence < d->sequences; pass.sequence++) {
        const size_t group = d->to[pass.sequence], turn = d->turn[d->order[d->begin[pass.sequence]]];
        if (!deal_has(d, group, rank) || (d->levels.turns ? turn != i : i-- > 0)) continue;
        pass.sp = d->levels.level[d->group[group].level].ranks;
        break;
    }
    return pass;
}

// Counts a rank's passes, except passes that do not count. *last: number of ranks in the group of the last pass counted
static size_t step_deal_sequences(const StepDeal *s, size_t rank, size_t *last) {
    DealtPass pass;
    size_t i = 0;
    for (*last = 1; pass = step_deal_pass(s, rank, i), pass.sequence < s->deal.sequences; i++) *last = pass.sp;
    return i;
}

// Counts all passes of a rank.
static size_t step_deal_passes(const StepDeal *s, size_t rank) {
    size_t last, ignored;
    if (s->deal.levels.turns) return s->deal.turn[s->deal.order[s->deal.samples - 1]] + 1;
    const size_t own = step_deal_sequences(s, rank, &last);
    size_t more = own == 0;
    for (size_t other = rank - rank % last; other < rank - rank % last + last; other++)
        more |= step_deal_sequences(s, other, &ignored) > own;
    return own + more;
}

// Deals the samples of `count` micro-batches from a position on. Returns the number of passes of this rank.
static size_t step_deal_make(StepDeal *s, DataLoader *d, uint64_t position, size_t count, size_t rank) {
    const size_t levels = s->table->levels.levels;
    size_t samples = 0;
    for (size_t b = 0; b < count; b++) {
        const EpochSequences *e;
        size_t begin, end;
        if (b) position = dataloader_after(d, position, 1);
        for (end = dataloader_samples(d, position, &e, &begin); begin < end; begin++, samples++) {
            s->item[samples].sample = e->order[begin];
            s->item[samples].positions = packing_length(&d->packing, e->order[begin]);
        }
    }
    packing_sort(s->item, s->spare, samples);
    s->deal.samples = samples;
    memset(s->deal.seconds, 0, samples * levels * sizeof(double));
    for (size_t i = 0; i < samples; i++) {
        size_t first, last = documents_sample(d, s->item[i].sample, &first);
        s->deal.positions[i] = s->item[i].positions;
        for (; first < last; first++)
            for (size_t k = 0; k < levels; k++)
                s->deal.seconds[i * levels + k] +=
                    deal_table_seconds(s->table, documents_segment(d, first).positions, k);
    }
    deal_make(&s->deal);
    return s->passes = step_deal_passes(s, rank);
}

static DealSummary deal_summary(const Deal *d) {
    DealSummary s = {.load = d->load, .bound = d->bound};
    for (size_t i = 0; i < d->sequences; i++) {
        const size_t level = d->group[d->to[i]].level;
        s.mean += deal_sequence_seconds(d, i) * (double)d->levels.level[level].ranks / (double)d->levels.ranks;
        s.groups[level]++;
    }
    return s;
}

// Reads a sequence into `batch`, with the longest sample last. In this order the work of the ranks that share the
// sequence differs least.
static void step_deal_read(const StepDeal *s, DataLoader *d, size_t sequence, Batch *batch) {
    const uint32_t *begin = s->deal.begin + sequence;
    batch->N = 0, batch->documents = 0;
    for (size_t i = begin[1]; i-- > begin[0];)
        documents_read_sample(d, s->item[s->deal.order[i]].sample, begin[1] - 1 - i, batch);
    batch_set_positions(batch);
    if (batch->document_weight) batch_count(batch);
}

#endif
