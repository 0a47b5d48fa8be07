/*
An op set around another, for a pass that tells where its time goes: each op is counted by op set "dry" (FLOPs and
bytes), run, and waited for, with a clock around it. Transfers and collectives are waited for where they are asked for:
nothing runs beside anything else, so this pass takes longer than others. Results are those of the other op set, to the
bit.

A row is one op; of products and norms one op and one shape of its weight. Passed on without a clock: memory, scratch
sizes, and the optimizer's step, which no pass has.
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

// Behind an op that began at that time and that dry has counted.
static void timed_end(double begin) {
    timing.inner->finish();
    const double end = seconds_now();
    TimedRow *row = timed_row(dry.op, dry.rows, dry.cols);
    row->calls++, row->seconds += end - begin;
    for (size_t k = 0; k < OP_COUNTS; k++) ((double *)&row->counts)[k] += ((const double *)&dry.counts)[k];
}

// The bodies of ops that return nothing, and of those that return a ticket.
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

// `inner` with its ops timed, nothing timed so far. ridge: of the machine whose floors are wanted, see DryCount
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
