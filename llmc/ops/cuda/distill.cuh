/*
Op set "cuda": distillation, one block for a row of logits[n,V] (llmc/ops/cpu/distill.h, formulas in op_list.h).

likeliest finds the key of the k-th highest logit 4 bits at a time, as sampling does (draw.cuh). Then each thread takes
a range of ids: a first reading counts the tokens above the key and at the key, a second one writes ids in ascending
order and sums the exponentials of all other tokens.

distill sets the logits of the teacher's tokens to -inf, sums the exponentials of the other words in one reading, and
overwrites the row with its gradient in a second one, backwards, as logprob.cuh does. The teacher's tokens follow one by
one, from their saved logits. Sums are double, in a fixed order.
*/
#ifndef LLMC_CUDA_DISTILL_CUH
#define LLMC_CUDA_DISTILL_CUH
#include "draw.cuh"

// Joins the values of a block's threads in a fixed order; all threads get the result. parts[blockDim.x]
template <typename F> __device__ inline double block_fold(double x, double *parts, F join) {
    __syncthreads(); // the last result has been read
    parts[threadIdx.x] = x;
    for (unsigned step = blockDim.x / 2; step; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) parts[threadIdx.x] = join(parts[threadIdx.x], parts[threadIdx.x + step]);
    }
    __syncthreads();
    return parts[0];
}
__device__ inline double block_max(double x, double *parts) {
    return block_fold(x, parts, [](double a, double b) { return a > b ? a : b; });
}
__device__ inline double block_sum(double x, double *parts) {
    return block_fold(x, parts, [](double a, double b) { return a + b; });
}

// ---- the likeliest tokens of a teacher ------------------------------------------------------------------------------
template <bool CAPPED>
__global__ void __launch_bounds__(DRAW_THREADS)
    likeliest_kernel(int32_t *top, float *top_logp, float *tail, const floatX *logits, const int32_t *targets,
                     uint32_t V, uint32_t k, size_t stride, SoftCap<CAPPED> cap, double inverse) {
    DYNAMIC_SHARED(double, bins);
    SHARED(double, parts, DRAW_THREADS);
    SHARED(uint32_t, above, DRAW_THREADS);
    SHARED(uint32_t, equal, DRAW_THREADS);
    const size_t t = blockIdx.x;
    const floatX *x = logits + t * stride;
    top += t * k, top_logp += t * k;
    if (targets[t] < 0) {
        for (uint32_t j = threadIdx.x; j < k; j += DRAW_THREADS) top[j] = 0, top_logp[j] = 0.0f;
        if (threadIdx.x == 0) tail[t] = 0.0f;
        return;
    }

    // 1. The k-th highest key. Of the tokens at this key the first `ties` are taken.
    const double wanted = (double)k;
    const DrawPlace place = place_of<OF_LOGITS>(
        x, V, bins, KEY_BITS, 0, false, [=](double) { return wanted; }, [](float) { return 1.0; });
    const uint32_t ties = k - (uint32_t)place.above;

    // 2. This thread's tokens above the key and at it, and the largest logit
    const uint32_t begin = (uint32_t)((uint64_t)V * threadIdx.x / DRAW_THREADS);
    const uint32_t end = (uint32_t)((uint64_t)V * (threadIdx.x + 1) / DRAW_THREADS);
    float largest = -FLT_MAX;
    uint32_t more = 0, same = 0;
    for (uint32_t i = begin; i < end; i++) {
        const float logit = load(x[i]);
        const uint32_t key = key_of(logit);
        more += key > place.key, same += key == place.key;
        largest = logit > largest ? logit : largest;
    }
    above[threadIdx.x] = more, equal[threadIdx.x] = same;
    const float highest = capped((float)block_max((double)largest, parts), cap);

    // 3. Ids in ascending order, and the sums of exponentials
    uint32_t first = 0, taken = 0;
    for (unsigned i = 0; i < threadIdx.x; i++) first += above[i], taken += equal[i];
    taken = taken < ties ? taken : ties, first += taken;
    double chosen = 0.0, rest = 0.0;
    for (uint32_t i = begin; i < end; i++) {
        const float logit = load(x[i]), p = expf((capped(logit, cap) - highest) * (float)inverse);
        const uint32_t key = key_of(logit);
        const bool takes = key > place.key || (key == place.key && taken < ties);
        taken += key == place.key && takes;
        if (takes && first < k) top[first++] = (int32_t)i;
        (takes ? chosen : rest) += (double)p;
    }
    chosen = block_sum(chosen, parts), rest = block_sum(rest, parts); // all ids are written, too

    // 4. Log-probabilities
    const double all = log(chosen + rest);
    for (uint32_t j = threadIdx.x; j < k; j += DRAW_THREADS)
        top_logp[j] = (float)(((double)capped(load(x[top[j]]), cap) - (double)highest) * inverse - all);
    if (threadIdx.x == 0) tail[t] = (float)(rest / (chosen + rest));
}

