/*
Draws a token from its logits by temperature, top-k, top-p and a uniform number. Each thread takes rows, and no row is
sorted. With temperature alone a row's weights are summed in blocks, and the block that the number hits is walked token
by token. With top-k or top-p weights are summed in bins of the logit. Whole bins are skipped, from the largest down,
until a bin holds the k-th token, the end of top-p or the number. Only this bin's tokens are taken one by one, from a
heap.
*/
#ifndef LLMC_CPU_DRAW_H
#define LLMC_CPU_DRAW_H
#include "elements.h"
#include "simd_math.h"

enum {
    DRAW_BLOCK = 256,
    DRAW_BINS = 2048,
    DRAW_ROWS = 16, // most rows at once, since each has scratch memory of its own
};
#define DRAW_WIDTH 40.0 // total width of all bins but the last, in temperatures; their weights reach from 1 to e^-40

typedef struct {
    const floatX *logits;
    size_t V;
    double temperature, cap;
    double largest, top; // the largest logit, before and after the cap
    // bins of the logit
    double bins_per_logit;
    double weight[DRAW_BINS];
    int32_t count[DRAW_BINS];
    size_t left;   // tokens in the heap
    int32_t *heap; // [V] ids, a heap: likelier ids above
} DrawRow;

// ---- weights --------------------------------------------------------------------------------------------------------
// Returns exp(x), x <= 0, within a relative 1e-15; 0 below -708. Like simd_sincos it is straight-line code with a
// Taylor series.
static inline double simd_exp(double x) {
    const double magic = 6755399441055744.0, y = x > -708.0 ? x : -708.0; // 1.5 * 2^52
    const double shifted = fused_double(y, 1.4426950408889634, magic), n = shifted - magic;
    const double r = fused_double(n, -2.3190468138462996e-17, fused_double(n, -0.69314718055994529, y));
    double p = 1.0 / 6227020800.0, power;
    uint64_t bits;
    p = fused_double(p, r, 1.0 / 479001600.0);
    p = fused_double(p, r, 1.0 / 39916800.0);
    p = fused_double(p, r, 1.0 / 3628800.0);
    p = fused_double(p, r, 1.0 / 362880.0);
    p = fused_double(p, r, 1.0 / 40320.0);
    p = fused_double(p, r, 1.0 / 5040.0);
    p = fused_double(p, r, 1.0 / 720.0);
    p = fused_double(p, r, 1.0 / 120.0);
    p = fused_double(p, r, 1.0 / 24.0);
    p = fused_double(p, r, 1.0 / 6.0);
    p = fused_double(p, r, 0.5);
    p = fused_double(p, r, 1.0);
    p = fused_double(p, r, 1.0);
    memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits + 1023) << 52; // 2^n
    memcpy(&power, &bits, sizeof(power));
    return x > -708.0 ? p * power : 0.0;
}

// Returns tanh(x), within an absolute 1e-15.
static inline double simd_tanh(double x) {
    const double e = simd_exp(-2 * fabs(x)), y = (1 - e) / (1 + e);
    return x < 0 ? -y : y;
}

static inline double draw_capped(double logit, double cap) { return cap > 0 ? cap * simd_tanh(logit / cap) : logit; }

// Returns a token's probability up to a factor: the likeliest token's weight is 1.
static inline double token_weight(const DrawRow *row, size_t id) {
    return simd_exp((draw_capped((double)load(row->logits[id]), row->cap) - row->top) / row->temperature);
}

static void weights_of_block(const DrawRow *row, size_t first, size_t count, double *weight) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) weight[i] = token_weight(row, first + i);
}

