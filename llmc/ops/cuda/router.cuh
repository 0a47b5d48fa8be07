/*
The router of a mixture of experts in op set "cuda" (linear.cuh computes its logits). A warp has one token, a lane every
LANES-th expert. Experts are chosen one after another, in the order of falling score and rising index: each is the best
expert that follows the previous one in this order. So no expert is marked as taken, and equal scores need no rule of
their own.

Counts and sums of softmax are made in blocks of GPU_COUNT_TOKENS tokens, then added in the order of blocks. No atomics.
*/
#ifndef LLMC_CUDA_ROUTER_CUH
#define LLMC_CUDA_ROUTER_CUH
#include "platform.cuh"

constexpr unsigned ROUTER_WARPS = 4, ROUTER_THREADS = ROUTER_WARPS * LANES, COUNT_THREADS = 256;

static inline dim3 router_grid(size_t n) { return dim3((unsigned)blocks_for(n, ROUTER_WARPS)); }
__device__ inline size_t router_token(void) { return (size_t)blockIdx.x * ROUTER_WARPS + threadIdx.x / LANES; }

__device__ inline float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }

// ---- choosing -------------------------------------------------------------------------------------------------------
struct Scored {
    float score;
    int index;
};
__device__ inline bool comes_before(Scored a, Scored b) {
    return a.score > b.score || (a.score == b.score && a.index < b.index);
}
__device__ inline Scored warp_first(Scored x) {
    for (unsigned step = LANES / 2; step; step /= 2) {
        const Scored other = {__shfl_xor_sync(ALL_LANES, x.score, step), __shfl_xor_sync(ALL_LANES, x.index, step)};
        if (comes_before(other, x)) x = other;
    }
    return x;
}

constexpr Scored BEFORE_ALL = {INFINITY, -1}, AFTER_ALL = {-INFINITY, INT_MAX};

struct RouterScores {
    const float *logits, *bias; // logits of the token; bias may be NULL
    bool sigmoids;
};
__device__ inline float score_at(const RouterScores &s, unsigned e) {
    const float score = (s.sigmoids ? sigmoid(s.logits[e]) : s.logits[e]) + (s.bias ? s.bias[e] : 0.0f);
    return score == score ? score : -INFINITY;
}

// Returns the group that is ranked last among the `kept` best groups. best[groups]: the sum of each group's two best
// scores, of a softmax the logarithm of the sum of their exponentials
__device__ inline Scored kept_groups(float *best, const RouterScores &scores, const RouterShape &shape) {
    const unsigned lane = threadIdx.x % LANES, size = (unsigned)(shape.E / shape.groups);
    for (unsigned g = 0; g < shape.groups; g++) {
        Scored first = AFTER_ALL;
        float second = -INFINITY;
        for (unsigned e = g * size + lane; e < (g + 1) * size; e += LANES) {
            const Scored own = {score_at(scores, e), (int)e};
            if (comes_before(own, first)) first = own;
        }
        first = warp_first(first);
        for (unsigned e = g * size + lane; e < (g + 1) * size; e += LANES)
            if ((int)e != first.index) second = fmaxf(second, score_at(scores, e));
        second = warp_max(second);
        if (!scores.sigmoids) second = second > -INFINITY ? log1pf(expf(second - first.score)) : 0.0f;
        if (lane == 0) best[g] = size > 1 ? first.score + second : first.score;
    }
    __syncwarp();
    Scored last = BEFORE_ALL;
    for (unsigned i = 0; i < shape.kept; i++) {
        Scored next = AFTER_ALL;
        for (unsigned g = lane; g < shape.groups; g += LANES) {
            const Scored own = {best[g], (int)g};
            if (comes_before(last, own) && comes_before(own, next)) next = own;
        }
        last = warp_first(next);
    }
    return last;
}

