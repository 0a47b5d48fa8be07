/*
SwiGLU, GELU, GeGLU, the clamped SwiGLU and the squared ReLU of op set "cuda", forward and backward, in the formulas of
llmc/ops/cpu/activation.h: all by the logistic function, so that the far negative side keeps its digits. A thread takes
a pack of 16 bytes of each tensor. In the clamped SwiGLU gates and ups alternate, so a thread takes two neighbouring
packs of them. Bytes moved per element of out: 3 s forward and 5 s backward with a gate; gelu 2 s and 3 s.
*/
#ifndef LLMC_CUDA_ACTIVATION_CUH
#define LLMC_CUDA_ACTIVATION_CUH
#include "platform.cuh"
#include "llmc/ops/formulas.h"

// Returns s(z) = 1 / (1 + exp(-z)), and 1 - s(z) without cancellation.
__device__ inline float sigmoid(float z, float *one_minus) {
    const float e = fast_exp2(-LOG2_E * fabsf(z)), large = fast_reciprocal(1.0f + e), small = e * large;
    *one_minus = z >= 0.0f ? small : large;
    return z >= 0.0f ? large : small;
}

// ---- clamped: out = g s(alpha g) (u + 1), g = min(gate, limit), u = min(max(up, -limit), limit) ---------------------
struct Clamp {
    float alpha, limit;
};
__device__ inline float clamped_gate(float x, Clamp clamp) {
    return x > clamp.limit ? clamp.limit : x;
} // a NaN stays NaN
__device__ inline float clamped_up(float x, Clamp clamp) {
    return x < -clamp.limit ? -clamp.limit : clamped_gate(x, clamp);
}

__device__ inline float clamped(float gate, float up, Clamp clamp) {
    float one_minus_s;
    const float g = clamped_gate(gate, clamp);
    return g * sigmoid(clamp.alpha * g, &one_minus_s) * (clamped_up(up, clamp) + 1.0f);
}
static Clamp clamp_of(Activation activation) { return {(float)activation.alpha, (float)activation.limit}; }

template <int W>
__global__ void clamped_forward_kernel(floatX *out, const floatX *in, size_t n, size_t FF, Clamp clamp) {
    FOR_EACH_ROW(t, c, W, n, FF) {
        Pack<floatX, W> both[2], result;
        for (int i = 0; i < 2; i++) both[i] = pack_read<W>(in + 2 * (t * FF + c) + i * W);
        for (int j = 0; j < W; j++)
            result.x[j] = store(
                clamped(load(both[2 * j / W].x[2 * j % W]), load(both[(2 * j + 1) / W].x[(2 * j + 1) % W]), clamp));
        pack_write(out + t * FF + c, result);
    }
}

template <int W>
__global__ void clamped_backward_kernel(floatX *din, const floatX *dout, const floatX *in, size_t n, size_t FF,
                                        Clamp clamp) {
    FOR_EACH_ROW(t, c, W, n, FF) {
        const Pack<floatX, W> gradient = pack_read<W>(dout + t * FF + c);
        Pack<floatX, W> both[2];
        for (int i = 0; i < 2; i++) both[i] = pack_read<W>(in + 2 * (t * FF + c) + i * W);
        for (int j = 0; j < W; j++) {
            floatX *const gate = &both[2 * j / W].x[2 * j % W], *const up = &both[(2 * j + 1) / W].x[(2 * j + 1) % W];
            const float g = clamped_gate(load(*gate), clamp), u = clamped_up(load(*up), clamp), d = load(gradient.x[j]);
            float one_minus_s;
            const float s = sigmoid(clamp.alpha * g, &one_minus_s);
            *gate = store(g == load(*gate) ? d * (u + 1.0f) * s * (1.0f + clamp.alpha * g * one_minus_s) : 0.0f);
            *up = store(u == load(*up) ? d * g * s : 0.0f);
        }
        for (int i = 0; i < 2; i++) pack_write(din + 2 * (t * FF + c) + i * W, both[i]);
    }
}

// ---- out = silu(gate) * up, or gelu(gate) * up, or without `up` gelu(in) or max(in, 0)^2 ----------------------------
template <int KIND> __device__ inline float activated(float g) {
    float one_minus_s;
    if (KIND == ACTIVATION_RELU2) return g < 0.0f ? 0.0f : g * g; // a NaN stays NaN
    return g * sigmoid(KIND == ACTIVATION_SWIGLU ? g : GELU_Z(g), &one_minus_s);
}

