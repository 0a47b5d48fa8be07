/*
Every op of llmc/ops/ops.h, from the linked op set, against the double reference (llmc/ops/ops_reference.h) at many
shapes. For every call: NaN in outputs and scratch beforehand, guards around every tensor, inputs untouched, the same
bits twice (CALL in testing.h). Inputs are rounded to their element type first, so that only the op's error counts.
*/
#include "llmc/ops/ops_reference.h"
#define REFERENCE(op)        reference_##op
#define SCRATCH_FOR(op, ...) ops->op##_scratch(__VA_ARGS__)
enum { TWINS_ARE_DOUBLE = 1, SLACK = 1 };
#include "cases.h"

// Runs every case_step-th of the listed cases, with ALL_CASES=1 all of them. The lists are long enough to cover every
// head size and both sides of the GPU kernels' 64 x 64 tiles. bf16 and double run fewer: they share fp32's lines.
static size_t case_step(void) { return all_cases() ? 1 : ops_device->stored == DTYPE_FP32 ? 4 : 6; }
#define CASE_STEP case_step()

#include "test_ops_reference.h"       // tests of the reference itself
#include "test_ops_attention.h"       // tests of attention
#include "test_ops_attention_part.h"  // the same, keys a range at a time
#include "test_ops_attention_split.h" // the same, of few queries over the keys of a cache
#include "test_ops_attention_wgmma.h" // the same, backward by Hopper's instructions
#include "test_ops_adapter.h"         // tests of adapters, scaling, dropout and scattered rows
#include "test_ops_adamw.h"           // tests of the optimizer
#include "test_ops_moments.h"         // tests of its moments in 8 bits
#include "test_ops_draw.h"            // tests of sampling
#include "test_ops_linear.h"          // tests of linear attention
#include "test_ops_quantise.h"        // tests of matrices in 4 bits
#include "test_ops_experts.h"         // tests of experts

// One test allocates the impossible: the sanitizer must return NULL like malloc.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

// ---- memory ---------------------------------------------------------------------------------------------------------
TEST(memory) {
    static const size_t sizes[] = {1, 3, 64, 4095, 4096, 4097, 100003, 524288, 1234567};
    assert_true(ops->name && ops->name[0]);
    assert_int_equal(ops->summed, dtype_of_sums(ops->stored));
    if (ops->allocate((size_t)1 << 60) || ops->allocate(SIZE_MAX)) test_fail("allocate gave 2^60 bytes");
    for (size_t s = 0; s < COUNT_OF(sizes); s++) {
        case_of("", "%zu bytes", sizes[s]);
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
        ops->copy_in((char *)device + 3, bytes, 2 * sizes[s]); // starts at any byte
        ops->copy_in((char *)device + 3 + sizes[s], bytes, sizes[s]);
        ops->copy_out(back, (char *)device + 3, 2 * sizes[s]);
        ops->release(device, 2 * sizes[s] + 3);
        assert_memory_equal(back, bytes, sizes[s]);
        assert_memory_equal(back + sizes[s], bytes, sizes[s]);
    }
}

// ---- embedding, norms, products, rotations -------------------------------------------------------------------------
TEST(embedding) {
    static const size_t shapes[][3] = {{1, 1, 1},       {1, 5, 7},    {2, 1, 3},    {3, 3, 8},      {7, 100, 16},
                                       {17, 4, 33},     {64, 2, 64},  {65, 300, 5}, {100, 50, 129}, {500, 1, 31},
                                       {1000, 257, 20}, {1030, 4, 9}, {5000, 3, 24}};
    for (size_t s = 0; s < 2 * COUNT_OF(shapes); s++) {
        const size_t *shape = shapes[s / 2];
        embedding_case(shape[0], shape[1], shape[2], (int)(s + s / 2) % 2, s % 2 ? ops->stored : ops->summed,
                       s % 3 ? 1.0 : 5.5);
    }
}

