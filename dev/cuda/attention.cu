/*
Playground of llmc/ops/cuda/attention.cuh, forward, at head_dim 128: the kernel with tiles other than its own choice.
More queries a block read keys and values less often. More keys a tile or more stages hide more of the wait for them.
Fewer of either let more blocks share a processor. cuDNN is not among the candidates: compare with its own figures.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/attention.cuh"
#ifndef CUDA_ON_CPU
#include "product.cuh"
#endif

constexpr int HEAD = 128;

// ---- cases ----------------------------------------------------------------------------------------------------------
struct Attention {
    struct Shape {
        size_t cut, begin, end, NH, NKV; // queries [begin, end); a second document begins at `cut` unless that is 0
    } shape;
    double tolerance =
        sizeof(floatX) == 2 ? 1.0 / 150 : 1e-5; // the weights are rounded before they are multiplied, too
    size_t n;
    double scale = 1 / sqrt((double)HEAD);
    Span spans[2];
    size_t span_count = 0;
    Tensor<floatX> out, q, k, v;
    Tensor<float> lse;
    Attention(Shape s)
        : shape(s), n(s.end - s.begin), out(n * s.NH * HEAD, constant(0)), q(n * s.NH * HEAD, random_values(1, 2)),
          k(s.end * s.NKV * HEAD, random_values(2)), v(s.end * s.NKV * HEAD, random_values(3)),
          lse(n * s.NH, constant(0)) {
        if (s.cut) spans[span_count++] = Span{0, s.begin, s.cut, 0};
        spans[span_count++] = Span{s.cut, std::max(s.begin, s.cut), s.end, s.cut ? s.cut - s.begin : 0};
    }
    size_t document(size_t t) const { return t < shape.cut ? 0 : shape.cut; }
    AttentionShape call() const {
        return AttentionShape{{spans, span_count, 0, 0}, shape.NH, shape.NKV, HEAD, scale, all_keys, 0, 0, {0, 0}};
    }
    double work() const {
        double pairs = 0;
        for (size_t t = shape.begin; t < shape.end; t++) pairs += (double)(t + 1 - document(t));
        return 4 * (double)(shape.NH * HEAD) * pairs;
    }
    void reset() { cuda_zero(out.data, out.count * sizeof(floatX)), cuda_zero(lse.data, lse.count * sizeof(float)); }
    double error() const {
        std::vector<double> expected(out.count), logs(lse.count), weight(shape.end);
        for (size_t r = 0; r < n * shape.NH; r++) {
            const size_t t = shape.begin + r / shape.NH, group = shape.NH / shape.NKV;
            const size_t key_head = r % shape.NH / group, first = document(t);
            double top = -INFINITY, sum = 0;
            for (size_t u = first; u <= t; u++) {
                weight[u] = 0;
                for (size_t d = 0; d < HEAD; d++)
                    weight[u] += scale * q.at(r * HEAD + d) * k.at((u * shape.NKV + key_head) * HEAD + d);
                top = std::max(top, weight[u]);
            }
            for (size_t u = first; u <= t; u++) sum += exp(weight[u] - top);
            logs[r] = top + log(sum);
            for (size_t u = first; u <= t; u++)
                for (size_t d = 0; d < HEAD; d++)
                    expected[r * HEAD + d] += exp(weight[u] - logs[r]) * v.at((u * shape.NKV + key_head) * HEAD + d);
        }
        return std::max(out.error([&](size_t i) { return expected[i]; }), lse.error([&](size_t i) { return logs[i]; }));
    }
};

static void real(Attention &c) {
    const AttentionShape call = c.call();
    cuda_attention_forward(c.out.data, c.lse.summed(), c.q.stored(), c.k.stored(), c.v.stored(), &call, NULL);
}

template <Tiles T> static void tiled(Attention &c) {
    SpanBlocks blocks;
    const AttentionShape call = c.call();
    span_blocks(&blocks, call.spans, all_keys, 0, T.held, false);
    LAUNCH((attention_forward_kernel<HEAD, T>), dim3(blocks.first[blocks.count], (unsigned)c.shape.NH),
           block_threads<T>, (tiles_bytes<HEAD>(T, 1)))
    (c.out.data, c.lse.data, c.q.data, c.k.data, c.v.data, blocks, head_shape(&call, c.q.data, c.k.data, c.v.data),
     false, false);
}

template <Tiles T> static bool fits(const Attention &) {
#ifdef CUDA_ON_CPU
    return true;
#else
    return tiles_bytes<HEAD>(T, 1) <= shared_memory_limit();
#endif
}

int main(int argc, char **argv) {
    const bool bf16 = sizeof(floatX) == 2; // without matrix instructions a shorter sequence takes long enough
    playground_begin(argc, argv);
#ifndef CUDA_ON_CPU
    playground.product_rate = best_square_product();
    printf("best square product: %.1f TFLOP/s\n", playground.product_rate * 1e-12);
#endif
    compare<Attention>(
        bf16 ? "attention_forward, the last 4096 queries of 32768, 32/8 heads of 128"
             : "attention_forward, the last 1024 queries of 4096, 32/8 heads of 128",
        FLOPS, {190, 133, 331, 4, 2},
        bf16 ? Attention::Shape{0, 28672, 32768, 32, 8} : Attention::Shape{0, 3072, 4096, 32, 8},
        {{"llmc/ops/cuda/attention.cuh", real},
         {"64 queries, tiles of 32 keys, 1 stage", tiled<Tiles{64, 32, 1}>, fits<Tiles{64, 32, 1}>},
         {"64 queries, tiles of 32 keys, 2 stages", tiled<Tiles{64, 32, 2}>, fits<Tiles{64, 32, 2}>},
         {"64 queries, tiles of 32 keys, 3 stages", tiled<Tiles{64, 32, 3}>, fits<Tiles{64, 32, 3}>},
         {"64 queries, tiles of 64 keys, 1 stage", tiled<Tiles{64, 64, 1}>, fits<Tiles{64, 64, 1}>},
         {"64 queries, tiles of 64 keys, 2 stages", tiled<Tiles{64, 64, 2}>, fits<Tiles{64, 64, 2}>},
         {"128 queries, tiles of 32 keys, 2 stages", tiled<Tiles{128, 32, 2}>, fits<Tiles{128, 32, 2}>},
         {"128 queries, tiles of 32 keys, 3 stages", tiled<Tiles{128, 32, 3}>, fits<Tiles{128, 32, 3}>},
         {"128 queries, tiles of 64 keys, 2 stages", tiled<Tiles{128, 64, 2}>, fits<Tiles{128, 64, 2}>}});
    return playground_end();
}
