/*
Random initial weights: normal with the standard deviation of the parameter table, or ones, or zeros; decay rates of
linear attention (A_log) are the logarithm of a uniform number. Element i of parameter p depends only on (seed, p, i),
so any rank can make any range with any number of threads. Values are computed in fp32, then rounded. A seed gives the
same model on every machine: the arithmetic is integers, single operations and explicit fused multiply-adds.
*/
#ifndef LLMC_INITIAL_WEIGHTS_H
#define LLMC_INITIAL_WEIGHTS_H
#include "llmc/base/dtype.h"
#include "model.h"
#include "llmc/base/random.h"

#define INITIAL_WEIGHTS_STREAM 0x776569676874u // random stream, distinct from every other use of a seed
#define INITIAL_RUN            8192            // elements that a thread makes at a time; even

// Computes sqrt(x) to 2e-7 as x / sqrt(x), by three Newton steps. sqrtf may set errno and so would not vectorise.
static float square_root(float x) {
    const float half = -0.5f * x;
    float y;
    uint32_t raw;
    memcpy(&raw, &x, sizeof(raw));
    raw = 0x5f375a86u - (raw >> 1); // halves and negates the exponent: 1/sqrt(x) to 3.5 percent
    memcpy(&y, &raw, sizeof(y));
    for (int step = 0; step < 3; step++) y = y * __builtin_fmaf(half * y, y, 1.5f);
    return x * y;
}

// Computes log x for x > 0 that is neither subnormal nor near the largest: exponent log 2 + log m with m in [2/3, 4/3),
// and log m = 2 atanh(s) for s = (m - 1) / (m + 1), |s| <= 0.2.
static float natural_logarithm(float x) {
    float mantissa;
    uint32_t raw;
    memcpy(&raw, &x, sizeof(raw));
    uint32_t exponent = (raw - 0x3f2aaaabu) >> 23; // 0x3f2aaaab are the bits of 2/3; exponents count modulo 512
    raw -= exponent << 23;
    memcpy(&mantissa, &raw, sizeof(mantissa));
    float s = (mantissa - 1.0f) / (mantissa + 1.0f);
    float s2 = s * s;
    float series = __builtin_fmaf(s2, 2.0f / 9, 2.0f / 7);
    series = __builtin_fmaf(series, s2, 2.0f / 5);
    series = __builtin_fmaf(series, s2, 2.0f / 3);
    series = __builtin_fmaf(series, s2, 2.0f);
    return __builtin_fmaf((float)((int32_t)(exponent << 23) >> 23), 0.693147182f, s * series);
}

/*
Box-Muller: 64 random bits give two normals, r cos t and r sin t, with r = sqrt(-2 log u) and t uniform over the circle.
31 bits make u in (0, 1), so |r| < 6.7. 30 bits make an angle within an eighth of a turn from the axis, one bit
exchanges the axes and one mirrors: together, the whole circle.
*/
static void normal_pair(uint64_t bits, float *first, float *second) {
    const uint32_t radius_bits = (uint32_t)(bits >> 33), angle_bits = (uint32_t)bits;
    const float u = ((float)(int32_t)radius_bits + 0.5f) * 0x1p-31f; // u rounds to 1 at most
    const float angle = (float)((int32_t)(angle_bits >> 2) - (1 << 29)) * (1.57079633f * 0x1p-30f); // within +- pi/4
    const float z = angle * angle;
    const uint32_t exchange = 0u - (angle_bits >> 1 & 1); // all bits set, or none
    uint32_t raw, raw_sine, raw_cosine;
    float r = square_root(-2.0f * natural_logarithm(u));
    // Taylor series, cut off below 1e-9
    float sine = __builtin_fmaf(z, 2.75573192e-6f, -1.98412701e-4f);
    sine = __builtin_fmaf(sine, z, 8.33333377e-3f);
    sine = __builtin_fmaf(sine, z, -1.66666672e-1f);
    sine = __builtin_fmaf(sine, z, 1.0f) * angle;
    float cosine = __builtin_fmaf(z, 2.48015876e-5f, -1.38888892e-3f);
    cosine = __builtin_fmaf(cosine, z, 4.16666679e-2f);
    cosine = __builtin_fmaf(cosine, z, -0.5f);
    cosine = __builtin_fmaf(cosine, z, 1.0f);
    // mirror and exchange by bit operations, since a branch would keep the loop from vectorising
    memcpy(&raw_sine, &sine, sizeof(raw_sine));
    memcpy(&raw_cosine, &cosine, sizeof(raw_cosine));
    raw_cosine ^= angle_bits << 31;
    raw = (raw_sine & exchange) | (raw_cosine & ~exchange);
    raw_sine = (raw_cosine & exchange) | (raw_sine & ~exchange);
    memcpy(&cosine, &raw, sizeof(cosine));
    memcpy(&sine, &raw_sine, sizeof(sine));
    *first = r * cosine;
    *second = r * sine;
}

// Fills values[0 .. 2 pairs) with normal numbers times deviation, from pair `first` of the sequence `key` on.
static void normal_run(float *values, uint64_t key, uint64_t first, size_t pairs, float deviation) {
    for (size_t i = 0; i < pairs; i++) {
        float one, other;
        normal_pair(random_mix(key ^ (first + i)), &one, &other);
        values[2 * i] = one * deviation;
        values[2 * i + 1] = other * deviation;
    }
}

// Fills values[0 .. count) with decay rates A_log, from element `first` on: log of numbers uniform over (0.01, 16).
static void decay_run(float *values, uint64_t key, uint64_t first, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const float u = ((float)(int32_t)(random_mix(key ^ (first + i)) >> 33) + 0.5f) * 0x1p-31f;
        values[i] = natural_logarithm(__builtin_fmaf(u, 15.99f, 0.01f));
    }
}

// Makes elements [begin, begin + count) with all threads. begin must be even, since numbers come in pairs.
static void initial_pairs(const Model *model, size_t parameter, size_t begin, size_t count, uint64_t seed, DType as,
                          void *out) {
    const Parameter *p = &model->parameters[parameter];
    const uint64_t key = random_mix(random_mix(seed) ^ (INITIAL_WEIGHTS_STREAM + parameter));
    const size_t runs = (count + INITIAL_RUN - 1) / INITIAL_RUN;
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (size_t run = 0; run < runs; run++) {
        float values[INITIAL_RUN];
        size_t first = run * INITIAL_RUN, n = min_size(INITIAL_RUN, count - first);
        if (p->role == ROLE_DECAY)
            decay_run(values, key, begin + first, n);
        else if (p->init_std != 0)
            normal_run(values, key, (begin + first) / 2, (n + 1) / 2, (float)p->init_std);
        else
            for (size_t i = 0; i < n; i++) values[i] = p->ones ? 1.0f : 0.0f;
        elements_convert((char *)out + first * dtype_size(as), as, values, DTYPE_FP32, n);
    }
}

// Makes the initial elements [begin, begin + count) of a parameter, in type `as`.
static void initial_weights(const Model *model, size_t parameter, size_t begin, size_t count, uint64_t seed, DType as,
                            void *out) {
    const size_t size = dtype_size(as), odd = begin % 2 && count;
    double pair[2]; // room for two elements of any type
    if (odd) {
        initial_pairs(model, parameter, begin - 1, 2, seed, as, pair);
        memcpy(out, (const char *)pair + size, size);
    }
    if (count > odd) initial_pairs(model, parameter, begin + odd, count - odd, seed, as, (char *)out + odd * size);
}

#endif
