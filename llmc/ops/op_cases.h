/*
The case of every op, written once: its tensors, its call, its reference (ops_reference.h) and what must agree. Two
drivers run them: the verb `doctor` at the shapes of a model, on samples (verbs/doctor_check.h); the tests at odd
shapes, every element, with aliases and without optional tensors (test/ops/cases.h). A driver defines what is used here
and not declared: Tensor and the functions that make a Tensor (NULL: left out); of() and columns(), which return what
the op or the reference is given; ON_DEVICE, ON_REFERENCE; expect(tensor, slack, scale of terms that cancel);
sums_of(length of the sums, what joins them); expect_integers(tensor).
*/
#ifndef LLMC_OP_CASES_H
#define LLMC_OP_CASES_H
#include "op_dims.h"
#include "ops_reference.h"

// Sizes and settings of a case. A case reads the fields that its op needs; all remaining fields are 0.
typedef struct {
    size_t n, C, OC, V, FF;         // tokens; columns in and out; vocabulary; width of an MLP
    size_t before, stride;          // OC columns begin at column `before` of rows of `stride` elements
    size_t NH, NKV, HD, VD, R;      // heads; elements of a head, of its values (latents); rotated elements of a head
    size_t positions, first, count; // positions; first row of dropout or of a quantised product; elements
    double factor;                  // a scale, temperature or rate; rope: theta; attention: size of q and k
    uint64_t seed;
    int accumulate, back;      // back: backward of rope, joining of heads, or the transposed transfer
    int learned, bias, joined; // optional tensors: learned positions; bias; a residual
    int times;                 // a router's tokens count a number of times
    int bare;                  // 1: a norm has no weight
    int in_ranges, documents;  // attention in two ranges of keys; spans of several documents
    int sinks;                 // attention's out and lse include sinks before backward
    DType type;                // type of the tensor whose type varies between cases
    Activation activation;
    double cap;             // cap of logits
    double softness, share; // of a distillation
    Norm norm;
    Rotation rotation;
    QuantFormat format;
    SamplingSettings sampling;
    Spans spans;     // attention's queries. Empty: three spans; the first span has n earlier keys
    TextSlots slots; // AttentionShape.slots
    DeltaShape delta;
    RouterShape router;
} OpShape;

static size_t len(Dim d) { return check.on_reference ? d.count : d.size; }

// Widens each index i of d to indices before + i * each + (0 .. each - 1) of a dimension of `size`.
static Dim columns_of(Dim d, size_t each, size_t before, size_t size) {
    size_t *at = (size_t *)check_allocate(d.count * each * sizeof(size_t));
    for (size_t i = 0; i < d.count * each; i++) at[i] = before + dim_at(d, i / each) * each + i % each;
    return dim_of(size, d.count * each, at);
}

// Makes rows of `stride` elements: `before` columns, the columns d, the remaining columns. A sample also has at most 16
// columns before d and at most 16 after d.
static Dim part_of_row(Dim d, size_t before, size_t stride) {
    const size_t behind = before + d.size;
    const Dim left = some_of(before, 16), right = some_of(stride - behind, 16);
    size_t *at = (size_t *)check_allocate((left.count + d.count + right.count) * sizeof(size_t)), count = 0;
    for (size_t i = 0; i < left.count; i++) at[count++] = dim_at(left, i);
    for (size_t i = 0; i < d.count; i++) at[count++] = before + dim_at(d, i);
    for (size_t i = 0; i < right.count; i++) at[count++] = behind + dim_at(right, i);
    const Dim row = {stride, count, at, d.size, before, left.count};
    return row;
}

// Makes spans of n tokens: the rest of a document after `before` tokens; with `documents` also two short documents.
static Spans usual_spans(size_t n, size_t before, int documents) {
    const size_t cut[4] = {0, documents ? n - n / 8 - n / 4 : n, n - n / 4, n};
    Span *span = (Span *)check_allocate(3 * sizeof(Span));
    Spans spans = {span, 0, 0, 0};
    for (size_t i = 0; i < (documents ? 3 : 1); i++) { // with fewer than 8 tokens some spans are empty
        const Span whole = {i ? before + cut[i] : 0, before + cut[i], before + cut[i + 1], cut[i]};
        if (whole.begin < whole.end) span[spans.count++] = whole;
    }
    return spans;
}

static Tensor *tensor_in(const char *name, Dim rows, Dim cols) {
    return tensor_make(TENSOR_READ, name, check.ops->stored, rows, cols);
}
static Tensor *tensor_out(const char *name, Dim rows, Dim cols) {
    return tensor_make(TENSOR_WRITTEN, name, check.ops->stored, rows, cols);
}
static Tensor *tensor_inout(const char *name, Dim rows, Dim cols) {
    return tensor_make(TENSOR_CHANGED, name, check.ops->stored, rows, cols);
}
static Tensor *tensor_sums(const char *name, Dim rows, Dim cols) {
    return tensor_make(TENSOR_CHANGED, name, check.ops->summed, rows, cols);
}
static Tensor *tensor_found(const char *name, Dim rows, Dim cols) {
    return tensor_make(TENSOR_WRITTEN, name, check.ops->summed, rows, cols);
}
static Tensor *tensor_scratch(size_t count) {
    return tensor_make(TENSOR_SCRATCH, "scratch", check.ops->summed, all_of(count), all_of(1));
}

