/*
A vector of floatS as wide as the machine's registers, by the vector extensions of gcc and clang, with its operations.
Code without this header is plain loops (simd_math.h). The compiler must contract a * b + c into one instruction: gcc
does in its gnu11 mode, or with -ffp-contract=fast; clang always does.
*/
#ifndef LLMC_CPU_VECTOR_H
#define LLMC_CPU_VECTOR_H
#include <math.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif
#include "precision.h"

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#if defined(PRECISION_DOUBLE)
#define VECTOR_LANES (VECTOR_BYTES / 8)
typedef uint64_t VectorWord;
#else
#define VECTOR_LANES (VECTOR_BYTES / 4)
typedef uint32_t VectorWord;
#endif

typedef floatS Vector __attribute__((vector_size(VECTOR_BYTES)));
typedef VectorWord VectorBits __attribute__((vector_size(VECTOR_BYTES))); // also used as a mask of lanes
typedef floatS VectorInMemory
    __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias)); // a vector in memory, any alignment

#define CACHE_LINE (64 / sizeof(floatS)) // elements of a cache line

static inline size_t round_up(size_t x, size_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// clang splits 64-byte vectors on processors where it prefers 32 bytes, except in functions with this attribute.
#if defined(__clang__) && VECTOR_BYTES == 64
#define VECTOR_FUNCTION __attribute__((min_vector_width(512)))
#else
#define VECTOR_FUNCTION
#endif
#define VECTOR_INLINE static inline __attribute__((always_inline)) VECTOR_FUNCTION

// f(0), f(1), ..., one for each lane
#define LANES_2(f)  f(0), f(1)
#define LANES_4(f)  LANES_2(f), f(2), f(3)
#define LANES_8(f)  LANES_4(f), f(4), f(5), f(6), f(7)
#define LANES_16(f) LANES_8(f), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#if VECTOR_LANES == 16
#define EACH_LANE LANES_16
#elif VECTOR_LANES == 8
#define EACH_LANE LANES_8
#elif VECTOR_LANES == 4
#define EACH_LANE LANES_4
#else
#define EACH_LANE LANES_2
#endif

// Shuffles: lane i of the result is lane index(i) of a followed by b.
#if defined(__clang__)
#define VECTOR_SHUFFLE(a, b, index) __builtin_shufflevector(a, b, EACH_LANE(index))
#else
#define VECTOR_SHUFFLE(a, b, index) __builtin_shuffle(a, b, (VectorBits){EACH_LANE(index)})
#endif

VECTOR_INLINE Vector vector_load(const floatS *x) { return *(const VectorInMemory *)x; }
VECTOR_INLINE void vector_store(floatS *x, Vector v) { *(VectorInMemory *)x = v; }

// Loads and stores the storage type; rounds like store(), and AVX512-BF16 also flushes denormals to 0. Uses intrinsics
// where gcc would take several instructions.
#if defined(PRECISION_BF16)
typedef uint16_t VectorHalves __attribute__((vector_size(VECTOR_BYTES / 2)));
VECTOR_INLINE Vector vector_load_stored(const floatX *x) {
    VectorHalves halves;
    memcpy(&halves, x, sizeof(halves));
#if defined(__AVX512F__)
    return (Vector)((VectorBits)_mm512_cvtepu16_epi32((__m256i)halves) << 16);
#elif defined(__AVX2__)
    return (Vector)((VectorBits)_mm256_cvtepu16_epi32((__m128i)halves) << 16);
#else
    return (Vector)(__builtin_convertvector(halves, VectorBits) << 16);
#endif
}
VECTOR_INLINE void vector_store_stored(floatX *x, Vector v) {
#if defined(__AVX512BF16__)
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)v);
#else
    const VectorBits bits = (VectorBits)v, nan = (VectorBits)(v != v);
    const VectorBits rounded = ((bits + 0x7fffu + ((bits >> 16) & 1)) & ~nan) | ((bits | 0x400000u) & nan);
#if defined(__AVX512F__)
    const __m256i halves = _mm512_cvtepi32_epi16((__m512i)(rounded >> 16));
#else
    const VectorHalves halves = __builtin_convertvector(rounded >> 16, VectorHalves);
#endif
#endif
    memcpy(x, &halves, sizeof(halves));
}
#else
VECTOR_INLINE Vector vector_load_stored(const floatX *x) { return vector_load(x); }
VECTOR_INLINE void vector_store_stored(floatX *x, Vector v) { vector_store(x, v); }
#endif

// Keeps a loaded vector in its register; otherwise gcc reloads it for each multiply-add and is bound by loads.
#if defined(__x86_64__)
#define VECTOR_KEEP(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define VECTOR_KEEP(v) __asm__("" : "+w"(v))
#else
#define VECTOR_KEEP(v) (void)(v)
#endif

