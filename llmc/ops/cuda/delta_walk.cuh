/*
The gated delta rule of op set "cuda", block after block of a span by matrix instructions: forward with the state of a
head, back with its gradient. A thread block has COLUMNS columns of the state. A warp has 16 of these columns and every
fourth tile of 16 rows: in fp32 in registers, and as a split operand in shared memory. In the notation of
delta_blocks.cuh, forward

    R = beta (v - exp(c) K S),  N = inverse R,  out = exp(c) Q S + scores N,  S = exp(c_L) S + K^T (decay(L) N)

and back, dS the gradient of the state after the block, with dN = scores^T dout + decay(L) K dS

    dR = inverse^T dN,  dS = exp(c_L) dS + Q^T (exp(c) dout) - K^T (beta exp(c) dR)

In products over tokens a warp has 16 tokens. Tiles are fetched as soon as their place is free: the next block's keys at
a block's beginning (keys have two places), its values or dout once this block's values or dout are used. Triangles come
as operands from global memory.
*/
#ifndef LLMC_CUDA_DELTA_WALK_CUH
#define LLMC_CUDA_DELTA_WALK_CUH
#include "delta_tokens.cuh"

constexpr int WALK_MOST_COLUMNS = 32, WARP_COLUMNS = 16, WALK_MOST_K = 128;
constexpr size_t WALK_LEAST_K = 16;
constexpr unsigned ROW_WARPS = DELTA_THREADS_OF_BLOCK / LANES;
template <int COLUMNS> constexpr unsigned WALK_THREADS = COLUMNS / WARP_COLUMNS *DELTA_THREADS_OF_BLOCK;
// Thread blocks that share a multiprocessor when there are many heads or documents. Few columns are for few blocks.
template <int COLUMNS> constexpr unsigned WALK_BLOCKS = COLUMNS == WALK_MOST_COLUMNS ? 2 : 1;
template <int COLUMNS> constexpr unsigned TOKENS_TILE = BLOCK *padded<COLUMNS>; // elements of a tile of tokens' rows

// Results of delta_blocks_kernel for a walk. A walk back takes transposed triangles.
struct DeltaPairs {
    const OperandA *inverse, *scores;
    const BlockFactors *factors;
    const floatX *dout;
    bool packed_rows; // 1: rows of v and out, or dout, are whole packs
};

// ---- shared memory --------------------------------------------------------------------------------------------------
// Shared memory: two tiles of keys, one of queries, one of rows (v or dout); the state; R, N and what is added to the
// state, all split; factors of two blocks' tokens, each followed by BlockFactors.keep. SSD (Mamba-2): one tile of keys,
// neither R nor N, and factors of one block after the rows of keys and queries, whose ends hold no elements
constexpr unsigned FACTORS = BLOCK + 1;
template <int KP, int COLUMNS, bool SSD = false> struct WalkTiles {
    static constexpr unsigned STATE = KP * padded<COLUMNS>, KEYS = BLOCK * padded<KP>, PLACES = SSD ? 1 : 2;
    static constexpr unsigned TOKENS = TOKENS_TILE<COLUMNS>, RESULT = SSD ? 0 : TERMS * TOKENS;
    static constexpr unsigned STEP = SSD ? padded<KP> * sizeof(floatX) / sizeof(TokenFactors) : 1; // between factors
    static constexpr size_t BYTES =
        ((PLACES + 1) * KEYS + TOKENS + TERMS * (STATE + TOKENS) + 2 * RESULT) * sizeof(floatX) +
        (SSD ? 0 : PLACES * FACTORS * sizeof(TokenFactors));
    floatX *keys, *queries, *rows, *S, *R, *N, *added;
    TokenFactors *factors;
};
template <int KP, int COLUMNS, bool SSD = false>
__device__ inline WalkTiles<KP, COLUMNS, SSD> walk_tiles(floatX *memory) {
    WalkTiles<KP, COLUMNS, SSD> tiles;
    tiles.keys = memory, tiles.queries = tiles.keys + tiles.PLACES * tiles.KEYS;
    tiles.rows = tiles.queries + tiles.KEYS, tiles.S = tiles.rows + tiles.TOKENS;
    tiles.R = tiles.S + TERMS * tiles.STATE, tiles.N = tiles.R + tiles.RESULT, tiles.added = tiles.N + tiles.RESULT;
    tiles.factors = (TokenFactors *)(SSD ? tiles.queries - padded<KP> + KP : tiles.added + TERMS * tiles.TOKENS);
    return tiles;
}

