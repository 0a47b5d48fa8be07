/*
Attention kernels of op set "cuda" for heads above 256, in the scheme of attention.cuh. The sums of 16 rows do not fit
one warp's registers, so several warps share the rows, and each has a part of the columns. A warp holds its columns of
the rows in registers, and multiplies them with the same columns of a tile. So each warp has a part of every score. The
parts meet in shared memory and are added in one order. Then every warp has its rows' whole scores, and adds to its own
columns.
*/
#ifndef LLMC_CUDA_ATTENTION_WIDE_CUH
#define LLMC_CUDA_ATTENTION_WIDE_CUH
#include "attention_tiles.cuh"

// PARTS: warps that share 16 rows, with HD / PARTS columns each. passing: rows of a tile
struct WideTiles {
    int parts, passing, stages;
};
constexpr unsigned WIDE_WARPS = 8, WIDE_THREADS = WIDE_WARPS * LANES;

// Tiles, as the registers allow. A warp's columns of these tensors are in registers: forward two, dq three, dk and dv
// two
template <int HD>
constexpr WideTiles WIDE_FORWARD = sizeof(floatX) == 2 ? WideTiles{HD / 256, 32, 1} : WideTiles{HD / 128, 16, 1};
template <int HD> constexpr WideTiles WIDE_DQ = {HD / 128, sizeof(floatX) == 2 ? 32 : 16, 1};
template <int HD>
constexpr WideTiles WIDE_DKV = sizeof(floatX) == 2 ? WideTiles{HD / 256, 16, 2} : WideTiles{HD / 128, 16, 1};

// Rows that a block holds; scores: how many score tensors meet in shared memory
template <WideTiles T> constexpr unsigned wide_rows = WIDE_WARPS / T.parts * 16;
template <int HD, WideTiles T> constexpr size_t wide_bytes(unsigned scores) {
    return 2 * T.stages * T.passing * tile_stride<HD> * sizeof(floatX) + scores * WIDE_WARPS * 16 * T.passing * 4;
}
constexpr size_t LEAST_SHARED = 99 << 10; // shared memory of a block on architectures 86, 89 and 120, the least of all
static_assert(wide_bytes<GPU_MOST_HEAD, WIDE_FORWARD<GPU_MOST_HEAD>>(1) <= LEAST_SHARED &&
              wide_bytes<GPU_MOST_HEAD, WIDE_DQ<GPU_MOST_HEAD>>(2) <= LEAST_SHARED &&
              wide_bytes<GPU_MOST_HEAD, WIDE_DKV<GPU_MOST_HEAD>>(1) <= LEAST_SHARED);

// Loads a = x rows [begin, begin + 16) of one head, columns [column, column + N); zeros from `end` on, and beyond h.HD.
template <int N>
__device__ inline void hold_rows(OperandA (&a)[N / 16], const floatX *x, HeadRows h, size_t begin, size_t end,
                                 size_t column) {
    const unsigned lane = threadIdx.x % LANES;
#pragma unroll
    for (int d = 0; d < N / 16; d++)
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            const size_t row = begin + lane / 4 + i / 2 % 2 * 8, c = column + d * 16 + lane % 4 * 2 + i % 2 + i / 4 * 8;
            a[d].x[i] = row < end && c < h.HD ? x[(row * h.heads + h.head) * h.HD + c] : store(0.0f);
        }
}

// Adds a b[N, COLUMNS]^T to c[16 rows][N].
template <int HD, int N, int COLUMNS>
__device__ inline void product_of_held(float (*c)[4], const OperandA (&a)[COLUMNS / 16], const floatX *b) {
    constexpr int SUMS = 32 / N; // four independent sums, so that a warp's instructions do not wait for each other
    float sums[SUMS][N / 8][4] = {};
#pragma unroll
    for (int d = 0; d < COLUMNS; d += 16)
        mma_columns<N>(sums[d / 16 % SUMS], a[d / 16], [&](int n) { return load_b(b, tile_stride<HD>, n, d); });
#pragma unroll
    for (int j = 0; j < N / 8; j++)
        for (int e = 0; e < 4; e++) c[j][e] = SUMS == 1 ? sums[0][j][e] : sums[0][j][e] + sums[SUMS - 1][j][e];
}

