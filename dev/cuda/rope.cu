/*
Playground of llmc/ops/cuda/rope.cuh. A thread rotates a pack of pairs (16 bytes of either half of a head) with as many
sines and cosines. The real kernel reads two heads at once; a thread of the candidates reads one after the other.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/rope.cuh"

template <int W, int HEADS>
__global__ void rope_packed_kernel(floatX *x, const int32_t *position, const float *inverse_frequency, size_t n,
                                   size_t heads, size_t HD) {
    const size_t half = HD / 2, packs = half / W, groups = (heads + HEADS - 1) / HEADS;
    FOR_EACH_PACK(i, n * groups * packs) {
        const size_t pair = i % packs * W, group = i / packs % groups, t = i / packs / groups;
        const size_t end = (group + 1) * HEADS < heads ? (group + 1) * HEADS : heads;
        float sine[W], cosine[W];
        for (int j = 0; j < W; j++) sincosf((float)position[t] * inverse_frequency[pair + j], &sine[j], &cosine[j]);
        for (size_t head = group * HEADS; head < end; head++) {
            floatX *at = x + (t * heads + head) * HD + pair;
            Pack<floatX, W> a = pack_read<W>(at), b = pack_read<W>(at + half);
            for (int j = 0; j < W; j++) {
                const float xa = load(a.x[j]), xb = load(b.x[j]);
                a.x[j] = store(xa * cosine[j] - xb * sine[j]);
                b.x[j] = store(xb * cosine[j] + xa * sine[j]);
            }
            pack_write(at, a);
            pack_write(at + half, b);
        }
    }
}

struct Rope {
    struct Shape {
        size_t n, heads, HD;
    } shape;
    double tolerance = 2 * ROUNDING;
    Tensor<floatX> x, before;
    Tensor<int32_t> position;
    Tensor<float> inverse_frequency;
    Rope(Shape s)
        : shape(s), x(s.n * s.heads * s.HD, random_values(1)), before(s.n * s.heads * s.HD, random_values(1)),
          position(s.n, [](size_t t) { return 3.0 * (double)t; }),
          inverse_frequency(s.HD / 2, [=](size_t i) { return pow(1e6, -2.0 * (double)i / (double)s.HD); }) {}
    double work() const { return 2.0 * (double)x.count * sizeof(floatX); }
    void reset() { x.restore(before); }
    double error() const {
        return x.error([&](size_t i) {
            const size_t d = i % shape.HD, half = shape.HD / 2, pair = d % half;
            // the angle is rounded to fp32, as in the formula of the op
            const double angle = (float)position.at(i / shape.HD / shape.heads) * (float)inverse_frequency.at(pair);
            return d < half ? before.at(i) * cos(angle) - before.at(i + half) * sin(angle)
                            : before.at(i) * cos(angle) + before.at(i - half) * sin(angle);
        });
    }
};

static void real(Rope &c) {
    cuda_rope(c.x.stored(), c.position.data, c.inverse_frequency.data, c.shape.n, c.shape.heads, c.shape.HD, c.shape.HD,
              Rotation{1, 0, 0, 1}, 0);
}

template <int HEADS> static void packed(Rope &c) {
    constexpr int W = full_pack<floatX>;
    const size_t threads = c.shape.n * blocks_for(c.shape.heads, HEADS) * (c.shape.HD / 2 / W);
    LAUNCH((rope_packed_kernel<W, HEADS>), loop_grid(threads), LOOP_THREADS, 0)
    (c.x.data, c.position.data, c.inverse_frequency.data, c.shape.n, c.shape.heads, c.shape.HD);
}

int main(int argc, char **argv) {
    playground_begin(argc, argv);
    for (size_t heads : {32, 8}) {
        char title[80];
        snprintf(title, sizeof(title), "rope_forward, n = 4096, %zu heads of 128", heads);
        compare<Rope>(
            title, BYTES, {53, 5, 64}, {4096, heads, 128},
            {{"llmc/ops/cuda/rope.cuh", real}, {"8 heads a thread", packed<8>}, {"2 heads a thread", packed<2>}});
    }
    return playground_end();
}
