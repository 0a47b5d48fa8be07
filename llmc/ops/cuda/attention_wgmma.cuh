/*
Backward of attention by Hopper's products and loads of tiles (wgmma.cuh): bf16, heads of 64, 128 and 256. Two passes,
as in attention.cuh: dk and dv by tiles of keys, dq by tiles of queries. Each sum has one owner and a fixed order, so
results are the same every time. Scores are computed in both passes; no memory is needed besides delta.

A block has three warp groups. The producer loads tiles into a ring of stages. Two groups compute. In the pass of dk and
dv their rows are keys, so p and ds are left operands of dv += p dout and dk += ds q without leaving registers:

    heads of 64, 128    a group has 64 keys, and both sums
    heads of 256        both groups have the same 64 keys. The first computes p and sums dv. It hands p in fp32 to the
                        second, which computes ds and sums dk

A tile may have rows beyond the block's: zeros outside the tensor, or rows of a neighbouring span. Their p and ds are 0.
These zeros are multiplied with the rows' values, which must be finite.
*/
#ifndef LLMC_CUDA_ATTENTION_WGMMA_CUH
#define LLMC_CUDA_ATTENTION_WGMMA_CUH
#include "attention_tiles.cuh"
#include "wgmma.cuh"
#ifdef PRECISION_BF16

constexpr unsigned CONSUMERS = 2, CONSUMER_WARPS = CONSUMERS * 4, HOPPER_THREADS = (CONSUMERS + 1) * GROUP_THREADS;

// Pass of dk and dv: keys of a block; stages of a tile of 64 queries and one of their outputs' gradients
template <int HD> constexpr bool SHARED_KEYS = HD > 128;
template <int HD> constexpr unsigned DKV_KEYS = SHARED_KEYS<HD> ? 64 : 128;
template <int HD> constexpr unsigned DKV_STAGES = HD > 128 ? 2 : HD > 64 ? 4 : 6;
constexpr unsigned DKV_QUERIES = 64;

// Pass of dq: keys of a tile; stages of one tile of keys or values
template <int HD> constexpr unsigned DQ_KEYS = HD > 64 ? 64 : 128;
template <int HD> constexpr unsigned DQ_STAGES = HD > 128 ? 3 : 8;
constexpr unsigned DQ_QUERIES = CONSUMERS * GROUP_ROWS;

template <int HD> constexpr size_t dkv_hopper_bytes() {
    const size_t tiles = (2 * DKV_KEYS<HD> + 2 * DKV_STAGES<HD> * DKV_QUERIES) * HD * sizeof(floatX);
    const size_t meetings = SHARED_KEYS<HD> ? DKV_STAGES<HD> * GROUP_ROWS * DKV_QUERIES * sizeof(float) : 0;
    return tiles + meetings + 2 * DKV_STAGES<HD> * DKV_QUERIES * sizeof(float);
}
template <int HD> constexpr size_t dq_hopper_bytes() {
    return (2 * DQ_QUERIES + DQ_STAGES<HD> * DQ_KEYS<HD>)*HD * sizeof(floatX);
}

#ifdef WGMMA_CODE
// Loads `ROWS` rows of one head, from `row` on, into a panel tile. One thread calls it; the map's boxes have 64 rows.
template <int HD, unsigned ROWS>
__device__ inline void head_load(floatX *tile, const TensorMap *map, TileBarrier *barrier, unsigned head,
                                 unsigned row) {
#pragma unroll 1
    for (unsigned panel = 0; panel < HD / PANEL; panel++)
        for (unsigned r = 0; r < ROWS; r += GROUP_ROWS)
            panel_load(tile + (panel * ROWS + r) * PANEL, map, barrier, panel * PANEL, head, row + r);
}

// Issues s[64 rows, N] = a[64, HD] b[N, HD]^T.
template <int HD, int N> __device__ inline void issue_scores(float (*s)[4], const floatX *a, const floatX *b) {
#pragma unroll
    for (int d = 0; d < HD; d += 16) wgmma<N>(s, operand_rows<GROUP_ROWS>(a, 0, d), operand_rows<N>(b, 0, d), d > 0);
    wgmma_commit();
}

// Issues sums[64 rows, HD] += w[64, N] b[N, HD].
template <int HD, int N>
__device__ inline void issue_sums(float (*sums)[4], const OperandA (&w)[N / 16], const floatX *b) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < N; j += 16) wgmma<HD>(sums, w[j / 16], operand_columns<N>(b, j, 0), true);
    wgmma_commit();
}