// Makes the result of a product: whole rows, or some columns of rows. The remaining columns must not change.
static Tensor *tensor_product(const char *name, Dim rows, Dim row) {
    return row.own == row.size ? tensor_out(name, rows, row) : tensor_inout(name, rows, row);
}
static AnyPointer own(const Tensor *t, Dim row) { return columns(t, row.first, row.in_sample); }

#define CHECK(op, ...)                                                                                                 \
    do {                                                                                                               \
        ON_DEVICE(check.ops->op(__VA_ARGS__));                                                                         \
        ON_REFERENCE(REFERENCE(op)(__VA_ARGS__));                                                                      \
    } while (0)

// ---- embedding, rows ------------------------------------------------------------------------------------------------
static void case_embedding_forward(const OpShape *s) {
    check_begin("%zu x %zu of %zu", s->n, s->C, s->V);
    const Dim N = some_of(s->n, 40), C = some_of(s->C, 32), V = all_of(s->V), P = all_of(s->positions);
    Tensor *tokens = tensor_indices("tokens", N, V.size, 0), *position = tensor_indices("position", N, P.size, 0);
    Tensor *wte = tensor_in("wte", V, C), *wpe = s->learned ? tensor_in("wpe", P, C) : NULL;
    Tensor *out = tensor_out("out", N, C);
    CHECK(embedding_forward, of(out), of(tokens), of(position), of(wte), of(wpe), len(N), len(C), s->factor);
    expect(out, 1, 0);
}

static void case_embedding_backward(const OpShape *s) {
    check_begin("%zu x %zu of %zu", s->n, s->C, s->V);
    const Dim N = all_of(s->n), C = some_of(s->C, 32), V = all_of(s->V);
    Tensor *index = tensor_indices("index", N, V.size, 0), *dx = tensor_in("dx", N, C);
    Tensor *dw = tensor_make(TENSOR_CHANGED, "dw", s->type, V, C);
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(embedding_backward, s->n, s->V, s->C));
    CHECK(embedding_backward, of(dw), s->type, of(dx), of(index), len(N), len(V), len(C), s->factor, V.size / 3,
          of(scratch));
    expect(dw, 1, 0);
}

// Scatters n of V rows, in falling order.
static void case_scatter_rows(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const Dim N = all_of(s->n), V = all_of(s->V), C = some_of(s->C, 32);
    int32_t *row = (int32_t *)check_allocate(s->n * sizeof(int32_t));
    for (size_t i = 0; i < s->n; i++) row[i] = (int32_t)(2 * (s->n - 1 - i) + i % 2);
    Tensor *rows = tensor_raw(TENSOR_READ, "row", DTYPE_FP32, N, row), *in = tensor_in("in", N, C);
    Tensor *out = tensor_inout("out", V, C);
    CHECK(scatter_rows, of(out), of(in), of(rows), len(N), len(C));
    expect(out, 1, 0);
}

// Gathers n of V rows, in falling order. Every third row stays.
static void case_gather_rows(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const Dim N = all_of(s->n), V = all_of(s->V), C = some_of(s->C, 32);
    int32_t *row = (int32_t *)check_allocate(s->n * sizeof(int32_t));
    for (size_t i = 0; i < s->n; i++) row[i] = i % 3 == 2 ? 0 : (int32_t)(s->V - 1 - i % s->V);
    Tensor *rows = tensor_raw(TENSOR_READ, "row", DTYPE_FP32, N, row), *in = tensor_in("in", V, C);
    Tensor *out = tensor_inout("out", N, C);
    CHECK(gather_rows, of(out), of(in), of(rows), len(N), len(C));
    expect(out, 1, 0);
}

// ---- quantised weights ----------------------------------------------------------------------------------------------
static Tensor *tensor_record(QuantFormat format, size_t count) {
    const size_t words = quant_parts(format, count).bytes / sizeof(float);
    const uint64_t seed = check_below((uint64_t)1 << 32);
    float *values = (float *)checked_malloc(count * sizeof(float), "a check");
    uint8_t *record = (uint8_t *)check_allocate(words * sizeof(float));
    for (size_t i = 0; i < count; i++) values[i] = (float)normal_of(random_mix(seed + i));
    quant_encode(record, format, values, count);
    free(values);
    return tensor_raw(TENSOR_READ, "record", DTYPE_FP32, all_of(words), record);
}

// Returns the case's format for matrices [rows, cols]. FP8: keeps the sizes that a test sets
static QuantFormat format_on(const OpShape *s, size_t rows, size_t cols) {
    return s->format.grid.cols ? s->format : quant_on(s->format, rows, cols);
}

