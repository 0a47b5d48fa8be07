/*
A case of each op: its tensors, its call, and what it is held against. The call is written once and made twice, by the
op set and by a reference: by ops_reference.h in double (test_ops.c), by op set "cpu" (test_gpu_large.c). Whoever
includes this defines

    REFERENCE(op)         the reference's function
    TWINS_ARE_DOUBLE      of its tensors; otherwise they are of the op set's types
    SCRATCH_FOR(op, ...)  elements of scratch that are enough for both
    SLACK                 roundings between the two, as a share of one
*/
#ifndef TEST_OPS_CASES_H
#define TEST_OPS_CASES_H
#include "test/base/testing.h"

static const Ops *ops; // == ops_device

// ---- tensors in their usual roles -----------------------------------------------------------------------------------
// As guarded_normal; large ones by all threads, without values: element i is of i, whoever draws it.
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
static Guarded *in_place(const char *name, size_t count) { return normal(CHANGED, name, ops->stored, count, 0.0, 1.0); }
static Guarded *accumulated(const char *name, size_t count) {
    return normal(CHANGED, name, ops->summed, count, 0.0, 1.0);
}
static Guarded *sums_out(const char *name, size_t count) { return guarded_poison(CHANGED, name, ops->summed, count); }
static Guarded *scratch_of(size_t count) { return guarded_poison(SCRATCH, "scratch", ops->summed, count); }

static Guarded *indices(const char *name, size_t n, size_t limit) { // the largest is among several
    int32_t *index = (int32_t *)case_memory(n * sizeof(int32_t));
    for (size_t t = 0; t < n; t++) index[t] = (int32_t)test_random_below(limit);
    if (n > 1) index[test_random_below(n)] = (int32_t)limit - 1;
    return guarded_bytes(INPUT, name, index, 4, n);
}

// ---- a call and its twin --------------------------------------------------------------------------------------------
static int on_twins; // whose turn it is

static void *of(const Guarded *t) { return !t ? NULL : on_twins ? t->twin : t->data; }

// Values of a tensor before the op.
static const double *doubles_of(const Guarded *t) {
    double *values = t->values ? NULL : case_doubles(t->count);
    for (size_t i = 0; values && i < t->count; i++) values[i] = element_to_double(t->before + t->offset, t->type, i);
    return values ? values : t->values;
}

static void twins_lay_out(void) {
    for (Guarded *t = testing.tensors; t; t = t->next) {
        const size_t bytes = t->count * (TWINS_ARE_DOUBLE && t->role != INPUT ? sizeof(double) : dtype_size(t->type));
        if (TWINS_ARE_DOUBLE && t->values) {
            t->twin = case_copy(t->values, t->count);
        } else {
            t->twin = case_memory(bytes);
            if (TWINS_ARE_DOUBLE && t->role != INPUT)
                memset(t->twin, 0xff, bytes); // NaN
            else
                memcpy(t->twin, t->before + t->offset, bytes);
        }
    }
}

#define ON_TWINS(call)                                                                                                 \
    do {                                                                                                               \
        twins_lay_out();                                                                                               \
        on_twins = 1;                                                                                                  \
        call;                                                                                                          \
        on_twins = 0;                                                                                                  \
    } while (0)
#define BOTH(op, ...)                                                                                                  \
    do {                                                                                                               \
        CALL(ops->op(__VA_ARGS__));                                                                                    \
        ON_TWINS(REFERENCE(op)(__VA_ARGS__));                                                                          \
    } while (0)

// Values that the reference left in t.
static double *expected(const Guarded *t) {
    if (TWINS_ARE_DOUBLE) return (double *)t->twin;
    double *values = case_doubles(t->count);
    for (size_t i = 0; i < t->count; i++) values[i] = element_to_double(t->twin, t->type, i);
    return values;
}

// Holds a result against the reference's; NULL: there is none. slack and scale as in expect_within.
static void expect(const Guarded *t, double slack, double scale) {
    if (t) expect_within(t, expected(t), SLACK * slack, scale);
}

