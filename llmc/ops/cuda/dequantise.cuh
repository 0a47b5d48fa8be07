/*
Decodes quantised matrices (llmc/base/quantise.h) to floatX in op set "cuda". In 4 bits a thread takes the 4 bytes of 8
elements, so that a warp reads and writes without gaps. The 8 elements share a scale, which is looked up and rounded as
quant_scales_of does. Bytes moved per element: 1/2, s, and scales: 1/16 (nested 1/64) of blocks of 64, in mxfp4 1/32.

fp8: a warp decodes a row, FP8_CODES codes of a lane at a time if rows and blocks are made of whole groups, else one. A
product takes a row in the same way. Bytes moved per element: 1 and s.

linear_forward_quantised: a warp computes one element of each of a few rows of out, so it reads a row of codes once;
rows of x are in the caches. Half a warp takes PART elements, which share a scale. Lane k rounds the value of code k,
and the other lanes fetch it by their codes. If rows are not whole parts, a lane takes single elements. A part of mxfp4
has two scales: lane k holds code k's value, which is multiplied by the scale of the lane that fetches it; that is
exact.
*/
#ifndef LLMC_CUDA_DEQUANTISE_CUH
#define LLMC_CUDA_DEQUANTISE_CUH
#include "platform.cuh"
#ifndef CUDA_ON_CPU
#include <cuda_fp16.h>
#endif

constexpr size_t CODES_OF_WORD = 8;

struct DequantiseTables {
    float code[16], map[256]; // map: decodes nested scales
};

#ifdef CUDA_ON_CPU
__device__ inline float fp16_rounded(float value) { return quant_round_fp16(value); }
#else
__device__ inline float fp16_rounded(float value) { return __half2float(__float2half_rn(value)); }
#endif

__device__ inline float block_scale(const uint8_t *record, const QuantParts &p, const float *map, QuantFormat format,
                                    size_t block) {
    const float *scales = (const float *)(record + p.scales);
    if (format.type == QUANT_MXFP4) { // like quant_mxfp4_scale
        const unsigned byte = record[p.scale_codes + block];
        return bf16_value((uint16_t)(byte < 2 ? 0x20u << byte : (byte - 1) << 7));
    }
    if (!format.nested) return scales[block];
    const float product =
        rounded_product(map[record[p.scale_codes + block]], scales[block / (size_t)QUANT_NESTED_BLOCK]);
    return product + *(const float *)(record + p.offset);
}

template <DType ROUNDING> __device__ inline floatX decoded(float code, float scale) {
    const float value = code * scale;
    if (ROUNDING == FLOATX_DTYPE || ROUNDING == DTYPE_FP32) return store(value);
    return store(ROUNDING == DTYPE_BF16 ? bf16_value(bf16_nearest(value)) : fp16_rounded(value));
}

__device__ inline unsigned first_shift(QuantFormat format) { return format.type == QUANT_MXFP4 ? 0 : 4; }

// Returns by how many bits to shift a word of 8 codes right for element j. first: first_shift()
__device__ inline unsigned code_shift(unsigned first, unsigned j) { return j / 2 * 8 + (j % 2 ? 4 - first : first); }

__device__ inline void load_tables(float *code, float *map, const DequantiseTables &tables) {
    static_assert(LOOP_THREADS == 256);
    map[threadIdx.x] = tables.map[threadIdx.x];
    if (threadIdx.x < 16) code[threadIdx.x] = tables.code[threadIdx.x];
    __syncthreads();
}

template <DType ROUNDING, bool PACKED>
__global__ void dequantise_kernel(floatX *out, const uint8_t *record, QuantFormat format, QuantParts p, unsigned shift,
                                  DequantiseTables tables, size_t n) {
    constexpr int W = full_pack<floatX>;
    SHARED(float, code, 16);
    SHARED(float, map, 256);
    load_tables(code, map, tables);
    FOR_EACH_PACK(i, (n + CODES_OF_WORD - 1) / CODES_OF_WORD) {
        const size_t begin = i * CODES_OF_WORD;
        const uint32_t word = ((const uint32_t *)record)[i]; // padding follows the last code
        const float scale = block_scale(record, p, map, format, begin >> shift);
        const unsigned first = first_shift(format);
        Pack<floatX, W> values[CODES_OF_WORD / W];
        for (unsigned j = 0; j < CODES_OF_WORD; j++)
            values[j / W].x[j % W] = decoded<ROUNDING>(code[word >> code_shift(first, j) & 15], scale);
        if (PACKED && begin + CODES_OF_WORD <= n)
            for (unsigned j = 0; j < CODES_OF_WORD / W; j++) pack_write(out + begin + j * W, values[j]);
        else
            for (unsigned j = 0; j < CODES_OF_WORD && begin + j < n; j++) out[begin + j] = values[j / W].x[j % W];
    }
}

