/*
An op set around another that times each op of a pass: op set "dry" counts its FLOPs and bytes, then it runs and is
awaited, with a clock around it. Transfers and collectives are awaited at once: nothing overlaps, so this pass takes
longer than others. Results are bit-identical to the inner op set's.

A row is one op; of products and norms, one op and one shape of its weight. Not timed: memory, scratch sizes, and the
optimizer's step, which is no part of a pass.
*/
#ifndef LLMC_OPS_TIMED_H
#define LLMC_OPS_TIMED_H
#include "llmc/ops/ops_dry.h"

typedef struct {
    const char *op;
    size_t rows, cols; // of its weight [rows, cols], of a norm's [cols]; else 0
    size_t calls;
    double seconds;
    OpCounts counts;
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

// Adds an op, which dry has counted, to its row.
static void timed_end(double begin) {
    timing.inner->finish();
    const double end = seconds_now();
    TimedRow *row = timed_row(dry.op, dry.rows, dry.cols);
    row->calls++, row->seconds += end - begin;
    for (size_t k = 0; k < OP_COUNTS; k++) ((double *)&row->counts)[k] += ((const double *)&dry.counts)[k];
}

// Bodies of ops that return nothing, and of those that return a ticket
#define TIMED_void(call)                                                                                               \
    call;                                                                                                              \
    timed_end(begin)
#define TIMED_int64_t(call)                                                                                            \
    const int64_t ticket = call;                                                                                       \
    timed_end(begin);                                                                                                  \
    return ticket
#define OP(type, op, parameters, arguments, tensors)                                                                   \
    static type timed_##op parameters {                                                                                \
        dry = timing.blank;                                                                                            \
        dry_##op arguments;                                                                                            \
        const double begin = seconds_now();                                                                            \
        TIMED_##type(timing.inner->op arguments);                                                                      \
    }
#define OP_HOST(...)
#define OP_SCRATCH(...)
#define OP_STEP(...)
#include "llmc/ops/op_list.h"
#undef TIMED_void
#undef TIMED_int64_t

// Returns `inner` with its ops timed, and clears the rows. ridge: DryCount.ridge of the floors' machine
static Ops ops_timed(const Ops *inner, double ridge) {
    Ops ops = *inner;
    memset(&timing, 0, sizeof(timing));
    timing.inner = inner;
    timing.blank.factor = 1, timing.blank.ridge = ridge;
    timing.blank.stored = dtype_size(inner->stored), timing.blank.summed = dtype_size(inner->summed);
#define OP(type, op, ...) ops.op = timed_##op;
#define OP_HOST(...)
#define OP_SCRATCH(...)
#define OP_STEP(...)
#include "llmc/ops/op_list.h"
    return ops;
}

#endif
