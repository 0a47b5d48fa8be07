/*
Vectors and factors of experts over their sorted rows, in op set "cuda". Forward: a thread takes a pack of columns of
BIAS_ROWS rows in turn and reads the vector again only where the expert changes. Gradients of vectors: a block has one
expert and a strip of columns; each of its warps takes every COLUMN_WARPS-th row. Each sum has one owner, so there are
no atomics. Bytes moved per element of rows: forward 2 s, each of the two gradients s.
*/
#ifndef LLMC_CUDA_EXPERTS_BIAS_CUH
#define LLMC_CUDA_EXPERTS_BIAS_CUH
#include "bias.cuh"

constexpr unsigned BIAS_ROWS = 16;

// Returns the expert of sorted row r.
__device__ inline unsigned expert_of(const int32_t *first, unsigned E, size_t r) {
    unsigned low = 0, high = E; // first[low] <= r < first[high]
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        if ((size_t)first[middle] <= r)
            low = middle;
        else
            high = middle;
    }
    return low;
}

template <int W>
__global__ void experts_bias_kernel(floatX *rows, const floatX *bias, const float *weight, const int32_t *first,
                                    const int32_t *source, size_t R, unsigned E, size_t width) {
    const size_t tiles = (R + BIAS_ROWS - 1) / BIAS_ROWS;
    FOR_EACH_ROW(tile, c, W, tiles, width) {
        size_t r = tile * BIAS_ROWS;
        const size_t end = r + BIAS_ROWS < R ? r + BIAS_ROWS : R;
        for (unsigned e = expert_of(first, E, r); r < end; e++) {
            const size_t last = (size_t)first[e + 1] < end ? (size_t)first[e + 1] : end;
            if (r >= last) continue; // the expert has no rows
            const Pack<floatX, W> add = pack_read<W>(bias + e * width + c);
#pragma unroll 4
            for (; r < last; r++) {
                const float w = weight ? weight[source[r]] : 1.0f;
                Pack<floatX, W> values = pack_read<W>(rows + r * width + c);
                for (int j = 0; j < W; j++) values.x[j] = store(load(values.x[j]) + w * load(add.x[j]));
                pack_write(rows + r * width + c, values);
            }
        }
    }
}

static void cuda_experts_bias_forward(Stored *rows, const Stored *bias, const Summed *weight, const int32_t *first,
                                      const int32_t *source, size_t R, size_t E, size_t width) {
    with_width<floatX>(width % full_pack<floatX> == 0 && all_aligned(rows, bias), [&](auto W) {
        LAUNCH((experts_bias_kernel<W>), rows_grid(blocks_for(R, BIAS_ROWS), width / W), rows_threads(width / W), 0)
        ((floatX *)rows, (const floatX *)bias, (const float *)weight, first, source, R, (unsigned)E, width);
    });
}

template <int W>
__global__ void experts_dbias_kernel(float *dbias, const floatX *drows, const float *weight, const int32_t *first,
                                     const int32_t *source, size_t width) {
    SHARED(float, parts, COLUMN_WARPS *LANES *W);
    const size_t e = blockIdx.y, c = ((size_t)blockIdx.x * LANES + threadIdx.x) * W, end = (size_t)first[e + 1];
    const unsigned self = threadIdx.y * LANES + threadIdx.x;
    float sum[W] = {};
#pragma unroll 4
    for (size_t r = (size_t)first[e] + threadIdx.y; r < end; r += COLUMN_WARPS) {
        const float w = weight ? weight[source[r]] : 1.0f;
        if (c >= width) break;
        const Pack<floatX, W> d = pack_read<W>(drows + r * width + c);
        for (int j = 0; j < W; j++) sum[j] += w * load(d.x[j]);
    }
    for (int j = 0; j < W; j++) parts[j * COLUMN_WARPS * LANES + self] = sum[j];
    __syncthreads();
    if (threadIdx.y || c >= width) return;
    for (int j = 0; j < W; j++) {
        for (unsigned i = 1; i < COLUMN_WARPS; i++) sum[j] += parts[(j * COLUMN_WARPS + i) * LANES + threadIdx.x];
        dbias[e * width + c + j] += sum[j];
    }
}

