/*
Parts of the attention kernels of op set "cuda": the queries and keys of a block, tiles of rows streamed through shared
memory, products with them, and the keys of a tile that a query sees.
*/
#ifndef LLMC_CUDA_ATTENTION_TILES_CUH
#define LLMC_CUDA_ATTENTION_TILES_CUH
#include "graph.cuh"
#include "mma.cuh"

// ---- blocks of spans: a launch takes up to MOST_SPANS spans as an argument ------------------------------------------
constexpr unsigned MOST_SPANS = 64;
constexpr int MOST_POSITIONS = 1 << 30; // most tokens of a document, so that distances fit an int

struct SpanBlocks {
    Span span[MOST_SPANS];
    unsigned first[MOST_SPANS + 1]; // first block of each span; last entry: the number of blocks
    unsigned count;
    int window;           // most keys that a query sees; MOST_POSITIONS: no window
    KeyRange keys;        // keys that the call may read
    const Span *recorded; // spans in device memory, read in place of `span`; NULL: none
};

struct SpanBlock {
    Span span;
    size_t begin, end; // the block's queries or keys
    KeyRange keys;     // keys that some query of the block, or of the span, sees; none if begin >= end
    size_t origin;     // token of row 0 of q, out, lse; may wrap below 0
};

__host__ __device__ inline size_t first_key_in(size_t document, size_t t, int window) {
    return t - document >= (size_t)window ? t + 1 - (size_t)window : document;
}

// Returns the keys that some of the queries [begin, end) of a document sees; none if begin >= end.
__host__ __device__ inline KeyRange keys_seen(const SpanBlocks &blocks, size_t document, size_t begin, size_t end) {
    const size_t first = first_key_in(document, begin, blocks.window);
    return KeyRange{first > blocks.keys.begin ? first : blocks.keys.begin,
                    end < blocks.keys.end ? end : blocks.keys.end};
}

// Cuts spans, from `from` on, into blocks of `size` queries; by_keys: into blocks of `size` keys that some query sees.
// Leaves out spans of up to `left_out` queries. Returns the next span.
static size_t span_blocks(SpanBlocks *blocks, Spans spans, KeyRange range, size_t from, unsigned size, bool by_keys,
                          size_t left_out = 0) {
    blocks->count = 0, blocks->first[0] = 0;
    blocks->window = spans.window && spans.window < MOST_POSITIONS ? (int)spans.window : MOST_POSITIONS;
    blocks->keys = range;
    blocks->recorded = graph_spans(spans, from);
    for (; from < spans.count && blocks->count < MOST_SPANS; from++) {
        const Span span = spans.span[from];
        const KeyRange keys =
            by_keys ? keys_seen(*blocks, span.document, span.begin, span.end) : KeyRange{span.begin, span.end};
        const bool taken = keys.begin < keys.end && span.end - span.begin > left_out;
        const size_t length = taken ? keys.end - keys.begin : 0;
        blocks->span[blocks->count] = span;
        blocks->first[blocks->count + 1] = blocks->first[blocks->count] + (unsigned)blocks_for(length, size);
        blocks->count++;
    }
    return from;
}

__device__ inline Span span_at(const SpanBlocks &blocks, unsigned i) {
    Span span = blocks.span[i];
    if (blocks.recorded) span = blocks.recorded[i];
    return span;
}

// Returns the span of a block.
__device__ inline unsigned span_of(const SpanBlocks &blocks, unsigned block) {
    unsigned i = 0;
    while (block >= blocks.first[i + 1]) i++;
    return i;
}

// Returns this block's part of a span. Blocks with the most work come first: causal attention gives it to the last
// queries and to the first keys.
__device__ inline SpanBlock span_block(const SpanBlocks &blocks, unsigned size, bool by_keys) {
    const unsigned block = by_keys ? blockIdx.x : blocks.first[blocks.count] - 1 - blockIdx.x,
                   i = span_of(blocks, block);
    const Span span = span_at(blocks, i);
    SpanBlock found = {span, 0, 0, keys_seen(blocks, span.document, span.begin, span.end), span.begin - span.row};
    found.begin = (by_keys ? found.keys.begin : span.begin) + (size_t)(block - blocks.first[i]) * size;
    found.end = by_keys ? found.keys.end : span.end;
    if (found.end - found.begin > size) found.end = found.begin + size;
    if (!by_keys) found.keys = keys_seen(blocks, span.document, found.begin, found.end);
    return found;
}

