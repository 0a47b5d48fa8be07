/*
Cases for the ops of linear attention and the gate of attention's output, like those of cases.h.
*/
#ifndef TEST_OPS_CASES_LINEAR_H
#define TEST_OPS_CASES_LINEAR_H
#include "cases.h"

// ---- shapes of linear attention -------------------------------------------------------------------------------------
enum { MOST_SPANS = 24 };

static size_t span_length(const Span *span) { return span->end - span->begin; }

// Returns consecutive documents with these lengths, ended by 0; `before` tokens of the first one precede the call.
static Spans documents_of(Span *span, const size_t *lengths, size_t before) {
    Spans spans = {span, 0, 0, 0.0};
    for (size_t row = 0, token = 0; lengths[spans.count]; spans.count++) {
        const size_t length = lengths[spans.count], begun = spans.count ? 0 : before;
        const Span next = {token, token + begun, token + begun + length, row};
        span[spans.count] = next;
        row += length, token += begun + length;
    }
    return spans;
}

static const char *spans_text(Spans spans) {
    static char text[100];
    size_t used = 0;
    for (size_t s = 0; s < spans.count && used < sizeof(text); s++)
        used += (size_t)snprintf(text + used, sizeof(text) - used, " %zu+%zu",
                                 spans.span[s].begin - spans.span[s].document, span_length(&spans.span[s]));
    return text;
}

static void delta_case(const char *op, const DeltaShape *shape, const char *variant) {
    case_of("", "%s HK=%zu HV=%zu K=%zu V=%zu taps=%zu stride=%zu%s, tokens before and in spans%s%s", op, shape->HK,
            shape->HV, shape->K, shape->V, shape->taps, shape->stride, shape->gates ? " with gates" : "",
            spans_text(shape->spans), variant);
}

// Content of a slot before a call: the state of its first span; no span uses it; anything
typedef enum { SLOT_GOES_ON, SLOT_UNTOUCHED, SLOT_ANYTHING } Slot;

static Slot slot_of(const DeltaShape *shape, size_t slot) {
    for (size_t s = 0; s < shape->spans.count; s++) {
        const Span *span = &shape->spans.span[s];
        if (delta_slot(shape, span) == slot) return span->begin > span->document ? SLOT_GOES_ON : SLOT_ANYTHING;
    }
    return SLOT_UNTOUCHED;
}

// Returns states of `slots` slots of `each` elements: NaN for SLOT_ANYTHING.
static Guarded *states_of(GuardedRole role, const char *name, DType type, const DeltaShape *shape, size_t slots,
                          size_t each) {
    double *values = case_doubles(slots * each);
    for (size_t i = 0; i < slots * each; i++)
        values[i] = slot_of(shape, i / each) == SLOT_ANYTHING ? NAN : test_normal();
    return guarded_values(role, name, type, values, slots * each);
}

static void expect_slots_untouched(const Guarded *t, const DeltaShape *shape, size_t each) {
    const double *before = doubles_of(t);
    for (size_t i = 0; i < t->count; i++)
        if (slot_of(shape, i / each) == SLOT_UNTOUCHED && result(t, i) != before[i])
            test_fail("%s[%zu] of slot %zu was changed, to which no span belongs", t->name, i, i / each);
}

// Returns the number of a case's slots: one more than its spans reach.
static size_t slots_of_case(const DeltaShape *shape) { return delta_slots(shape) + (shape->slot_tokens ? 1 : 0); }

// ---- the convolution ------------------------------------------------------------------------------------------------
// Whether number j of the taps - 1 tokens that end `length` tokens after a span's first is in the span's document.
static int in_document(const DeltaShape *shape, const Span *span, size_t length, size_t j) {
    return span->begin - span->document + length + j + 1 >= shape->taps;
}

