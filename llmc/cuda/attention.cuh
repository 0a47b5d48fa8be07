/*
Attention of op set "cuda" without cuDNN, and the check of the path with it: queries of one chunk against the keys of their
documents, causal, any ratio of query to key/value heads, in the manner of FlashAttention-2 (arXiv 2307.08691): tiles of keys pass
by, softmax is kept up to date with the largest score so far, and no matrix of scores is ever stored.

Forward and dq: a block holds queries of one head, 16 a warp, and walks the keys they see. dk, dv: a block holds keys of one
key/value head, 16 a warp or a pair of warps, and walks the queries that see them, for every query head that shares them, then adds
to dk and dv once. A sum has one owner, so there are no atomics; scores are computed once more than an implementation with atomics
would. Head sizes are padded to the next of with_head_size; what is padded is zero and is not stored.
*/
#ifndef LLMC_CUDA_ATTENTION_CUH
#define LLMC_CUDA_ATTENTION_CUH
#include "mma.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// ---- blocks of spans: a launch takes up to MOST_SPANS of them as an argument -----------------------------------------------------------
constexpr unsigned MOST_SPANS = 64;

struct SpanBlocks {
    Span span[MOST_SPANS];
    unsigned first[MOST_SPANS + 1]; // block of each span, the last being their number
    unsigned count;
    size_t window; // keys that a query sees at most; SIZE_MAX: all
};

struct SpanBlock {
    Span span;
    size_t begin;  // of the block's queries or keys
    size_t origin; // the token that would be row 0 of q, out, lse: maybe before the stream, as unsigned numbers wrap
};

__host__ __device__ inline size_t first_key_in(size_t document, size_t t, size_t window) {
    return t - document >= window ? t + 1 - window : document;
}

// by_keys: blocks of `size` keys that a query of the span sees, otherwise of its queries [begin, end)
static size_t span_blocks(SpanBlocks *blocks, Spans spans, size_t from, unsigned size, bool by_keys) {
    blocks->count = 0, blocks->first[0] = 0;
    blocks->window = spans.window ? spans.window : SIZE_MAX;
    for (; from < spans.count && blocks->count < MOST_SPANS; from++) {
        const Span span = spans.span[from];
        const size_t length =
            span.end - (by_keys ? first_key_in(span.document, span.begin, blocks->window) : span.begin);
        blocks->span[blocks->count] = span;
        blocks->first[blocks->count + 1] = blocks->first[blocks->count] + (unsigned)blocks_for(length, size);
        blocks->count++;
    }
    return from;
}

// The last blocks come first: causal ones have the most work.
__device__ inline SpanBlock span_block(const SpanBlocks &blocks, unsigned size, bool by_keys) {
    const unsigned block = blocks.first[blocks.count] - 1 - blockIdx.x;
    unsigned i = 0;
    while (block >= blocks.first[i + 1]) i++;
    SpanBlock found = {blocks.span[i], 0, blocks.span[i].begin - blocks.span[i].row};
    found.begin = by_keys ? first_key_in(found.span.document, found.span.begin, blocks.window) : found.span.begin;
    found.begin += (size_t)(block - blocks.first[i]) * size;
    return found;
}

// ---- tiles ---------------------------------------------------------------------------------------------------------------------------------
template <int HD> constexpr unsigned tile_stride = HD + 8; // rows begin in different banks, aligned to 16 bytes

// A block keeps `held` rows, 16 for each warp that owns sums of them, of one or two tensors; of two others tiles of `passing` rows
// come one after the other, and there is room for `stages` of them: with two, one comes while the one before is computed with.
struct Tiles {
    unsigned held, passing, stages;
};

// What a block may have on architectures 86, 89 and 120; the others have more.
constexpr size_t SHARED_LIMIT = 99 << 10;

template <Tiles T> constexpr unsigned block_threads = T.held / 16 * LANES;