static void case_dequantise(const OpShape *s) {
    check_begin("%s %zu", quant_type_names[s->format.type], s->count);
    const QuantFormat format = format_on(s, quant_ceil(s->count, 300), 300);
    Tensor *record = tensor_record(format, s->count), *out = tensor_out("out", all_of(1), all_of(s->count));
    CHECK(dequantise, of(out), of(record), &format, s->count);
    expect(out, 1, 0);
}

// Multiplies by rows of a larger matrix: `first` rows precede them, and up to two follow.
static void case_linear_forward_quantised(const OpShape *s) {
    check_begin("%zux%zux%zu", s->n, s->C, s->OC);
    const Dim N = all_of(s->n), C = all_of(s->C), OC = all_of(s->OC), whole = part_of_row(OC, 0, s->stride);
    const size_t rows = s->first + s->OC + s->first % 3;
    const QuantFormat format = format_on(s, rows, s->C);
    Tensor *record = tensor_record(format, rows * s->C), *x = tensor_in("x", N, C);
    Tensor *bias = tensor_in("bias", all_of(1), OC), *residual = tensor_in("residual", N, whole);
    Tensor *out = tensor_product("out", N, whole);
    sums_of(s->C, 0);
    CHECK(linear_forward_quantised, of(out), of(x), of(record), &format, rows, s->first, of(bias), of(residual), len(N),
          len(C), len(OC), len(whole));
    expect(out, 1, sqrt((double)s->C));
}

// ---- norms ----------------------------------------------------------------------------------------------------------
static void case_norm_forward(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const Dim N = some_of(s->n, 60), C = all_of(s->C), one = all_of(1);
    const int layer = s->norm.kind == NORM_LAYER;
    Tensor *x = tensor_in("x", N, C), *w = s->bare ? NULL : tensor_in("w", one, C),
           *b = layer ? tensor_in("b", one, C) : NULL;
    Tensor *residual = layer ? NULL : tensor_in("residual", N, C), *out = tensor_out("out", N, C);
    CHECK(norm_forward, of(out), of(x), of(w), of(b), of(residual), len(N), len(C), s->norm);
    expect(out, 1, 0);
}

static void case_norm_backward(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const Dim N = all_of(s->n), C = all_of(s->C), one = all_of(1);
    Tensor *x = tensor_in("x", N, C), *w = s->bare ? NULL : tensor_in("w", one, C), *dout = tensor_in("dout", N, C);
    Tensor *dx = s->accumulate ? tensor_inout("dx", N, C) : tensor_out("dx", N, C);
    Tensor *dw = s->bare ? NULL : tensor_sums("dw", one, C);
    Tensor *db = s->norm.kind == NORM_LAYER ? tensor_sums("db", one, C) : NULL;
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(norm_backward, s->n, s->C));
    CHECK(norm_backward, of(dx), of(dw), of(db), of(dout), of(x), of(w), len(N), len(C), s->norm, s->accumulate,
          of(scratch));
    expect(dx, 1, 1);
    expect(dw, 1, sqrt((double)s->n));
    expect(db, 1, sqrt((double)s->n));
}

// ---- products -------------------------------------------------------------------------------------------------------
static void case_linear_forward(const OpShape *s) {
    check_begin("%zux%zux%zu", s->n, s->C, s->OC);
    const Dim N = some_of(s->n, 32), C = all_of(s->C), OC = some_of(s->OC, 48);
    const Dim whole = part_of_row(OC, s->before, s->stride);
    Tensor *x = tensor_in("x", N, C), *weight = tensor_in("weight", OC, C);
    Tensor *bias = s->bias ? tensor_in("bias", all_of(1), OC) : NULL;
    Tensor *residual = s->joined ? tensor_in("residual", N, whole) : NULL, *out = tensor_product("out", N, whole);
    sums_of(s->C, s->bias + s->joined);
    CHECK(linear_forward, own(out, whole), of(x), of(weight), of(bias), own(residual, whole), len(N), len(C), len(OC),
          len(whole));
    expect(out, 1, sqrt((double)s->C));
}

static void case_linear_backward_input(const OpShape *s) {
    check_begin("%zux%zux%zu", s->n, s->C, s->OC);
    const Dim N = some_of(s->n, 32), C = some_of(s->C, 48), OC = all_of(s->OC);
    const Dim whole = part_of_row(OC, s->before, s->stride);
    Tensor *dout = tensor_in("dout", N, whole), *weight = tensor_in("weight", OC, C);
    Tensor *dx = s->accumulate ? tensor_inout("dx", N, C) : tensor_out("dx", N, C);
    sums_of(s->OC, s->accumulate);
    CHECK(linear_backward_input, of(dx), own(dout, whole), of(weight), len(N), len(C), len(OC), len(whole),
          s->accumulate);
    expect(dx, 1, sqrt((double)s->OC));
}

