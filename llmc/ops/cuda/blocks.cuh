/*
The best blocks of a long text (orders/context_memory.h) in op set "cuda". A warp counts how many blocks are better than
its own: this number is the block's place among the chosen blocks. One more block of threads then gives them to slots.
*/
#ifndef LLMC_CUDA_BLOCKS_CUH
#define LLMC_CUDA_BLOCKS_CUH
#include "platform.cuh"

constexpr unsigned BLOCKS_THREADS = 256;

// Returns the score of block b + 1.
__device__ inline float block_score(const float *score, size_t b) {
    return score && score[b] == score[b] ? score[b] : -INFINITY;
}

// chosen[slots] = the best blocks, the best one first. A warp for each block
__global__ void blocks_rank_kernel(int32_t *chosen, const float *score, size_t blocks, size_t slots) {
    const size_t b = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    if (b >= blocks) return;
    const float own = block_score(score, b);
    unsigned better = 0;
    for (size_t j = threadIdx.x % LANES; j < blocks; j += LANES) {
        const float other = block_score(score, j);
        better += other > own || (other == own && j < b);
    }
    better = warp_sum(better);
    if (threadIdx.x % LANES == 0 && better < slots) chosen[better] = (int32_t)b + 1;
}

__device__ inline bool is_listed(const int32_t *list, size_t n, int32_t block) {
    size_t i = 0;
    while (i < n && list[i] != block) i++;
    return i < n;
}

// Gives the blocks chosen[slots] to slots. fresh[slots]: scratch. One block of threads
__global__ void blocks_take_kernel(int32_t *slot, int32_t *taken, int32_t *chosen, int32_t *fresh, size_t slots) {
    const size_t first = threadIdx.x, step = blockDim.x;
    for (size_t i = first; i < slots; i += step) {
        taken[i] = !is_listed(chosen, slots, slot[i]);
        fresh[i] = is_listed(slot, slots, chosen[i]) ? 0 : chosen[i]; // 0: it stays in its slot
    }
    __syncthreads();
    for (size_t i = first; i < slots; i += step) { // sorts the fresh blocks
        size_t below = 0;
        for (size_t j = 0; j < slots; j++) below += fresh[j] && fresh[j] < fresh[i];
        if (fresh[i]) chosen[below] = fresh[i];
    }
    __syncthreads();
    for (size_t i = first; i < slots; i += step) { // numbers the free slots
        int32_t before = 0;
        for (size_t j = 0; j < i; j++) before += taken[j];
        fresh[i] = before;
    }
    __syncthreads();
    for (size_t i = first; i < slots; i += step)
        if (taken[i]) slot[i] = taken[i] = chosen[fresh[i]];
}

static void cuda_blocks_choose(int32_t *slot, int32_t *taken, const Summed *score, size_t blocks, size_t slots,
                               Summed *scratch) {
    int32_t *const chosen = (int32_t *)scratch;
    if (!slots) return;
    LAUNCH((blocks_rank_kernel), dim3((unsigned)blocks_for(blocks, BLOCKS_THREADS / LANES)), BLOCKS_THREADS, 0)
    (chosen, (const float *)score, blocks, slots);
    LAUNCH((blocks_take_kernel), 1, BLOCKS_THREADS, 0)(slot, taken, chosen, chosen + slots, slots);
}

#endif
