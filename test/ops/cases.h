/*
The tests' driver of the op cases (llmc/ops/op_cases.h): guarded tensors (testing.h), every element against a reference,
which is ops_reference.h in double (test_ops.c) or op set "cpu" (test_gpu_large.c). A case varies by its tensors' names:
left out, the same as another, drawn or given otherwise. Whoever includes this defines

    REFERENCE(op)         the reference's function
    TWINS_ARE_DOUBLE      whether its tensors are double; otherwise they have the op set's types
    SCRATCH_FOR(op, ...)  elements of scratch that are enough for both
    SLACK                 roundings between the two, as a share of one
*/
#ifndef TEST_OPS_CASES_H
#define TEST_OPS_CASES_H
#include "test/base/testing.h"
#include "llmc/ops/op_dims.h"
#include "llmc/ops/attention_calls.h"

static const Ops *ops; // == ops_device

// ---- tensors in their usual roles -----------------------------------------------------------------------------------
// As guarded_normal; draws large tensors in parallel, without values: element i depends on i alone.
static Guarded *normal(GuardedRole role, const char *name, DType type, size_t count, double mean, double deviation) {
    const uint64_t seed = test_random();
    if (TWINS_ARE_DOUBLE || count < 1000000) return guarded_normal(role, name, type, count, mean, deviation);
    Guarded *t = guarded_poison(role, name, type, count);
#pragma omp parallel for
    for (size_t i = 0; i < count; i++)
        element_write(t->before + t->offset, type, i, mean + deviation * normal_of(random_mix(seed + i)));
    return t;
}

static Guarded *input(const char *name, size_t count) { return normal(INPUT, name, ops->stored, count, 0.0, 1.0); }
static Guarded *output(const char *name, size_t count) { return guarded_poison(CHANGED, name, ops->stored, count); }
static Guarded *accumulated(const char *name, size_t count) {
    return normal(CHANGED, name, ops->summed, count, 0.0, 1.0);
}
static Guarded *sums_out(const char *name, size_t count) { return guarded_poison(CHANGED, name, ops->summed, count); }
static Guarded *scratch_of(size_t count) { return guarded_poison(SCRATCH, "scratch", ops->summed, count); }

// Keeps columns [first, first + own) of rows of `stride` elements. Other columns are never touched: NaN in inputs, tiny
// values in outputs.
static Guarded *keep_columns(Guarded *t, size_t first, size_t own, size_t stride) {
    const double beside = t->role == INPUT ? NAN : 0x1p-100;
    for (size_t i = 0; i < t->count; i++)
        if (i % stride < first || i % stride >= first + own) {
            element_write(t->before + t->offset, t->type, i, beside);
            if (t->values) ((double *)t->values)[i] = beside;
        }
    t->stride = stride, t->first = first, t->own = own;
    return t;
}

static Guarded *rows_of(GuardedRole role, const char *name, size_t n, size_t width, size_t stride, double deviation) {
    return keep_columns(normal(role, name, ops->stored, n * stride, 0.0, deviation), 0, width, stride);
}

// ---- a call and its twin --------------------------------------------------------------------------------------------
typedef Guarded Tensor;
typedef void *AnyPointer;

static struct {
    const Ops *ops;
    int on_reference; // whether the reference runs
} check;

static AnyPointer columns(const Tensor *t, size_t column, size_t in_sample) {
    const int twin = check.on_reference;
    (void)in_sample;
    return !t ? NULL
              : (char *)(twin ? t->twin : t->data) +
                    column * (twin && TWINS_ARE_DOUBLE ? sizeof(double) : dtype_size(t->type));
}
static AnyPointer of(const Tensor *t) { return columns(t, 0, 0); }

// Returns the values of a tensor before the op.
static const double *doubles_of(const Guarded *t) {
    double *values = t->values ? NULL : case_doubles(t->count);
    for (size_t i = 0; values && i < t->count; i++) values[i] = element_to_double(t->before + t->offset, t->type, i);
    return values ? values : t->values;
}

