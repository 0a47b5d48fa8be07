/*
The gated delta rule in blocks of DELTA_BLOCK tokens, in the notation of arXiv 2412.06464, section 3.2. Holds code
shared by the kernels of op set "cuda", and the first kernel. This kernel computes, for a block and value head,
everything that needs no state.

With q and k divided by their lengths, c the sum of the log decays from the block's first token on, decay(i, j) =
exp(c_i - c_j) for j <= i, S the state before the block and L its last token:

    A_ij = beta_i (k_i . k_j) decay(i, j) for j < i        inverse = (I + A)^-1
    P_ij = (q_i . k_j) decay(i, j) for j <= i               scores
    R_i = beta_i (v_i - exp(c_i) S^T k_i),  N = inverse R   what each token adds to the state
    out_i = exp(c_i) S^T q_i + sum_j P_ij N_j
    S <- exp(c_L) S + sum_j decay(L, j) k_j N_j^T

No exponent is positive, and nothing is divided by a decay. A short block is padded with zeros (beta 0, decay 1).

Matrix instructions take bf16 in the bf16 build. q, k, v and dout are bf16 already; their lengths and all other factors
are applied to the other operand or to the result. A computed operand is split into a bf16 number and its rounding
error, again in bf16 (TERMS). A product with a split operand is two products, with a relative error of about 2^-17.
*/
#ifndef LLMC_CUDA_DELTA_BLOCKS_CUH
#define LLMC_CUDA_DELTA_BLOCKS_CUH
#include "activation.cuh"
#include "attention_tiles.cuh" // for blocks of spans

constexpr unsigned BLOCK = DELTA_BLOCK, DELTA_THREADS_OF_BLOCK = BLOCK / 16 * LANES;
constexpr unsigned TERMS = sizeof(floatX) == 2 ? 2 : 1;

// A call, or a part of one
struct DeltaCall {
    size_t HK, HV, K, V, channels, stride, slot_tokens;
    float beta_most; // factor of s(b)
    const floatX *x, *b, *a, *A_log, *dt_bias;
    bool packed;     // 1: heads of x begin at multiples of 16 bytes
    const floatX *D; // of Mamba-2, as least and most, with dt in place of a
    float least, most;
};

// Rows of one block of a span
struct DeltaBlock {
    size_t row;    // first row in the call
    unsigned rows; // number of rows, at most BLOCK
};

__device__ inline DeltaBlock delta_block(const SpanBlocks &blocks, unsigned span, unsigned number) {
    const size_t first = (size_t)(number - blocks.first[span]) * BLOCK,
                 left = blocks.span[span].end - blocks.span[span].begin - first;
    return DeltaBlock{blocks.span[span].row + first, left < BLOCK ? (unsigned)left : BLOCK};
}

// Rows of x are q, k, v, or with SSD (Mamba-2) v, k, q.
template <bool SSD = false>
__device__ inline const floatX *queries_of(const DeltaCall &d, size_t row, size_t key_head) {
    return d.x + row * d.channels + (SSD ? d.HV * d.V + d.HK * d.K : 0) + key_head * d.K;
}
template <bool SSD = false> __device__ inline const floatX *keys_of(const DeltaCall &d, size_t row, size_t key_head) {
    if (SSD) return d.x + row * d.channels + d.HV * d.V + key_head * d.K;
    return queries_of(d, row, d.HK + key_head);
}
template <bool SSD = false> __device__ inline const floatX *values_of(const DeltaCall &d, size_t row, size_t head) {
    return d.x + row * d.channels + (SSD ? 0 : 2 * d.HK * d.K) + head * d.V;
}

// ---- gates ----------------------------------------------------------------------------------------------------------
struct Gate {
    float beta, rest;          // beta, 1 - s(b); Mamba-2: the step
    float log_decay, A, slope; // -A softplus(a + dt_bias), A, and the derivative of softplus, 0 at a bound of the step
};

