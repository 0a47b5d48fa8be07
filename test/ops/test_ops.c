/*
Every op of llmc/ops/ops.h, of whichever op set this was linked with, against the double reference (reference.h) at
many shapes. For every call: NaN in outputs and scratch beforehand, guards around every tensor, inputs untouched, the
same bits twice (CALL in testing.h). Inputs are rounded to their element type first, so what is measured is the op
alone.
*/
#include "test/base/testing.h"
#include "reference.h"
#include "test_ops_tensors.h"        // tensors in their usual roles
#include "test_ops_reference.h"      // tests of the reference itself
#include "test_ops_attention.h"      // tests of attention
#ifndef HAVE_CUDNN                   // which has no part in these
#include "test_ops_attention_part.h" // the same, keys a range at a time
#endif
#include "test_ops_adapter.h" // tests of adapters, scaling, dropout and scattered rows
#include "test_ops_logprob.h" // tests of the loss head
#include "test_ops_adamw.h"   // tests of the optimizer

// An allocation that cannot succeed is one of the tests: the sanitizer shall return NULL as malloc does.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

// ---- memory ---------------------------------------------------------------------------------------------------------
TEST(memory) {
    static const size_t sizes[] = {1, 3, 64, 4095, 4096, 4097, 100003, 524288, 1234567};
    assert_true(ops->name && ops->name[0]);
    assert_int_equal(ops->summed, dtype_of_sums(ops->stored));
    if (ops->allocate((size_t)1 << 60) || ops->allocate(SIZE_MAX)) test_fail("allocate gave 2^60 bytes");
    for (size_t s = 0; s < COUNT_OF(sizes); s++) {
        test_case("%zu bytes", sizes[s]);
        unsigned char *bytes = (unsigned char *)case_memory(2 * sizes[s]),
                      *back = (unsigned char *)case_memory(2 * sizes[s]);
        for (size_t i = 0; i < 2 * sizes[s]; i++) bytes[i] = (unsigned char)test_random();
        Guarded *in = guarded_bytes(INPUT, "in", bytes, 2, sizes[s]);
        Guarded *copy = guarded_poison(CHANGED, "copy", DTYPE_BF16, sizes[s]);
        Guarded *zero = guarded_poison(CHANGED, "zero", DTYPE_BF16, sizes[s]);
        CALL((ops->copy(copy->data, in->data, 2 * sizes[s]), ops->zero(zero->data, 2 * sizes[s])));
        assert_memory_equal(copy->after + copy->offset, bytes, 2 * sizes[s]);
        for (size_t i = 0; i < 2 * sizes[s]; i++) assert_int_equal(zero->after[zero->offset + i], 0);
        void *device = ops->allocate(2 * sizes[s] + 3);
        assert_non_null(device);
        ops->copy_in((char *)device + 3, bytes, 2 * sizes[s]); // any byte may be the first
        ops->copy_in((char *)device + 3 + sizes[s], bytes, sizes[s]);
        ops->copy_out(back, (char *)device + 3, 2 * sizes[s]);
        ops->release(device, 2 * sizes[s] + 3);
        assert_memory_equal(back, bytes, sizes[s]);
        assert_memory_equal(back + sizes[s], bytes, sizes[s]);
    }
}

// ---- embedding ------------------------------------------------------------------------------------------------------
static int32_t *random_rows(size_t n, size_t rows) {
    int32_t *index = (int32_t *)case_memory(n * sizeof(int32_t));
    for (size_t t = 0; t < n; t++) index[t] = (int32_t)test_random_below(rows);
    if (n > 1) index[test_random_below(n)] = (int32_t)rows - 1;
    return index;
}

