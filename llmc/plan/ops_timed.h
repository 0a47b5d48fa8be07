/*
An op set around another, for a pass that tells where its time goes: each op is counted by op set "dry" (FLOPs and
bytes), run, and waited for, with a clock around. So nothing runs beside anything else: transfers and collectives, which
may, are waited for where they are asked for, too, and the pass takes longer than one without. Results are those of the
other op set, to the bit.

Rows are of one op each, of products and norms one op and one shape of its weight. Passed on without being timed: memory
and scratch sizes, and what steps the weights, which is of no pass.
*/
#ifndef LLMC_OPS_TIMED_H
#define LLMC_OPS_TIMED_H
#include "machine.h"
#include "llmc/ops/ops_dry.h"

typedef struct {
    const char *op;
    size_t rows, cols; // of its weight [rows, cols], of a norm's [cols]; else 0
    size_t calls;
    double seconds;
    Work work; // as far as op set "dry" counts it
} TimedRow;

#define TIMED_ROWS 192 // a model has about five shapes, with adapters of every kind a few dozen

typedef struct {
    const Ops *inner;
    DryCount blank; // nothing counted, no ranges checked
    TimedRow row[TIMED_ROWS];
    size_t count;
} Timing;

static Timing timing; // of one pass at a time

static TimedRow *timed_row(const char *op, size_t rows, size_t cols) {
    TimedRow *row;
    for (row = timing.row; row < timing.row + timing.count; row++)
        if (row->rows == rows && row->cols == cols && !strcmp(row->op, op)) return row;
    if (timing.count == TIMED_ROWS) die("internal: a pass with more than %d kinds of ops", TIMED_ROWS);
    timing.count++;
    row->op = op, row->rows = rows, row->cols = cols;
    return row;
}

// After an op, which began at that time; dry has counted it.
static void timed_end(const char *op, size_t rows, size_t cols, double begin) {
    timing.inner->finish();
    double end = seconds_now();
    TimedRow *row = timed_row(op, rows, cols);
    row->calls++, row->seconds += end - begin;
    row->work.products += dry.flops - dry.attention_forward - dry.attention_backward;
    row->work.attention_forward += dry.attention_forward, row->work.attention_backward += dry.attention_backward;
    row->work.operands += dry.operands, row->work.moved += dry.moved, row->work.stalled += dry.stalled;
}

// The body of the op of that name: counts it, runs it, and has it in the row of its weight's rows and columns.
#define TIMED(op, rows, cols, ...) TIMED_AS(#op, op, rows, cols, __VA_ARGS__)
#define TIMED_AS(name, op, rows, cols, ...)                                                                            \
    do {                                                                                                               \
        dry = timing.blank;                                                                                            \
        dry_##op(__VA_ARGS__);                                                                                         \
        const double begin = seconds_now();                                                                            \
        timing.inner->op(__VA_ARGS__);                                                                                 \
        timed_end(name, rows, cols, begin);                                                                            \
    } while (0)

