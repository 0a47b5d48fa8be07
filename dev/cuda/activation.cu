/*
Playground of llmc/ops/cuda/activation.cuh: SwiGLU. The real kernels loop over packs with the grid's stride and divide
to find the row; the candidates give every pack a thread of its own, rows on the grid's y axis (no division, no loop),
and one of them takes the hardware's fast exponential and division.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/activation.cuh"

// s(z), as sigmoid() but by the special function units: a few units in the last place of fp32, far below bf16's
// rounding
__device__ inline float fast_sigmoid(float z, float *one_minus) {
#ifdef CUDA_ON_CPU
    const float e = expf(-fabsf(z)), large = 1.0f / (1.0f + e), small = e * large;
#else
    const float e = __expf(-fabsf(z)), large = __fdividef(1.0f, 1.0f + e), small = e * large;
#endif
    *one_minus = z >= 0.0f ? small : large;
    return z >= 0.0f ? large : small;
}

// ---- candidates: thread (x, y) has pack x of row y ------------------------------------------------------------------
template <int W, bool FAST> __global__ void swiglu_forward_flat_kernel(floatX *out, const floatX *gate_up, size_t FF) {
    const size_t t = blockIdx.y, c = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (c >= FF) return;
    const Pack<floatX, W> gate = pack_read<W>(gate_up + t * 2 * FF + c),
                          up = pack_read<W>(gate_up + t * 2 * FF + FF + c);
    Pack<floatX, W> result;
    for (int j = 0; j < W; j++) {
        float g = load(gate.x[j]), one_minus_s, s = FAST ? fast_sigmoid(g, &one_minus_s) : sigmoid(g, &one_minus_s);
        result.x[j] = store(g * s * load(up.x[j]));
    }
    pack_write(out + t * FF + c, result);
}

template <int W, bool FAST>
__global__ void swiglu_backward_flat_kernel(floatX *dgate_up, const floatX *dout, const floatX *gate_up, size_t FF) {
    const size_t t = blockIdx.y, c = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W, row = t * 2 * FF + c;
    if (c >= FF) return;
    const Pack<floatX, W> gate = pack_read<W>(gate_up + row), up = pack_read<W>(gate_up + row + FF),
                          gradient = pack_read<W>(dout + t * FF + c);
    Pack<floatX, W> dgate, dup;
    for (int j = 0; j < W; j++) {
        float g = load(gate.x[j]), d = load(gradient.x[j]), one_minus_s,
              s = FAST ? fast_sigmoid(g, &one_minus_s) : sigmoid(g, &one_minus_s);
        dgate.x[j] = store(d * load(up.x[j]) * (s + g * s * one_minus_s));
        dup.x[j] = store(d * g * s);
    }
    pack_write(dgate_up + row, dgate);
    pack_write(dgate_up + row + FF, dup);
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

static void forward_real(Forward &c) {
    cuda_activation_forward(c.out.stored(), c.gate_up.stored(), ACTIVATION_SWIGLU, c.shape.n, c.shape.FF);
}
static void backward_real(Backward &c) {
    cuda_activation_backward(c.dgate_up.stored(), c.dout.stored(), c.gate_up.stored(), ACTIVATION_SWIGLU, c.shape.n,
                             c.shape.FF);
}

static dim3 flat_grid(Shape2 s) {
    return dim3((unsigned)blocks_for(s.FF / full_pack<floatX>, LOOP_THREADS), (unsigned)s.n);
}
template <bool FAST> static void forward_flat(Forward &c) {
    LAUNCH((swiglu_forward_flat_kernel<full_pack<floatX>, FAST>), flat_grid(c.shape), LOOP_THREADS, 0)
    (c.out.data, c.gate_up.data, c.shape.FF);
}
template <bool FAST> static void backward_flat(Backward &c) {
    LAUNCH((swiglu_backward_flat_kernel<full_pack<floatX>, FAST>), flat_grid(c.shape), LOOP_THREADS, 0)
    (c.dgate_up.data, c.dout.data, c.gate_up.data, c.shape.FF);
}

int main(int argc, char **argv) {
    playground_begin(argc, argv);
    compare<Forward>("swiglu_forward, n = 4096, FF = 12288", BYTES, {37, 2312}, {4096, 12288},
                     {{"llmc/ops/cuda/activation.cuh", forward_real},
                      {"a thread for a pack", forward_flat<false>},
                      {"a thread for a pack, fast exponential", forward_flat<true>}});
    compare<Backward>("swiglu_backward, n = 4096, FF = 12288", BYTES, {37, 2312}, {4096, 12288},
                      {{"llmc/ops/cuda/activation.cuh", backward_real},
                       {"a thread for a pack", backward_flat<false>},
                       {"a thread for a pack, fast exponential", backward_flat<true>}});
    return playground_end();
}
