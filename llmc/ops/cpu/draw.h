/*
The draw of a token from its logits: temperature, top-k, top-p and a uniform number.
*/
#ifndef LLMC_CPU_DRAW_H
#define LLMC_CPU_DRAW_H
#include "elements.h"

// Before b in the order of likelihood: the higher logit, of equal ones the lower id.
static int likelier(const floatX *logits, int32_t a, int32_t b) {
    return load(logits[a]) > load(logits[b]) || (load(logits[a]) == load(logits[b]) && a < b);
}

static int32_t likeliest(const floatX *logits, size_t V) {
    int32_t best = 0;
    for (int32_t i = 1; i < (int32_t)V; i++)
        if (likelier(logits, i, best)) best = i;
    return best;
}

// heap[count], likelier tokens above: restores the order below `root`.
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

// Moves the likeliest of heap[count] behind the heap.
static void heap_pop(int32_t *heap, size_t count, const floatX *logits) {
    int32_t top = heap[0];
    heap[0] = heap[count - 1];
    heap[count - 1] = top;
    heap_sift(heap, count - 1, 0, logits);
}

// Probability of a token, up to a factor; that of the likeliest is 1.
static double token_mass(const SamplingSettings *settings, const floatX *logits, double largest, int32_t id) {
    return exp(((double)load(logits[id]) - largest) / settings->temperature);
}

// The tokens to draw from: the last `count` (returned) of order[V]. A heap gives the likeliest one by one, so that a
// short list out of a large vocabulary needs no sorting of the rest.
static size_t sampling_candidates(const SamplingSettings *settings, const floatX *logits, double largest, size_t V,
                                  int32_t *order) {
    size_t k = settings->top_k && settings->top_k < V ? settings->top_k : V, count;
    double mass = 0, held = 0;
    for (size_t i = 0; i < V; i++) order[i] = (int32_t)i;
    if (k == V && settings->top_p >= 1) return V;
    for (size_t i = V / 2; i-- > 0;) heap_sift(order, V, i, logits);
    for (size_t i = 0; i < V && k == V; i++) mass += token_mass(settings, logits, largest, (int32_t)i);
    for (size_t i = 0; i < k && k < V; i++) {
        heap_pop(order, V - i, logits);
        mass += token_mass(settings, logits, largest, order[V - 1 - i]);
    }
    if (settings->top_p >= 1) return k;
    for (count = 0; count < k && (count == 0 || held < settings->top_p * mass); count++) {
        if (k == V) heap_pop(order, V - count, logits);
        held += token_mass(settings, logits, largest, order[V - 1 - count]);
    }
    return count;
}

// The token for a uniform number in [0, 1). order[V] is scratch.
static int32_t sampling_draw(const SamplingSettings *settings, const floatX *logits, size_t V, int32_t *order,
                             double uniform) {
    int32_t best = likeliest(logits, V);
    double largest = (double)load(logits[best]), mass = 0, passed = 0;
    size_t i;
    if (settings->temperature == 0) return best;
    size_t count = sampling_candidates(settings, logits, largest, V, order);
    for (i = 0; i < count; i++) mass += token_mass(settings, logits, largest, order[V - 1 - i]);
    for (i = 0; i + 1 < count; i++) {
        passed += token_mass(settings, logits, largest, order[V - 1 - i]);
        if (passed > uniform * mass) break;
    }
    return order[V - 1 - i];
}

static void cpu_draw(int32_t *token, const Stored *logits, const double *uniform, size_t n, size_t V, size_t stride,
                     const SamplingSettings *settings, Summed *scratch) {
    for (size_t t = 0; t < n; t++) {
        const floatX *x = (const floatX *)logits + t * stride;
        size_t finite = 0;
        while (finite < V && isfinite(load(x[finite]))) finite++;
        token[t] = finite < V ? -1 - (int32_t)finite : sampling_draw(settings, x, V, (int32_t *)scratch, uniform[t]);
    }
}

// order[V]
static size_t cpu_draw_scratch(size_t V) { return (V * sizeof(int32_t) + sizeof(floatS) - 1) / sizeof(floatS); }

#endif
