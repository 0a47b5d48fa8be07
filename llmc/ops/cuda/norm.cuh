/*
RMSNorm and LayerNorm of op set "cuda" over rows of x[n,C], forward and backward, in the formulas of
llmc/ops/cpu/norm.h.

blockDim.x threads share a row (a part of a warp, a warp, or several) and a block does blockDim.y rows at a time. Thread
x has packs x, x + blockDim.x, ...: P packs, read into registers with the row's other inputs before the first sum. P =
0: any number of packs, read again when needed. Backward's blocks walk rows with the grid's stride, keep their part of
dw (and db) in registers, and write it to a line of scratch; then the lines are summed. Bytes moved per element: forward
2 s, 3 s with a residual; backward 3 s, 4 s if dx accumulates.
*/
#ifndef LLMC_CUDA_NORM_CUH
#define LLMC_CUDA_NORM_CUH
#include "bias.cuh"

constexpr unsigned NORM_THREADS = 256, NORM_MOST_THREADS = 512;
constexpr unsigned NORM_WARPS = NORM_MOST_THREADS / LANES; // most warps of a block
constexpr int NORM_PACKS[] = {4, 2}; // P for RMSNorm and LayerNorm, in rows with more packs than a warp has threads

struct NormShape {
    int P;
    dim3 threads; // x: threads of a row; y: rows
};

// Chooses P and the threads. packs: packs of a row; most: P for long rows. P = 1 leaves registers for 8 warps per
// block, larger P for 4
static NormShape norm_shape(size_t packs, int most) {
    NormShape s = {packs <= LANES ? 1 : most, dim3(4)};
    if (packs > NORM_MOST_THREADS * most) return NormShape{0, dim3(NORM_MOST_THREADS)};
    while (s.threads.x * s.P < packs || (s.P > 1 && s.threads.x < LANES)) s.threads.x *= 2;
    s.threads.y = NORM_THREADS / (s.P > 1 ? 2 : 1) / s.threads.x;
    if (!s.threads.y) s.threads.y = 1;
    return s;
}

// Calls f(number, first element) for this thread's packs of a row.
template <int W, int P, typename F> __device__ inline void for_packs(size_t C, F f) {
    if constexpr (P > 0) {
#pragma unroll
        for (int p = 0; p < P; p++) {
            const unsigned c = (threadIdx.x + p * blockDim.x) * W;
            if (c < C) f(p, (size_t)c);
        }
    } else {
        for (size_t c = threadIdx.x * W; c < C; c += blockDim.x * W) f(0, c);
    }
}

template <int W, int P> using RowPacks = Pack<floatX, W>[P ? P : 1];

// Returns the pack of a row that starts at `from`: kept[p], or read from memory.
template <int W, int P>
__device__ inline Pack<floatX, W> row_pack(const RowPacks<W, P> &kept, int p, const floatX *from) {
    return P ? kept[p] : pack_read<W>(from);
}

// Returns a pack of weights; w NULL: a pack of ones.
template <int W> __device__ inline Pack<floatX, W> weight_pack(const floatX *w, size_t c) {
    if (w) return pack_read<W>(w + c);
    Pack<floatX, W> ones;
    for (int j = 0; j < W; j++) ones.x[j] = store(1.0f);
    return ones;
}

// Makes the compiler hold the packs between two passes over a row, instead of the floats made from them.
template <int W, int P> __device__ inline void hold_packs(RowPacks<W, P> &packs) {
    (void)packs;
#ifndef CUDA_ON_CPU
    if constexpr (P > 0 && sizeof(packs[0]) == sizeof(uint4))
        for (Pack<floatX, W> &pack : packs) {
            uint4 *bits = (uint4 *)&pack;
            asm volatile("" : "+r"(bits->x), "+r"(bits->y), "+r"(bits->z), "+r"(bits->w));
        }
#endif
}

