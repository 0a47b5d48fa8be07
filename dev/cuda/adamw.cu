/*
Playground of llmc/ops/cuda/adamw.cuh. Candidates: eight elements a thread (it loads two packs of each tensor before it
computes); with stochastic rounding, the keys of the random numbers once for a block instead of in every thread. All
variants must agree with plain loops; either stochastic rounding of a value is within the tolerance.
*/
#include "playground.cuh"
#include "llmc/ops/cuda/adamw.cuh"

// One element: the arithmetic of adamw_kernel
template <typename T, typename G, typename M>
__device__ inline floatX step_element(T *w, G gradient, M *m, M *v, uint32_t index, const uint64_t *key,
                                      const AdamWFactors &f) {
    const float g = f.gradient_scale * load(gradient);
    const float new_m = f.beta1 * load(*m) + f.one_minus_beta1 * g;
    const float new_v = f.beta2 * load(*v) + f.one_minus_beta2 * g * g;
    float x = load(*w);
    x -= f.decay * x + f.rate * new_m / (sqrtf(new_v) * f.root_correction + f.epsilon);
    set_rounded(w, x, key[ADAMW_W], index);
    set_rounded(m, new_m, key[ADAMW_M], index);
    set_rounded(v, new_v, key[ADAMW_V], index);
    return store(x);
}

// Thread i has packs 2 i and 2 i + 1 of ADAMW_PACK elements; an even number of packs.
template <typename T, typename G, typename M>
__global__ void adamw_twice_kernel(T *weights, floatX *rounded, const G *gradient, M *m, M *v, size_t pairs,
                                   AdamWFactors f) {
    constexpr int W = ADAMW_PACK;
    FOR_EACH_PACK(i, pairs) {
        const size_t first = i * 2 * W, block = first / ADAMW_BLOCK;
        uint64_t key[ADAMW_ROLES];
        Pack<T, W> w[2];
        Pack<M, W> pm[2], pv[2];
        Pack<G, W> pg[2];
        Pack<floatX, W> nearest[2];
        for (int r = 0; r < ADAMW_ROLES; r++) key[r] = random_bits(f.seed, f.stream + r, block);
        for (int h = 0; h < 2; h++) {
            w[h] = pack_read<W>(weights + first + h * W), pg[h] = pack_read<W>(gradient + first + h * W);
            pm[h] = pack_read<W>(m + first + h * W), pv[h] = pack_read<W>(v + first + h * W);
        }
        for (int h = 0; h < 2; h++)
            for (int j = 0; j < W; j++) {
                const uint32_t index = (uint32_t)(first % ADAMW_BLOCK) + (uint32_t)(h * W + j);
                nearest[h].x[j] = step_element(&w[h].x[j], pg[h].x[j], &pm[h].x[j], &pv[h].x[j], index, key, f);
            }
        for (int h = 0; h < 2; h++) {
            pack_write(weights + first + h * W, w[h]);
            pack_write(m + first + h * W, pm[h]);
            pack_write(v + first + h * W, pv[h]);
            if (rounded) pack_write(rounded + first + h * W, nearest[h]);
        }
    }
}

// A block has the ADAMW_BLOCK elements that share keys.
template <typename T, typename G, typename M>
__global__ void adamw_keys_kernel(T *weights, floatX *rounded, const G *gradient, M *m, M *v, size_t count,
                                  AdamWFactors f) {
    constexpr int W = ADAMW_PACK;
    SHARED(uint64_t, key, ADAMW_ROLES);
    const uint32_t index = threadIdx.x * W;
    const size_t first = (size_t)blockIdx.x * ADAMW_BLOCK + index;
    if (threadIdx.x < ADAMW_ROLES) key[threadIdx.x] = random_bits(f.seed, f.stream + threadIdx.x, blockIdx.x);
    __syncthreads();
    if (first >= count) return;
    Pack<T, W> w = pack_read<W>(weights + first);
    Pack<M, W> pm = pack_read<W>(m + first), pv = pack_read<W>(v + first);
    const Pack<G, W> pg = pack_read<W>(gradient + first);
    Pack<floatX, W> nearest;
    for (int j = 0; j < W; j++)
        nearest.x[j] = step_element(&w.x[j], pg.x[j], &pm.x[j], &pv.x[j], index + (uint32_t)j, key, f);
    pack_write(weights + first, w);
    pack_write(m + first, pm);
    pack_write(v + first, pv);
    if (rounded) pack_write(rounded + first, nearest);
}