// ---- tiles ----------------------------------------------------------------------------------------------------------
template <int HD> constexpr unsigned tile_stride = HD + 8; // rows begin in different banks, aligned to 16 bytes

// Tiles of a kernel. A block holds `held` rows of one or two tensors, 16 per warp that owns their sums. It streams
// `passing`-row tiles of two other tensors through `stages` buffers, prefetching ahead.
struct Tiles {
    unsigned held, passing, stages;
};

// Shared memory of a block on architectures 86, 89 and 120; other architectures have more
constexpr size_t SHARED_LIMIT = 99 << 10;

template <Tiles T> constexpr unsigned block_threads = T.held / 16 * LANES;

// Blocks per multiprocessor: six leave 80 registers for each of 128 threads, four leave 128. Unbounded (0) for larger
// heads; for small ones the compiler would then spill registers to fit more blocks.
template <int HD> constexpr unsigned LEAST_BLOCKS = HD > 32 ? 0 : sizeof(floatX) == 2 ? 6 : 4;

template <int HD> constexpr size_t tiles_bytes(Tiles t, unsigned own_tensors) {
    return (own_tensors * t.held + 2 * t.stages * t.passing) * tile_stride<HD> * sizeof(floatX);
}

// Returns the first choice of tiles that fits. 32 rows take 16 registers of scores, in backward twice as many, in
// addition to HD / 2 or HD registers of sums.
template <int HD> constexpr Tiles tiles_that_fit(unsigned own_tensors) {
    const Tiles choices[] = {{64, 32, 2}, {64, 16, 2}, {64, 16, 1}, {32, 16, 1}};
    for (const Tiles t : choices)
        if (tiles_bytes<HD>(t, own_tensors) <= SHARED_LIMIT) return t;
    return Tiles{};
}
template <int HD> constexpr Tiles FORWARD_TILES = tiles_that_fit<HD>(1);
template <int HD> constexpr Tiles BACKWARD_TILES = tiles_that_fit<HD>(2);

// Returns the padding after a row of a tile. It holds lse for a row of q, delta for a row of dout.
template <int HD> __device__ inline float *beside_row(const floatX *tile, unsigned row) {
    return (float *)(tile + row * tile_stride<HD> + HD);
}

struct HeadRows {
    size_t heads, head, HD; // x[row][head][HD]
    bool packed;            // 1: rows are whole packs
};

// Fetches tile[rows][HD] = x rows [begin, begin + rows) of one head, valid after a fetch_wait; zeros from `end` on, and
// beyond h.HD.
template <int HD, unsigned THREADS>
__device__ inline void tile_fetch(floatX *tile, const floatX *x, HeadRows h, size_t begin, size_t end, unsigned rows) {
    constexpr unsigned W = full_pack<floatX>, PACKS = HD / W, STEP = THREADS / PACKS; // STEP: rows fetched at once
    static_assert(STEP > 0);
    const unsigned first = threadIdx.x / PACKS, d = threadIdx.x % PACKS * W;
    const unsigned valid = end - begin < rows ? (unsigned)(end - begin) : rows;
    const floatX *from = x + ((begin + first) * h.heads + h.head) * h.HD + d;
    if (first >= STEP) return; // threads beyond whole rows have no work
#pragma unroll
    for (unsigned row = first; row < rows; row += STEP, from += STEP * h.heads * h.HD) {
        floatX *to = tile + row * tile_stride<HD> + d;
        if (h.packed)
            fetch<16>(to, from, row < valid && d < h.HD);
        else
            for (unsigned j = 0; j < W; j++) to[j] = row < valid && d + j < h.HD ? from[j] : store(0.0f);
    }
}

