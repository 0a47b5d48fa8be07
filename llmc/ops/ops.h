/*
The op interface: everything the driver may do to tensors. One table (struct Ops) per op set; the driver calls nothing
else on tensors and never dereferences tensor memory, so Stored and Summed are incomplete types here:

    Stored   an element of floatX: weights, activations and their gradients      (fp32, bf16 or double)
    Summed   an element of a sum over tokens: a layer's dW, dK, dV, log-sum-exp  (fp32; double in the double build)

Write contract: outputs named `out` are overwritten; `d`-prefixed parameter gradients accumulate (+=); gradients of
activations are overwritten unless the comment says otherwise. Outputs alias inputs only where the comment allows it.
Everything is row-major, and contiguous unless it has a `stride`. n is the number of tokens (rows); the short shape
names are design vocabulary: C hidden, NH and NKV query and key/value heads, HD head_dim, FF intermediate, V vocabulary,
N tokens of the stream.

An op that needs scratch memory has a sibling X_scratch that returns its Summed elements; the caller plans for them. All
ops are deterministic for a given build, machine and thread count. Every pointer is device memory unless it says host.
*/
#ifndef LLMC_OPS_H
#define LLMC_OPS_H
#include "llmc/base/dtype.h"
#include "llmc/base/quantise.h"
#include "llmc/ranks/world.h"

typedef struct Stored Stored;
typedef struct Summed Summed;

// Queries [begin, end) of one document. A query attends to keys [document, its own position]. All are indices into the
// stream. A span is never empty: begin < end. Its queries are rows row, row + 1, ... of q, out, lse, dout and dq.
typedef struct {
    size_t document, begin, end, row;
} Span;

// The spans of one call, each of another document. Rows are contiguous: span[i].row is the sum of the lengths of the
// spans before. In the stream, spans may have gaps and any order. Host memory.
typedef struct {
    const Span *span;
    size_t count;
    size_t window; // most keys that a query sees, its own key included (sliding window); 0: all keys of its document
    double pairs;  // query-key pairs in these spans; only the dry op set reads it
} Spans;

// Returns the rows of all spans together: n of q, out, lse, dout and dq.
static size_t spans_rows(Spans spans) {
    const Span *last = spans.count ? &spans.span[spans.count - 1] : NULL;
    return last ? last->row + last->end - last->begin : 0;
}

// Returns the first key that a query at token t sees.
static size_t first_key(size_t document, size_t t, size_t window) {
    return window && t - document >= window ? t + 1 - window : document;
}

// Counts the query-key pairs of queries [first, end) of a document; indices count from its start.
static double query_key_pairs(size_t first, size_t end, size_t window) {
    const double w = window ? (double)window : (double)end; // queries below w see all earlier tokens
    const double a = (double)first < w ? (double)first : w, b = (double)end < w ? (double)end : w;
    return 0.5 * (b * (b + 1) - a * (a + 1)) + w * ((double)end - b - ((double)first - a));
}

// Keys of tokens [begin, end) of the stream
typedef struct {
    size_t begin, end;
} KeyRange;
static const KeyRange all_keys = {0, SIZE_MAX};

// Counts a span's query-key pairs with keys at or after `key`, as if its document began there.
static double span_pairs_from(Span span, size_t key, size_t window) {
    const size_t start = key > span.document ? key : span.document;
    const size_t begin = span.begin > start ? span.begin : start, end = span.end > start ? span.end : start;
    return query_key_pairs(begin - start, end - start, window);
}

// Counts a span's query-key pairs with the keys of a range.
static double span_pairs(Span span, KeyRange keys, size_t window) {
    return span_pairs_from(span, keys.begin, window) - span_pairs_from(span, keys.end, window);
}

// Documents of a key/value cache: their number, and most tokens of each. Zeros: no cache
typedef struct {
    size_t count, tokens;
} TextSlots;
static const TextSlots no_slots = {0, 0};

// One call of attention: queries of the spans over their documents' keys
typedef struct {
    Spans spans;
    size_t NH, NKV, HD; // query head h reads key/value head h / (NH/NKV)
    double scale;       // factor of the scores
    KeyRange keys;      // keys that the call reads
    int partial;     // 1: the keys are one range of several. out and dq are then Summed; round_sums rounds them after
                     // the last range
    int accumulate;  // with partial: this range adds to the ranges already in out, lse and dq
    TextSlots slots; // generation: the documents of the cache; forward only
} AttentionShape;

