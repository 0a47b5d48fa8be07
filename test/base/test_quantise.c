/*
Checks that 4-bit matrices match bitsandbytes. test/golden/quantised.bin has records and decoded values of bitsandbytes
for inputs by a formula (make_quantised.py), and transformers' values of every code and scale of mxfp4. Tests without a
golden value check cases that the file lacks.
*/
#include "child.h"
#include "llmc/base/quantise.h"

__attribute__((weak)) const Ops *ops_device = NULL; // no tensors here

static const char *golden; // read position

static void golden_read(void *to, size_t bytes) { memcpy(to, golden, bytes), golden += bytes; }

static float golden_input(int kind, size_t i) {
    uint32_t h = (uint32_t)(i * 2654435761u) + (uint32_t)kind * 40503u + 12345u;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
    const float x = (float)((int32_t)(h >> 8) - (1 << 23)) * 0x1p-28f;
    if (kind == 1) return ldexpf(x, ((int)(i / 64 % 7) - 3) * 4);
    if (kind == 2) return i / 64 % 3 == 1 || h % 4 == 0 ? 0.0f : x;
    if (kind == 4) return x * 0x1p-120f;
    return kind == 3 ? (float)(((int)((h >> 8) % 49) - 24) * (int)(i / 64 + 3)) : x;
}

// Returns an element of the file, in the type to which decoded values are rounded.
static float golden_value(const char *values, DType type, size_t i) {
    return (float)element_to_double(values, type, i);
}

static void golden_case(void) {
    int32_t header[7];
    golden_read(header, sizeof(header));
    const QuantFormat f = {
        .type = (QuantType)header[0], .nested = header[1], .block = (size_t)header[2], .rounding = (DType)header[3]};
    const size_t n = (size_t)header[5], bytes = (size_t)header[6];
    test_case("%s%s, blocks of %zu, rounded to %s, input %d of %zu", quant_type_names[f.type],
              f.nested ? " nested" : "", f.block, dtype_name(f.rounding), header[4], n);
    uint8_t *wanted = (uint8_t *)case_memory(bytes), *record = (uint8_t *)case_memory(bytes);
    float *x = (float *)case_memory(n * sizeof(float)), *decoded = (float *)case_memory(n * sizeof(float)), part[7];
    assert_int_equal(quant_parts(f, n).bytes, bytes);
    for (size_t i = 0; i < n; i++) x[i] = quant_round(f.rounding, golden_input(header[4], i));
    golden_read(wanted, bytes);
    memset(record, 0xff, bytes);
    QuantEncoder encoder = quant_encode_begin(record, f, n); // encodes parts of three blocks
    for (size_t begin = 0; begin < n; begin += 3 * f.block)
        quant_encode_part(&encoder, x + begin, begin, min_size(3 * f.block, n - begin));
    quant_encode_end(&encoder);
    for (size_t i = 0; i < bytes; i++)
        if (record[i] != wanted[i]) test_fail("byte %zu of %zu is %d, not %d", i, bytes, record[i], wanted[i]);
    memset(decoded, 0xff, n * sizeof(float));
    quant_decode_range(decoded, f, record, n, 0, n);
    for (size_t i = 0; i < n; i++) {
        const float value = golden_value(golden, f.rounding, i), found = decoded[i] + 0.0f; // -0 becomes 0
        if (memcmp(&value, &found, sizeof(value)))
            test_fail("value %zu is %.9g, not %.9g", i, (double)found, (double)value);
    }
    golden += n * dtype_size(f.rounding);
    for (size_t i = 0; i < 20; i++) { // a decoded range equals the same part of the whole
        const size_t begin = test_random_below(n), count = min_size(n - begin, 1 + test_random_below(7));
        quant_decode_range(part, f, record, n, begin, count);
        assert_memory_equal(part, decoded + begin, count * sizeof(float));
    }
}