// Blocks for a processor: six leave 80 registers for each of 128 threads, four 128. Left alone (0), the compiler spills some of the
// smallest head's to fit more.
template <int HD> constexpr unsigned LEAST_BLOCKS = HD > 32 ? 0 : sizeof(floatX) == 2 ? 6 : 4;

template <int HD> constexpr size_t tiles_bytes(Tiles t, unsigned held_tensors) {
    return (held_tensors * t.held + 2 * t.stages * t.passing) * tile_stride<HD> * sizeof(floatX);
}

// The first that fits. 32 rows are 16 registers of scores, or twice that in backward, beside HD / 2 or HD of sums.
template <int HD> constexpr Tiles tiles_that_fit(unsigned held_tensors) {
    const Tiles choices[] = {{64, 32, 2}, {64, 16, 2}, {64, 16, 1}, {32, 16, 1}};
    for (const Tiles t : choices)
        if (tiles_bytes<HD>(t, held_tensors) <= SHARED_LIMIT) return t;
    return Tiles{};
}
template <int HD> constexpr Tiles FORWARD_TILES = tiles_that_fit<HD>(1);
template <int HD> constexpr Tiles BACKWARD_TILES = tiles_that_fit<HD>(2);

struct HeadRows {
    size_t heads, head, HD; // x[row][head][HD]
    bool packed;            // rows are whole packs
};

// tile[rows][HD] = x rows [begin, begin + rows) of one head, after a fetch_wait; zeros from `end` on and beyond the head's own size
template <int HD, unsigned THREADS>
__device__ inline void tile_fetch(floatX *tile, const floatX *x, HeadRows h, size_t begin, size_t end, unsigned rows) {
    constexpr unsigned W = full_pack<floatX>, PACKS = HD / W, STEP = THREADS / PACKS; // rows at once
    static_assert(STEP > 0);
    const unsigned first = threadIdx.x / PACKS, d = threadIdx.x % PACKS * W;
    const unsigned valid = end - begin < rows ? (unsigned)(end - begin) : rows;
    const floatX *from = x + ((begin + first) * h.heads + h.head) * h.HD + d;
    if (first >= STEP) return; // threads that are no whole row
#pragma unroll
    for (unsigned row = first; row < rows; row += STEP, from += STEP * h.heads * h.HD) {
        floatX *to = tile + row * tile_stride<HD> + d;
        if (h.packed)
            fetch<16>(to, from, row < valid && d < h.HD);
        else
            for (unsigned j = 0; j < W; j++) to[j] = row < valid && d + j < h.HD ? from[j] : store(0.0f);
    }
}

template <unsigned ROWS> __device__ inline unsigned tiles_in(size_t rows) {
    return (unsigned)((rows + ROWS - 1) / ROWS);
}

