/*
Op set "dry": computes nothing; counts floating-point operations (a multiply-add is two) of matrix products and
attention, and the bytes that other ops on a chunk's rows move; checks that every tensor lies within one live region of
the arena, to its last element. It makes plans, and it runs in the tests to hold the driver to its own arena. Plans of
any element type come from any build; scratch sizes are those of the op set that was linked.
*/
#ifndef LLMC_OPS_DRY_H
#define LLMC_OPS_DRY_H
#include "arena.h"
#include "ops.h"

typedef struct {
    const Arena *arena; // NULL: ranges are not checked
    double flops, factor;
    double attention_forward, attention_backward; // of flops
    double operands;                              // bytes that the products of flops read and write
    double stalled;                               // FLOPs that these could do while they wait for operands (dry_ridge)
    double moved;                                 // and the ops in between
    size_t stored, summed;
} DryCount;

static DryCount dry;
static double dry_ridge; // FLOPs of products that the machine of an estimate does in the time of a byte; 0: none

static void dry_range(const char *op, const char *tensor, const void *pointer, size_t count, size_t size) {
    if (dry.arena && pointer && !arena_holds(dry.arena, pointer, count * size))
        die("%s: %s, %zu elements of %zu bytes, is not within one live region of the arena", op, tensor, count, size);
}

static void dry_move(size_t elements, size_t size) { dry.moved += dry.factor * (double)elements * (double)size; }

#define DRY_STORED(op, tensor, count) dry_range(#op, #tensor, tensor, count, dry.stored)
#define DRY_SUMMED(op, tensor, count) dry_range(#op, #tensor, tensor, count, dry.summed)
#define DRY_BYTES(op, tensor, bytes)  dry_range(#op, #tensor, tensor, bytes, 1)

// ---- memory -----------------------------------------------------------------------------------------------------------
static void *dry_allocate(size_t bytes) {
    (void)bytes;
    return NULL;
}
static void dry_release(void *memory, size_t bytes) { (void)memory, (void)bytes; }
static void dry_copy_in(void *device, const void *host, size_t bytes) {
    (void)host;
    DRY_BYTES(copy_in, device, bytes);
}
static void dry_copy_out(void *host, const void *device, size_t bytes) {
    (void)host;
    DRY_BYTES(copy_out, device, bytes);
}
static void dry_copy(void *out, const void *in, size_t bytes) {
    DRY_BYTES(copy, out, bytes);
    DRY_BYTES(copy, in, bytes);
}
static void dry_zero(void *out, size_t bytes) { DRY_BYTES(zero, out, bytes); }
static void dry_finish(void) {}
static void *dry_host_allocate(size_t bytes) {
    (void)bytes;
    return NULL;
}
static void dry_host_release(void *memory, size_t bytes) { (void)memory, (void)bytes; }
static int64_t dry_store(void *host, const void *device, size_t bytes) {
    (void)host;
    DRY_BYTES(store, device, bytes);
    return 0;
}
static int64_t dry_load(void *device, const void *host, size_t bytes) {
    (void)host;
    DRY_BYTES(load, device, bytes);
    return 0;
}
static void dry_await_transfer(int64_t ticket) { (void)ticket; }
static void dry_repeat(double factor) { dry.factor = factor; }

// ---- embedding --------------------------------------------------------------------------------------------------------
static void dry_embedding_forward(Stored *out, const int32_t *tokens, const int32_t *position, const Stored *wte,
                                  const Stored *wpe, size_t n, size_t C, double scale) {
    (void)scale;
    DRY_STORED(embedding_forward, out, n * C);
    DRY_BYTES(embedding_forward, tokens, n * sizeof(int32_t));
    DRY_BYTES(embedding_forward, position, n * sizeof(int32_t));
    DRY_STORED(embedding_forward, wte, C);
    DRY_STORED(embedding_forward, wpe, C);
    dry_move(2 * n * C, dry.stored);
}
static void dry_embedding_backward(void *dw, DType dw_type, const Stored *dx, const int32_t *index, size_t N,
                                   size_t rows, size_t C, double scale, Summed *scratch) {
    (void)scale;
    dry_range("embedding_backward", "dw", dw, rows * C, dtype_size(dw_type));
    DRY_STORED(embedding_backward, dx, N * C);
    DRY_BYTES(embedding_backward, index, N * sizeof(int32_t));
    DRY_SUMMED(embedding_backward, scratch, ops_device->embedding_backward_scratch(N, rows, C));
}

// Where rows go is known on the device only: out is held to be a live region, no more.
static void dry_scatter_rows(Stored *out, const Stored *in, const int32_t *row, size_t n, size_t width) {
    DRY_STORED(scatter_rows, out, n ? width : 0);
    DRY_STORED(scatter_rows, in, n * width);
    DRY_BYTES(scatter_rows, row, n * sizeof(int32_t));
    dry_move(2 * n * width, dry.stored);
}

