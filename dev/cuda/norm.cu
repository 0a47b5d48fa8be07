/*
Playground of llmc/ops/cuda/norm.cuh: RMSNorm. The candidates are the same kernels in other shapes: fewer packs of a row
for a thread and more threads; no pack kept (the row is read again, as norm.cuh once did); a warp for a row of 128;
other numbers of blocks. Bytes: forward 2 s an element, backward 3 s.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/norm.cuh"

constexpr double EPSILON = 1e-6;
constexpr Norm RMS = {EPSILON, 0.0, NORM_RMS};
constexpr int FULL = full_pack<floatX>;

// Rows of C elements, P packs for a thread (0: any number), at least LEAST threads
template <int P, unsigned LEAST> static dim3 threads_of(size_t C) {
    dim3 threads(LEAST);
    while (P && threads.x * P * FULL < C) threads.x *= 2;
    threads.y = threads.x < NORM_THREADS ? NORM_THREADS / threads.x : 1;
    return threads;
}

// ---- cases ----------------------------------------------------------------------------------------------------------
struct NormForward {
    struct Shape {
        size_t n, C;
    } shape;
    double tolerance = 2 * ROUNDING;
    Tensor<floatX> out, x, w;
    NormForward(Shape s)
        : shape(s), out(s.n * s.C, constant(0)), x(s.n * s.C, random_values(1)), w(s.C, random_values(2)) {}
    double work() const { return 2.0 * (double)x.count * sizeof(floatX); }
    void reset() { cuda_zero(out.data, out.count * sizeof(floatX)); }
    double rstd(size_t t) const {
        double squares = 0;
        for (size_t c = 0; c < shape.C; c++) squares += x.at(t * shape.C + c) * x.at(t * shape.C + c);
        return 1 / sqrt(squares / (double)shape.C + EPSILON);
    }
    double error() const {
        std::vector<double> factor(shape.n);
        for (size_t t = 0; t < shape.n; t++) factor[t] = rstd(t);
        return out.error([&](size_t i) { return x.at(i) * factor[i / shape.C] * w.at(i % shape.C); });
    }
};

static void forward_real(NormForward &c) {
    cuda_norm_forward(c.out.stored(), c.x.stored(), c.w.stored(), NULL, NULL, c.shape.n, c.shape.C, RMS);
}

template <int P, unsigned LEAST> static void forward_as(NormForward &c) {
    const dim3 threads = threads_of<P, LEAST>(c.shape.C);
    LAUNCH((norm_forward_kernel<FULL, P, false>), dim3((unsigned)blocks_for(c.shape.n, threads.y)), threads, 0)
    (c.out.data, c.x.data, c.w.data, (const floatX *)NULL, 0, c.shape.n, c.shape.C, 1.0f / (float)c.shape.C,
     (float)EPSILON, 0.0f);
}
template <int P, unsigned LEAST, typename Case> static bool fits(const Case &c) {
    return c.shape.C % FULL == 0 && threads_of<P, LEAST>(c.shape.C).x <= NORM_MOST_THREADS;
}

struct NormBackward : NormForward {
    Tensor<floatX> dout;
    Tensor<float> dw, lines;
    NormBackward(Shape s)
        : NormForward(s), dout(s.n * s.C, random_values(3)), dw(s.C, constant(0)),
          lines(2 * cuda_norm_backward_scratch(s.n, s.C), constant(0)) {
        tolerance = 4 * ROUNDING;
    }
    double work() const { return 3.0 * (double)x.count * sizeof(floatX); }
    void reset() { NormForward::reset(), cuda_zero(dw.data, dw.count * sizeof(float)); }
    double error() const {
        std::vector<double> sums(shape.C), expected(x.count);
        for (size_t t = 0; t < shape.n; t++) {
            const double factor = rstd(t);
            double dot = 0;
            for (size_t i = t * shape.C; i < (t + 1) * shape.C; i++)
                dot += dout.at(i) * w.at(i % shape.C) * x.at(i) * factor;
            for (size_t i = t * shape.C; i < (t + 1) * shape.C; i++) {
                const double xhat = x.at(i) * factor;
                sums[i % shape.C] += dout.at(i) * xhat;
                expected[i] = factor * (dout.at(i) * w.at(i % shape.C) - xhat * dot / (double)shape.C);
            }
        }
        return std::max(out.error([&](size_t i) { return expected[i]; }), dw.error([&](size_t c) { return sums[c]; }));
    }
};

static void backward_real(NormBackward &c) {
    cuda_norm_backward(c.out.stored(), c.dw.summed(), NULL, c.dout.stored(), c.x.stored(), c.w.stored(), c.shape.n,
                       c.shape.C, RMS, 0, c.lines.summed());
}

template <int P, unsigned LEAST, size_t BLOCKS> static void backward_as(NormBackward &c) {
    const dim3 threads = threads_of<P, LEAST>(c.shape.C);
    const size_t blocks = min_size(blocks_for(c.shape.n, threads.y), BLOCKS);
    LAUNCH((norm_backward_kernel<FULL, P, false>), (unsigned)blocks, threads, 0)
    (c.out.data, c.lines.data, c.dout.data, c.x.data, c.w.data, c.shape.n, c.shape.C, 1.0f / (float)c.shape.C,
     (float)EPSILON, 0.0f, 0);
    column_sums(c.dw.summed(), c.lines.data, blocks, c.shape.C, c.shape.C);
}

int main(int argc, char **argv) {
    playground_begin(argc, argv);
    compare<NormForward>("rmsnorm_forward, n = 4096, C = 4096", BYTES, {77, 1096}, {4096, 4096},
                         {{"llmc/ops/cuda/norm.cuh", forward_real},
                          {"two packs a thread", forward_as<2, 32>, fits<2, 32>},
                          {"a warp for a row", forward_as<16, 32>, fits<16, 32>},
                          {"256 threads, read again", forward_as<0, 256>, fits<0, 256>}});
    compare<NormForward>("rmsnorm_forward of 32 heads, n = 4096 x 32, C = 128", BYTES, {77, 128}, {4096 * 32, 128},
                         {{"llmc/ops/cuda/norm.cuh", forward_real},
                          {"a warp for a row", forward_as<1, 32>, fits<1, 32>},
                          {"a warp for a row, read again", forward_as<0, 32>, fits<0, 32>}});
    compare<NormBackward>("rmsnorm_backward, n = 4096, C = 4096", BYTES, {77, 1096}, {4096, 4096},
                          {{"llmc/ops/cuda/norm.cuh", backward_real},
                           {"two packs a thread", backward_as<2, 32, 528>, fits<2, 32>},
                           {"a pack a thread", backward_as<1, 32, 528>, fits<1, 32>},
                           {"512 threads, read again", backward_as<0, 512, 528>, fits<0, 512>}});
    compare<NormBackward>("rmsnorm_backward of 32 heads, n = 4096 x 32, C = 128", BYTES, {77, 128}, {4096 * 32, 128},
                          {{"llmc/ops/cuda/norm.cuh", backward_real},
                           {"264 blocks", backward_as<1, 16, 264>, fits<1, 16>},
                           {"1056 blocks", backward_as<1, 16, 1056>, fits<1, 16>},
                           {"a warp for a row", backward_as<1, 32, 528>, fits<1, 32>}});
    return playground_end();
}