template <bool SSD = false> __device__ inline Gate gate_of(const DeltaCall &d, size_t row, size_t head) {
    const float z = load(d.a[row * d.stride + head]) + load(d.dt_bias[head]), e = log1pf(expf(-fabsf(z)));
    const float open = z > 0.0f ? z + e : e;
    float one_minus_s;
    Gate gate = {};
    gate.slope = sigmoid(z, &one_minus_s);
    gate.A = expf(load(d.A_log[head]));
    if constexpr (SSD) {
        gate.beta = fminf(fmaxf(open, d.least), d.most);
        if (gate.beta != open) gate.slope = 0.0f;
        gate.log_decay = -fminf(gate.A * gate.beta, 1e5f); // stays finite
        return gate;
    }
    gate.beta = d.beta_most * sigmoid(load(d.b[row * d.stride + head]), &gate.rest);
    gate.log_decay = -gate.A * open;
    return gate;
}

// Factors of a token's row in a walk: beta; exp(c) / the length of k, and of q; decay(L) / the length of k
struct alignas(16) TokenFactors {
    float beta, read_k, read_q, add;
};
struct BlockFactors {
    TokenFactors token[BLOCK];
    float keep, unused[3]; // exp(c_L); padded to a multiple of 16 bytes
};
// A block's gates and lengths for the kernels. c is high + low, so that a difference of two c keeps its digits.
struct BlockGates {
    float high[BLOCK], low[BLOCK], beta[BLOCK];
};
struct BlockLengths {
    float query[BLOCK], key[BLOCK]; // 1 / sqrt(squares + eps), for queries also / sqrt(K)
};
constexpr float DELTA_EPS = 1e-6f;

__device__ inline float natural_exp(float x) { return fast_exp2(x * LOG2_E); }
__device__ inline float decay_between(const BlockGates &g, unsigned i, unsigned j) {
    return natural_exp((g.high[i] - g.high[j]) + (g.low[i] - g.low[j]));
}
__device__ inline float decay_to(const BlockGates &g, unsigned i) { return natural_exp(g.high[i] + g.low[i]); }

// A sum and the sum's rounding error
struct LongSum {
    float high, low;
};
__device__ inline LongSum long_sum(LongSum a, LongSum b) {
    const float sum = a.high + b.high, of_b = sum - a.high, rest = (a.high - (sum - of_b)) + (b.high - of_b);
    return LongSum{sum, rest + (a.low + b.low)};
}

// Computes a block's gates with one warp, two tokens per lane.
template <bool SSD = false>
__device__ inline void block_gates(BlockGates *g, const DeltaCall &d, DeltaBlock block, size_t head) {
    const unsigned lane = threadIdx.x % LANES;
    LongSum c[2] = {};
    for (unsigned i = 0; i < 2; i++) {
        Gate gate = {};
        if (2 * lane + i < block.rows) gate = gate_of<SSD>(d, block.row + 2 * lane + i, head);
        c[i].high = gate.log_decay;
        g->beta[2 * lane + i] = gate.beta;
    }
    LongSum sum = long_sum(c[0], c[1]); // sum over the lanes up to this lane
    for (unsigned step = 1; step < LANES; step *= 2) {
        const unsigned from = lane >= step ? lane - step : lane;
        const LongSum left = {__shfl_sync(ALL_LANES, sum.high, from), __shfl_sync(ALL_LANES, sum.low, from)};
        if (lane >= step) sum = long_sum(left, sum);
    }
    LongSum before = {__shfl_sync(ALL_LANES, sum.high, lane ? lane - 1 : 0),
                      __shfl_sync(ALL_LANES, sum.low, lane ? lane - 1 : 0)};
    if (lane == 0) before = LongSum{0.0f, 0.0f};
    before = long_sum(before, c[0]);
    g->high[2 * lane] = before.high, g->low[2 * lane] = before.low;
    g->high[2 * lane + 1] = sum.high, g->low[2 * lane + 1] = sum.low;
}

// ---- tiles ----------------------------------------------------------------------------------------------------------
template <int N> constexpr unsigned padded = N + 8; // stride of a tile's row, as in attention's tiles

