/*
The op interface: everything the driver may do to tensors. One table (struct Ops) per op set; the driver calls nothing
else on tensors and never dereferences tensor memory, so Stored and Summed are incomplete types here:

    Stored   an element of floatX: weights, activations and their gradients      (fp32, bf16 or double)
    Summed   an element of a sum over tokens: a layer's dW, dK, dV, log-sum-exp  (fp32; double in the double build)

Write contract: outputs named `out` are overwritten; `d`-prefixed parameter gradients accumulate (+=); gradients of
activations are overwritten unless the comment says otherwise. Outputs alias inputs only where the comment allows it.
Everything is row-major and contiguous. n is the number of tokens (rows); the short shape names are design vocabulary:
C hidden, NH and NKV query and key/value heads, HD head_dim, FF intermediate, V vocabulary, N tokens of the stream.

An op that needs scratch memory has a sibling X_scratch that tells how many Summed elements; the caller plans for them.
All ops are deterministic for a given build, machine and thread count. Every pointer is device memory unless it says
host.
*/
#ifndef LLMC_OPS_H
#define LLMC_OPS_H
#include "llmc/base/dtype.h"
#include "llmc/ranks/world.h"

typedef struct Stored Stored;
typedef struct Summed Summed;

// Queries [begin, end) of one document: they attend to keys [document, their own position]. Indices into the stream.
// A span is never empty: begin < end. Its queries are rows row, row + 1, ... of q, out, lse, dout and dq.
typedef struct {
    size_t document, begin, end, row;
} Span;

// The spans of one call, each of another document. Rows follow each other, span[i].row being the sum of the lengths
// before; in the stream there may be anything between two spans, and they may come in any order. Host memory.
typedef struct {
    const Span *span;
    size_t count;
    size_t window; // keys that a query sees at most, the last being its own (sliding window); 0: all of its document
    double pairs;  // query-key pairs in these spans; only counted with, by the dry op set
} Spans;

// Rows of all spans together: n of q, out, lse, dout and dq.
static size_t spans_rows(Spans spans) {
    const Span *last = spans.count ? &spans.span[spans.count - 1] : NULL;
    return last ? last->row + last->end - last->begin : 0;
}

// The first key that a query at token t sees.
static size_t first_key(size_t document, size_t t, size_t window) {
    return window && t - document >= window ? t + 1 - window : document;
}

// Query-key pairs of the queries first..end-1 of a document, counted from its start.
static double query_key_pairs(size_t first, size_t end, size_t window) {
    const double w = window ? (double)window : (double)end; // the queries below it see all that is before them
    const double a = (double)first < w ? (double)first : w, b = (double)end < w ? (double)end : w;
    return 0.5 * (b * (b + 1) - a * (a + 1)) + w * ((double)end - b - ((double)first - a));
}

// Keys of tokens [begin, end) of the stream.
typedef struct {
    size_t begin, end;
} KeyRange;
static const KeyRange all_keys = {0, SIZE_MAX};

// Query-key pairs of a span whose keys are at `key` or after it: as if its document began there.
static double span_pairs_from(Span span, size_t key, size_t window) {
    const size_t start = key > span.document ? key : span.document;
    const size_t begin = span.begin > start ? span.begin : start, end = span.end > start ? span.end : start;
    return query_key_pairs(begin - start, end - start, window);
}

// Query-key pairs of a span with the keys of a range.
static double span_pairs(Span span, KeyRange keys, size_t window) {
    return span_pairs_from(span, keys.begin, window) - span_pairs_from(span, keys.end, window);
}

// One call of attention: queries of the spans over their documents' keys.
typedef struct {
    Spans spans;
    size_t NH, NKV, HD; // query head h reads key/value head h / (NH/NKV)
    double scale;       // of the scores
    KeyRange keys;      // that are read
    int partial;    // they are one range of several: out and dq are Summed, rounded by round_sums after the last range
    int accumulate; // partial: this range adds to the ranges that out, lse and dq hold already
} AttentionShape;

