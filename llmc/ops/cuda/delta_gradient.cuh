/*
Gradients of the gated delta rule in op set "cuda". The walks have saved the state S before each block, the gradient dS
of the state after it, and N and dR of each token (delta_blocks.cuh). Each thread block takes BLOCK tokens of one key
head and its value heads one after the other. With

    dP_ij = dout_i . N_j for j <= i      dA_ij = -dR_i . N_j for j < i      dv = beta dR

and the gradients of q and k divided by their lengths

    dq_i = exp(c_i) S dout_i + sum_j dP_ij decay(i, j) k_j
    dk_j = sum_i dP_ij decay(i, j) q_i + sum_i (dA_ij beta_i decay(i, j) + dA_ji beta_j decay(j, i)) k_i
           - beta_j exp(c_j) S dR_j + decay(L, j) dS N_j

beta_i dbeta_i is dR_i . N_i. The gradient of a token's log decay is the sum of all terms with it in their decay. They
are dot products of known values: pairs i, j with j before it and i not, reads of S from it on, additions to the next
state before it, and exp(c_L) <S, dS>. No two of these cancel, however strong a decay is.
*/
#ifndef LLMC_CUDA_DELTA_GRADIENT_CUH
#define LLMC_CUDA_DELTA_GRADIENT_CUH
#include "delta_tokens.cuh"

struct DeltaGradient {
    floatX *dx, *db, *da;
    float *lines;                // [blocks, 2, HV]: parts of dA_log, ddt_bias
    float *dq, *dk;              // [blocks, HK, BLOCK, K]: sums over the value heads of a group so far
    const floatX *states, *back; // [blocks, HV, TERMS, K, V]: S, dS
    const floatX *N, *dR;        // [blocks, HV, TERMS, BLOCK, V]
    const BlockGates *gates;
    const BlockLengths *lengths;
    const floatX *dout;
    bool packed; // rows of dout are whole packs
};

// Warps of a block: 16 rows each; above 128 columns of K two warps share rows, half of the columns each
template <int KP> constexpr int KEY_COLUMNS = KP > 128 ? KP / 2 : KP;
template <int KP> constexpr unsigned GRADIENT_THREADS = DELTA_THREADS_OF_BLOCK *(KP / KEY_COLUMNS<KP>);

constexpr int STRIP = 32; // columns of V in shared memory at once
constexpr unsigned STRIP_TILE = BLOCK * padded<STRIP>, PAIR_TILE = BLOCK * padded<BLOCK>;
constexpr unsigned PAIR_TILES = 2 * TERMS * PAIR_TILE;

template <int KP> constexpr size_t gradient_bytes() {
    constexpr size_t states = (1 + TERMS) * STRIP_TILE + TERMS * KP * padded<STRIP>, slices = SLICE_TILES;
    return (PAIR_TILES + (states > slices ? states : slices)) * sizeof(floatX);
}

// Returns a number whose terms are `apart` elements from each other.
__device__ inline float joined(const floatX *x, size_t apart) {
    float sum = 0.0f;
    for (unsigned t = 0; t < TERMS; t++) sum += load(x[t * apart]);
    return sum;
}

// Splits value(token, column) of a block's tokens into a strip's tiles; zeros beyond `rows` and `columns`.
template <unsigned THREADS, typename Value>
__device__ inline void strip_of_tokens(floatX *tiles, unsigned rows, size_t columns, Value value) {
    for (unsigned i = threadIdx.x; i < BLOCK * STRIP; i += THREADS) {
        const unsigned row = i / STRIP, c = i % STRIP;
        split_store(tiles, STRIP_TILE, row * padded<STRIP> + c, row < rows && c < columns ? value(row, c) : 0.0f);
    }
}
template <int KP, unsigned THREADS, typename Value>
__device__ inline void strip_of_state(floatX *tiles, size_t K, size_t columns, Value value) {
    for (unsigned i = threadIdx.x; i < KP * STRIP; i += THREADS) {
        const unsigned row = i / STRIP, c = i % STRIP;
        split_store(tiles, KP * padded<STRIP>, row * padded<STRIP> + c, row < K && c < columns ? value(row, c) : 0.0f);
    }
}