static void twins_lay_out(void) {
    for (Guarded *t = testing.tensors; t; t = t->next) {
        const size_t size = dtype_size(t->type), bytes = t->count * (TWINS_ARE_DOUBLE ? sizeof(double) : size);
        t->twin = case_memory(bytes);
        if (TWINS_ARE_DOUBLE && t->values)
            memcpy(t->twin, t->values, bytes);
        else if (TWINS_ARE_DOUBLE && t->role != INPUT && !t->raw)
            memset(t->twin, 0xff, bytes); // NaN
        else
            memcpy(t->twin, t->before + t->offset, t->count * size);
    }
}

#define ON_DEVICE(call)                                                                                                \
    do {                                                                                                               \
        CALL(call);                                                                                                    \
        twins_lay_out();                                                                                               \
    } while (0)
#define ON_REFERENCE(call)                                                                                             \
    do {                                                                                                               \
        check.on_reference = 1;                                                                                        \
        call;                                                                                                          \
        check.on_reference = 0;                                                                                        \
    } while (0)

// Returns the reference's values of t.
static double *expected(const Guarded *t) {
    if (TWINS_ARE_DOUBLE) return (double *)t->twin;
    double *values = case_doubles(t->count);
    for (size_t i = 0; i < t->count; i++) values[i] = element_to_double(t->twin, t->type, i);
    return values;
}

static void expect_same(const Guarded *t) {
    double *rounded = case_copy(expected(t), t->count);
    for (size_t i = 0; i < t->count; i++) rounded[i] = round_to(t->type, rounded[i]);
    expect_exactly(t, rounded);
}

// Checks that elements outside of columns [first, first + own) keep their bits.
static void expect_beside(const Guarded *t, size_t first, size_t own, size_t stride) {
    const size_t size = dtype_size(t->type);
    for (size_t i = 0; i < t->count; i++)
        if ((i % stride < first || i % stride >= first + own) &&
            memcmp(t->before + t->offset + i * size, t->after + t->offset + i * size, size))
            test_fail("%s[%zu, %zu] was changed", t->name, i / stride, i % stride);
}

// ---- variants of a case ---------------------------------------------------------------------------------------------
typedef enum { LEFT_OUT, ANOTHER, DRAWN, GIVEN } EditKind;

typedef struct {
    EditKind kind;
    char name[20], other[20]; // ANOTHER: tensor `name` is `other`, which the case makes first
    double mean, deviation;
    const void *elements; // doubles, or the elements of a raw tensor
} Edit;

static struct {
    Edit edit[8];
    size_t edits;
    double slack; // scales every tensor's slack
    int exactly;  // results equal the reference's, rounded once
    Norm norm;    // for dx_scale
    size_t norm_width;
    double (*dx_scale)(void); // replaces the case's unless NULL
    const Guarded *dx;
} varied;

static Edit *vary(EditKind kind, const char *name) {
    Edit *e = &varied.edit[varied.edits++];
    if (varied.edits > COUNT_OF(varied.edit)) test_fail("more than %zu edits", COUNT_OF(varied.edit));
    memset(e, 0, sizeof(*e));
    e->kind = kind;
    snprintf(e->name, sizeof(e->name), "%s", name);
    return e;
}
static void drawn(const char *name, double mean, double deviation) {
    Edit *e = vary(DRAWN, name);
    e->mean = mean, e->deviation = deviation;
}
static void left_out(const char *name) { vary(LEFT_OUT, name); }
static void given(const char *name, const void *elements) { vary(GIVEN, name)->elements = elements; }

static const Edit *edit_of(EditKind kind, const char *name) {
    for (size_t i = 0; i < varied.edits; i++)
        if (varied.edit[i].kind == kind && !strcmp(varied.edit[i].name, name)) return &varied.edit[i];
    return NULL;
}

// Begins a case. variant: ", out is x, no bias" names it and sets it up.
__attribute__((format(printf, 2, 3))) static void case_of(const char *variant, const char *format, ...) {
    char text[sizeof(testing.about)], first[20], second[20];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    test_case("%s%s", text, variant);
    memset(&varied, 0, sizeof(varied));
    varied.slack = 1.0, check.ops = ops;
    for (const char *part = variant; (part = strstr(part, ", ")); part += 2) {
        if (sscanf(part, ", no %19[^,]", first) == 1)
            left_out(first);
        else if (sscanf(part, ", %19s is %19[^,]", first, second) == 2)
            memcpy(vary(ANOTHER, first)->other, second, sizeof(second));
    }
}