// ---- a warp's part of a state: tiles of 16 rows, every ROW_WARPS-th, and WARP_COLUMNS columns -----------------------
template <int KP> constexpr unsigned WALK_TILES = (KP / 16 + ROW_WARPS - 1) / ROW_WARPS;
template <int KP> using WalkState = float[WALK_TILES<KP>][WARP_COLUMNS / 8][4];

__device__ inline unsigned warp_row(void) { return threadIdx.x / LANES % ROW_WARPS * 16; }
__device__ inline unsigned warp_column(void) { return threadIdx.x / LANES / ROW_WARPS * WARP_COLUMNS; }

// Calls f(row, column, element, element of the next column) for a warp's part of the state.
template <int KP, typename F> __device__ inline void for_walk_state(WalkState<KP> &S, F f) {
#pragma unroll
    for (unsigned m = 0; m < WALK_TILES<KP>; m++) {
        const unsigned first = warp_row() + m * ROW_WARPS * 16;
        if (first < KP)
            for_pairs<WARP_COLUMNS>(
                S[m], [&](unsigned i, unsigned c, float &a, float &b) { f(first + i, warp_column() + c, a, b); });
    }
}

// Loads a warp's part of a state [K, width]. columns: columns of the matrix from `from` to the end of its row
template <int KP>
__device__ inline void walk_state_read(WalkState<KP> &S, const float *from, size_t K, unsigned columns, size_t width) {
    for_walk_state<KP>(S, [&](unsigned k, unsigned c, float &a, float &b) {
        if (k < K && c < columns) a = from[k * width + c];
        if (k < K && c + 1 < columns) b = from[k * width + c + 1];
    });
}
template <int KP>
__device__ inline void walk_state_write(float *to, WalkState<KP> &S, size_t K, unsigned columns, size_t width) {
    for_walk_state<KP>(S, [&](unsigned k, unsigned c, float a, float b) {
        if (k < K && c < columns) to[k * width + c] = a;
        if (k < K && c + 1 < columns) to[k * width + c + 1] = b;
    });
}

// Stores the state as a split operand.
template <int KP, int COLUMNS> __device__ inline void walk_state_store(WalkState<KP> &S, floatX *tile) {
    for_walk_state<KP>(S, [&](unsigned k, unsigned c, float &a, float &b) {
        split_store_two(tile, KP * padded<COLUMNS>, k * padded<COLUMNS> + c, a, b);
    });
}

// Copies a split tile of `rows` rows to [TERMS, most_rows, width] in memory, where delta_gradient.cuh reads it.
template <int ROWS, int COLUMNS>
__device__ inline void walk_save(floatX *to, const floatX *tile, unsigned rows, unsigned most_rows, unsigned columns,
                                 unsigned width) {
    for (unsigned t = 0; t < TERMS; t++)
        rows_store<ROWS, COLUMNS, WALK_THREADS<COLUMNS>>(to + t * most_rows * width, tile + t * ROWS * padded<COLUMNS>,
                                                         width, rows, columns, width % full_pack<floatX> == 0);
}

// Adds tile[BLOCK, KP]^T added[BLOCK, COLUMNS] to S; `added` is split.
template <int KP, int COLUMNS>
__device__ inline void walk_state_add(WalkState<KP> &S, const floatX *tile, const floatX *added) {
#pragma unroll
    for (unsigned j = 0; j < BLOCK; j += 16) {
        OperandB right[TERMS];
#pragma unroll
        for (unsigned t = 0; t < TERMS; t++)
            right[t] = load_b_rows(added + t * TOKENS_TILE<COLUMNS>, padded<COLUMNS>, j, warp_column());
#pragma unroll
        for (unsigned m = 0; m < WALK_TILES<KP>; m++) {
            const unsigned first = warp_row() + m * ROW_WARPS * 16;
            if (first < KP)
                split_product<WARP_COLUMNS>(S[m], load_a_columns(tile, padded<KP>, j, first),
                                            [&](int, unsigned t) { return right[t]; });
        }
    }
}

