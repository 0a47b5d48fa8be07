/*
Matrices in 4 or 8 bits: the elements in order, in blocks that share a scale. An element is a code,

    nf4    4 bits: 16 quantiles of the normal distribution
    fp4    4 bits: sign, two bits of exponent, one of mantissa
    mxfp4  the same with other exponents: 0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives
    fp8    8 bits (e4m3): sign, four bits of exponent, three of mantissa; 0x7f and 0xff are NaN and refused

times the scale of its block. mxfp4 is the format of OCP's Microscaling Formats 1.0 that gpt-oss uses: blocks of 32,
scales 2^(byte - 127), so every finite value is exact in bf16. Values equal those of transformers 5.24, also for byte
255.

nf4 and fp4 are the formats of bitsandbytes 0.50 (QLoRA, arXiv 2305.14314). Their scale is the largest magnitude of a
block (absmax). Nested ("double quantisation") scales are themselves codes of 8 bits, in blocks of 256: scale =
map[code] * scale of its block + offset, the offset being the mean of all scales. fp4 has a second zero, which decodes
to 0; bitsandbytes decodes it to 0 or -0, depending on which of its loops runs.

fp8 has blocks of rows and columns, as DeepSeek's and Qwen's FP8 folders: a block has `block` columns of grid.block_rows
rows, and the last block of a side may be shorter. A block as large as the matrix is a scale for a tensor; a block of
one row is a scale for a row. A stack of matrices has blocks of its own in each matrix. A value is bf16(fp32(code) *
scale), as transformers decodes. Encoding is that of transformers 5.24: f = (1 / largest magnitude) * 448, scale = 1 /
f, and the nearest code to value * f, ties to even. Scales in bf16 are rounded, exponents rounded up, and then f = 1 /
scale. MXFP8 is fp8 with blocks of one row and 32 columns, whose scales are exponents.

A matrix of n elements is one run of bytes, a record (QuantParts). Codes, scales and decoded values equal those of
bitsandbytes on a CPU, to the last bit. That includes two quirks. The code of a nested scale is looked up in a grid of
2^16 points, which misses 0 and the map's smallest values. The offset is a mean in torch's order of additions on one
thread; with several threads, above 32768 scales, its last bit may differ.
*/
#ifndef LLMC_QUANTISE_H
#define LLMC_QUANTISE_H
#include "dtype.h"
#include "random.h"
#include "utils.h"
#include <math.h>

typedef enum { QUANT_NONE, QUANT_NF4, QUANT_FP4, QUANT_MXFP4, QUANT_FP8, QUANT_TYPES } QuantType;

// Blocks of fp8, in matrices [rows, cols] that follow each other
typedef struct {
    size_t rows, cols, block_rows;
    DType scales;     // type of the scales in files: fp32, bf16, or int8 for exponents e8m0. In memory they are fp32
    size_t file_rows; // rows of a block in files: more than block_rows where memory has rows in another order
} QuantGrid;

typedef struct {
    QuantType type; // QUANT_NONE: neither in 4 nor in 8 bits
    int nested;
    size_t block;   // elements that share a scale: a power of two from 32 to 4096; the last block may be shorter
    DType rounding; // type of the model before quantisation, to which decoded values are rounded: fp32, bf16 or fp16
    QuantGrid grid; // fp8: `block` is the number of columns, of any size
} QuantFormat;

enum {
    QUANT_BLOCK = 64,
    QUANT_NESTED_BLOCK = 256,
    QUANT_BLOCK_LEAST = 32,
    QUANT_BLOCK_MOST = 4096,
    MXFP4_BLOCK = 32,
    MXFP8_BLOCK = 32,
    FP8_BLOCK = 128
};
enum { MXFP4_SCALE_MOST = 252 }; // greatest scale byte: 6 * 2^(252 - 127) is finite

static const char *const quant_type_names[QUANT_TYPES] = {"none", "nf4", "fp4", "mxfp4", "fp8"};

