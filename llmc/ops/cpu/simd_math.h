/*
Elementary functions that compilers can vectorise: straight-line code without calls, tables or branches, for loops under
`#pragma omp simd`. simd_exp has floatS's precision: relative error below 1.5e-7 in fp32; the double build, which exists
for tests, calls libm. NaN in gives NaN out.
*/
#ifndef LLMC_CPU_SIMD_MATH_H
#define LLMC_CPU_SIMD_MATH_H
#include <math.h>
#include "precision.h"

// a * b + c, in one rounding where the machine has the instruction (fma() is a slow library call where it has not).
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
static inline float fused_float(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fused_double(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
static inline float fused_float(float a, float b, float c) { return a * b + c; }
static inline double fused_double(double a, double b, double c) { return a * b + c; }
#endif

/*
exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2. exp(r) is 1 + r + r^2 q(r) with the minimax polynomial
q of degree 4 (error 3.1e-9). Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. All coefficients are
doubled and the scale is 2^(n-1): n = 128 is still in range, and n = -126, where the clamp below ends, has the bit
pattern of zero, so results below 2^-125.5 become exactly 0 without a slow denormal.
*/
static inline float simd_exp_float(float x) {
    const float magic = 12582912.0f;
    float scale;
    uint32_t bits;
    x = x < -87.5f ? -87.5f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = fused_float(x, 1.44269504f, magic);
    float n = shifted - magic;
    float r = fused_float(n, -0.693359375f, x); // ln 2 in two parts: the first has so few bits that n times it is exact
    r = fused_float(n, 2.12194440e-4f, r);
    float q = fused_float(r, 2 * 0.00138145987f, 2 * 0.00836871688f);
    q = fused_float(q, r, 2 * 0.0416683880f);
    q = fused_float(q, r, 2 * 0.166665206f);
    q = fused_float(q, r, 2 * 0.499999934f);
    q = fused_float(q * r, r, fused_float(r, 2.0f, 2.0f));
    memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits - 0x4b400000u + 126u) << 23; // 0x4b400000 are the bits of magic
    memcpy(&scale, &bits, sizeof(scale));
    return q * scale;
}

#if defined(PRECISION_DOUBLE)
static inline floatS simd_exp(floatS x) { return exp(x); }
static inline floatS square_root(floatS x) { return sqrt(x); }
#else
static inline floatS simd_exp(floatS x) { return simd_exp_float(x); }
static inline floatS square_root(floatS x) { return sqrtf(x); } // one instruction under -fno-math-errno
#endif

// 1 / (1 + exp(-x)), and one minus it, both without cancellation and without overflow.
static inline floatS sigmoid(floatS x, floatS *one_minus) {
    floatS e = simd_exp(x < 0 ? x : -x), larger = 1 / (1 + e), smaller = e * larger;
    *one_minus = x < 0 ? larger : smaller;
    return x < 0 ? smaller : larger;
}

/*
Sine and cosine of an angle given in fp32, |angle| < 2^31, to about 1e-13: enough to be rounded to fp32 afterwards.
The angle is reduced by the nearest multiple of pi/2. pi/2 stands in three parts, the first two of 22 bits, so that
n * part and the differences are exact for every n that occurs; then come the Taylor series, cut off below 1e-13.
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