typedef enum { NORM_RMS, NORM_LAYER } NormKind;

typedef struct {
    double eps, offset; // offset: added to the weight (RMSNorm)
    NormKind kind;
} Norm;

// SwiGLU: silu(gate) * up; GELU in its tanh form, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); GeGLU: gelu(gate) * up
typedef enum { ACTIVATION_SWIGLU, ACTIVATION_GELU, ACTIVATION_GEGLU } ActivationKind;

typedef struct {
    double learning_rate, beta1, beta2, epsilon, weight_decay;
    double gradient_scale; // the gradient is multiplied by this first (clipping)
    int64_t step;          // from 1, for bias correction
    uint64_t seed;         // of stochastic rounding, used where floatX is bf16 and there is no master copy
    size_t first;          // place of the first element in its parameter: its random bits go by it
} AdamW;

// One rank's part in an exchange with another one of its group.
typedef struct {
    size_t peer;     // rank within the group
    const void *out; // what is sent there
    void *in;        // where what comes from there goes
    size_t out_bytes, in_bytes;
} Message;

typedef struct Ops {
    const char *name; // "cpu", "cuda", "dry"
    DType stored, summed;
    size_t chunk, logits_chunk; // tokens of a chunk that suit it, where none are asked for

    // ---- memory -------------------------------------------------------------------------------------------------
    void *(*allocate)(size_t bytes); // NULL when there is not enough; contents undefined
    void (*release)(void *memory, size_t bytes);
    size_t (*memory_peak)(void);      // most bytes this process has had in use, whoever allocated them
    size_t (*memory_available)(void); // that could be allocated now; 0 where the machine does not tell
    void (*copy_in)(void *device, const void *host, size_t bytes);
    void (*copy_out)(void *host, const void *device, size_t bytes);
    void (*copy)(void *out, const void *in, size_t bytes); // device to device, no overlap
    void (*zero)(void *out, size_t bytes);
    void (*finish)(void); // returns when all that was asked for is done: before a clock is read

    // ---- host memory that tensors go to and come back from, beside other ops -------------------------------------
    void *(*host_allocate)(size_t bytes); // that a device reaches at its full speed; NULL when there is not enough
    void (*host_release)(void *memory, size_t bytes);
    size_t (*host_available)(size_t planned); // that could be allocated once the device has so many; 0: not known
    // A transfer runs beside other ops until its ticket, which is returned, is awaited: before that, nobody writes to
    // its memory or looks at what it changes there. Tickets grow, from 1; transfers are done in order.
    int64_t (*store)(void *host, const void *device, size_t bytes); // host = device
    int64_t (*load)(void *device, const void *host, size_t bytes);  // device = host
    void (*await_transfer)(int64_t ticket); // later ops find it done, and all before it; 0: none

    // What follows stands for `factor` calls alike. Only op set "dry" minds: it multiplies what it counts.
    void (*repeat)(double factor);

    // ---- embedding ----------------------------------------------------------------------------------------------
    // out[n,C] = scale * wte[token] + wpe[position];  wpe NULL where positions are rotary
    void (*embedding_forward)(Stored *out, const int32_t *tokens, const int32_t *position, const Stored *wte,
                              const Stored *wpe, size_t n, size_t C, double scale);
    // dw[rows,C] += scale * sum of dx[t] over the tokens t with index[t] == row, summed in Summed and added to dw (of
    // dw_type) once
    void (*embedding_backward)(void *dw, DType dw_type, const Stored *dx, const int32_t *index, size_t N, size_t rows,
                               size_t C, double scale, Summed *scratch);
    size_t (*embedding_backward_scratch)(size_t N, size_t rows, size_t C);

    // ---- rows ---------------------------------------------------------------------------------------------------
    // out[row[i],:] = in[i,:] of in[n,width], i < n; no two rows alike
    void (*scatter_rows)(Stored *out, const Stored *in, const int32_t *row, size_t n, size_t width);

    // ---- norms --------------------------------------------------------------------------------------------------
    // out[n,C] = xhat * (w + offset) (+ b[C] or residual[n,C], not both; NULL: nothing). RMSNorm: xhat = x / sqrt(mean(x^2)
    // + eps); LayerNorm: xhat = (x - mean) / sqrt(var + eps). out may be x or residual
    void (*norm_forward)(Stored *out, const Stored *x, const Stored *w, const Stored *b, const Stored *residual,
                         size_t n, size_t C, Norm norm);
    // dx[n,C] = (or += with accumulate) gradient of x, dw[C] +=, LayerNorm: db[C] +=;  dx may be dout or x when not
    // accumulating. With dw NULL (db then, too) dx alone is computed, and scratch may be NULL.
    void (*norm_backward)(Stored *dx, Summed *dw, Summed *db, const Stored *dout, const Stored *x, const Stored *w,
                          size_t n, size_t C, Norm norm, int accumulate, Summed *scratch);
    size_t (*norm_backward_scratch)(size_t n, size_t C);

    // ---- linear: weight[OC,C], as in out = x weight^T + bias ------------------------------------------------------
    // out[n,OC] = x[n,C] weight^T (+ bias[OC]) (+ residual[n,OC]);  bias, residual may be NULL; out may be residual
    void (*linear_forward)(Stored *out, const Stored *x, const Stored *weight, const Stored *bias,
                           const Stored *residual, size_t n, size_t C, size_t OC);
    // dx[n,C] = (or += with accumulate) dout[n,OC] weight
    void (*linear_backward_input)(Stored *dx, const Stored *dout, const Stored *weight, size_t n, size_t C, size_t OC,
                                  int accumulate);
    // dweight[OC,C] += dout^T x, dbias[OC] += column sums of dout (dbias may be NULL)
    void (*linear_backward_weight)(Summed *dweight, Summed *dbias, const Stored *dout, const Stored *x, size_t n,
                                   size_t C, size_t OC);

    // ---- adapters (LoRA): h[n,r] b[OC,r]^T joins a product's columns [column, column + OC) of out[n,width] ----------
    // these columns of out += h b^T, summed in Summed and rounded once; with b = 0 nothing changes (but -0, which may
    // become 0)
    void (*adapter_forward)(Stored *out, size_t width, size_t column, const Stored *h, const Stored *b, size_t n,
                            size_t r, size_t OC);
    // dh[n,r] = (these columns of dout[n,width]) b, db[OC,r] += (these columns)^T h (db may be NULL)
    void (*adapter_backward)(Stored *dh, Summed *db, const Stored *dout, size_t width, size_t column, const Stored *h,
                             const Stored *b, size_t n, size_t r, size_t OC);
    void (*scale)(Stored *x, double factor, size_t count); // x *= factor
    // out[n,width] = (or += with accumulate) in / (1 - rate) where dropout_keeps (random.h) the element of this seed
    // and place (first_row + row) * width + column, 0 elsewhere;  0 <= rate < 1; out may be in when not accumulating.
    // Its own backward.
    void (*dropout)(Stored *out, const Stored *in, size_t n, size_t width, size_t first_row, double rate, uint64_t seed,
                    int accumulate);

    // ---- rotary position embedding, in place on x[n,heads,HD]: pairs (i, i + HD/2) turned by position * frequency[i] ----
    void (*rope_forward)(Stored *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                         size_t HD);
    void (*rope_backward)(Stored *dx, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                          size_t HD); // the turn back

    // ---- attention of one chunk's queries over their documents' keys ----------------------------------------------
    // q, out [n,NH,HD] and lse [n,NH], n = spans_rows(spans); k, v [.,NKV,HD] start at token 0 of the stream. out =
    // softmax(scale q k^T) v, causal within the document and no more than spans.window keys back; lse = log sum exp of
    // the scaled scores. Keys that no query sees are not read.
    // With shape->partial keys come a range at a time, in any order (ring attention, arXiv 2310.01889): out and lse are
    // those of this range, with accumulate those of this range and the ones they hold. Rows of k, v outside of the range
    // are not read: they need not be memory. A query may see no key of the range; spans.pairs are those of the range.
    // As long as a row has met no key its out is 0 and its lse -infinity. out: Stored, partial: Summed
    void (*attention_forward)(void *out, Summed *lse, const Stored *q, const Stored *k, const Stored *v,
                              const AttentionShape *shape, Summed *scratch);
    // dq[n,NH,HD] = (or += with accumulate); dk, dv[.,NKV,HD] += for the keys that a query of the spans sees. out and lse
    // are those of all ranges together. dq: Stored, partial: Summed
    void (*attention_backward)(void *dq, Summed *dk, Summed *dv, const Stored *dout, const Stored *out, const Stored *q,
                               const Stored *k, const Stored *v, const Summed *lse, const AttentionShape *shape,
                               Summed *scratch);
    // enough for any of these; never less for more queries: plans rely on it
    size_t (*attention_scratch)(size_t n, size_t NH, size_t NKV, size_t HD);

    // ---- activations ----------------------------------------------------------------------------------------------
    // out[n,FF] of in[n,2FF] = [gate, up] in each row; GELU: of in[n,FF]
    void (*activation_forward)(Stored *out, const Stored *in, ActivationKind kind, size_t n, size_t FF);
    void (*activation_backward)(Stored *din, const Stored *dout, const Stored *in, ActivationKind kind, size_t n,
                                size_t FF); // din may be in

    // ---- loss head --------------------------------------------------------------------------------------------------
    // logp[n] = log softmax(logits[n,V] / temperature)[target], 0 where target < 0. With weight (dL/dlogp, [n]) the
    // logits become their own gradient: weight/temperature * (onehot(target) - softmax). With weight NULL they are
    // afterwards what they were before, but not read-only: a row's target stands aside while the others are summed.
    // entropy[n] (may be NULL) = -sum_v p log p of p = softmax(logits / temperature), nats; 0 where target < 0.
    void (*logprob)(Summed *logp, Summed *entropy, Stored *logits, const int32_t *targets, const Summed *weight,
                    size_t n, size_t V, double temperature);

    // ---- gradients and the optimizer --------------------------------------------------------------------------------
    void (*round_sums)(Stored *out, const Summed *in, size_t count);                  // out = in
    void (*gradient_add)(void *gradient, DType type, const Summed *in, size_t count); // gradient += in
    double (*sum_of_squares)(const void *x, DType type, size_t count);                // returned to the host
    // w[count] stepped by AdamW (decoupled decay); master (fp32) holds the weights where it is not NULL, w its rounding
    void (*adamw)(Stored *w, float *master, const void *gradient, DType gradient_type, void *m, void *v,
                  DType moment_type, size_t count, const AdamW *step);

    // ---- between processes (world.h); called by every rank of the group, in the same order; never in a group of one ----
    // What is asked for may run beside other ops until its ticket, which is returned, is awaited: before that, nobody
    // writes to its memory or looks at what it changes there. Tickets grow; they are done in order. Portions of ranks
    // are shard_range(count, unit, ranks of the group, rank).
    // x[count] of all ranks are added up: each rank's own portion of x becomes that of the sums; the rest is undefined
    int64_t (*reduce_scatter)(RankGroup group, Summed *x, size_t count, size_t unit);
    // x[count] of elements of `size` bytes: each rank's own portion comes to all others
    int64_t (*all_gather)(RankGroup group, void *x, size_t count, size_t unit, size_t size);
    // parcels[n] to and from other ranks; every out has its in on the other side, in the order of this list
    int64_t (*exchange)(RankGroup group, const Message *messages, size_t n);
    void (*await)(int64_t ticket); // later ops, and copies, find it done, and all before it
} Ops;

#ifdef __cplusplus
extern "C" {
#endif
extern const Ops *const ops_device; // the op set that was linked
#ifdef __cplusplus
}
#endif

#endif
