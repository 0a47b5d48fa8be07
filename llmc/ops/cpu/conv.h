/*
The causal, depthwise convolution of linear attention, then SiLU or gates (contract in op_list.h). The last taps - 1
inputs of a document pass from call to call; their gradients pass back. With y_t the sum at token t and d_t its
gradient,

    y_t = sum over j < taps of w_j x[t - (taps - 1) + j]        d_t = dout_t (s(y_t) + y_t s'(y_t))
    dx_t = sum over j < taps of w_j d[t + (taps - 1) - j]       dw_j = sum over t of d_t x[t - (taps - 1) + j]

With gates x above is u = B x, d_t = dout_t C_t, dC_t = dout_t y_t, and du gives dB = du x and dx = du B.

The bias is one more weight, of an input that is 1: row `taps` of a strip's weights and of their gradients.

Rows are walked in strips of channels: a strip's last taps rows and its weights stay in the L1 cache. Backward cuts the
rows into parts by their number alone, each with its own dw; d of the taps - 1 tokens after a part is computed twice. So
the result does not depend on the number of threads.
*/
#ifndef LLMC_CPU_CONV_H
#define LLMC_CPU_CONV_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "simd_math.h"

enum { CONV_STRIP = 512, CONV_ROWS = 128 }; // channels of a strip; rows of a thread's piece in forward

typedef floatS ConvStrip[CONV_STRIP + CACHE_LINE]; // padding: rows start in different cache sets

static const floatX conv_nothing[CONV_STRIP]; // x of tokens before a document: zeros
static const ConvStrip conv_no_slope;         // d of tokens after a document or the call: zeros

// Loads the weights of a strip of channels, tap by tap, then the bias (NULL: 0).
static void conv_weights(ConvStrip *w, const floatX *weight, const floatX *bias, size_t taps, size_t channel,
                         size_t count) {
    memset(w, 0, (taps + 1) * sizeof(*w));
    for (size_t c = 0; c < count; c++) {
        for (size_t j = 0; j < taps; j++) w[j][c] = load(weight[(channel + c) * taps + j]);
        if (bias) w[taps][c] = load(bias[channel + c]);
    }
}

// Products B x of the tokens that a walk read last. row[i]: of the row of B at of[i]
typedef struct {
    const floatX *of[CONV_TAPS_MAX];
    floatX row[CONV_TAPS_MAX][CONV_STRIP];
} ConvProducts;

// Returns B x of a token, from the row b of B on.
static VECTOR_FUNCTION const floatX *conv_product(ConvProducts *products, const floatX *b, size_t token, size_t W,
                                                  size_t count) {
    const size_t slot = token % CONV_TAPS_MAX;
    floatX *to = products->row[slot];
    if (products->of[slot] == b) return to;
    for (size_t c = 0; c < count; c += VECTOR_LANES)
        vector_store_first(
            to + c, vector_load_first(b + c, count - c, 0) * vector_load_first(b + 2 * W + c, count - c, 0), count - c);
    products->of[slot] = b;
    return to;
}

// Finds the inputs, from `channel` on, of the taps tokens that token t of a span reads. t counts from the span's first
// token. Earlier tokens are in columns, or zeros before the document. products: zeros before a walk
static void conv_inputs(const floatX **in, ConvProducts *products, const floatX *x, const floatX *columns,
                        const DeltaShape *shape, const Span *span, ptrdiff_t t, size_t channel, size_t count) {
    const ptrdiff_t taps = (ptrdiff_t)shape->taps;
    for (ptrdiff_t j = 0; j < taps; j++) {
        const ptrdiff_t at = t - (taps - 1) + j;
        if (at >= 0)
            in[j] = x + (span->row + (size_t)at) * shape->stride + channel;
        else if (-at <= (ptrdiff_t)(span->begin - span->document))
            in[j] = columns + (size_t)(taps - 1 + at) * delta_channels(shape) + channel;
        else
            in[j] = conv_nothing;
        if (at >= 0 && shape->gates) in[j] = conv_product(products, in[j], (size_t)at, delta_channels(shape), count);
    }
}

