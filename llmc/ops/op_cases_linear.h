/*
Cases of the ops of linear attention and of the gate of attention's output. Part of op_cases.h.
*/
#ifndef LLMC_OP_CASES_LINEAR_H
#define LLMC_OP_CASES_LINEAR_H
#include "ops_reference_linear.h"

// ---- the gate of attention's output ---------------------------------------------------------------------------------
static void case_split_heads(const OpShape *s) {
    check_begin("%zu x %zu x %zu%s", s->n, s->NH, s->HD, s->back ? " joined" : "");
    const Dim N = some_of(s->n, 40), width = all_of(s->NH * s->HD), twice = all_of(2 * s->NH * s->HD);
    Tensor *joined = s->back ? tensor_out("joined", N, twice) : tensor_in("joined", N, twice);
    Tensor *first = s->back ? tensor_in("first", N, width) : tensor_out("first", N, width);
    Tensor *second = s->back ? tensor_in("second", N, width) : tensor_out("second", N, width);
    CHECK(split_heads, of(joined), of(first), of(second), len(N), s->NH, s->HD, s->back);
    expect(s->back ? joined : first, 1, 0);
    expect(s->back ? NULL : second, 1, 0);
}

// Returns the elements of a gate: 1, or a head's.
static size_t gate_width(const OpShape *s) { return s->joined ? s->HD : 1; }

// ---- latent attention -----------------------------------------------------------------------------------------------
static void case_latent_expand(const OpShape *s) {
    check_begin("%zu x %zu x %zu, values %zu, %zu shared", s->n, s->NH, s->HD, s->VD, s->R);
    const Dim N = some_of(s->n, 40), width = all_of(s->NH * s->HD), R = all_of(s->R);
    Tensor *kv = tensor_in("kv", N, all_of(s->NH * (s->HD - s->R + s->VD))), *shared = tensor_in("shared", N, R);
    Tensor *k = tensor_out("k", N, width), *v = tensor_out("v", N, width);
    CHECK(latent_expand, of(k), of(v), of(kv), of(shared), len(N), s->NH, s->HD, s->VD, s->R);
    expect(k, 1, 0);
    expect(v, 1, 0);
}

static void case_latent_trim(const OpShape *s) {
    check_begin("%zu x %zu x %zu, values %zu%s", s->n, s->NH, s->HD, s->VD, s->back ? ", back" : "");
    const Dim N = some_of(s->n, 40), all = all_of(s->NH * s->HD), part = all_of(s->NH * s->VD);
    Tensor *wide = s->back ? tensor_out("wide", N, all) : tensor_in("wide", N, all);
    Tensor *narrow = s->back ? tensor_in("narrow", N, part) : tensor_out("narrow", N, part);
    CHECK(latent_trim, of(wide), of(narrow), len(N), s->NH, s->HD, s->VD, s->back);
    expect(s->back ? wide : narrow, 1, 0);
}

static void case_latent_fold(const OpShape *s) {
    check_begin("%zu x %zu x %zu, values %zu, %zu shared", s->n, s->NH, s->HD, s->VD, s->R);
    const Dim N = some_of(s->n, 40), width = all_of(s->NH * s->HD), R = all_of(s->R);
    Tensor *dk = tensor_make(TENSOR_READ, "dk", check.ops->summed, N, width);
    Tensor *dv = tensor_make(TENSOR_READ, "dv", check.ops->summed, N, width);
    Tensor *dkv = tensor_out("dkv", N, all_of(s->NH * (s->HD - s->R + s->VD)));
    Tensor *dshared = tensor_sums("dshared", N, R);
    CHECK(latent_fold, of(dkv), of(dshared), of(dk), of(dv), len(N), s->NH, s->HD, s->VD, s->R);
    expect(dkv, 1, 0);
    sums_of(s->NH, 0);
    expect(dshared, 1, 0);
}

static void case_sums_add(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const Dim count = some_of(s->n * s->C, 4000), one = all_of(1);
    Tensor *in = tensor_in("in", one, count), *sums = tensor_sums("sums", one, count);
    CHECK(sums_add, of(sums), of(in), len(count));
    expect(sums, 1, 0);
}

