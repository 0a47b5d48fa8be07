/*
Elementary functions: exponential, logistic function and tanh of a vector (vector.h), sine and cosine of one number in
straight-line code that compilers vectorise under `#pragma omp simd`. They have floatS's precision: a relative error
below 2.2e-7 in fp32; the double build, which exists for tests, calls libm. NaN in gives NaN out.
*/
#ifndef LLMC_CPU_SIMD_MATH_H
#define LLMC_CPU_SIMD_MATH_H
#include "vector.h"

// Returns a * b + c, rounded once if the machine has the instruction (else fma() would be a slow library call).
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
static inline float fused_float(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fused_double(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
static inline float fused_float(float a, float b, float c) { return a * b + c; }
static inline double fused_double(double a, double b, double c) { return a * b + c; }
#endif

/*
exp(x), x <= 0. exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2. exp(r) is 1 + r + r^2 q(r) with the
minimax polynomial q of degree 4 (error 3.1e-9). Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
Adding 126 more makes these bits the exponent of 2^(n-1). All coefficients are doubled: n = -126, where the clamp ends,
then has the bit pattern of zero, so results below 2^-125.5 become exactly 0 without a slow denormal.
*/
VECTOR_INLINE Vector vector_exp(Vector x) {
#if defined(PRECISION_DOUBLE)
    for (int i = 0; i < VECTOR_LANES; i++) x[i] = exp(x[i]);
    return x;
#else
    const float magic = 12582912.0f + 126.0f;
    const Vector y = vector_max(vector_of(-87.5f), x), shifted = y * 1.44269504f + magic, n = shifted - magic;
    Vector r = n * -0.693359375f + y; // ln 2 in two parts: the first has so few bits that n times it is exact
    r = n * 2.12194440e-4f + r;
    Vector q = r * (2 * 0.00138145987f) + 2 * 0.00836871688f;
    q = q * r + 2 * 0.0416683880f;
    q = q * r + 2 * 0.166665206f;
    q = q * r + 2 * 0.499999934f;
    q = q * r + 2.0f;
    q = q * r + 2.0f;
    return q * (Vector)((VectorBits)shifted << 23);
#endif
}

#if defined(PRECISION_DOUBLE)
static inline floatS square_root(floatS x) { return sqrt(x); }
#else
static inline floatS square_root(floatS x) { return sqrtf(x); } // with -fno-math-errno this is one instruction
#endif

// Returns s(x) = 1 / (1 + exp(-x)) and its slope s (1 - s), both without cancellation or overflow.
VECTOR_INLINE Vector vector_logistic(Vector x, Vector *slope) {
    const VectorWord sign = (VectorWord)1 << (8 * sizeof(VectorWord) - 1);
    const Vector e = vector_exp((Vector)((VectorBits)x | sign)), larger = 1 / (1 + e), smaller = e * larger;
    *slope = larger * smaller;
    return vector_select((VectorBits)(x < 0), smaller, larger);
}

/*
tanh(x) = -e / (2 + e) with e = exp(-2 |x|) - 1 = 2^n (exp(r) - 1) + 2^n - 1, n and r as in vector_exp, and the sign of
x. tanh keeps its digits for small x; its slope, 4 (1 + e) / (2 + e)^2, keeps them for large x.
*/
VECTOR_INLINE Vector vector_tanh(Vector x, Vector *slope) {
#if defined(PRECISION_DOUBLE)
    for (int i = 0; i < VECTOR_LANES; i++) {
        const double e = exp(-2 * fabs(x[i]));
        (*slope)[i] = 4 * e / ((1 + e) * (1 + e)), x[i] = tanh(x[i]);
    }
    return x;
#else
    const float magic = 12582912.0f + 127.0f;
    const VectorBits sign = (VectorBits)x & 0x80000000u;
    const Vector y = vector_max(vector_of(-80), -2 * (Vector)((VectorBits)x ^ sign));
    const Vector shifted = y * 1.44269504f + magic, n = shifted - magic;
    const Vector power = (Vector)((VectorBits)shifted << 23);
    Vector r = n * -0.693359375f + y;
    r = n * 2.12194440e-4f + r;
    Vector q = r * 0.00138145987f + 0.00836871688f;
    q = q * r + 0.0416683880f;
    q = q * r + 0.166665206f;
    q = q * r + 0.499999934f;
    q = q * r * r + r;
    const Vector e = power * q + (power - 1), inverse = 1 / (2 + e), magnitude = e * inverse; // at most 0
    *slope = 4 * (power * q + power) * inverse * inverse;
    return (Vector)((VectorBits)magnitude ^ sign ^ 0x80000000u);
#endif
}

/*
Sine and cosine of an angle given in fp32, |angle| < 2^31, to about 1e-13: enough to be rounded to fp32 afterwards. The
angle is reduced by the nearest multiple of pi/2. pi/2 is split into three parts, the first two of 22 bits: n * part and
the differences are exact for every n that occurs. Then the Taylor series, cut off below 1e-13.
*/
static inline void simd_sincos(float angle, double *sine, double *cosine) {
    const double magic = 6755399441055744.0; // 1.5 * 2^52 rounds to an integer and leaves it in the low bits
    double x = (double)angle, shifted = fused_double(x, 0.63661977236758138, magic), n = shifted - magic;
    uint64_t quadrant;
    memcpy(&quadrant, &shifted, sizeof(quadrant));
    double r = fused_double(n, -0x1.921fb00000000p+0, x);
    r = fused_double(n, -0x1.5110b00000000p-22, r);
    r = fused_double(n, -0x1.18469898cc517p-44, r);
    double z = r * r;
    double s = fused_double(z, 1.0 / 6227020800.0, -1.0 / 39916800.0);
    s = fused_double(s, z, 1.0 / 362880.0);
    s = fused_double(s, z, -1.0 / 5040.0);
    s = fused_double(s, z, 1.0 / 120.0);
    s = fused_double(s, z, -1.0 / 6.0);
    s = fused_double(s * z, r, r);
    double c = fused_double(z, -1.0 / 87178291200.0, 1.0 / 479001600.0);
    c = fused_double(c, z, -1.0 / 3628800.0);
    c = fused_double(c, z, 1.0 / 40320.0);
    c = fused_double(c, z, -1.0 / 720.0);
    c = fused_double(c, z, 1.0 / 24.0);
    c = fused_double(c, z, -1.0 / 2.0);
    c = fused_double(c, z, 1.0);
    *sine = (quadrant & 1 ? c : s) * (quadrant & 2 ? -1.0 : 1.0);
    *cosine = (quadrant & 1 ? s : c) * ((quadrant + 1) & 2 ? -1.0 : 1.0);
}

#endif
