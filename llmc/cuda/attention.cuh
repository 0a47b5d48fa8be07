/*
Attention of op set "cuda" without cuDNN, and the check of the path with it: queries of one chunk against the keys of their
documents, causal, any ratio of query to key/value heads, in the manner of FlashAttention-2 (arXiv 2307.08691): tiles of keys pass
by, softmax is kept up to date with the largest score so far, and no matrix of scores is ever stored.

Forward and dq: a block of four warps holds QUERIES queries of one head, 16 a warp, and walks the keys they see. dk, dv: a block holds
KEYS keys of one key/value head and walks the queries that see them, for every query head that shares them, then adds to dk and dv
once. A sum has one owner, so there are no atomics; scores are computed once more than an implementation with atomics would.
Head sizes are padded to the next of HEAD_SIZES; what is padded is zero and is not stored.
*/
#ifndef LLMC_CUDA_ATTENTION_CUH
#define LLMC_CUDA_ATTENTION_CUH
#include "mma.cuh"

constexpr unsigned QUERIES = 64, KEYS = sizeof(floatX) == 2 ? 64 : 32, ATTENTION_THREADS = 128;
constexpr float LOG2_E = 1.4426950408889634f;

// A row's output is a sum over keys, on whose digits backward lives. The fp32 build puts the sum of so many tiles aside, so that no
// step of it has many terms, as op set "cpu" does; in bf16 the rounding of the weights is larger than what this would save.
constexpr bool FOLDS = sizeof(floatX) == 4;
constexpr unsigned FOLD_TILES = 64;

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

struct HeadRows {
    size_t heads, head, HD; // x[row][head][HD]
    bool packed;            // rows are whole packs
};

// tile[rows][HD] = x rows [begin, begin + rows) of one head; zeros from `end` on and beyond the head's own size
template <int HD>
__device__ inline void tile_read(floatX *tile, const floatX *x, HeadRows h, size_t begin, size_t end, unsigned rows) {
    constexpr int W = full_pack<floatX>;
    constexpr unsigned PACKS = HD / W;
    for (unsigned i = threadIdx.x; i < rows * PACKS; i += blockDim.x) {
        const unsigned row = i / PACKS, d = i % PACKS * W;
        const floatX *from = x + ((begin + row) * h.heads + h.head) * h.HD + d;
        Pack<floatX, W> pack;
        if (h.packed && begin + row < end && d < h.HD) {
            pack = pack_read<W>(from);
        } else {
            for (int j = 0; j < W; j++) pack.x[j] = begin + row < end && d + j < h.HD ? from[j] : store(0.0f);
        }
        pack_write(tile + row * tile_stride<HD> + d, pack);
    }
}

// c[16 rows of this warp][N] += a[rows, HD] b[N, HD]^T
template <int HD, int N>
__device__ inline void product_of_rows(float (*c)[4], const floatX *a, unsigned row, const floatX *b) {
#pragma unroll
    for (int d = 0; d < HD; d += 16) {
        const OperandA left = load_a(a, tile_stride<HD>, row, d);
        mma_columns<N / 8>(c, left, [&](int j) { return load_b(b, tile_stride<HD>, j * 8, d); });
    }
}