template <int N> __device__ inline void operands_of(OperandA (&w)[N / 16], const float (*s)[4]) {
#pragma unroll
    for (int j = 0; j < N / 16; j++) w[j] = operand_of(s[2 * j], s[2 * j + 1]);
}

// One warp's arrival, after all its lanes came here.
__device__ inline void warp_arrive(TileBarrier *b) {
    __syncwarp();
    if (threadIdx.x % LANES == 0) barrier_arrive(b);
}

// Starts `count` barriers of a ring: `full` waits for `arrivals` and loads, `empty` for all consumers' warps.
__device__ inline void ring_start(TileBarrier *full, TileBarrier *empty, unsigned count, unsigned arrivals) {
    for (unsigned i = 0; i < count; i++) barrier_start(full + i, arrivals), barrier_start(empty + i, CONSUMER_WARPS);
}
#endif

// ---- dk, dv ---------------------------------------------------------------------------------------------------------
#ifdef WGMMA_CODE
// Shared memory of a block
struct DkvShared {
    floatX *k, *v, *stages;                 // a stage: a tile of dout, a tile of q
    float *beside, *meetings;               // of each stage delta, lse log2(e); p for the other group
    TileBarrier *held, *full, *empty, *met; // met: p of a stage is there
};

template <int HD> __device__ inline DkvShared dkv_shared() {
    constexpr unsigned STAGES = DKV_STAGES<HD>, TILE = DKV_QUERIES * HD;
    DYNAMIC_PANELS(floatX, tiles);
    SHARED(TileBarrier, barriers, 1 + 3 * STAGES);
    floatX *const v = tiles + DKV_KEYS<HD> * HD, *const stages = v + DKV_KEYS<HD> * HD;
    float *const beside = (float *)(stages + 2 * STAGES * TILE);
    TileBarrier *const full = barriers + 1, *const empty = full + STAGES;
    return DkvShared{tiles,    v,    stages, beside,        beside + 2 * STAGES * DKV_QUERIES,
                     barriers, full, empty,  empty + STAGES};
}

// Starts the barriers. All threads of the block.
template <int HD> __device__ inline void dkv_begin(const DkvShared &m) {
    if (threadIdx.x == 0) {
        barrier_start(m.held, 1);
        ring_start(m.full, m.empty, DKV_STAGES<HD>, 1 + LANES);
        for (unsigned i = 0; i < DKV_STAGES<HD>; i++) barrier_start(m.met + i, CONSUMER_WARPS / 2);
        barriers_started();
    }
    __syncthreads();
}

// Loads the block's keys and values, from row `from` on. One thread.
template <int HD>
__device__ inline void load_keys(const DkvShared &m, const TensorMap *k, const TensorMap *v, unsigned from) {
    barrier_expect(m.held, 2 * DKV_KEYS<HD> * HD * sizeof(floatX));
    for (unsigned r = 0; r < DKV_KEYS<HD>; r += GROUP_ROWS) {
        head_load<HD, GROUP_ROWS>(m.k + r * HD, k, m.held, blockIdx.y, from + r);
        head_load<HD, GROUP_ROWS>(m.v + r * HD, v, m.held, blockIdx.y, from + r);
    }
}

// The tiles of queries that see a key of the block, for each query head of the keys' head
struct QueryTiles {
    unsigned row, row_end, head, count; // rows of q; first head; tiles of all heads
    int begin, end;                     // the rows, relative to the first key of this thread's group
};

// Keys of a group, and of a thread of it
struct KeyRows {
    unsigned group;
    int warp_row, row, window; // the warp's first key and the thread's, relative to the group's
    float scale;
    bool any; // the group has a key
};

__device__ inline QueryTiles query_tiles(const SpanBlock &block, size_t window, size_t key, unsigned heads) {
    const size_t first = block.begin > block.span.begin ? block.begin : block.span.begin, span_end = block.span.end,
                 end = span_end - block.end >= window ? block.end + window - 1 : span_end;
    return QueryTiles{(unsigned)(first - block.origin),
                      (unsigned)(end - block.origin),
                      blockIdx.y * heads,
                      tiles_in<DKV_QUERIES>(end - first) * heads,
                      (int)((long long)first - (long long)key),
                      (int)((long long)end - (long long)key)};
}

