/*
States of linear attention between ranks: computes the state after a range of tokens from the state before it. A block
has COMBINE_ROWS rows of a head's state, so the state before is read K / COMBINE_ROWS times, from the L2 cache.
*/
#ifndef LLMC_CUDA_SCAN_CUH
#define LLMC_CUDA_SCAN_CUH
#include "platform.cuh"

constexpr size_t COMBINE_ROWS = 8, COMBINE_THREADS = 128;

// K: rows of a head's transfer, 1 for a number
__global__ void transfer_begin_kernel(float *transfer, size_t K, size_t count) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        transfer[i] = i / K % K == i % K ? 1.0f : 0.0f;
}

static void cuda_transfer_begin(Summed *transfer, const DeltaShape *shape) {
    const size_t count = delta_transfer_elements(shape);
    LAUNCH(transfer_begin_kernel, loop_grid(count), LOOP_THREADS, 0)
    ((float *)transfer, shape->ssd ? 1 : shape->K, count);
}

__global__ void state_combine_kernel(float *state, const float *transfer, const float *before, size_t K, size_t V,
                                     size_t across, size_t along) {
    const size_t tiles = (K + COMBINE_ROWS - 1) / COMBINE_ROWS, head = blockIdx.x / tiles;
    const size_t first = blockIdx.x % tiles * COMBINE_ROWS, rows = K - first < COMBINE_ROWS ? K - first : COMBINE_ROWS;
    const float *T = transfer + head * K * K + first * across, *in = before + head * K * V;
    float *out = state + (head * K + first) * V;
    for (size_t j = threadIdx.x; j < V; j += blockDim.x) {
        float sum[COMBINE_ROWS] = {};
        for (size_t k = 0; k < K; k++) {
            const float x = in[k * V + j];
            for (size_t i = 0; i < rows; i++) sum[i] += T[i * across + k * along] * x;
        }
        for (size_t i = 0; i < rows; i++) out[i * V + j] += sum[i];
    }
}

// The same with one number for each head
__global__ void state_scale_add_kernel(float *state, const float *transfer, const float *before, size_t each,
                                       size_t count) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        state[i] += transfer[i / each] * before[i];
}

static void cuda_state_combine(Summed *state, const Summed *transfer, const Summed *before, int back,
                               const DeltaShape *shape) {
    const size_t K = shape->K, tiles = (K + COMBINE_ROWS - 1) / COMBINE_ROWS;
    if (shape->ssd) {
        const size_t count = delta_state_elements(shape);
        LAUNCH(state_scale_add_kernel, loop_grid(count), LOOP_THREADS, 0)
        ((float *)state, (const float *)transfer, (const float *)before, K * shape->V, count);
        return;
    }
    LAUNCH(state_combine_kernel, (unsigned)(shape->HV * tiles), COMBINE_THREADS, 0)
    ((float *)state, (const float *)transfer, (const float *)before, K, shape->V, back ? 1 : K, back ? K : 1);
}

#endif
