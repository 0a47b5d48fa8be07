/*
Attention of few queries over many keys, in op set "cuda": decoding with a key/value cache. A block has 16 rows, a
part of the keys and one key/value head. A row is a query of one of the heads that share the key/value head, so keys
and values are read once for all of them. attention_merge_kernel merges the parts in order. The number of parts depends
on the cache alone (gpu_key_parts), not on how many texts a call has or how long they are. So the launches of a step do
not change, and a text's bits do not depend on other texts.

A warp has 16 keys of each tile and, of heads above 128, a part of the columns: several warps then compute the same
scores, because memory takes longer. The warps' results are merged in shared memory at the end.

    split_forward    all spans of at most split_queries(group) queries; the other kernels take the rest
*/
#ifndef LLMC_CUDA_ATTENTION_SPLIT_CUH
#define LLMC_CUDA_ATTENTION_SPLIT_CUH
#include "attention_tiles.cuh"

// Warps that share the keys of a tile, 16 keys each; warps that share the columns of a head; buffers of tiles
struct SplitTiles {
    unsigned keys, columns, stages;
};
constexpr unsigned SPLIT_ROWS = 16, MERGE_THREADS = 128;

template <SplitTiles T> constexpr unsigned split_threads = T.keys *T.columns *LANES;
template <SplitTiles T> constexpr unsigned split_keys = T.keys * 16; // keys of a tile

// Bytes of the tiles of keys and values, and of all tiles with the queries
template <int HD> constexpr size_t split_stages_bytes(SplitTiles t) {
    return 2 * t.stages * t.keys * 16 * tile_stride<HD> * sizeof(floatX);
}
template <int HD> constexpr size_t split_bytes(SplitTiles t) {
    return SPLIT_ROWS * tile_stride<HD> * sizeof(floatX) + split_stages_bytes<HD>(t);
}
// Bytes of the warps' results: sums, and the largest score and sum of weights of each row
template <int HD> constexpr size_t split_result_bytes(SplitTiles t) {
    return t.keys * SPLIT_ROWS * (HD + 8 + 2) * sizeof(float);
}

// Returns tiles of about 32 KiB, and up to 4 buffers, so that an H100 runs two blocks or more.
template <int HD> constexpr SplitTiles split_tiles() {
    const size_t row = HD * sizeof(floatX);
    SplitTiles t = {row > 512 ? 1u : row > 256 ? 2u : 4u, HD > 128 ? HD / 128u : 1u, 4};
    while (t.stages > 1 && split_bytes<HD>(t) > (84 << 10)) t.stages--;
    return t;
}
template <int HD> constexpr SplitTiles SPLIT_TILES = split_tiles<HD>();

// Keys of a part, and the parts that have keys; the last may have fewer keys
struct KeyParts {
    unsigned keys, used;
};
template <unsigned KEYS> __device__ inline KeyParts key_parts(size_t length, unsigned parts) {
    const unsigned tiles = tiles_in<KEYS>(length), each = (tiles + parts - 1) / parts;
    return KeyParts{each * KEYS, each ? (tiles + each - 1) / each : 0};
}

// Returns the number of lines of a launch.
__host__ __device__ inline size_t split_lines(size_t row_tiles, size_t NKV, size_t parts) {
    return row_tiles * NKV * SPLIT_ROWS * parts;
}

// The rows of a block: row r < count is query first + r of the span's queries x heads
struct SplitRows {
    Span span;
    size_t first, begin, last; // begin, last: tokens of the first and the last query
    unsigned count, length;    // length: keys that some row sees, from keys.begin on
    KeyRange keys;
};

__device__ inline SplitRows split_rows(const SpanBlocks &blocks, unsigned group) {
    const unsigned i = span_of(blocks, blockIdx.x);
    SplitRows rows = {span_at(blocks, i), (size_t)(blockIdx.x - blocks.first[i]) * SPLIT_ROWS, 0, 0, SPLIT_ROWS, 0, {}};
    const size_t left = (rows.span.end - rows.span.begin) * group - rows.first;
    if (left < SPLIT_ROWS) rows.count = (unsigned)left;
    rows.begin = rows.span.begin + rows.first / group;
    rows.last = rows.span.begin + (rows.first + rows.count - 1) / group;
    rows.keys = keys_seen(blocks, rows.span.document, rows.begin, rows.last + 1);
    if (rows.keys.begin < rows.keys.end) rows.length = (unsigned)(rows.keys.end - rows.keys.begin);
    return rows;
}

// Returns the index of a row's query and head: its row in q, out and lse of heads.
__device__ inline size_t split_place(const SplitRows &rows, const HeadShape &shape, unsigned group, unsigned r) {
    const size_t row = rows.first + r;
    return (rows.span.row + row / group) * shape.NH + blockIdx.y * group + row % group;
}

