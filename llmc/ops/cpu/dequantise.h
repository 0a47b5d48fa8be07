/*
Matrices in 4 bits (llmc/base/quantise.h) to floatX. The 16 codes of a block times its scale, rounded, are a table of 16
values of floatX, from which elements are picked by their codes: in registers on AVX2 and AVX-512. So what an element
costs is its bytes, and what is rounded is a fourth of a block or less.
*/
#ifndef LLMC_CPU_DEQUANTISE_H
#define LLMC_CPU_DEQUANTISE_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "vector.h"

enum { PICKED = 32 }; // elements at once: 16 bytes of codes. A divisor of every block's length

// out[PICKED] = table[code] of 16 bytes of codes
#if defined(__AVX2__) && !defined(PRECISION_DOUBLE)
// The codes in order, the first of two in the high half: in the low four bits of each byte of two vectors. What is
// above these bits is not looked at by permutations of 16 values.
static inline void codes_in_order(__m128i order[2], const uint8_t *codes) {
    const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)codes), high = _mm_srli_epi16(low, 4);
    order[0] = _mm_unpacklo_epi8(high, low), order[1] = _mm_unpackhi_epi8(high, low);
}
#endif
#if defined(__AVX512BW__) && defined(PRECISION_BF16)
typedef __m512i PickTable; // twice the 16 values: bit 4 of an index does not matter
static inline PickTable pick_table(const floatX table[16]) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(const void *)table));
}
static inline void pick(floatX *out, const uint8_t *codes, PickTable table) {
    const __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes));
    const __m512i index =
        _mm512_or_si512(_mm512_srli_epi32(byte, 4), _mm512_slli_epi32(byte, 16)); // a byte, two elements
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, table));
}
#elif defined(__AVX512F__) && !defined(PRECISION_DOUBLE) && !defined(PRECISION_BF16)
typedef __m512 PickTable;
static inline PickTable pick_table(const floatX table[16]) { return _mm512_loadu_ps(table); }
static inline void pick(floatX *out, const uint8_t *codes, PickTable table) {
    __m128i order[2];
    codes_in_order(order, codes);
    for (int half = 0; half < 2; half++)
        _mm512_storeu_ps(out + 16 * half, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(order[half]), table));
}
#elif defined(__AVX2__) && defined(PRECISION_BF16)
typedef struct {
    __m128i low, high; // bytes of the 16 values
} PickTable;
static inline PickTable pick_table(const floatX table[16]) {
    const __m128i a = _mm_loadu_si128((const __m128i *)(const void *)table), byte = _mm_set1_epi16(0xff),
                  b = _mm_loadu_si128((const __m128i *)(const void *)(table + 8));
    return (PickTable){_mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte)),
                       _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8))};
}
static inline void pick(floatX *out, const uint8_t *codes, PickTable table) {
    __m128i order[2], *to = (__m128i *)(void *)out;
    codes_in_order(order, codes);
    for (int half = 0; half < 2; half++) {
        const __m128i index = _mm_and_si128(order[half], _mm_set1_epi8(15));
        const __m128i low = _mm_shuffle_epi8(table.low, index), high = _mm_shuffle_epi8(table.high, index);
        _mm_storeu_si128(to + 2 * half, _mm_unpacklo_epi8(low, high));
        _mm_storeu_si128(to + 2 * half + 1, _mm_unpackhi_epi8(low, high));
    }
}
#elif defined(__AVX2__) && !defined(PRECISION_DOUBLE)
typedef struct {
    __m256 low, high; // values 0 to 7, 8 to 15
} PickTable;
static inline PickTable pick_table(const floatX table[16]) {
    return (PickTable){_mm256_loadu_ps(table), _mm256_loadu_ps(table + 8)};
}
static inline void pick(floatX *out, const uint8_t *codes, PickTable table) {
    __m128i order[2];
    codes_in_order(order, codes);
    for (int part = 0; part < 4; part++) {
        const __m128i bytes = part % 2 ? _mm_srli_si128(order[part / 2], 8) : order[part / 2];
        const __m256i index = _mm256_cvtepu8_epi32(bytes);
        const __m256 bit_3 = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)); // as the sign
        _mm256_storeu_ps(out + 8 * part, _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index),
                                                          _mm256_permutevar8x32_ps(table.high, index), bit_3));
    }
}
#else
typedef const floatX *PickTable;
static inline PickTable pick_table(const floatX table[16]) { return table; }
static inline void pick(floatX *out, const uint8_t *codes, PickTable table) {
    for (size_t i = 0; i < PICKED; i += 2) out[i] = table[codes[i / 2] >> 4], out[i + 1] = table[codes[i / 2] & 15];
}
#endif

