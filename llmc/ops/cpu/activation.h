/*
SwiGLU, GELU, GeGLU (a GELU that gates), the clamped SwiGLU and the squared ReLU, forward and backward, by the logistic
function s(z) = 1 / (1 + exp(-z)):

    silu(g) = g s(g)                  silu'(g) = s + g s (1 - s)
    gelu(x) = x s(z(x))               gelu'(x) = s + x s (1 - s) z'(x)

with z(x) = 2 sqrt(2/pi) (x + 0.044715 x^3), because (1 + tanh(z/2)) / 2 = s(z). The far negative side keeps all its
digits, where 1 + tanh would cancel. Clamped, with y = g s(alpha g): y (u + 1), and dy = s + alpha g s (1 - s).
*/
#ifndef LLMC_CPU_ACTIVATION_H
#define LLMC_CPU_ACTIVATION_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "simd_math.h"
#include "llmc/ops/formulas.h"

// Computes out[FF] = act(gate) * up; up NULL: out = act(gate). gelu: 1 GELU, 0 SiLU; a constant once inlined
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

// ---- clamped: gate and up in turn ---------------------------------------------------------------------------------
// Vectors of gate and up, and both after clamping
typedef struct {
    Vector gate, up, g, u;
} Clamped;

VECTOR_INLINE Clamped clamped_load(const floatX *in, size_t left, floatS limit) {
    const size_t behind = left > VECTOR_LANES / 2 ? 2 * left - VECTOR_LANES : 0; // elements of `in` after vector a
    const Vector a = vector_load_first(in, 2 * left, 0);
    const Vector b = behind ? vector_load_first(in + VECTOR_LANES, behind, 0) : vector_of(0);
    const Vector most = vector_of(limit), least = -most;
    Clamped c;
    c.gate = VECTOR_SHUFFLE(a, b, LANE_EVEN), c.up = VECTOR_SHUFFLE(a, b, LANE_ODD);
    c.g = vector_select((VectorBits)(c.gate > most), most, c.gate);
    c.u = vector_select((VectorBits)(c.up > most), most, vector_select((VectorBits)(c.up < least), least, c.up));
    return c;
}

VECTOR_INLINE void clamped(floatX *out, const floatX *in, Activation a, size_t FF) {
    for (size_t i = 0; i < FF; i += VECTOR_LANES) {
        const Clamped c = clamped_load(in + 2 * i, FF - i, (floatS)a.limit);
        Vector slope;
        vector_store_first(out + i, c.g * vector_logistic((floatS)a.alpha * c.g, &slope) * (c.u + 1), FF - i);
    }
}

VECTOR_INLINE void clamped_back(floatX *din, const floatX *dout, const floatX *in, Activation a, size_t FF) {
    const floatS alpha = (floatS)a.alpha;
    for (size_t i = 0; i < FF; i += VECTOR_LANES) {
        const Clamped c = clamped_load(in + 2 * i, FF - i, (floatS)a.limit);
        const Vector d = vector_load_first(dout + i, FF - i, 0);
        Vector slope, s = vector_logistic(alpha * c.g, &slope);
        const Vector dg = d * (c.u + 1) * (s + alpha * c.g * slope), du = d * c.g * s, none = {0};
        const Vector dgate = vector_select((VectorBits)(c.g < c.gate), none, dg);
        const Vector dup = vector_select((VectorBits)(c.u != c.up), none, du);
        vector_store_first(din + 2 * i, VECTOR_SHUFFLE(dgate, dup, LANE_INTERLEAVE_LOW), 2 * (FF - i));
        if (2 * (FF - i) > VECTOR_LANES)
            vector_store_first(din + 2 * i + VECTOR_LANES, VECTOR_SHUFFLE(dgate, dup, LANE_INTERLEAVE_HIGH),
                               2 * (FF - i) - VECTOR_LANES);
    }
}

// ---- squared ReLU -------------------------------------------------------------------------------------------------
VECTOR_INLINE void relu2(floatX *out, const floatX *in, size_t FF) {
    for (size_t i = 0; i < FF; i += VECTOR_LANES) {
        const Vector x = vector_max(vector_load_first(in + i, FF - i, 0), vector_of(0));
        vector_store_first(out + i, x * x, FF - i);
    }
}

VECTOR_INLINE void relu2_back(floatX *din, const floatX *dout, const floatX *in, size_t FF) {
    for (size_t i = 0; i < FF; i += VECTOR_LANES) {
        const Vector x = vector_max(vector_load_first(in + i, FF - i, 0), vector_of(0));
        vector_store_first(din + i, 2 * x * vector_load_first(dout + i, FF - i, 0), FF - i);
    }
}

// ---- rows -----------------------------------------------------------------------------------------------------------
static VECTOR_FUNCTION void activation_row(floatX *out, const floatX *in, Activation a, size_t FF) {
    switch (a.kind) {
    case ACTIVATION_SWIGLU: activate(out, in, in + FF, FF, 0); break;
    case ACTIVATION_GEGLU: activate(out, in, in + FF, FF, 1); break;
    case ACTIVATION_GELU: activate(out, in, NULL, FF, 1); break;
    case ACTIVATION_CLAMPED: clamped(out, in, a, FF); break;
    case ACTIVATION_RELU2: relu2(out, in, FF);
    }
}

static VECTOR_FUNCTION void activation_row_back(floatX *din, const floatX *dout, const floatX *in, Activation a,
                                                size_t FF) {
    switch (a.kind) {
    case ACTIVATION_SWIGLU: activate_back(din, din + FF, dout, in, in + FF, FF, 0); break;
    case ACTIVATION_GEGLU: activate_back(din, din + FF, dout, in, in + FF, FF, 1); break;
    case ACTIVATION_GELU: activate_back(din, NULL, dout, in, NULL, FF, 1); break;
    case ACTIVATION_CLAMPED: clamped_back(din, dout, in, a, FF); break;
    case ACTIVATION_RELU2: relu2_back(din, dout, in, FF);
    }
}

static void cpu_activation_forward(Stored *out, const Stored *in, Activation activation, size_t n, size_t FF) {
    const size_t width = activation_width(activation.kind, FF);
#pragma omp parallel for schedule(static) if (n * FF >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++)
        activation_row((floatX *)out + t * FF, (const floatX *)in + t * width, activation, FF);
}

static void cpu_activation_backward(Stored *din, const Stored *dout, const Stored *in, Activation activation, size_t n,
                                    size_t FF) {
    const size_t width = activation_width(activation.kind, FF);
#pragma omp parallel for schedule(static) if (n * FF >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++)
        activation_row_back((floatX *)din + t * width, (const floatX *)dout + t * FF, (const floatX *)in + t * width,
                            activation, FF);
}

#endif
