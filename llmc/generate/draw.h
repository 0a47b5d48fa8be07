/*
The draw of a token from its logits: temperature, top-k, top-p and a uniform number. The token at position t of a text
is drawn with random number t of the text's seed, so the text is the same however much of it was fed and however much
was drawn before, and whatever is drawn beside it (but for rounding: products of few rows and of many may sum in
another order).
*/
#ifndef LLMC_DRAW_H
#define LLMC_DRAW_H
#include "llmc/base/random.h"
#include "llmc/base/utils.h"
#include "llmc/model/model.h"
#include <math.h>

#define RANDOM_STREAM_SAMPLING 0x73616d706c65ull // of random.h ("sample")

typedef struct {
    double temperature; // logits are divided by it; 0: always the likeliest token
    size_t top_k;       // only the top_k likeliest tokens; 0: all
    double top_p;       // of these, only the fewest likeliest that hold this share of their probability; 1: all
    uint64_t seed;
} SamplingSettings;

// Before b in the order of likelihood: the higher logit, of equal ones the lower id.
static int likelier(const double *logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static int32_t likeliest(const double *logits, size_t V) {
    int32_t best = 0;
    for (int32_t i = 1; i < (int32_t)V; i++)
        if (likelier(logits, i, best)) best = i;
    return best;
}

// heap[count], likelier tokens above: restores the order below `root`.
static void heap_sift(int32_t *heap, size_t count, size_t root, const double *logits) {
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
static void heap_pop(int32_t *heap, size_t count, const double *logits) {
    int32_t top = heap[0];
    heap[0] = heap[count - 1];
    heap[count - 1] = top;
    heap_sift(heap, count - 1, 0, logits);
}

// Probability of a token, up to a factor; that of the likeliest is 1.
static double token_mass(const SamplingSettings *settings, const double *logits, double largest, int32_t id) {
    return exp((logits[id] - largest) / settings->temperature);
}

// The tokens to draw from: the last `count` (returned) of order[V]. A heap gives the likeliest one by one, so that a
// short list out of a large vocabulary needs no sorting of the rest.
static size_t sampling_candidates(const SamplingSettings *settings, const double *logits, double largest, size_t V,
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
static int32_t sampling_draw(const SamplingSettings *settings, const double *logits, size_t V, int32_t *order,
                             double uniform) {
    int32_t best = likeliest(logits, V);
    double largest = logits[best], mass = 0, passed = 0;
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

// ---- logits as the device stores them ------------------------------------------------------------------------------
typedef struct {
    size_t V; // vocab_size
    DType type;
    void *stored;   // [rows,V] of `type`
    double *logits; // [V] of the row that is drawn from
    int32_t *order; // [V] token ids, the likeliest last
} Draw;

static Draw draw_allocate(const Model *model, size_t rows) {
    Draw draw = {model->config.vocab_size, model->dtype, NULL, NULL, NULL};
    draw.stored = checked_calloc(rows * draw.V, dtype_size(draw.type), "logits to sample from");
    draw.logits = (double *)checked_calloc(draw.V, sizeof(double), "logits to sample from");
    draw.order = (int32_t *)checked_calloc(draw.V, sizeof(int32_t), "tokens to sample from");
    return draw;
}

static void draw_free(Draw *draw) { free(draw->stored), free(draw->logits), free(draw->order); }

// draw->logits = a row of what is stored; refuses those of a model that has diverged. position: of the token to be
// drawn
static void draw_read(Draw *draw, size_t row, size_t position) {
    for (size_t i = 0; i < draw->V; i++) {
        draw->logits[i] = element_to_double(draw->stored, draw->type, row * draw->V + i);
        if (!isfinite(draw->logits[i]))
            die("the logit of token %zu at position %zu is %g: the weights are damaged or training has diverged", i,
                position, draw->logits[i]);
    }
}

// The token at a position of a text, from draw->logits.
static int32_t draw_token(const Draw *draw, const SamplingSettings *settings, uint64_t seed, size_t position) {
    return sampling_draw(settings, draw->logits, draw->V, draw->order,
                         random_uniform(seed, RANDOM_STREAM_SAMPLING, position));
}

#endif
