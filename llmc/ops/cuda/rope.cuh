/*
Rotary position embedding of op set "cuda", in place on the first R elements of every head of x[n,heads,HD]: the pair
(i, i + R/2), or (2i, 2i + 1), is rotated by the angle position * inverse_frequency[i] and scaled, rounded to fp32 as in
llmc/ops/cpu/rope.h. A thread computes the sine and cosine of one pair of one token and rotates that pair in up to
ROPE_HEADS heads. Bytes moved per element: 2s.
*/
#ifndef LLMC_CUDA_ROPE_CUH
#define LLMC_CUDA_ROPE_CUH
#include "platform.cuh"
#include "llmc/ops/formulas.h"

constexpr size_t ROPE_HEADS = 8; // heads of a thread, which share a sine and a cosine

// direction: 1 forward, -1 back
__global__ void rope_kernel(floatX *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                            size_t HD, size_t R, Rotation how, float direction) {
    const size_t half = R / 2, groups = (heads + ROPE_HEADS - 1) / ROPE_HEADS;
    FOR_EACH_PACK(i, n * groups * half) {
        const size_t pair = i % half, group = i / half % groups, t = i / half / groups;
        const size_t end = (group + 1) * ROPE_HEADS < heads ? (group + 1) * ROPE_HEADS : heads;
        float sine, cosine;
        sincosf((float)position[t] * inverse_frequency[pair], &sine, &cosine);
        const float scale = rotation_scale(how, position[t]);
        cosine *= how.factor * scale;
        sine *= direction * how.factor * scale;
        for (size_t head = group * ROPE_HEADS; head < end; head++) {
            floatX *a = x + (t * heads + head) * HD + (how.interleaved ? 2 * pair : pair);
            floatX *b = a + (how.interleaved ? 1 : half);
            const float xa = load(*a), xb = load(*b);
            *a = store(xa * cosine - xb * sine);
            *b = store(xb * cosine + xa * sine);
        }
    }
}

static void cuda_rope(Stored *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                      size_t HD, size_t R, Rotation how, int back) {
    LAUNCH((rope_kernel), loop_grid(n * blocks_for(heads, ROPE_HEADS) * (R / 2)), LOOP_THREADS, 0)
    ((floatX *)x, position, inverse_frequency, n, heads, HD, R, how, back ? -1.0f : 1.0f);
}

#endif
