/*
A bias in op set "cuda" where cuBLASLt does not add it, and its gradient: dbias[OC] += column sums of dout[n,OC]. A
block sums a strip of columns, its warps every BIAS_WARPS-th row each; rows are taken in groups, so that the rounding
error of a long sum grows with the number of groups and the length of one. Bytes moved per element: s.
*/
#ifndef LLMC_CUDA_BIAS_CUH
#define LLMC_CUDA_BIAS_CUH
#include "platform.cuh"

constexpr unsigned BIAS_WARPS = 16;

namespace { // of each program's own: dev/cuda/bench.cu has this file beside the op set
__global__ void bias_backward_kernel(float *dbias, const floatX *dout, size_t n, size_t OC,
                                     size_t stride) {
    constexpr size_t GROUP = 64;
    SHARED(float, parts, BIAS_WARPS *LANES);
    const size_t column = (size_t)blockIdx.x * LANES + threadIdx.x;
    float sum = 0.0f;
    for (size_t t = threadIdx.y; t < n && column < OC;) {
        float group = 0.0f;
        for (size_t i = 0; i < GROUP && t < n; i++, t += BIAS_WARPS) group += load(dout[t * stride + column]);
        sum += group;
    }
    parts[threadIdx.y * LANES + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || column >= OC) return;
    for (unsigned i = 1; i < BIAS_WARPS; i++) sum += parts[i * LANES + threadIdx.x];
    dbias[column] += sum;
}

__global__ void bias_add_kernel(floatX *out, const floatX *bias, size_t n, size_t OC, size_t stride) {
    FOR_EACH_PACK(i, n * OC) {
        floatX *const to = out + i / OC * stride + i % OC;
        *to = store(load(*to) + load(bias[i % OC]));
    }
}
} // namespace

// out[n,OC] += bias[OC]
static void bias_add(Stored *out, const Stored *bias, size_t n, size_t OC, size_t stride) {
    LAUNCH((bias_add_kernel), loop_grid(n * OC), LOOP_THREADS, 0)((floatX *)out, (const floatX *)bias, n, OC, stride);
}

static void bias_backward(Summed *dbias, const Stored *dout, size_t n, size_t OC, size_t stride) {
    LAUNCH((bias_backward_kernel), dim3((unsigned)blocks_for(OC, LANES)), dim3(LANES, BIAS_WARPS), 0)
    ((float *)dbias, (const floatX *)dout, n, OC, stride);
}

#endif