// Chooses experts. P: scores that a lane holds, of at most P * LANES experts; 0: any number, computed again when needed
template <int P>
__global__ void router_choose_kernel(uint16_t *route, const float *logits, const float *bias, size_t n,
                                     RouterShape shape, int keep) {
    DYNAMIC_SHARED(float, groups);
    const size_t t = router_token();
    const unsigned lane = threadIdx.x % LANES, E = (unsigned)shape.E, size = (unsigned)(shape.E / shape.groups);
    if (t >= n || (keep && route[t * shape.k] != NO_EXPERT)) return;
    const RouterScores scores = {logits + t * E, bias, shape.kind == ROUTER_SIGMOID};
    float *const best = groups + threadIdx.x / LANES * shape.groups;
    const bool grouped = shape.groups > 1;
    const Scored last_group = grouped ? kept_groups(best, scores, shape) : AFTER_ALL;
    float held[P ? P : 1];
#pragma unroll
    for (int i = 0; i < P; i++) held[i] = lane + i * LANES < E ? score_at(scores, lane + i * LANES) : 0.0f;
    Scored last = BEFORE_ALL;
    for (unsigned j = 0; j < shape.k; j++) {
        Scored next = AFTER_ALL;
        const auto consider = [&](unsigned e, float score) {
            const Scored own = {score, (int)e};
            if (!comes_before(last, own) || !comes_before(own, next)) return;
            if (grouped && comes_before(last_group, Scored{best[e / size], (int)(e / size)})) return;
            next = own;
        };
#pragma unroll
        for (int i = 0; i < P; i++)
            if (lane + i * LANES < E) consider(lane + i * LANES, held[i]);
        for (unsigned e = lane; P == 0 && e < E; e += LANES) consider(e, score_at(scores, e));
        last = warp_first(next);
        if (lane == 0) route[t * shape.k + j] = (uint16_t)last.index;
    }
}

static void cuda_router_choose(uint16_t *route, const Summed *logits, const float *bias, size_t n,
                               const RouterShape *shape, int keep) {
    const size_t shared = shape->groups > 1 ? ROUTER_WARPS * shape->groups * sizeof(float) : 0;
    const auto launch = [&](auto P) {
        LAUNCH((router_choose_kernel<P>), router_grid(n), ROUTER_THREADS, shared)
        (route, (const float *)logits, bias, n, *shape, keep);
    };
    if (shape->E <= 4 * LANES)
        launch(Width<4>());
    else if (shape->E <= 16 * LANES)
        launch(Width<16>());
    else
        launch(Width<0>());
}

// ---- weights --------------------------------------------------------------------------------------------------------
struct Softmax {
    float largest, sum; // sum of exp(z - largest)
};
__device__ inline Softmax router_softmax(const float *z, unsigned E) {
    Softmax s = {-INFINITY, 0.0f};
    for (unsigned e = threadIdx.x % LANES; e < E; e += LANES) s.largest = fmaxf(s.largest, z[e]);
    s.largest = warp_max(s.largest);
    for (unsigned e = threadIdx.x % LANES; e < E; e += LANES) s.sum += expf(z[e] - s.largest);
    s.sum = warp_sum(s.sum);
    return s;
}

// A token's weights before they are scaled: weight_of / divisor. Normalised weights need no softmax of all experts:
// they count from the largest chosen logit, so that their sum is never 0.
struct TokenWeights {
    const float *z;
    const uint16_t *route; // NULL: all experts
    Softmax softmax;
    float divisor;
    bool sigmoids;
};
__device__ inline float chosen_logit(const TokenWeights &w, unsigned j) { return w.z[w.route ? w.route[j] : j]; }
__device__ inline float weight_of(const TokenWeights &w, unsigned j) {
    const float value = chosen_logit(w, j);
    return w.sigmoids ? sigmoid(value) : expf(value - w.softmax.largest) / w.softmax.sum;
}

__device__ inline TokenWeights token_weights(const float *logits, const uint16_t *route, size_t t,
                                             const RouterShape &shape) {
    TokenWeights w = {logits + t * shape.E,
                      route ? route + t * shape.k : NULL,
                      {-INFINITY, 1.0f},
                      1.0f,
                      shape.kind == ROUTER_SIGMOID};
    float sum = 0.0f;
    if (!w.sigmoids && !shape.normalised) w.softmax = router_softmax(w.z, (unsigned)shape.E);
    if (!shape.normalised) return w;
    for (unsigned j = threadIdx.x % LANES; j < shape.k; j += LANES)
        w.softmax.largest = fmaxf(w.softmax.largest, chosen_logit(w, j));
    w.softmax.largest = warp_max(w.softmax.largest);
    for (unsigned j = threadIdx.x % LANES; j < shape.k; j += LANES) sum += weight_of(w, j);
    w.divisor = warp_sum(sum) + (w.sigmoids ? (float)shape.epsilon : 0.0f);
    return w;
}

