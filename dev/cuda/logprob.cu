/*
Playground of llmc/ops/cuda/logprob.cuh. The second reading of a row should hit the cache, but all rows in flight have
to fit there. 4 blocks of 512 threads on each of 132 processors and a vocabulary of 151,936 in bf16 are 160 MB at a
time; an H100's L2 cache has 50. The candidates have fewer and faster rows in flight: 1024 threads for a row; one row
for each processor (it asks for all shared memory); the same with the row's beginning kept there.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/logprob.cuh"

constexpr unsigned WIDE_THREADS = 1024;

// As logprob_kernel with a weight for every row and no ignored targets; the first kept_packs of a row stay in shared
// memory.
__global__ void __launch_bounds__(WIDE_THREADS)
    logprob_wide_kernel(float *logp, floatX *logits, const int32_t *targets, const float *weight, size_t V,
                        double inverse, size_t kept_packs) {
    constexpr int W = full_pack<floatX>;
    SHARED(Exponentials, parts, WIDE_THREADS);
    DYNAMIC_SHARED(floatX, kept);
    const size_t t = blockIdx.x, target = (size_t)targets[t];
    floatX *x = logits + t * V;
    const RowCut cut = row_cut(x, V);
    if (kept_packs > cut.packs) kept_packs = cut.packs;
    const float temperature = (float)inverse, value = load(x[target]);
    Exponentials e = {-FLT_MAX, 0.0, 0.0};
    for (size_t i = threadIdx.x; i < kept_packs; i += blockDim.x) {
        const Pack<floatX, W> pack = pack_read<W>(x + cut.head + i * W);
        float values[W];
        for (int j = 0; j < W; j++) values[j] = cut.head + i * W + j == target ? -INFINITY : load(pack.x[j]);
        see(&e, values, W, temperature);
        pack_write(kept + i * W, pack);
    }
    for (size_t i = kept_packs + threadIdx.x; i < cut.packs; i += blockDim.x) {
        const size_t first = cut.head + i * W;
        const Pack<floatX, W> pack = pack_read<W>(x + first);
        float values[W];
        for (int j = 0; j < W; j++) values[j] = first + j == target ? -INFINITY : load(pack.x[j]);
        see(&e, values, W, temperature);
    }
    for (size_t i = threadIdx.x; i < cut.singles; i += blockDim.x) {
        const size_t c = single_of(cut, i);
        const float single = c == target ? -INFINITY : load(x[c]);
        see(&e, &single, 1, temperature);
    }
    parts[threadIdx.x] = e;
    for (unsigned step = WIDE_THREADS / 2; step; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) parts[threadIdx.x] = merged(parts[threadIdx.x], parts[threadIdx.x + step], temperature);
    }
    __syncthreads();
    double others = parts[0].sum;
    float top = parts[0].top;
    if (value > top) others *= exp(((double)top - (double)value) * inverse), top = value;
    const double itself = exp(((double)value - (double)top) * inverse), sum = itself + others;
    if (threadIdx.x == 0)
        logp[t] =
            (float)(itself > others ? -log1p(others / itself) : ((double)value - (double)top) * inverse - log(sum));
    const double slope = (double)weight[t] * inverse;
    const float scale = (float)(-slope / sum), gradient = (float)(slope * (others / sum));
    for (size_t left = threadIdx.x; left < cut.packs; left += blockDim.x) { // backwards, as the real one
        const size_t i = cut.packs - 1 - left, first = cut.head + i * W;
        Pack<floatX, W> pack = pack_read<W>(i < kept_packs ? kept + i * W : x + first);
        for (int j = 0; j < W; j++)
            pack.x[j] = store(first + j == target ? gradient : scale * expf((load(pack.x[j]) - top) * temperature));
        pack_write(x + first, pack);
    }
    for (size_t i = threadIdx.x; i < cut.singles; i += blockDim.x) {
        const size_t c = single_of(cut, i);
        x[c] = store(c == target ? gradient : scale * expf((load(x[c]) - top) * temperature));
    }
}

// ---- cases ----------------------------------------------------------------------------------------------------------
struct LogProb {
    struct Shape {
        size_t n, V;
    } shape;
    double tolerance = 2 * ROUNDING;
    Tensor<floatX> logits, before;
    Tensor<int32_t> targets;
    Tensor<float> weight, logp;
    LogProb(Shape s)
        : shape(s), logits(s.n * s.V, random_values(1, 4)), before(s.n * s.V, random_values(1, 4)),
          targets(s.n, [=](size_t t) { return (double)random_below(2, 0, t, s.V); }), weight(s.n, random_values(3)),
          logp(s.n, constant(0)) {}
    double work() const { return 2.0 * (double)logits.count * sizeof(floatX); } // read once, written once
    void reset() { logits.restore(before); }
    double error() const {
        std::vector<double> sums(shape.n);
        for (size_t i = 0; i < before.count; i++) sums[i / shape.V] += exp(before.at(i));
        const double of_gradient = logits.error([&](size_t i) {
            const size_t t = i / shape.V;
            return weight.at(t) * ((i % shape.V == (size_t)targets.at(t)) - exp(before.at(i)) / sums[t]);
        });
        return std::max(of_gradient, logp.error([&](size_t t) {
            return before.at(t * shape.V + (size_t)targets.at(t)) - log(sums[t]);
        }));
    }
};

static void real(LogProb &c) {
    cuda_logprob(c.logp.summed(), NULL, c.logits.stored(), c.targets.data, c.weight.summed(), c.shape.n, c.shape.V,
                 c.shape.V, Temperature{1, 0});
}

// Bytes of shared memory that a block may ask for beside `parts`
static size_t most_shared(void) {
#ifdef CUDA_ON_CPU
    return 4096; // less than a row, so that both parts of a row occur
#else
    static int most;
    if (!most)
        CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0),
                   "asking for the shared memory of a block");
    return ((size_t)most - WIDE_THREADS * sizeof(Exponentials) - 1024) / 128 * 128;
#endif
}

static void wide(LogProb &c, size_t shared, size_t kept) {
    LAUNCH((logprob_wide_kernel), (unsigned)c.shape.n, WIDE_THREADS, shared)
    (c.logp.data, c.logits.data, c.targets.data, c.weight.data, c.shape.V, 1.0, kept / 16);
}
static void wide_plain(LogProb &c) { wide(c, 0, 0); }
static void wide_alone(LogProb &c) { wide(c, most_shared(), 0); }
static void wide_kept(LogProb &c) { wide(c, most_shared(), most_shared()); }

int main(int argc, char **argv) {
    playground_begin(argc, argv);
    compare<LogProb>("logprob with its gradient, n = 512, V = 151936 (bytes: one reading, one writing)", BYTES,
                     {3, 5003}, {512, 151936},
                     {{"llmc/ops/cuda/logprob.cuh", real},
                      {"1024 threads for a row", wide_plain},
                      {"1024 threads, one row a processor", wide_alone},
                      {"the same, its beginning in shared memory", wide_kept}});
    return playground_end();
}
