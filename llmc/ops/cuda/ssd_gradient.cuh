/*
Gradients of Mamba-2's rule in op set "cuda", in the notation of ssd_walk.cuh. The walks have saved the state S before
each block and the gradient dS of the state after it, both split, and stored dv. Each thread block takes BLOCK tokens of
one key head, and its value heads one after another. With dP = dout v^T,

    dq = exp(c) S dout + (dP decay step) k              dk = (dP decay step)^T q + decay(L) step dS v
    dstep_j = sum_i dP_ij decay(i, j) q_i . k_j + decay(L, j) k_j . dS v_j - exp(A_log) dlog_j
    dD = sum_i dP_ii

dlog, the gradient of a token's log decay, is a sum of terms as in delta_gradient.cuh. Over the heads of a group, dq and
dk are summed in registers, pairs in shared memory. Pairs are multiplied by q and k once. Strips of V are those of
delta_strips.cuh, with v in place of N and dR.
*/
#ifndef LLMC_CUDA_SSD_GRADIENT_CUH
#define LLMC_CUDA_SSD_GRADIENT_CUH
#include "delta_gradient.cuh"
#include "ssd_walk.cuh"

// ---- shared memory --------------------------------------------------------------------------------------------------
// Tiles of a strip: dout, v, the terms of S and of dS
template <int KP> constexpr unsigned SSD_STRIP = 2 * TOKEN_STRIP<KP> + 2 * TERMS *STATE_STRIP<KP>;

struct SsdGradient {
    floatX *dx, *ddt;
    float *lines;                // [blocks, 3, HV]: parts of dA_log, dD, ddt_bias
    float *steps;                // [blocks, HV, BLOCK, 2]: dlog and dstep from the first columns of q and k
    const floatX *states, *back; // [blocks, HV, TERMS, K, V]: S, dS
    const BlockGates *gates;     // [blocks, HV]
    const floatX *values, *dout; // values: v of the call's first row
    bool packed;                 // 1: rows of dout are whole packs
    unsigned stages;             // as in DeltaGradient
    unsigned first, K;           // of K columns of q and k, a launch takes WALK_MOST_K from `first` on
    template <int KP> static constexpr unsigned TILES = SSD_STRIP<KP>;
};

struct SsdShared : GradientShared {
    float totals[GRADIENT_WARPS][LANES * 4]; // sums of pairs: across a lane's two tokens, and of their columns
};

// Shared memory: sums of pairs and products of q and k; strips, in the beginning tiles of q and k, in the end these and
// the pairs
template <int KP> constexpr size_t ssd_gradient_bytes(unsigned stages) {
    const size_t strips = stages * SSD_STRIP<KP>, begin = (stages - 1) * SSD_STRIP<KP> + 2 * KEY_TILE<KP>;
    const size_t end = TERMS * PAIR_TILE + 2 * KEY_TILE<KP>, most = strips > begin ? strips : begin;
    return LANES_BYTES + (most > end ? most : end) * sizeof(floatX);
}
template <int KP> constexpr bool ssd_gradient_fits(size_t limit, unsigned stages) {
    return ssd_gradient_bytes<KP>(stages) + sizeof(SsdShared) <= limit;
}
static_assert(ssd_gradient_fits<64>(99 << 10, 1) && ssd_gradient_fits<128>(99 << 10, 1));
static_assert(SSD_STRIP<64> * sizeof(floatX) >= BLOCK * PAIR_STRIDE * sizeof(float)); // room for a head's pairs