// Loads tiles of queries with their delta and lse. Up to four warps take turns, so that their loads overlap. There are
// at most as many as stages: else a warp could take the phase before last of a barrier for the last one.
template <int HD>
__device__ inline void load_queries(const DkvShared &m, QueryTiles t, const TensorMap *q, const TensorMap *dout,
                                    const float *lse, const float *delta, size_t NH, unsigned first_row) {
    constexpr unsigned QUERIES = DKV_QUERIES, TILE = QUERIES * HD, STAGES = DKV_STAGES<HD>,
                       WARPS = STAGES < 4 ? STAGES : 4;
    const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    unsigned row = t.row;
    Turn turn = {};
    for (unsigned tile = 0; tile < t.count; tile++, turn_next<STAGES>(turn)) {
        if (tile % WARPS == warp) {
            TileBarrier *const loaded = m.full + turn.stage;
            floatX *const td = m.stages + 2 * turn.stage * TILE;
            barrier_wait(m.empty + turn.stage, turn.phase ^ 1);
            if (lane == 0) {
                barrier_expect(loaded, 2 * TILE * sizeof(floatX));
                head_load<HD, QUERIES>(td, dout, loaded, t.head, row - first_row);
                head_load<HD, QUERIES>(td + TILE, q, loaded, t.head, row - first_row);
            }
#pragma unroll 1 // this group has few registers
            for (unsigned i = lane; i < QUERIES; i += LANES) {
                const size_t place = (size_t)(row + i) * NH + t.head;
                float *const to = m.beside + turn.stage * 2 * QUERIES + i;
                to[0] = row + i < t.row_end ? delta[place] : 0.0f;
                to[QUERIES] = row + i < t.row_end ? lse[place] * LOG2_E : INFINITY;
            }
            barrier_arrive(loaded);
        }
        row += QUERIES;
        if (row >= t.row_end) row = t.row, t.head++;
    }
}

// Replaces scores [64 keys, 64 queries] by p. query: the tile's first query, relative to the group's first key
__device__ inline void weigh_pairs(float (*s)[4], const KeyRows &keys, int query, const float *lse) {
    constexpr int N = DKV_QUERIES;
    if (query < keys.warp_row + 15) hide_unseen<N, true>(s, keys.row - query);
    if (query + N - 1 - keys.warp_row >= keys.window) hide_far<N, true>(s, keys.row - query + keys.window);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const Pack<float, 2> l = pack_read<2>(lse + j * 8 + threadIdx.x % 4 * 2);
        for (int e = 0; e < 4; e++) s[j][e] = fast_exp2(fmaf(s[j][e], keys.scale, -l.x[e % 2]));
    }
}

// Replaces eight columns of dout v^T by ds = p (dout v^T - delta).
__device__ inline void slope_of(float (&ds)[4], const float *p, const float *delta) {
    const Pack<float, 2> l = pack_read<2>(delta + threadIdx.x % 4 * 2);
    for (int e = 0; e < 4; e++) ds[e] = p[e] * (ds[e] - l.x[e % 2]);
}

// Sums of dv and dk, and p and ds of the tile that is added next, with its stage; DKV_STAGES: there is none
template <int HD> struct KeySums {
    float (&v)[HD / 8][4], (&k)[HD / 8][4];
    OperandA w[DKV_QUERIES / 16], dw[DKV_QUERIES / 16];
    unsigned late;
};

// LATE: the products with p and ds of a tile follow the next tile's scores, so that the tensor cores are busy while
// weights are computed. A group passes by at most one tile in a row, so late tiles do not hold up the ring.
template <int HD> constexpr bool LATE_SUMS = HD <= 64; // else registers are too few

// Adds the products with p and ds to the sums. stage: the tile's
template <int HD> __device__ inline void issue_late(KeySums<HD> &sum, const DkvShared &m, unsigned stage) {
    const floatX *const tile = m.stages + 2 * stage * DKV_QUERIES * HD;
    issue_sums<HD, DKV_QUERIES>(sum.v, sum.w, tile),
        issue_sums<HD, DKV_QUERIES>(sum.k, sum.dw, tile + DKV_QUERIES * HD);
}

