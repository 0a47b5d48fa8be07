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

// Adds 16 random bits below the last kept bit, then truncates. Infinities and NaN are rounded to nearest.
__device__ inline void set_rounded(Bf16 *x, float value, uint64_t key, uint32_t index) {
    uint32_t bits, noise = adamw_noise(key, index);
    memcpy(&bits, &value, sizeof(bits));
    x->bits = (bits & 0x7f800000u) == 0x7f800000u ? bf16_nearest(value) : (uint16_t)((bits + noise) >> 16);
}

// Updates `weights`. Also stores them rounded to nearest in `rounded`, unless it is NULL.
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

// ---- moments in 8 bits: a warp takes a block of elements that share scales ------------------------------------------
// value[k][c]: what code c decodes to. first[k][c]: first point of QuantScales' grid that encodes to c or more. k: 0 m,
// 1 v
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

// Returns the code of a value (llmc/ops/cpu/adamw.h). inverse: 1 / the block's scale, or 0. The grid point is the whole
// part of `at`; `at` need not be truncated, because it is compared only with whole numbers.
__device__ inline uint8_t moment_code(float value, float inverse, const float *first) {
    const float at = (rounded_product(value, inverse) + 1) * 32767.5f + 0.5f;
    unsigned bytes = 0; // bytes of first[] below the code found so far
#pragma unroll
    for (unsigned step = 128; step; step /= 2)
        if (*(const float *)((const char *)(first + step) + bytes) <= at) bytes += step * sizeof(float);
    return (uint8_t)(bytes / sizeof(float));
}

template <typename T, typename G, int W>
__global__ void __launch_bounds__(LOOP_THREADS, W > 1 ? 4 : 1)
    adamw_8_bits_kernel(T *weights, floatX *rounded, const G *gradient, uint8_t *m, uint8_t *v, float *m_scales,
                        float *v_scales, size_t before, size_t count, size_t blocks, AdamWFactors f, MomentMaps maps) {
    constexpr unsigned PACKS = MOMENT_BLOCK / (LANES * W), WARPS = LOOP_THREADS / LANES;
    SHARED(float, value_m, 256);
    SHARED(float, value_v, 256);
    SHARED(float, first_m, 256);
    SHARED(float, first_v, 256);
    const unsigned thread = threadIdx.x, lane = thread % LANES;
    value_m[thread] = maps.value[0][thread], value_v[thread] = maps.value[1][thread];
    first_m[thread] = (float)maps.first[0][thread], first_v[thread] = (float)maps.first[1][thread];
    __syncthreads();
    for (size_t block = blockIdx.x * WARPS + thread / LANES; block < blocks; block += gridDim.x * WARPS) {
        const size_t begin = block ? block * MOMENT_BLOCK - before : 0, next = (block + 1) * MOMENT_BLOCK - before;
        const size_t place = f.first + begin; // the block's elements share a key
        const unsigned length = (unsigned)((next < count ? next : count) - begin);
        const uint64_t key = adamw_key(&f, ADAMW_W, place);
        const float m_scale = m_scales[block], v_scale = v_scales[block];
        Pack<T, W> w[PACKS];
        Pack<G, W> g[PACKS];
        Pack<uint8_t, W> m_codes[PACKS], v_codes[PACKS];
        float new_m[PACKS][W] = {}, new_v[PACKS][W] = {}, most_m = 0, most_v = 0;
        const auto for_packs = [&](auto f) { // calls f for each of this lane's packs
#pragma unroll
            for (unsigned p = 0; p < PACKS; p++)
                if (const unsigned first = (p * LANES + lane) * W; first < length) f(p, first);
        };
        for_packs([&](unsigned p, unsigned first) {
            w[p] = pack_read<W>(weights + begin + first), g[p] = pack_read<W>(gradient + begin + first);
            m_codes[p] = pack_read<W>(m + begin + first), v_codes[p] = pack_read<W>(v + begin + first);
        });
        for_packs([&](unsigned p, unsigned first) {
            Pack<floatX, W> nearest;
            for (int j = 0; j < W; j++) {
                const float scaled = f.gradient_scale * load(g[p].x[j]);
                new_m[p][j] = f.beta1 * (value_m[m_codes[p].x[j]] * m_scale) + f.one_minus_beta1 * scaled;
                new_v[p][j] = f.beta2 * (value_v[v_codes[p].x[j]] * v_scale) + f.one_minus_beta2 * scaled * scaled;
                float x = load(w[p].x[j]);
                x -= f.decay * x + f.rate * new_m[p][j] / (sqrtf(new_v[p][j]) * f.root_correction + f.epsilon);
                set_rounded(&w[p].x[j], x, key, (uint32_t)(place % ADAMW_BLOCK) + first + (uint32_t)j);
                nearest.x[j] = store(x);
                most_m = fmaxf(most_m, fabsf(new_m[p][j])), most_v = fmaxf(most_v, fabsf(new_v[p][j]));
            }
            pack_write(weights + begin + first, w[p]);
            if (rounded) pack_write(rounded + begin + first, nearest);
        });
        most_m = warp_max(most_m), most_v = warp_max(most_v);
        const float inverse_m = most_m > 0 ? 1 / most_m : 0, inverse_v = most_v > 0 ? 1 / most_v : 0;
        for_packs([&](unsigned p, unsigned first) {
            for (int j = 0; j < W; j++) {
                m_codes[p].x[j] = most_m > 0 ? moment_code(new_m[p][j], inverse_m, first_m) : 0;
                v_codes[p].x[j] = most_v > 0 ? moment_code(new_v[p][j], inverse_v, first_v) : 0;
            }
            pack_write(m + begin + first, m_codes[p]);
            pack_write(v + begin + first, v_codes[p]);
        });
        if (lane == 0) m_scales[block] = most_m, v_scales[block] = most_v;
    }
}

static void cuda_adamw(Stored *w, float *master, const void *gradient, DType gradient_type, void *m, void *v,
                       DType moment_type, size_t count, const AdamW *step) {
    const AdamWFactors f = adamw_factors(step);
    void *const weights = master ? (void *)master : (void *)w; // the weights to update
    floatX *const rounded = master ? (floatX *)w : NULL;
    const bool packed =
        count % ADAMW_PACK == 0 && f.first % ADAMW_PACK == 0 && all_aligned(weights, rounded, gradient, m, v);
    if (moment_type == DTYPE_INT8) {
        static_assert(LOOP_THREADS == 256, "a thread for each code");
        const size_t blocks = moment_blocks(moment_type, step, count);
        with_type(master ? DTYPE_FP32 : FLOATX_DTYPE, "adamw", [&]<typename T>(T *) {
            with_type(gradient_type, "adamw", [&]<typename G>(G *) {
                with_width<float>(packed && step->block_first % ADAMW_PACK == 0, [&](auto W) {
                    LAUNCH((adamw_8_bits_kernel<T, G, W>), loop_grid(blocks * LANES), LOOP_THREADS, 0)
                    ((T *)weights, rounded, (const G *)gradient, (uint8_t *)m, (uint8_t *)v, step->m_scales,
                     step->v_scales, step->block_first, count, blocks, f, moment_maps());
                });
            });
        });
        return;
    }
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