// ---- a head's strips ------------------------------------------------------------------------------------------------
// Fetches a head's strip from column v on; with_gates: also its gates
template <int KP, typename Part>
__device__ inline void strip_bring(floatX *strip, BlockGates *gates, bool with_gates, const SsdGradient &G,
                                   const Part &p, unsigned head, unsigned v) {
    constexpr unsigned C = STRIP<KP>, STATES = TERMS * STATE_STRIP<KP>;
    floatX *const values = strip + TOKEN_STRIP<KP>, *const S = values + TOKEN_STRIP<KP>;
    const size_t place = (size_t)blockIdx.x * p.HV + head, size = G.K * p.V;
    const size_t states = place * TERMS * size + G.first * p.V + v;
    const floatX *const from = G.values + p.block.row * p.channels + head * p.V + v;
    const floatX *const dout = G.dout + (p.block.row * p.HV + head) * p.V + v;
    const unsigned left = p.V - v, rows = p.block.rows;
    const auto at = [](unsigned row, unsigned column) { return strip_place<C>(row, column); };
    if (p.packed) {
        const unsigned thread = computed_here(threadIdx.x);
        tile_fetch<BLOCK, C>(strip, at, dout, p.HV * p.V, rows, left, thread);
        tile_fetch<BLOCK, C>(values, at, from, p.channels, rows, left, thread);
#pragma unroll
        for (unsigned t = 0; t < TERMS; t++) {
            const size_t term = states + t * size;
            tile_fetch<KP, C>(S + t * STATE_STRIP<KP>, at, G.states + term, p.V, p.K, left, thread);
            tile_fetch<KP, C>(S + STATES + t * STATE_STRIP<KP>, at, G.back + term, p.V, p.K, left, thread);
        }
    } else {
        tile_copy<C>(strip, BLOCK, at, dout, p.HV * p.V, rows, left);
        tile_copy<C>(values, BLOCK, at, from, p.channels, rows, left);
#pragma unroll 1
        for (unsigned i = 0; i < 2 * TERMS; i++) // terms of both states
            tile_copy<C>(S + i * STATE_STRIP<KP>, KP, at, (i < TERMS ? G.states : G.back) + states + i % TERMS * size,
                         p.V, p.K, left);
    }
    if (with_gates) floats_fetch(gates, G.gates + place);
}

// A warp's results of a head: pairs dout v^T; products S dout and dS v
template <int KP> struct SsdResults {
    float dP[PAIR_COLUMNS / 8][4], read[KEY_COLUMNS<KP> / 8][4], added[KEY_COLUMNS<KP> / 8][4];
    float overlap;
};

// Adds a strip's products.
template <int KP, typename Part>
__device__ inline void ssd_strip_products(SsdResults<KP> &r, const floatX *strip, const Part &p) {
    constexpr unsigned C = STRIP<KP>, N = KEY_COLUMNS<KP>;
    const floatX *const values = strip + TOKEN_STRIP<KP>, *const S = values + TOKEN_STRIP<KP>;
    const floatX *const dS = S + TERMS * STATE_STRIP<KP>;
    strip_overlap<KP>(r.overlap, S, dS, p);
#pragma unroll
    for (unsigned v = 0; v < C; v += 16) {
        const OperandA dout = strip_a<C>(strip, p.row, v), of_v = strip_a<C>(values, p.row, v);
        if (p.pairs) {
            const OperandB right = strip_b<C>(values, p.pair_column, v);
            mma_columns<16>(r.dP, dout, [&](int) { return right; });
        }
#pragma unroll
        for (unsigned n = 0; n < N; n += 16) {
            OperandB of_S[TERMS], of_dS[TERMS];
            strip_terms<C>(of_S, S, KP, p.group * N + n, v), strip_terms<C>(of_dS, dS, KP, p.group * N + n, v);
#pragma unroll
            for (unsigned t = 0; t < TERMS; t++) {
                mma_columns<16>(r.read + n / 8, dout, [&](int) { return of_S[t]; });
                mma_columns<16>(r.added + n / 8, of_v, [&](int) { return of_dS[t]; });
            }
        }
    }
}

// ---- sums over a group's heads --------------------------------------------------------------------------------------
template <int KP> struct SsdSums { float dq[KEY_COLUMNS<KP> / 8][4], dk[KEY_COLUMNS<KP> / 8][4]; };

// Adds a head's pairs to their sums. lanes: a lane's sums and products of q and k. across[i][j]: what pair (i, j) adds
// to the gradient of step j
template <typename Part>
__device__ inline void ssd_pairs(float *across, float *dskip, float *lanes, float (*dP)[4], const BlockGates &g,
                                 const Part &p) {
    float scores[PAIR_COLUMNS / 8][4] = {}, qk[PAIR_COLUMNS / 8][4] = {};
    for_lane_pairs(lanes, scores, qk, lane_add);
    const auto add = [&](unsigned n, unsigned e, unsigned i, unsigned j, const float *decay, const float *step) {
        Pack<float, 2> both;
#pragma unroll
        for (unsigned c = 0; c < 2; c++) {
            const float pair = dP[n][2 * e + c] * decay[c];
            if (i == j + c) dskip[i] = dP[n][2 * e + c];
            both.x[c] = pair * qk[n][2 * e + c];
            scores[n][2 * e + c] += pair * step[c];
        }
        pack_write(across + i * PAIR_STRIDE + j, both);
    };
    for_decays<PAIR_COLUMNS>(g, p.row, p.pair_column, p.lane, add);
    for_lane_pairs(lanes, scores, qk, lane_write);
}