__global__ void router_weights_kernel(float *weight, const float *logits, const uint16_t *route, size_t n,
                                      RouterShape shape) {
    const size_t t = router_token();
    if (t >= n) return;
    const TokenWeights w = token_weights(logits, route, t, shape);
    for (unsigned j = threadIdx.x % LANES; j < shape.k; j += LANES)
        weight[t * shape.k + j] = weight_of(w, j) / w.divisor * (float)shape.scale;
}

static void cuda_router_weights(Summed *weight, const Summed *logits, const uint16_t *route, size_t n,
                                const RouterShape *shape) {
    LAUNCH((router_weights_kernel), router_grid(n), ROUTER_THREADS, 0)
    ((float *)weight, (const float *)logits, route, n, *shape);
}

// ---- backward -------------------------------------------------------------------------------------------------------
__global__ void router_backward_kernel(floatX *dlogits, const float *dweight, const float *logits,
                                       const uint16_t *route, const float *balance, float z_factor,
                                       const int32_t *times, size_t n, RouterShape shape) {
    SHARED(float, pulls, ROUTER_WARPS *CHOSEN_MOST);
    const size_t t = router_token();
    const unsigned lane = threadIdx.x % LANES, E = (unsigned)shape.E, k = (unsigned)shape.k;
    // Gradients of the chosen logits, through their weights.
    float *const pull = pulls + threadIdx.x / LANES * CHOSEN_MOST;
    const float scale = (float)shape.scale;
    if (t >= n) return;
    const bool spread = shape.kind == ROUTER_SOFTMAX && !shape.normalised;
    const TokenWeights w = token_weights(logits, route, t, shape);
    Softmax all = w.softmax;
    if (!spread && (balance || z_factor != 0.0f)) all = router_softmax(w.z, E);
    const float *const g = dweight + t * k;
    float inner = 0.0f, mean = 0.0f;
    for (unsigned j = lane; j < k; j += LANES) inner += weight_of(w, j) / w.divisor * g[j];
    inner = warp_sum(inner);
    const auto pull_of = [&](unsigned j) {
        const float own = weight_of(w, j);
        if (w.sigmoids) return scale * (shape.normalised ? (g[j] - inner) / w.divisor : g[j]) * own * (1.0f - own);
        return scale * own / w.divisor * (shape.normalised ? g[j] - inner : g[j]);
    };
    for (unsigned j = lane; route && j < k; j += LANES) pull[j] = pull_of(j);
    __syncwarp();
    const auto probability = [&](unsigned e) { return expf(w.z[e] - all.largest) / all.sum; };
    for (unsigned e = lane; balance && e < E; e += LANES) mean += probability(e) * balance[e];
    mean = warp_sum(mean);
    const float by = times ? (float)times[t] : 1.0f;
    const float of_p = by * z_factor * 2.0f * (logf(all.sum) + all.largest) - (spread ? scale * inner : 0.0f);
    for (unsigned e = lane; e < E; e += LANES) {
        float dz = route ? 0.0f : pull_of(e);
        for (unsigned j = 0; route && j < k; j++)
            if (w.route[j] == e) dz += pull[j];
        if (spread || z_factor != 0.0f) dz += of_p * probability(e);
        if (balance) dz += by * probability(e) * (balance[e] - mean);
        dlogits[t * E + e] = store(dz);
    }
}

static void cuda_router_backward(Stored *dlogits, const Summed *dweight, const Summed *logits, const uint16_t *route,
                                 const Summed *balance, double z, const int32_t *times, size_t n,
                                 const RouterShape *shape) {
    LAUNCH((router_backward_kernel), router_grid(n), ROUTER_THREADS, 0)
    ((floatX *)dlogits, (const float *)dweight, (const float *)logits, route, (const float *)balance, (float)z, times,
     n, *shape);
}

