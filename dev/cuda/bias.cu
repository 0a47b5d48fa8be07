/*
Playground of llmc/ops/cuda/bias.cuh: column sums of dout[n,OC]. The real kernel gives 32 columns to a block: few blocks
walk all rows, and a warp reads 32 neighbouring elements (64 bytes in bf16). The candidate reads packs of 16 bytes, also
cuts the rows over blocks, and adds the parts in order with a second kernel. It needs scratch memory that the op does
not have today.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/bias.cuh"

constexpr unsigned PART_WARPS = 8;
constexpr size_t PART_ROWS = 256; // of a block

// parts[blockIdx.y][OC]: lane l of every warp has packs of columns, its warps every PART_WARPS-th row of the part
template <int W> __global__ void bias_parts_kernel(float *parts, const floatX *dout, size_t n, size_t OC) {
    SHARED(float, sums, PART_WARPS *LANES *W);
    const size_t column = ((size_t)blockIdx.x * LANES + threadIdx.x) * W, first = (size_t)blockIdx.y * PART_ROWS;
    const size_t end = first + PART_ROWS < n ? first + PART_ROWS : n;
    float sum[W] = {};
    for (size_t t = first + threadIdx.y; t < end && column < OC; t += PART_WARPS) {
        const Pack<floatX, W> pack = pack_read<W>(dout + t * OC + column);
        for (int j = 0; j < W; j++) sum[j] += load(pack.x[j]);
    }
    for (int j = 0; j < W; j++) sums[(threadIdx.y * W + j) * LANES + threadIdx.x] = sum[j];
    __syncthreads();
    if (threadIdx.y || column >= OC) return;
    for (int j = 0; j < W; j++) {
        for (unsigned warp = 1; warp < PART_WARPS; warp++) sum[j] += sums[(warp * W + j) * LANES + threadIdx.x];
        parts[blockIdx.y * OC + column + j] = sum[j];
    }
}

__global__ void parts_add_kernel(float *dbias, const float *parts, size_t count, size_t OC) {
    FOR_EACH_PACK(c, OC) {
        float sum = 0.0f;
        for (size_t i = 0; i < count; i++) sum += parts[i * OC + c];
        dbias[c] += sum;
    }
}

struct Bias {
    struct Shape {
        size_t n, OC;
    } shape;
    double tolerance = 1e-5; // fp32 sums for every floatX
    Tensor<floatX> dout;
    Tensor<float> dbias, parts;
    Bias(Shape s)
        : shape(s), dout(s.n * s.OC, random_values(1)), dbias(s.OC, constant(0)),
          parts(blocks_for(s.n, PART_ROWS) * s.OC, constant(0)) {}
    double work() const { return (double)dout.count * sizeof(floatX); }
    void reset() { cuda_zero(dbias.data, dbias.count * sizeof(float)); }
    double error() const {
        std::vector<double> sums(shape.OC);
        for (size_t i = 0; i < dout.count; i++) sums[i % shape.OC] += dout.at(i);
        return dbias.error([&](size_t c) { return sums[c]; });
    }
};

static void real(Bias &c) { bias_backward(c.dbias.summed(), c.dout.stored(), c.shape.n, c.shape.OC, c.shape.OC); }

static void in_parts(Bias &c) {
    constexpr int W = full_pack<floatX>;
    const size_t parts = blocks_for(c.shape.n, PART_ROWS);
    LAUNCH((bias_parts_kernel<W>), dim3((unsigned)blocks_for(c.shape.OC, LANES * W), (unsigned)parts),
           dim3(LANES, PART_WARPS), 0)
    (c.parts.data, c.dout.data, c.shape.n, c.shape.OC);
    LAUNCH((parts_add_kernel), loop_grid(c.shape.OC), LOOP_THREADS, 0)(c.dbias.data, c.parts.data, parts, c.shape.OC);
}

int main(int argc, char **argv) {
    playground_begin(argc, argv);
    for (size_t OC : {4096, 12288}) {
        char title[80];
        snprintf(title, sizeof(title), "bias_backward, n = 4096, OC = %zu", OC);
        compare<Bias>(title, BYTES, {601, 392}, {4096, OC},
                      {{"llmc/ops/cuda/bias.cuh", real}, {"packs, rows in parts of 256, two kernels", in_parts}});
    }
    return playground_end();
}
