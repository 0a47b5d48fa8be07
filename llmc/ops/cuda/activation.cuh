/*
SwiGLU, GELU and GeGLU of op set "cuda", forward and backward, in the formulas of llmc/ops/cpu/activation.h: everything
through the logistic function, so that the far negative side keeps its digits. A thread takes a pack of 16 bytes of
each tensor. Bytes moved per element of out: a gated one 3 s forward, 5 s backward; gelu 2 s and 3 s.
*/
#ifndef LLMC_CUDA_ACTIVATION_CUH
#define LLMC_CUDA_ACTIVATION_CUH
#include "platform.cuh"

// s(z) = 1 / (1 + exp(-z)), and 1 - s(z) without cancellation
__device__ inline float sigmoid(float z, float *one_minus) {
    float e = expf(-fabsf(z)), large = 1.0f / (1.0f + e), small = e * large;
    *one_minus = z >= 0.0f ? small : large;
    return z >= 0.0f ? large : small;
}

// ---- GELU, tanh form: x s(z(x)) with z(x) = 2 sqrt(2/pi) (x + 0.044715 x^3) -----------------------------------------
constexpr float GELU_SCALE = 1.5957691216057308f, GELU_CUBIC = GELU_SCALE * 0.044715f;

// A gate's z, whose logistic function it is multiplied by, and the slope of z; GELU or silu
template <bool GELU> __device__ inline float gate_z(float g) {
    return GELU ? g * (GELU_SCALE + GELU_CUBIC * g * g) : g;
}
template <bool GELU> __device__ inline float gate_slope(float g) {
    return GELU ? GELU_SCALE + 3.0f * GELU_CUBIC * g * g : 1.0f;
}

__device__ inline floatX gelu(floatX in) {
    float x = load(in), one_minus_s, s = sigmoid(x * (GELU_SCALE + GELU_CUBIC * x * x), &one_minus_s);
    return store(x * s);
}

__device__ inline floatX gelu_gradient(floatX dout, floatX in) {
    float x = load(in), one_minus_s, s = sigmoid(x * (GELU_SCALE + GELU_CUBIC * x * x), &one_minus_s);
    return store(load(dout) * (s + x * s * one_minus_s * (GELU_SCALE + 3.0f * GELU_CUBIC * x * x)));
}

template <int W> __global__ void gelu_forward_kernel(floatX *out, const floatX *in, size_t packs) {
    FOR_EACH_PACK(i, packs) {
        Pack<floatX, W> x = pack_read<W>(in + i * W);
        for (int j = 0; j < W; j++) x.x[j] = gelu(x.x[j]);
        pack_write(out + i * W, x);
    }
}

template <int W> __global__ void gelu_backward_kernel(floatX *dx, const floatX *dout, const floatX *in, size_t packs) {
    FOR_EACH_PACK(i, packs) {
        Pack<floatX, W> x = pack_read<W>(in + i * W), d = pack_read<W>(dout + i * W);
        for (int j = 0; j < W; j++) d.x[j] = gelu_gradient(d.x[j], x.x[j]);
        pack_write(dx + i * W, d);
    }
}

static void gelu_forward(Stored *out, const Stored *x, size_t count) {
    with_width<floatX>(count % full_pack<floatX> == 0 && all_aligned(out, x), [&](auto W) {
        LAUNCH((gelu_forward_kernel<W>), loop_grid(count / W), LOOP_THREADS, 0)
        ((floatX *)out, (const floatX *)x, count / W);
    });
}

static void gelu_backward(Stored *dx, const Stored *dout, const Stored *x, size_t count) {
    with_width<floatX>(count % full_pack<floatX> == 0 && all_aligned(dx, dout, x), [&](auto W) {
        LAUNCH((gelu_backward_kernel<W>), loop_grid(count / W), LOOP_THREADS, 0)
        ((floatX *)dx, (const floatX *)dout, (const floatX *)x, count / W);
    });
}