// Returns the bias + sum over j of w_j in_j at channels c, c + 1, ...
VECTOR_INLINE Vector conv_sum(const floatX *const *in, const ConvStrip *w, size_t taps, size_t c, size_t count) {
    Vector sum = vector_load(w[taps] + c);
    for (size_t j = 0; j < taps; j++) sum += vector_load(w[j] + c) * vector_load_first(in[j] + c, count - c, 0);
    return sum;
}

// Computes out = silu(y), or y gate, of one row. ahead: input of a later row, to prefetch
VECTOR_INLINE void conv_row(floatX *out, const floatX *ahead, const floatX *gate, const floatX *const *in,
                            const ConvStrip *w, size_t taps, size_t count) {
    for (size_t c = 0; c < count; c += VECTOR_LANES) {
        const Vector y = conv_sum(in, w, taps, c, count);
        __builtin_prefetch(ahead + c);
        Vector slope;
        vector_store_first(out + c, y * (gate ? vector_load_first(gate + c, count - c, 0) : vector_logistic(y, &slope)),
                           count - c);
    }
}

static VECTOR_FUNCTION void conv_row_of(floatX *out, const floatX *ahead, const floatX *gate, const floatX *const *in,
                                        const ConvStrip *w, size_t taps, size_t count) {
    if (taps == 4 && count == CONV_STRIP && !gate)
        conv_row(out, ahead, NULL, in, w, 4, CONV_STRIP);
    else
        conv_row(out, ahead, gate, in, w, taps, count);
}

// Returns a row of x at `channel`, and its row of C (NULL: no gates).
static const floatX *conv_own_row(const floatX *x, const DeltaShape *shape, size_t row, size_t channel,
                                  const floatX **gate) {
    const floatX *own = x + row * shape->stride + channel;
    *gate = shape->gates ? own + delta_channels(shape) : NULL;
    return own;
}

// Computes rows [from, end) of the call, `count` channels.
static void conv_forward_rows(floatX *out, const floatX *columns, const floatX *x, const floatX *weight,
                              const floatX *bias, const DeltaShape *shape, size_t from, size_t end, size_t channel,
                              size_t count) {
    const size_t W = delta_channels(shape), taps = shape->taps;
    ConvStrip w[CONV_TAPS_MAX + 1];
    ConvProducts products;
    conv_weights(w, weight, bias, taps, channel, count);
    memset(products.of, 0, sizeof(products.of));
    for (size_t i = 0; i < shape->spans.count; i++) {
        const Span *span = &shape->spans.span[i];
        const floatX *before = columns + delta_slot(shape, span) * (taps - 1) * W, *in[CONV_TAPS_MAX], *gate;
        const size_t last = min_size(end, span->row + span->end - span->begin);
        for (size_t row = max_size(from, span->row); row < last; row++) {
            const floatX *own = conv_own_row(x, shape, row, channel, &gate);
            conv_inputs(in, &products, x, before, shape, span, (ptrdiff_t)(row - span->row), channel, count);
            conv_row_of(out + row * W + channel, row + 2 < last ? own + 2 * shape->stride : own, gate, in, w, taps,
                        count);
        }
    }
}

// Sets columns to the last taps - 1 inputs of a span; inputs before the span come from the old columns.
static void conv_keep(floatX *columns, const floatX *x, const DeltaShape *shape, const Span *span, size_t channel,
                      size_t count) {
    const size_t W = delta_channels(shape), taps = shape->taps;
    const floatX *in[CONV_TAPS_MAX];
    ConvProducts products;
    memset(products.of, 0, sizeof(products.of));
    conv_inputs(in, &products, x, columns, shape, span, (ptrdiff_t)(span->end - span->begin) - 1, channel, count);
    for (size_t j = 0; j + 1 < taps; j++) // first to last, so that rows are read before they are overwritten
        memmove(columns + j * W + channel, in[j + 1], count * sizeof(floatX));
}