// ---- a warp's products over tokens: 16 rows, WARP_COLUMNS columns ---------------------------------------------------
typedef float WalkRows[WARP_COLUMNS / 8][4];

// Adds tile[tokens, KP] S[KP, COLUMNS] to c, and other[tokens, KP] S to d unless it is NULL.
template <int KP, int COLUMNS>
__device__ inline void walk_read(WalkRows &c, const floatX *tile, float (*d)[4], const floatX *other, const floatX *S) {
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        const OperandA a = load_a(tile, padded<KP>, warp_row(), k);
        OperandA b;
        if (d) b = load_a(other, padded<KP>, warp_row(), k);
#pragma unroll
        for (unsigned t = 0; t < TERMS; t++) {
            const OperandB right = load_b_rows(S + t * KP * padded<COLUMNS>, padded<COLUMNS>, k, warp_column());
            mma_columns<WARP_COLUMNS>(c, a, [&](int) { return right; });
            if (d) mma_columns<WARP_COLUMNS>(d, b, [&](int) { return right; });
        }
    }
}

// A row of a triangle's operands: the rows from warp_row() on, of the triangle or its transpose
struct TriangleRow {
    SplitA at[SIDE];
};
// Loads a row of operands. index: index of the block and head
template <bool TRANSPOSED>
__device__ inline void triangle_load(TriangleRow &row, const OperandA *triangles, unsigned index) {
    constexpr int W = full_pack<floatX>;
    const OperandA *const from =
        triangles + (size_t)index * OPERANDS_OF_TRIANGLE + triangle_row<TRANSPOSED>(warp_row() / 16);
#pragma unroll
    for (unsigned j = 0; j < SIDE; j++) {
        if (!triangle_has<TRANSPOSED>(warp_row() / 16, j)) continue;
#pragma unroll
        for (unsigned t = 0; t < TERMS; t++)
#pragma unroll
            for (int e = 0; e < 8; e += W) {
                const auto pack = pack_read<W>(from[triangle_place<TRANSPOSED>(j, t)].x + e);
                memcpy(row.at[j].term[t].x + e, &pack, sizeof(pack));
            }
    }
}
// Adds triangle tile[BLOCK, COLUMNS] to c. EXACT: the tile has one term
template <bool TRANSPOSED, int COLUMNS, bool EXACT>
__device__ inline void triangle_product(WalkRows &c, const TriangleRow &row, const floatX *tile) {
#pragma unroll
    for (unsigned j = 0; j < SIDE; j++) {
        if (!triangle_has<TRANSPOSED>(warp_row() / 16, j)) continue;
        const auto right = [&](int, unsigned t) {
            return load_b_rows(tile + t * TOKENS_TILE<COLUMNS>, padded<COLUMNS>, j * 16, warp_column());
        };
        if constexpr (EXACT)
            split_by_exact<WARP_COLUMNS>(c, row.at[j], [&](int n) { return right(n, 0); });
        else
            split_product<WARP_COLUMNS>(c, row.at[j], right);
    }
}

// Calls f(token, place in a tile of tokens, factors, a, b) for a warp's pairs of neighbours.
template <int COLUMNS, typename F>
__device__ inline void for_tokens(WalkRows &c, const TokenFactors (&factors)[2], F f) {
    for_pairs<WARP_COLUMNS>(c, [&](unsigned i, unsigned column, float &a, float &b) {
        const unsigned token = warp_row() + i;
        f(token, token * padded<COLUMNS> + warp_column() + column, factors[i / 8], a, b);
    });
}
// factors_fetch fetches the factors of a block's tokens; the next function reads the factors of a lane's two tokens.
template <unsigned STEP = 1> __device__ inline void factors_fetch(TokenFactors *to, const BlockFactors *from) {
    if (threadIdx.x < FACTORS) fetch<16>(to + threadIdx.x * STEP, from->token + threadIdx.x, true);
}
template <unsigned STEP = 1> __device__ inline void factors_read(TokenFactors (&factors)[2], const TokenFactors *from) {
    for (unsigned i = 0; i < 2; i++) {
        const auto pack = pack_read<4>(&from[(warp_row() + threadIdx.x % LANES / 4 + 8 * i) * STEP].beta);
        memcpy(&factors[i], &pack, sizeof(pack));
    }
}

