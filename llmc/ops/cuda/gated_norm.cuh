/*
The gated norm of linear attention in op set "cuda": out = w xhat silu(z) with xhat = x rsqrt(mean(x^2) + eps) of each
head. GATE_FIRST (Mamba-2): out = w[heads,V] xhat with xhat of x silu(z). As in norm.cuh blockDim.x threads have a
head's packs in registers, P packs each. Backward's blocks walk rows with the grid's stride and write their part of dw
to a line of scratch. Bytes moved per element: forward 3 s, backward 5 s.
*/
#ifndef LLMC_CUDA_GATED_NORM_CUH
#define LLMC_CUDA_GATED_NORM_CUH
#include "activation.cuh"
#include "norm.cuh"

struct GatedShape {
    size_t rows, heads, V, stride; // rows = tokens x heads
    float mean_of, eps;
};

__device__ inline float silu(float g) {
    float one_minus_s;
    return g * sigmoid(g, &one_minus_s);
}

__device__ inline size_t gate_place(const GatedShape &s, size_t row) {
    return row / s.heads * s.stride + row % s.heads * s.V;
}

template <int W, int P, bool GATE_FIRST>
__global__ void __launch_bounds__(NORM_MOST_THREADS)
    gated_norm_forward_kernel(floatX *out, const floatX *x, const floatX *z, const floatX *w, GatedShape s) {
    SHARED(float, partials, NORM_WARPS);
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y, safe = row < s.rows ? row : s.rows - 1;
    RowPacks<W, P> in, gate;
    float squares[1] = {};
    for_packs<W, P>(s.V, [&](int p, size_t c) {
        in[p] = pack_read<W>(x + safe * s.V + c), gate[p] = pack_read<W>(z + gate_place(s, safe) + c);
    });
    for_packs<W, P>(s.V, [&](int p, size_t) {
        for (int j = 0; j < W; j++) {
            const float a = load(in[p].x[j]) * (GATE_FIRST ? silu(load(gate[p].x[j])) : 1.0f);
            squares[0] += a * a;
        }
    });
    norm_sums(squares, partials);
    const float rstd = rsqrtf(squares[0] * s.mean_of + s.eps);
    if (row >= s.rows) return;
    for_packs<W, P>(s.V, [&](int p, size_t c) {
        const Pack<floatX, W> scales = pack_read<W>(w + (GATE_FIRST ? row % s.heads * s.V : 0) + c);
        Pack<floatX, W> result;
        for (int j = 0; j < W; j++) {
            result.x[j] = store(load(scales.x[j]) * load(in[p].x[j]) * rstd * silu(load(gate[p].x[j])));
        }
        pack_write(out + row * s.V + c, result);
    });
}

// Calls launch(W, P, GATE_FIRST, threads) with constants. GATE_FIRST: with more than 2 packs backward spills, so only
// rows that need more have 4.
template <typename F> static void with_gated_norm(bool aligned, size_t V, size_t stride, int gate_first, F launch) {
    const auto run = [&](auto W, auto FIRST) {
        constexpr int USUAL = NORM_PACKS[FIRST && W > 1], MOST = NORM_PACKS[0];
        const size_t packs = blocks_for(V, W);
        const NormShape usual = norm_shape(packs, USUAL), shape = usual.P ? usual : norm_shape(packs, MOST);
        if (!shape.P)
            die("op set cuda: gated norm has heads of %zu elements, but at most %u are possible", V,
                NORM_MOST_THREADS * MOST * W);
        if (shape.P == 1)
            launch(W, Width<1>(), FIRST, shape.threads);
        else if (usual.P)
            launch(W, Width<USUAL>(), FIRST, shape.threads);
        else
            launch(W, Width<MOST>(), FIRST, shape.threads);
    };
    with_width<floatX>(aligned && V % full_pack<floatX> == 0 && stride % full_pack<floatX> == 0, [&](auto W) {
        if (gate_first)
            run(W, std::true_type());
        else
            run(W, std::false_type());
    });
}

static GatedShape gated_shape(size_t n, size_t heads, size_t V, size_t stride, double eps) {
    return GatedShape{n * heads, heads, V, stride, 1.0f / (float)V, (float)eps};
}

static void cuda_gated_norm_forward(Stored *out, const Stored *x, const Stored *z, const Stored *w, size_t n,
                                    size_t heads, size_t V, size_t stride, int gate_first, double eps) {
    with_gated_norm(all_aligned(out, x, z, w), V, stride, gate_first, [&](auto W, auto P, auto FIRST, dim3 threads) {
        LAUNCH((gated_norm_forward_kernel<W, P, FIRST>), dim3((unsigned)blocks_for(n * heads, threads.y)), threads, 0)
        ((floatX *)out, (const floatX *)x, (const floatX *)z, (const floatX *)w, gated_shape(n, heads, V, stride, eps));
    });
}