static void cpu_conv_forward(Stored *out, Stored *columns, const Stored *x, const Stored *weight, const Stored *bias,
                             const DeltaShape *shape) {
    const size_t W = delta_channels(shape), n = delta_rows(shape), kept = (shape->taps - 1) * W;
#pragma omp parallel if (n * W >= PARALLEL_MIN)
    {
#pragma omp for collapse(2) schedule(static)
        for (size_t row = 0; row < n; row += CONV_ROWS)
            for (size_t c = 0; c < W; c += CONV_STRIP)
                conv_forward_rows((floatX *)out, (const floatX *)columns, (const floatX *)x, (const floatX *)weight,
                                  (const floatX *)bias, shape, row, min_size(row + CONV_ROWS, n), c,
                                  min_size(CONV_STRIP, W - c));
#pragma omp for schedule(static)
        for (size_t c = 0; c < W; c += CONV_STRIP)
            for (size_t i = shape->slot_tokens || !n ? 0 : shape->spans.count - 1; i < shape->spans.count; i++)
                conv_keep((floatX *)columns + delta_slot(shape, &shape->spans.span[i]) * kept, (const floatX *)x, shape,
                          &shape->spans.span[i], c, min_size(CONV_STRIP, W - c));
    }
}

// ---- backward ------------------------------------------------------------------------------------------------------

static size_t conv_parts(size_t n) { return n < 2 * TOKEN_GROUP ? 1 : min_size(n / TOKEN_GROUP, 64); }

// Sizes scratch[parts][taps, then the bias][W, rounded up]: each part's dw
static size_t conv_part_row(const DeltaShape *shape) { return round_up(delta_channels(shape), CONV_STRIP); }
static size_t cpu_conv_backward_scratch(const DeltaShape *shape, int biased) {
    return conv_parts(delta_rows(shape)) * (shape->taps + (size_t)biased) * conv_part_row(shape);
}

// The rows of C and of dC of a token; C NULL: no gates, dC NULL: not computed
typedef struct {
    const floatX *c;
    floatX *dc;
} ConvGate;

// Computes d of a row, and dC; dw_j += d in_j unless dw is NULL.
VECTOR_INLINE void conv_row_slope(floatS *d, ConvStrip *dw, const floatX *dout, ConvGate gate, const floatX *const *in,
                                  const ConvStrip *w, size_t taps, size_t count) {
    for (size_t c = 0; c < count; c += VECTOR_LANES) {
        const Vector y = conv_sum(in, w, taps, c, count);
        Vector slope, g = vector_load_first(dout + c, count - c, 0);
        if (gate.dc) vector_store_first(gate.dc + c, g * y, count - c);
        if (gate.c) {
            g *= vector_load_first(gate.c + c, count - c, 0);
        } else {
            const Vector s = vector_logistic(y, &slope);
            g *= s + y * slope;
        }
        vector_store(d + c, g);
        if (!dw) continue;
        for (size_t j = 0; j < taps; j++) {
            floatS *sum = dw[j] + c;
            vector_store(sum, vector_load(sum) + g * vector_load_first(in[j] + c, count - c, 0));
        }
        vector_store(dw[taps] + c, vector_load(dw[taps] + c) + g);
    }
}

static VECTOR_FUNCTION void conv_row_slope_of(floatS *d, ConvStrip *dw, const floatX *dout, ConvGate gate,
                                              const floatX *const *in, const ConvStrip *w, size_t taps, size_t count) {
    const ConvGate none = {NULL, NULL};
    if (taps == 4 && dw && count == CONV_STRIP && !gate.c)
        conv_row_slope(d, dw, dout, none, in, w, 4, CONV_STRIP);
    else
        conv_row_slope(d, dw, dout, gate, in, w, taps, count);
}

// Computes dx = sum over j of w_j later_j + carried (NULL: 0). later_j: d of the token that reads x by tap j. b: a row
// of B (NULL: no gates), its row of x `value` elements after it; the sum then gives dB and dx in the same places of dx
VECTOR_INLINE void conv_row_back(floatX *dx, const floatX *b, size_t value, const floatS *const *later,
                                 const floatS *carried, const ConvStrip *w, size_t taps, size_t count) {
    for (size_t c = 0; c < count; c += VECTOR_LANES) {
        Vector sum = carried ? vector_load(carried + c) : (Vector){0};
        for (size_t j = 0; j < taps; j++) sum += vector_load(w[j] + c) * vector_load(later[j] + c);
        if (b) vector_store_first(dx + value + c, sum * vector_load_first(b + c, count - c, 0), count - c);
        if (b) sum *= vector_load_first(b + value + c, count - c, 0);
        vector_store_first(dx + c, sum, count - c);
    }
}

