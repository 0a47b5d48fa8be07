/*
Sampling: the tokens of op `draw` against a full sort, and their shares of [0, 1) against the distribution that
temperature, top-k and top-p define. Part of test_ops.c.
*/
#ifndef TEST_OPS_DRAW_H
#define TEST_OPS_DRAW_H
#include "cases.h"

TEST(draw) {
    static const size_t shapes[][2] = {{1, 1}, {3, 2}, {2, 7}, {5, 16}, {4, 17}, {3, 257}, {2, 1000}, {1, 50257}};
    static const double temperatures[] = {1.0, 0.0, 0.7, 1e-300, 1e12}, top_p[] = {1.0, 0.9, 0.3, 0.0, 0.999};
    double uniform[5] = {0.0, 0x1.fffffffffffffp-1};
    for (size_t s = 0; s < COUNT_OF(shapes); s++) {
        const size_t V = shapes[s][1], top_k[] = {0, 1, 3, V - 1, V, V + 1, SIZE_MAX};
        for (size_t i = 0; i < (V > 1000 ? 7 : 35); i += EMULATED ? 4 : 1) {
            const SamplingSettings settings = {temperatures[i % 9 < 5 ? i % 9 : 2], i % 4 == 3 ? 5.0 : 0.0,
                                               top_k[i % 7], top_p[i * 3 % 5], 0};
            for (size_t t = i % 5 < 3 ? 0 : 2; t < 5; t++) uniform[t] = test_uniform();
            draw_case(NULL, uniform, shapes[s][0], V, i % 3 ? (i % 3 == 1 ? 0.5 : 4.0) : 0.0, &settings); // ties
        }
    }
}

TEST(draw_of_ties_and_extremes) {
    static const double rows[][6] = {{2, 2, 2, 2, 2, 2},           {-1, 3, -0.0, 3, 0.0, 3},
                                     {-0.0, 0.0, -0.0, 0.0, 0, 0}, {-3e38, 3e38, -3e38, 3e38, 3e38, 0},
                                     {1, 2, NAN, 3, INFINITY, 4},  {1, 2, 3, 4, 5, -INFINITY},
                                     {INFINITY, 1, 1, 1, 1, 1},    {1e-38, -1e-38, 1e-38, 0, -1e-38, 0}};
    static const SamplingSettings settings[] = {
        {0, 0, 0, 1, 0},   {1, 0, 0, 1, 0},   {1, 0, 4, 1, 0}, {1, 0, 1, 1, 0},   {1, 0, 0, 0.5, 0},
        {1, 0, 5, 0.6, 0}, {0.5, 0, 0, 0, 0}, {1, 2, 0, 1, 0}, {1, 2, 5, 0.6, 0}, {0, 2, 0, 1, 0}};
    double uniform[COUNT_OF(rows)];
    for (size_t i = 0; i < 3 * COUNT_OF(settings); i++) {
        for (size_t t = 0; t < COUNT_OF(rows); t++) uniform[t] = test_uniform();
        draw_case(rows[0], uniform, COUNT_OF(rows), 6, 0.0, &settings[i / 3]);
    }
}

// Probabilities 0.5, 0.25, 0.15, 0.07, 0.03 of ids 3, 0, 4, 1, 2, before rounding.
static const double five_logits[5] = {-1.3862943611198906, -2.659260036932778, -3.506557897319982, -0.6931471805599453,
                                      -1.8971199848858813};
static const int32_t five_order[5] = {3, 0, 4, 1, 2};

// Checks that only the `count` likeliest are drawn, each for its share of [0, 1).
static void expect_shares(double temperature, double cap, size_t top_k, double top_p, size_t count) {
    enum { DRAWS = 1000 };
    const SamplingSettings settings = {temperature, cap, top_k, top_p, 0};
    static double values[5 * DRAWS], uniform[DRAWS];
    double p[5], total = 0.0, seen[5] = {0};
    for (size_t i = 0; i < 5 * DRAWS; i++)
        values[i] = five_logits[i % 5], uniform[i / 5] = ((double)(i / 5) + 0.5) / DRAWS;
    for (size_t i = 0; i < count; i++)
        total += p[i] = exp(capped_to(round_to(ops->stored, five_logits[five_order[i]]), cap) / temperature);
    const Guarded *token = draw_case(values, uniform, DRAWS, 5, 0.0, &settings);
    for (size_t t = 0; t < DRAWS; t++) seen[((int32_t *)(void *)(token->after + token->offset))[t]] += 1.0 / DRAWS;
    for (size_t i = 0; i < 5; i++) {
        const double share = seen[five_order[i]], wanted = i < count ? p[i] / total : 0.0;
        if (fabs(share - wanted) > (i < count ? 2.0 / DRAWS : 0.0))
            test_fail("token %d is drawn for %.6g, expected %.6g", five_order[i], share, wanted);
    }
}

TEST(draws_are_shares) {
    static const struct {
        size_t top_k;
        double top_p;
        size_t count;
    } cases[] = {{0, 1, 5},    {5, 1, 5},    {SIZE_MAX, 1, 5}, {1, 1, 1},    {2, 1, 2},    {4, 1, 4},
                 {0, 0, 1},    {0, 0.49, 1}, {0, 0.51, 2},     {0, 0.74, 2}, {0, 0.76, 3}, {0, 0.89, 3},
                 {0, 0.91, 4}, {0, 0.98, 5}, {9, 0.76, 3},     {2, 0.66, 1}, {2, 0.68, 2}, {3, 0.55, 1},
                 {3, 0.57, 2}, {3, 0.83, 2}, {3, 0.85, 3},     {1, 0.01, 1}};
    if (EMULATED) return; // slow; the test above checks the tokens
    // top-p: the fewest with at least this share of the top k: 0.5/0.75 = 0.667, 0.5/0.9 = 0.556, 0.75/0.9 = 0.833
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        expect_shares(1.0, 0.0, cases[i].top_k, cases[i].top_p, cases[i].count);
    for (double temperature = 0.25; temperature <= 4.0; temperature *= 2.0) { // p^(1/temperature), before top-k
        expect_shares(temperature, 0.0, 0, 1.0, 5);
        expect_shares(temperature, 2.5, 3, 1.0, 3);
    }
}

#endif