// Adds the tile of a stage to the sums. tk, tv: the group's keys and values
template <int HD>
__device__ inline void add_queries(KeySums<HD> &sum, const DkvShared &m, unsigned stage, const KeyRows &keys, int query,
                                   const floatX *tk, const floatX *tv) {
    constexpr bool LATE = LATE_SUMS<HD>;
    constexpr int N = DKV_QUERIES;
    const floatX *const td = m.stages + 2 * stage * N * HD, *const tq = td + N * HD;
    const float *const delta = m.beside + stage * 2 * N, *const lse = delta + N;
    float s[N / 8][4], ds[N / 8][4];
    wgmma_fence();
    issue_scores<HD, N>(s, tk, tq);
    if (LATE) issue_late<HD>(sum, m, sum.late < DKV_STAGES<HD> ? sum.late : stage);
    issue_scores<HD, N>(ds, tv, td);
    wgmma_wait<LATE ? 3 : 1>(s);
    weigh_pairs(s, keys, query, lse);
    if (LATE) {
        wgmma_wait<0>(ds, sum.v, sum.k);
        if (sum.late < DKV_STAGES<HD>) warp_arrive(m.empty + sum.late);
        operands_of<N>(sum.w, s);
    } else {
        operands_of<N>(sum.w, s);
        issue_sums<HD, N>(sum.v, sum.w, td);
        wgmma_wait<1>(ds);
    }
#pragma unroll
    for (int j = 0; j < N / 8; j++) slope_of(ds[j], s[j], delta + j * 8);
    operands_of<N>(sum.dw, ds);
    sum.late = stage;
    if (LATE) return;
    issue_sums<HD, N>(sum.k, sum.dw, tq);
    wgmma_wait<0>(sum.v, sum.k);
    warp_arrive(m.empty + stage);
}

// Sums dv and dk of a group's own keys.
template <int HD>
__device__ inline void sum_own_keys(float (&sum_v)[HD / 8][4], float (&sum_k)[HD / 8][4], const DkvShared &m,
                                    const QueryTiles &t, const KeyRows &keys) {
    constexpr int N = DKV_QUERIES;
    const floatX *const tk = m.k + keys.group * GROUP_ROWS * HD, *const tv = m.v + keys.group * GROUP_ROWS * HD;
    KeySums<HD> sum = {sum_v, sum_k, {}, {}, DKV_STAGES<HD>};
    int query = t.begin;
    Turn turn = {};
    for (unsigned i = 0; i < t.count; i++, turn_next<DKV_STAGES<HD>>(turn)) {
        barrier_wait(m.full + turn.stage, turn.phase);
        if (keys.any && query + N > 0 && query - (int)GROUP_ROWS + 1 < keys.window) // some query sees a key
            add_queries<HD>(sum, m, turn.stage, keys, query, tk, tv);
        else
            warp_arrive(m.empty + turn.stage);
        query = query + N < t.end ? query + N : t.begin;
    }
    if (!LATE_SUMS<HD> || sum.late == DKV_STAGES<HD>) return;
    issue_late<HD>(sum, m, sum.late);
    wgmma_wait<0>(sum_v, sum_k);
}

// Sums dv (the first group) or dk (the second one) of 64 keys. Each stage has its own place for p, free when the
// stage is.
template <int HD>
__device__ inline void sum_shared_keys(float (&sum)[HD / 8][4], const DkvShared &m, const QueryTiles &t,
                                       const KeyRows &keys) {
    constexpr unsigned TILE = DKV_QUERIES * HD;
    constexpr int N = DKV_QUERIES;
    int query = t.begin;
    Turn turn = {};
    for (unsigned i = 0; i < t.count; i++, turn_next<DKV_STAGES<HD>>(turn)) {
        const floatX *const td = m.stages + 2 * turn.stage * TILE, *const tq = td + TILE;
        const float *const delta = m.beside + turn.stage * 2 * N, *const lse = delta + N;
        float *const p = m.meetings + turn.stage * GROUP_ROWS * N + threadIdx.x % GROUP_THREADS * 4;
        float s[N / 8][4]; // scores, or dout v^T
        OperandA w[N / 16];
        barrier_wait(m.full + turn.stage, turn.phase);
        wgmma_fence();
        issue_scores<HD, N>(s, keys.group ? m.v : m.k, keys.group ? td : tq);
        wgmma_wait<0>(s);
        if (keys.group) {
            barrier_wait(m.met + turn.stage, turn.phase);
#pragma unroll
            for (int j = 0; j < N / 8; j++) slope_of(s[j], pack_read<4>(p + j * GROUP_THREADS * 4).x, delta + j * 8);
        } else {
            weigh_pairs(s, keys, query, lse);
#pragma unroll
            for (int j = 0; j < N / 8; j++)
                pack_write(p + j * GROUP_THREADS * 4, Pack<float, 4>{s[j][0], s[j][1], s[j][2], s[j][3]});
            warp_arrive(m.met + turn.stage);
        }
        operands_of<N>(w, s);
        issue_sums<HD, N>(sum, w, keys.group ? tq : td);
        wgmma_wait<0>(sum);
        warp_arrive(m.empty + turn.stage);
        query = query + N < t.end ? query + N : t.begin;
    }
}