static void case_linear_backward_weight(const OpShape *s) {
    check_begin("%zux%zux%zu", s->n, s->C, s->OC);
    const Dim N = all_of(s->n), C = some_of(s->C, 48), OC = some_of(s->OC, 48);
    const Dim whole = part_of_row(OC, s->before, s->stride);
    Tensor *dout = tensor_in("dout", N, whole), *x = tensor_in("x", N, C), *dweight = tensor_sums("dweight", OC, C);
    Tensor *dbias = s->bias ? tensor_sums("dbias", all_of(1), OC) : NULL;
    sums_of(s->n, 0);
    CHECK(linear_backward_weight, of(dweight), of(dbias), own(dout, whole), of(x), len(N), len(C), len(OC), len(whole));
    expect(dweight, 1, sqrt((double)s->n));
    sums_of(0, 0); // dbias sums numbers, not products
    expect(dbias, 1, sqrt((double)s->n));
}

// ---- elements -------------------------------------------------------------------------------------------------------
static void case_scale(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const Dim count = some_of(s->n * s->C, 4000);
    Tensor *x = tensor_make(TENSOR_CHANGED, "x", s->type, all_of(1), count);
    CHECK(scale, of(x), s->type, s->factor, len(count));
    expect(x, 1, 0);
}

// Samples the last rows, because an element's index decides whether it is dropped.
static void case_dropout(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const size_t rows = some_of(s->n, 40).count;
    const Dim C = all_of(s->C), N = columns_of(all_of(rows), 1, s->n - rows, s->n);
    Tensor *in = tensor_in("in", N, C), *out = s->accumulate ? tensor_inout("out", N, C) : tensor_out("out", N, C);
    CHECK(dropout, of(out), of(in), len(N), len(C), s->first + (s->n - len(N)), s->factor, s->seed, s->accumulate);
    expect(out, 1, 0);
}

static void case_rope(const OpShape *s) {
    check_begin("%zu x %zu x %zu", s->n, s->NH, s->HD);
    const Dim N = some_of(s->n, 40), width = all_of(s->NH * s->HD), half = all_of(s->R / 2);
    float *inverse = (float *)check_allocate(half.size * sizeof(float));
    for (size_t i = 0; i < half.size; i++) inverse[i] = (float)pow(s->factor, -2.0 * (double)i / (double)s->R);
    Tensor *position = tensor_indices("position", N, s->positions, 0);
    Tensor *frequency = tensor_raw(TENSOR_READ, "inverse_frequency", DTYPE_FP32, half, inverse);
    Tensor *x = tensor_inout("x", N, width);
    CHECK(rope, of(x), of(position), of(frequency), len(N), s->NH, s->HD, s->R, s->rotation, s->back);
    expect(x, 1, 0);
}

static void case_activation_forward(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->FF);
    const Dim N = some_of(s->n, 40), FF = all_of(s->FF), width = all_of(activation_width(s->activation.kind, s->FF));
    Tensor *in = tensor_in("in", N, width), *out = tensor_out("out", N, FF);
    CHECK(activation_forward, of(out), of(in), s->activation, len(N), len(FF));
    expect(out, 1, 0);
}

static void case_activation_backward(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->FF);
    const Dim N = some_of(s->n, 40), FF = all_of(s->FF), width = all_of(activation_width(s->activation.kind, s->FF));
    Tensor *in = tensor_in("in", N, width), *dout = tensor_in("dout", N, FF), *din = tensor_out("din", N, width);
    CHECK(activation_backward, of(din), of(dout), of(in), s->activation, len(N), len(FF));
    expect(din, 1, 0);
}

// ---- sinks ----------------------------------------------------------------------------------------------------------
static void case_sink_forward(const OpShape *s) {
    check_begin("%zu x %zu x %zu", s->n, s->NH, s->HD);
    const Dim N = some_of(s->n, 40), NH = all_of(s->NH), width = all_of(s->NH * s->HD);
    Tensor *out = tensor_inout("out", N, width), *lse = tensor_sums("lse", N, NH);
    Tensor *sinks = tensor_in("sinks", all_of(1), NH);
    CHECK(sink_forward, of(out), of(lse), of(sinks), len(N), s->NH, s->HD);
    expect(out, 1, 0);
    expect(lse, 1, 1);
}

static void case_sink_backward(const OpShape *s) {
    check_begin("%zu x %zu x %zu", s->n, s->NH, s->HD);
    const Dim N = all_of(s->n), NH = all_of(s->NH), width = all_of(s->NH * s->HD);
    Tensor *dout = tensor_in("dout", N, width), *out = tensor_in("out", N, width);
    Tensor *lse = tensor_make(TENSOR_READ, "lse", check.ops->summed, N, NH);
    Tensor *sinks = tensor_in("sinks", all_of(1), NH), *dsinks = tensor_sums("dsinks", all_of(1), NH);
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(sink_backward, s->n, s->NH));
    CHECK(sink_backward, of(dsinks), of(dout), of(out), of(lse), of(sinks), len(N), s->NH, s->HD, of(scratch));
    expect(dsinks, 1, sqrt((double)(s->n * s->HD)));
}