// Returns the rows of lse. q, out, dout and dq have as many rows of HD elements: one for each query and head.
static size_t attention_rows(const AttentionShape *shape) { return spans_rows(shape->spans) * shape->NH; }

// Layers of linear attention (Gated DeltaNet, arXiv 2412.06464) on the tokens of spans. A row of the projection is
// q[HK,K] | k[HK,K] | v[HV,V] | z[HV,V] | b[HV] | a[HV]; the W = 2 HK K + HV V channels q, k, v pass through the
// convolution. Mamba-2 (arXiv 2405.21060): z[HV,V] | v[HV,V] | k[HK,K] | q[HK,K] | dt[HV], with x, B, C for v, k, q. A
// document's state is all that its next span needs of earlier tokens. A short convolution alone (LFM2)
// has gates: a row of the projection is B[W] | C[W] | x[W], the convolution's input is B x, and C multiplies its output
// in place of SiLU.
typedef struct {
    Spans spans;         // window and pairs are ignored
    size_t HK, HV, K, V; // value head h has the key and query of head h / (HV/HK)
    size_t taps;         // taps of the convolution, at most CONV_TAPS_MAX
    size_t stride;       // elements from row to row of the projection, and of the projection's gradient
    size_t slot_tokens;  // 0: one state, of the current span; else state i belongs to documents that begin in [i
                         // slot_tokens, (i + 1) slot_tokens)
    int gates;           // 1: a short convolution alone
    int doubled;         // 1: the rule's beta is 2 s(b), so a token may change a state's sign; 0: s(b)
    int ssd;             // 1: Mamba-2's rule (ssd_forward), whose transfer is a number for each head
    double least, most;  // bounds of Mamba-2's time steps
} DeltaShape;

enum { CONV_TAPS_MAX = 8, DELTA_BLOCK = 64 }; // DELTA_BLOCK: tokens of a block of the chunked form, for counting FLOPs

static size_t delta_channels(const DeltaShape *shape) { return 2 * shape->HK * shape->K + shape->HV * shape->V; }
// Returns how many elements of a projection's row the convolution reads.
static size_t conv_width(const DeltaShape *shape) { return (shape->gates ? 3 : 1) * delta_channels(shape); }
static size_t delta_rows(const DeltaShape *shape) { return spans_rows(shape->spans); }
static size_t delta_state_elements(const DeltaShape *shape) { return shape->HV * shape->K * shape->V; }
static size_t delta_transfer_elements(const DeltaShape *shape) {
    return shape->ssd ? shape->HV : shape->HV * shape->K * shape->K;
}

typedef enum { DELTA_FORWARD, DELTA_STATE, DELTA_BACKWARD, DELTA_STATE_BACKWARD, DELTA_TRANSFER } DeltaWork;

// Returns the FLOPs per token of one kind of work: delta_forward, the state alone, delta_backward, dstate alone, or a
// transfer. A multiply-add is two FLOPs; triangular products count half. Forward in blocks of B tokens, each key head:
// k k^T and q k^T, B K each; each value head: k S, q S and k^T u, 2 K V each, the system for u and q k^T u, B V each.
// The state alone needs no q. Backward recomputes each block's state and u, then k k^T and q k^T, and does two products
// for each product of forward. dstate alone costs as much as forward. A transfer: k T, k^T u and its system. Mamba-2
// has no system, no k k^T and no k S: q k^T, q S, k^T u and q k^T u. Its state alone, and dstate alone, is one product.
static double delta_flops(const DeltaShape *shape, DeltaWork work) {
    const double B = DELTA_BLOCK, K = (double)shape->K, V = (double)shape->V;
    const double keys = (double)shape->HK * B * K, values = (double)shape->HV * B * V;
    const double states = 2 * (double)shape->HV * K * V;
    if (shape->ssd)
        return work == DELTA_FORWARD    ? keys + values + 2 * states
               : work == DELTA_BACKWARD ? 3 * keys + 2 * values + 5 * states
               : work == DELTA_TRANSFER ? 0
                                        : states;
    switch (work) {
    case DELTA_STATE: return keys + values + 2 * states;
    case DELTA_BACKWARD: return 7 * keys + 5 * values + 8 * states;
    case DELTA_TRANSFER: return (double)shape->HV * (B * K + 4 * K * K);
    default: return 2 * keys + 2 * values + 3 * states;
    }
}