// threads of a block, which has one warp per row
constexpr unsigned BIAS_THREADS = 256;
template <int W>
__global__ void experts_dweight_kernel(float *dweight, const floatX *drows, const floatX *bias, const int32_t *first,
                                       const int32_t *source, size_t R, unsigned E, size_t width) {
    const size_t r = (size_t)blockIdx.x * (BIAS_THREADS / LANES) + threadIdx.x / LANES;
    const unsigned lane = threadIdx.x % LANES;
    if (r >= R) return;
    bias += expert_of(first, E, r) * width, drows += r * width;
    float sum = 0.0f;
#pragma unroll 2
    for (size_t c = lane * W; c < width; c += LANES * W) {
        const Pack<floatX, W> d = pack_read<W>(drows + c), values = pack_read<W>(bias + c);
        for (int j = 0; j < W; j++) sum += load(d.x[j]) * load(values.x[j]);
    }
    sum = warp_sum(sum);
    if (lane == 0) dweight[source[r]] += sum;
}

static void cuda_experts_bias_backward(Summed *dbias, Summed *dweight, const Stored *drows, const Stored *bias,
                                       const Summed *weight, const int32_t *first, const int32_t *source, size_t R,
                                       size_t E, size_t width) {
    with_width<floatX>(width % full_pack<floatX> == 0 && all_aligned(drows, bias), [&](auto W) {
        if (dbias)
            LAUNCH((experts_dbias_kernel<W>), dim3((unsigned)blocks_for(width, LANES * W), (unsigned)E),
                   dim3(LANES, COLUMN_WARPS), 0)
        ((float *)dbias, (const floatX *)drows, (const float *)weight, first, source, width);
        if (dweight) LAUNCH((experts_dweight_kernel<W>), (unsigned)blocks_for(R, BIAS_THREADS / LANES), BIAS_THREADS, 0)
        ((float *)dweight, (const floatX *)drows, (const floatX *)bias, first, source, R, (unsigned)E, width);
    });
}

// ---- factors --------------------------------------------------------------------------------------------------------
__global__ void experts_scale_kernel(float *out, const float *weight, const floatX *scale, const int32_t *first,
                                     const int32_t *source, size_t R, unsigned E) {
    FOR_EACH_PACK(r, R) {
        const size_t i = (size_t)source[r];
        out[i] = load(scale[expert_of(first, E, r)]) * weight[i];
    }
}

static void cuda_experts_scale_forward(Summed *out, const Summed *weight, const Stored *scale, const int32_t *first,
                                       const int32_t *source, size_t R, size_t E) {
    LAUNCH((experts_scale_kernel), loop_grid(R), LOOP_THREADS, 0)
    ((float *)out, (const float *)weight, (const floatX *)scale, first, source, R, (unsigned)E);
}

// Runs with a block per expert.
__global__ void experts_dscale_kernel(float *dscale, float *dweight, const float *weight, const floatX *scale,
                                      const int32_t *first, const int32_t *source) {
    SHARED(float, partial, BIAS_THREADS / LANES);
    const size_t e = blockIdx.x, end = (size_t)first[e + 1];
    const float factor = load(scale[e]);
    float sum = 0.0f;
    for (size_t r = (size_t)first[e] + threadIdx.x; r < end; r += BIAS_THREADS) {
        const size_t i = (size_t)source[r];
        const float d = dweight[i];
        sum += d * weight[i];
        dweight[i] = factor * d;
    }
    sum = row_sum(sum, partial);
    if (dscale && threadIdx.x == 0) dscale[e] += sum;
}

static void cuda_experts_scale_backward(Summed *dscale, Summed *dweight, const Summed *weight, const Stored *scale,
                                        const int32_t *first, const int32_t *source, size_t, size_t E) {
    LAUNCH((experts_dscale_kernel), (unsigned)E, BIAS_THREADS, 0)
    ((float *)dscale, (float *)dweight, (const float *)weight, (const floatX *)scale, first, source);
}

#endif
