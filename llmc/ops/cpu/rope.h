/*
Rotary position embedding: in every head of x[n,heads,HD] the pair (x[i], x[i + HD/2]) is turned by the angle position
* inverse_frequency[i], and scaled by a factor. The angle, its sine and its cosine, and these times the factor, are
rounded to fp32 in every build, as transformers does: models are trained with these very angles.
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

static void cpu_rope(Stored *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                     size_t HD, float factor, int back) {
    size_t half = HD / 2;
#pragma omp parallel for schedule(static) if (n * heads * HD >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        floatS cosine[ROPE_PAIRS], sine[ROPE_PAIRS];
        for (size_t first = 0; first < half; first += ROPE_PAIRS) {
            size_t pairs = min_size(ROPE_PAIRS, half - first);
            rope_angles(cosine, sine, position[t], inverse_frequency + first, pairs, factor, back ? -1 : 1);
            for (size_t head = 0; head < heads; head++) {
                floatX *a = (floatX *)x + (t * heads + head) * HD + first, *b = a + half;
#pragma omp simd
                for (size_t i = 0; i < pairs; i++) {
                    floatS xa = load(a[i]), xb = load(b[i]);
                    a[i] = store(xa * cosine[i] - xb * sine[i]);
                    b[i] = store(xb * cosine[i] + xa * sine[i]);
                }
            }
        }
    }
}

#endif