static void case_gate_forward(const OpShape *s) {
    const size_t width = gate_width(s);
    check_begin("%zu x %zu, gates of %zu", s->n, s->NH * s->HD, width);
    const Dim gates = some_of(s->n * s->NH * s->HD / width, 4000 / width + 1), own = all_of(width);
    Tensor *x = tensor_in("x", gates, own), *gate = tensor_in("gate", gates, all_of(1));
    Tensor *out = tensor_out("out", gates, own);
    CHECK(gate_forward, of(out), of(x), of(gate), len(gates) * width, width);
    expect(out, 1, 0);
}

static void case_gate_backward(const OpShape *s) {
    const size_t width = gate_width(s);
    check_begin("%zu x %zu, gates of %zu", s->n, s->NH * s->HD, width);
    const Dim gates = some_of(s->n * s->NH * s->HD / width, 4000 / width + 1), own = all_of(width), one = all_of(1);
    Tensor *x = tensor_in("x", gates, own), *gate = tensor_in("gate", gates, one),
           *dout = tensor_in("dout", gates, own);
    Tensor *dx = tensor_out("dx", gates, own), *dgate = tensor_out("dgate", gates, one);
    CHECK(gate_backward, of(dx), of(dgate), of(dout), of(x), of(gate), len(gates) * width, width);
    expect(dx, 1, 0);
    expect(dgate, 1, width > 1 ? sqrt((double)width) / 4 : 0); // a sum of terms of d x / 4
}

// ---- shapes of linear attention -------------------------------------------------------------------------------------
typedef struct {
    DeltaShape shape, sample; // the sample has fewer heads and columns, and all tokens
} LinearCase;

static const DeltaShape *shape_of(const LinearCase *l) { return check.on_reference ? &l->sample : &l->shape; }

static LinearCase linear_case(const OpShape *s) {
    LinearCase l = {s->delta, s->delta};
    if (!s->delta.ssd) l.shape.most = l.sample.most = INFINITY;
    check_begin("%zu x %zu x %zu x %zu%s", s->n, l.shape.HV, l.shape.K, l.shape.V, s->documents ? " of documents" : "");
    l.shape.spans = l.sample.spans = usual_spans(s->n, s->n + CONV_TAPS_MAX, s->documents);
    return l;
}

// ---- the convolution: in the sample a channel is a value head of one element ----------------------------------------
static Dim conv_rows(LinearCase *l, Dim W) {
    const size_t parts = l->shape.gates ? 3 : 1; // B | C | x
    size_t *at = (size_t *)check_allocate(parts * W.count * sizeof(size_t));
    for (size_t i = 0; i < parts * W.count; i++) at[i] = i / W.count * W.size + dim_at(W, i % W.count);
    const Dim row = part_of_row(dim_of(parts * W.size, parts * W.count, at), 0, parts * W.size + 8);
    l->sample.HK = 1, l->sample.K = 0, l->sample.HV = W.count, l->sample.V = 1;
    l->shape.stride = row.size, l->sample.stride = row.count;
    return row;
}

static void case_conv_forward(const OpShape *s) {
    LinearCase l = linear_case(s);
    const Dim W = some_of(delta_channels(&l.shape), 256), row = conv_rows(&l, W), N = all_of(s->n);
    Tensor *x = tensor_in("x", N, row), *weight = tensor_in("weight", W, all_of(l.shape.taps));
    Tensor *bias = s->bias ? tensor_in("bias", all_of(1), W) : NULL;
    Tensor *out = tensor_out("out", N, W), *columns = tensor_inout("columns", all_of(l.shape.taps - 1), W);
    if (s->delta.gates) (void)rounds_operands(); // B x
    CHECK(conv_forward, of(out), of(columns), of(x), of(weight), of(bias), shape_of(&l));
    expect(out, 1, 1);
    expect(columns, 1, 0);
}

