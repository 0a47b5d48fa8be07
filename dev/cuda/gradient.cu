/*
Playground of llmc/ops/cuda/gradient.cuh: round_sums and gradient_add. Candidates: a thread for every pack instead of a
loop with the grid's stride; the same with loads and stores marked "evict first", which leaves the cache to other data.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/gradient.cuh"

#ifdef CUDA_ON_CPU
template <int W, typename T> static Pack<T, W> stream_read(const T *from) { return pack_read<W>(from); }
template <int W, typename T> static void stream_write(T *to, const Pack<T, W> &pack) { pack_write(to, pack); }
#else
template <int W, typename T> __device__ inline Pack<T, W> stream_read(const T *from) {
    static_assert(sizeof(Pack<T, W>) == 16 || sizeof(Pack<T, W>) == 8);
    Pack<T, W> pack;
    if constexpr (sizeof(pack) == 16) {
        const uint4 bits = __ldcs((const uint4 *)from);
        memcpy(&pack, &bits, sizeof(pack));
    } else {
        const uint2 bits = __ldcs((const uint2 *)from);
        memcpy(&pack, &bits, sizeof(pack));
    }
    return pack;
}
template <int W, typename T> __device__ inline void stream_write(T *to, const Pack<T, W> &pack) {
    if constexpr (sizeof(pack) == 16) {
        uint4 bits;
        memcpy(&bits, &pack, sizeof(bits));
        __stcs((uint4 *)to, bits);
    } else {
        uint2 bits;
        memcpy(&bits, &pack, sizeof(bits));
        __stcs((uint2 *)to, bits);
    }
}
#endif

constexpr int QUAD = 4; // floats of 16 bytes

template <bool STREAM> __global__ void round_flat_kernel(floatX *out, const float *in, size_t packs) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    const Pack<float, QUAD> sums = STREAM ? stream_read<QUAD>(in + i * QUAD) : pack_read<QUAD>(in + i * QUAD);
    Pack<floatX, QUAD> result;
    for (int j = 0; j < QUAD; j++) result.x[j] = store(sums.x[j]);
    if (STREAM)
        stream_write(out + i * QUAD, result);
    else
        pack_write(out + i * QUAD, result);
}

template <bool STREAM> __global__ void add_flat_kernel(floatX *gradient, const float *in, size_t packs) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    const Pack<float, QUAD> add = STREAM ? stream_read<QUAD>(in + i * QUAD) : pack_read<QUAD>(in + i * QUAD);
    Pack<floatX, QUAD> sum = STREAM ? stream_read<QUAD>(gradient + i * QUAD) : pack_read<QUAD>(gradient + i * QUAD);
    for (int j = 0; j < QUAD; j++) sum.x[j] = store(load(sum.x[j]) + add.x[j]);
    if (STREAM)
        stream_write(gradient + i * QUAD, sum);
    else
        pack_write(gradient + i * QUAD, sum);
}

// ---- cases ----------------------------------------------------------------------------------------------------------
struct Gradient {
    struct Shape {
        size_t count; // a multiple of QUAD
    } shape;
    double tolerance = ROUNDING;
    Tensor<floatX> gradient, before;
    Tensor<float> in;
    Gradient(Shape s)
        : shape(s), gradient(s.count, random_values(1)), before(s.count, random_values(1)),
          in(s.count, random_values(2)) {}
    void reset() { gradient.restore(before); }
};

struct Round : Gradient {
    using Gradient::Gradient;
    double work() const { return (double)shape.count * (sizeof(float) + sizeof(floatX)); }
    double error() const {
        return gradient.error([&](size_t i) { return in.at(i); });
    }
};

struct Add : Gradient {
    using Gradient::Gradient;
    double work() const { return (double)shape.count * (sizeof(float) + 2 * sizeof(floatX)); }
    double error() const {
        return gradient.error([&](size_t i) { return before.at(i) + in.at(i); });
    }
};

static void round_real(Round &c) { cuda_round_sums(c.gradient.stored(), c.in.summed(), c.shape.count); }
static void add_real(Add &c) { cuda_gradient_add(c.gradient.data, FLOATX_DTYPE, c.in.summed(), c.shape.count); }

static dim3 flat_grid(size_t count) { return dim3((unsigned)blocks_for(count / QUAD, LOOP_THREADS)); }
template <bool STREAM> static void round_flat(Round &c) {
    LAUNCH((round_flat_kernel<STREAM>), flat_grid(c.shape.count), LOOP_THREADS, 0)
    (c.gradient.data, c.in.data, c.shape.count / QUAD);
}
template <bool STREAM> static void add_flat(Add &c) {
    LAUNCH((add_flat_kernel<STREAM>), flat_grid(c.shape.count), LOOP_THREADS, 0)
    (c.gradient.data, c.in.data, c.shape.count / QUAD);
}

int main(int argc, char **argv) {
    const size_t layer = 192937984; // parameters of a layer of Qwen3-8B in matrices
    playground_begin(argc, argv);
    compare<Round>("round_sums of a layer of Qwen3-8B", BYTES, {70004}, {layer},
                   {{"llmc/ops/cuda/gradient.cuh", round_real},
                    {"a thread for a pack", round_flat<false>},
                    {"a thread for a pack, evict first", round_flat<true>}});
    compare<Add>("gradient_add of a layer of Qwen3-8B", BYTES, {70004}, {layer},
                 {{"llmc/ops/cuda/gradient.cuh", add_real},
                  {"a thread for a pack", add_flat<false>},
                  {"a thread for a pack, evict first", add_flat<true>}});
    return playground_end();
}
