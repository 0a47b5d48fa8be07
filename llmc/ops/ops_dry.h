/*
Op set "dry": computes nothing. It counts floating-point operations (a multiply-add is two) of matrix products and
attention, and the bytes that other ops of a pass move; it checks that every tensor lies within one live region of the
arena, to its last element. It makes plans, and in the tests it holds the driver to its own arena. Any build plans for
any element type; scratch sizes are those of the op set that was linked.
*/
#ifndef LLMC_OPS_DRY_H
#define LLMC_OPS_DRY_H
#include "arena.h"
#include "ops.h"

typedef struct {
    const Arena *arena;    // NULL: ranges are not checked
    size_t stored, summed; // bytes of an element
    double ridge;          // FLOPs of products that a machine does in the time of a byte; 0: no machine is known
    double factor;         // calls that a call stands for
    // counts
    double flops;                                 // of products and attention
    double attention_forward, attention_backward; // of flops
    double operands;                              // bytes that the products of flops read and write
    double stalled;                               // FLOPs that products could do while they wait for operands (ridge)
    double moved;                                 // bytes that the ops between products move
    // the call counted last: its op, by kind where an op has kinds, and its weight [rows, cols], a norm's [cols]; else
    // 0
    const char *op;
    size_t rows, cols;
} DryCount;

static DryCount dry; // one plan at a time

static void dry_range(const char *tensor, const void *pointer, size_t count, size_t size) {
    if (dry.arena && pointer && !arena_holds(dry.arena, pointer, count * size))
        die("%s: %s, %zu elements of %zu bytes, is not within one live region of the arena", dry.op, tensor, count,
            size);
}
#define DRY_STORED(tensor, count) dry_range(#tensor, tensor, count, dry.stored)
#define DRY_SUMMED(tensor, count) dry_range(#tensor, tensor, count, dry.summed)
#define DRY_BYTES(tensor, bytes)  dry_range(#tensor, tensor, bytes, 1)

static void dry_move(size_t elements, size_t size) { dry.moved += dry.factor * (double)elements * (double)size; }

// ---- memory and transfers -------------------------------------------------------------------------------------------
static void count_copy_in(void *device, const void *host, size_t bytes) {
    (void)host;
    DRY_BYTES(device, bytes);
}
static void count_copy_out(void *host, const void *device, size_t bytes) {
    (void)host;
    DRY_BYTES(device, bytes);
}
static void count_copy(void *out, const void *in, size_t bytes) {
    DRY_BYTES(out, bytes);
    DRY_BYTES(in, bytes);
}
static void count_zero(void *out, size_t bytes) { DRY_BYTES(out, bytes); }
static void count_store(void *host, const void *device, size_t bytes) { count_copy_out(host, device, bytes); }
static void count_load(void *device, const void *host, size_t bytes) { count_copy_in(device, host, bytes); }
static void count_await_transfer(int64_t ticket) { (void)ticket; }

// ---- embedding ------------------------------------------------------------------------------------------------------
static void count_embedding_forward(Stored *out, const int32_t *tokens, const int32_t *position, const Stored *wte,
                                    const Stored *wpe, size_t n, size_t C, double scale) {
    (void)scale;
    DRY_STORED(out, n * C);
    DRY_BYTES(tokens, n * sizeof(int32_t));
    DRY_BYTES(position, n * sizeof(int32_t));
    DRY_STORED(wte, C);
    DRY_STORED(wpe, C);
    dry_move(2 * n * C, dry.stored);
}
static void count_embedding_backward(void *dw, DType dw_type, const Stored *dx, const int32_t *index, size_t N,
                                     size_t rows, size_t C, double scale, Summed *scratch) {
    (void)scale;
    dry_range("dw", dw, rows * C, dtype_size(dw_type));
    DRY_STORED(dx, N * C);
    DRY_BYTES(index, N * sizeof(int32_t));
    DRY_SUMMED(scratch, ops_device->embedding_backward_scratch(N, rows, C));
}
// Only the device knows where rows go: out is checked to be a live region, no more.
static void count_scatter_rows(Stored *out, const Stored *in, const int32_t *row, size_t n, size_t width) {
    DRY_STORED(out, n ? width : 0);
    DRY_STORED(in, n * width);
    DRY_BYTES(row, n * sizeof(int32_t));
    dry_move(2 * n * width, dry.stored);
}