static void norm_cases(NormKind kind) {
    static const size_t widths[] = {1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 256, 768, 1025};
    static const size_t rows[] = {1, 2, 3, 7, 16, 33, 70};
    for (size_t c = 0; c < COUNT_OF(widths); c++)
        for (size_t r = 0; r < COUNT_OF(rows); r++) {
            norm_forward_case(kind, rows[r], widths[c], 0.0, 1.0,
                              (int)(c + r) % (kind == NORM_LAYER ? LAYERNORM_FORWARDS : RMSNORM_FORWARDS));
            norm_backward_case(kind, rows[r], widths[c], 0.0, 1.0, (int)(c + r) % NORM_VARIANTS,
                               (c / 2 + r) % 3 ? 0 : 1 + (kind == NORM_RMS && c % 2));
        }
    for (size_t c = 0; c < 2 * NORM_VARIANTS; c++)
        norm_backward_case(kind, 300, 64, 0.0, 1.0, (int)c % NORM_VARIANTS, c >= NORM_VARIANTS);
    // E[x^2] - mean^2 would lose three digits here; fp32 rounding of the mean itself loses one
    norm_forward_case(kind, 20, 500, 30.0, 5.0, OUT_ALONE);
    norm_backward_case(kind, 20, 500, 30.0, 5.0, SEPARATE, 0);
    // more than 512 threads can hold in a few packs
    norm_backward_case(kind, 2, 20000, 0.0, 3.0, SEPARATE, 0); // statistics are fp32 sums of a row
    norm_backward_case(kind, 2, 17001, 0.0, 3.0, ACCUMULATE, 0);
    norm_backward_case(kind, 2, 17001, 0.0, 3.0, SEPARATE, 1);
    if (kind == NORM_RMS) norm_backward_case(kind, 300, 64, 0.0, 1.0, SEPARATE, 2);
    norm_backward_case(kind, 530, 259, 0.0, 1.0, DX_IS_X, 0); // more rows than the GPU's kernel has blocks
}

TEST(rmsnorm) { norm_cases(NORM_RMS); }
TEST(layernorm) { norm_cases(NORM_LAYER); }

TEST(norms_of_constant_rows) { // neither 0/0 nor a variance below 0
    enum { C = 37 };
    for (size_t c = 0; c < 6; c++) {
        const double constant = c / 2 == 0 ? 0.0 : c / 2 == 1 ? 1.0 : -512.0;
        const OpShape s = {.n = 1, .C = C, .norm = {1e-6, 0.0, c % 2 ? NORM_LAYER : NORM_RMS}};
        case_of(", no residual", "all elements %g, %s", constant, c % 2 ? "layernorm" : "rmsnorm");
        drawn("x", constant, 0.0);
        if (c % 2) varied.slack = 1e6; // the reference's mean is rounded; compare with b
        case_norm_forward(&s);
        if (c % 2) expect_near(tensor_of("out"), tensor_of("b")->values);
    }
}

TEST(nothing_is_awaited) { ops->await(0); } // also if nothing was sent

// Each of up to 32 rows, as texts side by side, has the digits that it has alone.
TEST(linear_rows_alone) {
    enum { N = 32, C = 1100, OC = 53 };
    if (strcmp(ops->name, "cpu") || ops->stored == DTYPE_BF16) return; // other kernels serve more rows
    case_of("", "linear_forward of 1 to %d rows", N);
    const Guarded *x = input("x", N * C), *w = input("weight", OC * C);
    const unsigned char *rows = x->before + x->offset;
    const Stored *weight = (const Stored *)(w->before + w->offset);
    const size_t size = dtype_size(ops->stored), row = OC * size;
    char *all = (char *)case_memory(N * row), *some = (char *)case_memory(N * row);
    ops->linear_forward((Stored *)all, (const Stored *)rows, weight, NULL, NULL, N, C, OC, OC);
    for (size_t n = 1; n < N; n++) {
        const unsigned char *from = rows + (N - n) * C * size;
        ops->linear_forward((Stored *)some, (const Stored *)from, weight, NULL, NULL, n, C, OC, OC);
        if (memcmp(some, all + (N - n) * row, n * row)) test_fail("%zu rows have other digits than %d", n, N);
    }
}

