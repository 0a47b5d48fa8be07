/*
The op interface: everything the driver may do to tensors. One table (struct Ops) per op set; the driver calls nothing
else on tensors and never dereferences tensor memory, so Stored and Summed are incomplete types here:

    Stored   an element of floatX: weights, activations and their gradients      (fp32, bf16 or double)
    Summed   an element of a sum over tokens: a layer's dW, dK, dV, log-sum-exp  (fp32; double in the double build)

Write contract: outputs named `out` are overwritten; `d`-prefixed parameter gradients accumulate (+=); gradients of
activations are overwritten unless the comment says otherwise. Outputs alias inputs only where the comment allows it.
Everything is row-major, and contiguous but for what has a `stride`. n is the number of tokens (rows); the short shape
names are design vocabulary: C hidden, NH and NKV query and key/value heads, HD head_dim, FF intermediate, V vocabulary,
N tokens of the stream.

An op that needs scratch memory has a sibling X_scratch that tells how many Summed elements; the caller plans for them.
All ops are deterministic for a given build, machine and thread count. Every pointer is device memory unless it says
host.
*/
#ifndef LLMC_OPS_H
#define LLMC_OPS_H
#include "llmc/base/dtype.h"
#include "llmc/base/quantise.h"
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

// Rows of lse, and with HD elements each of q, out, dout and dq: one for each query and head
static size_t attention_rows(const AttentionShape *shape) { return spans_rows(shape->spans) * shape->NH; }

// Layers of linear attention (Gated DeltaNet, arXiv 2412.06464) on the tokens of spans. A row of what they project is
// q[HK,K] | k[HK,K] | v[HV,V] | z[HV,V] | b[HV] | a[HV]; W = 2 HK K + HV V channels q, k, v pass through the
// convolution. What passes from token to token is the state of a document: what its next span needs of the tokens
// before.
typedef struct {
    Spans spans;         // window and pairs are not looked at
    size_t HK, HV, K, V; // value head h has the key and query of head h / (HV/HK)
    size_t taps;         // of the convolution, at most CONV_TAPS_MAX
    size_t stride;       // elements from row to row of what is projected, and of its gradient
    size_t slot_tokens;  // 0: one state, of the span at hand; else state i is that of documents that begin in
                         // [i slot_tokens, (i + 1) slot_tokens)
} DeltaShape;

enum { CONV_TAPS_MAX = 8, DELTA_BLOCK = 64 }; // tokens of a block in the chunked form, by which FLOPs are counted

static size_t delta_channels(const DeltaShape *shape) { return 2 * shape->HK * shape->K + shape->HV * shape->V; }
static size_t delta_rows(const DeltaShape *shape) { return spans_rows(shape->spans); }
static size_t delta_state_elements(const DeltaShape *shape) { return shape->HV * shape->K * shape->V; }
static size_t delta_transfer_elements(const DeltaShape *shape) { return shape->HV * shape->K * shape->K; }

typedef enum { DELTA_FORWARD, DELTA_STATE, DELTA_BACKWARD, DELTA_STATE_BACKWARD, DELTA_TRANSFER } DeltaWork;

// FLOPs for each token of delta_forward with its output, or of the state alone, of delta_backward or of dstate alone,
// and of a transfer. In blocks of B tokens, a multiply-add two, of triangles their half. Forward, each key head: k k^T
// and q k^T, B K each; each value head: k S, q S and k^T u, 2 K V each, the system for u and q k^T u, B V each; the
// state alone is without q. Backward computes the state and u of each block again, then k k^T and q k^T, and two
// products for each of forward. dstate alone takes as many as forward. A transfer: k T, k^T u and its system.
static double delta_flops(const DeltaShape *shape, DeltaWork work) {
    const double B = DELTA_BLOCK, K = (double)shape->K, V = (double)shape->V;
    const double keys = (double)shape->HK * B * K, values = (double)shape->HV * B * V;
    const double states = 2 * (double)shape->HV * K * V;
    switch (work) {
    case DELTA_STATE: return keys + values + 2 * states;
    case DELTA_BACKWARD: return 7 * keys + 5 * values + 8 * states;
    case DELTA_TRANSFER: return (double)shape->HV * (B * K + 4 * K * K);
    default: return 2 * keys + 2 * values + 3 * states;
    }
}

// The state of a span
static size_t delta_slot(const DeltaShape *shape, const Span *span) {
    return shape->slot_tokens ? span->document / shape->slot_tokens : 0;
}