// Adds sums x factor to rows key and key + 8 of `to`, if they are below `end`.
template <int HD>
__device__ inline void add_key_sums(float *to, const float (*sums)[4], float factor, size_t key, size_t end,
                                    size_t NKV) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (key + 8 * i >= end) continue;
        float *const at = to + ((key + 8 * i) * NKV + blockIdx.y) * HD + threadIdx.x % 4 * 2;
#pragma unroll
        for (int d = 0; d < HD / 8; d++) {
            Pack<float, 2> sum = pack_read<2>(at + d * 8);
            for (int e = 0; e < 2; e++) sum.x[e] += sums[d][2 * i + e] * factor;
            pack_write(at + d * 8, sum);
        }
    }
}
#endif

template <int HD>
__global__ void __launch_bounds__(HOPPER_THREADS, 1)
    attention_dkv_hopper_kernel(float *dk, float *dv, TENSOR_MAP q, TENSOR_MAP dout, TENSOR_MAP k, TENSOR_MAP v,
                                const float *lse, const float *delta, SpanBlocks blocks, HeadShape shape,
                                size_t first_row, size_t first_key) {
#ifdef WGMMA_CODE
    const DkvShared m = dkv_shared<HD>();
    dkv_begin<HD>(m);
    const SpanBlock block = span_block(blocks, DKV_KEYS<HD>, true);
    const unsigned group = group_number() - 1, warp_row = threadIdx.x / LANES % 4 * 16,
                   row = warp_row + threadIdx.x % LANES / 4;
    const size_t key = block.begin + (SHARED_KEYS<HD> ? 0 : group * GROUP_ROWS); // the group's first key
    const QueryTiles t = query_tiles(block, (size_t)blocks.window, key, (unsigned)(shape.NH / shape.NKV));
    if (group + 1 == 0) {
        registers_give<24>();
        if (threadIdx.x == 0) load_keys<HD>(m, &k, &v, (unsigned)(block.begin - first_key));
        load_queries<HD>(m, t, &q, &dout, lse, delta, shape.NH, (unsigned)first_row);
        return;
    }
    registers_take<240>();
    const KeyRows keys = {group, (int)warp_row, (int)row, blocks.window, shape.scale * LOG2_E, key < block.end};
    float sums[SHARED_KEYS<HD> ? 1 : 2][HD / 8][4] = {}; // dv and dk, or this group's
    barrier_wait(m.held, 0);
    if constexpr (SHARED_KEYS<HD>)
        sum_shared_keys<HD>(sums[0], m, t, keys);
    else
        sum_own_keys<HD>(sums[0], sums[1], m, t, keys);
    if (!SHARED_KEYS<HD> || !group) add_key_sums<HD>(dv, sums[0], 1.0f, key + row, block.end, shape.NKV);
    if (!SHARED_KEYS<HD> || group)
        add_key_sums<HD>(dk, sums[SHARED_KEYS<HD> ? 0 : 1], shape.scale, key + row, block.end, shape.NKV);
#endif
}

// ---- dq -------------------------------------------------------------------------------------------------------------
#ifdef WGMMA_CODE
// Shared memory of a block
struct DqShared {
    floatX *q, *dout, *stages; // a stage: a tile of v or of k
    TileBarrier *held, *full, *empty;
};

template <int HD> __device__ inline DqShared dq_shared() {
    DYNAMIC_PANELS(floatX, tiles);
    SHARED(TileBarrier, barriers, 1 + 2 * DQ_STAGES<HD>);
    return DqShared{tiles,        tiles + DQ_QUERIES * HD,     tiles + 2 * DQ_QUERIES * HD, barriers,
                    barriers + 1, barriers + 1 + DQ_STAGES<HD>};
}

