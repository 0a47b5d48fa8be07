/*
AdamW with moments in 8 bits, compared with bitsandbytes' AdamW8bit on a CPU (test/golden/make_moments.py): codes and
scales of its quantiser to the bit, its steps to rounding; a parameter in parts. Part of test_ops.c.
*/
#ifndef TEST_OPS_MOMENTS_H
#define TEST_OPS_MOMENTS_H
#include "test_ops_adamw.h"

enum { MOMENTS = 1100, MOMENT_SCALES = 5, MOMENT_STEPS = 4 };

// The content of moments.bin, in its order
typedef struct {
    uint8_t m[MOMENTS], v[MOMENTS];
    float m_scales[MOMENT_SCALES], v_scales[MOMENT_SCALES];
} MomentState;

typedef struct {
    MomentState moments;
    float weights[MOMENTS];
} MomentStep;

typedef struct {
    MomentState quantised;
    MomentStep step[MOMENT_STEPS];
} MomentFile;

static const MomentFile *moment_file(void) {
    static MomentFile file;
    FILE *in = fopen("test/golden/moments.bin", "rb");
    if (!in || fread(&file, 1, sizeof(file), in) != sizeof(file) || fgetc(in) != EOF) die("test/golden/moments.bin");
    (void)fclose(in);
    return &file;
}

// values() and gradients() of make_moments.py
static double *moment_values(int salt, unsigned spread) {
    double *values = case_doubles(MOMENTS);
    for (unsigned i = 0; i < MOMENTS; i++) {
        uint32_t x = i + (unsigned)salt * 10007u;
        x = (x ^ x >> 16) * 0x85ebca6bu, x = (x ^ x >> 13) * 0xc2b2ae35u, x ^= x >> 16;
        values[i] = ldexp(1 + (double)(x & 0x7fffff) / 0x1p23, -(int)((x >> 23 & 31) % spread)) * (x >> 31 ? -1 : 1);
    }
    return values;
}

static double *moment_gradients(int step) {
    double *values = moment_values(1 + step, 20);
    for (int i = 512; i < 768 && step <= 1; i++) values[i] = 0;
    return values;
}

// The op's tensors
typedef struct {
    Guarded *w, *master, *gradient, *m, *v, *m_scales, *v_scales;
} MomentTensors;

static Guarded *moment_codes(const char *name, const uint8_t *codes, size_t count) {
    Guarded *t = guarded_poison(CHANGED, name, DTYPE_INT8, count);
    memcpy(t->before + t->offset, codes, count);
    return t;
}

static MomentTensors moment_tensors(const MomentState *from, const double *weights, const double *gradients) {
    MomentTensors t = {0};
    if (ops->stored == DTYPE_BF16) {
        t.w = output("w", MOMENTS);
        t.master = guarded_values(CHANGED, "master", DTYPE_FP32, weights, MOMENTS);
    } else {
        t.w = guarded_values(CHANGED, "w", ops->stored, weights, MOMENTS);
    }
    t.gradient = guarded_values(INPUT, "gradient", DTYPE_FP32, gradients, MOMENTS);
    t.m = moment_codes("m", from->m, MOMENTS), t.v = moment_codes("v", from->v, MOMENTS);
    t.m_scales = guarded_bytes(CHANGED, "scales of m", from->m_scales, sizeof(float), MOMENT_SCALES);
    t.v_scales = guarded_bytes(CHANGED, "scales of v", from->v_scales, sizeof(float), MOMENT_SCALES);
    return t;
}

// Elements [first, first + count); the first is at block_first of a block
static void moment_call(const MomentTensors *t, AdamW s, size_t first, size_t count, size_t block_first) {
    const size_t block = (block_first + first) / MOMENT_BLOCK;
    s.first = first, s.block_first = (block_first + first) % MOMENT_BLOCK;
    s.m_scales = (float *)t->m_scales->data + block, s.v_scales = (float *)t->v_scales->data + block;
    ops->adamw((Stored *)(void *)((char *)t->w->data + first * dtype_size(t->w->type)),
               t->master ? (float *)t->master->data + first : NULL, (float *)t->gradient->data + first, DTYPE_FP32,
               (uint8_t *)t->m->data + first, (uint8_t *)t->v->data + first, DTYPE_INT8, count, &s);
}

static AdamW moment_step(int64_t step) {
    AdamW s = adamw_step(step);
    s.learning_rate = 1e-2, s.gradient_scale = 1;
    return s;
}

