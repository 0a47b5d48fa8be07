/*
Backward of attention by Hopper's products and loads of tiles (wgmma.cuh): bf16, heads of 64, 128 and 256. Two passes,
as in attention.cuh: dk and dv by tiles of keys, dq by tiles of queries. Each sum has one owner and a fixed order, so
results are the same every time. Scores are computed in both passes; no memory is needed besides delta.

A block has three warp groups. The producer loads tiles into a ring of stages. Two groups compute. In the pass of dk and
dv their rows are keys, so p and ds are left operands of dv += p dout and dk += ds q without leaving registers:

    heads of 64, 128    a group has 64 keys, and both sums
    heads of 256        both groups have the same 64 keys. The first computes p and sums dv. It hands p in fp32 to the
                        second, which computes ds and sums dk

A tile may have rows beyond the block's: zeros outside the tensor, or rows of a neighbouring span. They get p = 0, and
ds = 0, times values that must be finite.
*/
#ifndef LLMC_CUDA_ATTENTION_WGMMA_CUH
#define LLMC_CUDA_ATTENTION_WGMMA_CUH
#include "attention_tiles.cuh"
#include "wgmma.cuh"
#ifdef PRECISION_BF16

constexpr unsigned CONSUMERS = 2, GROUP_ROWS = 64, CONSUMER_WARPS = CONSUMERS * 4,
                   HOPPER_THREADS = (CONSUMERS + 1) * GROUP_THREADS;

// Pass of dk and dv: keys of a block; stages of a tile of 64 queries and one of their outputs' gradients
template <int HD> constexpr bool SHARED_KEYS = HD > 128;
template <int HD> constexpr unsigned DKV_KEYS = SHARED_KEYS<HD> ? 64 : 128;
template <int HD> constexpr unsigned DKV_STAGES = HD > 128 ? 2 : HD > 64 ? 4 : 6;
constexpr unsigned DKV_QUERIES = 64, MEETINGS = 2; // MEETINGS: buffers of p between groups that share keys

// Pass of dq: keys of a tile; stages of one tile of keys or values
template <int HD> constexpr unsigned DQ_KEYS = HD > 64 ? 64 : 128;
template <int HD> constexpr unsigned DQ_STAGES = HD > 128 ? 3 : 8;
constexpr unsigned DQ_QUERIES = CONSUMERS * GROUP_ROWS;

template <int HD> constexpr size_t dkv_hopper_bytes() {
    const size_t tiles = (2 * DKV_KEYS<HD> + 2 * DKV_STAGES<HD> * DKV_QUERIES) * HD * sizeof(floatX);
    const size_t meetings = SHARED_KEYS<HD> ? MEETINGS * GROUP_ROWS * DKV_QUERIES * sizeof(float) : 0;
    return tiles + meetings + 2 * DKV_STAGES<HD> * DKV_QUERIES * sizeof(float);
}
template <int HD> constexpr size_t dq_hopper_bytes() {
    return (2 * DQ_QUERIES + DQ_STAGES<HD> * DQ_KEYS<HD>)*HD * sizeof(floatX);
}

