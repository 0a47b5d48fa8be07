/*
Attention on blocks packed in a thread's scratch memory: at most BLOCK_ROWS query rows against BLOCK_KEYS keys. The work
is three small matrix products, all on one register tile, and an exponential between them. Query rows are tokens x the
query heads of one key/value head, so a key block serves the whole group.

seen[r] is the number of a block's keys up to row r's own (causality), hidden[r] the number before its window; neither
falls with r. A tile of TILE_ROWS rows computes as many keys as its last row sees; weight 0 then masks keys that a row
does not see. 0 times NaN is NaN: a NaN or infinite value of one token reaches up to TILE_ROWS - 1 rows before it. This
is harmless, because a run with such values is stopped.

Sizes. The tile is the one of tile.h. A block's keys, their transposes, dk and dv (72 KiB each for HD = 128) and the
scores (36 KiB) stay in L2. 192 keys, or 128 rows, were not faster; 64 keys were slower.
*/
#ifndef LLMC_CPU_ATTENTION_BLOCK_H
#define LLMC_CPU_ATTENTION_BLOCK_H
#include "llmc/base/utils.h"
#include "tile.h"

#define BLOCK_KEYS 128
#define BLOCK_ROWS 64

// Elements from row to row of the scores: an odd number of cache lines (see packed_width)
#define SCORE_STRIDE (BLOCK_KEYS + CACHE_LINE)

// ---- the three products: rows is a multiple of TILE_ROWS; packed blocks are padded to whole tiles ------------------

// Computes scores[r][j] = a[r] . b[j] for the keys j that r's tile sees. a[rows][HD] is packed, bt[HD][SCORE_STRIDE]
// transposed.
static VECTOR_FUNCTION void block_scores(floatS *scores, const floatS *a, const floatS *bt, const size_t *seen,
                                         size_t rows, size_t HD) {
    const size_t width = packed_width(HD), most = seen[rows - 1];
    for (size_t key = 0, vectors; key < most; key += vectors * VECTOR_LANES) {
        vectors = panel_vectors(most - key);
        for (size_t r = 0; r < rows; r += TILE_ROWS) {
            const size_t end = seen[r + TILE_ROWS - 1];
            if (end <= key) continue;
            tile_product_of(scores + r * SCORE_STRIDE + key, SCORE_STRIDE, a + r * width, width, 1, bt + key,
                            SCORE_STRIDE, HD, min_size(vectors, (end - key + VECTOR_LANES - 1) / VECTOR_LANES), 0);
        }
    }
}

// Adds to out[r] the sum over the keys j that r's tile sees of weights[r][j] * b[j]. out[rows][HD] and b[keys][HD] are
// packed.
static VECTOR_FUNCTION void block_apply(floatS *out, const floatS *weights, const floatS *b, const size_t *seen,
                                        size_t rows, size_t HD) {
    const size_t width = packed_width(HD);
    for (size_t d = 0, vectors; d < HD; d += vectors * VECTOR_LANES) {
        vectors = panel_vectors(HD - d);
        for (size_t r = 0; r < rows; r += TILE_ROWS)
            tile_product_of(out + r * width + d, width, weights + r * SCORE_STRIDE, SCORE_STRIDE, 1, b + d, width,
                            seen[r + TILE_ROWS - 1], vectors, 1);
    }
}

// Adds to out[j] the sum over the first `rows` rows r that see key j of weights[r][j] * b[r]. rows is not rounded up to
// whole tiles here.
static VECTOR_FUNCTION void block_apply_transposed(floatS *out, const floatS *weights, const floatS *b,
                                                   const size_t *seen, size_t rows, size_t HD) {
    const size_t width = packed_width(HD), most = seen[rows - 1];
    for (size_t d = 0, vectors; d < HD; d += vectors * VECTOR_LANES) {
        vectors = panel_vectors(HD - d);
        for (size_t key = 0, first = 0; key < most; key += TILE_ROWS) {
            while (seen[first + TILE_ROWS - 1] <= key) first += TILE_ROWS;
            tile_product_of(out + key * width + d, width, weights + first * SCORE_STRIDE + key, 1, SCORE_STRIDE,
                            b + first * width + d, width, rows - first, vectors, 1);
        }
    }
}

// ---- softmax --------------------------------------------------------------------------------------------------------

// Returns how many keys the products of row r read: the keys its tile sees, in whole vectors (and whole tiles of keys).
static inline size_t row_extent(const size_t *seen, size_t r) {
    return round_up(seen[r - r % TILE_ROWS + TILE_ROWS - 1], ROW_MULTIPLE);
}

