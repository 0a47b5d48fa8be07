/*
Adapters in part of a product's columns, scaling, dropout and scattered rows against plain loops. Elements beside the
columns must keep their bits. Tests of the products are named linear_*: they run with other matrix products
(test/run.sh). Part of test_ops.c.
*/
#ifndef TEST_OPS_ADAPTER_H
#define TEST_OPS_ADAPTER_H
#include "cases.h"

// n, r, OC, columns before and after. The first rows: one token at a time; the last cross the blocks of a product.
static const size_t adapter_shapes[][5] = {
    {1, 1, 1, 0, 0},       {1, 8, 33, 3, 0},     {2, 16, 64, 64, 32},    {2, 3, 5, 0, 7},
    {3, 1, 9, 1, 1},       {5, 4, 16, 16, 16},   {7, 2, 31, 0, 33},      {16, 8, 64, 128, 64},
    {17, 16, 48, 48, 0},   {33, 5, 100, 7, 22},  {64, 32, 128, 0, 64},   {65, 64, 96, 96, 1},
    {100, 13, 129, 2, 60}, {300, 8, 1100, 8, 4}, {1045, 16, 70, 30, 10}, {40, 300, 300, 5, 0}};

static void adapter_case(const size_t *shape, int with_zeros, int backward) {
    const size_t OC = shape[2], column = shape[3];
    const OpShape s = {.n = shape[0],
                       .C = shape[1],
                       .OC = OC,
                       .before = column,
                       .stride = column + OC + shape[4],
                       .joined = !backward};
    case_of(backward ? "" : ", out is residual", "adapter, columns from %zu of %zu%s", column, s.stride,
            with_zeros ? ", b = 0" : "");
    if (with_zeros) drawn("weight", 0.0, 0.0);
    if (!backward) case_linear_forward(&s);
    if (!backward && with_zeros) expect_beside(tensor_of("residual"), column, 0, s.stride);
    if (backward) case_linear_backward_input(&s);
    if (backward) case_linear_backward_weight(&s);
}

static void adapter_cases(int backward) {
    for (size_t s = 0; s < COUNT_OF(adapter_shapes); s++) {
        adapter_case(adapter_shapes[s], 0, backward);
        if (!backward) adapter_case(adapter_shapes[s], 1, 0);
    }
    for (size_t s = 0; s < 60; s++) {
        const size_t shape[] = {1 + test_random_below(70), 1 + test_random_below(40), 1 + test_random_below(130),
                                test_random_below(40), test_random_below(40)};
        adapter_case(shape, s % 4 == 0 && !backward, backward);
    }
}

TEST(linear_adapter_forward) { adapter_cases(0); }
TEST(linear_adapter_backward) { adapter_cases(1); }

// ---- scaling --------------------------------------------------------------------------------------------------------
TEST(scale) {
    static const size_t counts[] = {1, 2, 7, 8, 15, 16, 17, 33, 1000, 4099, 70001};
    static const double factors[] = {2.0, 1.0, -0.3, 0.0};
    for (size_t c = 0; c < 8 * COUNT_OF(counts); c++) {
        const OpShape s = {
            .n = 1, .C = counts[c / 8], .factor = factors[c % 4], .type = c / 4 % 2 ? ops->summed : ops->stored};
        case_of("", "%s by %g", dtype_name(s.type), s.factor);
        varied.exactly = s.factor >= 1.0;
        case_scale(&s);
    }
}