// Makes gradients of the last tokens as later calls leave them: 0 for documents that have ended.
static void *dcolumns_of(const DeltaShape *shape, DType type) {
    const Span *last = &shape->spans.span[shape->spans.count - 1];
    const size_t W = delta_channels(shape), count = (shape->taps - 1) * W;
    float *values = (float *)check_allocate(count * sizeof(float));
    void *elements = check_allocate(count * dtype_size(type));
    for (size_t i = 0; i < count; i++)
        values[i] = last->end - last->document + i / W + 1 >= shape->taps ? (float)normal_of(random_mix(7 + i)) : 0.0f;
    elements_from_float(elements, type, values, count);
    return elements;
}

static void case_conv_backward(const OpShape *s) {
    const DType summed = check.ops->summed;
    LinearCase l = linear_case(s);
    const Dim W = some_of(delta_channels(&l.shape), 256), row = conv_rows(&l, W), N = all_of(s->n);
    const Dim taps = all_of(l.shape.taps), before = all_of(l.shape.taps - 1);
    Tensor *x = tensor_in("x", N, row), *weight = tensor_in("weight", W, taps), *dout = tensor_in("dout", N, W);
    Tensor *columns = tensor_in("columns", before, W), *dx = tensor_inout("dx", N, row);
    Tensor *dweight = tensor_sums("dweight", W, taps), *bias = s->bias ? tensor_in("bias", all_of(1), W) : NULL;
    Tensor *dbias = s->bias ? tensor_sums("dbias", all_of(1), W) : NULL;
    Tensor *dcolumns = tensor_given(TENSOR_CHANGED, "dcolumns", summed, before, W, dcolumns_of(&l.shape, summed));
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(conv_backward, &l.shape, s->bias));
    if (s->delta.gates) (void)rounds_operands();
    CHECK(conv_backward, of(dx), of(dweight), of(dbias), of(dcolumns), of(dout), of(x), of(columns), of(weight),
          of(bias), shape_of(&l), of(scratch));
    expect(dx, 1, 1);
    expect(dweight, 1, sqrt((double)s->n));
    expect(dbias, 1, sqrt((double)s->n));
    expect(dcolumns, 1, 1);
}

// ---- the gated delta rule -------------------------------------------------------------------------------------------
// A case of the delta rule. The sample has some heads, and in forward some columns of a state, because forward's
// columns are independent.
typedef struct {
    LinearCase l;
    Dim N, heads, x, out, gates, keys, values; // x, out, gates: columns of x, out, (b, a); keys, values: of states
    Tensor *in, *b, *A_log, *dt_bias;
} DeltaCase;

// Returns the b of all heads; b and a lie in the same rows.
static AnyPointer gate_b(const DeltaCase *d, const Tensor *t) { return own(t, d->gates); }
static AnyPointer gate_a(const DeltaCase *d, const Tensor *t) {
    return columns(t, d->gates.first + d->l.shape.HV, d->gates.in_sample + d->heads.count);
}

static void delta_sample(DeltaCase *d, size_t key_heads) {
    DeltaShape *const shape = &d->l.shape, *const sample = &d->l.sample;
    const size_t HK = shape->HK, HV = shape->HV, K = shape->K, V = shape->V;
    const Dim keys = some_of(HK, key_heads);
    d->heads = columns_of(keys, HV / HK, 0, HV);
    sample->HK = keys.count, sample->HV = d->heads.count, sample->V = d->values.count;
    const size_t own_keys = keys.count * K, own_values = sample->HV * sample->V;
    size_t *at = (size_t *)check_allocate(delta_channels(sample) * sizeof(size_t));
    size_t *of_out = (size_t *)check_allocate(own_values * sizeof(size_t));
    size_t *of_gates = (size_t *)check_allocate(2 * sample->HV * sizeof(size_t));
    for (size_t i = 0; i < 2 * own_keys; i++) at[i] = (i / own_keys * HK + dim_at(keys, i % own_keys / K)) * K + i % K;
    for (size_t i = 0; i < own_values; i++) {
        of_out[i] = dim_at(d->heads, i / sample->V) * V + dim_at(d->values, i % sample->V);
        at[2 * own_keys + i] = 2 * HK * K + of_out[i];
    }
    for (size_t i = 0; i < 2 * sample->HV; i++) of_gates[i] = i / sample->HV * HV + dim_at(d->heads, i % sample->HV);
    d->x = dim_of(delta_channels(shape), delta_channels(sample), at), d->out = dim_of(HV * V, own_values, of_out);
    d->keys = columns_of(d->heads, K, 0, HV * K);
    d->gates = part_of_row(dim_of(2 * HV, 2 * sample->HV, of_gates), 8, 2 * HV + 8);
    shape->stride = d->gates.size, sample->stride = d->gates.count;
}

