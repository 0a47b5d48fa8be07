/*
The loss head against the reference: log-probabilities, the gradient of the logits, entropy. Part of test_ops.c.
*/
#ifndef TEST_OPS_LOGPROB_H
#define TEST_OPS_LOGPROB_H
#include "reference.h"
#include "test_ops_tensors.h"

enum { NO_WEIGHT, ZERO_WEIGHT, RANDOM_WEIGHT };

// Each to 1e-5 of its size or 1e-6 nats.
static void expect_entropy(const Guarded *entropy, const double *logits, const int32_t *targets, size_t V,
                           double temperature) {
    const double scale = ops->summed == DTYPE_FP64 ? 1e-7 : 1.0;
    double *expected = case_doubles(entropy->count);
    reference_entropy(expected, logits, targets, entropy->count, V, temperature);
    for (size_t t = 0; t < entropy->count; t++) {
        const double found = result(entropy, t), allowed = scale * fmax(1e-5 * expected[t], 1e-6);
        if (!(fabs(found - expected[t]) <= allowed))
            test_fail("entropy[%zu] is %.9g, expected %.9g", t, found, expected[t]);
        if (targets[t] < 0 && found != 0.0) test_fail("entropy[%zu] of a masked token is %g", t, found);
        testing.worst = fmax(testing.worst, fabs(found - expected[t]) / allowed);
    }
}

static void logprob_case(const double *values, const int32_t *targets, int weights, size_t n, size_t V,
                         double temperature, double size, int with_entropy) {
    test_case("logprob n=%zu V=%zu temperature %g, %s%s", n, V, temperature,
              weights == NO_WEIGHT     ? "no weight"
              : weights == ZERO_WEIGHT ? "weight 0"
                                       : "weights",
              with_entropy ? ", entropy" : "");
    Guarded *logits = guarded_values(weights == NO_WEIGHT ? INPUT : CHANGED, "logits", ops->stored, values, n * V);
    Guarded *g_targets = guarded_bytes(INPUT, "targets", targets, 4, n),
            *logp = guarded_poison(CHANGED, "logp", ops->summed, n);
    double *weight = case_doubles(n);
    for (size_t t = 0; t < n; t++) weight[t] = weights == RANDOM_WEIGHT ? test_normal() : 0.0;
    Guarded *entropy = with_entropy ? guarded_poison(CHANGED, "entropy", ops->summed, n) : NULL;
    Guarded *g_weight = weights == NO_WEIGHT ? NULL : guarded_values(INPUT, "weight", ops->summed, weight, n);
    CALL(ops->logprob(logp->data, entropy ? entropy->data : NULL, logits->data, g_targets->data,
                      g_weight ? g_weight->data : NULL, n, V, temperature));
    double *expected = case_doubles(n * V);
    reference_logprob_forward(expected, logits->values, targets, n, V, temperature);
    expect_within(logp, expected, 1.0, size);
    for (size_t t = 0; t < n; t++)
        if (targets[t] < 0 && result(logp, t) != 0.0)
            test_fail("logp[%zu] of a masked token is %g", t, result(logp, t));
    if (entropy) expect_entropy(entropy, logits->values, targets, V, temperature);
    if (weights == NO_WEIGHT) return; // CALL has seen that the logits are untouched
    memset(expected, 0, n * V * sizeof(double));
    reference_logprob_backward(expected, logits->values, targets, g_weight->values, n, V, temperature);
    if (weights == ZERO_WEIGHT)
        expect_exactly(logits, expected);
    else
        expect_within(logits, expected, 1.0, V < 3 ? 1.0 : 0.0); // of one or two words, 1 - softmax cancels
}

