/*
Attention's blocks on processors with AMX (bf16 build): the five products use tiles of 16 x 16 sums of 32 products of
bf16. Blocks are packed as bf16, in the scratch memory of attention_block.h's fp32. q, k, v and dout are used unscaled;
weights and dscores are rounded to bf16 before they are multiplied; sums are fp32.

The right operand of a tile product has its rows in pairs: word [i][j] holds elements [2 i][j] and [2 i + 1][j]. So

    scores = q k^T        dweights = dout v^T       k and v with transposed words
    out = weights v       dq = dscores k            v and k with rows in pairs
    dv^T = dout^T weights dk^T = q^T dscores        weights and dscores with rows in pairs, q and dout transposed

Denormals count as 0. BLOCK_KEYS and BLOCK_ROWS are multiples of AMX_SIDE; HD must be a multiple of AMX_SIDE, too.

Measured on an Intel Xeon with AMX, 2 cores, HD = 128, T = 2048 and 8192: about 4 times the rate of the fp32 tiles.
*/
#ifndef LLMC_CPU_ATTENTION_AMX_H
#define LLMC_CPU_ATTENTION_AMX_H
#include "attention_block.h"
#if defined(PRECISION_BF16) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define ATTENTION_AMX
#include <sys/syscall.h>
#include <unistd.h>

#define AMX_SIDE 32 // rows and columns of a result of 2 x 2 tiles, and the depth of a step

// Asks Linux for permission to use tiles. Returns 0 if it refuses or does not know tiles.
static int amx_allowed(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    static int asked, allowed;
    if (!asked) asked = 1, allowed = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
    return allowed;
}

// Configures eight tiles of 16 rows of 64 bytes; call in each thread before its products. amx_end releases them, so
// that thread switches stay cheap.
static void amx_begin(void) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&tiles);
}
static void amx_end(void) { _tile_release(); }