// ---- a case's tensors and checks ------------------------------------------------------------------------------------
static void *check_allocate(size_t bytes) { return case_memory(bytes); }
static uint64_t check_below(uint64_t below) { return test_random_below(below); }
static Dim some_of(size_t size, size_t most) {
    (void)most;
    return all_of(size);
}
static int rounds_operands(void) { return testing.operands > 0.0; }
static void result_rounds(double times, double size) { testing.times = times, testing.terms_size = size; }
static void sums_of(size_t terms, int joins) { testing.terms = terms, testing.joins = joins; }
#define check_fail test_fail

__attribute__((format(printf, 1, 2))) static void check_begin(const char *format, ...) {
    const size_t used = strlen(testing.about);
    va_list arguments;
    va_start(arguments, format);
    if (used + 2 < sizeof(testing.about)) {
        memcpy(testing.about + used, ": ", 3);
        vsnprintf(testing.about + used + 2, sizeof(testing.about) - used - 2, format, arguments);
    }
    va_end(arguments);
}

// Returns the newest tensor of a name, or NULL.
static Guarded *tensor_of(const char *name) {
    Guarded *t = testing.tensors;
    while (t && strcmp(t->name, name) != 0) t = t->next;
    return t;
}

static Tensor *tensor_make(TensorUse use, const char *name, DType type, Dim rows, Dim cols) {
    const size_t count = rows.size * cols.size;
    const Edit *other = edit_of(ANOTHER, name), *values = edit_of(GIVEN, name), *draw = edit_of(DRAWN, name);
    GuardedRole role = use == TENSOR_READ ? INPUT : use == TENSOR_SCRATCH ? SCRATCH : CHANGED;
    if (edit_of(LEFT_OUT, name)) return NULL;
    for (size_t i = 0; i < varied.edits; i++)
        if (varied.edit[i].kind == ANOTHER && !strcmp(varied.edit[i].other, name)) role = CHANGED;
    Guarded *t = other    ? tensor_of(other->other)
                 : values ? guarded_values(role, name, type, (const double *)values->elements, count)
                 : use == TENSOR_WRITTEN || use == TENSOR_SCRATCH
                     ? guarded_poison(role, name, type, count)
                     : normal(role, name, type, count, draw ? draw->mean : 0.0, draw ? draw->deviation : 1.0);
    if (!strcmp(name, "dx")) varied.dx = t;
    return cols.own && cols.own < cols.size && !other ? keep_columns(t, cols.first, cols.own, cols.size) : t;
}

static Tensor *tensor_given(TensorUse use, const char *name, DType type, Dim rows, Dim cols, const void *elements) {
    double *values = case_doubles(rows.size * cols.size);
    for (size_t i = 0; i < rows.size * cols.size; i++) values[i] = element_to_double(elements, type, i);
    if (!edit_of(GIVEN, name)) given(name, values);
    return tensor_make(use, name, type, rows, cols);
}

static Tensor *tensor_raw(TensorUse use, const char *name, DType type, Dim n, const void *elements) {
    const Edit *other = edit_of(GIVEN, name);
    const GuardedRole role = use == TENSOR_READ ? INPUT : CHANGED;
    if (edit_of(LEFT_OUT, name)) return NULL;
    Guarded *t = elements ? guarded_bytes(role, name, other ? other->elements : elements, dtype_size(type), n.size)
                          : guarded_poison(role, name, type, n.size);
    t->raw = 1;
    return t;
}