// ---- fp8 ------------------------------------------------------------------------------------------------------------
constexpr int FP8_CODES = 4;

// Loads N codes, decoded with their scale and rounded to bf16, then to floatX.
template <int N> __device__ inline Pack<floatX, N> fp8_load(const uint8_t *from, float scale) {
    Pack<floatX, N> values;
    const uint32_t codes = N == 1 ? *from : *(const uint32_t *)from;
    for (int j = 0; j < N; j++)
        values.x[j] = decoded<DTYPE_BF16>(quant_fp8_value((unsigned)(codes >> 8 * j & 255)), scale);
    return values;
}

template <int N>
__global__ void dequantise_fp8_kernel(floatX *out, const uint8_t *record, QuantFormat format, QuantParts p, size_t n) {
    const unsigned lane = threadIdx.x % LANES, cols = (unsigned)format.grid.cols, block = (unsigned)format.block;
    const size_t warps = (size_t)gridDim.x * (LOOP_THREADS / LANES);
    for (size_t row = ((size_t)blockIdx.x * LOOP_THREADS + threadIdx.x) / LANES; row * cols < n; row += warps) {
        const float *const scales = (const float *)(record + p.scales) + quant_row_scale(format, row);
        for (unsigned c = lane * N; c < cols && row * cols + c < n; c += LANES * N) {
            const Pack<floatX, N> values = fp8_load<N>(record + row * cols + c, scales[c / block]);
            if constexpr (N == 1)
                out[row * cols + c] = values.x[0];
            else
                pack_write(out + row * cols + c, values);
        }
    }
}

// Tells whether FP8_CODES elements from a multiple of FP8_CODES on lie in one row and have one scale.
static bool fp8_is_grouped(const QuantFormat *format) {
    return format->grid.cols % FP8_CODES == 0 && (format->block % FP8_CODES == 0 || format->block >= format->grid.cols);
}

// Returns the tables of a launch. *shift: log2 of the block's length
static DequantiseTables dequantise_tables(const QuantFormat *format, unsigned *shift) {
    DequantiseTables tables = {};
    *shift = 0;
    if (format->type == QUANT_FP8) return tables; // decoded without tables
    memcpy(tables.code, quant_codes[format->type], sizeof(tables.code));
    memcpy(tables.map, quant_scales()->map, sizeof(tables.map));
    for (*shift = 0; (size_t)1 << *shift < format->block;) ++*shift;
    return tables;
}

// Calls launch(ROUNDING) with the format's rounding as a constant.
template <typename F> static void with_rounding(const QuantFormat *format, F launch) {
    switch (format->rounding) {
    case DTYPE_BF16: launch(std::integral_constant<DType, DTYPE_BF16>()); break;
    case DTYPE_FP16: launch(std::integral_constant<DType, DTYPE_FP16>()); break;
    default: launch(std::integral_constant<DType, DTYPE_FP32>());
    }
}

static void cuda_dequantise(Stored *out, const void *record, const QuantFormat *format, size_t n) {
    unsigned shift;
    const DequantiseTables tables = dequantise_tables(format, &shift);
    if (format->type == QUANT_FP8) {
        const size_t rows = blocks_for(n, format->grid.cols);
        with_flag(all_aligned(out) && fp8_is_grouped(format), [&](auto GROUPED) {
            LAUNCH((dequantise_fp8_kernel < GROUPED ? FP8_CODES : 1 >), loop_grid(rows * LANES), LOOP_THREADS, 0)
            ((floatX *)out, (const uint8_t *)record, *format, quant_parts(*format, n), n);
        });
        return;
    }
    with_flag(all_aligned(out), [&](auto PACKED) {
        with_rounding(format, [&](auto ROUNDING) {
            LAUNCH((dequantise_kernel<ROUNDING, PACKED>), loop_grid(blocks_for(n, CODES_OF_WORD)), LOOP_THREADS, 0)
            ((floatX *)out, (const uint8_t *)record, *format, quant_parts(*format, n), shift, tables, n);
        });
    });
}

