/*
The gradient's products that sum over V (delta_gradient.cuh), in one loop over strips of V:

    pairs dout N^T, dR N^T        states S dout, S dR, dS N        and <S, dS>

A thread block has BLOCK tokens of a key head and walks its value heads' strips. The next strip arrives in shared memory
during the current strip's products. The next head's first strip arrives during the end of the current head. A warp has
16 tokens, with a quarter of the key columns and 16 columns of the pairs.
*/
#ifndef LLMC_CUDA_DELTA_STRIPS_CUH
#define LLMC_CUDA_DELTA_STRIPS_CUH
#include "delta_walk.cuh"

constexpr unsigned GRADIENT_THREADS = 512, GRADIENT_WARPS = GRADIENT_THREADS / LANES, ROW_GROUPS = BLOCK / 16;
constexpr unsigned COLUMN_GROUPS = GRADIENT_WARPS / ROW_GROUPS, PAIR_COLUMNS = BLOCK / COLUMN_GROUPS;
constexpr unsigned TRIANGLE_WARPS = ROW_GROUPS * (ROW_GROUPS + 1) / 2; // warps with pairs on or below the diagonal
static_assert(PAIR_COLUMNS == 16);

// ---- shared memory --------------------------------------------------------------------------------------------------
// Key columns of a warp; columns of V in a strip
template <int KP> constexpr unsigned KEY_COLUMNS = KP < 64 ? 16 : KP / 4;
template <int KP> constexpr unsigned STRIP = KP * sizeof(floatX) > 256 ? 16 : 32;
// 1: pairs and states are computed one after the other, because registers do not suffice for both
template <int KP> constexpr bool APART = KP > 128;

// Elements of a strip: dout, the terms of N and dR, the terms of S and dS
template <int KP> constexpr unsigned TOKEN_STRIP = STRIP<KP> *BLOCK;
template <int KP> constexpr unsigned STATE_STRIP = STRIP<KP> *KP;
template <int KP> constexpr unsigned STRIP_TILES = TOKEN_STRIP<KP> *(1 + 2 * TERMS) + STATE_STRIP<KP> * 2 * TERMS;

struct DeltaGradient {
    floatX *dx, *db, *da;
    float *lines;                // [blocks, 2, HV]: parts of dA_log, ddt_bias
    float *dq, *dk;              // [blocks, HK, BLOCK, K rounded up to 8]: sums over the value heads of a group so far
    const floatX *states, *back; // [blocks, HV, TERMS, K, V]: S, dS
    const floatX *N, *dR;        // [blocks, HV, TERMS, BLOCK, V]
    const BlockGates *gates;
    const BlockLengths *lengths;
    const floatX *dout;
    bool packed;     // 1: rows of dout are whole packs
    unsigned stages; // strips in shared memory: 1, or 2 with one in flight
    template <int KP> static constexpr unsigned TILES = STRIP_TILES<KP>; // elements of a strip
};

