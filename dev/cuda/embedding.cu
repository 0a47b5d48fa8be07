/*
Playground of llmc/ops/cuda/embedding.cuh: the scattered sum of embedding_backward. The real kernel gives all tokens of
one table row to one block, so that the most frequent token of a text decides how long it takes. The candidate cuts the
run of a row in the sorted stream into pieces of CUT tokens: pieces of long runs leave partial sums in scratch memory,
a second kernel adds them in order. Both sort in the same way; that is part of their time.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/embedding.cuh"

constexpr size_t CUT = 64;

// First and last + 1 place of the run of equal rows around place i of the sorted stream
__device__ inline size_t run_begin(const int32_t *order, const int32_t *index, size_t i) {
    const int32_t row = index[order[i]];
    size_t low = 0, high = i; // the run begins in [low, high]
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (index[order[middle]] < row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Partial sums of [first, first + CUT), a piece of a run that began at `begin`. In any CUT places at most one long run
// begins and at most one goes on with a new piece, so these two slots for each CUT places are enough.
__device__ inline size_t slot_of(size_t first, size_t begin) { return first / CUT * 2 + (first > begin); }

template <typename T, int W>
__global__ void pieces_kernel(T *dw, float *parts, const floatX *dx, const int32_t *order, const int32_t *index,
                              size_t N, size_t C) {
    const size_t first = blockIdx.x, c = ((size_t)blockIdx.y * blockDim.x + threadIdx.x) * W;
    const int32_t row = index[order[first]];
    const size_t begin = run_begin(order, index, first), end = first + CUT < N ? first + CUT : N;
    if (c >= C || (first - begin) % CUT) return;
    float sum[W] = {};
    size_t i = first;
    for (; i < end && index[order[i]] == row; i++) {
        const Pack<floatX, W> pack = pack_read<W>(dx + (size_t)order[i] * C + c);
        for (int j = 0; j < W; j++) sum[j] += load(pack.x[j]);
    }
    const bool whole = first == begin && (i == N || index[order[i]] != row);
    for (int j = 0; j < W; j++) {
        T *to = dw + (size_t)row * C + c + j;
        if (whole)
            set_value(to, load(*to) + sum[j]);
        else
            parts[slot_of(first, begin) * C + c + j] = sum[j];
    }
}

// For the first place of every run of more than CUT tokens
template <typename T>
__global__ void add_pieces_kernel(T *dw, const float *parts, const int32_t *order, const int32_t *index, size_t N,
                                  size_t C) {
    const size_t begin = blockIdx.x, c = (size_t)blockIdx.y * blockDim.x + threadIdx.x;
    const int32_t row = index[order[begin]];
    if (c >= C || begin + CUT >= N || index[order[begin + CUT]] != row) return;
    if (begin && index[order[begin - 1]] == row) return;
    float sum = 0.0f;
    for (size_t first = begin; first < N && index[order[first]] == row; first += CUT)
        sum += parts[slot_of(first, begin) * C + c];
    T *to = dw + (size_t)row * C + c;
    set_value(to, load(*to) + sum);
}

// ---- cases ----------------------------------------------------------------------------------------------------------
struct Scatter {
    struct Shape {
        size_t N, rows, C;
        bool natural; // frequencies as in text (the k-th most frequent row about 1 / k), or all rows alike
    } shape;
    double tolerance = 1e-5;
    Tensor<float> dw, scratch, parts;
    Tensor<floatX> dx;
    Tensor<int32_t> index;
    Scatter(Shape s)
        : shape(s), dw(s.rows * s.C, constant(0)),
          scratch(cuda_embedding_backward_scratch(s.N, s.rows, s.C), constant(0)),
          parts(2 * blocks_for(s.N, CUT) * s.C, constant(0)), dx(s.N * s.C, random_values(1)),
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
                            c.scratch.summed());
}

static void in_pieces(Scatter &c) {
    constexpr int W = full_pack<floatX>;
    constexpr unsigned THREADS = 128;
    const size_t N = c.shape.N, C = c.shape.C;
    const int32_t *order = sort_by_row((int32_t *)(void *)c.scratch.data, c.index.data, N, c.shape.rows);
    LAUNCH((pieces_kernel<float, W>), dim3((unsigned)N, (unsigned)blocks_for(C / W, THREADS)), THREADS, 0)
    (c.dw.data, c.parts.data, c.dx.data, order, c.index.data, N, C);
    LAUNCH((add_pieces_kernel<float>), dim3((unsigned)N, (unsigned)blocks_for(C, THREADS)), THREADS, 0)
    (c.dw.data, c.parts.data, order, c.index.data, N, C);
}

int main(int argc, char **argv) {
    playground_begin(argc, argv);
    for (bool natural : {true, false})
        compare<Scatter>(natural ? "embedding_backward, N = 32768, C = 4096, 151936 rows as frequent as words"
                                 : "embedding_backward, N = 32768, C = 4096, 151936 rows alike",
                         BYTES, {1500, 300, 72, natural}, {32768, 151936, 4096, natural},
                         {{"llmc/ops/cuda/embedding.cuh", real}, {"runs cut into pieces of 64 tokens", in_pieces}});
    return playground_end();
}
