/*
Sampling in op set "cuda", one block for a row of logits[n,V]: draws the same tokens as llmc/ops/cpu/draw.h. Nothing is
sorted. A logit's key is its bits, mapped to the order of values. The k-th likeliest token, the end of top-p and the
token of a uniform number are found in the same way: as the key at which a sum of weights, from the largest key down,
reaches a target. Weights are 1, or exp((x - largest) / temperature). The key is found DRAW_DIGIT bits at a time: every
thread adds up its weights by digit in its own shared memory, and warps add the sums of all threads in a fixed order.
Tokens of equal keys have equal weights: how many are needed follows by division, and the last token's id by a search of
ids.

A row is read for its largest logit, then once per 4 bits of a logit for top-k, for top-p and for the draw. A search of
ids reads the row once, then only the part with the digits found so far. A bf16 row is read twice with temperature
alone, else at most 14 times. Only the first reading is from memory: a row of 152k logits is 0.3 MB, and the L2 cache of
a large GPU holds 64 MB.
*/
#ifndef LLMC_CUDA_DRAW_CUH
#define LLMC_CUDA_DRAW_CUH
#include "logprob.cuh"

constexpr unsigned DRAW_DIGIT = 4, DRAW_BINS = 1 << DRAW_DIGIT, DRAW_THREADS = DRAW_BINS * LANES; // one warp per bin
constexpr unsigned KEY_BITS = 8 * sizeof(floatX), KEY_SHIFT = 32 - KEY_BITS;
constexpr uint32_t SIGN = 0x80000000u, NOT_FINITE = 0xffffffffu; // NOT_FINITE is above all keys

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

// Returns exp(x), x <= 0, like simd_exp of llmc/ops/cpu/draw.h.
__device__ inline double weight_exp(double x) {
    const double magic = 6755399441055744.0, y = x > -708.0 ? x : -708.0; // 1.5 * 2^52
    const double shifted = fma(y, 1.4426950408889634, magic), n = shifted - magic;
    const double r = fma(n, -2.3190468138462996e-17, fma(n, -0.69314718055994529, y));
    const double terms[] = {1, 1, 2, 6, 24, 120, 720, 5040, 40320, 362880, 3628800, 39916800, 479001600};
    double p = 1.0 / 6227020800.0, power;
    uint64_t bits;
#pragma unroll
    for (int k = 12; k >= 0; k--) p = fma(p, r, 1.0 / terms[k]);
    memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits + 1023) << 52; // 2^n
    memcpy(&power, &bits, sizeof(power));
    return x > -708.0 ? p * power : 0.0;
}

// Returns cap tanh(x / cap) in double; cap 0: x.
__device__ inline double soft_capped(double x, double cap) {
    if (cap == 0) return x;
    const double e = weight_exp(-2 * fabs(x) / cap);
    return copysign(cap * ((1 - e) / (1 + e)), x);
}

// Calls f(logit, id) for this thread's tokens among ids [begin, end) of a row.
template <typename F> __device__ inline void for_tokens(const floatX *row, uint32_t begin, uint32_t end, F f) {
    constexpr unsigned W = full_pack<floatX>, BATCH = 2; // packs read at once
    const floatX *const x = row + begin;
    const RowCut cut = row_cut(x, end - begin);
    for (size_t first = threadIdx.x; first < cut.packs; first += BATCH * DRAW_THREADS) {
        Pack<floatX, W> packs[BATCH];
#pragma unroll
        for (unsigned b = 0; b < BATCH; b++)
            if (const size_t i = first + b * DRAW_THREADS; i < cut.packs) packs[b] = pack_read<W>(x + cut.head + i * W);
#pragma unroll
        for (unsigned b = 0; b < BATCH; b++)
            if (const size_t i = first + b * DRAW_THREADS; i < cut.packs)
                for (unsigned j = 0; j < W; j++) f(load(packs[b].x[j]), begin + (uint32_t)(cut.head + i * W) + j);
    }
    for (size_t i = threadIdx.x; i < cut.singles; i += DRAW_THREADS)
        f(load(x[single_of(cut, i)]), begin + (uint32_t)single_of(cut, i));
}

struct DrawPlace {
    uint32_t key;
    double above, all; // above: weight of all larger keys; all: weight of all keys
};

enum DrawKeys { OF_LOGITS, FALLING_IDS, RISING_IDS }; // keys: key_of(logit), id, V - 1 - id