static VECTOR_FUNCTION void conv_row_back_of(floatX *dx, const floatX *b, size_t value, const floatS *const *later,
                                             const floatS *carried, const ConvStrip *w, size_t taps, size_t count) {
    if (taps == 4 && count == CONV_STRIP && !b)
        conv_row_back(dx, NULL, 0, later, carried, w, 4, CONV_STRIP);
    else
        conv_row_back(dx, b, value, later, carried, w, taps, count);
}

typedef struct {
    floatX *dx;
    floatS *dcolumns, *parts; // parts NULL: dweight is not computed
    const floatX *dout, *x, *columns, *weight, *bias;
    const DeltaShape *shape;
    size_t rows; // rows of a part: taps, and 1 for the bias
} ConvBackward;

// Runs tokens [from, end) of a span backward. dw: sums of this part and strip. The last span adds dcolumns.
static void conv_span_back(const ConvBackward *b, size_t i, size_t from, size_t end, size_t channel, size_t count,
                           const ConvStrip *w, ConvStrip *dw) {
    const Span *span = &b->shape->spans.span[i];
    const size_t W = delta_channels(b->shape), taps = b->shape->taps, length = span->end - span->begin;
    const int last = i + 1 == b->shape->spans.count;
    ConvStrip d[CONV_TAPS_MAX], carried = {0};
    ConvProducts products;
    memset(products.of, 0, sizeof(products.of));
    for (size_t t = min_size(length, end + taps - 1); t-- > from;) {
        const size_t row = span->row + t;
        const floatX *in[CONV_TAPS_MAX];
        const floatS *later[CONV_TAPS_MAX];
        ConvGate gate = {NULL, NULL};
        const floatX *own = conv_own_row(b->x, b->shape, row, channel, &gate.c);
        floatX *dx = b->dx + row * b->shape->stride + channel;
        if (gate.c && t < end) gate.dc = dx + W;
        conv_inputs(in, &products, b->x, b->columns, b->shape, span, (ptrdiff_t)t, channel, count);
        conv_row_slope_of(d[t % taps], t < end ? dw : NULL, b->dout + row * W + channel, gate, in, w, taps, count);
        if (t >= end) continue;
        for (size_t j = 0; j < taps; j++) {
            const size_t reader = t + taps - 1 - j;
            later[j] = reader < length ? d[reader % taps] : conv_no_slope;
        }
        const int is_read = last && t + taps - 1 >= length;
        if (is_read) memcpy(carried, b->dcolumns + (t + taps - 1 - length) * W + channel, count * sizeof(floatS));
        conv_row_back_of(dx, gate.c ? own : NULL, 2 * W, later, is_read ? carried : NULL, w, taps, count);
    }
}

static void conv_part_back(const ConvBackward *b, size_t part, size_t from, size_t end, size_t channel, size_t count) {
    const size_t taps = b->shape->taps, width = conv_part_row(b->shape);
    ConvStrip w[CONV_TAPS_MAX + 1], dw[CONV_TAPS_MAX + 1];
    conv_weights(w, b->weight, b->bias, taps, channel, count);
    memset(dw, 0, (taps + 1) * sizeof(*dw));
    for (size_t i = 0; i < b->shape->spans.count; i++) {
        const Span *span = &b->shape->spans.span[i];
        const size_t first = max_size(from, span->row), last = min_size(end, span->row + span->end - span->begin);
        if (first < last)
            conv_span_back(b, i, first - span->row, last - span->row, channel, count, w, b->parts ? dw : NULL);
    }
    for (size_t j = 0; j < b->rows && b->parts; j++)
        memcpy(b->parts + (part * b->rows + j) * width + channel, dw[j], CONV_STRIP * sizeof(floatS));
}