// ---- temperature alone ----------------------------------------------------------------------------------------------
// Draws among all tokens, by falling ids. sums[V / DRAW_BLOCK + 1]: weights of blocks
static int32_t draw_of_all(const DrawRow *row, double uniform, double *sums) {
    const size_t blocks = (row->V + DRAW_BLOCK - 1) / DRAW_BLOCK;
    double weight[DRAW_BLOCK], whole = 0, passed = 0;
    for (size_t b = blocks; b-- > 0;) {
        const size_t count = min_size(DRAW_BLOCK, row->V - b * DRAW_BLOCK);
        double sum = 0;
        weights_of_block(row, b * DRAW_BLOCK, count, weight);
#pragma omp simd reduction(+ : sum)
        for (size_t i = 0; i < count; i++) sum += weight[i];
        whole += sums[b] = sum;
    }
    size_t b = blocks;
    while (b > 1 && passed + sums[b - 1] <= uniform * whole) passed += sums[--b];
    size_t id = min_size(b * DRAW_BLOCK, row->V);
    while (id-- > 1)
        if ((passed += token_weight(row, id)) > uniform * whole) return (int32_t)id;
    return 0;
}

// ---- the likeliest --------------------------------------------------------------------------------------------------
// Returns whether a is likelier than b: it has the higher logit, or an equal logit and the lower id.
static int likelier(const floatX *logits, int32_t a, int32_t b) {
    return load(logits[a]) > load(logits[b]) || (load(logits[a]) == load(logits[b]) && a < b);
}

// Restores the order below `root` of heap[count], with likelier tokens above.
static void heap_sift(int32_t *heap, size_t count, size_t root, const floatX *logits) {
    int32_t id = heap[root];
    size_t child;
    while ((child = 2 * root + 1) < count) {
        if (child + 1 < count && likelier(logits, heap[child + 1], heap[child])) child++;
        if (!likelier(logits, heap[child], id)) break;
        heap[root] = heap[child];
        root = child;
    }
    heap[root] = id;
}

// Finds the bins of a block's tokens: bin 0 has the largest logit, the last bin all tokens far below.
static void bins_of_block(const DrawRow *row, size_t first, size_t count, int32_t *bin) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        const double below = (row->largest - (double)load(row->logits[first + i])) * row->bins_per_logit;
        bin[i] = (int32_t)(below < DRAW_BINS - 1 ? below : DRAW_BINS - 1);
    }
}

static void bins_fill(DrawRow *row, double smallest) {
    const double most = row->cap > 0 ? INFINITY : DRAW_WIDTH * row->temperature; // a cap brings logits closer together
    const double width = fmin(row->largest - smallest, most) / (DRAW_BINS - 1);
    row->bins_per_logit = width > 0 ? fmin(1 / width, 1e300) : 0;
    memset(row->weight, 0, sizeof(row->weight)), memset(row->count, 0, sizeof(row->count));
    for (size_t first = 0; first < row->V; first += DRAW_BLOCK) {
        const size_t count = min_size(DRAW_BLOCK, row->V - first);
        double weight[DRAW_BLOCK];
        int32_t bin[DRAW_BLOCK];
        weights_of_block(row, first, count, weight), bins_of_block(row, first, count, bin);
        for (size_t i = 0; i < count; i++) row->weight[bin[i]] += weight[i], row->count[bin[i]]++;
    }
}

// Makes a heap of the tokens in bin b.
static void bin_open(DrawRow *row, size_t b) {
    row->left = 0;
    for (size_t first = 0; first < row->V && row->left < (size_t)row->count[b]; first += DRAW_BLOCK) {
        const size_t count = min_size(DRAW_BLOCK, row->V - first);
        int32_t bin[DRAW_BLOCK];
        int some = 0;
        bins_of_block(row, first, count, bin);
#pragma omp simd reduction(| : some)
        for (size_t i = 0; i < count; i++) some |= bin[i] == (int32_t)b;
        for (size_t i = 0; some && i < count; i++)
            if (bin[i] == (int32_t)b) row->heap[row->left++] = (int32_t)(first + i);
    }
    for (size_t i = row->left / 2; i-- > 0;) heap_sift(row->heap, row->left, i, row->logits);
}

static int32_t heap_pop(DrawRow *row) {
    const int32_t top = row->heap[0];
    row->heap[0] = row->heap[--row->left];
    if (row->left) heap_sift(row->heap, row->left, 0, row->logits);
    return top;
}

