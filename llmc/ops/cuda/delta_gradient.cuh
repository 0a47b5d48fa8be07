/*
Gradients of the gated delta rule in op set "cuda". The walks have saved the state S before each block, the gradient dS
of the state after it, and N and dR of each token (delta_blocks.cuh), all split. Each thread block takes BLOCK tokens of
one key head, and its value heads one after another. With

    dP_ij = dout_i . N_j for j <= i      dA_ij = -dR_i . N_j for j < i      dv = beta dR

and the gradients of q and k divided by their lengths

    dq_i = exp(c_i) S dout_i + sum_j dP_ij decay(i, j) k_j
    dk_j = sum_i dP_ij decay(i, j) q_i + sum_i (dA_ij beta_i decay(i, j) + dA_ji beta_j decay(j, i)) k_i
           - beta_j exp(c_j) S dR_j + decay(L, j) dS N_j

beta_i dbeta_i is dR_i . N_i. The gradient of a token's log decay is the sum of all terms with it in their decay. These
terms are dot products of known values: pairs i, j with j before the token and i not; reads of S by this and later
tokens; additions to the next state by earlier tokens; and exp(c_L) <S, dS>. No two terms cancel, however strong a decay
is.

The products that sum over V are one loop over its strips (delta_strips.cuh). Factors of rows are applied to results.
Pairs are summed over the heads of a group, and multiplied by q and k once. Only the lower triangle is computed.
*/
#ifndef LLMC_CUDA_DELTA_GRADIENT_CUH
#define LLMC_CUDA_DELTA_GRADIENT_CUH
#include "delta_strips.cuh"

// ---- shared memory --------------------------------------------------------------------------------------------------
// Columns of a slice: all of q or k, or as many columns of each warp as fit
template <int KP> constexpr unsigned KEY_SLICE = KP * sizeof(floatX) > 256 ? 16 : KEY_COLUMNS<KP>;
template <int KP> constexpr unsigned KEY_STRIDE = KEY_SLICE<KP> *(KP / KEY_COLUMNS<KP>)+8;
template <int KP> constexpr unsigned KEY_TILE = KEY_STRIDE<KP> *BLOCK;
constexpr unsigned PAIR_STRIDE = BLOCK + 4; // stride of a row of the pairs' sums

constexpr unsigned LANE_PAIRS = 2 * PAIR_COLUMNS / 8; // packs of four floats: a lane's pairs of two kinds
constexpr size_t LANES_BYTES = TRIANGLE_WARPS * LANE_PAIRS * LANES * 4 * sizeof(float);

struct GradientShared {
    BlockGates gates[2];
    BlockLengths length;
    float dots[3][COLUMN_GROUPS][BLOCK]; // three kinds of dot products of rows
    float dbeta[BLOCK];                  // gradients of beta, times beta; Mamba-2: dout . v
    float overlaps[GRADIENT_WARPS];      // parts of <S, dS>
};

// Shared memory: sums of pairs; strips and products of q and k; in the end the tiles of pairs, q and k
template <int KP> constexpr size_t gradient_bytes(unsigned stages) {
    const size_t strips = stages * STRIP_TILES<KP> * sizeof(floatX) + LANES_BYTES;
    const size_t last = (2 * TERMS * PAIR_TILE + 2 * KEY_TILE<KP>)*sizeof(floatX);
    return LANES_BYTES + (strips > last ? strips : last);
}
template <int KP> constexpr bool gradient_fits(size_t limit, unsigned stages) {
    return gradient_bytes<KP>(stages) + sizeof(GradientShared) <= limit;
}
static_assert(gradient_fits<32>(99 << 10, 1) && gradient_fits<64>(99 << 10, 1));
static_assert(gradient_fits<128>(99 << 10, 1) && gradient_fits<256>(99 << 10, 1));