// Returns the mask of keys j, j + 1, ... before key `end`.
VECTOR_INLINE VectorBits lanes_before(size_t end, size_t j) { return vector_first_lanes(end > j ? end - j : 0); }

// Returns the mask of keys j, j + 1, ... that a row sees.
VECTOR_INLINE VectorBits lanes_seen(size_t seen, size_t hidden, size_t j) {
    return lanes_before(seen, j) & ~lanes_before(hidden, j);
}

// Scales a row: row[HD] *= factor
VECTOR_INLINE void row_scale(floatS *row, Vector factor, size_t HD) {
    for (size_t d = 0; d < HD; d += VECTOR_LANES) vector_store(row + d, vector_load(row + d) * factor);
}

// Raises a row's largest score. If it grows, rescales the row's sum and its unfinished output: the folded part (NULL:
// none yet) and the rest.
VECTOR_INLINE void row_raise(floatS now, floatS *largest, double *sum, floatS *out, floatS *folded, size_t HD) {
    if (!(now > *largest)) return;
    const Vector shrink = vector_exp2(vector_of(*largest - now));
    row_scale(out, shrink, HD);
    if (folded) row_scale(folded, shrink, HD);
    *sum *= (double)shrink[0];
    *largest = now;
}

// Updates the rows' largest scores (row_raise). Scores of unseen keys become -inf.
static VECTOR_FUNCTION void block_largest(floatS *scores, floatS *out, floatS *folded, floatS *largest, double *sum,
                                          const size_t *seen, const size_t *hidden, size_t rows, size_t HD) {
    const size_t width = packed_width(HD);
    const Vector unseen = vector_of(-(floatS)INFINITY);
    for (size_t r = 0; r < rows; r++) {
        floatS *row = scores + r * SCORE_STRIDE;
        const size_t extent = row_extent(seen, r);
        Vector most = vector_of(largest[r]);
        for (size_t j = 0; j < hidden[r]; j += VECTOR_LANES)
            vector_store(row + j, vector_select(lanes_before(hidden[r], j), unseen, vector_load(row + j)));
        for (size_t j = seen[r] - seen[r] % VECTOR_LANES; j < extent; j += VECTOR_LANES)
            vector_store(row + j, vector_select(lanes_before(seen[r], j), vector_load(row + j), unseen));
        for (size_t j = 0; j < extent; j += VECTOR_LANES) most = vector_max(vector_load(row + j), most);
        row_raise(vector_max_across(most), largest + r, sum + r, out + r * width, folded ? folded + r * width : NULL,
                  HD);
    }
}

// Turns scores (to base 2) into weights relative to the row's largest score; 0 for unseen keys.
static VECTOR_FUNCTION void block_weights(floatS *scores, const floatS *largest, double *sum, const size_t *seen,
                                          const size_t *hidden, size_t rows) {
    for (size_t r = 0; r < rows; r++) {
        floatS *row = scores + r * SCORE_STRIDE;
        const size_t extent = row_extent(seen, r);
        Vector total = {0};
        for (size_t j = 0; j < extent; j += VECTOR_LANES) {
            Vector weight = vector_exp2(vector_load(row + j) - largest[r]);
            if (j + VECTOR_LANES > seen[r] || j < hidden[r])
                weight = (Vector)((VectorBits)weight & lanes_seen(seen[r], hidden[r], j));
            vector_store(row + j, weight);
            total += weight;
        }
        sum[r] += (double)vector_sum_across(total);
    }
}

// Moves out into the folded part: folded = (or += with accumulate) out, out = 0; [rows][HD] packed
static VECTOR_FUNCTION void block_fold(floatS *folded, floatS *out, size_t rows, size_t HD, int accumulate) {
    for (size_t i = 0; i < rows * packed_width(HD); i += VECTOR_LANES) {
        const Vector fresh = vector_load(out + i);
        vector_store(folded + i, accumulate ? vector_load(folded + i) + fresh : fresh);
        vector_store(out + i, (Vector){0});
    }
}

