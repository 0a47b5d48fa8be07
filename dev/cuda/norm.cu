/*
Playground of llmc/ops/cuda/norm.cuh: RMSNorm. The real kernels read a row again from the cache where they need it
again; the candidates keep it in registers. Backward's candidate also gets both of a row's sums from one pass, since
mean(g * xhat) = rstd * mean(g * x) needs no rstd beforehand.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/norm.cuh"

constexpr double EPSILON = 1e-6;
constexpr Norm RMS = {EPSILON, 0.0, NORM_RMS};

// ---- candidates -----------------------------------------------------------------------------------------------------
// blockDim.x threads have a row, P packs each; blockDim.y rows a block.
template <int W, int P>
__global__ void __launch_bounds__(NORM_THREADS)
    forward_kept_kernel(floatX *out, const floatX *x, const floatX *w, size_t n, size_t C, float eps) {
    SHARED(float, partials, NORM_THREADS / LANES);
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y, t = row < n ? row : n - 1;
    Pack<floatX, W> kept[P];
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < P; p++) {
        const size_t c = (threadIdx.x + p * blockDim.x) * W;
        if (c >= C) break;
        kept[p] = pack_read<W>(x + t * C + c);
        for (int j = 0; j < W; j++) squares += load(kept[p].x[j]) * load(kept[p].x[j]);
    }
    squares = row_sum(squares, partials + threadIdx.y * (blockDim.x / LANES));
    const float rstd = 1.0f / sqrtf(squares / (float)C + eps);
    if (row >= n) return;
#pragma unroll
    for (int p = 0; p < P; p++) {
        const size_t c = (threadIdx.x + p * blockDim.x) * W;
        if (c >= C) break;
        const Pack<floatX, W> scale = pack_read<W>(w + c);
        for (int j = 0; j < W; j++) kept[p].x[j] = store(load(kept[p].x[j]) * rstd * load(scale.x[j]));
        pack_write(out + t * C + c, kept[p]);
    }
}

// As norm_backward_kernel for RMSNorm without accumulation.
template <int W, int P>
__global__ void __launch_bounds__(NORM_THREADS)
    backward_kept_kernel(floatX *dx, float *lines, const floatX *dout, const floatX *x, const floatX *w, size_t n,
                         size_t C, float eps, size_t takers) {
    SHARED(float, partials, 2 * NORM_THREADS / LANES);
    const size_t taker = blockIdx.x;
    Pack<floatX, W> scale[P];
    float dw[P][W] = {};
    for (int p = 0; p < P; p++) {
        const size_t c = (threadIdx.x + p * blockDim.x) * W;
        if (c < C) scale[p] = pack_read<W>(w + c);
    }
    for (size_t row = taker; row < n; row += takers) {
        Pack<floatX, W> in[P], d[P];
        float squares = 0.0f, dot = 0.0f;
#pragma unroll
        for (int p = 0; p < P; p++) {
            const size_t c = (threadIdx.x + p * blockDim.x) * W;
            if (c >= C) break;
            in[p] = pack_read<W>(x + row * C + c), d[p] = pack_read<W>(dout + row * C + c);
            for (int j = 0; j < W; j++) {
                squares += load(in[p].x[j]) * load(in[p].x[j]);
                dot += load(d[p].x[j]) * load(scale[p].x[j]) * load(in[p].x[j]);
            }
        }
        squares = row_sum(squares, partials);
        dot = row_sum(dot, partials + NORM_THREADS / LANES);
        __syncthreads(); // before the next row's partials
        const float rstd = 1.0f / sqrtf(squares / (float)C + eps), pull = dot / (float)C * rstd * rstd;
#pragma unroll
        for (int p = 0; p < P; p++) {
            const size_t c = (threadIdx.x + p * blockDim.x) * W;
            if (c >= C) break;
            for (int j = 0; j < W; j++) {
                const float gradient = load(d[p].x[j]), value = load(in[p].x[j]);
                dw[p][j] += gradient * value * rstd;
                d[p].x[j] = store(rstd * (gradient * load(scale[p].x[j]) - value * pull));
            }
            pack_write(dx + row * C + c, d[p]);
        }
    }
    for (int p = 0; p < P; p++) {
        const size_t c = (threadIdx.x + p * blockDim.x) * W;
        for (int j = 0; j < W && c < C; j++) lines[taker * C + c + j] = dw[p][j];
    }
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

template <int P> static void forward_kept(NormForward &c, unsigned threads_of_row) {
    const dim3 threads(threads_of_row, NORM_THREADS / threads_of_row);
    LAUNCH((forward_kept_kernel<full_pack<floatX>, P>), dim3((unsigned)blocks_for(c.shape.n, threads.y)), threads, 0)
    (c.out.data, c.x.data, c.w.data, c.shape.n, c.shape.C, (float)EPSILON);
}
constexpr int WARP_PACKS = 4096 / full_pack<floatX> / LANES, BLOCK_PACKS = 4096 / full_pack<floatX> / NORM_THREADS;
static void forward_warp(NormForward &c) { forward_kept<WARP_PACKS>(c, LANES); }
static void forward_block(NormForward &c) { forward_kept<BLOCK_PACKS>(c, NORM_THREADS); }
static bool kept_fits(const NormForward &c) { return c.shape.C <= 4096 && c.shape.C % full_pack<floatX> == 0; }

struct NormBackward : NormForward {
    Tensor<floatX> dout;
    Tensor<float> dw, lines;
    NormBackward(Shape s)
        : NormForward(s), dout(s.n * s.C, random_values(3)), dw(s.C, constant(0)),
          lines(cuda_norm_backward_scratch(s.n, s.C), constant(0)) {
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

static void backward_kept(NormBackward &c) {
    const size_t takers = norm_takers(c.shape.n);
    LAUNCH((backward_kept_kernel<full_pack<floatX>, BLOCK_PACKS>), (unsigned)takers, NORM_THREADS, 0)
    (c.out.data, c.lines.data, c.dout.data, c.x.data, c.w.data, c.shape.n, c.shape.C, (float)EPSILON, takers);
    LAUNCH((add_lines_kernel), loop_grid(c.shape.C), LOOP_THREADS, 0)(c.dw.data, c.lines.data, takers, c.shape.C);
}
static bool backward_kept_fits(const NormBackward &c) { return kept_fits(c); }

int main(int argc, char **argv) {
    playground_begin(argc, argv);
    compare<NormForward>("rmsnorm_forward, n = 4096, C = 4096", BYTES, {77, 1096}, {4096, 4096},
                         {{"llmc/ops/cuda/norm.cuh", forward_real},
                          {"a block for a row, kept in registers", forward_block, kept_fits},
                          {"a warp for a row, kept in registers", forward_warp, kept_fits}});
    compare<NormForward>(
        "rmsnorm_forward of 32 heads, n = 4096 x 32, C = 128", BYTES, {77, 128}, {4096 * 32, 128},
        {{"llmc/ops/cuda/norm.cuh", forward_real}, {"a warp for a row, kept in registers", forward_warp, kept_fits}});
    compare<NormBackward>("rmsnorm_backward, n = 4096, C = 4096", BYTES, {77, 1096}, {4096, 4096},
                          {{"llmc/ops/cuda/norm.cuh", backward_real},
                           {"rows in registers, both sums at once", backward_kept, backward_kept_fits}});
    return playground_end();
}