// ---- pairs ----------------------------------------------------------------------------------------------------------
// Fetches each warp's key columns of q or k, from column `from` on.
template <int KP, typename Part>
__device__ inline void keys_bring(floatX *tile, const floatX *x, const Part &p, unsigned from) {
    constexpr bool WHOLE = KEY_SLICE<KP> == KEY_COLUMNS<KP>;
    constexpr unsigned COLUMNS = WHOLE ? KP : KEY_SLICE<KP>, GROUPS = WHOLE ? 1 : KP / KEY_COLUMNS<KP>;
    for (unsigned h = 0; h < GROUPS; h++) {
        const unsigned first = h * KEY_COLUMNS<KP> + from, left = first < p.K ? p.K - first : 0;
        const auto place = [&](unsigned row, unsigned c) { return row * KEY_STRIDE<KP> + h * KEY_SLICE<KP> + c; };
        if (p.packed)
            tile_fetch<BLOCK, COLUMNS>(tile, place, x + first, p.channels, p.block.rows, left,
                                       computed_here(threadIdx.x));
        else
            tile_copy<COLUMNS>(tile, BLOCK, place, x + first, p.channels, p.block.rows, left);
    }
}

// Computes kk, unless NULL, and qk, a warp's pairs of k k^T and q k^T. tiles: tiles of q and k, whose first slice is in
// flight
template <int KP, typename Part>
__device__ inline void key_pairs(float (*kk)[4], float (*qk)[4], floatX *tiles, const floatX *q, const floatX *k,
                                 const Part &p) {
    floatX *const tq = tiles, *const tk = tiles + KEY_TILE<KP>;
#pragma unroll 1
    for (unsigned from = 0; from < KEY_COLUMNS<KP>; from += KEY_SLICE<KP>) {
        if (from) {
            __syncthreads();
            keys_bring<KP>(tq, q, p, from), keys_bring<KP>(tk, k, p, from);
            fetch_commit();
        }
        fetch_wait<0>();
        __syncthreads();
        for (unsigned c = 0; c < KEY_STRIDE<KP> - 8 && p.pairs; c += 16) {
            const OperandB right = load_b(tk, KEY_STRIDE<KP>, p.pair_column, c);
            if (kk) mma_columns<16>(kk, load_a(tk, KEY_STRIDE<KP>, p.row, c), [&](int) { return right; });
            mma_columns<16>(qk, load_a(tq, KEY_STRIDE<KP>, p.row, c), [&](int) { return right; });
        }
    }
}

// Returns where a lane's pairs of two kinds lie in shared memory between their uses.
template <typename Part> __device__ inline float *lane_pairs(float *memory, const Part &p) {
    const unsigned r = p.row / 16, warp = r * (r + 1) / 2 + p.group;
    return memory + (warp * LANE_PAIRS * LANES + p.lane) * 4;
}
template <typename F> __device__ inline void for_lane_pairs(float *memory, float (*a)[4], float (*b)[4], F f) {
#pragma unroll
    for (unsigned n = 0; n < LANE_PAIRS; n++) f(memory + n * LANES * 4, n % 2 ? b[n / 2] : a[n / 2]);
}
__device__ inline void lane_write(float *memory, const float *value) {
    Pack<float, 4> pack;
    for (unsigned i = 0; i < 4; i++) pack.x[i] = value[i];
    pack_write(memory, pack);
}
__device__ inline void lane_add(const float *memory, float *value) {
    const Pack<float, 4> pack = pack_read<4>(memory);
    for (unsigned i = 0; i < 4; i++) value[i] += pack.x[i];
}