// Returns the type with this name; QUANT_NONE: there is none
static QuantType quant_type_find(const char *name) {
    for (int i = QUANT_NF4; i < QUANT_TYPES; i++)
        if (!strcmp(name, quant_type_names[i])) return (QuantType)i;
    return QUANT_NONE;
}

// mxfp4 has twice the values here, and scales 2^(byte - 128), which float holds for every byte
static const float quant_codes[QUANT_FP8][16] = {
    {0},
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
     0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    {0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f, 0.0f, -0.0625f / 12, -8.0f / 12, -1.0f,
     -4.0f / 12, -0.5f, -2.0f / 12, -0.25f},
    {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 6.0f, 8.0f, 12.0f, -0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f, -12.0f},
};

// Returns by how many bits a byte of codes is shifted right for its first element. The second element is in the other
// half.
static int quant_first_shift(QuantType type) { return type == QUANT_MXFP4 ? 0 : 4; }

static unsigned quant_code(QuantType type, const uint8_t *codes, size_t i) {
    return codes[i / 2] >> (i % 2 ? 4 - quant_first_shift(type) : quant_first_shift(type)) & 15;
}

// Codes of nf4 and fp4 in ascending order of their values. Of fp4's two zeros the first is used
static const uint8_t quant_order[QUANT_MXFP4][16] = {
    {0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3},
};

// Returns the format in which we quantise matrices. rounding: their type. Values of mxfp4 are exact in bf16.
static QuantFormat quant_format(QuantType type, DType rounding) {
    const QuantFormat mxfp4 = {type, 0, MXFP4_BLOCK, DTYPE_BF16, {0}};
    const QuantFormat fp8 = {type, 0, FP8_BLOCK, DTYPE_BF16, {0, 0, FP8_BLOCK, DTYPE_FP32, FP8_BLOCK}};
    const QuantFormat nested = {type, 1, QUANT_BLOCK, rounding == DTYPE_FP64 ? DTYPE_FP32 : rounding, {0}};
    return type == QUANT_MXFP4 ? mxfp4 : type == QUANT_FP8 ? fp8 : nested;
}

// Returns the format for matrices [rows, cols]. A block without a size is as large as the matrix.
static QuantFormat quant_on(QuantFormat f, size_t rows, size_t cols) {
    if (f.type != QUANT_FP8) return f;
    f.grid.rows = rows, f.grid.cols = cols;
    if (!f.grid.block_rows) f.grid.block_rows = rows;
    if (!f.block) f.block = cols;
    f.grid.file_rows = f.grid.block_rows;
    return f;
}

// Returns the number of bits of a code.
static int quant_bits(QuantType type) { return type == QUANT_FP8 ? 8 : 4; }

// ---- the record of a matrix -----------------------------------------------------------------------------------------
// Byte offsets of a record's parts. codes: two elements per byte, the first in the high half (mxfp4: in the low half);
// fp8: one element.
// scale_codes: codes of nested scales, or mxfp4's scale bytes. scales: in fp32, for nested scales one per 256. offset:
// of nested scales. Each part begins at a multiple of 16.
typedef struct {
    size_t codes, scale_codes, scales, offset;
    size_t blocks, scale_count; // number of blocks of elements, and of scales in fp32
    size_t bytes;               // bytes of the record, a multiple of 64
} QuantParts;

