/*
Attention sinks of op set "cuda": one more term of each head's softmax, which reads no value. A row is one head's output
of a token; a power of two of threads, at most a warp, shares it. Bytes moved per element of out: forward 2 s, backward
2 s.
*/
#ifndef LLMC_CUDA_SINK_CUH
#define LLMC_CUDA_SINK_CUH
#include "bias.cuh"

constexpr unsigned SINK_THREADS = 256;

// Returns the threads of a block. x: threads of a row of `packs` packs; y: rows
static dim3 sink_threads(size_t packs) {
    unsigned x = 4;
    while (x < LANES && x < packs) x *= 2;
    return dim3(x, SINK_THREADS / x);
}

// Adds sinks. With l = lse before and z = l - sink: out *= s(z), lse = l - log s(z), s the logistic function.
template <int W>
__global__ void sink_forward_kernel(floatX *out, float *lse, const floatX *sinks, size_t rows, size_t NH, size_t HD) {
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    const bool valid = row < rows;
    const float before = valid ? lse[row] : 0.0f, sink = valid ? load(sinks[row % NH]) : 0.0f, z = before - sink;
    const float factor = 1.0f / (1.0f + expf(-z));
    __syncwarp(); // all threads of a row have read lse
    if (!valid) return;
    if (threadIdx.x == 0) lse[row] = fmaxf(before, sink) + log1pf(expf(-fabsf(z)));
    for (size_t c = threadIdx.x * W; c < HD; c += blockDim.x * W) {
        Pack<floatX, W> values = pack_read<W>(out + row * HD + c);
        for (int j = 0; j < W; j++) values.x[j] = store(factor * load(values.x[j]));
        pack_write(out + row * HD + c, values);
    }
}

static void cuda_sink_forward(Stored *out, Summed *lse, const Stored *sinks, size_t n, size_t NH, size_t HD) {
    with_width<floatX>(HD % full_pack<floatX> == 0 && all_aligned(out), [&](auto W) {
        const dim3 threads = sink_threads(HD / W);
        LAUNCH((sink_forward_kernel<W>), (unsigned)blocks_for(n * NH, threads.y), threads, 0)
        ((floatX *)out, (float *)lse, (const floatX *)sinks, n * NH, NH, HD);
    });
}

// Computes lines[gridDim.x, NH] = each block's part of dsinks. threadIdx.y is a head; a block takes tokens with the
// grid's stride.
template <int W>
__global__ void sink_backward_kernel(float *lines, const floatX *dout, const floatX *out, const float *lse,
                                     const floatX *sinks, size_t n, size_t NH, size_t HD) {
    const size_t head = (size_t)blockIdx.y * blockDim.y + threadIdx.y;
    const bool valid = head < NH;
    const float sink = valid ? load(sinks[head]) : 0.0f;
    float sum = 0.0f;
#pragma unroll 2
    for (size_t t = blockIdx.x; t < n && valid; t += gridDim.x) {
        const size_t row = t * NH + head;
        const float share = expf(sink - lse[row]);
        float dot = 0.0f;
        for (size_t c = threadIdx.x * W; c < HD; c += blockDim.x * W) {
            const Pack<floatX, W> d = pack_read<W>(dout + row * HD + c), values = pack_read<W>(out + row * HD + c);
            for (int j = 0; j < W; j++) dot += load(d.x[j]) * load(values.x[j]);
        }
        sum += share * dot;
    }
    for (unsigned step = blockDim.x / 2; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (valid && threadIdx.x == 0) lines[blockIdx.x * NH + head] = -sum;
}

static void cuda_sink_backward(Summed *dsinks, const Stored *dout, const Stored *out, const Summed *lse,
                               const Stored *sinks, size_t n, size_t NH, size_t HD, Summed *scratch) {
    const size_t blocks = min_size(n, GPU_NORM_BLOCKS);
    with_width<floatX>(HD % full_pack<floatX> == 0 && all_aligned(dout, out), [&](auto W) {
        const dim3 threads = sink_threads(HD / W);
        LAUNCH((sink_backward_kernel<W>), dim3((unsigned)blocks, (unsigned)blocks_for(NH, threads.y)), threads, 0)
        ((float *)scratch, (const floatX *)dout, (const floatX *)out, (const float *)lse, (const floatX *)sinks, n, NH,
         HD);
    });
    column_sums(dsinks, (const float *)scratch, blocks, NH, NH);
}

#endif