// Computes c[32][32] = (or += with accumulate) a[32][32 steps] b[32 steps][32]. Strides are in bytes; b's rows are in
// pairs.
static void amx_product(floatS *c, size_t c_stride, const void *a, size_t a_stride, const void *b, size_t b_stride,
                        size_t steps, int accumulate) {
    const char *left = (const char *)a, *right = (const char *)b;
    char *out = (char *)c;
    __asm__ volatile("" ::: "memory"); // gcc does not know that tile loads read memory that was stored before
    if (accumulate) {
        _tile_loadd(0, out, c_stride);
        _tile_loadd(1, out + 64, c_stride);
        _tile_loadd(2, out + 16 * c_stride, c_stride);
        _tile_loadd(3, out + 16 * c_stride + 64, c_stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (size_t s = 0; s < steps; s++, left += 64, right += 16 * b_stride) {
        _tile_loadd(4, left, a_stride);
        _tile_loadd(6, right, b_stride);
        _tile_loadd(7, right + 64, b_stride);
        _tile_loadd(5, left + 16 * a_stride, a_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, c_stride);
    _tile_stored(1, out + 64, c_stride);
    _tile_stored(2, out + 16 * c_stride, c_stride);
    _tile_stored(3, out + 16 * c_stride + 64, c_stride);
}

// ---- packing --------------------------------------------------------------------------------------------------------

// Packs block[rows][HD] = x, with block_pack's parameters. Zero rows fill it up to a multiple of AMX_SIDE.
static void amx_pack(floatX *block, const floatX *x, size_t tokens, size_t heads, size_t stride, size_t HD) {
    const size_t rows = tokens * heads;
    for (size_t r = 0; r < rows; r++)
        memcpy(block + r * HD, x + r / heads * stride + r % heads * HD, HD * sizeof(floatX));
    memset(block + rows * HD, 0, (round_up(rows, AMX_SIDE) - rows) * HD * sizeof(floatX));
}

// Stores out[HD / 2][BLOCK_KEYS] = the transposed words of block[keys][HD].
static VECTOR_FUNCTION void amx_transpose(floatS *out, const floatX *block, size_t keys, size_t HD) {
    for (size_t i = 0; i < HD / 2; i += VECTOR_LANES)
        for (size_t j = 0; j < keys; j += VECTOR_LANES)
            vector_transpose(out + i * BLOCK_KEYS + j, BLOCK_KEYS, (const floatS *)(block + j * HD) + i, HD / 2);
}

// Interleaves rows `row` and row + HD, in pairs.
VECTOR_INLINE Vector amx_pair(const floatX *row, size_t HD) {
    const VectorBits low = (VectorBits)vector_load_stored(row), high = (VectorBits)vector_load_stored(row + HD);
    return (Vector)(low >> 16 | high);
}

// Stores out[rows / 2][HD] = block[rows][HD] with rows in pairs.
static VECTOR_FUNCTION void amx_pair_rows(floatS *out, const floatX *block, size_t rows, size_t HD) {
    for (size_t r = 0; r < rows; r += 2, out += HD)
        for (size_t d = 0; d < HD; d += VECTOR_LANES) vector_store(out + d, amx_pair(block + r * HD + d, HD));
}

// Stores out[rows / 32][HD][32] = block[rows][HD]: every AMX_SIDE rows transposed.
static VECTOR_FUNCTION void amx_transpose_rows(floatX *out, const floatX *block, size_t rows, size_t HD) {
    floatS square[VECTOR_LANES * VECTOR_LANES];
    for (size_t r = 0; r < rows; r += AMX_SIDE)
        for (size_t d = 0; d < HD; d += VECTOR_LANES) {
            for (size_t i = 0; i < VECTOR_LANES; i++)
                vector_store(square + i * VECTOR_LANES, amx_pair(block + (r + 2 * i) * HD + d, HD));
            vector_transpose((floatS *)(out + r * HD + d * AMX_SIDE), AMX_SIDE / 2, square, VECTOR_LANES);
        }
}

// Returns the dot product a . b of two rows of bf16.
static VECTOR_FUNCTION floatS amx_row_dot(const floatX *a, const floatX *b, size_t HD) {
    Vector sum = {0};
    for (size_t d = 0; d < HD; d += VECTOR_LANES) sum += vector_load_stored(a + d) * vector_load_stored(b + d);
    return vector_sum_across(sum);
}

// ---- products: rows is a multiple of AMX_SIDE; seen and hidden as in attention_block.h ------------------------------

// Returns how many keys the product of row r reads.
static inline size_t amx_extent(const size_t *seen, size_t r) {
    return round_up(seen[r - r % AMX_SIDE + AMX_SIDE - 1], AMX_SIDE);
}

// Computes scores[r][j] = a[r] . b[j] for a[rows][HD] and b with transposed words.
static void amx_scores(floatS *scores, const floatX *a, const floatS *b, const size_t *seen, size_t rows, size_t HD) {
    for (size_t key = 0; key < amx_extent(seen, rows - 1); key += AMX_SIDE)
        for (size_t r = 0; r < rows; r += AMX_SIDE)
            if (key < amx_extent(seen, r))
                amx_product(scores + r * SCORE_STRIDE + key, SCORE_STRIDE * 4, a + r * HD, HD * 2, b + key,
                            BLOCK_KEYS * 4, HD / 32, 0);
}

// Adds to out[r] the sum over j of weights[r][j] * b[j]. out[rows][width]; rows of weights are `stride` bytes apart;
// b's rows are in pairs
static void amx_apply(floatS *out, const void *weights, size_t stride, const floatS *b, const size_t *seen, size_t rows,
                      size_t HD) {
    const size_t width = packed_width(HD);
    for (size_t d = 0; d < HD; d += AMX_SIDE)
        for (size_t r = 0; r < rows; r += AMX_SIDE)
            amx_product(out + r * width + d, width * 4, (const char *)weights + r * stride, stride, b + d, HD * 4,
                        amx_extent(seen, r) / 32, 1);
}

// Adds to out[d][j] the sum over r of b[r][d] * weights[r][j]. out[HD][BLOCK_KEYS]; every 32 rows of b are transposed;
// weights are in pairs, their rows 2 SCORE_STRIDE words apart
static void amx_apply_transposed(floatS *out, const floatS *weights, const floatX *b, const size_t *seen, size_t rows,
                                 size_t HD) {
    for (size_t key = 0, first = 0; key < amx_extent(seen, rows - 1); key += AMX_SIDE) {
        while (amx_extent(seen, first) <= key) first += AMX_SIDE;
        for (size_t d = 0; d < HD; d += AMX_SIDE) {
            for (size_t r = first; r < rows; r += AMX_SIDE)
                amx_product(out + d * BLOCK_KEYS + key, BLOCK_KEYS * 4, b + r * HD + d * AMX_SIDE, 64,
                            weights + r * SCORE_STRIDE + key, 2 * SCORE_STRIDE * 4, 1, 1);
        }
    }
}

// ---- softmax --------------------------------------------------------------------------------------------------------

// Rounds `low` and `high` to bf16, low's lanes first.
VECTOR_INLINE VectorBits amx_round(Vector low, Vector high) {
    return (VectorBits)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// Runs block_largest and block_weights, but with bf16 results: scores (times scale, to base 2) become weights at the
// start of each row.
static VECTOR_FUNCTION void amx_weights(floatS *scores, floatS *out, floatS *folded, floatS *largest, double *sum,
                                        const size_t *seen, const size_t *hidden, size_t rows, size_t HD,
                                        floatS scale) {
    const size_t width = packed_width(HD);
    const Vector unseen = vector_of(-(floatS)INFINITY);
    for (size_t r = 0; r < rows; r++) {
        floatS *row = scores + r * SCORE_STRIDE;
        const size_t extent = amx_extent(seen, r);
        Vector most = unseen, total = {0};
        for (size_t j = 0; j < extent; j += VECTOR_LANES) {
            Vector score = vector_load(row + j) * scale;
            if (j + VECTOR_LANES > seen[r] || j < hidden[r])
                score = vector_select(lanes_seen(seen[r], hidden[r], j), score, unseen);
            vector_store(row + j, score);
            most = vector_max(score, most);
        }
        row_raise(vector_max_across(most), largest + r, sum + r, out + r * width, folded ? folded + r * width : NULL,
                  HD);
        for (size_t j = 0; j < extent; j += 2 * VECTOR_LANES) {
            Vector weight[2];
            for (size_t v = 0; v < 2; v++) {
                const size_t at = j + v * VECTOR_LANES;
                weight[v] = vector_exp2(vector_load(row + at) - largest[r]);
                if (at + VECTOR_LANES > seen[r] || at < hidden[r])
                    weight[v] = (Vector)((VectorBits)weight[v] & lanes_seen(seen[r], hidden[r], at));
                total += weight[v];
            }
            vector_store(row + j / 2, (Vector)amx_round(weight[0], weight[1]));
        }
        sum[r] += (double)vector_sum_across(total);
    }
}

// Runs block_softmax_backward, but with bf16 results: weights replace scores and dscores replace dweights, both with
// rows in pairs. dscores[rows][BLOCK_KEYS] gets them by rows, too.
static VECTOR_FUNCTION void amx_softmax_backward(floatS *scores, floatS *dweights, floatX *dscores, const floatS *lse,
                                                 const floatS *delta, const size_t *seen, const size_t *hidden,
                                                 size_t rows, floatS scale) {
    const __m512i in_pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                              6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (size_t r = 0; r < rows; r += 2) {
        floatS *row = scores + r * SCORE_STRIDE, *drow = dweights + r * SCORE_STRIDE;
        const size_t extent = amx_extent(seen, r);
        for (size_t j = 0; j < extent; j += VECTOR_LANES) {
            Vector p[2], ds[2];
            for (size_t i = 0; i < 2; i++) {
                p[i] = vector_exp2(vector_load(row + i * SCORE_STRIDE + j) * scale - lse[r + i]);
                ds[i] = p[i] * (vector_load(drow + i * SCORE_STRIDE + j) - delta[r + i]);
                if (j + VECTOR_LANES > seen[r + i] || j < hidden[r + i]) {
                    const VectorBits mask = lanes_seen(seen[r + i], hidden[r + i], j);
                    p[i] = (Vector)((VectorBits)p[i] & mask);
                    ds[i] = (Vector)((VectorBits)ds[i] & mask);
                }
            }
            const VectorBits weights = amx_round(p[0], p[1]), both = amx_round(ds[0], ds[1]);
            memcpy(dscores + r * BLOCK_KEYS + j, &both, sizeof(both) / 2);
            memcpy(dscores + (r + 1) * BLOCK_KEYS + j, (const char *)&both + sizeof(both) / 2, sizeof(both) / 2);
            vector_store(row + j, (Vector)_mm512_permutexvar_epi16(in_pairs, (__m512i)weights));
            vector_store(drow + j, (Vector)_mm512_permutexvar_epi16(in_pairs, (__m512i)both));
        }
    }
}

#endif
#endif
