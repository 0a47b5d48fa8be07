/*
The register tile of small matrix products: of attention's blocks (attention_block.h) and of linear attention's
(delta_block.h). With 64-byte vectors and 32 registers it is 8 rows x 3 vectors of sums, with 3 loaded vectors and a
broadcast: 24 multiply-adds for 11 loads. The right operand is walked in panels of 3 vectors; 128 keys or dimensions x
192 bytes are 24 KiB, half of a 48 KiB L1 cache, and all rows reuse them.
*/
#ifndef LLMC_CPU_TILE_H
#define LLMC_CPU_TILE_H
#include "llmc/base/utils.h"
#include "vector.h"

#if VECTOR_BYTES == 64 || defined(__aarch64__) // 32 vector registers; else 16
#define TILE_ROWS 8
#else
#define TILE_ROWS 4
#endif
#define TILE_VECTORS 3

// Blocks are padded to a multiple of this many rows: whole tiles, and whole vectors where they are transposed.
#define ROW_MULTIPLE (VECTOR_LANES > TILE_ROWS ? VECTOR_LANES : TILE_ROWS)

// Returns the length of a packed row: an odd number of cache lines, so that a panel's rows spread over all cache sets.
static inline size_t packed_width(size_t HD) { return (((HD + CACHE_LINE - 1) / CACHE_LINE) | 1) * CACHE_LINE; }

static floatS *cache_line_aligned(void *scratch) { return (floatS *)(((uintptr_t)scratch + 63) / 64 * 64); }

// Computes sum[TILE_ROWS][vectors] = sum over i < length of a[r * a_row + i * a_step] * b[i][vectors].
VECTOR_INLINE void tile_sums(Vector sum[TILE_ROWS][TILE_VECTORS], const floatS *a, size_t a_row, size_t a_step,
                             const floatS *b, size_t b_stride, size_t length, int vectors) {
    Vector right[TILE_VECTORS];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = (Vector){0};
    for (size_t i = 0; i < length; i++) {
        for (int v = 0; v < TILE_VECTORS; v++)
            if (v < vectors) right[v] = vector_load(b + i * b_stride + v * VECTOR_LANES);
        for (int r = 0; r < TILE_ROWS; r++)
            for (int v = 0; v < TILE_VECTORS; v++)
                if (v < vectors) sum[r][v] += a[r * a_row + i * a_step] * right[v];
    }
}

// Computes c[TILE_ROWS][vectors] = (or += with accumulate) tile_sums. A new sum is added to c at the end: the rounding
// error grows with the number of blocks, not of terms.
VECTOR_INLINE void tile_product(floatS *c, size_t c_stride, const floatS *a, size_t a_row, size_t a_step,
                                const floatS *b, size_t b_stride, size_t length, int vectors, int accumulate) {
    Vector sum[TILE_ROWS][TILE_VECTORS];
    tile_sums(sum, a, a_row, a_step, b, b_stride, length, vectors);
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++)
            if (v < vectors) {
                floatS *out = c + r * c_stride + v * VECTOR_LANES;
                vector_store(out, accumulate ? vector_load(out) + sum[r][v] : sum[r][v]);
            }
}

// Runs tile_product for a number of vectors that is known only at run time.
VECTOR_INLINE void tile_product_of(floatS *c, size_t c_stride, const floatS *a, size_t a_row, size_t a_step,
                                   const floatS *b, size_t b_stride, size_t length, size_t vectors, int accumulate) {
    switch (vectors) {
    case 1: tile_product(c, c_stride, a, a_row, a_step, b, b_stride, length, 1, accumulate); break;
    case 2: tile_product(c, c_stride, a, a_row, a_step, b, b_stride, length, 2, accumulate); break;
    default: tile_product(c, c_stride, a, a_row, a_step, b, b_stride, length, TILE_VECTORS, accumulate); break;
    }
}

// Returns the vectors of the next panel, with `columns` left. Panels are even: 4 vectors are 2 + 2, not 3 + 1.
static inline size_t panel_vectors(size_t columns) {
    const size_t vectors = (columns + VECTOR_LANES - 1) / VECTOR_LANES;
    const size_t panels = (vectors + TILE_VECTORS - 1) / TILE_VECTORS;
    return (vectors + panels - 1) / panels;
}

#endif
