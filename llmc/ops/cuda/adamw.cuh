/*
AdamW of op set "cuda": the formulas, and to the bit the random numbers, of llmc/ops/cpu/adamw.h. w (without a master
copy), m and v are rounded stochastically where they are bf16. A thread takes ADAMW_PACK elements, so that every type
is read in one access. Bytes moved per element: 2 (w + m + v) + gradient, and 2 * 4 more with a master copy.
*/
#ifndef LLMC_CUDA_ADAMW_CUH
#define LLMC_CUDA_ADAMW_CUH
#include "llmc/base/random.h"
#include "elements.cuh"

constexpr int ADAMW_PACK = 4;
constexpr size_t ADAMW_BLOCK = 1024; // elements that share a key of the random numbers; op set "cpu" has the same

enum { ADAMW_W, ADAMW_M, ADAMW_V, ADAMW_ROLES };

struct AdamWFactors {
    float gradient_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, decay, rate, root_correction, epsilon;
    uint64_t seed, stream; // of the random numbers
    size_t first;          // place of element 0 in its parameter
};

static AdamWFactors adamw_factors(const AdamW *step) {
    AdamWFactors f;
    f.gradient_scale = (float)step->gradient_scale;
    f.beta1 = (float)step->beta1, f.beta2 = (float)step->beta2;
    f.one_minus_beta1 = (float)(1 - step->beta1), f.one_minus_beta2 = (float)(1 - step->beta2);
    f.decay = (float)(step->learning_rate * step->weight_decay);
    f.rate = (float)(step->learning_rate / (1 - pow(step->beta1, (double)step->step)));
    f.root_correction = (float)(1 / sqrt(1 - pow(step->beta2, (double)step->step)));
    f.epsilon = (float)step->epsilon;
    f.seed = step->seed, f.stream = (uint64_t)step->step * ADAMW_ROLES, f.first = step->first;
    return f;
}

__device__ inline uint32_t mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

__device__ inline void set_rounded(float *x, float value, uint64_t, uint32_t) { *x = value; }

// Adds 16 random bits below the last bit that stays, then cuts; infinities and NaN are kept by rounding to nearest.
__device__ inline void set_rounded(Bf16 *x, float value, uint64_t key, uint32_t index) {
    uint32_t bits, noise = mix32(mix32(index ^ (uint32_t)key) ^ (uint32_t)(key >> 32)) >> 16;
    memcpy(&bits, &value, sizeof(bits));
    x->bits = (bits & 0x7f800000u) == 0x7f800000u ? bf16_nearest(value) : (uint16_t)((bits + noise) >> 16);
}

// Elements [first, first + W): the step is applied to `weights`; rounded gets their rounding where it is not NULL.
template <typename T, typename G, typename M, int W>
__global__ void adamw_kernel(T *weights, floatX *rounded, const G *gradient, M *m, M *v, size_t packs, AdamWFactors f) {
    FOR_EACH_PACK(i, packs) {
        const size_t first = i * W, place = f.first + first, block = place / ADAMW_BLOCK;
        const uint64_t key_w = random_bits(f.seed, f.stream + ADAMW_W, block),
                       key_m = random_bits(f.seed, f.stream + ADAMW_M, block),
                       key_v = random_bits(f.seed, f.stream + ADAMW_V, block);
        Pack<T, W> w = pack_read<W>(weights + first);
        Pack<M, W> pm = pack_read<W>(m + first), pv = pack_read<W>(v + first);
        const Pack<G, W> pg = pack_read<W>(gradient + first);
        Pack<floatX, W> nearest;
        for (int j = 0; j < W; j++) {
            const uint32_t index = (uint32_t)(place % ADAMW_BLOCK) + (uint32_t)j;
            const float g = f.gradient_scale * value_of(pg.x[j]);
            const float new_m = f.beta1 * value_of(pm.x[j]) + f.one_minus_beta1 * g;
            const float new_v = f.beta2 * value_of(pv.x[j]) + f.one_minus_beta2 * g * g;
            float x = value_of(w.x[j]);
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

template <typename T>
static void adamw_weights(T *weights, floatX *rounded, const void *gradient, DType gradient_type, void *m, void *v,
                          DType moment_type, size_t count, const AdamWFactors &f) {
    with_type(gradient_type, "adamw", [&](auto gradient_element) {
        with_type(moment_type, "adamw", [&](auto moment_element) {
            typedef std::remove_pointer_t<decltype(gradient_element)> G;
            typedef std::remove_pointer_t<decltype(moment_element)> M;
            const bool packed =
                count % ADAMW_PACK == 0 && f.first % ADAMW_PACK == 0 && all_aligned(weights, rounded, gradient, m, v);
            const auto launch_with = [&](auto W) {
                LAUNCH((adamw_kernel<T, G, M, W>), loop_grid(count / W), LOOP_THREADS, 0)
                (weights, rounded, (const G *)gradient, (M *)m, (M *)v, count / W, f);
            };
            if (packed)
                launch_with(Width<ADAMW_PACK>());
            else
                launch_with(Width<1>());
        });
    });
}

static void cuda_adamw(Stored *w, float *master, const void *gradient, DType gradient_type, void *m, void *v,
                       DType moment_type, size_t count, const AdamW *step) {
    const AdamWFactors f = adamw_factors(step);
    if (master)
        adamw_weights(master, (floatX *)w, gradient, gradient_type, m, v, moment_type, count, f);
    else if (FLOATX_DTYPE == DTYPE_BF16)
        adamw_weights((Bf16 *)w, NULL, gradient, gradient_type, m, v, moment_type, count, f);
    else
        adamw_weights((float *)w, NULL, gradient, gradient_type, m, v, moment_type, count, f);
}

#endif
