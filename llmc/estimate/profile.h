/*
Shows where the time of a pass goes. An op set that wraps another times each op of a pass: op set "dry" counts the op's
FLOPs and bytes, then the op runs and is awaited, and a clock measures it. Transfers and collectives are awaited at
once: nothing overlaps, so this pass takes longer than an ordinary pass. Results are bit-identical to the inner op
set's.

A row is one op; products and norms have a row for each op and shape of its weight. Rows become a table and JSON, the
longest first. A row's floor is the time of its counted work at a machine's rates (machine.h). Ops without counts
(copies, zeroing, sums of gradients) have neither rates nor a floor. The last row is the rest of the pass: the host, the
counting itself, waiting for other ranks. Not timed: memory, scratch sizes, and the optimizer's step, which is no part
of a pass.
*/
#ifndef LLMC_PROFILE_H
#define LLMC_PROFILE_H
#include "machine.h"
#include "llmc/base/json.h"
#include "llmc/ops/ops_dry.h"
#include "llmc/stream/state.h"

// ---- timing --------------------------------------------------------------------------------------------------------
typedef struct {
    const char *op;
    size_t rows, cols; // shape of the op's weight [rows, cols], of a norm's weight [cols]; else 0
    size_t calls;
    double seconds;
    OpCounts counts;
} TimedRow;

#define TIMED_ROWS 192 // a model has about five shapes; with every kind of adapter a few dozen

typedef struct {
    const Ops *inner;
    DryCount blank; // counts at zero, with no ranges checked
    TimedRow row[TIMED_ROWS];
    size_t count;
} Timing;

static Timing timing; // timing of the current pass; there is one at a time

static TimedRow *timed_row(const char *op, size_t rows, size_t cols) {
    TimedRow *row;
    for (row = timing.row; row < timing.row + timing.count; row++)
        if (row->rows == rows && row->cols == cols && !strcmp(row->op, op)) return row;
    if (timing.count == TIMED_ROWS)
        die("internal: a pass with more than %d kinds of ops; please report it", TIMED_ROWS);
    timing.count++;
    row->op = op, row->rows = rows, row->cols = cols;
    return row;
}

// Adds the counts of an op in op set "dry" to the op's row.
static void timed_end(double begin) {
    timing.inner->finish();
    const double end = seconds_now();
    TimedRow *row = timed_row(dry.op, dry.rows, dry.cols);
    row->calls++, row->seconds += end - begin;
    for (size_t k = 0; k < OP_COUNTS; k++) ((double *)&row->counts)[k] += ((const double *)&dry.counts)[k];
}

// Bodies of ops that return nothing, and of ops that return a ticket
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

// Returns `inner` with its ops timed, and clears the rows. ridge: DryCount.ridge of the machine for the floors
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

static int timed_compare(const void *a, const void *b) {
    const double x = ((const TimedRow *)a)->seconds, y = ((const TimedRow *)b)->seconds;
    return (x < y) - (x > y);
}

static void timing_sort(void) { qsort(timing.row, timing.count, sizeof(TimedRow), timed_compare); }

static double row_bytes(const TimedRow *row) { return row->counts.operands + row->counts.moved; }

// Names the parts of the model whose weights have this shape and share the row.
static const char *row_part(const TimedRow *row, const StreamBP *s, char text[48]) {
    const Shapes d = shapes_of(s->model);
    const size_t out = row->rows, in = row->cols;
    static const unsigned forms[] = {0, FORM_WINDOW, FORM_BORROWS}; // layers of these forms may have heads or MLPs of
                                                                    // other widths
    int attention = 0, mlp = 0, adapters = 0;
    for (size_t i = 0; i < 3; i++) {
        const Shapes of = shapes_in(s->model, forms[i]);
        attention |= (in == d.C && (out == of.Q || out == of.KV)) || (in == of.O && out == d.C);
        mlp |= (in == d.C && out == of.H) || (in == of.FF && out == d.C);
    }
    for (size_t i = 0; s->memory.lora && i < d.L * LAYER_TENSORS; i++) {
        const size_t rank = s->memory.lora->part[i].rank;
        adapters |= rank && (in == rank || out == rank);
    }
    snprintf(text, 48, "%s%s%s%s", attention ? "+attention" : "", mlp ? "+MLP" : "",
             in == d.C && out == d.V ? "+head" : "", adapters ? "+adapters" : "");
    return *text ? text + 1 : text;
}

