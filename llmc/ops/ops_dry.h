/*
Op set "dry": computes nothing. It counts floating-point operations (a multiply-add is two) of matrix products and
attention, and the bytes that other ops of a pass move. It checks that every tensor lies within one live region of the
arena, to its last element. Plans are made with it, and tests use it to check how the driver uses its arena. Any build
plans for any element type; scratch sizes come from the linked op set.
*/
#ifndef LLMC_OPS_DRY_H
#define LLMC_OPS_DRY_H
#include "arena.h"
#include "gpu_scratch.h"

// Work of the ops of a pass
typedef struct {
    double flops;                                 // FLOPs of products and attention
    double attention_forward, attention_backward; // the part of flops in attention
    double delta;                                 // the part of flops in the delta rule
    double operands;                              // bytes that products and attention read and write
    double stalled; // FLOPs that products could do while they wait for operands (DryCount.ridge)
    double moved;   // bytes that other ops move, and bytes that attention stages
    // counted only for a known machine (DryCount.library)
    double own_forward, own_backward;           // attention FLOPs in our own kernels
    double slow_forward, slow_backward;         // FLOPs that fit in the additional time of heads and windows
    double slow_own_forward, slow_own_backward; // FLOPs that our own kernels could do in the additional time
    double any_order;                           // part of attention_backward: in the library, with sums in any order
    double masked_forward, masked_any_order;    // part of attention in the library: AttentionCounts.masked
    double library_calls, staged;               // calls of the library; bytes of `moved` that these calls stage
    double launches;                            // kernel launches of the counted ops
} OpCounts;
enum { OP_COUNTS = sizeof(OpCounts) / sizeof(double) };

// Rates of kernels relative to the rates by which counts are divided; 0: equal
typedef struct {
    double experts, experts_weight; // experts' products, and those that make gradients of weights: / other products
    double backward[WGMMA_HEADS];   // backward with heads of wgmma_heads[i] by Hopper's kernels: / our other kernels
    int activates;                  // one kernel computes experts_activate, where its tiles suit the activation
} KernelRates;

typedef struct {
    const Arena *arena;    // [PLACES]; NULL: ranges are not checked
    size_t stored, summed; // bytes of an element
    double ridge;          // FLOPs of products that a machine does while it moves a byte; 0: unknown
    KernelRates rates;     // with ridge
    int library;           // LIBRARY_FORWARD, ...: which attention is counted as library calls (attention_calls.h)
    size_t head_dim;       // head size to which `library` refers; heads of another size are global heads
    double factor;         // each call counts this many times
    AttentionChoice attention;
    OpCounts counts;
    // the last call: its op, the op's kind, and its weight's [rows, cols] or a norm's [cols]; else 0
    const char *op;
    size_t rows, cols;
} DryCount;

static DryCount dry; // counts of the current plan; there is one plan at a time

enum { EXPERTS_TILE = 128 }; // rows of a tile in op set "cuda"

static void dry_range(const char *tensor, const void *pointer, size_t count, size_t size) {
    if (dry.arena && pointer && !arena_holds(dry.arena, pointer, count * size))
        die("%s: %s, %zu elements of %zu bytes, is not within one live region of the arena; please report it", dry.op,
            tensor, count, size);
}

// Checks that a range lies within one live region of some place.
static void dry_place(const char *name, const void *pointer, size_t bytes) {
    for (int place = 0; place < PLACES && dry.arena; place++)
        if (arena_holds(&dry.arena[place], pointer, bytes)) return;
    dry_range(name, pointer, bytes, 1);
}

static void dry_move(size_t elements, size_t size) {
    dry.counts.moved += dry.factor * (double)elements * (double)size, dry.counts.launches += dry.factor;
}

// ---- counts and checks of op_list.h, other than ranges --------------------------------------------------------------
static void dry_norm(Norm norm, const char *rms, const char *layer, size_t C) {
    dry.op = norm.kind == NORM_RMS ? rms : layer, dry.cols = C;
}

