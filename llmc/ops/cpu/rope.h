/*
Rotary position embedding: in every head of x[n,heads,HD] the pair (x[i], x[i + R/2]), or (x[2i], x[2i + 1]), of the
first R elements is rotated by the angle position * inverse_frequency[i], and scaled by a factor. In every build these
are rounded to fp32, as transformers does, because models are trained with these angles: the angle, its sine and cosine,
both times the factor, and the scale of later queries.
*/
#ifndef LLMC_CPU_ROPE_H
#define LLMC_CPU_ROPE_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "llmc/ops/formulas.h"
#include "simd_math.h"

enum { ROPE_PAIRS = 64 }; // pairs rotated at a time; all of them up to HD = 128

// Computes sine and cosine of position * inverse_frequency[0..pairs), scaled; direction -1 rotates back.
static void rope_angles(floatS *cosine, floatS *sine, int32_t position, const float *inverse_frequency, size_t pairs,
                        Rotation how, float direction) {
    const float p = (float)position;
    const floatS scale = rotation_scale(how, position);
#pragma omp simd
    for (size_t i = 0; i < pairs; i++) {
        double s, c;
        simd_sincos(p * inverse_frequency[i], &s, &c);
        cosine[i] = scale * (floatS)(how.factor * (float)c);
        sine[i] = scale * (floatS)(direction * how.factor * (float)s);
    }
}

// Rotates pairs (a[i], b[i]) by the angles of cosine and sine, arrays padded to whole vectors.
VECTOR_INLINE void rope_turn(floatX *a, floatX *b, const floatS *cosine, const floatS *sine, size_t pairs) {
    for (size_t i = 0; i < pairs; i += VECTOR_LANES) {
        const Vector xa = vector_load_first(a + i, pairs - i, 0), xb = vector_load_first(b + i, pairs - i, 0);
        const Vector c = vector_load(cosine + i), s = vector_load(sine + i);
        vector_store_first(a + i, xa * c - xb * s, pairs - i);
        vector_store_first(b + i, xb * c + xa * s, pairs - i);
    }
}

// Rotates neighbours: the pairs (x[2i], x[2i + 1]).
static inline void rope_turn_neighbours(floatX *x, const floatS *cosine, const floatS *sine, size_t pairs) {
#pragma omp simd
    for (size_t i = 0; i < pairs; i++) {
        const floatS a = load(x[2 * i]), b = load(x[2 * i + 1]);
        x[2 * i] = store(a * cosine[i] - b * sine[i]);
        x[2 * i + 1] = store(b * cosine[i] + a * sine[i]);
    }
}

static void cpu_rope(Stored *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                     size_t HD, size_t R, Rotation how, int back) {
    const size_t half = R / 2;
#pragma omp parallel for schedule(static) if (n * heads * R >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        floatS cosine[ROPE_PAIRS] = {0}, sine[ROPE_PAIRS] = {0};
        for (size_t first = 0; first < half; first += ROPE_PAIRS) {
            size_t pairs = min_size(ROPE_PAIRS, half - first);
            rope_angles(cosine, sine, position[t], inverse_frequency + first, pairs, how, back ? -1 : 1);
            for (size_t head = 0; head < heads; head++) {
                floatX *const of_head = (floatX *)x + (t * heads + head) * HD, *a = of_head + first;
                if (how.interleaved)
                    rope_turn_neighbours(of_head + 2 * first, cosine, sine, pairs);
                else
                    rope_turn(a, a + half, cosine, sine, pairs);
            }
        }
    }
}

#endif
