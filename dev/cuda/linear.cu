/*
Playground of llmc/ops/cuda/linear.cuh: the products of Qwen3-8B. linear.cuh takes the first algorithm that cuBLASLt's
heuristics return; the candidate times all of them and takes the fastest. Both are checked against plain sums in double
at random elements. Weight gradients are also timed overwriting their sums, which shows the cost of beta = 1 (8 bytes an
element instead of 4). GPT-2's head, of an odd vocabulary, is timed with contiguous rows of logits, and with rows padded
to 16 bytes, as in a pass.
*/
#include "product.cuh"

// A weight [OC, C] and n rows: out[row][column] of a product is the sum over i of b[row * b_row + i * b_step] *
// a[column * a_column + i * a_step], in op set terms
struct Product {
    const char *direction;
    Matmul matmul;
    size_t a_column, a_step, b_row, b_step;
};

// stride: from row to row of [n, OC]
static Product product_of(int direction, size_t n, size_t C, size_t OC, size_t stride) {
    Product p = {"forward", matmul_shape(OC, n, C, 1, 0, 0), C, 1, C, 1};                          // weight, x
    if (direction == 1) p = {"backward_input", matmul_shape(C, n, OC, 0, 0, 0), 1, C, stride, 1};  // weight, dout
    if (direction == 2) p = {"backward_weight", matmul_shape(C, OC, n, 0, 1, 1), 1, C, 1, stride}; // x, dout
    (direction == 0 ? p.matmul.stride_out : p.matmul.stride_b) = stride;
    return p;
}

static size_t out_stride(const Matmul &p) { return p.stride_out ? p.stride_out : p.m; }
static size_t elements_of_b(const Matmul &p) {
    return (p.transposed_b ? p.k : p.n) * (p.stride_b ? p.stride_b : p.transposed_b ? p.n : p.k);
}

// Largest difference at SAMPLES elements, over the largest of these
template <typename T>
static double sampled_error(const Product &p, const Tensor<T> &out, const Tensor<floatX> &a, const Tensor<floatX> &b) {
    constexpr int SAMPLES = 256;
    double difference = 0, largest = 0;
    for (uint64_t s = 0; s < SAMPLES; s++) {
        const size_t row = random_below(9, 0, s, p.matmul.n), column = random_below(9, 1, s, p.matmul.m);
        double sum = 0;
        T value;
        for (size_t i = 0; i < p.matmul.k; i++)
            sum += b.at(row * p.b_row + i * p.b_step) * a.at(column * p.a_column + i * p.a_step);
        cuda_copy_out(&value, out.data + row * out_stride(p.matmul) + column, sizeof(value));
        if (!(fabs(element(value) - sum) <= 1e300)) return INFINITY;
        difference = std::max(difference, fabs(element(value) - sum)), largest = std::max(largest, fabs(sum));
    }
    return difference / largest;
}

template <typename T> static void compare_product(const char *name, Product p) {
    const double tolerance = sizeof(T) == 2 ? ROUNDING : 1e-4,
                 work = 2.0 * (double)p.matmul.m * (double)p.matmul.n * (double)p.matmul.k;
    const Tensor<floatX> a(p.matmul.m * p.matmul.k, random_values(1)), b(elements_of_b(p.matmul), random_values(2));
    Tensor<T> out(out_stride(p.matmul) * p.matmul.n, constant(0));
    const float beta = p.matmul.summed_out ? 1.0f : 0.0f;
    p.matmul.alignment = MOST_ALIGNMENT;
    const KeptMatmul *kept = matmul_of(&p.matmul, NULL);
    const AlgorithmTimes times = time_algorithms(kept, out.data, a.data, b.data, beta, playground.repeats);
    printf("%s, %s: [%zu, %zu] x [%zu, %zu]\n", name, p.direction, p.matmul.n, p.matmul.k, p.matmul.k, p.matmul.m);
    for (int i : {0, times.best}) {
        char variant[64];
        snprintf(variant, sizeof(variant), "number %d of %d%s", i, times.offered,
                 i == 0 ? ", as llmc/ops/cuda/linear.cuh" : ", the fastest");
        cuda_zero(out.data, out.count * sizeof(T));
        const bool runs = multiply_by(kept, &times.found[i].algo, out.data, a.data, b.data, beta);
        const double error = runs ? sampled_error(p, out, a, b) : INFINITY;
        if (!(error <= tolerance)) playground.wrong++;
        print_variant(variant, i == 0 ? times.first_s : times.best_s, work, FLOPS, error, tolerance);
        if (times.best == 0) break;
    }
    if (beta == 0.0f) return;
    const auto overwrite = [&] { multiply_by(kept, &times.found[times.best].algo, out.data, a.data, b.data, 0.0f); };
    const double seconds = median_seconds(overwrite, playground.repeats), error = sampled_error(p, out, a, b);
    if (!(error <= tolerance)) playground.wrong++;
    print_variant("the fastest, beta = 0", seconds, work, FLOPS, error, tolerance);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        size_t n, C, OC, stride;
    } layers[] = {{"query, output", 4096, 4096, 4096, 4096},
                  {"key, value", 4096, 4096, 1024, 1024},
                  {"gate and up", 4096, 4096, 24576, 24576},
                  {"down", 4096, 12288, 4096, 4096},
                  {"head", 2048, 4096, 151936, 151936},
                  {"head, 4096 tokens", 4096, 4096, 151936, 151936},
                  {"GPT-2's head, rows of 50257", 2048, 768, 50257, 50257},
                  {"GPT-2's head, rows of 50264", 2048, 768, 50257, 50264}};
    playground_begin(argc, argv);
    cublas_require();
    playground.product_rate = best_square_product();
    printf("best square product: %.1f TFLOP/s\n", playground.product_rate * 1e-12);
    for (const auto &layer : layers)
        for (int direction = 0; direction < 3; direction++) {
            const Product p = product_of(direction, layer.n, layer.C, layer.OC, layer.stride);
            if (p.matmul.summed_out)
                compare_product<float>(layer.name, p);
            else
                compare_product<floatX>(layer.name, p);
        }
    return playground_end();
}
