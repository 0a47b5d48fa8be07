/*
The attention that each key receives, in op set "cuda": sums of exp(scale q k - lse) over queries and heads. As in
attention_dkv_kernel a block has keys of one key/value head, 16 a warp, and passes the queries of every head that shares
it. Its sums over queries are one line of `lines`; a second kernel adds the lines of all key/value heads in order.
FLOPs: 2 HD for each pair and head.
*/
#ifndef LLMC_CUDA_RECEIVED_CUH
#define LLMC_CUDA_RECEIVED_CUH
#include "attention_tiles.cuh"

template <int HD> constexpr size_t received_bytes(Tiles t) {
    return (t.held + t.stages * t.passing) * tile_stride<HD> * sizeof(floatX);
}
template <int HD> constexpr Tiles received_tiles() {
    const Tiles choices[] = {{64, 32, 2}, {64, 16, 2}, {32, 16, 1}};
    for (const Tiles t : choices)
        if (received_bytes<HD>(t) <= SHARED_LIMIT) return t;
    return Tiles{};
}
template <int HD> constexpr Tiles RECEIVED_TILES = received_tiles<HD>();

// A block's threads: its warps, or as many as fetch a row at once
template <int HD, Tiles T>
constexpr unsigned received_threads =
    block_threads<T> < HD / full_pack<floatX> ? HD / full_pack<floatX> : block_threads<T>;

// Computes lines[NKV,keys]. blockIdx.x: tile of keys; blockIdx.y: key/value head
template <int HD, Tiles T = RECEIVED_TILES<HD>>
__global__ void __launch_bounds__(received_threads<HD, T>)
    attention_received_kernel(float *lines, const floatX *q, const floatX *k, const float *lse, size_t n, size_t keys,
                              HeadShape shape) {
    constexpr unsigned QUERIES = T.passing, TILE = QUERIES * tile_stride<HD>, THREADS = received_threads<HD, T>;
    DYNAMIC_SHARED(floatX, tk);
    floatX *const stages = tk + T.held * tile_stride<HD>; // tiles of queries
    const unsigned lane = threadIdx.x % LANES, warp_row = threadIdx.x / LANES * 16;
    const size_t first = (size_t)blockIdx.x * T.held, before = keys - n, group = shape.NH / shape.NKV;
    const HeadRows of_keys = {shape.NKV, blockIdx.y, shape.HD, shape.packed},
                   queries = {shape.NH, 0, shape.HD, shape.packed};
    const unsigned begin = first > before ? (unsigned)(first - before) : 0, end = (unsigned)n; // queries that see a key
    const long long warp_key = (long long)(first + warp_row) - (long long)before; // the query of the warp's first key
    const float scale = shape.scale * LOG2_E;
    float sum[2] = {};
    unsigned coming = begin, next = begin;
    size_t coming_head = blockIdx.y * group;
    const auto bring = [&](unsigned, unsigned stage) {
        floatX *const tq = stages + stage * TILE;
        const size_t at = coming * shape.NH + coming_head;
        rows_fetch<HD, THREADS>(tq, q + at * shape.HD, queries, end - coming, QUERIES);
        for (unsigned i = threadIdx.x; i < QUERIES; i += THREADS)
            fetch<4>(beside_row<HD>(tq, i), lse + at + i * shape.NH, coming + i < end);
        coming += QUERIES;
        if (coming >= end) coming = begin, coming_head++;
    };
    const auto use = [&](unsigned, unsigned stage) {
        const floatX *const tq = stages + stage * TILE;
        const unsigned query = next;
        const long long row = warp_key + lane / 4 - query; // the tile's first column that sees the lane's first key
        float s[QUERIES / 8][4] = {};
        next = query + QUERIES < end ? query + QUERIES : begin;
        if (warp_row >= T.held || (long long)(query + QUERIES) <= warp_key) return;
        product_of_rows<HD, QUERIES>(s, tk, warp_row, tq);
        if (query < warp_key + 15 || query + QUERIES > end)
            hide_where<QUERIES>(s, [&](int j, int e) {
                const int column = j * 8 + (int)(lane % 4) * 2 + e % 2;
                return column < row + e / 2 * 8 || query + column >= end;
            });
#pragma unroll
        for (unsigned j = 0; j < QUERIES / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float of_query = *beside_row<HD>(tq, j * 8 + lane % 4 * 2 + e % 2);
                sum[e / 2] += exp2f(fmaf(s[j][e], scale, -LOG2_E * of_query));
            }
    };
    rows_fetch<HD, THREADS>(tk, k + (first * shape.NKV + blockIdx.y) * shape.HD, of_keys,
                            keys - first < T.held ? (unsigned)(keys - first) : T.held, T.held);
    pass_tiles<T.stages>((unsigned)group * tiles_in<QUERIES>(end - begin), bring, use);
    for (unsigned i = 0; i < 2; i++) {
        const float total = quad_sum(sum[i]);
        const size_t key = first + warp_row + lane / 4 + 8 * i;
        if (lane % 4 == 0 && key < keys && warp_row < T.held) lines[blockIdx.y * keys + key] = total;
    }
}

// Adds the lines of all key/value heads to received[keys].
__global__ void received_add_kernel(float *received, const float *lines, size_t NKV, size_t keys) {
    FOR_EACH_PACK(key, keys) {
        float sum = 0.0f;
        for (size_t h = 0; h < NKV; h++) sum += lines[h * keys + key];
        received[key] += sum;
    }
}

static void cuda_attention_received(Summed *received, const Stored *q, const Stored *k, const Summed *lse, size_t n,
                                    size_t keys, size_t NH, size_t NKV, size_t HD, double scale, Summed *scratch) {
    const bool packed = HD % full_pack<floatX> == 0 && all_aligned(q, k);
    const HeadShape shape = {NH, NKV, HD, (float)scale, packed};
    with_head_size<HEAD_SIZES>(HD, [&](auto PADDED) {
        constexpr Tiles T = RECEIVED_TILES<PADDED>;
        static_assert(T.held);
        LAUNCH((attention_received_kernel<PADDED>), dim3((unsigned)blocks_for(keys, T.held), (unsigned)NKV),
               (received_threads<PADDED, T>), received_bytes<PADDED>(T))
        ((float *)scratch, (const floatX *)q, (const floatX *)k, (const float *)lse, n, keys, shape);
    });
    LAUNCH((received_add_kernel), loop_grid(keys), LOOP_THREADS, 0)
    ((float *)received, (const float *)scratch, NKV, keys);
}

#endif