// Fetches tile[ROWS][N] = rows of x from `from` on, `stride` elements apart; zeros after `rows` and `columns`.
template <int N, unsigned THREADS, unsigned ROWS = BLOCK>
__device__ inline void rows_fetch(floatX *tile, const floatX *from, size_t stride, unsigned rows, size_t columns,
                                  bool packed) {
    constexpr unsigned W = full_pack<floatX>, PACKS = N / W, STEP = THREADS / PACKS; // STEP: rows fetched at once
    static_assert(THREADS % PACKS == 0 && ROWS % STEP == 0);
    const unsigned first = threadIdx.x / PACKS, c = threadIdx.x % PACKS * W;
    floatX *to = tile + first * padded<N> + c;
    from += first * stride + c;
    if (packed) {
#pragma unroll
        for (unsigned row = first; row < ROWS + first; row += STEP, from += STEP * stride, to += STEP * padded<N>)
            fetch<16>(to, from, row < rows && c < columns);
        return;
    }
#pragma unroll 1
    for (unsigned row = first; row < ROWS + first; row += STEP, from += STEP * stride, to += STEP * padded<N>)
        for (unsigned j = 0; j < W; j++) to[j] = row < rows && c + j < columns ? from[j] : store(0.0f);
}

// Stores to[rows][columns] = rows of a tile of ROWS rows; rows in memory are `stride` elements apart.
template <int ROWS, int N, unsigned THREADS>
__device__ inline void rows_store(floatX *to, const floatX *tile, unsigned stride, unsigned rows, size_t columns,
                                  bool packed) {
    constexpr unsigned W = full_pack<floatX>, PACKS = N / W, STEP = THREADS / PACKS;
    const unsigned first = threadIdx.x / PACKS, c = threadIdx.x % PACKS * W;
    tile += first * padded<N> + c, to += first * stride + c;
    if (packed) {
#pragma unroll
        for (unsigned row = 0; row < ROWS; row += STEP)
            if (first + row < rows && c < columns)
                pack_write<W>(to + row * stride, pack_read<W>(tile + row * padded<N>));
        return;
    }
#pragma unroll 1
    for (unsigned row = 0; first + row < rows; row += STEP)
        for (unsigned j = 0; j < W && c + j < columns; j++) to[row * stride + j] = tile[row * padded<N> + j];
}

// Splits a computed number into terms and stores each term in a separate tile; fp32 has one term.
__device__ inline void split(floatX (&term)[TERMS], float value) {
    term[0] = store(value);
    if constexpr (TERMS == 2) term[1] = store(value - load(term[0]));
}
__device__ inline void split_store(floatX *tile, size_t tile_size, size_t place, float value) {
    floatX term[TERMS];
    split(term, value);
    for (unsigned i = 0; i < TERMS; i++) tile[i * tile_size + place] = term[i];
}

// Two neighbours, stored at once
struct alignas(2 * sizeof(floatX)) Two {
    floatX x[2];
};
__device__ inline Two two_of(float a, float b) {
#if defined(PRECISION_BF16) && !defined(CUDA_ON_CPU)
    const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
    Two two;
    memcpy(&two, &both, sizeof(two));
    return two;
#else
    return Two{{store(a), store(b)}};
#endif
}
__device__ inline void split_two(Two (&term)[TERMS], float a, float b) {
    term[0] = two_of(a, b);
    if constexpr (TERMS == 2) term[1] = two_of(a - load(term[0].x[0]), b - load(term[0].x[1]));
}
__device__ inline void split_store_two(floatX *tile, size_t tile_size, unsigned place, float a, float b) {
    Two term[TERMS];
    split_two(term, a, b);
    for (unsigned i = 0; i < TERMS; i++) *(Two *)(tile + i * tile_size + place) = term[i];
}

struct SplitA {
    OperandA term[TERMS];
};

// Splits two neighbouring results C[16,8] into an A[16,16].
__device__ inline SplitA split_results(const float (*c)[4]) {
    SplitA a;
#pragma unroll
    for (unsigned i = 0; i < 8; i += 2) {
        Two term[TERMS];
        split_two(term, c[i / 4][i % 4], c[i / 4][i % 4 + 1]);
        for (unsigned t = 0; t < TERMS; t++) memcpy(&a.term[t].x[i], &term[t], sizeof(Two));
    }
    return a;
}