// Returns the keys that row r sees, counted from key `first`.
struct RowSight {
    int begin, end;
};
__device__ inline RowSight row_sight(const SpanBlocks &blocks, const SplitRows &rows, unsigned group, unsigned r,
                                     size_t first) {
    const size_t t = rows.span.begin + (rows.first + r) / group;
    const KeyRange seen = keys_seen(blocks, rows.span.document, t, t + 1);
    return RowSight{(int)((long long)seen.begin - (long long)first), (int)((long long)seen.end - (long long)first)};
}

// Fetches the block's rows of q; zeros beyond the last row.
template <int HD, unsigned THREADS>
__device__ inline void split_queries_fetch(floatX *tile, const floatX *q, const SplitRows &rows, const HeadShape &shape,
                                           unsigned group) {
    constexpr unsigned W = full_pack<floatX>, PACKS = HD / W;
    for (unsigned i = threadIdx.x; i < SPLIT_ROWS * PACKS; i += THREADS) {
        const unsigned r = i / PACKS, d = i % PACKS * W;
        const floatX *const from = q + split_place(rows, shape, group, r) * shape.HD + d;
        floatX *const to = tile + r * tile_stride<HD> + d;
        if (shape.packed)
            fetch<16>(to, from, r < rows.count && d < shape.HD);
        else
            for (unsigned j = 0; j < W; j++) to[j] = r < rows.count && d + j < shape.HD ? from[j] : store(0.0f);
    }
}

// The warps' results of a block, in shared memory: sums[warps of keys][SPLIT_ROWS][HD + 8], then for each warp and row
// the largest score and the sum of weights
template <int HD> constexpr unsigned RESULT_STRIDE = HD + 8;

template <int HD, SplitTiles T>
__device__ inline void split_result_put(float *result, const float (*o)[4], const float *largest, const float *total) {
    const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, keys = warp / T.columns;
    float *const of_rows = result + T.keys * SPLIT_ROWS * RESULT_STRIDE<HD>;
    for (unsigned i = 0; i < 2; i++) {
        const unsigned row = keys * SPLIT_ROWS + lane / 4 + 8 * i;
        float *const to = result + row * RESULT_STRIDE<HD> + warp % T.columns * (HD / T.columns) + lane % 4 * 2;
        if (lane % 4 == 0 && warp % T.columns == 0) of_rows[2 * row] = largest[i], of_rows[2 * row + 1] = total[i];
#pragma unroll
        for (unsigned d = 0; d < HD / T.columns / 8; d++)
            pack_write(to + d * 8, Pack<float, 2>{{o[d][2 * i], o[d][2 * i + 1]}});
    }
}

// Replaces the largest scores of row r by the factors of the warps' sums. Returns log2 of the row's sum of weights.
template <int HD, SplitTiles T> __device__ inline float split_factors(float *result, unsigned r) {
    float *const of_rows = result + T.keys * SPLIT_ROWS * RESULT_STRIDE<HD>;
    float top = -INFINITY, total = 0.0f;
    for (unsigned w = 0; w < T.keys; w++) top = fmaxf(top, of_rows[2 * (w * SPLIT_ROWS + r)]);
    for (unsigned w = 0; w < T.keys; w++) {
        float *const of = of_rows + 2 * (w * SPLIT_ROWS + r);
        of[0] = top == -INFINITY ? 0.0f : exp2f(of[0] - top);
        total += of[0] * of[1];
    }
    for (unsigned w = 0; w < T.keys && total > 0.0f; w++) of_rows[2 * (w * SPLIT_ROWS + r)] /= total;
    return top + log2f(total);
}