// Returns the least seconds of a row on this machine; NAN without counts or without a machine
static double row_floor(const TimedRow *row, const Machine *machine) {
    return machine && row->counts.flops + row_bytes(row) > 0 ? work_seconds(machine, row->counts) : NAN;
}

static double seconds_not_in_ops(double pass) {
    for (size_t i = 0; i < timing.count; i++) pass -= timing.row[i].seconds;
    return pass;
}

// ---- for people ----------------------------------------------------------------------------------------------------
// Prints four digits, or a dash for 0 and NAN.
static void print_cell(FILE *out, double value, double unit) {
    if (value > 0)
        fprintf(out, " %9.4g", value / unit);
    else
        fprintf(out, " %9s", "-");
}

static void print_row(FILE *out, const TimedRow *row, const StreamBP *s, const Machine *machine, double pass) {
    const double floor_seconds = row_floor(row, machine);
    char name[128], part[48];
    int used = snprintf(name, sizeof(name), "%s", row->op);
    if (row->rows)
        snprintf(name + used, sizeof(name) - (size_t)used, " [%zu,%zu] %s", row->rows, row->cols,
                 row_part(row, s, part));
    else if (row->cols)
        snprintf(name + used, sizeof(name) - (size_t)used, " [%zu]", row->cols);
    fprintf(out, "  %-48s %8zu %9.4g %7.2f %%", name, row->calls, row->seconds, 100 * row->seconds / pass);
    print_cell(out, row->counts.flops / row->seconds, 1e12);
    print_cell(out, row_bytes(row) / row->seconds, 1e9);
    if (machine) {
        print_cell(out, floor_seconds, 1);
        print_cell(out, floor_seconds / row->seconds, 0.01);
    }
    fputc('\n', out);
}

// Prints the table. pass: seconds of the pass with timed ops; median: seconds of the median of the other passes
static void profile_report(FILE *out, const StreamBP *s, const Machine *machine, double pass, double median) {
    const double rest = seconds_not_in_ops(pass);
    double floors = 0;
    for (size_t i = 0; machine && i < timing.count; i++) floors += work_seconds(machine, timing.row[i].counts);
    fprintf(out, "profile  of one more pass, each op waited for: %.4g s, %.3g times the median of the others\n", pass,
            pass / median);
    if (machine)
        fprintf(out, "floor    at the rates of an %s in bf16: %.4g s in all, %.1f %% of the median\n", machine->gpu,
                floors, 100 * floors / median);
    fprintf(out, "  %-48s %8s %9s %9s %9s %9s%s\n", "op", "calls", "seconds", "of pass", "TFLOP/s", "GB/s",
            machine ? "     floor   floor %" : "");
    for (size_t i = 0; i < timing.count; i++) print_row(out, &timing.row[i], s, machine, pass);
    fprintf(out, "  %-48s %8s %9.4g %7.2f %%\n", "not in ops (host)", "", rest, 100 * rest / pass);
}

// ---- as JSON -------------------------------------------------------------------------------------------------------
static void row_json(JsonOut *json, const TimedRow *row, const StreamBP *s, const Machine *machine) {
    char part[48];
    json_object(json, NULL);
    json_text(json, "op", row->op);
    if (row->rows) json_text(json, "part", row_part(row, s, part));
    if (row->cols) {
        json_array(json, "shape");
        if (row->rows) json_size(json, NULL, row->rows);
        json_size(json, NULL, row->cols);
        json_array_end(json);
    }
    json_size(json, "calls", row->calls);
    json_number(json, "seconds", row->seconds);
    json_number(json, "flops", row->counts.flops);
    json_number(json, "bytes", row_bytes(row));
    if (machine) json_number(json, "floor_seconds", row_floor(row, machine));
    json_object_end(json);
}

// Writes the rows into an open object.
static void profile_json(JsonOut *json, const StreamBP *s, const Machine *machine, double pass) {
    TimedRow rest = {0};
    rest.op = "host", rest.seconds = seconds_not_in_ops(pass);
    if (machine) json_text(json, "machine", machine->name);
    json_number(json, "profile_seconds", pass);
    json_array(json, "profile");
    for (size_t i = 0; i < timing.count; i++) row_json(json, &timing.row[i], s, machine);
    row_json(json, &rest, s, machine);
    json_array_end(json);
}

#endif
