/*
The gated delta rule in blocks of DELTA_BLOCK tokens, in the notation of arXiv 2412.06464, section 3.2: code shared by
the kernels of op set "cuda", and the first of them. It computes everything of a block and key head that needs no state.

With q and k divided by their lengths, c the sum of the log decays from the block's first token on, decay(i, j) =
exp(c_i - c_j) for j <= i, S the state before the block and L its last token:

    A_ij = beta_i (k_i . k_j) decay(i, j) for j < i        inverse = (I + A)^-1
    P_ij = (q_i . k_j) decay(i, j) for j <= i               scores
    R_i = beta_i (v_i - exp(c_i) S^T k_i),  N = inverse R   what each token adds to the state
    out_i = exp(c_i) S^T q_i + sum_j P_ij N_j
    S <- exp(c_L) S + sum_j decay(L, j) k_j N_j^T

No exponent is positive, and nothing is divided by a decay. A short block is padded with zeros (beta 0, decay 1).

Matrix instructions take bf16 in the bf16 build. q, k, v and dout are bf16 already; their lengths and all other factors
are applied to the other operand or to the result. Computed operands are split into a bf16 number and the rest, again in
bf16 (TERMS): a product with them is two, with a relative error of about 2^-17.
*/
#ifndef LLMC_CUDA_DELTA_BLOCKS_CUH
#define LLMC_CUDA_DELTA_BLOCKS_CUH
#include "activation.cuh"
#include "attention_tiles.cuh" // blocks of spans

constexpr unsigned BLOCK = DELTA_BLOCK, DELTA_THREADS_OF_BLOCK = BLOCK / 16 * LANES, PAIRS_OF_BLOCK = BLOCK * BLOCK;
constexpr unsigned TERMS = sizeof(floatX) == 2 ? 2 : 1;

// A call, or a part of one
struct DeltaCall {
    size_t HK, HV, K, V, channels, stride, slot_tokens;
    const floatX *x, *b, *a, *A_log, *dt_bias;
    bool packed; // heads of x begin at multiples of 16 bytes
};

// Rows of a block of a span
struct DeltaBlock {
    size_t row;    // of the call
    unsigned rows; // at most BLOCK
};

__device__ inline DeltaBlock delta_block(const SpanBlocks &blocks, unsigned span, unsigned number) {
    const size_t first = (size_t)(number - blocks.first[span]) * BLOCK,
                 left = blocks.span[span].end - blocks.span[span].begin - first;
    return DeltaBlock{blocks.span[span].row + first, left < BLOCK ? (unsigned)left : BLOCK};
}

__device__ inline const floatX *queries_of(const DeltaCall &d, size_t row, size_t key_head) {
    return d.x + row * d.channels + key_head * d.K;
}
__device__ inline const floatX *keys_of(const DeltaCall &d, size_t row, size_t key_head) {
    return queries_of(d, row, d.HK + key_head);
}
__device__ inline const floatX *values_of(const DeltaCall &d, size_t row, size_t head) {
    return d.x + row * d.channels + 2 * d.HK * d.K + head * d.V;
}

// ---- gates ----------------------------------------------------------------------------------------------------------
struct Gate {
    float beta, rest;          // s(b), 1 - s(b)
    float log_decay, A, slope; // -A softplus(a + dt_bias), A, softplus' there
};

__device__ inline Gate gate_of(const DeltaCall &d, size_t row, size_t head) {
    const float z = load(d.a[row * d.stride + head]) + load(d.dt_bias[head]), e = log1pf(expf(-fabsf(z)));
    float one_minus_s;
    Gate gate;
    gate.beta = sigmoid(load(d.b[row * d.stride + head]), &gate.rest);
    gate.slope = sigmoid(z, &one_minus_s);
    gate.A = expf(load(d.A_log[head]));
    gate.log_decay = -gate.A * (z > 0.0f ? z + e : e);
    return gate;
}

// A block's gates and lengths for the kernels; c is high + low, so that a difference of two keeps its digits
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