// ---- scores of several warps: meeting[WIDE_WARPS][N / 8][LANES][4] --------------------------------------------------
template <int N> __device__ inline float *met_scores(float *meeting, unsigned warp, int j) {
    return meeting + ((warp * (N / 8) + j) * LANES + threadIdx.x % LANES) * 4;
}
template <int N> __device__ inline void meet(float *meeting, float (*s)[4]) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        Pack<float, 4> own;
        for (int e = 0; e < 4; e++) own.x[e] = s[j][e];
        pack_write(met_scores<N>(meeting, threadIdx.x / LANES, j), own);
    }
}
// Computes s = the sum of the parts of WARPS warps from `first` on.
template <int N, unsigned WARPS> __device__ inline void add_met(float (*s)[4], float *meeting, unsigned first) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        Pack<float, 4> part[WARPS];
#pragma unroll
        for (unsigned w = 0; w < WARPS; w++) part[w] = pack_read<4>(met_scores<N>(meeting, first + w, j));
        for (int e = 0; e < 4; e++) {
            s[j][e] = part[0].x[e];
#pragma unroll
            for (unsigned w = 1; w < WARPS; w++) s[j][e] += part[w].x[e];
        }
    }
}

// Streams tiles of two tensors, each through its own buffer: one is fetched while the other is used.
template <typename BringFirst, typename UseFirst, typename BringSecond, typename UseSecond>
__device__ inline void pass_in_turn(unsigned count, BringFirst bring_first, UseFirst use_first,
                                    BringSecond bring_second, UseSecond use_second) {
    if (count) bring_first(0);
    fetch_commit();
    for (unsigned i = 0; i < count; i++) {
        fetch_wait<0>();
        __syncthreads(); // the first tensor's tile has arrived, and all threads are done with the second's
        bring_second(i);
        fetch_commit();
        use_first(i);
        fetch_wait<0>();
        __syncthreads();
        if (i + 1 < count) bring_first(i + 1);
        fetch_commit();
        use_second(i);
    }
}