// Returns columns[slots,taps-1,W] as left by earlier calls: 0 for tokens before the document.
static Guarded *columns_before(GuardedRole role, const DeltaShape *shape, size_t slots) {
    const size_t W = delta_channels(shape), each = (shape->taps - 1) * W;
    Guarded *columns = states_of(role, "columns", ops->stored, shape, slots, each);
    for (size_t s = shape->spans.count; s-- > 0;) { // the first span of a slot last
        const size_t slot = delta_slot(shape, &shape->spans.span[s]);
        for (size_t i = 0; i < each && slot_of(shape, slot) == SLOT_GOES_ON; i++) {
            const int there = in_document(shape, &shape->spans.span[s], 0, i / W);
            if (there || shape->spans.span[s].begin == shape->spans.span[s].document) continue;
            ((double *)columns->values)[slot * each + i] = 0.0;
            element_write(columns->before + columns->offset, ops->stored, slot * each + i, 0.0);
        }
    }
    return columns;
}

static void conv_forward_case(const DeltaShape *shape, int biased) {
    const size_t n = delta_rows(shape), W = delta_channels(shape), slots = slots_of_case(shape);
    delta_case("conv_forward", shape, biased ? ", bias" : "");
    Guarded *bias = biased ? input("bias", W) : NULL;
    Guarded *x = rows_of(INPUT, "x", n, conv_width(shape), shape->stride, 1.0);
    Guarded *weight = input("weight", W * shape->taps), *out = output("out", n * W);
    Guarded *columns = columns_before(CHANGED, shape, slots);
    CHECK(conv_forward, of(out), of(columns), of(x), of(weight), of(bias), shape);
    expect(out, 2.0, 1.0);
    if (shape->gates)
        expect(columns, 1.0, 0.0);
    else
        expect_same(columns);
    expect_slots_untouched(columns, shape, (shape->taps - 1) * W);
}

// Returns gradients of the last columns from later calls: 0 for those of other documents.
static Guarded *dcolumns_behind(const DeltaShape *shape) {
    const size_t W = delta_channels(shape), count = (shape->taps - 1) * W;
    const Span *last = &shape->spans.span[shape->spans.count - 1];
    double *values = case_doubles(count);
    for (size_t i = 0; i < count; i++)
        values[i] = in_document(shape, last, span_length(last), i / W) ? test_normal() : 0.0;
    return guarded_values(CHANGED, "dcolumns", ops->summed, values, count);
}

static void conv_backward_case(const DeltaShape *shape, int with_dweight, int biased) {
    const size_t n = delta_rows(shape), W = delta_channels(shape), taps = shape->taps, width = conv_width(shape);
    delta_case("conv_backward", shape, !with_dweight ? ", no dweight" : biased ? ", bias" : "");
    Guarded *bias = biased ? input("bias", W) : NULL;
    Guarded *x = rows_of(INPUT, "x", n, width, shape->stride, 1.0), *weight = input("weight", W * taps);
    Guarded *dx = rows_of(CHANGED, "dx", n, width, shape->stride, 1.0), *dout = input("dout", n * W);
    Guarded *columns = columns_before(INPUT, shape, 1), *dcolumns = dcolumns_behind(shape);
    Guarded *dweight = with_dweight ? accumulated("dweight", W * taps) : NULL;
    Guarded *dbias = with_dweight && biased ? accumulated("dbias", W) : NULL;
    Guarded *scratch = scratch_of(SCRATCH_FOR(conv_backward, shape, biased));
    CHECK(conv_backward, of(dx), of(dweight), of(dbias), of(dcolumns), of(dout), of(x), of(columns), of(weight),
          of(bias), shape, of(scratch));
    expect(dx, 2.0, 1.0);
    expect_beside(dx, 0, width, shape->stride);
    expect(dweight, 2.0, sqrt((double)n));
    expect(dbias, 2.0, sqrt((double)n));
    expect(dcolumns, 2.0, 1.0);
    for (size_t i = 0; i < dcolumns->count; i++)
        if (!in_document(shape, shape->spans.span, 0, i / W) && result(dcolumns, i) != 0.0)
            test_fail("dcolumns[%zu] is %g, of a token before the document", i, result(dcolumns, i));
}

// ---- the gated delta rule -------------------------------------------------------------------------------------------
// USUAL: heads with short and long memory; LASTING: no decay, beta 1; STRONG: log decay -500, beta 1; NOW_AND_THEN:
// both. ALIKE: as LASTING, with the same key in every token
typedef enum { GATES_USUAL, GATES_LASTING, GATES_STRONG, GATES_NOW_AND_THEN, GATES_ALIKE, GATES } GatesKind;
static const char *const gates_names[] = {"", ", lasting", ", strong decay", ", strong decay now and then",
                                          ", keys alike"};

