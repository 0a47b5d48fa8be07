/*
Rotary position embedding of op set "cuda", in place on the first R elements of every head of x[n,heads,HD]: the pair
(i, i + R/2), or (2i, 2i + 1), is rotated by the angle position * inverse_frequency[i] and scaled, rounded to fp32 as in
llmc/ops/cpu/rope.h. A thread computes the sines and cosines of W pairs of one token. It rotates these pairs in up to
ROPE_HEADS heads, and reads ROPE_BATCH heads at once. Bytes moved per element: 2s.
*/
#ifndef LLMC_CUDA_ROPE_CUH
#define LLMC_CUDA_ROPE_CUH
#include "platform.cuh"
#include "llmc/ops/formulas.h"

constexpr size_t ROPE_HEADS = 8, ROPE_BATCH = 2; // heads of a thread, which share sines and cosines

// Rotates pairs. Two packs a and b hold pairs (i, i + R/2) as halves; INTERLEAVED: they are contiguous and hold pairs
// (2i, 2i + 1). direction: 1 forward, -1 back
template <int W, bool INTERLEAVED>
__global__ void rope_kernel(floatX *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                            size_t HD, size_t R, Rotation how, float direction) {
    const size_t half = R / 2, packs = half / W, groups = (heads + ROPE_HEADS - 1) / ROPE_HEADS;
    FOR_EACH_PACK(i, n * groups * packs) {
        const size_t pair = i % packs * W, group = i / packs % groups, t = i / packs / groups;
        const size_t end = (group + 1) * ROPE_HEADS < heads ? (group + 1) * ROPE_HEADS : heads;
        const size_t apart = INTERLEAVED ? W : half;
        const float scale = how.factor * rotation_scale(how, position[t]);
        float sine[W], cosine[W];
        for (int j = 0; j < W; j++) {
            sincosf((float)position[t] * inverse_frequency[pair + j], &sine[j], &cosine[j]);
            cosine[j] *= scale;
            sine[j] *= direction * scale;
        }
        for (size_t head = group * ROPE_HEADS; head < end; head += ROPE_BATCH) {
            floatX *const at = x + (t * heads + head) * HD + (INTERLEAVED ? 2 * pair : pair);
            Pack<floatX, W> in[ROPE_BATCH][2];
            for (size_t h = 0; h < ROPE_BATCH; h++)
                for (int k = 0; k < 2; k++)
                    in[h][k] = pack_read<W>(at + (head + h < end ? h * HD : 0) + (k ? apart : 0));
            for (size_t h = 0; h < ROPE_BATCH && head + h < end; h++) {
                Pack<floatX, W> out[2];
                for (int j = 0; j < W; j++) {
                    const int a = INTERLEAVED ? 2 * j : j, b = INTERLEAVED ? 2 * j + 1 : W + j;
                    const float xa = load(in[h][a / W].x[a % W]), xb = load(in[h][b / W].x[b % W]);
                    out[a / W].x[a % W] = store(xa * cosine[j] - xb * sine[j]);
                    out[b / W].x[b % W] = store(xb * cosine[j] + xa * sine[j]);
                }
                for (int k = 0; k < 2; k++) pack_write(at + h * HD + (k ? apart : 0), out[k]);
            }
        }
    }
}

static void cuda_rope(Stored *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                      size_t HD, size_t R, Rotation how, int back) {
    const bool packed = HD % full_pack<floatX> == 0 && R / 2 % full_pack<floatX> == 0 && all_aligned(x);
    with_width<floatX>(packed, [&](auto W) {
        with_flag(how.interleaved != 0, [&](auto INTERLEAVED) {
            LAUNCH((rope_kernel<W, INTERLEAVED>), loop_grid(n * blocks_for(heads, ROPE_HEADS) * (R / 2 / W)),
                   LOOP_THREADS, 0)
            ((floatX *)x, position, inverse_frequency, n, heads, HD, R, how, back ? -1.0f : 1.0f);
        });
    });
}

#endif