// Compares values of all codes with every scale, in bf16. Code 2j is the low half of byte j.
static void golden_mxfp4(void) {
    enum { BLOCKS = 256, N = BLOCKS * MXFP4_BLOCK };
    const QuantFormat f = {QUANT_MXFP4, 0, MXFP4_BLOCK, DTYPE_BF16, {0}};
    const QuantParts p = quant_parts(f, N);
    uint8_t *record = (uint8_t *)case_memory(p.bytes);
    float *decoded = (float *)case_memory(N * sizeof(float));
    assert_int_equal(p.scales - p.scale_codes, BLOCKS);
    for (size_t i = 0; i < N / 2; i++) record[i] = (uint8_t)(i % 8 * 0x22 + 0x10);
    for (size_t b = 0; b < BLOCKS; b++) record[p.scale_codes + b] = (uint8_t)b;
    quant_decode_range(decoded, f, record, N, 0, N);
    for (size_t i = 0; i < N; i++) {
        const float value = golden_value(golden, DTYPE_BF16, i / MXFP4_BLOCK * 16 + i % 16);
        if (memcmp(&decoded[i], &value, sizeof(value)))
            test_fail("mxfp4: value %zu is %.9g, not %.9g", i, (double)decoded[i], (double)value);
    }
    golden += BLOCKS * 16 * sizeof(uint16_t);
}

TEST(records_are_those_of_bitsandbytes) {
    size_t length;
    char *const bytes = read_whole("test/golden/quantised.bin", &length), *const file = (char *)malloc(length);
    int32_t count, n;
    float wanted, *x = (float *)malloc(40000 * sizeof(float));
    assert_true(x && file);
    memcpy(file, bytes, length); // a static copy outlasts a case
    golden = file;
    golden_read(&count, sizeof(count));
    assert_int_equal(count, 66);
    for (int32_t i = 0; i < count; i++) golden_case();
    for (size_t i = 0; i < 40000; i++) x[i] = fabsf(golden_input(0, i));
    golden_read(&count, sizeof(count));
    for (int32_t i = 0; i < count; i++) { // offset of nested scales
        golden_read(&n, sizeof(n)), golden_read(&wanted, sizeof(wanted));
        test_case("mean of %d", n);
        const float found = quant_mean(x, (size_t)n);
        if (memcmp(&found, &wanted, sizeof(found))) test_fail("%.9g, not %.9g", (double)found, (double)wanted);
    }
    golden_mxfp4();
    assert_int_equal(golden - file, length);
    free(x), free(file);
}

// The code's value is one of the nearest values; of two it is the one with an even code.
TEST(mxfp4_is_rounded_to_the_nearest) {
    const QuantFormat f = {QUANT_MXFP4, 0, MXFP4_BLOCK, DTYPE_FP32, {0}};
    for (int turn = 0; turn < 3000; turn++) {
        float x[MXFP4_BLOCK], decoded[MXFP4_BLOCK], most = 0;
        uint8_t record[64], again[64];
        const int exponent = (int)test_random_below(276) - 148;
        for (size_t i = 0; i < MXFP4_BLOCK; i++) { // includes ties
            const double v = turn % 2 ? test_uniform() : (double)test_random_below(32) / 32;
            x[i] = (float)ldexp(turn % 7 ? v : 0, exponent) * (test_random() % 2 ? 1 : -1);
            most = fmaxf(most, fabsf(x[i]));
        }
        quant_encode(record, f, x, MXFP4_BLOCK);
        quant_decode_range(decoded, f, record, MXFP4_BLOCK, 0, MXFP4_BLOCK);
        const int byte = record[16], wanted = most > 0 ? ilogbf(most) - 2 + 127 : 0;
        if (byte != (wanted > 0 ? wanted : 0)) test_fail("scale %d of %.9g", byte, (double)most);
        for (size_t i = 0; i < MXFP4_BLOCK; i++) {
            const double scale = ldexp(1, byte - 128), off = fabs((double)decoded[i] - (double)x[i]);
            const unsigned code = quant_code(f.type, record, i);
            if ((code >= 8) != (signbit(x[i]) != 0)) test_fail("code %u of %.9g", code, (double)x[i]);
            for (unsigned other = 0; other < 16; other++) {
                const double is = fabs((double)quant_codes[f.type][other] * scale - (double)x[i]);
                if (is < off || (is == off && code % 2 && other % 2 == 0))
                    test_fail("%.9g became %.9g", (double)x[i], (double)decoded[i]);
            }
        }
        if (most < 0x1p-120f) continue; // for larger values, decoded values encode to the same bytes
        quant_encode(again, f, decoded, MXFP4_BLOCK);
        assert_memory_equal(again, record, sizeof(record));
    }
}

