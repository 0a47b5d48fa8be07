/*
Attention of op set "cuda" by our own kernels, without cuDNN. The cuDNN path is checked against these kernels, too. It
is causal and takes any ratio of query to key/value heads. It follows FlashAttention-2 (arXiv 2307.08691): a running
softmax over tiles of keys; no matrix of scores is ever stored.

Forward and dq: a block holds queries of one head, 16 a warp, and walks the keys they see. dk, dv: a block holds keys of
one key/value head, 16 a warp or a pair of warps, and walks the queries that see them, for every query head of this
key/value head. Then it adds to dk and dv once. Each sum has one owner, so there are no atomics; in exchange scores are
computed once more. Head sizes are padded with zeros to the next of HEAD_SIZES.
*/
#ifndef LLMC_CUDA_ATTENTION_CUH
#define LLMC_CUDA_ATTENTION_CUH
#include "attention_split.cuh"
#include "attention_wgmma.cuh"
#include "attention_wide.cuh"

// ---- forward --------------------------------------------------------------------------------------------------------
// Runs forward. RANGE: a query may see no key, or keys that end before it; then accumulate starts from the out and lse
// of earlier ranges of keys, and sums tells that out is fp32, not floatX
template <int HD, Tiles T = FORWARD_TILES<HD>, bool RANGE = false>
__global__ void __launch_bounds__(block_threads<T>, LEAST_BLOCKS<HD>)
    attention_forward_kernel(void *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                             SpanBlocks blocks, HeadShape shape, bool accumulate, bool sums) {
    constexpr unsigned KEYS = T.passing, TILE = KEYS * tile_stride<HD>, THREADS = block_threads<T>;
    DYNAMIC_SHARED(floatX, tiles);
    floatX *const tq = tiles, *const stages = tq + T.held * tile_stride<HD>; // tiles of keys and values
    const SpanBlock block = span_block(blocks, T.held, false);
    const size_t head = blockIdx.y, end = block.end;
    const HeadRows queries = {shape.NH, head, shape.HD, shape.packed},
                   keys = {shape.NKV, head / (shape.NH / shape.NKV), shape.HD, shape.packed};
    const unsigned lane = threadIdx.x % LANES, warp_row = threadIdx.x / LANES * 16;
    const size_t row = block.begin + warp_row + lane / 4; // this lane's rows: row and row + 8
    const WarpSight sight = warp_sight(block, warp_row);
    const float scale = shape.scale * LOG2_E;
    float o[HD / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY},
                 folded_largest[2] = {}; // largest scores before scaling
    WeightSum sum[2] = {};
    bool folded = false;
    // calls f(the lane's first or second row, an element of o, its place in out)
    const auto for_outputs = [&](auto f) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row + 8 * i >= end) continue;
            const size_t to = ((row + 8 * i - block.origin) * shape.NH + head) * shape.HD;