typedef struct {
    Guarded *x, *b, *a, *A_log, *dt_bias;
} DeltaInputs;

static Guarded *delta_gate(const char *name, const DeltaShape *shape, GatesKind kind, double lasting, double strong) {
    const size_t n = delta_rows(shape), stride = shape->stride;
    double *values = case_doubles(n * stride);
    for (size_t i = 0; i < n * stride; i++) {
        const double usual = 1.5 * test_normal();
        const int now = kind == GATES_STRONG || (kind == GATES_NOW_AND_THEN && test_random_below(10) == 0);
        values[i] = i % stride >= shape->HV                             ? NAN
                    : now                                               ? strong
                    : kind == GATES_USUAL || kind == GATES_NOW_AND_THEN ? usual
                                                                        : lasting;
    }
    return guarded_values(INPUT, name, ops->stored, values, n * stride);
}

static DeltaInputs delta_inputs(const DeltaShape *shape, GatesKind kind) {
    const size_t n = delta_rows(shape), W = delta_channels(shape), HV = shape->HV;
    const size_t first_k = shape->HK * shape->K, first_v = 2 * first_k;
    DeltaInputs in = {NULL, NULL, NULL, NULL, NULL};
    double *x = case_doubles(n * W), *dt_bias = case_doubles(HV);
    // with K of 1 or 2, far from 0: else the divisor of a key would be tiny
    for (size_t i = 0; i < n * W; i++) {
        const int key = i % W >= first_k && i % W < first_v;
        x[i] = shape->K > 2 || i % W >= first_v ? test_normal() : 2.0 + 0.5 * test_normal();
        if (kind == GATES_ALIKE && key && i >= W) x[i] = x[i - W];
    }
    for (size_t i = 0; i < HV; i++) dt_bias[i] = -3.0 + 1.5 * test_normal();
    in.x = guarded_values(INPUT, "x", ops->stored, x, n * W);
    in.b = delta_gate("b", shape, kind, 40.0, 40.0), in.a = delta_gate("a", shape, kind, -60.0, 503.0);
    in.A_log = normal(INPUT, "A_log", ops->stored, HV, 0.0, kind == GATES_USUAL ? 0.7 : 0.0);
    in.dt_bias = guarded_values(INPUT, "dt_bias", ops->stored, dt_bias, HV);
    return in;
}

// Where some log decays are -500 they sum to thousands; the decay between two tokens is a difference.
static double gates_slack(GatesKind gates) {
    return gates == GATES_NOW_AND_THEN && ops->summed == DTYPE_FP64 ? 8.0 : 1.0;
}

// out NULL: computes the state alone
enum { DELTA_OUT = 1, DELTA_WITH_TRANSFER = 2 };

static void delta_forward_case(const DeltaShape *shape, GatesKind gates, int what, double slack) {
    const size_t n = delta_rows(shape), HV = shape->HV, K = shape->K, each = delta_state_elements(shape);
    delta_case("delta_forward", shape, gates_names[gates]);
    slack *= gates_slack(gates);
    const DeltaInputs in = delta_inputs(shape, gates);
    Guarded *out = what & DELTA_OUT ? output("out", n * HV * shape->V) : NULL;
    Guarded *state = states_of(CHANGED, "state", ops->summed, shape, slots_of_case(shape), each);
    Guarded *transfer = what & DELTA_WITH_TRANSFER ? accumulated("transfer", HV * K * K) : NULL;
    Guarded *scratch = scratch_of(SCRATCH_FOR(delta_forward, shape));
    CHECK(delta_forward, of(out), of(state), of(transfer), of(in.x), of(in.b), of(in.a), of(in.A_log), of(in.dt_bias),
          shape, of(scratch));
    expect(out, slack, 0.0);
    expect(state, slack, 0.0);
    expect(transfer, slack, 1.0); // share of the old state that is kept: sums of terms near 1 that cancel
    expect_slots_untouched(state, shape, each);
    for (size_t i = 0; transfer && i < transfer->count && slot_of(shape, 0) == SLOT_ANYTHING; i++)
        if (result(transfer, i) != 0.0) test_fail("transfer[%zu] is not 0, but a document begins", i);
}