// ---- products of a few rows -----------------------------------------------------------------------------------------
constexpr size_t QUANTISED_ROWS = 8;                      // most rows of a launch
constexpr unsigned PART = QUANT_BLOCK, PARTS_AT_ONCE = 4; // elements of half a warp; number of parts whose codes it
                                                          // reads at once

struct QuantisedMatrix {
    const uint8_t *record;
    QuantFormat format;
    QuantParts parts;
    unsigned shift;
    const float *code, *map; // tables in shared memory
    size_t row;              // index in the record of the row's first element
};

// Scaling of a part. NO_PARTS: rows are not whole parts; EXACT_SCALES: mxfp4's scales; FP8_ONE, FP8_GROUPS: fp8, one
// code or FP8_CODES at a time
enum PartScales { NO_PARTS, ONE_SCALE, EXACT_SCALES, FP8_ONE, FP8_GROUPS };

// Calls f(r, row r of x[n,C] times a row of the matrix) for r < n, in lane 0. One warp computes it. ROWS: at least n
template <DType ROUNDING, PartScales SCALES, int ROWS, typename F>
__device__ inline void quantised_row(const QuantisedMatrix &m, const floatX *x, size_t n, size_t C, F f) {
    constexpr int W = PART * 2 / LANES; // elements per lane
    const unsigned lane = threadIdx.x % LANES, order = first_shift(m.format);
    float sum[ROWS] = {};
    const auto x_row = [=](int r) { return x + ((size_t)r < n ? (size_t)r : n - 1) * C; };
    if constexpr (SCALES >= FP8_ONE) {
        constexpr int N = SCALES == FP8_GROUPS ? FP8_CODES : 1;
        const float *const scales = (const float *)(m.record + m.parts.scales) + quant_row_scale(m.format, m.row / C);
        for (unsigned i = lane * N; i < C; i += LANES * N) {
            const Pack<floatX, N> weight = fp8_load<N>(m.record + m.row + i, scales[i / (unsigned)m.format.block]);
            for (int r = 0; r < ROWS; r++) {
                float values[N];
                if constexpr (N == 1)
                    values[0] = load(x_row(r)[i]);
                else
                    read_wide<N>(values, x_row(r) + i);
                for (int k = 0; k < N; k++) sum[r] += values[k] * load(weight.x[k]);
            }
        }
    } else if constexpr (SCALES != NO_PARTS) {
        constexpr bool EXACT = SCALES == EXACT_SCALES;
        constexpr unsigned BLOCKS = EXACT ? PART / MXFP4_BLOCK : 1; // blocks per part
        const unsigned half = lane / 16, own = lane % 16, parts = (unsigned)(C / PART);
        const uint16_t *const codes = (const uint16_t *)(m.record + m.row / 2) + lane;
        const float own_code = m.code[own];
        for (size_t first = 0; first < parts; first += 2 * PARTS_AT_ONCE) {
            const size_t scaled = first * BLOCKS + lane % (2 * PARTS_AT_ONCE * BLOCKS); // the block whose scale this
                                                                                        // lane looks up
            const size_t element = m.row + (scaled < parts * BLOCKS ? scaled : first * BLOCKS) * (PART / BLOCKS);
            const float scale = block_scale(m.record, m.parts, m.map, m.format, element >> m.shift);
#pragma unroll
            for (unsigned i = 0; i < PARTS_AT_ONCE; i++) {
                const bool there = first + 2 * i + half < parts;
                const unsigned word = there ? codes[first * (PART / W) + i * LANES] : 0;
                const unsigned owner = (2 * i + half) * BLOCKS + own * BLOCKS / 16;
                const float shared = __shfl_sync(ALL_LANES, scale, (int)owner);
                const float value = EXACT ? own_code : load(decoded<ROUNDING>(own_code, shared));
                float weight[W];
                for (unsigned j = 0; j < W; j++) {
                    weight[j] = __shfl_sync(ALL_LANES, value, (int)(word >> code_shift(order, j)), 16);
                    if (EXACT) weight[j] *= shared;
                }
                for (int r = 0; r < ROWS && there; r++) {
                    float values[W];
                    read_wide<W>(values, x_row(r) + (first * PART + lane * W) + i * (LANES * W));
                    for (int j = 0; j < W; j++) sum[r] += values[j] * weight[j];
                }
            }
        }
    } else {
        for (size_t i = lane; i < C; i += LANES) {
            const size_t element = m.row + i;
            const unsigned index = m.record[element / 2] >> code_shift(order, element % 2) & 15;
            const float scale = block_scale(m.record, m.parts, m.map, m.format, element >> m.shift);
            const float weight = load(decoded<ROUNDING>(m.code[index], scale));
            for (int r = 0; r < ROWS; r++) sum[r] += load(x_row(r)[i]) * weight;
        }
    }
    for (int r = 0; r < ROWS; r++) {
        const float all = warp_sum(sum[r]);
        if (lane == 0 && (size_t)r < n) f(r, all);
    }
}

