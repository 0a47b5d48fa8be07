/*
Rows of experts in op set "cuda": sorted by expert, gathered, weighed, combined. The sort is stable: blocks of rows
count their experts, one block turns the counts into places, blocks put their rows there, a thread for each expert.
*/
#ifndef LLMC_CUDA_ROUTES_CUH
#define LLMC_CUDA_ROUTES_CUH
#include "embedding.cuh"

constexpr unsigned ROUTE_THREADS = 256;

// Loads the block's experts into shared memory; returns how many rows it has.
__device__ inline unsigned block_routes(uint16_t *expert, const uint16_t *route, size_t rows) {
    const size_t begin = (size_t)blockIdx.x * TILE;
    const unsigned count = rows - begin < TILE ? (unsigned)(rows - begin) : TILE;
    for (unsigned i = threadIdx.x; i < count; i += ROUTE_THREADS) expert[i] = route[begin + i];
    __syncthreads();
    return count;
}

// Counts rows into counts[E][blocks].
__global__ void route_count_kernel(int32_t *counts, const uint16_t *route, size_t rows, unsigned E) {
    SHARED(uint16_t, expert, TILE);
    const unsigned here = block_routes(expert, route, rows);
    for (unsigned e = threadIdx.x; e < E; e += ROUTE_THREADS) {
        int32_t count = 0;
        for (unsigned i = 0; i < here; i++) count += expert[i] == e;
        counts[(size_t)e * gridDim.x + blockIdx.x] = count;
    }
}

__global__ void route_place_kernel(int32_t *first, int32_t *source, int32_t *place, const int32_t *counts,
                                   const uint16_t *route, size_t rows, unsigned E) {
    SHARED(uint16_t, expert, TILE);
    const unsigned here = block_routes(expert, route, rows);
    for (unsigned e = threadIdx.x; e < E; e += ROUTE_THREADS) {
        int32_t to = counts[(size_t)e * gridDim.x + blockIdx.x];
        if (blockIdx.x == 0) first[e] = to;
        for (unsigned i = 0; i < here; i++)
            if (expert[i] == e) {
                const size_t from = (size_t)blockIdx.x * TILE + i;
                source[to] = (int32_t)from, place[from] = to++;
            }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) first[E] = (int32_t)rows;
}

static void cuda_route_sort(int32_t *first, int32_t *source, int32_t *place, const uint16_t *route, size_t n, size_t k,
                            size_t E, Summed *scratch) {
    const unsigned blocks = (unsigned)blocks_for(n * k, TILE);
    int32_t *const counts = (int32_t *)scratch;
    LAUNCH((route_count_kernel), blocks, ROUTE_THREADS, 0)(counts, route, n * k, (unsigned)E);
    LAUNCH((scan_kernel), 1, SCAN_THREADS, 0)(counts, E * blocks);
    LAUNCH((route_place_kernel), blocks, ROUTE_THREADS, 0)
    (first, source, place, (const int32_t *)counts, route, n * k, (unsigned)E);
}

// ---- rows: bytes moved per element of a row: gather 2 s, combine (1 + 2 / k) s, weigh 2 s, its gradient 4 s ---------
template <int W>
__global__ void route_gather_kernel(floatX *out, const floatX *x, const int32_t *source, size_t rows, unsigned k,
                                    size_t width) {
    FOR_EACH_ROW(i, c, W, rows, width)
    pack_write(out + i * width + c, pack_read<W>(x + (unsigned)source[i] / k * width + c));
}

static void cuda_route_gather(Stored *out, const Stored *x, const int32_t *source, size_t n, size_t k, size_t width) {
    with_width<floatX>(width % full_pack<floatX> == 0 && all_aligned(out, x), [&](auto W) {
        LAUNCH((route_gather_kernel<W>), rows_grid(n * k, width / W), rows_threads(width / W), 0)
        ((floatX *)out, (const floatX *)x, source, n * k, (unsigned)k, width);
    });
}