VECTOR_INLINE Vector vector_of(floatS x) { return x - (Vector){0}; }

// Returns two words at x, each as large as floatS, repeated over the vector; with fewer than 8 lanes one word.
VECTOR_INLINE Vector vector_repeat(const floatX *x) {
#if VECTOR_BYTES == 64 && defined(PRECISION_DOUBLE)
    return (Vector)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)x));
#elif VECTOR_LANES >= 8
    int64_t two;
    memcpy(&two, x, sizeof(two));
#if VECTOR_BYTES == 64
    return (Vector)_mm512_set1_epi64(two);
#else
    return (Vector)_mm256_set1_epi64x(two);
#endif
#else
    return vector_of(load(x[0]));
#endif
}

// Returns sum + a * b. With AVX512-BF16 a word of a and b holds two bf16, whose products are added to a word of sum.
VECTOR_INLINE Vector multiply_words(Vector sum, Vector a, Vector b) {
#if defined(PRECISION_BF16) && defined(__AVX512BF16__)
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + a * b;
#endif
}

// Loads and stores the end of a row: only lanes [0, count) if count is less than a vector. Other lanes load as `rest`.
VECTOR_INLINE Vector vector_load_first(const floatX *x, size_t count, floatS rest) {
    if (__builtin_expect(count >= VECTOR_LANES, 1)) return vector_load_stored(x);
    floatS lane[VECTOR_LANES];
    for (size_t i = 0; i < VECTOR_LANES; i++) lane[i] = i < count ? load(x[i]) : rest;
    return vector_load(lane);
}
VECTOR_INLINE void vector_store_first(floatX *x, Vector v, size_t count) {
    if (__builtin_expect(count >= VECTOR_LANES, 1)) {
        vector_store_stored(x, v);
        return;
    }
    floatX lane[VECTOR_LANES];
    vector_store_stored(lane, v);
    for (size_t i = 0; i < count; i++) x[i] = lane[i];
}

// Returns a where the mask's bits are 1, else b. Comparisons make this kind of mask.
VECTOR_INLINE Vector vector_select(VectorBits mask, Vector a, Vector b) {
    return (Vector)(((VectorBits)a & mask) | ((VectorBits)b & ~mask));
}

// Returns a > b ? a : b, so b if either is NaN. This is one instruction, which gcc does not find by itself.
VECTOR_INLINE Vector vector_max(Vector a, Vector b) {
#if VECTOR_BYTES == 64 && !defined(PRECISION_DOUBLE)
    return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif VECTOR_BYTES == 32 && !defined(PRECISION_DOUBLE)
    return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vector_select((VectorBits)(a > b), a, b);
#endif
}

// Returns the mask of the first `count` lanes.
VECTOR_INLINE VectorBits vector_first_lanes(size_t count) {
#define LANE_ITSELF(i) i
    const VectorBits lane = {EACH_LANE(LANE_ITSELF)};
    return (VectorBits)(lane < (VectorWord)count);
}

// Reductions across the lanes fold the vector in halves: lane i with lane i + 8, then with i + 4, i + 2, i + 1.
#define LANE_PLUS_8(i) ((i + 8) % VECTOR_LANES)
#define LANE_PLUS_4(i) ((i + 4) % VECTOR_LANES)
#define LANE_PLUS_2(i) ((i + 2) % VECTOR_LANES)
#define LANE_PLUS_1(i) ((i + 1) % VECTOR_LANES)

VECTOR_INLINE floatS vector_max_across(Vector v) {
    if (VECTOR_LANES > 8) v = vector_max(v, VECTOR_SHUFFLE(v, v, LANE_PLUS_8));
    if (VECTOR_LANES > 4) v = vector_max(v, VECTOR_SHUFFLE(v, v, LANE_PLUS_4));
    if (VECTOR_LANES > 2) v = vector_max(v, VECTOR_SHUFFLE(v, v, LANE_PLUS_2));
    v = vector_max(v, VECTOR_SHUFFLE(v, v, LANE_PLUS_1));
    return v[0];
}

VECTOR_INLINE floatS vector_sum_across(Vector v) {
    if (VECTOR_LANES > 8) v += VECTOR_SHUFFLE(v, v, LANE_PLUS_8);
    if (VECTOR_LANES > 4) v += VECTOR_SHUFFLE(v, v, LANE_PLUS_4);
    if (VECTOR_LANES > 2) v += VECTOR_SHUFFLE(v, v, LANE_PLUS_2);
    v += VECTOR_SHUFFLE(v, v, LANE_PLUS_1);
    return v[0];
}