// ---- backward: with g = dout w silu(z),  dx = rstd (g - xhat mean(g xhat)),  dz = dout w xhat silu'(z),
// dw += dout xhat silu(z). GATE_FIRST: with a = x silu(z) and g = dout w,  da = rstd (g - ahat mean(g ahat)),  dx = da
// silu(z),  dz = da x silu'(z),  dw += dout ahat; blockIdx.y is the head
template <int W, int P, bool GATE_FIRST>
__global__ void __launch_bounds__(NORM_MOST_THREADS)
    gated_norm_backward_kernel(floatX *dx, floatX *dz, float *lines, const floatX *dout, const floatX *x,
                               const floatX *z, const floatX *w, GatedShape s) {
    SHARED(float, partials, 2 * 2 * NORM_WARPS);
    SHARED(float, strips, NORM_THREADS *W);
    unsigned turn = 0;
    float dw[P][W] = {};
    const size_t count = GATE_FIRST ? s.rows / s.heads : s.rows;
    RowPacks<W, P> scale;
    for_packs<W, P>(s.V,
                    [&](int p, size_t c) { scale[p] = pack_read<W>(w + (GATE_FIRST ? blockIdx.y * s.V : 0) + c); });
    for (size_t begin = (size_t)blockIdx.x * blockDim.y; begin < count; begin += (size_t)gridDim.x * blockDim.y) {
        const size_t i = begin + threadIdx.y, last = i < count ? i : count - 1;
        const size_t row = GATE_FIRST ? last * s.heads + blockIdx.y : last;
        RowPacks<W, P> in, gate, gradient;
        float sum[2] = {}; // sums of x^2 and g x, or of a
        for_packs<W, P>(s.V, [&](int p, size_t c) {
            in[p] = pack_read<W>(x + row * s.V + c), gate[p] = pack_read<W>(z + gate_place(s, row) + c);
            gradient[p] = pack_read<W>(dout + row * s.V + c);
        });
        for_packs<W, P>(s.V, [&](int p, size_t) {
            for (int j = 0; j < W; j++) {
                const float value = load(in[p].x[j]), open = silu(load(gate[p].x[j])), a = value * open;
                sum[0] += GATE_FIRST ? a * a : value * value;
                sum[1] += load(gradient[p].x[j]) * load(scale[p].x[j]) * open * value;
            }
        });
        norm_sums(sum, partials + turn++ % 2 * 2 * NORM_WARPS);
        const float rstd = rsqrtf(sum[0] * s.mean_of + s.eps), pull = sum[1] * s.mean_of * rstd * rstd;
        if (i >= count) continue;
        for_packs<W, P>(s.V, [&](int p, size_t c) {
            Pack<floatX, W> result, slope;
            for (int j = 0; j < W; j++) {
                const float g = load(gate[p].x[j]), value = load(in[p].x[j]), d = load(gradient[p].x[j]);
                float one_minus_s, sg = sigmoid(g, &one_minus_s);
                const float weighted = d * load(scale[p].x[j]), open = g * sg, da = weighted - value * open * pull;
                result.x[j] = store(rstd * (GATE_FIRST ? da * open : weighted * open - value * pull));
                slope.x[j] = store((GATE_FIRST ? da : weighted) * value * rstd * (sg + g * sg * one_minus_s));
                dw[p][j] += d * value * rstd * g * sg;
            }
            pack_write(dx + row * s.V + c, result);
            if (dz) pack_write(dz + gate_place(s, row) + c, slope);
        });
    }
    if (!lines) return;
    const unsigned threads = blockDim.x * blockDim.y, self = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
    for (int p = 0; p < P; p++) { // adds up the block's rows (threadIdx.y) in order
        const unsigned c = (threadIdx.x + p * blockDim.x) * W;
        if (blockDim.y > 1) {
            for (int j = 0; j < W; j++) strips[j * threads + self] = dw[p][j];
            __syncthreads();
            for (unsigned i = self + blockDim.x; threadIdx.y == 0 && i < threads; i += blockDim.x)
                for (int j = 0; j < W; j++) dw[p][j] += strips[j * threads + i];
            __syncthreads();
        }
        for (int j = 0; j < W && threadIdx.y == 0 && c < s.V; j++)
            lines[(GATE_FIRST ? blockIdx.x * s.heads + blockIdx.y : blockIdx.x) * s.V + c + j] = dw[p][j];
    }
}

static void cuda_gated_norm_backward(Stored *dx, Stored *dz, Summed *dw, const Stored *dout, const Stored *x,
                                     const Stored *z, const Stored *w, size_t n, size_t heads, size_t V, size_t stride,
                                     int gate_first, double eps, Summed *scratch) {
    const size_t of_w = gate_first ? heads : 1; // heads with weights of their own
    size_t blocks = 0;
    with_gated_norm(
        all_aligned(dx, dz, dout, x, z, w), V, stride, gate_first, [&](auto W, auto P, auto FIRST, dim3 threads) {
            blocks = norm_blocks(n * heads / of_w, threads.y);
            LAUNCH((gated_norm_backward_kernel<W, P, FIRST>), dim3((unsigned)blocks, (unsigned)of_w), threads, 0)
            ((floatX *)dx, (floatX *)dz, dw ? (float *)scratch : NULL, (const floatX *)dout, (const floatX *)x,
             (const floatX *)z, (const floatX *)w, gated_shape(n, heads, V, stride, eps));
        });
    if (dw) column_sums(dw, (const float *)scratch, blocks, of_w * V, of_w * V);
}

#endif
