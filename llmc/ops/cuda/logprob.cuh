/*
Op set "cuda": log-probabilities of the targets and the gradient of the logits, one block for a row of logits[n,V]. The
first reading finds a row's maximum and its sum of exponentials; a thread rescales its sum when its maximum grows. The
second reading overwrites the row with its gradient. It goes backwards, because the row's end may still be in a cache.
As in llmc/ops/cpu/logprob.h the other words are summed without the target, so that 1 - p does not cancel. Sums over the
vocabulary are double. Bytes moved per logit: 3 s; how much of the second reading the L2 cache serves has not been
measured (dev/cuda/logprob.cu).
*/
#ifndef LLMC_CUDA_LOGPROB_CUH
#define LLMC_CUDA_LOGPROB_CUH
#include "platform.cuh"
#include "llmc/ops/formulas.h"
#include <float.h>

constexpr unsigned LOGPROB_THREADS = 512;

template <bool WEIGHTED = false>
__device__ inline void see(Exponentials *e, const float *x, int count, float inverse_temperature) {
    float top = e->top, sum = 0.0f, weighted = 0.0f;
    for (int j = 0; j < count; j++) top = x[j] > top ? x[j] : top;
    if (top > e->top) raise_top(e, top, (double)inverse_temperature);
    for (int j = 0; j < count; j++) {
        const float z = (x[j] - top) * inverse_temperature, p = expf(z);
        sum += p;
        if (WEIGHTED) weighted += p * (z < LEAST_Z ? LEAST_Z : z);
    }
    e->sum += (double)sum;
    if (WEIGHTED) e->weighted += (double)weighted;
}

__device__ inline Exponentials merged(Exponentials a, Exponentials b, float inverse_temperature) {
    const float top = a.top > b.top ? a.top : b.top;
    raise_top(&a, top, (double)inverse_temperature);
    raise_top(&b, top, (double)inverse_temperature);
    return Exponentials{top, a.sum + b.sum, a.weighted + b.weighted};
}

// Cut of a row, which may start at any address (odd strides): elements [head, tail) are whole packs; the other elements
// are read singly.
struct RowCut {
    size_t head, packs, tail, singles;
};

__device__ inline RowCut row_cut(const floatX *row, size_t V) {
    constexpr size_t W = full_pack<floatX>;
    RowCut cut;
    cut.head = (16 - (uintptr_t)row % 16) % 16 / sizeof(floatX);
    if (cut.head > V) cut.head = V;
    cut.packs = (V - cut.head) / W;
    cut.tail = cut.head + cut.packs * W;
    cut.singles = V - cut.packs * W;
    return cut;
}

__device__ inline size_t single_of(RowCut cut, size_t i) { return i < cut.head ? i : cut.tail + i - cut.head; }

// Calls f(W, first element) for this thread's packs and single elements.
template <bool BACKWARDS, typename F> __device__ inline void for_row(RowCut cut, F f) {
    constexpr int W = full_pack<floatX>;
    for (size_t i = threadIdx.x; i < cut.packs; i += blockDim.x)
        f(Width<W>(), cut.head + (BACKWARDS ? cut.packs - 1 - i : i) * W);
    for (size_t i = threadIdx.x; i < cut.singles; i += blockDim.x) f(Width<1>(), single_of(cut, i));
}

// The soft cap of logits. Infinite logits stay infinite.
template <bool CAPPED> struct SoftCap { float cap, inverse; };
template <bool CAPPED> __device__ inline float capped(float x, SoftCap<CAPPED> c) {
    return CAPPED && fabsf(x) <= FLT_MAX ? c.cap * tanhf(x * c.inverse) : x;
}
// Returns 1 - tanh(x / cap)^2 without cancellation.
template <bool CAPPED> __device__ inline float cap_slope(float x, SoftCap<CAPPED> c) {
    const float e = expf(-2.0f * fabsf(x * c.inverse)), half = 1.0f / (1.0f + e);
    return CAPPED ? 4.0f * e * half * half : 1.0f;
}

template <bool WEIGHTED, bool CAPPED>
__device__ inline Exponentials row_exponentials(const floatX *x, RowCut cut, size_t target, SoftCap<CAPPED> cap,
                                                float inverse_temperature) {
    Exponentials e = {-FLT_MAX, 0.0, 0.0};
    for_row<false>(cut, [&]<int W>(Width<W>, size_t first) {
        const Pack<floatX, W> pack = pack_read<W>(x + first);
        float value[W];
        for (int j = 0; j < W; j++) value[j] = capped(load(pack.x[j]), cap);
        if (target - first < W) // the target is in this pack
            for (int j = 0; j < W; j++) value[j] = first + j == target ? -INFINITY : value[j];
        see<WEIGHTED>(&e, value, W, inverse_temperature);
    });
    return e;
}

