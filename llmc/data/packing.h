/*
Packs samples (segments of documents, or all documents of a pair or group) into sequences of at most `capacity`
positions, without padding and without cutting a sample.

    in a new order every epoch   samples are permuted by (seed, epoch) and divided into windows. A window is packed by
                                 first-fit decreasing: longest sample first (equal lengths as permuted), each into the
                                 first sequence with room. Then the sequences of all windows are permuted. A large
                                 window wastes little, at most about half a sequence; many windows vary between epochs
                                 which samples share a sequence.
    in the order of the file     next-fit: a sequence ends when the next sample does not fit.
    by steps                     a step has a fixed number of samples, in either order; it is a window with contiguous
                                 sequences. The last step of an epoch has the remaining samples.

A tree over the sequences finds the first with room, so a window of n samples takes O(n log n). An epoch's sequences
depend only on lengths, seed and epoch. If each sample fills a sequence, samples are only permuted. All memory is
allocated at the beginning.
*/
#ifndef LLMC_PACKING_H
#define LLMC_PACKING_H
#include "llmc/base/random.h"
#include "llmc/base/utils.h"

#define RANDOM_STREAM_SAMPLES   0x706965636573ull   // stream of random.h for the order of samples ("pieces")
#define RANDOM_STREAM_SEQUENCES 0x73747265616d73ull // stream of random.h for the order of sequences ("streams")
#define PACKING_WINDOW          4096                // least samples of a window
#define PACKING_SEQUENCES       256                 // least sequences of a window
#define PACKING_NO_EPOCH        UINT64_MAX

// The sequences of one epoch. The i-th has the samples order[begin[s] .. begin[s + 1]), s = permutation[i].
typedef struct {
    uint64_t epoch;        // number of the epoch, or PACKING_NO_EPOCH
    uint32_t *order;       // [samples] samples, sequence by sequence
    uint32_t *begin;       // [most sequences + 1] begin of each sequence in order
    uint32_t *permutation; // [most sequences] order in which the sequences are used
    size_t sequences;
} EpochSequences;

typedef struct {
    uint32_t positions, sample;
} PackingItem;

typedef struct {
    const uint32_t *length; // where the first sample's positions are stored; not owned
    size_t stride;          // bytes to the next sample's positions; 0: each sample fills a sequence
    size_t samples, capacity;
    size_t step;      // samples of a step; 0: not packed by steps
    size_t positions; // sum of positions over all samples
    size_t windows, largest_window, max_sequences;
    int shuffle;
    uint64_t seed;
    PackingItem *item, *spare; // [largest_window]
    uint32_t *bin;             // [largest_window] sequence of the window to which the item goes
    uint32_t *room; // [2 * leaves] a tree: leaf `leaves + b`: room of sequence b; node: larger of its children
} Packing;

static uint32_t packing_length(const Packing *p, size_t sample) {
    return *(const uint32_t *)(const void *)((const char *)p->length + sample * p->stride);
}

// ---- order ----------------------------------------------------------------------------------------------------------
static void identity_permutation(uint32_t *out, size_t count) {
    for (size_t i = 0; i < count; i++) out[i] = (uint32_t)i;
}

// Makes a random permutation. purpose: a RANDOM_STREAM_... constant
static void random_permutation(uint32_t *out, size_t count, uint64_t seed, uint64_t purpose, uint64_t epoch) {
    const uint64_t stream = random_mix(purpose) + epoch;
    identity_permutation(out, count);
    for (size_t i = count; i > 1; i--) {
        size_t j = (size_t)random_below(seed, stream, i, i);
        uint32_t moved = out[i - 1];
        out[i - 1] = out[j], out[j] = moved;
    }
}

// Sorts longest first; the sort is stable: a radix sort by the bytes of the length, lowest first. Both arrays have
// `count` items.
static void packing_sort(PackingItem *item, PackingItem *spare, size_t count) {
    for (unsigned shift = 0; shift < 32; shift += 8) { // four passes: the result is back in `item`
        size_t begin[256] = {0}, sum = 0;
        PackingItem *swapped = item;
        for (size_t i = 0; i < count; i++) begin[item[i].positions >> shift & 0xff]++;
        for (size_t i = 256; i-- > 0;) {
            size_t size = begin[i];
            begin[i] = sum;
            sum += size;
        }
        for (size_t i = 0; i < count; i++) spare[begin[item[i].positions >> shift & 0xff]++] = item[i];
        item = spare, spare = swapped;
    }
}

// ---- first-fit ------------------------------------------------------------------------------------------------------
// Returns the first sequence with room for `positions` positions, and reduces the sequence's room.
static size_t packing_place(uint32_t *room, size_t leaves, uint32_t positions) {
    size_t node = 1;
    while (node < leaves) {
        node *= 2;
        if (room[node] < positions) node++;
    }
    size_t found = node - leaves;
    room[node] -= positions;
    for (node /= 2; node > 0; node /= 2) room[node] = (uint32_t)max_size(room[2 * node], room[2 * node + 1]);
    return found;
}

// Sets bin[i] of items that packing_sort has sorted. Returns the number of sequences. Empty sequences have the whole
// capacity, so the tree opens them in order.
static size_t packing_first_fit(Packing *p, size_t count) {
    size_t leaves = 1, sequences = 0;
    while (leaves < count) leaves *= 2;
    for (size_t i = 1; i < 2 * leaves; i++) p->room[i] = (uint32_t)p->capacity;
    for (size_t i = 0; i < count; i++) {
        p->bin[i] = (uint32_t)packing_place(p->room, leaves, p->item[i].positions);
        sequences = max_size(sequences, p->bin[i] + 1);
    }
    return sequences;
}