// Draws n rows below `limit`, the last one among several. masked: a fourth are -1, and row 0 is among them.
static Tensor *tensor_indices(const char *name, Dim n, size_t limit, int masked) {
    int32_t *index = (int32_t *)case_memory(n.size * sizeof(int32_t));
    if (edit_of(LEFT_OUT, name)) return NULL;
    for (size_t t = 0; t < n.size; t++)
        index[t] = masked && test_random_below(4) == 0 ? -1 : (int32_t)test_random_below(limit);
    if (n.size > 1 && masked) index[1] = 0;
    if (n.size > 1) index[masked ? 0 : test_random_below(n.size)] = (int32_t)limit - 1;
    return tensor_raw(TENSOR_READ, name, DTYPE_FP32, n, index);
}

// Makes the op's result an input of the next call.
static void tensor_keep(Tensor *t) {
    double *values = case_doubles(t->count);
    memcpy(t->before, t->after, t->bytes);
    for (size_t i = 0; i < t->count; i++) values[i] = result(t, i);
    t->values = values, t->role = INPUT;
}

// Compares entropies, each to 1e-5 of its size or 1e-6 nats.
static void expect_entropy(const Guarded *entropy) {
    const double scale = ops->summed == DTYPE_FP64 ? 1e-7 : 1.0, *wanted = expected(entropy);
    for (size_t t = 0; t < entropy->count; t++) {
        const double found = result(entropy, t), allowed = scale * fmax(1e-5 * wanted[t], 1e-6);
        if (!(fabs(found - wanted[t]) <= allowed))
            test_fail("entropy[%zu] is %.9g, expected %.9g", t, found, wanted[t]);
        testing.worst = fmax(testing.worst, fabs(found - wanted[t]) / allowed);
    }
}

// Compares a result with the reference's; NULL: none. slack and scale as in expect_within.
static void expect(const Guarded *t, double slack, double scale) {
    if (!t) return;
    if (varied.dx_scale && t == varied.dx) scale = varied.dx_scale();
    if (varied.exactly)
        expect_same(t);
    else if (!strcmp(t->name, "entropy"))
        expect_entropy(t);
    else
        expect_within(t, expected(t), SLACK * slack * varied.slack, scale);
    if (t->own) expect_beside(t, t->first, t->own, t->stride);
}

static void expect_integers(const Guarded *t) {
    for (size_t i = 0; i < t->count; i++) {
        const int64_t found = integer_at(t->after + t->offset, t->type, i), wanted = integer_at(t->twin, t->type, i);
        if (found != wanted) test_fail("%s[%zu] is %lld, not %lld", t->name, i, (long long)found, (long long)wanted);
    }
}

#include "llmc/ops/op_cases.h"

// ---- embedding ------------------------------------------------------------------------------------------------------
static void embedding_case(size_t n, size_t rows, size_t C, int with_wpe, DType dw_type, double scale) {
    const OpShape s = {
        .n = n, .C = C, .V = rows, .positions = n, .learned = with_wpe, .factor = scale, .type = dw_type};
    case_of(with_wpe ? "" : ", no position", "dw %s, scale %g", dtype_name(dw_type), scale);
    varied.exactly = !with_wpe && scale == 1.0;
    case_embedding_forward(&s);
    varied.exactly = 0;
    case_embedding_backward(&s);
    const Guarded *dw = tensor_of("dw");
    const double *now = expected(dw), *before = doubles_of(dw);
    for (size_t i = 0; i < rows * C; i++) // rows without a token keep their bits
        if (now[i] == before[i] && result(dw, i) != before[i]) test_fail("dw[%zu] was changed", i);
}

// ---- norms ----------------------------------------------------------------------------------------------------------
enum { OUT_ALONE, OUT_IS_X, WITH_RESIDUAL, OUT_IS_RESIDUAL, BARE, BARE_WITH_RESIDUAL };
enum { LAYERNORM_FORWARDS = 2, RMSNORM_FORWARDS = 6 };
enum { SEPARATE, ACCUMULATE, DX_IS_DOUT, DX_IS_X, NORM_VARIANTS };

static OpShape norm_shape(NormKind kind, size_t n, size_t C, int accumulate) { // an offset as Gemma has it
    const OpShape s = {
        .n = n, .C = C, .accumulate = accumulate, .norm = {1e-5, kind == NORM_RMS && n % 2 ? 1.0 : 0.0, kind}};
    return s;
}