#pragma unroll
            for (int d = 0; d < HD / 8; d++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const size_t column = d * 8 + lane % 4 * 2 + e;
                    if (column >= shape.HD) continue;
                    if (RANGE && sums)
                        f(i, o[d][2 * i + e], ((float *)out)[to + column]);
                    else
                        f(i, o[d][2 * i + e], ((floatX *)out)[to + column]);
                }
        }
    };
    const auto bring = [&](unsigned i, unsigned stage) {
        const size_t key = block.keys.begin + i * KEYS;
        tile_fetch<HD, THREADS>(stages + 2 * stage * TILE, k, keys, key, block.keys.end, KEYS);
        tile_fetch<HD, THREADS>(stages + (2 * stage + 1) * TILE, v, keys, key, block.keys.end, KEYS);
    };
    const auto use = [&](unsigned i, unsigned stage) {
        const floatX *const tk = stages + 2 * stage * TILE, *const tv = tk + TILE;
        const unsigned key = i * KEYS;
        float s[KEYS / 8][4] = {}, shrink[2];
        if (!sees(sight, key, KEYS, blocks.window)) return;
        product_of_rows<HD, KEYS>(s, tq, warp_row, tk);
        hide<KEYS, RANGE>(s, sight, key, lane / 4, blocks.window);
        weights_of<KEYS>(s, scale, largest, sum, shrink,
                         (RANGE && sight.first < 0) || has_far(sight, key, blocks.window));
        if (shrink[0] != 1.0f || shrink[1] != 1.0f) // after the first tiles rarely needed
#pragma unroll
            for (int d = 0; d < HD / 8; d++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[d][e] *= shrink[e / 2];
        product_with_rows<HD, KEYS>(o, s, tv);
        if (FOLDS && (key + KEYS) % FOLD_KEYS == 0) {
            shrink[0] = exp2f(folded_largest[0] - largest[0]), shrink[1] = exp2f(folded_largest[1] - largest[1]);
            for_outputs([&](int i, float &sum, auto &to) {
                set_value(&to, folded ? load(to) * shrink[i] + sum : sum);
                sum = 0.0f;
            });
            folded = true, folded_largest[0] = largest[0], folded_largest[1] = largest[1];
        }
    };
    if (RANGE && accumulate) {
        for_outputs([&](int, float &sum, const auto &from) { sum = load(from); });
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (row + 8 * i < end) {
                largest[i] = lse[(row + 8 * i - block.origin) * shape.NH + head] * LOG2_E;
                if (lane % 4 == 0 && largest[i] != -INFINITY) sum[i] = 1;
            }
    }
    tile_fetch<HD, THREADS>(tq, q, queries, block.begin - block.origin, end - block.origin, T.held);
    pass_tiles<T.stages>(tiles_in<KEYS>(sight.length), bring, use);
    float total[2], shrink[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] = (float)quad_sum(sum[i]);
        if (folded) shrink[i] = exp2f(folded_largest[i] - largest[i]);
        if (row + 8 * i < end && lane % 4 == 0)
            lse[(row + 8 * i - block.origin) * shape.NH + head] = largest[i] * LN_2 + logf(total[i]);
        if (total[i] == 0.0f) total[i] = 1.0f, shrink[i] = 0.0f; // the row has seen no key: its output is 0
    }
    for_outputs([&](int i, float sum, auto &to) {
        if (FOLDS && folded) sum += load(to) * shrink[i];
        set_value(&to, sum / total[i]);
    });
}

// ---- backward: p = exp(s - lse), ds = p (dout v^T - delta), delta = dout . out --------------------------------------
constexpr unsigned DELTA_THREADS = 128;

// Computes delta[rows], rows = queries x heads, one warp per row.
__global__ void attention_delta_kernel(float *delta, const floatX *dout, const floatX *out, size_t rows, size_t HD) {
    const size_t row = (size_t)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    float sum = 0.0f;
    if (row >= rows) return;
    for (size_t d = threadIdx.x % LANES; d < HD; d += LANES) sum += load(dout[row * HD + d]) * load(out[row * HD + d]);
    sum = warp_sum(sum);
    if (threadIdx.x % LANES == 0) delta[row] = sum;
}