// Stores two neighbours, or only the first if `columns` is 1.
__device__ inline void two_store(floatX *to, Two two, unsigned columns, bool packed) {
    if (packed) {
        *(Two *)to = two;
    } else {
        to[0] = two.x[0];
        if (columns > 1) to[1] = two.x[1];
    }
}
// Saves a warp's rows like walk_save, from registers.
__device__ inline void walk_save_rows(floatX *to, WalkRows &rows, unsigned count, unsigned columns, unsigned width) {
    for_pairs<WARP_COLUMNS>(rows, [&](unsigned i, unsigned c, float a, float b) {
        const unsigned token = warp_row() + i, column = warp_column() + c;
        Two term[TERMS];
        split_two(term, a, b);
        if (token < count && column < columns)
            for (unsigned t = 0; t < TERMS; t++)
                two_store(to + (t * BLOCK + token) * width + column, term[t], columns - column, width % 2 == 0);
    });
}
// Stores a warp's rows in `out`, whose rows are `stride` elements apart.
__device__ inline void walk_out(floatX *out, WalkRows &rows, unsigned count, unsigned columns, unsigned stride,
                                bool packed) {
    for_pairs<WARP_COLUMNS>(rows, [&](unsigned i, unsigned c, float a, float b) {
        const unsigned token = warp_row() + i, column = warp_column() + c;
        if (token < count && column < columns)
            two_store(out + token * stride + column, two_of(a, b), columns - column, packed);
    });
}

// ---- the walks ------------------------------------------------------------------------------------------------------
// A thread block's place in a launch: a head of a span, and its columns from `first` on
struct WalkPlace {
    Span span;
    unsigned number, count, index; // number of the span; number of its blocks; index in [blocks, HV] where the walk
                                   // begins
    unsigned head, first;
    unsigned key, query, value; // first columns of q, k and v in x
};
template <bool SSD = false>
__device__ inline WalkPlace walk_place(const DeltaCall &d, const SpanBlocks &blocks, unsigned columns, bool back) {
    const unsigned number = blockIdx.z, begin = blocks.first[number], count = blocks.first[number + 1] - begin;
    const unsigned HK = (unsigned)d.HK, HV = (unsigned)d.HV, K = (unsigned)d.K, V = (unsigned)d.V;
    const unsigned head = blockIdx.y, first = blockIdx.x * columns, query = head / (HV / HK) * K;
    const unsigned index = (begin + (back ? count - 1 : 0)) * HV + head;
    if (SSD) {
        const unsigned key = HV * V + query;
        return WalkPlace{blocks.span[number], number, count, index, head, first, key, key + HK * K, head * V + first};
    }
    return WalkPlace{blocks.span[number],          number, count, index, head, first, query + HK * K, query,
                     2 * HK * K + head * V + first};
}