// Hides a value's origin from the compiler, so that addresses made from it are not kept in registers over a loop.
__device__ inline unsigned computed_here(unsigned x) {
#ifndef CUDA_ON_CPU
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// Returns the place in a strip's tile. Groups of eight columns are exchanged, so that eight rows of a group use all
// banks.
template <unsigned COLUMNS> __device__ inline unsigned strip_place(unsigned row, unsigned column) {
    constexpr unsigned GROUPS = COLUMNS / 8, ROWS = 8 / GROUPS;
    return row * COLUMNS + (column / 8 ^ row / ROWS % GROUPS) * 8 + column % 8;
}
// Load operands like load_a and load_b. row: a multiple of 16
template <unsigned COLUMNS> __device__ inline OperandA strip_a(const floatX *tile, unsigned row, unsigned column) {
    const unsigned lane = threadIdx.x % LANES;
    OperandA a;
#ifdef LOAD_MATRIX
    LOAD_MATRIX(a, "", tile + row * COLUMNS + strip_place<COLUMNS>(lane % 16, column + lane / 16 * 8));
#else
    for (unsigned i = 0; i < 8; i++)
        a.x[i] = tile[strip_place<COLUMNS>(row + lane / 4 + i / 2 % 2 * 8, column + lane % 4 * 2 + i % 2 + i / 4 * 8)];
#endif
    return a;
}
template <unsigned COLUMNS> __device__ inline OperandB strip_b(const floatX *tile, unsigned row, unsigned column) {
    const unsigned lane = threadIdx.x % LANES;
    OperandB b;
#ifdef LOAD_MATRIX
    LOAD_MATRIX(b, "",
                tile + row * COLUMNS + strip_place<COLUMNS>(lane / 16 * 8 + lane % 8, column + lane / 8 % 2 * 8));
#else
    for (unsigned i = 0; i < 8; i++)
        b.x[i] = tile[strip_place<COLUMNS>(row + lane / 4 + i / 4 * 8, column + lane % 4 * 2 + i % 2 + i / 2 % 2 * 8)];
#endif
    return b;
}

// Fetches tile[ROWS][COLUMNS] from rows of whole packs; zeros after `rows` and `columns`. place(row, column): place in
// the tile
template <unsigned ROWS, unsigned COLUMNS, typename Place>
__device__ inline void tile_fetch(floatX *tile, Place place, const floatX *from, unsigned stride, unsigned rows,
                                  unsigned columns, unsigned thread) {
    constexpr unsigned W = full_pack<floatX>, PACKS = COLUMNS / W,
                       STEP = GRADIENT_THREADS / PACKS; // STEP: rows of one fetch
    const unsigned first = thread / PACKS, c = thread % PACKS * W;
    from += first * stride + c;
#pragma unroll
    for (unsigned row = 0; row < ROWS; row += STEP)
        if (ROWS % STEP == 0 || first + row < ROWS)
            fetch<16>(tile + place(first + row, c), from + row * stride, first + row < rows && c < columns);
}
// Copies a tile like tile_fetch, from rows of any alignment.
template <unsigned COLUMNS, typename Place>
__device__ inline void tile_copy(floatX *tile, unsigned tile_rows, Place place, const floatX *from, unsigned stride,
                                 unsigned rows, unsigned columns) {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < tile_rows * COLUMNS; i += GRADIENT_THREADS) {
        const unsigned row = i / COLUMNS, c = i % COLUMNS;
        tile[place(row, c)] = row < rows && c < columns ? from[row * stride + c] : store(0.0f);
    }
}

template <typename T> __device__ inline void floats_fetch(T *to, const T *from) {
    static_assert(sizeof(T) / sizeof(float) <= GRADIENT_THREADS);
    const unsigned i = threadIdx.x;
    if (i < sizeof(T) / sizeof(float)) fetch<4>((float *)to + i, (const float *)from + i, true);
}

// ---- a thread's part ------------------------------------------------------------------------------------------------
template <bool PACKED> struct GradientPart {
    DeltaBlock block;
    unsigned HV, K, V, channels, key_head, group_heads;
    unsigned lane, row, group, pair_column; // row: the first of a warp's tokens; group: its quarter of the columns
    bool pairs, states; // pairs: this warp has pairs on or below the diagonal; states: it has columns of keys
    static constexpr bool packed = PACKED; // 1: all rows are whole packs
};

// A lane's elements of 16 rows of q or k, two neighbours at a time, in the places of a result
using KeyTwo = std::conditional_t<sizeof(Two) == 4, unsigned, uint2>;
template <int KP> using KeyTwos = KeyTwo[KEY_COLUMNS<KP> / 8][2];

__device__ inline float key_of(const KeyTwo &two, unsigned i) {
    Two elements;
    memcpy(&elements, &two, sizeof(two));
    return load(elements.x[i]);
}

