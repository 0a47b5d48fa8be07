/*
Sampling in op set "cuda", one block for a row of logits[n,V]: draws the same tokens as llmc/ops/cpu/draw.h. Nothing is
sorted. A logit's key is its bits, mapped to the order of values. The k-th likeliest token, the end of top-p and the
token of a uniform number are found alike: as the key at which a sum of weights, from the largest key down, reaches a
target. Weights are 1, or exp((x - largest) / temperature). The key is found DRAW_DIGIT bits at a time: every thread
adds up its weights by digit in its own shared memory, and warps add those of all threads in a fixed order. Tokens of
equal keys have equal weights: how many are needed follows by division, and the last one's id by a search of ids.

A row is read twice and once per 4 bits of V; except with temperature alone, also once per 4 bits of a logit for the
draw, for top-k and for top-p: at most 19 times (bf16, V = 152k). Only the first reading is from memory: such a row is
0.3 MB, and the L2 cache of a large GPU holds 64 of them.
*/
#ifndef LLMC_CUDA_DRAW_CUH
#define LLMC_CUDA_DRAW_CUH
#include "logprob.cuh"

constexpr unsigned DRAW_DIGIT = 4, DRAW_BINS = 1 << DRAW_DIGIT, DRAW_THREADS = DRAW_BINS * LANES; // a warp for a bin
constexpr unsigned KEY_BITS = 8 * sizeof(floatX), KEY_SHIFT = 32 - KEY_BITS;
constexpr uint32_t SIGN = 0x80000000u, NOT_FINITE = 0xffffffffu; // above all keys

__device__ inline uint32_t key_of(float x) {
    const float unsigned_zero = x + 0.0f;
    uint32_t bits;
    memcpy(&bits, &unsigned_zero, sizeof(bits));
    return (bits & SIGN ? ~bits : bits | SIGN) >> KEY_SHIFT;
}

__device__ inline float value_of(uint32_t key) {
    const uint32_t shifted = key << KEY_SHIFT, bits = shifted & SIGN ? shifted ^ SIGN : ~key << KEY_SHIFT;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// Calls f(logit, id) for this thread's tokens of a row.
template <typename F> __device__ inline void for_tokens(const floatX *x, RowCut cut, F f) {
    for_row<false>(cut, [&]<int W>(Width<W>, size_t first) {
        const Pack<floatX, W> pack = pack_read<W>(x + first);
        for (int j = 0; j < W; j++) f(load(pack.x[j]), (uint32_t)(first + j));
    });
}

// Returns the sum of f(logit, id) over a row, to all threads. bins: shared memory for at least DRAW_THREADS numbers
template <typename F> __device__ inline double row_total(const floatX *x, RowCut cut, double *bins, F f) {
    double sum = 0.0;
    for_tokens(x, cut, [&](float logit, uint32_t id) { sum += f(logit, id); });
    bins[threadIdx.x] = sum;
    for (unsigned step = DRAW_THREADS / 2; step; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) bins[threadIdx.x] += bins[threadIdx.x + step];
    }
    __syncthreads();
    sum = bins[0];
    __syncthreads();
    return sum;
}

struct DrawPlace {
    int64_t key;
    double above; // weight of all larger keys
};

// Returns the largest key, of `bits` bits, at which the weights of this key and all larger ones reach `target`, or with
// `pass` exceed it; if rounding prevents that, the lowest key with a weight. bins[DRAW_BINS][DRAW_THREADS]
template <typename Key, typename Weight>
__device__ inline DrawPlace place_of(const floatX *x, RowCut cut, double *bins, unsigned bits, double target, bool pass,
                                     Key key, Weight weight) {
    SHARED(double, total, DRAW_BINS);
    const unsigned bin = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    DrawPlace place = {0, 0.0};
    for (unsigned left = (bits + DRAW_DIGIT - 1) / DRAW_DIGIT; left-- > 0;) {
        for (unsigned d = 0; d < DRAW_BINS; d++) bins[d * DRAW_THREADS + threadIdx.x] = 0.0;
        for_tokens(x, cut, [&](float logit, uint32_t id) {
            const int64_t digits = (int64_t)key(logit, id) >> (left * DRAW_DIGIT);
            if (digits / DRAW_BINS == place.key)
                bins[digits % DRAW_BINS * DRAW_THREADS + threadIdx.x] += weight(logit, id);
        });
        __syncthreads();
        double sum = 0.0;
        for (unsigned i = lane; i < DRAW_THREADS; i += LANES) sum += bins[bin * DRAW_THREADS + i];
        sum = warp_sum(sum);
        if (lane == 0) total[bin] = sum;
        __syncthreads();
        double above = place.above;
        int64_t digit = 0;
        for (unsigned d = DRAW_BINS; d-- > 0;) {
            if (total[d] == 0.0) continue;
            digit = d, place.above = above;
            above += total[d];
            if (pass ? above > target : above >= target) break;
        }
        place.key = place.key * DRAW_BINS + digit;
    }
    return place;
}