template <int KP, int COLUMNS, bool OUT>
__global__ void __launch_bounds__(WALK_THREADS<COLUMNS>, WALK_BLOCKS<COLUMNS>)
    delta_walk_kernel(DeltaWalk w, DeltaPairs p, DeltaCall d, SpanBlocks blocks) {
    constexpr unsigned THREADS = WALK_THREADS<COLUMNS>, TOKENS = TOKENS_TILE<COLUMNS>;
    DYNAMIC_SHARED(floatX, memory);
    const WalkTiles<KP, COLUMNS> tiles = walk_tiles<KP, COLUMNS>(memory);
    const WalkPlace at = walk_place(d, blocks, COLUMNS, false);
    const size_t place = state_place(d, w, at.span, at.head) + at.first;
    const unsigned columns = w.width - at.first;
    WalkState<KP> S = {};
    if (state_is_there(w, at.span, at.number)) walk_state_read<KP>(S, w.state_in + place, d.K, columns, w.width);
    walk_state_store<KP, COLUMNS>(S, tiles.S);
    const auto rows_of = [&](unsigned b) { return (unsigned)(at.span.end - at.span.begin) - b * BLOCK; };
    const auto x_of = [&](unsigned b) { return d.x + (at.span.row + (size_t)b * BLOCK) * d.channels; };
    const auto index_of = [&](unsigned b) { return at.index + b * (unsigned)d.HV; };
    const auto fetch_keys = [&](unsigned b) {
        rows_fetch<KP, THREADS>(tiles.keys + b % 2 * tiles.KEYS, x_of(b) + at.key, d.channels, rows_of(b), d.K,
                                d.packed);
        factors_fetch(tiles.factors + b % 2 * FACTORS, p.factors + index_of(b));
        fetch_commit();
    };
    const auto fetch_rows = [&](unsigned b) {
        if (OUT) rows_fetch<KP, THREADS>(tiles.queries, x_of(b) + at.query, d.channels, rows_of(b), d.K, d.packed);
        rows_fetch<COLUMNS, THREADS>(tiles.rows, x_of(b) + at.value, d.channels, w.values ? rows_of(b) : 0, columns,
                                     p.packed_rows);
        fetch_commit();
    };
    fetch_keys(0), fetch_rows(0);
    for (unsigned b = 0; b < at.count; b++) {
        const floatX *const keys = tiles.keys + b % 2 * tiles.KEYS;
        const TokenFactors *const factors_at = tiles.factors + b % 2 * FACTORS;
        TriangleRow inverse, scores;
        TokenFactors factors[2];
        triangle_load<false>(inverse, p.inverse, index_of(b));
        fetch_wait<0>();
        __syncthreads(); // tiles have arrived, S is stored
        if (b + 1 < at.count) fetch_keys(b + 1);
        if (!OUT && w.states)
            walk_save<KP, COLUMNS>(w.states + index_of(b) * TERMS * d.K * w.width + at.first, tiles.S, (unsigned)d.K,
                                   (unsigned)d.K, columns, w.width);
        WalkRows of_k = {}, of_q = {}, N = {};
        walk_read<KP, COLUMNS>(of_k, keys, OUT ? of_q : NULL, tiles.queries, tiles.S);
        factors_read(factors, factors_at);
        for_tokens<COLUMNS>(of_k, factors, [&](unsigned, unsigned to, const TokenFactors &f, float a, float b) {
            const Two v = *(const Two *)(tiles.rows + to);
            split_store_two(tiles.R, TOKENS, to, f.beta * (load(v.x[0]) - f.read_k * a),
                            f.beta * (load(v.x[1]) - f.read_k * b));
        });
        __syncthreads(); // R is stored, queries and values are free
        if (b + 1 < at.count) fetch_rows(b + 1);
        triangle_product<false, COLUMNS, false>(N, inverse, tiles.R);
        for_tokens<COLUMNS>(N, factors, [&](unsigned, unsigned to, const TokenFactors &f, float a, float b) {
            if (OUT || w.added) split_store_two(tiles.N, TOKENS, to, a, b);
            split_store_two(tiles.added, TOKENS, to, f.add * a, f.add * b);
        });
        if (OUT) triangle_load<false>(scores, p.scores, index_of(b));
        __syncthreads(); // N is stored
        if (!OUT && w.added)
            walk_save<BLOCK, COLUMNS>(w.added + index_of(b) * TERMS * BLOCK * d.V + at.first, tiles.N, rows_of(b),
                                      BLOCK, columns, (unsigned)d.V);
        const float keep = factors_at[BLOCK].beta; // BlockFactors.keep
        for_walk_state<KP>(S, [&](unsigned, unsigned, float &a, float &b) { a *= keep, b *= keep; });
        walk_state_add<KP, COLUMNS>(S, keys, tiles.added);
        walk_state_store<KP, COLUMNS>(S, tiles.S);
        if (!OUT) continue;
        for_tokens<COLUMNS>(of_q, factors, [](unsigned, unsigned, const TokenFactors &f, float &a, float &b) {
            a *= f.read_q, b *= f.read_q;
        });
        triangle_product<false, COLUMNS, false>(of_q, scores, tiles.N);
        const size_t first = at.span.row + (size_t)b * BLOCK;
        walk_out(w.out + (first * d.HV + at.head) * d.V + at.first, of_q, rows_of(b), columns, (unsigned)(d.HV * d.V),
                 p.packed_rows);
    }
    if (w.state_out && at.number >= w.first_out) walk_state_write<KP>(w.state_out + place, S, d.K, columns, w.width);
}

