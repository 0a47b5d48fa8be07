/*
Matrix products beside the algorithm that llmc/ops/cuda/linear.cuh takes: every algorithm that cuBLASLt offers for the
same description, and the best rate of a square product, the reference for other products' rates.
*/
#ifndef DEV_CUDA_PRODUCT_CUH
#define DEV_CUDA_PRODUCT_CUH
#include "playground.cuh"
#include "llmc/ops/cuda/linear.cuh"

constexpr int MOST_ALGORITHMS = 32;

// Computes out = a b + beta out by one of them; returns false if it cannot run
static bool multiply_by(const KeptMatmul *kept, const cublasLtMatmulAlgo_t *algorithm, void *out, const void *a,
                        const void *b, float beta) {
    const float one = 1.0f;
    return cublaslt.Matmul(cublas.handle, kept->operation, &one, a, kept->a, b, kept->b, &beta, out, kept->out, out,
                           kept->out, algorithm, cublas.workspace, CUBLAS_WORKSPACE, NULL) == CUBLAS_STATUS_SUCCESS;
}

typedef struct {
    cublasLtMatmulHeuristicResult_t found[MOST_ALGORITHMS];
    int offered;    // of these
    int best;       // place of the fastest among them
    double first_s; // seconds of the first
    double best_s;  // and of the fastest
} AlgorithmTimes;

static AlgorithmTimes time_algorithms(const KeptMatmul *kept, void *out, const void *a, const void *b, float beta,
                                      size_t repeats) {
    AlgorithmTimes times = {};
    times.offered = matmul_algorithms(kept, times.found, MOST_ALGORITHMS);
    times.first_s = times.best_s = INFINITY;
    for (int i = 0; i < times.offered; i++) {
        const auto run = [&] { return multiply_by(kept, &times.found[i].algo, out, a, b, beta); };
        if (!run()) continue;
        const double seconds = median_seconds(run, repeats);
        if (i == 0) times.first_s = seconds;
        if (seconds < times.best_s) times.best_s = seconds, times.best = i;
    }
    if (!isfinite(times.best_s))
        die("none of the %d algorithms that cuBLASLt offers for a product runs", times.offered);
    return times;
}

// FLOP/s of [S, S] x [S, S], floatX in and out: the fastest algorithm at the best of a few sizes
static double best_square_product(void) {
    double best = 0;
    for (size_t S : {(size_t)4096, (size_t)8192}) {
        const Tensor<floatX> a(S * S, random_values(1)), b(S * S, random_values(2));
        Tensor<floatX> out(S * S, constant(0));
        Matmul p = matmul_shape(S, S, S, 1, 0, 0);
        p.alignment = MOST_ALIGNMENT;
        const double seconds =
            time_algorithms(matmul_of(&p, NULL), out.data, a.data, b.data, 0.0f, playground.repeats).best_s;
        best = std::max(best, 2.0 * (double)S * (double)S * (double)S / seconds);
    }
    return best;
}

#endif