static void expect_same(const Guarded *t) { expect_exactly(t, expected(t)); }

// ---- embedding ------------------------------------------------------------------------------------------------------
static void embedding_case(size_t n, size_t rows, size_t C, int with_wpe, DType dw_type, double scale) {
    test_case("n=%zu rows=%zu C=%zu %s wpe, dw %s, scale %g", n, rows, C, with_wpe ? "with" : "without",
              dtype_name(dw_type), scale);
    Guarded *tokens = indices("tokens", n, rows), *position = with_wpe ? indices("position", n, n) : NULL;
    Guarded *wte = input("wte", rows * C), *wpe = with_wpe ? input("wpe", n * C) : NULL, *out = output("out", n * C);
    BOTH(embedding_forward, of(out), of(tokens), of(position), of(wte), of(wpe), n, C, scale);
    expect(out, 1.0, 0.0);
    if (!with_wpe && scale == 1.0) expect_same(out);

    Guarded *dx = input("dx", n * C), *dw = normal(CHANGED, "dw", dw_type, rows * C, 0.0, 1.0);
    Guarded *scratch = scratch_of(SCRATCH_FOR(embedding_backward, n, rows, C));
    BOTH(embedding_backward, of(dw), dw_type, of(dx), of(tokens), n, rows, C, scale, rows / 3, of(scratch));
    const double *now = expected(dw), *before = doubles_of(dw);
    expect(dw, 1.0, TWINS_ARE_DOUBLE ? 0.0 : 1.0);
    for (size_t i = 0; i < rows * C; i++) // rows without a token keep their bits
        if (now[i] == before[i] && result(dw, i) != before[i]) test_fail("dw[%zu] was changed", i);
}

// ---- norms ----------------------------------------------------------------------------------------------------------
enum { OUT_ALONE, OUT_IS_X, WITH_RESIDUAL, OUT_IS_RESIDUAL, LAYERNORM_FORWARDS = 2, RMSNORM_FORWARDS = 4 };

static Norm norm_of(NormKind kind, size_t n) { // an offset as Gemma has it
    const Norm norm = {1e-5, kind == NORM_RMS && n % 2 ? 1.0 : 0.0, kind};
    return norm;
}

static void norm_forward_case(NormKind kind, size_t n, size_t C, double mean, double slack, int variant) {
    static const char *const variants[] = {"", ", out is x", ", with a residual", ", out is residual"};
    test_case("%s_forward n=%zu C=%zu mean %g%s", kind == NORM_LAYER ? "layernorm" : "rmsnorm", n, C, mean,
              variants[variant]);
    Guarded *x = normal(variant == OUT_IS_X ? CHANGED : INPUT, "x", ops->stored, n * C, mean, 1.0), *w = input("w", C);
    Guarded *b = kind == NORM_LAYER ? input("b", C) : NULL;
    Guarded *residual = variant == WITH_RESIDUAL     ? input("residual", n * C)
                        : variant == OUT_IS_RESIDUAL ? in_place("residual", n * C)
                                                     : NULL;
    Guarded *out = variant == OUT_IS_X ? x : variant == OUT_IS_RESIDUAL ? residual : output("out", n * C);
    BOTH(norm_forward, of(out), of(x), of(w), of(b), of(residual), n, C, norm_of(kind, n));
    expect(out, slack, 0.0);
}

// dx is a difference of terms of this size: what its rounding is measured by where they cancel (C of 1 and 2), and
// where x - mean has cancelled.
static double norm_gradient_size(Norm norm, const double *dout, const double *x, const double *w, size_t n, size_t C) {
    double sum = 0.0;
    for (size_t t = 0; t < n; t++) {
        double square = 0.0, mean = 0.0, deviation = 0.0;
        for (size_t i = 0; i < C && norm.kind == NORM_LAYER; i++) mean += x[t * C + i] / (double)C;
        for (size_t i = 0; i < C; i++) deviation += (x[t * C + i] - mean) * (x[t * C + i] - mean) / (double)C;
        const double scale = 1.0 / sqrt(deviation + norm.eps);
        for (size_t i = 0; i < C; i++) square += pow(dout[t * C + i] * (w[i] + norm.offset), 2.0);
        sum += square * pow(scale * (1.0 + fabs(mean) * scale), 2.0) / (double)(n * C);
    }
    return sqrt(sum);
}