// Tile after tile: bring(i, stage) fetches tile i, use(i, stage) computes with it. One barrier a tile: what has come for a
// thread is there for all, and all are done with the tile whose place the next one takes.
template <unsigned STAGES, typename Bring, typename Use>
__device__ inline void pass_tiles(unsigned count, Bring bring, Use use) {
    unsigned stage = 0;
    for (unsigned i = 0; i + 1 < STAGES; i++) {
        if (i < count) bring(i, i);
        fetch_commit(); // of nothing, too: the number of groups stays right
    }
    for (unsigned i = 0; i < count; i++) {
        if constexpr (STAGES == 1) {
            __syncthreads();
            bring(i, 0);
            fetch_commit();
        }
        fetch_wait<STAGES == 1 ? 0 : STAGES - 2>();
        __syncthreads();
        if constexpr (STAGES > 1) {
            if (i + STAGES - 1 < count) bring(i + STAGES - 1, stage ? stage - 1 : STAGES - 1);
            fetch_commit();
        }
        use(i, stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

// c[16 rows of this warp][N] += a[rows, HD] b[N, HD]^T
template <int HD, int N>
__device__ inline void product_of_rows(float (*c)[4], const floatX *a, unsigned row, const floatX *b) {
#pragma unroll(sizeof(floatX) == 2 ? HD / 16 : 1) // an fp32 product is long enough
    for (int d = 0; d < HD; d += 16) {
        const OperandA left = load_a(a, tile_stride<HD>, row, d);
        mma_columns<N>(c, left, [&](int n) { return load_b(b, tile_stride<HD>, n, d); });
    }
}

// c[16 rows][HD] += w[rows, N] b[N, HD], w in registers as a result
template <int HD, int N> __device__ inline void product_with_rows(float (*c)[4], float (*w)[4], const floatX *b) {
#pragma unroll
    for (int j = 0; j < N; j += 16) {
        const OperandA left = operand_of(w[j / 8], w[j / 8 + 1]);
        mma_columns<HD>(c, left, [&](int d) { return load_b_rows(b, tile_stride<HD>, j, d); });
    }
}

// Causality, in tiles that reach the diagonal: scores of keys after their query become -inf. `first` is the first row of the lane less
// the tile's first column; rows are queries and columns keys, or the other way round.
template <int N, bool ROWS_ARE_KEYS> __device__ inline void hide_unseen(float (*s)[4], int first) {
    first -= threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = j * 8 + e % 2 - e / 2 * 8; // against the lane's first row
            if (ROWS_ARE_KEYS ? column < first : column > first) s[j][e] = -INFINITY;
        }
}

// The window, in tiles at its far end: scores of keys that are `window` or more before their query become -inf. `first` as above,
// less the window where rows are queries, with it where they are keys.
template <int N, bool ROWS_ARE_KEYS> __device__ inline void hide_far(float (*s)[4], int first) {
    first -= threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = j * 8 + e % 2 - e / 2 * 8;
            if (ROWS_ARE_KEYS ? column >= first : column <= first) s[j][e] = -INFINITY;
        }
}

// Over the four lanes that share a row of a result
template <typename T> __device__ inline T quad_sum(T x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

struct AttentionShape {
    size_t NH, NKV, HD;
    float scale;
    bool packed;
};

// ---- forward -------------------------------------------------------------------------------------------------------------------------------
// A row's output is a sum over keys, on whose digits backward lives. The fp32 build puts the sum over so many keys aside, so that no
// step of it has many terms, as op set "cpu" does; in bf16 the rounding of the weights is larger than what this would save. It waits
// in `out`, which is fp32 then, for registers are few.
constexpr bool FOLDS = sizeof(floatX) == 4;
constexpr unsigned FOLD_KEYS = 2048;

// For the same reason weights are summed in double, tile by tile; bf16 leaves the few units for double alone.
using WeightSum = std::conditional_t<FOLDS, double, float>;

template <int HD, Tiles T = FORWARD_TILES<HD>>
__global__ void __launch_bounds__(block_threads<T>, LEAST_BLOCKS<HD>)
    attention_forward_kernel(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                             SpanBlocks blocks, AttentionShape shape) {
    constexpr unsigned KEYS = T.passing, TILE = KEYS * tile_stride<HD>, THREADS = block_threads<T>;
    DYNAMIC_SHARED(floatX, tiles);
    floatX *const tq = tiles, *const stages = tq + T.held * tile_stride<HD>; // of each: keys, values
    const SpanBlock block = span_block(blocks, T.held, false);
    const size_t head = blockIdx.y, end = block.begin + T.held < block.span.end ? block.begin + T.held : block.span.end;
    const HeadRows queries = {shape.NH, head, shape.HD, shape.packed},
                   keys = {shape.NKV, head / (shape.NH / shape.NKV), shape.HD, shape.packed};
    const unsigned lane = threadIdx.x % LANES, warp_row = threadIdx.x / LANES * 16;
    const size_t row = block.begin + warp_row + lane / 4; // and row + 8
    // Positions from the first key that the block sees: of the warp's first query, behind all keys of the block, behind those of
    // the warp
    const size_t key_begin = first_key_in(block.span.document, block.begin, blocks.window);
    const unsigned warp_first = (unsigned)(block.begin - key_begin) + warp_row, length = (unsigned)(end - key_begin),
                   warp_end = warp_first >= length       ? 0
                              : length - warp_first < 16 ? length
                                                         : warp_first + 16;
    const float scale = shape.scale * LOG2_E;
    float o[HD / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, folded_largest[2] = {}; // times scale
    WeightSum sum[2] = {};
    bool folded = false;
    // f(the lane's first or second row, an element of o, its place in out)
    const auto for_outputs = [&](auto f) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row + 8 * i >= end) continue;
            floatX *const to = out + ((row + 8 * i - block.origin) * shape.NH + head) * shape.HD;
#pragma unroll
            for (int d = 0; d < HD / 8; d++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const size_t column = d * 8 + lane % 4 * 2 + e;
                    if (column < shape.HD) f(i, o[d][2 * i + e], to[column]);
                }
        }
    };
    const auto bring = [&](unsigned i, unsigned stage) {
        tile_fetch<HD, THREADS>(stages + 2 * stage * TILE, k, keys, key_begin + i * KEYS, end, KEYS);
        tile_fetch<HD, THREADS>(stages + (2 * stage + 1) * TILE, v, keys, key_begin + i * KEYS, end, KEYS);
    };
    const auto use = [&](unsigned i, unsigned stage) {
        const floatX *const tk = stages + 2 * stage * TILE, *const tv = tk + TILE;
        const unsigned key = i * KEYS;
        float s[KEYS / 8][4] = {}, shrink[2];
        if (key >= warp_end || (warp_first >= blocks.window && key + KEYS <= warp_first + 1 - blocks.window)) return;
        product_of_rows<HD, KEYS>(s, tq, warp_row, tk);
        if (key + KEYS > warp_first + 1) hide_unseen<KEYS, false>(s, (int)(warp_first + lane / 4 - key));
        const bool far = warp_first + 15 >= blocks.window && key <= warp_first + 15 - blocks.window;
        if (far) hide_far<KEYS, false>(s, (int)(warp_first + lane / 4) - (int)blocks.window - (int)key);
#pragma unroll
        for (int i = 0; i < 2; i++) { // the lane's two rows
            float top = -INFINITY, tile_sum = 0.0f;
#pragma unroll
            for (unsigned j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
            top = fmaxf(largest[i], quad_max(top) * scale);
            if (far && top == -INFINITY) { // the row's window begins in a later tile
                shrink[i] = 1.0f;
#pragma unroll
                for (unsigned j = 0; j < KEYS / 8; j++) s[j][2 * i] = s[j][2 * i + 1] = 0.0f;
                continue;
            }
            shrink[i] = exp2f(largest[i] - top);
            largest[i] = top;
#pragma unroll
            for (unsigned j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    s[j][e] = exp2f(fmaf(s[j][e], scale, -top));
                    tile_sum += s[j][e];
                }
            sum[i] = sum[i] * shrink[i] + tile_sum;
        }
        if (shrink[0] != 1.0f || shrink[1] != 1.0f) // new largest scores get rare
#pragma unroll
            for (int d = 0; d < HD / 8; d++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[d][e] *= shrink[e / 2];
        product_with_rows<HD, KEYS>(o, s, tv);
        if (FOLDS && (key + KEYS) % FOLD_KEYS == 0) {
            shrink[0] = exp2f(folded_largest[0] - largest[0]), shrink[1] = exp2f(folded_largest[1] - largest[1]);
            for_outputs([&](int i, float &sum, floatX &to) {
                to = store(folded ? load(to) * shrink[i] + sum : sum);
                sum = 0.0f;
            });
            folded = true, folded_largest[0] = largest[0], folded_largest[1] = largest[1];
        }
    };
    tile_fetch<HD, THREADS>(tq, q, queries, block.begin - block.origin, end - block.origin, T.held);
    pass_tiles<T.stages>(tiles_in<KEYS>(length), bring, use);
    float total[2], shrink[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] = (float)quad_sum(sum[i]);
        if (folded) shrink[i] = exp2f(folded_largest[i] - largest[i]);
        if (row + 8 * i < end && lane % 4 == 0)
            lse[(row + 8 * i - block.origin) * shape.NH + head] = largest[i] * LN_2 + logf(total[i]);
    }
    for_outputs([&](int i, float sum, floatX &to) {
        if (FOLDS && folded) sum += load(to) * shrink[i];
        to = store(sum / total[i]);
    });
}

// ---- backward: p = exp(s - lse), ds = p (dout v^T - delta), delta = dout . out ----------------------------------------------------------
constexpr unsigned DELTA_THREADS = 128;

// delta[rows] of rows = queries x heads: a warp for each
__global__ void attention_delta_kernel(float *delta, const floatX *dout, const floatX *out, size_t rows, size_t HD) {
    const size_t row = (size_t)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    float sum = 0.0f;
    if (row >= rows) return;
    for (size_t d = threadIdx.x % LANES; d < HD; d += LANES) sum += load(dout[row * HD + d]) * load(out[row * HD + d]);
    sum = warp_sum(sum);
    if (threadIdx.x % LANES == 0) delta[row] = sum;
}

template <int HD, Tiles T = BACKWARD_TILES<HD>>
__global__ void __launch_bounds__(block_threads<T>, LEAST_BLOCKS<HD>)
    attention_dq_kernel(floatX *dq, const floatX *dout, const floatX *q, const floatX *k, const floatX *v,
                        const float *lse, const float *delta, SpanBlocks blocks, AttentionShape shape) {
    constexpr unsigned KEYS = T.passing, TILE = KEYS * tile_stride<HD>, THREADS = block_threads<T>;
    DYNAMIC_SHARED(floatX, tiles);
    floatX *const tq = tiles, *const td = tq + T.held * tile_stride<HD>,
                  *const stages = td + T.held * tile_stride<HD>; // of each: keys, values
    const SpanBlock block = span_block(blocks, T.held, false);
    const size_t head = blockIdx.y, end = block.begin + T.held < block.span.end ? block.begin + T.held : block.span.end;
    const HeadRows queries = {shape.NH, head, shape.HD, shape.packed},
                   keys = {shape.NKV, head / (shape.NH / shape.NKV), shape.HD, shape.packed};
    const unsigned lane = threadIdx.x % LANES, warp_row = threadIdx.x / LANES * 16;
    const size_t row = block.begin + warp_row + lane / 4; // and row + 8
    // Positions from the first key that the block sees: of the warp's first query, behind all keys of the block, behind those of
    // the warp
    const size_t key_begin = first_key_in(block.span.document, block.begin, blocks.window);
    const unsigned warp_first = (unsigned)(block.begin - key_begin) + warp_row, length = (unsigned)(end - key_begin),
                   warp_end = warp_first >= length       ? 0
                              : length - warp_first < 16 ? length
                                                         : warp_first + 16;
    const float scale = shape.scale * LOG2_E;
    float sums[HD / 8][4] = {}, row_lse[2] = {INFINITY, INFINITY}, row_delta[2] = {0.0f, 0.0f};
    for (int i = 0; i < 2; i++) {
        const size_t place = (row + 8 * i - block.origin) * shape.NH + head;
        if (row + 8 * i < end) row_lse[i] = lse[place] * LOG2_E, row_delta[i] = delta[place];
    }
    const auto bring = [&](unsigned i, unsigned stage) {
        tile_fetch<HD, THREADS>(stages + 2 * stage * TILE, k, keys, key_begin + i * KEYS, end, KEYS);
        tile_fetch<HD, THREADS>(stages + (2 * stage + 1) * TILE, v, keys, key_begin + i * KEYS, end, KEYS);
    };
    const auto use = [&](unsigned i, unsigned stage) {
        const floatX *const tk = stages + 2 * stage * TILE, *const tv = tk + TILE;
        const unsigned key = i * KEYS;
        float s[KEYS / 8][4] = {}, ds[KEYS / 8][4] = {};
        if (key >= warp_end || (warp_first >= blocks.window && key + KEYS <= warp_first + 1 - blocks.window)) return;
        product_of_rows<HD, KEYS>(s, tq, warp_row, tk);
        product_of_rows<HD, KEYS>(ds, td, warp_row, tv);
        if (key + KEYS > warp_first + 1) hide_unseen<KEYS, false>(s, (int)(warp_first + lane / 4 - key));
        if (warp_first + 15 >= blocks.window && key <= warp_first + 15 - blocks.window)
            hide_far<KEYS, false>(s, (int)(warp_first + lane / 4) - (int)blocks.window - (int)key);
#pragma unroll
        for (unsigned j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                ds[j][e] = exp2f(fmaf(s[j][e], scale, -row_lse[e / 2])) * (ds[j][e] - row_delta[e / 2]);
        product_with_rows<HD, KEYS>(sums, ds, tk);
    };
    tile_fetch<HD, THREADS>(tq, q, queries, block.begin - block.origin, end - block.origin, T.held);
    tile_fetch<HD, THREADS>(td, dout, queries, block.begin - block.origin, end - block.origin, T.held);
    pass_tiles<T.stages>(tiles_in<KEYS>(length), bring, use);
#pragma unroll
    for (int d = 0; d < HD / 8; d++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const size_t column = d * 8 + lane % 4 * 2 + e % 2, t = row + 8 * (e / 2);
            if (t < end && column < shape.HD)
                dq[((t - block.origin) * shape.NH + head) * shape.HD + column] = store(sums[d][e] * shape.scale);
        }
}

// Rows of results are keys here, columns queries, so that p and ds can be the left operands of dv and dk. The sums of 16 keys take
// HD registers; where these are too many, two warps share 16 keys: one owns dv, the other dk, and both compute the scores.
template <int HD> constexpr unsigned OWNERS = HD > 128 ? 2 : 1;

// Of a tile's query: lse is in the padding behind its row of q, delta behind its row of dout.
template <int HD> __device__ inline float *beside_row(const floatX *tile, unsigned row) {
    return (float *)(tile + row * tile_stride<HD> + HD);
}

template <int HD, Tiles T = BACKWARD_TILES<HD>>
__global__ void __launch_bounds__(block_threads<T> *OWNERS<HD>)
    attention_dkv_kernel(float *dk, float *dv, const floatX *dout, const floatX *q, const floatX *k, const floatX *v,
                         const float *lse, const float *delta, SpanBlocks blocks, AttentionShape shape) {
    constexpr unsigned QUERIES = T.passing, TILE = QUERIES * tile_stride<HD>, THREADS = block_threads<T> * OWNERS<HD>;
    constexpr bool SHARED_KEYS = OWNERS<HD> == 2;
    DYNAMIC_SHARED(floatX, tiles);
    floatX *const tk = tiles, *const tv = tk + T.held * tile_stride<HD>,
                  *const stages = tv + T.held * tile_stride<HD>; // of each: queries, gradients of their outputs
    const SpanBlock block = span_block(blocks, T.held, true);
    const size_t group = shape.NH / shape.NKV, end = block.span.end;
    const size_t key_end = block.begin + T.held < end ? block.begin + T.held : end;
    const HeadRows keys = {shape.NKV, blockIdx.y, shape.HD, shape.packed};
    const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warp_row = warp % (T.held / 16) * 16;
    const bool owns_dv = !SHARED_KEYS || warp < T.held / 16, owns_dk = !SHARED_KEYS || !owns_dv;
    const size_t warp_first = block.begin + warp_row, row = warp_first + lane / 4; // and row + 8: keys
    // Queries that see a key of the block
    const size_t first = block.begin > block.span.begin ? block.begin : block.span.begin,
                 query_end = end - key_end >= blocks.window ? key_end + blocks.window - 1 : end;
    const float scale = shape.scale * LOG2_E;
    float sums[SHARED_KEYS ? 1 : 2][HD / 8][4] = {}; // dv, dk; or the one that this warp owns
    float(*const sum_v)[4] = sums[0], (*const sum_k)[4] = sums[SHARED_KEYS ? 0 : 1];
    size_t coming = first, coming_head = blockIdx.y * group, next = first;
    const auto bring = [&](unsigned, unsigned stage) {
        floatX *const tq = stages + 2 * stage * TILE, *const td = tq + TILE;
        const HeadRows queries = {shape.NH, coming_head, shape.HD, shape.packed};
        tile_fetch<HD, THREADS>(tq, q, queries, coming - block.origin, query_end - block.origin, QUERIES);
        tile_fetch<HD, THREADS>(td, dout, queries, coming - block.origin, query_end - block.origin, QUERIES);
        for (unsigned i = threadIdx.x; i < QUERIES; i += THREADS) {
            const size_t place = (coming + i - block.origin) * shape.NH + coming_head;
            fetch<4>(beside_row<HD>(tq, i), lse + place, coming + i < query_end);
            fetch<4>(beside_row<HD>(td, i), delta + place, coming + i < query_end);
        }
        coming += QUERIES;
        if (coming >= query_end) coming = first, coming_head++;
    };
    // What lies beyond the end is zero, and so are its products, whatever its p is.
    const auto use = [&](unsigned, unsigned stage) {
        const floatX *const tq = stages + 2 * stage * TILE, *const td = tq + TILE;
        const size_t query = next;
        float p[QUERIES / 8][4] = {}, ds[QUERIES / 8][4] = {};
        next = query + QUERIES < query_end ? query + QUERIES : first; // then of the next head
        // None of them sees a key of this warp
        if (query + QUERIES <= warp_first || warp_first >= key_end) return;
        if (query >= warp_first + 15 && query - warp_first - 15 >= blocks.window) return;
        product_of_rows<HD, QUERIES>(p, tk, warp_row, tq);
        if (query < warp_first + 15) hide_unseen<QUERIES, true>(p, (int)(row - query));
        if (query + QUERIES - 1 - warp_first >= blocks.window)
            hide_far<QUERIES, true>(p, (int)((long long)row - (long long)query + (long long)blocks.window));
        if (owns_dk) product_of_rows<HD, QUERIES>(ds, tv, warp_row, td);
#pragma unroll
        for (unsigned j = 0; j < QUERIES / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const unsigned column = j * 8 + lane % 4 * 2 + e % 2;
                p[j][e] = exp2f(fmaf(p[j][e], scale, -LOG2_E * *beside_row<HD>(tq, column)));
                if (owns_dk) ds[j][e] = p[j][e] * (ds[j][e] - *beside_row<HD>(td, column));
            }
        if (owns_dv) product_with_rows<HD, QUERIES>(sum_v, p, td);
        if (owns_dk) product_with_rows<HD, QUERIES>(sum_k, ds, tq);
    };
    tile_fetch<HD, THREADS>(tk, k, keys, block.begin, key_end, T.held);
    tile_fetch<HD, THREADS>(tv, v, keys, block.begin, key_end, T.held);
    pass_tiles<T.stages>((unsigned)group * tiles_in<QUERIES>(query_end - first), bring, use);
#pragma unroll
    for (int d = 0; d < HD / 8; d++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const size_t column = d * 8 + lane % 4 * 2 + e % 2, t = row + 8 * (e / 2);
            const size_t place = (t * shape.NKV + blockIdx.y) * shape.HD + column;
            if (t >= key_end || column >= shape.HD) continue;
            if (owns_dk) dk[place] += sum_k[d][e] * shape.scale;
            if (owns_dv) dv[place] += sum_v[d][e];
        }
}

// ---- launches --------------------------------------------------------------------------------------------------------------------------------
constexpr size_t MOST_HEAD_SIZE = 256;

// Calls launch(HD) with the padded head size as a constant.
template <typename F> static void with_head_size(size_t HD, F launch) {
    if (HD <= 32)
        launch(Width<32>());
    else if (HD <= 64)
        launch(Width<64>());
    else if (HD <= 96)
        launch(Width<96>());
    else if (HD <= 128)
        launch(Width<128>());
    else
        launch(Width<MOST_HEAD_SIZE>());
}

template <typename... Pointers>
static AttentionShape attention_shape(size_t NH, size_t NKV, size_t HD, double scale, Pointers... pointers) {
    return AttentionShape{NH, NKV, HD, (float)scale, HD % full_pack<floatX> == 0 && all_aligned(pointers...)};
}

// Plans ask for this, so a head size that has no kernel is refused before anything is allocated.
static size_t attention_scratch(size_t n, size_t NH, size_t NKV, size_t HD) {
    (void)NKV;
    if (HD > MOST_HEAD_SIZE) die("head_dim is %zu; op set cuda has attention up to %zu", HD, MOST_HEAD_SIZE);
    return n * NH; // delta
}

static void attention_forward(Stored *out, Summed *lse, const Stored *q, const Stored *k, const Stored *v, Spans spans,
                              size_t NH, size_t NKV, size_t HD, double scale, Summed *scratch) {
    const AttentionShape shape = attention_shape(NH, NKV, HD, scale, q, k, v);
    (void)scratch;
    with_head_size(HD, [&](auto PADDED) {
        constexpr Tiles T = FORWARD_TILES<PADDED>;
        static_assert(T.held);
        SpanBlocks blocks;
        for (size_t from = 0; from < spans.count;) {
            from = span_blocks(&blocks, spans, from, T.held, false);
            LAUNCH((attention_forward_kernel<PADDED>), dim3(blocks.first[blocks.count], (unsigned)NH), block_threads<T>,
                   tiles_bytes<PADDED>(T, 1))
            ((floatX *)out, (float *)lse, (const floatX *)q, (const floatX *)k, (const floatX *)v, blocks, shape);
        }
    });
}

static void attention_backward(Stored *dq, Summed *dk, Summed *dv, const Stored *dout, const Stored *out,
                               const Stored *q, const Stored *k, const Stored *v, const Summed *lse, Spans spans,
                               size_t NH, size_t NKV, size_t HD, double scale, Summed *scratch) {
    const AttentionShape shape = attention_shape(NH, NKV, HD, scale, q, k, v, dout);
    const size_t first = spans.count ? spans.span[0].row * NH : 0, rows = spans_rows(spans) * NH - first;
    float *delta = (float *)scratch;
    if (!rows) return;
    LAUNCH((attention_delta_kernel), dim3((unsigned)blocks_for(rows, DELTA_THREADS / LANES)), DELTA_THREADS, 0)
    (delta + first, (const floatX *)dout + first * HD, (const floatX *)out + first * HD, rows, HD);
    with_head_size(HD, [&](auto PADDED) {
        constexpr Tiles T = BACKWARD_TILES<PADDED>;
        static_assert(T.held);
        const size_t bytes = tiles_bytes<PADDED>(T, 2);
        SpanBlocks blocks;
        for (size_t from = 0, next; from < spans.count; from = next) {
            next = span_blocks(&blocks, spans, from, T.held, false);
            LAUNCH((attention_dq_kernel<PADDED>), dim3(blocks.first[blocks.count], (unsigned)NH), block_threads<T>,
                   bytes)
            ((floatX *)dq, (const floatX *)dout, (const floatX *)q, (const floatX *)k, (const floatX *)v,
             (const float *)lse, delta, blocks, shape);
            span_blocks(&blocks, spans, from, T.held, true);
            LAUNCH((attention_dkv_kernel<PADDED>), dim3(blocks.first[blocks.count], (unsigned)NKV),
                   block_threads<T> * OWNERS<PADDED>, bytes)
            ((float *)dk, (float *)dv, (const floatX *)dout, (const floatX *)q, (const floatX *)k, (const floatX *)v,
             (const float *)lse, delta, blocks, shape);
        }
    });
}

#endif