// What a block loads: its queries from row `row` on, keys and values from row `key` on
struct DqLoads {
    const TensorMap *q, *dout, *k, *v;
    unsigned row, key, key_head;
};

// Loads the queries, then all tiles of `length` keys and values. One thread.
template <int HD> __device__ inline void dq_load(const DqShared &m, const DqLoads &from, unsigned length) {
    constexpr unsigned KEYS = DQ_KEYS<HD>, TILE = KEYS * HD;
    barrier_expect(m.held, 2 * DQ_QUERIES * HD * sizeof(floatX));
    for (unsigned r = 0; r < DQ_QUERIES; r += GROUP_ROWS) {
        head_load<HD, GROUP_ROWS>(m.q + r * HD, from.q, m.held, blockIdx.y, from.row + r);
        head_load<HD, GROUP_ROWS>(m.dout + r * HD, from.dout, m.held, blockIdx.y, from.row + r);
    }
    Turn turn = {};
    for (unsigned i = 0; i < 2 * tiles_in<KEYS>(length); i++, turn_next<DQ_STAGES<HD>>(turn)) {
        TileBarrier *const loaded = m.full + turn.stage;
        barrier_wait(m.empty + turn.stage, turn.phase ^ 1);
        barrier_expect(loaded, TILE * sizeof(floatX));
        head_load<HD, KEYS>(m.stages + turn.stage * TILE, i % 2 ? from.k : from.v, loaded, from.key_head,
                            from.key + i / 2 * KEYS);
    }
}

// A group's queries, relative to the block's first key, and what belongs to this thread's: row, row + 8
struct QueryRows {
    unsigned group;
    int first, window;
    bool any;        // the group has a query
    WarpSight sight; // of the warp
    float scale, lse[2], delta[2];
};

// Sums of dq, and ds of the keys that are added next, with their stage; DQ_STAGES: there are none. LATE: as in KeySums
template <int HD> struct QuerySums {
    static constexpr bool LATE = HD <= 128; // else stages are too few
    float (&q)[HD / 8][4];
    OperandA w[DQ_KEYS<HD> / 16];
    unsigned late;
};

// Adds the keys from `key` on to the sums; stages of their values and themselves.
template <int HD, bool RANGE>
__device__ inline void add_keys(QuerySums<HD> &sum, const DqShared &m, unsigned of_v, unsigned of_k, unsigned key,
                                const QueryRows &rows) {
    constexpr bool LATE = QuerySums<HD>::LATE;
    constexpr unsigned STAGES = DQ_STAGES<HD>, TILE = DQ_KEYS<HD> * HD;
    constexpr int N = DQ_KEYS<HD>;
    const floatX *const tq = m.q + rows.group * GROUP_ROWS * HD, *const td = m.dout + rows.group * GROUP_ROWS * HD;
    const floatX *const tv = m.stages + of_v * TILE, *const tk = m.stages + of_k * TILE;
    float s[N / 8][4], ds[N / 8][4];
    wgmma_fence();
    issue_scores<HD, N>(s, tq, tk);
    if (LATE) issue_sums<HD, N>(sum.q, sum.w, sum.late < STAGES ? m.stages + sum.late * TILE : tk);
    issue_scores<HD, N>(ds, td, tv);
    wgmma_wait<LATE ? 2 : 1>(s);
    hide<N, RANGE>(s, rows.sight, key, threadIdx.x % LANES / 4, rows.window);
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[j][e] = fast_exp2(fmaf(s[j][e], rows.scale, -rows.lse[e / 2]));
    wgmma_wait<0>(ds, sum.q);
    warp_arrive(m.empty + of_v);
    if (LATE && sum.late < STAGES) warp_arrive(m.empty + sum.late);
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) ds[j][e] = s[j][e] * (ds[j][e] - rows.delta[e / 2]);
    operands_of<N>(sum.w, ds);
    sum.late = of_k;
    if (LATE) return;
    issue_sums<HD, N>(sum.q, sum.w, tk);
    wgmma_wait<0>(sum.q);
    warp_arrive(m.empty + of_k);
}