static void norm_forward_case(NormKind kind, size_t n, size_t C, double mean, double slack, int variant) {
    static const char *const variants[] = {", no residual",     ", out is x, no residual", "",
                                           ", out is residual", ", out is x, no residual", ""};
    OpShape s = norm_shape(kind, n, C, 0);
    s.bare = variant >= BARE;
    case_of(variants[variant], "forward, mean %g", mean);
    drawn("x", mean, 1.0);
    varied.slack = slack;
    case_norm_forward(&s);
}

// Returns the size of the terms that cancel in dx (C of 1 and 2, x - mean), as the scale for its rounding.
static double norm_gradient_size(void) {
    const double *dout = doubles_of(tensor_of("dout")), *x = doubles_of(tensor_of("x"));
    const double *w = tensor_of("w") ? doubles_of(tensor_of("w")) : NULL;
    const size_t C = varied.norm_width, n = tensor_of("x")->count / C;
    const Norm norm = varied.norm;
    double sum = 0.0;
    for (size_t t = 0; t < n; t++) {
        double square = 0.0, mean = 0.0, deviation = 0.0;
        for (size_t i = 0; i < C && norm.kind == NORM_LAYER; i++) mean += x[t * C + i] / (double)C;
        for (size_t i = 0; i < C; i++) deviation += (x[t * C + i] - mean) * (x[t * C + i] - mean) / (double)C;
        const double scale = 1.0 / sqrt(deviation + norm.eps);
        for (size_t i = 0; i < C; i++) square += pow(dout[t * C + i] * norm_factor_of(norm, w, i), 2.0);
        sum += square * pow(scale * (1.0 + fabs(mean) * scale), 2.0) / (double)(n * C);
    }
    return sqrt(sum);
}

// alone: without dw and db, hence without scratch; 2: also without w
static void norm_backward_case(NormKind kind, size_t n, size_t C, double mean, double slack, int variant, int alone) {
    static const char *const variants[] = {"", "", ", dx is dout", ", dx is x"};
    OpShape s = norm_shape(kind, n, C, variant == ACCUMULATE);
    s.bare = alone > 1;
    case_of(variants[variant], "backward, mean %g, accumulate %d%s", mean, s.accumulate, alone ? ", dx alone" : "");
    if (alone) left_out("dw"), left_out("db"), left_out("scratch");
    drawn("x", mean, 1.0);
    varied.slack = slack, varied.dx_scale = norm_gradient_size, varied.norm = s.norm, varied.norm_width = C;
    case_norm_backward(&s);
}

// ---- linear: residual 2: out is residual ----------------------------------------------------------------------------
static void linear_forward_case(size_t n, size_t C, size_t OC, size_t stride, int with_bias, int residual) {
    const OpShape s = {.n = n, .C = C, .OC = OC, .stride = stride, .bias = with_bias, .joined = residual > 0};
    case_of(residual == 2 ? ", out is residual" : "", "forward, stride=%zu bias=%d residual=%d", stride, with_bias,
            residual);
    case_linear_forward(&s);
}

static void linear_backward_case(size_t n, size_t C, size_t OC, size_t stride, int with_bias, int accumulate) {
    const OpShape s = {.n = n, .C = C, .OC = OC, .stride = stride, .bias = with_bias, .accumulate = accumulate};
    case_of("", "backward, stride=%zu bias=%d accumulate=%d", stride, with_bias, accumulate);
    case_linear_backward_input(&s);
    case_linear_backward_weight(&s);
}

// ---- rotary position embedding, activations -------------------------------------------------------------------------
static void rope_case(size_t n, size_t heads, size_t HD, size_t R, double theta, size_t positions, int interleaved) {
    case_of("", "R=%zu theta=%g positions to %zu, interleaved %d", R, theta, positions, interleaved);
    for (int back = 0; back < 2; back++) {
        const OpShape s = {.n = n,
                           .NH = heads,
                           .HD = HD,
                           .R = R,
                           .positions = positions,
                           .factor = theta,
                           .back = back,
                           .rotation = {back ? 1.13f : 1, interleaved, interleaved == back ? 0 : 0.1, 100}};
        case_rope(&s);
    }
}