template <int KP, int COLUMNS>
__global__ void __launch_bounds__(WALK_THREADS<COLUMNS>, WALK_BLOCKS<COLUMNS>)
    delta_walk_back_kernel(DeltaWalk w, DeltaPairs p, DeltaCall d, SpanBlocks blocks) {
    constexpr unsigned THREADS = WALK_THREADS<COLUMNS>, TOKENS = TOKENS_TILE<COLUMNS>;
    DYNAMIC_SHARED(floatX, memory);
    const WalkTiles<KP, COLUMNS> tiles = walk_tiles<KP, COLUMNS>(memory);
    const WalkPlace at = walk_place(d, blocks, COLUMNS, true);
    const size_t place = at.head * d.K * w.width + at.first;
    const unsigned columns = w.width - at.first;
    WalkState<KP> dS = {};
    if (at.number >= w.first_in && at.number < w.last_in)
        walk_state_read<KP>(dS, w.state_in + place, d.K, columns, w.width);
    walk_state_store<KP, COLUMNS>(dS, tiles.S);
    unsigned index = at.index;
    size_t row = at.span.row + (size_t)(at.count - 1) * BLOCK; // the last block's first row
    unsigned rows = (unsigned)(at.span.row + at.span.end - at.span.begin - row);
    const auto fetch_keys = [&](unsigned b, unsigned rows) { // fetches the keys of block b, counted from the end, which
                                                             // begins at `row`
        rows_fetch<KP, THREADS>(tiles.keys + b % 2 * tiles.KEYS, d.x + row * d.channels + at.key, d.channels, rows, d.K,
                                d.packed);
        factors_fetch(tiles.factors + b % 2 * FACTORS, p.factors + index);
        fetch_commit();
    };
    const auto fetch_rows = [&](unsigned rows) {
        rows_fetch<COLUMNS, THREADS>(tiles.rows, p.dout + (row * d.HV + at.head) * d.V + at.first, d.HV * d.V, rows,
                                     columns, p.packed_rows);
        fetch_commit();
    };
    fetch_keys(0, rows), fetch_rows(rows);
    for (unsigned b = 0; b < at.count; b++, rows = BLOCK) {
        const unsigned now = index;
        const bool more = b + 1 < at.count;
        const floatX *const keys = tiles.keys + b % 2 * tiles.KEYS;
        const TokenFactors *const factors_at = tiles.factors + b % 2 * FACTORS;
        TriangleRow inverse, scores;
        TokenFactors factors[2];
        triangle_load<true>(scores, p.scores, now);
        fetch_wait<0>();
        __syncthreads(); // tiles have arrived, dS is stored
        rows_fetch<KP, THREADS>(tiles.queries, d.x + row * d.channels + at.query, d.channels, rows, d.K, d.packed);
        fetch_commit();
        if (more) row -= BLOCK, index -= (unsigned)d.HV, fetch_keys(b + 1, BLOCK);
        if (w.states)
            walk_save<KP, COLUMNS>(w.states + now * TERMS * d.K * w.width + at.first, tiles.S, (unsigned)d.K,
                                   (unsigned)d.K, columns, w.width);
        WalkRows dN = {}, dR = {};
        walk_read<KP, COLUMNS>(dN, keys, NULL, NULL, tiles.S);
        factors_read(factors, factors_at);
        for_tokens<COLUMNS>(dN, factors, [&](unsigned, unsigned to, const TokenFactors &f, float &a, float &b) {
            const Two dout = *(const Two *)(tiles.rows + to);
            a *= f.add, b *= f.add;
            split_store_two(tiles.added, TOKENS, to, f.read_q * load(dout.x[0]), f.read_q * load(dout.x[1]));
        });
        triangle_product<true, COLUMNS, true>(dN, scores, tiles.rows);
        for_tokens<COLUMNS>(dN, factors, [&](unsigned, unsigned to, const TokenFactors &, float a, float b) {
            split_store_two(tiles.N, TOKENS, to, a, b);
        });
        triangle_load<true>(inverse, p.inverse, now);
        __syncthreads(); // dN is stored, dout is free
        if (more) fetch_rows(BLOCK);
        triangle_product<true, COLUMNS, false>(dR, inverse, tiles.N);
        for_tokens<COLUMNS>(dR, factors, [&](unsigned, unsigned to, const TokenFactors &f, float a, float b) {
            const float scale = -f.beta * f.read_k;
            split_store_two(tiles.R, TOKENS, to, scale * a, scale * b);
        });
        if (w.added) walk_save_rows(w.added + now * TERMS * BLOCK * d.V + at.first, dR, rows, columns, (unsigned)d.V);
        if (more) // leaves the fetch of the next block's queries in flight
            fetch_wait<2>();
        else
            fetch_wait<0>();
        __syncthreads();                           // R is stored
        const float keep = factors_at[BLOCK].beta; // BlockFactors.keep
        for_walk_state<KP>(dS, [&](unsigned, unsigned, float &a, float &b) { a *= keep, b *= keep; });
        walk_state_add<KP, COLUMNS>(dS, tiles.queries, tiles.added);
        walk_state_add<KP, COLUMNS>(dS, keys, tiles.R);
        walk_state_store<KP, COLUMNS>(dS, tiles.S);
    }
    if (!w.state_out || at.number) return;
    if (at.span.begin == at.span.document) // a document's first state is zero, so its gradient is not needed
        for_walk_state<KP>(dS, [](unsigned, unsigned, float &a, float &b) { a = b = 0.0f; });
    walk_state_write<KP>(w.state_out + place, dS, d.K, columns, w.width);
}