// ---- gated: out = silu(gate) * up, or gelu(gate) * up ---------------------------------------------------------------
template <int W, bool GELU>
__global__ void gated_forward_kernel(floatX *out, const floatX *gate_up, size_t n, size_t FF) {
    const size_t packs = FF / W;
    FOR_EACH_PACK(i, n * packs) {
        const size_t t = i / packs, c = i % packs * W;
        const Pack<floatX, W> gate = pack_read<W>(gate_up + t * 2 * FF + c),
                              up = pack_read<W>(gate_up + t * 2 * FF + FF + c);
        Pack<floatX, W> result;
        for (int j = 0; j < W; j++) {
            float g = load(gate.x[j]), one_minus_s, s = sigmoid(gate_z<GELU>(g), &one_minus_s);
            result.x[j] = store(g * s * load(up.x[j]));
        }
        pack_write(out + t * FF + c, result);
    }
}

template <int W, bool GELU>
__global__ void gated_backward_kernel(floatX *dgate_up, const floatX *dout, const floatX *gate_up, size_t n,
                                      size_t FF) {
    const size_t packs = FF / W;
    FOR_EACH_PACK(i, n * packs) {
        const size_t t = i / packs, c = i % packs * W, row = t * 2 * FF + c;
        const Pack<floatX, W> gate = pack_read<W>(gate_up + row), up = pack_read<W>(gate_up + row + FF),
                              gradient = pack_read<W>(dout + t * FF + c);
        Pack<floatX, W> dgate, dup;
        for (int j = 0; j < W; j++) {
            float g = load(gate.x[j]), d = load(gradient.x[j]), one_minus_s, s = sigmoid(gate_z<GELU>(g), &one_minus_s);
            dgate.x[j] = store(d * load(up.x[j]) * (s + g * s * one_minus_s * gate_slope<GELU>(g)));
            dup.x[j] = store(d * g * s);
        }
        pack_write(dgate_up + row, dgate);
        pack_write(dgate_up + row + FF, dup);
    }
}

template <bool GELU> static void gated_forward(Stored *out, const Stored *gate_up, size_t n, size_t FF) {
    with_width<floatX>(FF % full_pack<floatX> == 0 && all_aligned(out, gate_up), [&](auto W) {
        LAUNCH((gated_forward_kernel<W, GELU>), loop_grid(n * FF / W), LOOP_THREADS, 0)
        ((floatX *)out, (const floatX *)gate_up, n, FF);
    });
}

template <bool GELU>
static void gated_backward(Stored *dgate_up, const Stored *dout, const Stored *gate_up, size_t n, size_t FF) {
    with_width<floatX>(FF % full_pack<floatX> == 0 && all_aligned(dgate_up, dout, gate_up), [&](auto W) {
        LAUNCH((gated_backward_kernel<W, GELU>), loop_grid(n * FF / W), LOOP_THREADS, 0)
        ((floatX *)dgate_up, (const floatX *)dout, (const floatX *)gate_up, n, FF);
    });
}

static void cuda_activation_forward(Stored *out, const Stored *in, ActivationKind kind, size_t n, size_t FF) {
    switch (kind) {
    case ACTIVATION_SWIGLU: gated_forward<false>(out, in, n, FF); break;
    case ACTIVATION_GEGLU: gated_forward<true>(out, in, n, FF); break;
    case ACTIVATION_GELU: gelu_forward(out, in, n * FF);
    }
}

static void cuda_activation_backward(Stored *din, const Stored *dout, const Stored *in, ActivationKind kind, size_t n,
                                     size_t FF) {
    switch (kind) {
    case ACTIVATION_SWIGLU: gated_backward<false>(din, dout, in, n, FF); break;
    case ACTIVATION_GEGLU: gated_backward<true>(din, dout, in, n, FF); break;
    case ACTIVATION_GELU: gelu_backward(din, dout, in, n * FF);
    }
}

#endif