// values: inputs; NULL: random
static void activation_case(ActivationKind kind, const double *values, size_t n, size_t FF, int same) {
    static const char *const names[] = {"swiglu", "gelu", "geglu", "clamped", "squared relu"};
    const OpShape s = {.n = n, .FF = FF, .activation = {kind, 1.702, 4.0}};
    case_of(same ? ", din is in" : "", "%s of %g", names[kind], values ? values[0] : NAN);
    drawn("in", 0.0, 3.0);
    if (values) given("in", values);
    case_activation_forward(&s);
    case_activation_backward(&s);
}

// ---- loss head ------------------------------------------------------------------------------------------------------
enum { NO_WEIGHT, ZERO_WEIGHT, RANDOM_WEIGHT };

// values: logits of one row; NULL: random. targets NULL: random. A masked token's results are exactly 0.
static void logprob_case(const double *values, const int32_t *targets, int weights, size_t n, size_t V,
                         double temperature, double cap, int with_entropy) {
    static const char *const variants[] = {
        ", no weight, no entropy", ", no entropy", ", no entropy", ", no weight", "", ""};
    const OpShape s = {
        .n = n, .V = V, .factor = temperature, .cap = cap, .stride = values ? V : (V + 7) / 8 * 8 + n % 2};
    case_of(variants[weights + 3 * with_entropy], "temperature %g, cap %g, weights %d", temperature, cap, weights);
    drawn("logits", 0.0, 3.0);
    drawn("weight", 0.0, weights == ZERO_WEIGHT ? 0.0 : 1.0);
    if (values) given("logits", values);
    if (targets) given("targets", targets);
    case_logprob(&s);
    const Guarded *logp = tensor_of("logp"), *entropy = tensor_of("entropy"), *target = tensor_of("targets");
    if (weights != RANDOM_WEIGHT) expect_same(tensor_of("logits"));
    for (size_t t = 0; t < n; t++)
        if (((const int32_t *)(const void *)(target->before + target->offset))[t] < 0 &&
            (result(logp, t) != 0.0 || (entropy && result(entropy, t) != 0.0)))
            test_fail("logp[%zu] or entropy of a masked token is not 0", t);
}

// ---- distillation ---------------------------------------------------------------------------------------------------
// apart: logits are multiples of it, so that several are equal (0: all differ)
static void likeliest_case(size_t n, size_t V, size_t k, double apart, double temperature, double cap) {
    const OpShape s = {
        .n = n, .V = V, .count = k, .factor = temperature, .cap = cap, .stride = (V + 7) / 8 * 8 + n % 2};
    case_of("", "apart %g, temperature %g, cap %g", apart, temperature, cap);
    double *logits = case_doubles(n * s.stride);
    for (size_t i = 0; i < n * s.stride; i++) {
        const double x = 3.0 * test_normal();
        logits[i] = i % s.stride >= V ? NAN : round_to(ops->stored, apart > 0.0 ? apart * floor(x / apart) : x);
    }
    given("logits", logits);
    case_likeliest(&s);
}

static void distill_case(int weights, size_t n, size_t V, size_t k, double temperature, double cap, double softness,
                         double share) {
    const OpShape s = {.n = n,
                       .V = V,
                       .count = k,
                       .factor = temperature,
                       .cap = cap,
                       .softness = softness,
                       .share = share,
                       .stride = (V + 7) / 8 * 8 + n % 2};
    case_of(weights ? "" : ", no weight", "temperature %g, cap %g, softness %g, share %g, weights %d", temperature, cap,
            softness, share, weights);
    drawn("logits", 0.0, 3.0);
    drawn("weight", 0.0, weights == ZERO_WEIGHT ? 0.0 : 1.0);
    case_distill(&s);
    if (weights != RANDOM_WEIGHT) expect_same(tensor_of("logits"));
}