// Computes dcolumns, the gradients of taps - 1 tokens before the call. Adds the first span's sums and, in short calls,
// the old dcolumns.
static void conv_columns_back(const ConvBackward *b, size_t channel, size_t count) {
    const Span *span = &b->shape->spans.span[0];
    const size_t W = delta_channels(b->shape), taps = b->shape->taps, length = span->end - span->begin;
    ConvStrip w[CONV_TAPS_MAX + 1], d[CONV_TAPS_MAX];
    ConvProducts products;
    conv_weights(w, b->weight, b->bias, taps, channel, count);
    memset(products.of, 0, sizeof(products.of));
    for (size_t t = 0; t < min_size(length, taps - 1); t++) {
        const floatX *in[CONV_TAPS_MAX];
        ConvGate gate = {NULL, NULL};
        conv_own_row(b->x, b->shape, span->row + t, channel, &gate.c);
        conv_inputs(in, &products, b->x, b->columns, b->shape, span, (ptrdiff_t)t, channel, count);
        conv_row_slope_of(d[t], NULL, b->dout + (span->row + t) * W + channel, gate, in, w, taps, count);
    }
    for (size_t i = taps - 1; i-- > 0;) { // last to first, so that rows are read before they are overwritten
        floatS *to = b->dcolumns + i * W + channel;
        const int is_read = b->shape->spans.count == 1 && i >= length; // 1: later calls read this input
        for (size_t c = 0; c < count; c++) {
            floatS sum = is_read ? b->dcolumns[(i - length) * W + channel + c] : 0;
            for (size_t j = 0; j <= i; j++)
                if (i - j < length) sum += w[j][c] * d[i - j][c];
            to[c] = taps - 1 - i <= span->begin - span->document ? sum : 0;
        }
    }
}

// Adds up the parts' row j. step: elements from channel to channel of d
static void conv_add_parts(const ConvBackward *b, floatS *d, size_t step, size_t j, size_t parts, size_t channel,
                           size_t count) {
    const size_t width = conv_part_row(b->shape);
    ConvStrip sum = {0};
    for (size_t p = 0; p < parts; p++)
        for (size_t c = 0; c < CONV_STRIP; c++) sum[c] += b->parts[(p * b->rows + j) * width + channel + c];
    for (size_t c = 0; c < count; c++) d[(channel + c) * step] += sum[c];
}

static void cpu_conv_backward(Stored *dx, Summed *dweight, Summed *dbias, Summed *dcolumns, const Stored *dout,
                              const Stored *x, const Stored *columns, const Stored *weight, const Stored *bias,
                              const DeltaShape *shape, Summed *scratch) {
    const ConvBackward b = {(floatX *)dx,
                            (floatS *)dcolumns,
                            dweight || dbias ? (floatS *)scratch : NULL,
                            (const floatX *)dout,
                            (const floatX *)x,
                            (const floatX *)columns,
                            (const floatX *)weight,
                            (const floatX *)bias,
                            shape,
                            shape->taps + (bias != NULL)};
    const size_t W = delta_channels(shape), n = delta_rows(shape), parts = conv_parts(n), taps = shape->taps;
#pragma omp parallel if (n * W >= PARALLEL_MIN)
    {
#pragma omp for collapse(2) schedule(static)
        for (size_t p = 0; p < parts; p++)
            for (size_t c = 0; c < W; c += CONV_STRIP)
                conv_part_back(&b, p, n * p / parts, n * (p + 1) / parts, c, min_size(CONV_STRIP, W - c));
#pragma omp for schedule(static)
        for (size_t c = 0; c < W; c += CONV_STRIP) {
            const size_t count = min_size(CONV_STRIP, W - c);
            conv_columns_back(&b, c, count);
            for (size_t j = 0; j < taps && dweight; j++)
                conv_add_parts(&b, (floatS *)dweight + j, taps, j, parts, c, count);
            if (dbias) conv_add_parts(&b, (floatS *)dbias, 1, taps, parts, c, count);
        }
    }
}

#endif