static size_t quant_align(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

static size_t quant_ceil(size_t n, size_t by) { return (n + by - 1) / by; }

// Returns the number of fp8's blocks side by side in a matrix
DEVICE_TOO static inline size_t quant_columns(QuantFormat f) { return (f.grid.cols + f.block - 1) / f.block; }

// Returns the number of fp8's blocks of a matrix.
static size_t quant_grid_blocks(QuantFormat f) { return quant_ceil(f.grid.rows, f.grid.block_rows) * quant_columns(f); }

// Returns the index of the scale at the beginning of a row, counted through all matrices of the record.
DEVICE_TOO static inline size_t quant_row_scale(QuantFormat f, size_t row) {
    const size_t high = (f.grid.rows + f.grid.block_rows - 1) / f.grid.block_rows;
    return (row / f.grid.rows * high + row % f.grid.rows / f.grid.block_rows) * quant_columns(f);
}

static QuantParts quant_parts(QuantFormat f, size_t n) {
    QuantParts p = {0};
    if (f.type == QUANT_FP8) {
        p.blocks = p.scale_count = quant_ceil(n, f.grid.rows * f.grid.cols) * quant_grid_blocks(f);
        p.scale_codes = p.scales = quant_align(n, 16);
        p.offset = p.scales + quant_align(p.scale_count * sizeof(float), 16);
        p.bytes = quant_align(p.offset, 64);
        return p;
    }
    p.blocks = (n + f.block - 1) / f.block;
    p.scale_count = f.nested ? (p.blocks + QUANT_NESTED_BLOCK - 1) / QUANT_NESTED_BLOCK : p.blocks;
    if (f.type == QUANT_MXFP4) p.scale_count = 0;
    p.scale_codes = quant_align((n + 1) / 2, 16);
    p.scales = p.scale_codes + (f.nested || f.type == QUANT_MXFP4 ? quant_align(p.blocks, 16) : 0);
    p.offset = p.scales + quant_align(p.scale_count * sizeof(float), 16);
    p.bytes = quant_align(p.offset + (f.nested ? sizeof(float) : 0), 64);
    return p;
}

// ---- the 8-bit map --------------------------------------------------------------------------------------------------
// Builds the dynamic map (arXiv 1511.04561), ascending: 0, 1, and for each of 7 decades below 1 the midpoints of equal
// steps from 0.1 to 1, twice as many in each larger decade. with_sign: also the negative values
static void quant_dynamic_map(float map[256], int with_sign) {
    size_t count = 0, zero;
    map[count++] = 0;
    for (int decade = 0; decade < 7; decade++) {
        const int steps = 1 << (decade + !with_sign);
        const double step = (double)(0.9f / (float)steps), least = (double)0.1f;
        const float factor = (float)pow(10.0, decade - 6);
        float before = 0.1f;
        for (int k = 1; k <= steps; k++) {
            const float bound = (float)(2 * k < steps + 1 ? step * k + least : 1.0 - step * (steps - k));
            map[count++] = factor * ((before + bound) / 2);
            before = bound;
        }
    }
    map[count++] = 1;
    if (!with_sign) return;
    zero = 256 - count; // negative values except -1
    memmove(map + zero, map, count * sizeof(float));
    for (size_t i = 1; i <= zero; i++) map[zero - i] = -map[zero + i];
}

enum { QUANT_GRID = 65536 };

typedef struct {
    float map[256];
    uint8_t nearest[QUANT_GRID]; // code of the map's value nearest to each point of a grid over [-1, 1]
} QuantScales;

// Returns the map. The first call builds it, so threads must not make the first call.
static const QuantScales *quant_dynamic(int with_sign) {
    static QuantScales scales[2];
    QuantScales *s = &scales[with_sign];
    if (s->map[255] != 0) return s;
    quant_dynamic_map(s->map, with_sign);
    for (size_t k = 0, code = 0; k < QUANT_GRID; k++) {
        const double x = (double)((float)((double)k / 32767.5 - 1));
        while (code < 255 && fabs((double)s->map[code + 1] - x) < fabs((double)s->map[code] - x)) code++;
        s->nearest[k] = (uint8_t)code;
    }
    return s;
}

static const QuantScales *quant_scales(void) { return quant_dynamic(1); }

// ---- encoding -------------------------------------------------------------------------------------------------------
// Sums x[n] in the order in which torch sums a row: 4 interleaved sums of vectors of `width`, carried to the next of 4
// levels every 2^k terms.
static float quant_sum_rows(const float *x, size_t n, size_t width) {
    enum { ROWS = 4, LEVELS = 4, WIDTH = 8 };
    float sum[LEVELS][ROWS][WIDTH] = {{{0}}};
    const size_t vectors = n / width, turns = vectors / ROWS;
    size_t log2 = 0, i = 0;
    while (((size_t)1 << log2) < turns) log2++;
    const size_t power = max_size(4, max_size(log2, 1) / LEVELS), step = (size_t)1 << power;
    while (i < turns) {
        const size_t end = min_size(turns, i + step);
        const int full = end - i == step;
        for (; i < end; i++)
            for (size_t k = 0; k < ROWS; k++)
                for (size_t w = 0; w < width; w++) sum[0][k][w] += x[(i * ROWS + k) * width + w];
        for (size_t level = 1; level < LEVELS && full; level++) {
            for (size_t k = 0; k < ROWS; k++)
                for (size_t w = 0; w < width; w++) sum[level][k][w] += sum[level - 1][k][w], sum[level - 1][k][w] = 0;
            if (i & ((step - 1) << (level * power))) break;
        }
    }
    for (size_t level = 1; level < LEVELS; level++)
        for (size_t k = 0; k < ROWS; k++)
            for (size_t w = 0; w < width; w++) sum[0][k][w] += sum[level][k][w];
    for (i = turns * ROWS; i < vectors; i++)
        for (size_t w = 0; w < width; w++) sum[0][0][w] += x[i * width + w];
    for (size_t k = 1; k < ROWS; k++)
        for (size_t w = 0; w < width; w++) sum[0][0][w] += sum[0][k][w];
    float all = 0;
    for (i = vectors * width; i < n; i++) all += x[i];
    for (size_t w = 0; w < width; w++) all += sum[0][0][w];
    return all;
}

static float quant_mean(const float *x, size_t n) { return quant_sum_rows(x, n, n < 8 ? 1 : 8) / (float)n; }

static float quant_absmax(const float *x, size_t n) {
    float most = 0;
    for (size_t i = 0; i < n; i++) most = fmaxf(most, fabsf(x[i]));
    return most;
}

// Encodes x[n] in 4 bits. n is even except at the matrix's end. Returns the scale.
static float quant_encode_block(uint8_t *codes, const float bounds[15], const uint8_t *order, const float *x, size_t n,
                                int whole) {
    uint8_t code[QUANT_BLOCK_MOST];
    const float most = quant_absmax(x, n), least = fmaxf(most, 1e-38f), inverse = 1 / least;
    for (size_t i = 0; i < n; i++) {
        const float v = whole ? x[i] * inverse : x[i] / least; // in a short block bitsandbytes divides
        int above = 0;
        for (int b = 0; b < 15; b++) above += v > bounds[b];
        code[i] = (uint8_t)above;
    }
    if (n % 2) code[n] = 7; // the code of 0, with which bitsandbytes pads
    for (size_t i = 0; i < n; i += 2) codes[i / 2] = (uint8_t)(order[code[i]] << 4 | order[code[i + 1]]);
    return whole ? most : least;
}

// Encodes x[n] in mxfp4, each value to the nearest code, and to the even code if two are equally near. The scale's
// exponent is the largest magnitude's exponent less 2. Values up to 6 times the scale are rounded; larger ones become
// 6.
static void quant_encode_mxfp4(uint8_t *codes, uint8_t *scale, const float *x, size_t n) {
    const float most = quant_absmax(x, n);
    int exponent;
    frexpf(most, &exponent); // most is in [1/2, 1) * 2^exponent
    *scale = (uint8_t)(most != 0 && exponent > -124 ? exponent + 124 : 0);
    const float inverse = ldexpf(1, 127 - *scale);
    memset(codes, 0, (n + 1) / 2);
    for (size_t i = 0; i < n; i++) {
        const float v = fabsf(x[i]) * inverse;
        const int code = (v > 0.25f) + (v >= 0.75f) + (v > 1.25f) + (v >= 1.75f) + (v > 2.5f) + (v >= 3.5f) + (v > 5);
        codes[i / 2] = (uint8_t)(codes[i / 2] | (code | (signbit(x[i]) ? 8 : 0)) << i % 2 * 4);
    }
}

// Encodes the scales of all blocks in 8 bits, with second-level scales and an offset.
static void quant_encode_scales(uint8_t *record, const QuantParts *p, float *scale) {
    const QuantScales *s = quant_scales();
    float *scales = (float *)(void *)(record + p->scales);
    const float mean = quant_mean(scale, p->blocks);
    memcpy(record + p->offset, &mean, sizeof(mean));
    for (size_t i = 0; i < p->blocks; i++) scale[i] -= mean;
    for (size_t b = 0; b < p->scale_count; b++) {
        const size_t begin = b * QUANT_NESTED_BLOCK, n = min_size(QUANT_NESTED_BLOCK, p->blocks - begin);
        uint8_t *code = record + p->scale_codes + begin;
        scales[b] = quant_absmax(scale + begin, n);
        const float inverse = 1 / scales[b];
        for (size_t i = 0; i < n && scales[b] != 0; i++) {
            const float value = fminf(fmaxf(scale[begin + i] * inverse, -1), 1); // rounded before 1 is added
            code[i] = s->nearest[min_size((size_t)((value + 1) * 32767.5f + 0.5f), QUANT_GRID - 1)];
        }
    }
}

// Rounds to fp16, ties to even. Values beyond the range of fp16 become infinity.
static float quant_round_fp16(float value) {
    const float magnitude = fabsf(value);
    uint32_t bits;
    if (magnitude < 1.0f / 16384) { // subnormal: multiples of 2^-24
        volatile float lifted = magnitude + 0.5f;
        return copysignf(lifted - 0.5f, value);
    }
    memcpy(&bits, &value, sizeof(bits));
    bits = (bits + 0xfffu + ((bits >> 13) & 1u)) & ~0x1fffu;
    memcpy(&value, &bits, sizeof(value));
    return magnitude < 65520 || magnitude != magnitude ? value : copysignf(INFINITY, value);
}

static float quant_round(DType type, float value) {
    if (type == DTYPE_BF16) return bf16_to_float(float_to_bf16(value));
    return type == DTYPE_FP16 ? quant_round_fp16(value) : value;
}

// ---- fp8 ------------------------------------------------------------------------------------------------------------
// Returns the value of a code of fp8. Subnormal codes are computed from normal numbers.
DEVICE_TOO static inline float quant_fp8_value(unsigned code) {
    const uint32_t bits = ((code & 0x7fu) << 20) + (120u << 23);
    float value;
    memcpy(&value, &bits, sizeof(value));
    if (!(code & 0x78u)) value = 2 * value - 0x1p-6f;
    return code & 0x80u ? -value : value;
}

// Returns the nearest code, the even code if two are equally near. Values beyond 448 become 448.
static uint8_t quant_fp8_code(float value) {
    const float most = fminf(fabsf(value), 448);
    const unsigned sign = signbit(value) ? 0x80 : 0;
    uint32_t bits;
    if (most < 0x1p-6f) { // subnormal: multiples of 2^-9
        volatile float lifted = most + 0x1p14f;
        return (uint8_t)(sign | (unsigned)((lifted - 0x1p14f) * 512));
    }
    memcpy(&bits, &most, sizeof(bits));
    return (uint8_t)(sign | (((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3)));
}

// Returns the scale of a block with this largest magnitude, in the type of the files' scales. A block of zeros has 1.
// *factor: by what its values are multiplied
static float quant_fp8_scale(float most, DType type, float *factor) {
    int exponent;
    *factor = most > 0 ? 1 / most * 448 : 1; // torch divides a number by a tensor so
    float scale = fmaxf(1 / *factor, 0x1p-126f);
    if (type == DTYPE_BF16) scale = bf16_to_float(float_to_bf16(scale));
    if (type == DTYPE_INT8) scale = ldexpf(1, frexpf(scale, &exponent) == 0.5f ? exponent - 1 : exponent);
    if (type != DTYPE_FP32 || scale == 0x1p-126f) *factor = 1 / scale;
    return scale;
}

// A record in the making: call begin, then encode all its blocks in any order, then call end. fp8 takes two passes over
// the matrix: the first finds scales.
typedef struct {
    uint8_t *record;
    QuantFormat format;
    QuantParts parts;
    float *scale;  // [blocks]
    float *factor; // [blocks] of fp8: see quant_fp8_scale
    size_t n;
    int pass;
    const uint8_t *was; // fp8: a record whose blocks are copied if no value of theirs changes; or NULL
    uint8_t *changed;   // [blocks] with `was`: 1 if a value of the block changes
} QuantEncoder;

static int quant_passes(QuantType type) { return type == QUANT_FP8 ? 2 : 1; }

static QuantEncoder quant_encode_begin(uint8_t *record, QuantFormat f, size_t n) {
    QuantEncoder e = {record, f, quant_parts(f, n), NULL, NULL, n, 0, NULL, NULL};
    if (f.type == QUANT_FP8) e.factor = (float *)checked_calloc(e.parts.blocks, sizeof(float), "scales of a matrix");
    e.scale = f.nested ? (float *)checked_calloc(e.parts.blocks, sizeof(float), "scales of a matrix")
                       : (float *)(void *)(record + e.parts.scales);
    memset(record + e.parts.scale_codes - 16, 0, e.parts.bytes - e.parts.scale_codes + 16);
    return e;
}

// Finds the elements of fp8 from element i on that share a scale, up to `end`. Returns the end; *scale: the scale's
// index
static inline size_t quant_fp8_run(QuantFormat f, size_t i, size_t end, size_t *scale) {
    const size_t row = i / f.grid.cols, column = (i - row * f.grid.cols) / f.block;
    *scale = quant_row_scale(f, row) + column;
    return min_size(end, row * f.grid.cols + min_size(f.grid.cols, (column + 1) * f.block));
}

// Takes x[n] = elements of block b of fp8, from element `at` on.
static void quant_fp8_part(const QuantEncoder *e, const float *x, size_t at, size_t n, size_t b) {
    const float *scales = (const float *)(const void *)(e->was + e->parts.scales);
    if (!e->pass) {
        e->scale[b] = fmaxf(e->scale[b], quant_absmax(x, n));
        for (size_t i = 0; e->was && i < n && !e->changed[b]; i++)
            e->changed[b] = quant_round(e->format.rounding, quant_fp8_value(e->was[at + i]) * scales[b]) != x[i];
    } else if (e->was && !e->changed[b]) {
        memcpy(e->record + at, e->was + at, n);
    } else {
        for (size_t i = 0; i < n; i++) e->record[at + i] = quant_fp8_code(x[i] * e->factor[b]);
    }
}

// Ends the pass of fp8 that finds the largest magnitudes.
static void quant_fp8_turn(QuantEncoder *e) {
    for (size_t b = 0; b < e->parts.blocks; b++)
        if (e->was && !e->changed[b])
            memcpy(&e->scale[b], e->was + e->parts.scales + b * sizeof(float), sizeof(float));
        else
            e->scale[b] = quant_fp8_scale(e->scale[b], e->format.grid.scales, &e->factor[b]);
    e->pass = 1;
}

// Encodes in[count], all finite: elements from `begin`, where a block starts, to the end of a block or of the matrix;
// fp8: any elements.
static void quant_encode_part(const QuantEncoder *e, const float *in, size_t begin, size_t count) {
    for (size_t i = begin, end, b; e->format.type == QUANT_FP8 && i < begin + count; i = end) {
        end = quant_fp8_run(e->format, i, begin + count, &b);
        quant_fp8_part(e, in + (i - begin), i, end - i, b);
    }
    if (e->format.type == QUANT_FP8) return;
    const int mxfp4 = e->format.type == QUANT_MXFP4;
    const uint8_t *order = quant_order[mxfp4 ? QUANT_NONE : e->format.type];
    const float *codes = quant_codes[e->format.type];
    const size_t block = e->format.block;
    float bounds[15];
    for (size_t i = 0; i < 15; i++) bounds[i] = (codes[order[i]] + codes[order[i + 1]]) / 2;
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (size_t b = begin / block; b < (begin + count + block - 1) / block; b++) {
        const size_t at = b * block, length = min_size(block, e->n - at);
        if (mxfp4)
            quant_encode_mxfp4(e->record + at / 2, e->record + e->parts.scale_codes + b, in + (at - begin), length);
        else
            e->scale[b] =
                quant_encode_block(e->record + at / 2, bounds, order, in + (at - begin), length, length == block);
    }
}

static void quant_encode_end(QuantEncoder *e) {
    free(e->factor);
    if (!e->format.nested) return;
    quant_encode_scales(e->record, &e->parts, e->scale);
    free(e->scale);
}

// Encodes in[n], all finite, into a record.
static void quant_encode(uint8_t *record, QuantFormat f, const float *in, size_t n) {
    QuantEncoder e = quant_encode_begin(record, f, n);
    quant_encode_part(&e, in, 0, n);
    if (f.type == QUANT_FP8) quant_fp8_turn(&e), quant_encode_part(&e, in, 0, n);
    quant_encode_end(&e);
}

// ---- decoding -------------------------------------------------------------------------------------------------------
// Returns half of 2^(byte - 127). Bytes 0 and 1 give subnormal numbers.
static float quant_mxfp4_scale(uint8_t byte) {
    return bf16_to_float((uint16_t)(byte < 2 ? 0x20u << byte : (byte - 1u) << 7));
}

// Decodes the scales of blocks [begin, begin + count).
static void quant_scales_of(float *scale, QuantFormat f, const uint8_t *record, const QuantParts *p, size_t begin,
                            size_t count) {
    const float *scales = (const float *)(const void *)(record + p->scales), *map = quant_scales()->map;
    float offset = 0;
    if (f.nested) memcpy(&offset, record + p->offset, sizeof(offset));
    if (f.type == QUANT_MXFP4)
        for (size_t i = 0; i < count; i++) scale[i] = quant_mxfp4_scale(record[p->scale_codes + begin + i]);
    else if (!f.nested)
        memcpy(scale, scales + begin, count * sizeof(float));
    for (size_t i = 0; i < count && f.nested; i++) {
        const size_t b = begin + i;
        const volatile float product = map[record[p->scale_codes + b]] * scales[b / QUANT_NESTED_BLOCK];
        scale[i] = product + offset; // volatile, so that it is rounded before the sum
    }
}

// Decodes elements [begin, begin + count) of a matrix of n elements into out[count].
static void quant_decode_range(float *out, QuantFormat f, const uint8_t *record, size_t n, size_t begin, size_t count) {
    const QuantParts p = quant_parts(f, n);
    const float *codes = quant_codes[f.type == QUANT_FP8 ? QUANT_NONE : f.type], *scales;
    scales = (const float *)(const void *)(record + p.scales);
    for (size_t i = begin, end, b; f.type == QUANT_FP8 && i < begin + count; i = end) {
        end = quant_fp8_run(f, i, begin + count, &b);
        for (size_t j = i; j < end; j++)
            out[j - begin] = quant_round(f.rounding, quant_fp8_value(record[j]) * scales[b]);
    }
    if (f.type == QUANT_FP8) return;
    for (size_t i = begin, end; i < begin + count; i = end) {
        float scale;
        end = min_size((i / f.block + 1) * f.block, begin + count);
        quant_scales_of(&scale, f, record, &p, i / f.block, 1);
        for (size_t j = i; j < end; j++)
            out[j - begin] = quant_round(f.rounding, codes[quant_code(f.type, record, j)] * scale);
    }
}

#endif