// Makes heads that remember few tokens and heads that remember many.
static DeltaCase delta_begin(const OpShape *s, size_t key_heads, size_t columns) {
    DeltaCase d = {0};
    d.l = linear_case(s);
    d.l.shape.ssd = d.l.sample.ssd = 0;
    const size_t HV = d.l.shape.HV;
    float *bias = (float *)check_allocate(HV * sizeof(float));
    void *elements = check_allocate(HV * sizeof(double));
    for (size_t i = 0; i < HV; i++) bias[i] = -1.5f * (float)(i % 4);
    elements_from_float(elements, check.ops->stored, bias, HV);
    d.N = all_of(s->n), d.values = some_of(d.l.shape.V, columns);
    delta_sample(&d, key_heads);
    d.in = tensor_in("x", d.N, d.x), d.b = tensor_in("b and a", d.N, d.gates);
    d.A_log = tensor_in("A_log", all_of(1), d.heads);
    d.dt_bias = tensor_given(TENSOR_READ, "dt_bias", check.ops->stored, all_of(1), d.heads, elements);
    (void)rounds_operands();
    return d;
}

// Tolerance factor: rounding errors of the recurrent state accumulate
enum { DELTA_SLACK = 4 };

static void case_delta_forward(const OpShape *s) {
    const DeltaCase d = delta_begin(s, 2, 32);
    Tensor *out = tensor_out("out", d.N, d.out), *state = tensor_sums("state", d.keys, d.values);
    Tensor *transfer = tensor_sums("transfer", d.keys, all_of(d.l.shape.K));
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(delta_forward, &d.l.shape));
    CHECK(delta_forward, of(out), of(state), of(transfer), of(d.in), gate_b(&d, d.b), gate_a(&d, d.b), of(d.A_log),
          of(d.dt_bias), shape_of(&d.l), of(scratch));
    expect(out, DELTA_SLACK, 0);
    expect(state, DELTA_SLACK, 0);
    expect(transfer, DELTA_SLACK, 1); // terms of size 1 cancel in an element of T
}

static void case_delta_backward(const OpShape *s) {
    const DeltaCase d = delta_begin(s, s->n > 64 ? 1 : 2, 1024);
    Tensor *dout = tensor_in("dout", d.N, d.out), *dx = tensor_out("dx", d.N, d.x);
    Tensor *db = tensor_inout("db and da", d.N, d.gates), *dA_log = tensor_sums("dA_log", all_of(1), d.heads);
    Tensor *ddt_bias = tensor_sums("ddt_bias", all_of(1), d.heads);
    Tensor *state = tensor_make(TENSOR_READ, "state", check.ops->summed, d.keys, d.values);
    Tensor *dstate = tensor_sums("dstate", d.keys, d.values);
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(delta_backward, &d.l.shape));
    CHECK(delta_backward, of(dx), gate_b(&d, db), gate_a(&d, db), of(dA_log), of(ddt_bias), of(dstate), of(dout),
          of(d.in), gate_b(&d, d.b), gate_a(&d, d.b), of(d.A_log), of(d.dt_bias), of(state), shape_of(&d.l),
          of(scratch));
    expect(dx, DELTA_SLACK, 1);
    expect(db, DELTA_SLACK, 1);
    expect(dA_log, DELTA_SLACK, sqrt((double)s->n));
    expect(ddt_bias, DELTA_SLACK, sqrt((double)s->n));
    expect(dstate, DELTA_SLACK, 1);
}