template <int KP, typename Part> __device__ inline void keys_load(KeyTwos<KP> &two, const floatX *x, const Part &p) {
    const unsigned row = p.row + p.lane / 4, column = p.group * KEY_COLUMNS<KP> + p.lane % 4 * 2;
    x += row * p.channels + column;
#pragma unroll
    for (unsigned n = 0; n < KEY_COLUMNS<KP> / 8; n++)
#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
            const floatX *const from = x + i * 8 * p.channels + n * 8;
            two[n][i] = KeyTwo{};
            if (row + 8 * i >= p.block.rows || column + n * 8 >= p.K) continue;
            if (p.packed) {
                two[n][i] = *(const KeyTwo *)ALIGNED(from, sizeof(KeyTwo));
            } else {
                Two elements = {{from[0], column + n * 8 + 1 < p.K ? from[1] : store(0.0f)}};
                memcpy(&two[n][i], &elements, sizeof(elements));
            }
        }
}

// Computes dots[row] = x . keys over a warp's key columns.
template <int KP, typename Part>
__device__ inline void row_dots(float *dots, float (*x)[4], const KeyTwos<KP> &keys, const Part &p) {
    float sum[2] = {};
#pragma unroll
    for (unsigned n = 0; n < KEY_COLUMNS<KP> / 8; n++)
#pragma unroll
        for (unsigned e = 0; e < 4; e++) sum[e / 2] += x[n][e] * key_of(keys[n][e / 2], e % 2);
#pragma unroll
    for (unsigned i = 0; i < 2; i++) {
        sum[i] = quad_sum(sum[i]);
        if (p.lane % 4 == 0) dots[p.row + p.lane / 4 + 8 * i] = sum[i];
    }
}

// Multiplies each row of c by the row's factor.
template <int N> __device__ inline void rows_scale(float (*c)[4], const float (&factor)[2]) {
#pragma unroll
    for (unsigned n = 0; n < N / 8; n++)
#pragma unroll
        for (unsigned e = 0; e < 4; e++) c[n][e] *= factor[e / 2];
}

// ---- products with V in common --------------------------------------------------------------------------------------
// A warp's results: pairs dout N^T and dR N^T; products S dout, S dR, dS N
template <int KP> struct GradientResults {
    float dP[PAIR_COLUMNS / 8][4], dA[PAIR_COLUMNS / 8][4];
    float dq[KEY_COLUMNS<KP> / 8][4], read[KEY_COLUMNS<KP> / 8][4], added[KEY_COLUMNS<KP> / 8][4];
    float overlap;
};

// Tiles of a strip
template <int KP> struct StripTiles { floatX *dout, *N, *dR, *S, *dS; };
template <int KP> __device__ inline StripTiles<KP> strip_tiles(floatX *strip) {
    constexpr unsigned TOKENS = TERMS * TOKEN_STRIP<KP>, FIRST = TOKEN_STRIP<KP>;
    return StripTiles<KP>{strip, strip + FIRST, strip + FIRST + TOKENS, strip + FIRST + 2 * TOKENS,
                          strip + FIRST + 2 * TOKENS + TERMS * STATE_STRIP<KP>};
}

