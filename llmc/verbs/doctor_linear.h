/*
Checks of the ops of linear attention and of the gate of attention's output (doctor_ops.h): at the heads of a model that
has such layers, else at a few small ones.
*/
#ifndef LLMC_DOCTOR_LINEAR_H
#define LLMC_DOCTOR_LINEAR_H
#include "llmc/model/config.h"
#include "llmc/ops/ops_reference_linear.h"
#include "doctor_check.h"

// ---- the gate of attention's output ---------------------------------------------------------------------------------
static void check_split_heads(const Config *c, size_t n) {
    for (int join = 0; join < 2; join++) {
        check_begin("%zu x %zu x %zu%s", n, c->num_attention_heads, c->head_dim, join ? " joined" : "");
        const size_t NH = c->num_attention_heads, HD = c->head_dim;
        const Dim N = some_of(n, 40), width = all_of(NH * HD), twice = all_of(2 * NH * HD);
        Tensor *joined = join ? tensor_out("joined", N, twice) : tensor_in("joined", N, twice);
        Tensor *first = join ? tensor_in("first", N, width) : tensor_out("first", N, width);
        Tensor *second = join ? tensor_in("second", N, width) : tensor_out("second", N, width);
        CHECK(split_heads, of(joined), of(first), of(second), len(N), NH, HD, join);
        expect(join ? joined : first, 0);
        expect(join ? NULL : second, 0);
    }
}

static void check_gate_forward(const Config *c, size_t n) {
    const size_t count = n * c->num_attention_heads * c->head_dim;
    check_begin("%zu x %zu", n, c->num_attention_heads * c->head_dim);
    const Dim one = all_of(1), some = some_of(count, 4000);
    Tensor *x = tensor_in("x", one, some), *gate = tensor_in("gate", one, some), *out = tensor_out("out", one, some);
    CHECK(gate_forward, of(out), of(x), of(gate), len(some));
    expect(out, 0);
}

static void check_gate_backward(const Config *c, size_t n) {
    const size_t count = n * c->num_attention_heads * c->head_dim;
    check_begin("%zu x %zu", n, c->num_attention_heads * c->head_dim);
    const Dim one = all_of(1), some = some_of(count, 4000);
    Tensor *x = tensor_in("x", one, some), *gate = tensor_in("gate", one, some), *dout = tensor_in("dout", one, some);
    Tensor *dx = tensor_out("dx", one, some), *dgate = tensor_out("dgate", one, some);
    CHECK(gate_backward, of(dx), of(dgate), of(dout), of(x), of(gate), len(some));
    expect(dx, 0);
    expect(dgate, 0);
}

// ---- shapes of linear attention ------------------------------------------------------------------------------------
typedef struct {
    DeltaShape shape, sample;
} LinearCase;
enum { BESIDE = 8 }; // columns of rows that an op neither reads nor writes

static const DeltaShape *shape_of(const LinearCase *l) { return check.on_reference ? &l->sample : &l->shape; }

// The rest of a document whose first tokens came before, alone, or with a short document and one more behind it. In the
// sample there are fewer heads and columns, and all tokens.
static LinearCase linear_case(const Config *c, size_t n, int documents) {
    const size_t cut[4] = {0, n - n / 8 - n / 4, n - n / 4, n}, before = n + CONV_TAPS_MAX;
    const DeltaShape small = {{NULL, 0, 0, 0}, 2, 4, 32, 32, 4, 0, 0};
    const DeltaShape model = {{NULL, 0, 0, 0},
                              c->linear_num_key_heads,
                              c->linear_num_value_heads,
                              c->linear_key_head_dim,
                              c->linear_value_head_dim,
                              c->linear_conv_kernel_dim,
                              0,
                              0};
    LinearCase l = {c->linear_num_value_heads ? model : small, small};
    Span *span = (Span *)check_allocate(3 * sizeof(Span));
    l.shape.spans.span = span;
    for (size_t s = 0; s < (documents ? 3 : 1); s++) { // below 8 tokens some are empty
        const Span whole = {s ? before + cut[s] : 0, before + cut[s], before + (documents ? cut[s + 1] : n), cut[s]};
        if (whole.begin < whole.end) span[l.shape.spans.count++] = whole;
    }
    l.sample = l.shape;
    return l;
}

static void linear_begin(const Config *c, size_t n, int documents) {
    const LinearCase l = linear_case(c, n, documents);
    check_begin("%zu x %zu x %zu x %zu%s", n, l.shape.HV, l.shape.K, l.shape.V, documents ? " of documents" : "");
}