// c[16][N] += a[rows, STRIP] b[N, STRIP]^T, both split; EXACT: a is one tile
template <int N, bool EXACT>
__device__ inline void strip_product(float (*c)[4], const floatX *a, unsigned row, const floatX *b, unsigned b_size) {
#pragma unroll
    for (int v = 0; v < STRIP; v += 16) {
        const auto right = [&](int n, unsigned term) { return load_b(b + term * b_size, padded<STRIP>, n, v); };
        if constexpr (EXACT) {
            split_product<N>(c, load_a(a, padded<STRIP>, row, v), right);
        } else {
            SplitA left;
            for (unsigned t = 0; t < TERMS; t++) left.term[t] = load_a(a + t * STRIP_TILE, padded<STRIP>, row, v);
            split_product<N>(c, left, right);
        }
    }
}

// dots[row] = sums of a lane's two rows over the lanes that share them
__device__ inline void row_dots(float *dots, unsigned row, float (&sum)[2]) {
    const unsigned lane = threadIdx.x % LANES;
    for (unsigned i = 0; i < 2; i++) {
        sum[i] = quad_sum(sum[i]);
        if (lane % 4 == 0) dots[row + lane / 4 + 8 * i] = sum[i];
    }
}

template <int KP>
__global__ void __launch_bounds__(GRADIENT_THREADS<KP>)
    delta_gradient_kernel(DeltaGradient G, DeltaCall d, SpanBlocks blocks) {
    constexpr int N = KEY_COLUMNS<KP>;
    constexpr unsigned THREADS = GRADIENT_THREADS<KP>, HALVES = KP / N;
    DYNAMIC_SHARED(floatX, memory);
    SHARED(BlockGates, g, 1);
    SHARED(float, passed, BLOCK);            // for each token's log decay: terms of pairs across it within the block
    SHARED(float, dots, 4 * HALVES * BLOCK); // four kinds of dots of rows
    SHARED(float, dbeta, BLOCK);             // times beta
    SHARED(float, overlaps, THREADS / LANES);
    floatX *const of_scores = memory, *const of_system = memory + TERMS * PAIR_TILE, *const work = memory + PAIR_TILES;
    floatX *const work_2 = work + STRIP_TILE, *const work_3 = work + (1 + TERMS) * STRIP_TILE;
    const unsigned span = span_of(blocks, blockIdx.x), lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const unsigned row = warp * 16 % BLOCK, half = warp * 16 / BLOCK, key_column = half * N;
    const DeltaBlock block = delta_block(blocks, span, blockIdx.x);
    const size_t key_head = blockIdx.y, group = d.HV / d.HK, K = d.K, V = d.V;
    const BlockLengths *const length = G.lengths + blockIdx.x * d.HK + key_head;
    const floatX *const q = queries_of(d, block.row, key_head), *const k = keys_of(d, block.row, key_head);
    // element of a row of q or k at a result's place
    const auto at = [&](const floatX *x, unsigned i, unsigned column) {
        return row + i < block.rows && key_column + column < K ? load(x[(row + i) * d.channels + key_column + column])
                                                               : 0.0f;
    };
    for (size_t head = key_head * group; head < (key_head + 1) * group; head++) {
        const size_t place = blockIdx.x * d.HV + head;
        const floatX *const S = G.states + place * TERMS * K * V, *const dS = G.back + place * TERMS * K * V;
        const auto token = [&](const floatX *x, unsigned i, size_t c) {
            return joined(x + (place * TERMS * BLOCK + i) * V + c, BLOCK * V);
        };
        const floatX *const dout = G.dout + (block.row * d.HV + head) * V;
        __syncthreads();
        for (unsigned i = threadIdx.x; i < BLOCK; i += THREADS) {
            g->high[i] = G.gates[place].high[i], g->low[i] = G.gates[place].low[i];
            g->beta[i] = G.gates[place].beta[i];
        }
        { // 1. dP, dA with the decays and lengths beside them; dv
            float kk[BLOCK / 8][4] = {}, qk[BLOCK / 8][4] = {}, dP[BLOCK / 8][4] = {}, dA[BLOCK / 8][4] = {};
            block_pairs<THREADS>(kk, qk, NULL, work, d, block, key_head);
            floatX *const tN = memory, *const tdR = memory + TERMS * STRIP_TILE; // later the pairs'
            for (size_t v = 0; v < V; v += STRIP) {
                __syncthreads();
                rows_fetch<STRIP, THREADS>(work, dout + v, d.HV * V, block.rows, V - v, G.packed);
                fetch_commit();
                strip_of_tokens<THREADS>(tN, block.rows, V - v,
                                         [&](unsigned i, size_t c) { return token(G.N, i, v + c); });
                strip_of_tokens<THREADS>(tdR, block.rows, V - v, [&](unsigned i, size_t c) {
                    const float dR = token(G.dR, i, v + c);
                    G.dx[(block.row + i) * d.channels + 2 * d.HK * K + head * V + v + c] = store(g->beta[i] * dR);
                    return dR;
                });
                fetch_wait<0>();
                __syncthreads();
                strip_product<BLOCK, true>(dP, work, row, tN, STRIP_TILE);
                strip_product<BLOCK, false>(dA, tdR, row, tN, STRIP_TILE);
            }
            __syncthreads();
            float *const pairs = (float *)work;
#pragma unroll
            for (unsigned n = 0; n < BLOCK / 8; n++)
#pragma unroll
                for (unsigned e = 0; e < 4; e++) {
                    const unsigned i = row + lane / 4 + e / 2 * 8, j = n * 8 + lane % 4 * 2 + e % 2;
                    const float decay = j <= i ? length->key[j] * decay_between(*g, i, j) : 0.0f;
                    const float score = j <= i ? dP[n][e] * length->query[i] * decay : 0.0f;
                    const float system = j < i ? -dA[n][e] * g->beta[i] * length->key[i] * decay : 0.0f;
                    if (half) continue;
                    if (i == j) dbeta[i] = dA[n][e];
                    split_store(of_scores, PAIR_TILE, i * padded<BLOCK> + j, score);
                    split_store(of_system, PAIR_TILE, i * padded<BLOCK> + j, system);
                    pairs[i * TRIANGLE_STRIDE + j] = j < i ? score * qk[n][e] + system * kk[n][e] : 0.0f;
                }
            __syncthreads();
            if (threadIdx.x < BLOCK) { // sums of a row's pairs before each token
                float sum = 0.0f, *const pair = pairs + threadIdx.x * TRIANGLE_STRIDE;
                for (unsigned t = 0; t < BLOCK; t++) {
                    const float next = pair[t];
                    pair[t] = sum;
                    sum += next;
                }
            }
            __syncthreads();
            if (threadIdx.x < BLOCK) {
                float sum = 0.0f;
                for (unsigned i = threadIdx.x; i < BLOCK; i++) sum += pairs[i * TRIANGLE_STRIDE + threadIdx.x];
                passed[threadIdx.x] = sum;
            }
        }
        float dq[N / 8][4] = {}, dk[N / 8][4] = {};
        // 2. exp(c) S dout and -beta exp(c) S dR
        for (size_t v = 0; v < V; v += STRIP) {
            __syncthreads();
            rows_fetch<STRIP, THREADS>(work, dout + v, d.HV * V, block.rows, V - v, G.packed);
            fetch_commit();
            strip_of_tokens<THREADS>(work_2, block.rows, V - v, [&](unsigned i, size_t c) {
                return -g->beta[i] * length->key[i] * decay_to(*g, i) * token(G.dR, i, v + c);
            });
            strip_of_state<KP, THREADS>(work_3, K, V - v,
                                        [&](unsigned i, size_t c) { return joined(S + i * V + v + c, K * V); });
            fetch_wait<0>();
            __syncthreads();
            const floatX *const right = work_3 + key_column * padded<STRIP>;
            strip_product<N, true>(dq, work, row, right, KP * padded<STRIP>);
            strip_product<N, false>(dk, work_2, row, right, KP * padded<STRIP>);
        }
        float of_q[2] = {}, of_R[2] = {}, of_k[2] = {}, overlap = 0.0f;
        for_results<N>(dq, [&](unsigned i, unsigned column, float &value) {
            value *= length->query[row + i] * decay_to(*g, row + i);
            of_q[i / 8] += value * at(q, i, column);
        });
        for_results<N>(dk, [&](unsigned i, unsigned column, float value) { of_R[i / 8] += value * at(k, i, column); });
        // 3. decay(L, j) dS N_j, and <S, dS>
        for (size_t v = 0; v < V; v += STRIP) {
            __syncthreads();
            strip_of_tokens<THREADS>(work_2, block.rows, V - v, [&](unsigned i, size_t c) {
                return length->key[i] * decay_between(*g, BLOCK - 1, i) * token(G.N, i, v + c);
            });
            strip_of_state<KP, THREADS>(work_3, K, V - v, [&](unsigned i, size_t c) {
                const float value = joined(dS + i * V + v + c, K * V);
                overlap += joined(S + i * V + v + c, K * V) * value;
                return value;
            });
            __syncthreads();
            strip_product<N, false>(dk, work_2, row, work_3 + key_column * padded<STRIP>, KP * padded<STRIP>);
        }
        for_results<N>(dk, [&](unsigned i, unsigned column, float value) { of_k[i / 8] += value * at(k, i, column); });
        row_dots(dots + half * BLOCK, row, of_q);
        row_dots(dots + (HALVES + half) * BLOCK, row, of_R);
        row_dots(dots + (2 * HALVES + half) * BLOCK, row, of_k);
        overlap = warp_sum(overlap);
        if (lane == 0) overlaps[warp] = overlap;
        // 4. products with the pairs, by slices of the columns
        constexpr int COLUMNS = N < SLICE ? N : SLICE;
        constexpr unsigned TILE = BLOCK * padded<COLUMNS>;
#pragma unroll
        for (int from = 0; from < N; from += COLUMNS) {
#pragma unroll
            for (unsigned keys = 0; keys < 2; keys++) {
                __syncthreads();
                for (unsigned h = 0; h < HALVES; h++) {
                    const size_t first = h * N + from;
                    rows_fetch<COLUMNS, THREADS>(work + h * TILE, (keys ? k : q) + first, d.channels, block.rows,
                                                 first < K ? K - first : 0, d.packed);
                }
                fetch_commit();
                fetch_wait<0>();
                __syncthreads();
                const floatX *const tile = work + half * TILE;
                for (unsigned j = 0; j < BLOCK; j += 16) {
                    const auto right = [&](int n) { return load_b_rows(tile, padded<COLUMNS>, j, n); };
                    for (unsigned t = 0; t < TERMS; t++) {
                        const floatX *const scores = of_scores + t * PAIR_TILE, *const system =
                                                                                    of_system + t * PAIR_TILE;
                        float(*const to_q)[4] = dq + from / 8, (*const to_k)[4] = dk + from / 8;
                        if (!keys && j >= row)
                            mma_columns<COLUMNS>(to_k, load_a_columns(scores, padded<BLOCK>, j, row), right);
                        if (keys && j <= row) {
                            mma_columns<COLUMNS>(to_q, load_a(scores, padded<BLOCK>, row, j), right);
                            mma_columns<COLUMNS>(to_k, load_a(system, padded<BLOCK>, row, j), right);
                        }
                        if (keys && j >= row)
                            mma_columns<COLUMNS>(to_k, load_a_columns(system, padded<BLOCK>, j, row), right);
                    }
                }
            }
        }
        // 5. dq, dk: sums of the group so far, or, after the last head, through the division by the length
        const auto finish = [&](float(*c)[4], const floatX *x, float *sums, size_t first_column, bool of_keys) {
            float dot[2] = {};
            for_results<N>(c, [&](unsigned i, unsigned column, float &value) {
                const size_t to = ((blockIdx.x * d.HK + key_head) * BLOCK + row + i) * K + key_column + column;
                if (row + i >= block.rows || key_column + column >= K) return;
                if (head > key_head * group) value += sums[to];
                if (head + 1 < (key_head + 1) * group) sums[to] = value;
                dot[i / 8] += value * at(x, i, column);
            });
            if (head + 1 < (key_head + 1) * group) return;
            __syncthreads();
            row_dots(dots + (3 * HALVES + half) * BLOCK, row, dot);
            __syncthreads();
            for_results<N>(c, [&](unsigned i, unsigned column, float value) {
                if (row + i >= block.rows || key_column + column >= K) return;
                const float inverse = of_keys ? length->key[row + i] : length->query[row + i];
                float along = 0.0f;
                for (unsigned h = 0; h < HALVES; h++) along += dots[(3 * HALVES + h) * BLOCK + row + i];
                along *= inverse * inverse * (of_keys ? 1.0f : (float)K);
                G.dx[(block.row + row + i) * d.channels + first_column + key_head * K + key_column + column] =
                    store(value - at(x, i, column) * along);
            });
        };
        finish(dq, q, G.dq, 0, false);
        finish(dk, k, G.dk, d.HK * K, true);
        __syncthreads();
        // 6. gates: two tokens a lane. Terms across a token: pairs, reads of S from it on, additions to S' before it
        if (warp) continue;
        float reads[2], adds[2], overlap_sum = 0.0f, sums[2] = {};
        for (unsigned e = 0; e < 2; e++) {
            float dot[3] = {};
            for (unsigned kind = 0; kind < 3; kind++)
                for (unsigned h = 0; h < HALVES; h++) dot[kind] += dots[(kind * HALVES + h) * BLOCK + 2 * lane + e];
            reads[e] = dot[0] + dot[1], adds[e] = dot[2] - dot[1];
        }
        for (unsigned w = 0; w < THREADS / LANES; w++) overlap_sum += overlaps[w];
        overlap_sum *= decay_to(*g, BLOCK - 1);
        float behind = reads[0] + reads[1], before = adds[0] + adds[1]; // sums over lanes from, and up to, this one
        for (unsigned step = 1; step < LANES; step *= 2) {
            const float right = __shfl_sync(ALL_LANES, behind, lane + step < LANES ? lane + step : lane),
                        left = __shfl_sync(ALL_LANES, before, lane >= step ? lane - step : lane);
            if (lane + step < LANES) behind += right;
            if (lane >= step) before += left;
        }
        const float lanes_before = __shfl_sync(ALL_LANES, before, lane ? lane - 1 : 0),
                    lanes_behind = __shfl_sync(ALL_LANES, behind, lane + 1 < LANES ? lane + 1 : lane);
        for (unsigned e = 0; e < 2; e++) {
            const unsigned i = 2 * lane + e;
            const float read = (lane + 1 < LANES ? lanes_behind : 0.0f) + reads[1] + (e ? 0.0f : reads[0]),
                        added = (lane ? lanes_before : 0.0f) + (e ? adds[0] : 0.0f);
            const float dlog = passed[i] + read + added + overlap_sum;
            if (i >= block.rows) continue;
            const Gate gate = gate_of(d, block.row + i, head);
            const float dinput = -dlog * gate.A * gate.slope;
            const size_t to = (block.row + i) * d.stride + head;
            G.db[to] = store(dbeta[i] * gate.rest);
            G.da[to] = store(dinput);
            sums[0] += dlog * gate.log_decay, sums[1] += dinput;
        }
        for (unsigned s = 0; s < 2; s++) {
            sums[s] = warp_sum(sums[s]);
            if (lane == 0) G.lines[(blockIdx.x * 2 + s) * d.HV + head] = sums[s];
        }
    }
}

template <int KP>
static void delta_gradient_of(const DeltaGradient &gradient, const DeltaCall &d, const SpanBlocks &blocks) {
    LAUNCH((delta_gradient_kernel<KP>), dim3(blocks.first[blocks.count], (unsigned)d.HK), GRADIENT_THREADS<KP>,
           gradient_bytes<KP>())
    (gradient, d, blocks);
}

static void delta_gradient(const DeltaGradient &gradient, const DeltaCall &d, const SpanBlocks &blocks) {
    if (d.K <= 32)
        delta_gradient_of<32>(gradient, d, blocks);
    else if (d.K <= 64)
        delta_gradient_of<64>(gradient, d, blocks);
    else if (d.K <= 128)
        delta_gradient_of<128>(gradient, d, blocks);
    else
        delta_gradient_of<256>(gradient, d, blocks);
}

#endif