// Computes out = x weight^T from 4-bit weights. begin: index in the record of weight's first element
template <DType ROUNDING, PartScales SCALES, int ROWS>
__global__ void linear_forward_quantised_kernel(floatX *out, const floatX *x, const uint8_t *record, QuantFormat format,
                                                QuantParts p, unsigned shift, DequantiseTables tables, size_t begin,
                                                const floatX *bias, const floatX *residual, size_t n, size_t C,
                                                size_t OC, size_t stride) {
    SHARED(float, code, 16);
    SHARED(float, map, 256);
    load_tables(code, map, tables);
    const size_t o = (size_t)blockIdx.x * (LOOP_THREADS / LANES) + threadIdx.x / LANES;
    if (o >= OC) return;
    const QuantisedMatrix matrix = {record, format, p, shift, code, map, begin + o * C};
    quantised_row<ROUNDING, SCALES, ROWS>(matrix, x, n, C, [&](int r, float sum) {
        const size_t at = (size_t)r * stride + o;
        out[at] = store(sum + (bias ? load(bias[o]) : 0.0f) + (residual ? load(residual[at]) : 0.0f));
    });
}

// Calls launch(ROUNDING, SCALES) with constants for rows of C elements.
template <typename F> static void with_parts(const QuantFormat *format, size_t C, const void *x, F launch) {
    const bool whole = C % PART == 0 && all_aligned(x);
    if (format->type == QUANT_FP8)
        return with_flag(all_aligned(x) && fp8_is_grouped(format), [&](auto GROUPED) {
            launch(std::integral_constant<DType, DTYPE_BF16>(), std::integral_constant < PartScales,
                   GROUPED ? FP8_GROUPS : FP8_ONE > ());
        });
    if (whole && format->type == QUANT_MXFP4 && format->rounding != DTYPE_FP16) // exact except when rounding to fp16
        return launch(std::integral_constant<DType, DTYPE_FP32>(), std::integral_constant<PartScales, EXACT_SCALES>());
    with_flag(whole && format->block >= PART, [&](auto WHOLE) {
        with_rounding(format, [&](auto ROUNDING) {
            launch(ROUNDING, std::integral_constant < PartScales, WHOLE ? ONE_SCALE : NO_PARTS > ());
        });
    });
}

static void cuda_linear_forward_quantised(Stored *out, const Stored *x, const void *record, const QuantFormat *format,
                                          size_t rows, size_t first, const Stored *bias, const Stored *residual,
                                          size_t n, size_t C, size_t OC, size_t stride) {
    unsigned shift;
    const DequantiseTables tables = dequantise_tables(format, &shift);
    const dim3 grid((unsigned)blocks_for(OC, LOOP_THREADS / LANES));
    for (size_t token = 0; token < n; token += QUANTISED_ROWS) {
        const size_t count = min_size(QUANTISED_ROWS, n - token);
        const floatX *in = (const floatX *)x + token * C;
        const floatX *added = residual ? (const floatX *)residual + token * stride : NULL;
        with_parts(format, C, in, [&](auto ROUNDING, auto SCALES) {
            const auto launch = [&](auto kernel_rows) {
                constexpr int ROWS = kernel_rows;
                LAUNCH((linear_forward_quantised_kernel<ROUNDING, SCALES, ROWS>), grid, LOOP_THREADS, 0)
                ((floatX *)out + token * stride, in, (const uint8_t *)record, *format, quant_parts(*format, rows * C),
                 shift, tables, first * C, (const floatX *)bias, added, count, C, OC, stride);
            };
            if (count == 1)
                launch(Width<1>());
            else if (count <= 4)
                launch(Width<4>());
            else
                launch(Width<(int)QUANTISED_ROWS>());
        });
    }
}

#endif