static void dry_activation(Activation activation, int backward) {
    static const char *const names[][2] = {{"swiglu_forward", "swiglu_backward"},
                                           {"gelu_forward", "gelu_backward"},
                                           {"geglu_forward", "geglu_backward"},
                                           {"clamped_forward", "clamped_backward"},
                                           {"relu2_forward", "relu2_backward"}};
    dry.op = names[activation.kind][backward];
}

// Counts a product. weight: bytes of the weight, or of its gradient read and written; slower: factor of the product's
// time
static void dry_product_of(size_t n, size_t C, size_t OC, double weight, double slower) {
    const double flops = 2.0 * (double)n * (double)C * (double)OC;
    const double bytes = (double)n * (double)(C + OC) * (double)dry.stored + weight;
    dry.rows = OC, dry.cols = C;
    dry.counts.flops += dry.factor * flops, dry.counts.operands += dry.factor * bytes;
    dry.counts.launches += dry.factor;
    if (dry.ridge > 0) dry.counts.stalled += dry.factor * (fmax(bytes * dry.ridge, flops * slower) - flops);
}

// Counts a product. matrix: bytes of the weight per element, as in dry_product_of
static void dry_product(size_t n, size_t C, size_t OC, size_t matrix) {
    dry_product_of(n, C, OC, (double)(C * OC * matrix), 1);
}

// Counts a product of rows with their experts' matrices. matrix: bytes per element; more: bytes besides, negative where
// results are not written; rate: see KernelRates. Rows may use all experts. They leave half of a tile of EXPERTS_TILE
// rows empty per expert.
static void dry_experts_at(double rate, size_t rows, size_t E, size_t C, size_t OC, double matrix, double more) {
    const double used = (double)min_size(rows, E), tiles = (double)rows + used * (double)(EXPERTS_TILE / 2);
    dry_product_of(rows, C, OC, used * (double)(C * OC) * matrix + more,
                   tiles / (double)max_size(rows, 1) / (rate > 0 ? rate : 1));
}
static void dry_experts(size_t rows, size_t E, size_t C, size_t OC, double matrix) {
    dry_experts_at(dry.rates.experts, rows, E, C, OC, matrix, 0);
}
static void dry_experts_weight(size_t rows, size_t E, size_t C, size_t OC) {
    dry_experts_at(dry.rates.experts_weight, rows, E, C, OC, 2 * (double)dry.summed, 0);
}

// Counts a product, the biases and the activation of its rows and, if they are weighed, their factors.
static void dry_activated(size_t rows, size_t E, size_t C, size_t I, Activation activation, int biased, int weighed,
                          int keep) {
    const size_t H = activation_width(activation.kind, I);
    const double kept = keep ? 0 : (double)H;
    if (dry.rates.activates && wgmma_activates(activation.kind, biased)) {
        dry_experts_at(dry.rates.experts, rows, E, C, H, (double)dry.stored,
                       (double)rows * ((double)I - kept) * (double)dry.stored);
        return;
    }
    dry_experts(rows, E, C, H, (double)dry.stored);
    if (biased) dry_move(2 * rows * H, dry.stored);
    dry_move(rows * (H + I), dry.stored);
    if (weighed) dry_move(2 * rows * I, dry.stored);
}

// Kernels of a library call. Forward: one, and log-sum-exp transposed. Backward: five, and three additions
static const double library_kernels[2] = {2, 8}; // forward, backward