// ---- norms ----------------------------------------------------------------------------------------------------------
static void count_norm_forward(Stored *out, const Stored *x, const Stored *w, const Stored *b, const Stored *residual,
                               size_t n, size_t C, Norm norm) {
    dry.op = norm.kind == NORM_RMS ? "rmsnorm_forward" : "layernorm_forward", dry.cols = C;
    DRY_STORED(out, n * C);
    DRY_STORED(x, n * C);
    DRY_STORED(residual, n * C);
    DRY_STORED(w, C);
    DRY_STORED(b, C);
    dry_move((residual ? 3 : 2) * n * C, dry.stored);
}
static void count_norm_backward(Stored *dx, Summed *dw, Summed *db, const Stored *dout, const Stored *x,
                                const Stored *w, size_t n, size_t C, Norm norm, int accumulate, Summed *scratch) {
    dry.op = norm.kind == NORM_RMS ? "rmsnorm_backward" : "layernorm_backward", dry.cols = C;
    DRY_STORED(dx, n * C);
    DRY_SUMMED(dw, C);
    DRY_SUMMED(db, C);
    DRY_STORED(dout, n * C);
    DRY_STORED(x, n * C);
    DRY_STORED(w, C);
    DRY_SUMMED(scratch, ops_device->norm_backward_scratch(n, C));
    dry_move((accumulate ? 4 : 3) * n * C, dry.stored);
}

// ---- linear ---------------------------------------------------------------------------------------------------------
// matrix: bytes of an element of the weight, or of its gradient in and out
static void dry_product(size_t n, size_t C, size_t OC, size_t matrix) {
    const double flops = 2.0 * (double)n * (double)C * (double)OC;
    const double bytes = (double)n * (double)(C + OC) * (double)dry.stored + (double)(C * OC * matrix);
    dry.rows = OC, dry.cols = C;
    dry.flops += dry.factor * flops, dry.operands += dry.factor * bytes;
    if (bytes * dry.ridge > flops) dry.stalled += dry.factor * (bytes * dry.ridge - flops);
}
static void count_linear_forward(Stored *out, const Stored *x, const Stored *weight, const Stored *bias,
                                 const Stored *residual, size_t n, size_t C, size_t OC) {
    DRY_STORED(out, n * OC);
    DRY_STORED(x, n * C);
    DRY_STORED(weight, OC * C);
    DRY_STORED(bias, OC);
    DRY_STORED(residual, n * OC);
    dry_product(n, C, OC, dry.stored);
}
static void count_linear_backward_input(Stored *dx, const Stored *dout, const Stored *weight, size_t n, size_t C,
                                        size_t OC, int accumulate) {
    (void)accumulate;
    DRY_STORED(dx, n * C);
    DRY_STORED(dout, n * OC);
    DRY_STORED(weight, OC * C);
    dry_product(n, C, OC, dry.stored);
}
static void count_linear_backward_weight(Summed *dweight, Summed *dbias, const Stored *dout, const Stored *x, size_t n,
                                         size_t C, size_t OC) {
    DRY_SUMMED(dweight, OC * C);
    DRY_SUMMED(dbias, OC);
    DRY_STORED(dout, n * OC);
    DRY_STORED(x, n * C);
    dry_product(n, C, OC, 2 * dry.summed);
}

static void count_adapter_forward(Stored *out, size_t width, size_t column, const Stored *h, const Stored *b, size_t n,
                                  size_t r, size_t OC) {
    if (column + OC > width) die("adapter_forward: columns %zu to %zu of %zu", column, column + OC, width);
    DRY_STORED(out, n * width);
    DRY_STORED(h, n * r);
    DRY_STORED(b, OC * r);
    dry_product(n, r, OC, dry.stored);
}
static void count_adapter_backward(Stored *dh, Summed *db, const Stored *dout, size_t width, size_t column,
                                   const Stored *h, const Stored *b, size_t n, size_t r, size_t OC) {
    if (column + OC > width) die("adapter_backward: columns %zu to %zu of %zu", column, column + OC, width);
    DRY_STORED(dh, n * r);
    DRY_SUMMED(db, OC * r);
    DRY_STORED(dout, n * width);
    DRY_STORED(h, n * r);
    DRY_STORED(b, OC * r);
    dry_product(n, r, OC, dry.stored);
    if (db) dry_product(n, r, OC, 2 * dry.summed);
}
static void count_scale(Stored *x, double factor, size_t count) {
    (void)factor;
    DRY_STORED(x, count);
    dry_move(2 * count, dry.stored);
}
static void count_dropout(Stored *out, const Stored *in, size_t n, size_t width, size_t first_row, double rate,
                          uint64_t seed, int accumulate) {
    (void)first_row, (void)rate, (void)seed;
    DRY_STORED(out, n * width);
    DRY_STORED(in, n * width);
    dry_move((accumulate ? 3 : 2) * n * width, dry.stored);
}