TEST(logprob) {
    static const size_t shapes[][2] = {{1, 1},  {1, 2},   {3, 3},    {2, 7},    {5, 16},   {4, 17},   {7, 33},
                                       {9, 64}, {6, 100}, {20, 257}, {3, 1000}, {1, 4099}, {3, 50257}};
    static double logits[3 * 50257];
    int32_t targets[20];
    for (size_t s = 0; s < 6 * COUNT_OF(shapes); s++) {
        size_t n = shapes[s / 6][0], V = shapes[s / 6][1];
        for (size_t i = 0; i < n * V; i++) logits[i] = 3.0 * test_normal();
        for (size_t i = 0; i < n; i++) targets[i] = test_random_below(4) == 0 ? -1 : (int32_t)test_random_below(V);
        if (n > 1) targets[0] = (int32_t)V - 1, targets[1] = 0;
        logprob_case(logits, targets, (int)(s % 3), n, V, s / 3 % 2 ? 0.7 : 1.0, 3.0, s % 2 == 0);
    }
}

// exp(logit) overflows by far here, and logit - lse cancels: the largest logit must be subtracted first.
TEST(logprob_of_extreme_logits) {
    enum { ROW = 35 };
    for (size_t row = 0; row < 2 * 6; row++) {
        int32_t target = 20;
        double logits[ROW], temperature = row % 2 ? 0.7 : 1.0;
        for (size_t i = 0; i < ROW; i++) logits[i] = row / 2 == 3 ? 1e4 : -1e4;
        if (row / 2 == 0) logits[20] = 1e4;             // certain: 0
        if (row / 2 == 1) logits[20] = logits[3] = 1e4; // one of two: -log 2
        if (row / 2 == 2) logits[34] = 1e4;             // hopeless: -2e4
        if (row / 2 == 5)
            for (size_t i = 0; i < ROW; i++) logits[i] = 1e4 + 64.0 * (double)(i % 3);
        logprob_case(logits, &target, RANDOM_WEIGHT, 1, ROW, temperature, 1.0, 1); // 3, 4: all alike: -log 35
        logprob_case(logits, &target, NO_WEIGHT, 1, ROW, temperature, 1.0, 1);
    }
}

// Nearly certain of the target or of another word, in its place among blocks and packs; words that cannot be (-inf); a
// vocabulary whose maximum grows all along; one that is flat; and a NaN, which must show.
TEST(logprob_entropy_of_few_words) {
    enum { ROW = 2600 };
    static double logits[ROW];
    for (size_t kind = 0; kind < 12; kind++) {
        int32_t target = (int32_t)test_random_below(ROW);
        size_t other = kind % 2 ? (size_t)target : test_random_below(ROW);
        for (size_t i = 0; i < ROW; i++) {
            logits[i] = test_normal();
            if (kind / 2 == 2 && i != (size_t)target && i % 1300) logits[i] = -INFINITY;
            if (kind / 2 == 3) logits[i] += 0.02 * (double)i;
            if (kind / 2 == 4) logits[i] = 3.0;
            if (kind / 2 == 5 && i < 1500 && i != (size_t)target) logits[i] = -INFINITY;
        }
        if (kind / 2 == 0) logits[other] = 30.0;
        if (kind / 2 == 1) logits[other] = 12.0;
        logprob_case(logits, &target, (int)kind % 3, 1, ROW, kind % 4 ? 1.0 : 0.6, 3.0, 1);
    }
    for (size_t i = 0; i < 3; i++) {
        int32_t target = 7;
        test_case("NaN %zu", i);
        logits[i == 0 ? 7 : 1300 * i - 1] = NAN;
        Guarded *g_logits = guarded_values(INPUT, "logits", ops->stored, logits, ROW);
        Guarded *g_target = guarded_bytes(INPUT, "target", &target, 4, 1);
        Guarded *logp = guarded_poison(CHANGED, "logp", ops->summed, 1),
                *entropy = guarded_poison(CHANGED, "entropy", ops->summed, 1);
        CALL(ops->logprob(logp->data, entropy->data, g_logits->data, g_target->data, NULL, 1, ROW, 1.0));
        if (!isnan(result(logp, 0)) || !isnan(result(entropy, 0)))
            test_fail("logp %g, entropy %g", result(logp, 0), result(entropy, 0));
        logits[i == 0 ? 7 : 1300 * i - 1] = 0.0;
    }
}

#endif