// c[16 rows][HD] += w[rows, N] b[N, HD], w in registers as a result
template <int HD, int N> __device__ inline void product_with_rows(float (*c)[4], float (*w)[4], const floatX *b) {
#pragma unroll
    for (int j = 0; j < N; j += 16) {
        const OperandA left = operand_of(w[j / 8], w[j / 8 + 1]);
        mma_columns<HD / 8>(c, left, [&](int d) { return load_b_rows(b, tile_stride<HD>, j, d * 8); });
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
template <int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_forward_kernel(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                             SpanBlocks blocks, AttentionShape shape) {
    DYNAMIC_SHARED(floatX, tiles);
    floatX *tq = tiles, *tk = tq + QUERIES * tile_stride<HD>, *tv = tk + KEYS * tile_stride<HD>;
    const SpanBlock block = span_block(blocks, QUERIES, false);
    const size_t head = blockIdx.y,
                 end = block.begin + QUERIES < block.span.end ? block.begin + QUERIES : block.span.end;
    const HeadRows queries = {shape.NH, head, shape.HD, shape.packed},
                   keys = {shape.NKV, head / (shape.NH / shape.NKV), shape.HD, shape.packed};
    const unsigned lane = threadIdx.x % LANES, warp_row = threadIdx.x / LANES * 16;
    const size_t row = block.begin + warp_row + lane / 4; // and row + 8
    const float scale = shape.scale * LOG2_E;
    float o[HD / 8][4] = {}, folded[FOLDS ? HD / 8 : 1][4] = {}, largest[2] = {-INFINITY, -INFINITY};
    double sum[2] = {0.0, 0.0}; // of the weights, tile by tile
    unsigned unfolded = 0;
    tile_read<HD>(tq, q, queries, block.begin - blocks.origin, end - blocks.origin, QUERIES);
    for (size_t key = block.span.document; key < end; key += KEYS) {
        float s[KEYS / 8][4] = {};
        __syncthreads();
        tile_read<HD>(tk, k, keys, key, end, KEYS);
        tile_read<HD>(tv, v, keys, key, end, KEYS);
        __syncthreads();
        product_of_rows<HD, KEYS>(s, tq, warp_row, tk);
        for (int i = 0; i < 2; i++) { // the lane's two rows
            float most = largest[i];
            for (unsigned j = 0; j < KEYS / 8; j++)
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    if (key + j * 8 + lane % 4 * 2 + e % 2 > row + 8 * i) s[j][e] = -INFINITY;
                    most = fmaxf(most, s[j][e]);
                }
            most = quad_max(most);
            const float shrink = exp2f((largest[i] - most) * scale);
            float tile_sum = 0.0f;
            largest[i] = most;
            for (unsigned j = 0; j < KEYS / 8; j++)
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    s[j][e] = exp2f((s[j][e] - most) * scale);
                    tile_sum += s[j][e];
                }
            sum[i] = sum[i] * shrink + tile_sum;
            for (int d = 0; d < HD / 8; d++) o[d][2 * i] *= shrink, o[d][2 * i + 1] *= shrink;
            if constexpr (FOLDS)
                for (int d = 0; d < HD / 8; d++) folded[d][2 * i] *= shrink, folded[d][2 * i + 1] *= shrink;
        }
        product_with_rows<HD, KEYS>(o, s, tv);
        if constexpr (FOLDS)
            if (++unfolded % FOLD_TILES == 0 || key + KEYS >= end)
                for (int d = 0; d < HD / 8; d++)
                    for (int e = 0; e < 4; e++) folded[d][e] += o[d][e], o[d][e] = 0.0f;
    }
    float(*const unscaled)[4] = FOLDS ? folded : o;
    for (int i = 0; i < 2; i++) {
        const size_t place = (row + 8 * i - blocks.origin) * shape.NH + head;
        const double total = quad_sum(sum[i]);
        if (row + 8 * i >= end) continue;
        if (lane % 4 == 0) lse[place] = largest[i] * shape.scale + logf((float)total);
        for (int d = 0; d < HD / 8; d++)
            for (int e = 0; e < 2; e++) {
                const size_t column = d * 8 + lane % 4 * 2 + e;
                if (column < shape.HD) out[place * shape.HD + column] = store(unscaled[d][2 * i + e] / (float)total);
            }
    }
}

// ---- backward: p = exp(s - lse), ds = p (dout v^T - delta), delta = dout . out ----------------------------------------------------------
// delta[rows] of rows = queries x heads: a warp for each
__global__ void attention_delta_kernel(float *delta, const floatX *dout, const floatX *out, size_t rows, size_t HD) {
    const size_t row = (size_t)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    float sum = 0.0f;
    if (row >= rows) return;
    for (size_t d = threadIdx.x % LANES; d < HD; d += LANES) sum += load(dout[row * HD + d]) * load(out[row * HD + d]);
    sum = warp_sum(sum);
    if (threadIdx.x % LANES == 0) delta[row] = sum;
}

