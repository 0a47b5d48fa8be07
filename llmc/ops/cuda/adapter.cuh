/*
Scaling and dropout of adapters (LoRA); their products are in linear.cuh. Dropout keeps the same elements as op set
"cpu": a function of the seed and an element's index in the stream. Bytes moved per element: 2 s; 3 s if dropout
accumulates.
*/
#ifndef LLMC_CUDA_ADAPTER_CUH
#define LLMC_CUDA_ADAPTER_CUH
#include "llmc/base/random.h"
#include "platform.cuh"

template <typename T, int W> __global__ void scale_kernel(T *x, float factor, size_t packs) {
    FOR_EACH_PACK(i, packs) {
        Pack<T, W> pack = pack_read<W>(x + i * W);
        for (int j = 0; j < W; j++) set_value(&pack.x[j], load(pack.x[j]) * factor);
        pack_write(x + i * W, pack);
    }
}

static void cuda_scale(void *x, DType type, double factor, size_t count) {
    with_type(type, "scale", [&]<typename T>(T *) {
        with_width<T>(count % full_pack<T> == 0 && all_aligned(x), [&](auto W) {
            LAUNCH((scale_kernel<T, W>), loop_grid(count / W), LOOP_THREADS, 0)
            ((T *)x, (float)factor, count / W);
        });
    });
}

// Scales with dropout. first: the stream's index of element 0
template <int W>
__global__ void dropout_kernel(floatX *out, const floatX *in, size_t packs, uint64_t first, float kept, uint64_t seed,
                               uint64_t threshold, int accumulate) {
    FOR_EACH_PACK(i, packs) {
        const Pack<floatX, W> pack = pack_read<W>(in + i * W);
        Pack<floatX, W> result;
        if (accumulate) result = pack_read<W>(out + i * W);
        for (int j = 0; j < W; j++) {
            const float x = dropout_keeps(seed, first + i * W + j, threshold) ? load(pack.x[j]) * kept : 0.0f;
            result.x[j] = store(accumulate ? load(result.x[j]) + x : x);
        }
        pack_write(out + i * W, result);
    }
}

static void cuda_dropout(Stored *out, const Stored *in, size_t n, size_t width, size_t first_row, double rate,
                         uint64_t seed, int accumulate) {
    const size_t count = n * width;
    with_width<floatX>(count % full_pack<floatX> == 0 && all_aligned(out, in), [&](auto W) {
        LAUNCH((dropout_kernel<W>), loop_grid(count / W), LOOP_THREADS, 0)
        ((floatX *)out, (const floatX *)in, count / W, first_row * width, (float)(1 / (1 - rate)), seed,
         dropout_threshold(rate), accumulate);
    });
}

#endif