// Counts a library's calls. Returns the query-key pairs of the library and of our own kernels. A plan may visit fewer
// blocks of keys than spans.pairs counts (ring.h), so calls are scaled by the pairs.
static AttentionCounts dry_library(const AttentionShape *shape, int backward) {
    const AttentionCut cut = attention_cut_of(shape, dry.attention);
    const double rows = (double)(spans_rows(shape->spans) * shape->NH), HD = (double)shape->HD;
    AttentionCounts c = {&cut, backward, 0, 0, 0, 0, 0, 0};
    const int library = shape->HD == dry.head_dim ? dry.library : dry.library / LIBRARY_GLOBAL;
    if (!(library & (backward ? LIBRARY_BACKWARD : LIBRARY_FORWARD))) {
        dry.counts.launches += dry.factor * (backward ? 3 : 1);
        c.own = 1;
        return c;
    }
    if (backward)
        attention_backward_calls(&cut, shape, 0, spans_rows(shape->spans), attention_count, &c);
    else
        attention_forward_calls(&cut, shape, attention_count, &c);
    const double pairs = c.own + c.library, visits = pairs > 0 ? dry.factor * shape->spans.pairs / pairs : 0;
    dry.counts.library_calls += visits * c.calls;
    dry.counts.launches += visits * c.calls * library_kernels[backward];
    // also stages log-sum-exp transposed, sums of dq zeroed, and these sums rounded at the end
    c.staged += rows * (2 * sizeof(float) + (backward ? HD * (2 * sizeof(float) + (double)dry.stored) : 0));
    dry.counts.staged += visits * c.staged, dry.counts.moved += visits * c.staged;
    return c;
}

// Returns the rate of backward by kernels for Hopper, of heads of this width: KernelRates.backward; 0: there are none.
static double hopper_backward_rate(size_t HD) {
    for (size_t i = 0; i < WGMMA_HEADS; i++)
        if (wgmma_heads[i] == HD) return dry.rates.backward[i];
    return 0;
}

// Returns (time of attention's FLOPs with heads of this width) / (time with heads of 128). Measured on an H200 for
// heads of 64 and 256 with cuDNN 9.19, and of 256 and 512 with our own kernels (dev/gpu_speed.md).
static double head_slowness(size_t HD, int library, int backward) {
    const double hopper = backward && !library ? hopper_backward_rate(HD) : 0;
    if (hopper > 0) return 1 / hopper;
    if (!library) return HD <= 128 ? 1 : HD <= 256 ? (backward ? 1.25 : 1) : backward ? 1.66 : 1.31;
    if (HD <= 64) return backward ? 1.73 : 1.48;
    return HD > 128 && backward ? 1.65 : 1;
}

// Keys outside a window that a kernel computes for a query on average, as part of a tile: measured on an H200
#define WINDOW_EDGE 128.0

// Returns the keys that a span reads.
static KeyRange dry_span_keys(const AttentionShape *shape, const Span *span) {
    const KeyRange keys = {max_size(first_key(span->document, span->begin, shape->spans.window), shape->keys.begin),
                           min_size(span->end, shape->keys.end)};
    return keys;
}

// Checks that no two spans of a call read the same keys: a kernel owns dK and dV of its span's keys.
static void dry_keys_apart(const AttentionShape *shape) {
    size_t end = 0; // of the keys of all spans before
    for (size_t i = 0; i < shape->spans.count; i++) {
        const KeyRange keys = dry_span_keys(shape, &shape->spans.span[i]);
        if (keys.begin >= keys.end) continue;
        for (size_t j = 0; keys.begin < end && j < i; j++) {
            const KeyRange other = dry_span_keys(shape, &shape->spans.span[j]);
            if (other.begin < other.end && max_size(keys.begin, other.begin) < min_size(keys.end, other.end))
                die("%s: spans %zu and %zu of a call read the same keys; please report it", dry.op, j, i);
        }
        end = max_size(end, keys.end);
    }
}

// Counts the keys and values that decoding reads, and the kernel that merges their parts, if there are several
// (cuda/attention_split.cuh).
static void dry_cached_keys(const AttentionShape *shape) {
    for (size_t i = 0; i < shape->spans.count; i++) {
        const Span span = shape->spans.span[i];
        const size_t keys = span.end - first_key(span.document, span.begin, shape->spans.window);
        dry.counts.moved += dry.factor * (double)(2 * keys * shape->NKV * shape->HD * dry.stored);
    }
    if (gpu_key_parts(shape->slots, shape->NKV) > 1) dry.counts.launches += dry.factor;
}