template <int W>
__global__ void route_combine_kernel(floatX *out, const floatX *rows, const int32_t *place, const floatX *residual,
                                     size_t n, unsigned k, size_t width) {
    FOR_EACH_ROW(t, c, W, n, width) {
        float sum[W] = {};
        Pack<floatX, W> result;
#pragma unroll 4
        for (unsigned j = 0; j < k; j++) {
            const Pack<floatX, W> row = pack_read<W>(rows + (size_t)place[t * k + j] * width + c);
            for (int i = 0; i < W; i++) sum[i] += load(row.x[i]);
        }
        if (residual) result = pack_read<W>(residual + t * width + c);
        for (int i = 0; i < W; i++) result.x[i] = store(residual ? sum[i] + load(result.x[i]) : sum[i]);
        pack_write(out + t * width + c, result);
    }
}

static void cuda_route_combine(Stored *out, const Stored *rows, const int32_t *place, const Stored *residual, size_t n,
                               size_t k, size_t width) {
    with_width<floatX>(width % full_pack<floatX> == 0 && all_aligned(out, rows, residual), [&](auto W) {
        LAUNCH((route_combine_kernel<W>), rows_grid(n, width / W), rows_threads(width / W), 0)
        ((floatX *)out, (const floatX *)rows, place, (const floatX *)residual, n, (unsigned)k, width);
    });
}

template <int W>
__global__ void route_weigh_kernel(floatX *out, const floatX *x, const float *weight, const int32_t *source,
                                   size_t rows, size_t width) {
    FOR_EACH_ROW(i, c, W, rows, width) {
        const float w = weight[source ? (size_t)source[i] : i];
        Pack<floatX, W> values = pack_read<W>(x + i * width + c);
        for (int j = 0; j < W; j++) values.x[j] = store(w * load(values.x[j]));
        pack_write(out + i * width + c, values);
    }
}

static void cuda_route_weigh(Stored *out, const Stored *x, const Summed *weight, const int32_t *source, size_t rows,
                             size_t width) {
    with_width<floatX>(width % full_pack<floatX> == 0 && all_aligned(out, x), [&](auto W) {
        LAUNCH((route_weigh_kernel<W>), rows_grid(rows, width / W), rows_threads(width / W), 0)
        ((floatX *)out, (const floatX *)x, (const float *)weight, source, rows, width);
    });
}

// Runs with a warp per row.
template <int W>
__global__ void route_weigh_backward_kernel(float *dweight, floatX *dx, floatX *x, const floatX *dout,
                                            const float *weight, const int32_t *source, size_t rows, size_t width) {
    const size_t i = (size_t)blockIdx.x * (ROUTE_THREADS / LANES) + threadIdx.x / LANES;
    const unsigned lane = threadIdx.x % LANES;
    if (i >= rows) return;
    const size_t at = source ? (size_t)source[i] : i;
    const float w = weight[at];
    float sum = 0.0f;
#pragma unroll 2
    for (size_t c = i * width + lane * W; c < (i + 1) * width; c += LANES * W) {
        Pack<floatX, W> gradient = pack_read<W>(dout + c), values = pack_read<W>(x + c);
        for (int j = 0; j < W; j++) {
            const float d = load(gradient.x[j]), value = load(values.x[j]);
            sum += d * value;
            gradient.x[j] = store(w * d), values.x[j] = store(w * value);
        }
        pack_write(dx + c, gradient), pack_write(x + c, values);
    }
    sum = warp_sum(sum);
    if (lane == 0) dweight[at] = sum;
}

static void cuda_route_weigh_backward(Summed *dweight, Stored *dx, Stored *x, const Stored *dout, const Summed *weight,
                                      const int32_t *source, size_t rows, size_t width) {
    with_width<floatX>(width % full_pack<floatX> == 0 && all_aligned(dx, x, dout), [&](auto W) {
        LAUNCH((route_weigh_backward_kernel<W>), (unsigned)blocks_for(rows, ROUTE_THREADS / LANES), ROUTE_THREADS, 0)
        ((float *)dweight, (floatX *)dx, (floatX *)x, (const floatX *)dout, (const float *)weight, source, rows, width);
    });
}

#endif