// Loads A[16,16] of a split tile, or of its transpose, from tile rows `row` and columns `column` on.
template <bool TRANSPOSED>
__device__ inline SplitA load_split(const floatX *tile, unsigned tile_size, unsigned stride, unsigned row,
                                    unsigned column) {
    SplitA a;
#pragma unroll
    for (unsigned t = 0; t < TERMS; t++)
        a.term[t] = TRANSPOSED ? load_a_columns(tile + t * tile_size, stride, row, column)
                               : load_a(tile + t * tile_size, stride, row, column);
    return a;
}

// Adds a b to c[16][N]; b(n, term) returns the operands of a split tile. Leaves out the product of the two last terms.
template <int N, typename B> __device__ inline void split_product(float (*c)[4], const SplitA &a, B b) {
#pragma unroll
    for (unsigned i = 0; i < TERMS; i++)
#pragma unroll
        for (unsigned j = 0; i + j < TERMS; j++) mma_columns<N>(c, a.term[i], [&](int n) { return b(n, j); });
}
// Adds a b to c with an exact a.
template <int N, typename B> __device__ inline void split_product(float (*c)[4], const OperandA &a, B b) {
#pragma unroll
    for (unsigned j = 0; j < TERMS; j++) mma_columns<N>(c, a, [&](int n) { return b(n, j); });
}
// Adds a b to c with an exact b(n).
template <int N, typename B> __device__ inline void split_by_exact(float (*c)[4], const SplitA &a, B b) {
#pragma unroll
    for (unsigned j = 0; j < TERMS; j++) mma_columns<N>(c, a.term[j], b);
}

// Calls f(row, column, element) for a lane's elements of c[16][N].
template <int N, typename F> __device__ inline void for_results(float (*c)[4], F f) {
    const unsigned lane = threadIdx.x % LANES;
#pragma unroll
    for (unsigned n = 0; n < N / 8; n++)
#pragma unroll
        for (unsigned e = 0; e < 4; e++) f(lane / 4 + e / 2 * 8, n * 8 + lane % 4 * 2 + e % 2, c[n][e]);
}

// Calls f(row, column, element, element of the next column).
template <int N, typename F> __device__ inline void for_pairs(float (*c)[4], F f) {
    const unsigned lane = threadIdx.x % LANES;
#pragma unroll
    for (unsigned n = 0; n < N / 8; n++)
#pragma unroll
        for (unsigned e = 0; e < 4; e += 2) f(lane / 4 + e / 2 * 8, n * 8 + lane % 4 * 2, c[n][e], c[n][e + 1]);
}

// Computes k k^T, unless NULL, and q k^T of a block, 16 rows per warp in four warps, repeated by the next four. Also
// computes the squares of its rows, keys first, unless NULL. Slices of K pass through tiles of SLICE_TILES elements.
constexpr int SLICE = 64;
constexpr unsigned SLICE_TILES = 2 * BLOCK * padded<SLICE>;

template <unsigned THREADS, bool SSD = false>
__device__ inline void block_pairs(float (*kk)[4], float (*qk)[4], float *squares, floatX *tiles, const DeltaCall &d,
                                   DeltaBlock block, size_t key_head) {
    floatX *const tk = tiles, *const tq = tiles + BLOCK * padded<SLICE>;
    const unsigned row = threadIdx.x / LANES * 16 % BLOCK;
    for (size_t slice = 0; slice < d.K; slice += SLICE) {
        const size_t left = d.K - slice;
        __syncthreads(); // waits until the tiles are free
        rows_fetch<SLICE, THREADS>(tk, keys_of<SSD>(d, block.row, key_head) + slice, d.channels, block.rows, left,
                                   d.packed);
        rows_fetch<SLICE, THREADS>(tq, queries_of<SSD>(d, block.row, key_head) + slice, d.channels, block.rows, left,
                                   d.packed);
        fetch_commit();
        fetch_wait<0>();
        __syncthreads();
        for (unsigned i = threadIdx.x; i < 2 * BLOCK && squares; i += THREADS) {
            const floatX *const x = (i < BLOCK ? tk : tq) + i % BLOCK * padded<SLICE>;
            float sum = slice ? squares[i] : 0.0f;
            for (unsigned c = 0; c < SLICE; c += full_pack<floatX>) {
                const auto pack = pack_read<full_pack<floatX>>(x + c);
                for (int j = 0; j < full_pack<floatX>; j++) sum += load(pack.x[j]) * load(pack.x[j]);
            }
            squares[i] = sum;
        }
#pragma unroll
        for (int c = 0; c < SLICE; c += 16) {
            const auto k = [&](int n) { return load_b(tk, padded<SLICE>, n, c); };
            if (kk) mma_columns<BLOCK>(kk, load_a(tk, padded<SLICE>, row, c), k);
            mma_columns<BLOCK>(qk, load_a(tq, padded<SLICE>, row, c), k);
        }
    }
}