static void cuda_likeliest(int32_t *top, Summed *top_logp, Summed *tail, const Stored *logits, const int32_t *targets,
                           size_t n, size_t V, size_t k, size_t stride, Temperature temperature) {
    with_flag(temperature.cap > 0, [&](auto CAPPED) {
        const SoftCap<CAPPED> cap = {(float)temperature.cap, (float)(1 / temperature.cap)};
        LAUNCH((likeliest_kernel<CAPPED>), dim3((unsigned)n), DRAW_THREADS, DRAW_BINS * DRAW_THREADS * sizeof(double))
        (top, (float *)top_logp, (float *)tail, (const floatX *)logits, targets, (uint32_t)V, (uint32_t)k, stride, cap,
         1 / temperature.divisor);
    });
}

// ---- the student ----------------------------------------------------------------------------------------------------
// Sums of exp((c - top) by_soft) and exp((c - top) by) over words
struct DistillSums {
    float top;
    double soft, hard;
};

template <bool APART>
__device__ inline void see_both(DistillSums *e, const float *c, int count, float by_soft, float by) {
    float top = e->top;
    for (int j = 0; j < count; j++) top = c[j] > top ? c[j] : top;
    if (top > e->top) {
        const double fall = (double)top - (double)e->top;
        e->soft *= exp(-fall * (double)by_soft), e->hard *= APART ? exp(-fall * (double)by) : 1.0;
        e->top = top;
    }
    for (int j = 0; j < count; j++) {
        e->soft += (double)expf((c[j] - top) * by_soft);
        if (APART) e->hard += (double)expf((c[j] - top) * by);
    }
}

