/*
SwiGLU, GELU and GeGLU (a GELU that gates), forward and backward, by the logistic function s(z) = 1 / (1 + exp(-z)):

    silu(g) = g s(g)                  silu'(g) = s + g s (1 - s)
    gelu(x) = x s(z(x))               gelu'(x) = s + x s (1 - s) z'(x)

with z(x) = 2 sqrt(2/pi) (x + 0.044715 x^3), because (1 + tanh(z/2)) / 2 = s(z). The far negative side keeps all its
digits, where 1 + tanh would cancel.
*/
#ifndef LLMC_CPU_ACTIVATION_H
#define LLMC_CPU_ACTIVATION_H
#include "elements.h"
#include "simd_math.h"
#include "llmc/ops/formulas.h"

static inline void gated_forward(Stored *out_, const Stored *gate_up, size_t n, size_t FF, const int gelu) {
#pragma omp parallel for schedule(static) if (n * FF >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        const floatX *gate = (const floatX *)gate_up + t * 2 * FF, *up = gate + FF;
        floatX *out = (floatX *)out_ + t * FF;
#pragma omp simd
        for (size_t i = 0; i < FF; i++) {
            floatS g = load(gate[i]), one_minus_s, s = sigmoid(gate_z(g, gelu), &one_minus_s);
            out[i] = store(g * s * load(up[i]));
        }
    }
}

static inline void gated_backward(Stored *dgate_up, const Stored *dout_, const Stored *gate_up, size_t n, size_t FF,
                                  const int gelu) {
#pragma omp parallel for schedule(static) if (n * FF >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        const floatX *gate = (const floatX *)gate_up + t * 2 * FF, *up = gate + FF,
                     *dout = (const floatX *)dout_ + t * FF;
        floatX *dgate = (floatX *)dgate_up + t * 2 * FF, *dup = dgate + FF;
#pragma omp simd
        for (size_t i = 0; i < FF; i++) {
            floatS g = load(gate[i]), u = load(up[i]), d = load(dout[i]);
            floatS one_minus_s, s = sigmoid(gate_z(g, gelu), &one_minus_s);
            dgate[i] = store(d * u * (s + g * s * one_minus_s * gate_slope(g, gelu)));
            dup[i] = store(d * g * s);
        }
    }
}

static void gelu_forward(Stored *out_, const Stored *in_, size_t count) {
    const floatX *in = (const floatX *)in_;
    floatX *out = (floatX *)out_;
#pragma omp parallel for simd schedule(static) if (parallel : count >= PARALLEL_MIN)
    for (size_t i = 0; i < count; i++) {
        floatS x = load(in[i]), one_minus_s, s = sigmoid(gate_z(x, 1), &one_minus_s);
        out[i] = store(x * s);
    }
}

static void gelu_backward(Stored *dx_, const Stored *dout_, const Stored *in_, size_t count) {
    const floatX *dout = (const floatX *)dout_, *in = (const floatX *)in_;
    floatX *dx = (floatX *)dx_;
#pragma omp parallel for simd schedule(static) if (parallel : count >= PARALLEL_MIN)
    for (size_t i = 0; i < count; i++) {
        floatS x = load(in[i]), one_minus_s, s = sigmoid(gate_z(x, 1), &one_minus_s);
        dx[i] = store(load(dout[i]) * (s + x * s * one_minus_s * gate_slope(x, 1)));
    }
}

static void cpu_activation_forward(Stored *out, const Stored *in, ActivationKind kind, size_t n, size_t FF) {
    switch (kind) {
    case ACTIVATION_SWIGLU: gated_forward(out, in, n, FF, 0); break;
    case ACTIVATION_GEGLU: gated_forward(out, in, n, FF, 1); break;
    case ACTIVATION_GELU: gelu_forward(out, in, n * FF);
    }
}

static void cpu_activation_backward(Stored *din, const Stored *dout, const Stored *in, ActivationKind kind, size_t n,
                                    size_t FF) {
    switch (kind) {
    case ACTIVATION_SWIGLU: gated_backward(din, dout, in, n, FF, 0); break;
    case ACTIVATION_GEGLU: gated_backward(din, dout, in, n, FF, 1); break;
    case ACTIVATION_GELU: gelu_backward(din, dout, in, n * FF);
    }
}

#endif