// ---- work that needs no state ---------------------------------------------------------------------------------------
// Lower triangles of BLOCK rows. In shared memory they are split tiles. In global memory they are operands of matrix
// instructions as a lane holds them, [TRIANGLE_TILES, TERMS, LANES], of a triangle or its transpose; a row's operands
// are contiguous.
constexpr unsigned PAIR_TILE = BLOCK * padded<BLOCK>, SIDE = BLOCK / 16, TRIANGLE_TILES = SIDE * (SIDE + 1) / 2;
constexpr unsigned OPERANDS_OF_TRIANGLE = TRIANGLE_TILES * TERMS * LANES;
constexpr unsigned DIAGONAL_STRIDE = 20; // stride of a row of the fp32 blocks of 16 x 16 on the diagonal

// Returns the index of the operand of tile (row, column) in a stored triangle. In the transpose, rows and columns count
// from the end.
template <bool TRANSPOSED> __device__ inline unsigned triangle_tile(unsigned row, unsigned column) {
    if (TRANSPOSED) row = SIDE - 1 - row, column = SIDE - 1 - column;
    return row * (row + 1) / 2 + column;
}

// triangle_has returns whether a triangle has operand j of row i, triangle_place the operand's offset from the row's
// first operand.
template <bool TRANSPOSED> __device__ inline bool triangle_has(unsigned i, unsigned j) {
    return TRANSPOSED ? j >= i : j <= i;
}
template <bool TRANSPOSED> __device__ inline unsigned triangle_place(unsigned j, unsigned term) {
    return ((TRANSPOSED ? SIDE - 1 - j : j) * TERMS + term) * LANES;
}
// Returns a lane's offset of row i's first operand.
template <bool TRANSPOSED> __device__ inline unsigned triangle_row(unsigned i) {
    return triangle_tile<TRANSPOSED>(i, TRANSPOSED ? SIDE - 1 : 0) * TERMS * LANES + threadIdx.x % LANES;
}

// Stores a split tile's triangle, or its transpose: one row of operands per warp.
template <bool TRANSPOSED> __device__ inline void triangle_store(OperandA *to, const floatX *tile) {
    const unsigned i = threadIdx.x / LANES;
    to += triangle_row<TRANSPOSED>(i);
#pragma unroll
    for (unsigned j = 0; j < SIDE; j++) {
        if (!triangle_has<TRANSPOSED>(i, j)) continue;
        const SplitA a = load_split<TRANSPOSED>(tile, PAIR_TILE, padded<BLOCK>, (TRANSPOSED ? j : i) * 16,
                                                (TRANSPOSED ? i : j) * 16);
#pragma unroll
        for (unsigned t = 0; t < TERMS; t++) to[triangle_place<TRANSPOSED>(j, t)] = a.term[t];
    }
}

// Inverts I + A of 16 rows, one lane per column. t: the lane's column of the inverse. A: [16][DIAGONAL_STRIDE]
__device__ inline void diagonal_inverse(float (&t)[16], const float *A) {
    const unsigned column = threadIdx.x % 16;
#pragma unroll
    for (unsigned i = 0; i < 16; i++) {
        float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (unsigned m = 0; m < i; m += 4) {
            const auto row = pack_read<4>(A + i * DIAGONAL_STRIDE + m);
#pragma unroll
            for (unsigned e = 0; e < 4; e++)
                if (m + e < i) sum -= row.x[e] * t[m + e];
        }
        t[i] = sum;
    }
}