#ifdef WGMMA_CODE
// Loads `ROWS` rows of one head, from `row` on, into a panel tile. One thread calls it; the map's boxes have 64 rows.
template <int HD, unsigned ROWS>
__device__ inline void head_load(floatX *tile, const TensorMap *map, TileBarrier *barrier, size_t head, size_t row) {
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
template <int HD>
__global__ void __launch_bounds__(HOPPER_THREADS, 1)
    attention_dkv_hopper_kernel(float *dk, float *dv, TENSOR_MAP q, TENSOR_MAP dout, TENSOR_MAP k, TENSOR_MAP v,
                                const float *lse, const float *delta, SpanBlocks blocks, HeadShape shape,
                                size_t first_row, size_t first_key) {
#ifdef WGMMA_CODE
    constexpr unsigned KEYS = DKV_KEYS<HD>, QUERIES = DKV_QUERIES, STAGES = DKV_STAGES<HD>, TILE = QUERIES * HD;
    constexpr int N = QUERIES;
    DYNAMIC_PANELS(floatX, tk);
    SHARED(TileBarrier, held, 1);
    SHARED(TileBarrier, full, STAGES);
    SHARED(TileBarrier, empty, STAGES);
    SHARED(TileBarrier, met, 2 * MEETINGS);
    floatX *const tv = tk + KEYS * HD, *const stages = tv + KEYS * HD; // a stage: a tile of dout, a tile of q
    float *const meetings = (float *)(stages + 2 * STAGES * TILE),
                 *const beside = meetings + (SHARED_KEYS<HD> ? MEETINGS * GROUP_ROWS * QUERIES : 0); // delta, lse
    const SpanBlock block = span_block(blocks, KEYS, true);
    const size_t first = block.begin > block.span.begin ? block.begin : block.span.begin, span_end = block.span.end,
                 end = span_end - block.end >= (size_t)blocks.window ? block.end + (size_t)blocks.window - 1 : span_end;
    const unsigned heads = (unsigned)(shape.NH / shape.NKV);
    if (threadIdx.x == 0) {
        barrier_start(held, 1);
        ring_start(full, empty, STAGES, GROUP_THREADS);
        for (unsigned i = 0; i < 2 * MEETINGS; i++) barrier_start(met + i, CONSUMER_WARPS / 2);
        barriers_started();
    }
    __syncthreads();
    if (group_number() == 0) { // a thread loads a query's delta or lse; the first one loads the tiles, too
        registers_give<24>();
        const unsigned i = threadIdx.x % QUERIES, of_lse = threadIdx.x / QUERIES;
        const float *const values = of_lse ? lse : delta;
        if (threadIdx.x == 0) {
            barrier_expect(held, 2 * KEYS * HD * sizeof(floatX));
            for (unsigned r = 0; r < KEYS; r += GROUP_ROWS) {
                head_load<HD, GROUP_ROWS>(tk + r * HD, &k, held, blockIdx.y, block.begin + r - first_key);
                head_load<HD, GROUP_ROWS>(tv + r * HD, &v, held, blockIdx.y, block.begin + r - first_key);
            }
        }
        Turn turn = {};
        for (size_t head = blockIdx.y * heads; head < (blockIdx.y + 1) * heads; head++)
            for (size_t query = first; query < end; query += QUERIES, turn_next<STAGES>(turn)) {
                const size_t row = query - block.origin;
                TileBarrier *const loaded = full + turn.stage;
                float value = of_lse ? INFINITY : 0.0f;
                if (query + i < end) value = values[(row + i) * shape.NH + head];
                barrier_wait(empty + turn.stage, turn.phase ^ 1);
                beside[turn.stage * 2 * QUERIES + threadIdx.x] = of_lse ? value * LOG2_E : value;
                if (threadIdx.x) {
                    barrier_arrive(loaded);
                    continue;
                }
                barrier_expect(loaded, 2 * TILE * sizeof(floatX));
                head_load<HD, QUERIES>(stages + 2 * turn.stage * TILE, &dout, loaded, head, row - first_row);
                head_load<HD, QUERIES>(stages + (2 * turn.stage + 1) * TILE, &q, loaded, head, row - first_row);
            }
        return;
    }
    registers_take<240>();
    const unsigned group = group_number() - 1, lane = threadIdx.x % LANES;
    const int warp_row = (int)(threadIdx.x / LANES % 4 * 16), row = warp_row + (int)lane / 4, window = blocks.window;
    const size_t key = block.begin + (SHARED_KEYS<HD> ? 0 : group * GROUP_ROWS); // the group's first key
    // first query and last query's end, relative to this key
    const int begin = (int)((long long)first - (long long)key), last = (int)((long long)end - (long long)key);
    const unsigned tiles = tiles_in<QUERIES>(end - first) * heads;
    const float scale = shape.scale * LOG2_E;
    const auto hide_pairs = [&](float(*s)[4], int query) {
        if (query < warp_row + 15) hide_unseen<N, true>(s, row - query);
        if (query + N - 1 - warp_row >= window) hide_far<N, true>(s, row - query + window);
    };
    const auto weigh = [&](float(*s)[4], const float *row_lse) {
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const Pack<float, 2> l = pack_read<2>(row_lse + j * 8 + lane % 4 * 2);
            for (int e = 0; e < 4; e++) s[j][e] = fast_exp2(fmaf(s[j][e], scale, -l.x[e % 2]));
        }
    };
    const auto slope = [&](float(*dp)[4], const float *p, int j, const float *row_delta) {
        const Pack<float, 2> l = pack_read<2>(row_delta + j * 8 + lane % 4 * 2);
        for (int e = 0; e < 4; e++) dp[j][e] = p[e] * (dp[j][e] - l.x[e % 2]);
    };
    const auto add_to = [&](float *to, float(*sums)[4], float factor) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const size_t t = key + (unsigned)row + 8 * i;
            if (t >= block.end) continue;
            float *const at = to + (t * shape.NKV + blockIdx.y) * HD + lane % 4 * 2;
#pragma unroll
            for (int d = 0; d < HD / 8; d++) {
                Pack<float, 2> sum = pack_read<2>(at + d * 8);
                for (int e = 0; e < 2; e++) sum.x[e] += sums[d][2 * i + e] * factor;
                pack_write(at + d * 8, sum);
            }
        }
    };
    Turn turn = {};
    Turn meeting = {};
    float sums[SHARED_KEYS<HD> ? 1 : 2][HD / 8][4] = {}; // dv and dk, or this group's
    barrier_wait(held, 0);
    int query = begin;
    for (unsigned i = 0; i < tiles; i++, turn_next<STAGES>(turn), turn_next<MEETINGS>(meeting)) {
        const floatX *const td = stages + 2 * turn.stage * TILE, *const tq = td + TILE;
        const float *const row_delta = beside + turn.stage * 2 * QUERIES, *const row_lse = row_delta + QUERIES;
        barrier_wait(full + turn.stage, turn.phase);
        if constexpr (SHARED_KEYS<HD>) {
            float s[N / 8][4]; // scores, or dout v^T
            OperandA w[N / 16];
            float *const p = meetings + meeting.stage * GROUP_ROWS * QUERIES + threadIdx.x % GROUP_THREADS * 4;
            TileBarrier *const p_full = met + 2 * meeting.stage, *const p_empty = p_full + 1;
            wgmma_fence();
            issue_scores<HD, N>(s, group ? tv : tk, group ? td : tq);
            wgmma_wait<0>(s);
            if (group) {
                barrier_wait(p_full, meeting.phase);
#pragma unroll
                for (int j = 0; j < N / 8; j++) slope(s, pack_read<4>(p + j * GROUP_THREADS * 4).x, j, row_delta);
                warp_arrive(p_empty);
            } else {
                hide_pairs(s, query);
                weigh(s, row_lse);
                barrier_wait(p_empty, meeting.phase ^ 1);
#pragma unroll
                for (int j = 0; j < N / 8; j++)
                    pack_write(p + j * GROUP_THREADS * 4, Pack<float, 4>{s[j][0], s[j][1], s[j][2], s[j][3]});
                warp_arrive(p_full);
            }
            operands_of<N>(w, s);
            issue_sums<HD, N>(sums[0], w, group ? tq : td);
            wgmma_wait<0>(sums[0]);
        } else if (query + N > 0 && query - (int)GROUP_ROWS + 1 < window && key < block.end) { // some query sees a key
            float s[N / 8][4], ds[N / 8][4];
            OperandA w[N / 16], dw[N / 16];
            wgmma_fence();
            issue_scores<HD, N>(s, tk + group * GROUP_ROWS * HD, tq);
            issue_scores<HD, N>(ds, tv + group * GROUP_ROWS * HD, td);
            wgmma_wait<1>(s);
            hide_pairs(s, query);
            weigh(s, row_lse);
            operands_of<N>(w, s);
            issue_sums<HD, N>(sums[0], w, td);
            wgmma_wait<1>(ds);
#pragma unroll
            for (int j = 0; j < N / 8; j++) slope(ds, s[j], j, row_delta);
            operands_of<N>(dw, ds);
            issue_sums<HD, N>(sums[1], dw, tq);
            wgmma_wait<0>(sums[0], sums[1]);
        }
        warp_arrive(empty + turn.stage);
        query = query + N < last ? query + N : begin;
    }
    if (!SHARED_KEYS<HD> || !group) add_to(dv, sums[0], 1.0f);
    if (!SHARED_KEYS<HD> || group) add_to(dk, sums[SHARED_KEYS<HD> ? 0 : 1], shape.scale);
