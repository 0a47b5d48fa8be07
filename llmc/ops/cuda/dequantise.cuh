/*
Matrices in 4 bits (llmc/base/quantise.h) to floatX, of op set "cuda". A thread takes the 4 bytes of 8 elements, so that
a warp reads and writes without gaps; they share a scale, which is looked up and rounded as quant_scales_of does it.
Bytes moved per element: 1/2, s, and scales: 1/16 (nested 1/64) of blocks of 64.
*/
#ifndef LLMC_CUDA_DEQUANTISE_CUH
#define LLMC_CUDA_DEQUANTISE_CUH
#include "platform.cuh"
#ifndef CUDA_ON_CPU
#include <cuda_fp16.h>
#endif

constexpr size_t CODES_OF_WORD = 8;

struct DequantiseTables {
    float code[16], map[256]; // map: of nested scales
};

#ifdef CUDA_ON_CPU
__device__ inline float fp16_rounded(float value) { return quant_round_fp16(value); }
#else
__device__ inline float fp16_rounded(float value) { return __half2float(__float2half_rn(value)); }
#endif

__device__ inline float block_scale(const uint8_t *record, const QuantParts &p, const float *map, bool nested,
                                    size_t block) {
    const float *scales = (const float *)(record + p.scales);
    if (!nested) return scales[block];
    const float product =
        rounded_product(map[record[p.scale_codes + block]], scales[block / (size_t)QUANT_NESTED_BLOCK]);
    return product + *(const float *)(record + p.offset);
}

template <bool PACKED>
__global__ void dequantise_kernel(floatX *out, const uint8_t *record, QuantFormat format, QuantParts p, unsigned shift,
                                  DequantiseTables tables, size_t n) {
    constexpr int W = full_pack<floatX>;
    SHARED(float, code, 16);
    SHARED(float, map, 256);
    static_assert(LOOP_THREADS == 256);
    map[threadIdx.x] = tables.map[threadIdx.x];
    if (threadIdx.x < 16) code[threadIdx.x] = tables.code[threadIdx.x];
    __syncthreads();
    FOR_EACH_PACK(i, (n + CODES_OF_WORD - 1) / CODES_OF_WORD) {
        const size_t begin = i * CODES_OF_WORD;
        const uint32_t word = ((const uint32_t *)record)[i]; // behind the last code there is padding
        const float scale = block_scale(record, p, map, format.nested, begin >> shift);
        Pack<floatX, W> values[CODES_OF_WORD / W];
        for (unsigned j = 0; j < CODES_OF_WORD; j++) {
            float value = code[word >> (j / 2 * 8 + (j % 2 ? 0 : 4)) & 15] * scale;
            if (format.rounding == DTYPE_BF16) value = bf16_value(bf16_nearest(value));
            if (format.rounding == DTYPE_FP16) value = fp16_rounded(value);
            values[j / W].x[j % W] = store(value);
        }
        if (PACKED && begin + CODES_OF_WORD <= n)
            for (unsigned j = 0; j < CODES_OF_WORD / W; j++) pack_write(out + begin + j * W, values[j]);
        else
            for (unsigned j = 0; j < CODES_OF_WORD && begin + j < n; j++) out[begin + j] = values[j / W].x[j % W];
    }
}

static void cuda_dequantise(Stored *out, const void *record, const QuantFormat *format, size_t n) {
    DequantiseTables tables;
    memcpy(tables.code, quant_codes[format->type], sizeof(tables.code));
    memcpy(tables.map, quant_scales()->map, sizeof(tables.map));
    unsigned shift = 0; // a division by the block's length, which is a power of two
    while ((size_t)1 << shift < format->block) shift++;
    with_flag(all_aligned(out), [&](auto PACKED) {
        LAUNCH((dequantise_kernel<PACKED>), loop_grid(blocks_for(n, CODES_OF_WORD)), LOOP_THREADS, 0)
        ((floatX *)out, (const uint8_t *)record, *format, quant_parts(*format, n), shift, tables, n);
    });
}

#endif