// ---- loss head, sampling --------------------------------------------------------------------------------------------
static void case_logprob(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->V);
    const Dim N = some_of(s->n, 16), V = all_of(s->V), row = part_of_row(V, 0, s->stride), one = all_of(1);
    const Temperature temperature = {s->factor, s->cap};
    Tensor *targets = tensor_indices("targets", N, V.size, 1);
    Tensor *weight = tensor_make(TENSOR_READ, "weight", check.ops->summed, N, one);
    Tensor *logits = weight ? tensor_inout("logits", N, row) : tensor_in("logits", N, row);
    Tensor *logp = tensor_found("logp", N, one), *entropy = tensor_found("entropy", N, one);
    CHECK(logprob, of(logp), of(entropy), of(logits), of(targets), of(weight), len(N), len(V), len(row), temperature);
    expect(logp, 1, 1);
    expect(entropy, 1, 1);
    if (weight) expect(logits, 1, s->V < 3); // with one or two words, 1 - softmax cancels
}

static void case_likeliest(const OpShape *s) {
    check_begin("%zu of %zu x %zu", s->count, s->n, s->V);
    const Dim N = all_of(s->n), V = all_of(s->V), K = all_of(s->count), row = part_of_row(V, 0, s->stride);
    const Temperature temperature = {s->factor, s->cap};
    Tensor *targets = tensor_indices("targets", N, V.size, 1), *logits = tensor_in("logits", N, row);
    Tensor *top = tensor_raw(TENSOR_WRITTEN, "top", DTYPE_FP32, all_of(s->n * s->count), NULL);
    Tensor *logp = tensor_found("logp", N, K), *tail = tensor_found("tail", N, all_of(1));
    CHECK(likeliest, (int32_t *)of(top), of(logp), of(tail), of(logits), of(targets), len(N), len(V), s->count,
          len(row), temperature);
    expect_integers(top);
    expect(logp, 1, 1);
    expect(tail, 1, 0);
}

// The teacher: k ids, one in each k-th part of the vocabulary; their probabilities are 1 to 7 parts each, the tail's 3.
static void case_distill(const OpShape *s) {
    check_begin("%zu of %zu x %zu", s->count, s->n, s->V);
    const size_t k = s->count, size = dtype_size(check.ops->summed);
    const Dim N = all_of(s->n), V = all_of(s->V), K = all_of(k), row = part_of_row(V, 0, s->stride), one = all_of(1);
    const Distillation how = {{s->factor, s->cap}, s->softness, s->share};
    int32_t *id = (int32_t *)check_allocate(s->n * k * sizeof(int32_t));
    char *logp_values = (char *)check_allocate(s->n * k * size), *tail_values = (char *)check_allocate(s->n * size);
    float *part = (float *)check_allocate(k * sizeof(float)), left = 0;
    for (size_t t = 0; t < s->n; t++) {
        float sum = k < s->V ? 3 : 0;
        for (size_t j = 0; j < k; j++) {
            const size_t begin = j * s->V / k, end = (j + 1) * s->V / k;
            id[t * k + j] = (int32_t)(begin + check_below(end - begin));
            sum += part[j] = (float)(1 + check_below(7));
        }
        left = k < s->V ? 3 / sum : 0;
        for (size_t j = 0; j < k; j++) part[j] = logf(part[j] / sum);
        elements_from_float(logp_values + t * k * size, check.ops->summed, part, k);
        elements_from_float(tail_values + t * size, check.ops->summed, &left, 1);
    }
    Tensor *targets = tensor_indices("targets", N, V.size, 1);
    Tensor *top = tensor_raw(TENSOR_READ, "top", DTYPE_FP32, all_of(s->n * k), id);
    Tensor *top_logp = tensor_given(TENSOR_READ, "top_logp", check.ops->summed, N, K, logp_values);
    Tensor *tail = tensor_given(TENSOR_READ, "tail", check.ops->summed, N, one, tail_values);
    Tensor *weight = tensor_make(TENSOR_READ, "weight", check.ops->summed, N, one);
    Tensor *logits = weight ? tensor_inout("logits", N, row) : tensor_in("logits", N, row);
    Tensor *logp = tensor_found("logp", N, one), *divergence = tensor_found("divergence", N, one);
    Tensor *scratch = tensor_scratch(s->n * k);
    CHECK(distill, of(logp), of(divergence), of(logits), of(targets), of(top), of(top_logp), of(tail), of(weight),
          len(N), len(V), k, len(row), how, of(scratch));
    expect(logp, 1, 1);
    expect(divergence, 1, 1);
    if (weight) expect(logits, 1, 1.0 / (double)k);
}

static void case_draw(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->V);
    const Dim N = all_of(s->n), V = all_of(s->V), row = part_of_row(V, 0, s->stride);
    double *uniform = (double *)check_allocate(s->n * sizeof(double));
    for (size_t t = 0; t < s->n; t++) uniform[t] = random_uniform(7, s->seed, t);
    Tensor *logits = tensor_in("logits", N, row), *scratch = tensor_scratch(SCRATCH_FOR(draw, s->V));
    Tensor *number = tensor_raw(TENSOR_READ, "uniform", DTYPE_FP64, N, uniform);
    Tensor *token = tensor_raw(TENSOR_WRITTEN, "token", DTYPE_FP32, N, NULL);
    CHECK(draw, of(token), of(logits), of(number), len(N), len(V), len(row), &s->sampling, of(scratch));
    expect_integers(token);
}