template <int W, int KIND>
__global__ void activation_forward_kernel(floatX *out, const floatX *in, size_t n, size_t FF) {
    constexpr bool GATED = KIND != ACTIVATION_GELU && KIND != ACTIVATION_RELU2;
    FOR_EACH_ROW(t, c, W, n, FF) {
        const size_t row = t * 2 * FF + c;
        const Pack<floatX, W> gate = pack_read<W>(in + row);
        Pack<floatX, W> up, result;
        if (GATED) up = pack_read<W>(in + row + FF);
        for (int j = 0; j < W; j++) {
            const float value = activated<KIND>(load(gate.x[j]));
            result.x[j] = store(GATED ? value * load(up.x[j]) : value);
        }
        pack_write(out + t * FF + c, result);
    }
}

template <int W, int KIND>
__global__ void activation_backward_kernel(floatX *din, const floatX *dout, const floatX *in, size_t n, size_t FF) {
    constexpr bool GATED = KIND != ACTIVATION_GELU && KIND != ACTIVATION_RELU2;
    FOR_EACH_ROW(t, c, W, n, FF) {
        const size_t row = t * 2 * FF + c;
        const Pack<floatX, W> gate = pack_read<W>(in + row), gradient = pack_read<W>(dout + t * FF + c);
        Pack<floatX, W> up, dgate, dup;
        if (GATED) up = pack_read<W>(in + row + FF);
        for (int j = 0; j < W; j++) {
            float g = load(gate.x[j]), d = load(gradient.x[j]), one_minus_s,
                  s = sigmoid(KIND == ACTIVATION_SWIGLU ? g : GELU_Z(g), &one_minus_s);
            const float slope = KIND == ACTIVATION_RELU2
                                    ? (g < 0.0f ? 0.0f : 2.0f * g)
                                    : s + g * s * one_minus_s * (KIND == ACTIVATION_SWIGLU ? 1 : GELU_SLOPE(g));
            dgate.x[j] = store((GATED ? d * load(up.x[j]) : d) * slope);
            if (GATED) dup.x[j] = store(d * g * s);
        }
        pack_write(din + row, dgate);
        if (GATED) pack_write(din + row + FF, dup);
    }
}

// Calls launch(W, KIND, rows, columns of out, their grid, its threads). Without a gate all elements are one row.
template <typename F> static void with_activation(ActivationKind kind, size_t n, size_t FF, bool aligned, F launch) {
    const size_t rows = activation_gates(kind) ? n : 1, columns = n * FF / rows;
    with_width<floatX>(columns % full_pack<floatX> == 0 && aligned, [&](auto W) {
        const auto run = [&](auto KIND) {
            launch(W, KIND, rows, columns, rows_grid(rows, columns / W), rows_threads(columns / W));
        };
        switch (kind) {
        case ACTIVATION_SWIGLU: run(Width<ACTIVATION_SWIGLU>()); break;
        case ACTIVATION_GEGLU: run(Width<ACTIVATION_GEGLU>()); break;
        case ACTIVATION_GELU: run(Width<ACTIVATION_GELU>()); break;
        case ACTIVATION_CLAMPED: run(Width<ACTIVATION_CLAMPED>()); break;
        case ACTIVATION_RELU2: run(Width<ACTIVATION_RELU2>());
        }
    });
}

static void cuda_activation_forward(Stored *out, const Stored *in, Activation activation, size_t n, size_t FF) {
    const Clamp clamp = clamp_of(activation);
    with_activation(activation.kind, n, FF, all_aligned(out, in),
                    [&](auto W, auto KIND, size_t rows, size_t columns, dim3 grid, dim3 threads) {
                        if constexpr (KIND == ACTIVATION_CLAMPED) {
                            LAUNCH((clamped_forward_kernel<W>), grid, threads, 0)
                            ((floatX *)out, (const floatX *)in, rows, columns, clamp);
                        } else {
                            LAUNCH((activation_forward_kernel<W, KIND>), grid, threads, 0)
                            ((floatX *)out, (const floatX *)in, rows, columns);
                        }
                    });
}

static void cuda_activation_backward(Stored *din, const Stored *dout, const Stored *in, Activation activation, size_t n,
                                     size_t FF) {
    const Clamp clamp = clamp_of(activation);
    with_activation(activation.kind, n, FF, all_aligned(din, dout, in),
                    [&](auto W, auto KIND, size_t rows, size_t columns, dim3 grid, dim3 threads) {
                        if constexpr (KIND == ACTIVATION_CLAMPED) {
                            LAUNCH((clamped_backward_kernel<W>), grid, threads, 0)
                            ((floatX *)din, (const floatX *)dout, (const floatX *)in, rows, columns, clamp);
                        } else {
                            LAUNCH((activation_backward_kernel<W, KIND>), grid, threads, 0)
                            ((floatX *)din, (const floatX *)dout, (const floatX *)in, rows, columns);
                        }
                    });
}

#endif