// Fetches a head's strip from column v on; with_gates: also its gates
template <int KP, typename Part>
__device__ inline void strip_bring(floatX *strip, BlockGates *gates, bool with_gates, const DeltaGradient &G,
                                   const Part &p, unsigned head, unsigned v) {
    constexpr unsigned C = STRIP<KP>;
    const StripTiles<KP> to = strip_tiles<KP>(strip);
    const size_t place = (size_t)blockIdx.x * p.HV + head, tokens = place * TERMS * BLOCK * p.V + v,
                 states = place * TERMS * p.K * p.V + v;
    const floatX *const dout = G.dout + (p.block.row * p.HV + head) * p.V + v;
    const unsigned left = p.V - v, rows = p.block.rows;
    const auto at = [](unsigned row, unsigned column) { return strip_place<C>(row, column); };
    if (p.packed) {
        const unsigned thread = computed_here(threadIdx.x);
        tile_fetch<BLOCK, C>(to.dout, at, dout, p.HV * p.V, rows, left, thread);
#pragma unroll
        for (unsigned t = 0; t < TERMS; t++) {
            tile_fetch<BLOCK, C>(to.N + t * TOKEN_STRIP<KP>, at, G.N + tokens + t * BLOCK * p.V, p.V, rows, left,
                                 thread);
            tile_fetch<BLOCK, C>(to.dR + t * TOKEN_STRIP<KP>, at, G.dR + tokens + t * BLOCK * p.V, p.V, rows, left,
                                 thread);
            tile_fetch<KP, C>(to.S + t * STATE_STRIP<KP>, at, G.states + states + t * p.K * p.V, p.V, p.K, left,
                              thread);
            tile_fetch<KP, C>(to.dS + t * STATE_STRIP<KP>, at, G.back + states + t * p.K * p.V, p.V, p.K, left, thread);
        }
    } else {
        tile_copy<C>(to.dout, BLOCK, at, dout, p.HV * p.V, rows, left);
#pragma unroll 1
        for (unsigned i = 0; i < 2 * TERMS; i++) { // terms of both tensors
            const unsigned t = i % TERMS;
            tile_copy<C>(to.N + i * TOKEN_STRIP<KP>, BLOCK, at, (i < TERMS ? G.N : G.dR) + tokens + t * BLOCK * p.V,
                         p.V, rows, left);
            tile_copy<C>(to.S + i * STATE_STRIP<KP>, KP, at, (i < TERMS ? G.states : G.back) + states + t * p.K * p.V,
                         p.V, p.K, left);
        }
    }
    if (with_gates) floats_fetch(gates, G.gates + place);
}

// Calls f(i, j) for the terms of a product of two split numbers. Leaves out the product of the two low terms.
template <typename F> __device__ inline void for_terms(F f) {
#pragma unroll
    for (unsigned i = 0; i < TERMS; i++)
#pragma unroll
        for (unsigned j = 0; i + j < TERMS; j++) f(i, j);
}

// Loads the terms of an operand of a strip's tiles.
template <unsigned C>
__device__ inline void strip_terms(OperandA (&a)[TERMS], const floatX *tile, unsigned row, unsigned v) {
#pragma unroll
    for (unsigned t = 0; t < TERMS; t++) a[t] = strip_a<C>(tile + t * C * BLOCK, row, v);
}
template <unsigned C>
__device__ inline void strip_terms(OperandB (&b)[TERMS], const floatX *tile, unsigned rows, unsigned row, unsigned v) {
#pragma unroll
    for (unsigned t = 0; t < TERMS; t++) b[t] = strip_b<C>(tile + t * C * rows, row, v);
}

// Adds the products of the states with columns v on of a strip. dout, dR: their operands
template <int KP, typename Part>
__device__ inline void state_products(GradientResults<KP> &r, const StripTiles<KP> &from, unsigned v,
                                      const OperandA &dout, const OperandA (&dR)[TERMS], const Part &p) {
    constexpr unsigned C = STRIP<KP>, N = KEY_COLUMNS<KP>;
    OperandA a[TERMS];
    OperandB b[TERMS];
#pragma unroll
    for (unsigned n = 0; n < N; n += 16) {
        strip_terms<C>(b, from.S, KP, p.group * N + n, v);
        for_terms([&](unsigned i, unsigned j) {
            if (i == 0) mma_columns<16>(r.dq + n / 8, dout, [&](int) { return b[j]; });
            mma_columns<16>(r.read + n / 8, dR[i], [&](int) { return b[j]; });
        });
    }
    strip_terms<C>(a, from.N, p.row, v);
#pragma unroll
    for (unsigned n = 0; n < N; n += 16) {
        strip_terms<C>(b, from.dS, KP, p.group * N + n, v);
        for_terms([&](unsigned i, unsigned j) { mma_columns<16>(r.added + n / 8, a[i], [&](int) { return b[j]; }); });
    }
}

