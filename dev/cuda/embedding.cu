/*
Playground of llmc/ops/cuda/embedding.cuh: the scattered sum of embedding_backward. The candidates switch to 16 warps
for a row at other frequencies, or never, as embedding.cuh once did: then the most frequent token of a text decides the
time. All sort in the same way; that is part of their time. Bytes: s an element of dx.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/embedding.cuh"

// ---- cases ----------------------------------------------------------------------------------------------------------
struct Scatter {
    struct Shape {
        size_t N, rows, C;
        bool natural; // frequencies as in text (the k-th most frequent row about 1 / k), or all rows alike
    } shape;
    double tolerance = 1e-5;
    Tensor<float> dw, scratch;
    Tensor<floatX> dx;
    Tensor<int32_t> index;
    Scatter(Shape s)
        : shape(s), dw(s.rows * s.C, constant(0)),
          scratch(cuda_embedding_backward_scratch(s.N, s.rows, s.C), constant(0)), dx(s.N * s.C, random_values(1)),
          index(s.N, [=](size_t t) {
              const double u = random_uniform(2, 0, t), rows = (double)s.rows;
              return std::min(s.natural ? exp(u * log(rows)) - 1 : u * rows, rows - 1);
          }) {}
    double work() const { return (double)dx.count * sizeof(floatX); } // reading dx; the rows written are fewer
    void reset() { cuda_zero(dw.data, dw.count * sizeof(float)); }
    double error() const {
        std::vector<double> sums(dw.count);
        for (size_t i = 0; i < dx.count; i++) sums[(size_t)index.at(i / shape.C) * shape.C + i % shape.C] += dx.at(i);
        return dw.error([&](size_t i) { return sums[i]; });
    }
};

static void real(Scatter &c) {
    cuda_embedding_backward(c.dw.data, DTYPE_FP32, c.dx.stored(), c.index.data, c.shape.N, c.shape.rows, c.shape.C, 1.0,
                            NO_ROW, c.scratch.summed());
}

template <size_t FREQUENT> static void frequent_from(Scatter &c) {
    const int32_t *order = sort_by_row((int32_t *)(void *)c.scratch.data, c.index.data, c.shape.N, c.shape.rows);
    embedding_add(c.dw.data, c.dx.data, order, c.index.data, c.shape.N, c.shape.C, 1.0, NO_ROW,
                  FREQUENT ? FREQUENT : c.shape.N);
}

int main(int argc, char **argv) {
    playground_begin(argc, argv);
    for (bool natural : {true, false})
        compare<Scatter>(natural ? "embedding_backward, N = 32768, C = 4096, 151936 rows as frequent as words"
                                 : "embedding_backward, N = 32768, C = 4096, 151936 rows alike",
                         BYTES, {1500, 300, 72, natural}, {32768, 151936, 4096, natural},
                         {{"llmc/ops/cuda/embedding.cuh", real},
                          {"16 warps from 64 tokens on", frequent_from<64>},
                          {"16 warps from 1024 tokens on", frequent_from<1024>},
                          {"one block for all of a row", frequent_from<0>}});
    return playground_end();
}