static void embedding_case(size_t n, size_t rows, size_t C, int with_wpe, DType dw_type, double scale) {
    test_case("n=%zu rows=%zu C=%zu %s wpe, dw %s, scale %g", n, rows, C, with_wpe ? "with" : "without",
              dtype_name(dw_type), scale);
    int32_t *tokens = random_rows(n, rows), *position = random_rows(n, n);
    Guarded *g_tokens = guarded_bytes(INPUT, "tokens", tokens, 4, n),
            *g_position = guarded_bytes(INPUT, "position", position, 4, n);
    Guarded *wte = input("wte", rows * C), *wpe = with_wpe ? input("wpe", n * C) : NULL, *out = output("out", n * C);
    CALL(ops->embedding_forward(out->data, g_tokens->data, with_wpe ? g_position->data : NULL, wte->data,
                                wpe ? wpe->data : NULL, n, C, scale));
    double *expected = case_doubles(n * C);
    reference_embedding_forward(expected, tokens, position, wte->values, wpe ? wpe->values : NULL, n, C, scale);
    expect_near(out, expected);
    if (!with_wpe && scale == 1.0) expect_exactly(out, expected);

    Guarded *dx = input("dx", n * C), *dw = guarded_normal(CHANGED, "dw", dw_type, rows * C, 0.0, 1.0);
    Guarded *scratch = scratch_of(ops->embedding_backward_scratch(n, rows, C));
    CALL(ops->embedding_backward(dw->data, dw_type, dx->data, g_tokens->data, n, rows, C, scale, scratch->data));
    expected = case_copy(dw->values, rows * C);
    reference_embedding_backward(expected, dx->values, tokens, n, C, scale);
    expect_near(dw, expected);
    for (size_t i = 0; i < rows * C; i++) // rows without a token keep their bits
        if (expected[i] == dw->values[i] && result(dw, i) != dw->values[i]) test_fail("dw[%zu] was changed", i);
}

TEST(embedding) {
    static const size_t shapes[][3] = {{1, 1, 1},      {1, 5, 7},    {2, 1, 3},       {3, 3, 8},
                                       {7, 100, 16},   {17, 4, 33},  {64, 2, 64},     {65, 300, 5},
                                       {100, 50, 129}, {500, 1, 31}, {1000, 257, 20}, {5000, 3, 24}};
    for (size_t s = 0; s < 2 * COUNT_OF(shapes); s++) {
        const size_t *shape = shapes[s / 2];
        embedding_case(shape[0], shape[1], shape[2], (int)(s + s / 2) % 2, s % 2 ? ops->stored : ops->summed,
                       s % 3 ? 1.0 : 5.5);
    }
}

// ---- norms ----------------------------------------------------------------------------------------------------------
enum { OUT_ALONE, OUT_IS_X, WITH_RESIDUAL, OUT_IS_RESIDUAL, LAYERNORM_FORWARDS = 2, RMSNORM_FORWARDS = 4 };

static void norm_forward_case(int layernorm, size_t n, size_t C, double mean, double slack, int variant) {
    static const char *const variants[] = {"", ", out is x", ", with a residual", ", out is residual"};
    double eps = 1e-5, offset = !layernorm && n % 2 ? 1.0 : 0.0;
    test_case("%s_forward n=%zu C=%zu mean %g offset %g%s", layernorm ? "layernorm" : "rmsnorm", n, C, mean, offset,
              variants[variant]);
    Guarded *x = guarded_normal(variant == OUT_IS_X ? CHANGED : INPUT, "x", ops->stored, n * C, mean, 1.0),
            *w = input("w", C);
    Guarded *b = layernorm ? input("b", C) : NULL;
    Guarded *residual = variant == WITH_RESIDUAL     ? input("residual", n * C)
                        : variant == OUT_IS_RESIDUAL ? in_place("residual", n * C)
                                                     : NULL;
    Guarded *out = variant == OUT_IS_X ? x : variant == OUT_IS_RESIDUAL ? residual : output("out", n * C);
    const Norm norm = {eps, offset, layernorm ? NORM_LAYER : NORM_RMS};
    CALL(ops->norm_forward(out->data, x->data, w->data, b ? b->data : NULL, residual ? residual->data : NULL, n, C,
                           norm));
    double *expected = case_doubles(n * C);
    reference_norm_forward(expected, x->values, w->values, b ? b->values : NULL, residual ? residual->values : NULL, n,
                           C, eps, offset);
    expect_within(out, expected, slack, 0.0);
}