typedef struct {
    size_t tokens; // how many of the likeliest tokens, at least one
    double weight; // their total weight
    int32_t last;
} Likeliest;

// Takes the likeliest tokens, at most `most`, until their weight reaches `target`, or, with `pass`, exceeds `target`.
static Likeliest likeliest_until(DrawRow *row, size_t most, double target, int pass) {
    Likeliest held = {0, 0, 0};
    row->left = 0;
    for (size_t b = 0; b < DRAW_BINS; b++) {
        const double all = held.weight + row->weight[b];
        if (held.tokens + (size_t)row->count[b] < most && (pass ? all <= target : all < target)) {
            held.tokens += (size_t)row->count[b], held.weight = all;
            continue;
        }
        bin_open(row, b);
        while (row->left) {
            held.last = heap_pop(row);
            held.weight += token_weight(row, (size_t)held.last);
            if (++held.tokens == most || (pass ? held.weight > target : held.weight >= target)) return held;
        }
    }
    return held;
}

static int32_t draw_of_likeliest(DrawRow *row, const SamplingSettings *settings, double uniform) {
    const size_t k = settings->top_k && settings->top_k < row->V ? settings->top_k : row->V;
    Likeliest from = {k, 0, 0};
    if (k < row->V) from = likeliest_until(row, k, INFINITY, 0);
    for (size_t b = 0; b < DRAW_BINS && k == row->V; b++) from.weight += row->weight[b];
    if (settings->top_p < 1) from = likeliest_until(row, k, settings->top_p * from.weight, 0);
    return likeliest_until(row, from.tokens, uniform * from.weight, 1).last;
}

// ---- rows -----------------------------------------------------------------------------------------------------------
// Returns the bytes for a row's heap of ids or sums of blocks, in whole cache lines.
static size_t draw_row_bytes(size_t V) { return round_up((V + 2) * sizeof(int32_t), 64); }

static int32_t draw_row(const SamplingSettings *settings, const floatX *logits, size_t V, void *memory,
                        double uniform) {
    floatS largest = load(logits[0]), smallest = largest;
    int bad = 0;
    size_t id = 0;
#pragma omp simd reduction(max : largest) reduction(min : smallest) reduction(| : bad)
    for (size_t i = 0; i < V; i++) {
        const floatS x = load(logits[i]);
        largest = x > largest ? x : largest, smallest = x < smallest ? x : smallest;
        bad |= !(x - x == 0);
    }
    if (bad) {
        while (isfinite(load(logits[id]))) id++;
        return -1 - (int32_t)id;
    }
    if (settings->temperature == 0) {
        while (load(logits[id]) != largest) id++;
        return (int32_t)id;
    }
    DrawRow row;
    row.logits = logits, row.V = V, row.temperature = settings->temperature, row.largest = (double)largest;
    row.cap = settings->cap, row.top = draw_capped(row.largest, row.cap);
    row.heap = (int32_t *)memory;
    if ((!settings->top_k || settings->top_k >= V) && settings->top_p >= 1)
        return draw_of_all(&row, uniform, (double *)memory);
    bins_fill(&row, (double)smallest);
    return draw_of_likeliest(&row, settings, uniform);
}

static size_t draw_rows_at_once(void) { return min_size((size_t)omp_get_max_threads(), DRAW_ROWS); }

static void cpu_draw(int32_t *token, const Stored *logits, const double *uniform, size_t n, size_t V, size_t stride,
                     const SamplingSettings *settings, Summed *scratch) {
    char *memory = (char *)round_up((size_t)scratch, 64);
#pragma omp parallel for schedule(dynamic) num_threads(min_size(n, draw_rows_at_once())) if (n > 1)
    for (size_t t = 0; t < n; t++)
        token[t] = draw_row(settings, (const floatX *)logits + t * stride, V,
                            memory + (size_t)omp_get_thread_num() * draw_row_bytes(V), uniform[t]);
}

static size_t cpu_draw_scratch(size_t V) { return (draw_rows_at_once() * draw_row_bytes(V) + 64) / sizeof(floatS); }

#endif