TEST(linear) {
    static const size_t sizes[] = {1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 129};
    // the last rows cross the blocks of a product (hundreds deep, a thousand wide or high) in each of the three
    // directions
    static const size_t shapes[][3] = {
        {1, 1, 1},       {1, 4099, 9},    {1, 16, 1000},   {1, 1030, 300},   {3, 300, 1100},
        {300, 64, 64},   {257, 129, 130}, {1000, 20, 24},  {64, 512, 300},   {33, 100, 777},
        {1100, 300, 40}, {40, 300, 1100}, {300, 1100, 40}, {1045, 30, 1030}, {30, 1045, 260},
        {530, 40, 1045}, {63, 24, 65},    {65, 56, 63},    {32, 2051, 70},                    // see onednn_is_fast
        {9, 1024, 33},   {70, 1500, 7},   {6, 3000, 3},    {5, 8213, 13},    {23, 4500, 50}}; // few rows in two pieces
    for (size_t s = 0; s < COUNT_OF(shapes) + 150 / CASE_STEP; s++) {
        const int listed = s < COUNT_OF(shapes);
        size_t n = listed ? shapes[s][0] : sizes[test_random_below(COUNT_OF(sizes))];
        size_t C = listed ? shapes[s][1] : sizes[test_random_below(COUNT_OF(sizes))];
        size_t OC = listed ? shapes[s][2] : sizes[test_random_below(COUNT_OF(sizes))];
        const int variant = (int)test_random_below(6);
        const size_t stride = s % 3 == 0 ? OC : s % 3 == 1 ? (OC + 7) / 8 * 8 : OC + 1 + test_random_below(20);
        linear_forward_case(n, C, OC, stride, variant % 2, variant / 2);
        linear_backward_case(n, C, OC, stride, variant % 2, variant / 2 % 2);
    }
    for (size_t s = 0; s < 12; s++) linear_forward_case(19, 40, 21, 21 + s % 2 * 3, (int)s / 2 % 2, (int)s / 4);
    for (size_t s = 0; s < 8; s++) linear_backward_case(19, 40, 21, 21 + s % 2 * 3, (int)s / 2 % 2, (int)s / 4);
    if (ops->summed == DTYPE_FP64) return; // the reference's own sums are no better
    // long sums: of a bias over tokens, of one row over the vocabulary (both sides of a vector's width)
    linear_backward_case(100000, 8, 16, 16, 1, 0);
    linear_backward_case(1, 33, 150000, 150000, 0, 0);
}

TEST(rope) {
    static const size_t head_sizes[] = {2, 4, 6, 16, 20, 64, 80, 128, 256};
    static const size_t rows[] = {1, 2, 5, 33};
    static const size_t heads[] = {1, 3, 12};
    for (size_t i = 0; i < COUNT_OF(head_sizes) * COUNT_OF(rows) * COUNT_OF(heads); i++) {
        const size_t HD = head_sizes[i / 12], part = i % 5 ? HD : HD / 4 / 2 * 2; // of a head, all or a quarter
        rope_case(rows[i / 3 % 4], heads[i % 3], HD, part ? part : HD, i % 2 ? 1e4 : 5e5, 3000, i % 7 < 3);
    }
    rope_case(500, 4, 128, 128, 1e6, 1000001, 0); // a million tokens
}

// ---- activations ----------------------------------------------------------------------------------------------------
static void gated_cases(ActivationKind kind) {
    static const size_t shapes[][2] = {{1, 1},  {1, 2},  {2, 1},   {3, 5},    {5, 16},
                                       {7, 17}, {4, 31}, {16, 64}, {33, 100}, {60, 511}};
    for (size_t s = 0; s < 2 * COUNT_OF(shapes); s++)
        activation_case(kind, NULL, shapes[s / 2][0], shapes[s / 2][1], (int)s % 2);
}

TEST(swiglu) { gated_cases(ACTIVATION_SWIGLU); }
TEST(geglu) { gated_cases(ACTIVATION_GEGLU); }
TEST(clamped) { gated_cases(ACTIVATION_CLAMPED); }

TEST(squared_relu) { gated_cases(ACTIVATION_RELU2); }

TEST(gelu) {
    static const size_t counts[] = {1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 127, 1000, 4099, 70001};
    for (size_t i = 0; i < 2 * COUNT_OF(counts); i++)
        activation_case(ACTIVATION_GELU, NULL, 1, counts[i / 2], (int)i % 2);
}

TEST(activations_of_extremes) { // no overflow, no 0 * inf
    static const double extremes[] = {0.0,  -0.0, 1e-30, -1e-30, 4.0,    -4.0,   5.0,
                                      -5.0, 20.0, -20.0, 100.0,  -100.0, 3000.0, -3000.0};
    for (size_t i = 0; i < 4 * COUNT_OF(extremes); i++) {
        const double gate_up[] = {extremes[i / 4], 2.0}, up_gate[] = {2.0, extremes[i / 4]};
        activation_case((ActivationKind)(i % 4), gate_up, 1, 1, 0);
        if (i % 4 == ACTIVATION_CLAMPED) activation_case(ACTIVATION_CLAMPED, up_gate, 1, 1, 0);
    }
}