// ---- forward --------------------------------------------------------------------------------------------------------
// RANGE, sums: as in attention_forward_kernel
template <int HD, WideTiles T = WIDE_FORWARD<HD>, bool RANGE = false>
__global__ void __launch_bounds__(WIDE_THREADS, 1)
    attention_wide_kernel(void *out, float *lse, const floatX *q, const floatX *k, const floatX *v, SpanBlocks blocks,
                          HeadShape shape, bool accumulate, bool sums) {
    constexpr unsigned KEYS = T.passing, PARTS = T.parts, OWN = HD / PARTS;
    DYNAMIC_SHARED(floatX, tk);
    floatX *const tv = tk + KEYS * tile_stride<HD>;
    float *const meeting = (float *)(tv + KEYS * tile_stride<HD>);
    const SpanBlock block = span_block(blocks, wide_rows<T>, false);
    const size_t head = blockIdx.y;
    const HeadRows queries = {shape.NH, head, shape.HD, shape.packed},
                   keys = {shape.NKV, head / (shape.NH / shape.NKV), shape.HD, shape.packed};
    const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warp_row = warp / PARTS * 16;
    const unsigned column = warp % PARTS * OWN;                                        // first column of this warp
    const unsigned row = (unsigned)(block.begin - block.origin) + warp_row + lane / 4; // this lane's rows of q and out:
                                                                                       // row and row + 8
    const int rows = (int)(block.end - block.begin) - (int)(warp_row + lane / 4);      // remaining rows from `row` on
    const WarpSight sight = warp_sight(block, warp_row);
    const float scale = shape.scale * LOG2_E;
    float o[OWN / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY},
                  folded_largest[2] = {}; // largest scores before scaling
    float s[KEYS / 8][4];
    WeightSum sum[2] = {};
    bool folded = false;
    OperandA held[OWN / 16];
    // calls f(the lane's first or second row, an element of o, its place in out)
    const auto for_outputs = [&](auto f) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (8 * i >= rows) continue;
            const size_t to = ((size_t)(row + 8 * i) * shape.NH + head) * shape.HD;
#pragma unroll
            for (int d = 0; d < (int)OWN / 8; d++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const size_t c = column + d * 8 + lane % 4 * 2 + e;
                    if (c >= shape.HD) continue;
                    if (RANGE && sums)
                        f(i, o[d][2 * i + e], ((float *)out)[to + c]);
                    else
                        f(i, o[d][2 * i + e], ((floatX *)out)[to + c]);
                }
        }
    };
    const size_t at = (block.keys.begin * keys.heads + keys.head) * keys.HD; // offset of the first key
    const auto bring = [&](floatX *tile, const floatX *from, unsigned i) {
        rows_fetch<HD, WIDE_THREADS>(tile, from + at + i * KEYS * keys.heads * keys.HD, keys, sight.length - i * KEYS,
                                     KEYS);
    };
    const auto score = [&](unsigned i) {
        if (!sees(sight, i * KEYS, KEYS, blocks.window)) return;
        product_of_held<HD, KEYS, OWN>(s, held, tk + column);
        meet<KEYS>(meeting, s);
    };
    const auto add_values = [&](unsigned i) {
        const unsigned key = i * KEYS;
        float shrink[2];
        if (!sees(sight, key, KEYS, blocks.window)) return;
        add_met<KEYS, PARTS>(s, meeting, warp / PARTS * PARTS);
        hide<KEYS, RANGE>(s, sight, key, lane / 4, blocks.window);
        weights_of<KEYS>(s, scale, largest, sum, shrink, RANGE || has_far(sight, key, blocks.window));
        if (shrink[0] != 1.0f || shrink[1] != 1.0f)
#pragma unroll
            for (unsigned d = 0; d < OWN / 8; d++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[d][e] *= shrink[e / 2];
        product_with_rows<HD, KEYS, OWN>(o, s, tv + column);
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
            if (8 * i < rows) {
                largest[i] = lse[(size_t)(row + 8 * i) * shape.NH + head] * LOG2_E;
                if (lane % 4 == 0 && largest[i] != -INFINITY) sum[i] = 1;
            }
        __syncthreads(); // all parts have read lse
    }
    hold_rows<OWN>(held, q, queries, block.begin + warp_row - block.origin, block.end - block.origin, column);
    pass_in_turn(
        tiles_in<KEYS>(sight.length), [&](unsigned i) { bring(tk, k, i); }, score, [&](unsigned i) { bring(tv, v, i); },
        add_values);
    float total[2], shrink[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] = (float)quad_sum(sum[i]);
        if (folded) shrink[i] = exp2f(folded_largest[i] - largest[i]);
        if (8 * i < rows && lane % 4 == 0 && column == 0)
            lse[(size_t)(row + 8 * i) * shape.NH + head] = largest[i] * LN_2 + logf(total[i]);
        if (total[i] == 0.0f) total[i] = 1.0f, shrink[i] = 0.0f; // the row has seen no key: its output is 0
    }
    for_outputs([&](int i, float sum, auto &to) {
        if (FOLDS && folded) sum += load(to) * shrink[i];
        set_value(&to, sum / total[i]);
    });
}