enum { SEPARATE, ACCUMULATE, DX_IS_DOUT, DX_IS_X, NORM_VARIANTS };

// alone: without dw and db, for which there is no scratch then
static void norm_backward_case(NormKind kind, size_t n, size_t C, double mean, double slack, int variant, int alone) {
    static const char *const variants[] = {"", ", accumulating", ", dx is dout", ", dx is x"};
    const Norm norm = norm_of(kind, n);
    test_case("%s_backward n=%zu C=%zu mean %g%s%s", kind == NORM_LAYER ? "layernorm" : "rmsnorm", n, C, mean,
              variants[variant], alone ? ", dx alone" : "");
    Guarded *x = normal(variant == DX_IS_X ? CHANGED : INPUT, "x", ops->stored, n * C, mean, 1.0), *w = input("w", C);
    Guarded *dout = variant == DX_IS_DOUT ? in_place("dout", n * C) : input("dout", n * C);
    Guarded *dw = alone ? NULL : accumulated("dw", C), *db = alone || kind == NORM_RMS ? NULL : accumulated("db", C);
    Guarded *dx = variant == DX_IS_DOUT   ? dout
                  : variant == DX_IS_X    ? x
                  : variant == ACCUMULATE ? in_place("dx", n * C)
                                          : output("dx", n * C);
    Guarded *scratch = alone ? NULL : scratch_of(SCRATCH_FOR(norm_backward, n, C));
    BOTH(norm_backward, of(dx), of(dw), of(db), of(dout), of(x), of(w), n, C, norm, variant == ACCUMULATE, of(scratch));
    expect(dx, slack, norm_gradient_size(norm, doubles_of(dout), doubles_of(x), doubles_of(w), n, C));
    expect(dw, slack, sqrt((double)n));
    expect(db, slack, sqrt((double)n));
}

// ---- rows with something between them ------------------------------------------------------------------------------
// [n,width], rows `stride` apart: between those of an input NaN, which nobody reads, between others tiny values, which
// nobody writes.
static Guarded *rows_of(GuardedRole role, const char *name, size_t n, size_t width, size_t stride, double deviation) {
    Guarded *t = normal(role, name, ops->stored, n * stride, 0.0, deviation);
    const double between = role == INPUT ? NAN : 0x1p-100;
    for (size_t i = 0; i < t->count; i++)
        if (i % stride >= width) {
            element_write(t->before + t->offset, t->type, i, between);
            if (t->values) ((double *)t->values)[i] = between;
        }
    return t;
}

// Elements outside of columns [column, column + width) keep their bits.
static void expect_between(const Guarded *t, size_t column, size_t width, size_t stride) {
    const size_t size = dtype_size(t->type);
    for (size_t i = 0; i < t->count; i++)
        if ((i % stride < column || i % stride >= column + width) &&
            memcmp(t->before + t->offset + i * size, t->after + t->offset + i * size, size))
            test_fail("%s[%zu, %zu] was changed", t->name, i / stride, i % stride);
}

// ---- linear ---------------------------------------------------------------------------------------------------------
static void linear_forward_case(size_t n, size_t C, size_t OC, size_t stride, int with_bias, int residual) {
    test_case("linear_forward n=%zu C=%zu OC=%zu stride=%zu bias=%d residual=%d", n, C, OC, stride, with_bias,
              residual); // 2: out is residual
    Guarded *x = input("x", n * C), *weight = input("weight", OC * C), *bias = with_bias ? input("bias", OC) : NULL;
    Guarded *added = residual ? rows_of(residual == 2 ? CHANGED : INPUT, "residual", n, OC, stride, 1.0) : NULL;
    Guarded *out = residual == 2  ? added
                   : stride == OC ? output("out", n * OC)
                                  : rows_of(CHANGED, "out", n, OC, stride, 1.0);
    BOTH(linear_forward, of(out), of(x), of(weight), of(bias), of(added), n, C, OC, stride);
    expect(out, 1.0, sqrt((double)C));
    expect_between(out, 0, OC, stride);
}

