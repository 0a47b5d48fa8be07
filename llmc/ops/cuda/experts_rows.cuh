/*
The sorted rows of experts in tiles, for the kernels of op set "cuda" that multiply each expert's rows by its matrix. A
kernel finds its tiles from first[E + 1], so the host never waits for counts. And the arguments of such a product.
*/
#ifndef LLMC_CUDA_EXPERTS_ROWS_CUH
#define LLMC_CUDA_EXPERTS_ROWS_CUH
#include "activation.cuh"

struct RowTile {
    unsigned expert, begin, rows;
};

// Returns the sum of `own` over all threads of the block before this one. Call once per kernel.
__device__ inline unsigned sum_before(unsigned own) {
    SHARED(unsigned, totals, LANES); // of each warp
    const unsigned lane = threadIdx.x % LANES;
    unsigned sum = own;
    for (unsigned step = 1; step < LANES; step *= 2) {
        const unsigned before = __shfl_sync(ALL_LANES, sum, lane - step);
        if (lane >= step) sum += before;
    }
    if (lane == LANES - 1) totals[threadIdx.x / LANES] = sum;
    __syncthreads();
    for (unsigned warp = 0; warp < threadIdx.x / LANES; warp++) sum += totals[warp];
    return sum - own;
}

// The block's threads share the experts: calls each(e, its row tiles, row tiles of all experts before it) for every
// expert. Call once per kernel.
template <typename F> __device__ inline void each_expert(const int32_t *first, unsigned E, unsigned size, F each) {
    const unsigned share = (E + blockDim.x - 1) / blockDim.x;
    const unsigned begin = threadIdx.x * share < E ? threadIdx.x * share : E,
                   end = begin + share < E ? begin + share : E;
    const auto tiles_of = [&](unsigned e) { return (unsigned)(first[e + 1] - first[e] + size - 1) / size; };
    unsigned own = 0;
    for (unsigned e = begin; e < end; e++) own += tiles_of(e);
    unsigned before = sum_before(own);
#pragma unroll 1
    for (unsigned e = begin; e < end; before += tiles_of(e++)) each(e, tiles_of(e), before);
}

// Returns tile `index` of an expert.
__device__ inline RowTile tile_of(const int32_t *first, unsigned e, unsigned size, unsigned index) {
    const unsigned begin = (unsigned)first[e] + index * size, left = (unsigned)first[e + 1] - begin;
    return RowTile{e, begin, left < size ? left : size};
}

// Returns tile `number`, of up to `size` rows; without rows if there are fewer tiles. Call once per kernel.
__device__ inline RowTile row_tile(const int32_t *first, unsigned E, unsigned size, unsigned number) {
    SHARED(RowTile, found, 1);
    if (threadIdx.x == 0) *found = RowTile{};
    each_expert(first, E, size, [&](unsigned e, unsigned tiles, unsigned before) {
        if (number - before < tiles) *found = tile_of(first, e, size, number - before);
    });
    __syncthreads();
    return *found;
}

// Returns the most tiles that `rows` rows of E experts make.
static inline size_t most_row_tiles(size_t rows, size_t E, size_t size) { return rows / size + min_size(E, rows); }

// ---- the grouped product --------------------------------------------------------------------------------------------
enum ProductForm { PRODUCT_FORWARD, PRODUCT_INPUT, PRODUCT_WEIGHT };

constexpr int PRODUCT_DEPTH = sizeof(floatX) == 2 ? 64 : 32; // elements of the summed dimension in a stage

struct GroupedProduct {
    floatX *out;
    float *sums; // result of form "weight"
    const floatX *a, *b;
    const int32_t *first;
    unsigned E, column_tiles;
    size_t C, OC;
    bool accumulate;
};

// Arguments of an activated product besides GroupedProduct. A row is multiplied by factor[source[row]]. gate_up NULL:
// it is not stored; bias NULL, factor NULL: there are none
struct ActivatedRows {
    floatX *gate_up;    // [rows, OC]
    const floatX *bias; // [E, OC]
    const float *factor;
    const int32_t *source;
    Clamp clamp;
};

#endif