// Computes x = scale * exp((x - top) / temperature), times the cap's slope with a cap, and `gradient` at the target.
// Goes backwards, because the row's end was read last.
template <bool CAPPED>
__device__ inline void row_gradient(floatX *x, RowCut cut, size_t target, float top, float scale, float gradient,
                                    SoftCap<CAPPED> cap, float inverse_temperature) {
    for_row<true>(cut, [&]<int W>(Width<W>, size_t first) {
        Pack<floatX, W> pack = pack_read<W>(x + first);
        for (int j = 0; j < W; j++) {
            const float logit = load(pack.x[j]), p = expf((capped(logit, cap) - top) * inverse_temperature);
            pack.x[j] = store(scale * p * cap_slope(logit, cap));
        }
        if (target - first < W)
            for (int j = 0; j < W; j++) pack.x[j] = first + j == target ? store(gradient) : pack.x[j];
        pack_write(x + first, pack);
    });
}

__device__ inline void row_zero(floatX *x, RowCut cut) {
    for_row<false>(cut, [&]<int W>(Width<W>, size_t first) {
        Pack<floatX, W> zeros;
        for (int j = 0; j < W; j++) zeros.x[j] = store(0.0f);
        pack_write(x + first, zeros);
    });
}

template <bool ENTROPY, bool CAPPED>
__global__ void __launch_bounds__(LOGPROB_THREADS)
    logprob_kernel(float *logp, float *entropy, floatX *logits, const int32_t *targets, const float *weight, size_t V,
                   size_t stride, SoftCap<CAPPED> cap, double inverse) {
    SHARED(Exponentials, parts, LOGPROB_THREADS);
    const size_t t = blockIdx.x;
    const bool counts = targets[t] >= 0, gradient = weight != NULL && counts && weight[t] != 0.0f;
    const size_t target = counts ? (size_t)targets[t] : 0;
    floatX *x = logits + t * stride;
    const RowCut cut = row_cut(x, V);
    if (!counts) {
        if (threadIdx.x == 0) {
            logp[t] = 0.0f;
            if (ENTROPY) entropy[t] = 0.0f;
        }
        if (weight != NULL) row_zero(x, cut);
        return;
    }
    const float logit = load(x[target]), value = capped(logit, cap);
    parts[threadIdx.x] = row_exponentials<ENTROPY>(x, cut, target, cap, (float)inverse);
    for (unsigned step = LOGPROB_THREADS / 2; step; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step)
            parts[threadIdx.x] = merged(parts[threadIdx.x], parts[threadIdx.x + step], (float)inverse);
    }
    __syncthreads(); // all threads have also read the target's logit, so the row may be overwritten
    Exponentials all = parts[0];
    if (value > all.top) raise_top(&all, value, inverse);
    const float top = all.top;
    const double others = all.sum, z = ((double)value - (double)top) * inverse, itself = exp(z), sum = itself + others;
    if (threadIdx.x == 0) {
        logp[t] = (float)(itself > others ? -log1p(others / itself) : z - log(sum));
        if (ENTROPY)
            entropy[t] = (float)((itself == 1.0 ? log1p(others) : log(sum)) -
                                 (all.weighted + fmax(z, (double)LEAST_Z) * itself) / sum);
    }
    if (gradient) {
        const double slope = (double)weight[t] * inverse;
        row_gradient(x, cut, target, top, (float)(-slope / sum),
                     (float)(slope * (others / sum)) * cap_slope(logit, cap), cap, (float)inverse);
    } else if (weight != NULL) {
        row_zero(x, cut);
    }
}

static void cuda_logprob(Summed *logp, Summed *entropy, Stored *logits, const int32_t *targets, const Summed *weight,
                         size_t n, size_t V, size_t stride, Temperature temperature) {
    with_flag(entropy != NULL, [&](auto ENTROPY) {
        with_flag(temperature.cap > 0, [&](auto CAPPED) {
            const SoftCap<CAPPED> cap = {(float)temperature.cap, (float)(1 / temperature.cap)};
            LAUNCH((logprob_kernel<ENTROPY, CAPPED>), dim3((unsigned)n), LOGPROB_THREADS, 0)
            ((float *)logp, (float *)entropy, (floatX *)logits, targets, (const float *)weight, V, stride, cap,
             1 / temperature.divisor);
        });
    });
}

#endif