#ifdef CUDA_ON_CPU
static size_t walk_limit(void) { return SIZE_MAX; }
#else
static size_t walk_limit(void) { return shared_memory_limit(); }
#endif

// Calls launch(KP) with the tiles' columns of q and k as a constant: the fewest columns that hold K.
template <typename F> static void with_walk_size(size_t K, F launch) {
    if (K <= 64)
        launch(Width<64>());
    else
        launch(Width<WALK_MOST_K>());
}

// Returns whether the tiled kernels take heads with K columns of q and k on this device. With few columns a state is
// almost forgotten within a block, and a difference of products would lose it.
static bool walk_takes(size_t K) {
    bool fits = false;
    if (K >= WALK_LEAST_K && K <= WALK_MOST_K)
        with_walk_size(K, [&](auto KP) { fits = WalkTiles<KP, WARP_COLUMNS>::BYTES <= walk_limit(); });
    return fits;
}

// Calls launch(KP, COLUMNS, grid) for a walk. Halves a thread block's columns if that fills more multiprocessors, or if
// shared memory is small.
template <bool SSD, typename F>
static void with_walk(const DeltaWalk &w, const DeltaCall &d, const SpanBlocks &blocks, F launch) {
    const auto run = [&](auto KP, auto COLUMNS) {
        launch(KP, COLUMNS, dim3((unsigned)blocks_for(w.width, COLUMNS), (unsigned)d.HV, blocks.count));
    };
    const size_t wide = blocks_for(w.width, WALK_MOST_COLUMNS) * d.HV * blocks.count;
    if constexpr (SSD)
        if (d.K > WALK_MOST_K) return run(Width<GPU_MOST_SSD_STATE>(), Width<WARP_COLUMNS>());
    with_walk_size(d.K, [&](auto KP) {
        if (2 * wide <= multiprocessors() || WalkTiles<KP, WALK_MOST_COLUMNS, SSD>::BYTES > walk_limit())
            run(KP, Width<WARP_COLUMNS>());
        else
            run(KP, Width<WALK_MOST_COLUMNS>());
    });
}

static void delta_tiled_walk(const DeltaWalk &w, const DeltaPairs &p, const DeltaCall &d, const SpanBlocks &blocks,
                             bool back) {
    with_walk<false>(w, d, blocks, [&](auto KP, auto COLUMNS, dim3 grid) {
        constexpr size_t BYTES = WalkTiles<KP, COLUMNS>::BYTES;
        if (back)
            LAUNCH((delta_walk_back_kernel<KP, COLUMNS>), grid, WALK_THREADS<COLUMNS>, BYTES)(w, p, d, blocks);
        else if (w.out)
            LAUNCH((delta_walk_kernel<KP, COLUMNS, true>), grid, WALK_THREADS<COLUMNS>, BYTES)(w, p, d, blocks);
        else
            LAUNCH((delta_walk_kernel<KP, COLUMNS, false>), grid, WALK_THREADS<COLUMNS>, BYTES)(w, p, d, blocks);
    });
}

#endif