// ---- loss head ------------------------------------------------------------------------------------------------------
TEST(logprob) {
    static const size_t shapes[][2] = {{1, 1},  {1, 2},   {3, 3},    {2, 7},    {5, 16},   {4, 17},   {7, 33},
                                       {9, 64}, {6, 100}, {20, 257}, {3, 1000}, {1, 4099}, {3, 50257}};
    for (size_t s = 0; s < 9 * COUNT_OF(shapes); s++) {
        size_t n = shapes[s / 9][0], V = shapes[s / 9][1], kind = s / 3 % 3;
        logprob_case(NULL, NULL, (int)(s % 3), n, V, kind ? 0.7 : 1.0, kind == 2 ? 4.0 : 0.0, s % 2 == 0);
    }
}

TEST(likeliest) {
    static const size_t shapes[][3] = {{1, 1, 1},   {3, 3, 3},    {2, 7, 2},     {5, 16, 5},    {4, 33, 32},
                                       {6, 100, 9}, {3, 257, 64}, {2, 1000, 17}, {1, 4099, 64}, {2, 8191, 8}};
    for (size_t s = 0; s < 3 * COUNT_OF(shapes); s++) {
        const size_t *of = shapes[s / 3];
        const int tied =
            s % 3 == 1 && of[1] <= 1000; // long sums of equal terms round to one side, the reference's, too
        likeliest_case(of[0], of[1], of[2], tied ? 0.5 : 0.0, s % 2 ? 0.7 : 1.0, s % 3 == 2 ? 4.0 : 0.0);
    }
}

// The teacher's k tokens: one, several, all; the target is among them or in the tail.
TEST(distill) {
    static const size_t shapes[][3] = {{1, 1, 1},     {1, 2, 1},      {3, 3, 3},    {2, 7, 2},
                                       {9, 16, 5},    {4, 33, 32},    {6, 100, 99}, {20, 257, 3},
                                       {9, 257, 257}, {3, 1000, 100}, {1, 4099, 64}};
    for (size_t s = 0; s < 6 * COUNT_OF(shapes); s++) {
        const size_t *of = shapes[s / 6], kind = s % 6;
        distill_case((int)((s + s / 6) % 3), of[0], of[1], of[2], s % 2 ? 0.7 : 1.0, kind % 3 == 2 ? 4.0 : 0.0,
                     kind / 2 ? 2.0 : 1.0,
                     kind % 4 == 0   ? 1.0
                     : kind % 4 == 1 ? 0.0
                                     : 0.6);
    }
}