// Sums dq.
template <int HD, bool RANGE>
__device__ inline void sum_queries(float (&sums)[HD / 8][4], const DqShared &m, unsigned length,
                                   const QueryRows &rows) {
    constexpr unsigned KEYS = DQ_KEYS<HD>, STAGES = DQ_STAGES<HD>;
    QuerySums<HD> sum = {sums, {}, STAGES};
    Turn turn = {};
    for (unsigned key = 0; key < length; key += KEYS) {
        const Turn of_v = turn;
        turn_next<STAGES>(turn);
        const Turn of_k = turn;
        turn_next<STAGES>(turn);
        barrier_wait(m.full + of_v.stage, of_v.phase);
        barrier_wait(m.full + of_k.stage, of_k.phase);
        if (!rows.any || (int)key >= rows.first + (int)GROUP_ROWS ||
            (int)(key + KEYS) <= rows.first + 1 - rows.window) { // no query of the group sees one of the keys
            warp_arrive(m.empty + of_v.stage), warp_arrive(m.empty + of_k.stage);
            continue;
        }
        add_keys<HD, RANGE>(sum, m, of_v.stage, of_k.stage, key, rows);
    }
    if (!QuerySums<HD>::LATE || sum.late == STAGES) return;
    issue_sums<HD, (int)KEYS>(sums, sum.w, m.stages + sum.late * KEYS * HD);
    wgmma_wait<0>(sums);
}

// Stores sums x factor as dq[row, head], or adds them to it: two rows that are `step` elements apart, `count` of them.
template <int HD, bool SUMS>
__device__ inline void store_query_sums(Result<SUMS> *dq, const float (*sums)[4], float factor, int count, size_t step,
                                        bool accumulate) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int d = 0; d < HD / 8 && i < count; d++) {
            Result<SUMS> *const to = dq + i * step + d * 8 + threadIdx.x % 4 * 2;
            Pack<Result<SUMS>, 2> pair = {};
            if (accumulate) pair = pack_read<2>(to);
            for (int e = 0; e < 2; e++)
                set_value(&pair.x[e], sums[d][2 * i + e] * factor + (accumulate ? load(pair.x[e]) : 0.0f));
            pack_write(to, pair);
        }
}
#endif

template <int HD, bool SUMS>
__global__ void __launch_bounds__(HOPPER_THREADS, 1)
    attention_dq_hopper_kernel(Result<SUMS> *dq, TENSOR_MAP q, TENSOR_MAP dout, TENSOR_MAP k, TENSOR_MAP v,
                               const float *lse, const float *delta, SpanBlocks blocks, HeadShape shape,
                               size_t first_row, size_t first_key, bool accumulate) {
#ifdef WGMMA_CODE
    const DqShared m = dq_shared<HD>();
    if (threadIdx.x == 0) {
        barrier_start(m.held, 1);
        ring_start(m.full, m.empty, DQ_STAGES<HD>, 1);
        barriers_started();
    }
    __syncthreads();
    const SpanBlock block = span_block(blocks, DQ_QUERIES, false);
    const size_t head = blockIdx.y, keys_begin = block.keys.begin;
    const unsigned length = keys_begin < block.keys.end ? (unsigned)(block.keys.end - keys_begin) : 0;
    if (group_number() == 0) {
        registers_give<24>();
        const DqLoads from = {&q,
                              &dout,
                              &k,
                              &v,
                              (unsigned)(block.begin - block.origin - first_row),
                              (unsigned)(keys_begin - first_key),
                              blockIdx.y / (unsigned)(shape.NH / shape.NKV)};
        if (threadIdx.x == 0) dq_load<HD>(m, from, length);
        return;
    }
    registers_take<240>();
    const unsigned group = group_number() - 1, warp_row = group * GROUP_ROWS + threadIdx.x / LANES % 4 * 16;
    const size_t group_begin = block.begin + group * GROUP_ROWS, row = block.begin + warp_row + threadIdx.x % LANES / 4;
    const size_t place = (row - block.origin) * shape.NH + head;
    QueryRows rows = {group,
                      (int)((long long)group_begin - (long long)keys_begin),
                      blocks.window,
                      group_begin < block.end,
                      warp_sight(block, warp_row),
                      shape.scale * LOG2_E,
                      {INFINITY, INFINITY},
                      {0.0f, 0.0f}};
    for (size_t i = 0; i < 2; i++)
        if (row + 8 * i < block.end)
            rows.lse[i] = lse[place + 8 * i * shape.NH] * LOG2_E, rows.delta[i] = delta[place + 8 * i * shape.NH];
    float sums[HD / 8][4] = {};
    barrier_wait(m.held, 0);
    sum_queries<HD, SUMS>(sums, m, length, rows);
    store_query_sums<HD, SUMS>(dq + place * HD, sums, shape.scale, (row < block.end) + (row + 8 < block.end),
                               8 * shape.NH * HD, SUMS && accumulate);
#endif
}