// ---- gradients and the optimizer ------------------------------------------------------------------------------------
static void case_round_sums(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const Dim count = some_of(s->n * s->C, 4000), one = all_of(1);
    Tensor *in = tensor_make(TENSOR_READ, "in", check.ops->summed, one, count), *out = tensor_out("out", one, count);
    CHECK(round_sums, of(out), of(in), len(count));
    expect(out, 1, 0);
}

static void case_widen(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const Dim count = some_of(s->n * s->C, 4000), one = all_of(1);
    Tensor *in = tensor_in("in", one, count), *out = tensor_make(TENSOR_WRITTEN, "out", DTYPE_FP32, one, count);
    CHECK(widen, of(out), of(in), len(count));
    expect(out, 1, 0);
}

static void case_gradient_add(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    const Dim count = some_of(s->n * s->C, 4000), one = all_of(1);
    Tensor *in = tensor_make(TENSOR_READ, "in", check.ops->summed, one, count);
    Tensor *gradient = tensor_make(TENSOR_CHANGED, "gradient", s->type, one, count);
    CHECK(gradient_add, of(gradient), s->type, of(in), len(count));
    expect(gradient, 1, 0);
}

static void case_sum_of_squares(const OpShape *s) {
    check_begin("%zu x %zu", s->n, s->C);
    Tensor *x = tensor_in("x", all_of(1), all_of(s->n * s->C));
    Tensor *sums = tensor_make(TENSOR_WRITTEN, "sums", DTYPE_FP64, all_of(SQUARES_PARTS), all_of(1));
    double part[SQUARES_PARTS], sum = 0;
    ON_DEVICE((check.ops->sum_of_squares(of(sums), SQUARES_PARTS, of(x), check.ops->stored, s->n * s->C),
               check.ops->copy_out(part, of(sums), sizeof(part))));
    const double found = squares_total(part, SQUARES_PARTS);
    for (size_t i = 0; i < s->n * s->C; i++) sum += ((double *)x->twin)[i] * ((double *)x->twin)[i];
    if (!(fabs(found - sum) <= 2e-6 * sum)) check_fail("is %.9g, expected %.9g", found, sum);
}

// ---- attention ------------------------------------------------------------------------------------------------------
// A case of attention. Without spans it has n queries at the end of 2n tokens. In the sample a span is one query. In
// backward the sample has all queries and the query heads of one key head, because dk and dv are sums over queries.
typedef struct {
    AttentionShape shape, sample;
    Dim rows, keys, queries, values, heads; // rows of q; rows of k; columns of q and out, of k and v, of lse
    Tensor *q, *k, *v, *out, *lse, *scratch;
} AttentionCase;

static AttentionCase attention_sample(const OpShape *s, int backward) {
    const size_t n = s->n, NH = s->NH, NKV = s->NKV, HD = s->HD, group = NH / NKV;
    const size_t few = some_of(NKV, n > 64 ? 1 : NKV).count;
    const AttentionShape shape = {s->spans, NH, NKV, HD, 1 / sqrt((double)HD), all_keys, 0, 0, s->slots};
    const Dim H = backward ? columns_of(all_of(few), 1, check_below(NKV - few + 1), NKV) : some_of(NKV, 4);
    AttentionCase a = {0};
    a.shape = a.sample = shape;
    a.sample.NH = H.count * group, a.sample.NKV = H.count;
    a.rows = backward ? all_of(n) : some_of(n, 24), a.keys = all_of(s->positions);
    a.heads = columns_of(H, group, 0, NH), a.queries = columns_of(a.heads, HD, 0, NH * HD);
    a.values = columns_of(H, HD, 0, NKV * HD);
    if (s->spans.count) return a;
    a.shape.spans = usual_spans(n, n, 1), a.shape.spans.window = s->spans.window;
    a.sample.spans = a.shape.spans;
    if (backward) return a;
    Span *each = (Span *)check_allocate(n * sizeof(Span));
    const Span *of = a.shape.spans.span;
    for (size_t i = 0; i < a.rows.count; i++) {
        const size_t row = dim_at(a.rows, i);
        while (of->end <= n + row) of++;
        const Span query = {of->document, n + row, n + row + 1, i};
        each[i] = query;
    }
    a.sample.spans.span = each, a.sample.spans.count = a.rows.count;
    return a;
}

// Selects range 0 or 1 of two ranges of keys, as in ring attention.
static void attention_range(AttentionCase *a, int range) {
    const size_t middle = a->keys.size / 2 + a->keys.size / 5;
    a->shape.partial = 1, a->shape.accumulate = range;
    a->shape.keys.begin = range ? 0 : middle, a->shape.keys.end = range ? middle : SIZE_MAX;
}

// Returns the slack for dout . v - delta: two sums of HD products, which nearly cancel in short documents. With few
// keys, rounding errors of operands hardly average out.
static double score_slack(size_t HD) { return fmax(1, sqrt((double)HD / 128)); }
static double attention_slack(size_t HD) { return score_slack(HD) * (rounds_operands() ? 2 : 1); }