// ---- cases: T what is stepped (the fp32 master copy, or the weights themselves), M the moments ----------------------
template <typename T, typename M> struct Step {
    struct Shape {
        size_t count; // a multiple of 2 * ADAMW_PACK
    } shape;
    static constexpr bool master = sizeof(T) != sizeof(floatX);
    double tolerance = sizeof(T) == 2 || sizeof(M) == 2 ? 1.0 / 120 : 2 * ROUNDING; // a whole bf16 unit if stochastic
    AdamW adamw = {1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, 3, 1, 0};
    Tensor<T> w, w_before;
    Tensor<floatX> rounded, gradient;
    Tensor<M> m, v, m_before, v_before;
    Step(Shape s)
        : shape(s), w(s.count, random_values(1)), w_before(s.count, random_values(1)),
          rounded(master ? s.count : 1, constant(0)), gradient(s.count, random_values(2)),
          m(s.count, random_values(3, 0.1)), v(s.count, positive()), m_before(s.count, random_values(3, 0.1)),
          v_before(s.count, positive()) {}
    static auto positive() {
        return [](size_t i) { return 0.01 + random_uniform(4, 0, i); };
    }
    double work() const {
        return (double)shape.count * (2.0 * (sizeof(T) + 2 * sizeof(M)) + sizeof(floatX) * (master ? 2 : 1));
    }
    void reset() { w.restore(w_before), m.restore(m_before), v.restore(v_before); }
    double error() const {
        const auto new_m = [&](size_t i) {
            return adamw.beta1 * m_before.at(i) + (1 - adamw.beta1) * adamw.gradient_scale * gradient.at(i);
        };
        const auto new_v = [&](size_t i) {
            const double g = adamw.gradient_scale * gradient.at(i);
            return adamw.beta2 * v_before.at(i) + (1 - adamw.beta2) * g * g;
        };
        const auto new_w = [&](size_t i) {
            const double step = (double)adamw.step, mean = new_m(i) / (1 - pow(adamw.beta1, step)),
                         root = sqrt(new_v(i) / (1 - pow(adamw.beta2, step)));
            return w_before.at(i) * (1 - adamw.learning_rate * adamw.weight_decay) -
                   adamw.learning_rate * mean / (root + adamw.epsilon);
        };
        const double of_w = std::max(w.error(new_w), master ? rounded.error(new_w) : 0.0);
        return std::max(of_w, std::max(m.error(new_m), v.error(new_v)));
    }
    floatX *rounding() const { return master ? rounded.data : NULL; }
};

template <typename T, typename M> static void real(Step<T, M> &c) {
    const DType moments = sizeof(M) == 2 ? DTYPE_BF16 : DTYPE_FP32;
    if (c.master)
        cuda_adamw(c.rounded.stored(), (float *)(void *)c.w.data, c.gradient.data, FLOATX_DTYPE, c.m.data, c.v.data,
                   moments, c.shape.count, &c.adamw);
    else
        cuda_adamw(c.w.stored(), NULL, c.gradient.data, FLOATX_DTYPE, c.m.data, c.v.data, moments, c.shape.count,
                   &c.adamw);
}

typedef std::conditional_t<sizeof(floatX) == 2, Bf16, float> Gradients; // floatX, as arithmetic on elements knows it

template <typename T, typename M> static void twice(Step<T, M> &c) {
    const size_t pairs = c.shape.count / (2 * ADAMW_PACK);
    LAUNCH((adamw_twice_kernel<T, Gradients, M>), loop_grid(pairs), LOOP_THREADS, 0)
    (c.w.data, c.rounding(), (const Gradients *)(const void *)c.gradient.data, c.m.data, c.v.data, pairs,
     adamw_factors(&c.adamw));
}

template <typename T, typename M> static void keys_once(Step<T, M> &c) {
    LAUNCH((adamw_keys_kernel<T, Gradients, M>), (unsigned)blocks_for(c.shape.count, ADAMW_BLOCK),
           (unsigned)(ADAMW_BLOCK / ADAMW_PACK), 0)
    (c.w.data, c.rounding(), (const Gradients *)(const void *)c.gradient.data, c.m.data, c.v.data, c.shape.count,
     adamw_factors(&c.adamw));
}

template <typename T, typename M> static void compare_steps(const char *title) {
    compare<Step<T, M>>(title, BYTES, {5000}, {192937984}, // a layer of Qwen3-8B
                        {{"llmc/ops/cuda/adamw.cuh", real<T, M>},
                         {"8 elements a thread", twice<T, M>},
                         {"a block for 1024 elements, keys once", keys_once<T, M>}});
}

int main(int argc, char **argv) {
    playground_begin(argc, argv);
    compare_steps<float, float>(Step<float, float>::master ? "adamw, fp32 master weights, fp32 moments"
                                                           : "adamw, fp32 weights, fp32 moments");
    compare_steps<Gradients, Bf16>("adamw, no master weights, bf16 moments: stochastic rounding");
    return playground_end();
}