// With k = V the divergence and its gradient are those of the whole distributions, to 1e-12 in double.
TEST(distill_of_all_words_is_the_dense_divergence) {
    enum { V = 301, N = 4 };
    test_case("k = V");
    const double precise = ops->stored == DTYPE_FP64 ? 1e-12 : ops->stored == DTYPE_FP32 ? 2e-6 : 1e-2;
    const Distillation how = {{1.0, 0.0}, 1.0, 1.0};
    double *teacher = case_doubles(N * V), *logits = case_doubles(N * V), ones[N], zeros[N] = {0}, wanted[N] = {0};
    int32_t *ids = (int32_t *)case_memory(N * V * sizeof(int32_t)), target[N];
    for (size_t t = 0; t < N; t++) {
        double sum = 0.0;
        for (size_t i = 0; i < V; i++) {
            logits[t * V + i] = round_to(ops->stored, 2.0 * test_normal()), teacher[t * V + i] = 2.0 * test_normal();
            sum += exp(teacher[t * V + i]), ids[t * V + i] = (int32_t)i;
        }
        for (size_t i = 0; i < V; i++) teacher[t * V + i] -= log(sum);
        ones[t] = -1.0, target[t] = (int32_t)(7 * t);
    }
    Guarded *x = guarded_values(CHANGED, "logits", ops->stored, logits, N * V), *logp = sums_out("logp", N);
    Guarded *top = guarded_bytes(INPUT, "top", ids, 4, N * V), *divergence = sums_out("divergence", N);
    Guarded *p = guarded_values(INPUT, "teacher", ops->summed, teacher, N * V);
    Guarded *tail = guarded_values(INPUT, "tail", ops->summed, zeros, N);
    Guarded *weight = guarded_values(INPUT, "weight", ops->summed, ones, N), *scratch = scratch_of(N * V);
    Guarded *targets = guarded_bytes(INPUT, "targets", target, 4, N);
    CALL(ops->distill(logp->data, divergence->data, x->data, targets->data, top->data, p->data, tail->data,
                      weight->data, N, V, V, V, how, scratch->data));
    double error = 0.0, size = 0.0;
    for (size_t t = 0; t < N; t++) {
        double sum = 0.0;
        for (size_t i = 0; i < V; i++) sum += exp(logits[t * V + i]);
        for (size_t i = 0; i < V; i++) {
            const double q = exp(logits[t * V + i]) / sum, now = exp(teacher[t * V + i]);
            wanted[t] += now * (teacher[t * V + i] - log(q));
            error += pow(result(x, t * V + i) - (q - now), 2.0), size += pow(q - now, 2.0);
        }
        if (!(fabs(result(divergence, t) - wanted[t]) <= precise * fabs(wanted[t])))
            test_fail("divergence[%zu] is %.17g, the dense one %.17g", t, result(divergence, t), wanted[t]);
    }
    if (!(sqrt(error) <= precise * sqrt(size))) test_fail("the gradient differs by %.3g", sqrt(error / size));
}

// exp(logit) overflows by far here, and logit - lse cancels: the largest logit must be subtracted first.
TEST(logprob_of_extreme_logits) {
    enum { ROW = 35 };
    for (size_t row = 0; row < 4 * 6; row++) {
        const double cap = row < 2 * 6 ? 0.0 : 400.0;
        int32_t target = 20;
        double logits[ROW], temperature = row % 2 ? 0.7 : 1.0;
        for (size_t i = 0; i < ROW; i++) logits[i] = row / 2 % 6 == 3 ? 1e4 : -1e4;
        if (row / 2 % 6 == 0) logits[20] = 1e4;             // certain: 0
        if (row / 2 % 6 == 1) logits[20] = logits[3] = 1e4; // one of two: -log 2
        if (row / 2 % 6 == 2) logits[34] = 1e4;             // impossible: -2e4
        if (row / 2 % 6 == 5)
            for (size_t i = 0; i < ROW; i++) logits[i] = 1e4 + 64.0 * (double)(i % 3);
        logprob_case(logits, &target, RANDOM_WEIGHT, 1, ROW, temperature, cap, 1); // 3, 4: uniform: -log 35
        logprob_case(logits, &target, NO_WEIGHT, 1, ROW, temperature, cap, 1);
    }
}

// Nearly certain of the target or of another word, anywhere in blocks and packs; impossible words (-inf); a vocabulary
// with a growing maximum; a flat one; and a NaN, which must show.
TEST(logprob_entropy_of_few_words) {
    enum { ROW = 2600 };
    static double logits[ROW];
    for (size_t each = 0; each < 24; each++) {
        const size_t kind = each % 12;
        int32_t target = (int32_t)test_random_below(ROW);
        size_t other = kind % 2 ? (size_t)target : test_random_below(ROW);
        for (size_t i = 0; i < ROW; i++) {
            logits[i] = test_normal();
            if (kind / 2 == 2 && i != (size_t)target && i % 1300) logits[i] = -INFINITY;
            if (kind / 2 == 3) logits[i] += 0.02 * (double)i;
            if (kind / 2 == 4) logits[i] = 3.0;
            if (kind / 2 == 5 && i < 1500 && i != (size_t)target) logits[i] = -INFINITY;
        }
        if (kind / 2 == 0) logits[other] = 30.0;
        if (kind / 2 == 1) logits[other] = 12.0;
        logprob_case(logits, &target, (int)kind % 3, 1, ROW, kind % 4 ? 1.0 : 0.6, each < 12 ? 0.0 : 20.0, 1);
    }
    for (size_t i = 0; i < 3; i++) {
        const Temperature one = {1.0, i % 2 ? 0.0 : 20.0};
        int32_t target = 7;
        case_of("", "NaN %zu", i);
        logits[i == 0 ? 7 : 1300 * i - 1] = NAN;
        Guarded *g_logits = guarded_values(INPUT, "logits", ops->stored, logits, ROW), *logp = sums_out("logp", 1);
        Guarded *g_target = guarded_bytes(INPUT, "target", &target, 4, 1), *entropy = sums_out("entropy", 1);
        CALL(ops->logprob(logp->data, entropy->data, g_logits->data, g_target->data, NULL, 1, ROW, ROW, one));
        if (!isnan(result(logp, 0)) || !isnan(result(entropy, 0)))
            test_fail("logp %g, entropy %g", result(logp, 0), result(entropy, 0));
        logits[i == 0 ? 7 : 1300 * i - 1] = 0.0;
    }
}