static void linear_backward_case(size_t n, size_t C, size_t OC, size_t stride, int with_bias, int accumulate) {
    test_case("linear_backward n=%zu C=%zu OC=%zu stride=%zu bias=%d accumulate=%d", n, C, OC, stride, with_bias,
              accumulate);
    Guarded *x = input("x", n * C), *weight = input("weight", OC * C);
    Guarded *dout = rows_of(INPUT, "dout", n, OC, stride, 1.0);
    Guarded *dx = accumulate ? in_place("dx", n * C) : output("dx", n * C);
    BOTH(linear_backward_input, of(dx), of(dout), of(weight), n, C, OC, stride, accumulate);
    expect(dx, 1.0, sqrt((double)OC));
    Guarded *dweight = accumulated("dweight", OC * C), *dbias = with_bias ? accumulated("dbias", OC) : NULL;
    BOTH(linear_backward_weight, of(dweight), of(dbias), of(dout), of(x), n, C, OC, stride);
    expect(dweight, 1.0, sqrt((double)n));
    expect(dbias, 1.0, sqrt((double)n));
}

// ---- rotary position embedding --------------------------------------------------------------------------------------
static void rope_case(size_t n, size_t heads, size_t HD, size_t R, double theta, size_t positions, int interleaved) {
    test_case("n=%zu heads=%zu HD=%zu R=%zu theta=%g positions to %zu, interleaved %d", n, heads, HD, R, theta,
              positions, interleaved);
    float *frequencies = (float *)case_memory(R / 2 * sizeof(float));
    for (size_t i = 0; i < R / 2; i++) frequencies[i] = (float)pow(theta, -2.0 * (double)i / (double)R);
    Guarded *position = indices("position", n, positions);
    Guarded *frequency = guarded_bytes(INPUT, "inverse_frequency", frequencies, 4, R / 2);
    Guarded *x = in_place("x", n * heads * HD);
    for (int back = 0; back < 2; back++) {
        const Rotation how = {back ? 1.13f : 1, interleaved, interleaved == back ? 0 : 0.1, 100};
        BOTH(rope, of(x), of(position), of(frequency), n, heads, HD, R, how, back);
        expect(x, 1.0, 0.0);
    }
}

// ---- activations ----------------------------------------------------------------------------------------------------
// values: of what goes in; NULL: random ones
static void activation_case(ActivationKind kind, const double *values, size_t n, size_t FF, int same) {
    static const char *const names[] = {"swiglu", "gelu", "geglu"};
    const size_t count = n * (kind == ACTIVATION_GELU ? FF : 2 * FF);
    test_case("%s n=%zu FF=%zu of %g%s", names[kind], n, FF, values ? values[0] : NAN, same ? ", din is in" : "");
    Guarded *in = values ? guarded_values(same ? CHANGED : INPUT, "in", ops->stored, values, count)
                         : normal(same ? CHANGED : INPUT, "in", ops->stored, count, 0.0, 3.0);
    Guarded *out = output("out", n * FF), *dout = input("dout", n * FF), *din = same ? in : output("din", count);
    BOTH(activation_forward, of(out), of(in), kind, n, FF);
    expect(out, 1.0, 0.0);
    BOTH(activation_backward, of(din), of(dout), of(in), kind, n, FF);
    expect(din, 1.0, 0.0);
}

// ---- loss head ------------------------------------------------------------------------------------------------------
enum { NO_WEIGHT, ZERO_WEIGHT, RANDOM_WEIGHT };