// ---- norms --------------------------------------------------------------------------------------------------------------
static void dry_norm_forward(Stored *out, const Stored *x, const Stored *w, const Stored *b, const Stored *residual,
                             size_t n, size_t C, Norm norm) {
    (void)norm;
    DRY_STORED(norm_forward, out, n * C);
    DRY_STORED(norm_forward, x, n * C);
    DRY_STORED(norm_forward, residual, n * C);
    DRY_STORED(norm_forward, w, C);
    DRY_STORED(norm_forward, b, C);
    dry_move((residual ? 3 : 2) * n * C, dry.stored);
}
static void dry_norm_backward(Stored *dx, Summed *dw, Summed *db, const Stored *dout, const Stored *x, const Stored *w,
                              size_t n, size_t C, Norm norm, int accumulate, Summed *scratch) {
    (void)norm;
    DRY_STORED(norm_backward, dx, n * C);
    DRY_SUMMED(norm_backward, dw, C);
    DRY_SUMMED(norm_backward, db, C);
    DRY_STORED(norm_backward, dout, n * C);
    DRY_STORED(norm_backward, x, n * C);
    DRY_STORED(norm_backward, w, C);
    DRY_SUMMED(norm_backward, scratch, ops_device->norm_backward_scratch(n, C));
    dry_move((accumulate ? 4 : 3) * n * C, dry.stored);
}

// ---- linear -----------------------------------------------------------------------------------------------------------
// matrix: bytes of an element of the weight, or of its gradient in and out
static void dry_product(size_t n, size_t C, size_t OC, size_t matrix) {
    const double flops = 2.0 * (double)n * (double)C * (double)OC;
    const double bytes = (double)n * (double)(C + OC) * (double)dry.stored + (double)(C * OC * matrix);
    dry.flops += dry.factor * flops, dry.operands += dry.factor * bytes;
    if (bytes * dry_ridge > flops) dry.stalled += dry.factor * (bytes * dry_ridge - flops);
}
static void dry_linear_forward(Stored *out, const Stored *x, const Stored *weight, const Stored *bias,
                               const Stored *residual, size_t n, size_t C, size_t OC) {
    DRY_STORED(linear_forward, out, n * OC);
    DRY_STORED(linear_forward, x, n * C);
    DRY_STORED(linear_forward, weight, OC * C);
    DRY_STORED(linear_forward, bias, OC);
    DRY_STORED(linear_forward, residual, n * OC);
    dry_product(n, C, OC, dry.stored);
}
static void dry_linear_backward_input(Stored *dx, const Stored *dout, const Stored *weight, size_t n, size_t C,
                                      size_t OC, int accumulate) {
    (void)accumulate;
    DRY_STORED(linear_backward_input, dx, n * C);
    DRY_STORED(linear_backward_input, dout, n * OC);
    DRY_STORED(linear_backward_input, weight, OC * C);
    dry_product(n, C, OC, dry.stored);
}
static void dry_linear_backward_weight(Summed *dweight, Summed *dbias, const Stored *dout, const Stored *x, size_t n,
                                       size_t C, size_t OC) {
    DRY_SUMMED(linear_backward_weight, dweight, OC * C);
    DRY_SUMMED(linear_backward_weight, dbias, OC);
    DRY_STORED(linear_backward_weight, dout, n * OC);
    DRY_STORED(linear_backward_weight, x, n * C);
    dry_product(n, C, OC, 2 * dry.summed);
}

static void dry_adapter_forward(Stored *out, size_t width, size_t column, const Stored *h, const Stored *b, size_t n,
                                size_t r, size_t OC) {
    if (column + OC > width) die("adapter_forward: columns %zu to %zu of %zu", column, column + OC, width);
    DRY_STORED(adapter_forward, out, n * width);
    DRY_STORED(adapter_forward, h, n * r);
    DRY_STORED(adapter_forward, b, OC * r);
    dry_product(n, r, OC, dry.stored);
}
static void dry_adapter_backward(Stored *dh, Summed *db, const Stored *dout, size_t width, size_t column,
                                 const Stored *h, const Stored *b, size_t n, size_t r, size_t OC) {
    if (column + OC > width) die("adapter_backward: columns %zu to %zu of %zu", column, column + OC, width);
    DRY_STORED(adapter_backward, dh, n * r);
    DRY_SUMMED(adapter_backward, db, OC * r);
    DRY_STORED(adapter_backward, dout, n * width);
    DRY_STORED(adapter_backward, h, n * r);
    DRY_STORED(adapter_backward, b, OC * r);
    dry_product(n, r, OC, dry.stored);
    if (db) dry_product(n, r, OC, 2 * dry.summed);
}
static void dry_scale(Stored *x, double factor, size_t count) {
    (void)factor;
    DRY_STORED(scale, x, count);
    dry_move(2 * count, dry.stored);
}
static void dry_dropout(Stored *out, const Stored *in, size_t n, size_t width, size_t first_row, double rate,
                        uint64_t seed, int accumulate) {
    (void)first_row, (void)rate, (void)seed;
    DRY_STORED(dropout, out, n * width);
    DRY_STORED(dropout, in, n * width);
    dry_move((accumulate ? 3 : 2) * n * width, dry.stored);
}