// ---- backward -------------------------------------------------------------------------------------------------------
template <int HD, WideTiles T = WIDE_DQ<HD>, bool SUMS = false>
__global__ void __launch_bounds__(WIDE_THREADS, 1)
    attention_wide_dq_kernel(Result<SUMS> *dq, const floatX *dout, const floatX *q, const floatX *k, const floatX *v,
                             const float *lse, const float *delta, SpanBlocks blocks, HeadShape shape,
                             bool accumulate) {
    constexpr unsigned KEYS = T.passing, PARTS = T.parts, OWN = HD / PARTS;
    DYNAMIC_SHARED(floatX, tk);
    floatX *const tv = tk + KEYS * tile_stride<HD>;
    float *const meeting_s = (float *)(tv + KEYS * tile_stride<HD>), *const meeting_ds =
                                                                         meeting_s + WIDE_WARPS * 16 * KEYS;
    const SpanBlock block = span_block(blocks, wide_rows<T>, false);
    const size_t head = blockIdx.y;
    const HeadRows queries = {shape.NH, head, shape.HD, shape.packed},
                   keys = {shape.NKV, head / (shape.NH / shape.NKV), shape.HD, shape.packed};
    const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warp_row = warp / PARTS * 16;
    const unsigned column = warp % PARTS * OWN;                                        // first column of this warp
    const unsigned row = (unsigned)(block.begin - block.origin) + warp_row + lane / 4; // this lane's rows of q and dq:
                                                                                       // row and row + 8
    const int rows = (int)(block.end - block.begin) - (int)(warp_row + lane / 4);      // remaining rows from `row` on
    const WarpSight sight = warp_sight(block, warp_row);
    const float scale = shape.scale * LOG2_E;
    float sums[OWN / 8][4] = {}, row_lse[2] = {INFINITY, INFINITY}, row_delta[2] = {0.0f, 0.0f};
    float s[KEYS / 8][4], ds[KEYS / 8][4];
    OperandA held_q[OWN / 16], held_d[OWN / 16];
    for (int i = 0; i < 2; i++) {
        const size_t place = (size_t)(row + 8 * i) * shape.NH + head;
        if (8 * i < rows) row_lse[i] = lse[place] * LOG2_E, row_delta[i] = delta[place];
    }
    const size_t at = (block.keys.begin * keys.heads + keys.head) * keys.HD; // offset of the first key
    const auto bring = [&](floatX *tile, const floatX *from, unsigned i) {
        rows_fetch<HD, WIDE_THREADS>(tile, from + at + i * KEYS * keys.heads * keys.HD, keys, sight.length - i * KEYS,
                                     KEYS);
    };
    const auto slope = [&](unsigned i) {
        if (!sees(sight, i * KEYS, KEYS, blocks.window)) return;
        product_of_held<HD, KEYS, OWN>(ds, held_d, tv + column);
        meet<KEYS>(meeting_ds, ds);
    };
    const auto add_keys = [&](unsigned i) {
        const unsigned key = i * KEYS;
        const bool seen = sees(sight, key, KEYS, blocks.window);
        if (seen) {
            product_of_held<HD, KEYS, OWN>(s, held_q, tk + column);
            meet<KEYS>(meeting_s, s);
        }
        __syncthreads();
        if (!seen) return;
        add_met<KEYS, PARTS>(s, meeting_s, warp / PARTS * PARTS);
        add_met<KEYS, PARTS>(ds, meeting_ds, warp / PARTS * PARTS);
        hide<KEYS, SUMS>(s, sight, key, lane / 4, blocks.window);
#pragma unroll
        for (unsigned j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                ds[j][e] = exp2f(fmaf(s[j][e], scale, -row_lse[e / 2])) * (ds[j][e] - row_delta[e / 2]);
        product_with_rows<HD, KEYS, OWN>(sums, ds, tk + column);
    };
    const size_t first = block.begin + warp_row - block.origin;
    hold_rows<OWN>(held_q, q, queries, first, block.end - block.origin, column);
    hold_rows<OWN>(held_d, dout, queries, first, block.end - block.origin, column);
    pass_in_turn(
        tiles_in<KEYS>(sight.length), [&](unsigned i) { bring(tv, v, i); }, slope, [&](unsigned i) { bring(tk, k, i); },
        add_keys);
#pragma unroll
    for (unsigned d = 0; d < OWN / 8; d++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const size_t c = column + d * 8 + lane % 4 * 2 + e % 2;
            if (8 * (e / 2) >= rows || c >= shape.HD) continue;
            Result<SUMS> *const to = dq + ((size_t)(row + 8 * (e / 2)) * shape.NH + head) * shape.HD + c;
            set_value(to, sums[d][e] * shape.scale + (SUMS && accumulate ? load(*to) : 0.0f));
        }
}

// Computes dk and dv. Results have keys as rows and queries as columns. Of the warps that share 16 keys, half compute
// scores and own dv, half compute dout v^T and own dk.
template <int HD, WideTiles T = WIDE_DKV<HD>>
__global__ void __launch_bounds__(WIDE_THREADS, 1)
    attention_wide_dkv_kernel(float *dk, float *dv, const floatX *dout, const floatX *q, const floatX *k,
                              const floatX *v, const float *lse, const float *delta, SpanBlocks blocks,
                              HeadShape shape) {
    constexpr unsigned QUERIES = T.passing, PARTS = T.parts, OWN = HD / PARTS, TILE = QUERIES * tile_stride<HD>;
    DYNAMIC_SHARED(floatX, stages); // tiles of queries and of their outputs' gradients
    float *const meeting = (float *)(stages + 2 * T.stages * TILE);
    const SpanBlock block = span_block(blocks, wide_rows<T> / 2, true);
    const size_t window = (size_t)blocks.window, group = shape.NH / shape.NKV, end = block.span.end,
                 key_end = block.end;
    const HeadRows keys = {shape.NKV, blockIdx.y, shape.HD, shape.packed},
                   queries = {shape.NH, 0, shape.HD, shape.packed};
    const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warp_row = warp / (2 * PARTS) * 16;
    const unsigned first_warp = warp / (2 * PARTS) * 2 * PARTS, column = warp % PARTS * OWN; // the warp's first column
    const bool owns_dk = warp - first_warp >= PARTS;
    const size_t warp_first = block.begin + warp_row, row = warp_first + lane / 4; // this lane's keys: row and row + 8
    // queries that see a key of the block
    const size_t first = block.begin > block.span.begin ? block.begin : block.span.begin,
                 query_end = end - key_end >= window ? key_end + window - 1 : end;
    const float scale = shape.scale * LOG2_E;
    float sums[OWN / 8][4] = {}; // this warp's sums: dk or dv
    OperandA held[OWN / 16];     // this warp's operands: v or k
    // from here on queries, and the warp's keys, count from `first`
    const unsigned count = (unsigned)(query_end - first), head = blockIdx.y * (unsigned)group;
    const int key = (int)((long long)warp_first - (long long)first);
    const size_t first_row = first - block.origin;
    unsigned coming = 0, coming_head = head, next = 0;
    const auto bring = [&](unsigned, unsigned stage) {
        floatX *const tq = stages + 2 * stage * TILE, *const td = tq + TILE;
        const size_t at = (first_row + coming) * shape.NH + coming_head;
        rows_fetch<HD, WIDE_THREADS>(tq, q + at * shape.HD, queries, count - coming, QUERIES);
        rows_fetch<HD, WIDE_THREADS>(td, dout + at * shape.HD, queries, count - coming, QUERIES);
        if (const unsigned i = threadIdx.x; i < QUERIES) {
            fetch<4>(beside_row<HD>(tq, i), lse + at + i * shape.NH, coming + i < count);
            fetch<4>(beside_row<HD>(td, i), delta + at + i * shape.NH, coming + i < count);
        }
        coming += QUERIES;
        if (coming >= count) coming = 0, coming_head++;
    };
    // rows after the end are zero, so their products are zero, whatever p is
    const auto use = [&](unsigned, unsigned stage) {
        const floatX *const tq = stages + 2 * stage * TILE, *const td = tq + TILE;
        const int query = (int)next;
        float p[QUERIES / 8][4], ds[QUERIES / 8][4];
        next = next + QUERIES < count ? next + QUERIES : 0; // next query tile of this head, or the next head's first
        // whether a query of the tile sees a key of this warp
        const bool seen = query + (int)QUERIES > key && warp_first < key_end && query - key - 15 < blocks.window;
        if (seen) {
            product_of_held<HD, QUERIES, OWN>(p, held, (owns_dk ? td : tq) + column);
            meet<QUERIES>(meeting, p);
        }
        __syncthreads();
        if (!seen) return;
        add_met<QUERIES, PARTS>(p, meeting, first_warp);
        if (owns_dk) add_met<QUERIES, PARTS>(ds, meeting, first_warp + PARTS);
        const int lane_key = key + (int)(lane / 4) - query;
        if (query < key + 15) hide_unseen<QUERIES, true>(p, lane_key);
        if (query + (int)QUERIES - 1 - key >= blocks.window) hide_far<QUERIES, true>(p, lane_key + blocks.window);
#pragma unroll
        for (unsigned j = 0; j < QUERIES / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const unsigned c = j * 8 + lane % 4 * 2 + e % 2;
                p[j][e] = exp2f(fmaf(p[j][e], scale, -LOG2_E * *beside_row<HD>(tq, c)));
                if (owns_dk) p[j][e] *= ds[j][e] - *beside_row<HD>(td, c);
            }
        product_with_rows<HD, QUERIES, OWN>(sums, p, (owns_dk ? tq : td) + column);
    };
    hold_rows<OWN>(held, owns_dk ? v : k, keys, warp_first, key_end, column);
    pass_tiles<T.stages>((unsigned)group * tiles_in<QUERIES>(count), bring, use);
#pragma unroll
    for (unsigned d = 0; d < OWN / 8; d++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const size_t c = column + d * 8 + lane % 4 * 2 + e % 2, t = row + 8 * (e / 2);
            if (t >= key_end || c >= shape.HD) continue;
            float *const to = (owns_dk ? dk : dv) + (t * shape.NKV + blockIdx.y) * shape.HD + c;
            *to += sums[d][e] * (owns_dk ? shape.scale : 1.0f);
        }
}

#endif