template <int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_dq_kernel(floatX *dq, const floatX *dout, const floatX *q, const floatX *k, const floatX *v,
                        const float *lse, const float *delta, SpanBlocks blocks, AttentionShape shape) {
    DYNAMIC_SHARED(floatX, tiles);
    floatX *tq = tiles, *td = tq + QUERIES * tile_stride<HD>, *tk = td + QUERIES * tile_stride<HD>,
           *tv = tk + KEYS * tile_stride<HD>;
    const SpanBlock block = span_block(blocks, QUERIES, false);
    const size_t head = blockIdx.y,
                 end = block.begin + QUERIES < block.span.end ? block.begin + QUERIES : block.span.end;
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
    tile_read<HD>(tq, q, queries, block.begin - blocks.origin, end - blocks.origin, QUERIES);
    tile_read<HD>(td, dout, queries, block.begin - blocks.origin, end - blocks.origin, QUERIES);
    for (size_t key = block.span.document; key < end; key += KEYS) {
        float s[KEYS / 8][4] = {}, ds[KEYS / 8][4] = {};
        __syncthreads();
        tile_read<HD>(tk, k, keys, key, end, KEYS);
        tile_read<HD>(tv, v, keys, key, end, KEYS);
        __syncthreads();
        product_of_rows<HD, KEYS>(s, tq, warp_row, tk);
        product_of_rows<HD, KEYS>(ds, td, warp_row, tv);
        for (unsigned j = 0; j < KEYS / 8; j++)
            for (int e = 0; e < 4; e++) {
                const bool seen = key + j * 8 + lane % 4 * 2 + e % 2 <= row + 8 * (e / 2);
                const float p = seen ? exp2f(s[j][e] * scale - row_lse[e / 2]) : 0.0f;
                ds[j][e] = p * (ds[j][e] - row_delta[e / 2]);
            }
        product_with_rows<HD, KEYS>(sums, ds, tk);
    }
    for (int d = 0; d < HD / 8; d++)
        for (int e = 0; e < 4; e++) {
            const size_t column = d * 8 + lane % 4 * 2 + e % 2, t = row + 8 * (e / 2);
            if (t < end && column < shape.HD)
                dq[((t - blocks.origin) * shape.NH + head) * shape.HD + column] = store(sums[d][e] * shape.scale);
        }
}