// DSTATE: dx NULL, dstate alone; NO_HEADS: dA_log and ddt_bias NULL
enum { DELTA_ALL, DELTA_NO_HEADS, DELTA_DSTATE };

static void delta_backward_case(const DeltaShape *shape, GatesKind gates, int what, double slack) {
    static const char *const variants[] = {"", ", without A_log and dt_bias", ", dstate alone"};
    const size_t n = delta_rows(shape), HV = shape->HV, stride = shape->stride, each = delta_state_elements(shape);
    char variant[80];
    snprintf(variant, sizeof(variant), "%s%s", gates_names[gates], variants[what]);
    delta_case("delta_backward", shape, variant);
    slack *= gates_slack(gates);
    const int all = what == DELTA_ALL, rows = what != DELTA_DSTATE;
    const DeltaInputs in = delta_inputs(shape, gates);
    Guarded *state = rows ? states_of(INPUT, "state", ops->summed, shape, 1, each) : NULL;
    Guarded *dstate = accumulated("dstate", each), *dout = input("dout", n * HV * shape->V);
    Guarded *dx = rows ? output("dx", in.x->count) : NULL, *dA_log = all ? accumulated("dA_log", HV) : NULL;
    Guarded *db = rows ? rows_of(CHANGED, "db", n, HV, stride, 1.0) : NULL;
    Guarded *da = rows ? rows_of(CHANGED, "da", n, HV, stride, 1.0) : NULL;
    Guarded *ddt_bias = all ? accumulated("ddt_bias", HV) : NULL;
    Guarded *scratch = scratch_of(SCRATCH_FOR(delta_backward, shape));
    CHECK(delta_backward, of(dx), of(db), of(da), of(dA_log), of(ddt_bias), of(dstate), of(dout), of(in.x), of(in.b),
          of(in.a), of(in.A_log), of(in.dt_bias), of(state), shape, of(scratch));
    expect(dx, slack, 1.0);
    expect(db, slack, 1.0);
    expect(da, slack, 1.0);
    expect(dA_log, slack, sqrt((double)n));
    expect(ddt_bias, slack, sqrt((double)n));
    expect(dstate, slack, 1.0);
    if (db) expect_beside(db, 0, HV, stride), expect_beside(da, 0, HV, stride);
    for (size_t i = 0; i < each && slot_of(shape, 0) == SLOT_ANYTHING; i++)
        if (result(dstate, i) != 0.0) test_fail("dstate[%zu] is not 0, but a document begins", i);
}

// ---- Mamba-2's rule -------------------------------------------------------------------------------------------------
// USUAL: heads with short and long memory; LASTING: steps at the least, A near 0; STRONG: log decay -500; NOW_AND_THEN:
// both; ALIKE: steps at the most, the same key in every token
static Guarded *ssd_rows(const char *name, const DeltaShape *shape, GatesKind kind) {
    const size_t n = delta_rows(shape), stride = shape->stride;
    double *values = case_doubles(n * stride);
    for (size_t i = 0; i < n * stride; i++) {
        const double usual = 1.5 * test_normal();
        const int now = kind == GATES_STRONG || (kind == GATES_NOW_AND_THEN && test_random_below(10) == 0);
        values[i] = i % stride >= shape->HV ? NAN
                    : now                   ? 503.0
                    : kind == GATES_LASTING ? -60.0
                    : kind == GATES_ALIKE   ? 40.0
                                            : usual;
    }
    return guarded_values(INPUT, name, ops->stored, values, n * stride);
}

typedef struct {
    Guarded *x, *dt, *A_log, *D, *dt_bias;
} SsdInputs;

static SsdInputs ssd_inputs(const DeltaShape *shape, GatesKind kind) {
    const size_t n = delta_rows(shape), W = delta_channels(shape), HV = shape->HV, first_k = HV * shape->V;
    SsdInputs in;
    double *x = case_doubles(n * W), *dt_bias = case_doubles(HV);
    for (size_t i = 0; i < n * W; i++) {
        x[i] = test_normal();
        if (kind == GATES_ALIKE && i % W >= first_k && i >= W) x[i] = x[i - W];
    }
    for (size_t i = 0; i < HV; i++) dt_bias[i] = -3.0 + 1.5 * test_normal();
    in.x = guarded_values(INPUT, "x", ops->stored, x, n * W), in.dt = ssd_rows("dt", shape, kind);
    in.A_log = normal(INPUT, "A_log", ops->stored, HV, 0.0, kind == GATES_USUAL ? 0.7 : 0.0);
    in.D = input("D", HV), in.dt_bias = guarded_values(INPUT, "dt_bias", ops->stored, dt_bias, HV);
    return in;
}