// Computes T = (I + A)^-1 on and below the diagonal, both split, with four warps. `diagonal` has A's blocks of 16 in
// fp32. Block column j of T belongs to warp j: T_ij = -T_ii sum over m from j to i - 1 of A_im T_mj. A warp computes
// the transposes U_ji, so that the result of one product is the left operand of the next.
__device__ inline void triangle_inverse(floatX *T, const floatX *A, const float *diagonal) {
    constexpr unsigned S = padded<BLOCK>;
    const unsigned lane = threadIdx.x % LANES, j = threadIdx.x / LANES;
    float t[16];
    diagonal_inverse(t, diagonal + j * 16 * DIAGONAL_STRIDE);
#pragma unroll
    for (unsigned i = 0; i < 16; i++)
        if (lane < 16) split_store(T, PAIR_TILE, (j * 16 + i) * S + j * 16 + lane, t[i]);
    __syncthreads();
    SplitA U[SIDE - 1];
    U[0] = load_split<true>(T, PAIR_TILE, S, j * 16, j * 16);
#pragma unroll
    for (unsigned d = 1; d < SIDE; d++) { // block row i = j + d
        const unsigned i = (j + d) * 16;
        float sum[2][4] = {}, result[2][4] = {};
        if (i >= BLOCK) continue;
#pragma unroll
        for (unsigned m = 0; m < d; m++)
            split_product<16>(
                sum, U[m], [&](int, unsigned t) { return load_b(A + t * PAIR_TILE, S, (int)i, (int)((j + m) * 16)); });
        for_results<16>(sum, [](unsigned, unsigned, float &value) { value = -value; });
        split_product<16>(result, split_results(sum),
                          [&](int, unsigned t) { return load_b(T + t * PAIR_TILE, S, (int)i, (int)i); });
        if (d + 1 < SIDE) U[d] = split_results(result);
        for_results<16>(result, [&](unsigned row, unsigned column, float value) {
            split_store(T, PAIR_TILE, (i + column) * S + j * 16 + row, value);
        });
    }
    __syncthreads();
}

constexpr unsigned BLOCKS_TILES = SLICE_TILES > 2 * TERMS *PAIR_TILE ? SLICE_TILES : 2 * TERMS *PAIR_TILE;
constexpr size_t BLOCKS_BYTES = BLOCKS_TILES * sizeof(floatX);

// Results of delta_blocks_kernel; NULL: not wanted
struct BlockResults {
    OperandA *inverse, *scores;           // [blocks, HV, OPERANDS_OF_TRIANGLE]
    OperandA *inverse_back, *scores_back; // inverse and scores of the transposes
    BlockGates *gates;                    // [blocks, HV]
    BlockFactors *factors;                // [blocks, HV]
    BlockLengths *lengths;                // [blocks, HK]
};

// Sets a block's lengths and, from them, the factors of its tokens; one thread per token. squares: keys first
__device__ inline void block_factors(BlockFactors *factors, BlockLengths *length, const BlockGates &g,
                                     const float *squares, size_t K) {
    const unsigned i = threadIdx.x;
    if (i >= BLOCK) return;
    const float decay = decay_to(g, i), key = 1.0f / sqrtf(squares[i] + DELTA_EPS),
                query = 1.0f / sqrtf((squares[BLOCK + i] + DELTA_EPS) * (float)K);
    length->key[i] = key, length->query[i] = query;
    factors->token[i] = TokenFactors{g.beta[i], decay * key, decay * query, decay_between(g, BLOCK - 1, i) * key};
    if (i == BLOCK - 1) factors->keep = decay;
}

