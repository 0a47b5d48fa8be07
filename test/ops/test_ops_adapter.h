/*
Adapters in part of a product's columns, scaling, dropout and scattered rows against plain loops. What lies beside the
columns must keep its bits. Tests of the products are named linear_*: they run where other matrix products are
(test/run.sh). Part of test_ops.c.
*/
#ifndef TEST_OPS_ADAPTER_H
#define TEST_OPS_ADAPTER_H
#include "cases.h"

// n, r, OC, columns before and behind them. The first rows: a token at a time; the last cross the blocks of a product.
static const size_t adapter_shapes[][5] = {
    {1, 1, 1, 0, 0},       {1, 8, 33, 3, 0},     {2, 16, 64, 64, 32},    {2, 3, 5, 0, 7},
    {3, 1, 9, 1, 1},       {5, 4, 16, 16, 16},   {7, 2, 31, 0, 33},      {16, 8, 64, 128, 64},
    {17, 16, 48, 48, 0},   {33, 5, 100, 7, 22},  {64, 32, 128, 0, 64},   {65, 64, 96, 96, 1},
    {100, 13, 129, 2, 60}, {300, 8, 1100, 8, 4}, {1045, 16, 70, 30, 10}, {40, 300, 300, 5, 0}};

static void *column_of(const Guarded *t, size_t column) {
    return (char *)of(t) + column * (on_twins ? sizeof(double) : dtype_size(t->type));
}

static void adapter_case(const size_t *shape, int with_zeros, int backward) {
    const size_t n = shape[0], r = shape[1], OC = shape[2], column = shape[3], width = column + OC + shape[4];
    test_case("adapter n=%zu C=%zu OC=%zu, columns from %zu of %zu%s", n, r, OC, column, width,
              with_zeros && !backward ? ", b = 0" : "");
    Guarded *h = input("h", n * r);
    Guarded *b = normal(INPUT, "b", ops->stored, OC * r, 0.0, with_zeros && !backward ? 0.0 : 1.0);
    if (backward) {
        Guarded *dout = input("dout", n * width), *dh = output("dh", n * r), *db = accumulated("db", OC * r);
        BOTH(linear_backward_input, of(dh), column_of(dout, column), of(b), n, r, OC, width, 0);
        expect(dh, 1.0, sqrt((double)OC));
        BOTH(linear_backward_weight, of(db), NULL, column_of(dout, column), of(h), n, r, OC, width);
        expect(db, 1.0, sqrt((double)n));
        return;
    }
    Guarded *out = in_place("out", n * width);
    BOTH(linear_forward, column_of(out, column), of(h), of(b), NULL, column_of(out, column), n, r, OC, width);
    expect(out, 1.0, sqrt((double)r));
    expect_between(out, column, with_zeros ? 0 : OC, width);
}

static void adapter_cases(int backward) {
    for (size_t s = 0; s < COUNT_OF(adapter_shapes); s++) {
        adapter_case(adapter_shapes[s], 0, backward);
        if (!backward) adapter_case(adapter_shapes[s], 1, 0);
    }
    for (size_t s = 0; s < 60; s++) {
        const size_t shape[] = {1 + test_random_below(70), 1 + test_random_below(40), 1 + test_random_below(130),
                                test_random_below(40), test_random_below(40)};
        adapter_case(shape, s % 4 == 0, backward);
    }
}

TEST(linear_adapter_forward) { adapter_cases(0); }
TEST(linear_adapter_backward) { adapter_cases(1); }

// ---- scaling --------------------------------------------------------------------------------------------------------
TEST(scale) {
    static const size_t counts[] = {1, 2, 7, 8, 15, 16, 17, 33, 1000, 4099, 70001};
    static const double factors[] = {2.0, 1.0, -0.3, 0.0};
    for (size_t c = 0; c < 8 * COUNT_OF(counts); c++) {
        const size_t count = counts[c / 8];
        const double factor = factors[c % 4];
        const DType type = c / 4 % 2 ? ops->summed : ops->stored;
        test_case("%zu of %s by %g", count, dtype_name(type), factor);
        Guarded *x = normal(CHANGED, "x", type, count, 0.0, 1.0);
        BOTH(scale, of(x), type, factor, count);
        expect(x, 1.0, 0.0);
        if (factor == 2.0 || factor == 1.0) expect_same(x);
    }
}