// By pointer: as parameters they would be another ABI's on processors without registers of this width
typedef float Sixteen __attribute__((vector_size(64)));
typedef uint32_t SixteenBits __attribute__((vector_size(64)));
typedef uint16_t SixteenHalves __attribute__((vector_size(32)));

VECTOR_INLINE void sixteen_to_bf16(Sixteen *v) { // as float_to_bf16
    const SixteenBits bits = (SixteenBits)*v, nan = (SixteenBits)(*v != *v);
    const SixteenBits rounded = ((bits + 0x7fffu + ((bits >> 16) & 1)) & ~nan) | ((bits | 0x400000u) & nan);
    *v = (Sixteen)(rounded & 0xffff0000u);
}

VECTOR_INLINE void sixteen_to_fp16(Sixteen *v) {
#if defined(__AVX512F__)
    *v = (Sixteen)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)*v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    float value[16];
    memcpy(value, v, sizeof(*v));
#if defined(__F16C__)
    for (size_t k = 0; k < 16; k += 8)
        _mm256_storeu_ps(value + k, _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_loadu_ps(value + k), 0)));
#else
    for (size_t k = 0; k < 16; k++) value[k] = quant_round_fp16(value[k]);
#endif
    memcpy(v, value, sizeof(*v));
#endif
}

// The 16 values of a block
VECTOR_INLINE void block_values(floatX table[16], const Sixteen *codes, DType rounding, float scale) {
    Sixteen values = *codes * scale;
    if (rounding == DTYPE_FP16) sixteen_to_fp16(&values);
#if defined(PRECISION_BF16)
    sixteen_to_bf16(&values);
    const SixteenHalves halves = __builtin_convertvector((SixteenBits)values >> 16, SixteenHalves);
    memcpy(table, &halves, sizeof(halves));
#else
    if (rounding == DTYPE_BF16) sixteen_to_bf16(&values);
    for (size_t k = 0; k < 16; k++) table[k] = (floatX)values[k];
#endif
}

// out[count] = elements [begin, begin + count) of a matrix of n. quant_scales() was made before
static void decode_elements(floatX *out, const void *record, QuantFormat f, size_t n, size_t begin, size_t count) {
    enum { SCALES = 64 }; // blocks whose scales are decoded at once
    const uint8_t *codes = (const uint8_t *)record;
    const size_t end = begin + count;
    Sixteen of_type;
    memcpy(&of_type, quant_codes[f.type], sizeof(of_type));
    for (size_t i = begin; i < end;) {
        const size_t first = i / f.block, blocks = min_size(SCALES, (end - 1) / f.block + 1 - first);
        float scale[SCALES];
        quant_scales_of(scale, f, codes, n, first, blocks);
        for (size_t b = 0; b < blocks; b++) {
            const size_t stop = min_size((first + b + 1) * f.block, end);
            floatX values[16] __attribute__((aligned(64)));
            block_values(values, &of_type, f.rounding, scale[b]);
            const PickTable table = pick_table(values);
            if (i % 2) out[i - begin] = values[codes[i / 2] & 15], i++;
            for (; i + PICKED <= stop; i += PICKED) pick(out + (i - begin), codes + i / 2, table);
            for (; i < stop; i++) out[i - begin] = values[codes[i / 2] >> (i % 2 ? 0 : 4) & 15];
        }
    }
}

static void cpu_dequantise(Stored *out, const void *record, const QuantFormat *format, size_t n) {
    enum { PART = 4096 };
    quant_scales(); // made before threads want it
#pragma omp parallel for schedule(static) if (parallel : n >= PARALLEL_MIN)
    for (size_t begin = 0; begin < n; begin += PART)
        decode_elements((floatX *)out + begin, record, *format, n, begin, min_size(PART, n - begin));
}

#endif