template <bool CAPPED, bool APART>
__global__ void __launch_bounds__(LOGPROB_THREADS)
    distill_kernel(float *logp, float *divergence, floatX *logits, const int32_t *targets, const int32_t *top_ids,
                   const float *top_logp, const float *tails, const float *weight, size_t V, size_t k, size_t stride,
                   SoftCap<CAPPED> cap, double by, double softness, double share, float *scratch) {
    SHARED(double, parts, LOGPROB_THREADS);
    const size_t t = blockIdx.x;
    const bool counts = targets[t] >= 0, gradient = weight != NULL && counts && weight[t] != 0.0f;
    floatX *x = logits + t * stride;
    const RowCut cut = row_cut(x, V);
    if (!counts) {
        if (threadIdx.x == 0) logp[t] = divergence[t] = 0.0f;
        if (weight != NULL) row_zero(x, cut);
        return;
    }
    const size_t target = (size_t)targets[t];
    const int32_t *id = top_ids + t * k;
    const float *teacher = top_logp + t * k;
    float *saved = scratch + t * k;
    const double by_soft = by / softness, tail = (double)tails[t];

    // 1. The teacher's tokens and the target count as -inf
    const float target_logit = load(x[target]), own_float = capped(target_logit, cap);
    const double own = (double)own_float;
    double most = own, inside = 0.0;
    __syncthreads(); // all threads have read the target's logit
    for (size_t j = threadIdx.x; j < k; j += LOGPROB_THREADS) {
        saved[j] = load(x[id[j]]), x[id[j]] = store(-INFINITY);
        most = fmax(most, (double)capped(saved[j], cap)), inside += (size_t)id[j] == target ? 1.0 : 0.0;
    }
    most = block_max(most, parts);
    const bool outside = block_sum(inside, parts) == 0.0; // the target is in the tail

    // 2. All other words
    DistillSums e = {-FLT_MAX, 0.0, 0.0};
    for_row<false>(cut, [&]<int W>(Width<W>, size_t first) {
        const Pack<floatX, W> pack = pack_read<W>(x + first);
        float value[W];
        for (int j = 0; j < W; j++) value[j] = capped(load(pack.x[j]), cap);
        if (target - first < W)
            for (int j = 0; j < W; j++) value[j] = first + j == target ? -INFINITY : value[j];
        see_both<APART>(&e, value, W, (float)by_soft, (float)by);
    });
    const float others = (float)block_max((double)e.top, parts);
    const double fall = (double)e.top - (double)others;
    const double soft = block_sum(e.soft * exp(fall * by_soft), parts);
    const double hard = APART ? block_sum(e.hard * exp(fall * by), parts) : soft;

    // 3. Sums over the teacher's tokens
    const double top = fmax(most, (double)others);
    double of_soft = 0.0, of_hard = 0.0, of_teacher = 0.0;
    for (size_t j = threadIdx.x; j < k; j += LOGPROB_THREADS) {
        const double c = (double)capped(saved[j], cap) - top;
        of_soft += exp(c * by_soft), of_teacher += exp((double)teacher[j]);
        if ((size_t)id[j] != target) of_hard += exp(c * by);
    }
    const double own_soft = outside ? exp((own - top) * by_soft) : 0.0;
    const double sum = soft * exp(((double)others - top) * by_soft) + own_soft + block_sum(of_soft, parts);
    const double rest = hard * exp(((double)others - top) * by) + block_sum(of_hard, parts);
    const double itself = exp((own - top) * by), probability = tail + block_sum(of_teacher, parts);
    const double log_sum = log(sum), tail_top = outside ? fmax((double)others, own) : (double)others;
    const double tail_sum =
        soft * exp(((double)others - tail_top) * by_soft) + (outside ? exp((own - tail_top) * by_soft) : 0.0);
    const double tail_log = tail_sum > 0.0 ? (tail_top - top) * by_soft + log(tail_sum) - log_sum : -INFINITY;

    // 4. The divergence and the log-probability
    double found = 0.0;
    for (size_t j = threadIdx.x; j < k; j += LOGPROB_THREADS) {
        const double q = ((double)capped(saved[j], cap) - top) * by_soft - log_sum, p = exp((double)teacher[j]);
        if (p > 0.0) found += p * ((double)teacher[j] - q);
    }
    found = block_sum(found, parts);
    if (threadIdx.x == 0) {
        divergence[t] = (float)(found + (tail > 0.0 ? tail * (log(tail) - tail_log) : 0.0));
        logp[t] = (float)(itself > rest ? -log1p(rest / itself) : (own - top) * by - log(rest + itself));
    }

    // 5. The gradient: first of the other words, then of the teacher's and the target
    if (!gradient) {
        if (weight != NULL) row_zero(x, cut);
        for (size_t j = threadIdx.x; j < k && weight == NULL; j += LOGPROB_THREADS) x[id[j]] = store(saved[j]);
        return;
    }
    const double w = (double)weight[t] * by, T = share * softness, cross = (1.0 - share) / (rest + itself);
    const double tail_share = tail_sum > 0.0 ? (probability * exp(tail_log) - tail) / tail_sum : 0.0;
    const double by_soft_word = -w * T * tail_share * exp(((double)others - tail_top) * by_soft);
    const double by_hard_word = -w * cross * exp(((double)others - top) * by);
    const float a = (float)(APART ? by_soft_word : by_soft_word + by_hard_word), b = (float)by_hard_word;
    for_row<true>(cut, [&]<int W>(Width<W>, size_t first) {
        Pack<floatX, W> pack = pack_read<W>(x + first);
        for (int j = 0; j < W; j++) {
            const float logit = load(pack.x[j]), z = capped(logit, cap) - others;
            float p = a * expf(z * (float)by_soft);
            if (APART) p += b * expf(z * (float)by);
            pack.x[j] = store(p * cap_slope(logit, cap));
        }
        pack_write(x + first, pack);
    });
    __syncthreads();
    for (size_t j = threadIdx.x; j < k; j += LOGPROB_THREADS) {
        const double c = (double)capped(saved[j], cap) - top, q = exp(c * by_soft) / sum;
        const double hit = (size_t)id[j] == target ? rest : -exp(c * by);
        const double g = cross * hit - T * (probability * q - exp((double)teacher[j]));
        x[id[j]] = store((float)(w * g) * cap_slope(saved[j], cap));
    }
    if (outside && threadIdx.x == 0) {
        const double g = cross * rest - T * tail_share * exp((own - tail_top) * by_soft);
        x[target] = store((float)(w * g) * cap_slope(target_logit, cap));
    }
}

static void cuda_distill(Summed *logp, Summed *divergence, Stored *logits, const int32_t *targets, const int32_t *top,
                         const Summed *top_logp, const Summed *tail, const Summed *weight, size_t n, size_t V, size_t k,
                         size_t stride, Distillation how, Summed *scratch) {
    with_flag(how.temperature.cap > 0, [&](auto CAPPED) {
        with_flag(how.softness != 1, [&](auto APART) {
            const SoftCap<CAPPED> cap = {(float)how.temperature.cap, (float)(1 / how.temperature.cap)};
            LAUNCH((distill_kernel<CAPPED, APART>), dim3((unsigned)n), LOGPROB_THREADS, 0)
            ((float *)logp, (float *)divergence, (floatX *)logits, targets, top, (const float *)top_logp,
             (const float *)tail, (const float *)weight, V, k, stride, cap, 1 / how.temperature.divisor, how.softness,
             how.share, (float *)scratch);
        });
    });
}

#endif