// Applies decays and steps to a head's products with states, adds them to the sums, and saves their dot products.
template <int KP, typename Part>
__device__ inline void ssd_states(SsdSums<KP> &sums, SsdResults<KP> &r, SsdShared &shared, const BlockGates &g,
                                  const KeyTwos<KP> &of_q, const KeyTwos<KP> &of_k, const Part &p) {
    constexpr unsigned N = KEY_COLUMNS<KP>;
    float read[2], added[2], step[2];
#pragma unroll
    for (unsigned i = 0; i < 2; i++) {
        const unsigned token = p.row + p.lane / 4 + 8 * i;
        read[i] = decay_to(g, token), added[i] = decay_between(g, BLOCK - 1, token), step[i] = g.beta[token];
    }
    rows_scale<N>(r.read, read), rows_scale<N>(r.added, added);
    row_dots<KP>(shared.dots[0][p.group], r.read, of_q, p);
    row_dots<KP>(shared.dots[1][p.group], r.added, of_k, p);
#pragma unroll
    for (unsigned n = 0; n < N / 8; n++)
#pragma unroll
        for (unsigned e = 0; e < 4; e++) sums.dq[n][e] += r.read[n][e], sums.dk[n][e] += step[e / 2] * r.added[n][e];
    r.overlap = warp_sum(r.overlap);
    if (p.lane == 0) shared.overlaps[threadIdx.x / LANES] = r.overlap;
}

// Stores the gradients of a head's steps with one warp, two tokens per lane. A step's slope is 1 - exp(-step), and 0 at
// a bound.
template <typename Part>
__device__ inline void ssd_steps_store(const SsdGradient &G, const DeltaCall &d, const SsdShared &shared,
                                       const BlockGates &g, float A_log, size_t head, const Part &p) {
    float reads[2] = {}, adds[2] = {}, pairs[2] = {}, dstep[2] = {}, overlap = 0.0f, sums[3] = {}, read[2], added[2];
    for (unsigned e = 0; e < 2; e++) {
        const unsigned i = 2 * p.lane + e;
        for (unsigned h = 0; h < COLUMN_GROUPS; h++) reads[e] += shared.dots[0][h][i], dstep[e] += shared.dots[1][h][i];
        adds[e] = dstep[e] * g.beta[i];
        for (unsigned w = 0; w < GRADIENT_WARPS; w++) {
            pairs[e] += shared.totals[w][p.lane * 4 + e];
            dstep[e] += shared.totals[w][p.lane * 4 + 2 + e];
        }
    }
    for (unsigned w = 0; w < GRADIENT_WARPS; w++) overlap += shared.overlaps[w];
    overlap *= decay_to(g, BLOCK - 1);
    const float A = expf(A_log);
    reads_and_adds(read, added, reads, adds, p.lane);
    for (unsigned e = 0; e < 2; e++) {
        const unsigned i = 2 * p.lane + e;
        if (i >= p.block.rows) continue;
        float dlog = pairs[e] + read[e] + added[e] + overlap;
        float *const so_far = G.steps + ((blockIdx.x * d.HV + head) * BLOCK + i) * 2;
        if (G.first) dlog += so_far[0], dstep[e] += so_far[1];
        if (G.first + p.K < G.K) so_far[0] = dlog, so_far[1] = dstep[e];
        const float step = g.beta[i], slope = step == d.least || step == d.most ? 0.0f : -expm1f(-step);
        const float ddt = (dstep[e] - A * dlog) * slope;
        G.ddt[(p.block.row + i) * d.stride + head] = store(ddt);
        sums[0] += -dlog * fminf(A * step, 1e5f), sums[1] += shared.dbeta[i], sums[2] += ddt;
    }
    for (unsigned s = 0; s < 3; s++) {
        sums[s] = warp_sum(sums[s]);
        if (p.lane == 0) G.lines[(blockIdx.x * 3 + s) * d.HV + head] = sums[s];
    }
}

// Stores a warp's columns of the gradient of q or k.
template <int KP, typename Part> __device__ inline void ssd_keys_store(floatX *dx, float (*x)[4], const Part &p) {
    for_pairs<KEY_COLUMNS<KP>>(x, [&](unsigned i, unsigned c, float a, float b) {
        const unsigned token = p.row + i, column = p.group * KEY_COLUMNS<KP> + c;
        if (token < p.block.rows && column < p.K)
            two_store(dx + token * p.channels + column, two_of(a, b), p.K - column, p.packed);
    });
}