// dx is a difference of terms of this size: what its rounding is measured by where they cancel (C of 1 and 2), and
// where x - mean has cancelled.
static double norm_gradient_size(int layernorm, const double *dout, const double *x, const double *w, size_t n,
                                 size_t C, double eps, double offset) {
    double sum = 0.0, mean;
    for (size_t t = 0; t < n; t++) {
        double scale = norm_statistics(layernorm, x + t * C, C, eps, &mean);
        for (size_t i = 0; i < C; i++)
            sum += pow(dout[t * C + i] * (w[i] + offset) * scale * (1.0 + fabs(mean) * scale), 2.0) / (double)(n * C);
    }
    return sqrt(sum);
}

enum { SEPARATE, ACCUMULATE, DX_IS_DOUT, DX_IS_X, NORM_VARIANTS };

// alone: without dw and db, for which there is no scratch then

static void norm_backward_case(int layernorm, size_t n, size_t C, double mean, double slack, int variant, int alone) {
    static const char *const variants[] = {"", ", accumulating", ", dx is dout", ", dx is x"};
    double eps = 1e-5, offset = !layernorm && n % 2 ? 1.0 : 0.0;
    int accumulate = variant == ACCUMULATE;
    test_case("%s_backward n=%zu C=%zu mean %g%s%s", layernorm ? "layernorm" : "rmsnorm", n, C, mean, variants[variant],
              alone ? ", dx alone" : "");
    Guarded *x = guarded_normal(variant == DX_IS_X ? CHANGED : INPUT, "x", ops->stored, n * C, mean, 1.0),
            *w = input("w", C);
    Guarded *dout = variant == DX_IS_DOUT ? in_place("dout", n * C) : input("dout", n * C);
    Guarded *dw = accumulated("dw", C), *db = layernorm ? accumulated("db", C) : NULL;
    Guarded *dx = variant == DX_IS_DOUT ? dout
                  : variant == DX_IS_X  ? x
                  : accumulate          ? in_place("dx", n * C)
                                        : output("dx", n * C);
    Guarded *scratch = scratch_of(ops->norm_backward_scratch(n, C));
    const Norm norm = {eps, offset, layernorm ? NORM_LAYER : NORM_RMS};
    CALL(ops->norm_backward(dx->data, alone ? NULL : dw->data, alone || !db ? NULL : db->data, dout->data, x->data,
                            w->data, n, C, norm, accumulate, alone ? NULL : scratch->data));
    double *e_dx = accumulate ? case_copy(dx->values, n * C) : case_doubles(n * C);
    double *e_dw = case_copy(dw->values, C), *e_db = layernorm ? case_copy(db->values, C) : NULL;
    reference_norm_backward(e_dx, e_dw, e_db, dout->values, x->values, w->values, n, C, eps, offset);
    double size = norm_gradient_size(layernorm, dout->values, x->values, w->values, n, C, eps, offset);
    expect_within(dx, e_dx, slack, size);
    if (alone) return;
    expect_within(dw, e_dw, slack, sqrt((double)n));
    if (db) expect_within(db, e_db, slack, sqrt((double)n));
}

static void norm_cases(int layernorm) {
    static const size_t widths[] = {1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 256, 768, 1025};
    static const size_t rows[] = {1, 2, 3, 7, 16, 33, 70};
    for (size_t c = 0; c < COUNT_OF(widths); c++)
        for (size_t r = 0; r < COUNT_OF(rows); r++) {
            norm_forward_case(layernorm, rows[r], widths[c], 0.0, 1.0,
                              (int)(c + r) % (layernorm ? LAYERNORM_FORWARDS : RMSNORM_FORWARDS));
            norm_backward_case(layernorm, rows[r], widths[c], 0.0, 1.0, (int)(c + r) % NORM_VARIANTS,
                               (c / 2 + r) % 3 == 0);
        }
    for (size_t c = 0; c < 2 * NORM_VARIANTS; c++)
        norm_backward_case(layernorm, 300, 64, 0.0, 1.0, (int)c % NORM_VARIANTS, c >= NORM_VARIANTS);
    // E[x^2] - mean^2 would lose three digits here; fp32 rounding of the mean itself loses one
    norm_forward_case(layernorm, 20, 500, 30.0, 5.0, OUT_ALONE);
    norm_backward_case(layernorm, 20, 500, 30.0, 5.0, SEPARATE, 0);
    // more than 512 threads hold a few packs of
    norm_backward_case(layernorm, 2, 20000, 0.0, 3.0, SEPARATE, 0); // statistics are fp32 sums of a row
    norm_backward_case(layernorm, 2, 17001, 0.0, 3.0, ACCUMULATE, 0);
    norm_backward_case(layernorm, 2, 17001, 0.0, 3.0, SEPARATE, 1);
}