// Turns dP and dA into the pairs' factors of k and q, with decays and lengths. Adds them to the sums over heads.
// across[i][j]: what pair (i, j) adds to the gradients of the log decays between its tokens
template <typename Results, typename Part>
__device__ inline void pairs_of_head(float *across, float *dbeta, Results &r, float *products, float *sums, bool first,
                                     const BlockGates &g, const BlockLengths &length, const Part &p) {
    const unsigned row = p.row + p.lane / 4, column = p.pair_column + p.lane % 4 * 2;
    float query[2], key[2], kk[PAIR_COLUMNS / 8][4] = {}, qk[PAIR_COLUMNS / 8][4] = {};
    const auto for_all = [&](auto f) { // calls f for all pairs of this lane
#pragma unroll
        for (unsigned n = 0; n < PAIR_COLUMNS / 8; n++)
#pragma unroll
            for (unsigned e = 0; e < 4; e++)
                f(row + e / 2 * 8, column + n * 8 + e % 2, e / 2, r.dP[n][e], r.dA[n][e], qk[n][e], kk[n][e]);
    };
#pragma unroll
    for (unsigned e = 0; e < 2; e++)
        query[e] = length.query[row + 8 * e], key[e] = g.beta[row + 8 * e] * length.key[row + 8 * e];
    for_all([&](unsigned i, unsigned j, unsigned, float, float dA, float, float) {
        if (i == j) dbeta[i] = dA;
    });
    for_all([&](unsigned i, unsigned j, unsigned e, float &dP, float &dA, float, float) {
        const float decay = length.key[j] * decay_between(g, i, j); // infinite above the diagonal
        dP = j <= i ? dP * query[e] * decay : 0.0f, dA = j < i ? -dA * key[e] * decay : 0.0f;
    });
    for_lane_pairs(lane_pairs(products, p), kk, qk, lane_add);
    for_all([&](unsigned i, unsigned j, unsigned, float score, float system, float of_q, float of_k) {
        across[i * PAIR_STRIDE + j] = j < i ? score * of_q + system * of_k : 0.0f;
    });
    if (!first) for_lane_pairs(lane_pairs(sums, p), r.dP, r.dA, lane_add);
    for_lane_pairs(lane_pairs(sums, p), r.dP, r.dA, lane_write);
}

// Computes sum[e]: what the pairs of a warp's four rows add to the log decays of tokens 2 lane + e. Pair (i, j) counts
// for tokens with j < token <= i. factor: of a pair by its j, or NULL. columns[e]: sum of column 2 lane + e, without
// factors; or NULL
template <typename Part>
__device__ inline void pairs_across(float (&sum)[2], const float *across, const Part &p, const float *factor = NULL,
                                    float *columns = NULL) {
    constexpr unsigned ROWS = BLOCK / GRADIENT_WARPS;
    const unsigned first = threadIdx.x / LANES * ROWS, t = 2 * p.lane;
    float left[ROWS], until[ROWS]; // per row: this lane's first pair, and the sum of all pairs up to its second
#pragma unroll
    for (unsigned i = 0; i < ROWS; i++) {
        Pack<float, 2> pair = pack_read<2>(across + (first + i) * PAIR_STRIDE + t);
        for (unsigned e = 0; e < 2; e++) {
            if (columns) columns[e] += t + e <= first + i ? pair.x[e] : 0.0f;
            if (factor) pair.x[e] *= factor[t + e];
        }
        left[i] = t < first + i ? pair.x[0] : 0.0f;
        until[i] = left[i] + (t + 1 < first + i ? pair.x[1] : 0.0f);
    }
#pragma unroll
    for (unsigned step = 1; step < LANES; step *= 2)
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) {
            const float before = __shfl_sync(ALL_LANES, until[i], p.lane >= step ? p.lane - step : p.lane);
            if (p.lane >= step) until[i] += before;
        }
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < ROWS; i++) {
        float before = __shfl_sync(ALL_LANES, until[i], p.lane ? p.lane - 1 : 0);
        if (p.lane == 0) before = 0.0f;
        if (t <= first + i) sum[0] += before;
        if (t + 1 <= first + i) sum[1] += before + left[i];
    }
}