// Sums over the threads of a row. partials[NORM_WARPS, SUMS] must not be the previous call's array, so that one barrier
// suffices
template <int SUMS> __device__ inline void norm_sums(float (&sum)[SUMS], float *partials) {
    const unsigned warps = blockDim.x / LANES, lane = threadIdx.x % LANES;
    for (unsigned step = (warps ? LANES : blockDim.x) / 2; step; step /= 2)
        for (int i = 0; i < SUMS; i++) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], step);
    if (warps <= 1) return;
    partials += threadIdx.y * warps * SUMS;
    for (int i = 0; i < SUMS && lane == 0; i++) partials[threadIdx.x / LANES * SUMS + i] = sum[i];
    __syncthreads();
    for (int i = 0; i < SUMS; i++) {
        sum[i] = 0.0f;
        for (unsigned warp = 0; warp < warps; warp++) sum[i] += partials[warp * SUMS + i];
    }
}

// Norms rows. Row t is shifted by shift + t * stride; shift NULL: no shift. All threads of a block reach every barrier:
// threads without a row repeat the last row and store nothing.
template <int W, int P, bool CENTRED>
__global__ void __launch_bounds__(NORM_MOST_THREADS)
    norm_forward_kernel(floatX *out, const floatX *x, const floatX *w, const floatX *shift, size_t stride, size_t n,
                        size_t C, float mean_of, float eps, float offset) {
    SHARED(float, partials, 2 * NORM_WARPS);
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y, t = row < n ? row : n - 1;
    RowPacks<W, P> in, add;
    x += t * C, out += t * C;
    if (shift) shift += t * stride;
    if (P)
        for_packs<W, P>(C, [&](int p, size_t c) {
            in[p] = pack_read<W>(x + c);
            if (shift) add[p] = pack_read<W>(shift + c);
        });
    float mean = 0.0f, squares[1] = {};
    if (CENTRED) {
        float sum[1] = {};
        for_packs<W, P>(C, [&](int p, size_t c) {
            const Pack<floatX, W> values = row_pack<W, P>(in, p, x + c);
            for (int j = 0; j < W; j++) sum[0] += load(values.x[j]);
        });
        norm_sums(sum, partials);
        mean = rounded_product(sum[0], mean_of); // unfused, so that x - mean is 0 for rows of one value
        hold_packs<W, P>(in);
    }
    for_packs<W, P>(C, [&](int p, size_t c) {
        const Pack<floatX, W> values = row_pack<W, P>(in, p, x + c);
        for (int j = 0; j < W; j++) squares[0] += (load(values.x[j]) - mean) * (load(values.x[j]) - mean);
    });
    norm_sums(squares, partials + NORM_WARPS);
    hold_packs<W, P>(in);
    const float rstd = rsqrtf(squares[0] * mean_of + eps);
    if (row >= n) return;
    for_packs<W, P>(C, [&](int p, size_t c) {
        Pack<floatX, W> values = row_pack<W, P>(in, p, x + c), added;
        const Pack<floatX, W> scales = weight_pack<W>(w, c); // read from the cache
        if (shift) added = row_pack<W, P>(add, p, shift + c);
        for (int j = 0; j < W; j++) {
            const float y = (load(values.x[j]) - mean) * rstd * (load(scales.x[j]) + offset);
            values.x[j] = store(shift ? y + load(added.x[j]) : y);
        }
        pack_write(out + c, values);
    });
}

// Calls launch(W, P, CENTRED, shape) with W, P and CENTRED as constants.
template <typename F> static void with_norm(NormKind kind, bool packed, size_t C, F launch) {
    with_flag(kind == NORM_LAYER, [&](auto CENTRED) {
        with_width<floatX>(packed && C % full_pack<floatX> == 0, [&](auto W) {
            constexpr int MOST = NORM_PACKS[CENTRED];
            const NormShape shape = norm_shape(blocks_for(C, W), MOST);
            switch (shape.P) {
            case 0: launch(W, Width<0>(), CENTRED, shape.threads); break;
            case 1: launch(W, Width<1>(), CENTRED, shape.threads); break;
            default: launch(W, Width<MOST>(), CENTRED, shape.threads);
            }
        });
    });
}