TEST(rmsnorm) { norm_cases(0); }
TEST(layernorm) { norm_cases(1); }

TEST(norms_of_constant_rows) { // neither 0/0 nor a variance below 0
    static const double constants[] = {0.0, 1.0, -512.0};
    const Norm rms = {1e-6, 0.0, NORM_RMS}, layer = {1e-6, 0.0, NORM_LAYER};
    size_t C = 37;
    for (size_t c = 0; c < 3; c++) {
        test_case("all elements %g", constants[c]);
        double *values = case_doubles(C), *expected = case_doubles(C);
        for (size_t i = 0; i < C; i++) values[i] = constants[c];
        Guarded *x = guarded_values(INPUT, "x", ops->stored, values, C), *w = input("w", C), *b = input("b", C),
                *out = output("out", C);
        CALL(ops->norm_forward(out->data, x->data, w->data, NULL, NULL, 1, C, rms));
        reference_norm_forward(expected, x->values, w->values, NULL, NULL, 1, C, 1e-6, 0.0);
        expect_near(out, expected);
        CALL(ops->norm_forward(out->data, x->data, w->data, b->data, NULL, 1, C, layer));
        expect_near(out, b->values);
    }
}

// ---- linear ---------------------------------------------------------------------------------------------------------
static void linear_forward_case(size_t n, size_t C, size_t OC, int with_bias, int residual) { // 2: out is residual
    test_case("linear_forward n=%zu C=%zu OC=%zu bias=%d residual=%d", n, C, OC, with_bias, residual);
    Guarded *x = input("x", n * C), *weight = input("weight", OC * C), *bias = with_bias ? input("bias", OC) : NULL;
    Guarded *added = residual == 1 ? input("residual", n * OC) : residual == 2 ? in_place("residual", n * OC) : NULL;
    Guarded *out = residual == 2 ? added : output("out", n * OC);
    CALL(ops->linear_forward(out->data, x->data, weight->data, bias ? bias->data : NULL, added ? added->data : NULL, n,
                             C, OC));
    double *expected = case_doubles(n * OC);
    reference_linear_forward(expected, x->values, weight->values, bias ? bias->values : NULL,
                             added ? added->values : NULL, n, C, OC);
    expect_within(out, expected, 1.0, sqrt((double)C));
}

static void linear_backward_case(size_t n, size_t C, size_t OC, int with_bias, int accumulate) {
    test_case("linear_backward n=%zu C=%zu OC=%zu bias=%d accumulate=%d", n, C, OC, with_bias, accumulate);
    Guarded *x = input("x", n * C), *weight = input("weight", OC * C), *dout = input("dout", n * OC);
    Guarded *dx = accumulate ? in_place("dx", n * C) : output("dx", n * C);
    CALL(ops->linear_backward_input(dx->data, dout->data, weight->data, n, C, OC, accumulate));
    double *expected = accumulate ? case_copy(dx->values, n * C) : case_doubles(n * C);
    reference_linear_backward(expected, NULL, NULL, dout->values, x->values, weight->values, n, C, OC);
    expect_within(dx, expected, 1.0, sqrt((double)OC));

    Guarded *dweight = accumulated("dweight", OC * C), *dbias = with_bias ? accumulated("dbias", OC) : NULL;
    CALL(ops->linear_backward_weight(dweight->data, dbias ? dbias->data : NULL, dout->data, x->data, n, C, OC));
    double *e_dweight = case_copy(dweight->values, OC * C), *e_dbias = with_bias ? case_copy(dbias->values, OC) : NULL;
    reference_linear_backward(NULL, e_dweight, e_dbias, dout->values, x->values, weight->values, n, C, OC);
    expect_within(dweight, e_dweight, 1.0, sqrt((double)n));
    if (dbias) expect_within(dbias, e_dbias, 1.0, sqrt((double)n));
}

