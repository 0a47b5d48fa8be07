/*
Adds a layer's fp32 sums over tokens to stored gradients, and computes the gradients' norm. Bytes moved per element:
round_sums and widen 4 + s; gradient_add 4 + 2 s of the gradient's type; sum_of_squares s.
*/
#ifndef LLMC_CUDA_GRADIENT_CUH
#define LLMC_CUDA_GRADIENT_CUH
#include "platform.cuh"

template <int W> __global__ void round_sums_kernel(floatX *out, const float *in, size_t packs) {
    FOR_EACH_PACK(i, packs) {
        constexpr int STEP = W < 4 ? 1 : 4;
        Pack<floatX, W> result;
        for (int j = 0; j < W; j += STEP) {
            const Pack<float, STEP> sums = pack_read<STEP>(in + i * W + j);
            for (int k = 0; k < STEP; k++) result.x[j + k] = store(sums.x[k]);
        }
        pack_write(out + i * W, result);
    }
}

static void cuda_round_sums(Stored *out, const Summed *in, size_t count) {
    with_width<floatX>(count % full_pack<floatX> == 0 && all_aligned(out, in), [&](auto W) {
        LAUNCH((round_sums_kernel<W>), loop_grid(count / W), LOOP_THREADS, 0)
        ((floatX *)out, (const float *)in, count / W);
    });
}

template <int W> __global__ void widen_kernel(float *out, const floatX *in, size_t packs) {
    FOR_EACH_PACK(i, packs) {
        const Pack<floatX, W> values = pack_read<W>(in + i * W);
        Pack<float, W> wide;
        for (int j = 0; j < W; j++) wide.x[j] = load(values.x[j]);
        pack_write(out + i * W, wide);
    }
}

static void cuda_widen(float *out, const Stored *in, size_t count) {
    with_width<float>(count % full_pack<float> == 0 && all_aligned(out, in), [&](auto W) {
        LAUNCH((widen_kernel<W>), loop_grid(count / W), LOOP_THREADS, 0)(out, (const floatX *)in, count / W);
    });
}

template <typename T, int W> __global__ void gradient_add_kernel(T *gradient, const float *in, size_t packs) {
    FOR_EACH_PACK(i, packs) {
        Pack<T, W> sum = pack_read<W>(gradient + i * W);
        const Pack<float, W> add = pack_read<W>(in + i * W);
        for (int j = 0; j < W; j++) set_value(&sum.x[j], load(sum.x[j]) + add.x[j]);
        pack_write(gradient + i * W, sum);
    }
}

static void cuda_gradient_add(void *gradient, DType type, const Summed *in, size_t count) {
    with_type(type, "gradient_add", [&]<typename T>(T *) {
        with_width<float>(count % full_pack<float> == 0 && all_aligned(gradient, in), [&](auto W) {
            LAUNCH((gradient_add_kernel<T, W>), loop_grid(count / W), LOOP_THREADS, 0)
            ((T *)gradient, (const float *)in, count / W);
        });
    });
}

// ---- the sum of squares: a part for each block ----------------------------------------------------------------------

template <typename T, int W> __global__ void squares_kernel(double *sums, const T *x, size_t packs) {
    SHARED(double, parts, LOOP_THREADS);
    double sum = 0;
    FOR_EACH_PACK(i, packs) {
        const Pack<T, W> pack = pack_read<W>(x + i * W);
        for (int j = 0; j < W; j++) sum += (double)load(pack.x[j]) * load(pack.x[j]);
    }
    parts[threadIdx.x] = sum;
    for (unsigned step = LOOP_THREADS / 2; step; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) parts[threadIdx.x] += parts[threadIdx.x + step];
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = parts[0];
}

static void cuda_sum_of_squares(double *sums, size_t parts, const void *x, DType type, size_t count) {
    with_type(type, "sum_of_squares", [&]<typename T>(T *) {
        with_width<T>(count % full_pack<T> == 0 && all_aligned(x), [&](auto W) {
            LAUNCH((squares_kernel<T, W>), (unsigned)parts, LOOP_THREADS, 0)(sums, (const T *)x, count / W);
        });
    });
}

#endif