// Adds the products of the pairs' sums with q and k to dq and dk. memory: room for pairs and key tiles. SYSTEM: both
// kinds of pairs; else the scores alone
template <int KP, bool SYSTEM, typename Part>
__device__ inline void pair_products(float (*dq)[4], float (*dk)[4], floatX *memory, float *sums, const floatX *q,
                                     const floatX *k, const Part &p) {
    constexpr unsigned N = KEY_SLICE<KP>, S = KEY_STRIDE<KP>;
    floatX *const of_scores = memory, *const of_system = memory + TERMS * PAIR_TILE;
    floatX *const tq = memory + (1 + SYSTEM) * TERMS * PAIR_TILE, *const tk = tq + KEY_TILE<KP>;
    if (p.pairs) {
        float score[PAIR_COLUMNS / 8][4] = {}, system[PAIR_COLUMNS / 8][4] = {};
        for_lane_pairs(lane_pairs(sums, p), score, system, lane_add);
        const unsigned place = p.row * padded<BLOCK> + p.pair_column;
        for_pairs<PAIR_COLUMNS>(score, [&](unsigned i, unsigned j, float a, float b) {
            split_store_two(of_scores, PAIR_TILE, place + i * padded<BLOCK> + j, a, b);
        });
        if (SYSTEM)
            for_pairs<PAIR_COLUMNS>(system, [&](unsigned i, unsigned j, float a, float b) {
                split_store_two(of_system, PAIR_TILE, place + i * padded<BLOCK> + j, a, b);
            });
    }
#pragma unroll
    for (unsigned from = 0; from < KEY_COLUMNS<KP>; from += N) {
        if (from) __syncthreads();
        keys_bring<KP>(tq, q, p, from), keys_bring<KP>(tk, k, p, from);
        fetch_commit();
        fetch_wait<0>();
        __syncthreads();
        float(*const to_q)[4] = dq + from / 8, (*const to_k)[4] = dk + from / 8;
#pragma unroll 1
        for (unsigned j = 0; j < BLOCK && p.states; j += 16) {
            OperandB of_q[N / 16], of_k[N / 16];
#pragma unroll
            for (unsigned n = 0; n < N; n += 16) {
                of_q[n / 16] = load_b_rows(tq, S, j, p.group * N + n);
                of_k[n / 16] = load_b_rows(tk, S, j, p.group * N + n);
            }
            const auto right_q = [&](int n) { return of_q[n / 16]; };
            const auto right_k = [&](int n) { return of_k[n / 16]; };
#pragma unroll
            for (unsigned t = 0; t < TERMS; t++) {
                const floatX *const scores = of_scores + t * PAIR_TILE, *const system = of_system + t * PAIR_TILE;
                if (j >= p.row) {
                    mma_columns<N>(to_k, load_a_columns(scores, padded<BLOCK>, j, p.row), right_q);
                    if (SYSTEM) mma_columns<N>(to_k, load_a_columns(system, padded<BLOCK>, j, p.row), right_k);
                }
                if (j <= p.row) {
                    mma_columns<N>(to_q, load_a(scores, padded<BLOCK>, p.row, j), right_k);
                    if (SYSTEM) mma_columns<N>(to_k, load_a(system, padded<BLOCK>, p.row, j), right_k);
                }
            }
        }
    }
}

// ---- ends -----------------------------------------------------------------------------------------------------------
// Applies decays and lengths to a head's products with states, and saves their dot products with q and k. `added`
// becomes dk.
template <int KP, typename Part>
__device__ inline void states_of_head(GradientResults<KP> &r, GradientShared &shared, const BlockGates &g,
                                      const KeyTwos<KP> &of_q, const KeyTwos<KP> &of_k, const Part &p) {
    constexpr unsigned N = KEY_COLUMNS<KP>;
    float query[2], read[2], added[2];
#pragma unroll
    for (unsigned i = 0; i < 2; i++) {
        const unsigned token = p.row + p.lane / 4 + 8 * i;
        const float decay = decay_to(g, token), key = shared.length.key[token];
        query[i] = shared.length.query[token] * decay, read[i] = -g.beta[token] * key * decay;
        added[i] = key * decay_between(g, BLOCK - 1, token);
    }
    rows_scale<N>(r.dq, query), rows_scale<N>(r.read, read), rows_scale<N>(r.added, added);
    row_dots<KP>(shared.dots[0][p.group], r.dq, of_q, p);
    row_dots<KP>(shared.dots[1][p.group], r.read, of_k, p);
    row_dots<KP>(shared.dots[2][p.group], r.added, of_k, p);
#pragma unroll
    for (unsigned n = 0; n < N / 8; n++)
#pragma unroll
        for (unsigned e = 0; e < 4; e++) r.added[n][e] += r.read[n][e];
    r.overlap = warp_sum(r.overlap);
    if (p.lane == 0) shared.overlaps[threadIdx.x / LANES] = r.overlap;
}