// A dimension of those of d, and of all columns that lie beside them in a row
static Dim with_beside(Dim d) {
    size_t *at = (size_t *)check_allocate((d.count + BESIDE) * sizeof(size_t));
    for (size_t i = 0; i < d.count; i++) at[i] = dim_at(d, i);
    for (size_t i = 0; i < BESIDE; i++) at[d.count + i] = d.size + i;
    const Dim dim = {d.size + BESIDE, d.count + BESIDE, at};
    return dim;
}

// The elements behind `column` elements of the op's tensor, or `in_sample` of the reference's
static AnyPointer behind(const Tensor *t, size_t column, size_t in_sample) {
    char *memory = (char *)of(t);
    const AnyPointer columns = {
        !t ? NULL : (void *)(memory + (check.on_reference ? in_sample * 8 : column * dtype_size(t->type)))};
    return columns;
}

// ---- the convolution: in the sample a channel is a value head of one element ----------------------------------------
static Dim conv_channels(LinearCase *l) {
    const Dim W = some_of(delta_channels(&l->shape), 256);
    l->sample.HK = 1, l->sample.K = 0, l->sample.HV = W.count, l->sample.V = 1;
    l->shape.stride = W.size + BESIDE, l->sample.stride = W.count + BESIDE;
    return W;
}

static void check_conv_forward(const Config *c, size_t n) {
    for (int documents = 0; documents < 2; documents++) {
        linear_begin(c, n, documents);
        LinearCase l = linear_case(c, n, documents);
        const Dim W = conv_channels(&l), N = all_of(n), taps = all_of(l.shape.taps), before = all_of(l.shape.taps - 1);
        Tensor *x = tensor_in("x", N, with_beside(W)), *weight = tensor_in("weight", W, taps);
        Tensor *out = tensor_out("out", N, W), *columns = tensor_inout("columns", before, W);
        CHECK(conv_forward, of(out), of(columns), of(x), of(weight), shape_of(&l));
        expect(out, 1);
        expect(columns, 0);
    }
}

// Gradients of the last tokens, as calls behind find them: 0 for those of documents that have ended
static void *dcolumns_of(const LinearCase *l, DType type) {
    const Span *last = &l->shape.spans.span[l->shape.spans.count - 1];
    const size_t W = delta_channels(&l->shape), count = (l->shape.taps - 1) * W;
    float *values = (float *)check_allocate(count * sizeof(float));
    void *elements = check_allocate(count * dtype_size(type));
    for (size_t i = 0; i < count; i++)
        values[i] =
            last->end - last->document + i / W + 1 >= l->shape.taps ? (float)normal_of(random_mix(7 + i)) : 0.0f;
    elements_from_float(elements, type, values, count);
    return elements;
}

static void check_conv_backward(const Config *c, size_t n) {
    const DType summed = check.ops->summed;
    for (int documents = 0; documents < 2; documents++) {
        linear_begin(c, n, documents);
        LinearCase l = linear_case(c, n, documents);
        const Dim W = conv_channels(&l), N = all_of(n), taps = all_of(l.shape.taps), before = all_of(l.shape.taps - 1);
        Tensor *x = tensor_in("x", N, with_beside(W)), *weight = tensor_in("weight", W, taps);
        Tensor *dout = tensor_in("dout", N, W), *columns = tensor_in("columns", before, W);
        Tensor *dx = tensor_inout("dx", N, with_beside(W)), *dweight = tensor_sums("dweight", W, taps);
        Tensor *dcolumns = tensor_given(TENSOR_CHANGED, "dcolumns", summed, before, W, dcolumns_of(&l, summed));
        Tensor *scratch = tensor_scratch(check.ops->conv_backward_scratch(&l.shape));
        CHECK(conv_backward, of(dx), of(dweight), of(dcolumns), of(dout), of(x), of(columns), of(weight), shape_of(&l),
              of(scratch));
        expect(dx, 1);
        expect(dweight, sqrt((double)n));
        expect(dcolumns, 1);
    }
}

// ---- the gated delta rule ------------------------------------------------------------------------------------------
// The sample has some heads, and in forward some columns of a state: there columns do not meet.
typedef struct {
    LinearCase l;
    Dim N, heads, x, out, gates, keys, values; // columns of x, of out, of b and a; rows and columns of states
    size_t a, sample_a;                        // where a stands beside b
    Tensor *in, *b, *A_log, *dt_bias;
} DeltaCase;