// Each to 1e-5 of its size or 1e-6 nats.
static void expect_entropy(const Guarded *entropy) {
    const double scale = ops->summed == DTYPE_FP64 ? 1e-7 : 1.0, *wanted = expected(entropy);
    for (size_t t = 0; t < entropy->count; t++) {
        const double found = result(entropy, t), allowed = scale * fmax(1e-5 * wanted[t], 1e-6);
        if (!(fabs(found - wanted[t]) <= allowed))
            test_fail("entropy[%zu] is %.9g, expected %.9g", t, found, wanted[t]);
        testing.worst = fmax(testing.worst, fabs(found - wanted[t]) / allowed);
    }
}

// values: logits; NULL: random ones. A masked token's results are exactly 0.
static void logprob_case(const double *values, const int32_t *targets, int weights, size_t n, size_t V,
                         double temperature, double size, int with_entropy) {
    static const char *const names[] = {"no weight", "weight 0", "weights"};
    const GuardedRole role = weights == NO_WEIGHT ? INPUT : CHANGED;
    const size_t stride = values ? V : (V + 7) / 8 * 8 + n % 2; // of values there is one row
    test_case("logprob n=%zu V=%zu temperature %g, %s%s", n, V, temperature, names[weights],
              with_entropy ? ", entropy" : "");
    Guarded *logits = values ? guarded_values(role, "logits", ops->stored, values, n * V)
                             : rows_of(role, "logits", n, V, stride, 3.0);
    Guarded *target = guarded_bytes(INPUT, "targets", targets, 4, n), *logp = sums_out("logp", n);
    Guarded *entropy = with_entropy ? sums_out("entropy", n) : NULL, *weight = NULL;
    if (weights != NO_WEIGHT)
        weight = guarded_normal(INPUT, "weight", ops->summed, n, 0.0, weights == ZERO_WEIGHT ? 0.0 : 1.0);
    BOTH(logprob, of(logp), of(entropy), of(logits), of(target), of(weight), n, V, stride, temperature);
    expect_between(logits, 0, V, stride);
    expect(logp, 1.0, size);
    if (entropy) expect_entropy(entropy);
    for (size_t t = 0; t < n; t++)
        if (targets[t] < 0 && (result(logp, t) != 0.0 || (entropy && result(entropy, t) != 0.0)))
            test_fail("logp[%zu] or entropy of a masked token is not 0", t);
    if (weights == ZERO_WEIGHT) expect_same(logits);
    if (weights == RANDOM_WEIGHT) expect(logits, 1.0, V < 3 ? 1.0 : 0.0); // of one or two words, 1 - softmax cancels
}

// ---- sampling -------------------------------------------------------------------------------------------------------
// values: logits; NULL: random ones, of which `apart` says how many share a value (0: none)
static Guarded *draw_case(const double *values, const double *uniform, size_t n, size_t V, double apart,
                          const SamplingSettings *s) {
    const size_t stride = (V + 7) / 8 * 8 + n % 2;
    test_case("draw n=%zu V=%zu temperature %g, top-k %zu, top-p %g", n, V, s->temperature, s->top_k, s->top_p);
    Guarded *logits = rows_of(INPUT, "logits", n, V, stride, 3.0),
            *token = guarded_poison(CHANGED, "token", DTYPE_FP32, n);
    for (size_t i = 0; i < n * stride && (values || apart > 0.0); i++) {
        if (i % stride >= V) continue;
        const double x = element_to_double(logits->before + logits->offset, logits->type, i);
        const double value = values ? values[i / stride * V + i % stride] : apart * floor(x / apart);
        element_write(logits->before + logits->offset, logits->type, i, value);
        if (logits->values) ((double *)logits->values)[i] = round_to(logits->type, value);
    }
    Guarded *number = guarded_bytes(INPUT, "uniform", uniform, 8, n), *scratch = scratch_of(SCRATCH_FOR(draw, V));
    BOTH(draw, of(token), of(logits), of(number), n, V, stride, s, of(scratch));
    for (size_t t = 0; t < n; t++) {
        const int32_t found = ((int32_t *)(void *)(token->after + token->offset))[t];
        if (found != ((int32_t *)token->twin)[t])
            test_fail("row %zu: %.17g draws token %d, not %d", t, uniform[t], found, ((int32_t *)token->twin)[t]);
    }
    return token;
}