// Reorders order[first .. first + count), so that each sequence's samples are contiguous.
static void packing_window(Packing *p, EpochSequences *e, size_t first, size_t count) {
    uint32_t *end = e->begin + e->sequences; // holds the end of each sequence at first, then the beginning
    for (size_t i = 0; i < count; i++) {
        p->item[i].sample = e->order[first + i];
        p->item[i].positions = packing_length(p, e->order[first + i]);
    }
    packing_sort(p->item, p->spare, count);
    size_t sequences = packing_first_fit(p, count);
    if (e->sequences + sequences > p->max_sequences)
        die("internal: more sequences than two halves of the data make; please report it");
    for (size_t i = 0; i <= sequences; i++) end[i] = 0;
    for (size_t i = 0; i < count; i++) end[p->bin[i]]++;
    for (size_t i = 0; i < sequences; i++) end[i] += (uint32_t)(i ? end[i - 1] : first);
    for (size_t i = count; i-- > 0;) e->order[--end[p->bin[i]]] = p->item[i].sample;
    e->sequences += sequences;
}

static void packing_next_fit(const Packing *p, EpochSequences *e) {
    size_t used = p->capacity;
    for (size_t i = 0; i < p->samples; i++) {
        if (used + packing_length(p, i) > p->capacity) {
            e->begin[e->sequences++] = (uint32_t)i;
            used = 0;
        }
        used += packing_length(p, i);
    }
}

// Computes the sequences of an epoch. Without shuffling all epochs are epoch 0.
static void packing_epoch(Packing *p, EpochSequences *e, uint64_t epoch) {
    const size_t window = p->step ? p->step : p->samples / p->windows, larger = p->step ? 0 : p->samples % p->windows;
    e->epoch = epoch, e->sequences = 0;
    identity_permutation(e->order, p->samples);
    if (p->step || (p->shuffle && p->stride)) {
        if (p->shuffle) random_permutation(e->order, p->samples, p->seed, RANDOM_STREAM_SAMPLES, epoch);
        for (size_t w = 0; w < p->windows; w++) {
            const size_t first = w * window + min_size(w, larger);
            packing_window(p, e, first, min_size(window + (w < larger), p->samples - first));
        }
    } else {
        packing_next_fit(p, e);
    }
    identity_permutation(e->permutation, e->sequences);
    if (p->shuffle && !p->step)
        random_permutation(e->permutation, e->sequences, p->seed, RANDOM_STREAM_SEQUENCES, epoch);
    e->begin[e->sequences] = (uint32_t)p->samples;
}

// ---- memory ---------------------------------------------------------------------------------------------------------
// Allocates memory for windows of `samples` samples.
static void packing_allocate_window(Packing *p, size_t samples) {
    size_t leaves = 1;
    while (leaves < samples) leaves *= 2;
    p->item = (PackingItem *)checked_calloc(samples, sizeof(PackingItem), "packing");
    p->spare = (PackingItem *)checked_calloc(samples, sizeof(PackingItem), "packing");
    p->bin = (uint32_t *)checked_calloc(samples, sizeof(uint32_t), "packing");
    p->room = (uint32_t *)checked_calloc(2 * leaves, sizeof(uint32_t), "packing");
}

// Prepares packing. samples: from 1 to 2^32 - 1, none longer than the capacity. step: 0: not by steps
static Packing packing_allocate(const uint32_t *length, size_t stride, size_t samples, size_t capacity, size_t step,
                                int shuffle, uint64_t seed) {
    Packing p = {0};
    p.length = length, p.stride = stride, p.samples = samples, p.step = min_size(step, samples);
    p.capacity = capacity, p.shuffle = shuffle, p.seed = seed;
    for (size_t i = 0; i < samples; i++) p.positions += packing_length(&p, i);
    const double samples_a_sequence = (double)capacity * (double)samples / (double)p.positions;
    const double window = fmax(PACKING_SEQUENCES * samples_a_sequence, PACKING_WINDOW);
    p.windows = step ? (samples + p.step - 1) / p.step : max_size((size_t)((double)samples / window), 1);
    p.largest_window = step ? p.step : (samples + p.windows - 1) / p.windows;
    // at most one sequence of a window is half empty; two consecutive next-fit sequences hold more than one capacity
    p.max_sequences = min_size(2 * p.positions / capacity + p.windows + 1, samples);
    if (step || (shuffle && stride)) packing_allocate_window(&p, p.largest_window);
    return p;
}

static void packing_free(Packing *p) {
    free(p->item), free(p->spare), free(p->bin), free(p->room);
    memset(p, 0, sizeof(*p));
}

static EpochSequences epoch_sequences_allocate(const Packing *p) {
    EpochSequences e;
    e.epoch = PACKING_NO_EPOCH, e.sequences = 0;
    e.order = (uint32_t *)checked_calloc(p->samples, sizeof(uint32_t), "the order of the data");
    e.begin = (uint32_t *)checked_calloc(p->max_sequences + 1, sizeof(uint32_t), "the sequences of an epoch");
    e.permutation = (uint32_t *)checked_calloc(p->max_sequences, sizeof(uint32_t), "the sequences of an epoch");
    return e;
}

static void epoch_sequences_free(EpochSequences *e) {
    free(e->order), free(e->begin), free(e->permutation);
    memset(e, 0, sizeof(*e));
}

// Returns (positions of all samples) / (`sequences` x capacity).
static double packing_fill(const Packing *p, size_t sequences) {
    return (double)p->positions / ((double)sequences * (double)p->capacity);
}

#endif