static AttentionCase attention_begin(const OpShape *s, int backward) {
    const char *const kind = s->in_ranges ? " in two ranges" : s->spans.window ? " in a window" : "";
    check_begin("%zu of %zu keys%s", s->n, s->positions, kind);
    AttentionCase a = attention_sample(s, backward);
    const DType type = s->in_ranges && !backward ? check.ops->summed : check.ops->stored;
    a.q = tensor_in("q", a.rows, a.queries), a.k = tensor_in("k", a.keys, a.values);
    a.v = tensor_in("v", a.keys, a.values), a.out = tensor_make(TENSOR_WRITTEN, "out", type, a.rows, a.queries);
    a.lse = tensor_found("lse", a.rows, a.heads);
    a.scratch = tensor_scratch(SCRATCH_FOR(attention, s->n, s->NH, s->NKV, s->HD, s->slots));
    return a;
}

static void case_attention_forward(const OpShape *s) {
    AttentionCase a = attention_begin(s, 0);
    ON_DEVICE(for (int range = 0; range <= s->in_ranges; range++) {
        if (s->in_ranges) attention_range(&a, range);
        check.ops->attention_forward(of(a.out), of(a.lse), of(a.q), of(a.k), of(a.v), &a.shape, of(a.scratch));
    });
    ON_REFERENCE(
        REFERENCE(attention_forward)(of(a.out), of(a.lse), of(a.q), of(a.k), of(a.v), &a.sample, of(a.scratch)));
    expect(a.out, attention_slack(s->HD), 0);
    expect(a.lse, attention_slack(s->HD), 1);
}

static void case_attention_backward(const OpShape *s) {
    AttentionCase a = attention_begin(s, 1);
    Tensor *sinks = s->sinks ? tensor_in("sinks", all_of(1), all_of(s->NH)) : NULL;
    ON_DEVICE({
        check.ops->attention_forward(of(a.out), of(a.lse), of(a.q), of(a.k), of(a.v), &a.shape, of(a.scratch));
        if (sinks) check.ops->sink_forward(of(a.out), of(a.lse), of(sinks), s->n, s->NH, s->HD);
    });
    tensor_keep(a.out), tensor_keep(a.lse);
    const DType type = s->in_ranges ? check.ops->summed : check.ops->stored;
    Tensor *dout = tensor_in("dout", a.rows, a.queries);
    Tensor *dq = tensor_make(TENSOR_WRITTEN, "dq", type, a.rows, a.queries);
    Tensor *dk = tensor_sums("dk", a.keys, a.values), *dv = tensor_sums("dv", a.keys, a.values);
    ON_DEVICE(for (int range = 0; range <= s->in_ranges; range++) {
        if (s->in_ranges) attention_range(&a, range);
        check.ops->attention_backward(of(dq), of(dk), of(dv), of(dout), of(a.out), of(a.q), of(a.k), of(a.v), of(a.lse),
                                      &a.shape, of(a.scratch));
    });
    ON_REFERENCE(REFERENCE(attention_backward)(of(dq), of(dk), of(dv), of(dout), of(a.out), of(a.q), of(a.k), of(a.v),
                                               of(a.lse), &a.sample, of(a.scratch)));
    expect(dq, attention_slack(s->HD), 0.3 * s->factor);
    expect(dk, attention_slack(s->HD), 0.3 * s->factor);
    expect(dv, attention_slack(s->HD), 0.3);
}

// Runs the op with keys of which the last n belong to the queries' tokens. lse is drawn like any tensor; it need not
// belong to these keys.
static void case_attention_received(const OpShape *s) {
    check_begin("%zu of %zu keys", s->n, s->positions);
    const Dim N = all_of(s->n), keys = all_of(s->positions), heads = all_of(s->NH);
    Tensor *q = tensor_in("q", N, all_of(s->NH * s->HD)), *k = tensor_in("k", keys, all_of(s->NKV * s->HD));
    Tensor *lse = tensor_make(TENSOR_READ, "lse", check.ops->summed, N, heads);
    Tensor *received = tensor_sums("received", all_of(1), keys);
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(attention_received, s->positions, s->NKV));
    CHECK(attention_received, of(received), of(q), of(k), of(lse), len(N), len(keys), s->NH, s->NKV, s->HD,
          1 / sqrt((double)s->HD), of(scratch));
    expect(received, score_slack(s->HD), sqrt((double)(s->n * s->NH))); // its weights are not rounded
}

// Chooses `count` of the blocks 1 .. positions. Every third slot is empty; the others hold the last blocks.
static void case_blocks_choose(const OpShape *s) {
    check_begin("%zu of %zu", s->count, s->positions);
    const Dim slots = all_of(s->count);
    int32_t *held = (int32_t *)check_allocate(s->count * sizeof(int32_t));
    for (size_t i = 0; i < s->count; i++) held[i] = i % 3 == 2 ? 0 : (int32_t)(s->positions - i);
    Tensor *score = tensor_make(TENSOR_READ, "score", check.ops->summed, all_of(1), all_of(s->positions));
    Tensor *slot = tensor_raw(TENSOR_CHANGED, "slot", DTYPE_FP32, slots, held);
    Tensor *taken = tensor_raw(TENSOR_WRITTEN, "taken", DTYPE_FP32, slots, NULL);
    Tensor *scratch = tensor_scratch(SCRATCH_FOR(blocks_choose, s->count));
    CHECK(blocks_choose, of(slot), of(taken), of(score), s->positions, s->count, of(scratch));
    expect_integers(slot);
    expect_integers(taken);
}