// Fetches like tile_fetch, from a head's row `x` on; zeros from `valid` on.
template <int HD, unsigned THREADS>
__device__ inline void rows_fetch(floatX *tile, const floatX *x, const HeadRows &h, unsigned valid, unsigned rows) {
    constexpr unsigned W = full_pack<floatX>, PACKS = HD / W, STEP = THREADS / PACKS; // STEP: rows fetched at once
    static_assert(STEP > 0);
    const unsigned first = threadIdx.x / PACKS, d = threadIdx.x % PACKS * W;
    const size_t stride = h.heads * h.HD;
    const floatX *from = x + first * stride + d;
    floatX *to = tile + first * tile_stride<HD> + d;
    if (THREADS % PACKS && first >= STEP) return; // threads beyond whole rows have no work
    if (h.packed) {
        if (d >= h.HD) valid = 0;
#pragma unroll
        for (unsigned i = 0; i < rows; i += STEP, from += STEP * stride, to += STEP * tile_stride<HD>)
            if (rows % STEP == 0 || first + i < rows) fetch<16>(to, from, first + i < valid);
        return;
    }
#pragma unroll 1
    for (unsigned row = first; row < rows; row += STEP, from += STEP * stride, to += STEP * tile_stride<HD>)
        for (unsigned j = 0; j < W; j++) to[j] = row < valid && d + j < h.HD ? from[j] : store(0.0f);
}

template <unsigned ROWS> __device__ inline unsigned tiles_in(size_t rows) {
    return (unsigned)((rows + ROWS - 1) / ROWS);
}