// ---- dropout --------------------------------------------------------------------------------------------------------
TEST(dropout) {
    static const size_t shapes[][3] = {{1, 1, 0},   {1, 7, 3},    {3, 8, 1000000}, {5, 16, 7},
                                       {7, 33, 64}, {16, 64, 12}, {33, 100, 5},    {130, 257, 40}};
    static const double rates[] = {0.1, 0.0, 0.5, 0.05, 0.9};
    for (size_t k = 0; k < 3 * 5 * COUNT_OF(shapes); k++) {
        const size_t *shape = shapes[k / 15], variant = k / 5 % 3; // 1: in place; 2: accumulating
        const OpShape s = {.n = shape[0],
                           .C = shape[1],
                           .first = shape[2],
                           .factor = rates[k % 5],
                           .seed = test_random(),
                           .accumulate = variant == 2};
        const double kept_share = 1.0 - s.factor, count = (double)(s.n * s.C);
        double kept = 0.0;
        case_of(variant == 1 ? ", out is in" : "", "from row %zu, rate %g, accumulate %d", s.first, s.factor,
                s.accumulate);
        case_dropout(&s);
        const Guarded *in = tensor_of("in"), *out = variant == 1 ? in : tensor_of("out");
        for (size_t i = 0; i < s.n * s.C; i++) {
            const int keeps = reference_keeps(s.seed, s.factor, s.first * s.C + i);
            kept += keeps;
            if (!keeps && result(out, i) != expected(out)[i])
                test_fail("element %zu is dropped, but %g", i, result(out, i));
        }
        if (s.factor == 0.0 && variant < 2) expect_exactly(out, in->values);
        if (fabs(kept - kept_share * count) > 5.0 * sqrt(kept_share * s.factor * count))
            test_fail("%g of %g kept", kept, count);
    }
}

// A stream in one piece and in chunks, aligned or not, drops the same elements. Another seed drops others.
TEST(dropout_is_of_places) {
    static const size_t chunks[] = {1, 3, 16, 50};
    const size_t N = 61, width = 24;
    size_t i, same = 0;
    for (size_t c = 0; c < COUNT_OF(chunks); c++) {
        case_of("", "chunks of %zu", chunks[c]);
        Guarded *in = guarded_normal(INPUT, "in", ops->stored, N * width, 10.0, 1.0);
        Guarded *whole = output("whole", N * width), *cut = output("cut", N * width),
                *other = output("other", N * width);
        tensors_load();
        ops->dropout(whole->data, in->data, N, width, 0, 0.5, 42, 0);
        ops->dropout(other->data, in->data, N, width, 0, 0.5, 43, 0);
        for (size_t t = 0; t < N; t += chunks[c]) {
            const size_t place = t * width * dtype_size(ops->stored), n = N - t < chunks[c] ? N - t : chunks[c];
            ops->dropout((Stored *)((char *)cut->data + place), (Stored *)((char *)in->data + place), n, width, t, 0.5,
                         42, 0);
        }
        tensors_check(0);
        for (i = 0, same = 0; i < N * width; i++) {
            if (result(whole, i) != result(cut, i)) test_fail("element %zu differs", i);
            same += (result(whole, i) != 0.0) == (result(other, i) != 0.0);
        }
        if (same < N * width * 2 / 5 || same > N * width * 3 / 5)
            test_fail("another seed agrees on %zu of %zu", same, N * width);
    }
}

// ---- scattered rows -------------------------------------------------------------------------------------------------
TEST(scatter_rows) {
    static const size_t shapes[][3] = {{1, 1, 1},   {1, 5, 3},    {2, 2, 8},       {7, 20, 5}, {16, 16, 64},
                                       {33, 70, 1}, {70, 90, 96}, {200, 1000, 130}}; // n, rows of out, width
    for (size_t s = 0; s < COUNT_OF(shapes); s++) {
        const size_t n = shapes[s][0], rows = shapes[s][1], width = shapes[s][2];
        const OpShape s = {.n = n, .V = rows, .C = width};
        case_of("", "%zu rows", rows);
        varied.exactly = 1;
        int32_t *row = (int32_t *)case_memory(rows * sizeof(*row));
        for (size_t i = 0; i < rows; i++) { // a shuffle; its first n are used
            size_t j = test_random_below(i + 1);
            row[i] = row[j], row[j] = (int32_t)i;
        }
        given("row", row);
        case_scatter_rows(&s);
    }
}

// ---- gathered rows --------------------------------------------------------------------------------------------------
TEST(gather_rows) {
    static const size_t shapes[][3] = {{1, 1, 1},   {3, 7, 5},   {16, 16, 64},
                                       {70, 5, 96}, {33, 70, 1}, {200, 1000, 130}}; // n, rows of in, width
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        const OpShape s = {.n = shapes[i][0], .V = shapes[i][1], .C = shapes[i][2]};
        case_of("", "of %zu rows", s.V);
        varied.exactly = 1;
        case_gather_rows(&s);
    }
}

#endif
