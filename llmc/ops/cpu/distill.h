/*
Distillation over a row of logits [V]: the likeliest tokens of a teacher, and a student's divergence from them with the
gradient of its logits (formulas: llmc/ops/op_list.h). No row of V probabilities is stored. A heap of k ids finds the
k likeliest tokens in one reading; a second reading sums the exponentials of all other tokens.

In distill_row the logits of the k tokens and of the target count as -inf while the exponentials of the other words are
summed, as in logprob.h. So the share of the other words, and 1 - p of the target, do not cancel. Sums are double.
*/
#ifndef LLMC_CPU_DISTILL_H
#define LLMC_CPU_DISTILL_H
#include "draw.h"
#include "logprob.h"

// ---- the likeliest tokens of a teacher ------------------------------------------------------------------------------
// Restores the order below `root` of heap[count], with the least likely token on top.
static void likeliest_sift(int32_t *heap, size_t count, size_t root, const floatX *x) {
    const int32_t id = heap[root];
    size_t child;
    while ((child = 2 * root + 1) < count) {
        if (child + 1 < count && likelier(x, heap[child], heap[child + 1])) child++;
        if (!likelier(x, id, heap[child])) break;
        heap[root] = heap[child];
        root = child;
    }
    heap[root] = id;
}

// Fills id[k] with the likeliest tokens, ascending. Returns the least likely of them, which of equal logits has the
// highest id.
static int32_t likeliest_choose(int32_t *id, const floatX *x, size_t V, size_t k) {
    for (size_t i = 0; i < k; i++) id[i] = (int32_t)i;
    for (size_t i = k / 2; i-- > 0;) likeliest_sift(id, k, i, x);
    floatS least = load(x[id[0]]);
    for (size_t i = k; i < V; i++) {
        if (!(load(x[i]) > least)) continue;
        id[0] = (int32_t)i;
        likeliest_sift(id, k, 0, x);
        least = load(x[id[0]]);
    }
    const int32_t last = id[0];
    for (size_t i = 0, found = 0; i < V && found < k; i++)
        if ((int32_t)i == last || likelier(x, (int32_t)i, last)) id[found++] = (int32_t)i;
    return last;
}

// Returns the sum of exp((c - top) by) over the tokens less likely than `last`; c: the capped logits.
VECTOR_INLINE double likeliest_rest(const floatX *x, size_t V, int32_t last, floatS top, floatS by, floatS cap) {
    const floatS least = load(x[last]);
    const size_t block = logit_block(V);
    double rest = 0;
    for (size_t begin = 0; begin < V; begin += block) {
        const size_t count = min_size(block, V - begin);
        Vector sum = {0}, slope;
        for (size_t i = 0; i < count; i += VECTOR_LANES) {
            const Vector logits = vector_load_first(x + begin + i, count - i, -INFINITY);
            const Vector c = cap > 0 ? capped(logits, cap, &slope) : logits, p = vector_exp((c - top) * by);
            sum += vector_select((VectorBits)(logits < vector_of(least)), p, vector_of(0));
        }
        rest += (double)vector_sum_across(sum);
    }
    size_t equal = 0; // tokens with the least logit that are not among the k
    for (size_t i = (size_t)last + 1; i < V; i++) equal += load(x[i]) == least;
    floatS slope;
    return rest + (double)equal * exp((double)(capped_logit(least, cap, &slope) - top) * (double)by);
}

static VECTOR_FUNCTION void likeliest_row(int32_t *id, floatS *logp, floatS *tail, const floatX *x, size_t V, size_t k,
                                          Temperature temperature) {
    const double by = 1 / temperature.divisor;
    const floatS cap = (floatS)temperature.cap;
    const int32_t last = likeliest_choose(id, x, V, k);
    floatS top = load(x[id[0]]), slope;
    double sum = 0;
    for (size_t j = 1; j < k; j++) top = load(x[id[j]]) > top ? load(x[id[j]]) : top;
    top = capped_logit(top, cap, &slope);
    const double rest = likeliest_rest(x, V, last, top, (floatS)by, cap);
    for (size_t j = 0; j < k; j++) sum += exp((double)(capped_logit(load(x[id[j]]), cap, &slope) - top) * by);
    for (size_t j = 0; j < k; j++)
        logp[j] = (floatS)((double)(capped_logit(load(x[id[j]]), cap, &slope) - top) * by - log(sum + rest));
    *tail = (floatS)(rest / (sum + rest));
}