// Counts products of length HD for each pair and query head: q k^T, p v; in backward q k^T, dp, dq, dk, dv.
static void dry_attention(const AttentionShape *shape, int backward) {
    const double products = backward ? 5 : 2, NH = (double)shape->NH, HD = (double)shape->HD;
    const double flops = dry.factor * 2 * products * shape->spans.pairs * NH * HD;
    dry_keys_apart(shape);
    const AttentionCounts c = dry_library(shape, backward);
    const double each = flops / fmax(c.own + c.library, 1), own = each * c.own, masked = each * c.masked;
    OpCounts *const counts = &dry.counts;
    if (shape->partial) dry.op = backward ? "attention_backward_part" : "attention_forward_part";
    *(backward ? &counts->attention_backward : &counts->attention_forward) += flops;
    *(backward ? &counts->own_backward : &counts->own_forward) += own;
    const double edges = shape->spans.window ? 1 + WINDOW_EDGE / (double)shape->spans.window : 1;
    const double library = backward ? flops - own + each * c.unseen : (flops - own) * edges;
    *(backward ? &counts->slow_backward : &counts->slow_forward) +=
        library * head_slowness(shape->HD, 1, backward) - (flops - own);
    *(backward ? &counts->slow_own_backward : &counts->slow_own_forward) +=
        own * (edges * head_slowness(shape->HD, 0, backward) - 1);
    if (!backward) counts->masked_forward += masked;
    if (backward && dry.attention.any_order) counts->any_order += flops - own, counts->masked_any_order += masked;
    counts->flops += flops;
    if (shape->slots.count) dry_cached_keys(shape);
}

// Counts one product of length HD for each pair and query head.
static void dry_received(size_t n, size_t keys, size_t NH, size_t NKV, size_t HD) {
    const double flops = 2 * query_key_pairs(keys - n, keys, 0) * (double)(NH * HD);
    dry.counts.flops += dry.factor * flops, dry.counts.attention_forward += dry.factor * flops;
    dry.counts.own_forward += dry.factor * flops;
    dry_move((n * NH + keys * NKV) * HD, dry.stored);
}

// Counts the chunked form: products of blocks of DELTA_BLOCK tokens. Triangular matrices count half.
static void dry_delta(const DeltaShape *shape, DeltaWork work, int transfer) {
    static const double launches[] = {3, 3, 6, 3};
    const double n = (double)delta_rows(shape), elements = (double)(delta_channels(shape) + shape->HV * shape->V);
    double flops = n * delta_flops(shape, work);
    if (transfer) flops += n * delta_flops(shape, DELTA_TRANSFER);
    if (work == DELTA_STATE) dry.op = shape->ssd ? "ssd_state" : "delta_state";
    if (work == DELTA_STATE_BACKWARD) dry.op = shape->ssd ? "ssd_state_backward" : "delta_state_backward";
    dry.counts.flops += dry.factor * flops, dry.counts.delta += dry.factor * flops;
    dry.counts.moved += dry.factor * n * elements * (double)dry.stored * (work == DELTA_BACKWARD ? 3 : 1);
    dry.counts.launches += dry.factor * launches[work];
}

// Counts a product [K,K] [K,V] for each value head, or a number times [K,V].
static void dry_combine(const DeltaShape *shape) {
    const double flops = 2 * (shape->ssd ? 1 : (double)shape->K) * (double)delta_state_elements(shape);
    dry.counts.flops += dry.factor * flops, dry.counts.delta += dry.factor * flops;
    dry_move(delta_transfer_elements(shape) + 3 * delta_state_elements(shape), dry.summed);
}

// Checks the rows of k, v, dk or dv that each span sees: tokens [the first query's first key, last query] of the range.
static void dry_keys(const char *name, const void *base, const AttentionShape *shape, size_t size) {
    const size_t row = shape->NKV * shape->HD;
    for (size_t i = 0; i < shape->spans.count; i++) {
        const KeyRange keys = dry_span_keys(shape, &shape->spans.span[i]);
        if (keys.begin < keys.end)
            dry_range(name, (const char *)base + keys.begin * row * size, (keys.end - keys.begin) * row, size);
    }
}