// Makes A from k k^T and the scores from q k^T, rows from `row` on. Zeros where a key does not precede.
__device__ inline void block_scale(float (*kk)[4], float (*qk)[4], const BlockGates &g, const BlockLengths &length,
                                   unsigned row) {
    const unsigned lane = threadIdx.x % LANES;
    float high[2], low[2], of_key[2], of_query[2];
    for (unsigned e = 0; e < 2; e++) {
        const unsigned i = row + lane / 4 + 8 * e;
        high[e] = g.high[i], low[e] = g.low[i];
        of_key[e] = g.beta[i] * length.key[i], of_query[e] = length.query[i];
    }
#pragma unroll
    for (unsigned n = 0; n < BLOCK / 8; n++)
#pragma unroll
        for (unsigned c = 0; c < 2; c++) {
            const unsigned j = n * 8 + lane % 4 * 2 + c;
            const float high_j = g.high[j], low_j = g.low[j], key = length.key[j];
#pragma unroll
            for (unsigned e = 0; e < 2; e++) {
                const unsigned i = row + lane / 4 + 8 * e;
                const float decay = key * natural_exp((high[e] - high_j) + (low[e] - low_j));
                kk[n][2 * e + c] = j < i ? kk[n][2 * e + c] * (of_key[e] * decay) : 0.0f;
                qk[n][2 * e + c] = j <= i ? qk[n][2 * e + c] * (of_query[e] * decay) : 0.0f;
            }
        }
}

// Copies a block's floats from shared memory to global memory.
template <typename T> __device__ inline void floats_store(T *to, const T *from) {
    static_assert(sizeof(T) % 16 == 0 && sizeof(T) / 16 <= DELTA_THREADS_OF_BLOCK);
    const unsigned i = threadIdx.x * 4;
    if (i < sizeof(T) / sizeof(float)) pack_write<4>((float *)to + i, pack_read<4>((const float *)from + i));
}

// Computes the parts of blocks that need no state: one thread block per block of tokens and value head.
__global__ void __launch_bounds__(DELTA_THREADS_OF_BLOCK)
    delta_blocks_kernel(BlockResults to, DeltaCall d, SpanBlocks blocks) {
    DYNAMIC_SHARED(floatX, memory); // BLOCKS_BYTES: tiles of q and k; later A, then the scores, and the inverse
    floatX *const A = memory, *const T = memory + TERMS * PAIR_TILE;
    SHARED(float, diagonal, SIDE * 16 * DIAGONAL_STRIDE);
    SHARED(float, squares, 2 * BLOCK);
    SHARED(BlockGates, g, 1);
    SHARED(BlockFactors, factors, 1);
    SHARED(BlockLengths, length, 1);
    const unsigned row = threadIdx.x / LANES * 16;
    const DeltaBlock block = delta_block(blocks, span_of(blocks, blockIdx.x), blockIdx.x);
    const size_t head = blockIdx.y, group = d.HV / d.HK, place = blockIdx.x * d.HV + head;
    const size_t operands = place * OPERANDS_OF_TRIANGLE;
    float kk[BLOCK / 8][4] = {}, qk[BLOCK / 8][4] = {};
    if (threadIdx.x < LANES) block_gates(g, d, block, head);
    block_pairs<DELTA_THREADS_OF_BLOCK>(kk, qk, squares, memory, d, block, head / group);
    __syncthreads();
    block_factors(factors, length, *g, squares, d.K);
    __syncthreads();
    floats_store(to.gates + place, g);
    floats_store(to.factors + place, factors);
    if (head % group == 0) floats_store(to.lengths + blockIdx.x * d.HK + head / group, length);
    block_scale(kk, qk, *g, *length, row);
    if (to.inverse || to.inverse_back) {
        for_pairs<BLOCK>(kk, [&](unsigned i, unsigned j, float a, float b) {
            split_store_two(A, PAIR_TILE, (row + i) * padded<BLOCK> + j, a, b);
            if (j / 16 != row / 16) return;
            float *const at = diagonal + (row + i) * DIAGONAL_STRIDE + j % 16;
            at[0] = a, at[1] = b;
        });
        __syncthreads();
        triangle_inverse(T, A, diagonal);
        if (to.inverse) triangle_store<false>(to.inverse + operands, T);
        if (to.inverse_back) triangle_store<true>(to.inverse_back + operands, T);
    }
    if (!to.scores && !to.scores_back) return;
    for_pairs<BLOCK>(qk, [&](unsigned i, unsigned j, float a, float b) {
        split_store_two(A, PAIR_TILE, (row + i) * padded<BLOCK> + j, a, b);
    });
    __syncthreads();
    if (to.scores) triangle_store<false>(to.scores + operands, A);
    if (to.scores_back) triangle_store<true>(to.scores_back + operands, A);
}

#endif