// Adds the sums over the earlier heads to x. Saves the new sums unless this head is the last.
template <int KP, typename Part>
__device__ inline void group_sums(float (*x)[4], float *sums, bool first, bool last, const Part &p) {
    const unsigned packs = (p.K + 7) / 8, column = p.group * KEY_COLUMNS<KP> / 8;
    sums += ((size_t)blockIdx.x * gridDim.y + p.key_head) * packs * BLOCK * 8;
    sums += ((column * ROW_GROUPS + p.row / 16) * LANES + p.lane) * 4;
#pragma unroll
    for (unsigned n = 0; n < KEY_COLUMNS<KP> / 8; n++, sums += ROW_GROUPS * LANES * 4) {
        if (column + n >= packs) continue;
        if (p.packed) {
            if (!first) lane_add(sums, x[n]);
            if (!last) lane_write(sums, x[n]);
        } else {
            for (unsigned e = 0; e < 4 && !first; e++) x[n][e] += sums[e];
            for (unsigned e = 0; e < 4 && !last; e++) sums[e] = x[n][e];
        }
    }
}

// Stores a gradient through the division by the length: dx = (x - key (key . x) / length^2). dots: parts of key . x
template <int KP, typename Part>
__device__ inline void keys_store(floatX *dx, float (*x)[4], const KeyTwos<KP> &keys, const float *inverse,
                                  float factor, const float (*dots)[BLOCK], const Part &p) {
    const unsigned row = p.row + p.lane / 4, column = p.group * KEY_COLUMNS<KP> + p.lane % 4 * 2;
#pragma unroll
    for (unsigned i = 0; i < 2; i++) {
        const unsigned token = row + 8 * i;
        float along = 0.0f;
        for (unsigned h = 0; h < KP / KEY_COLUMNS<KP>; h++) along += dots[h][token];
        along *= inverse[token] * inverse[token] * factor;
        floatX *const to = dx + token * p.channels + column;
#pragma unroll
        for (unsigned n = 0; n < KEY_COLUMNS<KP> / 8; n++) {
            const Two two =
                two_of(x[n][2 * i] - key_of(keys[n][i], 0) * along, x[n][2 * i + 1] - key_of(keys[n][i], 1) * along);
            if (token >= p.block.rows || column + n * 8 >= p.K) continue;
            if (p.packed) {
                *(Two *)(to + n * 8) = two;
            } else {
                to[n * 8] = two.x[0];
                if (column + n * 8 + 1 < p.K) to[n * 8 + 1] = two.x[1];
            }
        }
    }
}

// Computes for a lane's two tokens the sums of reads over the token and later ones, and of adds over earlier tokens.
__device__ inline void reads_and_adds(float (&read)[2], float (&added)[2], const float (&reads)[2],
                                      const float (&adds)[2], unsigned lane) {
    // after: sum over the lanes from this lane on; before: sum over the lanes up to this lane
    float after = reads[0] + reads[1], before = adds[0] + adds[1];
    for (unsigned step = 1; step < LANES; step *= 2) {
        const float right = __shfl_sync(ALL_LANES, after, lane + step < LANES ? lane + step : lane),
                    left = __shfl_sync(ALL_LANES, before, lane >= step ? lane - step : lane);
        if (lane + step < LANES) after += right;
        if (lane >= step) before += left;
    }
    const float lanes_before = __shfl_sync(ALL_LANES, before, lane ? lane - 1 : 0),
                lanes_after = __shfl_sync(ALL_LANES, after, lane + 1 < LANES ? lane + 1 : lane);
    for (unsigned e = 0; e < 2; e++) {
        read[e] = (lane + 1 < LANES ? lanes_after : 0.0f) + reads[1] + (e ? 0.0f : reads[0]);
        added[e] = (lane ? lanes_before : 0.0f) + (e ? adds[0] : 0.0f);
    }
}