// ---- Mamba-2's rule: as the delta rule's, with steps for a and rows v | k | q ---------------------------------------
static void ssd_sample(DeltaCase *d, size_t key_heads) {
    DeltaShape *const shape = &d->l.shape, *const sample = &d->l.sample;
    const size_t HK = shape->HK, HV = shape->HV, K = shape->K, V = shape->V;
    const Dim keys = some_of(HK, key_heads);
    d->heads = columns_of(keys, HV / HK, 0, HV);
    sample->HK = keys.count, sample->HV = d->heads.count, sample->V = d->values.count;
    const size_t own_keys = keys.count * K, own_values = sample->HV * sample->V;
    size_t *at = (size_t *)check_allocate(delta_channels(sample) * sizeof(size_t));
    size_t *of_out = (size_t *)check_allocate(own_values * sizeof(size_t));
    for (size_t i = 0; i < own_values; i++)
        at[i] = of_out[i] = dim_at(d->heads, i / sample->V) * V + dim_at(d->values, i % sample->V);
    for (size_t i = 0; i < 2 * own_keys; i++)
        at[own_values + i] = HV * V + (i / own_keys * HK + dim_at(keys, i % own_keys / K)) * K + i % K;
    d->x = dim_of(delta_channels(shape), delta_channels(sample), at), d->out = dim_of(HV * V, own_values, of_out);
    d->keys = columns_of(d->heads, K, 0, HV * K), d->gates = part_of_row(d->heads, 8, HV + 8);
    shape->stride = d->gates.size, sample->stride = d->gates.count;
}

static DeltaCase ssd_begin(const OpShape *s, size_t key_heads, size_t columns) {
    DeltaCase d = {0};
    d.l = linear_case(s);
    d.l.shape.ssd = d.l.sample.ssd = 1;
    d.N = all_of(s->n), d.values = some_of(d.l.shape.V, columns);
    ssd_sample(&d, key_heads);
    d.in = tensor_in("x", d.N, d.x), d.b = tensor_in("dt", d.N, d.gates);
    d.A_log = tensor_in("A_log", all_of(1), d.heads), d.dt_bias = tensor_in("dt_bias", all_of(1), d.heads);
    (void)rounds_operands();
    return d;
}

static void case_ssd_forward(const OpShape *s) {
    const DeltaCase d = ssd_begin(s, 2, 32);
    Tensor *D = tensor_in("D", all_of(1), d.heads);
    Tensor *out = tensor_out("out", d.N, d.out), *state = tensor_sums("state", d.keys, d.values);
    Tensor *transfer = tensor_sums("transfer", all_of(1), d.heads);
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(ssd_forward, &d.l.shape));
    CHECK(ssd_forward, of(out), of(state), of(transfer), of(d.in), own(d.b, d.gates), of(d.A_log), of(D), of(d.dt_bias),
          shape_of(&d.l), of(scratch));
    expect(out, DELTA_SLACK, 1); // terms of a sum over earlier tokens cancel
    expect(state, DELTA_SLACK, 1);
    expect(transfer, DELTA_SLACK, 0);
}

static void case_ssd_backward(const OpShape *s) {
    const DeltaCase d = ssd_begin(s, s->n > 64 ? 1 : 2, 1024);
    Tensor *D = tensor_in("D", all_of(1), d.heads);
    Tensor *dout = tensor_in("dout", d.N, d.out), *dx = tensor_out("dx", d.N, d.x);
    Tensor *ddt = tensor_inout("ddt", d.N, d.gates), *dA_log = tensor_sums("dA_log", all_of(1), d.heads);
    Tensor *dD = tensor_sums("dD", all_of(1), d.heads), *ddt_bias = tensor_sums("ddt_bias", all_of(1), d.heads);
    Tensor *state = tensor_make(TENSOR_READ, "state", check.ops->summed, d.keys, d.values);
    Tensor *dstate = tensor_sums("dstate", d.keys, d.values);
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(ssd_backward, &d.l.shape));
    CHECK(ssd_backward, of(dx), own(ddt, d.gates), of(dA_log), of(dD), of(ddt_bias), of(dstate), of(dout), of(d.in),
          own(d.b, d.gates), of(d.A_log), of(D), of(d.dt_bias), of(state), shape_of(&d.l), of(scratch));
    expect(dx, DELTA_SLACK, 1);
    expect(ddt, DELTA_SLACK, 1);
    expect(dA_log, DELTA_SLACK, sqrt((double)s->n));
    expect(dD, rounds_operands() ? 0.04 : (double)DELTA_SLACK, sqrt((double)(s->n * d.l.shape.V))); // not rounded terms
    expect(ddt_bias, DELTA_SLACK, sqrt((double)s->n));
    expect(dstate, DELTA_SLACK, 1);
}

