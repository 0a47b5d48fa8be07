/*
RMSNorm and LayerNorm of op set "cuda" over rows of x[n,C], forward and backward, in the formulas of
llmc/ops/cpu/norm.h.

blockDim.x threads (a warp, or several where rows are long) share a row and blockDim.y rows are done at a time; thread
x takes packs x, x + blockDim.x, ..., so that a row comes from the cache the second time. Backward gives each of a fixed
number of row takers a line of scratch for its part of dw (and db), kept in registers while it walks its rows; a second
kernel adds the lines in order. Bytes moved per element: forward 2 s; backward 3 s, 4 s where dx accumulates.
*/
#ifndef LLMC_CUDA_NORM_CUH
#define LLMC_CUDA_NORM_CUH
#include "platform.cuh"

constexpr unsigned NORM_THREADS = 256, NORM_MOST_THREADS = 512;
constexpr size_t NORM_TAKERS = 528; // 4 for each of an H100's processors: a constant, so that a plan needs no device

// Threads of a row, and rows of a block. packs: in a row
static inline dim3 norm_threads(size_t packs) {
    unsigned x = LANES;
    while (x < NORM_THREADS && x < packs) x *= 2;
    return dim3(x, NORM_THREADS / x);
}

struct RowStatistics {
    float mean, rstd;
};

template <int W, bool CENTRED>
__device__ inline RowStatistics row_statistics(const floatX *x, size_t C, float eps, float *partial) {
    RowStatistics s = {0.0f, 0.0f};
    const auto sum_of = [&](auto term) {
        float sum = 0.0f;
        for (size_t c = threadIdx.x * W; c < C; c += blockDim.x * W) {
            const Pack<floatX, W> pack = pack_read<W>(x + c);
            for (int j = 0; j < W; j++) sum += term(load(pack.x[j]));
        }
        sum = row_sum(sum, partial);
        __syncthreads();
        return sum;
    };
    if (CENTRED) s.mean = sum_of([](float value) { return value; }) / (float)C;
    const float squares = sum_of([&](float value) { return (value - s.mean) * (value - s.mean); });
    s.rstd = 1.0f / sqrtf(squares / (float)C + eps);
    return s;
}

// All threads of a block meet at every barrier: those without a row do the last one again and write nothing. Row t is
// shifted by shift + t * stride, NULL: by nothing.
template <int W, bool CENTRED>
__global__ void norm_forward_kernel(floatX *out, const floatX *x, const floatX *w, const floatX *shift, size_t stride,
                                    size_t n, size_t C, float eps, float offset) {
    SHARED(float, partials, NORM_THREADS / LANES);
    float *partial = partials + threadIdx.y * (blockDim.x / LANES);
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y, t = row < n ? row : n - 1;
    const RowStatistics s = row_statistics<W, CENTRED>(x + t * C, C, eps, partial);
    if (row >= n) return;
    for (size_t c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Pack<floatX, W> pack = pack_read<W>(x + t * C + c);
        const Pack<floatX, W> scale = pack_read<W>(w + c);
        Pack<floatX, W> add;
        if (shift) add = pack_read<W>(shift + t * stride + c);
        for (int j = 0; j < W; j++) {
            float y = (load(pack.x[j]) - s.mean) * s.rstd * (load(scale.x[j]) + offset);
            pack.x[j] = store(shift ? y + load(add.x[j]) : y);
        }
        pack_write(out + t * C + c, pack);
    }
}

static void cuda_norm_forward(Stored *out, const Stored *x, const Stored *w, const Stored *b, const Stored *residual,
                              size_t n, size_t C, Norm norm) {
    const Stored *const shift = b ? b : residual;
    const bool packed = C % full_pack<floatX> == 0 && all_aligned(out, x, w, shift);
    with_flag(norm.kind == NORM_LAYER, [&](auto CENTRED) {
        with_width<floatX>(packed, [&](auto W) {
            const dim3 threads = norm_threads(blocks_for(C, W));
            LAUNCH((norm_forward_kernel<W, CENTRED>), dim3((unsigned)blocks_for(n, threads.y)), threads, 0)
            ((floatX *)out, (const floatX *)x, (const floatX *)w, (const floatX *)shift, b ? 0 : C, n, C,
             (float)norm.eps, (float)norm.offset);
        });
    });
}

// ---- backward: with g = dout * (w + offset),  dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  dw += dout * xhat,
static inline size_t norm_takers(size_t n) { return n < NORM_TAKERS ? n : NORM_TAKERS; }

// [2, takers, C]: dw's lines, then db's; none of it where dw is NULL
static size_t cuda_norm_backward_scratch(size_t n, size_t C) { return 2 * norm_takers(n) * C; }