// Returns the largest key, of `bits` bits, at which the weights of this key and all larger keys reach target(the sum of
// all weights), or, with `pass`, exceed the target. If rounding prevents that, returns the lowest key with a weight.
// Keys below `least` have no weight.
template <DrawKeys KEYS, typename Target, typename Weight>
__device__ inline DrawPlace place_of(const floatX *x, uint32_t V, double *bins, unsigned bits, uint32_t least,
                                     bool pass, Target target, Weight weight) { // bins[DRAW_BINS][DRAW_THREADS]
    SHARED(double, total, DRAW_BINS);
    const unsigned bin = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    DrawPlace place = {0, 0.0, 0.0};
    double wanted = 0.0;
    for (unsigned shift = bits, width; shift;) {
        // 1. Weights by the next digit, of keys that begin with place.key. Such ids form a range.
        const uint64_t from = (uint64_t)place.key << shift, to = from + ((uint64_t)1 << shift);
        const uint32_t low = from < V ? (uint32_t)from : V, high = to < V ? (uint32_t)to : V;
        const uint32_t begin = KEYS == FALLING_IDS ? low : KEYS == RISING_IDS ? V - high : 0;
        const uint32_t end = KEYS == FALLING_IDS ? high : KEYS == RISING_IDS ? V - low : V;
        const uint32_t prefix = place.key;
        width = shift < DRAW_DIGIT ? shift : DRAW_DIGIT;
        shift -= width;
        for (unsigned d = 0; d < DRAW_BINS; d++) bins[d * DRAW_THREADS + threadIdx.x] = 0.0;
        for_tokens(x, begin, end, [&](float logit, uint32_t id) {
            const uint32_t key = KEYS == OF_LOGITS ? key_of(logit) : KEYS == FALLING_IDS ? id : V - 1 - id;
            const uint32_t digits = key >> shift;
            if (KEYS != OF_LOGITS || (key >= least && digits >> width == prefix))
                bins[digits % (1u << width) * DRAW_THREADS + threadIdx.x] += weight(logit);
        });
        // 2. Sums over all threads
        __syncthreads();
        double sum = 0.0;
        for (unsigned i = lane; i < DRAW_THREADS; i += LANES) sum += bins[bin * DRAW_THREADS + i];
        sum = warp_sum(sum);
        if (lane == 0) total[bin] = sum;
        __syncthreads();
        if (shift + width == bits) {
            for (unsigned d = DRAW_BINS; d-- > 0;) place.all += total[d];
            wanted = target(place.all);
        }
        // 3. The digit
        double above = place.above;
        uint32_t digit = 0;
        for (unsigned d = DRAW_BINS; d-- > 0;) {
            if (total[d] == 0.0) continue;
            digit = d, place.above = above;
            above += total[d];
            if (pass ? above > wanted : above >= wanted) break;
        }
        place.key = place.key << width | digit;
    }
    return place;
}

// Draws a token per row. inverse: 1 / temperature
__global__ void __launch_bounds__(DRAW_THREADS)
    draw_kernel(int32_t *token, const floatX *logits, const double *uniform, uint32_t V, size_t stride,
                SamplingSettings s, double inverse) {
    DYNAMIC_SHARED(double, bins);
    SHARED(uint64_t, likeliest, DRAW_THREADS);
    const floatX *x = logits + blockIdx.x * stride;
    const double u = uniform[blockIdx.x];

    // 1. The likeliest token. A logit that is not finite ranks above all others.
    uint64_t top = 0;
    for_tokens(x, 0, V, [&](float logit, uint32_t id) {
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
    const double largest = soft_capped((double)value_of((uint32_t)(top >> 32)), s.cap);
    const auto mass = [=](float logit) { return weight_exp((soft_capped((double)logit, s.cap) - largest) * inverse); };
    const auto mass_of_key = [=](uint32_t key) { return mass(value_of(key)); };
    unsigned id_bits = 1;
    while ((V - 1) >> id_bits) id_bits++;

    // 2. All tokens, if nothing limits them
    const bool all = s.top_k == 0 || s.top_k >= V;
    if (all && s.top_p >= 1) {
        const auto share = [=](double of_all) { return u * of_all; };
        id = (int32_t)place_of<FALLING_IDS>(x, V, bins, id_bits, 0, true, share, mass).key;
        if (threadIdx.x == 0) token[blockIdx.x] = id;
        return;
    }

    // 3. The limit of the likeliest tokens: all keys from `least` on, then `ties` tokens of key `end`, each of weight
    // `each`
    uint32_t least = 0, end = 0;
    double ties = 0.0, each = 0.0;
    if (!all) {
        const double k = (double)s.top_k;
        const DrawPlace place = place_of<OF_LOGITS>(
            x, V, bins, KEY_BITS, 0, false, [=](double) { return k; }, [](float) { return 1.0; });
        end = place.key, least = end + 1, ties = k - place.above, each = mass_of_key(end);
    }
    if (s.top_p < 1) {
        const auto share = [=](double of_all) { return s.top_p * (of_all + ties * each); };
        DrawPlace place = place_of<OF_LOGITS>(x, V, bins, KEY_BITS, least, false, share, mass);
        const double target = share(place.all);
        const bool beyond = ties * each > 0 && (place.all == 0 || target > place.all);
        if (!beyond) end = place.key, least = end + 1, each = mass_of_key(end);
        const double count = fmax(1.0, ceil((target - (beyond ? place.all : place.above)) / each));
        ties = beyond ? fmin(ties, count) : count;
    }

    // 4. The drawn token, maybe one of several with its key
    const auto share = [=](double of_all) { return u * (of_all + ties * each); };
    const DrawPlace place = place_of<OF_LOGITS>(x, V, bins, KEY_BITS, least, true, share, mass);
    const bool beyond = share(place.all) >= place.all && ties * each > 0;
    const uint32_t key = beyond ? end : place.key;
    double number = floor((share(place.all) - (beyond ? place.all : place.above)) / mass_of_key(key)) + 1.0;
    if (beyond) number = fmin(number, ties);
    const DrawPlace found = place_of<RISING_IDS>(
        x, V, bins, id_bits, 0, false, [=](double) { return number; },
        [=](float logit) { return key_of(logit) == key ? 1.0 : 0.0; });
    if (threadIdx.x == 0) token[blockIdx.x] = (int32_t)(V - 1 - found.key);
}

static void cuda_draw(int32_t *token, const Stored *logits, const double *uniform, size_t n, size_t V, size_t stride,
                      const SamplingSettings *settings, Summed *) {
    LAUNCH((draw_kernel), dim3((unsigned)n), DRAW_THREADS, DRAW_BINS * DRAW_THREADS * sizeof(double))
    (token, (const floatX *)logits, uniform, (uint32_t)V, stride, *settings, 1 / fmax(settings->temperature, 1e-300));
}

#endif