__global__ void __launch_bounds__(DRAW_THREADS) draw_kernel(int32_t *token, const floatX *logits, const double *uniform,
                                                            size_t V, size_t stride, SamplingSettings s) {
    DYNAMIC_SHARED(double, bins);
    SHARED(uint64_t, likeliest, DRAW_THREADS);
    const floatX *x = logits + blockIdx.x * stride;
    const RowCut cut = row_cut(x, V);
    const double u = uniform[blockIdx.x];
    const auto by_value = [](float logit, uint32_t) { return key_of(logit); };

    // 1. The likeliest token; a logit that is not finite ranks above all
    uint64_t top = 0;
    for_tokens(x, cut, [&](float logit, uint32_t id) {
        const uint32_t key = fabsf(logit) <= FLT_MAX ? key_of(logit) : NOT_FINITE;
        const uint64_t place = (uint64_t)key << 32 | (uint32_t)~id;
        top = place > top ? place : top;
    });
    likeliest[threadIdx.x] = top;
    for (unsigned step = DRAW_THREADS / 2; step; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step && likeliest[threadIdx.x + step] > likeliest[threadIdx.x])
            likeliest[threadIdx.x] = likeliest[threadIdx.x + step];
    }
    __syncthreads();
    top = likeliest[0];
    int32_t id = (int32_t) ~(uint32_t)top;
    if (top >> 32 == NOT_FINITE || s.temperature == 0) {
        if (threadIdx.x == 0) token[blockIdx.x] = s.temperature == 0 && top >> 32 != NOT_FINITE ? id : -1 - id;
        return;
    }
    const double largest = (double)value_of((uint32_t)(top >> 32));
    const auto mass = [=](float logit, uint32_t) { return exp(((double)logit - largest) / s.temperature); };
    const auto mass_of_key = [=](int64_t key) { return mass(value_of((uint32_t)key), 0); };
    unsigned id_bits = 1;
    while ((V - 1) >> id_bits) id_bits++;

    // 2. All tokens
    const bool all = s.top_k == 0 || s.top_k >= V;
    if (all && s.top_p >= 1) {
        const double whole = row_total(x, cut, bins, mass);
        id = (int32_t)place_of(
                 x, cut, bins, id_bits, u * whole, true, [](float, uint32_t id) { return id; }, mass)
                 .key;
        if (threadIdx.x == 0) token[blockIdx.x] = id;
        return;
    }

    // 3. The end of the likeliest: all larger keys, then `ties` tokens of key `end`. For all tokens, end.key is -1.
    DrawPlace end = {-1, 0.0};
    double ties = 0.0;
    if (!all) {
        end = place_of(x, cut, bins, KEY_BITS, (double)s.top_k, false, by_value, [](float, uint32_t) { return 1.0; });
        ties = (double)s.top_k - end.above;
    }
    const auto mass_above = [=](float logit, uint32_t id) { return key_of(logit) > end.key ? mass(logit, id) : 0.0; };
    double whole = row_total(x, cut, bins, mass_above) + (all ? 0.0 : ties * mass_of_key(end.key));
    if (s.top_p < 1) {
        const double target = s.top_p * whole;
        const DrawPlace place = place_of(x, cut, bins, KEY_BITS, target, false, by_value, mass);
        const double each = mass_of_key(place.key), count = fmax(1.0, ceil((target - place.above) / each));
        if (place.key > end.key || (place.key == end.key && count < ties))
            end = place, ties = count, whole = place.above + count * each;
    }

    // 4. The token, maybe one of several with its key
    DrawPlace place = place_of(x, cut, bins, KEY_BITS, u * whole, true, by_value, mass);
    double number = floor((u * whole - place.above) / mass_of_key(place.key)) + 1.0;
    if (place.key < end.key || (place.key == end.key && number > ties)) place.key = end.key, number = ties;
    const DrawPlace found = place_of(
        x, cut, bins, id_bits, number, false, [=](float, uint32_t id) { return (uint32_t)V - 1 - id; },
        [=](float logit, uint32_t) { return key_of(logit) == place.key ? 1.0 : 0.0; });
    if (threadIdx.x == 0) token[blockIdx.x] = (int32_t)((int64_t)V - 1 - found.key);
}

static void cuda_draw(int32_t *token, const Stored *logits, const double *uniform, size_t n, size_t V, size_t stride,
                      const SamplingSettings *settings, Summed *) {
    LAUNCH((draw_kernel), dim3((unsigned)n), DRAW_THREADS, DRAW_BINS * DRAW_THREADS * sizeof(double))
    (token, (const floatX *)logits, uniform, V, stride, *settings);
}

#endif