// A sum and its rounding error
struct LongSum {
    float high, low;
};
__device__ inline LongSum long_sum(LongSum a, LongSum b) {
    const float sum = a.high + b.high, of_b = sum - a.high, rest = (a.high - (sum - of_b)) + (b.high - of_b);
    return LongSum{sum, rest + (a.low + b.low)};
}

// Computes a block's gates by one warp, two tokens a lane.
__device__ inline void block_gates(BlockGates *g, const DeltaCall &d, DeltaBlock block, size_t head) {
    const unsigned lane = threadIdx.x % LANES;
    LongSum c[2] = {};
    for (unsigned i = 0; i < 2; i++) {
        Gate gate = {};
        if (2 * lane + i < block.rows) gate = gate_of(d, block.row + 2 * lane + i, head);
        c[i].high = gate.log_decay;
        g->beta[2 * lane + i] = gate.beta;
    }
    LongSum sum = long_sum(c[0], c[1]); // over the lanes so far
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
template <int N> constexpr unsigned padded = N + 8; // a tile's row, as in attention's tiles

// tile[BLOCK][N] = rows of x from `from` on, `stride` elements apart; zeros beyond `rows` and `columns`
template <int N, unsigned THREADS>
__device__ inline void rows_fetch(floatX *tile, const floatX *from, size_t stride, unsigned rows, size_t columns,
                                  bool packed) {
    constexpr unsigned W = full_pack<floatX>, PACKS = N / W, STEP = THREADS / PACKS; // rows at once
    static_assert(THREADS % PACKS == 0 && BLOCK % STEP == 0);
    const unsigned first = threadIdx.x / PACKS, c = threadIdx.x % PACKS * W;
    floatX *to = tile + first * padded<N> + c;
    from += first * stride + c;
    if (packed) {
#pragma unroll
        for (unsigned row = first; row < BLOCK + first; row += STEP, from += STEP * stride, to += STEP * padded<N>)
            fetch<16>(to, from, row < rows && c < columns);
        return;
    }
#pragma unroll 1
    for (unsigned row = first; row < BLOCK + first; row += STEP, from += STEP * stride, to += STEP * padded<N>)
        for (unsigned j = 0; j < W; j++) to[j] = row < rows && c + j < columns ? from[j] : store(0.0f);
}

// Splits a computed number into its terms, one tile each; fp32 has one term.
__device__ inline void split(floatX (&term)[TERMS], float value) {
    term[0] = store(value);
    if constexpr (TERMS == 2) term[1] = store(value - load(term[0]));
}
__device__ inline void split_store(floatX *tile, size_t tile_size, unsigned place, float value) {
    floatX term[TERMS];
    split(term, value);
    for (unsigned i = 0; i < TERMS; i++) tile[i * tile_size + place] = term[i];
}

// Two neighbours at once
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

// Makes a split A[16,16] from value(row, column).
template <typename Value> __device__ inline SplitA split_operand(Value value) {
    const unsigned lane = threadIdx.x % LANES;
    SplitA a;
#pragma unroll
    for (unsigned i = 0; i < 8; i += 2) {
        Two term[TERMS];
        const unsigned row = lane / 4 + i / 2 % 2 * 8, column = lane % 4 * 2 + i / 4 * 8;
        split_two(term, value(row, column), value(row, column + 1));
        for (unsigned t = 0; t < TERMS; t++) memcpy(&a.term[t].x[i], &term[t], sizeof(Two));
    }
    return a;
}

// c[16][N] += a b, b(n, term) the operands of a split tile; leaves out the product of both rests
template <int N, typename B> __device__ inline void split_product(float (*c)[4], const SplitA &a, B b) {
#pragma unroll
    for (unsigned i = 0; i < TERMS; i++)
#pragma unroll
        for (unsigned j = 0; i + j < TERMS; j++) mma_columns<N>(c, a.term[i], [&](int n) { return b(n, j); });
}
// a exact
template <int N, typename B> __device__ inline void split_product(float (*c)[4], const OperandA &a, B b) {
#pragma unroll
    for (unsigned j = 0; j < TERMS; j++) mma_columns<N>(c, a, [&](int n) { return b(n, j); });
}
// b(n) exact
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

// Computes k k^T and q k^T of a block, 16 rows for each of four warps, repeated by the next four; and the squares of
// its rows, keys first, unless NULL. Slices of K pass through tiles of SLICE_TILES elements.
constexpr int SLICE = 64;
constexpr unsigned SLICE_TILES = 2 * BLOCK * padded<SLICE>;

template <unsigned THREADS>
__device__ inline void block_pairs(float (*kk)[4], float (*qk)[4], float *squares, floatX *tiles, const DeltaCall &d,
                                   DeltaBlock block, size_t key_head) {
    floatX *const tk = tiles, *const tq = tiles + BLOCK * padded<SLICE>;
    const unsigned row = threadIdx.x / LANES * 16 % BLOCK;
    for (size_t slice = 0; slice < d.K; slice += SLICE) {
        const size_t left = d.K - slice;
        __syncthreads(); // tiles are free
        rows_fetch<SLICE, THREADS>(tk, keys_of(d, block.row, key_head) + slice, d.channels, block.rows, left, d.packed);
        rows_fetch<SLICE, THREADS>(tq, queries_of(d, block.row, key_head) + slice, d.channels, block.rows, left,
                                   d.packed);
        fetch_commit();
        fetch_wait<0>();
        __syncthreads();
        for (unsigned i = threadIdx.x; i < 2 * BLOCK && squares; i += THREADS) {
            const floatX *const x = (i < BLOCK ? tk : tq) + i % BLOCK * padded<SLICE>;
            float sum = slice ? squares[i] : 0.0f;
            for (unsigned c = 0; c < SLICE; c++) sum += load(x[c]) * load(x[c]);
            squares[i] = sum;
        }
#pragma unroll
        for (int c = 0; c < SLICE; c += 16) {
            const OperandA k = load_a(tk, padded<SLICE>, row, c), q = load_a(tq, padded<SLICE>, row, c);
            mma_columns<BLOCK>(kk, k, [&](int n) { return load_b(tk, padded<SLICE>, n, c); });
            mma_columns<BLOCK>(qk, q, [&](int n) { return load_b(tk, padded<SLICE>, n, c); });
        }
    }
}

// ---- work that needs no state ---------------------------------------------------------------------------------------
// Lower triangles of BLOCK rows in shared memory
constexpr unsigned TRIANGLE_STRIDE = BLOCK + 1, TRIANGLE = BLOCK * TRIANGLE_STRIDE;

// T = (I + A)^-1 on and below the diagonal; above is scratch. First the blocks of 16 on the diagonal, a thread for each
// column; then, below two finished neighbours, -T2 A21 T1.
__device__ inline void triangle_inverse(float *T, const float *A) {
    constexpr unsigned S = TRIANGLE_STRIDE, FIRST = 16;
    if (threadIdx.x < BLOCK) {
        const unsigned column = threadIdx.x, end = (column / FIRST + 1) * FIRST;
        T[column * S + column] = 1.0f;
        for (unsigned i = column + 1; i < end; i++) {
            float sum = 0.0f;
            for (unsigned m = column; m < i; m++) sum += A[i * S + m] * T[m * S + column];
            T[i * S + column] = -sum;
        }
    }
    __syncthreads();
    for (unsigned size = FIRST; size < BLOCK; size *= 2) {
        for (unsigned i = threadIdx.x; i < BLOCK / 2 * size;
             i += DELTA_THREADS_OF_BLOCK) { // A21 T1, above the diagonal
            const unsigned first = i / (size * size) * 2 * size, row = i / size % size, column = i % size;
            float sum = 0.0f;
            for (unsigned m = column; m < size; m++)
                sum += A[(first + size + row) * S + first + m] * T[(first + m) * S + first + column];
            T[(first + row) * S + first + size + column] = sum;
        }
        __syncthreads();
        for (unsigned i = threadIdx.x; i < BLOCK / 2 * size; i += DELTA_THREADS_OF_BLOCK) {
            const unsigned first = i / (size * size) * 2 * size, row = i / size % size, column = i % size;
            float sum = 0.0f;
            for (unsigned m = 0; m <= row; m++)
                sum += T[(first + size + row) * S + first + size + m] * T[(first + m) * S + first + size + column];
            T[(first + size + row) * S + first + column] = -sum;
        }
        __syncthreads();
    }
}

constexpr size_t BLOCKS_BYTES = SLICE_TILES * sizeof(floatX) > 2 * TRIANGLE * sizeof(float)
                                    ? SLICE_TILES * sizeof(floatX)
                                    : 2 * TRIANGLE * sizeof(float);

// inverse, scores: [blocks, HV, BLOCK, BLOCK], NULL: not wanted; gates [blocks, HV]; lengths [blocks, HK]
__global__ void __launch_bounds__(DELTA_THREADS_OF_BLOCK)
    delta_blocks_kernel(float *inverse, float *scores, BlockGates *gates, BlockLengths *lengths, DeltaCall d,
                        SpanBlocks blocks) {
    DYNAMIC_SHARED(float, memory); // BLOCKS_BYTES: tiles of q and k, later triangles
    float *const A = memory, *const T = A + TRIANGLE;
    SHARED(float, squares, 2 * BLOCK);
    SHARED(BlockGates, g, 1);
    SHARED(BlockLengths, length, 1);
    const unsigned span = span_of(blocks, blockIdx.x), row = threadIdx.x / LANES * 16;
    const DeltaBlock block = delta_block(blocks, span, blockIdx.x);
    const size_t key_head = blockIdx.y, group = d.HV / d.HK;
    float kk[BLOCK / 8][4] = {}, qk[BLOCK / 8][4] = {};
    block_pairs<DELTA_THREADS_OF_BLOCK>(kk, qk, squares, (floatX *)memory, d, block, key_head);
    __syncthreads();
    if (threadIdx.x < BLOCK) {
        const unsigned i = threadIdx.x;
        length->key[i] = 1.0f / sqrtf(squares[i] + DELTA_EPS);
        length->query[i] = 1.0f / sqrtf((squares[BLOCK + i] + DELTA_EPS) * (float)d.K);
        lengths[blockIdx.x * d.HK + key_head].key[i] = length->key[i];
        lengths[blockIdx.x * d.HK + key_head].query[i] = length->query[i];
    }
    for (size_t head = key_head * group; head < (key_head + 1) * group; head++) {
        const size_t place = blockIdx.x * d.HV + head;
        if (threadIdx.x < LANES) block_gates(g, d, block, head);
        __syncthreads();
        if (threadIdx.x < BLOCK) {
            gates[place].high[threadIdx.x] = g->high[threadIdx.x];
            gates[place].low[threadIdx.x] = g->low[threadIdx.x];
            gates[place].beta[threadIdx.x] = g->beta[threadIdx.x];
        }
        if (inverse) {
            for_results<BLOCK>(kk, [&](unsigned i, unsigned j, float product) {
                i += row;
                const float scale = j < i ? g->beta[i] * length->key[i] * length->key[j] * decay_between(*g, i, j) : 0;
                A[i * TRIANGLE_STRIDE + j] = j < i ? product * scale : 0.0f;
            });
            for_results<BLOCK>(qk, [&](unsigned i, unsigned j, float product) {
                i += row;
                const float scale = j <= i ? length->query[i] * length->key[j] * decay_between(*g, i, j) : 0;
                scores[place * PAIRS_OF_BLOCK + i * BLOCK + j] = j <= i ? product * scale : 0.0f;
            });
            __syncthreads();
            triangle_inverse(T, A);
            for (unsigned i = threadIdx.x; i < PAIRS_OF_BLOCK; i += DELTA_THREADS_OF_BLOCK)
                inverse[place * PAIRS_OF_BLOCK + i] =
                    i % BLOCK <= i / BLOCK ? T[i / BLOCK * TRIANGLE_STRIDE + i % BLOCK] : 0.0f;
        }
        __syncthreads();
    }
}

#endif