// ---- RoPE and attention ---------------------------------------------------------------------------------------------
static void count_rope_forward(Stored *x, const int32_t *position, const float *inverse_frequency, size_t n,
                               size_t heads, size_t HD) {
    DRY_STORED(x, n * heads * HD);
    DRY_BYTES(position, n * sizeof(int32_t));
    DRY_BYTES(inverse_frequency, HD / 2 * sizeof(float));
    dry_move(2 * n * heads * HD, dry.stored);
}
static void count_rope_backward(Stored *dx, const int32_t *position, const float *inverse_frequency, size_t n,
                                size_t heads, size_t HD) {
    count_rope_forward(dx, position, inverse_frequency, n, heads, HD);
}

// Rows of k, v, dk or dv that each span sees: tokens [the first query's first key, last query] of the range.
static void dry_keys(const char *name, const void *base, const AttentionShape *shape, size_t size) {
    const size_t row = shape->NKV * shape->HD;
    for (size_t i = 0; i < shape->spans.count; i++) {
        const Span *span = &shape->spans.span[i];
        const size_t begin = max_size(first_key(span->document, span->begin, shape->spans.window), shape->keys.begin);
        const size_t end = min_size(span->end, shape->keys.end);
        if (begin < end) dry_range(name, (const char *)base + begin * row * size, (end - begin) * row, size);
    }
}
// Tensors that forward and backward have in common. FLOPs: so many products of length HD for each pair and query head
static double dry_attention(const void *result, const Stored *q, const Stored *k, const Stored *v, const Summed *lse,
                            const AttentionShape *shape, const Summed *scratch, double products) {
    const size_t n = spans_rows(shape->spans), NH = shape->NH, HD = shape->HD;
    const double flops = dry.factor * 2 * products * shape->spans.pairs * (double)NH * (double)HD;
    dry_range("out or dq", result, n * NH * HD, shape->partial ? dry.summed : dry.stored);
    DRY_STORED(q, n * NH * HD);
    DRY_SUMMED(lse, n * NH);
    DRY_SUMMED(scratch, ops_device->attention_scratch(n, NH, shape->NKV, HD));
    dry_keys("k", k, shape, dry.stored);
    dry_keys("v", v, shape, dry.stored);
    dry.flops += flops;
    return flops;
}
static void count_attention_forward(void *out, Summed *lse, const Stored *q, const Stored *k, const Stored *v,
                                    const AttentionShape *shape, Summed *scratch) {
    if (shape->partial) dry.op = "attention_forward_part";
    dry.attention_forward += dry_attention(out, q, k, v, lse, shape, scratch, 2); // q k^T, p v
}
static void count_attention_backward(void *dq, Summed *dk, Summed *dv, const Stored *dout, const Stored *out,
                                     const Stored *q, const Stored *k, const Stored *v, const Summed *lse,
                                     const AttentionShape *shape, Summed *scratch) {
    const size_t count = spans_rows(shape->spans) * shape->NH * shape->HD;
    if (shape->partial) dry.op = "attention_backward_part";
    DRY_STORED(dout, count);
    DRY_STORED(out, count);
    dry_keys("dk", dk, shape, dry.summed);
    dry_keys("dv", dv, shape, dry.summed);
    dry.attention_backward += dry_attention(dq, q, k, v, lse, shape, scratch, 5); // q k^T again, dp, dq, dk, dv
}

