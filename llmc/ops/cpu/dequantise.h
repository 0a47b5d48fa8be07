/*
Decodes matrices in 4 or 8 bits (llmc/base/quantise.h) to floatX. In 4 bits a block's 16 codes times its scale, rounded,
are a table of 16 values of floatX; elements are picked from it by code, in registers on AVX2 and AVX-512. So an element
costs little more than its bytes, and at most a fourth as many values are rounded.
*/
#ifndef LLMC_CPU_DEQUANTISE_H
#define LLMC_CPU_DEQUANTISE_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "vector.h"

enum { PICKED = 32 }; // elements picked at once: 16 bytes of codes; divides every block's length

// Decodes out[PICKED] = table[code] from 16 bytes of codes. first: quant_first_shift()
#if defined(__AVX2__) && !defined(PRECISION_DOUBLE)
// Unpacks codes into the low four bits of each byte of two vectors. Permutations of 16 values ignore the bits above.
static inline void codes_in_order(__m128i order[2], const uint8_t *codes, int first) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)codes);
    const __m128i even = _mm_srl_epi16(bytes, _mm_cvtsi32_si128(first));
    const __m128i odd = _mm_srl_epi16(bytes, _mm_cvtsi32_si128(4 - first));
    order[0] = _mm_unpacklo_epi8(even, odd), order[1] = _mm_unpackhi_epi8(even, odd);
}

// Looks up w[] = value[code] for 16 bytes of codes, as vectors of float
#define PICKED_VECTORS (PICKED / VECTOR_LANES)
#if defined(__AVX512F__)
typedef __m512 ValueTable;
VECTOR_INLINE ValueTable value_table(const float value[16]) { return _mm512_loadu_ps(value); }
VECTOR_INLINE void pick_vectors(Vector w[PICKED_VECTORS], const uint8_t *codes, ValueTable table, int first) {
    __m128i order[2];
    codes_in_order(order, codes, first);
    for (int half = 0; half < 2; half++)
        w[half] = (Vector)_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(order[half]), table);
}
#else
typedef struct {
    __m256 low, high; // values 0 to 7, 8 to 15
} ValueTable;
VECTOR_INLINE ValueTable value_table(const float value[16]) {
    return (ValueTable){_mm256_loadu_ps(value), _mm256_loadu_ps(value + 8)};
}
VECTOR_INLINE void pick_vectors(Vector w[PICKED_VECTORS], const uint8_t *codes, ValueTable table, int first) {
    __m128i order[2];
    codes_in_order(order, codes, first);
    for (int part = 0; part < 4; part++) {
        const __m128i bytes = part % 2 ? _mm_srli_si128(order[part / 2], 8) : order[part / 2];
        const __m256i index = _mm256_cvtepu8_epi32(bytes);
        const __m256 bit_3 = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)); // bit 3 of the index as the sign bit
        w[part] = (Vector)_mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index),
                                           _mm256_permutevar8x32_ps(table.high, index), bit_3);
    }
}
#endif
#endif
#if defined(__AVX512BW__) && defined(PRECISION_BF16)
typedef __m512i PickTable; // the 16 values twice: bit 4 of an index does not matter
static inline PickTable pick_table(const floatX table[16]) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(const void *)table));
}
static inline void pick(floatX *out, const uint8_t *codes, PickTable table, int first) {
    const __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes));
    const __m512i index = _mm512_or_si512(_mm512_srl_epi32(byte, _mm_cvtsi32_si128(first)), // a byte holds 2 elements
                                          _mm512_sll_epi32(byte, _mm_cvtsi32_si128(12 + first)));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, table));
}
#elif defined(__AVX2__) && defined(PRECISION_BF16)
typedef struct {
    __m128i low, high; // the low and the high bytes of the 16 values
} PickTable;
static inline PickTable pick_table(const floatX table[16]) {
    const __m128i a = _mm_loadu_si128((const __m128i *)(const void *)table), byte = _mm_set1_epi16(0xff),
                  b = _mm_loadu_si128((const __m128i *)(const void *)(table + 8));
    return (PickTable){_mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte)),
                       _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8))};
}
static inline void pick(floatX *out, const uint8_t *codes, PickTable table, int first) {
    __m128i order[2], *to = (__m128i *)(void *)out;
    codes_in_order(order, codes, first);
    for (int half = 0; half < 2; half++) {
        const __m128i index = _mm_and_si128(order[half], _mm_set1_epi8(15));
        const __m128i low = _mm_shuffle_epi8(table.low, index), high = _mm_shuffle_epi8(table.high, index);
        _mm_storeu_si128(to + 2 * half, _mm_unpacklo_epi8(low, high));
        _mm_storeu_si128(to + 2 * half + 1, _mm_unpackhi_epi8(low, high));
    }
}
#elif defined(PICKED_VECTORS) && !defined(PRECISION_BF16)
typedef ValueTable PickTable;
static inline PickTable pick_table(const floatX table[16]) { return value_table(table); }
static inline void pick(floatX *out, const uint8_t *codes, PickTable table, int first) {
    Vector w[PICKED_VECTORS];
    pick_vectors(w, codes, table, first);
    for (size_t i = 0; i < PICKED_VECTORS; i++) vector_store(out + i * VECTOR_LANES, w[i]);
}
#else
typedef const floatX *PickTable;
static inline PickTable pick_table(const floatX table[16]) { return table; }
static inline void pick(floatX *out, const uint8_t *codes, PickTable table, int first) {
    for (size_t i = 0; i < PICKED; i += 2)
        out[i] = table[codes[i / 2] >> first & 15], out[i + 1] = table[codes[i / 2] >> (4 - first) & 15];
}
#endif

