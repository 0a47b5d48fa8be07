/*
The gate of attention's output in op set "cuda": out = x s(gate) with the logistic function s. Also splits q_proj's rows
into queries and gates, head by head. A thread takes a pack of 16 bytes of each tensor. Bytes moved per element:
split_heads 4 s per element of a half, the gate 3 s forward, 5 s backward.
*/
#ifndef LLMC_CUDA_GATE_CUH
#define LLMC_CUDA_GATE_CUH
#include "activation.cuh"

template <int W, bool JOIN>
__global__ void split_heads_kernel(floatX *joined, floatX *first, floatX *second, size_t rows, size_t HD) {
    FOR_EACH_ROW(row, c, W, rows, HD) {
        floatX *const both = joined + 2 * row * HD + c, *const a = first + row * HD + c,
                      *const b = second + row * HD + c;
        pack_write(JOIN ? both : a, pack_read<W>(JOIN ? a : both));
        pack_write(JOIN ? both + HD : b, pack_read<W>(JOIN ? b : both + HD));
    }
}

static void cuda_split_heads(Stored *joined, Stored *first, Stored *second, size_t n, size_t heads, size_t HD,
                             int join) {
    with_width<floatX>(HD % full_pack<floatX> == 0 && all_aligned(joined, first, second), [&](auto W) {
        with_flag(join, [&](auto JOIN) {
            LAUNCH((split_heads_kernel<W, JOIN>), rows_grid(n * heads, HD / W), rows_threads(HD / W), 0)
            ((floatX *)joined, (floatX *)first, (floatX *)second, n * heads, HD);
        });
    });
}

template <int W> __global__ void gate_forward_kernel(floatX *out, const floatX *x, const floatX *gate, size_t packs) {
    FOR_EACH_PACK(i, packs) {
        const Pack<floatX, W> in = pack_read<W>(x + i * W), z = pack_read<W>(gate + i * W);
        Pack<floatX, W> result;
        for (int j = 0; j < W; j++) {
            float one_minus_s;
            result.x[j] = store(load(in.x[j]) * sigmoid(load(z.x[j]), &one_minus_s));
        }
        pack_write(out + i * W, result);
    }
}

// Runs gates of `width` elements, a warp for each: out = x s, or with BACK out = dout s and dgate = s' sum of dout x.
template <bool BACK>
__global__ void gate_wide_kernel(floatX *out, floatX *dgate, const floatX *dout, const floatX *x, const floatX *gate,
                                 size_t gates, size_t width) {
    for (size_t g = (size_t)blockIdx.x * blockDim.y + threadIdx.y; g < gates; g += (size_t)gridDim.x * blockDim.y) {
        float one_minus_s, sum = 0.0f;
        const float s = sigmoid(load(gate[g]), &one_minus_s);
        for (size_t i = g * width + threadIdx.x; i < (g + 1) * width; i += LANES) {
            const float in = load(x[i]), d = BACK ? load(dout[i]) : in;
            sum += d * in;
            out[i] = store(d * s);
        }
        if (BACK) sum = warp_sum(sum);
        if (BACK && threadIdx.x == 0) dgate[g] = store(sum * s * one_minus_s);
    }
}

template <bool BACK>
static void gate_wide(Stored *out, Stored *dgate, const Stored *dout, const Stored *x, const Stored *gate, size_t gates,
                      size_t width) {
    LAUNCH((gate_wide_kernel<BACK>), loop_grid(gates * LANES), dim3(LANES, LOOP_THREADS / LANES), 0)
    ((floatX *)out, (floatX *)dgate, (const floatX *)dout, (const floatX *)x, (const floatX *)gate, gates, width);
}

static void cuda_gate_forward(Stored *out, const Stored *x, const Stored *gate, size_t count, size_t width) {
    if (width > 1) return gate_wide<false>(out, NULL, NULL, x, gate, count / width, width);
    with_width<floatX>(count % full_pack<floatX> == 0 && all_aligned(out, x, gate), [&](auto W) {
        LAUNCH((gate_forward_kernel<W>), loop_grid(count / W), LOOP_THREADS, 0)
        ((floatX *)out, (const floatX *)x, (const floatX *)gate, count / W);
    });
}

template <int W>
__global__ void gate_backward_kernel(floatX *dx, floatX *dgate, const floatX *dout, const floatX *x, const floatX *gate,
                                     size_t packs) {
    FOR_EACH_PACK(i, packs) {
        const Pack<floatX, W> d = pack_read<W>(dout + i * W), in = pack_read<W>(x + i * W),
                              z = pack_read<W>(gate + i * W);
        Pack<floatX, W> result, slope;
        for (int j = 0; j < W; j++) {
            float one_minus_s, s = sigmoid(load(z.x[j]), &one_minus_s);
            result.x[j] = store(load(d.x[j]) * s);
            slope.x[j] = store(load(d.x[j]) * load(in.x[j]) * s * one_minus_s);
        }
        pack_write(dx + i * W, result);
        pack_write(dgate + i * W, slope);
    }
}

static void cuda_gate_backward(Stored *dx, Stored *dgate, const Stored *dout, const Stored *x, const Stored *gate,
                               size_t count, size_t width) {
    if (width > 1) return gate_wide<true>(dx, dgate, dout, x, gate, count / width, width);
    with_width<floatX>(count % full_pack<floatX> == 0 && all_aligned(dx, dgate, dout, x, gate), [&](auto W) {
        LAUNCH((gate_backward_kernel<W>), loop_grid(count / W), LOOP_THREADS, 0)
        ((floatX *)dx, (floatX *)dgate, (const floatX *)dout, (const floatX *)x, (const floatX *)gate, count / W);
    });
}

#endif
