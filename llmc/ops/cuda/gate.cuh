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

static void cuda_gate_forward(Stored *out, const Stored *x, const Stored *gate, size_t count) {
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
                               size_t count) {
    with_width<floatX>(count % full_pack<floatX> == 0 && all_aligned(dx, dgate, dout, x, gate), [&](auto W) {
        LAUNCH((gate_backward_kernel<W>), loop_grid(count / W), LOOP_THREADS, 0)
        ((floatX *)dx, (floatX *)dgate, (const floatX *)dout, (const floatX *)x, (const floatX *)gate, count / W);
    });
}

#endif
