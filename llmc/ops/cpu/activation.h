/*
SwiGLU, GELU and GeGLU (a GELU that gates), forward and backward, by the logistic function s(z) = 1 / (1 + exp(-z)):

    silu(g) = g s(g)                  silu'(g) = s + g s (1 - s)
    gelu(x) = x s(z(x))               gelu'(x) = s + x s (1 - s) z'(x)

with z(x) = 2 sqrt(2/pi) (x + 0.044715 x^3), because (1 + tanh(z/2)) / 2 = s(z). The far negative side keeps all its
digits, where 1 + tanh would cancel.
*/
#ifndef LLMC_CPU_ACTIVATION_H
#define LLMC_CPU_ACTIVATION_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "simd_math.h"
#include "llmc/ops/formulas.h"

// out[FF] = act(gate) * up; up NULL: nothing gates. gelu: a constant once inlined; 0: silu.
VECTOR_INLINE void activate(floatX *out, const floatX *gate, const floatX *up, size_t FF, const int gelu) {
    for (size_t i = 0; i < FF; i += VECTOR_LANES) {
        const Vector g = vector_load_first(gate + i, FF - i, 0);
        Vector slope, y = g * vector_logistic(gelu ? GELU_Z(g) : g, &slope);
        if (up) y *= vector_load_first(up + i, FF - i, 0);
        vector_store_first(out + i, y, FF - i);
    }
}

// Computes dgate and dup; dgate may be gate, dup may be up.
VECTOR_INLINE void activate_back(floatX *dgate, floatX *dup, const floatX *dout, const floatX *gate, const floatX *up,
                                 size_t FF, const int gelu) {
    for (size_t i = 0; i < FF; i += VECTOR_LANES) {
        const Vector g = vector_load_first(gate + i, FF - i, 0), d = vector_load_first(dout + i, FF - i, 0);
        Vector slope, dg = d, s = vector_logistic(gelu ? GELU_Z(g) : g, &slope);
        if (gelu) slope *= GELU_SLOPE(g);
        if (up) {
            dg *= vector_load_first(up + i, FF - i, 0);
            vector_store_first(dup + i, d * g * s, FF - i);
        }
        vector_store_first(dgate + i, dg * (s + g * slope), FF - i);
    }
}

static VECTOR_FUNCTION void activation_row(floatX *out, const floatX *in, ActivationKind kind, size_t FF) {
    switch (kind) {
    case ACTIVATION_SWIGLU: activate(out, in, in + FF, FF, 0); break;
    case ACTIVATION_GEGLU: activate(out, in, in + FF, FF, 1); break;
    case ACTIVATION_GELU: activate(out, in, NULL, FF, 1);
    }
}

static VECTOR_FUNCTION void activation_row_back(floatX *din, const floatX *dout, const floatX *in, ActivationKind kind,
                                                size_t FF) {
    switch (kind) {
    case ACTIVATION_SWIGLU: activate_back(din, din + FF, dout, in, in + FF, FF, 0); break;
    case ACTIVATION_GEGLU: activate_back(din, din + FF, dout, in, in + FF, FF, 1); break;
    case ACTIVATION_GELU: activate_back(din, NULL, dout, in, NULL, FF, 1);
    }
}

static void cpu_activation_forward(Stored *out, const Stored *in, ActivationKind kind, size_t n, size_t FF) {
    const size_t width = activation_width(kind, FF);
#pragma omp parallel for schedule(static) if (n * FF >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) activation_row((floatX *)out + t * FF, (const floatX *)in + t * width, kind, FF);
}

static void cpu_activation_backward(Stored *din, const Stored *dout, const Stored *in, ActivationKind kind, size_t n,
                                    size_t FF) {
    const size_t width = activation_width(kind, FF);
#pragma omp parallel for schedule(static) if (n * FF >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++)
        activation_row_back((floatX *)din + t * width, (const floatX *)dout + t * FF, (const floatX *)in + t * width,
                            kind, FF);
}

#endif