// ---- the gated norm -------------------------------------------------------------------------------------------------
static void case_gated_norm_forward(const OpShape *s) {
    const size_t HV = s->delta.HV, V = s->delta.V;
    check_begin("%zu x %zu x %zu", s->n, HV, V);
    const Dim N = some_of(s->n, 40), width = all_of(HV * V), row = part_of_row(width, 0, s->delta.stride);
    Tensor *x = tensor_in("x", N, width), *z = tensor_in("z", N, row), *out = tensor_out("out", N, width);
    Tensor *w = tensor_in("w", all_of(1), all_of(s->back ? HV * V : V));
    CHECK(gated_norm_forward, of(out), of(x), of(z), of(w), len(N), HV, V, len(row), s->back, s->norm.eps);
    expect(out, 1, 0);
}

static void case_gated_norm_backward(const OpShape *s) {
    const size_t HV = s->delta.HV, V = s->delta.V;
    check_begin("%zu x %zu x %zu", s->n, HV, V);
    const Dim N = all_of(s->n), width = all_of(HV * V), row = part_of_row(width, 0, s->delta.stride), one = all_of(1);
    Tensor *x = tensor_in("x", N, width), *z = tensor_in("z", N, row), *dout = tensor_in("dout", N, width);
    const Dim weights = all_of(s->back ? HV * V : V);
    Tensor *w = tensor_in("w", one, weights), *dx = tensor_out("dx", N, width), *dz = tensor_inout("dz", N, row);
    Tensor *dw = tensor_sums("dw", one, weights);
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(gated_norm_backward, s->n, HV, V, s->back));
    CHECK(gated_norm_backward, of(dx), of(dz), of(dw), of(dout), of(x), of(z), of(w), len(N), HV, V, len(row), s->back,
          s->norm.eps, of(scratch));
    expect(dx, 1, V < 3 ? 5 : 1); // in rows of one or two elements the terms cancel
    expect(dz, 1, 1);
    expect(dw, 1, sqrt((double)(s->n * HV)));
}

// ---- transfer of a state by a range of tokens: three value heads of an odd width -----------------------------------
static const DeltaShape odd_shape = {.HK = 1, .HV = 3, .K = 37, .V = 130, .taps = 4};

static void case_transfer_begin(const OpShape *s) {
    DeltaShape shape = odd_shape;
    shape.ssd = s->delta.ssd;
    check_begin("%zu heads of %zu", shape.HV, delta_transfer_elements(&shape) / shape.HV);
    Tensor *transfer = tensor_found("transfer", all_of(shape.HV), all_of(delta_transfer_elements(&shape) / shape.HV));
    CHECK(transfer_begin, of(transfer), &shape);
    expect(transfer, 1, 0);
}

static void case_state_combine(const OpShape *s) {
    const Dim rows = all_of(odd_shape.HV * odd_shape.K), K = all_of(odd_shape.K), V = all_of(odd_shape.V);
    DeltaShape shape = odd_shape;
    shape.ssd = s->delta.ssd;
    check_begin("%zu x %zu x %zu%s", odd_shape.HV, K.size, V.size, s->back ? " transposed" : "");
    Tensor *transfer = tensor_make(TENSOR_READ, "transfer", check.ops->summed, shape.ssd ? all_of(shape.HV) : rows,
                                   shape.ssd ? all_of(1) : K);
    Tensor *before = tensor_make(TENSOR_READ, "before", check.ops->summed, rows, V);
    Tensor *state = tensor_sums("state", rows, V);
    CHECK(state_combine, of(state), of(transfer), of(before), s->back, &shape);
    expect(state, 1, sqrt((double)K.size));
}

#endif