// Checks that at most `others` codes differ, and only by one; scales to `close`, relatively.
static void expect_moments(const char *name, const Guarded *codes, const uint8_t *expected, const Guarded *scales,
                           const float *expected_scales, size_t others, double close) {
    size_t found = 0;
    for (size_t i = 0; i < MOMENT_SCALES; i++)
        if (!(fabs(result(scales, i) - (double)expected_scales[i]) <= close * (double)expected_scales[i]))
            test_fail("scale %zu of %s is %.9g, expected %.9g", i, name, result(scales, i), (double)expected_scales[i]);
    for (size_t i = 0; i < MOMENTS; i++) {
        const int code = codes->after[codes->offset + i], off = abs(code - expected[i]);
        found += off != 0;
        if (off > 1 || found > others) test_fail("code %zu of %s is %d, expected %d", i, name, code, expected[i]);
    }
}

// With beta1 = beta2 = 0 the moments are the gradient and its square.
TEST(moments_quantiser) {
    static const MomentState zeros;
    const MomentState *expected = &moment_file()->quantised;
    case_of("", "codes and scales");
    AdamW s = moment_step(1);
    s.beta1 = s.beta2 = 0;
    const MomentTensors t = moment_tensors(&zeros, moment_values(0, 8), moment_gradients(0));
    CALL(moment_call(&t, s, 0, MOMENTS, 0));
    expect_moments("m", t.m, expected->m, t.m_scales, expected->m_scales, 0, 0);
    expect_moments("v", t.v, expected->v, t.v_scales, expected->v_scales, 0, 0);
}

TEST(moments_steps) {
    const MomentFile *file = moment_file();
    const MomentStep *at = NULL;
    static const MomentState zeros;
    for (int step = 1; step <= MOMENT_STEPS; step++) { // each from bitsandbytes' state before it
        const MomentStep *expected = &file->step[step - 1];
        case_of("", "step %d", step);
        double *weights = moment_values(0, 8);
        for (size_t i = 0; i < MOMENTS && at; i++) weights[i] = (double)at->weights[i];
        const MomentTensors t = moment_tensors(at ? &at->moments : &zeros, weights, moment_gradients(step));
        CALL(moment_call(&t, moment_step(step), 0, MOMENTS, 0));
        expect_moments("m", t.m, expected->moments.m, t.m_scales, expected->moments.m_scales, 2, 2e-7);
        expect_moments("v", t.v, expected->moments.v, t.v_scales, expected->moments.v_scales, 2, 2e-7);
        for (size_t i = 0; i < MOMENTS; i++) {
            const double found = result(t.master ? t.master : t.w, i), wanted = (double)expected->weights[i];
            if (!(fabs(found - wanted) <= 2e-7 * fabs(wanted) + 1e-8))
                test_fail("w[%zu] is %.9g, expected %.9g", i, found, wanted);
        }
        at = expected;
    }
}

static void moments_in_parts(const MomentTensors *t, const size_t *cut, size_t parts, size_t block_first) {
    for (size_t i = 0; i < parts; i++) moment_call(t, moment_step(3), cut[i], cut[i + 1] - cut[i], block_first);
}

// A parameter that begins within a block, as a whole and cut at blocks
TEST(moments_parts) {
    enum { BEFORE = 100, PARTS = 3 };
    static const size_t cut[PARTS + 1] = {0, MOMENT_BLOCK - BEFORE, 3 * MOMENT_BLOCK - BEFORE, MOMENTS};
    const MomentState *from = &moment_file()->step[1].moments;
    unsigned char *whole[7];
    case_of("", "three parts");
    const MomentTensors t = moment_tensors(from, moment_values(0, 8), moment_gradients(3));
    Guarded *const all[] = {t.w, t.master, t.gradient, t.m, t.v, t.m_scales, t.v_scales};
    CALL(moment_call(&t, moment_step(3), 0, MOMENTS, BEFORE));
    for (size_t k = 0; k < 7; k++)
        if (all[k]) whole[k] = (unsigned char *)memcpy(case_memory(all[k]->bytes), all[k]->after, all[k]->bytes);
    CALL(moments_in_parts(&t, cut, PARTS, BEFORE));
    for (size_t k = 0; k < 7; k++)
        if (all[k] && memcmp(whole[k], all[k]->after, all[k]->bytes) != 0)
            test_fail("%s in parts has other bits than as a whole", all[k]->name);
}

#endif