// ---- sinks ----------------------------------------------------------------------------------------------------------
TEST(sinks) {
    static const size_t shapes[][3] = {
        {1, 1, 1},   {2, 3, 8},    {5, 7, 16},   {3, 16, 33},   {7, 17, 20}, {64, 8, 64},
        {65, 33, 5}, {130, 4, 96}, {40, 64, 64}, {300, 5, 128}, {3, 2, 512}}; // n, NH, HD
    for (size_t i = 0; i < 3 * COUNT_OF(shapes); i++) {
        const size_t *shape = shapes[i / 3];
        const OpShape s = {.n = shape[0], .NH = shape[1], .HD = shape[2]};
        case_of("", "forward, sums of about %g", i % 3 ? 100.0 : 1.0);
        drawn("lse", 0.0, i % 3 ? 100.0 : 1.0), drawn("sinks", 0.0, i % 3 == 1 ? 100.0 : 1.0);
        case_sink_forward(&s);
        case_of("", "backward");
        drawn("lse", i % 3 ? 30.0 : 3.0, 1.0), drawn("sinks", i % 3 == 1 ? 30.0 : 0.0, 1.0);
        case_sink_backward(&s);
    }
}

TEST(attention_received) {
    static const size_t shapes[][5] = {{1, 1, 1, 1, 1},    {1, 40, 4, 2, 8},    {3, 3, 2, 1, 20},    {7, 64, 6, 3, 16},
                                       {33, 35, 2, 2, 33}, {32, 96, 4, 1, 128}, {40, 200, 8, 2, 64}, {65, 130, 5, 5, 5},
                                       {2, 70, 2, 1, 512}}; // n, keys, NH, NKV, HD
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        const size_t *shape = shapes[i];
        const OpShape s = {.n = shape[0], .positions = shape[1], .NH = shape[2], .NKV = shape[3], .HD = shape[4]};
        case_of("", "%zu heads of %zu", s.NH, s.HD);
        drawn("lse", 3.0, 1.0);
        case_attention_received(&s);
    }
}

// Scores of few values tie; NaN counts as -infinity. Slots hold some of the best blocks, or nothing.
TEST(blocks_choose) {
    static const size_t shapes[][2] = {{1, 1}, {1, 9}, {3, 3}, {4, 40}, {7, 64}, {16, 250}, {33, 301}, {300, 700}};
    for (size_t i = 0; i < 4 * COUNT_OF(shapes); i++) {
        const OpShape s = {.count = shapes[i / 4][0], .positions = shapes[i / 4][1]};
        if (i % 4 == 3 && s.count < s.positions) continue; // all fit
        case_of(i % 4 == 3 ? ", no score" : "", "%s scores", i % 4 == 1 ? "three" : i % 4 == 2 ? "odd" : "drawn");
        double *score = case_doubles(s.positions);
        for (size_t b = 0; b < s.positions; b++) {
            const uint64_t drawn = test_random_below(6);
            score[b] = i % 4 == 1 ? (double)(drawn % 3) : drawn < 2 ? NAN : drawn < 4 ? -INFINITY : drawn * 0.0;
        }
        if (i % 4 == 1 || i % 4 == 2) given("score", score);
        int32_t *slot = (int32_t *)case_memory(s.count * sizeof(int32_t));
        for (size_t j = 0, b = 1; j < s.count; j++) { // blocks in rising order, with gaps
            slot[j] = test_random_below(3) && b <= s.positions ? (int32_t)b++ : 0;
            b += test_random_below(3);
        }
        given("slot", slot);
        case_blocks_choose(&s);
    }
}