// ---- counts: parts[blocks, E], and of softmax sums[blocks, E + 1] ---------------------------------------------------
__global__ void router_count_kernel(int32_t *parts, float *sums, const float *logits, const uint16_t *route,
                                    const int32_t *times, size_t n, unsigned E, unsigned k) {
    SHARED(uint16_t, chosen, (size_t)GPU_COUNT_TOKENS * CHOSEN_MOST);
    SHARED(Softmax, softmax, GPU_COUNT_TOKENS);
    SHARED(int32_t, held, GPU_COUNT_TOKENS); // times of each token
    const size_t begin = (size_t)blockIdx.x * GPU_COUNT_TOKENS;
    const unsigned tokens = n - begin < GPU_COUNT_TOKENS ? (unsigned)(n - begin) : (unsigned)GPU_COUNT_TOKENS;
    for (unsigned i = threadIdx.x; i < tokens * k; i += COUNT_THREADS) chosen[i] = route[begin * k + i];
    for (unsigned i = threadIdx.x; i < tokens; i += COUNT_THREADS) held[i] = times ? times[begin + i] : 1;
    for (unsigned i = threadIdx.x / LANES; sums && i < tokens; i += COUNT_THREADS / LANES) {
        const Softmax own = router_softmax(logits + (begin + i) * E, E);
        if (threadIdx.x % LANES == 0) softmax[i] = own;
    }
    __syncthreads();
    for (unsigned e = threadIdx.x; e < E; e += COUNT_THREADS) {
        int32_t count = 0;
        for (unsigned i = 0; i < tokens; i++)
            for (unsigned j = 0; j < k; j++) count += chosen[i * k + j] == e ? held[i] : 0;
        parts[(size_t)blockIdx.x * E + e] = count;
    }
    for (unsigned e = threadIdx.x; sums && e <= E; e += COUNT_THREADS) {
        float sum = 0.0f;
        for (unsigned i = 0; i < tokens; i++) {
            const float log_sum = logf(softmax[i].sum) + softmax[i].largest;
            const float *const z = logits + (begin + i) * E;
            sum += (float)held[i] * (e == E ? log_sum * log_sum : expf(z[e] - softmax[i].largest) / softmax[i].sum);
        }
        sums[(size_t)blockIdx.x * (E + 1) + e] = sum;
    }
}

__global__ void router_add_kernel(int64_t *count, double *sums, const int32_t *parts, const float *part_sums,
                                  size_t blocks, unsigned E) {
    const unsigned e = blockIdx.x * COUNT_THREADS + threadIdx.x;
    if (e > E) return;
    int64_t rows = 0;
    double sum = 0.0;
#pragma unroll 8
    for (size_t b = 0; b < blocks && e < E; b++) rows += parts[b * E + e];
#pragma unroll 8
    for (size_t b = 0; b < blocks && sums; b++) sum += (double)part_sums[b * (E + 1) + e];
    if (e < E) count[e] += rows;
    if (sums) sums[e] += sum;
}

static void cuda_router_count(int64_t *count, double *sums, const Summed *logits, const uint16_t *route,
                              const int32_t *times, size_t n, const RouterShape *shape, Summed *scratch) {
    const size_t blocks = blocks_for(n, GPU_COUNT_TOKENS);
    int32_t *const parts = (int32_t *)scratch;
    float *const part_sums = sums ? (float *)scratch + blocks * shape->E : NULL;
    const unsigned E = (unsigned)shape->E;
    LAUNCH((router_count_kernel), (unsigned)blocks, COUNT_THREADS, 0)
    (parts, part_sums, (const float *)logits, route, times, n, E, (unsigned)shape->k);
    LAUNCH((router_add_kernel), (unsigned)blocks_for(E + 1, COUNT_THREADS), COUNT_THREADS, 0)
    (count, sums, (const int32_t *)parts, (const float *)part_sums, blocks, E);
}

#endif
