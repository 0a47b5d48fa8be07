/*
AdamW of op set "cuda": the formulas, and to the bit the random numbers, of llmc/ops/cpu/adamw.h. w (without a master
copy), m and v are rounded stochastically where they are bf16. A thread takes ADAMW_PACK elements, so that every type
is read in one access. Bytes moved per element: 2 (w + m + v) + gradient, and 2 * 4 more with a master copy.
*/
#ifndef LLMC_CUDA_ADAMW_CUH
#define LLMC_CUDA_ADAMW_CUH
#include "platform.cuh"
#include "llmc/ops/formulas.h"

constexpr int ADAMW_PACK = full_pack<float>;

__device__ inline void set_rounded(float *x, float value, uint64_t, uint32_t) { *x = value; }

// Adds 16 random bits below the last bit that stays, then cuts; infinities and NaN are kept by rounding to nearest.
__device__ inline void set_rounded(Bf16 *x, float value, uint64_t key, uint32_t index) {
    uint32_t bits, noise = adamw_noise(key, index);
    memcpy(&bits, &value, sizeof(bits));
    x->bits = (bits & 0x7f800000u) == 0x7f800000u ? bf16_nearest(value) : (uint16_t)((bits + noise) >> 16);
}

// Elements [first, first + W): the step is applied to `weights`; rounded gets their rounding where it is not NULL.
template <typename T, typename G, typename M, int W>
__global__ void adamw_kernel(T *weights, floatX *rounded, const G *gradient, M *m, M *v, size_t packs, AdamWFactors f) {
    FOR_EACH_PACK(i, packs) {
        const size_t first = i * W, place = f.first + first;
        const uint64_t key_w = adamw_key(&f, ADAMW_W, place), key_m = adamw_key(&f, ADAMW_M, place),
                       key_v = adamw_key(&f, ADAMW_V, place);
        Pack<T, W> w = pack_read<W>(weights + first);
        Pack<M, W> pm = pack_read<W>(m + first), pv = pack_read<W>(v + first);
        const Pack<G, W> pg = pack_read<W>(gradient + first);
        Pack<floatX, W> nearest;
        for (int j = 0; j < W; j++) {
            const uint32_t index = (uint32_t)(place % ADAMW_BLOCK) + (uint32_t)j;
            const float g = f.gradient_scale * load(pg.x[j]);
            const float new_m = f.beta1 * load(pm.x[j]) + f.one_minus_beta1 * g;
            const float new_v = f.beta2 * load(pv.x[j]) + f.one_minus_beta2 * g * g;
            float x = load(w.x[j]);
            x -= f.decay * x + f.rate * new_m / (sqrtf(new_v) * f.root_correction + f.epsilon);
            set_rounded(&w.x[j], x, key_w, index);
            set_rounded(&pm.x[j], new_m, key_m, index);
            set_rounded(&pv.x[j], new_v, key_v, index);
            nearest.x[j] = store(x);
        }
        pack_write(weights + first, w);
        pack_write(m + first, pm);
        pack_write(v + first, pv);
        if (rounded) pack_write(rounded + first, nearest);
    }
}

static void cuda_adamw(Stored *w, float *master, const void *gradient, DType gradient_type, void *m, void *v,
                       DType moment_type, size_t count, const AdamW *step) {
    const AdamWFactors f = adamw_factors(step);
    void *const weights = master ? (void *)master : (void *)w; // what the step is applied to
    floatX *const rounded = master ? (floatX *)w : NULL;
    const bool packed =
        count % ADAMW_PACK == 0 && f.first % ADAMW_PACK == 0 && all_aligned(weights, rounded, gradient, m, v);
    with_type(master ? DTYPE_FP32 : FLOATX_DTYPE, "adamw", [&]<typename T>(T *) {
        with_type(gradient_type, "adamw", [&]<typename G>(G *) {
            with_type(moment_type, "adamw", [&]<typename M>(M *) {
                with_width<float>(packed, [&](auto W) {
                    LAUNCH((adamw_kernel<T, G, M, W>), loop_grid(count / W), LOOP_THREADS, 0)
                    ((T *)weights, rounded, (const G *)gradient, (M *)m, (M *)v, count / W, f);
                });
            });
        });
    });
}

#endif