// ---- gradients ------------------------------------------------------------------------------------------------------
static const size_t lengths_of_vectors[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 127, 1000, 4099, 100003};

TEST(round_sums_and_widen) {
    // ties both ways, just off a tie, overflow, the largest bf16, subnormals, zeros, infinities, NaN
    static const double special[] = {
        1.00390625, 1.01171875, 1.0039063, 1.0039062, -1.00390625, 3.4e38,   3.3961775e38, 3.3895314e38, 1e-39, -1e-41,
        0.0,        -0.0,       INFINITY,  -INFINITY, NAN,         0x1p-133, 0x1p-134,     0x1.8p-134,   257.0, -259.0};
    for (size_t l = 0; l < COUNT_OF(lengths_of_vectors) + 1; l++) {
        const OpShape s = {.n = 1, .C = l ? lengths_of_vectors[l - 1] : COUNT_OF(special)};
        case_of("", "rounded, then widened");
        varied.exactly = 1;
        if (!l) given("in", special);
        case_round_sums(&s);
        case_widen(&s);
    }
}

TEST(gradient_add) {
    for (size_t l = 0; l < 2 * COUNT_OF(lengths_of_vectors); l++) {
        const OpShape s = {.n = 1, .C = lengths_of_vectors[l / 2], .type = l % 2 ? ops->summed : ops->stored};
        case_of("", "gradient %s", dtype_name(s.type));
        case_gradient_add(&s);
    }
}

static double squares_of(const Guarded *x, Guarded *sums, DType type, size_t count) {
    double part[SQUARES_PARTS];
    ops->sum_of_squares(sums->data, SQUARES_PARTS, x->data, type, count);
    ops->copy_out(part, sums->data, sizeof(part));
    return squares_total(part, SQUARES_PARTS);
}

TEST(sum_of_squares) {
    const DType types[] = {ops->stored, ops->summed, DTYPE_FP32, DTYPE_BF16};
    for (size_t l = 0; l < 4 * COUNT_OF(lengths_of_vectors); l++) {
        size_t count = lengths_of_vectors[l / 4];
        DType type = types[l % 4];
        double expected = 0.0, first = 0.0, found = 0.0;
        if (CASE_STEP > 1 && l % 4 != l / 4 % 4) continue; // emulated launches are slow
        case_of("", "count=%zu, %s", count, dtype_name(type));
        Guarded *x = guarded_normal(INPUT, "x", type, count, 0.0, 1.0);
        Guarded *sums = guarded_poison(CHANGED, "sums", DTYPE_FP64, SQUARES_PARTS);
        CALL((first = found, found = squares_of(x, sums, type, count)));
        for (size_t i = 0; i < count; i++) expected += x->values[i] * x->values[i];
        if (!(fabs(found - expected) <= (ops->summed == DTYPE_FP64 ? 1e-13 : 1e-6) * expected))
            test_fail("%.17g, expected %.17g", found, expected);
        if (first != found) test_fail("%.17g, then %.17g", first, found);
    }
    for (size_t l = 0; l < 20;
         l += EMULATED ? 6 : 1) { // a NaN anywhere must show: it is how the driver finds bad gradients
        double values[20], found = 0.0;
        for (size_t i = 0; i < 20; i++) values[i] = i == l ? NAN : 1.0;
        case_of("", "NaN in element %zu", l);
        Guarded *x = guarded_values(INPUT, "x", ops->stored, values, 20);
        Guarded *sums = guarded_poison(CHANGED, "sums", DTYPE_FP64, SQUARES_PARTS);
        CALL(found = squares_of(x, sums, ops->stored, 20));
        if (!isnan(found)) test_fail("%g instead of NaN", found);
    }
}

// TEST_DTYPE: a type of the device; without it the first one
int main(int argc, char **argv) {
    const char *dtype = getenv("TEST_DTYPE");
    for (size_t i = 0; dtype && op_sets[i]; i++)
        if (!strcmp(op_sets[i]->name, ops_device->name) && !strcmp(dtype_name(op_sets[i]->stored), dtype)) {
            ops_device = op_sets[i];
            break;
        }
    if (dtype && strcmp(dtype_name(ops_device->stored), dtype) != 0)
        die("TEST_DTYPE=%s: this program has no op set of this type", dtype);
    check.ops = ops = ops_device;
    RUN_LISTED(argc, argv, NULL);
}