template <int HD, Tiles T = BACKWARD_TILES<HD>, bool SUMS = false>
__global__ void __launch_bounds__(block_threads<T>, LEAST_BLOCKS<HD>)
    attention_dq_kernel(Result<SUMS> *dq, const floatX *dout, const floatX *q, const floatX *k, const floatX *v,
                        const float *lse, const float *delta, SpanBlocks blocks, HeadShape shape, bool accumulate) {
    constexpr unsigned KEYS = T.passing, TILE = KEYS * tile_stride<HD>, THREADS = block_threads<T>;
    DYNAMIC_SHARED(floatX, tiles);
    floatX *const tq = tiles, *const td = tq + T.held * tile_stride<HD>,
                  *const stages = td + T.held * tile_stride<HD>; // tiles of keys and values
    const SpanBlock block = span_block(blocks, T.held, false);
    const size_t head = blockIdx.y, end = block.end;
    const HeadRows queries = {shape.NH, head, shape.HD, shape.packed},
                   keys = {shape.NKV, head / (shape.NH / shape.NKV), shape.HD, shape.packed};
    const unsigned lane = threadIdx.x % LANES, warp_row = threadIdx.x / LANES * 16;
    const size_t row = block.begin + warp_row + lane / 4; // this lane's rows: row and row + 8
    const WarpSight sight = warp_sight(block, warp_row);
    const float scale = shape.scale * LOG2_E;
    float sums[HD / 8][4] = {}, row_lse[2] = {INFINITY, INFINITY}, row_delta[2] = {0.0f, 0.0f};
    for (int i = 0; i < 2; i++) {
        const size_t place = (row + 8 * i - block.origin) * shape.NH + head;
        if (row + 8 * i < end) row_lse[i] = lse[place] * LOG2_E, row_delta[i] = delta[place];
    }
    const auto bring = [&](unsigned i, unsigned stage) {
        const size_t key = block.keys.begin + i * KEYS;
        tile_fetch<HD, THREADS>(stages + 2 * stage * TILE, k, keys, key, block.keys.end, KEYS);
        tile_fetch<HD, THREADS>(stages + (2 * stage + 1) * TILE, v, keys, key, block.keys.end, KEYS);
    };
    const auto use = [&](unsigned i, unsigned stage) {
        const floatX *const tk = stages + 2 * stage * TILE, *const tv = tk + TILE;
        const unsigned key = i * KEYS;
        float s[KEYS / 8][4] = {}, ds[KEYS / 8][4] = {};
        if (!sees(sight, key, KEYS, blocks.window)) return;
        product_of_rows<HD, KEYS>(s, tq, warp_row, tk);
        product_of_rows<HD, KEYS>(ds, td, warp_row, tv);
        hide<KEYS, SUMS>(s, sight, key, lane / 4, blocks.window);
#pragma unroll
        for (unsigned j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                ds[j][e] = exp2f(fmaf(s[j][e], scale, -row_lse[e / 2])) * (ds[j][e] - row_delta[e / 2]);
        product_with_rows<HD, KEYS>(sums, ds, tk);
    };
    tile_fetch<HD, THREADS>(tq, q, queries, block.begin - block.origin, end - block.origin, T.held);
    tile_fetch<HD, THREADS>(td, dout, queries, block.begin - block.origin, end - block.origin, T.held);
    pass_tiles<T.stages>(tiles_in<KEYS>(sight.length), bring, use);
#pragma unroll
    for (int d = 0; d < HD / 8; d++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const size_t column = d * 8 + lane % 4 * 2 + e % 2, t = row + 8 * (e / 2);
            if (t >= end || column >= shape.HD) continue;
            Result<SUMS> *const to = dq + ((t - block.origin) * shape.NH + head) * shape.HD + column;
            set_value(to, sums[d][e] * shape.scale + (SUMS && accumulate ? load(*to) : 0.0f));
        }
}

// Warps that share 16 keys. Results have keys as rows and queries as columns, so p and ds can be the left operands of
// dv and dk. The sums of 16 keys take HD registers. Above 128 two warps share 16 keys: one owns dv, the other dk, and
// both compute the scores.
template <int HD> constexpr unsigned OWNERS = HD > 128 ? 2 : 1;

template <int HD, Tiles T = BACKWARD_TILES<HD>>
__global__ void __launch_bounds__(block_threads<T> *OWNERS<HD>)
    attention_dkv_kernel(float *dk, float *dv, const floatX *dout, const floatX *q, const floatX *k, const floatX *v,
                         const float *lse, const float *delta, SpanBlocks blocks, HeadShape shape) {
    constexpr unsigned QUERIES = T.passing, TILE = QUERIES * tile_stride<HD>, THREADS = block_threads<T> * OWNERS<HD>;
    constexpr bool SHARED_KEYS = OWNERS<HD> == 2;
    DYNAMIC_SHARED(floatX, tiles);
    floatX *const tk = tiles, *const tv = tk + T.held * tile_stride<HD>,
                  *const stages = tv + T.held * tile_stride<HD>; // tiles of queries and of their outputs' gradients
    const SpanBlock block = span_block(blocks, T.held, true);
    const size_t window = (size_t)blocks.window, group = shape.NH / shape.NKV, end = block.span.end,
                 key_end = block.end;
    const HeadRows keys = {shape.NKV, blockIdx.y, shape.HD, shape.packed};
    const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warp_row = warp % (T.held / 16) * 16;
    const bool owns_dv = !SHARED_KEYS || warp < T.held / 16, owns_dk = !SHARED_KEYS || !owns_dv;
    const size_t warp_first = block.begin + warp_row, row = warp_first + lane / 4; // this lane's keys: row and row + 8
    // queries that see a key of the block
    const size_t first = block.begin > block.span.begin ? block.begin : block.span.begin,
                 query_end = end - key_end >= window ? key_end + window - 1 : end;
    const float scale = shape.scale * LOG2_E;
    float sums[SHARED_KEYS ? 1 : 2][HD / 8][4] = {}; // dv and dk, or only the sum that this warp owns
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
    // rows after the end are zero, so their products are zero, whatever p is
    const auto use = [&](unsigned, unsigned stage) {
        const floatX *const tq = stages + 2 * stage * TILE, *const td = tq + TILE;
        const size_t query = next;
        float p[QUERIES / 8][4] = {}, ds[QUERIES / 8][4] = {};
        next = query + QUERIES < query_end ? query + QUERIES : first; // next query tile of this head, or the next
                                                                      // head's first
        // no query of the tile sees a key of this warp
        if (query + QUERIES <= warp_first || warp_first >= key_end) return;
        if (query >= warp_first + 15 && query - warp_first - 15 >= window) return;
        product_of_rows<HD, QUERIES>(p, tk, warp_row, tq);
        if (query < warp_first + 15) hide_unseen<QUERIES, true>(p, (int)(row - query));
        if (query + QUERIES - 1 - warp_first >= window)
            hide_far<QUERIES, true>(p, (int)((long long)row - (long long)query + (long long)window));
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

// ---- launches -------------------------------------------------------------------------------------------------------
// Runs forward attention. Plans call it, too, so a head size without a kernel is refused before anything is allocated.
static void cuda_attention_forward(void *out, Summed *lse, const Stored *q, const Stored *k, const Stored *v,
                                   const AttentionShape *call, Summed *scratch) {
    const HeadShape shape = head_shape(call, q, k, v);
    const size_t few = split_queries(call);
    if (few)
        split_forward(out, (float *)lse, (const floatX *)q, (const floatX *)k, (const floatX *)v, call, shape,
                      (float *)scratch);
    const auto launch = [&](unsigned rows, auto start) {
        SpanBlocks blocks;
        for (size_t from = 0; from < call->spans.count;) {
            from = span_blocks(&blocks, call->spans, call->keys, from, rows, false, few);
            if (!blocks.first[blocks.count]) continue;
            start(dim3(blocks.first[blocks.count], (unsigned)shape.NH))(
                out, (float *)lse, (const floatX *)q, (const floatX *)k, (const floatX *)v, blocks, shape,
                call->accumulate != 0, call->partial != 0);
        }
    };
    const auto run = [&](auto RANGE, auto PADDED) {
        if constexpr (PADDED > 256) {
            constexpr WideTiles T = WIDE_FORWARD<PADDED>;
            launch(wide_rows<T>, [&](dim3 grid) {
                return LAUNCH((attention_wide_kernel<PADDED, T, RANGE>), grid, WIDE_THREADS,
                              (wide_bytes<PADDED, T>(1)));
            });
        } else {
            constexpr Tiles T = FORWARD_TILES<PADDED>;
            static_assert(T.held);
            launch(T.held, [&](dim3 grid) {
                return LAUNCH((attention_forward_kernel<PADDED, T, RANGE>), grid, block_threads<T>,
                              (tiles_bytes<PADDED>(T, 1)));
            });
        }
    };
    with_flag(call->partial || call->accumulate,
              [&](auto RANGE) { with_head_size<HEAD_SIZES>(shape.HD, [&](auto HD) { run(RANGE, HD); }); });
}

static void cuda_attention_backward(void *dq, Summed *dk, Summed *dv, const Stored *dout, const Stored *out,
                                    const Stored *q, const Stored *k, const Stored *v, const Summed *lse,
                                    const AttentionShape *call, Summed *scratch) {
    const HeadShape shape = head_shape(call, q, k, v, dout);
    const Spans spans = call->spans;
    const size_t NH = shape.NH, HD = shape.HD;
    const size_t first = spans.count ? spans.span[0].row * NH : 0, rows = spans_rows(spans) * NH - first;
    float *const delta = (float *)scratch;
    if (!rows) return;
    LAUNCH((attention_delta_kernel), dim3((unsigned)blocks_for(rows, DELTA_THREADS / LANES)), DELTA_THREADS, 0)
    (delta + first, (const floatX *)dout + first * HD, (const floatX *)out + first * HD, rows, HD);
    if (hopper_backward(dq, (float *)dk, (float *)dv, (const floatX *)dout, (const floatX *)q, (const floatX *)k,
                        (const floatX *)v, (const float *)lse, delta, call, shape))
        return;
    const auto launch = [&](auto SUMS, unsigned rows, unsigned key_rows, auto start_dq, auto start_dkv) {
        SpanBlocks blocks;
        for (size_t from = 0, next; from < spans.count; from = next) {
            next = span_blocks(&blocks, spans, call->keys, from, rows, false);
            start_dq(dim3(blocks.first[blocks.count], (unsigned)NH))(
                (Result<SUMS> *)dq, (const floatX *)dout, (const floatX *)q, (const floatX *)k, (const floatX *)v,
                (const float *)lse, delta, blocks, shape, call->accumulate != 0);
            span_blocks(&blocks, spans, call->keys, from, key_rows, true);
            if (!blocks.first[blocks.count]) continue; // no query sees a key of the range
            start_dkv(dim3(blocks.first[blocks.count], (unsigned)shape.NKV))(
                (float *)dk, (float *)dv, (const floatX *)dout, (const floatX *)q, (const floatX *)k, (const floatX *)v,
                (const float *)lse, delta, blocks, shape);
        }
    };
    const auto run = [&](auto SUMS, auto PADDED) {
        if constexpr (PADDED > 256) {
            constexpr WideTiles T = WIDE_DQ<PADDED>, OF_KEYS = WIDE_DKV<PADDED>;
            launch(
                SUMS, wide_rows<T>, wide_rows<OF_KEYS> / 2,
                [&](dim3 grid) {
                    return LAUNCH((attention_wide_dq_kernel<PADDED, T, SUMS>), grid, WIDE_THREADS,
                                  (wide_bytes<PADDED, T>(2)));
                },
                [&](dim3 grid) {
                    return LAUNCH((attention_wide_dkv_kernel<PADDED, OF_KEYS>), grid, WIDE_THREADS,
                                  (wide_bytes<PADDED, OF_KEYS>(1)));
                });
        } else {
            constexpr Tiles T = BACKWARD_TILES<PADDED>;
            static_assert(T.held);
            launch(
                SUMS, T.held, T.held,
                [&](dim3 grid) {
                    return LAUNCH((attention_dq_kernel<PADDED, T, SUMS>), grid, block_threads<T>,
                                  (tiles_bytes<PADDED>(T, 2)));
                },
                [&](dim3 grid) {
                    return LAUNCH((attention_dkv_kernel<PADDED>), grid, block_threads<T> * OWNERS<PADDED>,
                                  (tiles_bytes<PADDED>(T, 2)));
                });
        }
    };
    with_flag(call->partial,
              [&](auto SUMS) { with_head_size<HEAD_SIZES>(HD, [&](auto PADDED) { run(SUMS, PADDED); }); });
}

#endif