// Returns the index of a span's state.
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

// Settings of a library's attention (attention_choose)
typedef struct {
    int any_order;    // 1: backward's sums may be added in any order, so runs differ in their last bits
    size_t workspace; // most bytes that a library call may use in addition to its tensors; 0: the op set's own choice
} AttentionChoice;

#define NO_ROW SIZE_MAX // no row: for embedding_backward's skip, pad_token_id

typedef enum { NORM_RMS, NORM_LAYER } NormKind;

typedef struct {
    double eps, offset; // offset: added to the weight (RMSNorm)
    NormKind kind;
} Norm;

// Rotation of queries or keys by their positions
typedef struct {
    float factor;    // factor of sine and cosine (YaRN)
    int interleaved; // 1: pairs are (2i, 2i + 1), not (i, i + R/2)
    double growth;   // queries at position p are also scaled by 1 + growth log(1 + floor(p / original)); 0: not scaled
    double original;
} Rotation;

// SwiGLU: silu(gate) up; GELU by tanh: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); GeGLU: gelu(gate) up; CLAMPED
// (gpt-oss): g (u + 1) / (1 + exp(-alpha g)), g = min(gate, limit), u = min(max(up, -limit), limit); RELU2: max(x, 0)^2
typedef enum {
    ACTIVATION_SWIGLU,
    ACTIVATION_GELU,
    ACTIVATION_GEGLU,
    ACTIVATION_CLAMPED,
    ACTIVATION_RELU2
} ActivationKind;

typedef struct {
    ActivationKind kind;
    double alpha, limit; // parameters of CLAMPED
} Activation;

// Returns the elements of an input row: gate and up, or only FF.
static int activation_gates(ActivationKind kind) { return kind != ACTIVATION_GELU && kind != ACTIVATION_RELU2; }
static size_t activation_width(ActivationKind kind, size_t FF) { return activation_gates(kind) ? 2 * FF : FF; }

// Experts (a mixture): E experts, k for each token. A router gives a token logits z[E], from which its k experts and
// their weights follow (facts: the models' own code). A route is a token's k experts, in falling order of their scores.
typedef enum { ROUTER_NONE, ROUTER_SOFTMAX, ROUTER_SIGMOID } RouterKind;

typedef struct {
    RouterKind kind;     // scores p = softmax(z), or s = 1 / (1 + exp(-z)); a bias is added to s for the choice
    size_t E, k;         // number of experts, and of a token's experts
    int normalised;      // 1: a token's weights are divided by their sum (sigmoid: + epsilon)
    double scale;        // factor of the weights
    size_t groups, kept; // experts are chosen in the `kept` best of `groups` groups; the sum of a group's two best
                         // scores ranks it
    double epsilon;
} RouterShape;

#define NO_EXPERT 0xffff // stands for a token's first expert: its route is unknown
enum { EXPERTS_MOST = 4096, CHOSEN_MOST = 64 };

typedef struct {
    double learning_rate, beta1, beta2, epsilon, weight_decay;
    double gradient_scale; // factor of the gradient, applied first (clipping)
    int64_t step;          // number of the step, from 1, for bias correction
    uint64_t seed;         // seed of stochastic rounding, used for bf16 weights without a master copy
    size_t first;          // index of the first element in its parameter: selects its random bits
    // moments in 8 bits: index of the first element in its block, and a scale for each block touched
    size_t block_first;
    float *m_scales, *v_scales;
} AdamW;

// Elements of a parameter that share a scale if moments are in 8 bits
enum { MOMENT_BLOCK = 256 };

static size_t moment_blocks(DType moments, const AdamW *step, size_t count) {
    return moments == DTYPE_INT8 ? (step->block_first + count + MOMENT_BLOCK - 1) / MOMENT_BLOCK : 0;
}

// Most parts of a sum of squares, in double; fewest numbers that a part sums.
enum { SQUARES_PARTS = 512, SQUARES_OF_PART = 256 };

// Returns how many parts `count` numbers fill. More parts would not change the sums.
static size_t squares_parts(size_t count) {
    return min_size((count + SQUARES_OF_PART - 1) / SQUARES_OF_PART, SQUARES_PARTS);
}