TEST(values_are_rounded_to_fp16) { // each value of fp16, ties in both directions, and numbers next to a tie
    for (uint32_t bits = 0; bits < 0x7c00; bits++) {
        const float a = fp16_to_float((uint16_t)bits), b = bits == 0x7bff ? 65536 : fp16_to_float((uint16_t)(bits + 1));
        const float above = bits == 0x7bff ? INFINITY : b, tie = a + (b - a) / 2;
        const float in[] = {a, tie, nextafterf(tie, 0), nextafterf(tie, INFINITY)};
        const float wanted[] = {a, bits % 2 ? above : a, a, above};
        for (size_t i = 0; i < 8; i++) {
            const float sign = i < 4 ? 1 : -1, found = quant_round(DTYPE_FP16, sign * in[i % 4]);
            if (found != sign * wanted[i % 4]) test_fail("%.9g became %.9g", (double)(sign * in[i % 4]), (double)found);
        }
    }
    assert_true(isnan(quant_round(DTYPE_FP16, NAN)) && isinf(quant_round(DTYPE_FP16, -INFINITY)));
}

TEST(parts_follow_each_other) {
    for (size_t i = 0; i < 2000; i++) {
        const size_t n = 1 + test_random_below(i % 2 ? 300 : 100000), block = (size_t)32 << test_random_below(8);
        const QuantFormat f = {.type = QUANT_NF4, .nested = (int)(i / 2 % 2), .block = block};
        const QuantParts p = quant_parts(f, n);
        assert_true(p.codes == 0 && p.scale_codes >= (n + 1) / 2 && p.blocks == (n + block - 1) / block);
        assert_true(p.scales >= p.scale_codes + (f.nested ? p.blocks : 0));
        assert_true(p.scale_count == (f.nested ? (p.blocks + 255) / 256 : p.blocks));
        assert_true(p.offset >= p.scales + 4 * p.scale_count && p.bytes >= p.offset + (f.nested ? 4 : 0));
        assert_true((p.scale_codes | p.scales | p.offset) % 16 == 0 && p.bytes % 64 == 0 && p.bytes < p.offset + 128);
    }
}

// The value of a code by its definition, and all codes in ascending order of their values.
static double fp8_defined(unsigned code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double value = exponent ? ldexp(1 + mantissa / 8.0, exponent - 7) : ldexp(mantissa / 8.0, -6);
    return code & 128 ? -value : value;
}

TEST(fp8_codes) {
    for (unsigned code = 0; code < 256; code++) {
        if ((code & 127) == 127) continue;
        const float value = quant_fp8_value(code);
        test_case("code 0x%02x", code);
        assert_true((double)value == fp8_defined(code) && !signbit(value) == !(code & 128));
        assert_int_equal(quant_fp8_code(value), code);
        if ((code & 127) == 126) continue;
        const double next = fp8_defined(code + 1), middle = ((double)value + next) / 2; // to the even code
        assert_int_equal(quant_fp8_code((float)middle), code % 2 ? code + 1 : code);
        assert_int_equal(quant_fp8_code((float)(middle + (next - middle) / 1024)), code + 1);
        assert_int_equal(quant_fp8_code((float)(middle - (next - middle) / 1024)), code);
    }
    assert_int_equal(quant_fp8_code(1e30f), 0x7e);
    assert_int_equal(quant_fp8_code(-460), 0xfe);
}