TEST(linear) {
    static const size_t sizes[] = {1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 129};
    // the last rows cross the blocks of a product (hundreds deep, a thousand wide or high) in each of the three
    // directions
    static const size_t shapes[][3] = {{1, 1, 1},       {1, 4099, 9},     {1, 16, 1000},   {1, 1030, 300},
                                       {3, 300, 1100},  {300, 64, 64},    {257, 129, 130}, {1000, 20, 24},
                                       {64, 512, 300},  {33, 100, 777},   {1100, 300, 40}, {40, 300, 1100},
                                       {300, 1100, 40}, {1045, 30, 1030}, {30, 1045, 260}, {530, 40, 1045}};
    for (size_t s = 0; s < COUNT_OF(shapes) + 150 / CASE_STEP; s++) {
        int listed = s < COUNT_OF(shapes), variant = (int)test_random_below(6);
        size_t n = listed ? shapes[s][0] : sizes[test_random_below(COUNT_OF(sizes))];
        size_t C = listed ? shapes[s][1] : sizes[test_random_below(COUNT_OF(sizes))];
        size_t OC = listed ? shapes[s][2] : sizes[test_random_below(COUNT_OF(sizes))];
        linear_forward_case(n, C, OC, variant % 2, variant / 2);
        linear_backward_case(n, C, OC, variant % 2, variant / 2 % 2);
    }
    for (size_t s = 0; s < 6; s++) linear_forward_case(19, 40, 21, (int)s % 2, (int)s / 2);
    for (size_t s = 0; s < 4; s++) linear_backward_case(19, 40, 21, (int)s % 2, (int)s / 2);
    if (ops->summed == DTYPE_FP64) return; // the reference's own sums are no better
    // long sums: of a bias over tokens, of one row over the vocabulary (both sides of a vector's width)
    linear_backward_case(100000, 8, 16, 1, 0);
    linear_backward_case(1, 33, 150000, 0, 0);
}

// ---- rotary position embedding --------------------------------------------------------------------------------------
static void rope_case(size_t n, size_t heads, size_t HD, double theta, size_t positions, int backward) {
    int32_t *position;
    float *frequency;
    size_t count = n * heads * HD;
    test_case("rope_%s n=%zu heads=%zu HD=%zu theta=%g positions to %zu", backward ? "backward" : "forward", n, heads,
              HD, theta, positions);
    position = random_rows(n, positions), frequency = (float *)case_memory(HD / 2 * sizeof(float));
    position[0] = backward ? 0 : (int32_t)positions - 1;
    for (size_t i = 0; i < HD / 2; i++) frequency[i] = (float)pow(theta, -2.0 * (double)i / (double)HD);
    Guarded *x = in_place("x", count), *g_position = guarded_bytes(INPUT, "position", position, 4, n);
    Guarded *g_frequency = guarded_bytes(INPUT, "inverse_frequency", frequency, 4, HD / 2);
    CALL(ops->rope(x->data, g_position->data, g_frequency->data, n, heads, HD, backward));
    double *expected = case_copy(x->values, count);
    reference_rope(expected, position, frequency, n, heads, HD, backward);
    expect_near(x, expected);
}

TEST(rope) {
    static const size_t head_sizes[] = {2, 4, 6, 16, 20, 64, 80, 128, 256};
    static const size_t rows[] = {1, 2, 5, 33};
    static const size_t heads[] = {1, 3, 12};
    for (size_t h = 0; h < COUNT_OF(head_sizes); h++)
        for (size_t r = 0; r < COUNT_OF(rows); r++)
            for (size_t g = 0; g < COUNT_OF(heads); g++) {
                rope_case(rows[r], heads[g], head_sizes[h], 1e4, 3000, 0);
                rope_case(rows[r], heads[g], head_sizes[h], 5e5, 3000, 1);
            }
    rope_case(500, 4, 128, 1e6, 1000001, 0); // a million tokens
    rope_case(500, 4, 128, 1e4, 1000001, 1);
}

// ---- activations ----------------------------------------------------------------------------------------------------
static const double extremes[] = {0.0, -0.0, 1e-30, -1e-30, 5.0, -5.0, 20.0, -20.0, 100.0, -100.0, 3000.0, -3000.0};