// Adds up the parts of a sum of squares, in host memory.
static double squares_total(const double *part, size_t parts) {
    double sum = 0;
    for (size_t i = 0; i < parts; i++) sum += part[i];
    return sum;
}

// One rank's part of an exchange with another rank of its group
typedef struct {
    size_t peer;     // rank within the group
    const void *out; // bytes to send
    void *in;        // bytes to receive
    size_t out_bytes, in_bytes;
} Message;

// A softmax's argument: z = logits / divisor; with a cap z = cap tanh(logits / cap) / divisor. Infinite logits stay
// infinite
typedef struct {
    double divisor, cap; // cap 0: no cap
} Temperature;

// A student's loss (op distill): cross-entropy with weight 1 - share, divergence from a teacher with weight share
typedef struct {
    Temperature temperature;
    double softness; // temperature of the divergence, in addition
    double share;
} Distillation;

typedef struct {
    double temperature; // divisor of the logits; 0: always the likeliest token
    double cap;         // Temperature.cap
    size_t top_k;       // draws only from the top_k likeliest tokens; 0: all
    double top_p;       // of the top_k, only the fewest likeliest tokens that hold this probability; 1: all
    uint64_t seed;      // seed of the uniform numbers, which the caller of draw makes
} SamplingSettings;

// A part of a decoding step, for op graph_begin. Parts with the same bytes make the same calls with the same arguments;
// only the contents of device memory and the spans differ.
typedef struct {
    const Span *span;    // [n] the spans of all calls of the part, each of one token, on the host
    const Span *copied;  // [n] copy of `span` in device memory
    size_t n, part;      // part: the part's number in the step
    SamplingSettings of; // settings of the part's draws; zeros: the part draws nothing
} GraphKey;

// Returns the elements from the start of row 0 to the end of row n - 1; rows have `width` elements and begin `stride`
// elements apart.
static size_t strided(size_t n, size_t width, size_t stride) { return n ? (n - 1) * stride + width : 0; }

// Chunks that suit op set "cuda". Each chunk reads and writes a layer's fp32 dW; at 1024 tokens that takes half as long
// as the product.
enum { CUDA_CHUNK = 4096, CUDA_LOGITS_CHUNK = 2048 };
enum { PINNED_PER_TABLE = 512 }; // bytes of host memory for one of a GPU's page tables: measured on an H100
// For a GPU: an H100 gains nothing with 16,384 (dev/gpu_log.md), unless an expert then gets too few rows.
enum { LARGEST_CHUNK = 8192, LARGEST_LOGITS_CHUNK = 8192, ROWS_OF_EXPERT = 512 };

// Verdict on a part of a machine (machine_findings)
typedef enum { FINDING_OK, FINDING_NOTE, FINDING_WRONG, FINDINGS } Finding; // NOTE: it works, but could be better
typedef __attribute__((format(printf, 3, 4))) void (*TellFinding)(const char *name, Finding finding, const char *format,
                                                                  ...);

typedef struct Ops {
    const char *name;      // "cpu", "cuda", "dry"
    const char *libraries; // libraries it was built with: "oneDNN 3.1.0"
    DType stored, summed;
    size_t chunk, logits_chunk; // default tokens of a chunk
    size_t row_multiple;        // elements: rows of logits are padded to a multiple of this
    size_t quantised_rows;      // most rows for which linear_forward_quantised beats decoding the weights first
    int graphs;                 // 1: graph_begin repeats the launches of a part
#define OP(type, op, parameters, ...) type(*op) parameters;
#include "op_list.h" // each op with its contract
} Ops;

// Name of an op set's table: OPS_TABLE(cpu) is ops_cpu_bf16. An op set's object exports nothing else.
#if defined(PRECISION_BF16)
#define OPS_TABLE(device) ops_##device##_bf16
#elif defined(PRECISION_DOUBLE)
#define OPS_TABLE(device) ops_##device##_double
#else
#define OPS_TABLE(device) ops_##device##_fp32
#endif

#ifdef __cplusplus
extern "C" {
#endif
extern const Ops *const op_sets[]; // the linked op sets in order of preference, then NULL (scripts/op_sets.sh)
extern const Ops *ops_device;      // the chosen op set; at first op_sets[0]
#ifdef __cplusplus
}
#endif

#endif