static size_t delta_slots(const DeltaShape *shape) {
    size_t slots = 1;
    for (size_t i = 0; i < shape->spans.count; i++) {
        const size_t slot = delta_slot(shape, &shape->spans.span[i]) + 1;
        slots = slot > slots ? slot : slots;
    }
    return slots;
}

// The way of attention where a library has more than one (attention_choose)
typedef struct {
    int any_order;    // backward's sums may be added in any order: results differ in their last bits from run to run
    size_t workspace; // most bytes that a call of the library may use beside its tensors; 0: the op set's own choice
} AttentionChoice;

#define NO_ROW SIZE_MAX // no row of a table: of embedding_backward

typedef enum { NORM_RMS, NORM_LAYER } NormKind;

typedef struct {
    double eps, offset; // offset: added to the weight (RMSNorm)
    NormKind kind;
} Norm;

// How queries or keys are turned by their positions
typedef struct {
    float factor;    // of sine and cosine (YaRN's)
    int interleaved; // pairs are (2i, 2i + 1), not (i, i + R/2)
    double growth;   // queries of position p are scaled by 1 + growth log(1 + floor(p / original)), too; 0: none
    double original;
} Rotation;

// SwiGLU: silu(gate) up; GELU by tanh: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); GeGLU: gelu(gate) up
typedef enum { ACTIVATION_SWIGLU, ACTIVATION_GELU, ACTIVATION_GEGLU } ActivationKind;

// Elements of a row of the input: gate and up, or one
static size_t activation_width(ActivationKind kind, size_t FF) { return kind == ACTIVATION_GELU ? FF : 2 * FF; }

typedef struct {
    double learning_rate, beta1, beta2, epsilon, weight_decay;
    double gradient_scale; // the gradient is multiplied by this first (clipping)
    int64_t step;          // from 1, for bias correction
    uint64_t seed;         // of stochastic rounding, used where floatX is bf16 and there is no master copy
    size_t first;          // place of the first element in its parameter: its random bits go by it
    // of moments in 8 bits: the first element's place in its block, and a scale for each block that is touched
    size_t block_first;
    float *m_scales, *v_scales;
} AdamW;

// Elements of a parameter that share a scale where moments are in 8 bits
enum { MOMENT_BLOCK = 256 };

static size_t moment_blocks(DType moments, const AdamW *step, size_t count) {
    return moments == DTYPE_INT8 ? (step->block_first + count + MOMENT_BLOCK - 1) / MOMENT_BLOCK : 0;
}

// One rank's part in an exchange with another one of its group.
typedef struct {
    size_t peer;     // rank within the group
    const void *out; // what is sent there
    void *in;        // where what comes from there goes
    size_t out_bytes, in_bytes;
} Message;

typedef struct {
    double temperature; // logits are divided by it; 0: always the likeliest token
    size_t top_k;       // only the top_k likeliest tokens; 0: all
    double top_p;       // of these, only the fewest likeliest that hold this share of their probability; 1: all
    uint64_t seed;      // of the uniform numbers, which the caller of draw makes
} SamplingSettings;

// Elements from the first of n rows of `width` elements to the end of the last
static size_t strided(size_t n, size_t width, size_t stride) { return n ? (n - 1) * stride + width : 0; }

// Chunks that suit op set "cuda": each reads and writes a layer's fp32 dW, at 1024 tokens half as long as its product.
enum { CUDA_CHUNK = 4096, CUDA_LOGITS_CHUNK = 2048 };

// A verdict on a part of a machine (machine_findings)
typedef enum { FINDING_OK, FINDING_NOTE, FINDING_WRONG, FINDINGS } Finding; // NOTE: works, but could do better
typedef __attribute__((format(printf, 3, 4))) void (*TellFinding)(const char *name, Finding finding, const char *format,
                                                                  ...);

typedef struct Ops {
    const char *name;      // "cpu", "cuda", "dry"
    const char *libraries; // that it was built with: "oneDNN 3.1.0, Open MPI 4.1.4"
    DType stored, summed;
    size_t chunk, logits_chunk; // tokens of a chunk that suit it, where none are asked for
    size_t row_multiple;        // elements: rows of logits are padded to a multiple of it
    size_t quantised_rows;      // of so many rows linear_forward_quantised is faster than a product of decoded weights
#define OP(type, op, parameters, ...) type(*op) parameters;
#include "op_list.h" // each op with its contract
} Ops;

#ifdef __cplusplus
extern "C" {
#endif
extern const Ops *const ops_device; // the op set that was linked
#ifdef __cplusplus
}
#endif

#endif