// Stores the gates' gradients with one warp, two tokens per lane. A token's log decay has these terms: pairs across the
// token, reads of S by this and later tokens, additions to the next state by earlier tokens, <S, dS>.
template <typename Part>
__device__ inline void gates_store(const DeltaGradient &G, const DeltaCall &d, const GradientShared &shared,
                                   const BlockGates &g, const float *across, const Gate (&gate)[2], size_t head,
                                   const Part &p) {
    const unsigned lane = p.lane;
    float reads[2] = {}, adds[2] = {}, pairs[2] = {}, overlap = 0.0f, sums[2] = {};
    for (unsigned e = 0; e < 2; e++) {
        float dot[3] = {};
        for (unsigned kind = 0; kind < 3; kind++)
            for (unsigned h = 0; h < COLUMN_GROUPS; h++) dot[kind] += shared.dots[kind][h][2 * lane + e];
        reads[e] = dot[0] + dot[1], adds[e] = dot[2];
        for (unsigned w = 0; w < GRADIENT_WARPS; w++) pairs[e] += across[w * BLOCK + 2 * lane + e];
    }
    for (unsigned w = 0; w < GRADIENT_WARPS; w++) overlap += shared.overlaps[w];
    overlap *= decay_to(g, BLOCK - 1);
    float read[2], added[2];
    reads_and_adds(read, added, reads, adds, lane);
    for (unsigned e = 0; e < 2; e++) {
        const unsigned i = 2 * lane + e;
        const float dlog = pairs[e] + read[e] + added[e] + overlap, dinput = -dlog * gate[e].A * gate[e].slope;
        if (i >= p.block.rows) continue;
        const size_t to = (p.block.row + i) * d.stride + head;
        G.db[to] = store(shared.dbeta[i] * gate[e].rest);
        G.da[to] = store(dinput);
        sums[0] += dlog * gate[e].log_decay, sums[1] += dinput;
    }
    for (unsigned s = 0; s < 2; s++) {
        sums[s] = warp_sum(sums[s]);
        if (lane == 0) G.lines[(blockIdx.x * 2 + s) * d.HV + head] = sums[s];
    }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------
template <bool PACKED>
__device__ inline GradientPart<PACKED> gradient_part(const DeltaCall &d, const SpanBlocks &blocks, unsigned groups) {
    const unsigned warp = threadIdx.x / LANES, line = warp / COLUMN_GROUPS;
    GradientPart<PACKED> p;
    p.block = delta_block(blocks, span_of(blocks, blockIdx.x), blockIdx.x);
    p.HV = (unsigned)d.HV, p.K = (unsigned)d.K, p.V = (unsigned)d.V, p.channels = (unsigned)d.channels;
    p.key_head = blockIdx.y, p.group_heads = (unsigned)(d.HV / d.HK);
    p.lane = threadIdx.x % LANES, p.row = line * 16;
    p.group = (warp + 2 * line) % COLUMN_GROUPS; // spreads the pairs over all schedulers
    p.pair_column = p.group * PAIR_COLUMNS, p.pairs = p.pair_column <= p.row;
    p.states = p.group < groups;
    return p;
}

// Iterates over the strips of all heads, in order
struct Strips {
    floatX *memory;
    unsigned head, end, v, pass; // next strip to fetch
    unsigned stage;              // buffer of the current strip
};

template <int KP, typename Gradient, typename Part>
__device__ inline void strips_bring(Strips &s, unsigned to, GradientShared *shared, const Gradient &G, const Part &p) {
    if (s.head < s.end) {
        strip_bring<KP>(s.memory + to * Gradient::template TILES<KP>, shared->gates + s.head % 2,
                        s.v == 0 && s.pass == 0, G, p, s.head, s.v);
        s.v += STRIP<KP>;
        if (s.v >= p.V) s.v = 0, s.pass = APART<KP> ? 1 - s.pass : 0, s.head += s.pass == 0;
    }
    fetch_commit();
}
// Returns the next strip, and fetches one more.
template <int KP, typename Gradient, typename Part>
__device__ inline floatX *strips_take(Strips &s, GradientShared *shared, const Gradient &G, const Part &p) {
    s.stage = G.stages - 1 - s.stage;
    fetch_wait<0>();
    __syncthreads();
    strips_bring<KP>(s, G.stages - 1 - s.stage, shared, G, p);
    if (G.stages == 1) {
        fetch_wait<0>();
        __syncthreads();
    }
    return s.memory + s.stage * Gradient::template TILES<KP>;
}

// Parts of shared memory: sums of the pairs over heads; products of q and k; strips
struct GradientMemory {
    float *sums, *products;
    floatX *strips;
    GradientShared *shared;
};

// Computes the products of q and k, and fetches the first strip. SYSTEM: also lengths and products of k and k, which
// are 0 without it
template <int KP, bool SYSTEM, typename Gradient, typename Part>
__device__ inline void keys_begin(const GradientMemory &m, Strips &next, const floatX *q, const floatX *k,
                                  const Gradient &G, const Part &p) {
    floatX *const tiles = m.strips + (G.stages - 1) * Gradient::template TILES<KP>;
    float kk[PAIR_COLUMNS / 8][4] = {}, qk[PAIR_COLUMNS / 8][4] = {};
    if constexpr (SYSTEM) floats_fetch(&m.shared->length, G.lengths + blockIdx.x * gridDim.y + p.key_head);
    keys_bring<KP>(tiles, q, p, 0), keys_bring<KP>(tiles + KEY_TILE<KP>, k, p, 0);
    fetch_commit();
    if (G.stages == 2) strips_bring<KP>(next, 0, m.shared, G, p);
    key_pairs<KP>(SYSTEM ? kk : NULL, qk, tiles, q, k, p);
    __syncthreads(); // the tiles may reach into the products' place
    if (p.pairs) for_lane_pairs(lane_pairs(m.products, p), kk, qk, lane_write);
}

// Adds the pairs' part to dq and dk of all heads. Stores them in the key head's columns of q and of k in dx.
template <int KP, typename Part>
__device__ inline void keys_end(floatX *dx, float (*dq)[4], float (*dk)[4], const GradientMemory &m, const floatX *q,
                                const floatX *k, const Part &p) {
    KeyTwos<KP> of_q, of_k;
    __syncthreads();
    pair_products<KP, true>(dq, dk, m.strips, m.sums, q, k, p);
    keys_load<KP>(of_q, q, p), keys_load<KP>(of_k, k, p);
    row_dots<KP>(m.shared->dots[0][p.group], dq, of_q, p);
    row_dots<KP>(m.shared->dots[1][p.group], dk, of_k, p);
    __syncthreads();
    keys_store<KP>(dx, dq, of_q, m.shared->length.query, (float)p.K, m.shared->dots[0], p);
    keys_store<KP>(dx + gridDim.y * p.K, dk, of_k, m.shared->length.key, 1.0f, m.shared->dots[1], p);
}

template <int KP, bool PACKED>
__global__ void __launch_bounds__(GRADIENT_THREADS)
    delta_gradient_kernel(DeltaGradient G, DeltaCall d, SpanBlocks blocks) {
    DYNAMIC_SHARED(floatX, memory);
    SHARED(GradientShared, shared, 1);
    floatX *const strips = memory + LANES_BYTES / sizeof(floatX);
    const GradientMemory m = {(float *)memory, (float *)(strips + G.stages * STRIP_TILES<KP>), strips, shared};
    const GradientPart<PACKED> p = gradient_part<PACKED>(d, blocks, KP / KEY_COLUMNS<KP>);
    const floatX *const q = queries_of(d, p.block.row, p.key_head), *const k = keys_of(d, p.block.row, p.key_head);
    const auto dx = [&] { return G.dx + (size_t)computed_here((unsigned)p.block.row) * d.channels; };
    const unsigned first = p.key_head * p.group_heads, end = first + p.group_heads;
    const bool gates_warp = p.row == 0 && p.group == COLUMN_GROUPS - 1; // a warp without pairs
    Strips next = {strips, first, end, 0, 0, G.stages - 1};
    keys_begin<KP, true>(m, next, q, k, G, p);
    GradientResults<KP> r;
    for (unsigned head = first; head < end; head++) {
        const BlockGates &g = shared->gates[head % 2];
        floatX *strip = NULL;
        r = {};
        for (unsigned v = 0; v < p.V; v += STRIP<KP>) {
            strip = strips_take<KP>(next, shared, G, p);
            strip_products<KP, true, !APART<KP>>(r, strip, p);
            strip_values<KP>(dx() + 2 * d.HK * d.K + head * p.V + v, strip, g.beta, p.V - v, p);
        }
        GradientPart<PACKED> here = p;
        here.lane = computed_here(p.lane);
        KeyTwos<KP> of_q, of_k;
        if (!APART<KP>) keys_load<KP>(of_q, q, here); // loads early, to hide the latency
        __syncthreads();                              // from here on the strip holds the pairs' products
        float across[2];
        Gate gate[2] = {};
        if (p.pairs)
            pairs_of_head((float *)strip, shared->dbeta, r, m.products, m.sums, head == first, g, shared->length, here);
        for (unsigned e = 0; e < 2 && gates_warp; e++)
            if (2 * here.lane + e < p.block.rows) gate[e] = gate_of(d, p.block.row + 2 * here.lane + e, head);
        __syncthreads();
        if (!APART<KP>) keys_load<KP>(of_k, k, here);
        pairs_across(across, (const float *)strip, here);
        if constexpr (APART<KP>) {
            for (unsigned v = 0; v < p.V; v += STRIP<KP>) {
                strip = strips_take<KP>(next, shared, G, p);
                strip_products<KP, false, true>(r, strip, p);
            }
            keys_load<KP>(of_q, q, here), keys_load<KP>(of_k, k, here);
            __syncthreads();
        }
        float *const totals = (float *)strip + BLOCK * PAIR_STRIDE; // follows the pairs' products
        pack_write(totals + threadIdx.x * 2, Pack<float, 2>{{across[0], across[1]}});
        states_of_head<KP>(r, *shared, g, of_q, of_k, here);
        group_sums<KP>(r.dq, G.dq, head == first, head + 1 == end, here);
        group_sums<KP>(r.added, G.dk, head == first, head + 1 == end, here);
        __syncthreads();
        if (gates_warp) gates_store(G, d, *shared, g, totals, gate, head, here);
    }
    keys_end<KP>(dx() + p.key_head * p.K, r.dq, r.added, m, q, k, p);
}

template <int KP, bool PACKED>
static void delta_gradient_of(DeltaGradient gradient, const DeltaCall &d, const SpanBlocks &blocks) {
    gradient.stages = gradient_fits<KP>(walk_limit(), 2) ? 2 : 1;
    LAUNCH((delta_gradient_kernel<KP, PACKED>), dim3(blocks.first[blocks.count], (unsigned)d.HK), GRADIENT_THREADS,
           gradient_bytes<KP>(gradient.stages))
    (gradient, d, blocks);
}

static void delta_gradient(const DeltaGradient &gradient, const DeltaCall &d, const SpanBlocks &blocks) {
    const bool packed = gradient.packed && d.packed &&
                        all_aligned(gradient.dx, gradient.states, gradient.back, gradient.N, gradient.dR) &&
                        all_aligned(gradient.dq, gradient.dk);
    if (packed && d.K <= 64)
        delta_gradient_of<64, true>(gradient, d, blocks);
    else if (packed && d.K <= 128)
        delta_gradient_of<128, true>(gradient, d, blocks);
    else if (packed)
        delta_gradient_of<256, true>(gradient, d, blocks);
    else if (d.K <= 32)
        delta_gradient_of<32, false>(gradient, d, blocks);
    else if (d.K <= 128)
        delta_gradient_of<128, false>(gradient, d, blocks);
    else
        delta_gradient_of<256, false>(gradient, d, blocks);
}

#endif