// A gate and what it lets through, by either function.
typedef struct {
    const char *name;
    ActivationKind kind;
    void (*reference_forward)(double *out, const double *gate_up, size_t n, size_t FF);
    void (*reference_backward)(double *dgate_up, const double *dout, const double *gate_up, size_t n, size_t FF);
} Gated;

static Gated gated_of(int geglu) {
    const Gated swiglu = {"swiglu", ACTIVATION_SWIGLU, reference_swiglu_forward, reference_swiglu_backward};
    const Gated gelu = {"geglu", ACTIVATION_GEGLU, reference_geglu_forward, reference_geglu_backward};
    return geglu ? gelu : swiglu;
}

static void gated_case(Gated g, const double *values, size_t n, size_t FF, int same) {
    test_case("%s n=%zu FF=%zu of %g, ...%s", g.name, n, FF, values[0], same ? ", dgate_up is gate_up" : "");
    double *expected = case_doubles(n * 2 * FF);
    Guarded *gate_up = guarded_values(INPUT, "gate_up", ops->stored, values, n * 2 * FF), *out = output("out", n * FF);
    CALL(ops->activation_forward(out->data, gate_up->data, g.kind, n, FF));
    g.reference_forward(expected, gate_up->values, n, FF);
    expect_near(out, expected);
    Guarded *dout = input("dout", n * FF);
    Guarded *dgate_up =
        same ? guarded_values(CHANGED, "gate_up", ops->stored, values, n * 2 * FF) : output("dgate_up", n * 2 * FF);
    CALL(ops->activation_backward(dgate_up->data, dout->data, same ? dgate_up->data : gate_up->data, g.kind, n, FF));
    memset(expected, 0, n * 2 * FF * sizeof(double));
    g.reference_backward(expected, dout->values, gate_up->values, n, FF);
    expect_near(dgate_up, expected);
}

static void gated_cases(int geglu) {
    static const size_t shapes[][2] = {{1, 1},  {1, 2},  {2, 1},   {3, 5},    {5, 16},
                                       {7, 17}, {4, 31}, {16, 64}, {33, 100}, {60, 511}};
    static double values[2 * 60 * 511]; // of the largest; a case's own memory ends with it
    for (size_t s = 0; s < 2 * COUNT_OF(shapes); s++) {
        size_t n = shapes[s / 2][0], FF = shapes[s / 2][1];
        for (size_t i = 0; i < n * 2 * FF; i++) values[i] = 3.0 * test_normal();
        gated_case(gated_of(geglu), values, n, FF, (int)s % 2);
    }
}

TEST(swiglu) { gated_cases(0); }
TEST(geglu) { gated_cases(1); }

static void gelu_case(const double *values, size_t count, int same) {
    test_case("gelu of %zu%s", count, same ? ", dx is x" : "");
    double *expected = case_doubles(count);
    Guarded *x = values ? guarded_values(INPUT, "x", ops->stored, values, count)
                        : guarded_normal(INPUT, "x", ops->stored, count, 0.0, 2.0);
    Guarded *out = output("out", count);
    CALL(ops->activation_forward(out->data, x->data, ACTIVATION_GELU, 1, count));
    reference_gelu_forward(expected, x->values, count);
    expect_near(out, expected);
    Guarded *dout = input("dout", count);
    Guarded *dx = same ? guarded_values(CHANGED, "x", ops->stored, x->values, count) : output("dx", count);
    CALL(ops->activation_backward(dx->data, dout->data, same ? dx->data : x->data, ACTIVATION_GELU, 1, count));
    memset(expected, 0, count * sizeof(double));
    reference_gelu_backward(expected, dout->values, x->values, count);
    expect_near(dx, expected);
}

TEST(gelu) {
    static const size_t counts[] = {1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 127, 1000, 4099, 70001};
    for (size_t i = 0; i < 2 * COUNT_OF(counts); i++) gelu_case(NULL, counts[i / 2], (int)i % 2);
}

TEST(activations_of_extremes) { // no overflow, no 0 * inf
    for (size_t i = 0; i < COUNT_OF(extremes); i++) {
        double gate[2];
        gelu_case(&extremes[i], 1, 0);
        gate[0] = extremes[i], gate[1] = 2.0;
        gated_case(gated_of(0), gate, 1, 1, 0);
        gated_case(gated_of(1), gate, 1, 1, 0);
    }
}