static void cpu_likeliest(int32_t *top, Summed *top_logp, Summed *tail, const Stored *logits, const int32_t *targets,
                          size_t n, size_t V, size_t k, size_t stride, Temperature temperature) {
    floatS *logp = (floatS *)top_logp, *tails = (floatS *)tail;
#pragma omp parallel for schedule(dynamic) if (n * V >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        if (targets[t] >= 0) {
            likeliest_row(top + t * k, logp + t * k, tails + t, (const floatX *)logits + t * stride, V, k, temperature);
        } else {
            memset(top + t * k, 0, k * sizeof(*top)), memset(logp + t * k, 0, k * sizeof(*logp));
            tails[t] = 0;
        }
    }
}

// ---- the student ----------------------------------------------------------------------------------------------------
// A row's teacher: probabilities exp(logp[j]) of tokens id[j], and `tail` of all others together
typedef struct {
    const int32_t *id;  // [k] ascending
    const floatS *logp; // [k]
    double tail;
    size_t k;
} TeacherRow;

// Writes x = soft exp((c - top) by_soft) + hard exp((c - top) by), times the cap's slope: the gradient of all words but
// the teacher's and the target.
VECTOR_INLINE void distill_others(floatX *x, size_t V, floatS soft, floatS hard, floatS top, floatS by_soft, floatS by,
                                  floatS cap) {
    for (size_t i = 0; i < V; i += VECTOR_LANES) {
        Vector slope = vector_of(1);
        const Vector z = logits_load(x + i, V - i, cap > 0, cap, &slope) - top;
        Vector p = soft * vector_exp(z * by_soft);
        if (hard != 0) p += hard * vector_exp(z * by);
        vector_store_first(x + i, p * slope, V - i);
    }
}