// ---- RoPE and attention -----------------------------------------------------------------------------------------------
static void dry_rope(Stored *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                     size_t HD) {
    DRY_STORED(rope, x, n * heads * HD);
    DRY_BYTES(rope, position, n * sizeof(int32_t));
    DRY_BYTES(rope, inverse_frequency, HD / 2 * sizeof(float));
    dry_move(2 * n * heads * HD, dry.stored);
}
// Keys and values of each span: tokens [the first query's first key, last query] of the range.
static void dry_keys(const char *name, const void *base, const AttentionShape *shape, size_t size) {
    const size_t row = shape->NKV * shape->HD;
    for (size_t i = 0; i < shape->spans.count; i++) {
        const Span *span = &shape->spans.span[i];
        const size_t begin = max_size(first_key(span->document, span->begin, shape->spans.window), shape->keys.begin);
        const size_t end = min_size(span->end, shape->keys.end);
        if (begin < end)
            dry_range("attention", name, (const char *)base + begin * row * size, (end - begin) * row, size);
    }
}
// Both directions: q k^T and p v are 4 FLOPs a pair and element, and backward with q k^T again, dp, dq, dk and dv 10.
static double dry_attention(const Stored *q, const Stored *k, const Stored *v, const Summed *lse,
                            const AttentionShape *shape, const Summed *scratch, double flops) {
    const size_t n = spans_rows(shape->spans), NH = shape->NH, HD = shape->HD;
    DRY_STORED(attention, q, n * NH * HD);
    DRY_SUMMED(attention, lse, n * NH);
    DRY_SUMMED(attention, scratch, ops_device->attention_scratch(n, NH, shape->NKV, HD));
    dry_keys("k", k, shape, dry.stored);
    dry_keys("v", v, shape, dry.stored);
    flops *= dry.factor * shape->spans.pairs * (double)NH * (double)HD;
    dry.flops += flops;
    return flops;
}
static void dry_attention_forward(void *out, Summed *lse, const Stored *q, const Stored *k, const Stored *v,
                                  const AttentionShape *shape, Summed *scratch) {
    const size_t count = spans_rows(shape->spans) * shape->NH * shape->HD;
    dry_range("attention_forward", "out", out, count, shape->partial ? dry.summed : dry.stored);
    dry.attention_forward += dry_attention(q, k, v, lse, shape, scratch, 4.0);
}
static void dry_attention_backward(void *dq, Summed *dk, Summed *dv, const Stored *dout, const Stored *out,
                                   const Stored *q, const Stored *k, const Stored *v, const Summed *lse,
                                   const AttentionShape *shape, Summed *scratch) {
    const size_t count = spans_rows(shape->spans) * shape->NH * shape->HD;
    dry_range("attention_backward", "dq", dq, count, shape->partial ? dry.summed : dry.stored);
    DRY_STORED(attention_backward, dout, count);
    DRY_STORED(attention_backward, out, count);
    dry_keys("dk", dk, shape, dry.summed);
    dry_keys("dv", dv, shape, dry.summed);
    dry.attention_backward += dry_attention(q, k, v, lse, shape, scratch, 10.0);
}