// Adds a strip's part of <S, dS>. Each of the four warps of a quarter of the columns has one tile.
template <int KP, typename Part>
__device__ inline void strip_overlap(float &overlap, const floatX *tile_S, const floatX *tile_dS, const Part &p) {
    constexpr unsigned C = STRIP<KP>, TILES = KEY_COLUMNS<KP> / 16;
    static_assert(C / 16 * TILES <= ROW_GROUPS);
    const unsigned tile = p.row / 16, row = p.group * KEY_COLUMNS<KP> + tile % TILES * 16, v = tile / TILES * 16;
    if (!p.states || v >= C) return;
    OperandB S[TERMS], dS[TERMS];
    strip_terms<C>(S, tile_S, KP, row, v), strip_terms<C>(dS, tile_dS, KP, row, v);
#pragma unroll
    for (unsigned i = 0; i < 8; i++) {
        float left = load(S[0].x[i]), right = load(dS[0].x[i]);
        if constexpr (TERMS == 2) left += load(S[1].x[i]), right += load(dS[1].x[i]);
        overlap += left * right;
    }
}

// Adds a strip's products.
template <int KP, bool PAIRS, bool STATES, typename Part>
__device__ inline void strip_products(GradientResults<KP> &r, floatX *strip, const Part &p) {
    constexpr unsigned C = STRIP<KP>;
    const StripTiles<KP> from = strip_tiles<KP>(strip);
    if (STATES) strip_overlap<KP>(r.overlap, from.S, from.dS, p);
#pragma unroll
    for (unsigned v = 0; v < C; v += 16) {
        const OperandA dout = strip_a<C>(from.dout, p.row, v);
        OperandA dR[TERMS];
        strip_terms<C>(dR, from.dR, p.row, v);
        if (PAIRS && p.pairs) {
            OperandB N[TERMS];
            strip_terms<C>(N, from.N, BLOCK, p.pair_column, v);
            for_terms([&](unsigned i, unsigned j) {
                if (i == 0) mma_columns<16>(r.dP, dout, [&](int) { return N[j]; });
                mma_columns<16>(r.dA, dR[i], [&](int) { return N[j]; });
            });
        }
        if constexpr (STATES)
            if (p.states) state_products<KP>(r, from, v, dout, dR, p);
    }
}

// Stores dv[BLOCK, columns] = beta dR of a strip.
template <int KP, typename Part>
__device__ inline void strip_values(floatX *dv, const floatX *strip, const float *beta, unsigned columns,
                                    const Part &p) {
    constexpr unsigned W = 4, PACKS = STRIP<KP> / W;
    const floatX *const dR = strip + (1 + TERMS) * TOKEN_STRIP<KP>;
    for (unsigned i = threadIdx.x; i < BLOCK * PACKS; i += GRADIENT_THREADS) {
        const unsigned row = i / PACKS, c = i % PACKS * W, place = strip_place<STRIP<KP>>(row, c);
        floatX *const to = dv + row * p.channels + c;
        Pack<floatX, W> pack;
        float value[W] = {};
#pragma unroll
        for (unsigned t = 0; t < TERMS; t++) {
            const Pack<floatX, W> term = pack_read<W>(dR + t * TOKEN_STRIP<KP> + place);
            for (unsigned j = 0; j < W; j++) value[j] += load(term.x[j]);
        }
        for (unsigned j = 0; j < W; j++) pack.x[j] = store(beta[row] * value[j]);
        if (row >= p.block.rows || c >= columns) continue;
        if (p.packed)
            pack_write(to, pack);
        else
            for (unsigned j = 0; j < W && c + j < columns; j++) to[j] = pack.x[j];
    }
}

#endif