static void cuda_norm_forward(Stored *out, const Stored *x, const Stored *w, const Stored *b, const Stored *residual,
                              size_t n, size_t C, Norm norm) {
    const Stored *const shift = b ? b : residual;
    with_norm(norm.kind, all_aligned(out, x, w, shift), C, [&](auto W, auto P, auto CENTRED, dim3 threads) {
        LAUNCH((norm_forward_kernel<W, P, CENTRED>), dim3((unsigned)blocks_for(n, threads.y)), threads, 0)
        ((floatX *)out, (const floatX *)x, (const floatX *)w, (const floatX *)shift, b ? 0 : C, n, C, 1.0f / (float)C,
         (float)norm.eps, w ? (float)norm.offset : 0.0f);
    });
}

// ---- backward: with g = dout * (w + offset), dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), dw += dout * xhat, db
// += dout; mean(g) and db only for LayerNorm. As mean(g * xhat) = rstd * mean(g * (x - mean)), one pass makes all sums
// but the mean.
static size_t norm_blocks(size_t n, unsigned rows) { return min_size(blocks_for(n, rows), GPU_NORM_BLOCKS); }

// Runs backward. lines NULL: computes only dx
template <int W, int P, bool CENTRED>
__global__ void __launch_bounds__(NORM_MOST_THREADS)
    norm_backward_kernel(floatX *dx, float *lines, const floatX *dout, const floatX *x, const floatX *w, size_t n,
                         size_t C, float mean_of, float eps, float offset, int accumulate) {
    constexpr int SUMS = CENTRED ? 3 : 2;
    SHARED(float, partials, 2 * SUMS * NORM_WARPS);
    SHARED(float, strips, NORM_THREADS *W);
    unsigned turn = 0;
    float dw[P ? P : 1][W] = {}, db[P ? P : 1][W] = {};
    float *const line = lines ? lines + blockIdx.x * C : NULL, *const line_b = line + gridDim.x * C;
    RowPacks<W, P> scale;
    for_packs<W, P>(C, [&](int p, size_t c) {
        if (P) scale[p] = weight_pack<W>(w, c);
        for (int j = 0; j < W && P == 0 && line; j++) {
            line[c + j] = 0.0f;
            if (CENTRED) line_b[c + j] = 0.0f;
        }
    });
    for (size_t begin = (size_t)blockIdx.x * blockDim.y; begin < n; begin += (size_t)gridDim.x * blockDim.y) {
        const size_t row = begin + threadIdx.y, first = (row < n ? row : n - 1) * C;
        RowPacks<W, P> in, gradient, old;
        if (P)
            for_packs<W, P>(C, [&](int p, size_t c) {
                in[p] = pack_read<W>(x + first + c), gradient[p] = pack_read<W>(dout + first + c);
                if (accumulate) old[p] = pack_read<W>(dx + first + c);
            });
        float mean[1] = {}, sum[SUMS] = {};
        if (CENTRED) {
            for_packs<W, P>(C, [&](int p, size_t c) {
                const Pack<floatX, W> values = row_pack<W, P>(in, p, x + first + c);
                for (int j = 0; j < W; j++) mean[0] += load(values.x[j]);
            });
            norm_sums(mean, partials + turn++ % 2 * SUMS * NORM_WARPS);
            mean[0] = rounded_product(mean[0], mean_of);
            hold_packs<W, P>(in);
        }
        for_packs<W, P>(C, [&](int p, size_t c) {
            const Pack<floatX, W> values = row_pack<W, P>(in, p, x + first + c),
                                  d = row_pack<W, P>(gradient, p, dout + first + c),
                                  scales = P ? scale[p] : weight_pack<W>(w, c);
            for (int j = 0; j < W; j++) {
                const float g = load(d.x[j]) * (load(scales.x[j]) + offset), centred = load(values.x[j]) - mean[0];
                sum[0] += centred * centred, sum[1] += g * centred;
                if (CENTRED) sum[SUMS - 1] += g;
            }
        });
        norm_sums(sum, partials + turn++ % 2 * SUMS * NORM_WARPS);
        hold_packs<W, P>(in), hold_packs<W, P>(gradient), hold_packs<W, P>(scale);
        const float rstd = rsqrtf(sum[0] * mean_of + eps), pull = sum[1] * mean_of * rstd * rstd;
        const float mean_g = CENTRED ? sum[SUMS - 1] * mean_of : 0.0f;
        if (row >= n) continue;
        for_packs<W, P>(C, [&](int p, size_t c) {
            const Pack<floatX, W> values = row_pack<W, P>(in, p, x + first + c),
                                  d = row_pack<W, P>(gradient, p, dout + first + c),
                                  scales = P ? scale[p] : weight_pack<W>(w, c);
            Pack<floatX, W> result;
            if (accumulate) result = row_pack<W, P>(old, p, dx + first + c);
            for (int j = 0; j < W; j++) {
                const float centred = load(values.x[j]) - mean[0], g = load(d.x[j]) * (load(scales.x[j]) + offset);
                const float value = rstd * (g - mean_g - centred * pull);
                result.x[j] = store(accumulate ? load(result.x[j]) + value : value);
                if (P) {
                    dw[p][j] += load(d.x[j]) * centred * rstd;
                    if (CENTRED) db[p][j] += load(d.x[j]);
                } else if (line) {
                    line[c + j] += load(d.x[j]) * centred * rstd;
                    if (CENTRED) line_b[c + j] += load(d.x[j]);
                }
            }
            pack_write(dx + first + c, result);
        });
    }
    // adds up the block's rows (threadIdx.y) in order
    const auto write = [&](float *to, float(&sums)[W], unsigned c) {
        const unsigned threads = blockDim.x * blockDim.y, self = threadIdx.y * blockDim.x + threadIdx.x;
        if (blockDim.y > 1) {
            for (int j = 0; j < W; j++) strips[j * threads + self] = sums[j];
            __syncthreads();
            for (unsigned i = self + blockDim.x; threadIdx.y == 0 && i < threads; i += blockDim.x)
                for (int j = 0; j < W; j++) sums[j] += strips[j * threads + i];
            __syncthreads();
        }
        for (int j = 0; j < W && threadIdx.y == 0 && c < C; j++) to[c + j] = sums[j];
    };
#pragma unroll
    for (int p = 0; p < P && line; p++) {
        const unsigned c = (threadIdx.x + p * blockDim.x) * W;
        write(line, dw[p], c);
        if (CENTRED) write(line_b, db[p], c);
    }
}

static void cuda_norm_backward(Stored *dx, Summed *dw, Summed *db, const Stored *dout, const Stored *x, const Stored *w,
                               size_t n, size_t C, Norm norm, int accumulate, Summed *scratch) {
    float *const lines = dw ? (float *)scratch : NULL;
    size_t blocks = 0;
    with_norm(norm.kind, all_aligned(dx, dout, x, w), C, [&](auto W, auto P, auto CENTRED, dim3 threads) {
        blocks = norm_blocks(n, threads.y);
        LAUNCH((norm_backward_kernel<W, P, CENTRED>), dim3((unsigned)blocks), threads, 0)
        ((floatX *)dx, lines, (const floatX *)dout, (const floatX *)x, (const floatX *)w, n, C, 1.0f / (float)C,
         (float)norm.eps, w ? (float)norm.offset : 0.0f, accumulate);
    });
    if (dw) column_sums(dw, lines, blocks, C, C);
    if (dw && norm.kind == NORM_LAYER) column_sums(db, lines + blocks * C, blocks, C, C);
}

#endif