// A row is at most blockDim.x * P * W long. Taker k walks rows k, k + takers, and so on. lines NULL: dx alone
template <int W, int P, bool CENTRED>
__global__ void __launch_bounds__(NORM_MOST_THREADS)
    norm_backward_kernel(floatX *dx, float *lines, const floatX *dout, const floatX *x, const floatX *w, size_t n,
                         size_t C, float eps, float offset, int accumulate, size_t takers) {
    SHARED(float, partials, NORM_MOST_THREADS / LANES);
    float *partial = partials + threadIdx.y * (blockDim.x / LANES);
    const size_t taker = (size_t)blockIdx.x * blockDim.y + threadIdx.y, rounds = (n + takers - 1) / takers;
    float dw[P][W] = {}, db[P][W] = {};
    const auto for_packs = [&](auto f) { // f(number, first element) of this thread's packs of a row
#pragma unroll(P > 32 ? 1 : P)
        for (int p = 0; p < P; p++) {
            const size_t c = (threadIdx.x + p * blockDim.x) * W;
            if (c >= C) break;
            f(p, c);
        }
    };
    for (size_t round = 0; round < rounds; round++) {
        const size_t row = round * takers + taker;
        const bool mine = taker < takers && row < n;
        const size_t first = (mine ? row : n - 1) * C;
        const RowStatistics s = row_statistics<W, CENTRED>(x + first, C, eps, partial);
        float sum = 0.0f, dot = 0.0f;
        for_packs([&](int, size_t c) {
            const Pack<floatX, W> in = pack_read<W>(x + first + c), d = pack_read<W>(dout + first + c),
                                  scale = pack_read<W>(w + c);
            for (int j = 0; j < W; j++) {
                float g = load(d.x[j]) * (load(scale.x[j]) + offset);
                sum += g;
                dot += g * ((load(in.x[j]) - s.mean) * s.rstd);
            }
        });
        if (CENTRED) {
            sum = row_sum(sum, partial) / (float)C;
            __syncthreads();
        } else {
            sum = 0.0f;
        }
        dot = row_sum(dot, partial) / (float)C;
        __syncthreads();
        if (!mine) continue;
        for_packs([&](int p, size_t c) {
            const Pack<floatX, W> in = pack_read<W>(x + first + c), d = pack_read<W>(dout + first + c),
                                  scale = pack_read<W>(w + c);
            Pack<floatX, W> result;
            if (accumulate) result = pack_read<W>(dx + first + c);
            for (int j = 0; j < W; j++) {
                float gradient = load(d.x[j]), xhat = (load(in.x[j]) - s.mean) * s.rstd;
                dw[p][j] += gradient * xhat;
                if (CENTRED) db[p][j] += gradient;
                gradient = s.rstd * (gradient * (load(scale.x[j]) + offset) - sum - xhat * dot);
                result.x[j] = store(accumulate ? load(result.x[j]) + gradient : gradient);
            }
            pack_write(dx + first + c, result);
        });
    }
    if (taker >= takers || !lines) return;
    for_packs([&](int p, size_t c) {
        for (int j = 0; j < W; j++) {
            lines[taker * C + c + j] = dw[p][j];
            if (CENTRED) lines[(takers + taker) * C + c + j] = db[p][j];
        }
    });
}

// sums[C] += the lines, in order
__global__ void add_lines_kernel(float *sums, const float *lines, size_t count, size_t C) {
    FOR_EACH_PACK(c, C) {
        float sum = 0.0f;
        for (size_t i = 0; i < count; i++) sum += lines[i * C + c];
        sums[c] += sum;
    }
}

static void cuda_norm_backward(Stored *dx, Summed *dw, Summed *db, const Stored *dout, const Stored *x, const Stored *w,
                               size_t n, size_t C, Norm norm, int accumulate, Summed *scratch) {
    const size_t takers = norm_takers(n);
    const bool packed = C % full_pack<floatX> == 0 && all_aligned(dx, dout, x, w);
    float *lines = dw ? (float *)scratch : NULL;
    const auto run = [&](auto CENTRED, auto W, auto P) {
        dim3 threads(LANES);
        while (threads.x < NORM_MOST_THREADS && threads.x * P * W < C) threads.x *= 2;
        if (threads.x * P * W < C)
            die("norm backward: rows of %zu elements, op set cuda takes at most %u", C, threads.x * (unsigned)(P * W));
        threads.y = threads.x < NORM_THREADS ? NORM_THREADS / threads.x : 1;
        LAUNCH((norm_backward_kernel<W, P, CENTRED>), dim3((unsigned)blocks_for(takers, threads.y)), threads, 0)
        ((floatX *)dx, lines, (const floatX *)dout, (const floatX *)x, (const floatX *)w, n, C, (float)norm.eps,
         (float)norm.offset, accumulate, takers);
    };
    with_flag(norm.kind == NORM_LAYER, [&](auto CENTRED) {
        with_width<floatX>(packed, [&](auto W) {
            constexpr int FEW = W == 1 ? 32 : 4; // longer rows than 512 threads have so take more, which may spill
            if (NORM_MOST_THREADS * FEW * W >= C)
                run(CENTRED, W, Width<FEW>());
            else
                run(CENTRED, W, Width<4 * FEW>());
        });
    });
    if (!dw) return;
    LAUNCH((add_lines_kernel), loop_grid(C), LOOP_THREADS, 0)((float *)dw, lines, takers, C);
    if (norm.kind == NORM_LAYER)
        LAUNCH((add_lines_kernel), loop_grid(C), LOOP_THREADS, 0)((float *)db, lines + takers * C, takers, C);
}

#endif