static void delta_sample(DeltaCase *d, size_t key_heads) {
    DeltaShape *const shape = &d->l.shape, *const sample = &d->l.sample;
    const size_t HK = shape->HK, HV = shape->HV, K = shape->K, V = shape->V, channels = delta_channels(shape);
    const Dim keys = some_of(HK, key_heads);
    d->heads = columns_of(keys, HV / HK, 0, HV);
    sample->HK = keys.count, sample->HV = d->heads.count, sample->V = d->values.count;
    size_t *at = (size_t *)check_allocate(delta_channels(sample) * sizeof(size_t)), count = 0;
    for (size_t part = 0; part < 2; part++)
        for (size_t i = 0; i < keys.count * K; i++) at[count++] = (part * HK + dim_at(keys, i / K)) * K + i % K;
    d->out = d->heads;
    size_t *of_out = (size_t *)check_allocate(sample->HV * sample->V * sizeof(size_t));
    for (size_t i = 0; i < sample->HV * sample->V; i++) {
        of_out[i] = dim_at(d->heads, i / sample->V) * V + dim_at(d->values, i % sample->V);
        at[count++] = 2 * HK * K + of_out[i];
    }
    const Dim x = {channels, count, at}, out = {HV * V, sample->HV * sample->V, of_out};
    d->x = x, d->out = out, d->keys = columns_of(d->heads, K, 0, HV * K);
}

// b and a share rows: some columns of others, b of all heads, a of all heads
static void delta_gates(DeltaCase *d) {
    const size_t HV = d->l.shape.HV, count = d->heads.count;
    size_t *at = (size_t *)check_allocate((2 * count + BESIDE) * sizeof(size_t));
    for (size_t i = 0; i < BESIDE; i++) at[i] = i;
    for (size_t i = 0; i < 2 * count; i++) at[BESIDE + i] = BESIDE + i / count * HV + dim_at(d->heads, i % count);
    const Dim gates = {2 * HV + BESIDE, 2 * count + BESIDE, at};
    d->gates = gates, d->a = BESIDE + HV, d->sample_a = BESIDE + count;
    d->l.shape.stride = gates.size, d->l.sample.stride = gates.count;
}

// Heads that remember few tokens and many
static DeltaCase delta_case(const Config *c, size_t n, int documents, size_t key_heads, size_t columns) {
    linear_begin(c, n, documents);
    DeltaCase d = {0};
    d.l = linear_case(c, n, documents);
    const size_t HV = d.l.shape.HV;
    float *bias = (float *)check_allocate(HV * sizeof(float));
    void *elements = check_allocate(HV * sizeof(double));
    for (size_t i = 0; i < HV; i++) bias[i] = -1.5f * (float)(i % 4);
    elements_from_float(elements, check.ops->stored, bias, HV);
    d.N = all_of(n), d.values = some_of(d.l.shape.V, columns);
    delta_sample(&d, key_heads);
    delta_gates(&d);
    d.in = tensor_in("x", d.N, d.x), d.b = tensor_in("b and a", d.N, d.gates);
    d.A_log = tensor_in("A_log", all_of(1), d.heads);
    d.dt_bias = tensor_given(TENSOR_READ, "dt_bias", check.ops->stored, all_of(1), d.heads, elements);
    return d;
}

// Roundings of a state, and of what is solved for with it, accumulate.
static double delta_error(void) { return 4 * check_arithmetic(1); }

static void check_delta_forward(const Config *c, size_t n) {
    for (int documents = 0; documents < 2; documents++) {
        const DeltaCase d = delta_case(c, n, documents, 2, 32);
        Tensor *out = tensor_out("out", d.N, d.out), *state = tensor_sums("state", d.keys, d.values);
        Tensor *transfer = tensor_sums("transfer", d.keys, all_of(d.l.shape.K));
        Tensor *scratch = tensor_scratch(check.ops->delta_forward_scratch(&d.l.shape));
        CHECK(delta_forward, of(out), of(state), of(transfer), of(d.in), behind(d.b, BESIDE, BESIDE),
              behind(d.b, d.a, d.sample_a), of(d.A_log), of(d.dt_bias), shape_of(&d.l), of(scratch));
        expect_close(out, delta_error(), 0);
        expect_close(state, delta_error(), 0);
        expect_close(transfer, delta_error(), 0);
    }
}