// ---- activations, the loss head, gradients, the optimizer -------------------------------------------------------------
static size_t activation_width(ActivationKind kind, size_t FF) { return kind == ACTIVATION_GELU ? FF : 2 * FF; }
static void dry_activation_forward(Stored *out, const Stored *in, ActivationKind kind, size_t n, size_t FF) {
    const size_t width = activation_width(kind, FF);
    DRY_STORED(activation_forward, out, n * FF);
    DRY_STORED(activation_forward, in, n * width);
    dry_move(n * (FF + width), dry.stored);
}
static void dry_activation_backward(Stored *din, const Stored *dout, const Stored *in, ActivationKind kind, size_t n,
                                    size_t FF) {
    const size_t width = activation_width(kind, FF);
    DRY_STORED(activation_backward, din, n * width);
    DRY_STORED(activation_backward, dout, n * FF);
    DRY_STORED(activation_backward, in, n * width);
    dry_move(n * (FF + 2 * width), dry.stored);
}
static void dry_logprob(Summed *logp, Summed *entropy, Stored *logits, const int32_t *targets, const Summed *weight,
                        size_t n, size_t V, double temperature) {
    (void)temperature;
    DRY_SUMMED(logprob, logp, n);
    DRY_SUMMED(logprob, entropy, n);
    DRY_STORED(logprob, logits, n * V);
    DRY_BYTES(logprob, targets, n * sizeof(int32_t));
    DRY_SUMMED(logprob, weight, n);
    dry_move((weight ? 3 : 1) * n * V, dry.stored);
}
static void dry_round_sums(Stored *out, const Summed *in, size_t count) {
    DRY_STORED(round_sums, out, count);
    DRY_SUMMED(round_sums, in, count);
    dry_move(count, dry.stored + dry.summed);
}
static void dry_gradient_add(void *gradient, DType type, const Summed *in, size_t count) {
    dry_range("gradient_add", "gradient", gradient, count, dtype_size(type));
    DRY_SUMMED(gradient_add, in, count);
}
static double dry_sum_of_squares(const void *x, DType type, size_t count) {
    dry_range("sum_of_squares", "x", x, count, dtype_size(type));
    return 0;
}
static void dry_adamw(Stored *w, float *master, const void *gradient, DType gradient_type, void *m, void *v,
                      DType moment_type, size_t count, const AdamW *step) {
    (void)step;
    DRY_STORED(adamw, w, count);
    DRY_BYTES(adamw, master, count * sizeof(float));
    dry_range("adamw", "gradient", gradient, count, dtype_size(gradient_type));
    dry_range("adamw", "m", m, count, dtype_size(moment_type));
    dry_range("adamw", "v", v, count, dtype_size(moment_type));
}

// ---- between processes ------------------------------------------------------------------------------------------------
static int64_t dry_reduce_scatter(RankGroup group, Summed *x, size_t count, size_t unit) {
    (void)group, (void)unit;
    DRY_SUMMED(reduce_scatter, x, count);
    return 0;
}
static int64_t dry_all_gather(RankGroup group, void *x, size_t count, size_t unit, size_t size) {
    (void)group, (void)unit;
    DRY_BYTES(all_gather, x, count * size);
    return 0;
}
static int64_t dry_exchange(RankGroup group, const Message *messages, size_t n) {
    (void)group;
    for (size_t i = 0; i < n; i++) {
        DRY_BYTES(exchange, messages[i].out, messages[i].out_bytes);
        DRY_BYTES(exchange, messages[i].in, messages[i].in_bytes);
    }
    return 0;
}
static void dry_await(int64_t ticket) { (void)ticket; }

// The op set for a plan in `stored`, with its counts at zero. One plan at a time.
static Ops ops_dry(DType stored, const Arena *arena) {
    Ops ops = *ops_device; // scratch sizes are those of the op set that will run
    memset(&dry, 0, sizeof(dry));
    dry.arena = arena;
    dry.factor = 1;
    dry.stored = dtype_size(stored), dry.summed = dtype_size(dtype_of_sums(stored));
    ops.name = "dry";
    ops.stored = stored, ops.summed = dtype_of_sums(stored);
    ops.allocate = dry_allocate, ops.release = dry_release;
    ops.copy_in = dry_copy_in, ops.copy_out = dry_copy_out, ops.copy = dry_copy, ops.zero = dry_zero;
    ops.finish = dry_finish;
    ops.host_allocate = dry_host_allocate, ops.host_release = dry_host_release;
    ops.store = dry_store, ops.load = dry_load, ops.await_transfer = dry_await_transfer;
    ops.repeat = dry_repeat;
    ops.embedding_forward = dry_embedding_forward, ops.embedding_backward = dry_embedding_backward;
    ops.scatter_rows = dry_scatter_rows;
    ops.norm_forward = dry_norm_forward, ops.norm_backward = dry_norm_backward;
    ops.linear_forward = dry_linear_forward, ops.linear_backward_input = dry_linear_backward_input;
    ops.linear_backward_weight = dry_linear_backward_weight;
    ops.adapter_forward = dry_adapter_forward, ops.adapter_backward = dry_adapter_backward;
    ops.scale = dry_scale, ops.dropout = dry_dropout;
    ops.rope_forward = dry_rope, ops.rope_backward = dry_rope;
    ops.attention_forward = dry_attention_forward, ops.attention_backward = dry_attention_backward;
    ops.activation_forward = dry_activation_forward, ops.activation_backward = dry_activation_backward;
    ops.logprob = dry_logprob;
    ops.round_sums = dry_round_sums, ops.gradient_add = dry_gradient_add;
    ops.sum_of_squares = dry_sum_of_squares, ops.adamw = dry_adamw;
    ops.reduce_scatter = dry_reduce_scatter, ops.all_gather = dry_all_gather;
    ops.exchange = dry_exchange, ops.await = dry_await;
    return ops;
}

#endif
