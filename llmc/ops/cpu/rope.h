/*
Rotary position embedding: in every head of x[n,heads,HD] the pair (x[i], x[i + R/2]) of the first R elements is turned
by the angle position * inverse_frequency[i], and scaled by a factor. The angle, its sine and its cosine, and these
times the factor, are rounded to fp32 in every build, as transformers does: models are trained with these very angles.
*/
#ifndef LLMC_CPU_ROPE_H
#define LLMC_CPU_ROPE_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "simd_math.h"

enum { ROPE_PAIRS = 64 }; // pairs turned at a time; all of them up to HD = 128

// factor times sine and cosine of position * inverse_frequency[0..pairs); direction -1 turns back
static void rope_angles(floatS *cosine, floatS *sine, int32_t position, const float *inverse_frequency, size_t pairs,
                        float factor, float direction) {
    float p = (float)position;
#pragma omp simd
    for (size_t i = 0; i < pairs; i++) {
        double s, c;
        simd_sincos(p * inverse_frequency[i], &s, &c);
        cosine[i] = (floatS)(factor * (float)c);
        sine[i] = (floatS)(direction * factor * (float)s);
    }
}

// pairs (a[i], b[i]) turned by angles of that cosine and sine, of arrays that are filled up to whole vectors
VECTOR_INLINE void rope_turn(floatX *a, floatX *b, const floatS *cosine, const floatS *sine, size_t pairs) {
    for (size_t i = 0; i < pairs; i += VECTOR_LANES) {
        const Vector xa = vector_load_first(a + i, pairs - i, 0), xb = vector_load_first(b + i, pairs - i, 0);
        const Vector c = vector_load(cosine + i), s = vector_load(sine + i);
        vector_store_first(a + i, xa * c - xb * s, pairs - i);
        vector_store_first(b + i, xb * c + xa * s, pairs - i);
    }
}

static void cpu_rope(Stored *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                     size_t HD, size_t R, float factor, int back) {
    const size_t half = R / 2;
#pragma omp parallel for schedule(static) if (n * heads * R >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        floatS cosine[ROPE_PAIRS] = {0}, sine[ROPE_PAIRS] = {0};
        for (size_t first = 0; first < half; first += ROPE_PAIRS) {
            size_t pairs = min_size(ROPE_PAIRS, half - first);
            rope_angles(cosine, sine, position[t], inverse_frequency + first, pairs, factor, back ? -1 : 1);
            for (size_t head = 0; head < heads; head++) {
                floatX *a = (floatX *)x + (t * heads + head) * HD + first;
                rope_turn(a, a + half, cosine, sine, pairs);
            }
        }
    }
}

#endif
