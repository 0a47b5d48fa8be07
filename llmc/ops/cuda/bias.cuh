/*
Column sums in op set "cuda", and a bias that cuBLASLt does not add; its gradient is dbias[OC] += column sums of
dout[n,OC]. A block sums a strip of columns, its warps every COLUMN_WARPS-th row each, COLUMN_ROWS of them read at a
time; rows are summed in groups: the rounding error grows with the number of groups plus a group's length. Bytes moved
per element: s.
*/
#ifndef LLMC_CUDA_BIAS_CUH
#define LLMC_CUDA_BIAS_CUH
#include "platform.cuh"

constexpr unsigned COLUMN_WARPS = 16, COLUMN_ROWS = 8;

namespace { // private to each program: dev/cuda/bench.cu includes this file together with the op set
template <typename T> __global__ void column_sums_kernel(float *sums, const T *x, size_t n, size_t C, size_t stride) {
    constexpr size_t GROUP = 64 / COLUMN_ROWS;
    SHARED(float, parts, COLUMN_WARPS *LANES);
    const size_t column = (size_t)blockIdx.x * LANES + threadIdx.x;
    float sum = 0.0f;
    for (size_t t = threadIdx.y; t < n && column < C;) {
        float group = 0.0f;
        for (size_t i = 0; i < GROUP && t < n; i++, t += COLUMN_ROWS * COLUMN_WARPS) {
            float values[COLUMN_ROWS];
#pragma unroll
            for (unsigned j = 0; j < COLUMN_ROWS; j++) {
                const size_t row = t + j * COLUMN_WARPS;
                values[j] = row < n ? load(x[row * stride + column]) : 0.0f;
            }
            for (unsigned j = 0; j < COLUMN_ROWS; j++) group += values[j];
        }
        sum += group;
    }
    parts[threadIdx.y * LANES + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || column >= C) return;
    for (unsigned i = 1; i < COLUMN_WARPS; i++) sum += parts[i * LANES + threadIdx.x];
    sums[column] += sum;
}

template <typename T> __global__ void bias_add_kernel(T *out, const floatX *bias, size_t n, size_t OC, size_t stride) {
    FOR_EACH_PACK(i, n * OC) {
        T *const to = out + i / OC * stride + i % OC;
        set_value(to, load(*to) + load(bias[i % OC]));
    }
}
} // namespace

// Adds bias[OC] to the rows of out[n,OC].
template <typename T> static void bias_add(T *out, const Stored *bias, size_t n, size_t OC, size_t stride) {
    LAUNCH((bias_add_kernel<T>), loop_grid(n * OC), LOOP_THREADS, 0)(out, (const floatX *)bias, n, OC, stride);
}

// Adds column sums of x[n,C], whose rows are `stride` elements apart, to sums[C].
template <typename T> static void column_sums(Summed *sums, const T *x, size_t n, size_t C, size_t stride) {
    LAUNCH((column_sums_kernel<T>), dim3((unsigned)blocks_for(C, LANES)), dim3(LANES, COLUMN_WARPS), 0)
    ((float *)sums, x, n, C, stride);
}

static void bias_backward(Summed *dbias, const Stored *dout, size_t n, size_t OC, size_t stride) {
    column_sums(dbias, (const floatX *)dout, n, OC, stride);
}

#endif