// ---- activations, the loss head, gradients, the optimizer -----------------------------------------------------------
static void count_activation_forward(Stored *out, const Stored *in, ActivationKind kind, size_t n, size_t FF) {
    static const char *const names[] = {"swiglu_forward", "gelu_forward", "geglu_forward"};
    const size_t width = kind == ACTIVATION_GELU ? FF : 2 * FF;
    dry.op = names[kind];
    DRY_STORED(out, n * FF);
    DRY_STORED(in, n * width);
    dry_move(n * (FF + width), dry.stored);
}
static void count_activation_backward(Stored *din, const Stored *dout, const Stored *in, ActivationKind kind, size_t n,
                                      size_t FF) {
    static const char *const names[] = {"swiglu_backward", "gelu_backward", "geglu_backward"};
    const size_t width = kind == ACTIVATION_GELU ? FF : 2 * FF;
    dry.op = names[kind];
    DRY_STORED(din, n * width);
    DRY_STORED(dout, n * FF);
    DRY_STORED(in, n * width);
    dry_move(n * (FF + 2 * width), dry.stored);
}
static void count_logprob(Summed *logp, Summed *entropy, Stored *logits, const int32_t *targets, const Summed *weight,
                          size_t n, size_t V, double temperature) {
    (void)temperature;
    DRY_SUMMED(logp, n);
    DRY_SUMMED(entropy, n);
    DRY_STORED(logits, n * V);
    DRY_BYTES(targets, n * sizeof(int32_t));
    DRY_SUMMED(weight, n);
    dry_move((weight ? 3 : 1) * n * V, dry.stored);
}
static void count_round_sums(Stored *out, const Summed *in, size_t count) {
    DRY_STORED(out, count);
    DRY_SUMMED(in, count);
    dry_move(count, dry.stored + dry.summed);
}
static void count_gradient_add(void *gradient, DType type, const Summed *in, size_t count) {
    dry_range("gradient", gradient, count, dtype_size(type));
    DRY_SUMMED(in, count);
}
static void count_sum_of_squares(const void *x, DType type, size_t count) {
    dry_range("x", x, count, dtype_size(type));
}
static void count_adamw(Stored *w, float *master, const void *gradient, DType gradient_type, void *m, void *v,
                        DType moment_type, size_t count, const AdamW *step) {
    (void)step;
    DRY_STORED(w, count);
    DRY_BYTES(master, count * sizeof(float));
    dry_range("gradient", gradient, count, dtype_size(gradient_type));
    dry_range("m", m, count, dtype_size(moment_type));
    dry_range("v", v, count, dtype_size(moment_type));
}

// ---- between processes ----------------------------------------------------------------------------------------------
static void count_reduce_scatter(RankGroup group, Summed *x, size_t count, size_t unit) {
    (void)group, (void)unit;
    DRY_SUMMED(x, count);
}
static void count_all_gather(RankGroup group, void *x, size_t count, size_t unit, size_t size) {
    (void)group, (void)unit;
    DRY_BYTES(x, count * size);
}
static void count_exchange(RankGroup group, const Message *messages, size_t n) {
    (void)group;
    for (size_t i = 0; i < n; i++) {
        DRY_BYTES(messages[i].out, messages[i].out_bytes);
        DRY_BYTES(messages[i].in, messages[i].in_bytes);
    }
}
static void count_await(int64_t ticket) { (void)ticket; }

// ---- the op set: an op counts, and returns nothing, ticket 0 or 0.0 -------------------------------------------------
static void *dry_allocate(size_t bytes) {
    (void)bytes;
    return NULL;
}
static void dry_release(void *memory, size_t bytes) { (void)memory, (void)bytes; }
static void dry_finish(void) {}
static void dry_repeat(double factor) { dry.factor = factor; }

#define OP(type, op_name, parameters, arguments, tensors)                                                              \
    static type dry_##op_name parameters {                                                                             \
        dry.op = #op_name, dry.rows = dry.cols = 0;                                                                    \
        count_##op_name arguments;                                                                                     \
        return (type)0;                                                                                                \
    }
#define OP_HOST(...)
#define OP_SCRATCH(...)
#include "op_list.h"

// The op set for a plan in `stored`, with its counts at zero. ridge: see DryCount
static Ops ops_dry(DType stored, const Arena *arena, double ridge) {
    Ops ops = *ops_device; // scratch and chunk sizes are those of the op set that will run
    memset(&dry, 0, sizeof(dry));
    dry.arena = arena, dry.ridge = ridge, dry.factor = 1;
    dry.stored = dtype_size(stored), dry.summed = dtype_size(dtype_of_sums(stored));
    ops.name = "dry";
    ops.stored = stored, ops.summed = dtype_of_sums(stored);
    ops.allocate = ops.host_allocate = dry_allocate, ops.release = ops.host_release = dry_release;
    ops.finish = dry_finish, ops.repeat = dry_repeat;
#define OP(type, op, ...) ops.op = dry_##op;
#define OP_HOST(...)
#define OP_SCRATCH(...)
#include "op_list.h"
    return ops;
}

#endif
