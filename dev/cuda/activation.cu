/*
Playground of llmc/ops/cuda/activation.cuh: SwiGLU. The real kernels give every pack of a row a thread, and use the
hardware's fast exponential and reciprocal. The candidates loop over the packs of all rows, with a division for each;
one of them uses expf and an exact division, as activation.cuh once did. Bytes: forward 3 s an element of out, backward
5 s.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/activation.cuh"

__device__ inline float exact_sigmoid(float z, float *one_minus) {
    const float e = expf(-fabsf(z)), large = 1.0f / (1.0f + e), small = e * large;
    *one_minus = z >= 0.0f ? small : large;
    return z >= 0.0f ? large : small;
}

// ---- candidates -----------------------------------------------------------------------------------------------------
template <int W, bool EXACT>
__global__ void swiglu_forward_loop_kernel(floatX *out, const floatX *gate_up, size_t n, size_t FF) {
    FOR_EACH_PACK(i, n * (FF / W)) {
        const size_t t = i / (FF / W), row = t * FF + i * W;
        const Pack<floatX, W> gate = pack_read<W>(gate_up + row), up = pack_read<W>(gate_up + row + FF);
        Pack<floatX, W> result;
        for (int j = 0; j < W; j++) {
            float g = load(gate.x[j]), other, s = EXACT ? exact_sigmoid(g, &other) : sigmoid(g, &other);
            result.x[j] = store(g * s * load(up.x[j]));
        }
        pack_write(out + i * W, result);
    }
}

template <int W, bool EXACT>
__global__ void swiglu_backward_loop_kernel(floatX *dgate_up, const floatX *dout, const floatX *gate_up, size_t n,
                                            size_t FF) {
    FOR_EACH_PACK(i, n * (FF / W)) {
        const size_t t = i / (FF / W), row = t * FF + i * W;
        const Pack<floatX, W> gate = pack_read<W>(gate_up + row), up = pack_read<W>(gate_up + row + FF),
                              gradient = pack_read<W>(dout + i * W);
        Pack<floatX, W> dgate, dup;
        for (int j = 0; j < W; j++) {
            float g = load(gate.x[j]), d = load(gradient.x[j]), other,
                  s = EXACT ? exact_sigmoid(g, &other) : sigmoid(g, &other);
            dgate.x[j] = store(d * load(up.x[j]) * (s + g * s * other));
            dup.x[j] = store(d * g * s);
        }
        pack_write(dgate_up + row, dgate);
        pack_write(dgate_up + row + FF, dup);
    }
}

// ---- cases ----------------------------------------------------------------------------------------------------------
struct Shape2 {
    size_t n, FF;
};

static double sigmoid_of(double z) { return 1 / (1 + exp(-z)); }

struct Forward {
    typedef Shape2 Shape;
    Shape shape;
    double tolerance = ROUNDING;
    Tensor<floatX> out, gate_up;
    Forward(Shape s) : shape(s), out(s.n * s.FF, constant(0)), gate_up(s.n * s.FF * 2, random_values(1, 3)) {}
    double work() const { return 3.0 * (double)out.count * sizeof(floatX); }
    void reset() { cuda_zero(out.data, out.count * sizeof(floatX)); }
    double error() const {
        return out.error([&](size_t i) {
            const size_t at = i / shape.FF * 2 * shape.FF + i % shape.FF;
            const double g = gate_up.at(at);
            return g * sigmoid_of(g) * gate_up.at(at + shape.FF);
        });
    }
};

struct Backward {
    typedef Shape2 Shape;
    Shape shape;
    double tolerance = ROUNDING;
    Tensor<floatX> dgate_up, gate_up, dout;
    Backward(Shape s)
        : shape(s), dgate_up(s.n * s.FF * 2, constant(0)), gate_up(s.n * s.FF * 2, random_values(1, 3)),
          dout(s.n * s.FF, random_values(2)) {}
    double work() const { return 5.0 * (double)dout.count * sizeof(floatX); }
    void reset() { cuda_zero(dgate_up.data, dgate_up.count * sizeof(floatX)); }
    double error() const {
        return dgate_up.error([&](size_t i) {
            const size_t row = i / (2 * shape.FF) * 2 * shape.FF, c = i % (2 * shape.FF) % shape.FF;
            const double g = gate_up.at(row + c), d = dout.at(row / 2 + c), s = sigmoid_of(g);
            return i - row < shape.FF ? d * gate_up.at(row + shape.FF + c) * (s + g * s * (1 - s)) : d * g * s;
        });
    }
};

constexpr Activation SWIGLU = {ACTIVATION_SWIGLU, 0, 0};
static void forward_real(Forward &c) {
    cuda_activation_forward(c.out.stored(), c.gate_up.stored(), SWIGLU, c.shape.n, c.shape.FF);
}
static void backward_real(Backward &c) {
    cuda_activation_backward(c.dgate_up.stored(), c.dout.stored(), c.gate_up.stored(), SWIGLU, c.shape.n, c.shape.FF);
}

static dim3 packs_grid(Shape2 s) { return loop_grid(s.n * s.FF / full_pack<floatX>); }
template <bool EXACT> static void forward_loop(Forward &c) {
    LAUNCH((swiglu_forward_loop_kernel<full_pack<floatX>, EXACT>), packs_grid(c.shape), LOOP_THREADS, 0)
    (c.out.data, c.gate_up.data, c.shape.n, c.shape.FF);
}
template <bool EXACT> static void backward_loop(Backward &c) {
    LAUNCH((swiglu_backward_loop_kernel<full_pack<floatX>, EXACT>), packs_grid(c.shape), LOOP_THREADS, 0)
    (c.dgate_up.data, c.dout.data, c.gate_up.data, c.shape.n, c.shape.FF);
}

int main(int argc, char **argv) {
    playground_begin(argc, argv);
    compare<Forward>("swiglu_forward, n = 4096, FF = 12288", BYTES, {37, 2312}, {4096, 12288},
                     {{"llmc/ops/cuda/activation.cuh", forward_real},
                      {"a loop over packs", forward_loop<false>},
                      {"a loop over packs, exact exponential", forward_loop<true>}});
    compare<Backward>("swiglu_backward, n = 4096, FF = 12288", BYTES, {37, 2312}, {4096, 12288},
                      {{"llmc/ops/cuda/activation.cuh", backward_real},
                       {"a loop over packs", backward_loop<false>},
                       {"a loop over packs, exact exponential", backward_loop<true>}});
    return playground_end();
}