#endif
}

// ---- dq -------------------------------------------------------------------------------------------------------------
template <int HD, bool SUMS>
__global__ void __launch_bounds__(HOPPER_THREADS, 1)
    attention_dq_hopper_kernel(Result<SUMS> *dq, TENSOR_MAP q, TENSOR_MAP dout, TENSOR_MAP k, TENSOR_MAP v,
                               const float *lse, const float *delta, SpanBlocks blocks, HeadShape shape,
                               size_t first_row, size_t first_key, bool accumulate) {
#ifdef WGMMA_CODE
    constexpr unsigned KEYS = DQ_KEYS<HD>, STAGES = DQ_STAGES<HD>, TILE = KEYS * HD, HELD = GROUP_ROWS * HD;
    constexpr int N = KEYS;
    DYNAMIC_PANELS(floatX, tq);
    SHARED(TileBarrier, held, 1);
    SHARED(TileBarrier, full, STAGES);
    SHARED(TileBarrier, empty, STAGES);
    floatX *const td = tq + CONSUMERS * HELD, *const stages = td + CONSUMERS * HELD; // a stage: a tile of v or of k
    const SpanBlock block = span_block(blocks, DQ_QUERIES, false);
    const size_t head = blockIdx.y, key_head = head / (shape.NH / shape.NKV), keys_begin = block.keys.begin;
    const unsigned length = block.keys.begin < block.keys.end ? (unsigned)(block.keys.end - keys_begin) : 0;
    if (threadIdx.x == 0) {
        barrier_start(held, 1);
        ring_start(full, empty, STAGES, 1);
        barriers_started();
    }
    __syncthreads();
    if (group_number() == 0) {
        registers_give<24>();
        if (threadIdx.x) return;
        barrier_expect(held, 2 * CONSUMERS * HELD * sizeof(floatX));
        for (unsigned g = 0; g < CONSUMERS; g++) {
            const size_t row = block.begin - block.origin - first_row + g * GROUP_ROWS;
            head_load<HD, GROUP_ROWS>(tq + g * HELD, &q, held, head, row);
            head_load<HD, GROUP_ROWS>(td + g * HELD, &dout, held, head, row);
        }
        Turn turn = {};
        for (unsigned i = 0; i < 2 * tiles_in<KEYS>(length); i++, turn_next<STAGES>(turn)) {
            barrier_wait(empty + turn.stage, turn.phase ^ 1);
            barrier_expect(full + turn.stage, TILE * sizeof(floatX));
            head_load<HD, KEYS>(stages + turn.stage * TILE, i % 2 ? &k : &v, full + turn.stage, key_head,
                                keys_begin - first_key + i / 2 * KEYS);
        }
        return;
    }
    registers_take<240>();
    const unsigned group = group_number() - 1, lane = threadIdx.x % LANES, row_in_group = threadIdx.x / LANES % 4 * 16;
    const size_t group_begin = block.begin + group * GROUP_ROWS, row = group_begin + row_in_group + lane / 4;
    const WarpSight sight = warp_sight(block, group * GROUP_ROWS + row_in_group);
    const int group_first = (int)((long long)group_begin - (long long)keys_begin);
    const float scale = shape.scale * LOG2_E;
    float sums[HD / 8][4] = {}, row_lse[2] = {INFINITY, INFINITY}, row_delta[2] = {0.0f, 0.0f};
    for (int i = 0; i < 2; i++) {
        const size_t place = (row + 8 * i - block.origin) * shape.NH + head;
        if (row + 8 * i < block.end) row_lse[i] = lse[place] * LOG2_E, row_delta[i] = delta[place];
    }
    Turn turn = {};
    barrier_wait(held, 0);
    for (unsigned key = 0; key < length; key += KEYS) {
        const unsigned of_v = turn.stage, v_phase = turn.phase;
        turn_next<STAGES>(turn);
        const unsigned of_k = turn.stage;
        const floatX *const tv = stages + of_v * TILE, *const tk = stages + of_k * TILE;
        barrier_wait(full + of_v, v_phase);
        barrier_wait(full + of_k, turn.phase);
        turn_next<STAGES>(turn);
        if (group_begin >= block.end || (int)key >= group_first + (int)GROUP_ROWS ||
            (int)(key + KEYS) <= group_first + 1 - blocks.window) { // no query of the group sees one of the keys
            warp_arrive(empty + of_v), warp_arrive(empty + of_k);
            continue;
        }
        float s[N / 8][4], ds[N / 8][4];
        OperandA w[N / 16];
        wgmma_fence();
        issue_scores<HD, N>(s, tq + group * HELD, tk);
        issue_scores<HD, N>(ds, td + group * HELD, tv);
        wgmma_wait<1>(s);
        hide<N, SUMS>(s, sight, key, lane / 4, blocks.window);
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[j][e] = fast_exp2(fmaf(s[j][e], scale, -row_lse[e / 2]));
        wgmma_wait<0>(ds);
        warp_arrive(empty + of_v);
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) ds[j][e] = s[j][e] * (ds[j][e] - row_delta[e / 2]);
        operands_of<N>(w, ds);
        issue_sums<HD, N>(sums, w, tk);
        wgmma_wait<0>(sums);
        warp_arrive(empty + of_k);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (row + 8 * i >= block.end) continue;
        Result<SUMS> *const to = dq + ((row + 8 * i - block.origin) * shape.NH + head) * HD + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < HD / 8; d++) {
            Pack<Result<SUMS>, 2> pair = {};
            if (SUMS && accumulate) pair = pack_read<2>(to + d * 8);
            for (int e = 0; e < 2; e++)
                set_value(&pair.x[e], sums[d][2 * i + e] * shape.scale + (SUMS && accumulate ? load(pair.x[e]) : 0.0f));
            pack_write(to + d * 8, pair);
        }
    }
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
        KeyRange keys = {SIZE_MAX, min_size(call->keys.end, last->end)};
        for (size_t i = from; i < next; i++) {
            const Span span = spans.span[i];
            keys.begin = min_size(keys.begin, keys_seen(blocks, span.document, span.begin, span.end).begin);
        }
        if (keys.begin >= keys.end) keys.begin = keys.end = 0;
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