// ---- launches -------------------------------------------------------------------------------------------------------
// Returns the end of the spans from `from` on whose tokens and rows follow each other. So every row that their tensor
// maps reach is a row of theirs.
static size_t spans_end(Spans spans, size_t from) {
    const Span *const span = spans.span;
    while (++from < spans.count && span[from].begin == span[from - 1].end &&
           span[from].begin - span[from].row == span[from - 1].begin - span[from - 1].row) {
    }
    return from;
}

static TensorMap heads_map(const floatX *x, size_t heads, size_t HD, size_t rows) {
    return tensor_map(x, TensorDims{HD, heads, max_size(rows, 1), HD, heads * HD}, 1, GROUP_ROWS);
}

// Returns the keys that spans `from` to `next` of the call see, from the first to the last.
static KeyRange keys_of_spans(const SpanBlocks &blocks, const AttentionShape *call, size_t from, size_t next) {
    KeyRange keys = {SIZE_MAX, min_size(call->keys.end, call->spans.span[next - 1].end)};
    for (size_t i = from; i < next; i++) {
        const Span span = call->spans.span[i];
        keys.begin = min_size(keys.begin, keys_seen(blocks, span.document, span.begin, span.end).begin);
    }
    if (keys.begin >= keys.end) keys.begin = keys.end = 0;
    return keys;
}

// Runs backward once delta is known. Returns whether the kernels above serve these heads here; else does nothing.
static bool hopper_backward(void *dq, float *dk, float *dv, const floatX *dout, const floatX *q, const floatX *k,
                            const floatX *v, const float *lse, const float *delta, const AttentionShape *call,
                            const HeadShape &shape) {
    const size_t NH = shape.NH, NKV = shape.NKV;
    Spans spans = call->spans;
    SpanBlocks blocks;
    if ((shape.HD != 64 && shape.HD != 128 && shape.HD != 256) || !shape.packed || !wgmma_on()) return false;
    if (!all_aligned(dq, dk, dv)) return false;
    const auto run = [&](auto SUMS, auto HEAD, size_t from) {
        constexpr int HD = HEAD;
        const size_t next = span_blocks(&blocks, spans, call->keys, from, DQ_QUERIES, false);
        const Span *const begin = &spans.span[from], *const last = &spans.span[next - 1];
        const size_t row = begin->row, rows = last->row + last->end - last->begin - row;
        const KeyRange keys = keys_of_spans(blocks, call, from, next);
        const size_t first = keys.begin * NKV * HD, count = keys.end - keys.begin;
        const TensorMap of_q = heads_map(q + row * NH * HD, NH, HD, rows),
                        of_dout = heads_map(dout + row * NH * HD, NH, HD, rows),
                        of_k = heads_map(k + first, NKV, HD, count), of_v = heads_map(v + first, NKV, HD, count);
        LAUNCH((attention_dq_hopper_kernel<HD, SUMS>), dim3(blocks.first[blocks.count], (unsigned)NH), HOPPER_THREADS,
               (dq_hopper_bytes<HD>()))
        ((Result<SUMS> *)dq, of_q, of_dout, of_k, of_v, lse, delta, blocks, shape, row, keys.begin,
         call->accumulate != 0);
        span_blocks(&blocks, spans, call->keys, from, DKV_KEYS<HD>, true);
        if (blocks.first[blocks.count]) // some query sees a key of the range
            LAUNCH((attention_dkv_hopper_kernel<HD>), dim3(blocks.first[blocks.count], (unsigned)NKV), HOPPER_THREADS,
                   (dkv_hopper_bytes<HD>()))
        (dk, dv, of_q, of_dout, of_k, of_v, lse, delta, blocks, shape, row, keys.begin);
        return next;
    };
    for (size_t from = 0; from < call->spans.count;) {
        spans.count = spans_end(call->spans, from);
        with_flag(call->partial, [&](auto SUMS) {
            with_head_size<64, 128, 256>(shape.HD, [&](auto HD) { from = run(SUMS, HD, from); });
        });
        spans.count = call->spans.count;
    }
    return true;
}
#else
template <typename... Arguments> static bool hopper_backward(Arguments...) { return false; }
static bool wgmma_on(void) { return false; }
#endif
#endif