// ---- attention ------------------------------------------------------------------------------------------------------
typedef struct {
    size_t NH, NKV, HD;
} Heads;

// The window of the cases below; 0: none. Set by the tests of windows alone.
static size_t case_window;

// For each of N tokens, whether a query of the spans sees its key.
static char *seen_by(Spans spans, size_t N) {
    char *seen = (char *)case_memory(N);
    for (size_t s = 0; s < spans.count; s++) {
        const Span span = spans.span[s];
        memset(seen + first_key(span.document, span.begin, spans.window), 1,
               span.end - first_key(span.document, span.begin, spans.window));
    }
    return seen;
}

// K or V of the whole stream; NaN in tokens that are not seen.
static double *values_of_seen(size_t N, const char *seen, size_t row, double amplitude) {
    double *values = case_doubles(N * row);
    for (size_t i = 0; i < N * row; i++)
        values[i] = seen[i / row] ? round_to(ops->stored, amplitude * test_normal()) : NAN;
    return values;
}

static void expect_untouched(const Guarded *t, const char *seen, size_t row) {
    const double *before = doubles_of(t);
    for (size_t i = 0; i < t->count; i++)
        if (!seen[i / row] && result(t, i) != before[i])
            test_fail("%s[%zu] belongs to no key of these spans, but was changed", t->name, i);
}

// dout . v - delta: two sums of HD products, which nearly cancel in short documents. Of few keys roundings of operands
// hardly average out.
static double inner_slack(size_t HD) {
    return fmax(1.0, sqrt((double)HD / 128.0)) * (testing.operands > 0.0 ? 2.0 : 1.0);
}

// Forward and backward of spans of a stream of N tokens. amplitude: of q and k; slack: how much their size costs in
// accuracy.
static void attention_spans_case(Spans spans, size_t N, Heads heads, double amplitude, double slack) {
    const size_t NH = heads.NH, NKV = heads.NKV, HD = heads.HD, n = spans_rows(spans), row = NKV * HD;
    const char *seen = seen_by(spans, N);
    const AttentionShape shape = {spans, NH, NKV, HD, 1.0 / sqrt((double)HD), all_keys, 0, 0};
    slack *= inner_slack(HD);
    Guarded *q = normal(INPUT, "q", ops->stored, n * NH * HD, 0.0, amplitude);
    Guarded *k = guarded_values(INPUT, "k", ops->stored, values_of_seen(N, seen, row, amplitude), N * row);
    Guarded *v = guarded_values(INPUT, "v", ops->stored, values_of_seen(N, seen, row, 1.0), N * row);
    Guarded *out = output("out", n * NH * HD), *lse = sums_out("lse", n * NH);
    Guarded *scratch = scratch_of(SCRATCH_FOR(attention, n, NH, NKV, HD));
    BOTH(attention_forward, of(out), of(lse), of(q), of(k), of(v), &shape, of(scratch));
    expect(out, slack, 0.0);
    expect(lse, slack, 1.0);

    Guarded *given_out = guarded_values(INPUT, "given out", ops->stored, expected(out), out->count);
    Guarded *given_lse = guarded_values(INPUT, "given lse", ops->summed, expected(lse), lse->count);
    Guarded *dout = input("dout", out->count), *dq = output("dq", out->count);
    Guarded *dk = accumulated("dk", N * row), *dv = accumulated("dv", N * row);
    BOTH(attention_backward, of(dq), of(dk), of(dv), of(dout), of(given_out), of(q), of(k), of(v), of(given_lse),
         &shape, of(scratch));
    expect(dq, slack, 0.3 * amplitude);
    expect(dk, slack, 0.3 * amplitude);
    expect(dv, slack, 0.3);
    expect_untouched(dk, seen, row);
    expect_untouched(dv, seen, row);
}

#endif
