/*
The deal of a step (deal.h): which sequences of its samples this rank takes, on groups of how many ranks.

The samples are those that the step would have with any --sp. Their seconds come from a table of a document alone on
each level, made before the run: a sample takes as long as its documents.

Gradients are reduced in the last pass of a rank, so ranks may have different numbers of passes. Where every pass has
collectives of all ranks (--zero 2 and 3), all have the number of the busiest: others add passes over a token that does
not count, in groups of one. Without, a rank adds one if a rank of its last group has more passes: that one joins the
reductions there, so exchanges between them would wait forever.
*/
#ifndef LLMC_STEP_DEAL_H
#define LLMC_STEP_DEAL_H
#include "dataloader.h"
#include "deal.h"

#define DEAL_LENGTHS 96

// Seconds of a document by its positions, between the lengths on a line
typedef struct {
    DealLevels levels;
    int in_step; // all ranks have equally many passes
    size_t lengths;
    size_t length[DEAL_LENGTHS]; // positions, ascending from 1
    double seconds[DEAL_LENGTHS][DEAL_LEVELS];
} DealTable;

typedef struct {
    const DealTable *table; // NULL: steps are not dealt
    Deal deal;
    PackingItem *item, *spare; // [samples of a step]
    size_t passes;             // of a rank in the current step, with those that do not count
} StepDeal;

// A pass of a rank
typedef struct {
    size_t sp;       // ranks of its group
    size_t sequence; // of Deal.begin; Deal.sequences: a token that does not count
} DealtPass;

// What a log says of a deal
typedef struct {
    double load, mean, bound;   // s: of the slowest rank, of all on average, that no deal falls below; 0: no deal
    size_t groups[DEAL_LEVELS]; // of each level, that have sequences
} DealSummary;

static double deal_table_seconds(const DealTable *t, size_t positions, size_t level) {
    const size_t i = min_size(last_at_most(t->length, sizeof(size_t), t->lengths, positions), t->lengths - 2);
    const double share = ((double)positions - (double)t->length[i]) / (double)(t->length[i + 1] - t->length[i]);
    return t->seconds[i][level] + share * (t->seconds[i + 1][level] - t->seconds[i][level]);
}

// Allocates for steps of at most `samples`.
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

// Returns the first group of the rank's path, of level k.
static const DealGroup *step_deal_group(const StepDeal *s, size_t rank, size_t k) {
    const DealLevel *l = &s->table->levels.level[k];
    return &s->deal.group[l->first + rank / l->ranks];
}

// Counts the sequences of a rank.
static size_t step_deal_sequences(const StepDeal *s, size_t rank) {
    size_t sequences = 0;
    for (size_t k = 0; k < s->table->levels.levels; k++) sequences += step_deal_group(s, rank, k)->sequences;
    return sequences;
}

// Counts the passes of a rank where its last one alone has collectives of all ranks.
static size_t step_deal_passes(const StepDeal *s, size_t rank) {
    const DealLevels *l = &s->table->levels;
    const size_t own = step_deal_sequences(s, rank);
    size_t k = 0, more = own == 0;
    while (k + 1 < l->levels && !step_deal_group(s, rank, k)->sequences) k++;
    for (size_t place = 0; place < l->level[k].ranks; place++)
        more |= step_deal_sequences(s, rank - rank % l->level[k].ranks + place) > own;
    return own + more;
}

// Deals the samples of `count` micro-batches from a position on. Returns the passes of this rank.
static size_t step_deal_make(StepDeal *s, DataLoader *d, uint64_t position, size_t count, size_t rank) {
    const size_t levels = s->table->levels.levels;
    size_t samples = 0, most = 0;
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
    for (size_t r = 0; r < s->table->levels.ranks; r++) most = max_size(most, step_deal_sequences(s, r));
    return s->passes = s->table->in_step ? most : step_deal_passes(s, rank);
}

static DealSummary deal_summary(const Deal *d) {
    DealSummary s = {.load = d->load, .bound = d->bound};
    for (const DealGroup *g = d->group; g < d->group + d->levels.groups; g++) {
        s.mean += g->load * (double)d->levels.level[g->level].ranks / (double)d->levels.ranks;
        s.groups[g->level] += g->sequences > 0;
    }
    return s;
}

// Returns the i-th pass of a rank, those of its largest group first.
static DealtPass step_deal_pass(const StepDeal *s, size_t rank, size_t i) {
    DealtPass pass = {1, s->deal.sequences};
    for (size_t k = s->table->levels.levels; k-- > 0; i -= step_deal_group(s, rank, k)->sequences) {
        const DealGroup *g = step_deal_group(s, rank, k);
        if (i >= g->sequences) continue;
        pass.sp = s->table->levels.level[k].ranks, pass.sequence = g->begin + i;
        break;
    }
    return pass;
}

// Reads a sequence into `batch`, the longest sample last: then the parts of several ranks differ the least.
static void step_deal_read(const StepDeal *s, DataLoader *d, size_t sequence, Batch *batch) {
    const uint32_t *begin = s->deal.begin + sequence;
    batch->N = 0, batch->documents = 0;
    for (size_t i = begin[1]; i-- > begin[0];)
        documents_read_sample(d, s->item[s->deal.order[i]].sample, begin[1] - 1 - i, batch);
    batch_set_positions(batch);
    if (batch->document_weight) batch_count(batch);
}

#endif