// The same of one that returns a ticket; none of these is counted.
#define TIMED_TICKET(op, ...)                                                                                          \
    do {                                                                                                               \
        const double begin = seconds_now();                                                                            \
        const int64_t ticket = timing.inner->op(__VA_ARGS__);                                                          \
        dry = timing.blank;                                                                                            \
        timed_end(#op, 0, 0, begin);                                                                                   \
        return ticket;                                                                                                 \
    } while (0)

static void timed_copy_in(void *device, const void *host, size_t bytes) { TIMED(copy_in, 0, 0, device, host, bytes); }
static void timed_copy_out(void *host, const void *device, size_t bytes) { TIMED(copy_out, 0, 0, host, device, bytes); }
static void timed_copy(void *out, const void *in, size_t bytes) { TIMED(copy, 0, 0, out, in, bytes); }
static void timed_zero(void *out, size_t bytes) { TIMED(zero, 0, 0, out, bytes); }
static int64_t timed_store(void *host, const void *device, size_t bytes) { TIMED_TICKET(store, host, device, bytes); }
static int64_t timed_load(void *device, const void *host, size_t bytes) { TIMED_TICKET(load, device, host, bytes); }
static void timed_await_transfer(int64_t ticket) { TIMED(await_transfer, 0, 0, ticket); }

static void timed_embedding_forward(Stored *out, const int32_t *tokens, const int32_t *position, const Stored *wte,
                                    const Stored *wpe, size_t n, size_t C, double scale) {
    TIMED(embedding_forward, 0, 0, out, tokens, position, wte, wpe, n, C, scale);
}
static void timed_embedding_backward(void *dw, DType dw_type, const Stored *dx, const int32_t *index, size_t N,
                                     size_t rows, size_t C, double scale, Summed *scratch) {
    TIMED(embedding_backward, 0, 0, dw, dw_type, dx, index, N, rows, C, scale, scratch);
}
static void timed_scatter_rows(Stored *out, const Stored *in, const int32_t *row, size_t n, size_t width) {
    TIMED(scatter_rows, 0, 0, out, in, row, n, width);
}

static void timed_norm_forward(Stored *out, const Stored *x, const Stored *w, const Stored *b, const Stored *residual,
                               size_t n, size_t C, Norm norm) {
    TIMED_AS(norm.kind == NORM_RMS ? "rmsnorm_forward" : "layernorm_forward", norm_forward, 0, C, out, x, w, b,
             residual, n, C, norm);
}
static void timed_norm_backward(Stored *dx, Summed *dw, Summed *db, const Stored *dout, const Stored *x,
                                const Stored *w, size_t n, size_t C, Norm norm, int accumulate, Summed *scratch) {
    TIMED_AS(norm.kind == NORM_RMS ? "rmsnorm_backward" : "layernorm_backward", norm_backward, 0, C, dx, dw, db, dout,
             x, w, n, C, norm, accumulate, scratch);
}

static void timed_linear_forward(Stored *out, const Stored *x, const Stored *weight, const Stored *bias,
                                 const Stored *residual, size_t n, size_t C, size_t OC) {
    TIMED(linear_forward, OC, C, out, x, weight, bias, residual, n, C, OC);
}
static void timed_linear_backward_input(Stored *dx, const Stored *dout, const Stored *weight, size_t n, size_t C,
                                        size_t OC, int accumulate) {
    TIMED(linear_backward_input, OC, C, dx, dout, weight, n, C, OC, accumulate);
}
static void timed_linear_backward_weight(Summed *dweight, Summed *dbias, const Stored *dout, const Stored *x, size_t n,
                                         size_t C, size_t OC) {
    TIMED(linear_backward_weight, OC, C, dweight, dbias, dout, x, n, C, OC);
}

static void timed_adapter_forward(Stored *out, size_t width, size_t column, const Stored *h, const Stored *b, size_t n,
                                  size_t r, size_t OC) {
    TIMED(adapter_forward, OC, r, out, width, column, h, b, n, r, OC);
}
static void timed_adapter_backward(Stored *dh, Summed *db, const Stored *dout, size_t width, size_t column,
                                   const Stored *h, const Stored *b, size_t n, size_t r, size_t OC) {
    TIMED(adapter_backward, OC, r, dh, db, dout, width, column, h, b, n, r, OC);
}
static void timed_scale(Stored *x, double factor, size_t count) { TIMED(scale, 0, 0, x, factor, count); }
static void timed_dropout(Stored *out, const Stored *in, size_t n, size_t width, size_t first_row, double rate,
                          uint64_t seed, int accumulate) {
    TIMED(dropout, 0, 0, out, in, n, width, first_row, rate, seed, accumulate);
}

#define dry_rope_forward  dry_rope // the turn back is a turn
#define dry_rope_backward dry_rope
static void timed_rope_forward(Stored *x, const int32_t *position, const float *inverse_frequency, size_t n,
                               size_t heads, size_t HD) {
    TIMED(rope_forward, 0, 0, x, position, inverse_frequency, n, heads, HD);
}
static void timed_rope_backward(Stored *dx, const int32_t *position, const float *inverse_frequency, size_t n,
                                size_t heads, size_t HD) {
    TIMED(rope_backward, 0, 0, dx, position, inverse_frequency, n, heads, HD);
}
#undef dry_rope_forward
#undef dry_rope_backward
static void timed_attention_forward(void *out, Summed *lse, const Stored *q, const Stored *k, const Stored *v,
                                    const AttentionShape *shape, Summed *scratch) {
    TIMED_AS(shape->partial ? "attention_forward_part" : "attention_forward", attention_forward, 0, 0, out, lse, q, k,
             v, shape, scratch);
}
static void timed_attention_backward(void *dq, Summed *dk, Summed *dv, const Stored *dout, const Stored *out,
                                     const Stored *q, const Stored *k, const Stored *v, const Summed *lse,
                                     const AttentionShape *shape, Summed *scratch) {
    TIMED_AS(shape->partial ? "attention_backward_part" : "attention_backward", attention_backward, 0, 0, dq, dk, dv,
             dout, out, q, k, v, lse, shape, scratch);
}

static void timed_activation_forward(Stored *out, const Stored *in, ActivationKind kind, size_t n, size_t FF) {
    static const char *const names[] = {"swiglu_forward", "gelu_forward", "geglu_forward"};
    TIMED_AS(names[kind], activation_forward, 0, 0, out, in, kind, n, FF);
}
static void timed_activation_backward(Stored *din, const Stored *dout, const Stored *in, ActivationKind kind, size_t n,
                                      size_t FF) {
    static const char *const names[] = {"swiglu_backward", "gelu_backward", "geglu_backward"};
    TIMED_AS(names[kind], activation_backward, 0, 0, din, dout, in, kind, n, FF);
}

static void timed_logprob(Summed *logp, Summed *entropy, Stored *logits, const int32_t *targets, const Summed *weight,
                          size_t n, size_t V, double temperature) {
    TIMED(logprob, 0, 0, logp, entropy, logits, targets, weight, n, V, temperature);
}
static void timed_round_sums(Stored *out, const Summed *in, size_t count) { TIMED(round_sums, 0, 0, out, in, count); }
static void timed_gradient_add(void *gradient, DType type, const Summed *in, size_t count) {
    TIMED(gradient_add, 0, 0, gradient, type, in, count);
}

static int64_t timed_reduce_scatter(RankGroup group, Summed *x, size_t count, size_t unit) {
    TIMED_TICKET(reduce_scatter, group, x, count, unit);
}
static int64_t timed_all_gather(RankGroup group, void *x, size_t count, size_t unit, size_t size) {
    TIMED_TICKET(all_gather, group, x, count, unit, size);
}
static int64_t timed_exchange(RankGroup group, const Message *messages, size_t n) {
    TIMED_TICKET(exchange, group, messages, n);
}
static void timed_await(int64_t ticket) { TIMED(await, 0, 0, ticket); }
#undef TIMED
#undef TIMED_AS
#undef TIMED_TICKET

// `inner` with its ops timed, nothing timed so far.
static Ops ops_timed(const Ops *inner) {
    Ops ops = *inner;
    memset(&timing, 0, sizeof(timing));
    timing.inner = inner;
    timing.blank.factor = 1;
    timing.blank.stored = dtype_size(inner->stored), timing.blank.summed = dtype_size(inner->summed);
    ops.copy_in = timed_copy_in, ops.copy_out = timed_copy_out, ops.copy = timed_copy, ops.zero = timed_zero;
    ops.store = timed_store, ops.load = timed_load, ops.await_transfer = timed_await_transfer;
    ops.embedding_forward = timed_embedding_forward, ops.embedding_backward = timed_embedding_backward;
    ops.scatter_rows = timed_scatter_rows;
    ops.norm_forward = timed_norm_forward, ops.norm_backward = timed_norm_backward;
    ops.linear_forward = timed_linear_forward, ops.linear_backward_input = timed_linear_backward_input;
    ops.linear_backward_weight = timed_linear_backward_weight;
    ops.adapter_forward = timed_adapter_forward, ops.adapter_backward = timed_adapter_backward;
    ops.scale = timed_scale, ops.dropout = timed_dropout;
    ops.rope_forward = timed_rope_forward, ops.rope_backward = timed_rope_backward;
    ops.attention_forward = timed_attention_forward, ops.attention_backward = timed_attention_backward;
    ops.activation_forward = timed_activation_forward, ops.activation_backward = timed_activation_backward;
    ops.logprob = timed_logprob, ops.round_sums = timed_round_sums, ops.gradient_add = timed_gradient_add;
    ops.reduce_scatter = timed_reduce_scatter, ops.all_gather = timed_all_gather;
    ops.exchange = timed_exchange, ops.await = timed_await;
    return ops;
}

#endif