// ---- the optimizer --------------------------------------------------------------------------------------------------
static Tensor *tensor_master(Dim count) {
    return check.ops->stored == DTYPE_BF16 ? tensor_make(TENSOR_CHANGED, "master", DTYPE_FP32, all_of(1), count) : NULL;
}

// Runs a step from moments of 0: weights follow the formula, and scales are the largest magnitudes of blocks.
static void case_adamw_in_8_bits(size_t n) {
    AdamW step = {1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, 7, 42, 0, 100, NULL, NULL};
    check_begin("%zu, moments in 8 bits", n);
    const Dim count = all_of(n), one = all_of(1), blocks = all_of(moment_blocks(DTYPE_INT8, &step, n));
    const void *zeros = check_allocate(blocks.size * sizeof(float));
    Tensor *w = tensor_inout("w", one, count), *gradient = tensor_in("gradient", one, count);
    Tensor *master = tensor_master(count);
    Tensor *m = tensor_make(TENSOR_SCRATCH, "m", DTYPE_INT8, one, count);
    Tensor *v = tensor_make(TENSOR_SCRATCH, "v", DTYPE_INT8, one, count);
    Tensor *m_scales = tensor_given(TENSOR_CHANGED, "scales of m", DTYPE_FP32, one, blocks, zeros);
    Tensor *v_scales = tensor_given(TENSOR_CHANGED, "scales of v", DTYPE_FP32, one, blocks, zeros);
    step.m_scales = of(m_scales), step.v_scales = of(v_scales);
    ON_DEVICE(check.ops->adamw(of(w), of(master), of(gradient), check.ops->stored, of(m), of(v), DTYPE_INT8, n, &step));
    double *wt = (double *)w->twin, *gt = (double *)gradient->twin, *kt = master ? (double *)master->twin : wt;
    for (size_t i = 0; i < n; i++) {
        double *scale_m = (double *)m_scales->twin + (step.block_first + i) / MOMENT_BLOCK, new_m = 0, new_v = 0;
        double *scale_v = (double *)v_scales->twin + (step.block_first + i) / MOMENT_BLOCK;
        wt[i] = kt[i] += reference_adamw(kt[i], &new_m, &new_v, gt[i], &step);
        *scale_m = fmax(*scale_m, fabs(new_m)), *scale_v = fmax(*scale_v, new_v);
    }
    expect(w, 1, 0);
    expect(master, 1, 0);
    expect(m_scales, 1, 0);
    expect(v_scales, 1, 0);
}

static void case_adamw(const OpShape *s) {
    const AdamW step = {1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, 7, 42, 0, 0, NULL, NULL};
    const DType moments = check.ops->stored == DTYPE_FP64 ? DTYPE_FP64 : DTYPE_FP32;
    check_begin("%zu", s->count);
    const Dim count = some_of(s->count, 4000), one = all_of(1);
    float *squares = (float *)check_allocate(count.size * sizeof(float));
    void *above = check_allocate(count.size * sizeof(double));
    for (size_t i = 0; i < count.size; i++) squares[i] = 0.1f + (float)random_uniform(6, 0, i);
    elements_from_float(above, moments, squares, count.size);
    Tensor *w = tensor_inout("w", one, count), *gradient = tensor_in("gradient", one, count);
    Tensor *master = tensor_master(count);
    Tensor *m = tensor_make(TENSOR_CHANGED, "m", moments, one, count);
    Tensor *v = tensor_given(TENSOR_CHANGED, "v", moments, one, count, above);
    ON_DEVICE(
        check.ops->adamw(of(w), of(master), of(gradient), check.ops->stored, of(m), of(v), moments, s->count, &step));
    double *wt = (double *)w->twin, *mt = (double *)m->twin, *vt = (double *)v->twin, *gt = (double *)gradient->twin;
    double *kt = master ? (double *)master->twin : wt;
    for (size_t i = 0; i < count.count; i++) wt[i] = kt[i] += reference_adamw(kt[i], &mt[i], &vt[i], gt[i], &step);
    expect(w, 1, 0);
    expect(master, 1, 0);
    expect(m, 1, 0);
    expect(v, 1, 0);
    case_adamw_in_8_bits(min_size(s->count, 4000));
}

#include "op_cases_linear.h"
#include "op_cases_experts.h"

static const struct {
    const char *name;
    void (*run)(const OpShape *s);
} op_cases[] = {
#define OP(type, op, ...) {#op, case_##op},
#define OP_HOST(...)
#define OP_SCRATCH(...)
#define OP_MEMORY(...)
#include "op_list.h"
};
#define OP_CASES (sizeof(op_cases) / sizeof(op_cases[0]))

#endif