// Transposes a square of VECTOR_LANES x VECTOR_LANES in place. Each round interleaves row i with row i + half. That
// rotates an element's address (row bits, then lane bits) left by one bit, until row and lane are exchanged.
VECTOR_INLINE void vector_transpose_square(Vector *a) {
#define LANE_INTERLEAVE_LOW(i)  (i / 2 + i % 2 * VECTOR_LANES)
#define LANE_INTERLEAVE_HIGH(i) (i / 2 + i % 2 * VECTOR_LANES + VECTOR_LANES / 2)
    Vector b[VECTOR_LANES];
    for (int round = 1; round < VECTOR_LANES; round *= 2) {
        for (int i = 0; i < VECTOR_LANES / 2; i++) {
            b[2 * i] = VECTOR_SHUFFLE(a[i], a[i + VECTOR_LANES / 2], LANE_INTERLEAVE_LOW);
            b[2 * i + 1] = VECTOR_SHUFFLE(a[i], a[i + VECTOR_LANES / 2], LANE_INTERLEAVE_HIGH);
        }
        for (int i = 0; i < VECTOR_LANES; i++) a[i] = b[i];
    }
}

// Returns the sums of lanes 0 and 1, 2 and 3, ... of a followed by b.
VECTOR_INLINE Vector vector_sums_of_pairs(Vector a, Vector b) {
#define LANE_EVEN(i) (2 * (i))
#define LANE_ODD(i)  (2 * (i) + 1)
    return VECTOR_SHUFFLE(a, b, LANE_EVEN) + VECTOR_SHUFFLE(a, b, LANE_ODD);
}

// Returns in lane i the sum across a[i], bit-equal to vector_sum_across. Each round adds the halves of two vectors: one
// vector's sums are in even lanes, the other's in odd lanes.
VECTOR_INLINE Vector vector_sums(const Vector *a) {
    Vector sum[VECTOR_LANES];
    for (int i = 0; i < VECTOR_LANES; i++) sum[i] = a[i];
    for (int half = VECTOR_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            sum[i] = VECTOR_SHUFFLE(sum[i], sum[i + half], LANE_INTERLEAVE_LOW) +
                     VECTOR_SHUFFLE(sum[i], sum[i + half], LANE_INTERLEAVE_HIGH);
    return sum[0];
}

// Transposes a square of VECTOR_LANES x VECTOR_LANES: out[j][i] = in[i][j]
VECTOR_INLINE void vector_transpose(floatS *out, size_t out_stride, const floatS *in, size_t in_stride) {
    Vector a[VECTOR_LANES];
    for (int i = 0; i < VECTOR_LANES; i++) a[i] = vector_load(in + (size_t)i * in_stride);
    vector_transpose_square(a);
    for (int i = 0; i < VECTOR_LANES; i++) vector_store(out + (size_t)i * out_stride, a[i]);
}

/*
Returns 2^x for x <= 0, or a rounding error above; NaN gives NaN. 2^x = 2^n 2^r with n the nearest integer. Adding 1.5 *
2^23 (2^52 in double) and the exponent's bias rounds to n and leaves n + bias in the low bits; shifted, it is the
exponent of 2^n. fp32: 2^r = 1 + r q(r) with the minimax polynomial q, within 1e-7; double: its Taylor series. Below
-100 the result stays at 2^-100. That is negligible compared with a row's largest weight, 1, and far from the denormals,
which would make products slow.
*/
VECTOR_INLINE Vector vector_exp2(Vector x) {
#if defined(PRECISION_DOUBLE)
    static const double q[] = {1.36914888539041281e-12, 2.56784359934882055e-11,
                               4.44553827187081162e-10, 7.05491162080112336e-09,
                               1.01780860092396999e-07, 1.32154867901443095e-06,
                               1.52527338040598411e-05, 1.54035303933816088e-04,
                               1.33335581464284433e-03, 9.61812910762847688e-03,
                               5.55041086648215831e-02, 2.40226506959100722e-01,
                               6.93147180559945286e-01, 1};
    const double magic = 6755399441055744.0 + 1023;
    const int mantissa = 52;
#else
    static const float q[] = {
        1.53533620e-4f, 1.33988739e-3f, 9.61843692e-3f, 5.55033237e-2f, 2.40226477e-1f, 6.93147182e-1f, 1};
    const float magic = 12582912.0f + 127;
    const int mantissa = 23;
#endif
    const Vector y = vector_max(vector_of(-100), x), shifted = y + magic, r = y - (shifted - magic);
    Vector p = vector_of(q[0]);
    for (size_t i = 1; i < sizeof(q) / sizeof(q[0]); i++) p = p * r + q[i];
    return p * (Vector)((VectorBits)shifted << mantissa);
}

#endif