static void check_delta_backward(const Config *c, size_t n) {
    for (int documents = 0; documents < 2; documents++) {
        const DeltaCase d = delta_case(c, n, documents, n > 64 ? 1 : 2, 1024);
        Tensor *dout = tensor_in("dout", d.N, d.out), *dx = tensor_out("dx", d.N, d.x);
        Tensor *db = tensor_inout("db and da", d.N, d.gates);
        Tensor *dA_log = tensor_sums("dA_log", all_of(1), d.heads);
        Tensor *ddt_bias = tensor_sums("ddt_bias", all_of(1), d.heads);
        Tensor *state = tensor_make(TENSOR_READ, "state", check.ops->summed, d.keys, d.values);
        Tensor *dstate = tensor_sums("dstate", d.keys, d.values);
        Tensor *scratch = tensor_scratch(check.ops->delta_backward_scratch(&d.l.shape));
        CHECK(delta_backward, of(dx), behind(db, BESIDE, BESIDE), behind(db, d.a, d.sample_a), of(dA_log), of(ddt_bias),
              of(dstate), of(dout), of(d.in), behind(d.b, BESIDE, BESIDE), behind(d.b, d.a, d.sample_a), of(d.A_log),
              of(d.dt_bias), of(state), shape_of(&d.l), of(scratch));
        expect_close(dx, delta_error(), 1);
        expect_close(db, delta_error(), 1);
        expect_close(dA_log, delta_error(), sqrt((double)n));
        expect_close(ddt_bias, delta_error(), sqrt((double)n));
        expect_close(dstate, delta_error(), 1);
    }
}

// ---- the gated norm ------------------------------------------------------------------------------------------------
static void check_gated_norm_forward(const Config *c, size_t n) {
    const LinearCase l = linear_case(c, n, 0);
    const size_t HV = l.shape.HV, V = l.shape.V;
    check_begin("%zu x %zu x %zu", n, HV, V);
    const Dim N = some_of(n, 40), width = all_of(HV * V), rows = with_beside(width);
    Tensor *x = tensor_in("x", N, width), *z = tensor_in("z", N, rows), *w = tensor_in("w", all_of(1), all_of(V));
    Tensor *out = tensor_out("out", N, width);
    CHECK(gated_norm_forward, of(out), of(x), of(z), of(w), len(N), HV, V, rows.size, c->norm_eps);
    expect(out, 0);
}

static void check_gated_norm_backward(const Config *c, size_t n) {
    const LinearCase l = linear_case(c, n, 0);
    const size_t HV = l.shape.HV, V = l.shape.V;
    check_begin("%zu x %zu x %zu", n, HV, V);
    const Dim N = all_of(n), width = all_of(HV * V), rows = with_beside(width), one = all_of(1);
    Tensor *x = tensor_in("x", N, width), *z = tensor_in("z", N, rows), *w = tensor_in("w", one, all_of(V));
    Tensor *dout = tensor_in("dout", N, width), *dx = tensor_out("dx", N, width), *dz = tensor_inout("dz", N, rows);
    Tensor *dw = tensor_sums("dw", one, all_of(V));
    Tensor *scratch = tensor_scratch(check.ops->gated_norm_backward_scratch(n, HV, V));
    CHECK(gated_norm_backward, of(dx), of(dz), of(dw), of(dout), of(x), of(z), of(w), len(N), HV, V, rows.size,
          c->norm_eps, of(scratch));
    expect(dx, 1);
    expect(dz, 1);
    expect(dw, sqrt((double)(n * HV)));
}

// Three value heads of an odd width: the transfer of a range of tokens
static void check_transfer_begin(const Config *c, size_t n) {
    const DeltaShape shape = {{NULL, 0, 0, 0}, 1, 3, 37, 130, 4, 0, 0};
    (void)c, (void)n;
    check_begin("%zu x %zu x %zu", shape.HV, shape.K, shape.K);
    Tensor *transfer =
        tensor_make(TENSOR_WRITTEN, "transfer", check.ops->summed, all_of(shape.HV * shape.K), all_of(shape.K));
    CHECK(transfer_begin, of(transfer), &shape);
    expect(transfer, 0);
}

static void check_state_combine(const Config *c, size_t n) {
    const DeltaShape shape = {{NULL, 0, 0, 0}, 1, 3, 37, 130, 4, 0, 0};
    const Dim rows = all_of(shape.HV * shape.K), K = all_of(shape.K), V = all_of(shape.V);
    (void)c, (void)n;
    for (int back = 0; back < 2; back++) {
        check_begin("%zu x %zu x %zu%s", shape.HV, shape.K, shape.V, back ? " transposed" : "");
        Tensor *state = tensor_sums("state", rows, V);
        Tensor *transfer = tensor_make(TENSOR_READ, "transfer", check.ops->summed, rows, K);
        Tensor *before = tensor_make(TENSOR_READ, "before", check.ops->summed, rows, V);
        CHECK(state_combine, of(state), of(transfer), of(before), back, &shape);
        expect(state, sqrt((double)shape.K));
    }
}

#endif
