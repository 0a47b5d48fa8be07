/*
Matrices in 4 bits: records of random codes and scales, among them zeros, tiny and large ones, decoded to the bits that
quant_decode gives on the host; products with them. Bytes between a record's parts must not matter. Part of test_ops.c.
*/
#ifndef TEST_OPS_QUANTISE_H
#define TEST_OPS_QUANTISE_H
#include "cases.h"

static float random_scale(void) {
    const int exponent = (int)test_random_below(8) ? -3 : (int)test_random_below(150) - 130;
    return test_random_below(20) ? ldexpf((float)(0.5 + test_uniform()), exponent) : 0.0f;
}

// Returns a record of n elements: NaN between its parts.
static uint8_t *random_record(QuantFormat f, size_t n) {
    const QuantParts p = quant_parts(f, n);
    uint8_t *record = (uint8_t *)case_memory(p.bytes);
    const float offset = random_scale();
    memset(record, 0xff, p.bytes);
    for (size_t i = 0; i < (f.type == QUANT_FP8 ? n : (n + 1) / 2); i++) {
        record[i] = (uint8_t)test_random();
        if (f.type == QUANT_FP8 && (record[i] & 0x7f) == 0x7f) record[i] = 0x81; // NaN is refused before
    }
    for (size_t i = 0; (f.nested || f.type == QUANT_MXFP4) && i < p.blocks; i++)
        record[p.scale_codes + i] = (uint8_t)test_random();
    for (size_t i = 0; i < p.scale_count; i++) {
        const float scale = random_scale();
        memcpy(record + p.scales + i * sizeof(scale), &scale, sizeof(scale));
    }
    if (f.nested) memcpy(record + p.offset, &offset, sizeof(offset));
    return record;
}

static void dequantise_case(QuantFormat f, size_t n) {
    const OpShape s = {.count = n, .format = f};
    case_of("", "%s blocks of %zu, rounded to %s", f.nested ? "nested" : "plain", f.block, dtype_name(f.rounding));
    const uint8_t *bytes = random_record(f, n);
    float *values = (float *)case_memory(n * sizeof(float));
    const size_t size = dtype_size(ops->stored);
    unsigned char *wanted = (unsigned char *)case_memory(n * size);
    varied.exactly = 1;
    given("record", bytes);
    case_dequantise(&s);
    const Guarded *out = tensor_of("out");
    quant_decode_range(values, f, bytes, n, 0, n);
    elements_from_float(wanted, ops->stored, values, n);
    for (size_t i = 0; i < n; i++)
        if (memcmp(wanted + i * size, out->after + out->offset + i * size, size))
            test_fail("out[%zu] is %.9g, expected %.9g", i, result(out, i), (double)values[i]);
    for (size_t i = 0; i < n; i++) // the reference; infinite beyond fp16
        if (((const double *)out->twin)[i] != (double)values[i])
            test_fail("the reference has %.9g in [%zu], not %.9g", ((const double *)out->twin)[i], i,
                      (double)values[i]);
}

// Returns fp8's blocks in matrices [rows, cols]: blocks of 8 x 8 to 128 x 128, a row or a matrix.
static QuantFormat random_fp8(size_t rows, size_t cols) {
    const size_t side = (size_t)8 << test_random_below(5), kind = test_random_below(4);
    QuantFormat f = {QUANT_FP8, 0, kind > 1 ? side : 0, DTYPE_BF16, {0, 0, kind > 1 ? side : kind, DTYPE_FP32, 0}};
    return quant_on(f, rows, cols);
}

TEST(dequantise_fp8) {
    static const size_t sides[][2] = {{1, 1}, {3, 7}, {192, 40}, {40, 192}, {129, 64}, {5, 4099}, {64, 136}, {576, 8}};
    for (size_t i = 0; i < 3 * COUNT_OF(sides); i++) {
        const size_t *side = sides[i / 3], matrices = 1 + i % 3;
        dequantise_case(random_fp8(side[0], side[1]), matrices * side[0] * side[1]);
    }
}

TEST(dequantise) {
    static const size_t lengths[] = {1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 127, 1000, 4099, 16451, 40000};
    static const size_t blocks[] = {32, 64, 64, 128, 4096};
    static const DType roundings[] = {DTYPE_FP32, DTYPE_BF16, DTYPE_FP16};
    for (size_t l = 0; l < COUNT_OF(lengths); l++)
        for (size_t variant = l % CASE_STEP; variant < 15; variant += EMULATED ? CASE_STEP : 1) {
            QuantFormat f = {variant % 2 ? QUANT_NF4 : QUANT_FP4,
                             variant / 2 % 2 == 0,
                             blocks[test_random_below(COUNT_OF(blocks))],
                             roundings[variant / 4 % 3],
                             {0}};
            if (variant >= 12) f = (QuantFormat){QUANT_MXFP4, 0, MXFP4_BLOCK, roundings[variant % 3], {0}};
            dequantise_case(f, lengths[l]);
        }
}

TEST(linear_forward_quantised) {
    static const size_t shapes[][3] = {{1, 64, 6},   {1, 1, 1},    {2, 256, 13}, {1, 63, 13},
                                       {3, 513, 7},  {1, 4160, 9}, {9, 256, 11}, {5, 2048, 6},
                                       {33, 96, 50}, {2, 384, 60}, {2, 7, 5}};
    static const size_t blocks[] = {64, 32, 64, 4096, 128};
    static const DType roundings[] = {DTYPE_BF16, DTYPE_FP32, DTYPE_FP16};
    static const char *const variants[] = {
        ", no bias, no residual",     ", no residual",     ", no bias, no residual",    ", no bias", "", ", no bias",
        ", no bias, out is residual", ", out is residual", ", no bias, out is residual"};
    for (size_t s = 0; s < COUNT_OF(shapes) + 30; s++) {
        const size_t any[3] = {1 + test_random_below(12), 1 + test_random_below(300), 1 + test_random_below(60)};
        const size_t *shape = s < COUNT_OF(shapes) ? shapes[s] : any;
        QuantFormat f = {s % 4 ? QUANT_NF4 : QUANT_FP4,
                         s % 3 != 0,
                         blocks[s % 5],
                         ops->stored == DTYPE_BF16 ? DTYPE_BF16 : roundings[s / 2 % 3],
                         {0}};
        if (s % 6 == 5) f = (QuantFormat){QUANT_MXFP4, 0, MXFP4_BLOCK, f.rounding, {0}};
        const size_t from = s % 7 < 4 ? 0 : test_random_below(20);
        if (s % 6 == 2) f = random_fp8(from + shape[2] + from % 3, shape[1]);
        const OpShape of_case = {.n = shape[0],
                                 .C = shape[1],
                                 .OC = shape[2],
                                 .format = f,
                                 .first = from,
                                 .stride = shape[2] + (s % 2 ? test_random_below(9) : 0)};
        case_of(variants[s % 3 + 3 * (s / 2 % 3)], "from row %zu stride=%zu %s%s blocks of %zu, rounded to %s",
                of_case.first, of_case.stride, quant_type_names[f.type], f.nested ? " nested" : "", f.block,
                dtype_name(f.rounding));
        case_linear_forward_quantised(&of_case);
    }
}

#endif