// Streams tiles: bring(i, stage) fetches tile i, use(i, stage) computes with it. One barrier per tile publishes the
// fetched tile and frees the buffer that the next tile overwrites.
template <unsigned STAGES, typename Bring, typename Use>
__device__ inline void pass_tiles(unsigned count, Bring bring, Use use) {
    unsigned stage = 0;
    for (unsigned i = 0; i + 1 < STAGES; i++) {
        if (i < count) bring(i, i);
        fetch_commit(); // commit even an empty group, so that the count of groups is right
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

// Adds a[rows, HD] b[N, HD]^T to c[16 rows of this warp][N].
template <int HD, int N>
__device__ inline void product_of_rows(float (*c)[4], const floatX *a, unsigned row, const floatX *b) {
#pragma unroll(sizeof(floatX) == 2 ? HD / 16 : 1) // fp32 code is long enough without more unrolling
    for (int d = 0; d < HD; d += 16) {
        const OperandA left = load_a(a, tile_stride<HD>, row, d);
        mma_columns<N>(c, left, [&](int n) { return load_b(b, tile_stride<HD>, n, d); });
    }
}

// Adds w[rows, N] b[N, COLUMNS] to c[16 rows][COLUMNS]. w is in registers, in a result's layout.
template <int HD, int N, int COLUMNS = HD>
__device__ inline void product_with_rows(float (*c)[4], float (*w)[4], const floatX *b) {
#pragma unroll
    for (int j = 0; j < N; j += 16) {
        const OperandA left = operand_of(w[j / 8], w[j / 8 + 1]);
        mma_columns<COLUMNS>(c, left, [&](int d) { return load_b_rows(b, tile_stride<HD>, j, d); });
    }
}

// Sets scores s[j][e] to -inf where hidden(j, e).
template <int N, typename Hidden> __device__ inline void hide_where(float (*s)[4], Hidden hidden) {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (hidden(j, e)) s[j][e] = -INFINITY;
}

// Hides keys after their query, in tiles that reach the diagonal. first: the lane's first row minus the tile's first
// column. Rows are queries and columns keys, or the reverse.
template <int N, bool ROWS_ARE_KEYS> __device__ inline void hide_unseen(float (*s)[4], int first) {
    first -= threadIdx.x % 4 * 2;
    hide_where<N>(s, [&](int j, int e) {
        const int column = j * 8 + e % 2 - e / 2 * 8; // column relative to the lane's first row
        return ROWS_ARE_KEYS ? column < first : column > first;
    });
}

// Hides keys `window` or more before their query, in tiles at the window's far end. first: as in hide_unseen, minus the
// window if rows are queries, plus it if they are keys
template <int N, bool ROWS_ARE_KEYS> __device__ inline void hide_far(float (*s)[4], int first) {
    hide_unseen<N, !ROWS_ARE_KEYS>(s, ROWS_ARE_KEYS ? first - 1 : first + 1);
}

// Hides columns from `keys` on, after the last key, in the last tile.
template <int N> __device__ inline void hide_behind(float (*s)[4], unsigned keys) {
    const unsigned lane_column = threadIdx.x % 4 * 2;
    hide_where<N>(s, [&](int j, int e) { return lane_column + j * 8 + e % 2 >= keys; });
}

// ---- which keys of a block a warp's 16 queries see ------------------------------------------------------------------
// Keys that a warp's 16 queries see. Positions count from the block's first key.
struct WarpSight {
    int first;            // the warp's first query; negative if keys begin later
    unsigned end, length; // end: end of the keys that some query of the warp sees; length: number of the block's keys
};

__device__ inline WarpSight warp_sight(const SpanBlock &block, unsigned warp_row) {
    WarpSight sight = {(int)((long long)(block.begin + warp_row) - (long long)block.keys.begin), 0, 0};
    if (block.keys.begin < block.keys.end) sight.length = (unsigned)(block.keys.end - block.keys.begin);
    if (sight.first > -16 && block.begin + warp_row < block.end)
        sight.end = sight.first + 16 < (int)sight.length ? (unsigned)(sight.first + 16) : sight.length;
    return sight;
}

// Returns whether some query of the warp sees one of keys [key, key + keys).
__device__ inline bool sees(const WarpSight &sight, unsigned key, unsigned keys, int window) {
    return key < sight.end && (int)(key + keys) > sight.first + 1 - window;
}

// Returns whether `key` is outside the window of the warp's last query.
__device__ inline bool has_far(const WarpSight &sight, unsigned key, int window) {
    return (int)key < sight.first + 16 - window;
}

// Sets the scores of unseen keys of the tile at `key` to -inf. PART: keys may end before the block's last query
template <int N, bool PART>
__device__ inline void hide(float (*s)[4], const WarpSight &sight, unsigned key, unsigned lane_row, int window) {
    const int row = sight.first + (int)lane_row - (int)key;
    if ((int)(key + N) > sight.first + 1) hide_unseen<N, false>(s, row);
    if (has_far(sight, key, window)) hide_far<N, false>(s, row - window);
    if (PART && key + N > sight.length) hide_behind<N>(s, sight.length - key);
}

// Reduces over the four lanes that share a row of a result.
template <typename T> __device__ inline T quad_sum(T x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// ---- results and softmax --------------------------------------------------------------------------------------------
constexpr float LN_2 = 0.6931471805599453f;

// Type of the elements of out and dq: floatX, or with SUMS fp32 sums over ranges of keys (such kernels need more
// registers)
template <bool SUMS> using Result = std::conditional_t<SUMS, float, floatX>;

// 1: sums are folded. Backward needs the last digits of a row's output, a sum over keys. So the fp32 build sets aside
// the sum over every FOLD_KEYS keys, like op set "cpu", and no step has many terms. In bf16, rounding the weights costs
// more than folding would save. Registers are few, so the folded sum waits in `out`, which is fp32 in this build.
constexpr bool FOLDS = sizeof(floatX) == 4;
constexpr unsigned FOLD_KEYS = 2048;

// Type of sums of weights: double where sums are folded, for the same reason. The bf16 build avoids the few
// double-precision units.
using WeightSum = std::conditional_t<FOLDS, double, float>;

// Replaces a tile's scores, in the lane's two rows, by weights exp2(s scale - largest). shrink: factor for the sums
// over earlier tiles. may_begin: a row may have seen no key yet
template <int KEYS>
__device__ inline void weights_of(float (*s)[4], float scale, float (&largest)[2], WeightSum (&sum)[2],
                                  float (&shrink)[2], bool may_begin) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = -INFINITY, tile_sum = 0.0f;
#pragma unroll
        for (unsigned j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
        top = fmaxf(largest[i], quad_max(top) * scale);
        if (may_begin && top == -INFINITY) {
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
}

struct HeadShape {
    size_t NH, NKV, HD;
    float scale;
    bool packed;
};

// ---- launches -------------------------------------------------------------------------------------------------------
constexpr size_t MOST_HEAD_SIZE = GPU_MOST_HEAD;

// Calls launch(HD) with the padded head size as a constant: the first of SIZE, LARGER... that is large enough.
template <size_t SIZE, size_t... LARGER, typename F> static void with_head_size(size_t HD, F launch) {
    if constexpr (sizeof...(LARGER))
        if (HD > SIZE) return with_head_size<LARGER...>(HD, launch);
    launch(Width<SIZE>());
}
#define HEAD_SIZES 32, 64, 96, 128, 256, MOST_HEAD_SIZE

template <typename... Pointers> static HeadShape head_shape(const AttentionShape *shape, Pointers... pointers) {
    const size_t HD = shape->HD;
    return HeadShape{shape->NH, shape->NKV, HD, (float)shape->scale,
                     HD % full_pack<floatX> == 0 && all_aligned(pointers...)};
}

#endif