// Rows of results are keys here, columns queries, so that p and ds can be the left operands of dv and dk.
template <int HD>
__global__ void __launch_bounds__(KEYS / 16 * LANES)
    attention_dkv_kernel(float *dk, float *dv, const floatX *dout, const floatX *q, const floatX *k, const floatX *v,
                         const float *lse, const float *delta, SpanBlocks blocks, AttentionShape shape) {
    DYNAMIC_SHARED(floatX, tiles);
    floatX *tq = tiles, *td = tq + QUERIES * tile_stride<HD>, *tk = td + QUERIES * tile_stride<HD>,
           *tv = tk + KEYS * tile_stride<HD>;
    SHARED(float, query_lse, QUERIES);
    SHARED(float, query_delta, QUERIES);
    const SpanBlock block = span_block(blocks, KEYS, true);
    const size_t group = shape.NH / shape.NKV, end = block.span.end;
    const size_t key_end = block.begin + KEYS < end ? block.begin + KEYS : end;
    const HeadRows keys = {shape.NKV, blockIdx.y, shape.HD, shape.packed};
    const unsigned lane = threadIdx.x % LANES, warp_row = threadIdx.x / LANES * 16;
    const size_t row = block.begin + warp_row + lane / 4; // and row + 8: keys
    const size_t first =
        block.begin > block.span.begin ? block.begin : block.span.begin; // query that sees a key of the block
    const float scale = shape.scale * LOG2_E;
    float sum_k[HD / 8][4] = {}, sum_v[HD / 8][4] = {};
    tile_read<HD>(tk, k, keys, block.begin, key_end, KEYS);
    tile_read<HD>(tv, v, keys, block.begin, key_end, KEYS);
    for (size_t head = blockIdx.y * group; head < (blockIdx.y + 1) * group; head++) {
        const HeadRows queries = {shape.NH, head, shape.HD, shape.packed};
        for (size_t query = first; query < end; query += QUERIES) {
            __syncthreads();
            tile_read<HD>(tq, q, queries, query - blocks.origin, end - blocks.origin, QUERIES);
            tile_read<HD>(td, dout, queries, query - blocks.origin, end - blocks.origin, QUERIES);
            for (unsigned i = threadIdx.x; i < QUERIES; i += blockDim.x) {
                const size_t place = (query + i - blocks.origin) * shape.NH + head;
                query_lse[i] = query + i < end ? lse[place] * LOG2_E : INFINITY; // beyond the end: p = 0
                query_delta[i] = query + i < end ? delta[place] : 0.0f;
            }
            __syncthreads();
            for (unsigned half = 0; half < QUERIES; half += 32) { // keeps fewer results in registers at a time
                float p[4][4] = {}, ds[4][4] = {};
                product_of_rows<HD, 32>(p, tk, warp_row, tq + half * tile_stride<HD>);
                product_of_rows<HD, 32>(ds, tv, warp_row, td + half * tile_stride<HD>);
                for (unsigned j = 0; j < 4; j++)
                    for (int e = 0; e < 4; e++) {
                        const unsigned column = half + j * 8 + lane % 4 * 2 + e % 2;
                        const bool seen = query + column >= row + 8 * (e / 2);
                        p[j][e] = seen ? exp2f(p[j][e] * scale - query_lse[column]) : 0.0f;
                        ds[j][e] = p[j][e] * (ds[j][e] - query_delta[column]);
                    }
                product_with_rows<HD, 32>(sum_v, p, td + half * tile_stride<HD>);
                product_with_rows<HD, 32>(sum_k, ds, tq + half * tile_stride<HD>);
            }
        }
    }
    for (int d = 0; d < HD / 8; d++)
        for (int e = 0; e < 4; e++) {
            const size_t column = d * 8 + lane % 4 * 2 + e % 2, t = row + 8 * (e / 2);
            const size_t place = (t * shape.NKV + blockIdx.y) * shape.HD + column;
            if (t < key_end && column < shape.HD) {
                dk[place] += sum_k[d][e] * shape.scale;
                dv[place] += sum_v[d][e];
            }
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
        const size_t bytes = (QUERIES + 2 * KEYS) * tile_stride<PADDED> * sizeof(floatX);
        SpanBlocks blocks;
        for (size_t from = 0; from < spans.count;) {
            from = span_blocks(&blocks, spans, from, QUERIES, false);
            LAUNCH((attention_forward_kernel<PADDED>), dim3(blocks.first[blocks.count], (unsigned)NH),
                   ATTENTION_THREADS, bytes)
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
    LAUNCH((attention_delta_kernel), dim3((unsigned)blocks_for(rows, ATTENTION_THREADS / LANES)), ATTENTION_THREADS, 0)
    (delta, (const floatX *)dout, (const floatX *)out, rows, HD);
    with_head_size(HD, [&](auto PADDED) {
        const size_t bytes = (2 * QUERIES + 2 * KEYS) * tile_stride<PADDED> * sizeof(floatX);
        SpanBlocks blocks;
        for (size_t from = 0, next; from < spans.count; from = next) {
            next = span_blocks(&blocks, spans, from, QUERIES, false);
            LAUNCH((attention_dq_kernel<PADDED>), dim3(blocks.first[blocks.count], (unsigned)NH), ATTENTION_THREADS,
                   bytes)
            ((floatX *)dq, (const floatX *)dout, (const floatX *)q, (const floatX *)k, (const floatX *)v,
             (const float *)lse, delta, blocks, shape);
            span_blocks(&blocks, spans, from, KEYS, true);
            LAUNCH((attention_dkv_kernel<PADDED>), dim3(blocks.first[blocks.count], (unsigned)NKV), KEYS / 16 * LANES,
                   bytes)
            ((float *)dk, (float *)dv, (const floatX *)dout, (const floatX *)q, (const floatX *)k, (const floatX *)v,
             (const float *)lse, delta, blocks, shape);
        }
    });
}

#endif