// ---- gradients ------------------------------------------------------------------------------------------------------
static const size_t lengths_of_vectors[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 127, 1000, 4099, 100003};

TEST(round_sums) {
    // ties both ways, just off a tie, overflow, the largest bf16, subnormals, zeros, infinities, NaN
    static const double special[] = {
        1.00390625, 1.01171875, 1.0039063, 1.0039062, -1.00390625, 3.4e38,   3.3961775e38, 3.3895314e38, 1e-39, -1e-41,
        0.0,        -0.0,       INFINITY,  -INFINITY, NAN,         0x1p-133, 0x1p-134,     0x1.8p-134,   257.0, -259.0};
    for (size_t l = 0; l < COUNT_OF(lengths_of_vectors) + 1; l++) {
        size_t count = l ? lengths_of_vectors[l - 1] : COUNT_OF(special);
        test_case("count=%zu", count);
        double *expected = case_doubles(count);
        Guarded *in = l ? guarded_normal(INPUT, "in", ops->summed, count, 0.0, 1.0)
                        : guarded_values(INPUT, "in", ops->summed, special, count);
        Guarded *out = output("out", count);
        CALL(ops->round_sums(out->data, in->data, count));
        for (size_t i = 0; i < count; i++) expected[i] = round_to(ops->stored, in->values[i]);
        expect_exactly(out, expected);
    }
}

TEST(gradient_add) {
    for (size_t l = 0; l < 2 * COUNT_OF(lengths_of_vectors); l++) {
        size_t count = lengths_of_vectors[l / 2];
        DType type = l % 2 ? ops->summed : ops->stored;
        Guarded *in;
        double *expected;
        test_case("count=%zu, gradient %s", count, dtype_name(type));
        Guarded *gradient = guarded_normal(CHANGED, "gradient", type, count, 0.0, 1.0);
        in = guarded_normal(INPUT, "in", ops->summed, count, 0.0, 1.0), expected = case_doubles(count);
        CALL(ops->gradient_add(gradient->data, type, in->data, count));
        for (size_t i = 0; i < count; i++) expected[i] = gradient->values[i] + in->values[i];
        expect_near(gradient, expected);
    }
}

TEST(sum_of_squares) {
    const DType types[] = {ops->stored, ops->summed, DTYPE_FP32, DTYPE_BF16};
    for (size_t l = 0; l < 4 * COUNT_OF(lengths_of_vectors); l++) {
        size_t count = lengths_of_vectors[l / 4];
        DType type = types[l % 4];
        double expected = 0.0, first = 0.0, found = 0.0;
        if (CASE_STEP > 1 && l % 4 != l / 4 % 4) continue; // emulated, each launch is of a whole GPU
        test_case("count=%zu, %s", count, dtype_name(type));
        Guarded *x = guarded_normal(INPUT, "x", type, count, 0.0, 1.0);
        CALL((first = found, found = ops->sum_of_squares(x->data, type, count)));
        for (size_t i = 0; i < count; i++) expected += x->values[i] * x->values[i];
        if (!(fabs(found - expected) <= (ops->summed == DTYPE_FP64 ? 1e-13 : 1e-6) * expected))
            test_fail("%.17g, expected %.17g", found, expected);
        if (first != found) test_fail("%.17g, then %.17g", first, found);
    }
    for (size_t l = 0; l < 20;
         l += EMULATED ? 6 : 1) { // a NaN anywhere must show: the driver finds bad gradients by it
        double values[20], found = 0.0;
        for (size_t i = 0; i < 20; i++) values[i] = i == l ? NAN : 1.0;
        test_case("NaN in element %zu", l);
        Guarded *x = guarded_values(INPUT, "x", ops->stored, values, 20);
        CALL(found = ops->sum_of_squares(x->data, ops->stored, 20));
        if (!isnan(found)) test_fail("%g instead of NaN", found);
    }
}

int main(int argc, char **argv) {
    ops = ops_device;
    RUN_LISTED(argc, argv, NULL);
}
