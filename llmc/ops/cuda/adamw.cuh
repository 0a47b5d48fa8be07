/*
AdamW of op set "cuda": the formulas and the same random bits as llmc/ops/cpu/adamw.h. w (without a master copy), m and
v in bf16 are rounded stochastically. A thread takes ADAMW_PACK elements, so that every type is read in one access.
Bytes moved per element: 2 (w + m + v) + gradient, and 2 * 4 more with a master copy; m and v in 8 bits: 2 (1 + 4/256)
each.
*/
#ifndef LLMC_CUDA_ADAMW_CUH
#define LLMC_CUDA_ADAMW_CUH
#include "platform.cuh"
#include "llmc/base/quantise.h"
#include "llmc/ops/formulas.h"

constexpr int ADAMW_PACK = full_pack<float>;

__device__ inline void set_rounded(float *x, float value, uint64_t, uint32_t) { *x = value; }

// Adds 16 random bits below the last kept bit, then truncates; infinities and NaN are rounded to nearest.
__device__ inline void set_rounded(Bf16 *x, float value, uint64_t key, uint32_t index) {
    uint32_t bits, noise = adamw_noise(key, index);
    memcpy(&bits, &value, sizeof(bits));
    x->bits = (bits & 0x7f800000u) == 0x7f800000u ? bf16_nearest(value) : (uint16_t)((bits + noise) >> 16);
}

// Updates `weights`; rounded = their rounding unless it is NULL.
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

// ---- moments in 8 bits: a thread block takes a block of elements, a thread one --------------------------------------
// For m and v: values of the codes, and the lowest point of QuantScales' grid with that code or a greater one
struct MomentMaps {
    float value[2][256];
    uint16_t first[2][256];
};

static const MomentMaps &moment_maps() {
    static MomentMaps maps;
    if (maps.value[0][255] != 0) return maps;
    for (int of_v = 0; of_v < 2; of_v++) {
        const QuantScales *const s = quant_dynamic(!of_v);
        memcpy(maps.value[of_v], s->map, sizeof(s->map));
        for (unsigned code = 0, point = 0; code < 256; code++) {
            while (s->nearest[point] < code) point++;
            maps.first[of_v][code] = (uint16_t)point;
        }
    }
    return maps;
}

// Returns the code of a value (llmc/ops/cpu/adamw.h); inverse: 1 / the block's scale.
__device__ inline uint8_t moment_code(float value, float inverse, const uint16_t *first) {
    const float at = (rounded_product(value, inverse) + 1) * 32767.5f + 0.5f;
    const int point = at > 0 ? (at < (float)(QUANT_GRID - 1) ? (int)at : QUANT_GRID - 1) : 0;
    unsigned code = 0;
    for (unsigned step = 128; step; step /= 2)
        if (first[code + step] <= point) code += step;
    return (uint8_t)code;
}

// Returns the largest x of the block's threads; partial[MOMENT_BLOCK / LANES] may be reused after the next barrier.
__device__ inline float moment_block_max(float x, float *partial) {
    x = warp_max(x);
    if (threadIdx.x % LANES == 0) partial[threadIdx.x / LANES] = x;
    __syncthreads();
    return warp_max(partial[threadIdx.x % (MOMENT_BLOCK / LANES)]);
}

template <typename T, typename G>
__global__ void adamw_8_bits_kernel(T *weights, floatX *rounded, const G *gradient, uint8_t *m, uint8_t *v,
                                    float *m_scales, float *v_scales, size_t before, size_t count, size_t blocks,
                                    AdamWFactors f, MomentMaps maps) {
    SHARED(float, value_m, 256);
    SHARED(float, value_v, 256);
    SHARED(uint16_t, first_m, 256);
    SHARED(uint16_t, first_v, 256);
    SHARED(float, partial, 2 * MOMENT_BLOCK / LANES);
    const unsigned thread = threadIdx.x;
    value_m[thread] = maps.value[0][thread], value_v[thread] = maps.value[1][thread];
    first_m[thread] = maps.first[0][thread], first_v[thread] = maps.first[1][thread];
    for (size_t block = blockIdx.x; block < blocks; block += gridDim.x) {
        const size_t begin = block ? block * MOMENT_BLOCK - before : 0, i = begin + thread;
        const size_t next = (block + 1) * MOMENT_BLOCK - before;
        const bool is_there = i < next && i < count;
        const size_t place = f.first + begin; // the block's elements share a key
        float new_m = 0, new_v = 0;
        __syncthreads(); // the maps are loaded; partial is free
        if (is_there) {
            const float g = f.gradient_scale * load(gradient[i]);
            new_m = f.beta1 * (value_m[m[i]] * m_scales[block]) + f.one_minus_beta1 * g;
            new_v = f.beta2 * (value_v[v[i]] * v_scales[block]) + f.one_minus_beta2 * g * g;
            float x = load(weights[i]);
            x -= f.decay * x + f.rate * new_m / (sqrtf(new_v) * f.root_correction + f.epsilon);
            set_rounded(&weights[i], x, adamw_key(&f, ADAMW_W, place), (uint32_t)(place % ADAMW_BLOCK) + thread);
            if (rounded) rounded[i] = store(x);
        }
        const float most_m = moment_block_max(fabsf(new_m), partial);
        const float most_v = moment_block_max(fabsf(new_v), partial + MOMENT_BLOCK / LANES);
        if (is_there) {
            m[i] = most_m > 0 ? moment_code(new_m, 1 / most_m, first_m) : 0;
            v[i] = most_v > 0 ? moment_code(new_v, 1 / most_v, first_v) : 0;
        }
        if (thread == 0) m_scales[block] = most_m, v_scales[block] = most_v;
    }
}

static void cuda_adamw(Stored *w, float *master, const void *gradient, DType gradient_type, void *m, void *v,
                       DType moment_type, size_t count, const AdamW *step) {
    const AdamWFactors f = adamw_factors(step);
    void *const weights = master ? (void *)master : (void *)w; // the weights that are updated
    floatX *const rounded = master ? (floatX *)w : NULL;
    if (moment_type == DTYPE_INT8) {
        static_assert(LOOP_THREADS == MOMENT_BLOCK && LOOP_THREADS == 256, "a thread for each element and each code");
        const size_t blocks = moment_blocks(moment_type, step, count);
        with_type(master ? DTYPE_FP32 : FLOATX_DTYPE, "adamw", [&]<typename T>(T *) {
            with_type(gradient_type, "adamw", [&]<typename G>(G *) {
                LAUNCH((adamw_8_bits_kernel<T, G>), loop_grid(blocks * LOOP_THREADS), LOOP_THREADS, 0)
                ((T *)weights, rounded, (const G *)gradient, (uint8_t *)m, (uint8_t *)v, step->m_scales, step->v_scales,
                 step->block_first, count, blocks, f, moment_maps());
            });
        });
        return;
    }
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