// ---- kernels --------------------------------------------------------------------------------------------------------
// Computes a part of the keys. Without lines, writes out and lse. lines: fp32 [row tiles,NKV,SPLIT_ROWS,parts,HD], and
// then log2 of the sum of weights of each line. gridDim.z: parts
template <int HD, SplitTiles T = SPLIT_TILES<HD>, bool SUMS = false>
__global__ void __launch_bounds__(split_threads<T>, 2)
    attention_split_kernel(Result<SUMS> *out, float *lse, float *lines, const floatX *q, const floatX *k,
                           const floatX *v, SpanBlocks blocks, HeadShape shape) {
    constexpr unsigned KEYS = split_keys<T>, TILE = KEYS * tile_stride<HD>, THREADS = split_threads<T>,
                       OWN = HD / T.columns;
    DYNAMIC_SHARED(floatX, tq);
    floatX *const stages = tq + SPLIT_ROWS * tile_stride<HD>;
    float *const result = (float *)stages; // after the last tile
    const unsigned group = (unsigned)(shape.NH / shape.NKV), lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const unsigned warp_key = warp / T.columns * 16, column = warp % T.columns * OWN; // the warp's first
    const SplitRows rows = split_rows(blocks, group);
    const KeyParts parts = key_parts<KEYS>(rows.length, gridDim.z);
    const unsigned begin = blockIdx.z * parts.keys;
    if (blockIdx.z && blockIdx.z >= parts.used) return; // part 0 tells if a row sees no key
    const size_t first = rows.keys.begin + begin;
    const unsigned length = rows.length - begin < parts.keys ? rows.length - begin : parts.keys; // keys of this part
    const HeadRows keys = {shape.NKV, blockIdx.y, shape.HD, shape.packed};
    const float scale = shape.scale * LOG2_E;
    float o[OWN / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2];
    WeightSum sum[2] = {};
    RowSight sight[2]; // of the lane's rows; rows beyond the last see what it sees
    for (unsigned i = 0; i < 2; i++) {
        const unsigned r = lane / 4 + 8 * i;
        sight[i] = row_sight(blocks, rows, group, r < rows.count ? r : rows.count - 1, first);
    }
    const RowSight all = {row_sight(blocks, rows, group, rows.count - 1, first).begin,
                          row_sight(blocks, rows, group, 0, first).end}; // keys that all rows see
    const size_t at = (first * keys.heads + keys.head) * keys.HD;        // offset of the part's first key
    const auto bring = [&](unsigned i, unsigned stage) {
        const size_t from = at + (size_t)i * KEYS * keys.heads * keys.HD;
        const unsigned valid = length - i * KEYS;
        rows_fetch<HD, THREADS>(stages + 2 * stage * TILE, k + from, keys, valid, KEYS);
        rows_fetch<HD, THREADS>(stages + (2 * stage + 1) * TILE, v + from, keys, valid, KEYS);
    };
    const auto use = [&](unsigned i, unsigned stage) {
        const floatX *const tk = stages + 2 * stage * TILE + warp_key * tile_stride<HD>, *const tv = tk + TILE;
        const int key = (int)(i * KEYS + warp_key);
        float s[2][4] = {}, shrink[2];
        if (key >= (int)length) return;
        product_of_rows<HD, 16>(s, tq, 0, tk);
        if (key < all.begin || key + 16 > all.end)
            hide_where<16>(s, [&](int j, int e) {
                const int place = key + j * 8 + (int)(lane % 4 * 2) + e % 2;
                return place < sight[e / 2].begin || place >= sight[e / 2].end;
            });
        weights_of<16>(s, scale, largest, sum, shrink, true);
        if (shrink[0] != 1.0f || shrink[1] != 1.0f)
#pragma unroll
            for (unsigned d = 0; d < OWN / 8; d++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[d][e] *= shrink[e / 2];
        product_with_rows<HD, 16, OWN>(o, s, tv + column);
    };
    split_queries_fetch<HD, THREADS>(tq, q, rows, shape, group);
    pass_tiles<T.stages>(tiles_in<KEYS>(length), bring, use);
    for (int i = 0; i < 2; i++) total[i] = (float)quad_sum(sum[i]);
    __syncthreads(); // no warp reads a tile any more
    split_result_put<HD, T>(result, o, largest, total);
    __syncthreads();
    const size_t line = ((size_t)blockIdx.x * shape.NKV + blockIdx.y) * SPLIT_ROWS * gridDim.z + blockIdx.z;
    if (const unsigned r = threadIdx.x; r < rows.count) {
        const float log_sum = split_factors<HD, T>(result, r);
        if (lines)
            lines[split_lines(gridDim.x, shape.NKV, gridDim.z) * shape.HD + line + r * gridDim.z] = log_sum;
        else
            lse[split_place(rows, shape, group, r)] = log_sum * LN_2;
    }
    __syncthreads();
    for (unsigned r = warp; r < rows.count; r += THREADS / LANES)
        for (unsigned c = lane; c < shape.HD; c += LANES) {
            const float *const from = result + r * RESULT_STRIDE<HD> + c, *const factor =
                                                                              result +
                                                                              T.keys * SPLIT_ROWS * RESULT_STRIDE<HD> +
                                                                              2 * r;
            float value = 0.0f;
            for (unsigned w = 0; w < T.keys; w++)
                value += from[w * SPLIT_ROWS * RESULT_STRIDE<HD>] * factor[2 * w * SPLIT_ROWS];
            if (lines)
                lines[(line + r * gridDim.z) * shape.HD + c] = value;
            else
                set_value(out + split_place(rows, shape, group, r) * shape.HD + c, value);
        }
}

// Merges a row's parts in order: blockIdx.z is the row of the tile. accumulate: after what out and lse hold
template <unsigned KEYS, bool SUMS>
__global__ void attention_merge_kernel(Result<SUMS> *out, float *lse, const float *lines, SpanBlocks blocks,
                                       HeadShape shape, unsigned parts, bool accumulate) {
    SHARED(float, weight, GPU_SPLIT_BLOCKS);
    const unsigned group = (unsigned)(shape.NH / shape.NKV), r = blockIdx.z;
    const SplitRows rows = split_rows(blocks, group);
    if (r >= rows.count) return;
    const unsigned filled = key_parts<KEYS>(rows.length, parts).used, used = filled ? filled : 1;
    const size_t line = (((size_t)blockIdx.x * shape.NKV + blockIdx.y) * SPLIT_ROWS + r) * parts,
                 place = split_place(rows, shape, group, r);
    const float *const log_sum = lines + split_lines(gridDim.x, shape.NKV, parts) * shape.HD + line;
    const float before = accumulate ? lse[place] * LOG2_E : -INFINITY;
    float top = before;
    for (unsigned p = threadIdx.x; p < used; p += MERGE_THREADS) weight[p] = log_sum[p];
    __syncthreads();
    for (unsigned p = 0; p < used; p++) top = fmaxf(top, weight[p]);
    __syncthreads();
    for (unsigned p = threadIdx.x; p < used; p += MERGE_THREADS)
        weight[p] = top == -INFINITY ? 0.0f : exp2f(weight[p] - top);
    __syncthreads();
    const float held = before == -INFINITY ? 0.0f : exp2f(before - top);
    float total = held;
    for (unsigned p = 0; p < used; p++) total += weight[p];
    for (unsigned c = threadIdx.x; c < shape.HD; c += MERGE_THREADS) {
        Result<SUMS> *const to = out + place * shape.HD + c;
        float value = held > 0.0f ? held * load(*to) : 0.0f;
#pragma unroll 8
        for (unsigned p = 0; p < used; p++) value += weight[p] * lines[(line + p) * shape.HD + c];
        set_value(to, total > 0.0f ? value / total : 0.0f);
    }
    if (threadIdx.x == 0) lse[place] = (top + log2f(total)) * LN_2;
}

// ---- launches -------------------------------------------------------------------------------------------------------
static unsigned split_parts(const AttentionShape *call) {
    const char *const wanted = getenv("STREAMBP_SPLIT_KEYS");
    const size_t parts = gpu_key_parts(call->slots, call->NKV);
    return (wanted && !strcmp(wanted, "0")) || (parts == 1 && call->accumulate) ? 0 : (unsigned)parts;
}

// Returns the most queries of a span that split_forward takes; 0: it takes none.
static size_t split_queries(const AttentionShape *call) {
    return split_parts(call) ? max_size(GPU_SPLIT_ROWS / (call->NH / call->NKV), 1) : 0;
}

// Runs forward of the spans that split_queries allows.
static void split_forward(void *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                          const AttentionShape *call, const HeadShape &shape, float *scratch) {
    const unsigned parts = split_parts(call), NKV = (unsigned)shape.NKV;
    const size_t most = split_queries(call), group = shape.NH / shape.NKV;
    float *const lines = parts > 1 ? scratch : NULL;
    SpanBlocks blocks = {};
    const auto run = [&](auto SUMS, auto PADDED) {
        constexpr SplitTiles T = SPLIT_TILES<PADDED>;
        static_assert(split_result_bytes<PADDED>(T) <= split_stages_bytes<PADDED>(T));
        static_assert(split_bytes<PADDED>(T) <= SHARED_LIMIT);
        const dim3 grid(blocks.first[blocks.count], NKV, parts),
            rows(grid.x, NKV, (unsigned)min_size(SPLIT_ROWS, most * group));
        LAUNCH((attention_split_kernel<PADDED, T, SUMS>), grid, split_threads<T>, split_bytes<PADDED>(T))
        ((Result<SUMS> *)out, lse, lines, q, k, v, blocks, shape);
        if (!lines) return;
        LAUNCH((attention_merge_kernel<split_keys<T>, SUMS>), rows, MERGE_THREADS, 0)
        ((Result<SUMS> *)out, lse, (const float *)lines, blocks, shape, parts, call->accumulate != 0);
    };
    for (size_t from = 0; from < call->spans.count;) {
        from = span_blocks(&blocks, call->spans, call->keys, from, SPLIT_ROWS, false);
        for (unsigned i = 0; i < blocks.count; i++) {
            const size_t queries = blocks.span[i].end - blocks.span[i].begin;
            const size_t tiles = queries <= most ? blocks_for(queries * group, SPLIT_ROWS) : 0;
            blocks.first[i + 1] = blocks.first[i] + (unsigned)tiles;
        }
        if (!blocks.first[blocks.count]) continue;
        with_flag(call->partial,
                  [&](auto SUMS) { with_head_size<HEAD_SIZES>(shape.HD, [&](auto PADDED) { run(SUMS, PADDED); }); });
    }
}

#endif