static void dry_messages(const Message *messages, size_t n) {
    for (size_t i = 0; i < n; i++) {
        dry_range("a message out", messages[i].out, messages[i].out_bytes, 1);
        dry_range("a message in", messages[i].in, messages[i].in_bytes, 1);
    }
}

// ---- the op set: an op counts and returns nothing, ticket 0 or 0.0 --------------------------------------------------
static void *dry_allocate(size_t bytes) {
    (void)bytes;
    return NULL;
}
static void dry_release(void *memory, size_t bytes) { (void)memory, (void)bytes; }
static void dry_finish(void) {}
static int dry_reaches(const void *place, size_t bytes) { return (void)place, (void)bytes, 1; }
static void dry_repeat(double factor) { dry.factor = factor; }
static int dry_graph_begin(const GraphKey *key) { return (void)key, 1; }
static int dry_graph_end(void) { return 0; }
static void dry_graphs_forget(void) {}
static void dry_attention_choose(AttentionChoice choice) {
    dry.attention = choice;
    ops_device->attention_choose(choice); // scratch is planned with the linked op set's sizes
}

static Ops dry_ops; // op set of the current plan

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" // counting needs no values
#define OPS                            (&dry_ops)
#define STORED                         dry.stored
#define SUMMED                         dry.summed
#define TENSOR(tensor, elements, size) dry_range(#tensor, tensor, elements, size);
#define PLACE(tensor, bytes)           dry_place(#tensor, tensor, bytes);
#define KEYS(tensor, size)             dry_keys(#tensor, tensor, shape, size);
#define COUNT(...)                     __VA_ARGS__;
#define OP(type, op_name, parameters, arguments, touches)                                                              \
    static type dry_##op_name parameters {                                                                             \
        dry.op = #op_name, dry.rows = dry.cols = 0;                                                                    \
        touches return (type)0;                                                                                        \
    }
#define OP_HOST(...)
#define OP_SCRATCH(...)
#include "op_list.h"
#undef STORED
#undef SUMMED
#pragma GCC diagnostic pop

static size_t dry_gpu_attention_scratch(size_t n, size_t NH, size_t NKV, size_t HD, TextSlots slots) {
    return gpu_attention_scratch(dry.attention, hopper_backward_rate(HD) > 0, dry.stored, n, NH, NKV, HD, slots);
}

// Returns the op set for a plan with elements of type `stored`; sets the plan's counts to zero. ridge: see DryCount.
// gpu: scratch is sized for op set "cuda" with cuDNN, else for the linked op set
static Ops ops_dry(DType stored, const Arena *arena, double ridge, int gpu) {
    Ops ops = *ops_device;
    memset(&dry, 0, sizeof(dry));
    dry.arena = arena, dry.ridge = ridge, dry.factor = 1;
    dry.stored = dtype_size(stored), dry.summed = dtype_size(dtype_of_sums(stored));
    ops.name = "dry";
    ops.stored = stored, ops.summed = dtype_of_sums(stored);
    ops.allocate = ops.host_allocate = dry_allocate, ops.release = ops.host_release = dry_release;
    ops.finish = dry_finish, ops.reaches = dry_reaches, ops.repeat = dry_repeat,
    ops.attention_choose = dry_attention_choose;
    ops.graph_begin = dry_graph_begin, ops.graph_end = dry_graph_end, ops.graphs_forget = dry_graphs_forget;
#define OP(type, op, ...) ops.op = dry_##op;
#define OP_HOST(...)
#define OP_SCRATCH(op, ...) ops.op = gpu ? cuda_##op : ops.op;
#include "op_list.h"
    if (gpu) {
        ops.attention_scratch = dry_gpu_attention_scratch;
        ops.chunk = CUDA_CHUNK, ops.logits_chunk = CUDA_LOGITS_CHUNK, ops.graphs = 1;
    }
    return dry_ops = ops;
}

#endif