// ---- sampling -------------------------------------------------------------------------------------------------------
// values: logits; NULL: random, in steps of `apart`, so that several are equal (0: all differ)
static Guarded *draw_case(const double *values, const double *uniform, size_t n, size_t V, double apart,
                          const SamplingSettings *settings) {
    const OpShape s = {.n = n, .V = V, .stride = (V + 7) / 8 * 8 + n % 2, .sampling = *settings};
    case_of("", "temperature %g, cap %g, top-k %zu, top-p %g", settings->temperature, settings->cap, settings->top_k,
            settings->top_p);
    double *logits = case_doubles(n * s.stride);
    for (size_t i = 0; i < n * s.stride; i++) {
        const double x = 3.0 * test_normal();
        logits[i] = i % s.stride >= V ? NAN : values ? values[i / s.stride * V + i % s.stride] : x;
        if (!values && apart > 0.0) logits[i] = apart * floor(logits[i] / apart);
    }
    given("logits", logits), given("uniform", uniform);
    case_draw(&s);
    return tensor_of("token");
}

// ---- attention ------------------------------------------------------------------------------------------------------
typedef struct {
    size_t NH, NKV, HD;
} Heads;

// Window of the cases below; 0: none. Only the tests of windows set it.
static size_t case_window;
static TextSlots case_slots; // AttentionShape.slots; with a cache there is no backward

// How a token's key is used: not at all; read by a library, which rounds up the keys of a window; seen by a query
enum { KEY_UNREAD, KEY_READ, KEY_SEEN };

// Returns the use of each of N tokens' keys. library: one takes the spans' attention
static char *seen_by(Spans spans, size_t N, int library) {
    char *seen = (char *)case_memory(N);
    for (size_t s = 0; s < spans.count; s++) {
        const Span span = spans.span[s];
        const size_t first = first_key(span.document, span.begin, spans.window);
        memset(seen + first, KEY_SEEN, span.end - first);
    }
    for (size_t s = 0; s < spans.count && library && spans.window; s++) {
        const Span span = spans.span[s];
        size_t key = first_key(span.document, span.begin, spans.window);
        for (size_t n = 1; n < CUDNN_GRID / 2 && key > span.document; n++)
            if (!seen[--key]) seen[key] = KEY_READ;
    }
    return seen;
}

// Returns K or V of the whole stream; large in tokens that are read and not seen, so that a weight above 0 shows; NaN
// in tokens that are not read.
static double *values_of_seen(size_t N, const char *seen, size_t row, double amplitude) {
    double *values = case_doubles(N * row);
    for (size_t i = 0; i < N * row; i++)
        values[i] = seen[i / row] == KEY_UNREAD
                        ? NAN
                        : round_to(ops->stored, (seen[i / row] == KEY_READ ? 1000 : amplitude) * test_normal());
    return values;
}

static void expect_untouched(const Guarded *t, const char *seen, size_t row) {
    const double *before = doubles_of(t);
    for (size_t i = 0; i < t->count; i++)
        if (seen[i / row] != KEY_SEEN && result(t, i) != before[i])
            test_fail("%s[%zu] belongs to no key of these spans, but was changed", t->name, i);
}

// Checks forward and backward of spans of a stream of N tokens. amplitude: of q and k; slack: its cost in accuracy.
static void attention_spans_case(Spans spans, size_t N, Heads heads, double amplitude, double slack) {
    const size_t row = heads.NKV * heads.HD;
    const int library = ops->attention_library(heads.NH, heads.NKV, heads.HD, spans.window, 0) != NULL;
    const char *seen = seen_by(spans, N, library);
    const OpShape s = {.n = spans_rows(spans),
                       .NH = heads.NH,
                       .NKV = heads.NKV,
                       .HD = heads.HD,
                       .positions = N,
                       .factor = amplitude,
                       .sinks = spans_rows(spans) % 3 == 0,
                       .spans = spans,
                       .slots = case_slots};
    varied.slack = slack;
    drawn("q", 0.0, amplitude);
    given("k", values_of_seen(N, seen, row, amplitude)), given("v", values_of_seen(N, seen, row, 1.0));
    case_attention_forward(&s);
    if (s.slots.count) return;
    case_attention_backward(&s);
    expect_untouched(tensor_of("dk"), seen, row);
    expect_untouched(tensor_of("dv"), seen, row);
}

#endif