static void ssd_forward_case(const DeltaShape *shape, GatesKind gates, int what, double slack) {
    const size_t n = delta_rows(shape), HV = shape->HV, each = delta_state_elements(shape);
    delta_case("ssd_forward", shape, gates_names[gates]);
    slack *= gates_slack(gates);
    const SsdInputs in = ssd_inputs(shape, gates);
    Guarded *out = what & DELTA_OUT ? output("out", n * HV * shape->V) : NULL;
    Guarded *state = states_of(CHANGED, "state", ops->summed, shape, slots_of_case(shape), each);
    Guarded *transfer = what & DELTA_WITH_TRANSFER ? accumulated("transfer", HV) : NULL;
    Guarded *scratch = scratch_of(SCRATCH_FOR(ssd_forward, shape));
    CHECK(ssd_forward, of(out), of(state), of(transfer), of(in.x), of(in.dt), of(in.A_log), of(in.D), of(in.dt_bias),
          shape, of(scratch));
    expect(out, slack, 1.0); // outputs are sums over earlier tokens, whose terms cancel
    expect(state, slack, 1.0);
    expect(transfer, slack, 0.0);
    expect_slots_untouched(state, shape, each);
    for (size_t i = 0; transfer && i < HV && slot_of(shape, 0) == SLOT_ANYTHING; i++)
        if (result(transfer, i) != 0.0) test_fail("transfer[%zu] is not 0, but a document begins", i);
}

static void ssd_backward_case(const DeltaShape *shape, GatesKind gates, int what, double slack) {
    static const char *const variants[] = {"", ", without A_log, D and dt_bias", ", dstate alone"};
    const size_t n = delta_rows(shape), HV = shape->HV, stride = shape->stride, each = delta_state_elements(shape);
    char variant[80];
    snprintf(variant, sizeof(variant), "%s%s", gates_names[gates], variants[what]);
    delta_case("ssd_backward", shape, variant);
    slack *= gates_slack(gates);
    const int all = what == DELTA_ALL, rows = what != DELTA_DSTATE;
    const SsdInputs in = ssd_inputs(shape, gates);
    Guarded *state = rows ? states_of(INPUT, "state", ops->summed, shape, 1, each) : NULL;
    Guarded *dstate = accumulated("dstate", each), *dout = input("dout", n * HV * shape->V);
    Guarded *dx = rows ? output("dx", in.x->count) : NULL, *dA_log = all ? accumulated("dA_log", HV) : NULL;
    Guarded *ddt = rows ? rows_of(CHANGED, "ddt", n, HV, stride, 1.0) : NULL;
    Guarded *dD = all ? accumulated("dD", HV) : NULL, *ddt_bias = all ? accumulated("ddt_bias", HV) : NULL;
    Guarded *scratch = scratch_of(SCRATCH_FOR(ssd_backward, shape));
    CHECK(ssd_backward, of(dx), of(ddt), of(dA_log), of(dD), of(ddt_bias), of(dstate), of(dout), of(in.x), of(in.dt),
          of(in.A_log), of(in.D), of(in.dt_bias), of(state), shape, of(scratch));
    expect(dx, slack, 1.0);
    expect(ddt, slack, 1.0);
    expect(dA_log, slack, sqrt((double)n));
    expect(dD, slack, sqrt((double)(n * shape->V)));
    expect(ddt_bias, slack, sqrt((double)n));
    expect(dstate, slack, 1.0);
    if (ddt) expect_beside(ddt, 0, HV, stride);
    for (size_t i = 0; i < each && slot_of(shape, 0) == SLOT_ANYTHING; i++)
        if (result(dstate, i) != 0.0) test_fail("dstate[%zu] is not 0, but a document begins", i);
}

#endif