// ---- dropout --------------------------------------------------------------------------------------------------------
enum { ELSEWHERE, ON_ITSELF, ADDED, DROPOUT_VARIANTS };

static void dropout_case(size_t n, size_t width, size_t first_row, double rate, uint64_t seed, int variant) {
    static const char *const variants[] = {"", ", out is in", ", accumulating"};
    const double kept_share = 1.0 - rate, count = (double)(n * width);
    double kept = 0.0;
    test_case("n=%zu width=%zu from row %zu, rate %g%s", n, width, first_row, rate, variants[variant]);
    Guarded *in = variant == ON_ITSELF ? in_place("in", n * width) : input("in", n * width);
    Guarded *out = variant == ON_ITSELF ? in : variant == ADDED ? in_place("out", n * width) : output("out", n * width);
    BOTH(dropout, of(out), of(in), n, width, first_row, rate, seed, variant == ADDED);
    expect(out, 1.0, 0.0);
    for (size_t i = 0; i < n * width; i++) {
        const int keeps = reference_keeps(seed, rate, first_row * width + i);
        kept += keeps;
        if (!keeps && result(out, i) != expected(out)[i])
            test_fail("element %zu is dropped, but %g", i, result(out, i));
    }
    if (rate == 0.0 && variant != ADDED) expect_exactly(out, in->values);
    if (fabs(kept - kept_share * count) > 5.0 * sqrt(kept_share * rate * count))
        test_fail("%g of %g kept", kept, count);
}

TEST(dropout) {
    static const size_t shapes[][3] = {{1, 1, 0},   {1, 7, 3},    {3, 8, 1000000}, {5, 16, 7},
                                       {7, 33, 64}, {16, 64, 12}, {33, 100, 5},    {130, 257, 40}};
    static const double rates[] = {0.1, 0.0, 0.5, 0.05, 0.9};
    for (size_t s = 0; s < DROPOUT_VARIANTS * 5 * COUNT_OF(shapes); s++) {
        const size_t *shape = shapes[s / (DROPOUT_VARIANTS * 5)];
        dropout_case(shape[0], shape[1], shape[2], rates[s % 5], test_random(), (int)(s / 5 % DROPOUT_VARIANTS));
    }
}

// A stream in one piece and in chunks, aligned or not: the same elements. Another seed: others.
TEST(dropout_is_of_places) {
    static const size_t chunks[] = {1, 3, 16, 50};
    const size_t N = 61, width = 24;
    size_t i, same = 0;
    for (size_t c = 0; c < COUNT_OF(chunks); c++) {
        test_case("chunks of %zu", chunks[c]);
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

// ---- rows put elsewhere ---------------------------------------------------------------------------------------------
TEST(scatter_rows) {
    static const size_t shapes[][3] = {{1, 1, 1},   {1, 5, 3},    {2, 2, 8},       {7, 20, 5}, {16, 16, 64},
                                       {33, 70, 1}, {70, 90, 96}, {200, 1000, 130}}; // n, rows of out, width
    for (size_t s = 0; s < COUNT_OF(shapes); s++) {
        const size_t n = shapes[s][0], rows = shapes[s][1], width = shapes[s][2];
        test_case("n=%zu rows=%zu width=%zu", n, rows, width);
        int32_t *row = (int32_t *)case_memory(rows * sizeof(*row));
        for (size_t i = 0; i < rows; i++) { // a shuffle, of which the first n are taken
            size_t j = test_random_below(i + 1);
            row[i] = row[j], row[j] = (int32_t)i;
        }
        Guarded *in = input("in", n * width), *out = in_place("out", rows * width);
        Guarded *to = guarded_bytes(INPUT, "row", row, 4, n);
        BOTH(scatter_rows, of(out), of(in), of(to), n, width);
        expect_same(out);
    }
}

#endif