// Vectors of float in every build, as wide as registers: gcc 12 splits wider ones into moves of 16 bytes, which stall
// loads.
enum { FLOATS = VECTOR_BYTES / sizeof(float) };
typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t FloatBits __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t FloatHalves __attribute__((vector_size(VECTOR_BYTES / 2)));

VECTOR_INLINE Floats floats_to_bf16(Floats v) { // rounds like float_to_bf16
    const FloatBits bits = (FloatBits)v, nan = (FloatBits)(v != v);
    const FloatBits rounded = ((bits + 0x7fffu + ((bits >> 16) & 1)) & ~nan) | ((bits | 0x400000u) & nan);
    return (Floats)(rounded & 0xffff0000u);
}

VECTOR_INLINE Floats floats_to_fp16(Floats v) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (size_t k = 0; k < FLOATS; k++) v[k] = quant_round_fp16(v[k]);
    return v;
#endif
}

// Computes the 16 values of a block's codes as float, also rounded to floatX.
VECTOR_INLINE void block_floats(float value[16], const float *codes, DType rounding, float scale) {
    for (size_t k = 0; k < 16; k += FLOATS) {
        Floats v;
        memcpy(&v, codes + k, sizeof(v));
        v *= scale;
        if (rounding == DTYPE_FP16) v = floats_to_fp16(v);
        if (rounding == DTYPE_BF16 || FLOATX_DTYPE == DTYPE_BF16) v = floats_to_bf16(v);
        memcpy(value + k, &v, sizeof(v));
    }
}

VECTOR_INLINE void block_values(floatX table[16], const float *codes, DType rounding, float scale) {
    float value[16] __attribute__((aligned(64)));
    block_floats(value, codes, rounding, scale);
    for (size_t k = 0; k < 16; k += FLOATS) {
#if defined(PRECISION_BF16)
        FloatBits bits;
        memcpy(&bits, value + k, sizeof(bits));
        const FloatHalves halves = __builtin_convertvector(bits >> 16, FloatHalves);
        memcpy(table + k, &halves, sizeof(halves));
#else
        for (size_t j = k; j < k + FLOATS; j++) table[j] = (floatX)value[j];
#endif
    }
}

// Decodes out[count] = elements [begin, begin + count) of a matrix in fp8.
static void decode_fp8(floatX *out, const uint8_t *record, QuantFormat f, const QuantParts *p, size_t begin,
                       size_t count) {
    const float *scales = (const float *)(const void *)(record + p->scales);
    for (size_t i = begin, end, b; i < begin + count; i = end) {
        end = quant_fp8_run(f, i, begin + count, &b);
        for (size_t j = i; j < end; j++) // rounded to bf16 by every build
            out[j - begin] = store((floatS)bf16_to_float(float_to_bf16(quant_fp8_value(record[j]) * scales[b])));
    }
}

// Returns log2 of a block's length: shifts by it replace divisions.
static inline int block_shift(QuantFormat f) { return __builtin_ctzll((unsigned long long)f.block); }

// Decodes out[count] = elements [begin, begin + count) of a matrix. p: parts of its record. Call quant_scales() before.
static void decode_elements(floatX *out, const void *record, QuantFormat f, const QuantParts *p, size_t begin,
                            size_t count) {
    enum { SCALES = 64 }; // blocks whose scales are decoded at once
    const uint8_t *codes = (const uint8_t *)record;
    const size_t end = begin + count;
    if (f.type == QUANT_FP8) {
        decode_fp8(out, codes, f, p, begin, count);
        return;
    }
    const int shift = block_shift(f), first = quant_first_shift(f.type);
    for (size_t i = begin; i < end;) {
        const size_t block = i >> shift, blocks = min_size(SCALES, ((end - 1) >> shift) + 1 - block);
        float scale[SCALES];
        quant_scales_of(scale, f, codes, p, block, blocks);
        for (size_t b = 0; b < blocks; b++) {
            const size_t stop = min_size((block + b + 1) << shift, end);
            floatX values[16] __attribute__((aligned(64)));
            block_values(values, quant_codes[f.type], f.rounding, scale[b]);
            const PickTable table = pick_table(values);
            if (i % 2) out[i - begin] = values[quant_code(f.type, codes, i)], i++;
            for (; i + PICKED <= stop; i += PICKED) pick(out + (i - begin), codes + i / 2, table, first);
            for (; i < stop; i++) out[i - begin] = values[quant_code(f.type, codes, i)];
        }
    }
}

static void cpu_dequantise(Stored *out, const void *record, const QuantFormat *format, size_t n) {
    enum { PART = 4096 };
    const QuantParts p = quant_parts(*format, n);
    quant_scales(); // fills the table before threads need it
#pragma omp parallel for schedule(static) if (parallel : n >= PARALLEL_MIN)
    for (size_t begin = 0; begin < n; begin += PART)
        decode_elements((floatX *)out + begin, record, *format, &p, begin, min_size(PART, n - begin));
}

#endif
