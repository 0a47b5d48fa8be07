/*
Packs the samples of a run (documents.h) into sequences, and bounds the largest sequence, for plans.

Packing counts positions. If documents share prefixes it may count rows, what is computed (tree.h): with a fixed number
of samples a step (--samples), which keeps every step's documents, or with --share-prefixes on.
*/
#ifndef LLMC_DOCUMENTS_PACK_H
#define LLMC_DOCUMENTS_PACK_H
#include "families.h"

// ---- bounds ---------------------------------------------------------------------------------------------------------
// Bounds shuffled sequences of any epoch: positions by the capacity or by a step's longest samples, documents by how
// many of the shortest fit.
static SequenceBound documents_bound_shuffled(const DataLoader *d) {
    const size_t together = d->packing.step ? d->packing.step : d->samples;
    SequenceBound bound = {0};
    size_t N = 0;
    PackingItem *item = (PackingItem *)checked_calloc(2 * d->segments, sizeof(PackingItem), "the lengths of documents");
    for (size_t i = 0; i < d->samples; i++) item[i].positions = packing_length(&d->packing, i);
    packing_sort(item, item + d->segments, d->samples);
    for (size_t i = 0; i < together; i++) bound.N += item[i].positions;
    bound.N = min_size(bound.N, d->packing.capacity);
    for (size_t i = 0; i < d->segments; i++) item[i].positions = d->segment[i].positions;
    packing_sort(item, item + d->segments, d->segments);
    bound.longest = item[0].positions;
    for (size_t i = d->segments; i-- > 0 && N + item[i].positions <= bound.N;) {
        N += item[i].positions;
        bound.documents++;
    }
    bound.documents = min_size(bound.documents, together * d->largest_sample);
    if (d->settings.deals && !d->packing.step) // a step that crosses the end of an epoch may have samples twice
        bound.documents = bound.N / max_size(item[d->segments - 1].positions, 1);
    free(item);
    return bound;
}

// A sample whose `value` is summed over a sequence, in which it takes `length` of the capacity
typedef struct {
    uint64_t value, length;
} BoundItem;

static int bound_by_ratio(const void *a, const void *b) { // greatest value / length first
    const BoundItem *x = (const BoundItem *)a, *y = (const BoundItem *)b;
    const uint64_t first = x->value * y->length, second = y->value * x->length;
    return (first < second) - (first > second);
}

static int bound_by_value(const void *a, const void *b) { // greatest first
    const BoundItem *x = (const BoundItem *)a, *y = (const BoundItem *)b;
    return (x->value < y->value) - (x->value > y->value);
}

// Bounds the sum of a sequence's values: by its capacity, as if samples could be cut, and by the `together` greatest.
static size_t bound_most(BoundItem *item, size_t samples, size_t capacity, size_t together) {
    uint64_t by_capacity = 0, by_count = 0, left = capacity;
    qsort(item, samples, sizeof(BoundItem), bound_by_ratio);
    for (size_t i = 0; i < samples && left; i++) {
        const uint64_t part = item[i].length < left ? item[i].length : left;
        by_capacity += item[i].value * part / item[i].length, left -= part;
    }
    qsort(item, samples, sizeof(BoundItem), bound_by_value);
    for (size_t i = 0; i < together; i++) by_count += item[i].value;
    return (size_t)(by_capacity < by_count ? by_capacity : by_count);
}

// As documents_bound_shuffled, for samples whose documents share prefixes.
static SequenceBound documents_bound_shared(const DataLoader *d) {
    const size_t n = d->samples, together = d->packing.step ? d->packing.step : n;
    SequenceBound bound = {0};
    size_t *const of[4] = {&bound.N, &bound.rows, &bound.forks, &bound.documents};
    BoundItem *item = (BoundItem *)checked_calloc(n, sizeof(BoundItem), "the lengths of samples");
    for (size_t k = 0; k < 4; k++) {
        for (size_t i = 0; i < n; i++) {
            const Sample *s = &d->sample[i];
            const uint64_t values[4] = {s->positions, s->rows, s->forks, s[1].first - s->first};
            item[i].value = values[k], item[i].length = packing_length(&d->packing, i);
        }
        *of[k] = bound_most(item, n, d->packing.capacity, together);
    }
    free(item);
    for (size_t i = 0; i < d->segments; i++) bound.longest = max_size(bound.longest, d->segment[i].positions);
    return bound;
}

// Bounds the sequences of data that is packed alike in every epoch.
static SequenceBound documents_bound_in_order(const DataLoader *d) {
    const EpochSequences *e = &d->epoch[0];
    SequenceBound bound = {0};
    for (size_t s = 0; s < e->sequences; s++) {
        SequenceBound sum = {0};
        for (size_t i = e->begin[s]; i < e->begin[s + 1]; i++) {
            size_t first, end = documents_sample(d, e->order[i], &first);
            const Sample *sample = d->shares && d->sample ? &d->sample[e->order[i]] : NULL;
            sum.N += sample ? sample->positions : packing_length(&d->packing, e->order[i]);
            sum.documents += end - first;
            if (sample) sum.rows += sample->rows, sum.forks += sample->forks;
        }
        bound.N = max_size(bound.N, sum.N), bound.documents = max_size(bound.documents, sum.documents);
        bound.rows = max_size(bound.rows, sum.rows), bound.forks = max_size(bound.forks, sum.forks);
    }
    for (size_t i = 0; i < d->segments; i++) bound.longest = max_size(bound.longest, d->segment[i].positions);
    return bound;
}