// Runs softmax backward. In: scores (to base 2) and dweights = dout v^T. Out: weights p = 2^(score - lse), and dscores
// = p * (dweights - delta) in place of dweights; both 0 for unseen keys.
static VECTOR_FUNCTION void block_softmax_backward(floatS *scores, floatS *dweights, const floatS *lse,
                                                   const floatS *delta, const size_t *seen, const size_t *hidden,
                                                   size_t rows) {
    for (size_t r = 0; r < rows; r++) {
        floatS *row = scores + r * SCORE_STRIDE, *drow = dweights + r * SCORE_STRIDE;
        const size_t extent = row_extent(seen, r);
        for (size_t j = 0; j < extent; j += VECTOR_LANES) {
            Vector p = vector_exp2(vector_load(row + j) - lse[r]), ds = p * (vector_load(drow + j) - delta[r]);
            if (j + VECTOR_LANES > seen[r] || j < hidden[r]) {
                const VectorBits mask = lanes_seen(seen[r], hidden[r], j);
                p = (Vector)((VectorBits)p & mask);
                ds = (Vector)((VectorBits)ds & mask);
            }
            vector_store(row + j, p);
            vector_store(drow + j, ds);
        }
    }
}

// Returns the dot product a . b of two packed rows.
static VECTOR_FUNCTION floatS row_dot(const floatS *a, const floatS *b, size_t HD) {
    Vector sum = {0};
    for (size_t d = 0; d < HD; d += VECTOR_LANES) sum += vector_load(a + d) * vector_load(b + d);
    return vector_sum_across(sum);
}

// ---- packing --------------------------------------------------------------------------------------------------------

// tokens that are prefetched ahead: rows of consecutive tokens are too far apart for the processor's own prefetching
#define PREFETCH_TOKENS 8

// Packs block[tokens * heads][HD] = scale * x. In x a token's heads are contiguous and tokens `stride` elements apart.
// Zeros pad HD to whole vectors, and the rows to whole tiles and vectors.
static VECTOR_FUNCTION void block_pack(floatS *block, const floatX *x, size_t tokens, size_t heads, size_t stride,
                                       size_t HD, floatS scale) {
    const size_t width = packed_width(HD), rows = tokens * heads, whole = HD - HD % VECTOR_LANES;
    for (size_t r = 0; r < rows; r++) {
        const size_t t = r / heads;
        const floatX *from = x + t * stride + r % heads * HD;
        floatS *row = block + r * width;
        if (t + PREFETCH_TOKENS < tokens)
            for (size_t d = 0; d < HD; d += 64 / sizeof(floatX))
                __builtin_prefetch(from + PREFETCH_TOKENS * stride + d);
        for (size_t d = 0; d < whole; d += VECTOR_LANES) vector_store(row + d, scale * vector_load_stored(from + d));
        if (whole == HD) continue;
        vector_store(row + whole, (Vector){0});
        for (size_t d = whole; d < HD; d++) row[d] = scale * load(from[d]);
    }
    for (size_t r = rows; r < round_up(rows, ROW_MULTIPLE); r++)
        for (size_t d = 0; d < HD; d += VECTOR_LANES) vector_store(block + r * width + d, (Vector){0});
}

// Destination of rows of out or dq: rounded elements, or sums
typedef struct {
    floatX *stored;
    floatS *sums;   // used if `stored` is NULL
    int accumulate; // 1: adds to the sums
} RowResult;

// Stores row `place` of a result = scale * the sum, in order, of `count` packed rows that are `stride` elements apart.
static VECTOR_FUNCTION void block_unpack(RowResult to, size_t place, const floatS *row, size_t stride, size_t count,
                                         size_t HD, double scale) {
    for (size_t d = 0; d < HD; d += VECTOR_LANES) {
        Vector sum = vector_load(row + d);
        for (size_t i = 1; i < count; i++) sum += vector_load(row + d + i * stride);
        sum *= (floatS)scale;
        if (to.stored && d + VECTOR_LANES <= HD) {
            vector_store_stored(to.stored + place * HD + d, sum);
            continue;
        }
        for (size_t lane = 0; lane < VECTOR_LANES && d + lane < HD; lane++) {
            const size_t at = place * HD + d + lane;
            if (to.stored)
                to.stored[at] = store(sum[lane]);
            else
                to.sums[at] = to.accumulate ? to.sums[at] + sum[lane] : sum[lane];
        }
    }
}

// Stores bt[HD][SCORE_STRIDE] = the transpose of a packed block[keys][HD]. keys are rounded up to whole vectors.
static VECTOR_FUNCTION void block_transpose(floatS *bt, const floatS *block, size_t keys, size_t HD) {
    const size_t width = packed_width(HD);
    for (size_t d = 0; d < HD; d += VECTOR_LANES)
        for (size_t j = 0; j < keys; j += VECTOR_LANES)
            vector_transpose(bt + d * SCORE_STRIDE + j, SCORE_STRIDE, block + j * width + d, width);
}

#endif
