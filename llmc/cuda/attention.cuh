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

constexpr float LOG2_E = 1.4426950408889634f;

// ---- blocks of spans: a launch takes up to MOST_SPANS of them as an argument -----------------------------------------------------------
constexpr unsigned MOST_SPANS = 64;

struct SpanBlocks {
    Span span[MOST_SPANS];
    unsigned first[MOST_SPANS + 1]; // block of each span, the last being their number
    unsigned count;
    size_t origin; // the chunk's first query: row 0 of q, out, lse
};

struct SpanBlock {
    Span span;
    size_t begin; // of the block's queries or keys
};

// by_keys: blocks of `size` keys [document, end), otherwise of queries [begin, end)
static size_t span_blocks(SpanBlocks *blocks, Spans spans, size_t from, unsigned size, bool by_keys) {
    blocks->count = 0, blocks->first[0] = 0;
    blocks->origin = spans.span[0].begin;
    for (; from < spans.count && blocks->count < MOST_SPANS; from++) {
        const Span span = spans.span[from];
        const size_t length = span.end - (by_keys ? span.document : span.begin);
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
    SpanBlock found = {blocks.span[i], 0};
    found.begin = (by_keys ? found.span.document : found.span.begin) + (size_t)(block - blocks.first[i]) * size;
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

template <int HD> constexpr size_t tiles_bytes(Tiles t, unsigned held_tensors) {
    return (held_tensors * t.held + 2 * t.stages * t.passing) * tile_stride<HD> * sizeof(floatX);
}

// The largest that fit. Scores take passing / 2 registers: 64 keys where the output leaves so many.
template <int HD> constexpr Tiles tiles_that_fit(unsigned held_tensors) {
    const unsigned most = HD <= 64 && held_tensors == 1 && sizeof(floatX) == 2 ? 64 : 32;
    const Tiles choices[] = {{64, most, 2}, {64, 16, 2}, {64, 16, 1}, {32, 16, 1}};
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

// Tile after tile: bring(stage) fetches the next one, use(stage) computes with the oldest. One barrier a tile: what has come for a
// thread is there for all, and all are done with the tile whose place the next one takes.
template <unsigned STAGES, typename Bring, typename Use>
__device__ inline void pass_tiles(unsigned count, Bring bring, Use use) {
    unsigned stage = 0;
    for (unsigned i = 0; i + 1 < STAGES; i++) {
        if (i < count) bring(i);
        fetch_commit(); // of nothing, too: the number of groups stays right
    }
    for (unsigned i = 0; i < count; i++) {
        if constexpr (STAGES == 1) {
            __syncthreads();
            bring(0);
            fetch_commit();
        }
        fetch_wait<STAGES == 1 ? 0 : STAGES - 2>();
        __syncthreads();
        if constexpr (STAGES > 1) {
            if (i + STAGES - 1 < count) bring(stage ? stage - 1 : STAGES - 1);
            fetch_commit();
        }
        use(stage);
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

// Over the four lanes that share a row of a result
__device__ inline double quad_sum(double x) {
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

template <int HD, Tiles T = FORWARD_TILES<HD>>
__global__ void __launch_bounds__(block_threads<T>)
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
    const float scale = shape.scale * LOG2_E;
    float o[HD / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, folded_largest[2] = {};
    double sum[2] = {0.0, 0.0}; // of the weights, tile by tile
    bool folded = false;
    // f(the lane's first or second row, an element of o, its place in out)
    const auto for_outputs = [&](auto f) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row + 8 * i >= end) continue;
            floatX *const to = out + ((row + 8 * i - blocks.origin) * shape.NH + head) * shape.HD;
#pragma unroll
            for (int d = 0; d < HD / 8; d++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const size_t column = d * 8 + lane % 4 * 2 + e;
                    if (column < shape.HD) f(i, o[d][2 * i + e], to[column]);
                }
        }
    };
    size_t coming = block.span.document, next = coming;
    const auto bring = [&](unsigned stage) {
        tile_fetch<HD, THREADS>(stages + 2 * stage * TILE, k, keys, coming, end, KEYS);
        tile_fetch<HD, THREADS>(stages + (2 * stage + 1) * TILE, v, keys, coming, end, KEYS);
        coming += KEYS;
    };
    const auto use = [&](unsigned stage) {
        const floatX *const tk = stages + 2 * stage * TILE, *const tv = tk + TILE;
        const size_t key = next;
        float s[KEYS / 8][4] = {};
        next += KEYS;
        product_of_rows<HD, KEYS>(s, tq, warp_row, tk);
#pragma unroll
        for (int i = 0; i < 2; i++) { // the lane's two rows
            float most = largest[i];
#pragma unroll
            for (unsigned j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    if (key + j * 8 + lane % 4 * 2 + e % 2 > row + 8 * i) s[j][e] = -INFINITY;
                    most = fmaxf(most, s[j][e]);
                }
            most = quad_max(most);
            const float shrink = exp2f((largest[i] - most) * scale);
            float tile_sum = 0.0f;
            largest[i] = most;
#pragma unroll
            for (unsigned j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    s[j][e] = exp2f((s[j][e] - most) * scale);
                    tile_sum += s[j][e];
                }
            sum[i] = sum[i] * shrink + tile_sum;
#pragma unroll
            for (int d = 0; d < HD / 8; d++) o[d][2 * i] *= shrink, o[d][2 * i + 1] *= shrink;
        }
        product_with_rows<HD, KEYS>(o, s, tv);
        if (FOLDS && (key + KEYS - block.span.document) % FOLD_KEYS == 0) {
            const float shrink[2] = {folded ? exp2f((folded_largest[0] - largest[0]) * scale) : 0.0f,
                                     folded ? exp2f((folded_largest[1] - largest[1]) * scale) : 0.0f};
            for_outputs([&](int i, float &sum, floatX &to) {
                to = store(folded ? load(to) * shrink[i] + sum : sum);
                sum = 0.0f;
            });
            folded = true, folded_largest[0] = largest[0], folded_largest[1] = largest[1];
        }
    };
    tile_fetch<HD, THREADS>(tq, q, queries, block.begin - blocks.origin, end - blocks.origin, T.held);
    pass_tiles<T.stages>(tiles_in<KEYS>(end - block.span.document), bring, use);
    float total[2], shrink[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] = (float)quad_sum(sum[i]);
        if (folded) shrink[i] = exp2f((folded_largest[i] - largest[i]) * scale);
        if (row + 8 * i < end && lane % 4 == 0)
            lse[(row + 8 * i - blocks.origin) * shape.NH + head] = largest[i] * shape.scale + logf(total[i]);
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
__global__ void __launch_bounds__(block_threads<T>)
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
    const float scale = shape.scale * LOG2_E;
    float sums[HD / 8][4] = {}, row_lse[2] = {INFINITY, INFINITY}, row_delta[2] = {0.0f, 0.0f};
    for (int i = 0; i < 2; i++) {
        const size_t place = (row + 8 * i - blocks.origin) * shape.NH + head;
        if (row + 8 * i < end) row_lse[i] = lse[place] * LOG2_E, row_delta[i] = delta[place];
    }
    size_t coming = block.span.document, next = coming;
    const auto bring = [&](unsigned stage) {
        tile_fetch<HD, THREADS>(stages + 2 * stage * TILE, k, keys, coming, end, KEYS);
        tile_fetch<HD, THREADS>(stages + (2 * stage + 1) * TILE, v, keys, coming, end, KEYS);
        coming += KEYS;
    };
    const auto use = [&](unsigned stage) {
        const floatX *const tk = stages + 2 * stage * TILE, *const tv = tk + TILE;
        const size_t key = next;
        float s[KEYS / 8][4] = {}, ds[KEYS / 8][4] = {};
        next += KEYS;
        product_of_rows<HD, KEYS>(s, tq, warp_row, tk);
        product_of_rows<HD, KEYS>(ds, td, warp_row, tv);
#pragma unroll
        for (unsigned j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const bool seen = key + j * 8 + lane % 4 * 2 + e % 2 <= row + 8 * (e / 2);
                const float p = seen ? exp2f(s[j][e] * scale - row_lse[e / 2]) : 0.0f;
                ds[j][e] = p * (ds[j][e] - row_delta[e / 2]);
            }
        product_with_rows<HD, KEYS>(sums, ds, tk);
    };
    tile_fetch<HD, THREADS>(tq, q, queries, block.begin - blocks.origin, end - blocks.origin, T.held);
    tile_fetch<HD, THREADS>(td, dout, queries, block.begin - blocks.origin, end - blocks.origin, T.held);
    pass_tiles<T.stages>(tiles_in<KEYS>(end - block.span.document), bring, use);
#pragma unroll
    for (int d = 0; d < HD / 8; d++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const size_t column = d * 8 + lane % 4 * 2 + e % 2, t = row + 8 * (e / 2);
            if (t < end && column < shape.HD)
                dq[((t - blocks.origin) * shape.NH + head) * shape.HD + column] = store(sums[d][e] * shape.scale);
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
    const size_t row = block.begin + warp_row + lane / 4; // and row + 8: keys
    const size_t first =
        block.begin > block.span.begin ? block.begin : block.span.begin; // query that sees a key of the block
    const float scale = shape.scale * LOG2_E;
    float sums[SHARED_KEYS ? 1 : 2][HD / 8][4] = {}; // dv, dk; or the one that this warp owns
    float(*const sum_v)[4] = sums[0], (*const sum_k)[4] = sums[SHARED_KEYS ? 0 : 1];
    size_t coming = first, coming_head = blockIdx.y * group, next = first;
    const auto bring = [&](unsigned stage) {
        floatX *const tq = stages + 2 * stage * TILE, *const td = tq + TILE;
        const HeadRows queries = {shape.NH, coming_head, shape.HD, shape.packed};
        tile_fetch<HD, THREADS>(tq, q, queries, coming - blocks.origin, end - blocks.origin, QUERIES);
        tile_fetch<HD, THREADS>(td, dout, queries, coming - blocks.origin, end - blocks.origin, QUERIES);
        for (unsigned i = threadIdx.x; i < QUERIES; i += THREADS) {
            const size_t place = (coming + i - blocks.origin) * shape.NH + coming_head;
            fetch<4>(beside_row<HD>(tq, i), lse + place, coming + i < end);
            fetch<4>(beside_row<HD>(td, i), delta + place, coming + i < end);
        }
        coming += QUERIES;
        if (coming >= end) coming = first, coming_head++;
    };
    // What lies beyond the end is zero, and so are its products, whatever its p is.
    const auto use = [&](unsigned stage) {
        const floatX *const tq = stages + 2 * stage * TILE, *const td = tq + TILE;
        const size_t query = next;
        float p[QUERIES / 8][4] = {}, ds[QUERIES / 8][4] = {};
        next = query + QUERIES < end ? query + QUERIES : first; // then of the next head
        product_of_rows<HD, QUERIES>(p, tk, warp_row, tq);
        if (owns_dk) product_of_rows<HD, QUERIES>(ds, tv, warp_row, td);
#pragma unroll
        for (unsigned j = 0; j < QUERIES / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const unsigned column = j * 8 + lane % 4 * 2 + e % 2;
                const bool seen = query + column >= row + 8 * (e / 2);
                p[j][e] = seen ? exp2f(p[j][e] * scale - *beside_row<HD>(tq, column) * LOG2_E) : 0.0f;
                if (owns_dk) ds[j][e] = p[j][e] * (ds[j][e] - *beside_row<HD>(td, column));
            }
        if (owns_dv) product_with_rows<HD, QUERIES>(sum_v, p, td);
        if (owns_dk) product_with_rows<HD, QUERIES>(sum_k, ds, tq);
    };
    tile_fetch<HD, THREADS>(tk, k, keys, block.begin, key_end, T.held);
    tile_fetch<HD, THREADS>(tv, v, keys, block.begin, key_end, T.held);
    pass_tiles<T.stages>((unsigned)group * tiles_in<QUERIES>(end - first), bring, use);
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
    else if (HD <= 256)
        launch(Width<256>());
    else
        die("attention: head_dim %zu; op set cuda has kernels up to 256", HD);
}

template <typename... Pointers>
static AttentionShape attention_shape(size_t NH, size_t NKV, size_t HD, double scale, Pointers... pointers) {
    return AttentionShape{NH, NKV, HD, (float)scale, HD % full_pack<floatX> == 0 && all_aligned(pointers...)};
}

static size_t attention_scratch(size_t n, size_t NH, size_t NKV, size_t HD) {
    (void)NKV, (void)HD;
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
    const size_t rows = spans.count ? (spans.span[spans.count - 1].end - spans.span[0].begin) * NH : 0;
    float *delta = (float *)scratch;
    if (!rows) return;
    LAUNCH((attention_delta_kernel), dim3((unsigned)blocks_for(rows, DELTA_THREADS / LANES)), DELTA_THREADS, 0)
    (delta, (const floatX *)dout, (const floatX *)out, rows, HD);
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