static SequenceBound documents_bound(const DataLoader *d) {
    const SequenceBound regular = {d->settings.B * d->settings.T, d->settings.B, d->settings.T, 0, 0};
    if (d->regular) return regular;
    SequenceBound bound = !d->packing.shuffle && !d->settings.deals ? documents_bound_in_order(d)
                          : d->shares && d->sample                  ? documents_bound_shared(d)
                                                                    : documents_bound_shuffled(d);
    if (d->shares == PREFIXES_OF_ALL) {
        if (!d->sample) bound.rows = bound.N;
        bound.forks = min_size(bound.forks + prefix_budget(bound.rows), bound.rows / PREFIX_LEAST);
        bound.forks = min_size(bound.forks, bound.documents - 1);
    }
    return bound;
}

// ---- packing --------------------------------------------------------------------------------------------------------
// Decides what documents share, and what packing counts.
static void documents_choose(DataLoader *d) {
    const Prefixes wanted = d->settings.prefixes;
    const int indexed = d->sample && !d->regular, groups = indexed && !d->common;
    size_t forks = 0;
    for (size_t i = 0; i < d->samples && indexed; i++)
        d->positions += d->sample[i].positions, d->rows += d->sample[i].rows, forks += d->sample[i].forks;
    for (size_t i = 0; i < d->segments && !d->sample; i++) d->positions += d->segment[i].positions;
    if (d->regular) d->positions = d->samples * d->sample->positions;
    if (!indexed) d->rows = d->positions;
    if (d->regular && wanted == PREFIXES_OF_ALL)
        note("--share-prefixes on: %s is one of llm.c's shards, whose documents begin anywhere in a text: each is "
             "computed alone",
             d->shard[0].header.path);
    if (groups)
        d->shares = forks ? PREFIXES_OF_PROMPTS : PREFIXES_NONE;
    else if (!d->regular && wanted == PREFIXES_OF_ALL)
        d->shares = wanted;
    d->packs_rows = d->common || (groups && d->shares && (d->settings.step || wanted == PREFIXES_OF_ALL));
}

// Returns the most positions, or rows, of a sequence.
static size_t documents_capacity(const DataLoader *d) {
    const size_t B = d->settings.B, T = d->settings.T, n = d->regular || d->common ? 1 : d->largest_sample;
    size_t rows = 0;
    if (T > INT32_MAX / (B * n))
        die_usage("--batch %zu x --seq-len %zu x %zu (documents of a sample): at most %d tokens of one sequence can be "
                  "indexed; lower --batch and raise --grad-accum",
                  B, T, n, INT32_MAX);
    for (size_t i = 0; d->packs_rows && i < d->samples; i++) rows = max_size(rows, d->sample[i].rows);
    return d->packs_rows && !d->common ? B * rows : B * T * n;
}

static void documents_pack(DataLoader *d) {
    const size_t B = d->settings.B;
    const int shuffle = d->settings.shuffle == SHUFFLE_AUTO ? !d->regular : d->settings.shuffle == SHUFFLE_ON;
    documents_choose(d);
    const uint32_t *length = d->packs_rows ? &d->sample[0].rows
                             : d->sample   ? &d->sample[0].positions
                                           : &d->segment[0].positions;
    const size_t stride = d->regular ? 0 : d->sample ? sizeof(Sample) : sizeof(Segment);
    const size_t capacity = documents_capacity(d);
    if (d->regular && d->settings.step % B)
        die_usage("--samples %zu: with llm.c's shards a step is whole micro-batches of --batch %zu; give a multiple",
                  d->settings.step, B);
    const size_t step = d->regular ? d->settings.step / B : d->settings.step;
    d->packing = packing_allocate(length, stride, d->samples, capacity, step, shuffle, d->settings.seed);
    d->epoch[0] = epoch_sequences_allocate(&d->packing);
    if (shuffle) d->epoch[1] = epoch_sequences_allocate(&d->packing);
    packing_epoch(&d->packing, &d->epoch[0], 0);
    d->first_epoch_sequences = d->epoch[0].sequences;
    d->bound = documents_bound(d);
    if (d->bound.documents < 2) d->shares = PREFIXES_NONE, d->bound.rows = d->bound.forks = 0;
    if (d->families_cut)
        note("%s%s: a sequence takes %zu tokens, so families of documents are cut at %zu places; raise --batch or "
             "--seq-len to compute fewer tokens",
             d->shard[0].header.path, others(d), capacity, d->families_cut);
    if (d->bound.N > INT32_MAX)
        die_usage("--share-prefixes: up to %zu tokens of a sequence share prefixes, at most %d can be indexed; lower "
                  "--batch",
                  d->bound.N, INT32_MAX);
    d->advantage = (double *)checked_calloc(d->largest_sample, sizeof(double), "the advantages of a group");
    if (d->shares == PREFIXES_OF_ALL)
        d->prefix = (PrefixText *)checked_calloc(d->bound.documents, sizeof(PrefixText), "the prefixes of documents");
}

#endif