// ---- the kernel -----------------------------------------------------------------------------------------------------
template <int KP, bool PACKED>
__global__ void __launch_bounds__(GRADIENT_THREADS) ssd_gradient_kernel(SsdGradient G, DeltaCall d, SpanBlocks blocks) {
    DYNAMIC_SHARED(floatX, memory);
    SHARED(SsdShared, shared, 1);
    const GradientMemory m = {(float *)memory, (float *)memory, memory + LANES_BYTES / sizeof(floatX), shared};
    GradientPart<PACKED> p = gradient_part<PACKED>(d, blocks, KP / KEY_COLUMNS<KP>);
    p.K = p.K - G.first < KP ? p.K - G.first : KP;
    const floatX *const q = queries_of<true>(d, p.block.row, p.key_head) + G.first;
    const floatX *const k = keys_of<true>(d, p.block.row, p.key_head) + G.first;
    const unsigned first = p.key_head * p.group_heads, end = first + p.group_heads;
    const bool steps_warp = p.row == 0 && p.group == COLUMN_GROUPS - 1; // a warp without pairs
    Strips next = {m.strips, first, end, 0, 0, G.stages - 1};
    SsdSums<KP> sums = {};
    keys_begin<KP, false>(m, next, q, k, G, p);
    for (unsigned head = first; head < end; head++) {
        const BlockGates &g = shared->gates[head % 2];
        SsdResults<KP> r = {};
        floatX *strip = NULL;
        for (unsigned v = 0; v < p.V; v += STRIP<KP>) {
            strip = strips_take<KP>(next, shared, G, p);
            ssd_strip_products<KP>(r, strip, p);
        }
        GradientPart<PACKED> here = p;
        here.lane = computed_here(p.lane);
        KeyTwos<KP> of_q, of_k;
        __syncthreads(); // from here on the strip holds the pairs
        if (p.pairs) ssd_pairs((float *)strip, shared->dbeta, lane_pairs(m.sums, here), r.dP, g, here);
        const float A_log = load(d.A_log[head]); // loads early, to hide the latency
        __syncthreads();
        keys_load<KP>(of_q, q, here), keys_load<KP>(of_k, k, here);
        float total[2], column[2] = {};
        pairs_across(total, (float *)strip, here, g.beta, column);
        pack_write(shared->totals[threadIdx.x / LANES] + p.lane * 4,
                   Pack<float, 4>{{total[0], total[1], column[0], column[1]}});
        ssd_states<KP>(sums, r, *shared, g, of_q, of_k, here);
        __syncthreads();
        if (steps_warp) ssd_steps_store(G, d, *shared, g, A_log, head, here);
    }
    __syncthreads(); // the pairs are read
    pair_products<KP, false>(sums.dq, sums.dk, m.strips, m.sums, q, k, p);
    ssd_keys_store<KP>(G.dx + (q - d.x), sums.dq, p);
    ssd_keys_store<KP>(G.dx + (k - d.x), sums.dk, p);
}

template <int KP, bool PACKED>
static void ssd_gradient_of(SsdGradient gradient, const DeltaCall &d, const SpanBlocks &blocks) {
    gradient.stages = ssd_gradient_fits<KP>(walk_limit(), 2) ? 2 : 1, gradient.K = (unsigned)d.K;
    for (gradient.first = 0; gradient.first < d.K; gradient.first += KP)
        LAUNCH((ssd_gradient_kernel<KP, PACKED>), dim3(blocks.first[blocks.count], (unsigned)d.HK), GRADIENT_THREADS,
               ssd_gradient_bytes<KP>(gradient.stages))
    (gradient, d, blocks);
}

static void ssd_gradient(const SsdGradient &gradient, const DeltaCall &d, const SpanBlocks &blocks) {
    const bool packed =
        gradient.packed && d.packed && all_aligned(gradient.dx, gradient.states, gradient.back, gradient.dout);
    if (packed && d.K <= 64)
        ssd_gradient_of<64, true>(gradient, d, blocks);
    else if (packed)
        ssd_gradient_of<128, true>(gradient, d, blocks);
    else
        ssd_gradient_of<128, false>(gradient, d, blocks);
}

#endif
