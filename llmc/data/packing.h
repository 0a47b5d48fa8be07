/*
Packing: units (pieces of documents, or all documents of a pair or group) into streams of at most `capacity` positions,
without padding and without cutting a unit.

    in a new order every epoch   units are permuted by (seed, epoch) and taken in windows; within a window first-fit decreasing:
                                 longest first (equal lengths as permuted), each into the first stream that has room. Then the
                                 streams of all windows are permuted. A window is large enough for what it leaves unfilled,
                                 about half a stream, not to matter; there are many where there are many units, so that epochs
                                 differ in what meets in a stream.
    in the order of the file     next-fit: a stream ends where the next unit does not fit.

The first stream with room is found in a tree over the streams, so a window of n units takes O(n log n). An epoch's
streams follow from lengths, seed and epoch alone. Everything is allocated at the beginning, for any epoch.
*/
#ifndef LLMC_PACKING_H
#define LLMC_PACKING_H
#include "llmc/base/random.h"
#include "llmc/base/utils.h"

#define RANDOM_STREAM_PIECES  0x706965636573ull   // of random.h, the order of the units ("pieces"), by epoch
#define RANDOM_STREAM_STREAMS 0x73747265616d73ull // and of the streams ("streams")
#define PACKING_WINDOW        4096                // units of a window, at least
#define PACKING_STREAMS       256                 // and streams of its
#define PACKING_NO_EPOCH      UINT64_MAX

// The streams of one epoch: the i-th to come is units order[begin[s] .. begin[s + 1]), s = stream[i].
typedef struct {
    uint64_t epoch;   // or PACKING_NO_EPOCH
    uint32_t *order;  // [units]
    uint32_t *begin;  // [most streams + 1]
    uint32_t *stream; // [most streams]
    size_t streams;
} EpochSequences;

typedef struct {
    uint32_t positions, unit;
} PackingItem;

typedef struct {
    const uint32_t *length; // positions of the first unit, not owned; of the next, `stride` bytes further
    size_t stride, units, capacity;
    uint64_t positions; // of all units
    size_t windows, largest_window, max_sequences;
    int shuffle;
    uint64_t seed;
    PackingItem *item, *spare; // [largest_window]
    uint32_t *bin;             // [largest_window] which stream of the window an item is in
    uint32_t *room;            // [2 * leaves], a tree: leaf `leaves + b` is stream b's room, above them the most of two
    size_t leaves;
} Packing;

static uint32_t packing_length(const Packing *p, size_t unit) {
    return *(const uint32_t *)(const void *)((const char *)p->length + unit * p->stride);
}

// ---- order ----------------------------------------------------------------------------------------------------------
static void random_permutation(uint32_t *out, size_t count, uint64_t seed, uint64_t stream) {
    for (size_t i = 0; i < count; i++) out[i] = (uint32_t)i;
    for (size_t i = count; i > 1; i--) {
        size_t j = (size_t)random_below(seed, stream, i, i);
        uint32_t moved = out[i - 1];
        out[i - 1] = out[j], out[j] = moved;
    }
}

static uint64_t packing_random_stream(uint64_t purpose, uint64_t epoch) { return random_mix(purpose) + epoch; }

// Longest first, equal ones in the order they had: by bytes of the length, the lowest first. Both arrays have `count`
// items.
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
// The first stream with room for `positions`; it loses as much.
static size_t packing_place(uint32_t *room, size_t leaves, uint32_t positions) {
    size_t node = 1;
    while (node < leaves) {
        node *= 2;
        if (room[node] < positions) node++;
    }
    size_t found = node - leaves;
    room[node] -= positions;
    for (node /= 2; node > 0; node /= 2)
        room[node] = room[2 * node] > room[2 * node + 1] ? room[2 * node] : room[2 * node + 1];
    return found;
}

// bin[i] of items sorted by packing_sort; returns the number of streams. What holds nothing yet has the whole capacity,
// so the tree opens streams one after another by itself.
static size_t packing_first_fit(Packing *p, size_t count) {
    size_t leaves = 1, streams = 0;
    while (leaves < count) leaves *= 2;
    for (size_t i = 1; i < 2 * leaves; i++) p->room[i] = (uint32_t)p->capacity;
    for (size_t i = 0; i < count; i++) {
        p->bin[i] = (uint32_t)packing_place(p->room, leaves, p->item[i].positions);
        streams = max_size(streams, p->bin[i] + 1);
    }
    return streams;
}