TEST(fp8_scales) {
    assert_true(quant_fp8_scale(0, DTYPE_FP32) == 1 && quant_fp8_scale(448, DTYPE_FP32) == 1);
    assert_true(quant_fp8_scale(448, DTYPE_INT8) == 1 && quant_fp8_scale(449, DTYPE_INT8) == 2);
    assert_true(quant_fp8_scale(224, DTYPE_INT8) == 0.5f && quant_fp8_scale(1e-44f, DTYPE_FP32) > 0);
    assert_true(quant_fp8_scale(449, DTYPE_BF16) == bf16_to_float(float_to_bf16(449.0f / 448)));
}

// Matrices [192, 136] in blocks of 128 x 128: the last blocks have 64 rows and 8 columns. Ranges decode as the whole,
// and each block by its own scale. Blocks keep their bytes if no value changes.
TEST(fp8_blocks) {
    enum { ROWS = 192, COLS = 136, ALL = 2 * ROWS * COLS };
    const QuantFormat f = quant_on(quant_format(QUANT_FP8, DTYPE_BF16), ROWS, COLS);
    const QuantParts p = quant_parts(f, ALL);
    float *x = (float *)case_memory(ALL * sizeof(float)), *out = (float *)case_memory(ALL * sizeof(float)), part[300];
    uint8_t *record = (uint8_t *)case_memory(p.bytes), *changed = (uint8_t *)case_memory(p.bytes);
    float *scales = (float *)(void *)(record + p.scales);
    assert_int_equal(p.blocks, 8);
    for (size_t i = 0; i < ALL; i++) {
        const size_t block = i / COLS / ROWS * 4 + i / COLS % ROWS / 128 * 2 + i % COLS / 128;
        x[i] = (float)(test_uniform() - 0.5) * ldexpf(1, (int)block);
        if (i / COLS % 64 == 3 && (i % COLS == 0 || i % COLS == 128)) x[i] = -ldexpf(0.5f, (int)block);
    }
    quant_encode(record, f, x, ALL);
    quant_decode_range(out, f, record, ALL, 0, ALL);
    for (size_t b = 0; b < 8; b++) assert_true(scales[b] == ldexpf(0.5f, (int)b) / 448);
    for (size_t i = 0; i < ALL; i++) {
        const size_t block = i / COLS / ROWS * 4 + i / COLS % ROWS / 128 * 2 + i % COLS / 128;
        assert_true(out[i] == bf16_to_float(float_to_bf16((float)fp8_defined(record[i]) * scales[block])));
        assert_true(fabsf(out[i] - x[i]) <= fmaxf(fabsf(x[i]) / 15, scales[block] * 0x1p-9f));
    }
    for (size_t begin = 0; begin < ALL; begin += 4321) {
        quant_decode_range(part, f, record, ALL, begin, min_size(300, ALL - begin));
        assert_memory_equal(part, out + begin, min_size(300, ALL - begin) * sizeof(float));
    }
    for (size_t b = 0; b < 8; b++) scales[b] *= 1.013f; // not the scales that encoding would choose
    quant_decode_range(x, f, record, ALL, 0, ALL);
    x[150 * COLS + 130] = 100; // in block 3 alone
    QuantEncoder e = quant_encode_begin(changed, f, ALL);
    e.was = record, e.changed = (uint8_t *)case_memory(p.blocks);
    memset(e.changed, 0, p.blocks);
    for (int pass = 0; pass < 2; pass++) {
        if (pass) quant_fp8_turn(&e);
        for (size_t begin = 0; begin < ALL; begin += 5000)
            quant_encode_part(&e, x + begin, begin, min_size(5000, ALL - begin));
    }
    for (size_t b = 0; b < 8; b++) assert_int_equal(memcmp(e.scale + b, scales + b, sizeof(float)) != 0, b == 3);
    for (size_t i = 0; i < ALL; i++)
        if (i / COLS < 128 || i / COLS >= ROWS || i % COLS < 128) assert_int_equal(changed[i], record[i]);
    assert_int_equal(changed[150 * COLS + 130], 0x7e);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