// Computes one row. weight NULL leaves the logits unchanged. saved[k]: scratch
static VECTOR_FUNCTION void distill_row(floatS *logp, floatS *divergence, floatX *x, size_t target, TeacherRow teacher,
                                        const floatS *weight, floatS *saved, size_t V, Distillation how) {
    const size_t k = teacher.k;
    const double by = 1 / how.temperature.divisor, by_soft = by / how.softness;
    const floatS cap = (floatS)how.temperature.cap;
    const int apart = how.softness != 1; // the two softmaxes differ
    const floatX logit = x[target];
    floatS slope, target_slope;
    size_t place = k; // of the target among the teacher's tokens

    // 1. All other words
    for (size_t j = 0; j < k; j++) {
        saved[j] = load(x[teacher.id[j]]), x[teacher.id[j]] = store(-INFINITY);
        if ((size_t)teacher.id[j] == target) place = j;
    }
    x[target] = store(-INFINITY);
    const Exponentials soft = cap > 0 ? sum_of_exponentials(x, V, (floatS)by_soft, 0, NULL, 1, cap)
                                      : sum_of_exponentials(x, V, (floatS)by_soft, 0, NULL, 0, 0);
    const Exponentials hard = !apart    ? soft
                              : cap > 0 ? sum_of_exponentials(x, V, (floatS)by, 0, NULL, 1, cap)
                                        : sum_of_exponentials(x, V, (floatS)by, 0, NULL, 0, 0);

    // 2. The softmax with the temperature: of all words, and of those in the tail, each relative to its largest logit
    const int outside = place == k; // the target is in the tail
    const double own = (double)capped_logit(outside ? load(logit) : saved[place], cap, &target_slope);
    double top = fmax((double)soft.top, own), probability = teacher.tail, sum, tail_log = -INFINITY, tail_share = 0;
    for (size_t j = 0; j < k; j++) top = fmax(top, (double)capped_logit(saved[j], cap, &slope));
    sum = soft.sum * exp(((double)soft.top - top) * by_soft) + (outside ? exp((own - top) * by_soft) : 0);
    for (size_t j = 0; j < k; j++) sum += exp(((double)capped_logit(saved[j], cap, &slope) - top) * by_soft);
    const double tail_top = outside ? fmax((double)soft.top, own) : (double)soft.top;
    const double tail_sum =
        soft.sum * exp(((double)soft.top - tail_top) * by_soft) + (outside ? exp((own - tail_top) * by_soft) : 0);
    if (tail_sum > 0) tail_log = (tail_top - top) * by_soft + log(tail_sum) - log(sum);

    // 3. The divergence
    double found = teacher.tail > 0 ? teacher.tail * (log(teacher.tail) - tail_log) : 0;
    for (size_t j = 0; j < k; j++) {
        const double p = exp((double)teacher.logp[j]);
        const double q = ((double)capped_logit(saved[j], cap, &slope) - top) * by_soft - log(sum);
        probability += p;
        if (p > 0) found += p * ((double)teacher.logp[j] - q);
    }
    *divergence = (floatS)found;

    // 4. The target's log-probability, without the temperature. rest: all words but the target
    double rest = hard.sum * exp(((double)hard.top - top) * by), itself = exp((own - top) * by);
    for (size_t j = 0; j < k; j++)
        if (j != place) rest += exp(((double)capped_logit(saved[j], cap, &slope) - top) * by);
    *logp = (floatS)(itself > rest ? -log1p(rest / itself) : (own - top) * by - log(rest + itself));

    // 5. The gradient: first of the other words, then of the teacher's and the target
    if (weight) {
        const double w = (double)*weight * by, T = how.share * how.softness, cross = 1 - how.share;
        if (tail_sum > 0) tail_share = (probability * exp(tail_log) - teacher.tail) / tail_sum;
        const double of_soft = -w * T * tail_share * exp(((double)soft.top - tail_top) * by_soft);
        const double of_hard = -w * cross * exp(((double)hard.top - top) * by) / (rest + itself);
        distill_others(x, V, (floatS)(apart ? of_soft : of_soft + of_hard), (floatS)(apart ? of_hard : 0), soft.top,
                       (floatS)by_soft, (floatS)by, cap);
        for (size_t j = 0; j < k; j++) {
            const double c = (double)capped_logit(saved[j], cap, &slope), q = exp((c - top) * by_soft) / sum;
            const double hit = j == place ? rest : -exp((c - top) * by);
            const double g = cross * hit / (rest + itself) - T * (probability * q - exp((double)teacher.logp[j]));
            x[teacher.id[j]] = store((floatS)(w * g * (double)slope));
        }
        const double g = cross * rest / (rest + itself) - T * tail_share * exp((own - tail_top) * by_soft);
        if (outside) x[target] = store((floatS)(w * g * (double)target_slope));
        return;
    }
    x[target] = logit;
    for (size_t j = 0; j < k; j++) x[teacher.id[j]] = store(saved[j]);
}

static void cpu_distill(Summed *logp_, Summed *divergence_, Stored *logits_, const int32_t *targets, const int32_t *top,
                        const Summed *top_logp, const Summed *tail, const Summed *weight_, size_t n, size_t V, size_t k,
                        size_t stride, Distillation how, Summed *scratch) {
    floatS *logp = (floatS *)logp_, *divergence = (floatS *)divergence_;
    const floatS *weight = (const floatS *)weight_;
    const size_t turn = 1 + 4 * PARALLEL_MIN / V; // as in cpu_logprob
    (void)turn;
#pragma omp parallel for schedule(dynamic, turn) if (n * V >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        floatX *x = (floatX *)logits_ + t * stride;
        const int counts = targets[t] >= 0, gradient = weight != NULL && counts && weight[t] != 0;
        const TeacherRow teacher = {top + t * k, (const floatS *)top_logp + t * k, (double)((const floatS *)tail)[t],
                                    k};
        if (counts)
            distill_row(logp + t, divergence + t, x, (size_t)targets[t], teacher, gradient ? weight + t : NULL,
                        (floatS *)scratch + t * k, V, how);
        else
            logp[t] = divergence[t] = 0;
        if (weight && !gradient) memset(x, 0, V * sizeof(*x));
    }
}

#endif