// order[first .. first + count) becomes the units of one stream after another.
static void packing_window(Packing *p, EpochSequences *e, size_t first, size_t count) {
    uint32_t *end = e->begin + e->streams; // first the end of each stream, then its beginning
    for (size_t i = 0; i < count; i++) {
        p->item[i].unit = e->order[first + i];
        p->item[i].positions = packing_length(p, e->order[first + i]);
    }
    packing_sort(p->item, p->spare, count);
    size_t streams = packing_first_fit(p, count);
    if (e->streams + streams > p->max_sequences) die("internal: more streams than two halves of the data make");
    for (size_t i = 0; i <= streams; i++) end[i] = 0;
    for (size_t i = 0; i < count; i++) end[p->bin[i]]++;
    for (size_t i = 0; i < streams; i++) end[i] += (uint32_t)(i ? end[i - 1] : first);
    for (size_t i = count; i-- > 0;) e->order[--end[p->bin[i]]] = p->item[i].unit;
    e->streams += streams;
}

static void packing_next_fit(const Packing *p, EpochSequences *e) {
    size_t used = p->capacity;
    for (size_t i = 0; i < p->units; i++) {
        if (used + packing_length(p, i) > p->capacity) {
            e->stream[e->streams] = (uint32_t)e->streams;
            e->begin[e->streams++] = (uint32_t)i;
            used = 0;
        }
        e->order[i] = (uint32_t)i;
        used += packing_length(p, i);
    }
}

// The streams of an epoch; nothing is allocated. Where nothing is shuffled, all epochs are epoch 0.
static void packing_epoch(Packing *p, EpochSequences *e, uint64_t epoch) {
    e->epoch = epoch, e->streams = 0;
    if (p->shuffle) {
        random_permutation(e->order, p->units, p->seed, packing_random_stream(RANDOM_STREAM_PIECES, epoch));
        for (size_t w = 0; w < p->windows; w++) {
            size_t first = p->units / p->windows * w + min_size(w, p->units % p->windows);
            packing_window(p, e, first, p->units / p->windows + (w < p->units % p->windows));
        }
        random_permutation(e->stream, e->streams, p->seed, packing_random_stream(RANDOM_STREAM_STREAMS, epoch));
    } else {
        packing_next_fit(p, e);
    }
    e->begin[e->streams] = (uint32_t)p->units;
}

// ---- memory ---------------------------------------------------------------------------------------------------------
// units: at least one, none longer than the capacity, fewer than 2^32.
static Packing packing_allocate(const uint32_t *length, size_t stride, size_t units, size_t capacity, int shuffle,
                                uint64_t seed) {
    Packing p = {0};
    p.length = length, p.stride = stride, p.units = units;
    p.capacity = capacity, p.shuffle = shuffle, p.seed = seed;
    for (size_t i = 0; i < units; i++) p.positions += packing_length(&p, i);
    double window =
        PACKING_STREAMS * ((double)capacity * (double)units / (double)p.positions); // units of so many streams
    if (window < PACKING_WINDOW) window = PACKING_WINDOW;
    p.windows = max_size((size_t)((double)units / window), 1);
    p.largest_window = (units + p.windows - 1) / p.windows;
    // of a window's streams at most one is half empty or more; of next-fit's, any two in a row hold more than one
    p.max_sequences = min_size((size_t)(2 * p.positions / capacity) + p.windows + 1, units);
    if (!shuffle) return p;
    for (p.leaves = 1; p.leaves < p.largest_window;) p.leaves *= 2;
    p.item = (PackingItem *)checked_calloc(p.largest_window, sizeof(PackingItem), "packing");
    p.spare = (PackingItem *)checked_calloc(p.largest_window, sizeof(PackingItem), "packing");
    p.bin = (uint32_t *)checked_calloc(p.largest_window, sizeof(uint32_t), "packing");
    p.room = (uint32_t *)checked_calloc(2 * p.leaves, sizeof(uint32_t), "packing");
    return p;
}

static void packing_free(Packing *p) {
    free(p->item), free(p->spare), free(p->bin), free(p->room);
    memset(p, 0, sizeof(*p));
}

static EpochSequences epoch_sequences_allocate(const Packing *p) {
    EpochSequences e;
    e.epoch = PACKING_NO_EPOCH, e.streams = 0;
    e.order = (uint32_t *)checked_calloc(p->units, sizeof(uint32_t), "the order of the data");
    e.begin = (uint32_t *)checked_calloc(p->max_sequences + 1, sizeof(uint32_t), "the streams of an epoch");
    e.stream = (uint32_t *)checked_calloc(p->max_sequences, sizeof(uint32_t), "the streams of an epoch");
    return e;
}

static void epoch_sequences_free(EpochSequences *e) {
    free(e->order), free(e->begin), free(e->stream);
    memset(e, 0, sizeof(*e));
}

// Positions that are filled, of all that so many streams have room for.
static double packing_fill(const Packing *p, size_t streams) {
    return (double)p->positions / ((double)streams * (double)p->capacity);
}

#endif
